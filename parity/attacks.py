"""Training on attacked inputs: the usual loop around ``torch.autograd.grad``, against :func:`functricks.attack`.

The classic versions are those of torchattacks' ``FGSM``, ``PGD`` and ``PGDL2`` without their random start, with a norm
of zero guarded against; README.md compares with torchattacks itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from functricks import attack, gradient, losses, sgd
from functricks.types import Loss
from parity import tasks
from parity.harness import Run, Technique, backward_of_cross_entropy, classic_loop, functional_loop
from parity.tasks import Batch, Net, Task

LR, LOW, HIGH = 0.3, -1.5, 1.5


class Case(NamedTuple):
    name: str
    norm: Any
    epsilon: float
    step_size: float
    steps: int
    targeted: bool = False


def wanted(labels: Tensor, case: Case) -> Tensor:
    """The labels that the attack looks at: the right ones, or those that it wants."""
    return (labels + 1) % tasks.CLASSES if case.targeted else labels


def classic(case: Case, task: Task) -> Run:
    def backward(model: nn.Module, batch: Batch) -> None:
        rows, labels = batch[0].clamp(LOW, HIGH), wanted(batch[1], case)
        moved = rows.clone()
        for _ in range(case.steps):
            moved.requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(model(moved), labels, reduction="sum"), moved)
            slope = -slope if case.targeted else slope
            if case.norm == "linf":
                shift = moved.detach() + case.step_size * slope.sign() - rows
                shift = shift.clamp(-case.epsilon, case.epsilon)
            else:
                shift = moved.detach() + case.step_size * slope / slope.norm(dim=1, keepdim=True) - rows
                shift = shift * (case.epsilon / shift.norm(dim=1, keepdim=True)).clamp(max=1.0)
            moved = (rows + shift).clamp(LOW, HIGH)
        backward_of_cross_entropy(model, (moved, batch[1]))

    return classic_loop(task, lambda model: SGD(model.parameters(), LR), backward)


def functional(case: Case, task: Task) -> Run:
    def score(net: Net, batch: Batch) -> Loss:
        rows, labels = batch[0].clamp(LOW, HIGH), wanted(batch[1], case)
        moved = attack(
            lambda x: losses.cross_entropy(net(x), labels).sum(),
            rows,
            norm=case.norm,
            epsilon=case.epsilon,
            step_size=case.step_size,
            steps=case.steps,
            clamp=(LOW, HIGH),
            targeted=case.targeted,
        )
        return losses.cross_entropy(net(moved.detach()), batch[1])

    return functional_loop(task, gradient(task.loss_fn(score)), sgd(LR))


CASES = [
    Case("attack, one step, linf", "linf", 0.1, 0.1, 1),
    Case("attack, linf", "linf", 0.2, 0.1, 4),
    Case("attack, l2", "l2", 0.5, 0.3, 4),
    Case("attack, l2, targeted", "l2", 0.5, 0.3, 4, targeted=True),
]

TECHNIQUES = [Technique(case.name, partial(classic, case), partial(functional, case), tasks.classes) for case in CASES]
