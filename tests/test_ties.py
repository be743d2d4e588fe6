"""Ties of parameters: one entry, one gradient; attacked, decayed, clipped, saved once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.utils import clip_grad_norm_

from functricks import (
    Functional,
    adamw,
    chain,
    clip_by_global_norm,
    fgm,
    functional,
    gradient,
    random,
    sgd,
    stack,
    tie,
    train_step,
    unstack,
    untie,
)
from functricks.losses import cross_entropy
from tests.helpers import assert_close, assert_nonzero, assert_run_close, assert_same, assert_untouched

WORDS, WIDTH = 7, 4
TIES = {"decoder.weight": "encoder.weight", "output.weight": "encoder.weight"}


class Translator(nn.Module):
    """Encoder embedding, decoder embedding and output, tied in the classic way or not at all."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.decoder = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, WORDS)
        if tied:
            self.decoder.weight = self.encoder.weight
            self.output.weight = self.encoder.weight

    def forward(self, tokens: Tensor) -> Tensor:
        source, target = self.encoder(tokens), self.decoder(tokens.flip(1))
        return self.output(torch.tanh(self.mix(torch.cat([source, target], -1)))).transpose(1, 2)


def classic() -> Translator:
    torch.manual_seed(0)
    return Translator(tied=True).double()


def tied() -> Functional:
    torch.manual_seed(0)
    return tie(functional(Translator(tied=False).double()), TIES)


def same_start() -> tuple[Translator, Functional]:
    module, pure = classic(), tied()
    module.load_state_dict(untie(pure.params, TIES))
    return module, pure


TOKENS = torch.tensor([[1, 2, 3], [4, 4, 6]])
TARGETS = torch.tensor([[2, 3, 0], [1, 5, 6]])


def loss_fn(pure: Functional) -> Any:
    return lambda params, batch: cross_entropy(pure.apply(params, {}, batch[0])[0], batch[1])


def classic_loss(module: nn.Module) -> Tensor:
    return F.cross_entropy(module(TOKENS), TARGETS)


def named_grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters()}


def test_one_entry_one_value_one_gradient() -> None:
    module, pure = same_start()
    assert list(pure.params) == [name for name, _ in module.named_parameters()]
    found = gradient(loss_fn(pure))(pure.params, (TOKENS, TARGETS))
    loss = classic_loss(module)
    loss.backward()
    assert_nonzero(named_grads(module))
    assert_close(found.loss, loss.detach())
    assert_close(found.grads, named_grads(module))


def test_by_hand() -> None:
    # C34: w = 3, x = 1, y = w * w: 9, and the gradient of the tie is 6
    pure = tie(
        functional(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))), {"1.weight": "0.weight"}
    )
    params = {"0.weight": torch.full((1, 1), 3.0)}
    found = torch.func.grad_and_value(lambda p: pure.apply(p, {}, torch.ones(1, 1))[0].sum())(params)
    assert (found[1].item(), found[0]["0.weight"].item()) == (9.0, 6.0)


def test_ties_of_a_dict_are_its_entries_taken_out_and_put_back() -> None:
    params = {"a": torch.ones(2), "b": torch.zeros(2), "c": torch.full((2,), 3.0)}
    with assert_untouched(params):
        single = tie(params, {"b": "a"})
    assert list(params) == ["a", "b", "c"]
    assert_same(single, {"a": torch.ones(2), "c": torch.full((2,), 3.0)})
    whole = untie(single, {"b": "a"})
    assert whole["b"] is whole["a"]
    assert_same(
        grad(lambda p: (untie(p, {"b": "a"})["b"] * untie(p, {"b": "a"})["a"]).sum())(single)["a"], 2 * single["a"]
    )


