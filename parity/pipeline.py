"""Gradient functions of gradient functions, and mixed precision: nested classic loops against composed wrappers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from functricks import (
    accumulate,
    adamw,
    autocast,
    awp,
    cast,
    chain,
    clip_by_global_norm,
    clip_per_example,
    dynamic_loss_scale,
    fgm,
    free_lb,
    gradient,
    losses,
    multi_task,
    pgd,
    sam,
    static_loss_scale,
)
from functricks.types import GradFn, Loss
from parity import tasks
from parity.adversarial import fgm_attack, pgd_attack
from parity.atomic_step import spoil
from parity.harness import (
    Run,
    Technique,
    backward_of_cross_entropy,
    classic_loop,
    functional_loop,
    gradient_of_cross_entropy,
)
from parity.tasks import CLASSES, IGNORED, Batch, Net, Task

LR = 3e-3
Backward = Callable[[nn.Module, Batch], None]
Gradients = dict[str, Tensor]


class Case(NamedTuple):
    name: str
    classic: Backward
    functional: Callable[[Task], GradFn]
    task: Callable[..., Task] = tasks.classes


def classic(case: Case, task: Task) -> Run:
    return classic_loop(task, lambda model: AdamW(model.parameters(), LR), case.classic)


def functional(case: Case, task: Task) -> Run:
    return functional_loop(task, case.functional(task), adamw(LR))


def take_gradients(model: nn.Module) -> Gradients:
    """Return the gradients, and leave none."""
    found = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def put_gradients(model: nn.Module, gradients: Gradients) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]


# --- gradients at moved weights --------------------------------------------------------------------------------------


def at_moved(moves: Callable[[nn.Module], Gradients]) -> Backward:
    """Look at the gradient at moved weights alone: SAM and AWP."""

    def backward(model: nn.Module, batch: Batch) -> None:
        backward_of_cross_entropy(model, batch)
        shift = moves(model)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(shift[name])
        model.zero_grad()
        backward_of_cross_entropy(model, batch)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])

    return backward


def sam_moves(rho: float) -> Callable[[nn.Module], Gradients]:
    def moves(model: nn.Module) -> Gradients:
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        return {name: rho * p.grad / norm for name, p in model.named_parameters()}

    return moves


def awp_moves(gamma: float) -> Callable[[nn.Module], Gradients]:
    def moves(model: nn.Module) -> Gradients:
        with torch.no_grad():
            return {
                name: gamma * p.norm() * p.grad / p.grad.norm() if p.ndim > 1 else torch.zeros_like(p)
                for name, p in model.named_parameters()
            }

    return moves


def free_lb_backward(epsilon: float, step_size: float, steps: int, name: str) -> Backward:
    def backward(model: nn.Module, batch: Batch) -> None:
        moved = dict(model.named_parameters())[name]
        start, shift = moved.detach().clone(), torch.zeros_like(moved)
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for _ in range(steps):
            with torch.no_grad():
                moved.copy_(start + shift)
            backward_of_cross_entropy(model, batch)
            gradients = take_gradients(model)
            for key, gradient_ in gradients.items():
                total[key] += gradient_ / steps
            shift = shift + step_size * gradients[name] / gradients[name].norm()
            if shift.norm() > epsilon:
                shift = shift * (epsilon / shift.norm())
        with torch.no_grad():
            moved.copy_(start)
        put_gradients(model, total)

    return backward


# --- several tasks ---------------------------------------------------------------------------------------------------


def second_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Regression of the logits to a one-hot target: it disagrees with cross entropy about their size."""
    return F.mse_loss(logits, F.one_hot(labels, CLASSES).to(logits.dtype))


def two_losses(task: Task) -> dict[str, GradFn]:
    def score(net: Net, batch: Batch) -> Loss:
        return losses.mse_loss(net(batch[0]), F.one_hot(batch[1], CLASSES).to(batch[0].dtype))

    return {"first": gradient_of_cross_entropy(task), "second": gradient(task.loss_fn(score))}


def weighted_backward(weight: float) -> Backward:
    def backward(model: nn.Module, batch: Batch) -> None:
        backward_of_cross_entropy(model, batch)
        (weight * second_loss(model(batch[0]), batch[1])).backward()  # its own forward pass: one graph at a time

    return backward


