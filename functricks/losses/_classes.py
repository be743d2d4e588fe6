"""Losses over classes: softmax, cross entropy with all that usually bends it, and its focal form.

One pipeline serves them all: overwrite the ignored rows, divide by the temperature, take the logarithms of the
probabilities, (focal) damp them, and weigh them with the targets.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from functricks import tree
from functricks.losses._boundary import (
    MINUS_INF,
    check_floating,
    check_tensor,
    check_within,
    finish,
    hyper,
    is_concrete,
    is_number,
    narrow,
    positive,
    warn_if_probabilities,
)
from functricks.types import Loss, Number

WeightMode = Literal["class", "row"]

# Stands for log(0) where a finite number is needed: exp() of it is 0, and 0 times it is 0.
_FLOOR = -1e30


# --- softmax ---------------------------------------------------------------------------------------------------------


def softmax(input: Tensor, dim: int = -1, *, temperature: Number = 1.0) -> Tensor:
    r"""Turn logits into probabilities; a high temperature flattens them, a low one sharpens them.

    .. math:: p_i = \frac{\exp(x_i / T)}{\sum_j \exp(x_j / T)}

    Classic: :func:`torch.nn.functional.softmax` of ``input / temperature``.
    Reference: Bridle 1990; the temperature: Hinton et al. 2015, arXiv:1503.02531; Guo et al. 2017, arXiv:1706.04599.

    Args:
        input: logits :math:`x`; ``-inf`` forbids a class, and keeps out of the derivative by the temperature.
        dim: the class axis.
        temperature: :math:`T > 0`; may be a tensor, batched by ``vmap`` or learned.

    Half precision is divided and normalised in float32, and comes back in its own dtype, but for under
    ``torch.autocast``, where it stays float32. Raises ``ValueError`` for a temperature that is not positive.

    >>> import torch
    >>> softmax(torch.tensor([0.0, 1.0]), temperature=0.01)
    tensor([3.7835e-44, 1.0000e+00])
    """
    return narrow(F.softmax(_scaled("softmax", input, temperature), dim), input.dtype)


def log_softmax(input: Tensor, dim: int = -1, *, temperature: Number = 1.0) -> Tensor:
    r"""Turn logits into log-probabilities, without the underflow of ``softmax(...).log()``.

    .. math:: \log p_i = x_i / T - \log \sum_j \exp(x_j / T)

    Classic: :func:`torch.nn.functional.log_softmax` of ``input / temperature``.
    Reference and arguments as :func:`softmax`.

    >>> import torch
    >>> log_softmax(torch.tensor([0.0, 1.0]), temperature=0.01)
    tensor([-100.,    0.])
    """
    return narrow(F.log_softmax(_scaled("log_softmax", input, temperature), dim), input.dtype)


def _scaled(name: str, logits: Tensor, temperature: Number) -> Tensor:
    """Return logits / temperature in the compute dtype."""
    check_floating(name, "input", logits)
    wide = logits.to(tree.compute_dtype(logits.dtype))
    return _divide(wide, positive(name, "temperature", temperature, wide.dtype))


def _log_softmax(x: Tensor, axis: int) -> Tensor:
    """Take the logarithms of the probabilities; in eager lanes with the classes ahead of the rows.

    The kernel for a short last axis does a row at a time, and takes three times as long as the one that does many rows.
    """
    if tree.lanes() is not None and x.ndim == 2 and axis == 1 and x.shape[1] <= 64:
        return F.log_softmax(x.t(), 0).t()
    return F.log_softmax(x, axis)


def _divide(logits: Tensor, temperature: Number) -> Tensor:
    if is_number(temperature, 1):
        return logits
    if not isinstance(temperature, Tensor):
        return logits / temperature
    # -inf / T has the derivative inf / T**2, which times the zero that reaches it would be NaN for all of T
    forbidden = logits == MINUS_INF
    return (logits.masked_fill(forbidden, 0) / temperature).masked_fill(forbidden, MINUS_INF)


# --- the losses ------------------------------------------------------------------------------------------------------


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    label_smoothing: Number = 0.0,
    temperature: Number = 1.0,
    weight_mode: WeightMode = "class",
) -> Loss:
    r"""Score class logits against class indices or class probabilities.

    With :math:`\log p = \mathrm{log\_softmax}(x / T)`, :math:`C` classes and the smoothed target
    :math:`q = (1 - \varepsilon)\, t + \varepsilon / C`, where :math:`t` is one-hot for an index,

    .. math:: v = -\sum_c w_c \, q_c \log p_c, \qquad \text{weight} = w_y \text{ for an index } y,\ 1 \text{ for
        probabilities}

    Classic: :func:`torch.nn.functional.cross_entropy`, for every combination of its arguments.
    Reference: label smoothing: Szegedy et al. 2016, arXiv:1512.00567; temperature: Hinton et al. 2015,
    arXiv:1503.02531.

    Args:
        logits: :math:`x`, shaped ``(N, C)``, ``(N, C, d1, ...)`` or, for one example, ``(C,)``. ``-inf`` forbids a
            class.
        targets: class indices, shaped like the logits without the class axis; or probabilities, shaped like the logits.
        weight: :math:`w`, one factor a class, shaped ``(C,)``.
        ignore_index: rows with this target weigh 0, whatever is in them. None ignores nothing and is cheaper. Only for
            indices: probabilities with an ``ignore_index >= 0`` raise, as in PyTorch.
        label_smoothing: :math:`\varepsilon` in [0, 1]. The right class keeps :math:`1 - \varepsilon + \varepsilon / C`.
        temperature: :math:`T > 0`.
        weight_mode: ``"class"`` is PyTorch's rule, which weights every term of the smoothed target by its own class,
            and so moves the optimum: for weights [1, 100] and smoothing 0.1, target 0 is best predicted with p = 0.16.
            ``"row"`` weights the whole row by the class of its target, :math:`w_y \sum_c q_c \log p_c` (for
            probabilities :math:`\sum_c t_c w_c`), which leaves the optimum at :math:`q`: p = 0.95.

    A target without mass on a class costs nothing there, even if the class is forbidden; PyTorch gives NaN for
    probabilities of 0 on ``-inf``. If every row is ignored, ``.mean()`` is NaN and ``.sum()`` is 0, as in PyTorch.

    Raises ``ValueError`` for shapes that do not fit, integer targets shaped like the logits (one-hot targets must be
    floating point), a ``weight`` of the wrong length, and a concrete index out of range. Warns where the logits look
    like probabilities: softmax is applied here.

    >>> import torch
    >>> logits = torch.tensor([[1.0, 2.0], [3.0, 0.4]])
    >>> cross_entropy(logits, torch.tensor([-100, 1]), label_smoothing=0.1)
    Loss(values=tensor([0.0000, 2.5416]), weights=tensor([0., 1.]))
    """
    return _class_loss(
        "cross_entropy", logits, targets, weight, ignore_index, label_smoothing, weight_mode, temperature=temperature
    )


def focal_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    gamma: Number = 2.0,
    weight: Tensor | None = None,
    ignore_index: int | None = -100,
    label_smoothing: Number = 0.0,
    weight_mode: WeightMode = "class",
) -> Loss:
    r"""Cross entropy that pays less attention to what is already right, for rare classes.

    .. math:: v = -\sum_c w_c \, q_c \, (1 - p_c)^\gamma \log p_c, \qquad \text{weight} = w_y

    Classic: none in PyTorch; the usual recipe is ``(1 - p_t) ** gamma * cross_entropy(..., reduction="none")``, whose
    mean counts ignored rows and whose gradient is NaN where :math:`p_t = 1` and :math:`\gamma < 1`.
    Reference: Lin et al. 2017, arXiv:1708.02002. Their :math:`\alpha` is ``weight`` here, one factor a class.

    Args:
        gamma: :math:`\gamma \ge 0`. At 0 this is :func:`cross_entropy` exactly. Usual: 0.5 to 5.
        logits, targets, weight, ignore_index, label_smoothing, weight_mode: as in :func:`cross_entropy`.

    :math:`\log (1 - p_c)` is computed from the other classes, not by subtraction: value, first and second derivative
    are finite for every finite logit and every :math:`\gamma \ge 0`. A forbidden class that is right costs ``inf``.
    Errors as in :func:`cross_entropy`.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    >>> focal_loss(logits, torch.tensor([0, 1, -100])).mean()
    tensor(0.0550)
    """
    return _class_loss("focal_loss", logits, targets, weight, ignore_index, label_smoothing, weight_mode, gamma=gamma)


def nll_loss(input: Tensor, target: Tensor, *, weight: Tensor | None = None, ignore_index: int | None = -100) -> Loss:
    r"""Pick the negative log-probability of the right class; with :func:`log_softmax` it makes :func:`cross_entropy`.

    .. math:: v = -w_y \, x_y, \qquad \text{weight} = w_y

    Classic: :func:`torch.nn.functional.nll_loss`.
    Reference: Bishop 2006, Pattern Recognition and Machine Learning, section 4.3.4.

    Args:
        input: log-probabilities, shaped ``(N, C)``, ``(N, C, d1, ...)`` or ``(C,)``.
        target: class indices, shaped like the input without the class axis.
        weight: one factor a class, shaped ``(C,)``.
        ignore_index: rows with this target weigh 0; None ignores nothing and is cheaper.

    Errors as in :func:`cross_entropy`; warns where ``input`` holds probabilities.

    >>> import torch
    >>> nll_loss(torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log(), torch.tensor([1, 0])).values
    tensor([0.2877, 0.6931])
    """
    name = "nll_loss"
    axis = _check_classes(name, "input", input, target, weight, ignore_index)
    if target.is_floating_point():
        raise ValueError(f"{name}: target must be class indices, got {target.dtype}; cross_entropy takes probabilities")
    warn_if_probabilities(name, input, "give their logarithms")
    wide = input.to(tree.compute_dtype(input.dtype))
    rows = _rows(target, ignore_index)
    log_p = wide if rows.ignored is None else wide.masked_fill(rows.ignored.unsqueeze(axis), 0)
    weight = None if weight is None else weight.to(wide.dtype)
    return finish(*_of_indices(log_p, rows, weight, 0.0, "class", axis), input.dtype)


# --- the pipeline ----------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Class indices that are safe to gather with, and which rows to leave out (None: none)."""

    classes: Tensor
    ignored: Tensor | None


