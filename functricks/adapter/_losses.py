"""Losses as modules: class weights move with ``.to()``, and a criterion can be printed, saved and pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from functricks import losses
from functricks.types import Loss, Number

__all__ = ["FocalLoss", "InfoNCE", "LabelSmoothingCrossEntropy", "LossModule"]

Reduction = Literal["mean", "sum", "none"]
_REDUCTIONS = ("mean", "sum", "none")


class LossModule(nn.Module):
    """Make a module of a loss function, with PyTorch's ``reduction``.

    Classic: :class:`torch.nn.CrossEntropyLoss` and the others. ``"mean"`` divides by the weights, as there.

    Args:
        fn: from :mod:`functricks.losses`, or any function that returns a :class:`functricks.Loss`.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        arguments: of ``fn``, by name; each becomes an attribute. Tensors become buffers, which move with ``.to()`` and
            are in ``state_dict``, and an ``nn.Parameter`` (a learned temperature, say) becomes a parameter.

    ``criterion.loss(...)`` is the :class:`functricks.Loss` itself, with its weights: what :class:`Loop` needs.

    >>> import torch
    >>> criterion = LossModule(losses.cross_entropy, weight=torch.tensor([1.0, 3.0]), label_smoothing=0.1)
    >>> criterion
    LossModule(cross_entropy, weight=tensor of shape (2,), label_smoothing=0.1, reduction='mean')
    >>> criterion(torch.tensor([[0.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1]))
    tensor(0.3076)

    Raises ``ValueError`` for another reduction, and for an argument whose name a module already uses; ``TypeError``
    when ``fn`` does not return a ``Loss``.
    """

    def __init__(self, fn: Callable[..., Loss], reduction: Reduction = "mean", **arguments: Any) -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise ValueError(f"{type(self).__name__}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        self.fn, self.reduction = fn, reduction
        for name, value in arguments.items():
            if hasattr(self, name):
                raise ValueError(f"{type(self).__name__}: a module already has the attribute {name!r}; wrap fn")
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self._names = list(arguments)

    def loss(self, *inputs: Any, **more: Any) -> Loss:
        """Return the values and weights, not reduced."""
        loss = self.fn(*inputs, **{name: getattr(self, name) for name in self._names}, **more)
        if not isinstance(loss, Loss):
            raise TypeError(f"{type(self).__name__}: fn must return a functricks.Loss, got {type(loss).__name__}")
        return loss

    def forward(self, *inputs: Any, **more: Any) -> Tensor:
        loss = self.loss(*inputs, **more)
        if self.reduction == "none":
            return loss.values
        return loss.mean() if self.reduction == "mean" else loss.sum()

    def extra_repr(self) -> str:
        shown = [getattr(self.fn, "__name__", repr(self.fn))] if type(self) is LossModule else []
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                shown.append(f"{name}=tensor of shape {tuple(value.shape)}")
            elif value is not None:
                shown.append(f"{name}={value!r}")
        return ", ".join([*shown, f"reduction={self.reduction!r}"])


class LabelSmoothingCrossEntropy(LossModule):
    """Cross entropy against targets that keep ``1 - label_smoothing`` for the right class and spread the rest.

    Classic: ``nn.CrossEntropyLoss(label_smoothing=...)``, the same numbers; the usual recipe's own class counts ignored
    rows and divides by all. Functional: :func:`functricks.losses.cross_entropy`, which describes the arguments.
    Reference: Szegedy et al. 2016, arXiv:1512.00567.

    >>> import torch
    >>> LabelSmoothingCrossEntropy(0.1)(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]))
    tensor(0.3729)
    """

    def __init__(
        self,
        label_smoothing: Number = 0.1,
        *,
        weight: Tensor | None = None,
        ignore_index: int | None = -100,
        temperature: Number = 1.0,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            losses.cross_entropy,
            reduction,
            label_smoothing=label_smoothing,
            weight=weight,
            ignore_index=ignore_index,
            temperature=temperature,
        )


class FocalLoss(LossModule):
    """Cross entropy that pays less attention to what is already right, for rare classes.

    Classic: the usual recipe, ``(1 - p) ** gamma * cross_entropy``, whose gradient is NaN at p = 1 for gamma < 1.
    Functional: :func:`functricks.losses.focal_loss`, which describes the arguments. Reference: Lin et al. 2017,
    arXiv:1708.02002.

    >>> import torch
    >>> FocalLoss(2.0)(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]))
    tensor(0.0109)
    """

    def __init__(
        self,
        gamma: Number = 2.0,
        *,
        weight: Tensor | None = None,
        ignore_index: int | None = -100,
        label_smoothing: Number = 0.0,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            losses.focal_loss,
            reduction,
            gamma=gamma,
            weight=weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )


class InfoNCE(LossModule):
    """Pull each query towards its key and away from the others: ``criterion(queries, keys, labels=, mask=)``.

    Classic: ``F.cross_entropy(F.normalize(q) @ F.normalize(k).T / temperature, arange(N))``. Functional:
    :func:`functricks.losses.info_nce`, which describes the arguments. An ``nn.Parameter`` as ``temperature`` is
    learned. Reference: van den Oord et al. 2018, arXiv:1807.03748.

    >>> import torch
    >>> InfoNCE(0.5)(torch.eye(2), torch.eye(2))
    tensor(0.1269)
    """

    def __init__(self, temperature: Number = 0.1, *, normalize: bool = True, reduction: Reduction = "mean") -> None:
        super().__init__(losses.info_nce, reduction, temperature=temperature, normalize=normalize)
