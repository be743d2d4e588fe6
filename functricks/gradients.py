"""From a loss function to its gradient, and from one gradient function to another.

A ``LossFn`` is ``(params, batch) -> Loss``. :func:`gradient` makes a ``GradFn`` of it, ``(params, batch, carry) ->
Gradient``, and everything else that needs the loss again (on parts of the batch, at other parameters) is a wrapper
``GradFn -> GradFn``. So ``accumulate(fgm(gradient(loss)), 4)`` is a gradient function like any other.

Three rules hold for all of them. The carry (buffers, random key) goes through every evaluation in the order in which a
classic loop would have mutated it. A ``Gradient`` carries its weight, so parts add up to the whole. And a loss scale
enters and leaves inside :func:`gradient`: nobody else ever sees a scaled gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functricks import tree
from functricks.types import Batch, Carry, GradFn, Gradient, Loss, LossFn, Number, Params

__all__ = ["accumulate", "gradient"]

Backend = Literal["func", "autograd"]


class _Evaluated(NamedTuple):
    """A loss function's answer in one form."""

    mean: Tensor
    weight: Tensor
    carry: Carry
    metrics: dict[str, Tensor]


def gradient(
    loss_fn: LossFn, *, has_carry: bool = False, has_metrics: bool = False, backend: Backend = "func"
) -> GradFn:
    r"""Return the function that computes the gradient of the mean loss.

    .. math:: g = \nabla_\theta \frac{\sum_i v_i(\theta)}{\sum_i w_i}

    Classic: ``loss.backward()`` and the ``.grad`` of every parameter.

    Args:
        loss_fn: ``(params, batch) -> loss``; with ``has_carry`` it is ``(params, batch, carry) -> (loss, carry)``; with
            ``has_metrics`` the dict of metrics (name -> 0-d tensor) comes last in the returned tuple. ``loss`` is a
            :class:`~functricks.Loss`, or a 0-d tensor, which counts as the mean over the batch's leading axis.
        has_carry: does ``loss_fn`` take and return a carry? Without it a carry passes through untouched.
        has_metrics: does ``loss_fn`` return metrics?
        backend: ``"func"`` is ``torch.func``: composes with ``vmap``, ``grad`` and ``torch.compile``. ``"autograd"`` is
            ``torch.autograd.grad``: faster for one eager run, and the one that works with hooks, activation
            checkpointing and DDP-wrapped modules; first order, its result is detached.

    The returned ``GradFn`` is ``(params, batch, carry=(), *, scale=None) -> Gradient``. ``scale`` multiplies the loss
    before differentiation, as float32, and is divided out of the gradient again. A batch of zero weight has a zero
    gradient. A leaf that the loss does not use has a zero gradient.

    Raises ``ValueError`` when the loss is neither a ``Loss`` nor 0-d, when the leaves of the batch differ in length
    under a 0-d loss, and with ``backend="autograd"`` when the result would silently lose a derivative.

    >>> import torch
    >>> grad_fn = gradient(lambda params, batch: (params["w"] * batch).square().mean())
    >>> grad_fn({"w": torch.tensor(2.0)}, torch.tensor([1.0, 3.0])).grads["w"]
    tensor(20.)
    """
    if backend not in ("func", "autograd"):
        raise ValueError(f"gradient: backend must be 'func' or 'autograd', got {backend!r}")
    differentiate = _by_func if backend == "func" else _by_autograd

    def grad_fn(params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        if backend == "autograd":
            _check_first_order(params, batch, carry, scale)

        def evaluate(params: Params) -> tuple[Tensor, _Evaluated]:
            done = _evaluate(loss_fn, params, batch, carry, has_carry, has_metrics)
            if scale is None:
                return done.mean, done
            return done.mean.to(_wide(done.mean)) * scale, done

        grads, done = differentiate(evaluate, params)
        if scale is not None:
            grads = tree.map(lambda leaf: (leaf.to(_wide(leaf)) / scale).to(leaf.dtype), grads)
        return Gradient(grads, done.mean, done.weight, done.carry, done.metrics)

    return grad_fn


def _wide(tensor: Tensor) -> torch.dtype:
    return tree.compute_dtype(tensor.dtype)


def _evaluate(
    loss_fn: LossFn, params: Params, batch: Batch, carry: Carry, has_carry: bool, has_metrics: bool
) -> _Evaluated:
    """Call the loss function and sort its answer."""
    out = loss_fn(params, batch, carry) if has_carry else loss_fn(params, batch)
    parts = tuple(out) if has_carry or has_metrics else (out,)
    expected = 1 + has_carry + has_metrics
    if len(parts) != expected:
        raise ValueError(
            f"gradient: with has_carry={has_carry}, has_metrics={has_metrics} the loss function must return "
            f"{expected} values, got {len(parts)}"
        )
    mean, weight = _mean_and_weight(parts[0], batch)
    return _Evaluated(mean, weight, parts[1] if has_carry else carry, parts[-1] if has_metrics else {})


def _mean_and_weight(loss: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    if isinstance(loss, Loss):
        wide = _wide(loss.values)
        weight = loss.weights.sum()
        total = loss.values.sum(dtype=wide)
        return (total / torch.where(weight == 0, 1, weight)).to(wide), weight
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"gradient: the loss function must return a Loss or a 0-d tensor, got {got}")
    return loss, torch.full((), _batch_length(batch), dtype=_wide(loss), device=loss.device)


def _batch_length(batch: Batch) -> float:
    """Return the length of the leading axis; 1 for a batch without leaves or of 0-d leaves."""
    lengths = {path: leaf.shape[0] for path, leaf in tree.named_leaves(batch).items() if leaf.ndim}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"gradient: a 0-d loss counts as the mean over the batch's leading axis, but leaves differ: {lengths}; "
            "return a Loss(values, weights)"
        )
    return float(next(iter(lengths.values()), 1))