def _class_loss(
    name: str,
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    ignore_index: int | None,
    label_smoothing: Number,
    weight_mode: WeightMode,
    *,
    temperature: Number = 1.0,
    gamma: Number = 0.0,
) -> Loss:
    axis = _check_classes(name, "logits", logits, targets, weight, ignore_index)
    if weight_mode not in ("class", "row"):
        raise ValueError(f"{name}: weight_mode must be 'class' or 'row', got {weight_mode!r}")
    warn_if_probabilities(name, logits, "give logits, softmax is applied here", stacklevel=4)
    x = logits.to(tree.compute_dtype(logits.dtype))
    temperature = positive(name, "temperature", temperature, x.dtype)
    gamma = hyper(name, "gamma", gamma, x.dtype)
    smoothing = hyper(name, "label_smoothing", label_smoothing, x.dtype, high=1.0)
    weight = None if weight is None else weight.to(x.dtype)

    rows = None if targets.is_floating_point() else _rows(targets, ignore_index)
    if rows is not None and rows.ignored is not None:
        x = x.masked_fill(rows.ignored.unsqueeze(axis), 0)  # before log_softmax: its derivative spreads a NaN
    log_p = _log_softmax(_divide(x, temperature), axis)
    if not is_number(gamma, 0):
        log_p = _damp(log_p, gamma, axis)
    if rows is None:
        return finish(
            *_of_probabilities(log_p, targets.to(x.dtype), weight, smoothing, weight_mode, axis), logits.dtype
        )
    return finish(*_of_indices(log_p, rows, weight, smoothing, weight_mode, axis), logits.dtype)


