"""What the command leaves behind: a table in the terminal, and results.csv, results.json and plot.png."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from functricks.cli.summary import METRICS, Row, as_json, verdict
from functricks.experiments.results import Interval

__all__ = ["print_table", "write_csv", "write_json"]

MARKS = {1: "▲", 0: "\u00a0", -1: "▼"}  # no-break, or right-aligned columns lose it
COLOURS = {1: "green", 0: "", -1: "red"}


def print_table(console: Console, rows: Sequence[Row], title: str) -> None:
    """Print one line a technique."""
    console.print(title, style="italic", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("technique", no_wrap=True)
    for heading in ("accuracy %", "vs baseline", "NLL", "ECE %", "attacked", "s/run"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.arm.name, *_cells(row), style="bold" if row is rows[0] else "")
    console.print(table)


def _cells(row: Row) -> list[Text]:
    accuracy = row.estimates["accuracy"]
    difference = Text("") if row.arm.name == "baseline" else _difference(accuracy.difference)
    others = [_marked(row, "nll", 3), _marked(row, "ece", 1), _marked(row, "attacked_accuracy", 1)]
    return [Text(_interval(accuracy.value, "", 2)), difference, *others, Text(f"{row.seconds:.2f}")]


def _difference(difference: Interval) -> Text:
    sign = verdict(METRICS["accuracy"], difference)
    return Text(f"{_interval(difference, '+', 2)} {MARKS[sign]}", style=COLOURS[sign])


def _marked(row: Row, name: str, digits: int) -> Text:
    """Return the mean, with a mark where its paired difference to the baseline is clear."""
    metric, estimate = METRICS[name], row.estimates[name]
    sign = verdict(metric, estimate.difference)
    return Text(f"{estimate.value.mean * metric.factor:.{digits}f} {MARKS[sign]}", style=COLOURS[sign])


def _interval(value: Interval, sign: str, digits: int) -> str:
    mean = f"{100 * value.mean:{sign}.{digits}f}"
    return mean if math.isnan(value.half_width) else f"{mean} ± {100 * value.half_width:.{digits}f}"


def write_csv(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Write one row a run."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(runs[0]))
        writer.writeheader()
        writer.writerows(runs)


def write_json(path: Path, about: dict[str, Any], rows: Sequence[Row], runs: Sequence[dict[str, Any]]) -> None:
    """Write everything: how the runs were made, the summary, and the runs. What is no number is null."""
    content = {**about, "summary": [as_json(row) for row in rows], "runs": runs}
    path.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
