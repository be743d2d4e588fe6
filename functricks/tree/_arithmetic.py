"""Arithmetic on trees, leaf by leaf through the seam."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functricks.tree._lanes import (
    any_differentiable,
    below_lanes,
    compute_dtype,
    is_differentiated,
    is_transformed,
    lanes,
    look,
    may_look,
    outside_lanes,
)
from functricks.tree._seam import One, apply
from functricks.tree._walking import Tree, columns_of, map
from functricks.types import Number


def zeros_like(tree: Tree, dtype: torch.dtype | None = None) -> Tree:
    """Return zeros with the structure and shapes of ``tree``."""
    return map(lambda leaf: torch.zeros_like(leaf, dtype=dtype), tree)


def cast(tree: Tree, dtype: torch.dtype) -> Tree:
    """Cast the floating-point leaves; others pass, and so does what is no tensor (the name of a task in a batch)."""

    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return map(one, tree)


def as_real(leaf: Tensor) -> Tensor:
    """Return a complex leaf as a real one with a last axis of two, and any other as it is."""
    return torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf


def wide(tree: Tree) -> Tree:
    """Return the tree with half-precision leaves in float32."""
    return map(lambda leaf: leaf.to(compute_dtype(leaf.dtype)), tree)


def pointwise(function: One, *trees: Tree, coefficients: Sequence[Number] = ()) -> Tree:
    """Apply ``function(*leaves, *coefficients)`` leaf by leaf; the result has the dtypes of the first tree.

    For what is not worth a function of its own here: ordinary operations only, with coefficients in the leaf's dtype.

    >>> pointwise(lambda x, c: (x * c).sign(), {"w": torch.tensor([2.0, 0.0])}, coefficients=(-1.0,))
    {'w': tensor([-1., 0.])}
    """
    return apply(function, None, trees, coefficients)


def add(a: Tree, b: Tree) -> Tree:
    """Return ``a + b``."""
    return apply(torch.add, torch._foreach_add, (a, b))


def sub(a: Tree, b: Tree) -> Tree:
    """Return ``a - b``."""
    return apply(torch.sub, torch._foreach_sub, (a, b))


def mul(a: Tree, b: Tree) -> Tree:
    """Return ``a * b``."""
    return apply(torch.mul, torch._foreach_mul, (a, b))


def maximum(a: Tree, b: Tree) -> Tree:
    """Return the larger of ``a`` and ``b``, entry by entry."""
    return apply(torch.maximum, torch._foreach_maximum, (a, b))


def scale(a: Tree, c: Number) -> Tree:
    """Return ``c * a``."""
    return apply(torch.mul, torch._foreach_mul, (a,), (c,))


def add_scaled(a: Tree, b: Tree, c: Number) -> Tree:
    """Return ``a + c * b``."""

    def many(a: list[Tensor], b: list[Tensor], c: Any) -> Sequence[Tensor]:
        b = like_dtype(b, a)
        if isinstance(c, list):
            return torch._foreach_addcmul(a, b, like_dtype(c, a))
        return torch._foreach_add(a, b, alpha=c)

    def one(a: Tensor, b: Tensor, c: Number) -> Tensor:
        # a 0-d coefficient widens nothing: the product of a half-precision term would be rounded before it is added
        return a + b.to(torch.promote_types(a.dtype, b.dtype)) * c

    return apply(one, many, (a, b), (c,))


def add_to_total(total: Tree, term: Tree, c: Number) -> Tree:
    """Return ``total + c * term`` as :func:`add_scaled`, writing over ``total`` where that saves making it anew.

    ``total`` must belong to the caller alone: what :func:`scale` or this function returned, and what nobody else has
    seen. Fresh memory for every term costs more than the addition itself.
    """
    columns, _ = columns_of((total, term))
    number = look(c)
    if isinstance(number, Tensor) or torch.compiler.is_compiling() or is_transformed() or any_differentiable(columns):
        return add_scaled(total, term, c)
    torch._foreach_add_(columns[0], like_dtype(columns[1], columns[0]), alpha=number)
    return total


def scaled_sum(c: Number, a: Tree, k: Number, b: Tree) -> Tree:
    """Return ``c * (a + k * b)``."""

    def many(a: list[Tensor], b: list[Tensor], c: Any, k: Any) -> Sequence[Tensor]:
        b = like_dtype(b, a)
        out = (
            torch._foreach_addcmul(a, b, like_dtype(k, a)) if isinstance(k, list) else torch._foreach_add(a, b, alpha=k)
        )
        torch._foreach_mul_(out, c)
        return out

    return apply(lambda a, b, c, k: (a + b * k) * c, many, (a, b), (c, k))


def clamp(a: Tree, low: Number, high: Number) -> Tree:
    """Return ``a`` with every entry in ``[low, high]``; NaN stays NaN."""

    def one(leaf: Tensor, low: Number, high: Number) -> Tensor:
        low, high = (torch.as_tensor(_within(x, leaf.dtype), dtype=leaf.dtype, device=leaf.device) for x in (low, high))
        return torch.minimum(torch.maximum(leaf, low), high)

    def many(leaves: list[Tensor], low: Any, high: Any) -> Sequence[Tensor]:
        if isinstance(low, float | int) and max(-low, high) > _SMALLEST_RANGE:
            return [one(leaf, low, high) for leaf in leaves]
        out = torch._foreach_clamp_min(leaves, low)
        torch._foreach_clamp_max_(out, high)
        return out

    return apply(one, many, (a,), (low, high))


_SMALLEST_RANGE = torch.finfo(torch.float16).max


def _within(bound: Number, dtype: torch.dtype) -> Number:
    """Return a bound that a dtype can hold: infinity for a number beyond its range, which PyTorch would refuse."""
    if isinstance(bound, Tensor) or not dtype.is_floating_point or abs(bound) <= torch.finfo(dtype).max:
        return bound
    return math.copysign(math.inf, bound)


def ema(average: Tree, new: Tree, decay: Number) -> Tree:
    """Return ``decay * average + (1 - decay) * new``, by PyTorch's ``lerp``."""

    def many(average: list[Tensor], new: list[Tensor], weight: Any) -> Sequence[Tensor]:
        average = [leaf.to(compute_dtype(leaf.dtype)) for leaf in average]  # lerp takes no float32 weight for half
        return torch._foreach_lerp(average, like_dtype(new, average), weight)

    def one(average: Tensor, new: Tensor, weight: Number) -> Tensor:
        average = average.to(compute_dtype(average.dtype))
        return torch.lerp(average, new.to(average.dtype), weight)

    return apply(one, many, (average, new), (1 - decay,))


