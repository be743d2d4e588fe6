"""What a classifier is measured by, as pure functions without data-dependent shapes, which run under ``vmap``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["calibration_gaps", "correct", "expected_calibration_error", "negative_log_likelihood"]

BINS = 15


def correct(logits: Tensor, targets: Tensor) -> Tensor:
    """Return 1 for every row whose largest logit is that of its target, else 0.

    >>> correct(torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.tensor([1, 1]))
    tensor([1., 0.])
    """
    return (logits.argmax(-1) == targets).to(logits.dtype)


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    r"""Return :math:`-\log p_y` of every row, in nats.

    >>> negative_log_likelihood(torch.zeros(1, 2), torch.tensor([0]))
    tensor([0.6931])
    """
    return -F.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]


def calibration_gaps(logits: Tensor, targets: Tensor, bins: int = BINS) -> Tensor:
    r"""Return, for every bin of confidence, the sum of (right or not, minus confidence) over its rows.

    A row with confidence :math:`p`, the largest probability, lies in bin :math:`m` where :math:`(m - 1)/M < p \le m/M`.
    The sums of parts of the data add up to those of the whole.

    >>> calibration_gaps(torch.tensor([[0.0, 0.0]]), torch.tensor([0]), bins=4)
    tensor([0.0000, 0.5000, 0.0000, 0.0000])
    """
    confidence = F.softmax(logits, -1).amax(-1)
    own = (confidence * bins).ceil().clamp(1, bins) - 1
    member = own[:, None] == torch.arange(bins, device=logits.device)
    return ((correct(logits, targets) - confidence)[:, None] * member).sum(0)


def expected_calibration_error(gaps: Tensor, count: int) -> Tensor:
    r"""Return the expected calibration error from :func:`calibration_gaps` over ``count`` rows.

    .. math:: \mathrm{ECE} = \sum_m \frac{|B_m|}{n} \left| \mathrm{acc}(B_m) - \mathrm{conf}(B_m) \right|

    Reference: Guo et al. 2017, arXiv:1706.04599, with 15 bins of equal width.

    >>> expected_calibration_error(torch.tensor([0.5, -1.0]), 4)
    tensor(0.3750)
    """
    return gaps.abs().sum() / count
