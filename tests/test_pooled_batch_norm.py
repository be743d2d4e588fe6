"""accumulate(batch_norm=) on real modules: one window counts as one batch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_half_close, assert_nonzero, assert_same, lane, stack
from torch import Tensor, nn

from functricks import (
    accumulate,
    autocast,
    fgm,
    functional,
    gradient,
    losses,
    multi_task,
    pgd,
    random,
    sam,
    supervised,
    supervised_carry,
    tree,
)

ROWS = 12


def net(momentum: float | None = 0.1, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    first = nn.BatchNorm2d(3, momentum=momentum)
    model = nn.Sequential(first, nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(16, 5)).to(dtype)
    first.running_mean.uniform_(-1, 1)
    first.running_var.uniform_(0.5, 2)
    first.num_batches_tracked.fill_(4)
    return model


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 3, 3, 3, generator=generator).to(dtype)
    return x * 2 + 1, torch.randint(5, (ROWS,), generator=generator)


def problem(momentum: float | None = 0.1, dtype: torch.dtype = torch.float64) -> tuple[Any, Any, Any]:
    model = functional(net(momentum, dtype))
    grad_fn = gradient(supervised(model, losses.cross_entropy), has_carry=True, has_metrics=True)
    return grad_fn, model.params, supervised_carry(model, random.key(0))


def classic(momentum: float | None, parts: list[Tensor]) -> dict[str, Tensor]:
    module = net(momentum)
    for part in parts:
        module[0](part)
    return dict(module.named_buffers())


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("size", [3, 5, ROWS])
def test_pooled_is_one_batch_and_sequential_is_the_loop(momentum: Any, size: int) -> None:
    grad_fn, params, carry = problem(momentum)
    x, y = batch()
    pooled = accumulate(grad_fn, micro_batch_size=size, batch_norm="pooled")(params, (x, y), carry)
    assert list(pooled.carry.buffers) == list(carry.buffers)
    assert_close(pooled.carry.buffers, classic(momentum, [x]))
    sequential = accumulate(grad_fn, micro_batch_size=size)(params, (x, y), carry)
    assert_close(sequential.carry.buffers, classic(momentum, list(x.split(size))))
    assert_same(pooled.grads, sequential.grads)  # only the running statistics differ
    assert_nonzero(pooled.grads)


EVALUATIONS = {  # of every micro-batch
    "fgm": (lambda grad_fn: fgm(grad_fn, 0.3, where="1.weight"), 2),
    "pgd": (lambda grad_fn: pgd(grad_fn, 0.3, 0.2, 2, where="1.weight"), 3),
    "sam": (lambda grad_fn: sam(grad_fn, 0.3, where="1.weight"), 2),
    "multi_task": (lambda grad_fn: multi_task({"a": grad_fn, "b": grad_fn}), 2),
    "fgm in sam": (lambda grad_fn: sam(fgm(grad_fn, 0.3, where="1.weight"), 0.3, where="1.weight"), 4),
}


@pytest.mark.parametrize("name", EVALUATIONS)
@pytest.mark.parametrize("outside", [False, True])
def test_all_evaluations_of_the_window_are_pooled(name: str, outside: bool) -> None:
    """Behind BatchNorm everything moves; it sees every micro-batch again, which changes n in its variance.

    Outside ``accumulate`` each pass over the batch is a window of its own.
    """
    wrap, times = EVALUATIONS[name]
    grad_fn, params, carry = problem()
    x, y = batch()
    parts = partial(accumulate, micro_batches=3, batch_norm="pooled")
    if outside:
        found = wrap(parts(grad_fn))(params, (x, y), carry)
        assert_close(found.carry.buffers, classic(0.1, [x] * times))
    else:
        found = parts(wrap(grad_fn))(params, (x, y), carry)
        assert_close(found.carry.buffers, classic(0.1, [torch.cat([x] * times)]))


@pytest.mark.parametrize("grad_mode", [False, True])
def test_bfloat16_lanes_with_an_attack(grad_mode: bool) -> None:
    """autocast below, BatchNorm inside, FGM and a pooled window around, a lane for each strength."""
    model = functional(net(dtype=torch.float32))
    loss_fn = autocast(supervised(model, losses.cross_entropy), "cpu", torch.bfloat16)
    data, carry = batch(torch.float32), supervised_carry(model, random.key(0))

    def run(epsilon: Tensor) -> Any:
        grad_fn = fgm(gradient(loss_fn, has_carry=True, has_metrics=True), epsilon, where="1.weight")
        return tuple(accumulate(grad_fn, 3, batch_norm="pooled")(model.params, data, carry))

    strengths = torch.tensor([0.1, 0.5])
    with torch.set_grad_enabled(grad_mode):
        found = torch.vmap(run)(strengths)
        for index, epsilon in enumerate(strengths):
            grads, _, _, after, _ = run(epsilon)
            assert_close(lane(found, index)[3].buffers, after.buffers, 64)  # float32, whatever the convolution is in
            for name, leaf in grads.items():
                gap = (lane(found, index)[0][name] - leaf).abs().max()
                assert gap <= 8 * torch.finfo(torch.bfloat16).eps * max(leaf.abs().max(), 0.1), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("laned", [False, True])
def test_half_precision_statistics_are_pooled_in_float32(dtype: torch.dtype, laned: bool) -> None:
    """Of more entries than float16 can count."""
    module = nn.Sequential(nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(dtype)
    model = functional(module)
    grad_fn = gradient(supervised(model, losses.cross_entropy), has_carry=True, has_metrics=True)
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(8, 2, 120, 120, generator=generator) + 1).to(dtype)
    rows, carry = (x, torch.arange(8) % 2), supervised_carry(model, random.key(0))

    def buffers(params: Any) -> Any:
        return accumulate(grad_fn, 4, batch_norm="pooled")(params, rows, carry).carry.buffers

    if laned:
        with torch.no_grad():
            found = lane(torch.vmap(buffers)(stack([model.params, model.params])), 1)
    else:
        found = buffers(model.params)
    expected = copy.deepcopy(module).double()
    expected(x.double())
    for name in ("running_mean", "running_var"):
        assert found[f"0.{name}"].dtype == dtype
        assert_half_close(found[f"0.{name}"], dict(expected.named_buffers())[f"0.{name}"], 1)


def test_evaluation_mode_leaves_them_alone() -> None:
    model = functional(net())
    loss_fn = supervised(model, losses.cross_entropy, train=False)
    grad_fn = accumulate(gradient(loss_fn, has_carry=True, has_metrics=True), 3, batch_norm="pooled")
    carry = supervised_carry(model, random.key(0))
    assert_same(grad_fn(model.params, batch(), carry).carry.buffers, carry.buffers)


@pytest.mark.parametrize("grad_mode", [False, True])
def test_vmap_equals_the_loop(grad_mode: bool) -> None:
    grad_fn, params, carry = problem()
    data = batch()
    lanes = stack([tree.scale(params, factor) for factor in (1.0, 0.5)])
    step = accumulate(fgm(grad_fn, 0.3, where="0.weight"), 3, batch_norm="pooled")
    with torch.set_grad_enabled(grad_mode):
        found = torch.vmap(lambda params: tuple(step(params, data, carry)))(lanes)
        for index in range(2):
            assert_close(lane(found, index), tuple(step(lane(lanes, index), data, carry)), 64)  # batched convolution


@pytest.mark.slow
def test_compiles() -> None:
    grad_fn, params, carry = problem(dtype=torch.float32)
    step = accumulate(grad_fn, 6, batch_norm="pooled", nonfinite="drop")
    data = batch(torch.float32)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_close(tuple(compiled(params, data, carry)), tuple(step(params, data, carry)), 64)  # fused sums


def test_instance_norm_and_untracked_batch_norm_do_not_count() -> None:
    model = functional(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2)))
    grad_fn = gradient(supervised(model, losses.cross_entropy), has_carry=True, has_metrics=True)
    data = torch.randn(8, 3), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(ValueError, match="batch_norm='pooled' needs a carry with a dict that holds 'running_mean'"):
        accumulate(grad_fn, 2, batch_norm="pooled")(model.params, data, supervised_carry(model, random.key(0)))
