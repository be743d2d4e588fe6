"""Schedules that go round: cosine with restarts, one cycle, triangular cycles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functricks.schedules.base import Curve, at_least, one_of
from functricks.types import Number

__all__ = ["cosine_restarts", "cyclic", "one_cycle"]

_MOST_CYCLES = 53  # with T_mult >= 2 every one is twice as long, and float64 counts up to 2**53


@dataclass(frozen=True, eq=False, repr=False)
class cosine_restarts(Curve):
    r"""Fall from ``lr`` towards ``eta_min`` along a cosine, again and again, each cycle ``T_mult`` times as long.

    .. math:: f(t) = \eta_{\min} + \tfrac12 (\eta - \eta_{\min}) \left(1 + \cos(\pi\,p / L_n)\right), \quad
        L_n = T_0 m^n, \quad p = t - \sum_{k<n} L_k \in [0, L_n)

    Classic: :class:`torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`, which never reaches ``eta_min``, since a
    cycle restarts first; ``inclusive=True`` divides by :math:`L_n - 1`, so that a cycle's last step has ``eta_min``.
    Reference: Loshchilov and Hutter 2017, arXiv:1608.03983.

    Args:
        lr: :math:`\eta`, at the first step of each cycle.
        T_0: length of the first cycle, a whole number > 0.
        T_mult: :math:`m`, a whole number >= 1.
        eta_min: :math:`\eta_{\min}`.
        inclusive: whether a cycle reaches ``eta_min``; a cycle of one step has ``lr``.

    The cycle is found by counting whole steps, so borders are exact for steps and cycles up to :math:`2^{53}`.
    Raises ValueError for ``T_0`` or ``T_mult`` that is not whole or too small.

    >>> cosine_restarts(1.0, T_0=2, T_mult=2)(torch.arange(7))
    tensor([1.0000, 0.5000, 1.0000, 0.8536, 0.5000, 0.1464, 1.0000],
           dtype=torch.float64)
    >>> cosine_restarts(1.0, T_0=3, inclusive=True)(torch.arange(6))
    tensor([1.0000, 0.5000, 0.0000, 1.0000, 0.5000, 0.0000], dtype=torch.float64)
    """

    lr: Number
    T_0: Number
    T_mult: Number = 1
    eta_min: Number = 0.0
    inclusive: bool = False

    def _validate(self) -> None:
        self._check("lr", "eta_min")
        self._check("T_0", "T_mult", least=1)
        for name in ("T_0", "T_mult"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) and value != int(value):
                raise ValueError(f"cosine_restarts: {name} must be a whole number, got {value!r}")
        if not isinstance(self.inclusive, bool):
            raise TypeError(f"cosine_restarts: inclusive must be True or False, got {self.inclusive!r}")

    def _value(self, step: Tensor) -> Tensor:
        start: Number = 0
        if isinstance(self.T_mult, Tensor) or self.T_mult > 1:
            start = self._finished(step)
        length = self.T_0 + (self.T_mult - 1) * start  # a geometric series: the next term from the sum so far
        position = torch.remainder(step - start, length)  # the remainder serves T_mult = 1
        end = at_least(length - 1, 1) if self.inclusive else length
        return self.eta_min + (self.lr - self.eta_min) * 0.5 * (1 + torch.cos(math.pi * position / end))

    def _finished(self, step: Tensor) -> Tensor:
        """Return how many steps the finished cycles have together: products and sums of integers, which are exact."""
        origin = torch.zeros_like(step) + 0 * self.T_0 + 0 * self.T_mult  # in the shape and on the device of all three
        first, ratio = (origin + self.T_0).unsqueeze(-1), (origin + self.T_mult).unsqueeze(-1)
        lengths = torch.cat([first, ratio.expand(*ratio.shape[:-1], _MOST_CYCLES - 1)], -1).cumprod(-1)
        return torch.where(step.unsqueeze(-1) >= lengths.cumsum(-1), lengths, 0.0).sum(-1)


@dataclass(frozen=True, eq=False, repr=False)
class one_cycle(Curve):
    r"""Rise from ``max_lr / div_factor`` to ``max_lr``, then fall far below the start: one cycle for the whole run.

    With :math:`T` = ``total_steps`` and :math:`p` = ``pct_start``: up until step :math:`pT - 1`, then down to
    ``max_lr / div_factor / final_div_factor`` at step :math:`T - 1`. With ``three_phase`` down to the start at step
    :math:`2pT - 2`, then on to the end. Between two values :math:`a, b` with :math:`x` from 0 to 1:

    .. math:: b + \tfrac12 (a - b) (1 + \cos \pi x) \quad \text{or} \quad a + (b - a)\,x

    Classic: :class:`torch.optim.lr_scheduler.OneCycleLR`, which raises after ``total_steps``; here the value of the
    last step stays. Its momentum is another such curve:
    ``one_cycle(base_momentum, T, div_factor=base_momentum / max_momentum, final_div_factor=1.0)``.
    Reference: Smith and Topin 2018, arXiv:1708.07120.

    Args:
        max_lr: the peak.
        total_steps: :math:`T \ge 1`.
        pct_start: :math:`p \in [0, 1]`, the part of the run that rises.
        anneal_strategy: "cos" or "linear".
        div_factor: peak over start, > 0.
        final_div_factor: start over end, > 0.
        three_phase: whether the fall has two parts.

    A phase without length is left out. Raises ValueError for arguments out of range, TypeError for a ``three_phase``
    that is not a bool.

    >>> one_cycle(1.0, total_steps=5, pct_start=0.4, anneal_strategy="linear", div_factor=4.0)(torch.arange(6))
    tensor([2.5000e-01, 1.0000e+00, 6.6668e-01, 3.3335e-01, 2.5000e-05, 2.5000e-05],
           dtype=torch.float64)
    """

    max_lr: Number
    total_steps: Number
    pct_start: Number = 0.3
    anneal_strategy: str = "cos"
    div_factor: Number = 25.0
    final_div_factor: Number = 1e4
    three_phase: bool = False

    def _validate(self) -> None:
        self._check("max_lr")
        self._check("total_steps", least=1)
        self._check("pct_start", least=0, most=1)
        self._check("div_factor", "final_div_factor", above=0)
        one_of("one_cycle", "anneal_strategy", self.anneal_strategy, ("cos", "linear"))
        if not isinstance(self.three_phase, bool):
            raise TypeError(f"one_cycle: three_phase must be True or False, got {self.three_phase!r}")

    def _value(self, step: Tensor) -> Tensor:
        start = self.max_lr / self.div_factor
        final = start / self.final_div_factor
        peak, last = self.pct_start * self.total_steps - 1, self.total_steps - 1
        step = torch.minimum(step, last) if isinstance(last, Tensor) else step.clamp(max=last)
        rise = self._anneal(start, self.max_lr, step, 0, peak)
        if not self.three_phase:
            return torch.where(step <= peak, rise, self._anneal(self.max_lr, final, step, peak, last))
        valley = 2 * self.pct_start * self.total_steps - 2
        fall = self._anneal(self.max_lr, start, step, peak, valley)
        rest = self._anneal(start, final, step, valley, last)
        return torch.where(step <= peak, rise, torch.where(step <= valley, fall, rest))

    def _anneal(self, low: Number, high: Number, step: Tensor, begin: Number, end: Number) -> Tensor:
        done = (step - begin) / _positive(end - begin)
        if self.anneal_strategy == "linear":
            return low + (high - low) * done
        return high + (low - high) * 0.5 * (1 + torch.cos(math.pi * done))


@dataclass(frozen=True, eq=False, repr=False)
class cyclic(Curve):
    r"""Go from ``lr`` up to ``max_lr`` and back in straight lines, over and over, with a height that may shrink.

    .. math:: f(t) = \eta + (\eta_{\max} - \eta)\,h(t)\,g, \qquad n = \lfloor 1 + t / (u + d) \rfloor

    where :math:`h` rises from 0 to 1 in :math:`u` steps and falls back in :math:`d`, and :math:`g` is 1
    ("triangular"), :math:`2^{1-n}` ("triangular2"), :math:`\gamma^t` ("exp_range"), or ``scale_fn`` of :math:`n` or
    :math:`t`.

    Classic: :class:`torch.optim.lr_scheduler.CyclicLR` (``lr`` is its ``base_lr``). Its momentum is
    ``cyclic(max_momentum, base_momentum, ...)``. Reference: Smith 2017, arXiv:1506.01186.

    Args:
        lr: :math:`\eta`, the bottom.
        max_lr: :math:`\eta_{\max}`, the top.
        step_size_up: :math:`u > 0` steps.
        step_size_down: :math:`d \ge 0` steps. None: as ``step_size_up``.
        mode: "triangular", "triangular2" or "exp_range"; without effect where ``scale_fn`` is given.
        gamma: :math:`\gamma \ge 0`, for "exp_range".
        scale_fn: a function of a float64 tensor, elementwise.
        scale_mode: "cycle" gives ``scale_fn`` the number of the cycle, from 1; "iterations" gives it the step.

    Raises ValueError for arguments out of range, TypeError for a ``scale_fn`` that cannot be called.

    >>> cyclic(0.0, 1.0, step_size_up=2, mode="triangular2")(torch.arange(7))
    tensor([0.0000, 0.5000, 1.0000, 0.5000, 0.0000, 0.2500, 0.5000],
           dtype=torch.float64)
    """

    lr: Number
    max_lr: Number
    step_size_up: Number = 2000
    step_size_down: Number | None = None
    mode: str = "triangular"
    gamma: Number = 1.0
    scale_fn: Callable[[Tensor], Any] | None = None
    scale_mode: str = "cycle"

    def _validate(self) -> None:
        self._check("lr", "max_lr")
        self._check("step_size_up", above=0)
        if self.step_size_down is not None:
            self._check("step_size_down", least=0)
        self._check("gamma", least=0)
        one_of("cyclic", "scale_mode", self.scale_mode, ("cycle", "iterations"))
        if self.scale_fn is None:
            one_of("cyclic", "mode", self.mode, ("triangular", "triangular2", "exp_range"))
        elif not callable(self.scale_fn):
            raise TypeError(f"cyclic: scale_fn must be a function of a tensor, got {self.scale_fn!r}")

    def _value(self, step: Tensor) -> Tensor:
        period = self.step_size_up + (self.step_size_up if self.step_size_down is None else self.step_size_down)
        turn = self.step_size_up / period
        cycle = torch.floor(1 + step / period)
        within = 1 + step / period - cycle  # CyclicLR's own order: for tiny cycles rounding shows after 10,000 steps
        height = torch.where(within <= turn, within / turn, (1 - within) / _positive(1 - turn))
        return self.lr + (self.max_lr - self.lr) * height * self._scale(step, cycle)

    def _scale(self, step: Tensor, cycle: Tensor) -> Number | Any:
        if self.scale_fn is not None:
            return self.scale_fn(cycle if self.scale_mode == "cycle" else step)
        if self.mode == "triangular2":
            return torch.pow(0.5, cycle - 1)
        return torch.pow(self.gamma, step) if self.mode == "exp_range" else 1.0


def _positive(length: Number) -> Number:
    """Return a length to divide by: 1 for one that is not positive, whose phase is never chosen."""
    if isinstance(length, Tensor):
        return torch.where(length > 0, length, 1.0)
    return length if length > 0 else 1.0
