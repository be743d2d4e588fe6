"""The forest plot: every technique's paired differences to the baseline, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from functricks.cli.summary import METRICS, Row, verdict

__all__ = ["forest_plot"]

# Blue and orange stay apart for colour-blind readers, and in grey.
_COLOURS = {1: "#0b6fb8", 0: "#8a8a8a", -1: "#d9650b"}
_MARKERS = {1: "o", 0: "s", -1: "o"}


def forest_plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw one panel a metric and one line a technique, in the order of the table."""
    from matplotlib.figure import Figure

    techniques = rows[1:]
    height = 1.5 + 0.34 * len(techniques)
    figure = Figure(figsize=(11.5, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    panels = figure.subplots(1, len(METRICS), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, METRICS, strict=True):
        _panel(axes, name, techniques)
    panels[0].set_yticks(range(len(techniques)), [row.arm.name for row in techniques])
    panels[0].set_ylim(len(techniques) - 0.5, -0.5)
    figure.supxlabel(
        "paired difference to the baseline, mean and 95 % interval over the seeds; "
        "blue: clearly better, orange: clearly worse, grey square: unclear",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)


def _panel(axes: Any, name: str, rows: Sequence[Row]) -> None:
    metric = METRICS[name]
    axes.axvline(0, color="0.35", linewidth=1, zorder=1)
    for place, row in enumerate(rows):
        difference = row.estimates[name].difference
        sign = verdict(metric, difference)
        axes.errorbar(
            difference.mean * metric.factor,
            place,
            xerr=0 if math.isnan(difference.half_width) else difference.half_width * metric.factor,
            fmt=_MARKERS[sign],
            color=_COLOURS[sign],
            markersize=5,
            capsize=2.5,
            linewidth=1.4,
        )
    better = "right" if metric.higher_is_better else "left"
    axes.set_title(f"{metric.label}\n(better: {better})", fontsize=9)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.margins(x=0.12)
