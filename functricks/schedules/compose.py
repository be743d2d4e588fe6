"""Schedules made of other things: one after the other, or from a function of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functricks.schedules.base import Curve, as_float64, as_step, unstack
from functricks.types import Number, Schedule

__all__ = ["join", "lambda_schedule"]


@dataclass(frozen=True, eq=False, repr=False)
class join(Curve):
    r"""Run one schedule after the other, each counting steps from its own start.

    .. math:: f(t) = f_i(t - b_{i-1}) \quad \text{for } b_{i-1} \le t < b_i, \qquad b_{-1} = 0

    Classic: :class:`torch.optim.lr_scheduler.SequentialLR`, where its children start from the base rate.

    Args:
        schedules: :math:`f_0, f_1, \ldots`, at least one; schedules of this package or functions like them.
        boundaries: :math:`b_0, b_1, \ldots`, one fewer, none smaller than the one before: a list of numbers and 0-d
            tensors, or one tensor with the boundaries on its last axis. Between two equal ones a schedule has no step,
            so a warm-up may have length 0.

    The last schedule goes on for ever. Raises ValueError where the numbers do not fit or boundaries fall, TypeError for
    a child that cannot be called.

    nanoGPT's schedule, with its warm-up of 2 and a floor:

    >>> from functricks.schedules import constant, cosine_annealing, linear_warmup
    >>> nanogpt = join([linear_warmup(1.0, 3, first_step=1), cosine_annealing(1.0, 4, 0.1), constant(0.1)], [2, 6])
    >>> nanogpt(torch.arange(8))
    tensor([0.3333, 0.6667, 1.0000, 0.8682, 0.5500, 0.2318, 0.1000, 0.1000],
           dtype=torch.float64)
    """

    schedules: Sequence[Schedule]
    boundaries: Sequence[Number] | Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "boundaries", unstack("join: boundaries", self.boundaries))
        object.__setattr__(self, "schedules", tuple(self.schedules))
        super().__post_init__()

    def _validate(self) -> None:
        for child in self.schedules:
            if not callable(child):
                raise TypeError(f"join: schedules must be callable, got {child!r}; use constant(value) for a number")
        if len(self.schedules) != len(self.boundaries) + 1:
            raise ValueError(
                f"join: boundaries lie between schedules, so there must be one fewer, "
                f"got {len(self.schedules)} schedules and {len(self.boundaries)} boundaries"
            )
        self._check_order("boundaries")

    def __call__(self, step: int | Tensor) -> Tensor:
        """Return the value at ``step``: of the one schedule for an int, by selection for a tensor."""
        if isinstance(step, Tensor) or any(isinstance(start, Tensor) for start in self.boundaries):
            return self._value(as_step(step))
        step = max(step, 0)
        chosen = sum(1 for start in self.boundaries if step >= start)  # bisect does not trace
        since = step - self.boundaries[chosen - 1] if chosen else step
        return _of_child(self.schedules[chosen](since))  # type: ignore[arg-type]

    def _value(self, step: Tensor) -> Tensor:
        value = _of_child(self.schedules[0](step), step.device) + torch.zeros_like(step)
        for child, start in zip(self.schedules[1:], self.boundaries, strict=True):
            value = torch.where(step >= start, _of_child(child((step - start).clamp(min=0)), step.device), value)
        return value


def _of_child(value: Any, device: torch.device | None = None) -> Tensor:
    """Return what a child gave as float64, one number as a 0-d tensor: it may be any function of the step."""
    found = as_float64(value, None if isinstance(value, Tensor) else device)
    return found.reshape(()) if found.numel() == 1 else found


@dataclass(frozen=True, eq=False, repr=False)
class lambda_schedule(Curve):
    r"""Multiply ``lr`` by a function of the step.

    .. math:: f(t) = \eta\,\lambda(t)

    Classic: :class:`torch.optim.lr_scheduler.LambdaLR`. ``MultiplicativeLR`` multiplies the last rate by
    :math:`\mu(t)`; its pure form is :math:`\lambda(t) = \prod_{i=1}^t \mu(i)`, ``lambda t: math.prod(map(mu, range(1,
    t + 1)))`` for int steps, and :class:`exponential_decay` for a constant factor.

    Args:
        lr: :math:`\eta`.
        lr_lambda: the function. It gets an int where the step is one, otherwise a float64 tensor, elementwise; written
            with tensor operations it works under vmap and compile. A negative step is given as 0.

    Two are equal where the function is the same object. ``repr`` and pickle work as far as the function's do: use a
    function of a module, or a frozen dataclass with ``__call__``. Raises TypeError where it cannot be called.

    >>> lambda_schedule(0.1, lambda step: 0.5**step)(3)
    tensor(0.0125, dtype=torch.float64)
    """

    lr: Number
    lr_lambda: Callable[[Any], Any]

    def _validate(self) -> None:
        self._check("lr")
        if not callable(self.lr_lambda):
            raise TypeError(f"lambda_schedule: lr_lambda must be a function of the step, got {self.lr_lambda!r}")

    def __call__(self, step: int | Tensor) -> Tensor:
        """Return ``lr`` times the function at ``step``, in the step's shape also where the function is constant."""
        at = as_step(step)
        factor = self.lr_lambda(at if isinstance(step, Tensor) else max(step, 0))
        return self.lr * as_float64(factor, at.device) + torch.zeros_like(at)
