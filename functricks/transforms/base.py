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
        if value.ndim:
            raise ValueError(
                f"{name} must be one number, got a tensor of shape {tuple(value.shape)}; vmap gives each lane its own"
            )
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


def check_integer(name: str, value: Any, minimum: int) -> None:
    """Validate a count where it is a Python number; an integer tensor passes."""
    if isinstance(value, Tensor):
        check_number(name, value)
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")


def is_schedule(value: Any) -> TypeIs[Schedule]:
    """Is this a schedule? torch.compile finds tensors callable too."""
    return callable(value) and not isinstance(value, Tensor)


def check_rate(name: str, value: Any) -> None:
    """Validate a learning rate: a number, a 0-d tensor or a schedule."""
    if not is_schedule(value):
        check_number(name, value, minimum=0.0)


def check_betas(betas: Any) -> None:
    """Validate a pair of decay rates."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas must be a pair of numbers or 0-d tensors, got {betas!r}")
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
    return lr(step) if is_schedule(lr) else double(lr)


# --- state -----------------------------------------------------------------------------------------------------------


def counter(params: Params) -> Tensor:
    """Return a counter at zero, on the device (and in the lanes) of the parameters."""
    leaves = tree.leaves(params)
    return leaves[0].new_zeros((), dtype=torch.int64) if leaves else torch.zeros((), dtype=torch.int64)


def statistic(params: Params) -> Grads:
    """Return zeros for a running statistic: float32 for half-precision parameters."""
    return tree.map(lambda leaf: torch.zeros_like(leaf, dtype=tree.compute_dtype(leaf.dtype)), params)


def matched(name: str, grads: Grads, like: Grads) -> Grads:
    """Return the gradients in the dtypes of a statistic; raise, with paths and shapes, if it is not of these leaves."""
    tree.check_like(f"{name}: the state and the gradients", like, grads)
    return tree.map(lambda leaf, other: leaf if leaf.dtype == other.dtype else leaf.to(other.dtype), grads, like)


def stateless(update: Callable[[Grads, Params], Updates]) -> Transform:
    """Make a transform without memory."""
    return Transform(lambda params: Empty(), lambda grads, state, params: (update(grads, params), state))
