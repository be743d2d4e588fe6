"""Learning-rate schedules: schedulers that step, against functions of the step.

HuggingFace's schedules are ``LambdaLR`` with a formula; the formulas are written out here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler

from functricks import schedules, sgd
from functricks.types import Params, Schedule, StepInfo
from parity import tasks
from parity.harness import (
    Run,
    Technique,
    backward_of_cross_entropy,
    classic_loop,
    functional_loop,
    gradient_of_cross_entropy,
)
from parity.tasks import Task

LR, MOMENTUM = 0.2, 0.5
STEPS = 40  # warm-ups, periods and milestones below are chosen for a run of this length


class Case(NamedTuple):
    name: str
    classic: Callable[[Optimizer], Any]
    functional: Schedule


def _optimizer(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), LR, MOMENTUM)


def classic(case: Case, task: Task) -> Run:
    return classic_loop(task, _optimizer, backward_of_cross_entropy, make_scheduler=case.classic)


def functional(case: Case, task: Task) -> Run:
    return functional_loop(task, gradient_of_cross_entropy(task), sgd(case.functional, MOMENTUM))


# --- the one with a memory -------------------------------------------------------------------------------------------

PLATEAU = {"factor": 0.5, "patience": 2, "cooldown": 1, "threshold": 1e-3}
PLATEAU_UP = {**PLATEAU, "mode": "max", "threshold_mode": "abs"}  # of a loss that falls: it reduces again and again


def classic_plateau(options: dict[str, Any], task: Task) -> Run:
    watched = task.batches[0]

    def advance(scheduler: lr_scheduler.ReduceLROnPlateau, model: nn.Module) -> None:
        with torch.no_grad():
            scheduler.step(F.cross_entropy(model(watched[0]), watched[1]))

    def make(optimizer: Optimizer) -> lr_scheduler.ReduceLROnPlateau:
        return lr_scheduler.ReduceLROnPlateau(optimizer, **options)

    return classic_loop(task, _optimizer, backward_of_cross_entropy, make_scheduler=make, advance=advance)


def functional_plateau(options: dict[str, Any], task: Task) -> Run:
    watched, grad_fn = task.batches[0], gradient_of_cross_entropy(task)
    plateau = schedules.reduce_on_plateau(**options)

    def observe(state: schedules.PlateauState, params: Params, info: StepInfo) -> schedules.PlateauState:
        return plateau.update(grad_fn(params, watched).loss, state)[1]

    return functional_loop(
        task,
        grad_fn,
        lambda state: sgd(state.lr, MOMENTUM),
        memory=plateau.init(LR),
        observe=observe,
    )


# --- HuggingFace's formulas ------------------------------------------------------------------------------------------


def by_formula(after: Callable[[float], float], warmup: int) -> Callable[[Optimizer], Any]:
    """``LambdaLR``: a linear warm-up, then ``after`` of the progress from 0 to 1."""

    def factor(step: int) -> float:
        return step / max(1, warmup) if step < warmup else after((step - warmup) / max(1, STEPS - warmup))

    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, factor)


def _wsd(step: int) -> float:
    if step < 5:
        return step / 5
    return 1.0 if step < 25 else max(0.0, 0.5 * (1 + math.cos(math.pi * (step - 25) / 10))) if step < 35 else 0.0


# --- pairs -----------------------------------------------------------------------------------------------------------


def of_pytorch(
    name: str, scheduler: Callable[..., Any], schedule: Schedule, *positional: Any, **arguments: Any
) -> Case:
    return Case(name, lambda optimizer: scheduler(optimizer, *positional, **arguments), schedule)


def _one_cycle(name: str, **arguments: Any) -> Case:
    return Case(
        name,
        lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer, max_lr=LR, total_steps=STEPS + 1, cycle_momentum=False, **arguments
        ),
        schedules.one_cycle(LR, total_steps=STEPS + 1, **arguments),
    )


def _cyclic(mode: str, gamma: float = 1.0) -> Case:
    return Case(
        f"cyclic, {mode}",
        lambda optimizer: lr_scheduler.CyclicLR(
            optimizer,
            base_lr=0.05,
            max_lr=LR,
            step_size_up=4,
            step_size_down=7,
            mode=mode,
            gamma=gamma,
            cycle_momentum=False,
        ),
        schedules.cyclic(0.05, LR, step_size_up=4, step_size_down=7, mode=mode, gamma=gamma),
    )


def _warm_then_cosine(optimizer: Optimizer) -> Any:
    children = [
        lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5),
        lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - 5),
    ]
    return lr_scheduler.SequentialLR(optimizer, children, milestones=[5])


def _chained(optimizer: Optimizer) -> Any:
    children = [
        lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=10),
        lr_scheduler.ExponentialLR(optimizer, gamma=0.95),
    ]
    return lr_scheduler.ChainedScheduler(children)


CASES = [
    of_pytorch(
        "step_decay", lr_scheduler.StepLR, schedules.step_decay(LR, step_size=7, gamma=0.5), step_size=7, gamma=0.5
    ),
    of_pytorch(
        "multistep",
        lr_scheduler.MultiStepLR,
        schedules.multistep(LR, [5, 20], gamma=0.3),
        milestones=[5, 20],
        gamma=0.3,
    ),
    of_pytorch(
        "multistep, repeated and unsorted",
        lr_scheduler.MultiStepLR,
        schedules.multistep(LR, [20, 5, 5], gamma=0.5),
        milestones=[20, 5, 5],
        gamma=0.5,
    ),
    of_pytorch(
        "exponential_decay", lr_scheduler.ExponentialLR, schedules.exponential_decay(LR, gamma=0.95), gamma=0.95
    ),
    of_pytorch(
        "cosine_annealing, past T_max",
        lr_scheduler.CosineAnnealingLR,
        schedules.cosine_annealing(LR, T_max=25, eta_min=0.01),
        T_max=25,
        eta_min=0.01,
    ),
    of_pytorch(
        "cosine_restarts",
        lr_scheduler.CosineAnnealingWarmRestarts,
        schedules.cosine_restarts(LR, T_0=5, T_mult=2),
        T_0=5,
        T_mult=2,
    ),
    of_pytorch(
        "cosine_restarts, equal cycles",
        lr_scheduler.CosineAnnealingWarmRestarts,
        schedules.cosine_restarts(LR, T_0=6, eta_min=0.01),
        T_0=6,
        eta_min=0.01,
    ),
    of_pytorch(
        "polynomial",
        lr_scheduler.PolynomialLR,
        schedules.polynomial(LR, total_iters=30, power=2.0),
        total_iters=30,
        power=2.0,
    ),
    of_pytorch(
        "linear", lr_scheduler.LinearLR, schedules.linear(LR, 0.2, 1.0, total_iters=9), start_factor=0.2, total_iters=9
    ),
    of_pytorch(
        "constant", lr_scheduler.ConstantLR, schedules.constant(LR, 0.25, total_iters=6), factor=0.25, total_iters=6
    ),
    of_pytorch(
        "lambda_schedule",
        lr_scheduler.LambdaLR,
        schedules.lambda_schedule(LR, lambda step: 1 / (1 + 0.1 * step)),
        lambda step: 1 / (1 + 0.1 * step),
    ),
    of_pytorch(
        "exponential_decay, as multiplicative",
        lr_scheduler.MultiplicativeLR,
        schedules.exponential_decay(LR, gamma=0.9),
        lambda step: 0.9,
    ),
    _one_cycle("one_cycle"),
    _one_cycle("one_cycle, linear", anneal_strategy="linear"),
    _one_cycle("one_cycle, three phases", three_phase=True),
    _cyclic("triangular"),
    _cyclic("triangular2"),
    _cyclic("exp_range", 0.97),
    Case(
        "join: warm-up, then cosine",
        _warm_then_cosine,
        schedules.join([schedules.linear(LR, 0.1, total_iters=5), schedules.cosine_annealing(LR, STEPS - 5)], [5]),
    ),
    Case(
        "product of schedules",
        _chained,
        schedules.constant(LR, 0.5, total_iters=10) * schedules.exponential_decay(1.0, gamma=0.95),
    ),
    Case(
        "constant_schedule_with_warmup",
        by_formula(lambda done: 1.0, 8),
        schedules.constant_schedule_with_warmup(LR, 8),
    ),
    Case(
        "linear_schedule_with_warmup",
        by_formula(lambda done: max(0.0, 1 - done), 8),
        schedules.linear_schedule_with_warmup(LR, 8, STEPS),
    ),
    Case(
        "cosine_schedule_with_warmup",
        by_formula(lambda done: max(0.0, 0.5 * (1 + math.cos(math.pi * done))), 8),
        schedules.cosine_schedule_with_warmup(LR, 8, STEPS),
    ),
    Case(
        "cosine_with_hard_restarts_schedule_with_warmup",
        by_formula(lambda done: max(0.0, 0.5 * (1 + math.cos(math.pi * (3 * done % 1)))) if done < 1 else 0.0, 8),
        schedules.cosine_with_hard_restarts_schedule_with_warmup(LR, 8, STEPS, num_cycles=3),
    ),
    Case(
        "polynomial_decay_schedule_with_warmup",
        by_formula(lambda done: (0.01 + (LR - 0.01) * (1 - min(done, 1)) ** 2) / LR, 8),
        schedules.polynomial_decay_schedule_with_warmup(LR, 8, STEPS, lr_end=0.01, power=2.0),
    ),
    Case(
        "inverse_sqrt",
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / 8 if step < 8 else (8 / step) ** 0.5),
        schedules.inverse_sqrt(LR, 8),
    ),
    Case(
        "wsd",
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, _wsd),
        schedules.wsd(LR, 5, 10, num_stable_steps=20),
    ),
]

task = partial(tasks.classes, steps=STEPS)
TECHNIQUES = [Technique(case.name, partial(classic, case), partial(functional, case), task) for case in CASES]
TECHNIQUES += [
    Technique(name, partial(classic_plateau, options), partial(functional_plateau, options), task)
    for name, options in (("reduce_on_plateau", PLATEAU), ("reduce_on_plateau, max, abs", PLATEAU_UP))
]
