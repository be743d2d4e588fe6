"""Rates of their own for every entry, from sums or running means of squares: AdaGrad, AdaDelta, RMSprop."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functricks import tree
from functricks.optimizers.base import ascend, decay
from functricks.transforms import chain, scale_by_learning_rate, scale_by_rms, trace
from functricks.transforms.base import check_number, counter, double, is_zero, matched, recorded, statistic
from functricks.types import Grads, Number, Params, Schedule, Transform, Updates

__all__ = ["adadelta", "adagrad", "rmsprop"]


class ScaleByAdagradState(NamedTuple):
    step: Tensor
    total: Grads


def scale_by_adagrad(lr_decay: Number, initial_accumulator_value: Number, eps: Number) -> Transform:
    """The direction of :func:`adagrad`."""
    check_number("lr_decay", lr_decay, minimum=0.0)
    check_number("initial_accumulator_value", initial_accumulator_value, minimum=0.0)
    check_number("eps", eps, minimum=0.0)

    def init(params: Params) -> ScaleByAdagradState:
        total = tree.pointwise(torch.add, statistic("adagrad", params), coefficients=(initial_accumulator_value,))
        return ScaleByAdagradState(counter(params), total)

    def update(grads: Grads, state: ScaleByAdagradState, params: Params) -> tuple[Updates, ScaleByAdagradState]:
        grads = matched("adagrad", grads, state.total)
        total = tree.pointwise(lambda total, g: total + g * g, state.total, grads)
        slowdown = 1.0 + state.step.double() * double(lr_decay)
        return tree.root_ratio(grads, total, slowdown, 1.0, eps), ScaleByAdagradState(state.step + 1, total)

    return Transform(init, update)


@recorded
def adagrad(
    lr: Number | Schedule = 1e-2,
    lr_decay: Number = 0.0,
    weight_decay: Number = 0.0,
    initial_accumulator_value: Number = 0.0,
    eps: Number = 1e-10,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
    learning_rates: dict[str, Number] | None = None,
) -> Transform:
    r"""Divide every entry's gradient by the root of the sum of its squares so far.

    .. math:: s_t = s_{t-1} + g_t^2, \qquad
        \theta \mapsto \theta - \frac{\eta}{1 + (t - 1) \delta} \frac{g_t}{\sqrt{s_t} + \epsilon}

    Classic: :class:`torch.optim.Adagrad`. Reference: Duchi et al. 2011, JMLR 12.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule.
        lr_decay: :math:`\delta \ge 0`.
        weight_decay: L2 regularisation.
        initial_accumulator_value: :math:`s_0 \ge 0`.
        eps: added to the root, >= 0.
        maximize: see :func:`~functricks.adam`, as ``decay_where`` and ``learning_rates``.

    >>> optimizer = adagrad(0.1)
    >>> optimizer.update({"w": torch.tensor(3.0)}, optimizer.init({"w": torch.tensor(0.0)}), {})[0]
    {'w': tensor(-0.1000)}
    """
    return chain(
        *ascend(maximize),
        *decay(weight_decay, decay_where),
        scale_by_adagrad(lr_decay, initial_accumulator_value, eps),
        scale_by_learning_rate(lr, learning_rates),
    )


class ScaleByAdadeltaState(NamedTuple):
    nu: Grads
    moved: Grads


def scale_by_adadelta(rho: Number, eps: Number) -> Transform:
    """The direction of :func:`adadelta`."""
    check_number("rho", rho, minimum=0.0, maximum=1.0)
    check_number("eps", eps, minimum=0.0)

    def step(moved: Tensor, nu: Tensor, grad: Tensor, eps: Number) -> Tensor:
        return tree.sqrt(moved + eps) / tree.sqrt(nu + eps) * grad

    def init(params: Params) -> ScaleByAdadeltaState:
        return ScaleByAdadeltaState(statistic("adadelta", params), statistic("adadelta", params))

    def update(grads: Grads, state: ScaleByAdadeltaState, params: Params) -> tuple[Updates, ScaleByAdadeltaState]:
        grads = matched("adadelta", grads, state.nu)
        nu = tree.ema_of_squares(state.nu, grads, rho)
        updates = tree.pointwise(step, state.moved, nu, grads, coefficients=(eps,))
        return updates, ScaleByAdadeltaState(nu, tree.ema_of_squares(state.moved, updates, rho))

    return Transform(init, update)


@recorded
def adadelta(
    lr: Number | Schedule = 1.0,
    rho: Number = 0.9,
    eps: Number = 1e-6,
    weight_decay: Number = 0.0,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
    learning_rates: dict[str, Number] | None = None,
) -> Transform:
    r"""Give every entry a step in the units of the parameter: the root mean square of its steps over its gradients'.

    .. math:: u_t = \frac{\sqrt{d_{t-1} + \epsilon}}{\sqrt{v_t + \epsilon}}\, g_t

    with :math:`v` the running mean of :math:`g^2` and :math:`d` that of :math:`u^2`, both with decay :math:`\rho`.

    Classic: :class:`torch.optim.Adadelta`. Reference: Zeiler 2012, arXiv:1212.5701.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule.
        rho: :math:`\rho`, in [0, 1].
        eps: :math:`\epsilon`, inside the roots, > 0.
        weight_decay: L2 regularisation.
        maximize: see :func:`~functricks.adam`, as ``decay_where`` and ``learning_rates``.

    >>> optimizer = adadelta()
    >>> optimizer.update({"w": torch.tensor(3.0)}, optimizer.init({"w": torch.tensor(0.0)}), {})[0]
    {'w': tensor(-0.0032)}
    """
    return chain(
        *ascend(maximize),
        *decay(weight_decay, decay_where),
        scale_by_adadelta(rho, eps),
        scale_by_learning_rate(lr, learning_rates),
    )


@recorded
def rmsprop(
    lr: Number | Schedule = 1e-2,
    alpha: Number = 0.99,
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    momentum: Number = 0.0,
    centered: bool = False,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
    learning_rates: dict[str, Number] | None = None,
) -> Transform:
    r"""Divide every entry's gradient by the root of a running mean of its square, with momentum after it.

    .. math:: \theta \mapsto \theta - \eta\, b_t, \qquad b_t = \mu b_{t-1} + u_t

    with :math:`u_t` that of :func:`~functricks.scale_by_rms` for the gradient :math:`g_t + \lambda \theta`.

    Classic: :class:`torch.optim.RMSprop`. Reference: Tieleman and Hinton 2012, lecture 6.5.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule.
        alpha: see :func:`~functricks.scale_by_rms`, as ``eps`` and ``centered``.
        eps: >= 0.
        weight_decay: :math:`\lambda`, L2 regularisation.
        momentum: :math:`\mu`, see :func:`~functricks.trace`.
        centered: divide by the standard deviation.
        maximize: see :func:`~functricks.adam`, as ``decay_where`` and ``learning_rates``.

    >>> optimizer = rmsprop(0.1, alpha=0.75)
    >>> optimizer.update({"w": torch.tensor(3.0)}, optimizer.init({"w": torch.tensor(0.0)}), {})[0]
    {'w': tensor(-0.2000)}
    """
    return chain(
        *ascend(maximize),
        *decay(weight_decay, decay_where),
        scale_by_rms(alpha, eps, centered),
        *([] if is_zero(momentum) else [trace(momentum)]),
        scale_by_learning_rate(lr, learning_rates),
    )
