"""Per-example gradients, against one backward pass an example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_close, assert_nonzero, assert_same, lane, stack
from torch import Tensor

from functricks import (
    Gradient,
    Loss,
    accumulate,
    clip_per_example,
    gradient,
    losses,
    per_example_gradient,
    random,
    tree,
)

ROWS = 6


def problem(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    params = {"w": torch.randn(3, 4, generator=generator).to(dtype), "b": torch.randn(4, generator=generator).to(dtype)}
    labels = torch.randint(4, (ROWS, 5), generator=generator)
    labels[torch.rand(ROWS, 5, generator=generator) < 0.3] = -100
    labels[2] = -100
    return params, (torch.randn(ROWS, 5, 3, generator=generator).to(dtype), labels)


def loss_fn(params: Any, batch: Any) -> tuple[Loss, dict[str, Tensor]]:
    logits = batch[0] @ params["w"] + params["b"]
    loss = losses.cross_entropy(logits.movedim(-1, 1), batch[1])
    return loss, {"size": Loss(logits.square().mean(-1) * loss.weights, loss.weights).mean()}


def by_loop(params: Any, batch: Any) -> list[Any]:
    grad_fn = gradient(loss_fn, has_metrics=True)
    return [grad_fn(params, tuple(leaf[i : i + 1] for leaf in batch)) for i in range(ROWS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_equals_one_pass_an_example(dtype: torch.dtype, chunk_size: Any) -> None:
    params, batch = problem(dtype)
    found = per_example_gradient(loss_fn, has_metrics=True, chunk_size=chunk_size)(params, batch)
    for index, one in enumerate(by_loop(params, batch)):
        assert_close(lane(tuple(found), index), tuple(one))


def test_infinite_bound_is_the_gradient() -> None:
    params, batch = problem()
    whole = gradient(loss_fn, has_metrics=True)(params, batch)
    found = clip_per_example(loss_fn, float("inf"), has_metrics=True)(params, batch)
    assert_nonzero(whole.grads)
    assert_close(found.grads, whole.grads)
    assert_close((found.loss, found.weight, found.metrics["size"]), (whole.loss, whole.weight, whole.metrics["size"]))
    assert found.metrics["clipped"].item() == 0


@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1.0])
def test_clips_each_example(max_norm: float) -> None:
    params, batch = problem()
    examples = by_loop(params, batch)
    weight = sum(one.weight for one in examples)
    expected = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    clipped = torch.tensor(0.0, dtype=torch.float64)
    for one in examples:
        norm = torch.sqrt(sum(leaf.square().sum() for leaf in one.grads.values()))
        factor = min(1.0, max_norm / norm.item()) if norm > 0 else 1.0
        clipped += one.weight / weight * (factor < 1)
        for name, leaf in one.grads.items():
            expected[name] += leaf * factor * one.weight / weight
    found = clip_per_example(loss_fn, max_norm, has_metrics=True)(params, batch)
    assert_close(found.grads, expected)
    assert_close(found.metrics["clipped"], clipped)
    assert clipped > 0


@pytest.mark.parametrize("huge", [1e3, 1e30, 1e300])
def test_one_outlier_cannot_pull_far(huge: float) -> None:
    found = clip_per_example(lambda p, x: (p * x).mean(), 1.0)(
        torch.zeros((), dtype=torch.float64), torch.tensor([0.5, huge], dtype=torch.float64)
    )
    assert found.grads.item() == pytest.approx(0.75)


def test_accumulate_bounds_the_memory_and_changes_nothing() -> None:
    params, batch = problem()
    grad_fn = clip_per_example(loss_fn, 0.3, has_metrics=True)
    assert_close(tuple(accumulate(grad_fn, micro_batch_size=4)(params, batch)), tuple(grad_fn(params, batch)))


def test_zero_gradient_of_an_example_stays_zero_and_differentiable() -> None:
    def size(bound: Tensor) -> Tensor:
        return clip_per_example(lambda p, x: (p * x).mean(), bound)(torch.tensor(1.0), torch.tensor([0.0, 4.0])).grads

    assert size(torch.tensor(1.0)).item() == 0.5
    assert torch.func.grad(size)(torch.tensor(1.0)).item() == 0.5


def test_carry_moves_on_once() -> None:
    def noisy(params: Tensor, batch: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        key, carry = random.split(carry).unbind()
        return (params * batch * random.uniform(key)).mean(), carry

    key = random.key(0)
    found = per_example_gradient(noisy, has_carry=True)(torch.tensor(1.0), torch.ones(3), key)
    assert torch.equal(found.carry, random.split(key)[1])
    assert found.grads.unique().numel() == 1
    without = per_example_gradient(lambda p, x: (p * x).mean())(torch.tensor(1.0), torch.ones(3), key)
    assert torch.equal(without.carry, key)


def test_vmap_over_the_bound_and_compile() -> None:
    params, batch = problem(torch.float32)
    bounds = torch.tensor([0.1, 0.5, 10.0], dtype=torch.float64)

    def run(params: Any, bound: Tensor) -> Any:
        return tuple(clip_per_example(loss_fn, bound, has_metrics=True)(params, batch))

    with torch.no_grad():
        found = torch.vmap(run)(stack([params] * 3), bounds)
    for index in range(3):
        assert_close(lane(found, index), run(params, bounds[index]))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(params, bounds[1])
    assert_close(compiled, run(params, bounds[1]))


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_an_empty_batch(chunk_size: Any) -> None:
    params, batch = problem()
    empty, key = tuple(leaf[:0] for leaf in batch), random.key(0)

    def with_carry(params: Any, batch: Any, carry: Tensor) -> Any:
        loss, metrics = loss_fn(params, batch)
        return loss, random.split(carry)[0], metrics

    options = {"has_carry": True, "has_metrics": True, "chunk_size": chunk_size}
    found = per_example_gradient(with_carry, **options)(params, empty, key)
    full = per_example_gradient(with_carry, **options)(params, batch, key)
    assert_same(found._replace(carry=()), Gradient(*tree.map(lambda leaf: leaf[:0], tuple(full._replace(carry=())))))
    assert torch.equal(found.carry, key)
    clipped = clip_per_example(with_carry, 0.3, **options)(params, empty, key)
    assert_same(clipped.grads, tree.zeros_like(params))
    assert (clipped.loss, clipped.weight, clipped.metrics["clipped"], clipped.metrics["size"]) == (0, 0, 0, 0)


def test_an_empty_batch_whose_loss_reduces_inside() -> None:
    """There vmap over no lanes raises an IndexError."""
    found = per_example_gradient(lambda p, x: p * x.mean())(torch.tensor(1.0), torch.zeros(0, 3))
    assert found.grads.shape == (0,)
    assert clip_per_example(lambda p, x: p * x.mean(), 1.0)(torch.tensor(1.0), torch.zeros(0, 3)).grads.item() == 0


def test_numbers_of_the_batch_go_to_every_example() -> None:
    params, x = torch.tensor(1.0), torch.tensor([1.0, 3.0])
    found = per_example_gradient(lambda p, b: (p * b["x"] * b["t"]).mean())(params, {"x": x, "t": torch.tensor(2.0)})
    assert found.grads.tolist() == [2.0, 6.0]


def test_none_in_place_of_a_parameter_and_in_the_carry() -> None:
    def loss(params: Any, x: Tensor, carry: Any) -> Any:
        return (params["w"] * x).mean(), carry, {"rows": len(x)}

    flags = {"has_carry": True, "has_metrics": True}
    params, carry, x = {"w": torch.tensor(1.0), "bias": None}, {"key": torch.tensor(7), "none": None}, torch.ones(3)
    found = per_example_gradient(loss, chunk_size=2, **flags)(params, x, carry)
    assert found.grads["w"].tolist() == [1.0, 1.0, 1.0]
    assert found.grads["bias"] is None
    assert found.carry == carry
    assert found.metrics["rows"].tolist() == [1, 1, 1]
    assert clip_per_example(loss, 0.5, **flags)(params, x, carry).grads == {"w": torch.tensor(0.5), "bias": None}


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"leaves of the batch must be tensors, got \{'name': 'str'\}"):
        per_example_gradient(loss_fn)({}, {"x": torch.ones(2), "name": "a"})
    with pytest.raises(ValueError, match=r"must share one leading axis, got lengths \{'0': 2, '1': 3\}"):
        per_example_gradient(loss_fn)({}, (torch.ones(2), torch.ones(3)))
    with pytest.raises(ValueError, match=r"must share one leading axis, got lengths \{\}"):
        per_example_gradient(loss_fn)({}, torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"chunk_size must be an integer >= 1, got 2\.5"):
        per_example_gradient(loss_fn, chunk_size=2.5)
    with pytest.raises(ValueError, match="max_norm must be >= 0, got -1"):
        clip_per_example(loss_fn, -1.0)
    with pytest.raises(ValueError, match="chunk_size must be an integer >= 1, got 0"):
        per_example_gradient(loss_fn, chunk_size=0)
