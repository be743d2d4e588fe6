"""Look at a schedule: sample it, or draw it with matplotlib."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functricks.schedules.base import product
from functricks.schedules.compose import join
from functricks.schedules.cycles import cyclic
from functricks.schedules.warmup import wsd
from functricks.types import Schedule

__all__ = ["horizon", "plot", "sample"]

_ENDS = ("num_training_steps", "total_steps", "total_iters")
_PERIODS = ("T_max", "T_0", "step_size", "num_warmup_steps", "num_stable_steps", "timescale", "k")


def sample(schedule: Schedule, steps: int | None = None, *, points: int = 1000) -> tuple[Tensor, Tensor]:
    """Evaluate a schedule at whole steps from 0 to ``steps``, one step after the other.

    Args:
        schedule: any function of a step; it gets ints.
        steps: the number of steps, >= 1. None: :func:`horizon`.
        points: the most steps to evaluate, >= 2, evenly spread over them.

    Returns the steps (int64 [n]) and the values (float64 [n]). Raises ValueError for arguments out of range.

    >>> from functricks.schedules import linear
    >>> sample(linear(1.0, 0.0, 1.0, total_iters=4), 5)
    (tensor([0, 1, 2, 3, 4]), tensor([0.0000, 0.2500, 0.5000, 0.7500, 1.0000], dtype=torch.float64))
    """
    steps = horizon(schedule) if steps is None else steps
    if steps < 1 or points < 2:
        raise ValueError(f"sample: steps must be >= 1 and points >= 2, got {steps} and {points}")
    at = torch.linspace(0, steps - 1, min(steps, points), dtype=torch.float64).round().to(torch.int64)
    values = [torch.as_tensor(schedule(step), dtype=torch.float64) for step in at.tolist()]
    return at, torch.stack(values).detach().cpu()


def plot(schedule: Schedule, steps: int | None = None, *, ax: Any = None) -> Any:
    """Draw a schedule with matplotlib and return the axes.

    Args:
        schedule: any function of a step.
        steps: how many steps to draw. None: :func:`horizon`.
        ax: axes to draw into. None: those of a new figure.

    Raises ImportError where matplotlib is missing.
    """
    at, values = sample(schedule, steps)
    if ax is None:
        ax = _new_axes()
    ax.plot(at.tolist(), values.tolist(), label=repr(schedule))
    ax.set(xlabel="step (applied updates)", ylabel="value", title=repr(schedule)[:80])
    return ax


def horizon(schedule: Schedule) -> int:
    """Return how many steps show the schedule's shape: its own end and a tenth more, or three periods, or 1000.

    >>> from functricks.schedules import cosine_annealing
    >>> horizon(cosine_annealing(0.1, T_max=50))
    150
    """
    if isinstance(schedule, product):
        return max(horizon(factor) for factor in schedule.factors)
    if isinstance(schedule, join):
        return int(max([0.0, *_lengths(schedule.boundaries)])) + horizon(schedule.schedules[-1])
    ends, periods = (
        [x for name in names for x in _lengths(getattr(schedule, name, None))] for names in (_ENDS, _PERIODS)
    )
    if isinstance(schedule, wsd):
        ends += _lengths(schedule.num_warmup_steps + schedule._stable() + schedule.num_decay_steps)
    if ends:
        return int(max(ends) * 1.1) + 1
    if isinstance(schedule, cyclic):
        down = schedule.step_size_up if schedule.step_size_down is None else schedule.step_size_down
        periods += _lengths(schedule.step_size_up + down)
    periods += _lengths(getattr(schedule, "milestones", None))
    return max(1, int(3 * max(periods))) if periods else 1000


def _lengths(value: Any) -> list[float]:
    """Return the positive numbers in ``value``: a number, a tensor, a tuple of them, or None."""
    items = value if isinstance(value, (list, tuple)) else [value]
    numbers = [float(item.max()) if isinstance(item, Tensor) else float(item) for item in items if item is not None]
    return [number for number in numbers if number > 0]


def _new_axes() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("schedule.plot needs matplotlib; install it: pip install matplotlib") from error
    return pyplot.figure().add_subplot()
