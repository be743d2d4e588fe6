"""Norms over all leaves, without overflow on the way."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from functricks.tree._arithmetic import sqrt
from functricks.tree._lanes import (
    above_lanes,
    any_differentiable,
    below_lanes,
    is_transformed,
    lanes,
    may_look,
    outside_lanes,
)
from functricks.tree._walking import Tree, leaves


def norm(tree: Tree, order: float = 2.0) -> Tensor:
    """Return the norm of all leaves together: 0-d float64, no overflow on the way."""
    peak, relative = norm_parts(tree, order)
    return peak * relative


def all_finite(tree: Tree) -> Tensor:
    """Return a 0-d bool: is every entry of every leaf finite?"""
    peak, relative = norm_parts(tree)
    return torch.isfinite(peak) & torch.isfinite(relative)


def norm_parts(tree: Tree, order: float = 2.0) -> tuple[Tensor, Tensor]:
    r"""Return ``(peak, relative)``, 0-d float64, whose product is the norm; both finite if all leaves are.

    The norm is :math:`(\sum |x|^p)^{1/p}` with ``order`` p, the Euclidean one by default, and the largest entry where
    it is ``inf``. Squares of float32 and half fit into float64, so ``peak`` is 1 there. Otherwise leaves are divided
    by their largest entry first: the norm itself may lie outside float64.
    """
    columns = [
        leaf.abs() if leaf.is_complex() else leaf
        for leaf in leaves(tree)
        if leaf.numel() and (leaf.is_floating_point() or leaf.is_complex())
    ]
    device = columns[0].device if columns else None
    one = torch.ones((), dtype=torch.float64, device=device)
    if order == math.inf:
        return one, _peak(columns) if columns else torch.zeros_like(one)
    peak = one
    if order != 2.0 or any(leaf.dtype == torch.float64 for leaf in columns):
        peak = _peak([leaf.detach() for leaf in columns]) if columns else one
        peak = torch.clamp(peak, min=torch.finfo(torch.float64).tiny)  # one over less than that is infinite
        columns = [leaf.double() / peak for leaf in columns]
    if order == 2.0:
        return peak, sqrt(_sum_of_squares(columns))
    return peak, _root(sum((_sum_of_powers(leaf, order) for leaf in columns), torch.zeros_like(one)), order)


def _peak(columns: list[Tensor]) -> Tensor:
    return torch.stack([leaf.abs().amax().double() for leaf in columns]).amax()


def _sum_of_powers(leaf: Tensor, order: float) -> Tensor:
    size = leaf.abs()
    return size.sum() if order == 1.0 else (size**order).sum()


def _root(total: Tensor, order: float) -> Tensor:
    """Return the p-th root, with derivative zero at zero."""
    zero = total == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, total) ** (1.0 / order))


def _sum_of_squares(columns: list[Tensor]) -> Tensor:
    level = lanes()
    found = [below_lanes(leaf) if level is not None else (leaf, False) for leaf in columns]
    traced = torch.compiler.is_compiling() or (level is None and is_transformed())
    if not columns or traced or any_differentiable([[x for x, _ in found]]):
        return sum((leaf.double().square().sum() for leaf in columns), torch.zeros((), dtype=torch.float64))
    with outside_lanes():
        total = _squares_of_rows([x.reshape(x.shape[0] if laned else 1, -1) for x, laned in found])
    laned = any(laned for _, laned in found)
    return above_lanes(total, level) if laned and level is not None else total.squeeze(0)


def _squares_of_rows(leaves: list[Tensor]) -> Tensor:
    """Return the sum of squares of every row, over all leaves, in float64: by float32 where that is exact enough."""

    lane_count = max(rows.shape[0] for rows in leaves)

    def stacked(columns: list[Tensor]) -> Tensor:
        return torch.stack([column.expand(lane_count) for column in columns])

    def exactly() -> Tensor:
        return stacked([rows.double().square().sum(1) for rows in leaves])

    if any(rows.dtype != torch.float32 or not may_look(rows) or not _block(rows.shape[1]) for rows in leaves):
        return exactly().sum(0)
    blocks = [rows.reshape(rows.shape[0], -1, _block(rows.shape[1])) for rows in leaves]
    norms = [torch.linalg.vector_norm(block, dim=2) for block in blocks]  # ten times as fast as in float64
    squares = stacked([norm.double().square().sum(1) for norm in norms])
    safe = (squares > 1e-30) & (squares < 1e36)  # no square overflowed, and what underflowed does not count
    return (squares if bool(safe.all()) else torch.where(safe, squares, exactly())).sum(0)


def _block(length: int) -> int:
    """Return how many entries float32 may sum at a time, within a few ulps: a divisor of the length; 0 for none."""
    block = length if length <= 1024 else math.gcd(length, 1024)
    return block if block * 64 >= length or block >= 64 else 0
