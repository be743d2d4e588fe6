"""What a module changes by itself: BatchNorm's running statistics and dropout's generator, against a carry.

In the functional version both are values that go through every evaluation. So the classic version sees the same: each
forward pass, those of an attack or of a micro-batch included, moves the statistics and draws the next mask; and a step
that is skipped has to put the statistics back.

The classic dropout takes its masks from the same key. Which mask a key gives is learned from the library as a user
sees it: from a stack of identities with dropout at the same path, applied to ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD

from functricks import accumulate, fgm, gradient, losses, random, sgd, supervised, supervised_carry
from functricks import functional as pure
from functricks.types import GradFn
from parity import atomic_step, tasks
from parity.adversarial import Backward, accumulated, fgm_attack, whole
from parity.harness import Run, Technique, classic_loop, functional_loop
from parity.tasks import CLASSES, FEATURES, HIDDEN, Task

LR, MOMENTUM, RATE, SEED = 0.05, 0.5, 0.4, 3


def network(dropout: Callable[[float], nn.Module] = nn.Dropout, rate: float = 0.0) -> nn.Module:
    """BatchNorm, then dropout; no bias before BatchNorm, which would take it out again."""
    first, last = nn.Linear(FEATURES, HIDDEN, bias=False), nn.Linear(HIDDEN, CLASSES)
    return nn.Sequential(first, nn.BatchNorm1d(HIDDEN), nn.Tanh(), dropout(rate), last)


class ClassicDropout(nn.Module):
    """Dropout with a generator of its own, which every forward pass in training moves on."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.key = random.key(SEED)
        self.masks = pure(nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity(), nn.Dropout(rate)))

    def forward(self, x: Tensor) -> Tensor:
        self.key, key = random.split(self.key).unbind()
        mask, _ = self.masks.apply({}, {}, torch.ones_like(x), key=key)
        return x * mask


class Case(NamedTuple):
    name: str
    classic: Backward
    functional: Callable[[GradFn], GradFn]
    rate: float = 0.0
    task: Callable[..., Task] = tasks.classes


def classic(case: Case, task: Task) -> Run:
    before: dict[str, Tensor] = {}

    def backward(model: nn.Module, batch: tasks.Batch) -> None:
        before.update({name: buffer.clone() for name, buffer in model.named_buffers()})
        case.classic(model, batch)

    def ready(model: nn.Module) -> bool:
        finite = all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
        for name, buffer in model.named_buffers():
            if not finite:
                buffer.copy_(before[name])
        return finite

    return classic_loop(task, lambda model: SGD(model.parameters(), LR, MOMENTUM), backward, ready=ready)


def functional(case: Case, task: Task) -> Run:
    model = pure(network(nn.Dropout, case.rate).to(next(task.prototype.parameters()).dtype))
    loss_fn = supervised(model, losses.cross_entropy)
    return functional_loop(
        task,
        case.functional(gradient(loss_fn, has_carry=True, has_metrics=True)),
        sgd(LR, MOMENTUM),
        carry=supervised_carry(model, random.key(SEED)),
        buffers_of=lambda carry: carry.buffers,
    )


def plain(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    loss().backward()


def broken(dtype: torch.dtype, steps: int = atomic_step.STEPS, *, rate: float = 0.0) -> Task:
    """Batches of which some hold an infinite feature."""
    return atomic_step.spoil(with_network(dtype, steps, rate=rate))


def with_network(dtype: torch.dtype, steps: int = 40, *, rate: float = 0.0) -> Task:
    return tasks.classes(dtype, steps, network=partial(network, ClassicDropout, rate) if rate else network)


CASES = [
    Case("batch norm", whole(plain), lambda grad_fn: grad_fn, task=with_network),
    Case("batch norm, accumulated", accumulated(plain, 5), partial(accumulate, micro_batch_size=5), task=with_network),
    Case(
        "batch norm, fgm",
        whole(fgm_attack(0.3, "0.weight")),
        partial(fgm, epsilon=0.3, where="0.weight"),
        task=with_network,
    ),
    Case("batch norm, steps that are not finite", whole(plain), lambda grad_fn: grad_fn, task=broken),
    Case("dropout", whole(plain), lambda grad_fn: grad_fn, RATE, partial(with_network, rate=RATE)),
    Case(
        "dropout, batch norm, fgm of every micro-batch, accumulated",
        accumulated(fgm_attack(0.3, "0.weight"), 5),
        lambda grad_fn: accumulate(fgm(grad_fn, 0.3, where="0.weight"), micro_batch_size=5),
        RATE,
        partial(with_network, rate=RATE),
    ),
]

TECHNIQUES = [Technique(case.name, partial(classic, case), partial(functional, case), case.task) for case in CASES]
