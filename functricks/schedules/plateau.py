"""Reduce on plateau: the one schedule that needs a memory, as a pure state machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functricks.schedules.base import is_number, one_of
from functricks.types import Number

__all__ = ["Plateau", "PlateauState", "reduce_on_plateau"]


class PlateauState(NamedTuple):
    """The memory of :func:`reduce_on_plateau`: rate and best metric, float64, and two int64 counters, of one shape."""

    lr: Tensor
    best: Tensor
    num_bad_epochs: Tensor
    cooldown_counter: Tensor


class Plateau(NamedTuple):
    """A pure state machine: ``init(lr) -> state``, ``update(metric, state) -> (lr, state)``."""

    init: Callable[[Number], PlateauState]
    update: Callable[[Number, PlateauState], tuple[Tensor, PlateauState]]


def reduce_on_plateau(
    mode: str = "min",
    factor: Number = 0.1,
    patience: Number = 10,
    threshold: Number = 1e-4,
    threshold_mode: str = "rel",
    cooldown: Number = 0,
    min_lr: Number | Sequence[Number] = 0.0,
    eps: Number = 1e-8,
    *,
    relative_to: str = "value",
) -> Plateau:
    r"""Multiply the rate by ``factor`` when a metric has not improved for more than ``patience`` updates.

    A metric :math:`m` improves on the best one :math:`b` (in mode "min"; "max" mirrors it) where

    .. math:: m < b\,(1 - \epsilon) \;\text{("rel")}, \qquad m < b - \epsilon \;\text{("abs")}, \qquad
        m < b - \epsilon\,|b| \;\text{("rel", relative to the magnitude)}

    An update without improvement is a bad one, and so is one whose metric is NaN. The bad update number
    ``patience + 1`` in a row reduces the rate to :math:`\max(\eta \cdot \text{factor}, \text{min\_lr})`, unless that
    changes it by ``eps`` or less; the count starts anew, and the next ``cooldown`` updates cannot be bad.

    Classic: :class:`torch.optim.lr_scheduler.ReduceLROnPlateau`, equal to the bit, the metric taken in float64. With
    "rel" and a negative best, its rule (``relative_to="value"``) takes a slightly worse metric for an improvement:
    after -1, -0.99995 counts as better. ``relative_to="magnitude"`` is right for either sign.

    Args:
        mode: "min" where lower is better, "max" where higher is.
        factor: in [0, 1).
        patience: how many bad updates in a row are borne, >= 0.
        threshold: :math:`\epsilon \ge 0`.
        threshold_mode: "rel" or "abs".
        cooldown: a whole number >= 0 of updates after a reduction.
        min_lr: the floor of the rate; it may be a list or a tensor with an entry for each rate.
        eps: the smallest change of the rate that is made, >= 0.
        relative_to: "value" or "magnitude", for "rel".

    Every number may be a tensor, with a value for each lane under vmap. The rate given to ``init`` may have a shape,
    for parameter groups or lanes: every entry has its own counters. The state is tensors only: save it as any pytree,
    whole (``best`` alone does not resume). A warm-up is a factor on the rate, which leaves the state alone:
    ``lr = linear_warmup(1.0, 500)(step) * state.lr``; start to call ``update`` when the warm-up is over.

    A metric of one element may have any shape. Raises ValueError for arguments out of range and for a metric of another
    shape than the rate's, TypeError for what is not a number.

    >>> plateau = reduce_on_plateau(patience=1, factor=0.5)
    >>> state = plateau.init(0.1)
    >>> for loss in [1.0, 0.8, 0.8, 0.8]:
    ...     lr, state = plateau.update(loss, state)
    >>> lr, int(state.num_bad_epochs)
    (tensor(0.0500, dtype=torch.float64), 0)
    """
    one_of("reduce_on_plateau", "mode", mode, ("min", "max"))
    one_of("reduce_on_plateau", "threshold_mode", threshold_mode, ("rel", "abs"))
    one_of("reduce_on_plateau", "relative_to", relative_to, ("value", "magnitude"))
    if threshold_mode == "abs" and relative_to != "value":
        raise ValueError("reduce_on_plateau: relative_to='magnitude' needs threshold_mode='rel', got 'abs'")
    if isinstance(min_lr, (list, tuple)):
        for one in min_lr:
            _check_numbers(min_lr=one)
        floor: Number = torch.stack([torch.as_tensor(one, dtype=torch.float64) for one in min_lr])
    else:
        floor = min_lr  # type: ignore[assignment]  # a number or a tensor, which is checked next
    _check_numbers(patience=patience, threshold=threshold, cooldown=cooldown, eps=eps, factor=factor, min_lr=floor)
    better = _improvement(mode, _float64(threshold), threshold_mode, relative_to)
    factor, floor, eps = _float64(factor), _float64(floor), _float64(eps)
    patience = _float64(patience)
    pause = cooldown.to(torch.int64, copy=True) if isinstance(cooldown, Tensor) else int(cooldown)

    def init(lr: Number) -> PlateauState:
        rate = torch.as_tensor(lr, dtype=torch.float64).clone()  # never the caller's own tensor
        zero = torch.zeros_like(rate, dtype=torch.int64)
        return PlateauState(rate, torch.full_like(rate, math.inf if mode == "min" else -math.inf), zero, zero.clone())

    def update(metric: Number, state: PlateauState) -> tuple[Tensor, PlateauState]:
        current = _metric(metric, state.lr)
        improved = better(current, state.best)
        cooling = state.cooldown_counter > 0
        bad = torch.where(improved | cooling, 0, state.num_bad_epochs + 1)
        reduce = bad > patience
        reduced = torch.maximum(state.lr * factor, torch.as_tensor(floor, dtype=torch.float64))
        lr = torch.where(reduce & (state.lr - reduced > eps), reduced, state.lr)
        waiting = state.cooldown_counter - cooling.to(torch.int64)
        return lr, PlateauState(
            lr=lr,
            best=torch.where(improved, current, state.best),
            num_bad_epochs=torch.where(reduce, 0, bad),
            cooldown_counter=torch.where(reduce, pause, waiting),
        )

    return Plateau(init, update)


def _metric(metric: Number, rate: Tensor) -> Tensor:
    """Return the metric as float64: one number as a 0-d tensor, several only where each has its own rate."""
    current = torch.as_tensor(metric, dtype=torch.float64)
    if current.numel() == 1:
        return current.reshape(())
    sizes = zip(reversed(current.shape), reversed(rate.shape), strict=False)
    if current.ndim > rate.ndim or any(size not in (1, full) for size, full in sizes):
        raise ValueError(
            f"reduce_on_plateau: metric must be one number, or one for each rate in the shape {tuple(rate.shape)}, "
            f"got shape {tuple(current.shape)}"
        )
    return current


def _improvement(
    mode: str, threshold: Number, threshold_mode: str, relative_to: str
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return ``better(metric, best)``, in the order of operations of ReduceLROnPlateau."""
    sign = -1 if mode == "min" else 1

    def better(metric: Tensor, best: Tensor) -> Tensor:
        if relative_to == "magnitude":
            # before the first metric the best is infinite, and infinity times a threshold of 0 would be NaN
            magnitude = torch.where(best.isinf(), 0.0, best.abs())
            bar = best + sign * threshold * magnitude
        elif threshold_mode == "rel":
            bar = best * (1.0 + sign * threshold)
        else:
            bar = best + sign * threshold
        return metric < bar if mode == "min" else metric > bar

    return better


def _float64(value: Number) -> Number:
    return value.to(torch.float64, copy=True) if isinstance(value, Tensor) else value


def _check_numbers(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, Tensor):
            continue
        if not is_number(value):
            raise TypeError(f"reduce_on_plateau: {name} must be a number or a tensor, got {value!r}")
        if not (value >= 0 or name == "min_lr"):
            raise ValueError(f"reduce_on_plateau: {name} must be >= 0, got {value!r}")
        if name == "factor" and not value < 1:
            raise ValueError(f"reduce_on_plateau: factor must be < 1 to reduce anything, got {value!r}")
        if name == "cooldown" and value != int(value):
            raise ValueError(f"reduce_on_plateau: cooldown must be a whole number of updates, got {value!r}")
