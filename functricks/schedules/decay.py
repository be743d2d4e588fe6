"""Schedules that hold or fall: constant, linear, polynomial, exponential, in steps, along a cosine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from functricks.schedules.base import Curve, at_least, unstack
from functricks.types import Number

__all__ = [
    "constant",
    "cosine_annealing",
    "exponential_decay",
    "inverse_sigmoid",
    "linear",
    "multistep",
    "polynomial",
    "step_decay",
]


@dataclass(frozen=True, eq=False, repr=False)
class constant(Curve):
    r"""Hold one value, or a part of it for the first ``total_iters`` steps.

    .. math:: f(t) = \begin{cases} \eta\,c & t < T \\ \eta & t \ge T \end{cases}

    Classic: :class:`torch.optim.lr_scheduler.ConstantLR` (there ``factor=1/3, total_iters=5``); HuggingFace's
    ``get_constant_schedule``.

    Args:
        lr: :math:`\eta`, the value.
        factor: :math:`c`, what the value is multiplied with at first.
        total_iters: :math:`T \ge 0`, for how many steps. 0 means never.

    Raises ValueError for ``total_iters < 0``.

    >>> constant(0.1)(7)
    tensor(0.1000, dtype=torch.float64)
    >>> constant(1.0, factor=0.5, total_iters=2)(torch.arange(4))
    tensor([0.5000, 0.5000, 1.0000, 1.0000], dtype=torch.float64)
    """

    lr: Number
    factor: Number = 1.0
    total_iters: Number = 0

    def _validate(self) -> None:
        self._check("lr", "factor")
        self._check("total_iters", least=0)

    def _value(self, step: Tensor) -> Tensor:
        whole = torch.zeros_like(step) + self.lr  # a new tensor: the answer never aliases the argument
        if not isinstance(self.factor, Tensor) and self.factor == 1:
            return whole
        return torch.where(step < self.total_iters, whole * self.factor, whole)


@dataclass(frozen=True, eq=False, repr=False)
class linear(Curve):
    r"""Move from ``lr * start_factor`` to ``lr * end_factor`` in a straight line, then stay.

    .. math:: f(t) = \eta \left(a + (b - a) \min(t / T, 1)\right)

    Classic: :class:`torch.optim.lr_scheduler.LinearLR`. Factors above 1 are allowed here.

    Args:
        lr: :math:`\eta`.
        start_factor: :math:`a`, at step 0.
        end_factor: :math:`b`, from step ``total_iters`` on.
        total_iters: :math:`T \ge 0` steps. With 0 the value is ``lr * end_factor`` from the start.

    Raises ValueError for ``total_iters < 0``.

    >>> linear(1.0, start_factor=0.0, end_factor=1.0, total_iters=4)(torch.arange(6))
    tensor([0.0000, 0.2500, 0.5000, 0.7500, 1.0000, 1.0000], dtype=torch.float64)
    """

    lr: Number
    start_factor: Number = 1 / 3
    end_factor: Number = 1.0
    total_iters: Number = 5

    def _validate(self) -> None:
        self._check("lr", "start_factor", "end_factor")
        self._check("total_iters", least=0)

    def _value(self, step: Tensor) -> Tensor:
        return self.lr * (self.start_factor + (self.end_factor - self.start_factor) * ramp(step, self.total_iters))


@dataclass(frozen=True, eq=False, repr=False)
class polynomial(Curve):
    r"""Fall from ``lr`` to 0 within ``total_iters`` steps, along a power.

    .. math:: f(t) = \eta \left(1 - \min(t / T, 1)\right)^p

    Classic: :class:`torch.optim.lr_scheduler.PolynomialLR`. For an end above 0 see
    :class:`polynomial_decay_schedule_with_warmup` with no warm-up.

    Args:
        lr: :math:`\eta`, at step 0.
        total_iters: :math:`T \ge 0`; from this step on the value is 0 (1 for ``power=0``).
        power: :math:`p \ge 0`; 1 is a straight line.

    The derivative at the end, which is infinite for ``power < 1``, is taken as 0.
    Raises ValueError for ``total_iters < 0`` or ``power < 0``.

    >>> polynomial(1.0, total_iters=4, power=2.0)(torch.arange(6))
    tensor([1.0000, 0.5625, 0.2500, 0.0625, 0.0000, 0.0000], dtype=torch.float64)
    """

    lr: Number
    total_iters: Number = 5
    power: Number = 1.0

    def _validate(self) -> None:
        self._check("lr")
        self._check("total_iters", "power", least=0)

    def _value(self, step: Tensor) -> Tensor:
        return self.lr * safe_pow(1 - ramp(step, self.total_iters), self.power)


@dataclass(frozen=True, eq=False, repr=False)
class exponential_decay(Curve):
    r"""Multiply by ``gamma`` every step.

    .. math:: f(t) = \eta\,\gamma^t

    Classic: :class:`torch.optim.lr_scheduler.ExponentialLR`, and ``MultiplicativeLR`` with a constant factor.

    Args:
        lr: :math:`\eta`, at step 0.
        gamma: :math:`\gamma \ge 0`.

    Raises ValueError for ``gamma < 0``.

    >>> exponential_decay(1.0, gamma=0.5)(torch.arange(4))
    tensor([1.0000, 0.5000, 0.2500, 0.1250], dtype=torch.float64)
    """

    lr: Number
    gamma: Number

    def _validate(self) -> None:
        self._check("lr")
        self._check("gamma", least=0)

    def _value(self, step: Tensor) -> Tensor:
        return self.lr * torch.pow(self.gamma, step)


@dataclass(frozen=True, eq=False, repr=False)
class step_decay(Curve):
    r"""Multiply by ``gamma`` every ``step_size`` steps.

    .. math:: f(t) = \eta\,\gamma^{\lfloor t / s \rfloor}

    Classic: :class:`torch.optim.lr_scheduler.StepLR`.

    Args:
        lr: :math:`\eta`, at step 0.
        step_size: :math:`s > 0` steps, not necessarily whole.
        gamma: :math:`\gamma \ge 0`.

    Raises ValueError for ``step_size <= 0`` or ``gamma < 0``.

    >>> step_decay(1.0, step_size=2, gamma=0.5)(torch.arange(6))
    tensor([1.0000, 1.0000, 0.5000, 0.5000, 0.2500, 0.2500], dtype=torch.float64)
    """

    lr: Number
    step_size: Number
    gamma: Number = 0.1

    def _validate(self) -> None:
        self._check("lr")
        self._check("step_size", above=0)
        self._check("gamma", least=0)

    def _value(self, step: Tensor) -> Tensor:
        return self.lr * torch.pow(self.gamma, torch.div(step, self.step_size, rounding_mode="floor"))


@dataclass(frozen=True, eq=False, repr=False)
class multistep(Curve):
    r"""Multiply by ``gamma`` at each milestone.

    .. math:: f(t) = \eta\,\gamma^{\,|\{i : m_i \le t\}|}

    Classic: :class:`torch.optim.lr_scheduler.MultiStepLR`.

    Args:
        lr: :math:`\eta`, at step 0.
        milestones: :math:`m_i \ge 0`, in any order; one that is there twice counts twice. A list of numbers and 0-d
            tensors, or one tensor with the milestones on its last axis. From a milestone on the value is smaller, so a
            milestone 0 counts from the start.
        gamma: :math:`\gamma \ge 0`.

    Raises ValueError where milestones are negative, and for ``gamma < 0``; TypeError for a number in place of the list.

    >>> multistep(1.0, milestones=[2, 4], gamma=0.5)(torch.arange(6))
    tensor([1.0000, 1.0000, 0.5000, 0.5000, 0.2500, 0.2500], dtype=torch.float64)
    """

    lr: Number
    milestones: Sequence[Number] | Tensor
    gamma: Number = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", unstack("multistep: milestones", self.milestones))
        super().__post_init__()

    def _validate(self) -> None:
        self._check("lr")
        self._check("gamma", least=0)
        self._check_steps("milestones")

    def _value(self, step: Tensor) -> Tensor:
        passed = torch.zeros_like(step)
        for milestone in self.milestones:
            passed = passed + (step >= milestone)
        return self.lr * torch.pow(self.gamma, passed)


@dataclass(frozen=True, eq=False, repr=False)
class cosine_annealing(Curve):
    r"""Swing from ``lr`` down to ``eta_min`` at step ``T_max``, and back up after it.

    .. math:: f(t) = \eta_{\min} + \tfrac12 (\eta - \eta_{\min}) \left(1 + \cos(\pi t / T)\right)

    Classic: :class:`torch.optim.lr_scheduler.CosineAnnealingLR`, past ``T_max`` too: the value rises again, to ``lr``
    at ``2 * T_max``. To stay at the bottom, ``join([cosine_annealing(lr, T, low), constant(low)], [T])``.
    Reference: Loshchilov and Hutter 2017, arXiv:1608.03983.

    Args:
        lr: :math:`\eta`, at step 0.
        T_max: :math:`T > 0`, half a period in steps.
        eta_min: :math:`\eta_{\min}`, at step ``T_max`` (not at the step before).

    Raises ValueError for ``T_max <= 0``.

    >>> cosine_annealing(1.0, T_max=4)(torch.arange(6))
    tensor([1.0000, 0.8536, 0.5000, 0.1464, 0.0000, 0.1464], dtype=torch.float64)
    """

    lr: Number
    T_max: Number
    eta_min: Number = 0.0

    def _validate(self) -> None:
        self._check("lr", "eta_min")
        self._check("T_max", above=0)

    def _value(self, step: Tensor) -> Tensor:
        # whole periods are taken off exactly, where the cosine of a large argument would lose digits
        phase = torch.remainder(step, 2 * self.T_max) * math.pi / self.T_max
        return self.eta_min + (self.lr - self.eta_min) * 0.5 * (1 + torch.cos(phase))


@dataclass(frozen=True, eq=False, repr=False)
class inverse_sigmoid(Curve):
    r"""Stay near ``lr``, then fall to 0 along a sigmoid: a decay of scheduled sampling's teacher probability.

    .. math:: f(t) = \eta\,\frac{k}{k + \exp(t / k)}

    Classic: none in PyTorch. Reference: Bengio et al. 2015, arXiv:1506.03099.

    Args:
        lr: :math:`\eta`, 1 for a probability; step 0 has :math:`\eta\,k / (k + 1)`.
        k: :math:`k \ge 1` steps; half is left at step :math:`k \ln k`.

    Raises ValueError for ``k < 1``.

    >>> inverse_sigmoid(1.0, k=10.0)(torch.tensor([0, 23, 100]))
    tensor([9.0909e-01, 5.0065e-01, 4.5379e-04], dtype=torch.float64)
    """

    lr: Number
    k: Number

    def _validate(self) -> None:
        self._check("lr")
        self._check("k", least=1)

    def _value(self, step: Tensor) -> Tensor:
        half = self.k.log() if isinstance(self.k, Tensor) else math.log(self.k)
        return self.lr * torch.sigmoid(half - step / self.k)


def ramp(step: Tensor, length: Number) -> Tensor:
    """Return ``step / length`` and 1 from ``length`` on, so 1 throughout for a length of 0."""
    return torch.where(step < length, step / at_least(length, 1), 1.0)


def safe_pow(base: Tensor, power: Number) -> Tensor:
    """Return ``base ** power`` for a base >= 0; the derivative at base 0 is 0 where it would be infinite."""
    if not isinstance(power, Tensor) and power == 1:
        return base
    positive = base > 0
    at_zero = (power == 0).to(base.dtype) if isinstance(power, Tensor) else float(power == 0)
    return torch.where(positive, torch.pow(torch.where(positive, base, 1.0), power), at_zero)


def safe_sqrt(base: Tensor) -> Tensor:
    """Return the square root, whose derivative at 0 is taken as 0."""
    return safe_pow(base, 0.5)