def test_a_whole_run_is_that_of_the_classic_tie() -> None:
    """Attacked once, clipped once, decayed once, updated once."""
    module, pure = same_start()
    grad_fn = fgm(gradient(loss_fn(pure)), 0.5, where="encoder.*")
    step = train_step(grad_fn, chain(clip_by_global_norm(0.2, classic=True), adamw(0.05, weight_decay=0.3)))
    state = step.init(pure.params)
    optimizer = torch.optim.AdamW(module.parameters(), 0.05, weight_decay=0.3)
    for _ in range(5):
        state, _ = step.update(state, (TOKENS, TARGETS))
        optimizer.zero_grad()
        classic_loss(module).backward()
        weight = module.encoder.weight
        moved = 0.5 * weight.grad / weight.grad.norm()
        weight.data += moved
        classic_loss(module).backward()
        weight.data -= moved
        clip_grad_norm_(module.parameters(), 0.2)
        optimizer.step()
    assert_run_close(state.params, {n: p.detach() for n, p in module.named_parameters()}, pure.params)


def test_the_attack_moves_a_tied_leaf_by_one_epsilon() -> None:
    _, pure = same_start()
    seen: list[dict[str, Tensor]] = []

    def watched(params: Any, batch: Any) -> Any:
        seen.append(untie(params, TIES))
        return loss_fn(pure)(params, batch)

    fgm(gradient(watched, backend="autograd"), 0.5, where="encoder.*")(pure.params, (TOKENS, TARGETS))
    clean, moved = ({name: p.detach() for name, p in one.items()} for one in (seen[0], seen[-1]))
    assert_close((moved["encoder.weight"] - clean["encoder.weight"]).norm(), torch.tensor(0.5, dtype=torch.float64))
    assert_same(moved["output.weight"], moved["encoder.weight"])
    assert_same(moved["decoder.weight"], moved["encoder.weight"])


def test_decay_and_step_hit_a_tied_leaf_once() -> None:
    # C40 b: the same tensor twice in one group of torch's SGD is updated twice, -0.2; here it is one entry
    params = tie({"x": torch.zeros(1), "again": torch.zeros(1)}, {"again": "x"})
    optimizer = sgd(0.1)
    updates, _ = optimizer.update({"x": torch.ones(1)}, optimizer.init(params), params)
    assert updates["x"].item() == pytest.approx(-0.1)
    params = {"x": torch.ones(1)}
    optimizer = adamw(0.1, weight_decay=0.1)
    updates, _ = optimizer.update({"x": torch.ones(1)}, optimizer.init(params), params)
    assert updates["x"].item() == pytest.approx(-0.11)


def test_the_norm_counts_a_tied_leaf_once() -> None:
    params = tie({"x": torch.zeros(2), "again": torch.zeros(2)}, {"again": "x"})
    grads = grad(lambda p: (untie(p, {"again": "x"})["again"] * torch.tensor([3.0, 4.0])).sum())(params)
    clip = clip_by_global_norm(1.0)
    assert_close(clip.update(grads, clip.init(params), params)[0]["x"], torch.tensor([0.6, 0.8]))


def test_checkpoints_keep_the_tie(tmp_path: Path) -> None:
    # C40 c: load_state_dict(assign=True) unties the classic pair; a dict with one entry a tie cannot be untied
    module, pure = same_start()
    torch.save(pure.params, tmp_path / "params.pt")
    loaded = torch.load(tmp_path / "params.pt", weights_only=True)
    assert list(loaded) == list(pure.params)
    grads = [gradient(loss_fn(pure))(params, (TOKENS, TARGETS)).grads for params in (loaded, pure.params)]
    assert_same(*grads)
    state = {name: p.clone() for name, p in module.state_dict().items()}
    module.load_state_dict(state, assign=True)
    assert module.decoder.weight is not module.encoder.weight
    assert len(functional(module).params) == len(pure.params) + 2
    assert list(tie(functional(module), TIES).params) == list(pure.params)


def test_untying_trains_the_parts_apart() -> None:
    _, pure = same_start()
    torch.manual_seed(0)
    free = functional(Translator(tied=False).double())
    params = {name: untie(pure.params, TIES)[name] for name in free.params}
    found = gradient(loss_fn(free))(params, (TOKENS, TARGETS)).grads
    whole = gradient(loss_fn(pure))(pure.params, (TOKENS, TARGETS)).grads
    assert_close(found["encoder.weight"] + found["decoder.weight"] + found["output.weight"], whole["encoder.weight"])


