"""Averages of parameters along the way, as the last link of an optimizer's chain.

``chain(adamw(1e-3), ema(0.999))`` trains as ``adamw`` does and keeps the average in its state, where
:func:`averaged` finds it. What is averaged are the parameters *after* each update.

Buffers are not parameters: BatchNorm's running statistics belong to the weights they were collected with. Two ways, as
in PyTorch: average them too, with ``ema(...).observe(buffers, state)`` beside the training step (``use_buffers=True``
there), or collect them anew for the averaged weights with :func:`update_bn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functricks import tree
from functricks.transforms.base import check_integer, check_number, counter, is_zero, zeros
from functricks.types import Batch, Number, Params, State, Updates

__all__ = ["averaged", "ema", "swa", "update_bn"]


class Average(NamedTuple):
    """A Transform that passes its updates, with a third function: ``observe(values, state) -> state``.

    ``observe`` takes the values themselves, for what no update moves: buffers, activations, another run's parameters.
    """

    init: Callable[[Params], State]
    update: Callable[[Updates, State, Params], tuple[Updates, State]]
    observe: Callable[[Params, State], State]


class AverageState(NamedTuple):
    step: Tensor
    taken: Tensor
    weight: Tensor
    average: Params

    def averaged(self, params: Params) -> Params:
        """The average; the given values where nothing was averaged yet, or counts (``debias`` with a decay of 1)."""
        inverse = 1.0 / torch.where(self.weight == 0, 1.0, self.weight)
        mean = tree.pointwise(_scaled, self.average, coefficients=(inverse,))
        return tree.where(self.weight > 0, mean, _like(params, self.average))


def _scaled(leaf: Tensor, factor: Number) -> Tensor:
    return leaf * factor if _is_averaged(leaf) else leaf


def _is_averaged(leaf: Tensor) -> bool:
    """Is there a mean of these? A count of batches is copied."""
    return leaf.is_floating_point() or leaf.is_complex()


def _like(params: Params, average: Params) -> Params:
    return tree.map(lambda leaf, own: leaf.to(own.dtype), params, average)


def ema(decay: Number = 0.999, debias: bool = False, every: int | Tensor = 1) -> Average:
    r"""Keep an exponential moving average of the parameters.

    .. math:: a_1 = \theta_1, \qquad a_t = d\, a_{t-1} + (1 - d)\, \theta_t

    or, with ``debias``, from :math:`a_0 = 0` and divided by the weights so far, :math:`1 - d^t`, so that the start does
    not count for more than what follows.

    Classic: ``torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))``, which copies the
    first parameters, and without ``use_buffers`` never moves the averaged model's buffers. Reference: Polyak and
    Juditsky 1992; Kingma and Ba 2015, arXiv:1412.6980, section 7.2.

    Args:
        decay: :math:`d`, in [0, 1].
        debias: see above.
        every: average after every so many updates only, >= 1.

    Averages are float32 for half precision; integer leaves (a count of batches) are copied.

    >>> from functricks import chain, sgd
    >>> optimizer = chain(sgd(1.0), ema(0.5))
    >>> params = {"w": torch.tensor(0.0)}
    >>> state = optimizer.init(params)
    >>> for _ in range(2):
    ...     updates, state = optimizer.update({"w": torch.tensor(-1.0)}, state, params)
    ...     params = {"w": params["w"] + updates["w"]}
    >>> params, averaged(state, params)
    ({'w': tensor(2.)}, {'w': tensor(1.5000)})
    """
    check_number("ema: decay", decay, minimum=0.0, maximum=1.0)

    def share(state: AverageState) -> tuple[Number, Number]:
        kept = torch.as_tensor(decay, dtype=torch.float64)
        if not debias:
            kept = torch.where(state.taken == 0, 0.0, kept)
        return kept, kept * state.weight + (1.0 - kept)

    return _average("ema", share, every)


def swa(every: int | Tensor = 1, start: int | Tensor = 0) -> Average:
    r"""Keep the plain mean of the parameters: stochastic weight averaging.

    .. math:: a_n = a_{n-1} + \frac{\theta_n - a_{n-1}}{n}

    Classic: ``torch.optim.swa_utils.AveragedModel(model)``, updated after every epoch of the last quarter of training,
    at a constant or cyclic learning rate. Reference: Izmailov et al. 2018, arXiv:1803.05407.

    Args:
        every: average after every so many updates, >= 1; the updates of an epoch.
        start: leave out the first so many updates.

    Averages are float32 for half precision; integer leaves (a count of batches) are copied.

    >>> average = swa()
    >>> state = average.init({"w": torch.tensor(0.0)})
    >>> for value in (1.0, 2.0, 6.0):
    ...     state = average.observe({"w": torch.tensor(value)}, state)
    >>> averaged(state, {"w": torch.tensor(6.0)})
    {'w': tensor(3.)}
    """

    def share(state: AverageState) -> tuple[Number, Number]:
        return state.taken.double() / (state.taken + 1), 1.0

    return _average("swa", share, every, start)


def _average(
    name: str,
    share: Callable[[AverageState], tuple[Number, Number]],
    every: int | Tensor,
    start: int | Tensor = 0,
) -> Average:
    """Make an average from ``share(state) -> (decay of the old average, new sum of weights)``."""
    for what, value, least in (("every", every, 1), ("start", start, 0)):
        check_integer(f"{name}: {what}", value, least)

    def init(params: Params) -> AverageState:
        return AverageState(counter(params), counter(params), counter(params).double(), zeros(params))

    def observe(values: Params, state: AverageState) -> AverageState:
        tree.check_like(f"{name}: the state and the values", state.average, values)
        kept, weight = share(state)
        step = state.step + 1
        due = (step > start) & ((step - start) % every == 0)
        moved = tree.map(lambda own, new: _mixed(own, new, kept), state.average, values)
        taken = AverageState(step, state.taken + 1, torch.as_tensor(weight, dtype=torch.float64), moved)
        chosen: AverageState = tree.where(due, taken, state._replace(step=step))
        return chosen

    def update(updates: Updates, state: AverageState, params: Params) -> tuple[Updates, AverageState]:
        return updates, observe(tree.add(tree.wide(params), updates), state)

    return Average(init, update, observe)


def averaged(state: State, params: Params) -> Params:
    """Return the averaged parameters that an optimizer's state holds.

    They are there after :func:`ema`, :func:`swa`, :func:`functricks.lookahead`, :func:`functricks.asgd` and
    :func:`functricks.schedule_free_adamw`, at any depth: in a chain, a partition, a mask.

    Args:
        state: the optimizer's state, or ``TrainState.optimizer``.
        params: the parameters; leaves that no average covers (another label, outside a mask) are returned from here,
            and every leaf in the dtype that it has here.

    Raises ``ValueError`` where there is no average, and where two cover one leaf: pass the state of the one you mean.

    >>> average = ema(0.9)
    >>> params = {"w": torch.tensor(1.0)}
    >>> averaged((average.init(params), ()), params)
    {'w': tensor(1.)}
    """
    found: dict[str, Any] = {}
    holders = _holders(state)
    if not holders:
        raise ValueError("averaged: the state holds no average; add ema(...) or swa() to the chain")
    named = tree.named_leaves(params)
    for holder, own in holders:
        covered = tree.paths(own)
        strangers = [path for path in covered if path not in named]
        if strangers:
            raise ValueError(f"averaged: the state averages {', '.join(strangers)}; have: {', '.join(named)}")
        flat = isinstance(own, dict) and set(own) == set(covered)  # what partition and masked hand to theirs
        mean = holder.averaged({path: named[path] for path in covered} if flat else params)
        for path, leaf in tree.named_leaves(mean).items():
            if path in found:
                raise ValueError(f"averaged: two averages of {path}; pass the state of the one you mean")
            found[path] = leaf.to(named[path].dtype)
    return tree.from_named(params, found)


def _holders(state: State) -> list[tuple[Any, Any]]:
    """Return the states within that can say what their average is, with a tree of the leaves that it covers."""
    if hasattr(state, "averaged"):
        own = next(getattr(state, name) for name in ("average", "slow", "z") if hasattr(state, name))
        return [(state, own)]
    children = state.values() if isinstance(state, dict) else state if isinstance(state, (tuple, list)) else ()
    return [holder for child in children for holder in _holders(child)]


def update_bn(
    apply: Callable[[Params, Any, Batch], Any],
    params: Params,
    buffers: dict[str, Tensor],
    batches: Iterable[Batch],
    *,
    momentum: Number = 0.1,
) -> dict[str, Tensor]:
    """Collect BatchNorm's running statistics anew, for averaged parameters: the mean over the batches.

    Classic: :func:`torch.optim.swa_utils.update_bn`.

    Args:
        apply: ``(params, buffers, batch) -> new buffers``, in training mode; it must not update ``buffers`` in place.
        params: usually ``averaged(state, params)``.
        buffers: ``{path: buffer}``; those named ``running_mean``, ``running_var`` and ``num_batches_tracked`` are
            collected, the others pass.
        batches: what to collect over; each batch counts the same, as in PyTorch.
        momentum: that of the BatchNorm modules, in (0, 1].

    >>> def apply(params, buffers, batch):
    ...     return {"bn.running_mean": 0.9 * buffers["bn.running_mean"] + 0.1 * batch.mean()}
    >>> batches = [torch.tensor([1.0]), torch.tensor([3.0])]
    >>> update_bn(apply, {}, {"bn.running_mean": torch.tensor(7.0)}, batches)
    {'bn.running_mean': tensor(2.)}
    """
    check_number("update_bn: momentum", momentum, minimum=0.0, maximum=1.0)
    if is_zero(momentum):
        raise ValueError("update_bn: momentum must be > 0: with 0, BatchNorm collects nothing")
    statistics = [path for path in buffers if path.split(".")[-1] in ("running_mean", "running_var")]
    counts = [path for path in buffers if path.split(".")[-1] == "num_batches_tracked"]
    cleared = {path: torch.zeros_like(buffers[path]) for path in (*statistics, *counts)}
    total = tree.wide({path: cleared[path] for path in statistics})  # a sum in half would stop growing
    seen = 0
    current = {**buffers, **cleared}
    for seen, batch in enumerate(batches, start=1):  # noqa: B007  the number of batches is wanted
        new = apply(params, {**current, **{path: cleared[path] for path in statistics}}, batch)
        total = {path: total[path] + new[path] / momentum for path in statistics}
        current = dict(new)
    if not seen:
        return dict(buffers)
    return {**current, **{path: (total[path] / seen).to(buffers[path].dtype) for path in statistics}}


def _mixed(own: Tensor, new: Tensor, kept: Number) -> Tensor:
    if not _is_averaged(own):
        return new
    weight = torch.as_tensor(1.0 - kept, device=own.device).to(tree.compute_dtype(own.dtype))
    return torch.lerp(own, new.to(own.dtype), weight)
