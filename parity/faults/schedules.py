"""Learning-rate schedules: what goes wrong in the usual recipes."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

from functricks import (
    schedules,
)
from parity.faults.registry import fault, show


@fault(
    "decay by hand",
    "`if step % 50 == 0: lr *= 0.1`",
    "step 0 fires too, so the rate is one decay ahead of the plan",
    "`step_decay` is a function of the step",
)
def decay_at_zero() -> str:
    lr, seen = 1.0, []
    for step in range(51):
        if step % 50 == 0:
            lr *= 0.1
        seen.append(lr)
    ours = schedules.step_decay(1.0, step_size=50, gamma=0.1)
    return f"rate at steps 0 and 50: {show(seen[0], seen[50])} instead of {show(ours(0), ours(50))}"


@fault(
    "exponential decay by hand",
    "`lr = lr * gamma ** step`",
    "the decay is applied to what has decayed already",
    "`exponential_decay` starts from the first rate",
)
def compounded_decay() -> str:
    lr = 1.0
    for step in range(4):
        lr = lr * 0.5**step
    return f"{show(lr)} instead of {show(schedules.exponential_decay(1.0, gamma=0.5)(3))} at step 3, γ = 0.5"


@fault(
    "cosine annealing",
    "train past `T_max`",
    "the rate rises again, up to where it began",
    "the same, documented; `join([cosine_annealing(...), constant(low)], [T_max])` stays down",
)
def cosine_rises() -> str:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, seen = lr_scheduler.CosineAnnealingLR(optimizer, T_max=10), [1.0]
    for _ in range(20):
        optimizer.step()
        scheduler.step()
        seen.append(scheduler.get_last_lr()[0])
    joined = schedules.join([schedules.cosine_annealing(1.0, 10), schedules.constant(0.0)], [10])
    rates = show(*(round(seen[step], 6) for step in (10, 15, 20)))
    return f"T_max = 10: {rates} at steps 10, 15, 20; joined {show(joined(20))}"


@fault(
    "warm-up",
    "`LambdaLR` with `step / warmup`",
    "the first update has rate 0: a batch is wasted, though momentum and step counts move",
    "`linear_warmup(first_step=1)` names the other convention",
)
def warm_up_from_zero() -> str:
    usual, other = schedules.linear_warmup(1.0, 4), schedules.linear_warmup(1.0, 4, first_step=1)
    return f"first rates {show(usual(torch.arange(3)))}; with `first_step=1` {show(other(torch.arange(3)))}"


@fault(
    "schedule under accumulation",
    "`scheduler.step()` after every micro-batch",
    "the schedule runs k times too fast",
    "a schedule's step counts applied updates",
)
def schedule_per_micro_batch() -> str:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, usual = lr_scheduler.StepLR(optimizer, 2, 0.5), []
    for micro_batch in range(8):
        if micro_batch % 2 == 1:
            usual.append(scheduler.get_last_lr()[0])
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step()
    ours = schedules.step_decay(1.0, step_size=2, gamma=0.5)(torch.arange(4))
    return f"k = 2, halved every 2 updates: {show(*usual)} instead of {show(ours)}"


@fault(
    "reduce on plateau",
    "read `patience=5` as the fifth bad epoch",
    "the sixth bad one in a row reduces: after the first metric that is call 7",
    "PyTorch's rule to the bit, stated in the docstring",
)
def plateau_patience() -> str:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    usual, ours = lr_scheduler.ReduceLROnPlateau(optimizer, patience=5), schedules.reduce_on_plateau(patience=5)
    state, calls = ours.init(1.0), {"PyTorch": 0, "here": 0}
    for _ in range(10):
        calls["PyTorch"] += usual.get_last_lr() == [1.0]
        calls["here"] += int(state.lr == 1)
        usual.step(0.5)
        _, state = ours.update(0.5, state)
    return f"reduced at call {calls['PyTorch']}, here {calls['here']}"


@fault(
    "reduce on plateau",
    "a relative threshold on a metric that is negative, such as a log-likelihood",
    "`best * (1 - threshold)` is worse than the best, so a worse metric counts as an improvement and becomes the best",
    '`relative_to="magnitude"`',
)
def plateau_negative() -> str:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    usual = lr_scheduler.ReduceLROnPlateau(optimizer, threshold=0.01)
    plateau = schedules.reduce_on_plateau(threshold=0.01, relative_to="magnitude")
    state = plateau.init(1.0)
    for metric in (-1.0, -0.995):
        usual.step(metric)
        _, state = plateau.update(metric, state)
    return f"after −1 and −0.995 the best is {show(usual.best)}; by magnitude {show(state.best)}"
