"""The adapter in a classic loop: hand-written loops and the usual recipe's classes, against adapter.Loop, FGM and PGD.

Both sides have an ``nn.Module`` and a ``torch.optim`` optimizer here; the first is written out, the second is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer, lr_scheduler

from functricks.adapter import FGM, PGD, LabelSmoothingCrossEntropy, Loop
from functricks.types import Loss
from parity import accumulation, adversarial, atomic_step, tasks, whole_recipe
from parity.adversarial import WHERE, fgm_attack, pgd_attack, whole
from parity.harness import Run, Technique, _values, backward_of_cross_entropy, classic_loop
from parity.tasks import Batch, Task

LR, MAX_NORM, WARMUP, SIZE = 1e-2, 0.3, 6, 4
Scheduler = lr_scheduler.LRScheduler


class Case(NamedTuple):
    name: str
    classic: Callable[[Task], Run]
    options: Callable[[nn.Module], dict[str, Any]]
    optimizer: Callable[[nn.Module], Optimizer]
    scheduler: Callable[[Optimizer], Scheduler] | None = None
    label_smoothing: float = 0.0
    micro_batch_size: int | None = None
    task: Callable[..., Task] = tasks.tokens


def adapted(case: Case, task: Task) -> Run:
    """Train with :class:`functricks.adapter.Loop`; a batch of the task is one window."""
    model = task.module()
    run = Run(_values(model))
    criterion = LabelSmoothingCrossEntropy(case.label_smoothing)
    optimizer = case.optimizer(model)
    scheduler = None if case.scheduler is None else case.scheduler(optimizer)

    def loss_fn(model: nn.Module, batch: Batch) -> Loss:
        return criterion.loss(model(batch[0]), batch[1])

    loop = Loop(model, loss_fn, optimizer, scheduler=scheduler, **case.options(model))
    for batch in task.batches:
        size = case.micro_batch_size or len(batch[0])
        for part in zip(*(leaf.split(size) for leaf in batch), strict=True):
            loop.step(part)
        loop.flush()
        run.saw((name, parameter.grad) for name, parameter in model.named_parameters())
        run.steps += 1
    run.end = _values(model)
    return run


def by_attack(make: Callable[[nn.Module], FGM | PGD], task: Task) -> Run:
    """Train with the attack alone, in a loop of one's own."""
    model = task.module()
    run = Run(_values(model))
    attack, optimizer = make(model), AdamW(model.parameters(), adversarial.LR)
    for tokens, labels in task.batches:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), labels).backward()
        with attack.attacked() as rounds:
            for _ in rounds if isinstance(attack, PGD) else range(1):
                F.cross_entropy(model(tokens), labels).backward()
        run.saw((name, parameter.grad) for name, parameter in model.named_parameters())
        optimizer.step()
        run.steps += 1
    run.end = _values(model)
    return run


def adamw(lr: float, model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr)


def warm_up(optimizer: Optimizer) -> Scheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))


def clipped_loop(task: Task) -> Run:
    def ready(model: nn.Module) -> bool:
        return math.isfinite(clip_grad_norm_(model.parameters(), MAX_NORM))

    return classic_loop(task, partial(adamw, LR), backward_of_cross_entropy, ready=ready, make_scheduler=warm_up)


def decaying(model: nn.Module) -> Optimizer:
    groups = [{"params": [p for p in model.parameters() if p.ndim >= 2]}]
    groups += [{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    return AdamW(groups, whole_recipe.LR, weight_decay=whole_recipe.DECAY)


def warm_up_and_cosine(optimizer: Optimizer) -> Scheduler:
    steps, warm = whole_recipe.STEPS, whole_recipe.WARMUP

    def factor(step: int) -> float:
        return step / warm if step < warm else max(0.0, 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm))))

    return lr_scheduler.LambdaLR(optimizer, factor)


def broken_schedule(optimizer: Optimizer) -> Scheduler:
    steps, warm = atomic_step.STEPS, atomic_step.WARMUP
    return lr_scheduler.LambdaLR(optimizer, lambda i: i / warm if i < warm else max(0.0, (steps - i) / (steps - warm)))


CASES = [
    Case("adapter loop", clipped_loop, lambda model: {"clip": MAX_NORM}, partial(adamw, LR), warm_up),
    Case(
        "adapter loop, accumulated over ignored tokens",
        partial(accumulation.classic, accumulation.CASES[2]),
        lambda model: {"accumulate": 9},  # more than there are: every batch ends with a flush
        partial(adamw, accumulation.LR),
        micro_batch_size=SIZE,
    ),
    Case(
        "adapter loop, steps that are not finite",
        atomic_step.classic,
        lambda model: {"clip": 1.0, "scaler": torch.amp.GradScaler("cpu", init_scale=4.0)},
        partial(adamw, atomic_step.LR),
        broken_schedule,
        task=atomic_step.task,
    ),
    Case(
        "adapter loop, whole recipe",
        whole_recipe.classic,
        lambda model: {
            "accumulate": 4,
            "clip": whole_recipe.MAX_NORM,
            "adversarial": FGM(model, whole_recipe.EPSILON, WHERE),
        },
        decaying,
        warm_up_and_cosine,
        whole_recipe.SMOOTHING,
        whole_recipe.SIZE,
    ),
]

ATTACKS: list[tuple[str, adversarial.Attack, Callable[[nn.Module], FGM | PGD]]] = [
    ("adapter fgm", fgm_attack(0.5, "embedding"), lambda model: FGM(model, 0.5, WHERE)),
    (
        "adapter fgm, two leaves",
        fgm_attack(0.3, "embedding", "hidden.weight"),
        lambda model: FGM(model, 0.3, [WHERE, "hidden.weight"]),
    ),
    ("adapter pgd, inside the ball", pgd_attack(1.0, 0.3, 3, "embedding"), lambda model: PGD(model, 1.0, WHERE)),
    ("adapter pgd, projected", pgd_attack(0.5, 0.3, 3, "embedding"), lambda model: PGD(model, 0.5, WHERE)),
]


def classic_attack(attack: adversarial.Attack, task: Task) -> Run:
    return classic_loop(task, partial(adamw, adversarial.LR), whole(attack))


TECHNIQUES = [Technique(case.name, case.classic, partial(adapted, case), case.task) for case in CASES]
TECHNIQUES += [
    Technique(name, partial(classic_attack, attack), partial(by_attack, make), tasks.tokens)
    for name, attack, make in ATTACKS
]
