"""``functricks ablate``: which technique helps on this data, and by how much?"""

from __future__ import annotations

import importlib
import math
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from functricks import random
from functricks.cli.data import Dataset, load
from functricks.cli.errors import CommandError
from functricks.cli.experiment import ATTACK_STEPS, Plan, make_experiment
from functricks.cli.metrics import BINS
from functricks.cli.output import staged
from functricks.cli.plotting import forest_plot
from functricks.cli.report import print_table, write_csv, write_json
from functricks.cli.splits import Split, split
from functricks.cli.summary import Row, summarise
from functricks.cli.techniques import NEUTRAL, TECHNIQUES, Arm, parse_arms
from functricks.experiments import Minibatches, Results, minibatches, run

__all__ = ["Options", "ablate", "list_techniques"]

_BATCH_SIZE = 64
_KEY = 0
_WIDTH = 100  # of a table that goes to a file
_FILES = ("results.csv", "results.json", "plot.png")
_MOST_SEEDS = 10_000
_WIDEST = 2**16  # hidden layer


class Options(NamedTuple):
    """What the user asked for."""

    data: Path | None = None
    target: str | None = None
    drop: tuple[str, ...] = ()
    out: Path = Path("functricks-ablate")
    techniques: str | None = None
    seeds: int = 8
    epochs: int = 15
    batch_size: int | None = None
    hidden: str = "64,64"
    lr: float = 5e-3
    epsilon: float = 0.25
    threads: int = 1
    compile: bool = False
    quiet: bool = False


def ablate(options: Options) -> None:
    """Train, print the table, and write results.csv, results.json and plot.png; or raise and write nothing."""
    arms = parse_arms(options.techniques)
    hidden = _check(options)
    data = load(options.data, options.target, options.drop)
    parts = split(data)
    batches = _batches(options, parts)
    if options.techniques is not None:  # by default, a batch smaller than the micro-batches is split into single rows
        _check_accumulation(arms, batches.batch_size)
    notes = Console(stderr=True, quiet=options.quiet, soft_wrap=True, highlight=False)
    with staged(options.out, _FILES) as stage:
        notes.print(_describe(data, parts, len(arms), options.seeds, batches), markup=False)
        results = _train(options, hidden, arms, parts, batches, notes)
        rows = summarise(results, arms)
        _write(stage, options, data, parts, batches, rows, _runs(results, arms))
    _report(options, data, rows, results, batches, notes)


