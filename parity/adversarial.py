"""Adversarial training on the embedding: attack, backward, restore, against wrappers of a gradient function.

The classes below are the usual recipe with its faults mended: backups are kept by name; a name that matches nothing
raises; a norm that is zero or not finite means no attack; what the attack moved is put back by copying, into the same
storage; PGD's gradients are restored for every parameter that had one, also where the last ``zero_grad`` has set them
to None; and the perturbation of PGD is kept instead of being computed back from the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from functricks import accumulate, adamw, fgm, pgd
from functricks.types import GradFn
from parity import tasks
from parity.harness import Run, Technique, classic_loop, functional_loop, gradient_of_cross_entropy
from parity.tasks import IGNORED, Batch, Task

LR = 3e-3


Backward = Callable[[nn.Module, Batch], None]  # fills .grad from one batch
Attack = Callable[[nn.Module, Callable[[], Tensor]], None]  # fills .grad from one loss


class Case(NamedTuple):
    name: str
    classic: Backward
    functional: Callable[[GradFn], GradFn]


def classic(case: Case, task: Task) -> Run:
    return classic_loop(task, lambda model: AdamW(model.parameters(), LR), case.classic)


def functional(case: Case, task: Task) -> Run:
    return functional_loop(task, case.functional(gradient_of_cross_entropy(task)), adamw(LR))


# --- the classic attacks ---------------------------------------------------------------------------------------------


class Perturbed:
    """Parameters that are moved, and put back."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self.model = model
        self.chosen = {name: p for name, p in model.named_parameters() if any(part in name for part in names)}
        if not self.chosen:
            raise ValueError(f"no parameter is called like {names}")
        self.backup = {name: parameter.detach().clone() for name, parameter in self.chosen.items()}
        self.gradients: dict[str, Tensor] = {}

    def steps(self, length: float) -> dict[str, Tensor]:
        """Return steps along the gradients; zero where the norm is zero or not finite."""
        found = {}
        for name, parameter in self.chosen.items():
            norm = parameter.grad.norm()
            usable = bool(torch.isfinite(norm)) and norm != 0
            found[name] = length * parameter.grad / norm if usable else torch.zeros_like(parameter)
        return found

    @torch.no_grad()
    def move(self, shift: dict[str, Tensor]) -> None:
        for name, parameter in self.chosen.items():
            parameter.copy_(self.backup[name] + shift[name])

    @torch.no_grad()
    def restore(self) -> None:
        for name, parameter in self.chosen.items():
            parameter.copy_(self.backup[name])

    def backup_gradients(self) -> None:
        self.gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def restore_gradients(self) -> None:
        parameters = dict(self.model.named_parameters())
        for name, value in self.gradients.items():
            parameters[name].grad = value.clone()


def fgm_attack(epsilon: float, *names: str) -> Attack:
    def attack(model: nn.Module, loss: Callable[[], Tensor]) -> None:
        loss().backward()
        perturbed = Perturbed(model, names)
        perturbed.move(perturbed.steps(epsilon))
        loss().backward()  # adds to the clean gradient
        perturbed.restore()

    return attack


def pgd_attack(epsilon: float, step_size: float, steps: int, *names: str) -> Attack:
    def attack(model: nn.Module, loss: Callable[[], Tensor]) -> None:
        loss().backward()
        perturbed = Perturbed(model, names)
        perturbed.backup_gradients()
        shift: dict[str, Tensor] = {name: torch.zeros_like(p) for name, p in perturbed.chosen.items()}
        for step in range(steps):
            shift = {name: _into_ball(shift[name] + move, epsilon) for name, move in perturbed.steps(step_size).items()}
            perturbed.move(shift)
            if step < steps - 1:
                model.zero_grad()
            else:
                perturbed.restore_gradients()
            loss().backward()
        perturbed.restore()

    return attack


def _into_ball(shift: Tensor, epsilon: float) -> Tensor:
    norm = shift.norm()
    return shift * (epsilon / norm) if norm > epsilon else shift


def _mean_loss(model: nn.Module, rows: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(rows), labels)


def whole(attack: Attack) -> Backward:
    """Attack a whole batch at once."""

    def backward(model: nn.Module, batch: Batch) -> None:
        attack(model, partial(_mean_loss, model, *batch))

    return backward


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def accumulated(attack: Attack, size: int, loss: Loss = _mean_loss) -> Backward:
    """Attack each micro-batch by its own gradient; the gradients of earlier ones wait outside ``.grad``."""

    def backward(model: nn.Module, batch: Batch) -> None:
        inputs, targets = batch
        total = int((targets != IGNORED).sum())
        summed = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        for rows, labels in zip(inputs.split(size), targets.split(size), strict=True):
            kept = int((labels != IGNORED).sum())
            if kept == 0:
                continue  # the mean of nothing is NaN
            model.zero_grad()
            attack(model, partial(loss, model, rows, labels))
            for name, parameter in model.named_parameters():
                summed[name] += kept / total * parameter.grad
        for name, parameter in model.named_parameters():
            parameter.grad = summed[name]

    return backward


WHERE = "embedding.*"

CASES = [
    Case("fgm", whole(fgm_attack(0.5, "embedding")), partial(fgm, epsilon=0.5, where=WHERE)),
    Case(
        "fgm, two leaves",
        whole(fgm_attack(0.3, "embedding", "hidden.weight")),
        partial(fgm, epsilon=0.3, where=[WHERE, "hidden.weight"]),
    ),
    Case(
        "pgd, inside the ball",
        whole(pgd_attack(1.0, 0.3, 3, "embedding")),
        partial(pgd, epsilon=1.0, step_size=0.3, steps=3, where=WHERE),
    ),
    Case(
        "pgd, projected",
        whole(pgd_attack(0.5, 0.3, 3, "embedding")),
        partial(pgd, epsilon=0.5, step_size=0.3, steps=3, where=WHERE),
    ),
    Case(
        "fgm of every micro-batch, accumulated",
        accumulated(fgm_attack(0.5, "embedding"), 4),
        lambda grad_fn: accumulate(fgm(grad_fn, 0.5, where=WHERE), micro_batch_size=4),
    ),
]

TECHNIQUES = [Technique(case.name, partial(classic, case), partial(functional, case), tasks.tokens) for case in CASES]
