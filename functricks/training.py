"""One training step as one function of one value: everything happens, or nothing does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functricks import tree
from functricks.gradients._gradient import check_grad_fn
from functricks.precision import LossScale
from functricks.transforms import apply_updates
from functricks.transforms.base import check_integer, check_transform, counter
from functricks.types import Batch, Carry, GradFn, Params, StepInfo, TrainState, TrainStep, Transform

__all__ = ["train_step"]


def train_step(
    grad_fn: GradFn,
    optimizer: Transform,
    *,
    loss_scale: LossScale | None = None,
    skip_nonfinite: bool = True,
    freeze_nonfinite: int | Tensor | None = None,
) -> TrainStep:
    """Make an atomic training step of a gradient function and an optimizer.

    gradient (unscaled) -> finite check -> ``optimizer`` (clipping is one of its links) -> apply; or, when a gradient is
    not finite, nothing at all: parameters, optimizer state, carry (buffers, random key) and the step counter, and so
    the schedule, stay as they were, and ``StepInfo.applied`` says so. Only the loss scale moves on every step.

    Classic: ``zero_grad``, ``scale``, ``backward``, ``unscale_``, ``clip_grad_norm_``, ``step``, ``update``,
    ``scheduler.step``, whose order and guards are the caller's task.

    Args:
        grad_fn: from :func:`~functricks.gradient` and its wrappers.
        optimizer: a transform whose updates are added to the parameters.
        loss_scale: from :func:`~functricks.dynamic_loss_scale`; its state is saved with the rest.
        skip_nonfinite: False applies every step, as a bare PyTorch loop does.
        freeze_nonfinite: after so many skips in a row the run has diverged, and stays where it is for good. More than
            a dynamic loss scale may need to come down from where it starts.

    Returns ``TrainStep(init, update)``: ``init(params, carry=()) -> TrainState`` and
    ``update(state, batch) -> (state, StepInfo)``. Both are pure. Under ``vmap`` each lane skips for itself: a diverged
    run never touches its neighbours. ``StepInfo.grad_norm`` is the norm before clipping, float64.

    Parameters that require grad (an ``nn.Parameter``) make the state remember how it came about, step after step, for
    a derivative through training; without that, start from ``functional(model).params``, or train under
    ``torch.no_grad()``.

    >>> from functricks import gradient, sgd
    >>> step = train_step(gradient(lambda params, x: (params["w"] * x).mean()), sgd(0.1))
    >>> state = step.init({"w": torch.tensor(1.0)})
    >>> state, info = step.update(state, torch.tensor([1.0, 3.0]))
    >>> state.params, state.step, info.applied
    ({'w': tensor(0.8000)}, tensor(1), tensor(True))
    """
    check_grad_fn("train_step", grad_fn)
    check_transform("train_step: optimizer", optimizer)
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise TypeError(f"train_step: loss_scale must be a LossScale, got {loss_scale!r}")
    if freeze_nonfinite is not None:
        check_integer("train_step: freeze_nonfinite", freeze_nonfinite, 1)
        if not skip_nonfinite:
            raise ValueError("train_step: freeze_nonfinite needs skip_nonfinite")

    def init(params: Params, carry: Carry = ()) -> TrainState:
        step = counter(params)
        skips: Any = () if freeze_nonfinite is None else counter(params)
        scaling: Any = () if loss_scale is None else tree.map(lambda leaf: leaf.to(step.device), loss_scale.init())
        return TrainState(step, params, optimizer.init(params), carry, scaling, skips)

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, StepInfo]:
        scale = None if loss_scale is None else state.loss_scale.scale
        found = grad_fn(state.params, batch, state.carry, scale=scale)
        peak, relative = tree.norm_parts(found.grads)
        finite = torch.isfinite(peak) & torch.isfinite(relative)
        updates, memory = optimizer.update(found.grads, state.optimizer, state.params)
        new = TrainState(state.step + 1, apply_updates(state.params, updates), memory, found.carry)
        applied = finite if skip_nonfinite else torch.ones_like(finite)
        if freeze_nonfinite is not None:
            applied = applied & (state.skips < freeze_nonfinite)
        if skip_nonfinite:
            new = tree.where(applied, new, state._replace(loss_scale=(), skips=()))
        new = new._replace(
            loss_scale=() if loss_scale is None else loss_scale.update(state.loss_scale, finite),
            skips=() if freeze_nonfinite is None else torch.where(applied, 0, state.skips + 1),
        )
        return new, StepInfo(found.loss, found.weight, peak * relative, applied, found.metrics)

    return TrainStep(init, update)
