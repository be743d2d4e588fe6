"""Gradient clipping: bound the length of a gradient, keep its direction.

A bound may be a tensor, one a lane under ``vmap``. Leaves keep shape and dtype; empty leaves and an empty tree pass.
Gradients that are not finite pass unchanged (but for ``classic=True``), so that the finite check of
:func:`functricks.train_step` or :func:`functricks.skip_nonfinite` sees them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functricks import tree
from functricks.transforms.base import check_number, counter, recorded, stateless
from functricks.types import Empty, Grads, Number, Params, Transform

__all__ = ["adaptive_clip", "clip_by_global_norm", "clip_by_leaf_norm", "clip_by_value"]


@recorded
def clip_by_value(bound: Number) -> Transform:
    r"""Clamp every entry of every gradient to ``[-bound, bound]``.

    .. math:: g_i \mapsto \max(-c, \min(c, g_i))

    Classic: :func:`torch.nn.utils.clip_grad_value_`. Reference: Mikolov 2012, PhD thesis, section 3.2.2.

    Args:
        bound: :math:`c \ge 0`.

    This changes the direction. NaN stays NaN; infinite entries become ``bound``.

    >>> clip = clip_by_value(1.0)
    >>> clip.update({"w": torch.tensor([3.0, -0.5])}, clip.init({}), {})[0]["w"]
    tensor([ 1.0000, -0.5000])
    """
    check_number("clip_by_value: bound", bound, minimum=0.0)
    return stateless(lambda grads, params: tree.clamp(grads, -bound, bound))


class ClipByGlobalNormState(NamedTuple):
    nonfinite: Tensor


@recorded
def clip_by_global_norm(
    max_norm: Number, *, norm_type: float = 2.0, classic: bool = False, error_if_nonfinite: bool = False
) -> Transform:
    r"""Scale the gradients so that the norm of all of them together is at most ``max_norm``.

    .. math:: g \mapsto g \cdot \min\left(1, \frac{c}{\lVert g \rVert_p}\right)

    Classic: :func:`torch.nn.utils.clip_grad_norm_`. Reference: Pascanu et al. 2013, arXiv:1211.5063.

    Args:
        max_norm: :math:`c \ge 0`; ``inf`` never clips.
        norm_type: p >= 1, ``inf`` for the largest entry.
        classic: reproduce ``clip_grad_norm_`` to the bit: it computes the norm in the gradients' dtype and divides by
            the norm plus 1e-6, so that it shrinks tiny gradients too and overflows for large ones. Where leaves have
            several dtypes, PyTorch adds up dtype by dtype in an order of its own, and the last place of float64
            leaves may differ.
        error_if_nonfinite: PyTorch's argument, as a value, since a pure function under ``vmap`` cannot raise for one
            lane: the state is then ``(nonfinite,)``, which counts the updates whose norm was not finite.

    In the default, finite gradients of any size keep their direction and zero stays zero.

    >>> clip = clip_by_global_norm(1.0)
    >>> clip.update({"a": torch.tensor(3.0), "b": torch.tensor(4.0)}, clip.init({}), {})[0]
    {'a': tensor(0.6000), 'b': tensor(0.8000)}
    """
    check_number("clip_by_global_norm: max_norm", max_norm, minimum=0.0)
    _check_order(norm_type, classic)

    def init(params: Params) -> Empty | ClipByGlobalNormState:
        return ClipByGlobalNormState(counter(params)) if error_if_nonfinite else Empty()

    def update(
        grads: Grads, state: Empty | ClipByGlobalNormState, params: Params
    ) -> tuple[Grads, Empty | ClipByGlobalNormState]:
        if not tree.leaves(grads):
            return grads, state
        find = _classic_factor if classic else shrinkage
        (first, second), finite = find(grads, max_norm, float(norm_type))
        clipped = tree.scale(tree.scale(grads, first), second)
        if isinstance(state, ClipByGlobalNormState):
            return clipped, ClipByGlobalNormState(state.nonfinite + ~finite)
        return clipped, state

    return Transform(init, update)


def _check_order(norm_type: Any, classic: bool) -> None:
    if not isinstance(norm_type, (int, float)) or not (classic or norm_type >= 1):
        raise ValueError(f"clip_by_global_norm: norm_type must be >= 1, or inf, got {norm_type!r}")


_SMALL = 2.0**-100


def shrinkage(grads: Grads, max_norm: Number, order: float = 2.0) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the two factors to multiply with one after the other, and whether the gradients are finite.

    One would do, but for a small bound over a large norm, whose ratio has no place in the leaf's dtype.
    """
    peak, relative = tree.norm_parts(grads, order)
    length = peak * relative  # may be infinite for finite gradients, which is then more than max_norm, as it should
    finite = torch.isfinite(peak) & torch.isfinite(relative)
    clips = finite & (length > max_norm)
    peak, relative = torch.where(clips, peak, 1.0), torch.where(clips, relative, 1.0)
    factor = torch.where(clips, max_norm / peak / relative, 1.0)  # 1 / length alone may overflow
    small = factor < _SMALL
    return (torch.where(small, _SMALL, factor), torch.where(small, max_norm / _SMALL / peak / relative, 1.0)), finite


