"""``functricks schedules``: list the schedules, or draw one in the terminal and into a file."""

from __future__ import annotations

import ast
import inspect
import math
import os
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console

from functricks import schedules
from functricks.cli.errors import CommandError
from functricks.types import Schedule

__all__ = ["draw", "list_schedules", "sketch"]

_FIRST = ("lr", "max_lr", "base_lr")  # what the first argument of a schedule is called
_NO_NUMBERS = ("lambda_schedule",)  # takes a function
_WORDS = {"true": True, "false": False, "none": None}
_WIDTH, _HEIGHT = 72, 14
_ROLES = re.compile(r":\w+:(?=`)")


def known() -> dict[str, Callable[..., Schedule]]:
    """Return the schedules that can be made from numbers and words, by name."""
    found: dict[str, Callable[..., Schedule]] = {}
    for name in schedules.__all__:
        value = getattr(schedules, name)
        first = next(iter(_parameters(value)), "")
        if first in _FIRST and name.islower() and name not in _NO_NUMBERS:
            found[name] = value
    return found


def list_schedules() -> None:
    """Print each schedule with its arguments and what it does."""
    console = Console(highlight=False)
    seen: list[Callable[..., Schedule]] = []
    for name, maker in known().items():
        if maker in seen:  # a second name
            continue
        seen.append(maker)
        effect = (inspect.getdoc(maker) or "").partition("\n")[0]
        console.print(f"{name}({_signature(maker)})", style="bold", markup=False, soft_wrap=True)
        console.print(f"    {_ROLES.sub('', effect).replace('`', '')}", markup=False, soft_wrap=True)


def draw(name: str, arguments: Sequence[str], steps: int | None, plot: Path | None) -> None:
    """Draw the schedule ``name`` with ``key=value`` arguments; ``lr`` is 1 where it is not given."""
    schedule = _make(name, arguments)
    if steps is not None and steps < 1:
        raise CommandError(f"--steps must be at least 1, got {steps}")
    if plot is not None and plot.is_dir():
        raise CommandError(f"--plot {plot}: is a directory; give a file in it, such as {plot / 'schedule.png'}")
    try:
        at, values = schedules.sample(schedule, steps, points=2 * _WIDTH)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        OverflowError,
    ) as error:  # an argument of a kind that only its use shows
        raise CommandError(f"{name}: {error}; it takes: {_signature(known()[name])}") from error
    if plot is not None:
        _save(schedule, steps, plot)
    console = Console(highlight=False, soft_wrap=True)
    console.print(repr(schedule), markup=False)
    console.print(sketch(at.tolist(), values.tolist()), markup=False)
    if plot is not None:
        console.print(f"drawn into {plot}", markup=False)


def _make(name: str, arguments: Sequence[str]) -> Schedule:
    makers = known()
    if name not in makers:
        near = get_close_matches(name, makers, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CommandError(f"unknown schedule {name!r}; {hint}known: {', '.join(makers)}")
    maker = makers[name]
    given: dict[str, Any] = {}
    for text in arguments:
        key, value = _argument(name, maker, text)
        if key in given:
            raise CommandError(f"{name}: {key} is given twice; give it once")
        given[key] = value
    parameters = _parameters(maker)
    given.setdefault(next(iter(parameters)), 1.0)
    missing = [key for key, one in parameters.items() if one.default is one.empty and key not in given]
    if missing:
        raise CommandError(f"{name}: needs {', '.join(f'{key}=...' for key in missing)}; it takes: {_signature(maker)}")
    try:
        return maker(**given)
    except (TypeError, ValueError, OverflowError) as error:
        raise CommandError(f"{error}") from error


def _argument(name: str, maker: Callable[..., Schedule], text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise CommandError(f"{name}: {text!r} is no key=value; it takes: {_signature(maker)}")
    if key not in _parameters(maker):
        raise CommandError(f"{name}: has no argument {key!r}; it takes: {_signature(maker)}")
    if value.lower() in _WORDS:
        return key, _WORDS[value.lower()]
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value  # a word, such as mode=triangular


def _parameters(maker: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(maker).parameters)
    except (TypeError, ValueError):  # no function of Python
        return {}


def _signature(maker: Callable[..., Schedule]) -> str:
    parts = [key if one.default is one.empty else f"{key}={one.default!r}" for key, one in _parameters(maker).items()]
    return ", ".join(parts)


def _save(schedule: Schedule, steps: int | None, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    schedules.plot(schedule, steps, ax=figure.add_subplot())
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        figure.savefig(part, dpi=150)
        part.replace(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
        raise CommandError(
            f"--plot {path}: cannot be written ({reason}); give a writable .png, .svg or .pdf"
        ) from error
    finally:
        if part.exists():
            os.unlink(part)


# --- the terminal ----------------------------------------------------------------------------------------------------

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille letter: rows of two


def sketch(steps: Sequence[int], values: Sequence[float], width: int = _WIDTH, height: int = _HEIGHT) -> str:
    """Return a curve as lines of braille letters, two by four dots each, with its range at the left."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    cells = _dots(steps, values, low, high, width, height)
    labels = _labels(low, high, height)
    pad = max(map(len, labels))
    letters = ["".join(chr(0x2800 + cell) for cell in row) for row in cells]
    lines = [f"{label:>{pad}} ┤{row}" for label, row in zip(labels, letters, strict=True)]
    ends = f"{steps[0]}{'step':^{max(0, width - len(str(steps[0])) - len(str(steps[-1])))}}{steps[-1]}"
    return "\n".join([*lines, f"{'':>{pad}} └{'─' * width}", f"{'':>{pad}}  {ends}"])


def _labels(low: float, high: float, height: int) -> list[str]:
    labels = [""] * height
    labels[height // 2] = f"{low / 2 + high / 2:.4g}" if height > 2 and high > low else ""
    labels[-1] = f"{low:.4g}"
    labels[0] = f"{high:.4g}"
    return labels


def _dots(
    steps: Sequence[int], values: Sequence[float], low: float, high: float, width: int, height: int
) -> list[list[int]]:
    cells = [[0] * width for _ in range(height)]
    columns, rows = 2 * width - 1, 4 * height - 1
    span = high / 2 - low / 2  # halves, since the difference of huge numbers would be infinite
    last: int | None = None
    for step, value in zip(steps, values, strict=True):
        if not math.isfinite(value):
            last = None
            continue
        x = round((step - steps[0]) / max(1, steps[-1] - steps[0]) * columns)
        y = round((high / 2 - value / 2) / span * rows) if span > 0 else rows // 2
        for dot in range(min(y, y if last is None else last), max(y, y if last is None else last) + 1):
            cells[dot // 4][x // 2] |= _DOTS[dot % 4][x % 2]
        last = y
    return cells
