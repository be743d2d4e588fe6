"""Losses: what goes wrong in the usual recipes."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from functricks import (
    losses,
)
from functricks.types import Loss
from parity.faults.registry import fault, show, slope


@fault(
    "label smoothing",
    "add a uniform term by hand, averaged over all rows",
    "padding has a say: the loss moves when only the logits of ignored rows do",
    "ignored rows are taken out before anything is computed",
)
def smoothing_of_ignored_rows() -> str:
    targets = torch.tensor([-100, 1])

    def usual(logits: Tensor) -> Tensor:
        log_p = F.log_softmax(logits, 1)
        return 0.9 * F.nll_loss(log_p, targets) + 0.1 * -log_p.mean(1).mean()

    before, after = torch.tensor([[1.0, 2.0], [3.0, 0.4]]), torch.tensor([[9.0, -9.0], [3.0, 0.4]])
    ours = [losses.cross_entropy(x, targets, label_smoothing=0.1).mean() for x in (before, after)]
    return f"{show(usual(before))} becomes {show(usual(after))}; here {show(ours[0])} stays {show(ours[1])}"


@fault(
    "label smoothing",
    "take 1 − ε for the new target",
    "the uniform part falls on the right class too: its target is 1 − ε + ε/C",
    "PyTorch's rule, stated in the docstring",
)
def smoothed_target() -> str:
    target = losses.cross_entropy  # the gradient at logits of zero is 1/C - target
    found = 0.2 - slope(lambda x: target(x, torch.tensor([0]), label_smoothing=0.1).mean(), torch.zeros(1, 5))[0, 0]
    return f"{show(found)} for ε = 0.1 and 5 classes, not {show(1 - 0.1)}"


@fault(
    "label smoothing with class weights",
    "`cross_entropy(weight=, label_smoothing=)`",
    "each term of the smoothed target is weighted by its own class, so the optimum is no longer the smoothed target",
    'PyTorch\'s rule by default; `weight_mode="row"` keeps the optimum',
)
def weighted_optimum() -> str:
    p = torch.linspace(0.001, 0.999, 9981, dtype=torch.float64)
    logits = torch.stack([p, 1 - p], 1).log()
    targets, weight = torch.zeros(len(p), dtype=torch.int64), torch.tensor([1.0, 100.0], dtype=torch.float64)
    usual = F.cross_entropy(logits, targets, weight, reduction="none", label_smoothing=0.1)
    ours = losses.cross_entropy(logits, targets, weight=weight, label_smoothing=0.1, weight_mode="row").values
    return f"best p for target 0 is {p[usual.argmin()]:.2f}, with `row` {p[ours.argmin()]:.2f}"


@fault(
    "class weights",
    "average the weighted means of micro-batches",
    "each mean divides by its own sum of weights, so the parts do not add up to the batch",
    "`Loss(values, weights)`: add both up, divide once",
)
def weighted_micro_batches() -> str:
    logits, targets, weight = torch.tensor([[0.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1]), torch.tensor([1.0, 3.0])
    means = [F.cross_entropy(logits[i : i + 1], targets[i : i + 1], weight) for i in range(2)]
    parts = [losses.cross_entropy(logits[i : i + 1], targets[i : i + 1], weight=weight) for i in range(2)]
    ours = Loss(torch.cat([part.values for part in parts]), torch.cat([part.weights for part in parts])).mean()
    return f"{show(sum(means) / 2)} instead of {show(ours)}"


@fault(
    "temperature",
    "expect a larger loss from a larger temperature",
    "so it is for what is right; for what is wrong the loss falls, and gradients shrink with 1/T everywhere",
    "`temperature` may be a tensor, swept or learned",
)
def temperature() -> str:
    wrong, right = torch.tensor([[5.0, 0.0, 0.0]]), torch.tensor([[0.0, 5.0, 0.0]])
    one, five = (
        [losses.cross_entropy(x, torch.tensor([1]), temperature=t).mean() for x in (right, wrong)] for t in (1.0, 5.0)
    )
    return f"T = 1 to 5: {show(one[0])} to {show(five[0])} where right, {show(one[1])} to {show(five[1])} where wrong"


def naive_focal(logits: Tensor, targets: Tensor, gamma: float) -> Tensor:
    cost = F.cross_entropy(logits, targets, reduction="none")
    return ((1 - torch.exp(-cost)) ** gamma * cost).mean()


@fault(
    "focal loss",
    "`(1 - p) ** gamma` with γ < 1",
    "the power has an infinite slope at p = 1, and infinity times zero is NaN",
    "the power is taken of a logarithm that never cancels: finite for every γ ≥ 0",
)
def focal_gamma() -> str:
    logits, targets = torch.tensor([[100.0, -100.0]]), torch.tensor([0])
    usual = slope(lambda x: naive_focal(x, targets, 0.5), logits)
    ours = slope(lambda x: losses.focal_loss(x, targets, gamma=0.5).mean(), logits)
    return f"gradient {show(usual)} at γ = 0.5, p = 1; here {show(ours.abs())}"


@fault(
    "focal loss",
    "mask ignored rows, then `.mean()`",
    "ignored rows stay in the denominator",
    "they weigh 0",
)
def focal_denominator() -> str:
    logits, targets = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([0, 1, -100])
    return f"{show(naive_focal(logits, targets, 2.0))} instead of {show(losses.focal_loss(logits, targets).mean())}"


@fault(
    "focal loss",
    "say that α = 0.5 has no effect",
    "it halves the loss, and so the step of an optimizer without adaptive scaling",
    "`alpha=None` leaves it out",
)
def focal_alpha() -> str:
    logits, targets = torch.tensor([2.0]), torch.tensor([1.0])
    without, half = (losses.sigmoid_focal_loss(logits, targets, alpha=alpha).mean() for alpha in (None, 0.5))
    return f"{show(without)} without α, {show(half)} with 0.5"


@fault(
    "binary cross entropy",
    "`binary_cross_entropy(sigmoid(x))`",
    "the sigmoid rounds to 0, the loss is capped and the gradient of the worst errors vanishes",
    "`binary_cross_entropy_with_logits` never clamps; the other matches PyTorch to the bit",
)
def saturated_sigmoid() -> str:
    x, one = torch.tensor([-200.0]), torch.ones(1)

    def usual(x: Tensor) -> Tensor:
        return F.binary_cross_entropy(torch.sigmoid(x), one)

    def ours(x: Tensor) -> Tensor:
        return losses.binary_cross_entropy_with_logits(x, one).mean()

    return (
        f"logit −200, target 1: loss {show(usual(x))}, gradient {show(slope(usual, x).abs())}; "
        f"from logits {show(ours(x))} and {show(slope(ours, x))}"
    )


@fault(
    "cross entropy",
    "let the model end with a softmax",
    "softmax is applied twice: the loss cannot come near 0",
    "logits that look like probabilities give a warning",
)
def double_softmax() -> str:
    logits, target = torch.tensor([[4.0, 0.0, 0.0], [0.0, 4.0, 0.0]]), torch.tensor([0, 1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twice = losses.cross_entropy(F.softmax(logits, 1), target).mean()
    return f"{show(twice)} instead of {show(losses.cross_entropy(logits, target).mean())}, {len(caught)} warning"


@fault(
    "mse",
    "`mse_loss` of predictions `[B, 1]` against targets `[B]`",
    "both broadcast to `[B, B]`, and perfect predictions cost something",
    "shapes must be equal, or ValueError",
)
def broadcast_mse() -> str:
    predictions, targets = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 2.0, 3.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usual = F.mse_loss(predictions, targets)
    return f"{show(usual)} instead of {show(losses.mse_loss(predictions[:, 0], targets).mean())}"


@fault(
    "contrastive loss",
    "take the softmax over all pairs of both views",
    "each row's similarity to itself is in its denominator, and is the largest one",
    "`ntxent` leaves self-pairs out",
)
def self_pairs() -> str:
    z = torch.eye(2).repeat(2, 1)
    usual = F.cross_entropy(z @ z.T, torch.arange(4).roll(2))
    return f"{show(usual)} instead of {show(losses.ntxent(z[:2], z[2:], temperature=1.0).mean())}"
