"""Steps that know the sign of the gradient only: Rprop and Lion."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functricks import tree
from functricks.optimizers.base import ascend, descend
from functricks.transforms import chain, scale
from functricks.transforms.base import check_betas, check_number, check_pair, matched, recorded, statistic
from functricks.types import Grads, Number, Params, Schedule, Transform, Updates

__all__ = ["lion", "rprop"]


class ScaleByRpropState(NamedTuple):
    previous: Grads
    size: Grads


def scale_by_rprop(lr: Number, etas: tuple[Number, Number], step_sizes: tuple[Number, Number]) -> Transform:
    """The direction of :func:`rprop`."""
    shrink, grow = etas

    def init(params: Params) -> ScaleByRpropState:
        size = tree.pointwise(torch.add, statistic("rprop", params), coefficients=(lr,))
        return ScaleByRpropState(statistic("rprop", params), size)

    def resized(size: Tensor, grad: Tensor, last: Tensor, *bounds: Number) -> Tensor:
        shrink, grow, low, high = (torch.as_tensor(x, dtype=size.dtype, device=size.device) for x in bounds)
        agreement = grad * last
        factor = torch.where(agreement > 0, grow, torch.where(agreement < 0, shrink, 1.0))
        return torch.minimum(torch.maximum(size * factor, low), high)

    def update(grads: Grads, state: ScaleByRpropState, params: Params) -> tuple[Updates, ScaleByRpropState]:
        grads = matched("rprop", grads, state.previous)
        size = tree.pointwise(resized, state.size, grads, state.previous, coefficients=(shrink, grow, *step_sizes))
        kept = tree.pointwise(lambda g, last: torch.where(g * last < 0, 0.0, g), grads, state.previous)
        return tree.pointwise(lambda g, size: g.sign() * size, kept, size), ScaleByRpropState(kept, size)

    return Transform(init, update)


@recorded
def rprop(
    lr: Number = 1e-2,
    etas: tuple[Number, Number] = (0.5, 1.2),
    step_sizes: tuple[Number, Number] = (1e-6, 50.0),
    *,
    maximize: bool = False,
) -> Transform:
    r"""Move every entry against its gradient's sign, by a step that grows while the sign stays and shrinks when not.

    .. math:: \Delta_t = \mathrm{clip}(\Delta_{t-1} \cdot \eta^\pm, \Delta_{\min}, \Delta_{\max}), \qquad
        \theta \mapsto \theta - \mathrm{sign}(g_t)\, \Delta_t

    with :math:`\eta^+` where :math:`g_t g_{t-1} > 0` and :math:`\eta^-` where it is negative; there the entry rests
    for one step. For full batches: noise in the sign is fatal to it.

    Classic: :class:`torch.optim.Rprop`. Reference: Riedmiller and Braun 1993.

    Args:
        lr: the first step of every entry: a number or a 0-d tensor. A schedule would have no effect, and raises.
            Another first step for some leaves: ``partition``.
        etas: :math:`(\eta^-, \eta^+)`, with :math:`0 < \eta^- < 1 < \eta^+`.
        step_sizes: the smallest and the largest step.
        maximize: ascend instead of descend.

    >>> optimizer = rprop(0.1)
    >>> optimizer.update({"w": torch.tensor(3.0)}, optimizer.init({"w": torch.tensor(0.0)}), {})[0]
    {'w': tensor(-0.1000)}
    """
    check_number("rprop: lr (the first step only: a schedule would have no effect)", lr, minimum=0.0)
    check_pair("rprop: etas", etas)
    check_pair("rprop: step_sizes", step_sizes)
    numbers = {"etas[0]": etas[0], "etas[1]": etas[1], "step_sizes[0]": step_sizes[0], "step_sizes[1]": step_sizes[1]}
    for name, value in numbers.items():
        check_number(f"rprop: {name}", value, minimum=0.0)
    if not any(isinstance(eta, Tensor) for eta in etas) and not 0.0 < etas[0] < 1.0 < etas[1]:
        raise ValueError(f"rprop: etas must be 0 < etas[0] < 1 < etas[1], got {etas!r}")
    return chain(*ascend(maximize), scale_by_rprop(lr, etas, step_sizes), scale(-1.0))


class ScaleByLionState(NamedTuple):
    mu: Grads


def scale_by_lion(betas: tuple[Number, Number]) -> Transform:
    """The direction of :func:`lion`."""
    check_betas(betas)
    beta1, beta2 = betas

    def init(params: Params) -> ScaleByLionState:
        return ScaleByLionState(statistic("lion", params))

    def update(grads: Grads, state: ScaleByLionState, params: Params) -> tuple[Updates, ScaleByLionState]:
        grads = matched("lion", grads, state.mu)
        updates = tree.pointwise(torch.sign, tree.ema(state.mu, grads, beta1))
        return updates, ScaleByLionState(tree.ema(state.mu, grads, beta2))

    return Transform(init, update)


@recorded
def lion(
    lr: Number | Schedule = 1e-4,
    betas: tuple[Number, Number] = (0.9, 0.99),
    weight_decay: Number = 0.0,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
    learning_rates: dict[str, Number] | None = None,
) -> Transform:
    r"""Step by the sign of an interpolated momentum: half of Adam's memory, every entry moves by the same amount.

    .. math::
        u_t = \mathrm{sign}(\beta_1 m_{t-1} + (1 - \beta_1) g_t), \quad m_t = \beta_2 m_{t-1} + (1 - \beta_2) g_t, \quad
        \theta \mapsto \theta - \eta (u_t + \lambda \theta)

    PyTorch has no Lion. Reference: Chen et al. 2023, arXiv:2302.06675, whose advice is a learning rate 3 to 10 times
    smaller than AdamW's, and a weight decay as many times larger.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule.
        betas: :math:`\beta_1, \beta_2`, in [0, 1).
        weight_decay: :math:`\lambda`, decoupled.
        maximize: see :func:`~functricks.adam`, as ``decay_where`` and ``learning_rates``.

    >>> optimizer = lion(0.1)
    >>> optimizer.update({"w": torch.tensor(3.0)}, optimizer.init({"w": torch.tensor(0.0)}), {})[0]
    {'w': tensor(-0.1000)}
    """
    return chain(
        *ascend(maximize),
        scale_by_lion(betas),
        descend(lr, weight_decay, decay_where, learning_rates),
    )
