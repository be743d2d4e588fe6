"""Train both versions of a technique and compare where they end.

Both start from the same parameters and see the same batches, in float64 and in float32. What is compared is the
*displacement* from the start: parameters barely move in a short run, so that a comparison of the parameters themselves
would pass whatever the technique did. Two numbers come out:

- ``rel_f64``: the largest difference of an entry, divided by the largest displacement in its leaf; the worst leaf.
- ``ulp_f32``: the largest difference of an entry in float32, in units of the float32 spacing at the largest magnitude
  that its leaf has in the classic version; the worst leaf.

A technique is ok when ``rel_f64`` is within its tolerance and ``ulp_f32`` within its number of ulps, both versions made
the same number of steps, every leaf moved, and every parameter saw a gradient that is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from functricks import LossScale, gradient, losses, train_step
from functricks.types import Batch, GradFn, Gradient, Params, StepInfo, Transform
from parity.tasks import Task

TOLERANCE = 1e-10  # relative, on the displacement, in float64
ULPS = 64.0  # rounding in another order, carried through a run


@dataclass
class Run:
    """A training run: where it started, where it ended, and the largest gradient entry that each parameter saw."""

    start: dict[str, Tensor]
    end: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    steps: int = 0

    def saw(self, gradients: Iterable[tuple[str, Tensor | None]]) -> None:
        for name, found in gradients:
            size = 0.0 if found is None else float(found.nan_to_num(0.0, 0.0, 0.0).abs().max())
            self.gradients[name] = max(size, self.gradients.get(name, 0.0))


# --- the two training loops ------------------------------------------------------------------------------------------


def classic_loop(
    task: Task,
    make_optimizer: Callable[[nn.Module], Optimizer],
    backward: Callable[[nn.Module, Batch], None],
    *,
    ready: Callable[[nn.Module], bool] = lambda model: True,
    make_scheduler: Callable[[Optimizer], Any] | None = None,
    advance: Callable[[Any, nn.Module], None] = lambda scheduler, model: scheduler.step(),
) -> Run:
    """Train as usual: zero_grad, backward, step, scheduler.step.

    Args:
        task: model and batches.
        make_optimizer: from the model.
        backward: fill ``.grad`` from one batch.
        ready: called on the gradients, may change them (clip); False skips the step, and the scheduler's.
        make_scheduler: from the optimizer.
        advance: move the scheduler on after a step.
    """
    model = task.module()
    run = Run(_values(model))
    optimizer = make_optimizer(model)
    scheduler = None if make_scheduler is None else make_scheduler(optimizer)
    for batch in task.batches:
        optimizer.zero_grad()
        backward(model, batch)
        run.saw((name, parameter.grad) for name, parameter in model.named_parameters())
        if ready(model):
            optimizer.step()
            if scheduler is not None:
                advance(scheduler, model)
        run.steps += 1
    run.end = _values(model)
    return run


def functional_loop(
    task: Task,
    grad_fn: GradFn,
    optimizer: Transform | Callable[[Any], Transform],
    *,
    carry: Any = (),
    buffers_of: Callable[[Any], dict[str, Tensor]] = lambda carry: {},
    memory: Any = None,
    observe: Callable[[Any, Params, StepInfo], Any] | None = None,
    loss_scale: LossScale | None = None,
) -> Run:
    """Train with :func:`functricks.train_step`.

    Args:
        task: model and batches.
        grad_fn: from :func:`functricks.gradient` and its wrappers.
        optimizer: a transform; or, with ``observe``, a function of the memory that makes one.
        carry: goes through the gradient function.
        buffers_of: the buffers in the carry; they are compared too.
        memory: what the loop remembers between steps beside the state.
        observe: ``(memory, params, info) -> memory``, after every step.
        loss_scale: handed to ``train_step``.
    """
    params = task.start()
    run = Run({**params, **buffers_of(carry)})

    def watched(params: Params, batch: Batch, carry: Any = (), *, scale: Any = None) -> Gradient:
        found = grad_fn(params, batch, carry, scale=scale)
        run.saw(found.grads.items())
        return found

    state = None
    for batch in task.batches:
        step = train_step(watched, optimizer if observe is None else optimizer(memory), loss_scale=loss_scale)
        state = step.init(params, carry) if state is None else state
        state, info = step.update(state, batch)
        if observe is not None:
            memory = observe(memory, state.params, info)
        run.steps += 1
    assert state is not None
    run.end = {**state.params, **buffers_of(state.carry)}
    return run


def _values(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters, then of the buffers, which a training run moves as well."""
    return {name: leaf.detach().clone() for name, leaf in (*model.named_parameters(), *model.named_buffers())}