# --- three ways to differentiate -------------------------------------------------------------------------------------

Evaluate = Callable[[Params], tuple[Tensor, _Evaluated]]


def _by_func(evaluate: Evaluate, params: Params) -> tuple[Params, _Evaluated]:
    if not tree.leaves(params):
        return params, evaluate(params)[1]
    level = tree.lanes()
    if level is not None and not torch.is_grad_enabled() and _has_lane(params):
        return _below_lanes(evaluate, params, level)
    grads, done = torch.func.grad(evaluate, has_aux=True)(params)
    return grads, done


def _has_lane(params: Params) -> bool:
    return any(tree.below_lanes(leaf)[1] for leaf in tree.leaves(params))


def _below_lanes(evaluate: Evaluate, params: Params, level: int) -> tuple[Params, _Evaluated]:
    """Differentiate the stacked lanes by ordinary autograd: half the time of ``vmap(torch.func.grad)`` in eager.

    Lanes are independent, so the gradient of the sum of their losses holds each lane's gradient. Right only where
    nobody differentiates through the result, hence the caller's check that grad mode is off.
    """
    leaves, structure = tree.flatten(params)
    found = [tree.below_lanes(leaf) for leaf in leaves]
    lane_count = next(stacked.shape[0] for stacked, laned in found if laned)
    with tree.outside_lanes():
        stacked = [(x if laned else x.expand(lane_count, *x.shape)).detach().requires_grad_() for x, laned in found]
    with torch.enable_grad():
        total, done = evaluate(tree.unflatten(structure, [tree.above_lanes(x, level) for x in stacked]))
        total, _ = tree.below_lanes(total)
        with tree.outside_lanes():
            found_grads = _gradients(total.sum(), stacked)
    with tree.outside_lanes():
        # A linear layer's weight gradient comes out transposed, and everything that follows would pay for the strides.
        grads = [x.contiguous() for x in found_grads]
    done = tree.map(torch.Tensor.detach, done)
    return tree.unflatten(structure, [tree.above_lanes(x, level) for x in grads]), done


def _by_autograd(evaluate: Evaluate, params: Params) -> tuple[Params, _Evaluated]:
    leaves, structure = tree.flatten(params)
    with torch.enable_grad():
        inputs = [leaf.detach().requires_grad_() for leaf in leaves]
        total, done = evaluate(tree.unflatten(structure, inputs))
        grads = _gradients(total, inputs)
    return tree.unflatten(structure, grads), tree.map(torch.Tensor.detach, done)


