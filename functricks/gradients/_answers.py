"""What a loss function answers, and what it was asked, in one form: mean, weight, carry, metrics; rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functricks import tree
from functricks.types import Batch, Carry, Loss, LossFn, Params, weight_of

__all__ = ["Answer", "answer_of", "common_length", "mean_and_weight", "others"]


class Answer(NamedTuple):
    """A loss function's answer in one form; ``carry`` is ``()`` where it returns none."""

    mean: Tensor
    weight: Tensor
    carry: Carry
    metrics: dict[str, Tensor]


def answer_of(
    loss_fn: LossFn, params: Params, batch: Batch, carry: Carry, has_carry: bool, has_metrics: bool
) -> Answer:
    """Call the loss function and sort its answer."""
    out = loss_fn(params, batch, carry) if has_carry else loss_fn(params, batch)
    several = (has_carry or has_metrics) and isinstance(out, (tuple, list)) and not isinstance(out, Loss)
    parts = tuple(out) if several else (out,)
    expected = 1 + has_carry + has_metrics
    if len(parts) != expected:
        got = str(len(parts)) if several else f"a {type(out).__name__} alone"
        raise ValueError(
            f"gradient: with has_carry={has_carry}, has_metrics={has_metrics} the loss function must return "
            f"{expected} values, got {got}"
        )
    if expected == 1 and isinstance(out, (tuple, list)) and not isinstance(out, Loss):
        raise ValueError(
            f"gradient: the loss function returned {len(out)} values, but has_carry and has_metrics are False; "
            "set the one that says what comes after the loss"
        )
    mean, weight = mean_and_weight(parts[0], batch)
    metrics = _as_metrics(parts[-1], mean) if has_metrics else {}
    return Answer(mean, weight, _checked_carry(parts[1]) if has_carry else (), metrics)


def _as_metrics(found: Any, like: Tensor) -> dict[str, Tensor]:
    """Return the metrics as tensors; Python numbers are welcome."""
    if not isinstance(found, dict):
        raise TypeError(
            f"gradient: the metrics, which come last, must be a dict of name -> 0-d tensor, got {type(found).__name__}"
        )
    if all(isinstance(value, Tensor) for value in found.values()):
        return found
    wrong = {name: type(x).__name__ for name, x in found.items() if not isinstance(x, (Tensor, bool, int, float))}
    if wrong:
        raise TypeError(f"gradient: a metric must be a 0-d tensor or a number, got {wrong}")
    return {name: x if isinstance(x, Tensor) else torch.as_tensor(x, device=like.device) for name, x in found.items()}


def _checked_carry(carry: Carry) -> Carry:
    if not all(isinstance(leaf, Tensor) for leaf in tree.leaves(carry)):
        raise TypeError(f"gradient: the carry must hold tensors alone, got {others(carry)}; torch.tensor(value) is one")
    return carry


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
        wide = torch.promote_types(loss.values.dtype, torch.float32)
        weight = weight_of(loss)
        total = loss.values.sum(dtype=wide)
        return (total / tree.or_one(weight)).to(wide), weight
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"{name}: {what} must return a Loss or a 0-d tensor, got {got}")
    length = _batch_length(batch, name, items)
    # sums of losses, and a loss scale, need more than half precision
    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
    if not length:  # the mean of nothing is NaN
        loss = torch.where(torch.ones_like(loss, dtype=torch.bool), 0.0, loss) if graph else torch.zeros_like(loss)
    return loss, torch.full((), length, dtype=loss.dtype, device=loss.device)


def _batch_length(batch: Batch, name: str, items: str) -> float:
    """Return the length of the leading axis; 1 for a batch without leaves or of 0-d leaves, which numbers are too."""
    lengths = _lengths(batch)
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"{name}: a 0-d loss counts as the mean over the batch's leading axis, but {items} differ: {lengths}; "
            "return a Loss(values, weights)"
        )
    return float(next(iter(lengths.values()), 1))


def _lengths(batch: Batch) -> dict[str, int]:
    return {path: leaf.shape[0] for path, leaf in tree.named_leaves(batch).items() if getattr(leaf, "ndim", 0)}


def common_length(name: str, batch: Batch) -> int:
    """Return the length of the leading axis that the leaves of a batch share; 0-d leaves have none."""
    leaves = tree.leaves(batch)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise TypeError(f"{name}: the leaves of the batch must be tensors, got {others(batch)}")
    lengths = {leaf.shape[0] for leaf in leaves if leaf.ndim}  # without paths, which only the error needs
    if len(lengths) != 1:
        raise ValueError(f"{name}: the leaves of the batch must share one leading axis, got lengths {_lengths(batch)}")
    length: int = lengths.pop()
    return length


def others(given: Any, fits: Callable[[Tensor], bool] = lambda leaf: True) -> str:
    """Return what the leaves that are no tensors, or do not fit, are, for an error."""
    found = {
        path: leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
        for path, leaf in tree.named_leaves(given).items()
        if not isinstance(leaf, Tensor) or not fits(leaf)
    }
    if not found:  # it has tensors all the same, inside of what optree and torch.func take for a leaf
        names = sorted({type(leaf).__name__ for leaf in tree.leaves(given) if not isinstance(leaf, Tensor)})
        return f"{', '.join(names)} (a class of its own is no tree, dict(...) is)"
    first = dict(list(found.items())[:3])
    return f"{first}" + (f" and {len(found) - 3} more" if len(found) > 3 else "")
