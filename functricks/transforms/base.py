"""What the makers of transforms share: checks of hyper-parameters, counters, and scalars in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

import torch
from torch import Tensor

from functricks import tree
from functricks.types import Empty, Grads, Number, Params, Schedule, Transform, Updates

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__: list[str] = []  # nothing here is public


# --- how a transform was made ----------------------------------------------------------------------------------------

Arguments = ParamSpec("Arguments")


class Made(NamedTuple):
    """The maker of a transform, and what it was called with."""

    maker: Callable[..., Transform]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def recorded(maker: Callable[Arguments, Transform]) -> Callable[Arguments, Transform]:
    """Have a maker note on its transforms how they were made: the adapter shows and changes hyper-parameters by it."""

    @functools.wraps(maker)
    def make(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Transform:
        transform = maker(*args, **kwargs)
        if not torch.compiler.is_compiling():
            transform.update.__dict__["made"] = Made(make, args, kwargs)
        return transform

    return make


def made(transform: Any) -> Made | None:
    """Return how a transform was made, if its maker is recorded."""
    return getattr(getattr(transform, "update", None), "made", None)


# --- hyper-parameters ------------------------------------------------------------------------------------------------


def check_number(
    name: str, value: Any, *, minimum: float | None = None, maximum: float | None = None, below: float | None = None
) -> None:
    """Validate a hyper-parameter where it is a Python number; a 0-d tensor passes, a schedule does not."""
    if isinstance(value, Tensor):
        _check_axes(name, value)
        return
    if callable(value):
        raise TypeError(
            f"{name} must be a number or a 0-d tensor, got the schedule {value!r}; inject_hyperparams makes any "
            "hyper-parameter a schedule"
        )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number or a 0-d tensor, got {value!r}")
    if minimum is not None and not value >= minimum:
        raise ValueError(f"{name} must be >= {minimum:g}, got {value!r}")
    if maximum is not None and not value <= maximum:
        raise ValueError(f"{name} must be <= {maximum:g}, got {value!r}")
    if below is not None and not value < below:
        raise ValueError(f"{name} must be < {below:g}, got {value!r}")


def check_transform(what: str, transform: Any) -> None:
    """Raise unless this is a pair of init and update: a Transform, or what has a third function beside the two."""
    if not (hasattr(transform, "init") and hasattr(transform, "update")):
        raise TypeError(f"{what} must be a Transform, got {transform!r}")


def check_integer(name: str, value: Any, minimum: int) -> None:
    """Validate a count where it is a Python number; a 0-d tensor passes."""
    if isinstance(value, Tensor):
        _check_axes(name, value)
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")


def _check_axes(name: str, value: Tensor) -> None:
    """Raise for a tensor with axes, which would broadcast against the leaves."""
    if value.ndim:
        raise ValueError(f"{name} must be a 0-d tensor, got shape {tuple(value.shape)}; for one value a lane use vmap")


def is_schedule(value: Any) -> TypeIs[Schedule]:
    """Is this a schedule? torch.compile finds tensors callable too."""
    return callable(value) and not isinstance(value, Tensor)


def check_rate(name: str, value: Any) -> None:
    """Validate a learning rate: a number, a 0-d tensor or a schedule."""
    if not is_schedule(value):
        check_number(name, value, minimum=0.0)


def check_pair(name: str, value: Any) -> None:
    """Validate that there are two; what they are is for the caller."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name} must be a pair of numbers or 0-d tensors, got {value!r}")


def check_betas(betas: Any) -> None:
    """Validate a pair of decay rates."""
    check_pair("betas", betas)
    for index, beta in enumerate(betas):
        check_number(f"betas[{index}]", beta, minimum=0.0, below=1.0)


def is_zero(value: Any) -> bool:
    """Is this the Python number 0? Structure follows Python numbers only: a tensor is never known to be zero."""
    return isinstance(value, (int, float)) and value == 0


def double(value: Number) -> Number:
    """Return a tensor in float64, in which scalar coefficients are computed; Python numbers already are."""
    return value.double() if isinstance(value, Tensor) else value


def power(beta: Number, step: Tensor) -> Tensor:
    """Return beta**step in float64: in float32, 1 - 0.999**t is off by 1e-5."""
    return torch.pow(double(beta), step.double())


def rate_at(lr: Any, step: Tensor) -> Number:
    """Return a learning rate as a number or a float64 tensor; a schedule is asked for the step."""
    if not is_schedule(lr):
        return double(lr)
    rate = lr(step)
    if isinstance(rate, Tensor):
        _check_axes("lr: the schedule's value", rate)
    return rate


# --- state -----------------------------------------------------------------------------------------------------------


def counter(params: Params) -> Tensor:
    """Return a counter at zero, on the device (and in the lanes) of the parameters."""
    leaves = tree.leaves(params)
    if leaves and not isinstance(leaves[0], Tensor):
        raise TypeError(f"init: parameters must be tensors, {tree.paths(params)[0]} is {type(leaves[0]).__name__}")
    return leaves[0].new_zeros((), dtype=torch.int64) if leaves else torch.zeros((), dtype=torch.int64)


def check_moves(name: str, params: Params, *, linear: bool = False) -> None:
    """Raise for leaves that do not move: integers (a count of batches), and complex ones but for a linear update.

    A square, a sign or a root takes a complex number apart otherwise than PyTorch's, which treats it as two reals.
    """
    for path, leaf in tree.named_leaves(params).items():
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{name}: parameters must be tensors, {path} is {type(leaf).__name__}")
        if not (leaf.is_floating_point() or (linear and leaf.is_complex())):
            raise TypeError(
                f"{name}: parameters must be {'' if linear else 'real '}floating-point tensors, {path} is {leaf.dtype}"
                "; leave it out or give it freeze() with partition"
            )


def zeros(params: Params) -> Grads:
    """Return zeros to add up leaves in: float32 for half precision."""
    return tree.map(lambda leaf: torch.zeros_like(leaf, dtype=tree.compute_dtype(leaf.dtype)), params)


def statistic(name: str, params: Params, *, linear: bool = False) -> Grads:
    """Return zeros for a running statistic of gradients, see :func:`zeros`; raise for leaves that have none."""
    check_moves(name, params, linear=linear)
    return zeros(params)


def matched(name: str, grads: Grads, like: Grads) -> Grads:
    """Return the gradients in the dtypes of a statistic; raise, with paths and shapes, if it is not of these leaves."""
    own, new = tree.check_like(f"{name}: the state and the gradients", like, grads)
    if [leaf.dtype for leaf in own] == [leaf.dtype for leaf in new]:
        return grads
    return tree.map(lambda leaf, other: leaf if leaf.dtype == other.dtype else leaf.to(other.dtype), grads, like)


def stateless(update: Callable[[Grads, Params], Updates]) -> Transform:
    """Make a transform without memory."""
    return Transform(lambda params: Empty(), lambda grads, state, params: (update(grads, params), state))
