"""Parameter groups: every leaf has exactly one label, rate and layer, and nothing is silently left out."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_close, assert_same, lane
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import functricks as F
from functricks import tree
from functricks.modules import functional

ONE = torch.tensor(1.0)


def ones(*paths: str) -> dict[str, Tensor]:
    return {path: ONE.clone() for path in paths}


def one_update(optimizer: F.Transform, params: Any, grads: Any = None) -> Any:
    return optimizer.update(params if grads is None else grads, optimizer.init(params), params)[0]


# --- decay masks -----------------------------------------------------------------------------------------------------


def test_decay_mask_is_kept() -> None:
    """Field case C39a: torchopt ignores it."""
    params = ones("a", "b")
    expected = {"a": torch.tensor(-0.11), "b": torch.tensor(-0.1)}
    for where in ("a", ["a"], {"a": True, "b": False}, lambda path, leaf: path == "a"):
        assert_close(one_update(F.adamw(0.1, weight_decay=0.1, decay_where=where), params), expected)


def test_no_decay_goes_by_kind() -> None:
    """Field case C39b: names miss norm1 and layernorm, and catch bias_proj."""
    net = nn.ModuleDict(
        {"layernorm": nn.LayerNorm(2), "norm1": nn.LayerNorm(2), "bias_proj": nn.Linear(2, 2), "fc": nn.Linear(2, 2)}
    )
    params = {name: leaf.detach() for name, leaf in net.named_parameters()}
    where = {name: not left_out for name, left_out in F.no_decay(net).items()}
    updates = one_update(F.sgd(1.0, weight_decay=1.0, decay_where=where), params, tree.zeros_like(params))
    assert {path for path, leaf in updates.items() if leaf.any()} == {"bias_proj.weight", "fc.weight"}


class Line(NamedTuple):
    """Parameters that are also the model: callable trees, as some people write them."""

    weight: Any
    bias: Any

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


def test_masks_and_labels_may_be_callable_trees() -> None:
    """A kind of field case C39: such a mask is a tree of bools, and no function of path and leaf."""
    params = Line(ONE.clone(), ONE.clone())
    found = one_update(F.adamw(0.1, weight_decay=0.1, decay_where=Line(True, False)), params)
    assert_close(found, Line(torch.tensor(-0.11), torch.tensor(-0.1)))
    assert_same(one_update(F.masked(F.scale(2.0), Line(False, True)), params), Line(ONE, 2 * ONE))
    assert_same(one_update(F.chain(F.scale(2.0), F.freeze(Line(True, False))), params), Line(0 * ONE, 2 * ONE))
    parts = {"x": F.scale(2.0), "y": F.scale(3.0)}
    assert_same(one_update(F.partition(parts, Line("y", "x")), params), Line(3 * ONE, 2 * ONE))


@pytest.mark.parametrize(
    ("where", "decays"),
    [
        ("layer.1.*", {"layer.1.w"}),  # not 10 and 11
        ("layer.1*", {"layer.1.w", "layer.10.w", "layer.11.w"}),
        (["*.w", "bias_proj"], {"layer.1.w", "layer.10.w", "layer.11.w", "bias_proj"}),
        ("bias", {"bias"}),  # the whole path: not bias_proj
        (lambda path, leaf: leaf.ndim == 0 and "proj" in path, {"bias_proj"}),
    ],
)
@pytest.mark.parametrize("make", [F.sgd, F.adam, F.adamw, F.nadam, F.radam, F.adamax, F.adagrad, F.adadelta, F.rmsprop,
                                  F.asgd, F.lion, F.lamb, F.adafactor, F.schedule_free_adamw])  # fmt: skip
def test_the_decay_of_every_optimizer_keeps_its_mask(make: Any, where: Any, decays: set[str]) -> None:
    params = ones("layer.1.w", "layer.10.w", "layer.11.w", "bias", "bias_proj")
    plain = one_update(make(0.1, weight_decay=0.0), params, {path: -leaf for path, leaf in params.items()})
    some = one_update(
        make(0.1, weight_decay=0.5, decay_where=where), params, {path: -leaf for path, leaf in params.items()}
    )
    every = one_update(make(0.1, weight_decay=0.5), params, {path: -leaf for path, leaf in params.items()})
    for path in params:
        assert_same(some[path], every[path] if path in decays else plain[path])
    if make not in (F.adam, F.nadam, F.radam, F.adamax, F.adagrad, F.rmsprop, F.lamb):  # of which step 1 sees the sign
        assert all(every[path] != plain[path] for path in params)


def test_no_decay_of_parameters_goes_by_axes() -> None:
    net = nn.ModuleDict({"norm1": nn.LayerNorm(2), "bias_proj": nn.Linear(2, 2), "gain": nn.LayerNorm((2, 2))})
    params = functional(net).params
    assert F.no_decay(params) == {**F.no_decay(net), "gain.weight": False, "gain.bias": False}
    assert F.no_decay({"a": [ONE, torch.ones(2, 2)]}) == {"a.0": True, "a.1": False}
    assert F.no_decay({}) == {}


def test_no_decay_finds_every_kind_of_normalisation() -> None:
    kinds = [nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.BatchNorm3d(3), nn.SyncBatchNorm(3), nn.GroupNorm(1, 3),
             nn.InstanceNorm1d(3, affine=True), nn.InstanceNorm2d(3, affine=True), nn.LayerNorm((3, 2)),
             nn.RMSNorm((3, 2))]  # fmt: skip
    for kind in kinds:
        assert set(F.no_decay(kind).values()) == {True}, kind


def test_no_decay_equals_pytorch_groups() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    nn.init.normal_(net[1].weight)
    params = {name: leaf.detach().clone() for name, leaf in net.named_parameters()}
    left_out = F.no_decay(net)
    groups = [
        {"params": [p for name, p in net.named_parameters() if left_out[name] is flag], "weight_decay": decay}
        for flag, decay in ((False, 0.1), (True, 0.0))
    ]
    classic = torch.optim.AdamW(groups, lr=0.01)
    optimizer = F.adamw(0.01, weight_decay=0.1, decay_where={name: not out for name, out in left_out.items()})
    state = optimizer.init(params)
    for step in range(10):
        grads = {name: torch.sin(leaf + step) for name, leaf in params.items()}
        for leaf in net.parameters():
            leaf.grad = torch.sin(leaf.detach() + step)
        classic.step()
        updates, state = optimizer.update(grads, state, params)
        params = F.apply_updates(params, updates)
    for name, leaf in net.named_parameters():
        torch.testing.assert_close(params[name], leaf.detach(), rtol=1e-12, atol=0)


# --- rates -----------------------------------------------------------------------------------------------------------


def test_learning_rates_are_pytorch_groups() -> None:
    """The rate scales the decoupled decay too, as a group's lr does."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    params = {name: leaf.detach().clone() for name, leaf in net.named_parameters()}
    classic = torch.optim.AdamW([{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.1}], lr=0.01)
    optimizer = F.adamw(0.01, learning_rates={"1.*": 10.0})
    state = optimizer.init(params)
    for step in range(10):
        for leaf in net.parameters():
            leaf.grad = torch.sin(leaf.detach() + step)
        updates, state = optimizer.update({n: torch.sin(p + step) for n, p in params.items()}, state, params)
        classic.step()
        params = F.apply_updates(params, updates)
    for name, leaf in net.named_parameters():
        torch.testing.assert_close(params[name], leaf.detach(), rtol=1e-12, atol=0)


