"""Gradient clipping: :func:`torch.nn.utils.clip_grad_norm_` against :func:`functricks.clip_by_global_norm`.

``clip_grad_norm_`` divides by the norm plus 1e-6. ``classic=True`` does the same. The default adds nothing; the classic
version to compare it with is written out from PyTorch's own parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import SGD

from functricks import chain, clip_by_global_norm, sgd
from functricks.types import Transform
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

MAX_NORM = 0.5  # half of the gradients of the task are longer
LR, MOMENTUM = 0.3, 0.9


class Case(NamedTuple):
    name: str
    classic: Callable[[nn.Module], None]
    functional: Transform


def classic(case: Case, task: Task) -> Run:
    def ready(model: nn.Module) -> bool:
        case.classic(model)
        return True

    return classic_loop(
        task, lambda model: SGD(model.parameters(), LR, MOMENTUM), backward_of_cross_entropy, ready=ready
    )


def functional(case: Case, task: Task) -> Run:
    return functional_loop(task, gradient_of_cross_entropy(task), chain(case.functional, sgd(LR, MOMENTUM)))


def pytorch(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), MAX_NORM)


def exact(model: nn.Module) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = get_total_norm(gradients)
    if norm > MAX_NORM:
        for gradient in gradients:
            gradient.mul_(MAX_NORM / norm)


CASES = [
    Case("clip_by_global_norm, classic", pytorch, clip_by_global_norm(MAX_NORM, classic=True)),
    Case("clip_by_global_norm", exact, clip_by_global_norm(MAX_NORM)),
]

TECHNIQUES = [Technique(case.name, partial(classic, case), partial(functional, case), tasks.classes) for case in CASES]
