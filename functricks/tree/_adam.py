"""Adam's direction and moments: by PyTorch's fused kernel where it applies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functricks.tree._arithmetic import ema, ema_of_squares, root_ratio
from functricks.tree._lanes import any_differentiable, is_transformed, look, may_look
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
    """Do it by the fused kernel; None where it does not apply.

    Not below the lanes: it takes one step for all of them, so that a lane would round otherwise as soon as another
    lane has skipped a step.
    """
    if not _fusable(columns, step):
        return None
    direction = [torch.zeros_like(leaf) for leaf in columns[0]]
    mu, nu = ([leaf.clone() for leaf in column] for column in columns[1:])
    (beta1, beta2, eps), steps = numbers, [step.float()] * len(direction)
    torch._fused_adamw_(
        direction, columns[0], mu, nu, [], steps,
        lr=-1.0, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
    return [direction, mu, nu]


def _adam_by_parts(
    mu: Tree, nu: Tree, grads: Tree, betas: tuple[Number, Number], eps: Number, step: Tensor
) -> tuple[Tree, Tree, Tree]:
    mu, nu = ema(mu, grads, betas[0]), ema_of_squares(nu, grads, betas[1])
    wide = [beta.double() if isinstance(beta, Tensor) else beta for beta in betas]
    kept = [torch.pow(beta, step.double()) for beta in wide]  # float64: in float32, 1 - 0.999**t is off by 1e-5
    return root_ratio(mu, nu, 1 - kept[0], torch.sqrt(1 - kept[1]), eps), mu, nu


def _fusable(columns: list[list[Any]], step: Tensor) -> bool:
    """May the fused kernel do it: plain, dense CPU leaves of one dtype?"""
    if torch.compiler.is_compiling() or is_transformed() or not may_look(step):
        return False
    dtype = columns[0][0].dtype
    if dtype not in (torch.float32, torch.float64) or any_differentiable(columns):
        return False
    return all(x.dtype == dtype and x.is_cpu and x.is_contiguous() for column in columns for x in column)