LINEAR = [F.sgd, F.adam, F.adamw, F.nadam, F.radam, F.adamax, F.adagrad, F.adadelta, F.rmsprop, F.lion, F.lamb]


@pytest.mark.parametrize("make", LINEAR)
def test_every_optimizer_takes_learning_rates(make: Any) -> None:
    params = ones("body.w", "head.w")
    plain = one_update(make(0.5), params)
    scaled = one_update(make(0.5, learning_rates={"head.*": 10.0}), params)
    assert_same(scaled["body.w"], plain["body.w"])
    assert_close(scaled["head.w"], 10 * plain["head.w"])


def test_learning_rates_by_schedule_and_by_lane() -> None:
    params = ones("body", "head")
    halves = F.sgd(lambda step: torch.tensor(0.5), learning_rates={"head": 2.0})
    assert_close(one_update(halves, params), {"body": torch.tensor(-0.5), "head": torch.tensor(-1.0)})
    found = torch.vmap(lambda c: one_update(F.sgd(0.5, learning_rates={"head": c}), params))(torch.tensor([2.0, 3.0]))
    assert_close(found["head"], torch.tensor([-1.0, -1.5]))


def test_a_glob_of_nothing_and_two_globs_of_one_leaf_raise() -> None:
    params = ones("body.w", "head.w")
    with pytest.raises(
        ValueError, match=r"learning_rates: where='tail\.\*' matches no parameter; have: body.w, head.w"
    ):
        one_update(F.sgd(0.1, learning_rates={"tail.*": 2.0}), params)
    with pytest.raises(ValueError, match=r"more than one glob matches: \{'head.w': \['head.\*', '\*.w'\]\}"):
        one_update(F.sgd(0.1, learning_rates={"head.*": 2.0, "*.w": 3.0}), params)
    with pytest.raises(ValueError, match=r"learning_rates\['head.\*'\] must be >= 0"):
        F.sgd(0.1, learning_rates={"head.*": -1.0})


