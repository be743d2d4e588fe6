"""Gradient accumulation: a batch in parts, each with its weight."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functricks import tree
from functricks.gradients._answers import common_length
from functricks.gradients._batch_norm import pool, unpool
from functricks.gradients._gradient import check_grad_fn
from functricks.gradients._loop import fold
from functricks.types import Batch, Carry, GradFn, Gradient, Number, Params

__all__ = ["accumulate"]


def accumulate(
    grad_fn: GradFn,
    micro_batches: int | None = None,
    *,
    micro_batch_size: int | None = None,
    nonfinite: Literal["keep", "drop"] = "keep",
    batch_norm: Literal["sequential", "pooled"] = "sequential",
    unroll: bool = False,
) -> GradFn:
    r"""Compute the gradient of a batch from its micro-batches: the same numbers, the memory of one micro-batch.

    .. math:: g = \frac{\sum_k w_k g_k}{\sum_k w_k}

    with :math:`w_k` the weight of micro-batch *k* (its valid tokens, class weights, ...), so the result is the whole
    batch's whatever the split: uneven left-overs, ignored tokens and micro-batches of weight zero included.

    Classic: ``(loss / k).backward()`` for each of *k* micro-batches, then one step; right only if all weigh the same.
    Reference: the fault is described in https://github.com/huggingface/transformers/pull/34191.

    Args:
        grad_fn: the gradient function to call on each micro-batch.
        micro_batches: into how many parts to split the leading axis, as evenly as possible; a batch shorter than that
            has one row a part.
        micro_batch_size: instead, how many rows a part has; the last may have fewer.
        nonfinite: ``"keep"``: one bad micro-batch makes the whole gradient not finite, and ``train_step`` skips it.
            ``"drop"``: it counts neither in the numerator nor in the denominator, and leaves the carry as before it;
            where that leaves nothing, gradient, loss and weight are zero, as over a batch without valid elements, and
            ``train_step`` takes that step. Under a loss scale, only a micro-batch whose *loss* is not finite is
            dropped: a gradient that overflows has to be seen, so that the step is skipped and the scale falls.
        batch_norm: how BatchNorm's running statistics move. ``"sequential"``: once a micro-batch, as in a classic loop.
            ``"pooled"``: once, by the statistics of all inputs that it saw in the window, adversarial evaluations
            included: what one batch of them would have done. Needs BatchNorm from ``functricks.functional``, whose
            buffers are in the carry.
        unroll: compile a loop without a scan, for those who differentiate through it.

    The carry goes from one micro-batch to the next; 0-d leaves of the batch go to every one. Metrics are averaged like
    the loss. Sums are float32 or wider.

    BatchNorm normalises every micro-batch by its own statistics, whatever ``batch_norm`` says: outputs and gradients of
    such a model differ from those of the whole batch. So do those of losses that compare the rows of a batch
    (``info_nce``). Around :func:`multi_task`, parts are weighed by the largest task;
    ``multi_task({name: accumulate(...)})`` is exact where tasks weigh differently.

    Raises ``ValueError`` unless exactly one of the two sizes is given, and is >= 1; when the leaves of the batch differ
    in length, or the metrics of one micro-batch from those of another; and with ``"pooled"`` when the carry holds no
    BatchNorm. Raises ``TypeError`` for leaves of the batch that are no tensors.

    >>> import torch
    >>> from functricks import gradient
    >>> grad_fn = gradient(lambda params, x: (params["w"] * x).mean())
    >>> accumulate(grad_fn, 2)({"w": torch.tensor(1.0)}, torch.tensor([1.0, 4.0, 4.0])).grads["w"]
    tensor(3.)
    """
    check_grad_fn("accumulate", grad_fn)
    if (micro_batches is None) == (micro_batch_size is None):
        raise ValueError("accumulate: give exactly one of micro_batches and micro_batch_size")
    given = micro_batches if micro_batch_size is None else micro_batch_size
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"accumulate: micro_batches and micro_batch_size must be integers >= 1, got {given!r}")
    if nonfinite not in ("keep", "drop"):
        raise ValueError(f"accumulate: nonfinite must be 'keep' or 'drop', got {nonfinite!r}")
    if batch_norm not in ("sequential", "pooled"):
        raise ValueError(f"accumulate: batch_norm must be 'sequential' or 'pooled', got {batch_norm!r}")

    def accumulated(params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        def more(state: tuple[_Sums, Carry], part: Batch) -> tuple[_Sums, Carry]:
            return one(part, state[1], state[0])

        def one(part: Batch, before: Carry, sums: _Sums | None = None) -> tuple[_Sums, Carry]:
            found = grad_fn(params, part, before, scale=scale)
            if nonfinite == "drop":
                finite = tree.all_finite((found.grads, found.loss) if scale is None else found.loss)
                if not tree.holds_everywhere(finite):
                    found = tree.where(finite, found, tree.zeros_like(found)._replace(carry=before))
            return added(sums, found), found.carry

        ours = False
        if batch_norm == "pooled":
            carry, ours = pool(carry)
        first, *groups = _split(batch, micro_batches, micro_batch_size)
        state = one(first[0], carry)
        for group in groups:
            state = fold(more, state, group, unroll=unroll)
        return divided(state[0], params, unpool(state[1]) if ours else state[1])

    return accumulated


def _split(batch: Batch, parts: int | None, size: int | None) -> list[list[Batch]]:
    """Return the micro-batches: the first alone, then in groups of equal shapes."""
    length = common_length("accumulate", batch)
    leaves, structure = tree.flatten(batch)
    count = max(1, min(parts or 1, length)) if size is None else max(1, -(-length // size))

    def cut(leaf: Tensor) -> Any:
        if not leaf.ndim:
            return (leaf,) * count  # a number, which every part needs
        return torch.tensor_split(leaf, count) if size is None else torch.split(leaf, size)

    columns = [cut(leaf) for leaf in leaves]
    rows = [tree.unflatten(structure, row) for row in zip(*columns, strict=True)]
    sizes = [part.shape[0] for part in next(column for column in columns if column[0].ndim)]
    # sizes fall at most once: parts as even as possible, or a left-over at the end
    larger = sizes.count(sizes[0])
    return [rows[:1], rows[1:larger], rows[larger:]]


class _Sums(NamedTuple):
    grads: Any
    loss: Tensor
    metrics: dict[str, Tensor]
    weight: Tensor


def added(sums: _Sums | None, one: Gradient) -> _Sums:
    """Add a micro-batch, weighted, to the sums; None is nothing yet."""
    weight = one.weight.to(torch.promote_types(one.weight.dtype, torch.float32))  # half precision cannot count
    # gradient divides by 1 where the weight is 0: a smoothed row of a class of no weight has a numerator all the same
    factor = tree.or_one(weight)
    # while a metric over nothing is NaN, and counts for nothing
    metrics = {name: torch.where(weight == 0, 0.0, leaf) for name, leaf in one.metrics.items()}
    means = (one.grads, one.loss)
    if sums is None:
        wide_means, wide_metrics = tree.map(_wide, (means, metrics))
        grads, loss = tree.scale(wide_means, factor)
        return _Sums(grads, loss, tree.scale(wide_metrics, weight), weight)
    _check_metrics(sums.metrics, metrics)
    grads, loss = tree.add_to_total((sums.grads, sums.loss), means, factor)
    metrics = tree.add_scaled(sums.metrics, metrics, weight) if metrics else sums.metrics
    return _Sums(grads, loss, metrics, sums.weight + weight)


def _wide(leaf: Tensor) -> Tensor:
    return leaf.to(torch.promote_types(leaf.dtype, torch.float32))


def _check_metrics(total: dict[str, Tensor], one: dict[str, Tensor]) -> None:
    """Raise unless the metrics of a micro-batch are those of the ones before."""
    shapes, others = ({name: tuple(leaf.shape) for name, leaf in part.items()} for part in (total, one))
    if shapes != others:
        raise ValueError(
            f"accumulate: every micro-batch must have the same metrics, of the same shapes, got {shapes} and {others}; "
            "a metric is a mean, 0-d"
        )


def divided(total: _Sums, params: Params, carry: Carry) -> Gradient:
    inverse = 1 / tree.or_one(total.weight.double())
    grads, loss, metrics = tree.scale((total.grads, total.loss, total.metrics), inverse)
    return Gradient(tree.map(lambda leaf, like: leaf.to(like.dtype), grads, params), loss, total.weight, carry, metrics)
