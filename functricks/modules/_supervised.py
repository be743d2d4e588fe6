"""The common case in one line: the loss function of a model and a loss on pairs of inputs and targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from functricks import random
from functricks.modules._functional import Buffers, Dropout, Functional
from functricks.types import Batch, Loss, LossFn, Params


class SupervisedCarry(NamedTuple):
    """What a supervised loss function carries from one evaluation to the next: the buffers and the random key."""

    buffers: Buffers
    key: Tensor


def supervised_carry(model: Functional, key: Tensor) -> SupervisedCarry:
    """Return the first carry of :func:`supervised`: the buffers of the model, and the key of the run.

    Args:
        model: from :func:`functional`.
        key: int64 [2], from :mod:`functricks.random`.

    >>> from torch import nn
    >>> from functricks import functional
    >>> carry = supervised_carry(functional(nn.Linear(2, 3)), random.key(0))
    >>> carry
    SupervisedCarry(buffers={}, key=tensor([0, 0]))
    """
    return SupervisedCarry(model.buffers, key)


def supervised(
    model: Functional,
    loss: Callable[[Any, Any], Loss | Tensor],
    *,
    train: bool | None = None,
    dropout: Dropout | None = None,
) -> LossFn:
    """Make the loss function of a model and a loss: ``(params, batch, carry) -> (loss, carry, metrics)``.

    A batch is ``(inputs, targets)``; the model is called on ``inputs`` and the loss on ``(output, targets)``. Every
    evaluation advances the key, so that the next one draws other masks.

    Classic: ``loss(model(inputs), targets)``.

    Args:
        model: from :func:`functional`.
        loss: ``(output, targets) -> Loss`` (or a 0-d tensor), such as :func:`functricks.losses.cross_entropy`.
        train, dropout: as for ``apply``; a tensor as ``dropout`` may be batched by ``vmap``.

    The result is for :func:`functricks.gradient` with ``has_carry=True, has_metrics=True``. Where the targets are
    class indices and the output holds scores with the class axis 1, ``metrics["accuracy"]`` is the share of correct
    predictions among the targets other than -100 (0 where there are none).

    >>> import torch
    >>> from torch import nn
    >>> from functricks import functional
    >>> from functricks.losses import cross_entropy
    >>> model = functional(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)))
    >>> batch = torch.ones(4, 2), torch.tensor([0, 1, 2, -100])
    >>> loss_fn = supervised(model, cross_entropy)
    >>> loss, carry, metrics = loss_fn(model.params, batch, supervised_carry(model, random.key(0)))
    >>> loss.values.shape, list(metrics), carry.key.tolist() == [0, 0]
    (torch.Size([4]), ['accuracy'], False)
    """

    def loss_fn(
        params: Params, batch: Batch, carry: SupervisedCarry
    ) -> tuple[Loss | Tensor, SupervisedCarry, dict[str, Tensor]]:
        inputs, targets = batch
        following, key = random.split(carry.key).unbind()
        output, buffers = model.apply(params, carry.buffers, inputs, key=key, train=train, dropout=dropout)
        return loss(output, targets), SupervisedCarry(buffers, following), _metrics(output, targets)

    return loss_fn


def _metrics(output: Any, targets: Any) -> dict[str, Tensor]:
    if not (isinstance(output, Tensor) and isinstance(targets, Tensor)) or targets.is_floating_point():
        return {}
    if output.dim() < 2 or output.shape[:1] + output.shape[2:] != targets.shape:
        return {}
    valid = targets != -100  # torch's ignore_index
    correct = (output.detach().argmax(1) == targets) & valid
    return {"accuracy": correct.sum() / valid.sum().clamp(min=1)}