# --- layers ----------------------------------------------------------------------------------------------------------


def rates(paths: list[str], rate: float = 0.5, layers: Any = None) -> dict[str, float]:
    params = ones(*paths)
    return {path: leaf.item() for path, leaf in one_update(F.layer_decay(rate, layers), params).items()}


def test_layer_decay_numbers() -> None:
    """Field case C39c: ELECTRA gave the top layer .64."""
    paths = ["embeddings.word.weight", "layer.0.fc.weight", "layer.1.fc.weight", "classifier.weight"]
    found = rates(paths, 0.8)
    assert list(found.values()) == pytest.approx([0.512, 0.64, 0.8, 1.0])
    explicit = rates(paths, 0.8, ["embeddings.*", "layer.0.*", "layer.1.*", "classifier.*"])
    assert explicit == pytest.approx(found)
    assert rates(paths, 0.8, lambda path: int(path.startswith("class"))) == pytest.approx(
        dict(zip(paths, [0.8, 0.8, 0.8, 1.0], strict=True))
    )


def test_layer_ten_is_not_layer_one() -> None:
    paths = [f"blocks.{i}.w" for i in range(12)] + ["head.w"]
    found = rates(paths)
    assert found["blocks.1.w"] == 0.5**11
    assert found["blocks.10.w"] == found["blocks.11.w"] / 2 == 0.5**2
    assert list(rates(list(reversed(paths))).items()) == list(reversed(found.items()))  # by name, not by position


