"""Adam and its family: a running mean of the gradient, divided by the root of one of its square."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functricks import tree
from functricks.optimizers.base import ascend, decay, descend
from functricks.transforms import chain, scale_by_adam, scale_by_learning_rate
from functricks.transforms.base import check_betas, check_number, counter, double, matched, power, recorded, statistic
from functricks.types import Grads, Number, Params, Schedule, Transform, Updates

__all__ = ["adam", "adamax", "adamw", "nadam", "radam"]


@recorded
def adam(
    lr: Number | Schedule = 1e-3,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
    learning_rates: dict[str, Number] | None = None,
    decoupled_weight_decay: bool = False,
) -> Transform:
    r"""Adam: the running mean of the gradient over the root of that of its square, with L2 regularisation.

    .. math:: \theta \mapsto \theta - \eta\, u_t

    with :math:`u_t` that of :func:`~functricks.scale_by_adam` for the gradient :math:`g_t + \lambda \theta`.

    Classic: :class:`torch.optim.Adam`. Reference: Kingma and Ba 2015, arXiv:1412.6980.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule.
        betas: see :func:`~functricks.scale_by_adam`, as ``eps`` and ``amsgrad``.
        eps: >= 0.
        weight_decay: :math:`\lambda`, L2 regularisation, added to the gradient before the moments see it. :func:`adamw`
            decouples it.
        amsgrad: use the largest second moment so far.
        maximize: ascend instead of descend.
        decay_where: the leaves that decay; all by default.
        learning_rates: ``{glob: factor}``, see :func:`~functricks.scale_by_learning_rate`.
        decoupled_weight_decay: decay as :func:`adamw` does.

    >>> import torch
    >>> optimizer = adam(0.1)
    >>> optimizer.update({"w": torch.tensor(3.0)}, optimizer.init({"w": torch.tensor(0.0)}), {})[0]
    {'w': tensor(-0.1000)}
    """
    coupled, apart = (0.0, weight_decay) if decoupled_weight_decay else (weight_decay, 0.0)
    return chain(
        *ascend(maximize),
        *decay(coupled, decay_where),
        scale_by_adam(betas, eps, amsgrad),
        descend(lr, apart, decay_where, learning_rates),
    )


@recorded
def adamw(
    lr: Number | Schedule = 1e-3,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 1e-2,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
    learning_rates: dict[str, Number] | None = None,
) -> Transform:
    r"""Adam with decoupled weight decay.

    .. math:: \theta \mapsto \theta - \eta (u_t + \lambda \theta)

    with :math:`u_t` that of :func:`~functricks.scale_by_adam`.

    Classic: :class:`torch.optim.AdamW`. Reference: Loshchilov and Hutter 2019, arXiv:1711.05101.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule. It scales the decay too, as in PyTorch.
        betas: see :func:`~functricks.scale_by_adam`, as ``eps`` and ``amsgrad``.
        eps: >= 0.
        weight_decay: :math:`\lambda`.
        amsgrad: use the largest second moment so far.
        maximize: ascend instead of descend.
        decay_where: the leaves that decay (no bias, no normalisation layer: ``functricks.no_decay``); all by default.
        learning_rates: ``{glob: factor}``, see :func:`~functricks.scale_by_learning_rate`.

    >>> import torch
    >>> optimizer = adamw(0.1, weight_decay=0.1)
    >>> params = {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(1.0)}, optimizer.init(params), params)[0]
    {'w': tensor(-0.1100)}
    """
    return chain(
        *ascend(maximize),
        scale_by_adam(betas, eps, amsgrad),
        descend(lr, weight_decay, decay_where, learning_rates),
    )


class ScaleByNadamState(NamedTuple):
    step: Tensor
    mu_product: Tensor
    mu: Grads
    nu: Grads


def scale_by_nadam(betas: tuple[Number, Number], eps: Number, momentum_decay: Number) -> Transform:
    """The direction of :func:`nadam`."""
    check_betas(betas)
    check_number("eps", eps, minimum=0.0)
    check_number("momentum_decay", momentum_decay, minimum=0.0)
    beta1, beta2 = betas

    def momentum_at(step: Tensor) -> Tensor:
        return double(beta1) * (1.0 - 0.5 * torch.pow(0.96, step.double() * double(momentum_decay)))

    def init(params: Params) -> ScaleByNadamState:
        mu, nu = statistic("nadam", params), statistic("nadam", params)
        return ScaleByNadamState(counter(params), counter(params).double() + 1, mu, nu)

    def update(grads: Grads, state: ScaleByNadamState, params: Params) -> tuple[Updates, ScaleByNadamState]:
        grads = matched("nadam", grads, state.mu)
        step = state.step + 1
        now, ahead = momentum_at(step), momentum_at(step + 1)
        product = state.mu_product * now
        mu = tree.ema(state.mu, grads, beta1)
        nu = tree.ema_of_squares(state.nu, grads, beta2)
        mixed = tree.add_scaled(tree.scale(grads, (1 - now) / (1 - product)), mu, ahead / (1 - product * ahead))
        updates = tree.root_ratio(mixed, nu, 1.0, torch.sqrt(1 - power(beta2, step)), eps)
        return updates, ScaleByNadamState(step, product, mu, nu)

    return Transform(init, update)


@recorded
def nadam(
    lr: Number | Schedule = 2e-3,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    momentum_decay: Number = 4e-3,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
    learning_rates: dict[str, Number] | None = None,
) -> Transform:
    r"""Adam with Nesterov's look ahead, and a momentum that grows from half of :math:`\beta_1` to all of it.

    .. math::
        \mu_t = \beta_1 \left(1 - \tfrac12 0.96^{t \psi}\right), \qquad
        u_t = \frac{\frac{1 - \mu_t}{1 - \prod_{i \le t} \mu_i}\, g_t
        + \frac{\mu_{t+1}}{1 - \prod_{i \le t+1} \mu_i}\, m_t}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    with :math:`m` and :math:`v` as in :func:`~functricks.scale_by_adam`.

    Classic: :class:`torch.optim.NAdam`, which keeps the product of the :math:`\mu_i` in float32; here it is float64.
    Reference: Dozat 2016, "Incorporating Nesterov momentum into Adam".

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule.
        betas: see :func:`~functricks.scale_by_adam`, as ``eps``.
        eps: >= 0.
        weight_decay: L2 regularisation, or decoupled, as the next but one says.
        momentum_decay: :math:`\psi \ge 0`.
        decoupled_weight_decay: decay as :func:`~functricks.adamw` does.
        maximize: see :func:`~functricks.adam`, as ``decay_where`` and ``learning_rates``.

    >>> import torch
    >>> optimizer = nadam(0.1, momentum_decay=0.0)
    >>> optimizer.update({"w": torch.tensor(3.0)}, optimizer.init({"w": torch.tensor(0.0)}), {})[0]
    {'w': tensor(-0.1056)}
    """
    coupled, apart = (0.0, weight_decay) if decoupled_weight_decay else (weight_decay, 0.0)
    return chain(
        *ascend(maximize),
        *decay(coupled, decay_where),
        scale_by_nadam(betas, eps, momentum_decay),
        descend(lr, apart, decay_where, learning_rates),
    )


class ScaleByRadamState(NamedTuple):
    step: Tensor
    mu: Grads
    nu: Grads


def scale_by_radam(betas: tuple[Number, Number], eps: Number) -> Transform:
    """The direction of :func:`radam`."""
    check_betas(betas)
    check_number("eps", eps, minimum=0.0)
    beta1, beta2 = betas

    def init(params: Params) -> ScaleByRadamState:
        return ScaleByRadamState(counter(params), statistic("radam", params), statistic("radam", params))

    def update(grads: Grads, state: ScaleByRadamState, params: Params) -> tuple[Updates, ScaleByRadamState]:
        grads = matched("radam", grads, state.mu)
        step = state.step + 1
        mu = tree.ema(state.mu, grads, beta1)
        nu = tree.ema_of_squares(state.nu, grads, beta2)
        correction, rest = 1 - power(beta1, step), power(beta2, step)
        longest = 2 / (1 - double(beta2)) - 1
        length = longest - 2 * step.double() * rest / (1 - rest)
        usable = length > 5
        length = torch.where(usable, length, 6.0)  # keeps the root below, and its derivative, finite
        rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        gain = torch.sqrt(torch.where(usable, rectified, 1.0) * (1 - rest))
        adaptive = tree.root_ratio(mu, nu, correction / gain, 1.0, eps)
        updates = tree.where(usable, adaptive, tree.scale(mu, 1 / correction))
        return updates, ScaleByRadamState(step, mu, nu)

    return Transform(init, update)


@recorded
def radam(
    lr: Number | Schedule = 1e-3,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
    learning_rates: dict[str, Number] | None = None,
) -> Transform:
    r"""Adam without its unreliable first steps: momentum alone until the second moment can be trusted.

    .. math::
        \rho_t = \rho_\infty - \frac{2 t \beta_2^t}{1 - \beta_2^t}, \quad \rho_\infty = \frac{2}{1 - \beta_2} - 1,
        \qquad r_t = \sqrt{\frac{(\rho_t - 4)(\rho_t - 2) \rho_\infty}{(\rho_\infty - 4)(\rho_\infty - 2) \rho_t}}

    The update is :math:`\hat m_t r_t \sqrt{1 - \beta_2^t} / (\sqrt{v_t} + \epsilon)` where :math:`\rho_t > 5`, and
    :math:`\hat m_t` before.

    Classic: :class:`torch.optim.RAdam`. Reference: Liu et al. 2020, arXiv:1908.03265.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule.
        betas: see :func:`~functricks.scale_by_adam`, as ``eps``.
        eps: added to the root of the second moment before its bias is corrected, as PyTorch does.
        weight_decay: L2 regularisation, or decoupled, as the next one says.
        decoupled_weight_decay: decay as :func:`~functricks.adamw` does.
        maximize: see :func:`~functricks.adam`, as ``decay_where`` and ``learning_rates``.

    >>> import torch
    >>> optimizer = radam(0.1)
    >>> optimizer.update({"w": torch.tensor(3.0)}, optimizer.init({"w": torch.tensor(0.0)}), {})[0]
    {'w': tensor(-0.3000)}
    """
    coupled, apart = (0.0, weight_decay) if decoupled_weight_decay else (weight_decay, 0.0)
    return chain(
        *ascend(maximize),
        *decay(coupled, decay_where),
        scale_by_radam(betas, eps),
        descend(lr, apart, decay_where, learning_rates),
    )


class ScaleByAdamaxState(NamedTuple):
    step: Tensor
    mu: Grads
    peak: Grads


def scale_by_adamax(betas: tuple[Number, Number], eps: Number) -> Transform:
    """The direction of :func:`adamax`."""
    check_betas(betas)
    check_number("eps", eps, minimum=0.0)
    beta1, beta2 = betas

    def init(params: Params) -> ScaleByAdamaxState:
        return ScaleByAdamaxState(counter(params), statistic("adamax", params), statistic("adamax", params))

    def update(grads: Grads, state: ScaleByAdamaxState, params: Params) -> tuple[Updates, ScaleByAdamaxState]:
        grads = matched("adamax", grads, state.mu)
        step = state.step + 1
        mu = tree.ema(state.mu, grads, beta1)
        peak = tree.pointwise(
            lambda u, g, beta, eps: torch.maximum(u * beta, g.abs() + eps), state.peak, grads, coefficients=(beta2, eps)
        )
        updates = tree.pointwise(lambda m, u, c: m / (u * c), mu, peak, coefficients=(1 - power(beta1, step),))
        return updates, ScaleByAdamaxState(step, mu, peak)

    return Transform(init, update)


@recorded
def adamax(
    lr: Number | Schedule = 2e-3,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
    learning_rates: dict[str, Number] | None = None,
) -> Transform:
    r"""Adam with a decaying maximum in place of the root of the second moment.

    .. math:: u_t = \max(\beta_2 u_{t-1}, |g_t| + \epsilon), \qquad
        \theta \mapsto \theta - \frac{\eta}{1 - \beta_1^t} \frac{m_t}{u_t}

    Classic: :class:`torch.optim.Adamax`. Reference: Kingma and Ba 2015, arXiv:1412.6980, section 7.1.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule.
        betas: see :func:`~functricks.scale_by_adam`.
        eps: > 0: with 0, an entry whose gradient was always zero becomes NaN, as in PyTorch.
        weight_decay: L2 regularisation.
        maximize: see :func:`~functricks.adam`, as ``decay_where`` and ``learning_rates``.

    >>> import torch
    >>> optimizer = adamax(0.1)
    >>> optimizer.update({"w": torch.tensor(3.0)}, optimizer.init({"w": torch.tensor(0.0)}), {})[0]
    {'w': tensor(-0.1000)}
    """
    return chain(
        *ascend(maximize),
        *decay(weight_decay, decay_where),
        scale_by_adamax(betas, eps),
        scale_by_learning_rate(lr, learning_rates),
    )
