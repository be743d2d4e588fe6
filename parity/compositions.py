"""Wrappers of gradients around each other, two and three deep in every order, against nested classic loops.

Each classic layer is a function from one way to fill ``.grad`` to another: what ``accumulate`` is around ``fgm`` is a
loop over micro-batches around attack, backward, restore. Rows of labels are ignored, the last micro-batch is short, and
under a loss scale some batches are not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from functricks import accumulate, autocast, dynamic_loss_scale, fgm, gradient, losses, multi_task, pgd, sam, sgd
from functricks.types import GradFn, Loss
from parity import tasks
from parity.atomic_step import spoil
from parity.harness import Run, Technique, classic_loop, functional_loop
from parity.pipeline import Backward, Gradients, put_gradients, take_gradients
from parity.tasks import CLASSES, IGNORED, Batch, Net, Task

LR, MOMENTUM = 0.1, 0.9  # not Adam, which would make a whole step of what rounding left of a gradient
SIZE, WEIGHT = 4, 0.5
FGM, PGD, PGD_STEP, SAM = 0.3, 0.2, 0.15, 0.1
FIRST, MATRICES = ("0.weight",), ("0.weight", "2.weight")
INIT_SCALE, INTERVAL = 2.0**10, 3
STEPS = 8

Names = tuple[str, ...]  # from the inside out
LAYERS = ("accumulate", "fgm", "pgd", "sam", "multi_task")


# --- the classic version ---------------------------------------------------------------------------------------------


class Scale:
    """GradScaler's numbers, by its kernel: the class unscales once a step, and an attack needs it at every pass."""

    def __init__(self) -> None:
        self.value = torch.tensor(INIT_SCALE)
        self.tracker = torch.zeros((), dtype=torch.int32)

    def update(self, finite: bool) -> None:
        found = torch.tensor(0.0 if finite else 1.0)
        torch._amp_update_scale_(self.value, self.tracker, found, 2.0, 0.5, INTERVAL)


def first_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def second_loss(logits: Tensor, labels: Tensor) -> Tensor:
    kept = labels != IGNORED
    return F.mse_loss(logits[kept], F.one_hot(labels[kept], CLASSES).to(logits.dtype))


def one_pass(loss: Callable[[Tensor, Tensor], Tensor], scale: Scale | None, lower: bool) -> Backward:
    """Return what fills ``.grad`` by one forward and one backward pass."""

    def backward(model: nn.Module, batch: Batch) -> None:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=lower):
            value = loss(model(batch[0]), batch[1])
        factor = 1.0 if scale is None else float(scale.value)
        (value * factor).backward()
        for parameter in model.parameters():
            parameter.grad /= factor

    return backward


def in_parts(inner: Backward) -> Backward:
    def backward(model: nn.Module, batch: Batch) -> None:
        kept = int((batch[1] != IGNORED).sum())
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for part in zip(*(leaf.split(SIZE) for leaf in batch), strict=True):
            own = int((part[1] != IGNORED).sum())
            if own:  # the mean of nothing is NaN
                inner(model, part)
                total = plus(total, take_gradients(model), own / kept)
        put_gradients(model, total)

    return backward


def attacked(inner: Backward, names: Names, steps: int, step_size: float, epsilon: float) -> Backward:
    """FGM where it takes one step; PGD's ball is around all the names together."""

    def backward(model: nn.Module, batch: Batch) -> None:
        inner(model, batch)
        found = clean = take_gradients(model)
        start = {name: dict(model.named_parameters())[name].detach().clone() for name in names}
        shift = {name: torch.zeros_like(leaf) for name, leaf in start.items()}
        for _ in range(steps):
            shift = plus(shift, unit(found, names), step_size)
            norm = length(shift)
            if norm > epsilon:
                shift = {name: leaf * (epsilon / norm) for name, leaf in shift.items()}
            write(model, plus(start, shift))
            inner(model, batch)
            found = take_gradients(model)
        write(model, start)
        put_gradients(model, plus(clean, found))

    return backward


def sharpness_aware(inner: Backward) -> Backward:
    def backward(model: nn.Module, batch: Batch) -> None:
        inner(model, batch)
        found = take_gradients(model)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        write(model, plus(start, unit(found, tuple(found)), SAM))
        inner(model, batch)
        write(model, start)

    return backward


def with_second(second: Backward, inner: Backward) -> Backward:
    def backward(model: nn.Module, batch: Batch) -> None:
        inner(model, batch)
        first = take_gradients(model)
        second(model, batch)
        put_gradients(model, plus(first, take_gradients(model), WEIGHT))

    return backward


def plus(a: Gradients, b: Gradients, factor: float = 1.0) -> Gradients:
    return {name: leaf + factor * b[name] for name, leaf in a.items()}