def list_techniques() -> None:
    """Print the techniques and their default strengths."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("technique", "strength", "meaning of the strength"):
        table.add_column(heading, no_wrap=heading != "meaning of the strength")
    for one in TECHNIQUES.values():
        table.add_row(one.name, f"{one.strength:g}", one.about)
    Console().print(table)


# --- before training -------------------------------------------------------------------------------------------------


def _check(options: Options) -> tuple[int, ...]:
    """Check the numbers; return the widths of the hidden layers."""
    counts = {name: getattr(options, name) for name in ("seeds", "epochs", "batch_size", "threads")}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    limits = {
        "seeds": (_MOST_SEEDS, ""),
        "threads": (os.cpu_count() or 1, ", the number of CPUs of this machine"),
    }
    for name, (most, what) in limits.items():
        if counts[name] > most:
            raise CommandError(f"--{name} must be at most {most}{what}, got {counts[name]}")
    if not (options.lr > 0 and math.isfinite(options.lr)):
        raise CommandError(f"--lr must be a number above 0, got {options.lr:g}")
    if not (options.epsilon >= 0 and math.isfinite(options.epsilon)):
        raise CommandError(f"--epsilon must be a number, 0 or more, got {options.epsilon:g}")
    if options.hidden.strip().lower() in ("none", ""):
        return ()
    widths = [width.strip() for width in options.hidden.split(",")]
    if not all(width.isdecimal() and width.strip("0") for width in widths):
        raise CommandError(f"--hidden must be widths like 64,64 or none, got {options.hidden!r}")
    if any(len(width.lstrip("0")) > len(str(_WIDEST)) or int(width) > _WIDEST for width in widths):
        raise CommandError(f"--hidden: a layer must be at most {_WIDEST} wide, got {options.hidden[:40]!r}")
    return tuple(int(width) for width in widths)


def _check_accumulation(arms: list[Arm], batch_size: int) -> None:
    for arm in arms:
        kind, _, parts = str(arm.settings.get("gradient", "")).partition(" ")
        if kind == "accumulate" and int(parts) > batch_size:
            raise CommandError(
                f"accumulation={float(parts):g} is more micro-batches than the {batch_size} rows of a batch; "
                f"give at most {batch_size}, or a larger --batch-size"
            )


def _batches(options: Options, parts: Split) -> Minibatches:
    rows = len(parts.train[1])
    size = options.batch_size if options.batch_size is not None else max(1, min(_BATCH_SIZE, rows // 4))
    if size > rows:
        raise CommandError(f"--batch-size {size} is more than the {rows} training rows; give at most {rows}")
    return minibatches(parts.train, size, epochs=options.epochs, order="per-lane")


def _describe(data: Dataset, parts: Split, arms: int, seeds: int, batches: Minibatches) -> str:
    sizes = " / ".join(str(len(part[1])) for part in parts[:3])
    text = (
        f"{data.name}: {len(data.labels)} rows, {len(data.columns)} features, {len(data.classes)} classes in "
        f"{data.target!r}; {sizes} rows to train / validate / test\n"
        f"{arms} variants x {seeds} seeds, {batches.total_steps} steps of {batches.batch_size} rows each"
    )
    if parts.untested:
        names = ", ".join(parts.untested[:5]) + (" ..." if len(parts.untested) > 5 else "")
        text += f"\nwarning: too few rows to test on of class {names}: trained on only"
    if seeds == 1:
        text += "\nwarning: one seed gives no intervals; use --seeds 2 or more"
    return text


# --- training --------------------------------------------------------------------------------------------------------


def _train(
    options: Options, hidden: tuple[int, ...], arms: list[Arm], parts: Split, batches: Minibatches, notes: Console
) -> Results:
    x, labels = parts.train
    counts = torch.bincount(labels).to(torch.float32)
    plan = Plan(hidden, options.lr, batches.total_steps, options.epsilon, counts, x.shape[1])
    configs = [
        {"arm": index, "seed": seed, **NEUTRAL, **arm.settings}
        for index, arm in enumerate(arms)
        for seed in range(options.seeds)
    ]
    with _threads(options.threads), _progress(notes) as progress:
        return run(
            make_experiment(plan),
            configs,
            batches,
            key=random.key(_KEY),
            eval_data={"validation": parts.validation, "test": parts.test},
            compile=options.compile,
            progress=progress,
        )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Use so many threads: one is fastest while tensors are small, and far faster when other programs run too."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while training, on a terminal only."""
    columns = (TextColumn("training"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    shown = console.is_terminal and not console.quiet
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("training", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# --- afterwards ------------------------------------------------------------------------------------------------------


def _runs(results: Results, arms: list[Arm]) -> list[dict[str, Any]]:
    """Return one row a run, the technique first."""
    runs = []
    for found in results:
        arm = arms[found.pop("arm")]
        runs.append({"technique": arm.name, **found})
    return runs


def _write(
    stage: Path,
    options: Options,
    data: Dataset,
    parts: Split,
    batches: Minibatches,
    rows: list[Row],
    runs: list[dict[str, Any]],
) -> None:
    about = {
        "versions": _versions(),
        "data": {
            "name": data.name,
            "target": data.target,
            "features": data.columns,
            "classes": data.classes,
            "rows": {name: len(part[1]) for name, part in zip(parts._fields, parts[:3], strict=False)},
        },
        "settings": {
            **{name: value for name, value in options._asdict().items() if name not in ("data", "out", "quiet")},
            "batch_size": batches.batch_size,
            "steps": batches.total_steps,
            "key": _KEY,
            "calibration_bins": BINS,
            "attack": {"norm": "linf", "epsilon": options.epsilon, "steps": ATTACK_STEPS},
            "baseline": NEUTRAL,
        },
    }
    write_csv(stage / "results.csv", runs)
    write_json(stage / "results.json", about, rows, runs)
    forest_plot(stage / "plot.png", rows, f"{data.name}: what each technique changes, {options.seeds} paired seeds")


def _versions() -> dict[str, str]:
    package: Any = importlib.import_module("functricks")
    return {
        "functricks": package.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "scikit-learn", "polars")},
    }


def _report(
    options: Options, data: Dataset, rows: list[Row], results: Results, batches: Minibatches, notes: Console
) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    print_table(console, rows, f"{data.name}: test rows, mean and 95 % interval over {options.seeds} seeds")
    skipped = sum(batches.total_steps - row["applied_steps"] for row in results)
    if skipped:
        notes.print(
            f"warning: {skipped:.0f} steps had gradients that were not finite and were skipped; try a lower --lr"
        )
    best = max(rows, key=lambda row: row.validation_accuracy)
    notes.print(
        f"▲ better, ▼ worse than the baseline: the 95 % interval of the paired difference excludes 0 "
        f"(of {4 * (len(rows) - 1)} comparisons, about one in twenty does by chance).\n"
        f"attacked: accuracy in % with each feature moved by up to {options.epsilon:g} of its standard deviations "
        f"(PGD, {ATTACK_STEPS} steps). s/run: a run's share of its batched program.\n"
        f"Choose by validation accuracy, best: {best.arm.name} ({100 * best.validation_accuracy:.2f} %). "
        f"Files: {options.out / 'results.csv'}, results.json, plot.png",
        markup=False,
    )
