"""Stochastic gradient descent, with and without momentum."""

from __future__ import annotations

from functricks import tree
from functricks.optimizers.base import ascend, decay
from functricks.transforms import chain, scale_by_learning_rate, trace
from functricks.transforms.base import is_zero, recorded
from functricks.types import Number, Schedule, Transform

__all__ = ["sgd"]


@recorded
def sgd(
    lr: Number | Schedule = 1e-3,
    momentum: Number = 0.0,
    dampening: Number = 0.0,
    weight_decay: Number = 0.0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
    learning_rates: dict[str, Number] | None = None,
) -> Transform:
    r"""Stochastic gradient descent, with momentum.

    .. math:: \theta \mapsto \theta - \eta\, b_t, \qquad b_t = \mu b_{t-1} + (1 - \tau)(g_t + \lambda \theta)

    Classic: :class:`torch.optim.SGD`, whose ``momentum_buffer`` is half for half-precision parameters.
    Reference: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning".

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule.
        momentum: see :func:`~functricks.trace`, as ``dampening`` and ``nesterov``.
        dampening: 0 with ``nesterov``.
        weight_decay: L2 regularisation.
        nesterov: needs a momentum.
        maximize: ascend instead of descend.
        decay_where: the leaves that decay; all by default.
        learning_rates: ``{glob: factor}``, see :func:`~functricks.scale_by_learning_rate`.

    >>> import torch
    >>> optimizer = sgd(0.1)
    >>> optimizer.update({"w": torch.tensor(1.0)}, optimizer.init({}), {})[0]
    {'w': tensor(-0.1000)}
    """
    if nesterov and (is_zero(momentum) or not is_zero(dampening)):
        raise ValueError("sgd: nesterov needs a momentum and no dampening")
    return chain(
        *ascend(maximize),
        *decay(weight_decay, decay_where),
        *([] if is_zero(momentum) else [trace(momentum, dampening, nesterov)]),
        scale_by_learning_rate(lr, learning_rates),
    )
