"""``functricks schedules``: the list, the drawing, the file, and bad input."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from functricks import schedules
from functricks.cli import main
from functricks.cli.schedules import sketch


def drawn(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["schedules", *arguments]) == 0
    return capsys.readouterr().out


def test_list_names_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    listed = drawn(capsys)
    others = {"Curve", "Plateau", "PlateauState", "horizon", "join", "lambda_schedule", "plot", "product", "sample"}
    aliases = {"inverse_sqrt_schedule", "wsd_schedule"}
    for name in set(schedules.__all__) - others - aliases - {"reduce_on_plateau"}:
        assert f"{name}(" in listed
    assert ":class:" not in listed


def test_drawing_has_the_range_and_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    text = drawn(capsys, "linear_warmup", "lr=0.5", "num_warmup_steps=10", "first_step=1", "--steps", "21")
    lines = text.splitlines()
    assert lines[0] == "linear_warmup(lr=0.5, num_warmup_steps=10, first_step=1, start_factor=0.0)"
    assert lines[1].strip().startswith("0.5 ┤")
    assert "0.05 ┤" in text
    assert lines[-1].split() == ["0", "step", "20"]


def test_lists_and_words_are_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert "milestones=[10, 20]" in drawn(capsys, "multistep", "milestones=[10, 20]")
    assert "mode='triangular2'" in drawn(capsys, "cyclic", "max_lr=2", "step_size_up=10", "mode=triangular2")


def test_true_false_and_none_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert "three_phase=True" in drawn(capsys, "one_cycle", "total_steps=9", "three_phase=true")
    assert "inclusive=False" in drawn(capsys, "cosine_restarts", "T_0=4", "inclusive=false")
    assert "timescale=None" in drawn(capsys, "inverse_sqrt", "num_warmup_steps=4", "timescale=none")


def test_huge_rates_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert "1e+308 ┤" in drawn(capsys, "linear", "lr=1e308", "start_factor=-1", "end_factor=1", "total_iters=9")


def test_plot_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.png"
    assert f"drawn into {path}" in drawn(capsys, "step_decay", "step_size=10", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["cosine"], "unknown schedule 'cosine'; known: constant, "),
        (["step_decy"], "unknown schedule 'step_decy'; did you mean 'step_decay'?"),
        (["step_decay"], "step_decay: needs step_size=...; it takes: lr, step_size, gamma=0.1"),
        (["step_decay", "size=3"], "step_decay: has no argument 'size'; it takes: lr, step_size, gamma=0.1"),
        (["step_decay", "3"], "step_decay: '3' is no key=value; it takes: lr, step_size, gamma=0.1"),
        (["step_decay", "step_size=0"], "step_decay: step_size must be > 0, got 0"),
        (["step_decay", "step_size=many"], "step_decay: step_size must be a number or a tensor, got 'many'"),
        (["multistep", "milestones=2"], "multistep: milestones must be a list of step numbers, got 2; give [2]"),
        (["one_cycle", "total_steps=9", "three_phase=no"], "one_cycle: three_phase must be True or False, got 'no'"),
        (["constant", "lr=1", "lr=2"], "constant: lr is given twice; give it once"),
        (["constant", f"lr={10**400}"], "error: "),
        (["step_decay", "step_size=1e308"], "error: "),
        (["constant", "--plot", "."], "--plot .: is a directory; give a file in it, such as schedule.png"),
        (["constant", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["constant", "--plot", "none/a.png"], "--plot none/a.png: cannot be written (No such file or directory)"),
        (["constant", "--plot", "a.xyz"], "--plot a.xyz: cannot be written ("),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["schedules", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert line in said.err
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_sketch_of_odd_curves() -> None:
    assert "1 ┤" in sketch([0], [1.0])
    assert sketch([0, 1, 2], [1.0, math.nan, math.inf]).count("┤") == 14
    flat = sketch([0, 1], [2.0, 2.0], width=4, height=3).splitlines()
    assert [line.count("⠀") for line in flat[:3]] == [4, 2, 4]
