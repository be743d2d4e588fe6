"""What a tensor is at this moment: a lane of ``vmap``, differentiated, traced, or plain and free to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._functorch.vmap import vmap_increment_nesting
from torch.autograd import forward_ad

from functricks.tree._walking import Tree, leaves, map
from functricks.types import Number


def lanes() -> int | None:
    """Return the current ``vmap`` level if it is the only transform and nothing is being traced, else None."""
    if torch.compiler.is_compiling() or is_dual():
        return None
    interpreter: Any = functorch.peek_interpreter_stack()
    if interpreter is None or interpreter.level() != 1 or interpreter.key() != functorch.TransformType.Vmap:
        return None
    return 1


def is_dual() -> bool:
    """Is forward-mode differentiation on? It sees neither ``requires_grad`` nor ``torch.no_grad``."""
    return forward_ad._current_level >= 0


def below_lanes(value: Any) -> tuple[Any, bool]:
    """Return the stacked tensor under a lane of a single ``vmap`` level, lanes first, and whether there was one."""
    if isinstance(value, Tensor) and functorch.is_batchedtensor(value):
        stacked, dim = functorch.get_unwrapped(value), functorch.maybe_get_bdim(value)
        return (stacked if dim == 0 else stacked.movedim(dim, 0)), True
    return value, False


def above_lanes(stacked: Tensor, level: int) -> Tensor:
    """Turn a stacked tensor, lanes first, into a lane again."""
    lane: Tensor = functorch._add_batch_dim(stacked, 0, level)
    return lane


def map_lanes(function: Callable[..., Tree], axes: Sequence[int | None], inputs: Sequence[Tree]) -> Tree:
    """Do what ``torch.vmap(function, axes)(*inputs)`` does, for axes 0 and None and leaves that are tensors.

    ``vmap`` walks every tree several times in Python, which for a small model costs a twentieth of a training step.
    """
    size = next(leaf.shape[0] for x, axis in zip(inputs, axes, strict=True) if axis is not None for leaf in leaves(x))
    with vmap_increment_nesting(size, "error") as level:
        own = [
            x if axis is None else map(lambda leaf: functorch._add_batch_dim(leaf, 0, level), x)
            for x, axis in zip(inputs, axes, strict=True)
        ]
        return map(lambda leaf: functorch._remove_batch_dim(leaf, level, size, 0), function(*own))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which scalars and sums for this dtype are computed: float32 for half."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def outside_lanes() -> Any:
    """Return the context in which stacked tensors from :func:`below_lanes` are ordinary tensors."""
    return temporarily_pop_interpreter_stack() if is_transformed() else nullcontext()


def is_transformed() -> bool:
    """Are we inside a ``torch.func`` transform?"""
    return functorch.peek_interpreter_stack() is not None


def any_differentiable(columns: Iterable[Iterable[Any]]) -> bool:
    """Would autograd have to see an operation on any of these?"""
    if is_dual():
        return True
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for column in columns for value in column
    )


def is_differentiated(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return True
    if functorch.is_gradtrackingtensor(x):
        return True
    return functorch.is_batchedtensor(x) and is_differentiated(functorch.get_unwrapped(x))


def look(value: Number) -> Number:
    """Return a plain 0-d CPU tensor as a Python number: a look is free there, and so is an operation with a number."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or torch.compiler.is_compiling():
        return value
    if is_transformed() or is_dual() or (value.requires_grad and torch.is_grad_enabled()) or not may_look(value):
        return value
    whole: Any = value.full_tensor() if hasattr(value, "full_tensor") else value  # a norm of sharded leaves
    return float(whole.tolist())


def may_look(value: Tensor) -> bool:
    """Is reading a value free, and does it have one? Not on a GPU, and not where fake tensors stand in."""
    return value.device.type == "cpu" and torch._C._len_torch_dispatch_stack() == 0