def _classic_factor(grads: Grads, max_norm: Number, order: float) -> tuple[tuple[Tensor, Tensor], Tensor]:
    leaves = tree.leaves(grads)
    if (
        order < 0 or order == math.inf
    ):  # nothing is the largest or the smallest entry of an empty leaf, and torch raises
        leaves = [leaf for leaf in leaves if leaf.numel()] or [leaves[0].new_zeros(1)]
    norms = [torch.linalg.vector_norm(leaf, order) for leaf in leaves]
    total = torch.linalg.vector_norm(torch.stack(norms), order)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    return (factor, torch.ones_like(factor)), torch.isfinite(total)


@recorded
def clip_by_leaf_norm(max_norm: Number) -> Transform:
    r"""Scale every leaf by itself so that its Euclidean norm is at most ``max_norm``.

    .. math:: g_l \mapsto g_l \cdot \min\left(1, \frac{c}{\lVert g_l \rVert_2}\right)

    Classic: ``clip_grad_norm_`` called once a parameter. It keeps the direction within a leaf, not across leaves.

    Args:
        max_norm: :math:`c \ge 0`.

    >>> clip = clip_by_leaf_norm(1.0)
    >>> clip.update({"a": torch.tensor([3.0, 4.0]), "b": torch.tensor(0.5)}, clip.init({}), {})[0]
    {'a': tensor([0.6000, 0.8000]), 'b': tensor(0.5000)}
    """
    check_number("clip_by_leaf_norm: max_norm", max_norm, minimum=0.0)

    def clip(leaf: Tensor, max_norm: Number) -> Tensor:
        (first, second), _ = shrinkage(leaf, max_norm)
        dtype = tree.compute_dtype(leaf.dtype)
        return leaf.to(dtype) * first.to(dtype) * second.to(dtype)

    return stateless(lambda grads, params: tree.pointwise(clip, grads, coefficients=(max_norm,)))


@recorded
def adaptive_clip(clipping: Number = 0.01, eps: Number = 1e-3) -> Transform:
    r"""Bound the gradient of every output unit by a share of the norm of the unit's weights.

    .. math:: g_i \mapsto g_i \cdot \min\left(1, \lambda \frac{\max(\lVert w_i \rVert, \epsilon)}{\lVert g_i \rVert}
        \right)

    with :math:`i` the first axis, as in ``torch.nn.Linear`` and convolutions; leaves of one axis or none are one unit.

    PyTorch has none. Reference: Brock et al. 2021, arXiv:2102.06171, with the paper's ``eps``. The paper leaves out
    the last layer: ``masked(adaptive_clip(), where)``.

    Args:
        clipping: :math:`\lambda \ge 0`.
        eps: what a unit's norm counts as at least, so that weights at zero can move; >= 0.

    >>> clip = adaptive_clip(0.1)
    >>> params = {"w": torch.tensor([[3.0, 4.0], [0.0, 1.0]])}
    >>> clip.update({"w": torch.tensor([[0.0, 2.0], [0.0, 0.01]])}, clip.init(params), params)[0]["w"]
    tensor([[0.0000, 0.5000],
            [0.0000, 0.0100]])
    """
    check_number("adaptive_clip: clipping", clipping, minimum=0.0)
    check_number("adaptive_clip: eps", eps, minimum=0.0)

    def clip(leaf: Tensor, param: Tensor, clipping: Number, eps: Number) -> Tensor:
        if not leaf.numel():
            return leaf
        peak, length = _unit_norms(leaf)
        own_peak, own = _unit_norms(param)
        bound = clipping * _at_least(own_peak * own, eps)
        clips = torch.isfinite(peak) & torch.isfinite(length) & (peak * length > bound)
        # one after the other: their product, or the ratio of a small bound to it, may have no place in the dtype
        wide = leaf.to(torch.promote_types(leaf.dtype, torch.float64))
        return torch.where(clips, wide / torch.where(clips, peak, 1.0) / torch.where(clips, length, 1.0) * bound, wide)

    return stateless(lambda grads, params: tree.pointwise(clip, grads, params, coefficients=(clipping, eps)))


def _at_least(norms: Tensor, eps: Number) -> Tensor:
    return torch.maximum(norms, torch.as_tensor(eps, dtype=norms.dtype, device=norms.device))


def _unit_norms(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of every unit, ready to broadcast, as two float64 factors: the product may overflow."""
    wide = (leaf.abs() if leaf.is_complex() else leaf).double()
    axes = tuple(range(1, leaf.ndim)) if leaf.ndim > 1 else tuple(range(leaf.ndim))
    peak = wide.detach().abs().amax(axes, keepdim=True) if axes else wide.detach().abs()
    peak = torch.where(peak == 0, 1.0, peak)
    squares = (wide / peak).square()
    return peak, tree.sqrt(squares.sum(axes, keepdim=True) if axes else squares)
