"""The parity harness itself: it passes what is equal, and fails what is off, stands still or crashes."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parity
from functricks import gradient, losses, sam, sgd
from parity import __main__ as command
from parity import accumulation, compositions, harness, matrix, speed, speed_lanes, tasks, timing
from parity.faults import __main__ as faults_command
from parity.faults.registry import faults, markdown
from parity.harness import Run, Technique, measure
from parity.tasks import Task

STEPS = 6
ALL = {one.name: one for one in command.techniques()}
FEW = [
    "label smoothing, class weights, ignored rows",
    "info_nce, learned temperature",
    "cyclic, exp_range",
    "reduce_on_plateau",
    "adamw, amsgrad",
    "learning rates per layer",
    "clip_by_global_norm",
    "accumulate, a micro-batch without a token",
    "pgd, projected",
    "vat",
    "r-drop",
    "attack, l2",
    "multi_steps, weights and a flush",
    "multi_task in accumulate in sam",
    "autocast in fgm in accumulate",
    "pgd in accumulate in loss scale",
    "train_step, steps that are not finite",
    "dropout, batch norm, fgm of every micro-batch, accumulated",
    "whole recipe, a lane of a batched experiment",
]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# --- the rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
def test_versions_agree(name: str) -> None:
    report = measure(ALL[name], steps=STEPS)
    assert report.row.ok, report.problems
    assert report.row.steps == STEPS


def test_every_module_is_in_the_table() -> None:
    names = [module.name for module in pkgutil.iter_modules(parity.__path__)]
    modules = {name: importlib.import_module(f"parity.{name}") for name in names}
    assert {name for name in names if hasattr(modules[name], "TECHNIQUES")} == set(command.MODULES)


def test_every_composition_has_a_row() -> None:
    """Those of test_pipeline.py, which builds its list in another way."""
    from test_pipeline import COMPOSITIONS

    wanted = {" in ".join(names) for names in COMPOSITIONS}
    assert len(wanted) > 100
    assert wanted <= ALL.keys()


def test_a_composition_in_another_order_is_off() -> None:
    for names, other in (
        (("fgm", "accumulate"), ("accumulate", "fgm")),
        (("sam", "pgd", "accumulate"), ("pgd", "sam", "accumulate")),
        (("autocast", "sam"), ("sam", "loss scale")),
    ):
        wrong = ALL[" in ".join(names)]._replace(functional=partial(compositions.functional, other))
        assert not measure(wrong).row.ok, names


def test_docstrings_name_files_that_exist() -> None:
    root = Path(parity.__path__[0]).parent
    texts = [path.read_text() for path in (root / "functricks").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"parity/\w+\.py", text)}
    assert named
    assert [name for name in named if not (root / name).exists()] == []


def test_names_are_unique() -> None:
    assert len(ALL) == len(command.techniques())


# --- the harness can fail --------------------------------------------------------------------------------------------


def classic(task: Task) -> Run:
    def backward(model: nn.Module, batch: Any) -> None:
        F.cross_entropy(model(batch[0]), batch[1]).backward()

    return harness.classic_loop(task, lambda model: torch.optim.SGD(model.parameters(), 0.3), backward)


def functional(task: Task) -> Run:
    loss_fn = task.loss_fn(lambda net, batch: losses.cross_entropy(net(batch[0]), batch[1]))
    return harness.functional_loop(task, gradient(loss_fn), sgd(0.3))


SAME = Technique("same", classic, functional, tasks.classes)


def perturbed(dtype: torch.dtype, amount: float, unit: str) -> Technique:
    """Move the entry that went farthest, by an amount of tolerances or of ulps."""

    def off(task: Task) -> Run:
        run = functional(task)
        name, end = next(iter(run.end.items()))
        if end.dtype != dtype:
            return run
        moved = end - run.start[name]
        place = moved.abs().argmax()
        size = moved.abs().max() * harness.TOLERANCE if unit == "tolerances" else _spacing(end) * harness.ULPS
        end = end.clone()
        end.view(-1)[place] += amount * size
        run.end[name] = end
        return run

    return SAME._replace(functional=off)


def _spacing(leaf: torch.Tensor) -> torch.Tensor:
    largest = leaf.abs().max()
    return torch.nextafter(largest, torch.tensor(torch.inf)) - largest


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float64, "tolerances"), (torch.float32, "ulps")])
def test_off_by_two_tolerances_fails(dtype: torch.dtype, unit: str) -> None:
    assert measure(SAME, steps=STEPS).row.ok
    assert measure(perturbed(dtype, 0.5, unit), steps=STEPS).row.ok
    report = measure(perturbed(dtype, 2.0, unit), steps=STEPS)
    assert not report.row.ok
    assert len(report.problems) == 1
    size = report.row.rel_f64 / harness.TOLERANCE if unit == "tolerances" else report.row.ulp_f32 / harness.ULPS
    assert size == pytest.approx(2.0, rel=0.05)


def test_the_usual_fault_fails() -> None:
    def mean_of_means(task: Task) -> Run:
        def backward(model: nn.Module, batch: Any) -> None:
            parts = list(zip(batch[0].split(4), batch[1].split(4), strict=True))
            for rows, labels in parts:
                (F.cross_entropy(model(rows), labels) / len(parts)).backward()

        return harness.classic_loop(
            task, lambda model: torch.optim.AdamW(model.parameters(), accumulation.LR), backward
        )

    right = ALL["accumulate, ignored tokens"]
    report = measure(right._replace(classic=mean_of_means), steps=STEPS)
    assert report.row.rel_f64 > 1e-3
    assert not report.row.ok


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda run: run.end.update(run.start), "did not move"),
        (lambda run: run.gradients.update(dict.fromkeys(run.gradients, 0.0)), "saw no gradient"),
        (lambda run: run.gradients.clear(), "no gradient was seen"),
        (lambda run: setattr(run, "steps", run.steps + 1), "functional steps"),
        (lambda run: run.end.update({"0.bias": run.end["0.bias"] * math.nan}), "relative difference nan"),
        (lambda run: run.start.update({"0.bias": run.start["0.bias"] + 1}), "starts elsewhere"),
    ],
)
def test_worthless_comparisons_fail(spoil: Any, problem: str) -> None:
    def spoiled(version: Any) -> Any:
        def train(task: Task) -> Run:
            run = version(task)
            spoil(run)
            return run

        return train

    report = measure(SAME._replace(functional=spoiled(functional)), steps=STEPS)
    assert not report.row.ok
    assert any(problem in one for one in report.problems), report.problems
    if problem == "did not move":  # also where both versions agree perfectly
        both = SAME._replace(classic=spoiled(classic), functional=spoiled(functional))
        assert not measure(both, steps=STEPS).row.ok


def test_units() -> None:
    start = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([0.0])}
    one = Run(start, {"a": torch.tensor([1.5, 1.0]), "b": torch.tensor([3.0])})
    other = Run(start, {"a": torch.tensor([1.5, 1.0 + 2**-20]), "b": torch.tensor([3.0])})
    assert harness.relative_difference(one, other) == 2**-20 / 0.5
    assert harness.ulp_difference(one, other) == 2**-20 / 2**-23


# --- the command -----------------------------------------------------------------------------------------------------


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "sgd", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    (row,) = found["rows"]
    assert list(row) == ["technique", "steps", "rel_f64", "ulp_f32", "tolerance", "ok"]
    assert row["technique"] == "sgd"
    assert row["steps"] > 0
    assert row["rel_f64"] <= row["tolerance"]
    assert row["ok"] is True


def test_exit_code_and_null(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def crashes(task: Task) -> Run:
        raise RuntimeError("no such thing")

    rows = [SAME, SAME._replace(name="broken", functional=crashes), perturbed(torch.float64, 2.0, "tolerances")]
    rows[2] = rows[2]._replace(name="off")
    monkeypatch.setattr(command, "techniques", lambda: rows)
    assert command.main(["--json"]) == 1
    printed = capsys.readouterr()
    found = {row["technique"]: row for row in json.loads(printed.out)["rows"]}
    assert {name: row["ok"] for name, row in found.items()} == {"same": True, "broken": False, "off": False}
    assert found["broken"]["rel_f64"] is None
    assert "broken: RuntimeError: no such thing" in printed.err
    assert "off: float64: relative difference" in printed.err
    assert command.main([]) == 1
    assert "1 of 3" in capsys.readouterr().out


def test_only_takes_globs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "techniques", lambda: [SAME, SAME._replace(name="other")])
    assert command.main(["--only", "s*"]) == 0
    assert "1 of 1" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        command.main(["--only", "nothing"])
    assert "--only 'nothing' names nothing; have: same; other" in capsys.readouterr().err


# --- the matrix ------------------------------------------------------------------------------------------------------


def test_matrix_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--json", "--only", "lion"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["column"] for row in rows] == list(matrix.COLUMNS)
    for row in rows:
        assert list(row) == ["technique", "column", "ok", "reason"]
        assert (row["technique"], row["ok"]) == ("lion", True)
    assert [row["reason"] for row in rows] == ["", "", "", "its derivative jumps", ""]


def test_every_technique_is_the_same_in_a_classic_loop() -> None:
    ran = set()
    for name, make in matrix.entries().items():
        check = make().adapter
        if not isinstance(check, str):
            check()
            ran.add(name)
    assert {"adamw", "fgm", "pgd", "accumulate", "focal_loss", "cosine_annealing", "join"} <= ran
    assert len(ran) > 90


def test_a_cell_that_is_off_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    entry = matrix.entries()["softmax"]()
    off = partial(matrix.gradient_in_loop, lambda grad_fn: sam(grad_fn, 0.5), None, [5])
    calls = iter(range(1000))
    drifts = entry.case._replace(function=lambda numbers, inputs: inputs[0] * next(calls))
    broken = entry._replace(case=drifts, at_zero=drifts, adapter=off)
    monkeypatch.setattr(matrix, "entries", lambda: {"softmax": lambda: broken})
    assert matrix.main([]) == 1
    shown = capsys.readouterr()
    assert "1 of 5 cells are ok" in shown.out
    for column in ("pure", "vmap", "hyper-gradient"):
        assert f"softmax, {column}: AssertionError" in shown.err
    assert "softmax, adapter: AssertionError: ['0.weight']: displacement off by" in shown.err


# --- speed -----------------------------------------------------------------------------------------------------------


def test_speed_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"ROWS": 130, "EPOCH": 4, "LANES": 3, "WARM_UP": 1}.items():
        monkeypatch.setattr(speed_lanes, name, value)
    monkeypatch.setattr(speed, "THREADS", 1)
    monkeypatch.setattr(speed, "MODULES", (speed_lanes,))
    speed_lanes.data.cache_clear()
    code = speed.main(["--quick", "--json", "--only", "*eager*"])
    speed_lanes.data.cache_clear()
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 4
    for row in rows:
        assert list(row) == ["case", "functional_ms", "classic_ms", "ratio", "target", "ok"]
        assert row["ratio"] == row["classic_ms"] / row["functional_ms"] > 0
        assert row["ok"] == (row["target"] is None or row["ratio"] >= row["target"])
    assert code == (0 if all(row["ok"] for row in rows) else 1)


def test_lanes_against_both_classic_optimizers() -> None:
    times = speed_lanes.Times([0.5, 9.0, 0.5], [9.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    rows = [measure(1) for measure in speed_lanes.both("a case", lambda rounds: times, 4.0, 3.0).values()]
    assert rows == [
        timing.Row("a case", 0.5, 2.0, 4.0, 4.0, True),
        timing.Row("a case, against fused", 0.5, 1.0, 2.0, 3.0, False),
    ]


@pytest.mark.parametrize(("functional_ms", "code"), [(0.5, 0), (2.0, 1)])
def test_speed_target(
    functional_ms: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "THREADS", 1)
    monkeypatch.setattr(speed, "cases", lambda: {"a case": lambda rounds: timing.to_row("a case", functional_ms, 2, 3)})
    assert speed.main([]) == code
    assert ("NO" in capsys.readouterr().out) == bool(code)


def test_versions_take_turns() -> None:
    called: list[str] = []
    row = timing.in_turns("a case", lambda: called.append("ours"), lambda: called.append("theirs"), None, 1, calls=2)
    assert called == ["ours", "ours", "theirs", "theirs"] * (1 + timing.WARM_UP)
    assert row.ok
    assert row.target is None


# --- faults ----------------------------------------------------------------------------------------------------------


def test_readme_has_the_numbers_that_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(parity.__path__[0]) / "README.md").read_text()
    assert readme.endswith(f"\n\n{markdown()}\n")
    assert faults_command.main([]) == 0
    listing = capsys.readouterr().out
    cells = [re.split(r"(?<!\\)\|", line)[4].strip().replace("\\|", "|") for line in markdown().splitlines()[2:]]
    assert len(cells) > 30
    assert all(f"-> {cell}\n" in listing for cell in cells)


def test_known_numbers() -> None:
    """Worked out by hand or published with the report of the fault."""
    found = " / ".join(one.number for one in faults())
    for number in (
        "2.5, or 5, instead of 3.25",
        "0.41 instead of 0.2685",
        "0.16, with `row` 0.95",
        "23.08 instead of 20.5",
    ):
        assert number in found
