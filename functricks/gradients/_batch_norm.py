"""BatchNorm's running statistics over a window of micro-batches, as siblings of its buffers in the carry.

``pool`` puts a counter and sums beside every ``running_mean``; BatchNorm merges each batch that it sees into them and
recomputes its running statistics from where the window started (``merge``); ``unpool`` takes them out again. So the
window counts as one batch, exactly, and nothing but the carry knows about it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functricks import tree
from functricks.transforms.base import check_integer, check_number
from functricks.types import Carry, Number

__all__ = ["bn_momentum_for", "pool", "unpool"]

_MEAN = "running_mean"
_SIBLINGS = ("count", "mean", "m2", "start_mean", "start_var", "start_batches")


def bn_momentum_for(accumulation_steps: int, momentum: Number = 0.1) -> Number:
    r"""Return the BatchNorm momentum with which N micro-batches move the running statistics as far as one batch did.

    .. math:: m' = 1 - (1 - m)^{1/N}

    The correction for a classic loop; ``accumulate(batch_norm="pooled")`` needs none and is exact. Either mends the
    running statistics alone, which evaluation uses: in training every micro-batch is still normalised by its own
    statistics, so the outputs, and the gradients, differ from those of the whole batch.

    Args:
        accumulation_steps: N, the number of micro-batches, >= 1.
        momentum: m in [0, 1], of the whole batch; PyTorch's convention, the share of the new statistics.

    Raises ``ValueError`` unless N is an integer >= 1 and m in [0, 1].

    >>> round(bn_momentum_for(4, 0.1), 6)
    0.025996
    """
    check_integer("bn_momentum_for: accumulation_steps", accumulation_steps, 1)
    check_number("bn_momentum_for: momentum", momentum, minimum=0.0, maximum=1.0)
    return 1 - (1 - momentum) ** (1 / accumulation_steps)


def pool(carry: Carry) -> tuple[Carry, bool]:
    """Add empty siblings beside every ``running_mean``; False where an enclosing window already has."""
    seen = _Seen()
    pooled = _in_dicts(carry, lambda buffers: _with_siblings(buffers, seen))
    if not seen.batch_norms:
        raise ValueError("accumulate: batch_norm='pooled' needs a carry with a dict that holds 'running_mean'")
    return pooled, not seen.pooled


def unpool(carry: Carry) -> Carry:
    """Take the siblings out."""

    def without(buffers: dict[str, Any]) -> dict[str, Any]:
        ours = {f"{prefix}pooled_{name}" for prefix in _prefixes(buffers) for name in _SIBLINGS}
        return {name: value for name, value in buffers.items() if name not in ours}

    return _in_dicts(carry, without)


class _Seen:
    batch_norms = False
    pooled = False


def _prefixes(buffers: dict[str, Any]) -> list[str]:
    """Return the ``"<path>."`` of every BatchNorm that tracks statistics."""
    names = [str(name) for name, value in buffers.items() if isinstance(value, Tensor)]
    return [name.removesuffix(_MEAN) for name in names if name == _MEAN or name.endswith(f".{_MEAN}")]


def _with_siblings(buffers: dict[str, Any], seen: _Seen) -> dict[str, Any]:
    new = dict(buffers)
    for prefix in _prefixes(buffers):
        seen.batch_norms = True
        if f"{prefix}pooled_count" in buffers:
            seen.pooled = True
            continue
        mean, var = buffers[f"{prefix}{_MEAN}"], buffers[f"{prefix}running_var"]
        wide = tree.compute_dtype(mean.dtype)  # float16 counts to 65504
        new[f"{prefix}pooled_count"] = mean.new_zeros((), dtype=wide)
        new[f"{prefix}pooled_mean"] = torch.zeros_like(mean, dtype=wide)
        new[f"{prefix}pooled_m2"] = torch.zeros_like(var, dtype=wide)
        new[f"{prefix}pooled_start_mean"], new[f"{prefix}pooled_start_var"] = mean, var
        batches = buffers.get(f"{prefix}num_batches_tracked")
        if batches is not None:
            new[f"{prefix}pooled_start_batches"] = batches
    return new


def _in_dicts(node: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Apply ``change`` to every dict of a pytree."""
    if isinstance(node, dict):
        return change({key: _in_dicts(child, change) for key, child in node.items()})
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*[_in_dicts(child, change) for child in node])
    if isinstance(node, (tuple, list)):
        children = [_in_dicts(child, change) for child in node]
        return children if isinstance(node, list) else tuple(children)
    return node
