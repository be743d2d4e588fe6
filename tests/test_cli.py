"""The command as its user meets it: the table, the files, exit codes, and one clear line for every bad input."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
import torch

from functricks import random
from functricks.cli import main
from functricks.cli.errors import CommandError
from functricks.cli.experiment import Plan, make_experiment
from functricks.cli.model import initial_weights, perceptron
from functricks.cli.output import staged
from functricks.cli.summary import METRICS, verdict
from functricks.cli.techniques import NEUTRAL, TECHNIQUES, parse_arms
from functricks.experiments import Experiment, Minibatches, minibatches, run
from functricks.experiments.results import Interval
from functricks.gradients import gradient
from functricks.losses import cross_entropy
from functricks.modules import functional
from functricks.optimizers import adamw
from functricks.training import train_step

ROOT = Path(__file__).parent.parent
FILES = ["plot.png", "results.csv", "results.json"]
QUICK = ["--seeds", "2", "--epochs", "1", "--hidden", "8"]
NUMBERS = [name for name, one in TECHNIQUES.items() if one.gradient == "plain" and one.setting != "gradient"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three classes, two of three features informative, as a CSV file."""
    generator = np.random.default_rng(0)
    label = np.arange(90) % 3
    noise = generator.normal(size=(90, 3))
    columns = {"u": label + 0.4 * noise[:, 0], "v": -label + 0.4 * noise[:, 1], "w": noise[:, 2]}
    path = tmp_path / "data.csv"
    polars.DataFrame({**columns, "kind": np.array(["ant", "bee", "cow"])[label]}).write_csv(path)
    return path


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# --- what it gives ---------------------------------------------------------------------------------------------------


def test_whole_command(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "functricks", "ablate", data, "--out", out, *QUICK],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["baseline", *TECHNIQUES]
    assert lines[1].split() == ["technique", "accuracy", "%", "vs", "baseline", "NLL", "ECE", "%", "attacked", "s/run"]
    assert "90 rows, 3 features, 3 classes in 'kind'; 54 / 18 / 18 rows to train / validate / test" in done.stderr
    assert "14 variants x 2 seeds" in done.stderr
    assert f"Files: {out / 'results.csv'}, results.json, plot.png" in done.stderr
    assert sorted(os.listdir(out)) == FILES
    assert sorted(os.listdir(tmp_path)) == ["data.csv", "deep"]


