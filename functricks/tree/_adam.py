"""Adam's direction and moments: by PyTorch's fused kernel where it applies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functricks.tree._arithmetic import ema, ema_of_squares, root_ratio
from functricks.tree._lanes import (
    above_lanes,
    any_differentiable,
    below_lanes,
    is_transformed,
    lanes,
    look,
    may_look,
    outside_lanes,
)
from functricks.tree._walking import Tree, columns_of, unflatten
from functricks.types import Number


def adam(
    mu: Tree, nu: Tree, grads: Tree, betas: tuple[Number, Number], eps: Number, step: Tensor
) -> tuple[Tree, Tree, Tree]:
    r"""Return Adam's direction and its two moments, see :func:`functricks.scale_by_adam`.

    On plain tensors by PyTorch's fused kernel: it writes into copies, with a learning rate of -1 and zeros as the
    parameters, which leaves the direction there.
    """
    columns, structure = columns_of((grads, mu, nu))
    numbers = [value for value in (look(one) for one in (*betas, eps)) if not isinstance(value, Tensor)]
    fused = _adam_fused(columns, numbers, step) if len(numbers) == 3 and columns[0] else None
    if fused is None:
        return _adam_by_parts(mu, nu, grads, betas, eps, step)
    direction, new_mu, new_nu = (unflatten(structure, column) for column in fused)
    return direction, new_mu, new_nu


def _adam_fused(columns: list[list[Any]], numbers: list[float], step: Tensor) -> list[list[Tensor]] | None:
    """Do it on plain tensors or the stacked tensors below the lanes; None where the kernel does not apply."""
    level = lanes()
    if torch.compiler.is_compiling() or (level is None and is_transformed()):
        return None
    found = [[below_lanes(leaf) for leaf in column] for column in columns]
    stacked, steps = [[leaf for leaf, _ in column] for column in found], below_lanes(step)[0]
    with outside_lanes():
        if len({laned for column in found for _, laned in column}) > 1 or not _fusable(stacked, steps):
            return None
        direction = [torch.zeros_like(leaf) for leaf in stacked[0]]
        mu, nu = ([leaf.clone() for leaf in column] for column in stacked[1:])
        (beta1, beta2, eps), count = numbers, [steps.flatten()[0].float()] * len(direction)
        torch._fused_adamw_(
            direction, stacked[0], mu, nu, [], count,
            lr=-1.0, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        results = [direction, mu, nu]
        if level is None or not found[0][0][1]:
            return results
        return [[above_lanes(leaf, level) for leaf in column] for column in results]


def _adam_by_parts(
    mu: Tree, nu: Tree, grads: Tree, betas: tuple[Number, Number], eps: Number, step: Tensor
) -> tuple[Tree, Tree, Tree]:
    mu, nu = ema(mu, grads, betas[0]), ema_of_squares(nu, grads, betas[1])
    wide = [beta.double() if isinstance(beta, Tensor) else beta for beta in betas]
    kept = [torch.pow(beta, step.double()) for beta in wide]  # float64: in float32, 1 - 0.999**t is off by 1e-5
    return root_ratio(mu, nu, 1 - kept[0], torch.sqrt(1 - kept[1]), eps), mu, nu


def _fusable(columns: list[list[Any]], steps: Tensor) -> bool:
    """May the fused kernel do it: plain, dense CPU leaves of one dtype, and lanes that have taken as many steps?"""
    dtype = columns[0][0].dtype
    if dtype not in (torch.float32, torch.float64) or any_differentiable(columns) or not may_look(steps):
        return False
    if any(x.dtype != dtype or not x.is_cpu or not x.is_contiguous() for column in columns for x in column):
        return False
    return steps.ndim == 0 or bool((steps == steps[0]).all())
