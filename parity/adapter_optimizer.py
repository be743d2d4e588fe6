"""``adapter.Optimizer`` and ``adapter.Scheduler`` in a classic loop, beside ``torch.optim`` in the same loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn, optim
from torch.optim import Optimizer, lr_scheduler

from functricks import adamw, adapter, chain, clip_by_global_norm, schedules, sgd
from parity import tasks
from parity.harness import Run, Technique, backward_of_cross_entropy, classic_loop
from parity.tasks import Task

LR, STEPS, MAX_NORM = 3e-3, 50, 0.5
Make = Callable[[nn.Module], Optimizer]


class Side(NamedTuple):
    """One side of a row: what the loop is given."""

    optimizer: Make
    scheduler: Callable[[Optimizer], Any] | None = None
    ready: Callable[[nn.Module], bool] = lambda model: True


def train(side: Side, task: Task) -> Run:
    return classic_loop(
        task, side.optimizer, backward_of_cross_entropy, ready=side.ready, make_scheduler=side.scheduler
    )


def clip(model: nn.Module) -> bool:
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return True


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """The body, and a head that learns ten times as fast."""
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 10 * LR}]


def by_torch(model: nn.Module) -> Optimizer:
    return optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=True)


def by_kernel(model: nn.Module) -> Optimizer:
    return adapter.Optimizer(model.named_parameters(), adamw, lr=LR, weight_decay=0.1)


def clipped(model: nn.Module) -> Optimizer:
    transform = chain(clip_by_global_norm(MAX_NORM, classic=True), adamw(LR, weight_decay=0.1))
    return adapter.Optimizer(model.named_parameters(), transform)


PAIRS = {
    "adapter: adamw": (Side(by_torch), Side(by_kernel)),
    "adapter: clip and adamw as one chain": (Side(by_torch, ready=clip), Side(clipped)),
    "adapter: groups": (
        Side(lambda model: optim.SGD(groups(model), lr=LR, momentum=0.9, fused=True)),
        Side(lambda model: adapter.Optimizer(groups(model), chain(sgd(LR, momentum=0.9)))),
    ),
    "adapter: scheduler": (
        Side(by_torch, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS)),
        Side(by_kernel, lambda optimizer: adapter.Scheduler(optimizer, schedules.cosine_annealing(LR, STEPS))),
    ),
    "adapter: torch's scheduler on a chain": (
        Side(by_torch, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, LR, total_steps=1000)),
        Side(
            lambda model: adapter.Optimizer(model.named_parameters(), chain(adamw(LR, weight_decay=0.1))),
            lambda optimizer: lr_scheduler.OneCycleLR(optimizer, LR, total_steps=1000),
        ),
    ),
    "adapter: a schedule as the rate": (
        Side(by_torch, lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.97)),
        Side(
            lambda model: adapter.Optimizer(
                model.parameters(), adamw(schedules.exponential_decay(LR, gamma=0.97), weight_decay=0.1)
            )
        ),
    ),
}

TECHNIQUES = [
    Technique(name, partial(train, classic), partial(train, ours), tasks.classes)
    for name, (classic, ours) in PAIRS.items()
]