def test_a_projection_where_widths_differ() -> None:
    torch.manual_seed(0)
    hidden = 6
    net = nn.ModuleDict(
        {
            "embedding": nn.Embedding(WORDS, WIDTH),
            "hidden": nn.Linear(WIDTH, hidden),
            "output": nn.Sequential(nn.Linear(hidden, WIDTH, bias=False), nn.Linear(WIDTH, WORDS)),
        }
    )
    chainlike = nn.Sequential(net["embedding"], net["hidden"], nn.Tanh(), net["output"])
    pure = tie(functional(chainlike.double()), {"3.1.weight": "0.weight"})
    assert pure.params["0.weight"].shape == (WORDS, WIDTH)

    def by_hand(params: dict[str, Tensor]) -> Tensor:
        h = torch.tanh(F.linear(F.embedding(TOKENS, params["0.weight"]), params["1.weight"], params["1.bias"]))
        return F.linear(F.linear(h, params["3.0.weight"]), params["0.weight"], params["3.1.bias"])

    assert_same(pure.apply(pure.params, {}, TOKENS)[0], by_hand(pure.params))
    assert_close(
        grad(lambda p: pure.apply(p, {}, TOKENS)[0].sin().sum())(pure.params),
        grad(lambda p: by_hand(p).sin().sum())(pure.params),
    )


def test_ties_in_lanes_and_compiled() -> None:
    torch.manual_seed(0)
    models = [Translator(tied=False).double() for _ in range(2)]
    pure = tie(stack(models), TIES)
    assert len(pure.params) == 4
    grad_fn = gradient(loss_fn(pure))
    found = vmap(lambda p: grad_fn(p, (TOKENS, TARGETS)).grads)(pure.params)
    for one, grads in zip(unstack(pure), unstack(found), strict=True):
        assert_close(grads, gradient(loss_fn(one))(one.params, (TOKENS, TARGETS)).grads)
    one = unstack(pure)[0]
    function = gradient(loss_fn(one))
    compiled = torch.compile(lambda p: function(p, (TOKENS, TARGETS)).grads, fullgraph=True, backend="aot_eager")
    assert_close(compiled(one.params), function(one.params, (TOKENS, TARGETS)).grads)


def test_a_tied_function_passes_on_keys_and_buffers() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    pure = tie(functional(net), {"1.weight": "0.weight"})
    x = torch.randn(5, 3)
    output, buffers = pure.apply(pure.params, pure.buffers, x, key=random.key(0))
    assert (output == 0).any()
    assert buffers["2.num_batches_tracked"] == 1


def test_errors() -> None:
    params = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(3), "d": torch.ones(2).double()}
    with pytest.raises(ValueError, match="tie: 'x' is no parameter; have: a, b, c, d"):
        tie(params, {"x": "a"})
    with pytest.raises(ValueError, match="tie: 'x' is no parameter; have: a, b, c, d"):
        tie(params, {"a": "x"})
    with pytest.raises(ValueError, match="tie: 'b' is tied itself; tie 'a' to what stays"):
        tie(params, {"a": "b", "b": "d"})
    with pytest.raises(ValueError, match="tie: 'a' is tied itself"):
        tie(params, {"a": "a"})
    with pytest.raises(
        ValueError, match=r"'c' is torch.float32 \[3\] and 'a' torch.float32 \[2\]; .* put a projection"
    ):
        tie(params, {"c": "a"})
    with pytest.raises(ValueError, match=r"'d' is torch.float64 \[2\] and 'a' torch.float32 \[2\]"):
        tie(params, {"d": "a"})
    with pytest.raises(ValueError, match="untie: 'a', which 'b' is tied to, is no parameter; have: c"):
        untie({"c": torch.ones(1)}, {"b": "a"})
    with pytest.raises(ValueError, match="untie: 'b' is there already"):
        untie(params, {"b": "a"})
    with pytest.raises(ValueError, match="tie: 'x' is no parameter; have: weight, bias"):
        tie(functional(nn.Linear(1, 1)), {"x": "weight"})
