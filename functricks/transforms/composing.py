"""Composing transforms, and adding what comes out of them to the parameters."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from functricks import tree
from functricks.transforms.base import check_transform, counter, recorded
from functricks.types import Gradient, Grads, Params, State, Transform, Updates

__all__ = ["apply_updates", "chain", "named_chain", "skip_nonfinite"]


def apply_updates(params: Params, updates: Updates) -> Params:
    """Add the updates to the parameters; every parameter keeps its dtype.

    Updates may be wider than the parameters (float32 for half precision): the sum is rounded once.

    Raises ``ValueError`` that names the paths and shapes in which the two differ, also for None in place of an update.

    >>> import torch
    >>> apply_updates({"w": torch.tensor(1.0)}, {"w": torch.tensor(-0.5)})
    {'w': tensor(0.5000)}
    """
    return tree.add(params, updates)


@recorded
def chain(*transforms: Transform) -> Transform:
    """Apply transforms one after the other; the state is the tuple of theirs.

    >>> import torch
    >>> from functricks import scale, scale_by_learning_rate
    >>> both = chain(scale(2.0), scale_by_learning_rate(0.1))
    >>> both.update({"w": torch.tensor(1.0)}, both.init({}), {})[0]
    {'w': tensor(-0.2000)}
    """
    for transform in transforms:
        check_transform("chain: every link", transform)

    def init(params: Params) -> State:
        return tuple(transform.init(params) for transform in transforms)

    def update(grads: Grads, state: State, params: Params) -> tuple[Updates, State]:
        if len(state) != len(transforms):
            raise ValueError(f"chain: the state has {len(state)} parts, the chain {len(transforms)} links")
        states = []
        for transform, one in zip(transforms, state, strict=True):
            grads, one = transform.update(grads, one, params)
            states.append(one)
        return grads, tuple(states)

    return Transform(init, update)


@recorded
def named_chain(**transforms: Transform) -> Transform:
    """Apply transforms one after the other; the state is a dict with their names, so that one is found again.

    >>> import torch
    >>> from functricks import scale_by_learning_rate, trace
    >>> momentum = named_chain(momentum=trace(0.9), rate=scale_by_learning_rate(0.1))
    >>> momentum.init({"w": torch.tensor(1.0)})["momentum"].trace
    {'w': tensor(0.)}
    """
    for name, transform in transforms.items():
        check_transform(f"named_chain: {name}", transform)

    def init(params: Params) -> State:
        return {name: transform.init(params) for name, transform in transforms.items()}

    def update(grads: Grads, state: State, params: Params) -> tuple[Updates, State]:
        if state.keys() != transforms.keys():
            raise ValueError(f"named_chain: the state has {list(state)}, the links are {list(transforms)}")
        states = {}
        for name, transform in transforms.items():
            grads, states[name] = transform.update(grads, state[name], params)
        return grads, states

    return Transform(init, update)


class SkipNonfiniteState(NamedTuple):
    inner: State
    skipped: Tensor


@recorded
def skip_nonfinite(transform: Transform) -> Transform:
    """Skip a step whose gradients are not all finite: zero updates, and ``transform`` keeps its state.

    Classic: what ``torch.amp.GradScaler.step`` does. :func:`functricks.train_step` does it for the whole step; this is
    for loops that own their state. ``state.skipped`` counts the skips. Of a :class:`~functricks.Gradient`, which
    :func:`functricks.multi_steps` takes, the gradients and their weight are looked at, not the loss, carry and metrics.

    >>> import torch
    >>> from functricks import scale
    >>> safe = skip_nonfinite(scale(-1.0))
    >>> safe.update({"w": torch.tensor(float("nan"))}, safe.init({}), {})[0]
    {'w': tensor(0.)}
    """
    check_transform("skip_nonfinite: transform", transform)

    def init(params: Params) -> SkipNonfiniteState:
        return SkipNonfiniteState(transform.init(params), counter(params))

    def update(grads: Grads, state: SkipNonfiniteState, params: Params) -> tuple[Updates, SkipNonfiniteState]:
        finite = tree.all_finite((grads.grads, grads.weight) if isinstance(grads, Gradient) else grads)
        updates, inner = transform.update(grads, state.inner, params)
        updates = tree.where(finite, updates, tree.zeros_like(updates))
        return updates, SkipNonfiniteState(tree.where(finite, inner, state.inner), state.skipped + ~finite)

    return Transform(init, update)
