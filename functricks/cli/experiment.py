"""The training run that ``functricks ablate`` repeats: one small network, every technique a setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functricks import random
from functricks.adversarial import attack, fgm, pgd
from functricks.cli.metrics import calibration_gaps, correct, expected_calibration_error, negative_log_likelihood
from functricks.cli.model import FIRST_LAYER, WEIGHTS, initial_weights, perceptron
from functricks.clipping import clip_by_global_norm
from functricks.experiments import Experiment
from functricks.gradients import accumulate, gradient
from functricks.losses import focal_loss
from functricks.modules import Functional, functional
from functricks.optimizers import adamw
from functricks.schedules import cosine_schedule_with_warmup, step_decay
from functricks.training import train_step
from functricks.transforms import chain
from functricks.types import Batch, Carry, GradFn, Loss, Params, Schedule, StepInfo, TrainState, TrainStep

__all__ = ["Plan", "make_experiment"]

Config = dict[str, Any]

ATTACK_STEPS = 5
_ROWS_AT_ONCE = 512  # in evaluation: bounds the memory of a lane


class Plan(NamedTuple):
    """What all runs share.

    Args:
        hidden: the widths of the hidden layers.
        lr: the learning rate of AdamW, before any schedule.
        steps: how many updates a run makes.
        attack_epsilon: how far the attack may move each feature, in standard deviations of the feature.
        class_counts: training rows of each class, float32 [C].
        features: how many columns a row has.
    """

    hidden: tuple[int, ...]
    lr: float
    steps: int
    attack_epsilon: float
    class_counts: Tensor
    features: int


def make_experiment(plan: Plan) -> Experiment:
    """Return the run as three functions of a configuration, whose settings are those of ``techniques.NEUTRAL``."""
    model = functional(perceptron(plan.features, plan.hidden, len(plan.class_counts)))

    def init(config: Config, key: Tensor) -> TrainState:
        weights, masks = random.split(key)
        return _step(plan, model, config).init(initial_weights(weights, model.params), masks)

    def update(config: Config, state: TrainState, batch: Batch) -> tuple[TrainState, StepInfo]:
        return _step(plan, model, config).update(state, batch)

    def evaluate(config: Config, state: TrainState, data: dict[str, Batch]) -> dict[str, Tensor]:
        def logits_of(x: Tensor) -> Tensor:
            logits: Tensor = model.apply(state.params, model.buffers, x, train=False)[0] / config["temperature"]
            return logits

        found = _scores(logits_of, data["test"], plan.attack_epsilon)
        on_validation = _scores(logits_of, data["validation"], None)
        found |= {f"validation_{name}": value for name, value in on_validation.items()}
        return {**found, "applied_steps": state.step.to(torch.float32)}

    return Experiment(init, update, evaluate)


# --- training --------------------------------------------------------------------------------------------------------


def _step(plan: Plan, model: Functional, config: Config) -> TrainStep:
    optimizer = chain(
        clip_by_global_norm(config["max_norm"]),
        adamw(_learning_rate(plan, config), weight_decay=config["weight_decay"], decay_where=WEIGHTS),
    )
    return train_step(_gradient(plan, model, config), optimizer)


def _learning_rate(plan: Plan, config: Config) -> Schedule:
    floor = 1 - config["cosine_depth"]
    shape = cosine_schedule_with_warmup(1.0, config["warmup"] * plan.steps, plan.steps, min_lr=floor)
    return shape * step_decay(plan.lr, max(1, -(-plan.steps // 3)), config["step_factor"])


def _gradient(plan: Plan, model: Functional, config: Config) -> GradFn:
    plain = gradient(_loss(plan, model, config), has_carry=True)
    kind, _, parts = str(config["gradient"]).partition(" ")
    if kind == "fgm":
        return fgm(plain, config["epsilon"], where=FIRST_LAYER)
    if kind == "pgd":
        return pgd(plain, config["epsilon"], config["epsilon"] / 2, 3, where=FIRST_LAYER)
    if kind == "accumulate":
        return accumulate(plain, int(parts))
    return plain


def _loss(plan: Plan, model: Functional, config: Config) -> Callable[[Params, Batch, Carry], tuple[Loss, Carry]]:
    weight = (plan.class_counts.mean() / plan.class_counts) ** config["class_weight_power"]

    def loss_fn(params: Params, batch: Batch, key: Tensor) -> tuple[Loss, Tensor]:
        x, targets = batch
        following, own = random.split(key)
        logits, _ = model.apply(params, model.buffers, x, key=own, train=True, dropout=config["dropout"])
        loss = focal_loss(
            logits / config["temperature"],
            targets,
            gamma=config["focal_gamma"],
            weight=weight,
            ignore_index=None,
            label_smoothing=config["label_smoothing"],
        )
        return loss, following

    return loss_fn


# --- evaluation ------------------------------------------------------------------------------------------------------


def _scores(logits_of: Callable[[Tensor], Tensor], data: Batch, epsilon: float | None) -> dict[str, Tensor]:
    """Return accuracy, negative log-likelihood and calibration error, and accuracy under attack with an ``epsilon``."""
    count = len(data[1])
    parts = [_sums(logits_of, x, targets, epsilon) for x, targets in _blocks(data)]
    totals = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    gaps = totals.pop("gaps")
    means = {name: total / count for name, total in totals.items()}
    return {**means, "ece": expected_calibration_error(gaps, count)}


def _sums(
    logits_of: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, epsilon: float | None
) -> dict[str, Tensor]:
    logits = logits_of(x)
    sums = {
        "accuracy": correct(logits, targets).sum(),
        "nll": negative_log_likelihood(logits, targets).sum(),
        "gaps": calibration_gaps(logits, targets),
    }
    if epsilon is not None:
        moved = attack(
            lambda x: negative_log_likelihood(logits_of(x), targets).sum(), x, epsilon=epsilon, steps=ATTACK_STEPS
        )
        sums["attacked_accuracy"] = correct(logits_of(moved), targets).sum()
    return sums


def _blocks(data: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    x, targets = data
    yield from zip(x.split(_ROWS_AT_ONCE), targets.split(_ROWS_AT_ONCE), strict=True)
