"""Schedules against their oracles over whole runs: torch.optim.lr_scheduler and HuggingFace's schedules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler as L

from functricks import schedules as S

STEPS = 10_000
RUN = 1e-12  # of the largest value of the run

LRS = [pytest.param(0.1, id="float"), pytest.param(torch.tensor(0.1, dtype=torch.float64), id="tensor")]


def classic(make: Callable[[torch.optim.Optimizer], Any], lr: float | Tensor, steps: int = STEPS) -> Tensor:
    """The rate that each of the updates 0, 1, ... sees in a classic loop."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=copy.deepcopy(lr), momentum=0.9)
    scheduler = make(optimizer)
    optimizer.step()  # or the first scheduler.step() warns
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        if len(rates) < steps:
            scheduler.step()
    return torch.tensor(rates, dtype=torch.float64)


def same(ours: S.Curve, theirs: Tensor, tolerance: float = RUN) -> None:
    """Compare a whole run, evaluated in one call, and some of its steps alone."""
    steps = len(theirs)
    values = ours(torch.arange(steps))
    largest = theirs.abs().max()
    assert largest > 0
    assert values.dtype == torch.float64
    worst = (values - theirs).abs().max() / largest
    assert worst <= tolerance, f"{worst:.2e}"
    for step in {0, 1, 2, 7, steps // 3, steps - 1}:
        alone = ours(step)
        assert alone.shape == ()
        assert (alone - theirs[step]).abs() <= tolerance * largest


TORCH = {
    "ConstantLR": (
        lambda o: L.ConstantLR(o, factor=1 / 3, total_iters=5),
        lambda lr: S.constant(lr, factor=1 / 3, total_iters=5),
    ),
    "LinearLR": (
        lambda o: L.LinearLR(o, start_factor=0.01, end_factor=0.9, total_iters=7000),
        lambda lr: S.linear(lr, 0.01, 0.9, 7000),
    ),
    "LinearLR-default": (L.LinearLR, S.linear),
    "PolynomialLR": (
        lambda o: L.PolynomialLR(o, total_iters=9000, power=0.9),
        lambda lr: S.polynomial(lr, total_iters=9000, power=0.9),
    ),
    "PolynomialLR-square": (
        lambda o: L.PolynomialLR(o, total_iters=STEPS, power=2.0),
        lambda lr: S.polynomial(lr, total_iters=STEPS, power=2.0),
    ),
    "ExponentialLR": (lambda o: L.ExponentialLR(o, 0.9995), lambda lr: S.exponential_decay(lr, 0.9995)),
    "StepLR": (lambda o: L.StepLR(o, 30, 0.98), lambda lr: S.step_decay(lr, 30, 0.98)),
    "MultiStepLR": (
        lambda o: L.MultiStepLR(o, [1, 300, 5000, 9999], 0.5),
        lambda lr: S.multistep(lr, [1, 300, 5000, 9999], 0.5),
    ),
    "CosineAnnealingLR": (
        lambda o: L.CosineAnnealingLR(o, STEPS, eta_min=0.003),
        lambda lr: S.cosine_annealing(lr, STEPS, eta_min=0.003),
    ),
    "CosineAnnealingWarmRestarts": (
        lambda o: L.CosineAnnealingWarmRestarts(o, 7, 1, eta_min=0.01),
        lambda lr: S.cosine_restarts(lr, 7, 1, eta_min=0.01),
    ),
    "CosineAnnealingWarmRestarts-2": (
        lambda o: L.CosineAnnealingWarmRestarts(o, 10, 2),
        lambda lr: S.cosine_restarts(lr, 10, 2),
    ),
    "CosineAnnealingWarmRestarts-3": (
        lambda o: L.CosineAnnealingWarmRestarts(o, 1, 3),
        lambda lr: S.cosine_restarts(lr, 1, 3),
    ),
    "CyclicLR": (
        lambda o: L.CyclicLR(o, 0.01, 0.1, step_size_up=37, step_size_down=111),
        lambda lr: S.cyclic(0.01, lr, 37, 111),
    ),
    "CyclicLR-tiny": (
        lambda o: L.CyclicLR(o, 0.01, 0.1, step_size_up=1, step_size_down=2),
        lambda lr: S.cyclic(0.01, lr, 1, 2),
    ),
    "CyclicLR-sawtooth": (
        lambda o: L.CyclicLR(o, 0.01, 0.1, step_size_up=9, step_size_down=0),
        lambda lr: S.cyclic(0.01, lr, 9, 0),
    ),
    "CyclicLR-triangular2": (
        lambda o: L.CyclicLR(o, 0.01, 0.1, step_size_up=500, mode="triangular2"),
        lambda lr: S.cyclic(0.01, lr, 500, mode="triangular2"),
    ),
    "CyclicLR-exp_range": (
        lambda o: L.CyclicLR(o, 0.01, 0.1, step_size_up=100, mode="exp_range", gamma=0.9994),
        lambda lr: S.cyclic(0.01, lr, 100, mode="exp_range", gamma=0.9994),
    ),
    "CyclicLR-scale_fn": (
        lambda o: L.CyclicLR(o, 0.01, 0.1, step_size_up=100, scale_fn=lambda n: 1 / (5 ** (n * 0.0001))),
        lambda lr: S.cyclic(0.01, lr, 100, scale_fn=lambda n: 1 / (5 ** (n * 0.0001))),
    ),
    "CyclicLR-iterations": (
        lambda o: L.CyclicLR(o, 0.01, 0.1, step_size_up=99, scale_fn=lambda t: 0.9999**t, scale_mode="iterations"),
        lambda lr: S.cyclic(0.01, lr, 99, scale_fn=lambda t: 0.9999**t, scale_mode="iterations"),
    ),
    "SequentialLR": (
        lambda o: L.SequentialLR(
            o,
            [L.LinearLR(o, 0.1, total_iters=500), L.CosineAnnealingLR(o, 5000), L.ExponentialLR(o, 0.999)],
            [500, 5500],
        ),
        lambda lr: S.join(
            [S.linear(lr, 0.1, total_iters=500), S.cosine_annealing(lr, 5000), S.exponential_decay(lr, 0.999)],
            [500, 5500],
        ),
    ),
    "ChainedScheduler": (
        lambda o: L.ChainedScheduler(
            [L.ConstantLR(o, 0.1, 20), L.ExponentialLR(o, 0.9995), L.StepLR(o, 1000, 0.7)], optimizer=o
        ),
        lambda lr: S.constant(1.0, 0.1, 20) * S.exponential_decay(lr, 0.9995) * S.step_decay(1.0, 1000, 0.7),
    ),
    "LambdaLR": (
        lambda o: L.LambdaLR(o, lambda epoch: 0.9997**epoch),
        lambda lr: S.lambda_schedule(lr, lambda epoch: 0.9997**epoch),
    ),
    "MultiplicativeLR": (
        lambda o: L.MultiplicativeLR(o, lambda epoch: 0.9995),
        lambda lr: S.exponential_decay(lr, 0.9995),
    ),
}


@pytest.mark.parametrize("lr", LRS)
@pytest.mark.parametrize("name", TORCH)
def test_torch(name: str, lr: float | Tensor) -> None:
    theirs, ours = TORCH[name]
    if name.startswith("CyclicLR"):
        assert isinstance(
            theirs(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)), L.CyclicLR
        )
    same(ours(lr), classic(theirs, lr))


