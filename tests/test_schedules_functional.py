"""The shape of a schedule is data: every number differs from lane to lane, compiles, and takes a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jacrev, vmap

from functricks import schedules as S

F64 = torch.float64
STEPS = [0, 1, 2, 3, 4, 5, 7, 9, 12, 30]

# name: (numbers -> schedule, three lanes of numbers, with the edges: no warm-up, nothing after it, powers below 1)
SHAPES: dict[str, tuple[Callable[..., S.Curve], list[tuple[float, ...]]]] = {
    "constant": (S.constant, [(0.1, 0.5, 3), (0.2, 1.0, 0), (0.3, 2.0, 9)]),
    "linear": (S.linear, [(0.1, 0.3, 1.0, 5), (0.2, 0.0, 1.0, 0), (0.3, 1.0, 0.0, 9)]),
    "polynomial": (S.polynomial, [(0.1, 5, 0.5), (0.2, 0, 1.0), (0.3, 9, 0.0)]),
    "exponential_decay": (S.exponential_decay, [(0.1, 0.9), (0.2, 1.0), (0.3, 0.0)]),
    "step_decay": (S.step_decay, [(0.1, 3, 0.5), (0.2, 1, 0.0), (0.3, 7, 1.0)]),
    "multistep": (
        lambda lr, a, b, gamma: S.multistep(lr, [a, b], gamma),
        [(0.1, 2, 4, 0.5), (0.2, 0, 9, 0.0), (1, 3, 4, 1)],
    ),
    "cosine_annealing": (S.cosine_annealing, [(0.1, 5, 0.01), (0.2, 1, 0.0), (0.3, 9, 0.3)]),
    "inverse_sigmoid": (S.inverse_sigmoid, [(1.0, 1.0), (0.5, 4.0), (1.0, 20.0)]),
    "cosine_restarts": (S.cosine_restarts, [(0.1, 3, 2, 0.01), (0.2, 1, 1, 0.0), (0.3, 4, 3, 0.0)]),
    "inclusive": (
        lambda *numbers: S.cosine_restarts(*numbers, inclusive=True),
        [(0.1, 3, 2, 0.01), (0.2, 1, 1, 0.0), (0.3, 1, 3, 0.0)],
    ),
    "one_cycle": (S.one_cycle, [(0.1, 10, 0.3), (0.2, 1, 0.0), (0.3, 9, 1.0)]),
    "three_phase": (
        lambda *numbers: S.one_cycle(*numbers, anneal_strategy="linear", three_phase=True),
        [(0.1, 10, 0.3), (0.2, 10, 0.1), (0.3, 9, 0.5)],
    ),
    "cyclic": (
        lambda low, high, up, down, gamma: S.cyclic(low, high, up, down, "exp_range", gamma),
        [(0.01, 0.1, 3, 2, 0.9), (0.02, 0.1, 1, 0, 1.0), (0.0, 0.1, 4, 4, 0.0)],
    ),
    "triangular2": (
        lambda low, high, up: S.cyclic(low, high, up, mode="triangular2"),
        [(0.01, 0.1, 3), (0.02, 0.1, 1), (0.0, 0.1, 4)],
    ),
    "linear_warmup": (S.linear_warmup, [(0.1, 4, 0, 0.1), (0.2, 0, 1, 0.0), (0.3, 9, 1, 0.0)]),
    "linear_schedule_with_warmup": (S.linear_schedule_with_warmup, [(0.1, 3, 8), (0.2, 0, 9), (0.3, 5, 5)]),
    "cosine_schedule_with_warmup": (
        S.cosine_schedule_with_warmup,
        [(0.1, 3, 8, 0.5, 0.01), (0.2, 0, 9, 1.0, 0.0), (0.3, 5, 5, 0.5, 0.0)],
    ),
    "hard_restarts": (
        S.cosine_with_hard_restarts_schedule_with_warmup,
        [(0.1, 3, 8, 1), (0.2, 0, 9, 3), (0.3, 5, 5, 2)],
    ),
    "polynomial_decay": (
        S.polynomial_decay_schedule_with_warmup,
        [(0.1, 3, 8, 0.01, 0.5), (0.2, 0, 9, 0.0, 2.0), (0.3, 5, 5, 0.0, 0.0)],
    ),
    "inverse_sqrt": (S.inverse_sqrt, [(0.1, 3), (0.2, 0), (0.3, 9)]),
    "inverse_sqrt-timescale": (S.inverse_sqrt, [(0.1, 3, 1), (0.2, 0, 5), (0.3, 9, 2)]),
    "wsd": (
        lambda *numbers: S.wsd(*numbers[:4], warmup_type="1-sqrt", decay_type="1-sqrt", min_lr_ratio=numbers[4]),
        [(0.1, 3, 3, 9, 0.1), (0.2, 0, 0, 4, 0.0), (0.3, 4, 4, 8, 0.0)],
    ),
    "wsd-stable": (
        lambda lr, w, d, s: S.wsd(lr, w, d, num_stable_steps=s, warmup_type="cosine"),
        [(0.1, 3, 3, 3), (0.2, 0, 0, 4), (0.3, 4, 4, 0)],
    ),
    "join": (
        lambda lr, w, d: S.join([S.linear_warmup(lr, w), S.cosine_annealing(lr, d), S.constant(0.01)], [w, w + d]),
        [(0.1, 3, 5), (0.2, 0, 3), (0.3, 9, 1)],
    ),
    "product": (
        lambda lr, w, gamma: 2 * S.linear_warmup(1.0, w) * S.exponential_decay(lr, gamma),
        [(0.1, 3, 0.9), (0.2, 0, 1.0), (0.3, 9, 0.5)],
    ),
    "lambda_schedule": (
        lambda lr, k: S.lambda_schedule(lr, lambda step: 1 / (1 + step / k)),
        [(0.1, 3.0), (0.2, 1.0), (0.3, 9.0)],
    ),
}
EACH = pytest.mark.parametrize(("make", "lanes"), SHAPES.values(), ids=list(SHAPES))


def columns(lanes: list[tuple[float, ...]]) -> list[Tensor]:
    """The numbers as `experiments` gives them: int64 where whole, float64 otherwise, one entry a lane."""
    whole = [all(isinstance(number, int) for number in column) for column in zip(*lanes, strict=True)]
    kinds = [torch.int64 if is_whole else F64 for is_whole in whole]
    return [torch.tensor(column, dtype=kind) for column, kind in zip(zip(*lanes, strict=True), kinds, strict=True)]


def alone(make: Callable[..., S.Curve], lanes: list[tuple[float, ...]], step: int) -> Tensor:
    return torch.stack([make(*numbers)(step) for numbers in lanes])


@EACH
def test_lanes_equal_the_loop(make: Callable[..., S.Curve], lanes: list[tuple[float, ...]]) -> None:
    for step in STEPS:
        expected = alone(make, lanes, step)
        shared = vmap(lambda *numbers, step=step: make(*numbers)(step))(*columns(lanes))
        assert shared.dtype == F64
        assert (shared - expected).abs().max() < 1e-15
    steps = torch.tensor([2, 5, 9])  # lanes at different steps: one was skipped, say
    own = vmap(lambda step, *numbers: make(*numbers)(step))(steps, *columns(lanes))
    expected = torch.stack([make(*numbers)(int(step)) for step, numbers in zip(steps, lanes, strict=True)])
    assert (own - expected).abs().max() < 1e-15
    pointwise = make(*columns(lanes))(steps)  # without vmap: elementwise
    assert (pointwise - expected).abs().max() < 1e-15


@EACH
def test_gradients_are_finite(make: Callable[..., S.Curve], lanes: list[tuple[float, ...]]) -> None:
    every, jacobians = tuple(range(len(lanes[0]))), []
    for numbers in lanes:
        args = [torch.tensor(number, dtype=F64) for number in numbers]
        jacobians += jacrev(lambda *args: make(*args)(torch.tensor(STEPS)), argnums=every)(*args)
    assert all(part.isfinite().all() for part in jacobians)
    assert any((part != 0).any() for part in jacobians)


REAL = {  # numbers, step: away from jumps, where the derivative by differences is the derivative
    "linear": ((0.1, 0.3, 0.8, 5.5), 3),
    "polynomial": ((0.1, 9.5, 0.7), 3),
    "exponential_decay": ((0.1, 0.9), 3),
    "multistep": ((0.1, 2.5, 4.5, 0.5), 7),
    "cosine_annealing": ((0.1, 5.5, 0.01), 14),
    "inverse_sigmoid": ((1.0, 4.0), 6),
    "cosine_restarts": ((0.1, 3.2, 1.0, 0.01), 14),
    "one_cycle": ((0.1, 20.0, 0.3), 9),
    "three_phase": ((0.1, 20.0, 0.3), 8),
    "cyclic": ((0.01, 0.1, 3.3, 2.7, 0.9), 14),
    "linear_warmup": ((0.1, 8.5, 0.0, 0.2), 3),
    "linear_schedule_with_warmup": ((0.1, 3.5, 20.5), 9),
    "cosine_schedule_with_warmup": ((0.1, 3.5, 20.5, 0.7, 0.01), 9),
    "hard_restarts": ((0.1, 3.5, 20.5, 1.3), 9),
    "polynomial_decay": ((0.1, 3.5, 20.5, 0.01, 0.7), 9),
    "inverse_sqrt": ((0.1, 3.5), 9),
    "wsd": ((0.1, 3.5, 9.5, 20.5, 0.1), 14),
    "join": ((0.1, 3.5, 9.5), 9),
    "product": ((0.1, 12.5, 0.9), 9),
}


@pytest.mark.parametrize("name", REAL)
def test_gradients_are_right(name: str) -> None:
    numbers, step = REAL[name]
    args = tuple(torch.tensor(number, dtype=F64, requires_grad=True) for number in numbers)
    assert torch.autograd.gradcheck(lambda *args: SHAPES[name][0](*args)(step), args)


def test_gradient_of_the_warmup_length() -> None:
    lengths = torch.tensor([4.0, 8.0], dtype=F64)
    slope = vmap(torch.func.grad(lambda w: S.linear_schedule_with_warmup(1.0, w, 100)(2)))(lengths)
    assert torch.allclose(slope, -2 / lengths**2, rtol=1e-15)


def test_gradient_of_the_step() -> None:
    slope = torch.func.grad(S.linear_schedule_with_warmup(1.0, 4, 14))(torch.tensor([2.0, 9.0], dtype=F64).unbind()[1])
    assert slope == pytest.approx(-0.1)


@EACH
def test_compiles_without_recompiling(make: Callable[..., S.Curve], lanes: list[tuple[float, ...]]) -> None:
    batched = vmap(lambda step, *numbers: make(*numbers)(step), (None, *[0] * len(lanes[0])))
    compiled = torch.compile(batched, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in STEPS:
            found = compiled(torch.tensor(step), *columns(lanes))
            assert (found - alone(make, lanes, step)).abs().max() < 1e-15


def test_compiles_from_outside() -> None:
    schedules = [make(*lanes[0]) for make, lanes in SHAPES.values()] + [
        make(*columns(lanes)) for make, lanes in SHAPES.values()
    ]
    compiled = torch.compile(lambda step: [schedule(step) for schedule in schedules], fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in STEPS:
            found = compiled(torch.tensor(step))
            assert all((a - b(step)).abs().max() < 1e-15 for a, b in zip(found, schedules, strict=True))


def test_compiles_with_int_steps() -> None:
    schedules = [
        S.join([S.linear_warmup(0.1, 3), S.cosine_annealing(0.1, 5)], [3]),
        S.join([lambda t: 0.5, S.constant(0.1)], [3]),
        S.lambda_schedule(0.1, lambda t: 0.9**t),
        S.multistep(0.1, [2, 5]),
        S.cosine_restarts(0.1, 3, 2),
        S.wsd(0.1, 2, 4, num_stable_steps=5),
        S.exponential_decay(0.1, 0.9) * S.linear_warmup(1.0, 4),
    ]
    compiled = torch.compile(lambda step: [schedule(step) for schedule in schedules], fullgraph=True, backend="eager")
    for step in range(20):  # more than the recompilations that torch.compile puts up with
        assert all((a - b(step)).abs() < 1e-15 for a, b in zip(compiled(step), schedules, strict=True))


@pytest.mark.slow
def test_one_program_sweeps_several() -> None:
    names = ("linear_schedule_with_warmup", "multistep", "cosine_restarts", "join")
    chosen = [SHAPES[name] for name in names]

    def every(step: Tensor, *numbers: Any) -> list[Tensor]:
        return [make(*own)(step) for (make, _), own in zip(chosen, numbers, strict=True)]

    numbers = [columns(lanes) for _, lanes in chosen]
    compiled = torch.compile(vmap(every, (None, *[0] * len(numbers))), fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in STEPS:
            for found, (make, lanes) in zip(compiled(torch.tensor(step), *numbers), chosen, strict=True):
                assert (found - alone(make, lanes, step)).abs().max() < 1e-14  # the compiler's own cos and pow
