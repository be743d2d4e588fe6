"""A step whose gradient is not finite is skipped: by hand, against :func:`functricks.train_step`.

Skipping the optimizer alone is the usual recipe, and leaves the schedule running; the classic version here skips both.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, lr_scheduler

from functricks import adamw, chain, clip_by_global_norm
from functricks.schedules import linear_schedule_with_warmup
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

LR, WARMUP, STEPS = 1e-2, 6, 40
BROKEN = (0, 3, 4, 17)  # these batches hold an infinite feature


def spoil(whole: Task) -> Task:
    """Put an infinite feature into some of the batches."""
    for step in BROKEN:
        if step < len(whole.batches):
            whole.batches[step][0][1, 2] = torch.inf
    return whole


def task(dtype: torch.dtype, steps: int = STEPS) -> Task:
    return spoil(tasks.classes(dtype, steps))


def classic(task: Task) -> Run:
    def ready(model: nn.Module) -> bool:
        return bool(torch.isfinite(clip_grad_norm_(model.parameters(), 1.0)))

    def factor(step: int) -> float:
        return step / WARMUP if step < WARMUP else max(0.0, (STEPS - step) / (STEPS - WARMUP))

    return classic_loop(
        task,
        lambda model: AdamW(model.parameters(), LR),
        backward_of_cross_entropy,
        ready=ready,
        make_scheduler=lambda optimizer: lr_scheduler.LambdaLR(optimizer, factor),
    )


def functional(task: Task) -> Run:
    schedule = linear_schedule_with_warmup(LR, WARMUP, STEPS)
    return functional_loop(
        task, gradient_of_cross_entropy(task), chain(clip_by_global_norm(1.0, classic=True), adamw(schedule))
    )


TECHNIQUES = [Technique("train_step, steps that are not finite", classic, functional, task)]
