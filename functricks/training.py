"""One training step as one function of one value: everything happens, or nothing does."""

from __future__ import annotations

import torch

from functricks import tree
from functricks.transforms import apply_updates
from functricks.types import Batch, Carry, GradFn, Params, StepInfo, TrainState, TrainStep, Transform

__all__ = ["train_step"]


def train_step(grad_fn: GradFn, optimizer: Transform, *, skip_nonfinite: bool = True) -> TrainStep:
    """Make an atomic training step of a gradient function and an optimizer.

    gradient (unscaled) -> finite check -> ``optimizer`` (clipping is one of its links) -> apply; or, when a gradient is
    not finite, nothing at all: parameters, optimizer state, carry (buffers, random key) and the step counter, and so
    the schedule, stay as they were, and ``StepInfo.applied`` says so.

    Classic: ``zero_grad``, ``backward``, ``unscale_``, ``clip_grad_norm_``, ``step``, ``scheduler.step``, whose order
    and guards are the caller's task.

    Args:
        grad_fn: from :func:`~functricks.gradient` and its wrappers.
        optimizer: a transform whose updates are added to the parameters.
        skip_nonfinite: False applies every step, as a bare PyTorch loop does.

    Returns ``TrainStep(init, update)``: ``init(params, carry=()) -> TrainState`` and
    ``update(state, batch) -> (state, StepInfo)``. Both are pure. Under ``vmap`` each lane skips for itself: a diverged
    run never touches its neighbours. ``StepInfo.grad_norm`` is the norm before clipping, float64.

    >>> from functricks import gradient, sgd
    >>> step = train_step(gradient(lambda params, x: (params["w"] * x).mean()), sgd(0.1))
    >>> state = step.init({"w": torch.tensor(1.0)})
    >>> state, info = step.update(state, torch.tensor([1.0, 3.0]))
    >>> state.params, state.step, info.applied
    ({'w': tensor(0.8000)}, tensor(1), tensor(True))
    """

    def init(params: Params, carry: Carry = ()) -> TrainState:
        return TrainState(torch.zeros((), dtype=torch.int64), params, optimizer.init(params), carry)

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, StepInfo]:
        found = grad_fn(state.params, batch, state.carry)
        peak, relative = tree.norm_parts(found.grads)
        updates, memory = optimizer.update(found.grads, state.optimizer, state.params)
        new = TrainState(state.step + 1, apply_updates(state.params, updates), memory, found.carry, state.loss_scale)
        applied = torch.isfinite(peak) & torch.isfinite(relative)
        if skip_nonfinite:
            new = tree.where(applied, new, state)
        else:
            applied = torch.ones_like(applied)
        return new, StepInfo(found.loss, found.weight, peak * relative, applied, found.metrics)

    return TrainStep(init, update)
