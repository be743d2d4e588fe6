"""From a loss function to its gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from functricks import tree
from functricks.gradients._answers import Answer, answer_of, others
from functricks.types import Batch, Carry, GradFn, Gradient, LossFn, Number, Params

__all__ = ["gradient"]

Backend = Literal["func", "autograd"]


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
        has_carry: does ``loss_fn`` take and return a carry, a tree of tensors? Without it a carry passes through
            untouched.
        has_metrics: does ``loss_fn`` return metrics? Python numbers among them become tensors.
        backend: ``"func"`` is ``torch.func``: composes with ``vmap``, ``grad`` and ``torch.compile``. ``"autograd"`` is
            ``torch.autograd.grad``: faster for one eager run, and the one that works with hooks, activation
            checkpointing and DDP-wrapped modules; first order, its result is detached.

    The returned ``GradFn`` is ``(params, batch, carry=(), *, scale=None) -> Gradient``. ``scale`` multiplies the loss
    before differentiation, as float32, and is divided out of the gradient again. Over a weight of zero the sum counts
    instead of the mean, so a batch without valid elements, or without rows, has a zero gradient and a zero loss. A leaf
    that the loss does not use has a zero gradient. ``loss`` is float32 or wider.

    Raises ``ValueError`` when a parameter is not floating point, when the loss is neither a ``Loss`` nor 0-d, when its
    values and weights differ in shape, when the leaves of the batch differ in length under a 0-d loss, and with
    ``backend="autograd"`` when the result would silently lose a derivative. Raises ``ValueError`` or ``TypeError`` when
    the loss function does not take or return what the flags say, or its carry or metrics hold something else.

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
        _check_scale(scale)
        if backend == "autograd":
            _check_first_order(params, batch, carry, scale)

        def evaluate(params: Params) -> tuple[Tensor, Answer]:
            done = answer_of(loss_fn, params, batch, carry, has_carry, has_metrics)
            if scale is None:
                return done.mean, done
            return done.mean * scale, done

        grads, done = differentiate(evaluate, params)
        if scale is not None:
            grads = tree.map(lambda leaf: (leaf.to(tree.compute_dtype(leaf.dtype)) / scale).to(leaf.dtype), grads)
        return Gradient(grads, done.mean, done.weight, done.carry if has_carry else carry, done.metrics)

    return grad_fn


def _check_loss_fn(loss_fn: Any, has_carry: bool) -> None:
    """Raise where the loss function is named, and not when it is called, deep inside a transform."""
    if torch.compiler.is_compiling():
        return
    if not callable(loss_fn):
        raise TypeError(f"gradient: loss_fn must be a function, got {type(loss_fn).__name__}")
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a builtin does not tell
        return
    called = ("params", "batch", *(["carry"] if has_carry else []))
    try:
        signature.bind(*called)
    except TypeError as error:
        raise TypeError(
            f"gradient: with has_carry={has_carry} the loss function is called as ({', '.join(called)}), "
            f"but it takes {signature}; see has_carry"
        ) from error


def check_grad_fn(name: str, given: Any) -> None:
    """Raise for what is no ``GradFn``, such as a loss function: it could not take the loss scale."""
    if torch.compiler.is_compiling():
        return
    if not callable(given) or not _takes_scale(getattr(given, "__code__", None)):
        what = getattr(given, "__name__", type(given).__name__)
        raise TypeError(
            f"{name}: a gradient function is (params, batch, carry=(), *, scale=None) -> Gradient, got {what!r}; "
            "gradient(loss_fn) makes one of a loss function"
        )


def _takes_scale(code: Any) -> bool:
    """Look at the code of a function, if it is one; ``inspect.signature`` takes ten times as long."""
    if code is None or code.co_flags & inspect.CO_VARKEYWORDS:
        return True
    return "scale" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _check_scale(scale: Number | None) -> None:
    if isinstance(scale, Tensor) and scale.ndim:
        raise ValueError(f"gradient: scale must be a number or a 0-d tensor, got shape {tuple(scale.shape)}")


# --- three ways to differentiate -------------------------------------------------------------------------------------

Evaluate = Callable[[Params], tuple[Tensor, Answer]]


def _by_func(evaluate: Evaluate, params: Params) -> tuple[Params, Answer]:
    leaves, structure = tree.flatten(params)
    if not leaves:
        return params, evaluate(params)[1]
    _check_floating(leaves, params)
    level = tree.lanes()
    if level is not None and not torch.is_grad_enabled() and _has_lane(params) and not _is_inference():
        return _below_lanes(evaluate, params, level)
    forms: list[Any] = []

    def of_leaves(own: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        total, done = evaluate(tree.unflatten(structure, own))
        answer, form = tree.flatten(done)  # torch.func takes tensors alone, not None
        forms.append(form)
        return total, answer

    grads, answer = torch.func.grad(of_leaves, has_aux=True)(leaves)
    return tree.unflatten(structure, grads), tree.unflatten(forms[0], answer)


def _check_floating(leaves: list[Any], params: Params) -> None:
    if not all(isinstance(leaf, Tensor) and _has_slope(leaf) for leaf in leaves):
        raise ValueError(
            f"gradient: parameters must be floating point, got {others(params, _has_slope)}; "
            "counters and buffers belong in the carry"
        )


def _has_slope(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _is_inference() -> bool:
    """Does ordinary autograd record nothing at all, whatever enable_grad says?"""
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def _has_lane(params: Params) -> bool:
    return any(tree.below_lanes(leaf)[1] for leaf in tree.leaves(params))


def _below_lanes(evaluate: Evaluate, params: Params, level: int) -> tuple[Params, Answer]:
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


def _by_autograd(evaluate: Evaluate, params: Params) -> tuple[Params, Answer]:
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