def _of_indices(
    log_p: Tensor, rows: Rows, weight: Tensor | None, smoothing: Number, mode: WeightMode, axis: int
) -> tuple[Tensor, Tensor]:
    """Return the values and the weights for class indices."""
    values = _picked(log_p, rows.classes, axis)
    weights = torch.ones_like(values)
    if weight is not None:
        weights = weight.gather(0, rows.classes.reshape(-1)).reshape(rows.classes.shape)
        values = _times(weights, values)
    if not is_number(smoothing, 0):
        spread = _spread(log_p, weight, weights, mode, axis)
        values = (1 - smoothing) * values + _times(smoothing, spread)
    if rows.ignored is None:
        return values, weights
    return values.masked_fill(rows.ignored, 0), weights.masked_fill(rows.ignored, 0)


def _picked(log_p: Tensor, classes: Tensor, axis: int) -> Tensor:
    """Return the cost of the right class, for classes in range: in one kernel where it is the faster way."""
    if log_p.ndim == 2 and is_concrete(log_p, classes):
        return F.nll_loss(log_p, classes, reduction="none")
    return -log_p.gather(axis, classes.unsqueeze(axis)).squeeze(axis)


def _spread(log_p: Tensor, weight: Tensor | None, weights: Tensor, mode: WeightMode, axis: int) -> Tensor:
    """Return the mean cost of all classes: the part of a smoothed target that lies on every class alike."""
    if weight is None:
        return -log_p.mean(axis)
    if mode == "row":
        return _times(weights, -log_p.mean(axis))
    return -_times(_along(weight, log_p, axis), log_p).mean(axis)


