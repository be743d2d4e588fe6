"""Optimizers whose result is an average of where they have been: ASGD and schedule-free AdamW.

``functricks.averaged(state, params)`` reads the average.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functricks import tree
from functricks.optimizers.base import ascend, decay
from functricks.transforms import chain
from functricks.transforms.base import (
    check_betas,
    check_number,
    check_rate,
    counter,
    double,
    is_zero,
    matched,
    power,
    rate_at,
    recorded,
    statistic,
)
from functricks.transforms.groups import scale_by_path
from functricks.types import Grads, Number, Params, Schedule, Transform, Updates

__all__ = ["asgd", "schedule_free_adamw"]


class AsgdState(NamedTuple):
    step: Tensor
    average: Params

    def averaged(self, params: Params) -> Params:
        """The average; the parameters before the first step."""
        return tree.where(self.step > 0, self.average, tree.wide(params))


def step_asgd(lr: Number | Schedule, lambd: Number, alpha: Number, t0: Number) -> Transform:
    """The step of :func:`asgd`."""

    def init(params: Params) -> AsgdState:
        return AsgdState(counter(params), statistic("asgd", params, linear=True))

    def update(grads: Grads, state: AsgdState, params: Params) -> tuple[Updates, AsgdState]:
        grads = matched("asgd", grads, state.average)
        params = tree.wide(params)
        count = state.step.double()
        rate = torch.as_tensor(rate_at(lr, state.step), dtype=torch.float64)
        eta = rate / (1.0 + double(lambd) * rate * count) ** double(alpha)
        share = 1.0 / torch.clamp(count - double(t0), min=1.0)
        updates = tree.add_scaled(tree.scale(grads, -eta), params, -(double(lambd) * eta))
        new = tree.add(params, updates)
        average = tree.add_scaled(state.average, tree.sub(new, state.average), share)
        return updates, AsgdState(state.step + 1, average)

    return Transform(init, update)


@recorded
def asgd(
    lr: Number | Schedule = 1e-2,
    lambd: Number = 1e-4,
    alpha: Number = 0.75,
    t0: Number = 1e6,
    weight_decay: Number = 0.0,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
) -> Transform:
    r"""Gradient descent with a falling rate, and the average of the parameters from step ``t0`` on.

    .. math::
        \eta_t = \frac{\eta}{(1 + \lambda \eta t)^\alpha}, \qquad
        \theta \mapsto (1 - \lambda \eta_t) \theta - \eta_t g_t, \qquad
        \bar\theta \mapsto \bar\theta + \frac{\theta - \bar\theta}{\max(1, t - t_0)}

    for :math:`t = 0, 1, \dots`. ``averaged(state, params)`` reads :math:`\bar\theta`.

    Classic: :class:`torch.optim.ASGD`, which keeps :math:`\eta_t` in float32; here it is float64. It computes
    :math:`\eta_t` at the end of the step before, so that a scheduler acts one step late there, and a schedule at once
    here. Its average is in ``optimizer.state[p]["ax"]``. Reference: Polyak and Juditsky 1992.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule. A rate for some leaves: ``partition``, since
            :math:`\eta_t` is not in proportion to it.
        lambd: :math:`\lambda \ge 0`, which pulls the parameters to zero as well.
        alpha: how fast the rate falls.
        t0: where the average starts.
        weight_decay: L2 regularisation.
        maximize: ascend instead of descend.
        decay_where: the leaves to which ``weight_decay`` applies; all by default.

    >>> optimizer = asgd(0.1)
    >>> params = {"w": torch.tensor(0.0)}
    >>> optimizer.update({"w": torch.tensor(3.0)}, optimizer.init(params), params)[0]
    {'w': tensor(-0.3000)}
    """
    check_rate("lr", lr)
    check_number("asgd: lambd", lambd, minimum=0.0)
    check_number("asgd: alpha", alpha)
    check_number("asgd: t0", t0)
    return chain(*ascend(maximize), *decay(weight_decay, decay_where), step_asgd(lr, lambd, alpha, t0))


class ScheduleFreeState(NamedTuple):
    step: Tensor
    weight: Tensor
    peak: Tensor
    beta: Tensor
    z: Params
    nu: Grads

    def averaged(self, params: Params) -> Params:
        """The average x, from y = (1 - beta) z + beta x."""
        wide = tree.wide(params)
        return tree.add_scaled(wide, tree.sub(self.z, wide), 1.0 - 1.0 / self.beta)


def step_schedule_free(
    lr: Number | Schedule,
    betas: tuple[Number, Number],
    eps: Number,
    weight_decay: Number,
    warmup_steps: int | Tensor,
    r: Number,
    weight_lr_power: Number,
    decay_where: tree.Where | None,
    learning_rates: dict[str, Number] | None,
) -> Transform:
    """The step of :func:`schedule_free_adamw`."""
    beta1, beta2 = betas
    links = decay(weight_decay, decay_where)
    factors = scale_by_path(learning_rates or {}, name="learning_rates")

    def init(params: Params) -> ScheduleFreeState:
        zero = counter(params).double()
        beta = torch.as_tensor(beta1, dtype=torch.float64)
        nu = statistic("schedule_free_adamw", params)
        return ScheduleFreeState(
            counter(params), zero, zero.clone(), beta, tree.map(torch.clone, tree.wide(params)), nu
        )

    def rate(step: Tensor) -> Tensor:
        """The learning rate of a step, counted from 0, with its warm-up."""
        warm = torch.clamp((step + 1).double() / torch.clamp(torch.as_tensor(warmup_steps), min=1), max=1.0)
        return rate_at(lr, step) * warm

    def update(grads: Grads, state: ScheduleFreeState, params: Params) -> tuple[Updates, ScheduleFreeState]:
        grads = matched("schedule_free_adamw", grads, state.nu)
        params, step, now = tree.wide(params), state.step + 1, rate(state.step)
        peak = torch.maximum(state.peak, now)
        own = step.double() ** double(r) * peak ** double(weight_lr_power)
        weight = state.weight + own
        share = torch.where(weight == 0, 0.0, own / torch.where(weight == 0, 1.0, weight))
        nu = tree.ema_of_squares(state.nu, grads, beta2)
        direction = tree.root_ratio(grads, nu, 1.0, torch.sqrt(1 - power(beta2, step)), eps)
        for decays in links:
            direction = decays.update(direction, (), params)[0]
        if learning_rates:  # a factor leaves the average's weights as they are: they are relative to each other
            direction = factors(direction)
        ahead = now * (double(beta1) * (1 - share) - 1)
        updates = tree.add_scaled(tree.scale(tree.sub(state.z, params), share), direction, ahead)
        z = tree.add_scaled(state.z, direction, -now)
        return updates, ScheduleFreeState(step, weight, peak, state.beta, z, nu)

    return Transform(init, update)


@recorded
def schedule_free_adamw(
    lr: Number | Schedule = 2.5e-3,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    warmup_steps: int | Tensor = 0,
    r: Number = 0.0,
    weight_lr_power: Number = 2.0,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
    learning_rates: dict[str, Number] | None = None,
) -> Transform:
    r"""AdamW that needs no learning rate schedule: the gradient is taken between the iterate and its average.

    .. math::
        y_t = (1 - \beta_1) z_t + \beta_1 x_t, \quad z_{t+1} = z_t - \eta_t \left(\frac{g(y_t)}{\sqrt{\hat v_t} +
        \epsilon} + \lambda y_t\right), \quad x_{t+1} = (1 - c_t) x_t + c_t z_{t+1}

    with :math:`c_t \propto t^r \max_{s \le t} \eta_s^p`, normalised. The parameters are :math:`y`, which the gradient
    is for; evaluate and save the average :math:`x`, which ``averaged(state, params)`` reads.

    PyTorch has none. Reference: Defazio et al. 2024, arXiv:2405.15682, and its code (``AdamWScheduleFree``), whose
    arguments and defaults these are.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule.
        betas: :math:`\beta_1 > 0`, and the decay of the second moment.
        eps: added to the root, >= 0.
        weight_decay: :math:`\lambda`, decoupled, at :math:`y`.
        warmup_steps: the learning rate grows linearly over so many steps.
        r: the power of the step in the average's weights.
        weight_lr_power: :math:`p`.
        maximize: see :func:`~functricks.adam`, as ``decay_where`` and ``learning_rates``.

    >>> optimizer = schedule_free_adamw(0.1)
    >>> params = {"w": torch.tensor(0.0)}
    >>> optimizer.update({"w": torch.tensor(3.0)}, optimizer.init(params), params)[0]
    {'w': tensor(-0.1000)}
    """
    check_rate("lr", lr)
    check_betas(betas)
    if is_zero(betas[0]):
        raise ValueError("schedule_free_adamw: betas[0] must be > 0: with 0 the average cannot be told from parameters")
    for name, value in {"eps": eps, "warmup_steps": warmup_steps}.items():
        check_number(f"schedule_free_adamw: {name}", value, minimum=0.0)
    for name, value in {"r": r, "weight_lr_power": weight_lr_power}.items():
        check_number(f"schedule_free_adamw: {name}", value)
    own = step_schedule_free(
        lr, betas, eps, weight_decay, warmup_steps, r, weight_lr_power, decay_where, learning_rates
    )
    return chain(*ascend(maximize), own)