def ema_of_squares(average: Tree, new: Tree, decay: Number) -> Tree:
    """Return ``decay * average + (1 - decay) * new**2``."""

    def many(average: list[Tensor], new: list[Tensor], decay: Any, weight: Any) -> Sequence[Tensor]:
        new = like_dtype(new, average)
        out = torch._foreach_mul(average, decay)
        if isinstance(weight, float):
            torch._foreach_addcmul_(out, new, new, value=weight)  # in place on what the line above made
        else:
            squares = torch._foreach_mul(new, new)
            torch._foreach_mul_(squares, weight)
            torch._foreach_add_(out, squares)
        return out

    def one(average: Tensor, new: Tensor, decay: Number, weight: Number) -> Tensor:
        new = new.to(average.dtype)
        return average * decay + new * new * weight

    return apply(one, many, (average, new), (decay, 1 - decay))


def like_dtype(column: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    pairs = zip(column, like, strict=True)
    return [leaf if leaf.dtype == other.dtype else leaf.to(other.dtype) for leaf, other in pairs]


def root_ratio(a: Tree, b: Tree, correction: Number, root_correction: Number, eps: Number) -> Tree:
    r"""Return :math:`\frac{a / c}{\sqrt{b} / r + \epsilon}`, the direction of the Adam family.

    As :math:`a / (\sqrt{b} \, (c / r) + \epsilon c)`: two factors, each computed once for all entries.
    """

    def many(a: list[Tensor], b: list[Tensor], ratio: Any, shift: Any) -> Sequence[Tensor]:
        below = torch._foreach_sqrt(b)
        torch._foreach_mul_(below, ratio)
        torch._foreach_add_(below, shift)
        return [torch.div(x, y, out=y) for x, y in zip(a, below, strict=True)]

    def one(a: Tensor, b: Tensor, ratio: Number, shift: Number) -> Tensor:
        return a / (sqrt(b) * ratio + shift)

    c, r, eps = (value.double() if isinstance(value, Tensor) else value for value in (correction, root_correction, eps))
    return apply(one, many, (a, b), (c / r, eps * c))


def where(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """Return ``a`` where the 0-d bool ``condition`` holds, else ``b``, leaf by leaf."""
    if holds_everywhere(condition):
        return a

    def many(a: list[Tensor], b: list[Tensor], condition: list[Tensor]) -> Sequence[Tensor]:
        return [torch.where(*row) for row in zip(condition, a, b, strict=True)]

    return apply(lambda a, b, condition: torch.where(condition, a, b), many, (a, b), (condition,))


def holds_everywhere(condition: Tensor) -> bool:
    """Look, where that is free: in eager on the CPU; elsewhere say no. For what is nearly always so, as copies cost."""
    if torch.compiler.is_compiling() or (is_transformed() and lanes() is None):
        return False
    stacked, _ = below_lanes(condition)
    with outside_lanes():
        return may_look(stacked) and bool(stacked.all())


def or_one(weight: Tensor) -> Number:
    """Return what to divide by: the 0-d ``weight``, or 1 in the place of 0; a number where looking is free."""
    number = look(weight)
    return torch.where(number == 0, 1, number) if isinstance(number, Tensor) else number or 1.0


def sqrt(x: Tensor) -> Tensor:
    """Return the square root, with derivative zero, not infinity, at zero.

    The guard costs a few operations, and is there only where ``x`` is being differentiated or traced.
    """
    if not is_differentiated(x):
        return torch.sqrt(x)
    zero = x == 0
    return torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, x)))
