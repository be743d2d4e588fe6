"""From runs to rows of the report: means over the seeds, and paired differences to the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from functricks.cli.techniques import Arm
from functricks.experiments import Results
from functricks.experiments.results import Interval

__all__ = ["METRICS", "Estimate", "Metric", "Row", "as_json", "summarise", "verdict"]


_ROUNDING = 1e-5


class Metric(NamedTuple):
    """A column of the results: its label, what to multiply with to show it, and which direction is good."""

    name: str
    label: str
    factor: float
    higher_is_better: bool


METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "accuracy, %", 100, True),
        Metric("nll", "negative log-likelihood", 1, False),
        Metric("ece", "calibration error, %", 100, False),
        Metric("attacked_accuracy", "accuracy under attack, %", 100, True),
    )
}


class Estimate(NamedTuple):
    """A metric of a technique, and how far it is from the baseline's, each with its 95 % interval over the seeds."""

    value: Interval
    difference: Interval


class Row(NamedTuple):
    """One technique: its estimates by metric, its validation accuracy, and the seconds of a run."""

    arm: Arm
    estimates: dict[str, Estimate]
    validation_accuracy: float
    seconds: float


def summarise(results: Results, arms: Sequence[Arm]) -> list[Row]:
    """Return a row for every arm, in order; the configurations of ``results`` name theirs by ``arm``."""
    found = {metric: results.compare(to={"arm": 0}, metric=metric) for metric in METRICS}
    rows = []
    for index, arm in enumerate(arms):
        estimates = {metric: Estimate(one[index].value, one[index].difference) for metric, one in found.items()}
        own = [row for row in results if row["arm"] == index]
        mean = {name: sum(row[name] for row in own) / len(own) for name in ("validation_accuracy", "seconds")}
        rows.append(Row(arm, estimates, mean["validation_accuracy"], mean["seconds"]))
    return rows


def verdict(metric: Metric, difference: Interval) -> int:
    """Return 1 where the interval is on the good side of 0, -1 on the bad side, 0 where it holds 0 or is unknown.

    Differences as small as the rounding of the same computation in another order say nothing either.
    """
    unknown = math.isnan(difference.half_width) or abs(difference.mean) < _ROUNDING
    if unknown or abs(difference.mean) <= difference.half_width:
        return 0
    return 1 if (difference.mean > 0) == metric.higher_is_better else -1


def as_json(row: Row) -> dict[str, Any]:
    """Return a row as plain values."""
    metrics = {
        name: {
            "mean": one.value.mean,
            "half_width": one.value.half_width,
            "difference": one.difference.mean,
            "difference_half_width": one.difference.half_width,
            "verdict": {1: "better", 0: "unclear", -1: "worse"}[verdict(METRICS[name], one.difference)],
        }
        for name, one in row.estimates.items()
    }
    return {
        "technique": row.arm.name,
        "settings": row.arm.settings,
        **metrics,
        "validation_accuracy": row.validation_accuracy,
        "seconds_a_run": row.seconds,
    }