def test_timm_layout() -> None:
    """A ViT: tokens and stem at the bottom; the final norm with the last block, the head alone, as timm has it."""
    stem = ["cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"]
    blocks = [f"blocks.{i}.{name}" for i in range(3) for name in ("norm1.weight", "attn.qkv.weight", "mlp.fc1.bias")]
    found = rates([*stem, *blocks, "norm.weight", "fc_norm.weight", "head.weight"])
    assert all(found[path] == 0.5**4 for path in stem)
    assert all(found[path] == 0.5 ** (3 - int(path.split(".")[1])) for path in blocks)
    assert (found["norm.weight"], found["fc_norm.weight"], found["head.weight"]) == (0.5, 1.0, 1.0)


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("cls_token", 0), ("stem.conv.weight", 0), ("conv_stem.weight", 0), ("tok_emb.weight", 0), ("wpe.weight", 0),
        ("norm_pre.weight", 0), ("rel_pos_bias.relative_position_bias_table", 0), ("norm.weight", 3),
        ("final_norm.weight", 3), ("norm_f.weight", 3), ("fc_norm.weight", 4), ("head.weight", 4),
        ("head.norm.weight", 4), ("head.0.weight", 4), ("head.3.weight", 4), ("classifier.0.dense.weight", 4),
        ("system_head.weight", 4), ("embed_out.weight", 4), ("unembed.weight", 4), ("pooler.dense.weight", 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("around", ["", "model.", "embedder."])
def test_layers_by_what_a_path_says(around: str, path: str, layer: int) -> None:
    """Three blocks, and one leaf beside them; what is around all of them says nothing."""
    blocks = [f"{around}blocks.{i}.attn.{name}" for i in range(3) for name in ("qkv.weight", "norm.0.weight")]
    found = rates([*blocks, around + path, "last_head.weight"])
    assert found[around + path] == 0.5 ** (4 - layer)
    assert [found[block] for block in blocks[::2]] == [0.125, 0.25, 0.5]


@pytest.mark.parametrize(
    "stacks",
    [
        ("encoder.block.{}.layer.0.q.weight", "decoder.block.{}.layer.0.q.weight"),  # T5
        ("layer1.{}.conv1.weight", "layer2.{}.conv1.weight"),  # ResNet
        ("text.encoder.layers.{}.fc.weight", "vision.encoder.layers.{}.fc.weight"),  # CLIP
    ],
)
def test_two_stacks_of_blocks_raise(stacks: tuple[str, ...]) -> None:
    """Neither is the head of the other; layers= says in which order they come."""
    paths = [stack.format(i) for stack in stacks for i in range(2)]
    with pytest.raises(ValueError, match=r"more than one stack of blocks, pass layers=; have: .*, "):
        rates([*paths, "head.weight"])
    found = rates([*paths, "head.weight"], layers=[*paths, "head.weight"])
    assert list(found.values()) == [0.0625, 0.125, 0.25, 0.5, 1.0]


@pytest.mark.parametrize("depth", [-1, None, "top", 1.5])
def test_a_layer_that_is_no_number_is_named(depth: Any) -> None:
    with pytest.raises(ValueError, match=r"layers must give every path an integer >= 0, got \{'b.w': "):
        rates(["a.w", "b.w"], layers=lambda path: 0 if path == "a.w" else depth)


@pytest.mark.parametrize(("rate", "count"), [(0.8, 2), (0.65, 12), (0.9, 24), (1.0, 3), (0.0, 3)])
def test_cases_like_c39_c(rate: float, count: int) -> None:
    paths = ["embeddings.w", *[f"layer.{i}.fc.w" for i in range(count)], "classifier.w"]
    assert list(rates(paths, rate).values()) == pytest.approx([rate**i for i in range(count + 1, -1, -1)])


def hugging_face(name: str) -> list[str]:
    import transformers

    small: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
    if name == "gpt2":
        config: Any = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=10, n_positions=4)
        net: Any = transformers.GPT2ForSequenceClassification(config)
    elif name == "llama":
        config = transformers.LlamaConfig(**small, num_key_value_heads=2, intermediate_size=8, vocab_size=10)
        net = transformers.LlamaForCausalLM(config)
    elif name == "neox":
        net = transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(**small, intermediate_size=8, vocab_size=10, tie_word_embeddings=False)
        )
    elif name == "vit":
        net = transformers.ViTForImageClassification(
            transformers.ViTConfig(**small, intermediate_size=8, image_size=8, patch_size=4)
        )
    else:
        net = transformers.BertForSequenceClassification(
            transformers.BertConfig(**small, intermediate_size=8, vocab_size=10, max_position_embeddings=4)
        )
    return [path for path, _ in net.named_parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", {"bert.embeddings": 0, "bert.encoder.layer.0": 1, "bert.encoder.layer.1": 2, "bert.pooler": 3,
                  "classifier": 3}),
        ("vit", {"vit.embeddings": 0, "vit.encoder.layer.0": 1, "vit.encoder.layer.1": 2, "vit.layers.0": 1,
                 "vit.layers.1": 2, "vit.layernorm": 2, "classifier": 3}),
        ("gpt2", {"transformer.wte": 0, "transformer.wpe": 0, "transformer.h.0": 1, "transformer.h.1": 2,
                  "transformer.ln_f": 2, "score": 3}),
        ("neox", {"gpt_neox.embed_in": 0, "gpt_neox.layers.0": 1, "gpt_neox.layers.1": 2,
                  "gpt_neox.final_layer_norm": 2, "embed_out": 3, "lm_head": 3}),
        ("llama", {"model.embed_tokens": 0, "model.layers.0": 1, "model.layers.1": 2, "model.norm": 2, "lm_head": 3}),
    ],
)  # fmt: skip
def test_hugging_face_layouts(name: str, expected: dict[str, int]) -> None:
    for path, found in rates(hugging_face(name)).items():
        (layer,) = [layer for prefix, layer in expected.items() if path.startswith(prefix + ".")]
        assert found == 0.5 ** (3 - layer), path


