"""observe, intervene and probes against PyTorch's own hooks; and the adapter's context manager for classic loops."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.func import grad, vmap

from functricks import attack, functional, random, replace_gradient, reverse_gradient
from functricks.adapter import hooks
from functricks.modules import Functional
from tests.helpers import assert_close, assert_nonzero, assert_same, assert_untouched, lane, stack


class Net(nn.Module):
    """A module that is called twice, a BatchNorm, a ReLU that may write in place, a nested block."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace)
        self.block = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.block(self.relu(self.fc(torch.tanh(self.fc(x)))))))


class Encoder(nn.Module):
    """Attention, keyword arguments, tuples, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layer(self.embedding(tokens), src_mask=None)
        return self.head(self.attention(x, x, value=x, need_weights=True)[0])


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
TOKENS = torch.randint(9, (2, 5), generator=torch.Generator().manual_seed(4))
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, tuple[str, ...]]] = {
    "mlp": (Net, X, ("fc", "relu", "block.0", "block.1", "block", "head")),
    "transformer": (Encoder, TOKENS, ("embedding", "layer.self_attn", "layer.linear1", "layer", "head")),
}
each_model = pytest.mark.parametrize("name", MODELS)


def make(name: str) -> tuple[nn.Module, Tensor, tuple[str, ...]]:
    torch.manual_seed(0)
    model, x, paths = MODELS[name]
    return model(), x, paths


def score(output: Tensor) -> Tensor:
    return (output**2 * torch.linspace(0.5, 2.0, output.shape[-1], dtype=output.dtype)).sum()


def classic(model: nn.Module, x: Tensor, paths: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any], Tensor]:
    """What forward hooks, forward pre-hooks and full backward hooks see: values, gradients, and the output."""
    seen: dict[str, Any] = {}
    gradients: dict[str, Any] = {}
    calls: dict[str, int] = {}
    handles = []

    def single(values: tuple[Any, ...]) -> Any:
        return values[0] if len(values) == 1 else values

    def copies(values: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, values)

    for path in paths:

        def before(module: nn.Module, args: tuple[Any, ...], path: str = path) -> None:
            calls[path] = calls.get(path, -1) + 1
            seen[f"{path}#{calls[path]}:input"] = copies(single(args))

        def after(module: nn.Module, args: tuple[Any, ...], output: Any, path: str = path) -> None:
            seen[f"{path}#{calls[path]}"] = copies(output)

        def backward(module: nn.Module, into: tuple[Any, ...], out: tuple[Any, ...], path: str = path) -> None:
            number = calls[path]  # the last call comes back first
            calls[path] -= 1
            gradients[f"{path}#{number}:input"], gradients[f"{path}#{number}"] = copies(into), copies(out)

        module = model.get_submodule(path)
        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        if not isinstance(module, nn.MultiheadAttention):  # it would make three tensors of one, and attention looks
            handles.append(module.register_full_backward_hook(backward))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # tokens have no gradient
        output = model(x.clone().requires_grad_() if x.is_floating_point() else x)
        score(output).backward()
    for handle in handles:
        handle.remove()
    first = {site: site.replace("#0", "") for site in [*seen, *gradients]}
    return (
        {first[s]: v for s, v in seen.items()},
        {first[s]: v for s, v in gradients.items()},
        output.detach(),
    )


def with_inputs(paths: tuple[str, ...]) -> list[str]:
    return [*paths, *(f"{path}:input" for path in paths)]


def comparable(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda v: torch.zeros(0) if v is None else v, tree)


# --- reading ---------------------------------------------------------------------------------------------------------


@each_model
def test_observed_is_what_forward_hooks_and_pre_hooks_see(name: str) -> None:
    model, x, paths = make(name)
    pure = functional(model, observe=with_inputs(paths))
    params = {path: p.requires_grad_() for path, p in pure.params.items()}  # the grad mode decides attention's kernels
    (output, seen), buffers = pure.apply(params, pure.buffers, x)
    values, _, expected = classic(model, x, paths)
    assert list(seen) == list(values)
    assert_same(comparable(seen), comparable(values))
    assert_same(output, expected)
    assert_same(functional(make(name)[0]).apply(params, pure.buffers, x), (output, buffers))


@each_model
@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_gradient_of_a_probe_is_what_full_backward_hooks_see(name: str, backend: str) -> None:
    model, x, paths = make(name)
    values, gradients, _ = classic(model, x, paths)
    inputs = [path for path in paths if isinstance(values[f"{path}:input"], Tensor) and path != "embedding"]
    pure = functional(model, observe=with_inputs(paths), probes=[*paths, *(f"{path}:input" for path in inputs)])
    (_, seen), _ = pure.apply(pure.params, pure.buffers, x)
    sites = [s for s in seen if not s.endswith(":input") or s.split("#")[0].split(":")[0] in inputs]
    sites = [s for s in sites if isinstance(seen[s], Tensor)]
    probes = {site: torch.zeros_like(seen[site]) for site in sites}

    def loss(params: dict[str, Tensor], probes: dict[str, Tensor]) -> Tensor:
        return score(pure.apply(params, pure.buffers, x, probes=probes)[0][0])

    if backend == "func":
        found = grad(loss, argnums=(0, 1))(pure.params, probes)[1]
    else:
        params = {path: p.requires_grad_() for path, p in pure.params.items()}
        probes = {site: probe.requires_grad_() for site, probe in probes.items()}
        found = dict(zip(probes, torch.autograd.grad(loss(params, probes), list(probes.values())), strict=True))
    assert_nonzero(found)
    assert len(sites) >= 7
    for site in sites:
        assert_same({site: found[site]}, {site: gradients[site][0]})


def test_an_observed_value_is_part_of_the_graph() -> None:
    model, x, _ = make("mlp")
    pure = functional(model, observe="block.0")
    params = {name: p.requires_grad_() for name, p in pure.params.items()}
    (output, seen), _ = pure.apply(params, pure.buffers, x)
    (found,) = torch.autograd.grad(score(output), seen["block.0"])
    assert_same(found, classic(model, x, ("block.0",))[1]["block.0"][0])


def test_writes_in_place_do_not_reach_what_was_observed() -> None:
    torch.manual_seed(0)
    model = Net(inplace=True)
    pure = functional(model, observe=["fc", "relu:input", "relu", "block.1"], probes="fc")

    def loss(probe: Tensor) -> Any:
        (output, seen), _ = pure.apply(pure.params, pure.buffers, X, probes={"fc#1": probe})
        return score(output), seen

    found, seen = grad(loss, has_aux=True)(torch.zeros(5, 4))
    torch.manual_seed(0)
    values, gradients, _ = classic(Net(), X, ("fc", "relu", "block.1"))
    assert (seen["fc#1"] < 0).any()
    assert_same(seen, {site: values[site] for site in seen})
    assert_same(found, gradients["fc#1"][0])
    assert seen.keys() == {"fc", "fc#1", "relu:input", "relu", "block.1", "relu#1:input", "relu#1"}


# --- replacing -------------------------------------------------------------------------------------------------------


@each_model
def test_intervening_is_a_forward_hook_that_returns(name: str) -> None:
    model, x, _ = make(name)
    changes = {"head": lambda y: y.sin(), "head:input": lambda y: y * 2}
    pure = functional(model, intervene=changes)
    handles = [
        model.head.register_forward_hook(lambda module, args, output: changes["head"](output)),
        model.head.register_forward_pre_hook(lambda module, args: (changes["head:input"](args[0]),)),
    ]

    def loss(params: dict[str, Tensor]) -> Tensor:
        return score(pure.apply(params, pure.buffers, x)[0])

    found = grad(loss)(pure.params)
    score(model(x)).backward()
    for handle in handles:
        handle.remove()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert_nonzero({name: g for name, g in expected.items() if not name.endswith("in_proj_bias")})
    assert_same(found, expected)


def test_intervening_with_another_gradient_is_a_backward_hook_that_returns() -> None:
    model, x, _ = make("mlp")
    clip = replace_gradient(lambda g: g.clamp(-0.1, 0.1))
    pure = functional(model, intervene={"block.0:input": clip, "block.1": reverse_gradient})
    handles = [
        model.block[0].register_full_backward_hook(lambda module, into, out: (into[0].clamp(-0.1, 0.1),)),
        model.block[1].register_full_backward_pre_hook(lambda module, out: (-out[0],)),
    ]
    found = grad(lambda params: score(pure.apply(params, pure.buffers, x)[0]))(pure.params)
    score(model(x)).backward()
    for handle in handles:
        handle.remove()
    assert_same(found, {name: p.grad for name, p in model.named_parameters()})


def test_one_call_of_several() -> None:
    model, x, _ = make("mlp")
    pure = functional(model, intervene={"fc#1": lambda y: y + 1, "relu#0:input": torch.neg, "relu#1": torch.exp})
    with torch.no_grad():
        h = torch.relu(-(model.fc(torch.tanh(model.fc(x))) + 1))
        expected = model.head(torch.relu(model.block(h)).exp())
    assert_same(pure.apply(pure.params, pure.buffers, x)[0], expected)


def test_order_is_observe_then_intervene_then_probe() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    pure = functional(
        model, observe=["0", "*:input"], intervene={"0": lambda y: 3 * y, "*0": lambda y: y + 1}, probes="0"
    )
    x = torch.ones(1, 2)
    (output, seen), _ = pure.apply(pure.params, {}, x, probes={"0": torch.full((1, 2), 100.0)})
    y = model(x).detach()
    assert_same(seen, {"0:input": x, "0": y, "1:input": 3 * y + 1 + 100})
    assert_same(output, 3 * y + 1 + 100)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x, x)


def test_a_probe_of_a_structure_and_of_another_dtype() -> None:
    torch.manual_seed(0)
    pure = functional(SelfAttention(), probes="inner")
    x = torch.randn(3, 1, 4)
    probe = torch.ones(3, 1, 4, dtype=torch.float64)
    (moved, weights), _ = pure.apply(pure.params, {}, x, probes={"inner": (probe, None)})
    (output, same), _ = pure.apply(pure.params, {}, x)
    assert_same((moved, weights), (output + 1, same))


def test_several_positional_arguments_are_a_tuple() -> None:
    torch.manual_seed(0)
    model = SelfAttention()
    pure = functional(model, observe="inner:input", intervene={"inner:input": lambda qkv: (qkv[0], 2 * qkv[1], qkv[2])})
    x = torch.randn(3, 1, 4)
    ((output, _), seen), _ = pure.apply(pure.params, {}, x)
    assert_same(seen, {"inner:input": (x, x, x)})
    assert_same(output, model.inner(x, 2 * x, x)[0].detach())


def test_the_root_is_selected_by_its_empty_path_only() -> None:
    linear = nn.Linear(2, 2)
    pure = functional(linear, observe=["", ":input"], intervene={"": torch.neg})
    (output, seen), _ = pure.apply(pure.params, {}, torch.ones(1, 2))
    assert_same(output, -seen[""])
    assert list(seen) == [":input", ""]
    with pytest.raises(ValueError, match=r"observe='\*' matches no module; have: $"):
        functional(linear, observe="*")


def test_a_shared_module_has_one_name() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    pure = functional(Shared(), observe="b")
    (output, seen), _ = pure.apply(pure.params, {}, torch.ones(1, 2))
    assert list(seen) == ["a", "a#1"]
    assert_same(seen["a#1"], output)


def test_own_hooks_of_the_module_stay_and_come_first() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    pure = functional(model, observe="0")
    (_, seen), _ = pure.apply(pure.params, {}, torch.ones(1, 2))
    assert_same(seen["0"], model(torch.ones(1, 2)).detach())
    assert [len(m._forward_hooks) for m in model.modules()] == [0, 1]


def test_a_callable_selects_modules() -> None:
    model, x, _ = make("mlp")
    pure = functional(model, observe=lambda path, module: isinstance(module, nn.Linear) and path != "head")
    (_, seen), _ = pure.apply(pure.params, pure.buffers, x)
    assert list(seen) == ["fc", "fc#1", "block.0"]


TERMS = 8 * 300.0  # BatchNorm divides what is left of a difference by a spread of sqrt(1e-5) at the least

# --- under transforms ------------------------------------------------------------------------------------------------


def tapped(inplace: bool = True, dtype: torch.dtype = torch.float32) -> tuple[Functional, Callable[..., Any]]:
    torch.manual_seed(0)
    pure = functional(
        Net(inplace).to(dtype),
        observe=["fc", "relu:input"],
        intervene={"block.1": lambda y: reverse_gradient(y, 0.5)},
        probes="fc",
    )

    def run(params: Any, buffers: Any, x: Tensor, probes: Any) -> Any:
        def loss(params: Any, probes: Any) -> Any:
            (output, seen), new = pure.apply(params, buffers, x, probes=probes)
            return score(output), (seen, new)

        return grad(loss, argnums=(0, 1), has_aux=True)(params, probes)

    return pure, run


def probes_like(x: Tensor) -> dict[str, Tensor]:
    return {"fc": torch.full_like(x, 0.1), "fc#1": torch.full_like(x, -0.2)}


def test_lanes_are_a_loop() -> None:
    pure, run = tapped(dtype=torch.float64)
    params = [pure.params, {name: 1.5 * p for name, p in pure.params.items()}]
    x = X.double()
    xs, probes = [x, x + 1], [probes_like(x), probes_like(2 * x)]
    with assert_untouched(params, pure.buffers, xs, probes):
        found = vmap(run, in_dims=(0, None, 0, 0))(stack(params), pure.buffers, stack(xs), stack(probes))
        for i in range(2):
            assert_close(lane(found, i), run(params[i], pure.buffers, xs[i], probes[i]), at_least=TERMS)
        # lanes that only the probes bring: what BatchNorm writes has them too
        found = vmap(run, in_dims=(None, None, None, 0))(params[0], pure.buffers, x, stack(probes))
        assert_close(lane(found, 1), run(params[0], pure.buffers, x, probes[1]), at_least=TERMS)


def test_observed_under_a_vmap_over_examples() -> None:
    # C36: a forward hook sees one example there; as a value, the activation has the batch again
    torch.manual_seed(0)
    pure = functional(nn.Linear(1, 1), observe="")
    x = torch.tensor([[1.0], [2.0], [3.0]])
    output, seen = vmap(lambda row: pure.apply(pure.params, {}, row)[0])(x)
    assert seen[""].shape == (3, 1)
    assert_same(seen[""], output)
    pure = functional(nn.Linear(1, 1), probes="")
    found = grad(lambda probe: pure.apply(pure.params, {}, x, probes={"": probe})[0].sum())(torch.zeros(3, 1))
    assert_same(found, torch.ones(3, 1))


def test_compiled_is_eager_and_compiles_once() -> None:
    pure, run = tapped()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    args = (pure.params, pure.buffers, X, probes_like(X))
    assert_close(compiled(*args), run(*args))
    more = ({name: 2 * p for name, p in pure.params.items()}, pure.buffers, X + 1, probes_like(3 * X))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_close(compiled(*more), run(*more))


@pytest.mark.slow
def test_lanes_compile_by_inductor() -> None:
    torch.manual_seed(0)
    pure = functional(nn.Linear(3, 2), observe="", probes="", intervene={"": reverse_gradient})

    def loss(weight: Tensor, probe: Tensor, x: Tensor) -> Any:
        (output, seen), _ = pure.apply({**pure.params, "weight": weight}, {}, x, probes={"": probe})
        return score(output), seen

    function = vmap(grad(loss, argnums=(0, 1), has_aux=True), in_dims=(None, 0, 0))
    args = (pure.params["weight"], torch.ones(2, 4, 2), torch.randn(2, 4, 3))
    assert_close(torch.compile(function, fullgraph=True)(*args), function(*args))


def test_works_inside_a_scan() -> None:
    pure, run = tapped()

    def body(params: Any, x: Tensor) -> Any:
        (grads, _), (seen, _) = run(params, pure.buffers, x, {})
        return {name: p - 0.1 * grads[name] for name, p in params.items()}, seen["fc#1"]

    xs = torch.stack([X, X + 1, X - 1])
    found = torch.compile(lambda params: scan(body, params, xs), fullgraph=True, backend="aot_eager")(pure.params)
    params, seen = pure.params, []
    for x in xs:
        params, observed = body(params, x)
        seen.append(observed)
    assert_close(found, (params, torch.stack(seen)), eps=32)  # three steps


def test_two_threads_do_not_mix_what_they_observe() -> None:
    pure, _ = tapped()
    inputs = [X + i for i in range(6)]
    alone = [pure.apply(pure.params, pure.buffers, x)[0] for x in inputs]
    found: list[Any] = [None] * len(inputs)

    def work(i: int) -> None:
        found[i] = pure.apply(pure.params, pure.buffers, inputs[i])[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(found, alone)


def test_after_an_exception_the_next_call_is_clean() -> None:
    model, x, _ = make("mlp")

    def fails(y: Tensor) -> Tensor:
        if y.abs().max() > 1e3:
            raise ArithmeticError("too large")
        return y

    pure = functional(model, observe="fc", intervene={"block": fails})
    expected = pure.apply(pure.params, pure.buffers, x)
    with pytest.raises(ArithmeticError, match="too large"):
        pure.apply({path: 1e3 * p for path, p in pure.params.items()}, pure.buffers, x, train=False)
    assert_same(pure.apply(pure.params, pure.buffers, x), expected)


def test_an_intervention_may_call_the_same_function() -> None:
    linear = nn.Linear(2, 2)
    inner = functional(linear, observe="")
    nested: list[Any] = []

    def twice(y: Tensor) -> Tensor:
        if len(nested) == 0:
            nested.append(None)
            nested[0] = outer.apply(outer.params, {}, y)[0][1]
        return y

    outer = functional(nn.Sequential(linear), observe="0", intervene={"0": twice})
    (output, seen), _ = outer.apply(outer.params, {}, torch.ones(1, 2))
    assert_same(seen["0"], output)
    assert_same(nested[0]["0"], inner.apply(inner.params, {}, output)[0][0])


def test_dropout_is_observed_with_its_mask() -> None:
    pure = functional(nn.Sequential(nn.Dropout(0.5), nn.Identity()), observe="0")
    (output, seen), _ = pure.apply({}, {}, torch.ones(100), key=random.key(0))
    assert_same(output, seen["0"])
    assert 20 < (output == 0).sum() < 80


def test_an_attack_on_the_embeddings_goes_through_a_probe() -> None:
    model, tokens, _ = make("transformer")
    pure = functional(model, probes="embedding")

    def loss(probe: Tensor) -> Tensor:
        output, _ = pure.apply(pure.params, {}, tokens, probes={"embedding": probe})
        return F.cross_entropy(output.transpose(1, 2), torch.zeros(2, 5, dtype=torch.int64))

    clean = torch.zeros(2, 5, 8)
    moved = attack(loss, clean, norm="l2", per="token", epsilon=0.5, step_size=0.5, steps=1)
    (_, expected, _) = classic_embedding_gradient(model, tokens)
    assert_close(moved, 0.5 * expected / expected.norm(dim=-1, keepdim=True))
    assert loss(moved) > loss(clean)


def classic_embedding_gradient(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kept: list[Tensor] = []
    handle = model.embedding.register_forward_hook(lambda m, a, output: (output.retain_grad(), kept.append(output))[0])
    output = model(tokens)
    F.cross_entropy(output.transpose(1, 2), torch.zeros(2, 5, dtype=torch.int64)).backward()
    handle.remove()
    return output, kept[0].grad, kept[0]


# --- classic loops ---------------------------------------------------------------------------------------------------


def number_of_hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@each_model
def test_a_loop_sees_what_hooks_see(name: str) -> None:
    model, x, paths = make(name)
    values, gradients, _ = classic(model, x, paths)
    single = [path for path in with_inputs(paths) if isinstance(values[path], Tensor) and path != "embedding:input"]
    before = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    fresh = make(name)[0]
    model.load_state_dict(fresh.state_dict())
    with hooks(model, observe=with_inputs(paths), gradients=single) as seen:
        for _ in range(2):  # each forward begins anew
            model.load_state_dict(fresh.state_dict())
            model.zero_grad()
            score(model(x.clone().requires_grad_() if x.is_floating_point() else x)).backward()
    assert_same(comparable(seen.activations), comparable(values))
    assert list(seen.activations) == list(values)
    assert_same(seen.gradients, {site: gradients[site][0] for site in seen.gradients})
    assert len(seen.gradients) >= 7
    assert_same({name: p.grad for name, p in model.named_parameters()}, before)


def test_a_loop_replaces_what_functional_replaces() -> None:
    model, x, _ = make("mlp")
    clip = replace_gradient(lambda g: g.clamp(-0.1, 0.1))
    changes = {"block.0:input": clip, "block.1": reverse_gradient, "fc#1": torch.sin}
    pure = functional(model, intervene=changes)
    expected = grad(lambda params: score(pure.apply(params, pure.buffers, x)[0]))(pure.params)
    with hooks(model, intervene=changes):
        score(model(x)).backward()
    assert_same({name: p.grad for name, p in model.named_parameters()}, expected)
    assert_same(model(x).detach(), make("mlp")[0](x).detach())


def test_handles_are_removed_however_the_block_is_left() -> None:
    model, x, _ = make("mlp")
    own = model.fc.register_forward_hook(lambda module, args, output: None)
    with hooks(model, observe="fc"), hooks(model, gradients="*:input", intervene={"": torch.neg}):
        assert number_of_hooks(model) > 10
        model(x)
    assert number_of_hooks(model) == 1
    for error in (ArithmeticError, KeyboardInterrupt):
        with contextlib.suppress(error), hooks(model, observe="*") as seen:
            model(x)
            raise error
        assert number_of_hooks(model) == 1
        assert "block.1" in seen.activations

    def fails(y: Tensor) -> Tensor:
        raise ArithmeticError("in the forward")

    with pytest.raises(ArithmeticError, match="in the forward"), hooks(model, intervene={"head": fails}):
        model(x)
    with (
        pytest.raises(ValueError, match="hooks of Net: gradients='fc9' matches no module"),
        hooks(model, observe="fc", gradients="fc9"),
    ):
        raise AssertionError
    with (
        pytest.raises(ValueError, match="hooks of Net: observe='fc#2' matches no call of this forward; have: fc, fc#1"),
        hooks(model, observe="fc#2"),
    ):
        model(x)
    assert number_of_hooks(model) == 1
    own.remove()


def test_a_recorded_gradient_is_what_came_this_way() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Identity()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.sin(x)
            return 3 * self.same(h) + 5 * h + self.relu(2 * h)

    model = Residual()
    x = torch.tensor([1.0, -1.0], requires_grad=True)
    with hooks(model, gradients=["same", "same:input", "relu", "relu:input"]) as seen:
        model(x).sum().backward()
    assert_same(
        seen.gradients,
        {
            "relu": torch.ones(2),
            "relu:input": torch.tensor([1.0, 0.0]),
            "same": torch.full((2,), 3.0),
            "same:input": torch.full((2,), 3.0),
        },
    )
    with torch.no_grad(), hooks(model, gradients="same") as seen:
        model(x)
    assert seen.gradients == {}


@pytest.mark.slow
def test_a_bert_is_observed_and_probed_as_by_hooks() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}
    model = transformers.BertModel(transformers.BertConfig(**sizes, **quiet, intermediate_size=16))
    site = "embeddings.word_embeddings"
    pure = functional(model, observe=["encoder.layer.?", "encoder.layer.*.output"], probes=site)

    def loss(params: Any, probe: Tensor) -> Any:
        (output, seen), _ = pure.apply(params, pure.buffers, TOKENS, probes={site: probe})
        return score(output.last_hidden_state), seen

    (_, found), seen = grad(loss, argnums=(0, 1), has_aux=True)(pure.params, torch.zeros(2, 5, 8))
    with hooks(model, observe=["encoder.layer.?", "encoder.layer.*.output"], gradients=site) as classic:
        score(model(TOKENS).last_hidden_state).backward()
    assert len(seen) == 6
    assert_same(seen, {path: value.detach() for path, value in classic.activations.items()})
    assert_same(found, classic.gradients[site])


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "given"),
    [("observe", "fc9"), ("observe", ["fc", "fc9"]), ("intervene", {"fc9": torch.neg}), ("probes", ["fc9"])],
)
def test_a_selector_that_matches_no_module_raises(kind: str, given: Any) -> None:
    with pytest.raises(ValueError, match=rf"functional of Net: {kind}='fc9' matches no module; have: fc, relu, block,"):
        functional(Net(), **{kind: given})


def test_errors_at_construction() -> None:
    with pytest.raises(ValueError, match="chooses no module; have: fc, relu"):
        functional(Net(), observe=lambda path, module: False)
    with pytest.raises(TypeError, match=r"observe takes globs such as .*, got <class"):
        functional(Net(), observe=[nn.Linear])
    with pytest.raises(TypeError, match="intervene maps selectors to functions; 'fc' has 2"):
        functional(Net(), intervene={"fc": 2.0})
    with pytest.raises(TypeError, match="intervene maps selectors to functions; 'fc' has None"):
        functional(Net(), intervene=["fc"])


def test_errors_of_a_call() -> None:
    pure = functional(Net(), observe="fc#2")
    with pytest.raises(ValueError, match="observe='fc#2' matches no call of this forward; have: fc, fc#1"):
        pure.apply(pure.params, pure.buffers, X)
    pure = functional(Net(), probes="fc")
    with pytest.raises(ValueError, match=r"'relu' in probes is no activation chosen by .* have: fc, fc#1"):
        pure.apply(pure.params, pure.buffers, X, probes={"relu": torch.zeros(5, 4)})
    with pytest.raises(ValueError, match=r"the probe 'fc' has the shapes \[torch.Size\(\[4\]\)\], the activation"):
        pure.apply(pure.params, pure.buffers, X, probes={"fc": torch.zeros(4)})
    pure = functional(Net())
    with pytest.raises(ValueError, match="'fc' in probes is no activation"):
        pure.apply(pure.params, pure.buffers, X, probes={"fc": torch.zeros(5, 4)})
    pure = functional(Net(), intervene={"fc": lambda y: None})
    with pytest.raises(TypeError, match="intervene='fc' returned None instead of an activation"):
        pure.apply(pure.params, pure.buffers, X)

    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(input=x)

    pure = functional(Keywords(), observe="inner:input")
    with pytest.raises(ValueError, match="'inner:input' is called with keyword arguments only"):
        pure.apply(pure.params, pure.buffers, X)


# --- what is put in draws from the key too ---------------------------------------------------------------------------


def _drops(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


class _Drops:
    def __call__(self, x: Tensor) -> Tensor:
        return _drops(x)


@pytest.mark.parametrize("replace", [_drops, _Drops(), nn.Dropout(0.5)], ids=["function", "object", "module"])
def test_an_intervention_draws_from_the_key(replace: Callable[[Tensor], Tensor]) -> None:
    model = functional(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), intervene={"0": replace}, observe="1:input")
    x, keys = torch.ones(4, 2), random.split(random.key(0), 2)

    def hidden(key: Tensor) -> Tensor:
        seen: Tensor = model.apply(model.params, model.buffers, x, key=key)[0][1]["1:input"]
        return seen

    assert_same(hidden(keys[0]), hidden(keys[0]))
    assert_same(vmap(hidden)(keys), torch.stack([hidden(key) for key in keys]))
    assert not torch.equal(hidden(keys[0]), hidden(keys[1]))
    with pytest.raises(ValueError, match="no key to draw from"):
        model.apply(model.params, model.buffers, x)


def test_noise_of_an_intervention_and_of_an_own_hook_raises() -> None:
    def noise(x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    own = nn.Sequential(nn.Linear(2, 3))
    own[0].register_forward_hook(lambda module, args, output: noise(output))
    for model in (functional(nn.Sequential(nn.Linear(2, 3)), intervene={"0": noise}), functional(own)):
        with pytest.raises(ValueError, match="calls randn_like, which draws random numbers that no key controls"):
            model.apply(model.params, model.buffers, torch.ones(1, 2), key=random.key(0))


def test_one_tensor_in_the_place_of_several_arguments_raises() -> None:
    class Pair(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a - b

    model = functional(Pair(), intervene={":input": lambda pair: torch.stack(pair)})
    with pytest.raises(TypeError, match=r"':input', which has 2 positional arguments, must return the tuple"):
        model.apply({}, {}, torch.ones(2), torch.ones(2))
