"""The command line: options, help, and what happens to errors. The work is done elsewhere, imported when needed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from functricks.cli.errors import CommandError

__all__ = ["app", "run_app"]

app = typer.Typer(
    name="functricks",
    help="Training techniques for PyTorch as pure functions.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_INTERRUPTED = 130


def run_app(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code. Bad input is one line on stderr and code 2."""
    _never_fail_to_encode()
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="functricks", standalone_mode=False)
    except CommandError as error:
        return _complain(str(error))
    except Exception as error:
        usage = getattr(error, "format_message", None)  # typer's own errors, whichever click it brings
        if usage is None:
            raise
        return _complain(f"{usage().rstrip('.')}; see functricks --help")
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _complain(message: str) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return 2


def _never_fail_to_encode() -> None:
    """Print a question mark for what the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _version(wanted: bool) -> None:
    if wanted:
        package: Any = importlib.import_module("functricks")
        typer.echo(f"functricks {package.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Training techniques for PyTorch as pure functions."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def ablate(
    data: Annotated[
        Path | None,
        typer.Argument(
            help="A CSV, Parquet or NPZ file (arrays x and y); without it, scikit-learn's digits.", show_default=False
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="The column with the class. Default: one named target, label, class or y, else the last.",
            show_default=False,
        ),
    ] = None,
    drop: Annotated[str, typer.Option(help="Columns to leave out, separated by commas.", show_default=False)] = "",
    out: Annotated[Path, typer.Option(help="The folder for results.csv, results.json and plot.png.")] = Path(
        "functricks-ablate"
    ),
    techniques: Annotated[
        str | None,
        typer.Option(
            help="Which, separated by commas, each with an optional strength: dropout,label-smoothing=0.05. "
            "Default: all. --list names them.",
            show_default=False,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the techniques and their strengths, and exit.")] = False,
    seeds: Annotated[int, typer.Option(help="Runs of each technique, paired with the baseline's by seed.")] = 8,
    epochs: Annotated[int, typer.Option(help="Passes over the training rows.")] = 15,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Rows a step. Default: 64, or a quarter of the training rows.", show_default=False),
    ] = None,
    hidden: Annotated[str, typer.Option(help="Widths of the hidden layers; none for a linear model.")] = "64,64",
    lr: Annotated[float, typer.Option(help="The learning rate of AdamW.")] = 5e-3,
    epsilon: Annotated[
        float, typer.Option(help="How far the attack moves each feature, in its standard deviations.")
    ] = 0.25,
    threads: Annotated[int, typer.Option(help="More than one pays for wide networks and large batches.")] = 1,
    compile_: Annotated[bool, typer.Option("--compile", help="Compile the steps: for long runs.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes, only the table.")] = False,
) -> None:
    """Compare training techniques with a baseline on your data.

    Trains a small network with each technique over several seeds, all as batched programs, and prints what each
    technique changes: the same seed means the same initial weights, batches and masks, so the differences are paired.
    """
    from functricks.cli.ablate import Options, ablate, list_techniques

    if list_:
        list_techniques()
        return
    names = tuple(name.strip() for name in drop.split(",") if name.strip())
    ablate(
        Options(
            data,
            target,
            names,
            out,
            techniques,
            seeds,
            epochs,
            batch_size,
            hidden,
            lr,
            epsilon,
            threads,
            compile_,
            quiet,
        )
    )


@app.command()
def schedules(
    name: Annotated[
        str | None, typer.Argument(help="A schedule; without it, all are listed.", show_default=False)
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Its arguments, as Python literals.", show_default=False),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="How many steps to draw. Default: what shows its shape.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw it into this file (PNG, SVG, PDF).", show_default=False)
    ] = None,
) -> None:
    """List learning rate schedules, or draw one: functricks schedules cosine_annealing lr=0.1 T_max=100."""
    from functricks.cli.schedules import draw, list_schedules

    if name is None:
        list_schedules()
    else:
        draw(name, arguments or [], steps, plot)