def test_layers_that_do_not_cover_raise() -> None:
    paths = ["embed.w", "block.w", "head.w"]
    with pytest.raises(ValueError, match=r"parameters in no layer: head\.w"):
        rates(paths, layers=["embed.*", "block.*"])
    with pytest.raises(ValueError, match="more than one glob matches"):
        rates(paths, layers=["embed.*", "block.*", "*"])
    with pytest.raises(ValueError, match="no numbered blocks"):
        rates(paths)


def test_layer_decay_lanes() -> None:
    params = ones("embed.w", "blocks.0.w", "head.w")
    found = torch.vmap(lambda rate: one_update(F.layer_decay(rate), params))(torch.tensor([0.5, 0.1]))
    assert_close(found["embed.w"], torch.tensor([0.25, 0.01]))


# --- masks and partitions --------------------------------------------------------------------------------------------


def test_masked_inside_masked() -> None:
    params = {"a": {"w": ONE, "b": ONE}, "c": ONE}
    inner = F.masked(F.masked(F.scale(2.0), "*.w"), "a.*")
    assert_same(one_update(inner, params), {"a": {"w": 2 * ONE, "b": ONE}, "c": ONE})
    state = F.masked(F.masked(F.trace(0.9), "*.w"), "a.*").init(params)
    assert list(state.trace) == ["a.w"]  # no memory for the others


def test_masks_may_be_trees() -> None:
    params = {"a": ONE, "b": (ONE, ONE)}
    assert_same(
        one_update(F.masked(F.scale(2.0), {"a": False, "b": (True, False)}), params), {"a": ONE, "b": (2 * ONE, ONE)}
    )


def test_partition_names_what_has_no_label() -> None:
    params = ones("a", "b")
    with pytest.raises(ValueError, match=r"without: b"):
        F.partition({"x": F.scale(1.0)}, lambda path, leaf: "x" if path == "a" else None).init(params)
    with pytest.raises(ValueError, match=r"missing: \['b'\]"):
        F.partition({"x": F.scale(1.0)}, {"a": "x", "b": None}).init(params)
    with pytest.raises(ValueError, match=r"labels without a transform: \{'b': 'y'\}; have: x"):
        F.partition({"x": F.scale(1.0)}, {"a": "x", "b": "y"}).init(params)


def test_partition_by_lane() -> None:
    """One frozen member of an ensemble, by a mask over lanes."""
    params = {"w": torch.ones(3)}
    lr, alive = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 0.0, 1.0])
    found = torch.vmap(lambda lr, alive, p: one_update(F.sgd(lr * alive), p))(lr, alive, params)
    assert_close(found["w"], torch.tensor([-0.1, 0.0, -0.3]))


