"""The gradient of every example by itself: to look at, or to bound each one's share in the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functricks import tree
from functricks.clipping import shrinkage
from functricks.gradients._answers import common_length
from functricks.gradients._gradient import gradient
from functricks.transforms.base import check_integer, check_number
from functricks.types import Batch, Carry, GradFn, Gradient, Grads, LossFn, Number, Params

__all__ = ["clip_per_example", "per_example_gradient"]


def per_example_gradient(
    loss_fn: LossFn, *, has_carry: bool = False, has_metrics: bool = False, chunk_size: int | None = None
) -> GradFn:
    r"""Return the function that computes the gradient of every example's own mean loss.

    .. math:: g_i = \nabla_\theta \ell_i(\theta)

    Classic: a backward pass for each example; or Opacus, whose hooks know some kinds of layer.
    Reference: Goodfellow 2015, arXiv:1510.01799.

    Args:
        loss_fn: as in :func:`gradient`. It sees one example at a time as a batch of one: the leading axis stays.
        has_carry: as in :func:`gradient`. Every example starts from the same carry, and the new carry is that of the
            first; so a key moves on once, and all examples draw the same dropout mask. BatchNorm has no meaning here.
        has_metrics: as in :func:`gradient`.
        chunk_size: how many examples at a time, to bound memory; all by default.

    In the :class:`~functricks.Gradient`, ``grads``, ``loss``, ``weight`` and ``metrics`` have a leading axis, the
    examples, of length zero for an empty batch, which leaves the carry as it was. 0-d leaves of the batch go to every
    example.

    Raises ``ValueError`` when the leaves of the batch do not share one leading axis, and ``TypeError`` when one is no
    tensor.

    >>> import torch
    >>> grad_fn = per_example_gradient(lambda params, x: (params["w"] * x).mean())
    >>> grad_fn({"w": torch.tensor(1.0)}, torch.tensor([1.0, 3.0])).grads["w"]
    tensor([1., 3.])
    """
    if chunk_size is not None:
        check_integer("per_example_gradient: chunk_size", chunk_size, 1)
    grad_fn = gradient(loss_fn, has_carry=has_carry, has_metrics=has_metrics)

    def per_example(params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        none = common_length("per_example_gradient", batch) == 0
        leaves, structure = tree.flatten(batch)
        axes = tuple(0 if leaf.ndim else None for leaf in leaves)

        forms: list[Any] = []

        def one(*own: Tensor) -> Any:
            example = [x if axis is None else x[None] for x, axis in zip(own, axes, strict=True)]
            found = grad_fn(params, tree.unflatten(structure, example), carry, scale=scale)
            answer, form = tree.flatten(found if has_carry else found._replace(carry=()))
            forms.append(form)
            return tuple(answer)  # vmap takes tensors alone, not None

        if none:  # there is nothing to map over; a row of zeros shows the form of the answer
            leaves = [leaf.new_zeros(1, *leaf.shape[1:]) if leaf.ndim else leaf for leaf in leaves]
        answer = torch.vmap(one, axes, chunk_size=chunk_size)(*leaves)
        found = Gradient(*tree.unflatten(forms[0], answer))
        if none:
            found = Gradient(*tree.map(lambda leaf: leaf[:0], tuple(found._replace(carry=()))))
        return found._replace(carry=tree.map(lambda leaf: leaf[0], found.carry) if has_carry and not none else carry)

    return per_example


def clip_per_example(
    loss_fn: LossFn,
    max_norm: Number,
    *,
    has_carry: bool = False,
    has_metrics: bool = False,
    chunk_size: int | None = None,
) -> GradFn:
    r"""Return the function that averages the examples' gradients after clipping each of them.

    .. math:: g = \frac{\sum_i w_i\, g_i \min(1, c / \lVert g_i \rVert_2)}{\sum_i w_i}

    No example pulls by more than ``max_norm``, in units of its weight: robust to outliers, and with
    ``add_noise`` the gradient of DP-SGD (where every example must weigh the same).

    Classic: Opacus' ``DPOptimizer``. Reference: Abadi et al. 2016, arXiv:1607.00133.

    Args:
        loss_fn: as in :func:`per_example_gradient`, like the other arguments.
        max_norm: :math:`c \ge 0`.
        has_carry: see :func:`per_example_gradient`.
        has_metrics: see :func:`per_example_gradient`.
        chunk_size: see :func:`per_example_gradient`.

    ``metrics["clipped"]`` is the share of the weight that was clipped. All gradients exist at once; to bound memory,
    wrap it in :func:`accumulate`. An example whose gradient is not finite is passed on, so that the finite check sees
    it; ``accumulate(..., micro_batch_size=1, nonfinite="drop")`` leaves such examples out.

    >>> import torch
    >>> grad_fn = clip_per_example(lambda params, x: (params["w"] * x).mean(), 1.0)
    >>> grad_fn({"w": torch.tensor(1.0)}, torch.tensor([0.5, 30.0])).grads["w"]
    tensor(0.7500)
    """
    check_number("clip_per_example: max_norm", max_norm, minimum=0.0)
    every = per_example_gradient(loss_fn, has_carry=has_carry, has_metrics=has_metrics, chunk_size=chunk_size)

    def clipped(params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        found = every(params, batch, carry, scale=scale)
        shrunk, (first, second) = _shrunk(found, max_norm)
        weight = found.weight.sum()
        share = found.weight / tree.or_one(weight)
        # gradient divides by 1 where the weight is 0
        numerator = torch.where(found.weight == 0, 1, found.weight) / tree.or_one(weight)
        grads = tree.map(lambda leaf: _weighted_sum(leaf, numerator * second), shrunk)
        metrics = {name: _weighted_sum(value, share) for name, value in found.metrics.items()}
        metrics["clipped"] = _weighted_sum((first * second < 1).to(share.dtype), share)
        return Gradient(grads, _weighted_sum(found.loss, numerator), weight, found.carry, metrics)

    return clipped


def _shrunk(found: Gradient, max_norm: Number) -> tuple[Grads, tuple[Tensor, Tensor]]:
    """Return the examples' gradients times the first of their two factors, and both factors."""
    ones = torch.ones_like(found.weight, dtype=torch.float64)
    leaves, structure = tree.flatten(found.grads)  # vmap takes no None
    if not len(ones) or not leaves:  # vmap needs something to map over
        return found.grads, (ones, ones)
    factors = torch.vmap(lambda grads: shrinkage(grads, max_norm)[0])(leaves)
    return tree.unflatten(structure, torch.vmap(tree.scale)(leaves, factors[0])), factors


def _weighted_sum(rows: Tensor, share: Tensor) -> Tensor:
    """Return the sum over the leading axis; a row of no weight counts for nothing, whatever it holds."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    share = share.view(-1, *[1] * (rows.ndim - 1))
    total = torch.where(share == 0, 0.0, rows.to(wide) * share.to(wide)).sum(0)
    return total.to(rows.dtype if rows.is_floating_point() or rows.is_complex() else wide)