def _of_probabilities(
    log_p: Tensor, targets: Tensor, weight: Tensor | None, smoothing: Number, mode: WeightMode, axis: int
) -> tuple[Tensor, Tensor]:
    """Return the values and the weights for class probabilities: each row counts as one, as in PyTorch."""
    smoothed = targets
    if not is_number(smoothing, 0):
        smoothed = targets * (1 - smoothing) + smoothing / log_p.shape[axis]
    if weight is not None and mode == "class":
        smoothed = smoothed * _along(weight, log_p, axis)
    values = -_times(smoothed, log_p).sum(axis)
    if weight is not None and mode == "row":
        values = _times((targets * _along(weight, log_p, axis)).sum(axis), values)
    return values, torch.ones_like(values)


def _damp(log_p: Tensor, gamma: Number, axis: int) -> Tensor:
    """Return (1 - p)**gamma * log p, finite with its derivatives; -inf for a class that is forbidden."""
    impossible = log_p == MINUS_INF
    log_p = log_p.clamp(min=_FLOOR)
    # At most one class has p > exp(-0.5) = 0.61. There 1 - p would cancel, so it is summed from the other classes;
    # everywhere else it is safe. The fill of each branch keeps the other branch's elements finite.
    top = log_p > -0.5
    others = log_p.masked_fill(top, _FLOOR).logsumexp(axis, keepdim=True)
    log_rest = torch.where(top, others, torch.log1p(-log_p.masked_fill(top, -1).exp()))
    return ((gamma * log_rest).exp() * log_p).masked_fill(impossible, MINUS_INF)


def _times(factor: Number, cost: Tensor) -> Tensor:
    """Return factor * cost with 0 * inf = 0; where the cost is finite, the derivative by the factor is the cost."""
    if not isinstance(factor, Tensor):
        return factor * cost
    return factor * cost.masked_fill(cost.isinf() & (factor == 0), 0)


def _along(weight: Tensor, like: Tensor, axis: int) -> Tensor:
    """Shape one weight a class so that it lies along the class axis."""
    return weight.reshape(-1, *[1] * (like.ndim - 1 - axis))


def _rows(targets: Tensor, ignore_index: int | None) -> Rows:
    index = targets.long()  # before comparing: -100 would wrap around in uint8
    if ignore_index is None:
        return Rows(index, None)
    ignored = index == ignore_index
    return Rows(index.masked_fill(ignored, 0), ignored)


def _check_classes(
    name: str, what: str, logits: Tensor, targets: Tensor, weight: Tensor | None, ignore_index: int | None
) -> int:
    """Check the shapes, dtypes and indices; return the class axis."""
    check_floating(name, what, logits)
    check_tensor(name, "targets", targets)
    if weight is not None:
        check_tensor(name, "weight", weight)
    if logits.ndim == 0:
        raise ValueError(f"{name}: {what} must have a class axis, got a 0-d tensor")
    axis = min(1, logits.ndim - 1)
    classes = logits.shape[axis]
    if weight is not None and tuple(weight.shape) != (classes,):
        raise ValueError(f"{name}: weight must hold one number a class, shape ({classes},), got {tuple(weight.shape)}")
    if targets.is_floating_point():
        _check_probabilities(name, what, logits, targets, ignore_index)
    else:
        _check_indices(name, what, logits, targets, ignore_index, axis)
    return axis


def _check_probabilities(name: str, what: str, logits: Tensor, targets: Tensor, ignore_index: int | None) -> None:
    if targets.shape != logits.shape:
        raise ValueError(
            f"{name}: class probabilities must have the shape of the {what}, {tuple(logits.shape)}, "
            f"got {tuple(targets.shape)}; class indices must be integers"
        )
    if ignore_index is not None and ignore_index >= 0:
        raise ValueError(f"{name}: ignore_index={ignore_index} has no meaning for class probabilities")


def _check_indices(name: str, what: str, logits: Tensor, targets: Tensor, ignore_index: int | None, axis: int) -> None:
    if targets.dtype == torch.bool or targets.is_complex():
        raise ValueError(f"{name}: targets must be class indices or probabilities, got {targets.dtype}")
    rows = (*logits.shape[:axis], *logits.shape[axis + 1 :])
    if tuple(targets.shape) != rows:
        hint = "; one-hot targets must be floating point" if targets.shape == logits.shape else ""
        raise ValueError(
            f"{name}: class indices for {what} of shape {tuple(logits.shape)} must have the shape {rows}, "
            f"got {tuple(targets.shape)}{hint}"
        )
    check_within(name, "targets", targets.long(), 0, logits.shape[axis] - 1, ignore_index)
