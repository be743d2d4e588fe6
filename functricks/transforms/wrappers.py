"""Transforms around a transform: several steps as one, slow weights, live hyper-parameters, float32 masters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from functricks import tree
from functricks.transforms.base import (
    check_integer,
    check_number,
    check_transform,
    counter,
    is_schedule,
    matched,
    recorded,
    zeros,
)
from functricks.transforms.composing import apply_updates
from functricks.types import Gradient, Grads, Number, Params, State, Transform, Updates

__all__ = ["inject_hyperparams", "lookahead", "master_weights", "multi_steps"]


# --- several steps as one --------------------------------------------------------------------------------------------


class MultiStepsState(NamedTuple):
    seen: Tensor
    weight: Tensor
    total: Grads
    inner: State


class MultiSteps(NamedTuple):
    """A Transform with a third function: ``flush(state, params) -> (updates, state)`` spends what is left over.

    Its ``update`` also takes a :class:`~functricks.Gradient`, whose ``weight`` says how much it counts.
    """

    init: Callable[[Params], MultiStepsState]
    update: Callable[[Grads | Gradient, MultiStepsState, Params], tuple[Updates, MultiStepsState]]
    flush: Callable[[MultiStepsState, Params], tuple[Updates, MultiStepsState]]


def multi_steps(transform: Transform, every: int | Tensor) -> MultiSteps:
    r"""Collect gradients over ``every`` updates, and let ``transform`` see their weighted mean once.

    .. math:: g = \frac{\sum_k w_k g_k}{\sum_k w_k}

    The updates in between are zero. ``transform`` counts only its own steps, so schedules run in optimizer steps.

    Classic: ``if (i + 1) % every == 0: optimizer.step()`` with the loss divided by ``every``, which is wrong for
    micro-batches that weigh differently, and for the ones left over at the end of an epoch: they are dropped, divided
    by ``every`` all the same, or leak into the next epoch. :func:`functricks.accumulate` does one batch in pieces;
    this is for loops that see one micro-batch a call.

    Args:
        transform: the optimizer, clipping included.
        every: how many updates make a step, >= 1; a tensor may differ from lane to lane.

    Returns a :class:`MultiSteps`. Call ``flush`` at the end of an epoch: it divides by the weight that is really there,
    and does nothing where nothing is left. A plain tree of gradients weighs 1; pass the whole ``Gradient`` to have its
    weight count. In a ``train_step``, which hands on gradients alone, every micro-batch weighs the same.

    ``skip_nonfinite(steps)`` drops a micro-batch whose gradient is not finite. It has no ``flush`` of its own, nor has
    a chain: flush the state within, ``updates, inner = steps.flush(state.inner, params)``, and go on with
    ``state._replace(inner=inner)``.

    >>> from functricks import sgd
    >>> steps = multi_steps(sgd(1.0), every=2)
    >>> params = {"w": torch.tensor(0.0)}
    >>> state = steps.init(params)
    >>> for size in (1.0, 3.0, 5.0):
    ...     updates, state = steps.update({"w": torch.tensor(size)}, state, params)
    ...     print(updates)
    {'w': tensor(0.)}
    {'w': tensor(-2.)}
    {'w': tensor(0.)}
    >>> steps.flush(state, params)[0]
    {'w': tensor(-5.)}
    """
    check_transform("multi_steps: transform", transform)
    check_integer("multi_steps: every", every, 1)

    def init(params: Params) -> MultiStepsState:
        # the weight in float64: as float32, a window of 2**24 tokens would stop growing by single ones
        return MultiStepsState(counter(params), counter(params).double(), zeros(params), transform.init(params))

    def update(found: Grads | Gradient, state: MultiStepsState, params: Params) -> tuple[Updates, MultiStepsState]:
        grads, weight = (found.grads, found.weight.double()) if isinstance(found, Gradient) else (found, 1.0)
        grads = matched("multi_steps", grads, state.total)
        # gradient divides by 1 where the weight is 0: a smoothed row of a class of no weight still has a numerator
        factor = tree.or_one(weight) if isinstance(weight, Tensor) else weight
        total = tree.add_scaled(state.total, grads, factor)
        grown = MultiStepsState(state.seen + 1, state.weight + weight, total, state.inner)
        return spend(grown, grown.seen >= every, params)

    def spend(state: MultiStepsState, due: Tensor, params: Params) -> tuple[Updates, MultiStepsState]:
        """Take the step, and choose whether it happened: under vmap some lanes take it and some do not."""
        mean = tree.scale(state.total, 1.0 / tree.or_one(state.weight))
        updates, inner = transform.update(mean, state.inner, params)
        taken = MultiStepsState(
            torch.zeros_like(state.seen), torch.zeros_like(state.weight), tree.zeros_like(state.total), inner
        )
        return tree.where(due, updates, tree.zeros_like(updates)), tree.where(due, taken, state)

    def flush(state: MultiStepsState, params: Params) -> tuple[Updates, MultiStepsState]:
        return spend(state, state.seen > 0, params)

    return MultiSteps(init, update, flush)


# --- slow weights ----------------------------------------------------------------------------------------------------


class LookaheadState(NamedTuple):
    step: Tensor
    slow: Params
    inner: State

    def averaged(self, params: Params) -> Params:
        """The slow weights."""
        return self.slow


@recorded
def lookahead(transform: Transform, sync_period: int | Tensor = 5, slow_step_size: Number = 0.5) -> Transform:
    r"""Let ``transform`` run ahead, and every ``sync_period`` steps go only part of the way after it.

    .. math:: \phi \leftarrow \phi + \alpha (\theta - \phi), \qquad \theta \leftarrow \phi

    every :math:`k` steps. ``averaged(state, params)`` reads the slow weights :math:`\phi`.

    PyTorch has none. Reference: Zhang et al. 2019, arXiv:1907.08610, with the paper's values as defaults. The inner
    state is kept at a synchronisation, as the paper does for most of its results.

    Args:
        transform: the fast optimizer.
        sync_period: :math:`k \ge 1`.
        slow_step_size: :math:`\alpha`, in [0, 1]; 1 is the fast optimizer alone.

    >>> from functricks import sgd
    >>> slow = lookahead(sgd(1.0), sync_period=1)
    >>> params = {"w": torch.tensor(0.0)}
    >>> slow.update({"w": torch.tensor(-1.0)}, slow.init(params), params)[0]
    {'w': tensor(0.5000)}
    """
    check_transform("lookahead: transform", transform)
    check_integer("lookahead: sync_period", sync_period, 1)
    check_number("lookahead: slow_step_size", slow_step_size, minimum=0.0, maximum=1.0)

    def init(params: Params) -> LookaheadState:
        return LookaheadState(counter(params), tree.map(torch.clone, tree.wide(params)), transform.init(params))

    def update(grads: Grads, state: LookaheadState, params: Params) -> tuple[Updates, LookaheadState]:
        tree.check_like("lookahead: the state and the parameters", state.slow, params)
        updates, inner = transform.update(grads, state.inner, params)
        step = state.step + 1
        wide = tree.wide(params)
        fast = tree.add(wide, updates)
        moved = tree.add_scaled(state.slow, tree.sub(fast, state.slow), slow_step_size)
        due = step % sync_period == 0
        slow = tree.where(due, moved, state.slow)
        return tree.where(due, tree.sub(moved, wide), tree.wide(updates)), LookaheadState(step, slow, inner)

    return Transform(init, update)


# --- live hyper-parameters -------------------------------------------------------------------------------------------


class InjectHyperparamsState(NamedTuple):
    step: Tensor
    hyperparams: dict[str, Any]
    inner: State


def inject_hyperparams(maker: Callable[..., Transform], static: Collection[str] = ()) -> Callable[..., Transform]:
    """Keep a maker's hyper-parameters in the state: to log them, to write them, to make any of them a schedule.

    ``inject_hyperparams(adamw)(lr=0.1, weight_decay=schedule)`` is ``adamw`` whose state holds
    ``state.hyperparams["lr"]`` and ``["weight_decay"]`` as 0-d float64 tensors. Write one with
    ``state._replace(hyperparams={**state.hyperparams, "lr": new})``, as :func:`functricks.schedules.reduce_on_plateau`
    needs; a hyper-parameter given as a schedule is computed anew at every update, from the number of updates so far.
    Only what is given is there, not the defaults. The result has ``init`` and ``update`` alone: of ``multi_steps`` or
    ``ema``, inject into what they wrap or read, or call their third function on ``state.inner``.

    Classic: ``optimizer.param_groups[0]["lr"]``.

    Args:
        maker: any maker of a transform, as ``adamw`` or ``clip_by_global_norm``.
        static: names of arguments to leave as they are. Bools, ints, tensors of them (a count, a key), strings, None
            transforms, selectors (``where``, ``decay_where``, ``labels``) and ``norm_type`` always are: structure is
            not for writing. A pair of numbers stays a pair.

    >>> from functricks import sgd
    >>> optimizer = inject_hyperparams(sgd)(lr=0.5)
    >>> params = {"w": torch.tensor(1.0)}
    >>> state = optimizer.init(params)
    >>> state.hyperparams
    {'lr': tensor(0.5000, dtype=torch.float64)}
    >>> state = state._replace(hyperparams={"lr": torch.tensor(0.1)})
    >>> optimizer.update({"w": torch.tensor(1.0)}, state, params)[0]
    {'w': tensor(-0.1000)}
    """
    if not callable(maker):
        raise TypeError(f"inject_hyperparams: maker must be the function that makes a transform, got {maker!r}")
    signature = inspect.signature(maker)
    unknown = [name for name in static if name not in signature.parameters]
    if unknown:
        raise ValueError(f"inject_hyperparams: static={unknown} are no arguments of {maker.__name__}")
    fixed = {*static, "where", "decay_where", "labels", "norm_type"}

    def make(*args: Any, **kwargs: Any) -> Transform:
        given = signature.bind(*args, **kwargs).arguments
        live = {name: value for name, value in given.items() if name not in fixed and _is_live(value)}

        def rebuild(values: dict[str, Any]) -> Transform:
            bound = signature.bind(*args, **kwargs)
            bound.arguments.update(values)
            return maker(*bound.args, **bound.kwargs)

        rebuild({name: _without_schedules(value) for name, value in live.items()})  # check now
        return _injected(rebuild, live)

    return make


def _is_live(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        if hasattr(value, "_fields"):  # a Transform, whose two functions are no schedules
            return False
        return bool(value) and all(_is_live(one) for one in value)
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point()) or is_schedule(value)


def _without_schedules(value: Any) -> Any:
    """Put a tensor, which fits every range, where there is a schedule."""
    if isinstance(value, (tuple, list)):
        return tuple(_without_schedules(one) for one in value)
    return torch.ones((), dtype=torch.float64) if is_schedule(value) else value


def _injected(rebuild: Callable[[dict[str, Any]], Transform], live: dict[str, Any]) -> Transform:
    def values(step: Tensor, old: dict[str, Any] | None) -> dict[str, Any]:
        return {name: _value(given, step, None if old is None else old[name]) for name, given in live.items()}

    def init(params: Params) -> InjectHyperparamsState:
        now = values(counter(params), None)
        return InjectHyperparamsState(counter(params), now, rebuild(now).init(params))

    def update(grads: Grads, state: InjectHyperparamsState, params: Params) -> tuple[Updates, InjectHyperparamsState]:
        if state.hyperparams.keys() != live.keys():
            raise ValueError(f"inject_hyperparams: the state has {list(state.hyperparams)}, expected {list(live)}")
        now = values(state.step, state.hyperparams)
        updates, inner = rebuild(now).update(grads, state.inner, params)
        return updates, InjectHyperparamsState(state.step + 1, now, inner)

    return Transform(init, update)


def _value(given: Any, step: Tensor, old: Any) -> Any:
    """Return a hyper-parameter as it is at this step: a schedule's value, or what the state says."""
    if isinstance(given, (tuple, list)):
        olds = [None] * len(given) if old is None else old
        return tuple(_value(one, step, own) for one, own in zip(given, olds, strict=True))
    if is_schedule(given):
        return torch.as_tensor(given(step), dtype=torch.float64)
    return torch.as_tensor(given if old is None else old, dtype=torch.float64)


