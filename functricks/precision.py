"""Mixed precision: in which dtype a loss is computed, and a loss scale that adapts, as values.

``cast`` and ``autocast`` wrap a loss function; its parameters stay float32 and so do their gradients. A
:class:`LossScale` keeps float16 gradients from underflowing on the way: :func:`functricks.train_step` hands its scale
to the gradient function, which divides it out again, and its update sees whether the unscaled gradient was finite.
bfloat16 needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functricks import tree
from functricks.transforms.base import check_integer, check_number
from functricks.types import Batch, Loss, LossFn, Number, Params, State

__all__ = ["LossScale", "LossScaleState", "autocast", "cast", "dynamic_loss_scale", "static_loss_scale"]


def cast(loss_fn: LossFn, dtype: torch.dtype) -> LossFn:
    """Compute a loss with parameters and batch in ``dtype``; the loss comes back in float32 or wider.

    Differentiation goes through the cast, so parameters keep their dtype, and so do their gradients.

    Classic: ``model.half()`` beside float32 master weights. Reference: Micikevicius et al. 2018, arXiv:1710.03740.

    Args:
        loss_fn: any loss function. What should not be computed in ``dtype`` (softmax, the loss) it casts itself.
        dtype: e.g. ``torch.bfloat16``.

    Floating-point leaves are cast, others pass. The carry passes as it is: BatchNorm's statistics stay float32.

    >>> loss_fn = cast(lambda params, x: (params["w"] * x).mean(), torch.bfloat16)
    >>> loss_fn({"w": torch.tensor(1.0)}, torch.tensor([1.001, 1.001]))
    tensor(1.)
    """

    def lower(params: Params, batch: Batch, *carry: Any) -> Any:
        return _wide_loss(loss_fn(tree.cast(params, dtype), tree.cast(batch, dtype), *carry))

    return lower


def autocast(loss_fn: LossFn, device_type: str = "cuda", dtype: torch.dtype | None = None) -> LossFn:
    """Compute a loss under :class:`torch.autocast`: matrix products in half precision, sums and losses in float32.

    Classic: ``with torch.autocast(device_type, dtype):`` around the forward pass; side by side in
    ``parity/pipeline.py``.

    Args:
        loss_fn: any loss function.
        device_type: ``"cuda"``, ``"cpu"``, ...
        dtype: float16 or bfloat16; PyTorch's default for the device: float16 on CUDA, bfloat16 on the CPU.

    The cache of cast weights is off: it would keep tensors of one evaluation, or of one ``torch.func`` transform, for
    the next. The loss comes back in float32 or wider; :mod:`functricks.losses` keep float32 values on the way to it.

    >>> loss_fn = autocast(lambda params, x: (x @ params["w"]).mean(), "cpu", torch.bfloat16)
    >>> loss_fn({"w": torch.ones(1, 1)}, torch.tensor([[1.001]]))
    tensor(1.)
    """

    def lower(params: Params, batch: Batch, *carry: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
            return _wide_loss(loss_fn(params, batch, *carry))

    return lower


def _wide_loss(answer: Any) -> Any:
    """Return what the loss function returned, its loss in float32 or wider."""
    if isinstance(answer, Loss):
        return Loss(_wide(answer.values), _wide(answer.weights))
    if isinstance(answer, (tuple, list)):
        return _wide_loss(answer[0]), *answer[1:]
    return _wide(answer)


def _wide(x: Any) -> Any:
    return x.to(tree.compute_dtype(x.dtype)) if isinstance(x, Tensor) else x


# --- loss scaling ----------------------------------------------------------------------------------------------------


_SMALLEST = 2.0**-149  # of float32, with subnormal numbers


class LossScaleState(NamedTuple):
    """``scale``, float32; ``growth_tracker``, int64: finite steps since the scale last changed."""

    scale: Tensor
    growth_tracker: Tensor


class LossScale(NamedTuple):
    """A loss scale as a state machine: ``init() -> state`` and ``update(state, finite) -> state``."""

    init: Callable[[], LossScaleState]
    update: Callable[[State, Tensor], State]


def dynamic_loss_scale(
    init_scale: Number = 2.0**16,
    growth_factor: Number = 2.0,
    backoff_factor: Number = 0.5,
    growth_interval: int | Tensor = 2000,
    min_scale: Number = 2.0**-126,
) -> LossScale:
    """Shrink the scale when a gradient is not finite, grow it after ``growth_interval`` finite ones in a row.

    Classic: :class:`torch.amp.GradScaler`, whose numbers these are; its ``None`` before first use, its per-optimizer
    stages and its silent ``step()`` are not. Reference: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.

    Args:
        init_scale: the first scale, > 0.
        growth_factor: > 1. Growth that would leave float32 does not happen.
        backoff_factor: in (0, 1).
        growth_interval: >= 1.
        min_scale: the scale never falls below this, > 0.

    >>> scaler = dynamic_loss_scale(4.0, growth_interval=2)
    >>> state = scaler.init()
    >>> for finite in (True, True, False):
    ...     state = scaler.update(state, torch.tensor(finite))
    ...     print(state.scale)
    tensor(4.)
    tensor(8.)
    tensor(4.)
    """
    _check_scale("dynamic_loss_scale: init_scale", init_scale)
    _check_scale("dynamic_loss_scale: min_scale", min_scale)
    check_number("dynamic_loss_scale: backoff_factor", backoff_factor, below=1.0)
    if not isinstance(backoff_factor, Tensor) and not backoff_factor > 0:
        raise ValueError(f"dynamic_loss_scale: backoff_factor must be > 0, got {backoff_factor!r}")
    check_integer("dynamic_loss_scale: growth_interval", growth_interval, 1)
    if not isinstance(growth_factor, Tensor) and not growth_factor > 1:
        raise ValueError(f"dynamic_loss_scale: growth_factor must be > 1, got {growth_factor!r}")

    def update(state: State, finite: Tensor) -> LossScaleState:
        # products in float64, rounded once, as in PyTorch's kernel
        scale = state.scale.double()
        tracker = state.growth_tracker + 1
        grown = (scale * growth_factor).float()
        grows = tracker >= growth_interval
        shrunk = torch.maximum((scale * backoff_factor).float(), _float32(min_scale, state.scale))
        up = torch.where(grows & torch.isfinite(grown), grown, state.scale)
        tracker = torch.where(finite & ~grows, tracker, 0)
        return LossScaleState(torch.where(finite, up, shrunk), tracker)

    return LossScale(lambda: _start(init_scale), update)


def static_loss_scale(scale: Number) -> LossScale:
    """Keep the loss scale as it is.

    Classic: ``loss * scale``, and every gradient divided by it before anybody looks.

    Args:
        scale: > 0.

    >>> scaler = static_loss_scale(128.0)
    >>> scaler.update(scaler.init(), torch.tensor(False)).scale
    tensor(128.)
    """
    _check_scale("static_loss_scale: scale", scale)
    return LossScale(lambda: _start(scale), lambda state, finite: state)


def _start(scale: Number) -> LossScaleState:
    wide = scale.float() if isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float32)
    return LossScaleState(wide, torch.zeros((), dtype=torch.int64, device=wide.device))


def _float32(value: Number, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=like.device)


def _check_scale(name: str, value: Number) -> None:
    """Raise unless a scale is a float32 > 0: from one that rounds to 0 or inf, no step would ever come back."""
    check_number(name, value)
    if not isinstance(value, Tensor) and not _SMALLEST <= value <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name} must be > 0 and in the range of float32, got {value!r}")
