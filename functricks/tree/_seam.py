"""The seam of all arithmetic on trees: plain tensors and lanes by foreach kernels, anything else leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from functricks.tree._lanes import (
    above_lanes,
    any_differentiable,
    below_lanes,
    compute_dtype,
    is_transformed,
    lanes,
    look,
    outside_lanes,
)
from functricks.tree._walking import Tree, check_shapes, columns_of, unflatten
from functricks.types import Number

One: TypeAlias = Callable[..., Tensor]
Many: TypeAlias = Callable[..., Sequence[Tensor]]


def apply(one: One, many: Many | None, trees: Sequence[Tree], coefficients: Sequence[Number] = ()) -> Tree:
    """Apply a pointwise operation to trees of one structure; the result keeps the first tree's leaf dtypes.

    ``one(*leaves, *coefficients)`` does a leaf with out-of-place operations. ``many(*columns, *coefficients)`` does
    the same to lists of plain tensors, where a coefficient is a Python number or a list with one tensor a leaf, ready
    to broadcast; without it, all goes through ``one``.

    Raises ``ValueError`` for leaves that would broadcast, and for a coefficient with axes.
    """
    columns, structure = columns_of(trees)
    if not columns[0]:
        return trees[0]
    if len(trees) > 1:
        check_shapes(trees, columns)
    for value in coefficients:
        if isinstance(value, Tensor) and value.ndim:
            raise ValueError(f"tree: a coefficient must be 0-d, got shape {tuple(value.shape)}; one a lane: by vmap")
    results = None if many is None else _fast(many, columns, coefficients)
    if results is None:
        rows = zip(*columns, strict=True)
        results = [one(*row, *[_fit(value, row[0]) for value in coefficients]) for row in rows]
    kept = zip(results, columns[0], strict=True)
    return unflatten(structure, [new if new.dtype == old.dtype else new.to(old.dtype) for new, old in kept])


def _fit(value: Number, leaf: Tensor) -> Number:
    """Cast a tensor coefficient to the dtype in which it meets the leaf."""
    if isinstance(value, Tensor) and value.dtype != torch.bool and leaf.is_floating_point():
        fitted = value.to(compute_dtype(leaf.dtype))
        return _computed_once(fitted) if torch.compiler.is_compiling() else fitted
    return value


def _computed_once(coefficient: Tensor) -> Tensor:
    """Keep the compiler from computing a coefficient again for every few entries of a leaf.

    It would inline ``beta**t`` into the loop over the leaf, and a float64 power there costs more than all the rest. A
    view by explicit strides needs its base in memory.
    """
    return coefficient.as_strided(coefficient.size(), coefficient.stride())


def _fast(many: Many, columns: list[list[Any]], coefficients: Sequence[Number]) -> Sequence[Tensor] | None:
    """Do it on plain tensors, or on the stacked tensors below the lanes; None where neither is what we have."""
    if torch.compiler.is_compiling():
        return None
    if not is_transformed():
        if any_differentiable((*columns, coefficients)):
            return None
        return many(*columns, *[spread(look(value), columns[0]) for value in coefficients])
    level = lanes()
    return None if level is None else _fast_lanes(many, columns, coefficients, level)


def _fast_lanes(
    many: Many, columns: list[list[Any]], coefficients: Sequence[Number], level: int
) -> Sequence[Tensor] | None:
    found = [[below_lanes(leaf) for leaf in column] for column in columns]
    numbers = [below_lanes(value) for value in coefficients]
    everything = [pair for column in (*found, numbers) for pair in column]
    if any_differentiable([[value for value, _ in everything]]):
        return None
    sizes = [value.shape[0] for value, laned in everything if laned]
    with outside_lanes():
        if not sizes:
            return many(*columns, *[spread(value, columns[0]) for value in coefficients])
        # Leaves that all lanes share are expanded, so that what an operation makes of them has room for every lane.
        below = [[x if laned else x.expand(sizes[0], *x.shape) for x, laned in column] for column in found]
        results = many(*below, *[spread(value, below[0], laned) for value, laned in numbers])
        return [above_lanes(new, level) for new in results]


def spread(value: Number, column: list[Tensor], laned: bool = False) -> Any:
    """Turn a tensor coefficient into one tensor a leaf; one a lane, ``[K]``, becomes ``[K, 1, ...]``."""
    if not isinstance(value, Tensor):
        return value
    shapes = [(-1, *[1] * (leaf.ndim - 1)) if laned else () for leaf in column]
    return [_fit(value.view(shape), leaf) for shape, leaf in zip(shapes, column, strict=True)]
