"""Running statistics of gradients: momentum, and the second moments of Adam and RMSprop."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functricks import tree
from functricks.transforms.base import check_betas, check_number, counter, double, matched, power, statistic
from functricks.types import Grads, Number, Params, Transform, Updates

__all__ = ["scale_by_adam", "scale_by_rms", "trace"]


class TraceState(NamedTuple):
    step: Tensor
    trace: Grads


def trace(momentum: Number, dampening: Number = 0.0, nesterov: bool = False) -> Transform:
    r"""Replace the gradient by a running sum of gradients: momentum.

    .. math:: b_1 = g_1, \qquad b_t = \mu b_{t-1} + (1 - \tau) g_t

    The update is :math:`b_t`, or :math:`g_t + \mu b_t` with ``nesterov``.

    Classic: ``torch.optim.SGD(momentum=, dampening=, nesterov=)``, the undamped first step included.
    Reference: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning".

    Args:
        momentum: :math:`\mu`, in [0, 1).
        dampening: :math:`\tau`, in [0, 1].
        nesterov: look one step ahead.

    The sum is float32 for half-precision gradients, where PyTorch's buffer is half.

    >>> heavy = trace(0.9)
    >>> state = heavy.init({"w": torch.tensor(0.0)})
    >>> for _ in range(2):
    ...     updates, state = heavy.update({"w": torch.tensor(1.0)}, state, {})
    >>> updates
    {'w': tensor(1.9000)}
    """
    check_number("momentum", momentum, minimum=0.0)
    check_number("dampening", dampening)

    def init(params: Params) -> TraceState:
        return TraceState(counter(params), statistic("trace", params, linear=True))

    def update(grads: Grads, state: TraceState, params: Params) -> tuple[Updates, TraceState]:
        grads = matched("trace", grads, state.trace)
        if isinstance(dampening, Tensor) or dampening:
            fresh = 1.0 - (state.step > 0).double() * double(dampening)
            damped = tree.scale(grads, fresh)
        else:
            damped = grads
        new = tree.add_scaled(damped, state.trace, momentum)
        updates = tree.add_scaled(grads, new, momentum) if nesterov else new
        return updates, TraceState(state.step + 1, new)

    return Transform(init, update)


class ScaleByAdamState(NamedTuple):
    step: Tensor
    mu: Grads
    nu: Grads
    nu_max: Grads


def scale_by_adam(betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8, amsgrad: bool = False) -> Transform:
    r"""Divide a running mean of the gradient by the root of a running mean of its square.

    .. math::
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2, \quad
        u_t = \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    Classic: ``torch.optim.Adam``. Reference: Kingma and Ba 2015, arXiv:1412.6980; AMSGrad: Reddi et al. 2018,
    arXiv:1904.09237.

    Args:
        betas: the two decay rates, in [0, 1).
        eps: added to the root, >= 0.
        amsgrad: divide by the root of the largest :math:`v` so far.

    The moments are float32 for half-precision gradients.

    >>> adam = scale_by_adam()
    >>> adam.update({"w": torch.tensor(3.0)}, adam.init({"w": torch.tensor(0.0)}), {})[0]
    {'w': tensor(1.)}
    """
    check_betas(betas)
    check_number("eps", eps, minimum=0.0)
    beta1, beta2 = betas

    def init(params: Params) -> ScaleByAdamState:
        mu, nu = statistic("scale_by_adam", params), statistic("scale_by_adam", params)
        return ScaleByAdamState(counter(params), mu, nu, tree.zeros_like(nu) if amsgrad else ())

    def update(grads: Grads, state: ScaleByAdamState, params: Params) -> tuple[Updates, ScaleByAdamState]:
        grads = matched("scale_by_adam", grads, state.mu)
        step = state.step + 1
        if not amsgrad:
            updates, mu, nu = tree.adam(state.mu, state.nu, grads, betas, eps, step)
            return updates, ScaleByAdamState(step, mu, nu, ())
        mu = tree.ema(state.mu, grads, beta1)
        nu = tree.ema_of_squares(state.nu, grads, beta2)
        nu_max = tree.maximum(state.nu_max, nu)
        correction, root_correction = 1 - power(beta1, step), torch.sqrt(1 - power(beta2, step))
        updates = tree.root_ratio(mu, nu_max, correction, root_correction, eps)
        return updates, ScaleByAdamState(step, mu, nu, nu_max)

    return Transform(init, update)


class ScaleByRmsState(NamedTuple):
    nu: Grads
    mu: Grads


def scale_by_rms(alpha: Number = 0.99, eps: Number = 1e-8, centered: bool = False) -> Transform:
    r"""Divide the gradient by the root of a running mean of its square.

    .. math:: v_t = \alpha v_{t-1} + (1 - \alpha) g_t^2, \qquad u_t = \frac{g_t}{\sqrt{v_t} + \epsilon}

    with ``centered``, by the root of a running variance: :math:`v_t - m_t^2`, :math:`m_t` the running mean.

    Classic: ``torch.optim.RMSprop``. Reference: Tieleman and Hinton 2012, lecture 6.5; centered: Graves 2013,
    arXiv:1308.0850.

    Args:
        alpha: the decay rate, in [0, 1].
        eps: added to the root, >= 0.
        centered: subtract the square of the mean. As in PyTorch, a variance that rounds to less than zero gives NaN.

    The statistics are float32 for half-precision gradients.

    >>> rms = scale_by_rms(alpha=0.75)
    >>> rms.update({"w": torch.tensor(3.0)}, rms.init({"w": torch.tensor(0.0)}), {})[0]
    {'w': tensor(2.)}
    """
    check_number("alpha", alpha, minimum=0.0, maximum=1.0)
    check_number("eps", eps, minimum=0.0)

    def init(params: Params) -> ScaleByRmsState:
        nu = statistic("scale_by_rms", params)
        return ScaleByRmsState(nu, tree.zeros_like(nu) if centered else ())

    def update(grads: Grads, state: ScaleByRmsState, params: Params) -> tuple[Updates, ScaleByRmsState]:
        grads = matched("scale_by_rms", grads, state.nu)
        nu = tree.ema_of_squares(state.nu, grads, alpha)
        mu = tree.ema(state.mu, grads, alpha) if centered else ()
        variance = tree.pointwise(lambda v, m: torch.addcmul(v, m, m, value=-1), nu, mu) if centered else nu
        return tree.root_ratio(grads, variance, 1.0, 1.0, eps), ScaleByRmsState(nu, mu)

    return Transform(init, update)
