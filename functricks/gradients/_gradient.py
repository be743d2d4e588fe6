"""From a loss function to its gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functricks import tree
from functricks.types import Batch, Carry, GradFn, Gradient, Loss, LossFn, Number, Params, weight_of

__all__ = ["gradient"]

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
    before differentiation, as float32, and is divided out of the gradient again. Over a weight of zero the sum counts
    instead of the mean, so a batch without valid elements, or without rows, has a zero gradient and a zero loss. A leaf
    that the loss does not use has a zero gradient.

    Raises ``TypeError`` when ``loss_fn`` cannot be called as ``has_carry`` says, or a metric is no 0-d tensor;
    ``ValueError`` when a parameter is not floating point, when the loss is neither a ``Loss`` nor 0-d, when its values
    and weights differ in shape, when the leaves of the batch differ in length under a 0-d loss, and with
    ``backend="autograd"`` when the result would silently lose a derivative.

    >>> import torch
    >>> grad_fn = gradient(lambda params, batch: (params["w"] * batch).square().mean())
    >>> grad_fn({"w": torch.tensor(2.0)}, torch.tensor([1.0, 3.0])).grads["w"]
    tensor(20.)
    """
    if backend not in ("func", "autograd"):
        raise ValueError(f"gradient: backend must be 'func' or 'autograd', got {backend!r}")
    _check_loss_fn(loss_fn, has_carry)
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


def _signature(function: Any) -> inspect.Signature | None:
    """Return how a function may be called; None where it does not tell, or while compiling."""
    if torch.compiler.is_compiling() or not callable(function):
        return None
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # a builtin
        return None


def _check_loss_fn(loss_fn: Any, has_carry: bool) -> None:
    """Raise where the loss function is named, and not when it is called, deep inside a transform."""
    if not callable(loss_fn):
        raise TypeError(f"gradient: loss_fn must be a function, got {type(loss_fn).__name__}")
    signature = _signature(loss_fn)
    if signature is None:
        return
    called = ("params", "batch", *(["carry"] if has_carry else []))
    try:
        signature.bind(*called)
    except TypeError as error:
        raise TypeError(
            f"gradient: with has_carry={has_carry} the loss function is called as ({', '.join(called)}), "
            f"but it takes {signature}; see has_carry"
        ) from error


def check_grad_fn(name: str, grad_fn: Any) -> None:
    """Raise unless this can be a gradient function: the loss function itself is a likely mistake."""
    signature = _signature(grad_fn)
    kinds = {} if signature is None else {one.name: one.kind for one in signature.parameters.values()}
    takes_scale = signature is None or "scale" in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()
    if not callable(grad_fn) or not takes_scale:
        got = f"{type(grad_fn).__name__}{'' if signature is None else f' {signature}'}"
        raise TypeError(
            f"{name}: grad_fn must be a gradient function, (params, batch, carry, *, scale) -> Gradient, got a {got}; "
            "gradient(loss_fn) makes one"
        )


def _wide(tensor: Tensor) -> torch.dtype:
    return tree.compute_dtype(tensor.dtype)


def _evaluate(
    loss_fn: LossFn, params: Params, batch: Batch, carry: Carry, has_carry: bool, has_metrics: bool
) -> _Evaluated:
    """Call the loss function and sort its answer."""
    out = loss_fn(params, batch, carry) if has_carry else loss_fn(params, batch)
    # a Loss is itself a tuple of two
    parts = tuple(out) if isinstance(out, (tuple, list)) and not isinstance(out, Loss) else (out,)
    expected = 1 + has_carry + has_metrics
    if len(parts) != expected:
        raise ValueError(
            f"gradient: with has_carry={has_carry}, has_metrics={has_metrics} the loss function must return "
            f"{expected} value{'s' * (expected > 1)}, got {len(parts)}"
        )
    if has_metrics:
        _check_metrics(parts[-1])
    mean, weight = mean_and_weight(parts[0], batch)
    return _Evaluated(mean, weight, parts[1] if has_carry else carry, parts[-1] if has_metrics else {})


