"""Optimizers: each a chain of transforms, with PyTorch's argument names and defaults."""

from __future__ import annotations

from functricks import tree
from functricks.transforms import (
    add_decayed_weights,
    chain,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    trace,
)
from functricks.types import Number, Schedule, Transform

__all__ = ["adam", "adamw", "sgd"]


def sgd(
    lr: Number | Schedule = 1e-3,
    momentum: Number = 0.0,
    dampening: Number = 0.0,
    weight_decay: Number = 0.0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
) -> Transform:
    r"""Stochastic gradient descent, with momentum.

    .. math:: \theta \mapsto \theta - \eta\, b_t, \qquad b_t = \mu b_{t-1} + (1 - \tau)(g_t + \lambda \theta)

    Classic: :class:`torch.optim.SGD`.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule.
        momentum: see :func:`~functricks.trace`, as ``dampening`` and ``nesterov``.
        dampening: 0 with ``nesterov``.
        weight_decay: L2 regularisation.
        nesterov: needs a momentum.
        maximize: ascend instead of descend.
        decay_where: the leaves that decay; all by default.

    >>> import torch
    >>> optimizer = sgd(0.1)
    >>> optimizer.update({"w": torch.tensor(1.0)}, optimizer.init({}), {})[0]
    {'w': tensor(-0.1000)}
    """
    if nesterov and (_is_zero(momentum) or not _is_zero(dampening)):
        raise ValueError("sgd: nesterov needs a momentum and no dampening")
    return chain(
        *_ascend(maximize),
        *_decay(weight_decay, decay_where),
        *([] if _is_zero(momentum) else [trace(momentum, dampening, nesterov)]),
        scale_by_learning_rate(lr),
    )


def adam(
    lr: Number | Schedule = 1e-3,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
) -> Transform:
    """Adam: :func:`~functricks.scale_by_adam`, with L2 regularisation in the gradient.

    Classic: :class:`torch.optim.Adam`. Reference: Kingma and Ba 2015, arXiv:1412.6980.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule.
        betas: see :func:`~functricks.scale_by_adam`, as ``eps`` and ``amsgrad``.
        eps: >= 0.
        weight_decay: L2 regularisation, added to the gradient before the moments see it. :func:`adamw` decouples it.
        amsgrad: use the largest second moment so far.
        maximize: ascend instead of descend.
        decay_where: the leaves that decay; all by default.

    >>> import torch
    >>> optimizer = adam(0.1)
    >>> optimizer.update({"w": torch.tensor(3.0)}, optimizer.init({"w": torch.tensor(0.0)}), {})[0]
    {'w': tensor(-0.1000)}
    """
    return chain(
        *_ascend(maximize),
        *_decay(weight_decay, decay_where),
        scale_by_adam(betas, eps, amsgrad),
        scale_by_learning_rate(lr),
    )


def adamw(
    lr: Number | Schedule = 1e-3,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 1e-2,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
) -> Transform:
    r"""Adam with decoupled weight decay: :math:`\theta \mapsto \theta - \eta (u_t + \lambda \theta)`.

    Classic: :class:`torch.optim.AdamW`. Reference: Loshchilov and Hutter 2019, arXiv:1711.05101.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule. It scales the decay too, as in PyTorch.
        betas: see :func:`~functricks.scale_by_adam`, as ``eps`` and ``amsgrad``.
        eps: >= 0.
        weight_decay: :math:`\lambda`.
        amsgrad: use the largest second moment so far.
        maximize: ascend instead of descend.
        decay_where: the leaves that decay (no bias, no normalisation layer: ``functricks.no_decay``); all by default.

    >>> import torch
    >>> optimizer = adamw(0.1, weight_decay=0.1)
    >>> params = {"w": torch.tensor(1.0)}
    >>> optimizer.update({"w": torch.tensor(1.0)}, optimizer.init(params), params)[0]
    {'w': tensor(-0.1100)}
    """
    return chain(
        *_ascend(maximize),
        scale_by_adam(betas, eps, amsgrad),
        *_decay(weight_decay, decay_where),
        scale_by_learning_rate(lr),
    )


def _is_zero(value: Number) -> bool:
    """Structure follows Python numbers only: a tensor is never known to be zero."""
    return isinstance(value, (int, float)) and value == 0


def _ascend(maximize: bool) -> list[Transform]:
    return [scale(-1.0)] if maximize else []


def _decay(weight_decay: Number, where: tree.Where | None) -> list[Transform]:
    return [] if _is_zero(weight_decay) else [add_decayed_weights(weight_decay, where)]
