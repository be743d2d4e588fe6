"""Gradient clipping: bound the length of a gradient, keep its direction."""

from __future__ import annotations

import torch
from torch import Tensor

from functricks import tree
from functricks.transforms import check_number
from functricks.types import Empty, Grads, Number, Params, Transform

__all__ = ["clip_by_global_norm"]


def clip_by_global_norm(max_norm: Number, *, classic: bool = False) -> Transform:
    r"""Scale the gradients so that the Euclidean norm of all of them together is at most ``max_norm``.

    .. math:: g \mapsto g \cdot \min\left(1, \frac{c}{\lVert g \rVert_2}\right)

    Classic: :func:`torch.nn.utils.clip_grad_norm_`. Reference: Pascanu et al. 2013, arXiv:1211.5063.

    Args:
        max_norm: :math:`c \ge 0`; ``inf`` never clips.
        classic: reproduce ``clip_grad_norm_`` to the bit: it computes the norm in the gradients' dtype and divides by
        the norm
            plus 1e-6, so that it shrinks tiny gradients too and overflows for large ones.

    In the default, finite gradients of any size keep their direction, zero stays zero, and gradients that are not
    finite pass unchanged, so that the finite check sees them. Leaves keep shape and dtype.

    >>> clip = clip_by_global_norm(1.0)
    >>> clip.update({"a": torch.tensor(3.0), "b": torch.tensor(4.0)}, clip.init({}), {})[0]
    {'a': tensor(0.6000), 'b': tensor(0.8000)}
    """
    check_number("clip_by_global_norm: max_norm", max_norm, minimum=0.0)

    def update(grads: Grads, state: Empty, params: Params) -> tuple[Grads, Empty]:
        if not tree.leaves(grads):
            return grads, state
        factor = _classic_factor(grads, max_norm) if classic else _factor(grads, max_norm)
        return tree.scale(grads, factor), state

    return Transform(lambda params: Empty(), update)


def _factor(grads: Grads, max_norm: Number) -> Tensor:
    peak, relative = tree.norm_parts(grads)
    length = peak * relative  # may be infinite for finite gradients, which is then more than max_norm, as it should
    clips = torch.isfinite(peak) & torch.isfinite(relative) & (length > max_norm)
    safe = torch.where(clips, relative, 1.0)
    return torch.where(clips, max_norm / torch.where(clips, peak, 1.0) / safe, 1.0)


def _classic_factor(grads: Grads, max_norm: Number) -> Tensor:
    norms = [torch.linalg.vector_norm(leaf) for leaf in tree.leaves(grads)]
    total = torch.linalg.vector_norm(torch.stack(norms))
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)