def test_three_lanes_are_three_runs() -> None:
    """Field case C38."""
    lr = torch.tensor([0.1, 0.2, 0.3])

    def step(lr: Tensor, optimizer: Any) -> Tensor:
        params = {"w": ONE}
        return F.apply_updates(params, one_update(optimizer(lr), params, {"w": 2 * ONE}))["w"]

    assert_close(torch.vmap(lambda lr: step(lr, F.sgd))(lr), torch.tensor([0.8, 0.6, 0.4]))
    clipped = torch.vmap(lambda lr: step(lr, lambda lr: F.chain(F.clip_by_global_norm(1.0), F.sgd(lr))))(lr)
    assert_close(clipped, torch.tensor([0.9, 0.8, 0.7]))


@pytest.mark.parametrize(
    ("rates", "starts", "decays", "bounds", "expected"),
    [  # loss w**2: p - lr * (clip(2 p) + decay * p)
        ((0.1, 0.2, 0.3), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (9.0, 9.0, 9.0), (0.8, 0.6, 0.4)),
        ((0.1, 0.2, 0.3), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.9, 0.8, 0.7)),
        ((0.5, 0.5, 0.5), (1.0, 2.0, -3.0), (0.0, 0.0, 0.0), (1.0, 2.0, 3.0), (0.5, 1.0, -1.5)),
        ((0.25, 0.5, 0.0), (2.0, -4.0, 1.0), (0.5, 0.25, 1.0), (4.0, 1.0, 2.0), (0.75, -3.0, 1.0)),
        ((0.1, 0.1, 0.1), (5.0, 5.0, 5.0), (0.0, 1.0, 2.0), (0.0, 0.0, 0.0), (5.0, 4.5, 4.0)),
    ],
)
def test_cases_like_c38(rates: Any, starts: Any, decays: Any, bounds: Any, expected: Any) -> None:
    """Rate, decay and bound of each member; the gradient by torch.func within the same vmap."""

    def step(lr: Tensor, start: Tensor, decay: Tensor, bound: Tensor) -> Tensor:
        grad = torch.func.grad(lambda w: w.square())(start)
        optimizer = F.chain(F.clip_by_global_norm(bound), F.sgd(lr, weight_decay=decay))
        return F.apply_updates({"w": start}, one_update(optimizer, {"w": start}, {"w": grad}))["w"]

    found = torch.vmap(step)(*map(torch.tensor, (rates, starts, decays, bounds)))
    assert_close(found, torch.tensor(expected))


def test_the_step_may_differ_by_member_too() -> None:
    """Two members at step 0, one at step 5 of its schedule: the counter is state, and a traced tensor."""
    optimizer = F.adamw(F.schedules.step_decay(0.1, 5, 0.1), weight_decay=0.0)
    params = {"w": torch.ones(3)}
    state = torch.vmap(optimizer.init)(params)
    for _ in range(5):
        older = torch.vmap(optimizer.update)(params, state, params)[1]
        state = tree.map(lambda new, old: torch.where(torch.arange(3) == 2, new, old), older, state)
    updates, _ = torch.vmap(optimizer.update)(params, state, params)
    assert_close(updates["w"], torch.tensor([-0.1, -0.1, -0.01]))


@pytest.mark.parametrize("make", [*LINEAR, F.asgd, F.rprop, F.schedule_free_adamw, F.adafactor])
def test_lanes_of_every_optimizer_are_solo_runs(make: Any) -> None:
    lr = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    start = {"w": torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3), "b": torch.ones(2, dtype=torch.float64)}

    def run(lr: Any) -> Any:
        optimizer = make(lr)
        params, state = start, optimizer.init(start)
        for step in range(5):
            grads = {name: torch.cos(leaf + step) for name, leaf in params.items()}
            updates, state = optimizer.update(grads, state, params)
            params = F.apply_updates(params, updates)
        return params

    found = torch.vmap(run)(lr)
    for i in range(3):
        assert_close(lane(found, i), run(lr[i].item()), eps=64)  # five steps


# --- frozen parts ----------------------------------------------------------------------------------------------------


