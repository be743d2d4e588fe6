"""What every schedule is made of: frozen values that are called with a step, and their products."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from functricks.types import Number

__all__ = ["Curve", "as_float64", "as_step", "at_least", "is_number", "one_of", "product", "unstack"]


@dataclass(frozen=True, eq=False, repr=False)
class Curve:
    """A schedule as a value: ``curve(step)`` is a float64 tensor, and nothing else is remembered.

    A step is an int or a tensor and counts applied updates; the answer has the step's shape: a 0-d tensor for an int. A
    negative step counts as step 0. Arguments may be numbers or tensors. Tensors are copied as float64 when the schedule
    is made, so that a later in-place write to the learning rate changes no schedule; build the schedule inside the
    function that is batched, compiled or differentiated. Lists become tuples.

    Curves are equal when their kind and their arguments are (a tensor never equals a number), hashable, picklable, and
    ``repr`` reads back with ``eval``. ``curve * curve``, ``curve * number``, ``number * curve`` are :class:`product`.

    Subclasses are frozen dataclasses that define ``_value`` and, to check their arguments, ``_validate``.
    """

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:  # dataclasses.fields does not trace
            object.__setattr__(self, name, _frozen(getattr(self, name)))
        self._validate()

    def __call__(self, step: int | Tensor) -> Tensor:
        """Return the value at ``step``, as float64, in the shape of ``step``."""
        return self._value(as_step(step))

    def plot(self, steps: int | None = None, ax: Any = None) -> Any:
        """Draw the schedule with matplotlib and return the axes; see :func:`functricks.schedules.plot`."""
        from functricks.schedules.drawing import plot  # here, since that module imports this one

        return plot(self, steps, ax=ax)

    def _value(self, step: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define _value(step)")

    def _validate(self) -> None:
        """Raise where a Python number is out of range; tensors are never looked at."""

    def _check(self, *names: str, least: float = -math.inf, above: float = -math.inf, most: float = math.inf) -> None:
        for name in names:
            _check_number(f"{type(self).__name__}: {name}", getattr(self, name), least, above, most)

    def _check_steps(self, name: str) -> None:
        """Raise where a step number in the tuple ``name`` is negative."""
        for value in getattr(self, name):
            _check_number(f"{type(self).__name__}: every one of {name}", value, least=0)

    def _check_order(self, name: str) -> None:
        """Raise where the step numbers in the tuple ``name`` are negative or fall."""
        self._check_steps(name)
        values = getattr(self, name)
        for low, high in pairwise(values):
            if not isinstance(low, Tensor) and not isinstance(high, Tensor) and high < low:
                raise ValueError(
                    f"{type(self).__name__}: {name} must not decrease, got {list(values)}; sort them first"
                )

    def __mul__(self, other: Curve | Number) -> Curve:
        return _times(self, other)

    def __rmul__(self, other: Number) -> Curve:
        return _times(self, other)

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # as for any value; and a tensor that requires grad could not be copied

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Curve) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        arguments = ", ".join(f"{field.name}={_literal(getattr(self, field.name))}" for field in fields(self))
        return f"{type(self).__name__}({arguments})"

    def _key(self) -> tuple[Any, ...]:
        return type(self), *(_comparable(getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True, eq=False, repr=False)
class product(Curve):
    r"""Multiply schedules, and a number: what ``*`` between schedules makes.

    .. math:: f(t) = c \prod_i f_i(t)

    This is the pure form of a chain of multiplicative schedulers: give one factor the learning rate, the others 1.

    Classic: :class:`torch.optim.lr_scheduler.ChainedScheduler` over multiplicative schedulers.

    Args:
        scale: a number or tensor.
        factors: schedules, at least one.

    Raises TypeError where a factor is not a schedule of this package; wrap a function in :class:`lambda_schedule`.

    >>> from functricks.schedules import constant, exponential_decay
    >>> chained = constant(1.0, factor=0.5, total_iters=2) * exponential_decay(0.1, gamma=0.9)
    >>> chained(torch.arange(4))
    tensor([0.0500, 0.0450, 0.0810, 0.0729], dtype=torch.float64)
    >>> 2 * constant(0.1)
    2 * constant(lr=0.1, factor=1.0, total_iters=0)
    """

    scale: Number
    factors: tuple[Curve, ...]

    def _validate(self) -> None:
        self._check("scale")
        if not self.factors:
            raise ValueError("product: factors must hold at least one schedule, got none; use constant(value)")
        for factor in self.factors:
            if not isinstance(factor, Curve):
                raise TypeError(f"product: factors must be schedules, got {factor!r}; wrap it in lambda_schedule")

    def __call__(self, step: int | Tensor) -> Tensor:
        """Return the product at ``step``; the factors get it as it is, since a lambda_schedule may want the int."""
        value = self.factors[0](step)
        for factor in self.factors[1:]:
            value = value * factor(step)
        if not isinstance(self.scale, Tensor) and self.scale == 1:
            return value
        return value * self.scale

    def __repr__(self) -> str:
        plain = not isinstance(self.scale, Tensor) and self.scale == 1
        if plain and len(self.factors) == 1:
            return super().__repr__()
        return " * ".join(_literal(part) for part in (*(() if plain else (self.scale,)), *self.factors))


def _times(curve: Curve, other: Curve | Number) -> Curve:
    """Multiply with one flat product, so that equal chains are equal however they were bracketed."""
    scale, factors = (curve.scale, curve.factors) if isinstance(curve, product) else (1, (curve,))
    if isinstance(other, product):
        return product(scale * other.scale, (*factors, *other.factors))
    if isinstance(other, Curve):
        return product(scale, (*factors, other))
    if isinstance(other, Tensor) or is_number(other):
        return product(scale * other, factors)
    return NotImplemented  # type: ignore[no-any-return]  # how Python asks the other operand


def as_step(step: int | Tensor) -> Tensor:
    """Return ``step`` as float64, which holds every integer up to 2**53, and 0 where it is negative."""
    return as_float64(step).clamp(min=0)


def as_float64(value: Any, device: torch.device | None = None) -> Tensor:
    """Return ``value`` as float64, a tensor on its own device unless another is given."""
    if isinstance(value, (int, float)) and torch.compiler.is_compiling():
        return torch.full((), value, dtype=torch.float64, device=device)  # as_tensor would recompile for every number
    return torch.as_tensor(value, dtype=torch.float64, device=device)


def at_least(value: Number, low: float) -> Number:
    """Return the larger of the two: the guard of a denominator that counts steps."""
    return value.clamp(min=low) if isinstance(value, Tensor) else max(value, low)


def unstack(what: str, values: Iterable[Number] | Tensor) -> tuple[Number, ...]:
    """Return a list of step numbers, or a tensor of them along its last axis, as a tuple."""
    if is_number(values):
        raise TypeError(f"{what} must be a list of step numbers, got {values!r}; give [{values!r}]")
    if isinstance(values, Tensor):
        if values.ndim == 0:
            raise TypeError(f"{what}: a tensor of step numbers needs an axis, got a 0-d tensor; give [step]")
        return tuple(values.unbind(-1))
    return tuple(values)


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a real Python or numpy number; a bool is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def one_of(owner: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _check_number(
    what: str, value: Any, least: float = -math.inf, above: float = -math.inf, most: float = math.inf
) -> None:
    if isinstance(value, Tensor):
        return
    if not is_number(value):
        raise TypeError(f"{what} must be a number or a tensor, got {value!r}")
    if not -math.inf < value < math.inf:
        raise ValueError(f"{what} must be finite, got {value!r}")
    if value <= above:
        raise ValueError(f"{what} must be > {above:g}, got {value!r}")
    if value < least:
        raise ValueError(f"{what} must be >= {least:g}, got {value!r}")
    if value > most:
        raise ValueError(f"{what} must be <= {most:g}, got {value!r}")


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.is_complex():
            raise TypeError("a schedule's arguments must be real, got a complex tensor")
        return value.to(torch.float64, copy=True)
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    return value


def _literal(value: Any) -> str:
    """Return text that evaluates to ``value``: Python numbers and tensors keep every digit."""
    if isinstance(value, Tensor):
        try:
            return f"tensor({_literal_list(value.tolist())}, dtype=torch.float64)"
        except RuntimeError:  # inside vmap or a trace there are no numbers to read
            return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_literal(item) for item in value)}]"
    if is_number(value):
        return _literal_list(value)
    return repr(value)


def _literal_list(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_literal_list(item) for item in value)}]"
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    return repr(float(value)) if math.isfinite(value) else f"float('{float(value)}')"


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), _literal_list(value.tolist())  # as text, where NaN equals itself
    if isinstance(value, tuple):
        return tuple(_comparable(item) for item in value)
    return value