def pcgrad_backward(model: nn.Module, batch: Batch) -> None:
    parts = []
    for weight, loss in ((1.0, F.cross_entropy), (-2.0, second_loss)):
        (weight * loss(model(batch[0]), batch[1])).backward()
        parts.append(take_gradients(model))
    flat = [torch.cat([g.flatten() for g in part.values()]) for part in parts]
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for own, other in ((0, 1), (1, 0)):
        along = flat[own] @ flat[other]
        factor = along / (flat[other] @ flat[other]) if along < 0 else torch.zeros(())
        for name in total:
            total[name] += parts[own][name] - factor * parts[other][name]
    put_gradients(model, total)


class Weighed(nn.Module):
    """A network and the log-variances of its two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tasks.mlp()
        self.s = nn.ParameterDict({"first": torch.tensor(0.2), "second": torch.tensor(-0.3)})

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def weighed(dtype: torch.dtype, steps: int = 40) -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Task(Weighed().to(dtype), tasks.classes(dtype, steps).batches)


def log_variance_backward(model: Any, batch: Batch) -> None:
    logits = model(batch[0])
    named = {"first": F.cross_entropy(logits, batch[1]), "second": second_loss(logits, batch[1])}
    sum(torch.exp(-model.s[name]) * loss + model.s[name] for name, loss in named.items()).backward()


# --- parts of the batch ----------------------------------------------------------------------------------------------


class InParts:
    """A loss whose ``backward`` goes through the micro-batches of a batch."""

    def __init__(self, model: nn.Module, batch: Batch, size: int) -> None:
        self.model, self.batch, self.size = model, batch, size

    def backward(self) -> None:
        inputs, labels = self.batch
        total = (labels != IGNORED).sum()
        for rows, own in zip(inputs.split(self.size), labels.split(self.size), strict=True):
            (F.cross_entropy(self.model(rows), own, reduction="sum") / total).backward()


def attack_in_parts(attack: Callable[..., None], size: int) -> Backward:
    return lambda model, batch: attack(model, lambda: InParts(model, batch, size))


def clipped_examples(max_norm: float) -> Backward:
    def backward(model: nn.Module, batch: Batch) -> None:
        inputs, labels = batch
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for row, label in zip(inputs.split(1), labels.split(1), strict=True):
            F.cross_entropy(model(row), label).backward()
            gradients = take_gradients(model)
            norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients.values()]))
            for name, one in gradients.items():
                total[name] += one * torch.clamp(max_norm / norm, max=1.0) / len(inputs)
        put_gradients(model, total)

    return backward


# --- mixed precision -------------------------------------------------------------------------------------------------


def scaled_classic(task: Task) -> Run:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    optimizers: list[Optimizer] = []

    def make_optimizer(model: nn.Module) -> Optimizer:
        optimizers.append(AdamW(model.parameters(), LR))
        return optimizers[0]

    def backward(model: nn.Module, batch: Batch) -> None:
        scaler.scale(F.cross_entropy(model(batch[0]), batch[1])).backward()

    def ready(model: nn.Module) -> bool:
        scaler.unscale_(optimizers[0])
        finite = all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
        clip_grad_norm_(model.parameters(), 0.3)
        scaler.update()
        return finite

    return classic_loop(task, make_optimizer, backward, ready=ready)


def scaled_functional(task: Task) -> Run:
    return functional_loop(
        task,
        gradient_of_cross_entropy(task),
        chain(clip_by_global_norm(0.3, classic=True), adamw(LR)),
        loss_scale=dynamic_loss_scale(2.0**10, growth_interval=3),
    )


def broken(dtype: torch.dtype, steps: int = 40) -> Task:
    return spoil(tasks.classes(dtype, steps))


def autocast_backward(model: nn.Module, batch: Batch) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()


def autocast_gradient(task: Task) -> GradFn:
    loss_fn = task.loss_fn(lambda net, batch: losses.cross_entropy(net(batch[0]), batch[1]))
    return gradient(autocast(loss_fn, "cpu", torch.bfloat16))


def cast_backward(model: nn.Module, batch: Batch) -> None:
    """A copy of the model in bfloat16 beside masters, which get its gradients."""
    copy = deepcopy(model).to(torch.bfloat16)
    copy.zero_grad()
    F.cross_entropy(copy(batch[0].to(torch.bfloat16)).float(), batch[1]).backward()
    for parameter, lowered in zip(model.parameters(), copy.parameters(), strict=True):
        parameter.grad = lowered.grad.to(parameter.dtype)


def cast_gradient(task: Task) -> GradFn:
    loss_fn = task.loss_fn(lambda net, batch: losses.cross_entropy(net(batch[0]).float(), batch[1]))
    return gradient(cast(loss_fn, torch.bfloat16))


def fixed_backward(model: nn.Module, batch: Batch) -> None:
    (128.0 * F.cross_entropy(model(batch[0]), batch[1])).backward()
    for parameter in model.parameters():
        parameter.grad /= 128.0


def fixed_functional(task: Task) -> Run:
    return functional_loop(task, gradient_of_cross_entropy(task), adamw(LR), loss_scale=static_loss_scale(128.0))


# --- rows ------------------------------------------------------------------------------------------------------------


def wrapped(wrapper: Callable[[GradFn], GradFn]) -> Callable[[Task], GradFn]:
    return lambda task: wrapper(gradient_of_cross_entropy(task))


def examples(task: Task) -> GradFn:
    return clip_per_example(task.loss_fn(lambda net, batch: losses.cross_entropy(net(batch[0]), batch[1])), 0.5)


def in_parts(wrapper: Callable[[GradFn], GradFn]) -> Callable[[Task], GradFn]:
    return lambda task: wrapper(accumulate(gradient_of_cross_entropy(task), micro_batch_size=4))


CASES = [
    Case("sam", at_moved(sam_moves(0.1)), wrapped(partial(sam, rho=0.1))),
    Case("awp", at_moved(awp_moves(0.05)), wrapped(partial(awp, gamma=0.05))),
    Case(
        "free_lb",
        free_lb_backward(0.5, 0.3, 3, "embedding.weight"),
        wrapped(partial(free_lb, epsilon=0.5, step_size=0.3, steps=3, where="embedding.*")),
        tasks.tokens,
    ),
    Case(
        "multi_task", weighted_backward(0.5), lambda task: multi_task(two_losses(task), {"first": 1.0, "second": 0.5})
    ),
    Case(
        "multi_task, conflicts removed",
        pcgrad_backward,
        lambda task: multi_task(two_losses(task), {"first": 1.0, "second": -2.0}, conflicts="project"),
    ),
    Case("multi_task, log-variances", log_variance_backward, lambda task: multi_task(two_losses(task), "s"), weighed),
    Case("clip_per_example", clipped_examples(0.5), examples),
    Case(
        "fgm around accumulate",
        attack_in_parts(fgm_attack(0.3, "embedding"), 4),
        in_parts(partial(fgm, epsilon=0.3, where="embedding.*")),
        tasks.tokens,
    ),
    Case(
        "pgd around accumulate",
        attack_in_parts(pgd_attack(0.5, 0.3, 3, "embedding"), 4),
        in_parts(partial(pgd, epsilon=0.5, step_size=0.3, steps=3, where="embedding.*")),
        tasks.tokens,
    ),
]

TECHNIQUES = [Technique(case.name, partial(classic, case), partial(functional, case), case.task) for case in CASES]
half = Case("autocast, bfloat16", autocast_backward, autocast_gradient)
lower = Case("cast, bfloat16", cast_backward, cast_gradient)
fixed = Case("loss scale, fixed", fixed_backward, gradient_of_cross_entropy)
TECHNIQUES += [
    Technique(half.name, partial(classic, half), partial(functional, half), half.task),  # float64 is not cast
    Technique(lower.name, partial(classic, lower), partial(functional, lower), lower.task),
    Technique("loss scale, steps that are not finite", scaled_classic, scaled_functional, broken),
    Technique("loss scale, fixed", partial(classic, fixed), fixed_functional, fixed.task),
]
