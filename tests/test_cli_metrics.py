"""What the command measures, against slow references."""

from __future__ import annotations

import math

import pytest
import torch

from functricks.cli.metrics import calibration_gaps, correct, expected_calibration_error, negative_log_likelihood


def slow_ece(logits: torch.Tensor, targets: torch.Tensor, bins: int) -> float:
    """Guo et al. 2017, equation 3, one row and one bin at a time."""
    rows = []
    for row, target in zip(logits.double(), targets.tolist(), strict=True):
        p = torch.softmax(row, 0)
        rows.append((float(p.max()), int(p.argmax()) == target))
    total = 0.0
    for m in range(1, bins + 1):
        members = [(p, right) for p, right in rows if (m - 1) / bins < p <= m / bins]
        if members:
            accuracy = sum(right for _, right in members) / len(members)
            confidence = sum(p for p, _ in members) / len(members)
            total += len(members) / len(rows) * abs(accuracy - confidence)
    return total


def some(rows: int = 200, classes: int = 5, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    return scale * torch.randn(rows, classes), torch.randint(0, classes, (rows,))


def ece(logits: torch.Tensor, targets: torch.Tensor, bins: int = 15) -> torch.Tensor:
    return expected_calibration_error(calibration_gaps(logits, targets, bins), len(targets))


@pytest.mark.parametrize("bins", [1, 2, 15])
@pytest.mark.parametrize("scale", [0.1, 3.0, 100.0])
def test_ece_is_the_slow_one(bins: int, scale: float) -> None:
    logits, targets = some(scale=scale)
    assert ece(logits, targets, bins).item() == pytest.approx(slow_ece(logits, targets, bins), abs=1e-6)
    assert slow_ece(logits, targets, bins) > 0


def test_ece_of_certainty() -> None:
    logits = torch.tensor([[1000.0, 0.0], [1000.0, 0.0]])
    assert ece(logits, torch.tensor([0, 0])).item() == 0
    assert ece(logits, torch.tensor([1, 1])).item() == 1


def test_parts_add_up_to_the_whole() -> None:
    logits, targets = some()
    parts = [calibration_gaps(x, y) for x, y in zip(logits.split(64), targets.split(64), strict=True)]
    assert torch.allclose(sum(parts, torch.zeros(15)), calibration_gaps(logits, targets), atol=1e-5)


def test_accuracy_and_likelihood() -> None:
    logits, targets = some()
    p = torch.softmax(logits.double(), 1)
    rows = range(len(targets))
    assert correct(logits, targets).tolist() == [float(p[i].argmax() == targets[i]) for i in rows]
    expected = [-math.log(p[i, targets[i]]) for i in rows]
    assert negative_log_likelihood(logits, targets).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("metric", [correct, negative_log_likelihood, calibration_gaps])
def test_batched_is_one_by_one(metric) -> None:
    logits, targets = torch.randn(4, 30, 3), torch.randint(0, 3, (30,))
    batched = torch.vmap(metric, in_dims=(0, None))(logits, targets)
    assert torch.equal(batched, torch.stack([metric(one, targets) for one in logits]))
