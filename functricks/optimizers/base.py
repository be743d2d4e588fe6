"""What the optimizers share: the links that an argument puts into a chain or leaves out."""

from __future__ import annotations

from functricks import tree
from functricks.transforms import add_decayed_weights, chain, scale, scale_by_learning_rate
from functricks.transforms.base import check_number, check_rate, double, is_schedule, is_zero, rate_at
from functricks.transforms.scaling import ScaleByScheduleState
from functricks.types import Empty, Grads, Number, Params, Schedule, State, Transform, Updates

__all__: list[str] = []  # nothing here is public


def ascend(maximize: bool) -> list[Transform]:
    """Return the link that turns descent into ascent, if asked for."""
    return [scale(-1.0)] if maximize else []


def decay(weight_decay: Number, where: tree.Where | None) -> list[Transform]:
    """Return the link that adds the decayed weights; none for the Python number 0."""
    return [] if is_zero(weight_decay) else [add_decayed_weights(weight_decay, where)]


def descend(
    lr: Number | Schedule,
    weight_decay: Number,
    decay_where: tree.Where | None,
    learning_rates: dict[str, Number] | None,
) -> Transform:
    """Return the last link of an optimizer with decoupled weight decay: ``u -> -lr * (u + weight_decay * params)``.

    It is ``add_decayed_weights`` and ``scale_by_learning_rate``, where all leaves are treated alike in one pass.
    """
    if is_zero(weight_decay) or decay_where is not None or learning_rates:
        return chain(*decay(weight_decay, decay_where), scale_by_learning_rate(lr, learning_rates))
    check_rate("lr", lr)
    check_number("weight_decay", weight_decay, minimum=0.0)
    rates = scale_by_learning_rate(lr)

    def update(grads: Grads, state: State, params: Params) -> tuple[Updates, State]:
        rate = rate_at(lr, state.step) if is_schedule(lr) else double(lr)
        updates = tree.scaled_sum(-rate, tree.wide(grads), weight_decay, params)
        return updates, ScaleByScheduleState(state.step + 1) if is_schedule(lr) else Empty()

    return Transform(rates.init, update)