def _check_metrics(metrics: Any) -> None:
    wrong: Any = {}
    if isinstance(metrics, dict):
        wrong = {name: value for name, value in metrics.items() if not isinstance(value, Tensor) or value.ndim}
    if not isinstance(metrics, dict) or wrong:
        got = ", ".join(f"{name!r}: {_described(value)}" for name, value in wrong.items()) or _described(metrics)
        raise TypeError(f"gradient: metrics must be a dict of 0-d tensors, got {got}")


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def mean_and_weight(
    loss: Any,
    batch: Batch,
    *,
    name: str = "gradient",
    what: str = "the loss function",
    items: str = "leaves",
    graph: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the mean of what a loss function returned, and its weight.

    Args:
        loss: what it returned.
        batch: what it was called on.
        name, what, items: for the caller's errors.
        graph: keep the graph of a mean over no rows, which is zero then: ``backward`` needs one. A derivative of NaN
            may come out of it.
    """
    if isinstance(loss, Loss):
        wide = _wide(loss.values)
        weight = weight_of(loss)
        total = loss.values.sum(dtype=wide)
        return (total / tree.or_one(weight)).to(wide), weight
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        raise ValueError(f"{name}: {what} must return a Loss or a 0-d tensor, got {_described(loss)}")
    length = _batch_length(batch, name, items)
    if not length:  # the mean of nothing is NaN
        loss = torch.where(torch.ones_like(loss, dtype=torch.bool), 0.0, loss) if graph else torch.zeros_like(loss)
    return loss, torch.full((), length, dtype=_wide(loss), device=loss.device)


def _batch_length(batch: Batch, name: str, items: str) -> float:
    """Return the length of the leading axis; 1 for a batch without leaves or of 0-d leaves."""
    lengths = {path: leaf.shape[0] for path, leaf in tree.named_leaves(batch).items() if leaf.ndim}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"{name}: a 0-d loss counts as the mean over the batch's leading axis, but {items} differ: {lengths}; "
            "return a Loss(values, weights)"
        )
    return float(next(iter(lengths.values()), 1))


# --- three ways to differentiate -------------------------------------------------------------------------------------

Evaluate = Callable[[Params], tuple[Tensor, _Evaluated]]


def _by_func(evaluate: Evaluate, params: Params) -> tuple[Params, _Evaluated]:
    leaves = tree.leaves(params)
    if not leaves:
        return params, evaluate(params)[1]
    _check_floating(leaves, params)
    level = tree.lanes()
    if level is not None and not torch.is_grad_enabled() and _has_lane(params) and not _is_inference():
        return _below_lanes(evaluate, params, level)
    grads, done = torch.func.grad(evaluate, has_aux=True)(params)
    return grads, done


def _check_floating(leaves: list[Tensor], params: Params) -> None:
    if not all(leaf.is_floating_point() or leaf.is_complex() for leaf in leaves):
        wrong = {p: x.dtype for p, x in tree.named_leaves(params).items() if not x.is_floating_point()}
        raise ValueError(
            f"gradient: parameters must be floating point, got {wrong}; counters and buffers belong in the carry"
        )


def _is_inference() -> bool:
    """Does ordinary autograd record nothing at all, whatever enable_grad says?"""
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


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
    _check_floating(leaves, params)
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
    if _is_inference():
        raise ValueError(
            "gradient: backend='autograd' records nothing under torch.inference_mode(); use torch.no_grad() instead"
        )
    if not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in tree.leaves(inputs)):
        return
    for what, value in zip(("params", "batch", "carry", "scale"), inputs, strict=True):
        for path, leaf in tree.named_leaves(value).items():
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ValueError(
                    f"gradient: {what} {path!r} requires grad, but backend='autograd' returns detached gradients; "
                    "detach it, call under torch.no_grad(), or use backend='func'"
                )