def test_files_hold_every_run_and_its_summary(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["ablate", str(data), "--out", str(out), "--techniques", "dropout=0.5,fgm", "-q", *QUICK]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    rows = rows_of(out)
    assert [(row["technique"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("baseline", "dropout 0.5", "fgm 0.5") for seed in "01"
    ]
    assert [row["dropout"] for row in rows] == ["0.0", "0.0", "0.5", "0.5", "0.0", "0.0"]
    found = json.loads(
        (out / "results.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )
    assert found["versions"]["torch"] == torch.__version__
    assert found["settings"]["seeds"] == 2
    assert found["data"]["classes"] == ["ant", "bee", "cow"]
    assert found["data"]["rows"] == {"train": 54, "validation": 18, "test": 18}
    assert len(found["runs"]) == 6
    assert found["runs"][0]["max_norm"] is None  # infinity
    for index, one in enumerate(found["summary"]):
        for metric in ("accuracy", "nll", "ece", "attacked_accuracy"):
            values, base = ([float(row[metric]) for row in rows[i : i + 2]] for i in (2 * index, 0))
            assert one[metric]["mean"] == pytest.approx(np.mean(values))
            pairs = np.subtract(values, base)
            assert one[metric]["difference"] == pytest.approx(np.mean(pairs))
            expected = 12.7062 * np.std(pairs, ddof=1) / np.sqrt(2)  # t quantile for one degree of freedom
            assert one[metric]["difference_half_width"] == pytest.approx(expected, rel=1e-4)
        assert f"{100 * one['accuracy']['mean']:.2f} ±" in printed.out
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_one_seed_has_no_intervals(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--out", str(tmp_path / "out"), "--techniques", "cosine", *QUICK, "--seeds", "1"]
    assert main(["ablate", str(data), *options]) == 0
    printed = capsys.readouterr()
    assert "±" not in printed.out
    assert "one seed gives no intervals" in printed.err
    assert json.loads((tmp_path / "out" / "results.json").read_text())["summary"][1]["accuracy"]["half_width"] is None


@pytest.mark.parametrize("hidden", ["none", "5", "6,4,3"])
def test_any_depth(data: Path, tmp_path: Path, hidden: str) -> None:
    options = ["--out", str(tmp_path / "out"), *QUICK, "--hidden", hidden, "--techniques", "pgd,dropout,accumulation=3"]
    assert main(["ablate", str(data), *options]) == 0


def test_rare_class_is_said_and_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.parquet"
    polars.DataFrame({"x": np.arange(30.0), "y": ["a"] * 15 + ["b"] * 14 + ["rare"]}).write_parquet(path)
    assert main(["ablate", str(path), "--out", str(tmp_path / "out"), *QUICK, "--techniques", "class-weights"]) == 0
    assert "too few rows to test on of class rare: trained on only" in capsys.readouterr().err


def test_results_are_replaced_whole(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.csv").write_text("old")
    (out / "notes.txt").write_text("mine")
    assert main(["ablate", str(data), "--out", str(out), *QUICK, "--techniques", "dropout"]) == 0
    assert sorted(os.listdir(out)) == ["notes.txt", *FILES]
    assert len(rows_of(out)) == 4


def test_help_version_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("functricks 0.")
    for arguments in ([], ["--help"], ["ablate", "--help"], ["schedules", "-h"]):
        assert main(arguments) == 0
        assert "Usage" in capsys.readouterr().out
    assert main(["ablate", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in TECHNIQUES)


@pytest.mark.parametrize(
    ("mean", "half_width", "expected"),
    [(0.02, 0.01, 1), (-0.02, 0.01, -1), (0.02, 0.03, 0), (0.02, float("nan"), 0), (0.0, 0.0, 0), (1e-7, 1e-8, 0)],
)
def test_marks_are_for_intervals_without_zero(mean: float, half_width: float, expected: int) -> None:
    assert verdict(METRICS["accuracy"], Interval(mean, half_width)) == expected
    assert verdict(METRICS["nll"], Interval(mean, half_width)) == -expected


# --- what it promises about the numbers ------------------------------------------------------------------------------


def toy() -> tuple[Minibatches, Plan, dict[str, Any]]:
    """Noise with a little signal: what to train on, the plan, and what to evaluate on."""
    x = torch.randn(96, 5, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    batches = minibatches((x[:64], y[:64]), 16, epochs=3, order="per-lane")
    plan = Plan((8,), 1e-2, batches.total_steps, 0.25, torch.bincount(y[:64]).float(), 5)
    return batches, plan, {"validation": (x[64:80], y[64:80]), "test": (x[80:], y[80:])}


def trained(arms: list[dict[str, Any]], seeds: list[int], make: Any = make_experiment) -> list[dict[str, Any]]:
    """Train settings x seeds as the command does; return its rows, with the final parameters."""
    batches, plan, held_out = toy()
    configs = [{"arm": i, "seed": s, **NEUTRAL, **arm} for i, arm in enumerate(arms) for s in seeds]
    results = run(make(plan), configs, batches, key=random.key(0), eval_data=held_out)
    params = [results.state(i).params for i in range(len(results))]
    return [{**row, "params": one} for row, one in zip(results.rows, params, strict=True)]


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a["params"][path], b["params"][path]) for path in a["params"])


def bare(plan: Plan) -> Experiment:
    """The baseline without any technique in its program."""
    model = functional(perceptron(5, plan.hidden, 3))

    def loss_fn(params: Any, batch: Any) -> Any:
        return cross_entropy(model.apply(params, {}, batch[0], train=False)[0], batch[1], ignore_index=None)

    step = train_step(gradient(loss_fn), adamw(plan.lr, weight_decay=0.0))
    return Experiment(
        lambda config, key: step.init(initial_weights(random.split(key)[0], model.params)),
        lambda config, state, batch: step.update(state, batch),
        lambda config, state, data: {"step": state.step.float()},
    )


def test_neutral_settings_are_the_bare_program_to_the_bit() -> None:
    away = [arm.settings for arm in parse_arms(",".join(NUMBERS))[1:]]
    found = trained([{}, *away, {}], [0, 1])
    base, others, last = found[:2], found[2:-2], found[-2:]
    for one, other, expected in zip(base, last, trained([{}], [0, 1], bare), strict=True):
        assert equal(one, other)
        assert equal(one, expected)
    moved = [not equal(base[i % 2], one) for i, one in enumerate(others)]
    assert all(moved), [NUMBERS[i // 2] for i, one in enumerate(moved) if not one]


def test_zero_strength_of_a_wrapper_doubles_the_gradient_only() -> None:
    found = trained([{}, {"gradient": "fgm"}, {"gradient": "pgd"}, {"gradient": "accumulate 4"}], [0])
    base = found[0]["params"]
    for one in found[1:]:  # Adam divides the factor 2 out, but for its eps
        assert all(torch.allclose(one["params"][path], base[path], atol=1e-3) for path in base)


def test_same_seed_has_the_same_start_and_batches() -> None:
    model_params = dict(perceptron(5, (8,), 3).named_parameters())
    keys = torch.stack([random.key(0), random.key(1), random.key(0)])
    lanes = torch.vmap(lambda key: initial_weights(key, model_params))(keys)
    for path, leaf in lanes.items():
        assert torch.equal(leaf[0], leaf[2])
        assert not torch.equal(leaf[0], leaf[1])
        assert torch.equal(leaf[1], initial_weights(random.key(1), model_params)[path])
    found = trained([{}, {"dropout": 0.0, "weight_decay": 0.0}], [0, 1])
    assert equal(found[0], found[2])
    assert not equal(found[0], found[1])


def test_initial_weights_are_those_of_linear_layers() -> None:
    torch.manual_seed(0)
    params = dict(perceptron(400, (300,), 10).named_parameters())
    drawn = initial_weights(random.key(0), params)
    for path, leaf in params.items():
        bound = 1 / np.sqrt(400 if path.startswith("0.") else 300)
        assert drawn[path].shape == leaf.shape
        assert drawn[path].abs().max() <= bound
        assert leaf.abs().max() <= bound
    assert drawn["0.weight"].std().item() == pytest.approx(params["0.weight"].std().item(), rel=0.02)


def test_a_row_does_not_depend_on_what_runs_beside_it() -> None:
    together = trained([{}, {"dropout": 0.5}, {"gradient": "fgm", "epsilon": 0.5}, {"label_smoothing": 0.2}], [0, 1, 2])
    alone = trained([{"dropout": 0.5}], [2])[0]
    beside = next(row for row in together if row["arm"] == 1 and row["seed"] == 2)
    for metric in ("accuracy", "nll", "ece", "attacked_accuracy", "validation_nll"):
        assert alone[metric] == pytest.approx(beside[metric], abs=1e-5)


def test_number_techniques_share_one_program() -> None:
    arms = parse_arms(",".join(NUMBERS))
    assert len(NUMBERS) == 10
    assert {arm.settings.get("gradient", "plain") for arm in arms} == {"plain"}
    for arm in arms:
        assert {name: type(value) for name, value in {**NEUTRAL, **arm.settings}.items()} == {
            name: type(value) for name, value in NEUTRAL.items()
        }


@pytest.mark.slow
def test_default_run(tmp_path: Path) -> None:
    assert main(["ablate", "--out", str(tmp_path / "out"), "--quiet"]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["summary"][0]["accuracy"]["mean"] > 0.93
    assert len(found["runs"]) == 14 * 8
    assert abs(found["summary"][11]["accuracy"]["difference"]) < 0.01  # accumulation gives the same numbers


# --- bad input -------------------------------------------------------------------------------------------------------


def refused(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command; check that it says one line, ends with 2 and leaves no trace. Return the line."""
    before = sorted(folder.rglob("*"))
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before
    return said.err


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--techniques", "droput"], "unknown technique 'droput'; did you mean 'dropout'? known: label-smoothing, "),
        (["--techniques", "zzz"], "unknown technique 'zzz'; known: label-smoothing, temperature, "),
        (["--techniques", " , "], "--techniques names none; give at least one of: label-smoothing, "),
        (["--techniques", "fgm,fgm=0.5"], "--techniques names 'fgm 0.5' twice"),
        (["--techniques", "dropout=2"], "dropout=2: the strength must be a number from 0 to 1 (rate after every"),
        (["--techniques", "fgm=x"], "fgm=x: the strength must be a number at least 0"),
        (["--techniques", "accumulation=1.5"], "accumulation=1.5: the strength must be a whole number at least 1"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--epochs", "-1"], "--epochs must be at least 1, got -1"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--batch-size", "55"], "--batch-size 55 is more than the 54 training rows; give at most 54"),
        (
            ["--techniques", "accumulation=1000000"],
            "accumulation=1e+06 is more micro-batches than the 13 rows of a batch",
        ),
        (["--techniques", "accumulation=9", "--batch-size", "8"], "give at most 8, or a larger --batch-size"),
        (["--seeds", "10001"], "--seeds must be at most 10000, got 10001"),
        (["--threads", "1000000"], f"--threads must be at most {os.cpu_count()}, the number of CPUs"),
        (["--hidden", "64,65537"], "--hidden: a layer must be at most 65536 wide, got '64,65537'"),
        (["--hidden", "9" * 5000], "--hidden: a layer must be at most 65536 wide, got '999"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--hidden", "64,x"], "--hidden must be widths like 64,64 or none, got '64,x'"),
        (["--hidden", "0"], "--hidden must be widths like 64,64 or none"),
        (["--lr", "0"], "--lr must be a number above 0, got 0"),
        (["--epsilon", "nan"], "--epsilon must be a number, 0 or more, got nan"),
        (["--target", "kin"], "--target: no column 'kin'; did you mean 'kind'? columns: u, v, w, kind"),
        (["--target", "u", "--drop", "kind"], "which looks like a regression"),
        (["--target", "w", "--drop", "kind,u,v"], "no feature column is left"),
        (["--drop", "x"], "--drop: no column 'x'; columns: u, v, w, kind"),
        (["--seeds", "many"], "Invalid value for '--seeds'"),
        (["--frobnicate"], "No such option: --frobnicate; see functricks --help"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_bad_options(
    options: list[str], line: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ablate", str(data), "--out", str(tmp_path / "new" / "out"), *options]
    assert line in refused(arguments, tmp_path, capsys)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda frame: frame.with_columns(w=polars.lit("x")), "feature column 'w' is not numeric ('x')"),
        (lambda frame: frame.with_columns(w=polars.lit(float("nan"))), "column 'w' (a feature): 90 rows have NaN"),
        (lambda frame: frame.with_columns(kind=polars.lit("ant")), "has one class only ('ant')"),
        (lambda frame: frame.head(5), "has 5 rows; at least 10 are needed"),
    ],
    ids=["text", "NaN", "one class", "few rows"],
)
def test_bad_data(change: Any, line: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(polars.read_csv(data)).write_csv(data)
    assert line in refused(["ablate", str(data), "--out", str(tmp_path / "out")], tmp_path, capsys)


def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.parquet").write_text("nonsense")
    for name, line in (("none.csv", "no such file"), ("x.parquet", "cannot be read as PARQUET")):
        assert line in refused(["ablate", str(tmp_path / name), "--out", str(tmp_path / "out")], tmp_path, capsys)


def test_out_that_cannot_be_written_is_found_before_training(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("functricks.cli.ablate.run", lambda *_, **__: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    for out in ("file", "file/out"):
        line = refused(["ablate", str(data), "--out", str(tmp_path / out)], tmp_path, capsys)
        assert "cannot write there" in line
        assert "choose another folder" in line


@pytest.mark.parametrize("name", FILES)
def test_targets_that_are_no_files_are_found_before_training(
    name: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("functricks.cli.ablate.run", lambda *_, **__: pytest.fail("trained"))
    (tmp_path / "out" / name).mkdir(parents=True)
    line = refused(["ablate", str(data), "--out", str(tmp_path / "out")], tmp_path, capsys)
    assert f"{name} is there and is no regular file; move it away" in line


def test_files_move_together_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b").write_text("old")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "c":
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    def write(renamed: Any = rename) -> None:
        monkeypatch.setattr(Path, "rename", renamed)
        with staged(tmp_path, "abc") as stage:
            for name in "abc":
                (stage / name).write_text("new")

    with pytest.raises(CommandError, match=r"c cannot be written \(Permission denied\)"):
        write(failing)
    assert os.listdir(tmp_path) == ["b"]
    assert (tmp_path / "b").read_text() == "old"
    write()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys("abc", "new")


def test_accumulation_counts_are_whole_numbers() -> None:
    arm = parse_arms("accumulation=1e6")[1]
    assert arm == ("accumulation 1000000", {"gradient": "accumulate 1000000"})


def test_failure_while_writing_leaves_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("functricks.cli.ablate.forest_plot", fail)
    for out in (tmp_path / "new" / "out", tmp_path):
        with pytest.raises(MemoryError):
            main(["ablate", str(data), "--out", str(out), "--techniques", "dropout", *QUICK])
        assert os.listdir(tmp_path) == ["data.csv"]


def test_interrupt_says_so_and_leaves_nothing(data: Path, tmp_path: Path) -> None:
    arguments = ["ablate", data, "--out", tmp_path / "out", "--epochs", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "functricks", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        # A shell's background jobs ignore SIGINT, and so would all that they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "out").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == "interrupted: nothing was written"
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == ["data.csv"]


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    """A finder that hides the extra's libraries stands for an environment without them."""
    code = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"typer", "rich", "matplotlib", "sklearn", "polars"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
from functricks.cli import main
sys.exit(main(["ablate"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "error: the command needs typer; install it with: pip install 'functricks-torch[cli]'\n"
    assert done.stdout == ""