def test_frozen_leaves_stay_whatever_their_gradient() -> None:
    params = ones("body", "head")
    grads = {"body": torch.tensor(float("nan")), "head": ONE}
    optimizer = F.partition({"train": F.adamw(0.1), "still": F.freeze()},
                            lambda path, leaf: "train" if path == "head" else "still")  # fmt: skip
    assert_same(F.apply_updates(params, one_update(optimizer, params, grads))["body"], params["body"])
    assert tree.paths(optimizer.init(params)["still"]) == []
    chained = F.chain(F.adamw(0.1, weight_decay=0.5), F.freeze("body"))
    assert_same(one_update(chained, params)["body"], torch.tensor(0.0))
    with pytest.raises(ValueError, match="freeze: where='tail' matches no parameter"):
        one_update(F.freeze("tail"), params)


@pytest.mark.parametrize("backend", ["autograd", "func"])
def test_head_only_training_does_no_work_for_the_body(backend: Any) -> None:
    net = functional(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)))
    x, y = torch.randn(16, 32), torch.randint(4, (16,))

    def loss_fn(params: Any, batch: Any) -> Any:
        return F.losses.cross_entropy(net.apply(params, net.buffers, batch[0])[0], batch[1])

    head = tree.pick(net.params, tree.select("2.*", net.params))
    step = F.train_step(
        F.gradient(lambda head, batch: loss_fn(tree.from_named(net.params, head), batch), backend=backend),
        F.adamw(1e-2),
    )
    state = step.init(head)
    assert set(tree.named_leaves(state.params)) == {"2.weight", "2.bias"}
    memory = sum(leaf.numel() for leaf in tree.leaves(state.optimizer))
    assert memory <= 2 * sum(leaf.numel() for leaf in head.values()) + 8  # two moments and a few counters
    with FlopCounterMode(display=False) as counter:
        step.update(state, (x, y))
    forward = 2 * 16 * (32 * 64 + 64 * 4)
    assert counter.get_total_flops() == forward + 2 * 16 * 64 * 4  # and the head's weight gradient, nothing else


def test_layer_decay_compiles() -> None:
    params = ones("embed.w", "blocks.0.w", "blocks.1.w", "norm.w", "head.w")
    decay = F.layer_decay(0.5)
    compiled = torch.compile(lambda grads: decay.update(grads, (), params)[0], fullgraph=True, backend="aot_eager")
    assert_same(compiled(params), one_update(decay, params))


def test_a_norm_before_the_blocks_and_t5s_table_are_at_the_bottom() -> None:
    blocks = ["blocks.0.attn.weight", "blocks.1.attn.weight"]
    found = rates(["norm_pre.weight", "pre_layrnorm.weight", "shared.weight", *blocks, "norm.weight", "head.0.weight"])
    assert list(found.values()) == [0.125, 0.125, 0.125, 0.25, 0.5, 0.5, 1.0]


def test_a_norm_beside_the_numbers_is_no_block() -> None:
    paths = ["layers.0.fc.weight", "layers.1.fc.weight", "layers.norm.weight", "head.weight"]
    assert rates(paths)["head.weight"] == 1.0


@pytest.mark.parametrize(
    "stacks", [("encoder.block", "decoder.block"), ("layer1", "layer2"), ("text.layers", "vision.layers")]
)
def test_several_stacks_of_blocks_are_named(stacks: tuple[str, ...]) -> None:
    """The blocks of the shorter stack would have counted as the head, and moved the most."""
    paths = [f"{stack}.{i}.attn.weight" for stack in stacks for i in range(2)]
    with pytest.raises(
        ValueError, match=rf"more than one stack of blocks, pass layers=; have: {stacks[0]}\., {stacks[1]}\."
    ):
        rates([*paths, "head.weight"])


def test_states_of_other_links_and_labels_raise() -> None:
    params = ones("a", "b")
    three = F.chain(F.trace(0.9), F.trace(0.9), F.scale(-0.1))
    with pytest.raises(ValueError, match="chain: the state has 2 parts, the chain 3 links"):
        three.update(params, F.sgd(0.1, 0.9).init(params), params)
    old = F.partition({"x": F.sgd(0.1)}, lambda path, leaf: "x")
    new = F.partition({"x": F.sgd(0.1), "y": F.sgd(0.2)}, lambda path, leaf: "x" if path == "a" else "y")
    with pytest.raises(ValueError, match=r"partition: the state has \['x'\], the labels are \['x', 'y'\]"):
        new.update(params, old.init(params), params)