def length(leaves: Gradients) -> Tensor:
    return torch.stack([leaf.norm() for leaf in leaves.values()]).norm()


def unit(gradients: Gradients, names: Names) -> Gradients:
    """Return the direction of the gradients; zero where it is not finite."""
    chosen = {name: gradients[name] for name in names}
    norm = length(chosen)
    if not torch.isfinite(norm) or norm == 0:
        return {name: torch.zeros_like(leaf) for name, leaf in chosen.items()}
    return {name: leaf / norm for name, leaf in chosen.items()}


@torch.no_grad()
def write(model: nn.Module, values: Gradients) -> None:
    for name, parameter in model.named_parameters():
        if name in values:
            parameter.copy_(values[name])


def classic(names: Names, task: Task) -> Run:
    scale = Scale() if "loss scale" in names else None
    second = one_pass(second_loss, scale, lower=False)
    layers: dict[str, Callable[[Backward], Backward]] = {
        "accumulate": in_parts,
        "fgm": partial(attacked, names=FIRST, steps=1, step_size=FGM, epsilon=FGM),
        "pgd": partial(attacked, names=MATRICES, steps=2, step_size=PGD_STEP, epsilon=PGD),
        "sam": sharpness_aware,
        "multi_task": partial(with_second, second),
    }
    backward = one_pass(first_loss, scale, lower="autocast" in names)
    for name in names:
        backward = layers[name](backward) if name in layers else backward

    def ready(model: nn.Module) -> bool:
        finite = all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
        if scale is not None:
            scale.update(finite)
        return finite

    return classic_loop(task, lambda model: SGD(model.parameters(), LR, MOMENTUM), backward, ready=ready)


# --- the functional version ------------------------------------------------------------------------------------------


def functional(names: Names, task: Task) -> Run:
    def first(net: Net, batch: Batch) -> Loss:
        return losses.cross_entropy(net(batch[0]), batch[1])

    def second(net: Net, batch: Batch) -> Loss:
        kept = (batch[1] != IGNORED).to(batch[0].dtype)
        labels = F.one_hot(batch[1].clamp(min=0), CLASSES).to(batch[0].dtype)
        return losses.mse_loss(net(batch[0]), labels, weight=kept[:, None].expand(-1, CLASSES))

    wrappers: dict[str, Callable[[GradFn], GradFn]] = {
        "accumulate": partial(accumulate, micro_batch_size=SIZE),
        "fgm": partial(fgm, epsilon=FGM, where=FIRST),
        "pgd": partial(pgd, epsilon=PGD, step_size=PGD_STEP, steps=2, where=MATRICES, norm="global"),
        "sam": partial(sam, rho=SAM),
        "multi_task": lambda grad_fn: multi_task(
            {"first": grad_fn, "second": gradient(task.loss_fn(second))}, {"first": 1.0, "second": WEIGHT}
        ),
    }
    loss_fn = task.loss_fn(first)
    grad_fn = gradient(autocast(loss_fn, "cpu", torch.bfloat16) if "autocast" in names else loss_fn)
    for name in names:
        grad_fn = wrappers[name](grad_fn) if name in wrappers else grad_fn
    scaling = dynamic_loss_scale(INIT_SCALE, growth_interval=INTERVAL) if "loss scale" in names else None
    return functional_loop(task, grad_fn, sgd(LR, MOMENTUM), loss_scale=scaling)


# --- rows ------------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """The task of a composition; only under a loss scale some batches are not finite."""

    broken: bool

    def __call__(self, dtype: torch.dtype, steps: int = STEPS) -> Task:
        task = tasks.classes(dtype, steps, ignored=0.3)
        return spoil(task) if self.broken else task


def compositions() -> list[Names]:
    """Autocast lowers the loss and the loss scale belongs to the step, so each has one place; the rest, any order."""
    pairs: list[Names] = [*permutations(LAYERS, 2), *((name, name) for name in LAYERS[:-1])]
    middle: list[Names] = [(), *((name,) for name in LAYERS)]
    found: list[Names] = [*pairs, *permutations(LAYERS, 3)]
    for own in (*middle, *permutations(LAYERS, 2)):
        found += [("autocast", *own), (*own, "loss scale"), ("autocast", *own, "loss scale")]
    return sorted({names for names in found if 2 <= len(names) <= 3}, key=lambda names: (len(names), names))


TECHNIQUES = [
    Technique(
        " in ".join(names),
        partial(classic, names),
        partial(functional, names),
        Problem("loss scale" in names),
        # float64 is not cast; in float32 a last place that differs is now and then another rounding to bfloat16, whose
        # eps is 2**16 ulps: far less than what leaving autocast out would change
        ulps=2.0**12 if "autocast" in names else 64.0,
    )
    for names in compositions()
]
