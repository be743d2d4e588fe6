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

    A batch of another form, such as a dict, takes a loss function of its own; this is all that there is to it:

    >>> def of_dict(params, batch, carry):
    ...     following, key = random.split(carry.key).unbind()
    ...     logits, buffers = model.apply(params, carry.buffers, batch["inputs"], key=key)
    ...     return cross_entropy(logits, batch["labels"]), SupervisedCarry(buffers, following), {}
    >>> dict_batch = {"inputs": batch[0], "labels": batch[1]}
    >>> again, _, _ = of_dict(model.params, dict_batch, supervised_carry(model, random.key(0)))
    >>> torch.equal(again.values, loss.values)
    True

    Raises ``TypeError`` for a module in place of a :class:`~functricks.Functional`, a batch that is no pair, and a
    carry that is no :class:`SupervisedCarry`.
    """

    if not isinstance(model, Functional):
        raise TypeError(f"supervised: model must be a Functional, as of functional(model), got {type(model).__name__}")

    def loss_fn(
        params: Params, batch: Batch, carry: SupervisedCarry
    ) -> tuple[Loss | Tensor, SupervisedCarry, dict[str, Tensor]]:
        if not isinstance(carry, SupervisedCarry):
            raise TypeError(
                f"supervised: the carry must be a SupervisedCarry, got {type(carry).__name__}; start with "
                "supervised_carry(model, key): step.init(params, carry)"
            )
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            got = f"a dict with {', '.join(map(repr, batch))}" if isinstance(batch, dict) else type(batch).__name__
            raise TypeError(f"supervised: a batch must be a pair (inputs, targets), got {got}; see its documentation")
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
