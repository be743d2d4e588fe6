"""What every loss does at its boundary: check what it is given, widen half precision, narrow the result.

Shapes and dtypes are known in a trace too and are checked always. Values are looked at only where that is free of
surprises: :func:`is_concrete`.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from functricks import tree
from functricks.types import Loss, Number

MINUS_INF = -math.inf


# --- shapes and dtypes: always ---------------------------------------------------------------------------------------


def check_floating(name: str, what: str, value: Tensor) -> None:
    """Raise unless ``value`` is a tensor of real floating-point numbers."""
    check_tensor(name, what, value)
    if not value.is_floating_point():
        raise ValueError(f"{name}: {what} must be floating point, got {value.dtype}")


def check_tensor(name: str, what: str, value: Tensor) -> None:
    """Raise unless ``value`` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: {what} must be a tensor, got {type(value).__name__}")


def check_same_shape(name: str, a: str, first: Tensor, b: str, second: Tensor) -> None:
    """Raise unless both are tensors of one shape: broadcasting here is a mistake that only shows in the results."""
    check_tensor(name, b, second)
    if first.shape != second.shape:
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise ValueError(f"{name}: {a} and {b} must have the same shape, got {shapes}; nothing is broadcast")


def check_broadcasts(name: str, what: str, factor: Tensor, like: Tensor) -> None:
    """Raise unless ``factor`` is a tensor that broadcasts to the shape of ``like`` without enlarging it."""
    check_tensor(name, what, factor)
    sizes = zip(reversed(factor.shape), reversed(like.shape), strict=False)
    if factor.ndim > like.ndim or any(size not in (1, full) for size, full in sizes):
        raise ValueError(
            f"{name}: {what} of shape {tuple(factor.shape)} does not broadcast to the input's {tuple(like.shape)}"
        )


def hyper(
    name: str, what: str, value: Number, dtype: torch.dtype, *, low: float = 0.0, high: float = math.inf
) -> Number:
    """Check a Python number; cast a tensor to the compute dtype, since under vmap a float64 one widens all it meets."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name}: {what} must be one number, got a tensor of shape {tuple(value.shape)}; "
                "vmap gives each lane its own"
            )
        return value.reshape(()).to(dtype)
    if not (low <= value <= high and value < math.inf):  # isfinite does not trace
        raise ValueError(f"{name}: {what} must lie in [{low:g}, {high:g}], got {value!r}")
    return value


def positive(name: str, what: str, value: Number, dtype: torch.dtype) -> Number:
    """:func:`hyper` for a number that must be above zero."""
    if not isinstance(value, Tensor) and not value > 0:
        raise ValueError(f"{name}: {what} must be > 0, got {value!r}")
    return hyper(name, what, value, dtype)


def is_number(value: Number, number: float) -> bool:
    """Is it a Python number of this value? Never asks a tensor, so a tensor takes the general path."""
    return not isinstance(value, Tensor) and value == number


# --- values: only where looking is free of surprises -----------------------------------------------------------------


def is_concrete(*tensors: Tensor) -> bool:
    """May the values be looked at: plain CPU tensors, outside of every transform, trace and dispatch mode?"""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or tree.is_transformed():
        return False
    if torch._C._len_torch_dispatch_stack() > 0:  # fake tensors, make_fx
        return False
    for one in tensors:  # no generator: every loss asks
        if type(one) not in (Tensor, torch.nn.Parameter) or not one.is_cpu or not one.numel():
            return False
    return True


def check_within(
    name: str,
    what: str,
    values: Tensor,
    low: int,
    high: int,
    ignore: float | None,
    *,
    slack: float = 0.0,
    hint: str = "",
) -> None:
    """Raise where a concrete value is outside ``[low, high]``, give or take ``slack``, and not the one to ignore."""
    if not is_concrete(values):
        return
    smallest, largest = (float(extreme) for extreme in torch.aminmax(values.detach()))
    if low - slack <= smallest and largest <= high + slack:  # one pass in the usual case; NaN goes on to the second
        return
    wrong = ~((values >= low - slack) & (values <= high + slack))
    if ignore is not None:
        wrong = wrong & (values != ignore)
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        unless = "" if ignore is None else f" or equal ignore_index={ignore}"
        raise ValueError(
            f"{name}: {what} must lie in [{low}, {high}]{unless}; got {values[place].tolist()} at {place}{hint}"
        )


def warn_if_probabilities(name: str, logits: Tensor, expected: str, *, stacklevel: int = 3) -> None:
    """Warn where concrete rows lie on the probability simplex: softmax has probably been applied already.

    A warning, not an error: such logits are legal, only absurdly unlikely. A few rows settle it, which keeps this
    cheap. Toy inputs are spared: a single row, rows of zeros and ones, and rows that are all alike.
    """
    if logits.ndim < 2 or logits.shape[0] < 2 or logits.shape[1] < 2 or not is_concrete(logits):
        return
    rows = logits.detach()[(slice(0, 8), slice(None), *(slice(0, 2) for _ in logits.shape[2:]))]
    if not float(rows.min()) >= 0:  # ordinary logits, and NaN, end here
        return
    rounding = max(torch.finfo(rows.dtype).eps, torch.finfo(torch.float32).eps) * math.sqrt(rows.shape[1])
    on_simplex = (rows.double().sum(1) - 1).abs() <= 8 * rounding
    inside = ((rows > 0) & (rows < 1)).any() & (rows != rows.flatten()[0]).any()
    if bool(on_simplex.all() & inside):
        message = f"{name}: every row sums to 1, so these look like probabilities; {expected}"
        warnings.warn(message, UserWarning, stacklevel=stacklevel)


# --- dtypes ----------------------------------------------------------------------------------------------------------


def finish(values: Tensor, weights: Tensor, dtype: torch.dtype) -> Loss:
    """Return the values in the dtype of the input; what float16 cannot hold becomes its largest number.

    Under autocast they stay wide, as PyTorch's: the loss is where rounding would reach every gradient.
    """
    if dtype == torch.float16 and not _keeps_wide(values):
        limit = torch.finfo(dtype).max
        over, fixed = (values.abs() > limit) & values.isfinite(), values.detach()
        # values - fixed is 0, with the gradient: a clamp alone would cut it for the elements that are most wrong
        values = torch.where(over, fixed.clamp(-limit, limit) + (values - fixed).masked_fill(~over, 0), values)
    return Loss(narrow(values, dtype), weights)


def narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in the dtype of what they were computed from; under autocast they stay as they are."""
    return values if dtype == values.dtype or _keeps_wide(values) else values.to(dtype)


def _keeps_wide(values: Tensor) -> bool:
    device = values.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # not on "meta"
