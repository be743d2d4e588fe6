"""Train each technique classically and functionally, and print how far apart they end: ``python -m parity``."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import platform
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy
import optree
import torch

import functricks
from parity.harness import Report, Row, Technique, measure

MODULES = (
    "losses",
    "schedules",
    "optimizers",
    "clipping",
    "accumulation",
    "adversarial",
    "pipeline",
    "compositions",
    "atomic_step",
    "dropout_batchnorm",
    "consistency",
    "attacks",
    "hooks",
    "scheduled_sampling",
    "adapter_optimizer",
    "adapter_loop",
    "distributed",
    "whole_recipe",
)


def techniques() -> list[Technique]:
    """Return all techniques, in the order of the table."""
    return [one for name in MODULES for one in importlib.import_module(f"parity.{name}").TECHNIQUES]


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "functricks": functricks.__version__,
        "optree": optree.__version__,
        "numpy": numpy.__version__,
    }


def as_json(rows: Sequence[Any]) -> str:
    """Return versions and rows; a number that is not finite becomes null, which JSON has."""
    plain = [
        {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row._asdict().items()}
        for row in rows
    ]
    return json.dumps({"versions": versions(), "rows": plain}, indent=2, allow_nan=False)


def select(names: Sequence[str], only: str | None, parser: argparse.ArgumentParser) -> list[str]:
    """Return the names that are ``only``, or match it as a glob; end the program where there is none."""
    found = [name for name in names if only is None or name == only or fnmatchcase(name, only)]
    if not found:
        parser.error(f"--only {only!r} names nothing; have: {'; '.join(names)}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m parity", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    parser.add_argument("--only", metavar="NAME", help="one technique, or a glob such as 'adam*'")
    given = parser.parse_args(arguments)
    everything = {one.name: one for one in techniques()}
    chosen = select(list(everything), given.only, parser)
    width = max(len(name) for name in chosen)
    if not given.json:
        print(f"{'technique':{width}} steps  rel. difference  ulps     tolerance  ok")
        print(f"{'':{width}}        in float64       in float32")
    reports = []
    for name in chosen:
        report = measure_safely(everything[name])
        reports.append(report)
        if not given.json:
            print(_line(report.row, width), flush=True)
    for report in reports:
        for problem in report.problems:
            print(f"{report.row.technique}: {problem}", file=sys.stderr)
    if given.json:
        print(as_json([report.row for report in reports]))
    bad = sum(not report.row.ok for report in reports)
    if not given.json:
        print(f"{len(reports) - bad} of {len(reports)} techniques give the same numbers")
    return 1 if bad else 0


def measure_safely(technique: Technique) -> Report:
    """Measure; an exception is a problem of this technique, and the others go on."""
    try:
        return measure(technique)
    except Exception as error:
        row = Row(technique.name, 0, math.nan, math.nan, technique.tolerance, False)
        return Report(row, [f"{type(error).__name__}: {error}"])


def _line(row: Row, width: int) -> str:
    numbers = f"{row.steps:5d}  {row.rel_f64:15.1e}  {row.ulp_f32:10.1f}  {row.tolerance:9.0e}"
    return f"{row.technique:{width}} {numbers}  {'ok' if row.ok else 'NO'}"


if __name__ == "__main__":
    torch.set_num_threads(1)  # small tensors; and one thread sums in one order
    sys.exit(main())