@pytest.mark.parametrize(
    ("paths", "layers"),
    [
        (  # open_clip
            {"visual.conv1.weight": 0, "visual.class_embedding": 0, "visual.positional_embedding": 0,
             "visual.ln_pre.weight": 0, "visual.ln_post.weight": 2, "visual.proj": 3}, "visual.transformer.resblocks.",
        ),
        (  # Whisper's encoder with a head
            {"conv1.weight": 0, "conv2.bias": 0, "embed_positions.weight": 0, "layer_norm.weight": 2,
             "head.conv1.weight": 3}, "layers.",
        ),
        (  # timm's EfficientNet
            {"conv_stem.weight": 0, "bn1.weight": 0, "conv_head.weight": 3, "bn2.weight": 3, "classifier.bias": 3},
            "blocks.",
        ),
        ({"class_token": 0, "positional_encoding": 0, "norm.weight": 2, "decode_head.bn1.bias": 3}, "blocks."),
    ],
)  # fmt: skip
def test_stems_and_norms_beside_the_blocks(paths: dict[str, int], layers: str) -> None:
    found = rates([f"{layers}{i}.attn.qkv.weight" for i in range(2)] + list(paths))
    assert {path: found[path] for path in paths} == {path: 0.5 ** (3 - layer) for path, layer in paths.items()}


def test_blocks_that_are_no_numbered_list_are_not_taken_from_within_one() -> None:
    """torchvision's ViT: the numbers are those of the layers of every block's MLP."""
    paths = [f"encoder.layers.encoder_layer_{i}.mlp.{j}.weight" for i in range(2) for j in (0, 3)]
    with pytest.raises(ValueError, match=r"more than one stack of blocks, pass layers=; have: encoder\.layers"):
        rates(["class_token", *paths, "heads.head.weight"])


def test_learning_rates_of_schedule_free_are_runs_of_their_own() -> None:
    """The average's weights are relative to each other, so that a constant factor is another learning rate."""
    start = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([0.5])}

    def end(path: str, lr: float, **kwargs: Any) -> Tensor:
        optimizer = F.schedule_free_adamw(lr, weight_decay=0.1, warmup_steps=3, **kwargs)
        params = start if kwargs else {path: start[path]}
        state = optimizer.init(params)
        for step in range(6):
            grads = {name: torch.sin(3 * leaf + step) for name, leaf in params.items()}
            updates, state = optimizer.update(grads, state, params)
            params = F.apply_updates(params, updates)
        return F.averaged(state, params)[path]

    for path, factor in {"a": 1.0, "b": 10.0}.items():
        torch.testing.assert_close(end(path, 0.02, learning_rates={"b": 10.0}), end(path, 0.02 * factor))
    with pytest.raises(ValueError, match="learning_rates: where='c' matches no parameter"):
        end("a", 0.1, learning_rates={"c": 1.0})


@pytest.mark.parametrize(
    "make", [F.partition({"all": F.scale(2.0)}, lambda path, leaf: "all"), F.masked(F.scale(2.0), "a")]
)
def test_parameters_that_are_not_those_of_the_gradients_raise(make: Any) -> None:
    params = ones("a")
    with pytest.raises(
        ValueError, match=r"the leaves to choose from: trees differ; missing: \[\], unexpected: \['b'\]"
    ):
        make.update(ones("a", "b"), make.init(params), params)


def test_a_mask_of_nothing_raises_whatever_its_form() -> None:
    for where in ("c.*", ["a", "c"], lambda path, leaf: False, {"a": False, "b": False}):
        with pytest.raises(ValueError, match=r"masked: where=.* matches no parameter; have: a, b"):
            F.masked(F.scale(2.0), where).init(ones("a", "b"))
