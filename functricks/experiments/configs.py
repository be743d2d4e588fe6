"""Configurations: plain dicts, made by the dozen, and sorted into groups that run as one program."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import product
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["Config", "Group", "grid", "group", "is_integer", "zipped"]

Config: TypeAlias = dict[str, Any]


def grid(**axes: Iterable[Any] | Any) -> list[Config]:
    """Return every combination of the values; the last axis varies fastest.

    A value that is no list, tuple or range counts as one value. Grids are lists: ``+`` joins them.

    >>> grid(lr=[0.1, 0.2], seed=range(2))
    [{'lr': 0.1, 'seed': 0}, {'lr': 0.1, 'seed': 1}, {'lr': 0.2, 'seed': 0}, {'lr': 0.2, 'seed': 1}]
    """
    columns = [_values(name, values) for name, values in axes.items()]
    return [dict(zip(axes, row, strict=True)) for row in product(*columns)]


def zipped(**axes: Iterable[Any] | Any) -> list[Config]:
    """Return the first values together, the second values together, and so on; a single value goes with all.

    Raises ``ValueError`` when the lengths differ.

    >>> zipped(lr=[0.1, 0.2], momentum=[0.9, 0.8], seed=0)
    [{'lr': 0.1, 'momentum': 0.9, 'seed': 0}, {'lr': 0.2, 'momentum': 0.8, 'seed': 0}]
    """
    columns = {name: _values(name, values) for name, values in axes.items()}
    length = max((len(values) for values in columns.values()), default=0)
    bad = {name: len(values) for name, values in columns.items() if len(values) not in (1, length)}
    if bad:
        raise ValueError(f"zipped: every axis needs {length} values or one, got {bad}")
    return [{name: values[i if len(values) > 1 else 0] for name, values in columns.items()} for i in range(length)]


def _values(name: str, values: Any) -> list[Any]:
    if not isinstance(values, (list, tuple, range)):
        return [values]
    if len(values) == 0:
        raise ValueError(f"{name} has no values; give at least one")
    return list(values)


class Group(NamedTuple):
    """Configurations that run as one program: what they share, and their numbers, stacked."""

    indices: list[int]
    static: Config
    numbers: dict[str, Tensor]


def group(configs: Sequence[Config]) -> list[Group]:
    """Sort configurations by their structure, in the order in which each structure first appears.

    Floats become tensors of the default dtype, ints int64; an int among floats of the same name counts as a float.
    NumPy's numbers count as floats and ints. A ``seed`` must be an int in [0, 2**32) or a 0-d integer tensor.
    """
    found: dict[Hashable, list[int]] = {}
    for index, config in enumerate(configs):
        if not isinstance(config, dict):
            raise TypeError(f"run: configuration {index} must be a dict, got {config!r}")
        if "seed" in config:
            _check_seed(index, config["seed"])
        found.setdefault(_structure(config), []).append(index)
    return [_stack(indices, [configs[i] for i in indices]) for indices in found.values()]


def is_integer(value: Any) -> bool:
    """Return whether a value is a Python or NumPy integer and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (Real, Tensor)) and not isinstance(value, bool)


def _check_seed(index: int, seed: Any) -> None:
    if isinstance(seed, Tensor):
        fits = seed.ndim == 0 and not (seed.is_floating_point() or seed.is_complex() or seed.dtype == torch.bool)
    else:
        fits = is_integer(seed) and 0 <= seed < 2**32
    if not fits:
        raise ValueError(
            f"run: seed must be an int in [0, 2**32) or a 0-d integer tensor, got {seed!r} in configuration {index}"
        )


def _structure(config: Config) -> Hashable:
    """Return what must be equal for two configurations to share a program."""
    parts: list[Hashable] = []
    for name, value in sorted(config.items()):
        if _is_number(value):
            parts.append((name, tuple(value.shape) if isinstance(value, Tensor) else ()))
        else:
            try:
                hash(value)
            except TypeError as error:
                raise TypeError(
                    f"run: {name}={value!r} is neither a number nor hashable; pass a tuple of hashables or a string"
                ) from error
            parts.append((name, type(value), value))
    return tuple(parts)


def _stack(indices: list[int], configs: list[Config]) -> Group:
    first = configs[0]
    numbers = {name: _column([config[name] for config in configs]) for name in first if _is_number(first[name])}
    return Group(indices, {name: first[name] for name in first if name not in numbers}, numbers)


def _column(values: list[Any]) -> Tensor:
    plain = [_python(value) for value in values]
    if any(isinstance(value, Tensor) for value in plain):
        return torch.stack([torch.as_tensor(value) for value in plain])
    floats = any(isinstance(value, float) for value in plain)
    return torch.tensor(plain, dtype=torch.get_default_dtype() if floats else torch.int64)


def _python(value: Any) -> Any:
    """Return a number of NumPy or Python as an int or a float, a tensor as it is."""
    if isinstance(value, Tensor):
        return value
    return int(value) if is_integer(value) else float(value)
