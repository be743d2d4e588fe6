"""Schedules that start low: a linear warm-up, and HuggingFace's schedules with one.

All of HuggingFace's take ``lr`` where theirs take the optimizer, and keep the other names. They share these rules:

- the warm-up is ``lr * step / num_warmup_steps``, so the first update has lr 0, and update ``num_warmup_steps`` is the
  first with the whole rate; :class:`linear_warmup` has the other convention too;
- a warm-up of 0 steps starts at the whole rate;
- with ``num_training_steps == num_warmup_steps`` linear and polynomial are at their end from that step on, while the
  cosines have the whole rate at that step and are at their end from the next;
- ``num_training_steps < num_warmup_steps`` raises ValueError for Python numbers. For tensors, which are never looked
  at, the warm-up goes on to its own end, as at HuggingFace;
- what comes after ``num_training_steps`` is said at each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from functricks.schedules.base import Curve, at_least, one_of
from functricks.schedules.decay import constant, ramp, safe_pow, safe_sqrt
from functricks.types import Number

__all__ = [
    "constant_schedule",
    "constant_schedule_with_warmup",
    "cosine_schedule_with_warmup",
    "cosine_with_hard_restarts_schedule_with_warmup",
    "inverse_sqrt",
    "inverse_sqrt_schedule",
    "linear_schedule_with_warmup",
    "linear_warmup",
    "polynomial_decay_schedule_with_warmup",
    "wsd",
    "wsd_schedule",
]


@dataclass(frozen=True, eq=False, repr=False)
class linear_warmup(Curve):
    r"""Rise from ``lr * start_factor`` to ``lr`` in a straight line, then stay.

    .. math:: f(t) = \eta \left(a + (1 - a) \min\left(\frac{t + s}{w}, 1\right)\right)

    The conventions in use, for :math:`w = 4`, :math:`\eta = 1` and updates 0, 1, ...:

    ====================================  ==============================  ========================
    call                                  values                          as in
    ====================================  ==============================  ========================
    ``linear_warmup(1, 4)``               0, 0.25, 0.5, 0.75, 1, 1        HuggingFace
    ``linear_warmup(1, 4, first_step=1)`` 0.25, 0.5, 0.75, 1, 1, 1        :math:`(t + 1) / w`
    ``linear_warmup(1, 5, first_step=1)`` 0.2, 0.4, 0.6, 0.8, 1, 1        nanoGPT, warm-up 4
    ====================================  ==============================  ========================

    Classic: ``get_constant_schedule_with_warmup`` of HuggingFace; :class:`torch.optim.lr_scheduler.LinearLR`.
    Reference: Goyal et al. 2017, arXiv:1706.02677. Multiplied with another schedule it warms that one up.

    Args:
        lr: :math:`\eta`, after the warm-up.
        num_warmup_steps: :math:`w \ge 0`. With 0 the value is ``lr`` from the start.
        first_step: :math:`s`: 0 where the first update has ``lr * start_factor``, 1 where it is one step on its way.
        start_factor: :math:`a`.

    Raises ValueError for ``num_warmup_steps < 0`` and a ``first_step`` other than 0 and 1.

    >>> linear_warmup(1.0, 4, first_step=1)(torch.arange(6))
    tensor([0.2500, 0.5000, 0.7500, 1.0000, 1.0000, 1.0000], dtype=torch.float64)
    """

    lr: Number
    num_warmup_steps: Number
    first_step: Number = 0
    start_factor: Number = 0.0

    def _validate(self) -> None:
        self._check("lr", "start_factor", "first_step")
        self._check("num_warmup_steps", least=0)
        if not isinstance(self.first_step, Tensor) and self.first_step not in (0, 1):
            raise ValueError(
                f"linear_warmup: first_step must be 0 (the first update has lr * start_factor) or 1, "
                f"got {self.first_step!r}"
            )

    def _value(self, step: Tensor) -> Tensor:
        if not isinstance(self.first_step, Tensor) and self.first_step == 0:
            done = ramp(step, self.num_warmup_steps)
        else:
            done = ramp(step + self.first_step, self.num_warmup_steps)
        if not isinstance(self.start_factor, Tensor) and self.start_factor == 0:
            return self.lr * done
        return self.lr * (self.start_factor + (1 - self.start_factor) * done)


def constant_schedule(lr: Number) -> Curve:
    """Hold ``lr``: HuggingFace's name for :class:`constant`.

    Classic: ``get_constant_schedule``.

    >>> constant_schedule(0.1) == constant(0.1)
    True
    """
    return constant(lr)


def constant_schedule_with_warmup(lr: Number, num_warmup_steps: Number) -> Curve:
    r"""Rise from 0 to ``lr``, then stay: :class:`linear_warmup` with ``first_step=0``.

    .. math:: f(t) = \eta \min(t / w, 1)

    Classic: ``get_constant_schedule_with_warmup``.

    Args:
        lr: :math:`\eta`.
        num_warmup_steps: :math:`w \ge 0`.

    Raises ValueError for ``num_warmup_steps < 0``.

    >>> constant_schedule_with_warmup(1.0, 4)(torch.arange(6))
    tensor([0.0000, 0.2500, 0.5000, 0.7500, 1.0000, 1.0000], dtype=torch.float64)
    """
    return linear_warmup(lr, num_warmup_steps)


@dataclass(frozen=True, eq=False, repr=False)
class _Warmed(Curve):
    """A linear warm-up from 0 to ``lr``, then a decay from step ``num_warmup_steps`` to ``num_training_steps``."""

    lr: Number
    num_warmup_steps: Number
    num_training_steps: Number

    def _validate(self) -> None:
        self._check("lr")
        self._check("num_warmup_steps", "num_training_steps", least=0)
        warmup, total = self.num_warmup_steps, self.num_training_steps
        if not isinstance(warmup, Tensor) and not isinstance(total, Tensor) and total < warmup:
            raise ValueError(
                f"{type(self).__name__}: num_training_steps counts the warm-up too and must be >= num_warmup_steps, "
                f"got {total!r} < {warmup!r}"
            )

    def _value(self, step: Tensor) -> Tensor:
        warmup = self.num_warmup_steps
        after = self._after(step - warmup, at_least(self.num_training_steps - warmup, 1))
        return torch.where(step < warmup, self.lr * (step / at_least(warmup, 1)), after)

    def _after(self, since: Tensor, length: Number) -> Tensor:
        """Return the value ``since`` steps after the warm-up, finite also where ``since`` is negative."""
        raise NotImplementedError

    def _left(self, since: Tensor, length: Number) -> Tensor:
        """Return how much of the decay is left: 1 at its start, 0 from ``num_training_steps`` on."""
        span = self.num_training_steps - self.num_warmup_steps  # 0 where length is 1 only because it divides
        return ((span - since) / length).clamp(min=0, max=1)


@dataclass(frozen=True, eq=False, repr=False)
class linear_schedule_with_warmup(_Warmed):
    r"""Rise from 0 to ``lr``, then fall to 0 in a straight line, then stay at 0.

    .. math:: f(t) = \eta \begin{cases} t / w & t < w \\ \max\left(0, \frac{T - t}{T - w}\right) & t \ge w \end{cases}

    Classic: ``get_linear_schedule_with_warmup``. Reference: Devlin et al. 2019, arXiv:1810.04805.

    Args:
        lr: :math:`\eta`, at step ``num_warmup_steps``.
        num_warmup_steps: :math:`w \ge 0`.
        num_training_steps: :math:`T \ge w`, the first step with 0; an update :math:`T - 1` is the last that moves.

    With :math:`T = w` the value is 0 from step :math:`T` on. Raises ValueError for ``num_warmup_steps < 0`` and
    ``num_training_steps < num_warmup_steps``.

    Every number may differ from lane to lane; a sweep over the length of the warm-up is one program:

    >>> at = lambda warmup, step: linear_schedule_with_warmup(1.0, warmup, 8)(step)
    >>> torch.func.vmap(at, (0, None))(torch.tensor([0, 2, 4]), torch.tensor(3))
    tensor([0.6250, 0.8333, 0.7500], dtype=torch.float64)
    """

    def _after(self, since: Tensor, length: Number) -> Tensor:
        return self.lr * self._left(since, length)


@dataclass(frozen=True, eq=False, repr=False)
class cosine_schedule_with_warmup(_Warmed):
    r"""Rise from 0 to ``lr``, then follow a cosine, with the default half wave down to ``min_lr``.

    .. math:: f(t) = \eta_{\min} + (\eta - \eta_{\min}) \tfrac12 \left(1 + \cos\left(2 \pi c\,x\right)\right),
        \quad x = \frac{t - w}{T - w} \ge 0

    Classic: ``get_cosine_schedule_with_warmup``, ``get_cosine_with_min_lr_schedule_with_warmup``. As there, the wave
    goes on past ``num_training_steps``, so the value rises again; ``join`` with ``constant`` to stay.

    Args:
        lr: :math:`\eta`, at step ``num_warmup_steps``.
        num_warmup_steps: :math:`w \ge 0`.
        num_training_steps: :math:`T \ge w`, where the wave has swung ``num_cycles`` times.
        num_cycles: :math:`c`, waves; 0.5 goes down once.
        min_lr: :math:`\eta_{\min}`, the bottom of the wave (the warm-up starts from 0 all the same).

    Raises ValueError for ``num_warmup_steps < 0`` and ``num_training_steps < num_warmup_steps``.

    >>> cosine_schedule_with_warmup(1.0, 2, 6)(torch.arange(8))
    tensor([0.0000, 0.5000, 1.0000, 0.8536, 0.5000, 0.1464, 0.0000, 0.1464],
           dtype=torch.float64)
    """

    num_cycles: Number = 0.5
    min_lr: Number = 0.0

    def _validate(self) -> None:
        super()._validate()
        self._check("num_cycles", "min_lr")

    def _after(self, since: Tensor, length: Number) -> Tensor:
        wave = 0.5 * (1 + torch.cos(since / length * (2 * math.pi * self.num_cycles)))
        return self.min_lr + (self.lr - self.min_lr) * wave


@dataclass(frozen=True, eq=False, repr=False)
class cosine_with_hard_restarts_schedule_with_warmup(_Warmed):
    r"""Rise from 0 to ``lr``, then fall along a cosine ``num_cycles`` times, then stay at 0.

    .. math:: f(t) = \eta\,\tfrac12 \left(1 + \cos\left(\pi \left(c\,\tfrac{t - w}{T - w} \bmod 1\right)\right)\right),
        \quad w \le t < T

    Classic: ``get_cosine_with_hard_restarts_schedule_with_warmup``. Where a cycle starts on a whole step, it starts
    here at ``lr`` for every number of cycles; there, from 22 cycles on, rounding makes some of them start at 0.
    Reference: Loshchilov and Hutter 2017, arXiv:1608.03983.

    Args:
        lr: :math:`\eta`, at the start of each cycle.
        num_warmup_steps: :math:`w \ge 0`.
        num_training_steps: :math:`T \ge w`; from this step on the value is 0 (from the next one where :math:`T = w`).
        num_cycles: :math:`c > 0`.

    Raises ValueError for ``num_warmup_steps < 0``, ``num_training_steps < num_warmup_steps`` and ``num_cycles <= 0``.

    >>> cosine_with_hard_restarts_schedule_with_warmup(1.0, 0, 4, num_cycles=2)(torch.arange(6))
    tensor([1.0000, 0.5000, 1.0000, 0.5000, 0.0000, 0.0000], dtype=torch.float64)
    """

    num_cycles: Number = 1

    def _validate(self) -> None:
        super()._validate()
        self._check("num_cycles", above=0)

    def _after(self, since: Tensor, length: Number) -> Tensor:
        within = torch.remainder(since * self.num_cycles, length) / length  # whole numbers: exact where a cycle starts
        return self.lr * torch.where(since < length, 0.5 * (1 + torch.cos(math.pi * within)), 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class polynomial_decay_schedule_with_warmup(_Warmed):
    r"""Rise from 0 to ``lr``, then fall to ``lr_end`` along a power, then stay.

    .. math:: f(t) = \eta_e + (\eta - \eta_e) \left(1 - \frac{t - w}{T - w}\right)^p, \quad w \le t \le T

    Classic: ``get_polynomial_decay_schedule_with_warmup``, which divides by zero where :math:`T = w`; here the value is
    ``lr_end`` from that step on.

    Args:
        lr: :math:`\eta`, at step ``num_warmup_steps``.
        num_warmup_steps: :math:`w \ge 0`.
        num_training_steps: :math:`T \ge w`; from this step on the value is ``lr_end``.
        lr_end: :math:`\eta_e < \eta`.
        power: :math:`p \ge 0`.

    The derivative at the end, which is infinite for ``power < 1``, is taken as 0. Raises ValueError for
    ``num_warmup_steps < 0``, ``num_training_steps < num_warmup_steps``, ``lr_end >= lr`` and ``power < 0``.

    >>> polynomial_decay_schedule_with_warmup(1.0, 2, 6, lr_end=0.2)(torch.arange(8))
    tensor([0.0000, 0.5000, 1.0000, 0.8000, 0.6000, 0.4000, 0.2000, 0.2000],
           dtype=torch.float64)
    """

    lr_end: Number = 1e-7
    power: Number = 1.0

    def _validate(self) -> None:
        super()._validate()
        self._check("lr_end")
        self._check("power", least=0)
        if not isinstance(self.lr, Tensor) and not isinstance(self.lr_end, Tensor) and self.lr_end >= self.lr:
            raise ValueError(
                f"polynomial_decay_schedule_with_warmup: lr_end must be smaller than lr, "
                f"got {self.lr_end!r} and lr {self.lr!r}"
            )

    def _after(self, since: Tensor, length: Number) -> Tensor:
        return self.lr_end + (self.lr - self.lr_end) * safe_pow(self._left(since, length), self.power)


@dataclass(frozen=True, eq=False, repr=False)
class inverse_sqrt(Curve):
    r"""Rise from 0 to ``lr``, then fall as the inverse square root of the step.

    .. math:: f(t) = \eta \begin{cases} t / w & t < w \\ \left(1 + (t - w) / \tau\right)^{-1/2} & t \ge w \end{cases}

    With the default :math:`\tau = w` this is :math:`\eta \sqrt{w / t}`, the schedule of the first Transformer.

    Classic: ``get_inverse_sqrt_schedule``, whose name :data:`inverse_sqrt_schedule` is kept too.
    Reference: Vaswani et al. 2017, arXiv:1706.03762; Zhai et al. 2022, arXiv:2106.04560.

    Args:
        lr: :math:`\eta`, at step ``num_warmup_steps``.
        num_warmup_steps: :math:`w \ge 0`.
        timescale: :math:`\tau > 0` steps. None: ``num_warmup_steps``, or 10,000 where that is 0.

    It falls for ever. Raises ValueError for ``num_warmup_steps < 0`` and ``timescale <= 0``.

    >>> inverse_sqrt(1.0, 4)(torch.tensor([0, 2, 4, 16, 64]))
    tensor([0.0000, 0.5000, 1.0000, 0.5000, 0.2500], dtype=torch.float64)
    """

    lr: Number
    num_warmup_steps: Number
    timescale: Number | None = None

    def _validate(self) -> None:
        self._check("lr")
        self._check("num_warmup_steps", least=0)
        if self.timescale is not None:
            self._check("timescale", above=0)

    def _value(self, step: Tensor) -> Tensor:
        warmup = self.num_warmup_steps
        fall = torch.rsqrt(1 + (step - warmup).clamp(min=0) / self._scale())
        return self.lr * torch.where(step < warmup, step / at_least(warmup, 1), fall)

    def _scale(self) -> Number:
        if self.timescale is not None:
            return self.timescale
        warmup = self.num_warmup_steps
        return torch.where(warmup == 0, 10_000.0, warmup) if isinstance(warmup, Tensor) else warmup or 10_000


@dataclass(frozen=True, eq=False, repr=False)
class wsd(Curve):
    r"""Warm up, stay stable, decay: rise to ``lr``, hold it, fall to ``lr * min_lr_ratio``, and stay there.

    .. math:: f(t) = \eta \begin{cases} r + (1 - r)\,u(t / w) & t < w \\ 1 & t < w + s \\
        r + (1 - r)\,v((t - w - s) / d) & t < w + s + d \\ r & \text{after} \end{cases}

    with :math:`u(x) = x,\ \tfrac12(1 - \cos \pi x),\ 1 - \sqrt{1 - x}` and
    :math:`v(x) = 1 - x,\ \tfrac12(1 + \cos 2 \pi c x),\ 1 - \sqrt x` for ``"linear"``, ``"cosine"``, ``"1-sqrt"``.

    Classic: ``get_wsd_schedule``, whose name :data:`wsd_schedule` is kept too.
    Reference: Hu et al. 2024, arXiv:2404.06395; Haegele et al. 2024, arXiv:2405.18392.

    Args:
        lr: :math:`\eta`, on the plateau.
        num_warmup_steps: :math:`w \ge 0`.
        num_decay_steps: :math:`d \ge 0`.
        num_training_steps: :math:`w + s + d`; needed where ``num_stable_steps`` is None.
        num_stable_steps: :math:`s \ge 0`. None: what the other two leave of ``num_training_steps``.
        warmup_type, decay_type: "linear", "cosine" or "1-sqrt".
        min_lr_ratio: :math:`r`, where the warm-up starts and the decay ends.
        num_cycles: :math:`c`, waves of the decay by cosine; 0.5 goes down once.

    The derivative at the start of a "1-sqrt" decay, which is infinite, is taken as 0. Raises ValueError for a negative
    number of steps, for fewer training steps than warm-up and decay need, where ``num_training_steps`` and
    ``num_stable_steps`` are both missing or contradict each other, and for an unknown type.

    >>> wsd(1.0, 2, 4, num_stable_steps=2, decay_type="linear")(torch.arange(9))
    tensor([0.0000, 0.5000, 1.0000, 1.0000, 1.0000, 0.7500, 0.5000, 0.2500, 0.0000],
           dtype=torch.float64)
    """

    lr: Number
    num_warmup_steps: Number
    num_decay_steps: Number
    num_training_steps: Number | None = None
    num_stable_steps: Number | None = None
    warmup_type: str = "linear"
    decay_type: str = "cosine"
    min_lr_ratio: Number = 0.0
    num_cycles: Number = 0.5

    def _validate(self) -> None:
        self._check("lr", "min_lr_ratio", "num_cycles")
        self._check("num_warmup_steps", "num_decay_steps", least=0)
        one_of("wsd", "warmup_type", self.warmup_type, ("linear", "cosine", "1-sqrt"))
        one_of("wsd", "decay_type", self.decay_type, ("linear", "cosine", "1-sqrt"))
        for name in ("num_training_steps", "num_stable_steps"):
            if getattr(self, name) is not None:
                self._check(name, least=0)
        self._check_total()

    def _check_total(self) -> None:
        warmup, stable, decay = self.num_warmup_steps, self.num_stable_steps, self.num_decay_steps
        total = self.num_training_steps
        if total is None and stable is None:
            raise ValueError("wsd: give num_stable_steps or num_training_steps, got neither")
        if total is None or any(isinstance(n, Tensor) for n in (total, warmup, stable, decay)):
            return
        if total < warmup + decay or (stable is not None and total != warmup + stable + decay):
            raise ValueError(
                f"wsd: num_training_steps must be warm-up + stable + decay steps, "
                f"got {total!r} for {warmup!r} + {stable!r} + {decay!r}; leave num_stable_steps out to have the rest"
            )

    def _stable(self) -> Number:
        if self.num_stable_steps is not None:
            return self.num_stable_steps
        assert self.num_training_steps is not None  # _check_total saw to it
        return self.num_training_steps - self.num_warmup_steps - self.num_decay_steps

    def _value(self, step: Tensor) -> Tensor:
        warmup = self.num_warmup_steps
        decay_start = warmup + self._stable()
        rise = _rise(self.warmup_type, (step / at_least(warmup, 1)).clamp(max=1))
        fall = _fall(self.decay_type, step - decay_start, self.num_decay_steps, self.num_cycles)
        factor = torch.where(step < warmup, rise, torch.where(step < decay_start, 1.0, fall))
        if not isinstance(self.min_lr_ratio, Tensor) and self.min_lr_ratio == 0:
            return self.lr * factor
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * factor)


def _rise(kind: str, done: Tensor) -> Tensor:
    if kind == "linear":
        return done
    if kind == "cosine":
        return 0.5 * (1 - torch.cos(math.pi * done))
    return 1 - safe_sqrt(1 - done)


def _fall(kind: str, since: Tensor, length: Number, cycles: Number) -> Tensor:
    """Return the decay ``since`` steps after its start, and 0 once it is over."""
    done = (since / at_least(length, 1)).clamp(min=0, max=1)
    if kind == "linear":
        left = 1 - done
    elif kind == "cosine":
        left = 0.5 * (1 + torch.cos(done * (2 * math.pi * cycles)))
    else:
        left = 1 - safe_sqrt(done)
    return torch.where(since < length, left, 0.0)


inverse_sqrt_schedule = inverse_sqrt
wsd_schedule = wsd