# --- float32 masters -------------------------------------------------------------------------------------------------


class MasterWeightsState(NamedTuple):
    master: Params
    inner: State


@recorded
def master_weights(transform: Transform) -> Transform:
    """Keep float32 copies of half-precision parameters, and let ``transform`` move those.

    In bfloat16, ``1 - 0.001`` is 1: small updates are lost one by one. The copy adds them up, and the parameter is
    always the copy rounded to its dtype. The updates are float32 differences that take it there. Where a finite copy is
    beyond the range of float16, the parameter is the largest number in it: no update leads back from infinity.

    Classic: ``torch.optim`` over float32 copies, as in Micikevicius et al. 2018, arXiv:1710.03740.

    Args:
        transform: the optimizer; it sees float32 gradients and the float32 copies.

    >>> from functricks import apply_updates, sgd
    >>> optimizer = master_weights(sgd(0.001))
    >>> params = {"w": torch.tensor(1.0, dtype=torch.bfloat16)}
    >>> state = optimizer.init(params)
    >>> for _ in range(4):
    ...     updates, state = optimizer.update({"w": torch.ones((), dtype=torch.bfloat16)}, state, params)
    ...     params = apply_updates(params, updates)
    >>> params, state.master
    ({'w': tensor(0.9961, dtype=torch.bfloat16)}, {'w': tensor(0.9960)})
    """
    check_transform("master_weights: transform", transform)

    def init(params: Params) -> MasterWeightsState:
        master = tree.map(torch.clone, tree.wide(params))
        return MasterWeightsState(master, transform.init(master))

    def update(grads: Grads, state: MasterWeightsState, params: Params) -> tuple[Updates, MasterWeightsState]:
        grads = matched("master_weights", grads, state.master)
        updates, inner = transform.update(grads, state.inner, state.master)
        master = apply_updates(state.master, updates)
        rounded = tree.map(lambda new, leaf: _rounded(new, leaf.dtype), master, params)
        return tree.sub(rounded, tree.wide(params)), MasterWeightsState(master, inner)

    return Transform(init, cast(Any, update))


def _rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a dtype and stay within its range; infinity, which is a copy that has diverged, stays so."""
    if dtype == master.dtype:
        return master
    limit = torch.finfo(dtype).max
    return torch.where(master.isinf(), master, master.clamp(-limit, limit)).to(dtype).to(master.dtype)
