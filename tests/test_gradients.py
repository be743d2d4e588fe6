"""From losses to gradients: three ways to differentiate that agree, and micro-batches that add up to the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from helpers import (
    FLOAT16_EPS,
    assert_close,
    assert_half_close,
    assert_nonzero,
    assert_same,
    lane,
    stack,
)
from torch import Tensor

import functricks as F
from functricks import Gradient, Loss, accumulate, gradient, losses, tree

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def mlp(seed: int, dtype: torch.dtype = F64) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64).to(dtype)

    return {"fc": {"weight": draw(5, 4), "bias": draw(5)}, "head": {"weight": draw(3, 5), "bias": draw(3)}}


def forward(params: Any, x: Tensor) -> Tensor:
    hidden = nnf.linear(x, params["fc"]["weight"], params["fc"]["bias"]).tanh()
    return nnf.linear(hidden, params["head"]["weight"], params["head"]["bias"])


def data(seed: int, rows: int = 7, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(rows, 4, generator=generator, dtype=F64).to(dtype)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def cross_entropy(params: Any, batch: tuple[Tensor, Tensor]) -> Loss:
    return losses.cross_entropy(forward(params, batch[0]), batch[1])


def classic_gradients(params: Any, loss: Callable[[Any], Tensor]) -> Any:
    """``loss.backward()`` on leaves of our own."""
    leaves = {
        layer: {name: leaf.detach().clone().requires_grad_() for name, leaf in own.items()}
        for layer, own in params.items()
    }
    loss(leaves).backward()
    return {layer: {name: leaf.grad for name, leaf in own.items()} for layer, own in leaves.items()}


# --- three ways to differentiate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64])
def test_all_back_ends_are_loss_backward(dtype: torch.dtype) -> None:
    params, (x, y) = mlp(0, dtype), data(0, dtype=dtype)
    expected = classic_gradients(params, lambda leaves: nnf.cross_entropy(forward(leaves, x), y))
    assert_nonzero(expected)
    by_func = gradient(cross_entropy)(params, (x, y))
    by_autograd = gradient(cross_entropy, backend="autograd")(params, (x, y))
    assert_close(by_func.grads, expected)
    assert_same(by_autograd, by_func)
    assert_close(by_func.loss, nnf.cross_entropy(forward(params, x), y))
    assert by_func.weight == 7


def test_below_the_lanes_is_torch_func_grad() -> None:
    """Ordinary autograd under the lanes, with grad mode off, and vmap(torch.func.grad) with it on; shared leaves."""
    lanes = [mlp(i) for i in range(3)]
    batches = stack([data(i) for i in range(3)])
    one_by_one = stack([gradient(cross_entropy)(params, data(i)) for i, params in enumerate(lanes)])
    grad_fn = gradient(cross_entropy)
    with torch.no_grad():
        fast = torch.vmap(grad_fn)(stack(lanes), batches)
    assert_close(fast, one_by_one)
    assert_close(torch.vmap(grad_fn)(stack(lanes), batches), one_by_one)

    head = {"fc": None, "head": 0}  # only the head has lanes
    mixed = {"fc": lanes[0]["fc"], "head": stack([one["head"] for one in lanes])}
    expected = stack([grad_fn({"fc": lanes[0]["fc"], "head": one["head"]}, data(0)) for one in lanes])
    with torch.no_grad():
        assert_close(torch.vmap(grad_fn, (head, None))(mixed, data(0)), expected)
    expected = stack([grad_fn(lanes[0], data(i)) for i in range(3)])
    with torch.no_grad():  # no parameter has lanes, only the batch
        assert_close(torch.vmap(grad_fn, (None, 0))(lanes[0], batches), expected)


def test_lanes_at_another_axis() -> None:
    params = {"w": torch.randn(4, 3, dtype=F64)}  # lanes are the last axis
    grad_fn = gradient(lambda params, x: (params["w"] * x).square().mean())
    x = torch.randn(4, dtype=F64)
    with torch.no_grad():
        found = torch.vmap(grad_fn, ({"w": 1}, None))(params, x)
    for i in range(3):
        assert_close(lane(found, i), grad_fn({"w": params["w"][:, i]}, x))


def _in_lanes(grad_fn: Any, params: Any, batch: Any, **kwargs: Any) -> Gradient:
    with torch.no_grad():
        found = torch.vmap(partial(grad_fn, **kwargs))(stack([params, params]), stack([batch, batch]))
    return lane(found, 1)


WAYS: dict[str, Callable[..., Gradient]] = {
    "func": lambda loss, params, batch, **kwargs: gradient(loss)(params, batch, **kwargs),
    "autograd": lambda loss, params, batch, **kwargs: gradient(loss, backend="autograd")(params, batch, **kwargs),
    "lanes": lambda loss, params, batch, **kwargs: _in_lanes(gradient(loss), params, batch, **kwargs),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


@EVERY_WAY
def test_a_leaf_that_the_loss_does_not_use_has_a_zero_gradient(way: str) -> None:
    params = {"used": torch.tensor(2.0), "unused": torch.ones(2, 3)}
    found = WAYS[way](lambda params, x: (params["used"] * x).mean(), params, torch.ones(3))
    assert_same(found.grads, {"used": torch.tensor(1.0), "unused": torch.zeros(2, 3)})


@EVERY_WAY
def test_a_loss_that_uses_no_parameter_has_zero_gradients(way: str) -> None:
    params = {"w": torch.ones(2)}
    found = WAYS[way](lambda params, x: x.mean(), params, torch.ones(3))
    assert_same(found.grads, {"w": torch.zeros(2)})
    assert found.loss == 1


@EVERY_WAY
def test_the_same_tensor_under_two_names_is_two_parameters(way: str) -> None:
    w = torch.tensor(3.0)
    found = WAYS[way](lambda params, x: (params["a"] * params["b"] * x).mean(), {"a": w, "b": w}, torch.ones(1))
    assert_same(found.grads, {"a": w, "b": w})


@EVERY_WAY
def test_a_batch_of_no_weight_contributes_nothing(way: str) -> None:
    params, (x, _) = mlp(0), data(0)
    found = WAYS[way](cross_entropy, params, (x, torch.full((7,), -100)))
    assert_same(found.grads, torch.utils._pytree.tree_map(torch.zeros_like, params))
    assert found.loss == 0
    assert found.weight == 0


@EVERY_WAY
def test_scale_enters_and_leaves(way: str) -> None:
    params, batch = mlp(0), data(0)
    plain = WAYS[way](cross_entropy, params, batch)
    for scale in (1024.0, torch.tensor(1024.0)):  # a power of two: exact
        assert_same(WAYS[way](cross_entropy, params, batch, scale=scale), plain)
    assert_close(WAYS[way](cross_entropy, params, batch, scale=torch.tensor(3.0)).grads, plain.grads)


@EVERY_WAY
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_half_parameters_have_half_gradients_and_a_wide_loss(way: str, dtype: torch.dtype) -> None:
    w, x = torch.tensor([0.5, -1.5], dtype=dtype), torch.tensor([[1.0, 2.0], [3.0, 0.5]], dtype=dtype)

    def loss(params: Any, x: Tensor) -> Loss:
        values = (params["w"] * x).sum(1)
        return Loss(values, torch.ones(2))

    for scale in (None, 8.0, torch.tensor(8.0)):
        found = WAYS[way](loss, {"w": w}, x, scale=scale)
        assert found.grads["w"].dtype == dtype
        assert found.loss.dtype == found.weight.dtype == F32
        assert_half_close(found.grads, {"w": x.double().mean(0)}, FLOAT16_EPS)


def test_scale_saves_gradients_of_float32_masters_from_underflow() -> None:
    """The forward runs in float16; a gradient of 1e-8 is zero there, and is not when the loss is scaled."""

    def loss(params: Any, x: Tensor) -> Tensor:
        return (params["w"].half() * x).mean().float()

    params, x = {"w": torch.tensor(1.0)}, torch.full((1,), 2.0**-13, dtype=F16)
    tiny = lambda params, x: loss(params, x) * 2.0**-13  # noqa: E731
    assert gradient(tiny)(params, x).grads["w"] == 0
    found = gradient(tiny)(params, x, scale=2.0**14)
    assert found.grads["w"] == 2.0**-26
    assert found.grads["w"].dtype == F32
    assert found.loss == 2.0**-26


@EVERY_WAY
def test_an_overflowing_scale_shows_in_the_gradient_not_in_the_loss(way: str) -> None:
    found = WAYS[way](lambda params, x: (params["w"] * x).mean(), {"w": torch.tensor(2.0)}, torch.ones(1), scale=3e38)
    assert found.loss == 2
    found = WAYS[way](
        lambda params, x: (params["w"] * x).mean(), {"w": torch.tensor(2.0)}, torch.full((1,), 1e3), scale=1e37
    )
    assert found.grads["w"].isinf()


class Own(dict[str, Any]):
    """Frameworks hand out such dicts; for torch.func and optree they are leaves."""


@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_what_is_no_tensor_among_the_parameters_is_named(backend: Any) -> None:
    grad_fn = gradient(lambda p, x: p["w"] * 1.0, backend=backend)
    with pytest.raises(ValueError, match=r"parameters must be floating point, got \{'w': 'float'\}"):
        grad_fn({"w": 2.0}, ())
    with pytest.raises(ValueError, match=r"got Own \(a class of its own is no tree, dict\(\.\.\.\) is\)"):
        grad_fn(Own(w=torch.tensor(2.0)), ())


@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_none_in_place_of_a_parameter_stays_none(backend: Any) -> None:
    """As ``bias`` of a layer without one."""
    params, x = {"w": torch.tensor(2.0), "bias": None}, torch.tensor([1.0, 3.0, 5.0])
    grad_fn = gradient(lambda p, x: (p["w"] * x).mean(), backend=backend)
    for wrapped in (grad_fn, accumulate(grad_fn, 2), F.sam(grad_fn)):
        assert wrapped(params, x).grads == {"w": torch.tensor(3.0), "bias": None}


def test_none_in_lanes_and_compiled() -> None:
    grad_fn = accumulate(gradient(lambda p, x, c: ((p["w"] * x).mean(), c), has_carry=True), 2)
    x, carry = torch.tensor([1.0, 3.0, 5.0]), {"key": torch.tensor(1), "none": None}
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            lanes = torch.vmap(lambda w: grad_fn({"w": w, "bias": None}, x, carry).grads["w"])(torch.ones(2))
        assert lanes.tolist() == [3.0, 3.0]
    found = torch.compile(grad_fn, fullgraph=True, backend="eager")({"w": torch.tensor(1.0), "bias": None}, x, carry)
    assert found.grads == {"w": torch.tensor(3.0), "bias": None}
    assert found.carry == carry


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_half_loss_is_handed_on_in_float32(dtype: torch.dtype, backend: Any) -> None:
    """Sums of losses, over tasks or the steps of an attack, need more: in float16 this one would be infinite."""
    grad_fn = gradient(lambda p, x: p * x, backend=backend)
    found = F.multi_task({"a": grad_fn, "b": grad_fn})(
        torch.tensor(2.0, dtype=dtype), torch.tensor(2.0**14, dtype=dtype)
    )
    assert found.loss.dtype == found.metrics["a.loss"].dtype == F32
    assert found.loss == 2.0**16
    assert found.grads == 2.0**15
    assert found.grads.dtype == dtype


@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_a_loss_of_integers_is_a_float32_loss_without_a_slope(backend: Any) -> None:
    """``return torch.tensor(0)`` is how loss functions say that there was nothing to learn from."""
    found = accumulate(gradient(lambda p, x: torch.tensor(0), backend=backend), 2)(torch.ones(2), torch.ones(3))
    assert (found.loss.dtype, found.weight.dtype, found.weight.item()) == (F32, F32, 3)
    assert not found.grads.any()


@pytest.mark.parametrize("split", [{"micro_batches": 2}, {"micro_batch_size": 1}])
def test_complex_parameters_keep_their_imaginary_part(split: Any) -> None:
    def loss(params: Any, x: Tensor) -> Tensor:
        return (params["c"] - 1j * x).abs().square().mean()

    params, x = {"c": torch.tensor([1.0 + 2.0j])}, torch.tensor([1.0, 3.0, 8.0])
    expected = torch.view_as_real(gradient(loss)(params, x).grads["c"])
    assert_close(expected, torch.tensor([[2.0, -4.0]]))  # 2 (c - i mean(x))
    for wrapped in (accumulate(gradient(loss), **split), F.clip_per_example(loss, 1e9)):
        for scale in (None, 2.0**10):
            assert_close(torch.view_as_real(wrapped(params, x, scale=scale).grads["c"]), expected)


# --- carry, metrics, weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("has_metrics", [False, True])
@pytest.mark.parametrize("has_carry", [False, True])
def test_carry_and_metrics(has_carry: bool, has_metrics: bool, backend: Any) -> None:
    def loss(params: Any, x: Tensor, *carry: Tensor) -> Any:
        out = [(params["w"] * x).mean()]
        out += [carry[0] + 1] if has_carry else []
        out += [{"largest": (params["w"] * x).max()}] if has_metrics else []
        return tuple(out) if len(out) > 1 else out[0]

    grad_fn = gradient(loss, has_carry=has_carry, has_metrics=has_metrics, backend=backend)
    found = grad_fn({"w": torch.tensor(2.0)}, torch.tensor([1.0, 5.0]), torch.tensor(10))
    assert found.grads["w"] == 3
    assert found.carry == (11 if has_carry else 10)
    assert found.metrics == ({"largest": torch.tensor(10.0)} if has_metrics else {})
    assert not any(leaf.requires_grad for leaf in (found.loss, found.weight, *found.metrics.values()))
    assert found.weight == 2


def test_a_wrong_number_of_results_is_refused() -> None:
    grad_fn = gradient(lambda params, x, carry: (params["w"].sum(), carry, {}), has_carry=True)
    with pytest.raises(ValueError, match="with has_carry=True, has_metrics=False the loss function must return 2"):
        grad_fn({"w": torch.ones(1)}, (), ())


def test_the_flags_must_say_what_the_loss_function_returns() -> None:
    def call(out: Any, **flags: Any) -> Any:
        return gradient(lambda params, x, *carry: out, **flags)({"w": torch.ones(1)}, torch.ones(2), torch.ones(()))

    one, loss = torch.tensor(1.0), Loss(torch.ones(2), torch.ones(2))
    for out, name in ((one, "Tensor"), (loss, "Loss")):  # not the two fields of a Loss for a loss and a carry
        with pytest.raises(ValueError, match=f"has_carry=True, .* must return 2 values, got a {name} alone"):
            call(out, has_carry=True)
        with pytest.raises(ValueError, match=f"has_metrics=True the loss .* must return 2 values, got a {name} alone"):
            call(out, has_metrics=True)
    with pytest.raises(ValueError, match="returned 2 values, but has_carry and has_metrics are False; set the one"):
        call((one, {}))
    with pytest.raises(TypeError, match="metrics, which come last, must be a dict of name -> 0-d tensor, got Tensor"):
        call((one, {}, one), has_carry=True, has_metrics=True)
    with pytest.raises(TypeError, match=r"a metric must be a 0-d tensor or a number, got \{'all': 'dict'\}"):
        call((one, {"all": {"a": one}}), has_metrics=True)
    with pytest.raises(TypeError, match=r"the carry must hold tensors alone, got \{'epoch': 'int'\}"):
        call((one, {"epoch": 3}), has_carry=True)


@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_metrics_may_be_numbers(backend: Any) -> None:
    def loss(params: Any, x: Tensor) -> Any:
        return (params * x).mean(), {"rows": len(x), "rate": 0.5, "more": len(x) > 1}

    grad_fn = gradient(loss, has_metrics=True, backend=backend)
    found = grad_fn(torch.tensor(1.0), torch.ones(3)).metrics
    assert all(isinstance(value, Tensor) for value in found.values())
    assert {name: value.item() for name, value in found.items()} == {"rows": 3, "rate": 0.5, "more": True}
    found = accumulate(grad_fn, 2)(torch.tensor(1.0), torch.ones(3)).metrics
    assert_close(found, {"rows": torch.tensor(5 / 3), "rate": torch.tensor(0.5), "more": torch.tensor(2 / 3)})


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("carry", [None, 3, "name", {"a": None, "b": (1,)}])
def test_a_carry_that_the_loss_does_not_take_passes_whatever_it_is(carry: Any, backend: Any) -> None:
    grad_fn = gradient(lambda params, x: (params * x).mean(), backend=backend)
    for wrapped in (grad_fn, accumulate(grad_fn, 2), accumulate(grad_fn, 2, nonfinite="drop")):
        assert wrapped(torch.tensor(1.0), torch.ones(3), carry).carry is carry
    assert per_example(torch.tensor(1.0), torch.ones(3), carry).carry is carry


per_example = F.per_example_gradient(lambda params, x: (params * x).mean())


@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_a_scale_with_axes_is_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match=r"scale must be a number or a 0-d tensor, got shape \(1,\)"):
        gradient(lambda params, x: params * 1.0, backend=backend)(torch.tensor(1.0), (), scale=torch.ones(1))


@pytest.mark.parametrize(
    ("batch", "weight"),
    [
        ((), 1.0),
        (2, 1.0),
        ({"x": torch.ones(4), "task": "mnli", "names": ["a", "b"]}, 4.0),
        (torch.tensor(2.0), 1.0),
        (torch.ones(4), 4.0),
        ({"x": torch.ones(3, 2), "n": torch.tensor(1)}, 3.0),
    ],
)
def test_what_a_plain_mean_weighs(batch: Any, weight: float) -> None:
    assert gradient(lambda params, batch: params["w"] * 1.0)({"w": torch.tensor(1.0)}, batch).weight == weight


@pytest.mark.parametrize(
    ("loss", "batch", "match"),
    [
        (lambda params, x: params["w"] * x, torch.ones(2), r"a Loss or a 0-d tensor, got a tensor of shape \(2,\)"),
        (lambda params, x: 1.0, torch.ones(2), "a Loss or a 0-d tensor, got float"),
        (lambda params, b: params["w"], {"x": torch.ones(2), "y": torch.ones(3)}, "leaves differ: .*'x': 2, 'y': 3"),
    ],
)
def test_bad_losses(loss: Any, batch: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        gradient(loss)({"w": torch.tensor(1.0)}, batch)


def test_an_unknown_back_end_is_refused() -> None:
    with pytest.raises(ValueError, match="backend must be 'func' or 'autograd', got 'jax'"):
        gradient(cross_entropy, backend="jax")  # type: ignore[arg-type]


# --- backend="autograd" is first order, and says so ------------------------------------------------------------------


@pytest.mark.parametrize("what", ["params", "batch", "carry", "scale"])
def test_autograd_refuses_inputs_that_require_grad(what: str) -> None:
    inputs: dict[str, Any] = {
        "params": {"w": torch.tensor(1.0)},
        "batch": {"x": torch.ones(2)},
        "carry": {"c": torch.tensor(1.0)},
        "scale": torch.tensor(1.0),
    }
    name = {"params": "w", "batch": "x", "carry": "c", "scale": ""}[what]
    leaf = inputs[what] if what == "scale" else inputs[what][name]
    leaf.requires_grad_()
    grad_fn = gradient(lambda params, batch: (params["w"] * batch["x"]).mean(), backend="autograd")

    def call() -> Gradient:
        return grad_fn(inputs["params"], inputs["batch"], inputs["carry"], scale=inputs["scale"])

    with pytest.raises(ValueError, match=f"{what} '{name}' requires grad.*use backend='func'"):
        call()
    with torch.no_grad():
        assert call().grads["w"] == 1


def test_autograd_refuses_torch_func() -> None:
    grad_fn = gradient(lambda params, x: (params["w"] * x).mean(), backend="autograd")
    params, x = {"w": torch.ones(2)}, torch.ones(2)
    for transformed in (
        lambda: torch.vmap(grad_fn, (0, None))(params, x),
        lambda: torch.func.grad(lambda w: grad_fn({"w": w}, x).loss)(torch.tensor(1.0)),
    ):
        with pytest.raises(ValueError, match=r"does not work under vmap, grad .*use backend='func'"):
            transformed()


def test_autograd_runs_hooks_and_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    seen = []

    def loss(params: Any, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda w, x: (w * x).tanh(), params["w"], x, use_reentrant=False)
        hidden.register_hook(lambda slope: seen.append(slope))
        return hidden.sum()

    params, x = {"w": torch.tensor([0.5, 1.0])}, torch.tensor([1.0, 2.0])
    found = gradient(loss, backend="autograd")(params, x)
    expected = gradient(lambda params, x: (params["w"] * x).tanh().sum())(params, x)
    assert_same(found.grads, expected.grads)
    assert_same(seen, [torch.ones(2)])
    assert not found.grads["w"].requires_grad


# --- higher order ----------------------------------------------------------------------------------------------------


def test_vmap_inside_grad_inside_vmap() -> None:
    """A hyper-gradient through a batched inner gradient, itself batched: equal to the loop."""

    def outer(c: Tensor, params: Tensor, x: Tensor) -> Tensor:
        inner = gradient(lambda p, x: (c * p["w"] * x).sin().mean())
        found = torch.vmap(lambda w: inner({"w": w}, x))(params)
        return found.grads["w"].square().sum()

    c, params, x = (torch.randn(shape, dtype=F64) for shape in [(3,), (3, 2), (3, 5)])
    together = torch.vmap(torch.func.grad(outer))(c, params, x)
    looped = []
    for i in range(3):
        leaf = c[i].clone().requires_grad_()
        slopes = [
            torch.autograd.grad((leaf * w * x[i]).sin().mean(), w, create_graph=True)[0].square()
            for w in (one.clone().requires_grad_() for one in params[i])
        ]
        looped.append(torch.autograd.grad(sum(slopes), leaf)[0])
    assert_nonzero(together)
    assert_close(together, torch.stack(looped))


def test_the_way_below_the_lanes_never_cuts_a_derivative() -> None:
    """Grad mode on, from outside of the lanes: the gradient of a gradient is there."""
    x = torch.tensor([1.0, 2.0], dtype=F64)
    w = torch.tensor([0.3, 0.7], dtype=F64, requires_grad=True)
    grad_fn = gradient(lambda params, x: (params["w"] * x).sin())
    found = torch.vmap(lambda w, x: grad_fn({"w": w}, x).grads["w"])(w, x)
    (second,) = torch.autograd.grad(found.sum(), w)
    assert_close(second, -(x**2) * (w.detach() * x).sin())


def test_example_weights_have_a_gradient_through_accumulate() -> None:
    """As in learning to reweight examples (Ren et al. 2018): the weights are what is learned."""
    x, params = torch.randn(6, dtype=F64), {"w": torch.tensor(0.7, dtype=F64)}

    def outer(weights: Tensor, wrap: Callable[[Any], Any]) -> Tensor:
        grad_fn = wrap(gradient(lambda params, batch: Loss((params["w"] * batch[0]).sin() * batch[1], batch[1])))
        return grad_fn(params, (x, weights)).grads["w"]

    weights = torch.rand(6, dtype=F64) + 0.5
    whole = torch.func.grad(outer)(weights, lambda grad_fn: grad_fn)
    assert_nonzero(whole)
    assert_close(torch.func.grad(outer)(weights, lambda grad_fn: accumulate(grad_fn, 3)), whole)


# --- accumulation ----------------------------------------------------------------------------------------------------

SPLITS = [{"micro_batches": k} for k in (1, 2, 3, 5, 7, 20)] + [{"micro_batch_size": n} for n in (1, 2, 3, 7, 50)]


def weighted_cross_entropy(params: Any, batch: tuple[Tensor, Tensor]) -> tuple[Loss, dict[str, Tensor]]:
    weight = torch.tensor([1.0, 3.0, 0.5], dtype=batch[0].dtype)
    logits = forward(params, batch[0])
    loss = losses.cross_entropy(logits, batch[1], weight=weight, label_smoothing=0.1)
    return loss, {"loss_again": loss.values.sum() / torch.where(loss.weights.sum() == 0, 1, loss.weights.sum())}


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_micro_batches_add_up_to_the_batch(split: dict[str, int], dtype: torch.dtype) -> None:
    """Uneven splits, class weights, ignored rows, and micro-batches in which every row is ignored."""
    params, (x, y) = mlp(0, dtype), data(0, dtype=dtype)
    y = torch.where(torch.tensor([0, 1, 1, 0, 0, 1, 0]).bool(), -100, y)  # rows 1, 2 and 5
    grad_fn = gradient(weighted_cross_entropy, has_metrics=True)
    whole = grad_fn(params, (x, y))
    assert_nonzero(whole.grads)
    parts = accumulate(grad_fn, **split)(params, (x, y))
    assert_close(parts, whole, eps=2 * 8)  # a sum of up to seven parts
    assert_close(parts.metrics["loss_again"], whole.loss, eps=2 * 8)
    with torch.no_grad():
        laned = torch.vmap(accumulate(grad_fn, **split))(stack([params, params]), stack([(x, y), (x, y)]))
    assert_close(lane(laned, 1), whole, eps=2 * 8)


def test_c01_token_normalised_loss() -> None:
    """Mean of means would be 2.5, sum of means 5.0."""
    rows = torch.tensor([[1.0, 0.0, 0.0], [4.0, 4.0, 4.0]])
    mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    grad_fn = gradient(lambda params, batch: Loss(params["w"] * batch[0] * batch[1], batch[1]))
    for order in ([0, 1], [1, 0]):
        found = accumulate(grad_fn, 2)({"w": torch.tensor(1.0)}, (rows[order], mask[order]))
        assert found.grads["w"] == 3.25
        assert found.weight == 4
        assert found.loss == 3.25


def test_c04_class_weights_do_not_cancel() -> None:
    logits, targets = torch.tensor([[0.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])
    weight = torch.tensor([1.0, 3.0])

    def loss(params: Any, batch: Any) -> Loss:
        return losses.cross_entropy(batch[0] + params["shift"], batch[1], weight=weight)

    params = {"shift": torch.zeros(2)}
    found = accumulate(gradient(loss), 2)(params, (logits, targets))
    assert found.loss.item() == pytest.approx(0.2684828, abs=1e-7)
    assert found.weight == 4
    classic = nnf.cross_entropy(logits, targets, weight)
    assert_close(found.loss, classic)
    slope = torch.func.grad(lambda shift: nnf.cross_entropy(logits + shift, targets, weight))(params["shift"])
    assert_close(found.grads["shift"], slope)


def test_c05_left_over_rows_count_by_their_weight() -> None:
    """Seven rows in windows of four: the window of three is divided by three, and nothing leaks into the next."""
    step = F.train_step(
        accumulate(gradient(lambda params, x: (params["w"] * x).mean()), micro_batch_size=1), F.sgd(0.1)
    )
    state = step.init({"w": torch.tensor(0.0, dtype=F64)})
    for window in torch.ones(7, dtype=F64).split(4):
        state, info = step.update(state, window)
        assert info.grad_norm == 1
    assert state.params["w"].item() == pytest.approx(-0.2)
    assert state.step == 2


def test_the_carry_goes_through_the_parts_in_order() -> None:
    def loss(params: Any, x: Tensor, carry: Tensor) -> Any:
        return (params["w"] * x).mean(), carry * 10 + x.sum()

    grad_fn = gradient(loss, has_carry=True)
    found = accumulate(grad_fn, 3)({"w": torch.tensor(1.0)}, torch.tensor([1.0, 2.0, 3.0]), torch.tensor(7.0))
    assert found.carry == 7123


def test_metrics_are_averaged_by_weight_integers_too() -> None:
    def loss(params: Any, batch: tuple[Tensor, Tensor]) -> Any:
        x, weights = batch
        metrics = {"largest": x.max(), "count": torch.tensor(3), "all": (x > 0).all()}
        return Loss(params["w"] * x * weights, weights), metrics

    batch = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1.0, 1.0, 0.1])
    found = accumulate(gradient(loss, has_metrics=True), micro_batch_size=2)({"w": torch.tensor(1.0)}, batch)
    assert found.metrics["largest"].item() == pytest.approx((2 * 2 + 6 * 0.1) / 2.1)
    assert found.metrics["count"].item() == pytest.approx(3)
    assert found.metrics["all"].item() == 1


def test_float32_weights_do_not_coarsen_a_float64_gradient() -> None:
    x = torch.randn(7, dtype=F64)
    grad_fn = gradient(lambda params, x: Loss((params["w"] * x).sin(), torch.ones(len(x))))
    params = {"w": torch.tensor(0.7, dtype=F64)}
    assert_close(accumulate(grad_fn, 3)(params, x).grads, grad_fn(params, x).grads)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_half_parameters_accumulate_in_float32(dtype: torch.dtype) -> None:
    """2,048 ones in float16: a sum in half precision would stick at 2,048 times the rounding, or overflow."""
    rows = torch.full((512,), 300.0, dtype=dtype)
    found = accumulate(gradient(lambda params, x: Loss(params["w"] * x, torch.ones(len(x)))), micro_batch_size=1)(
        {"w": torch.ones((), dtype=dtype)}, rows
    )
    assert found.grads["w"].dtype == dtype
    assert found.grads["w"] == 300
    assert found.loss == 300
    assert found.loss.dtype == F32


def test_scale_goes_through_accumulation() -> None:
    params, batch = mlp(0), data(0)
    grad_fn = accumulate(gradient(cross_entropy), 3)
    assert_same(grad_fn(params, batch, scale=2.0**10), grad_fn(params, batch))


def test_a_bad_micro_batch_shows() -> None:
    x = torch.tensor([1.0, math.nan, 2.0])
    found = accumulate(gradient(lambda params, x: (params["w"] * x).mean()), 3)({"w": torch.tensor(1.0)}, x)
    assert found.grads["w"].isnan()


def test_accumulation_inside_and_outside_other_wrappers() -> None:
    """accumulate(fgm(...)) attacks every part; a nested accumulation is the same as one."""
    params, batch = mlp(0), data(0, rows=8)
    grad_fn = gradient(cross_entropy)
    assert_close(accumulate(accumulate(grad_fn, 2), 2)(params, batch), grad_fn(params, batch), eps=2 * 8)
    attacked = F.fgm(grad_fn, 0.5, where="fc.*")
    parts = [attacked(params, lane_) for lane_ in zip(batch[0].split(4), batch[1].split(4), strict=True)]
    found = accumulate(attacked, 2)(params, batch)
    expected = torch.utils._pytree.tree_map(lambda a, b: (a + b) / 2, parts[0].grads, parts[1].grads)
    assert_close(found.grads, expected)
    assert found.metrics["adversarial_loss"] > found.loss


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "exactly one of micro_batches and micro_batch_size"),
        ({"micro_batches": 2, "micro_batch_size": 2}, "exactly one of"),
        ({"micro_batches": 0}, "must be integers >= 1, got 0"),
        ({"micro_batch_size": -1}, "must be integers >= 1, got -1"),
        ({"micro_batches": 2.0}, "must be integers >= 1, got 2.0"),
    ],
)
def test_accumulate_refuses(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        accumulate(gradient(cross_entropy), **arguments)


def test_accumulate_needs_one_leading_axis() -> None:
    grad_fn = accumulate(gradient(lambda params, batch: params["w"]), 2)
    for batch in ({"x": torch.ones(2), "y": torch.ones(3)}, {"x": torch.tensor(1.0)}, {}):
        with pytest.raises(ValueError, match="must share one leading axis, got lengths"):
            grad_fn({"w": torch.tensor(1.0)}, batch)


def test_a_0d_leaf_of_the_batch_goes_to_every_part() -> None:
    batch = {"x": torch.tensor([1.0, 4.0, 4.0]), "factor": torch.tensor(2.0)}
    found = accumulate(gradient(lambda params, batch: (params["w"] * batch["x"] * batch["factor"]).mean()), 2)(
        {"w": torch.tensor(1.0)}, batch
    )
    assert found.grads["w"] == 6


def test_every_combination_of_wrappers_agrees_between_back_ends() -> None:
    params, batch = mlp(0), data(0)
    wrappers: list[Callable[[Any], Any]] = [
        partial(accumulate, micro_batches=3),
        partial(F.fgm, epsilon=0.5, where="fc.weight"),
        partial(F.pgd, epsilon=0.5, step_size=0.3, steps=2, where="head.*", norm="global"),
    ]
    for outer, inner in itertools.permutations(wrappers, 2):
        by_func = outer(inner(gradient(cross_entropy)))(params, batch)
        assert_close(outer(inner(gradient(cross_entropy, backend="autograd")))(params, batch), by_func)


# --- batches without rows, odd parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("loss_fn", [lambda p, x: (p * x).mean(), lambda p, x: p.log() * x.mean() + p])
def test_a_mean_over_no_rows_is_zero_and_weighs_nothing(loss_fn: Any, backend: Any) -> None:
    found = gradient(loss_fn, backend=backend)(torch.tensor(2.0), torch.zeros(0, 3))
    assert (found.grads, found.loss, found.weight) == (0, 0, 0)


def test_a_mean_over_no_rows_in_lanes_compiled_and_attacked() -> None:
    def run(params: Any) -> Any:
        grad_fn = gradient(lambda p, x: (p["w"] * x).square().mean())
        wrapped = [F.fgm(grad_fn, 1.0, where="w"), F.pgd(grad_fn, 1.0, where="w"), F.sam(grad_fn), grad_fn]
        return [tuple(one(params, torch.zeros(0, 3))) for one in wrapped]

    params = {"w": torch.tensor([1.0, 2.0])}
    with torch.no_grad():
        found = torch.vmap(run)(params)
    assert all(not leaf.any() for leaf in tree.leaves(found))
    mean = gradient(lambda p, x: (p["w"] * x).square().mean())
    alone = torch.compile(mean, fullgraph=True, backend="eager")({"w": torch.tensor(1.0)}, torch.zeros(0, 3))
    assert all(not leaf.any() for leaf in tree.leaves(tuple(alone)))


@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_parameters_must_be_floating_point(backend: Any) -> None:
    params = {"w": torch.ones(2), "steps": torch.tensor(3)}
    with pytest.raises(ValueError, match=r"parameters must be floating point, got \{'steps': torch.int64\}"):
        gradient(lambda p, x: p["w"].sum(), backend=backend)(params, ())


def test_a_loss_whose_weights_would_broadcast_raises() -> None:
    with pytest.raises(ValueError, match=r"the same shape, got \(4, 2\) and \(4, 1\); expand the weights"):
        gradient(lambda p, x: Loss(p * x, torch.ones(4, 1)))(torch.tensor(1.0), torch.ones(4, 2))


# --- likely mistakes are named where they are made -------------------------------------------------------------------


def test_a_loss_function_of_another_form_is_named() -> None:
    with pytest.raises(TypeError, match=r"has_carry=False the loss function is called as \(params, batch\), but"):
        gradient(lambda params, batch, carry: (params, carry))
    with pytest.raises(TypeError, match=r"has_carry=True the loss function is called as \(params, batch, carry\)"):
        gradient(lambda params, batch: params, has_carry=True)
    with pytest.raises(TypeError, match="loss_fn must be a function, got Tensor"):
        gradient(torch.ones(()))  # type: ignore[arg-type]  # the mistake
    gradient(lambda params, batch, more=1: params["w"])  # what has a default may be there
    gradient(lambda *anything: anything[0]["w"], has_carry=True)