def _gradients(total: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Differentiate by autograd; zeros where the total does not depend on the inputs, as ``torch.func.grad``."""
    if not total.requires_grad or not inputs:
        return tuple(torch.zeros_like(leaf) for leaf in inputs)
    return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)


def _check_first_order(*inputs: Any) -> None:
    """Refuse what ``backend="autograd"`` would get silently wrong."""
    if tree.is_transformed():
        raise ValueError(
            "gradient: backend='autograd' does not work under vmap, grad and other torch.func transforms; "
            "use backend='func'"
        )
    if not torch.is_grad_enabled():
        return
    for what, value in zip(("params", "batch", "carry", "scale"), inputs, strict=True):
        for path, leaf in tree.named_leaves(value).items():
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ValueError(
                    f"gradient: {what} {path!r} requires grad, but backend='autograd' returns detached gradients; "
                    "detach it, call under torch.no_grad(), or use backend='func'"
                )


# --- accumulation ----------------------------------------------------------------------------------------------------


def accumulate(grad_fn: GradFn, micro_batches: int | None = None, *, micro_batch_size: int | None = None) -> GradFn:
    r"""Compute the gradient of a batch from its micro-batches: the same numbers, the memory of one micro-batch.

    .. math:: g = \frac{\sum_k w_k g_k}{\sum_k w_k}

    with :math:`w_k` the weight of micro-batch *k* (its valid tokens, class weights, ...), so the result is the whole
    batch's whatever the split: uneven left-overs, ignored tokens and micro-batches of weight zero included.

    Classic: ``(loss / k).backward()`` for each of *k* micro-batches, then one step; right only if all weigh the same.
    Reference: the fault is described in https://github.com/huggingface/transformers/pull/34191.

    Args:
        grad_fn: the gradient function to call on each micro-batch.
        micro_batches: into how many parts to split the leading axis, as evenly as possible; a batch shorter than that
        has
            one row a part.
        micro_batch_size: instead, how many rows a part has; the last may have fewer.

    The carry goes from one micro-batch to the next; 0-d leaves of the batch go to every one. Metrics are averaged like
    the loss. Sums are float32 or wider.

    Raises ``ValueError`` unless exactly one of the two sizes is given, and is >= 1.

    >>> import torch
    >>> grad_fn = gradient(lambda params, x: (params["w"] * x).mean())
    >>> accumulate(grad_fn, 2)({"w": torch.tensor(1.0)}, torch.tensor([1.0, 4.0, 4.0])).grads["w"]
    tensor(3.)
    """
    if (micro_batches is None) == (micro_batch_size is None):
        raise ValueError("accumulate: give exactly one of micro_batches and micro_batch_size")
    given = micro_batches if micro_batch_size is None else micro_batch_size
    if not isinstance(given, int) or given < 1:
        raise ValueError(f"accumulate: micro_batches and micro_batch_size must be integers >= 1, got {given!r}")

    def accumulated(params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        total = None
        for part in _split(batch, micro_batches, micro_batch_size):
            one = grad_fn(params, part, carry, scale=scale)
            carry = one.carry
            weighted = _weighted(one)
            total = weighted if total is None else tree.add(total, weighted)
        assert total is not None
        return _divided(total, params, carry)

    return accumulated


def _split(batch: Batch, parts: int | None, size: int | None) -> list[Batch]:
    leaves, structure = tree.flatten(batch)
    lengths = {leaf.shape[0] for leaf in leaves if leaf.ndim}
    if len(lengths) != 1:
        raise ValueError(
            f"accumulate: the leaves of the batch must share one leading axis, got lengths {sorted(lengths)}"
        )
    length = lengths.pop()
    count = max(1, min(parts or 1, length)) if size is None else max(1, -(-length // size))
    columns = [
        (leaf,) * count  # a number, which every part needs
        if not leaf.ndim
        else torch.tensor_split(leaf, count)
        if size is None
        else torch.split(leaf, size)
        for leaf in leaves
    ]
    return [tree.unflatten(structure, row) for row in zip(*columns, strict=True)]


class _Sums(NamedTuple):
    grads: Any
    loss: Tensor
    metrics: dict[str, Tensor]
    weight: Tensor


def _weighted(one: Gradient) -> _Sums:
    def widened(leaf: Tensor) -> Tensor:  # a count, too, has a mean that is no integer
        return leaf.to(_wide(leaf) if leaf.is_floating_point() else torch.float32)

    wide = tree.map(widened, (one.grads, one.loss, one.metrics))
    grads, loss, metrics = tree.scale(wide, one.weight)
    return _Sums(grads, loss, metrics, one.weight)


def _divided(total: _Sums, params: Params, carry: Carry) -> Gradient:
    weight = torch.where(total.weight == 0, 1, total.weight)
    grads, loss, metrics = tree.scale((total.grads, total.loss, total.metrics), 1 / weight.double())
    return Gradient(tree.map(lambda leaf, like: leaf.to(like.dtype), grads, params), loss, total.weight, carry, metrics)