@pytest.mark.parametrize("lr", LRS)
@pytest.mark.parametrize("three_phase", [False, True])
@pytest.mark.parametrize("anneal", ["cos", "linear"])
@pytest.mark.parametrize("pct_start", [0.0, 0.3, 0.4999, 1.0])
def test_one_cycle(pct_start: float, anneal: str, three_phase: bool, lr: float | Tensor) -> None:
    steps = STEPS if pct_start == 0.3 else 1000
    options = {"pct_start": pct_start, "anneal_strategy": anneal, "three_phase": three_phase, "div_factor": 20.0}
    theirs = classic(lambda o: L.OneCycleLR(o, 0.1, total_steps=steps, **options), lr, steps)
    same(S.one_cycle(lr, steps, **options), theirs)


def test_momentum_of_cycles_is_a_second_schedule() -> None:
    def momenta(make: Callable[[torch.optim.Optimizer], Any]) -> Tensor:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        scheduler, values = make(optimizer), []
        optimizer.step()
        for _ in range(200):
            values.append(optimizer.param_groups[0]["momentum"])
            if len(values) < 200:
                scheduler.step()
        return torch.tensor(values, dtype=torch.float64)

    one = S.one_cycle(0.85, 200, div_factor=0.85 / 0.95, final_div_factor=1.0)
    same(one, momenta(lambda o: L.OneCycleLR(o, 0.1, total_steps=200)))
    same(S.cyclic(0.9, 0.8, 30), momenta(lambda o: L.CyclicLR(o, 0.01, 0.1, step_size_up=30)))


