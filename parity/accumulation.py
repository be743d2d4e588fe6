"""Gradient accumulation: one division by the weight of the whole batch, against :func:`functricks.accumulate`.

The usual classic version averages the means of the micro-batches, which is wrong as soon as they weigh differently; the
one here adds up sums and divides by the weight of all micro-batches together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from functricks import accumulate, adamw, gradient, losses
from functricks.types import GradFn, Loss
from parity import tasks
from parity.harness import Run, Technique, classic_loop, functional_loop
from parity.tasks import IGNORED, Batch, Net, Task

LR = 3e-3


class Case(NamedTuple):
    name: str
    size: int  # rows a micro-batch
    functional: Callable[[GradFn], GradFn]
    task: Callable[..., Task] = tasks.tokens
    class_weight: tuple[float, ...] | None = None

    def weight(self, like: Tensor) -> Tensor | None:
        return None if self.class_weight is None else torch.tensor(self.class_weight, dtype=like.dtype)


def classic(case: Case, task: Task) -> Run:
    def backward(model: nn.Module, batch: Batch) -> None:
        inputs, targets = batch
        weight = case.weight(next(model.parameters()))
        kept = targets[targets != IGNORED]
        total = len(kept) if weight is None else weight[kept].sum()
        for rows, labels in zip(inputs.split(case.size), targets.split(case.size), strict=True):
            (F.cross_entropy(model(rows), labels, weight=weight, reduction="sum") / total).backward()

    return classic_loop(task, lambda model: AdamW(model.parameters(), LR), backward)


def functional(case: Case, task: Task) -> Run:
    def score(net: Net, batch: Batch) -> Loss:
        logits = net(batch[0])
        return losses.cross_entropy(logits, batch[1], weight=case.weight(logits))

    return functional_loop(task, case.functional(gradient(task.loss_fn(score))), adamw(LR))


# A batch has 14 rows: 7 + 7 or, with a left-over, 4 + 4 + 4 + 2. Two rows are padding only.
CASES = [
    Case("accumulate", 7, partial(accumulate, micro_batches=2), partial(tasks.tokens, ignored=0.0)),
    Case(
        "accumulate, uneven left-over", 4, partial(accumulate, micro_batch_size=4), partial(tasks.tokens, ignored=0.0)
    ),
    Case("accumulate, ignored tokens", 4, partial(accumulate, micro_batch_size=4)),
    Case("accumulate, a micro-batch without a token", 2, partial(accumulate, micro_batch_size=2)),
    Case("accumulate, class weights", 4, partial(accumulate, micro_batch_size=4), class_weight=(0.3, 1.0, 2.0, 0.7)),
]

TECHNIQUES = [Technique(case.name, partial(classic, case), partial(functional, case), case.task) for case in CASES]