# --- the loss of techniques that are not about losses ----------------------------------------------------------------


def backward_of_cross_entropy(model: nn.Module, batch: Batch) -> None:
    F.cross_entropy(model(batch[0]), batch[1]).backward()


def gradient_of_cross_entropy(task: Task) -> GradFn:
    return gradient(task.loss_fn(lambda net, batch: losses.cross_entropy(net(batch[0]), batch[1])))


# --- comparing -------------------------------------------------------------------------------------------------------


class Technique(NamedTuple):
    """One row: two versions of a training run."""

    name: str
    classic: Callable[[Task], Run]
    functional: Callable[[Task], Run]
    task: Callable[..., Task]
    tolerance: float = TOLERANCE
    ulps: float = ULPS


class Row(NamedTuple):
    technique: str
    steps: int
    rel_f64: float
    ulp_f32: float
    tolerance: float
    ok: bool


class Report(NamedTuple):
    row: Row
    problems: list[str]


def measure(technique: Technique, steps: int | None = None) -> Report:
    """Run both versions in both dtypes and compare.

    Args:
        technique: what to run.
        steps: how many steps, instead of as many as its task has.
    """
    sizes = {} if steps is None else {"steps": steps}
    problems: list[str] = []
    found = {}
    for dtype, difference in ((torch.float64, relative_difference), (torch.float32, ulp_difference)):
        task = technique.task(dtype, **sizes)
        classic, functional = technique.classic(task), technique.functional(task)
        problems += [f"{str(dtype).removeprefix('torch.')}: {problem}" for problem in _check(classic, functional)]
        found[dtype] = difference(classic, functional)
    rel, ulp = found[torch.float64], found[torch.float32]
    if not rel <= technique.tolerance:
        problems.append(f"float64: relative difference {rel:.2e} is above the tolerance {technique.tolerance:.0e}")
    if not ulp <= technique.ulps:
        problems.append(f"float32: {ulp:.1f} ulps are more than {technique.ulps:g}")
    return Report(Row(technique.name, classic.steps, rel, ulp, technique.tolerance, not problems), problems)


def relative_difference(classic: Run, functional: Run) -> float:
    """Return the largest difference of an entry over the largest displacement of its leaf."""
    return _worst(classic, functional, lambda start, end: _largest(end - start))


def ulp_difference(classic: Run, functional: Run) -> float:
    """Return the largest difference of an entry in float32 spacings at its leaf's largest magnitude."""
    return _worst(classic, functional, lambda start, end: _spacing(_largest(end)))


def _worst(classic: Run, functional: Run, unit: Callable[[Tensor, Tensor], float]) -> float:
    found = []
    for name, end in classic.end.items():
        difference = _largest(functional.end[name].double() - end.double())
        scale = unit(classic.start[name].double(), end.double())
        found.append(difference / scale if scale else math.inf)
    return math.nan if any(math.isnan(value) for value in found) else max(found)


def _largest(leaf: Tensor) -> float:
    return float(leaf.abs().max())


def _spacing(size: float) -> float:
    """Return the distance between neighbouring float32 numbers at ``size``."""
    return 2.0 ** (math.floor(math.log2(size)) - 23) if size else 0.0


def _check(classic: Run, functional: Run) -> list[str]:
    """Return what makes the comparison worthless: nothing moved, nothing to compare with, different starts."""
    problems = []
    if list(classic.end) != list(functional.end):
        problems.append(f"leaves differ: {list(classic.end)} and {list(functional.end)}")
    if classic.steps != functional.steps:
        problems.append(f"{classic.steps} classic and {functional.steps} functional steps")
    for version, run in (("classic", classic), ("functional", functional)):
        for name, end in run.end.items():
            if not torch.equal(run.start[name], classic.start[name]):
                problems.append(f"{version}: {name} starts elsewhere")
            if not _largest(end.double() - run.start[name].double()) > 0:
                problems.append(f"{version}: {name} did not move")
        for name, size in run.gradients.items():
            if not size > 0:
                problems.append(f"{version}: {name} saw no gradient")
        if not run.gradients:
            problems.append(f"{version}: no gradient was seen")
    return problems