@pytest.mark.parametrize("lr", LRS)
@pytest.mark.parametrize("t_max", [1, 3, 50, 1000])
def test_cosine_annealing_past_its_end(t_max: int, lr: float | Tensor) -> None:
    theirs = classic(lambda o: L.CosineAnnealingLR(o, t_max, eta_min=0.01), lr)
    same(S.cosine_annealing(lr, t_max, eta_min=0.01), theirs, 1e-11)  # torch's recursion drifts


def test_cosine_annealing_does_not_drift() -> None:
    t_max = 7777
    theirs = classic(lambda o: L.CosineAnnealingLR(o, t_max, eta_min=0.01), 0.1)
    exact = [0.01 + 0.09 * (1 + math.cos(math.pi * (step % (2 * t_max)) / t_max)) / 2 for step in range(STEPS)]
    same(S.cosine_annealing(0.1, t_max, eta_min=0.01), torch.tensor(exact, dtype=torch.float64), 1e-15)
    with pytest.raises(AssertionError):  # torch loses five digits where its recursion divides by almost nothing
        same(S.cosine_annealing(0.1, t_max, eta_min=0.01), theirs, 1e-11)


def test_multiplicative_with_any_factor() -> None:
    def factor(step: int) -> float:
        return 0.99 + 0.01 * math.sin(step)

    theirs = classic(lambda o: L.MultiplicativeLR(o, factor), 0.1, 500)
    ours = S.lambda_schedule(0.1, lambda step: math.prod(map(factor, range(1, step + 1))))
    values = torch.stack([ours(step) for step in range(500)])
    assert (values - theirs).abs().max() <= RUN * theirs.max()


def test_lambda_gets_ints_for_ints() -> None:
    table = [1.0, 0.5, 0.25]
    theirs = classic(lambda o: L.LambdaLR(o, lambda step: table[min(step, 2)]), 0.1, 5)
    ours = S.lambda_schedule(0.1, lambda step: table[min(step, 2)])
    assert torch.equal(torch.stack([ours(step) for step in range(5)]), theirs)
    joined = S.join([S.constant(0.1), ours * 2], [10])
    assert joined(11) == 0.1


def test_comparison_notices_a_step_and_a_digit() -> None:
    theirs = classic(lambda o: L.StepLR(o, 30, 0.98), 0.1, 1000)
    for wrong in (S.step_decay(0.1, 31, 0.98), S.step_decay(0.1 * (1 + 3 * RUN), 30, 0.98)):
        with pytest.raises(AssertionError):
            same(wrong, theirs)


def hugging_face(name: str) -> Callable[..., Any]:
    return getattr(pytest.importorskip("transformers.optimization"), f"get_{name}")


SPANS = [(0, STEPS - 100), (500, STEPS - 100), (1, STEPS), (STEPS - 1, STEPS)]


