"""The identity with another gradient: scaled, reversed, clipped, or whatever a function makes of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from functricks.clipping import clip_by_global_norm, clip_by_value
from functricks.types import Empty, Number, Transform

Identity: TypeAlias = Callable[..., Tensor]


class _Replaced(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, fn: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        y = x.clone()  # a view made in here could not be written to in place by the next module
        for operand in operands:
            # The value needs the lanes of the operands: without them, one gradient would arrive for all lanes.
            y = torch.where(operand.new_ones((), dtype=torch.bool), y, y)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, ctx.fn, *operands = inputs
        ctx.save_for_backward(*operands)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient: Any = ctx.fn(gradients[0], *ctx.saved_tensors)
        if not isinstance(gradient, Tensor) or gradient.shape != gradients[0].shape:
            got = f"shape {tuple(gradient.shape)}" if isinstance(gradient, Tensor) else f"{type(gradient).__name__}"
            raise TypeError(
                f"replace_gradient: the function must return a tensor of the gradient's shape "
                f"{tuple(gradients[0].shape)}, got {got}"
            )
        return gradient, None, *(None for _ in ctx.saved_tensors)


# The compiler's own way with an autograd.Function has no rule for vmap and drops the function from second derivatives.
# A function that it is allowed to put into the graph unread is right in both. To tell it so imports it, which takes a
# second, and therefore waits until something is compiled.
_unread: weakref.WeakSet[Identity] = weakref.WeakSet()


def _register() -> None:
    compiler: Any = torch.compiler
    for function in list(_unread):
        compiler.allow_in_graph(function)
        _unread.discard(function)


_register.__dict__["_dynamo_marked_constant"] = True  # runs while the compiler traces; see functricks.tree


def replace_gradient(fn: Callable[..., Tensor]) -> Identity:
    r"""Make an identity whose gradient is what ``fn`` makes of the gradient that arrives.

    .. math:: y = x, \qquad \bar x = \mathrm{fn}(\bar y, \ldots)

    Classic: ``x.register_hook(fn)``, or the value returned by a full backward hook. Under :func:`torch.func.grad` full
    backward hooks raise; tensor hooks act on one level of derivatives only, and raise in lanes inside of it.

    Args:
        fn: ``(gradient, *operands) -> gradient`` of the same shape. It may be differentiated again.

    The result is ``identity(x, *operands)``, where ``operands`` are tensors that ``fn`` needs: they get no gradient
    from the first derivative, may have lanes, and are differentiated where the gradient is. What ``fn`` takes from
    around it must have no lanes. The value is a copy of ``x``, to the bit. For a module's output or input, give it to
    ``functional(intervene=)``.

    Make it outside of a compiled function and call it inside; otherwise it raises RuntimeError. ``fn`` raises TypeError
    in the backward pass if it returns something else. There is no forward-mode derivative.

    >>> positive = replace_gradient(torch.relu)
    >>> torch.func.grad(lambda x: (positive(x) * torch.tensor([2.0, -2.0])).sum())(torch.ones(2))
    tensor([2., 0.])
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("replace_gradient: called while compiling; make the identity outside and call it inside")
    return _identity(fn)


