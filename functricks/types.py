"""The shapes that functions here take and return: plain NamedTuples of tensors and the callables between them.

Every technique is one of four kinds of function, and each kind composes with itself:

- a ``LossFn`` turns parameters and a batch into a :class:`Loss`;
- a ``GradFn`` turns parameters and a batch into a :class:`Gradient`;
- a :class:`Transform` turns gradients into updates, with memory;
- a ``Schedule`` turns a step into a number.

NamedTuples, because ``torch.func`` walks them and ``vmap`` refuses anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "Batch",
    "Carry",
    "Empty",
    "GradFn",
    "Gradient",
    "Grads",
    "Loss",
    "LossFn",
    "Number",
    "Params",
    "Schedule",
    "State",
    "StepInfo",
    "TrainState",
    "TrainStep",
    "Transform",
    "Updates",
]

Params: TypeAlias = Any  # a pytree of tensors
Grads: TypeAlias = Any  # the structure of Params
Updates: TypeAlias = Any  # the structure of Params; what is added to the parameters
Batch: TypeAlias = Any  # a pytree of tensors with one leading axis
Carry: TypeAlias = Any  # what a classic loop mutates: buffers, the random key
State: TypeAlias = Any  # a pytree of tensors

Number: TypeAlias = float | Tensor
Schedule: TypeAlias = Callable[[int | Tensor], Tensor]  # step -> 0-d float64
LossFn: TypeAlias = Callable[..., Any]  # (params, batch[, carry]) -> Loss | Tensor, see functricks.gradient


class Empty(NamedTuple):
    """The state of a transform without memory: no leaves, and equal to ``()``."""


class Loss(NamedTuple):
    r"""Per-element loss values and the weight that each carries in the mean.

    ``values`` already hold their factor (class weight, mask); ``weights`` say how much each counts in the denominator:

    .. math:: \mathrm{mean} = \frac{\sum_i v_i}{\sum_i w_i}, \qquad \mathrm{sum} = \sum_i v_i

    So the mean of a whole batch is the sum of its parts' numerators over the sum of their weights, however it is split.

    Classic: ``reduction="mean" | "sum" | "none"`` are ``.mean()``, ``.sum()`` and ``.values``.

    Args:
        values: the loss of every element, of any shape.
        weights: the same shape; what is not float32 or wider (a mask, half precision) is summed as float32.

    Where both are added up, unlike shapes raise ``ValueError``.

    >>> loss = Loss(torch.tensor([1.0, 6.0]), torch.tensor([1.0, 3.0]))
    >>> loss.mean()
    tensor(1.7500)
    """

    values: Tensor
    weights: Tensor

    def mean(self) -> Tensor:
        """Return the weighted mean; NaN where the weights sum to zero, as in PyTorch.

        In the dtype of ``values``, float32 where that is none of floating point (hits and misses, say).
        """
        wide = torch.promote_types(self.values.dtype, torch.float32)
        total = weight_of(self).to(wide)
        mean = (self.values.sum(dtype=wide) / total).masked_fill(total == 0, float("nan"))
        return mean.to(self.values.dtype) if self.values.is_floating_point() else mean

    def sum(self) -> Tensor:
        """Return the sum of the values; the weights play no part."""
        return self.values.sum()


def weight_of(loss: Loss) -> Tensor:
    """Return the sum of a loss's weights, float32 or wider: in bfloat16, 257 rows would count as 256."""
    if loss.values.shape != loss.weights.shape:
        raise ValueError(
            f"Loss: values and weights must have the same shape, got {tuple(loss.values.shape)} and "
            f"{tuple(loss.weights.shape)}; expand the weights"
        )
    return loss.weights.sum(dtype=torch.promote_types(loss.weights.dtype, torch.float32))


class Gradient(NamedTuple):
    """What a ``GradFn`` returns: the gradient of the mean loss, and all that is needed to add it to others.

    ``grads`` has the structure of the parameters; ``loss`` is the mean loss and ``weight`` how much it counts, so two
    gradients combine as ``(g1 * w1 + g2 * w2) / (w1 + w2)``. ``carry`` is the new carry, ``metrics`` a dict of 0-d
    tensors.
    """

    grads: Grads
    loss: Tensor
    weight: Tensor
    carry: Carry
    metrics: dict[str, Tensor]


class GradFn(Protocol):
    """``(params, batch, carry=(), *, scale=None) -> Gradient``."""

    def __call__(self, params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        """Compute the gradient."""
        ...


class Transform(NamedTuple):
    """A gradient transformation: ``init(params) -> state`` and ``update(grads, state, params) -> (updates, state)``."""

    init: Callable[[Params], State]
    update: Callable[[Grads, State, Params], tuple[Updates, State]]


class TrainState(NamedTuple):
    """Everything that a run remembers, as one pytree of tensors.

    ``step`` counts the applied updates. ``loss_scale`` is there with a loss scale, ``skips`` (the skipped steps in a
    row) with ``train_step(freeze_nonfinite=)``.
    """

    step: Tensor
    params: Params
    optimizer: State
    carry: Carry = ()
    loss_scale: State = ()
    skips: State = ()


class StepInfo(NamedTuple):
    """What one training step reports.

    The mean loss and its weight, the gradient's norm before clipping (float64), whether the step was applied, and the
    metrics of the loss function.
    """

    loss: Tensor
    weight: Tensor
    grad_norm: Tensor
    applied: Tensor
    metrics: dict[str, Tensor]


class TrainStep(NamedTuple):
    """An atomic step: ``init(params, carry=()) -> TrainState`` and ``update(state, batch) -> (state, StepInfo)``."""

    init: Callable[..., TrainState]
    update: Callable[[TrainState, Batch], tuple[TrainState, StepInfo]]
