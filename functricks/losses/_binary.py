"""Losses of independent yes/no targets: binary cross entropy, from probabilities or logits, and its focal form.

Targets are probabilities of "yes", of any numeric dtype. Two ways to the same loss are not equally good:

- from **logits**, the loss of a confidently wrong answer is the logit and its gradient is one, however large;
- from **probabilities**, a sigmoid that has rounded to 0 or 1 has forgotten the logit: PyTorch caps the value at 100
  and the gradient through the sigmoid vanishes, so the worst errors are never corrected.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from functricks import tree
from functricks.losses._boundary import (
    check_broadcasts,
    check_floating,
    check_same_shape,
    check_within,
    finish,
    hyper,
    is_number,
)
from functricks.types import Loss, Number

_ROUNDING = 1e-4  # by how much a soft target may miss [0, 1]


def binary_cross_entropy(
    input: Tensor, target: Tensor, *, weight: Tensor | None = None, ignore_index: float | None = -100
) -> Loss:
    r"""Score probabilities of "yes" against yes/no targets, exactly as PyTorch does, clamps included.

    .. math:: v_i = -w_i \left( t_i \log p_i + (1 - t_i) \log (1 - p_i) \right), \qquad \text{weight}_i = 1

    Prefer :func:`binary_cross_entropy_with_logits`. Both logarithms are clamped at -100 and the derivative's
    denominator at 1e-12, so after a saturated sigmoid the loss stops growing and its gradient is zero: for a target of
    1 and a logit of -200 this loss gives 100 with gradient 0, the other 200 with gradient -1.

    Classic: :func:`torch.nn.functional.binary_cross_entropy`; values are equal to the bit in float32 and float64.
    Reference: Bishop 2006, Pattern Recognition and Machine Learning, section 4.3.2.

    Args:
        input: probabilities in [0, 1], of any shape.
        target: the same shape, in [0, 1]; soft targets are fine.
        weight: a factor that broadcasts to the input; it leaves the denominator of the mean alone.
        ignore_index: elements with this target weigh 0; None ignores nothing and is cheaper.

    Raises ``ValueError`` where shapes differ, or a concrete probability or target is outside [0, 1].

    >>> import torch
    >>> binary_cross_entropy(torch.tensor([0.5, 0.0]), torch.tensor([1.0, 1.0])).values
    tensor([  0.6931, 100.0000])
    """
    name = "binary_cross_entropy"
    p, t, ignored = _prepare(name, "input", input, "target", target, ignore_index, fill=0.5)
    check_within(name, "input", p, 0, 1, None, hint="; logits belong in binary_cross_entropy_with_logits")
    values = F.binary_cross_entropy(p, t, reduction="none")
    if weight is not None:
        check_broadcasts(name, "weight", weight, input)
        values = values * weight.to(p.dtype)  # outside, because torch does not differentiate by the weight
    return _weigh(values, ignored, input.dtype)


def binary_cross_entropy_with_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    pos_weight: Number | None = None,
    ignore_index: float | None = -100,
) -> Loss:
    r"""Score the logits of yes/no answers; exact however confident and wrong they are.

    .. math:: v_i = -w_i \left( c \, t_i \log \sigma(x_i) + (1 - t_i) \log \sigma(-x_i) \right),
        \quad \text{weight}_i = 1

    Classic: :func:`torch.nn.functional.binary_cross_entropy_with_logits`.
    Reference: Bishop 2006, Pattern Recognition and Machine Learning, section 4.3.2.

    Args:
        logits: :math:`x` of any shape.
        targets: the same shape, in [0, 1]; soft targets are fine.
        weight: a factor that broadcasts to the logits; it leaves the denominator of the mean alone. May be learned.
        pos_weight: :math:`c \ge 0`, the factor of the positive part; a number, or a tensor that broadcasts to the
            logits. May be learned.
        ignore_index: elements with this target weigh 0; None ignores nothing and is cheaper.

    Nothing is clamped: a logit of -200 against a target of 1 costs 200, with gradient -1.

    Raises ``ValueError`` where shapes differ, a number for ``pos_weight`` is negative or not finite, or a concrete
    target is outside [0, 1] (labels of -1 and 1, for example).

    >>> import torch
    >>> binary_cross_entropy_with_logits(torch.tensor([0.0, -200.0]), torch.tensor([1.0, 1.0])).values
    tensor([  0.6931, 200.0000])
    """
    name = "binary_cross_entropy_with_logits"
    x, t, ignored = _prepare(name, "logits", logits, "targets", targets, ignore_index)
    if pos_weight is None:
        values = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    else:
        # written out, in torch's order: its own function does not differentiate by the two weights
        factor = _pos_weight(name, pos_weight, x)
        values = (1 - t) * x - ((factor - 1) * t + 1) * F.logsigmoid(x)
    if weight is not None:
        check_broadcasts(name, "weight", weight, logits)
        values = values * weight.to(x.dtype)
    return _weigh(values, ignored, logits.dtype)


def sigmoid_focal_loss(
    logits: Tensor,
    targets: Tensor,
    *,
    gamma: Number = 2.0,
    alpha: Number | None = 0.25,
    ignore_index: float | None = -100,
) -> Loss:
    r"""Binary cross entropy that pays less attention to what is already right, for rare positives.

    .. math:: v = -\alpha \, t \, (1 - p)^\gamma \log p - (1 - \alpha) (1 - t) \, p^\gamma \log (1 - p),
        \qquad p = \sigma(x), \quad \text{weight} = 1

    Classic: ``torchvision.ops.sigmoid_focal_loss``, equal for targets of 0 and 1. For a soft target this is the
    expected loss, linear in the target as binary cross entropy is; torchvision's formula mixes the two probabilities
    instead.
    Reference: Lin et al. 2017, arXiv:1708.02002.

    Args:
        logits: :math:`x` of any shape.
        targets: the same shape, in [0, 1].
        gamma: :math:`\gamma \ge 0`; 0 is binary cross entropy. Usual: 0.5 to 5.
        alpha: :math:`\alpha` in [0, 1], the factor of the positives; the negatives get :math:`1 - \alpha`, so 0.5
            halves the loss. None leaves both factors out.
        ignore_index: elements with this target weigh 0; None ignores nothing and is cheaper.

    The powers are taken of logarithms: :math:`(1 - p)^\gamma = \exp(\gamma \log \sigma(-x))`. So value, first and
    second derivative are finite for every finite logit, :math:`\gamma < 1` included, where ``(1 - p) ** gamma`` gives
    NaN.

    Raises ``ValueError`` where shapes differ, or a concrete target is outside [0, 1].

    >>> import torch
    >>> sigmoid_focal_loss(torch.tensor([2.0, 100.0]), torch.tensor([1.0, 1.0]), gamma=0.5, alpha=None).values
    tensor([0.0438, 0.0000])
    """
    name = "sigmoid_focal_loss"
    x, t, ignored = _prepare(name, "logits", logits, "targets", targets, ignore_index)
    gamma = hyper(name, "gamma", gamma, x.dtype)
    if alpha is None and is_number(gamma, 0):
        return _weigh(F.binary_cross_entropy_with_logits(x, t, reduction="none"), ignored, logits.dtype)
    log_yes, log_no = F.logsigmoid(x), F.logsigmoid(-x)
    yes = -t * (gamma * log_no).exp() * log_yes
    no = (t - 1) * (gamma * log_yes).exp() * log_no
    if alpha is not None:
        alpha = hyper(name, "alpha", alpha, x.dtype, high=1.0)
        yes, no = alpha * yes, (1 - alpha) * no
    return _weigh(yes + no, ignored, logits.dtype)


def _prepare(
    name: str, a: str, input: Tensor, b: str, target: Tensor, ignore: float | None, fill: float = 0.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check both, widen them, and overwrite the ignored elements, so that nothing in them is computed with."""
    check_floating(name, a, input)
    check_same_shape(name, a, input, b, target)
    check_within(name, b, target, 0, 1, ignore, slack=_ROUNDING)
    dtype = tree.compute_dtype(input.dtype)
    x, t = input.to(dtype), target.to(dtype)
    if ignore is None:
        return x, t, None
    ignored = t == ignore
    return x.masked_fill(ignored, fill), t.masked_fill(ignored, 0), ignored


def _pos_weight(name: str, value: Any, like: Tensor) -> Tensor:
    """Check the factor of the positive part, and return it as a tensor that broadcasts to ``like``."""
    if not isinstance(value, Tensor):
        if isinstance(value, (list, tuple)):
            raise TypeError(f"{name}: pos_weight must be a number or a tensor, got {type(value).__name__}")
        if not 0 <= value < math.inf:  # NaN is not
            raise ValueError(f"{name}: pos_weight must be finite and >= 0, got {value!r}")
    factor = torch.as_tensor(value, device=like.device).to(like.dtype)
    check_broadcasts(name, "pos_weight", factor, like)
    return factor


def _weigh(values: Tensor, ignored: Tensor | None, dtype: torch.dtype) -> Loss:
    weights = torch.ones_like(values)
    if ignored is not None:
        values, weights = values.masked_fill(ignored, 0), weights.masked_fill(ignored, 0)
    return finish(values, weights, dtype)