def _identity(fn: Callable[..., Tensor]) -> Identity:
    """Make it without a look at the compiler, which may be what imports this module."""

    def unread(x: Tensor, *operands: Tensor) -> Tensor:
        apply: Any = _Replaced.apply
        replaced: Tensor = apply(x, fn, *operands)
        return replaced

    _unread.add(unread)

    def identity(x: Tensor, *operands: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            _register()
        return unread(x, *operands)

    return identity


def scale_gradient(x: Tensor, factor: Number) -> Tensor:
    r"""Return ``x``, and multiply its gradient by ``factor``.

    .. math:: y = x, \qquad \bar x = c\,\bar y

    Classic: ``x.register_hook(lambda g: g * factor)``, or ``x * c + (x * (1 - c)).detach()``, which changes the value.
    Reference: DeepMind's ``optax.scale_gradient``.

    Args:
        x: any floating-point tensor.
        factor: a number, or a tensor that broadcasts to ``x``; it may be batched by ``vmap`` and differentiated.

    >>> torch.func.grad(lambda x: scale_gradient(x, 0.5) ** 2)(torch.tensor(3.0))
    tensor(3.)
    """
    return _scaled(x, _operand(factor, x))


def reverse_gradient(x: Tensor, factor: Number = 1.0) -> Tensor:
    r"""Return ``x``, and turn its gradient round: what minimises the loss above maximises it below.

    .. math:: y = x, \qquad \bar x = -\lambda\,\bar y

    Classic: an ``autograd.Function`` called ``GradientReversal`` or ``GRL``.
    Reference: Ganin and Lempitsky 2015, arXiv:1409.7495, "Unsupervised domain adaptation by backpropagation".

    Args:
        x: any floating-point tensor.
        factor: :math:`\lambda`, often from a schedule; it may be batched by ``vmap``.

    >>> torch.func.grad(lambda x: reverse_gradient(x) ** 2)(torch.tensor(3.0))
    tensor(-6.)
    """
    return _scaled(x, -_operand(factor, x))


def clip_gradient(x: Tensor, bound: Number | None = None, *, max_norm: Number | None = None) -> Tensor:
    r"""Return ``x``, and clip its gradient: every entry to ``[-bound, bound]``, or its L2 norm to ``max_norm``.

    .. math:: \bar x_i = \max(-b, \min(b, \bar y_i)) \quad\text{or}\quad \bar x = \bar y \min(1, m / \lVert\bar y\rVert)

    Classic: ``x.register_hook(lambda g: g.clamp(-bound, bound))``, in every step of a recurrent network.
    Reference: Graves 2013, arXiv:1308.0850, section 2.1.

    Args:
        x: any floating-point tensor.
        bound: at least 0, see :func:`clip_by_value`; may be batched by ``vmap``.
        max_norm: at least 0, see :func:`clip_by_global_norm`; may be batched by ``vmap``. The norm is that of the whole
            gradient of ``x``, of one lane under ``vmap``.

    Raises ValueError unless exactly one of ``bound`` and ``max_norm`` is given.

    >>> torch.func.grad(lambda x: clip_gradient(x, 1.0) ** 2)(torch.tensor(3.0))
    tensor(1.)
    """
    if (bound is None) == (max_norm is None):
        raise ValueError(f"clip_gradient: give bound or max_norm, one of them; got {bound!r} and {max_norm!r}")
    limit: Any = max_norm if bound is None else bound
    if not isinstance(limit, Tensor) and not limit >= 0:
        raise ValueError(f"clip_gradient: {'bound' if max_norm is None else 'max_norm'} must be >= 0, got {limit!r}")
    return (_clipped_by_norm if bound is None else _clipped)(x, _operand(limit, x))


def _operand(value: Number, x: Tensor) -> Tensor:
    # Half precision would round the number first, and a hook that multiplies by it does not.
    wide = x.dtype if x.dtype.itemsize > 2 else torch.float32
    return torch.as_tensor(value, dtype=wide, device=x.device)


def _by(make: Callable[[Tensor], Transform]) -> Identity:
    """Return the identity whose gradient goes through a transform without memory."""

    def clip(gradient: Tensor, limit: Tensor) -> Tensor:
        clipped: Tensor = make(limit).update(gradient, Empty(), gradient)[0]
        return clipped

    return _identity(clip)


def _scale(gradient: Tensor, factor: Tensor) -> Tensor:
    return (gradient.to(factor.dtype) * factor).to(gradient.dtype)


_scaled = _identity(_scale)
_clipped = _by(clip_by_value)
_clipped_by_norm = _by(clip_by_global_norm)