@pytest.mark.parametrize("lr", LRS)
@pytest.mark.parametrize(("warmup", "total"), SPANS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear_schedule_with_warmup", {}),
        ("cosine_schedule_with_warmup", {}),
        ("cosine_schedule_with_warmup", {"num_cycles": 1.5}),
        ("cosine_with_hard_restarts_schedule_with_warmup", {}),
        ("cosine_with_hard_restarts_schedule_with_warmup", {"num_cycles": 3}),
        ("polynomial_decay_schedule_with_warmup", {}),
        ("polynomial_decay_schedule_with_warmup", {"lr_end": 0.01, "power": 2.5}),
    ],
)
def test_hugging_face(name: str, options: dict[str, Any], warmup: int, total: int, lr: float | Tensor) -> None:
    theirs = classic(lambda o: hugging_face(name)(o, warmup, total, **options), 0.1)
    same(getattr(S, name)(lr, warmup, total, **options), theirs)


@pytest.mark.parametrize("lr", LRS)
@pytest.mark.parametrize("warmup", [0, 1, 500])
def test_hugging_face_without_an_end(warmup: int, lr: float | Tensor) -> None:
    theirs = classic(lambda o: hugging_face("constant_schedule_with_warmup")(o, warmup), 0.1)
    same(S.constant_schedule_with_warmup(lr, warmup), theirs)
    same(S.constant_schedule(lr), classic(hugging_face("constant_schedule"), 0.1))
    for timescale in (None, 3, 2000):
        theirs = classic(lambda o, t=timescale: hugging_face("inverse_sqrt_schedule")(o, warmup, t), 0.1)
        same(S.inverse_sqrt_schedule(lr, warmup, timescale), theirs)


@pytest.mark.parametrize("kinds", [("linear", "cosine"), ("cosine", "1-sqrt"), ("1-sqrt", "linear")])
@pytest.mark.parametrize(("warmup", "decay", "total"), [(500, 2000, 9000), (0, 1, 5000), (100, 0, 5000), (0, 0, 0)])
def test_hugging_face_wsd(kinds: tuple[str, str], warmup: int, decay: int, total: int) -> None:
    options = {"warmup_type": kinds[0], "decay_type": kinds[1], "min_lr_ratio": 0.1}
    theirs = classic(lambda o: hugging_face("wsd_schedule")(o, warmup, decay, total, **options), 0.1)
    same(S.wsd_schedule(0.1, warmup, decay, total, **options), theirs)
    stable = total - warmup - decay
    same(S.wsd(torch.tensor(0.1, dtype=torch.float64), warmup, decay, None, stable, **options), theirs)


@pytest.mark.parametrize("warmup", [0, 300])
def test_hugging_face_cosine_with_a_floor(warmup: int) -> None:
    make = hugging_face("cosine_with_min_lr_schedule_with_warmup")
    theirs = classic(lambda o: make(o, warmup, STEPS, min_lr=0.01), 0.1)
    same(S.cosine_schedule_with_warmup(0.1, warmup, STEPS, min_lr=0.01), theirs)


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_hard_restarts"])
def test_hugging_face_with_nothing_after_the_warmup(name: str) -> None:
    name = f"{name}_schedule_with_warmup"
    same(getattr(S, name)(0.1, 20, 20), classic(lambda o: hugging_face(name)(o, 20, 20), 0.1, 60))


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_hard_restarts", "polynomial_decay"])
def test_hugging_face_with_fewer_steps_than_the_warmup(name: str) -> None:
    name = f"{name}_schedule_with_warmup"
    theirs = classic(lambda o: hugging_face(name)(o, 20, 10), 0.1, 60)
    same(getattr(S, name)(torch.tensor(0.1, dtype=torch.float64), torch.tensor(20), torch.tensor(10)), theirs)


def test_hard_restarts_start_whole_where_hugging_face_slips() -> None:
    name, cycles = "cosine_with_hard_restarts_schedule_with_warmup", 22
    theirs = classic(lambda o: hugging_face(name)(o, 0, cycles * 10, num_cycles=cycles), 1.0, cycles * 10)
    starts = S.cosine_with_hard_restarts_schedule_with_warmup(1.0, 0, cycles * 10, cycles)(
        torch.arange(0, cycles * 10, 10)
    )
    assert torch.equal(starts, torch.ones_like(starts))
    assert theirs[::10].min() < 1e-12  # 22 * (15 / 22) rounds to less than 15
