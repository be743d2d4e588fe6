"""Gradient accumulation: one division by the weight of the whole batch, against :func:`functricks.accumulate`.

The usual classic version averages the means of the micro-batches, which is wrong as soon as they weigh differently; the
one here adds up sums and divides by the weight of all micro-batches together. So does the one beside
:func:`functricks.multi_steps`, for loops in which micro-batches arrive one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from functricks import accumulate, adamw, apply_updates, gradient, losses, multi_steps
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


# --- micro-batches that arrive one by one ----------------------------------------------------------------------------

EVERY = 3  # of 40: one is left over at the end


def classic_windows(task: Task) -> Run:
    """Sums add up in ``.grad``; one division by the tokens of the window, also of the one that is left over."""
    model = task.module()
    run = Run({name: p.detach().clone() for name, p in model.named_parameters()}, steps=len(task.batches))
    optimizer, tokens = AdamW(model.parameters(), LR), 0
    for index, (inputs, labels) in enumerate(task.batches, 1):
        F.cross_entropy(model(inputs), labels, reduction="sum").backward()
        tokens += int((labels != IGNORED).sum())
        if index % EVERY == 0 or index == len(task.batches):
            for parameter in model.parameters():
                parameter.grad /= tokens
            run.saw((name, p.grad) for name, p in model.named_parameters())
            optimizer.step()
            optimizer.zero_grad()
            tokens = 0
    run.end = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def functional_windows(task: Task) -> Run:
    grad_fn = gradient(task.loss_fn(lambda net, batch: losses.cross_entropy(net(batch[0]), batch[1])))
    optimizer = multi_steps(adamw(LR), EVERY)
    params = task.start()
    run, state = Run(params, steps=len(task.batches)), optimizer.init(params)
    for batch in task.batches:
        found = grad_fn(params, batch)
        run.saw(found.grads.items())
        updates, state = optimizer.update(found, state, params)  # the whole Gradient, whose weight counts
        params = apply_updates(params, updates)
    run.end = apply_updates(params, optimizer.flush(state, params)[0])
    return run


# --- rows ------------------------------------------------------------------------------------------------------------

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
TECHNIQUES.append(Technique("multi_steps, weights and a flush", classic_windows, functional_windows, tasks.tokens))
