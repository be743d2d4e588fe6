from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors
import torch
from helpers import assert_same, assert_untouched, nonzero_like, odd_trees
from safetensors.torch import save_file
from torch import nn

from functricks import adamw, chain, dynamic_loss_scale, gradient, random, schedules, skip_nonfinite, train_step
from functricks.adapter import load_checkpoint, save_checkpoint
from functricks.types import TrainState

ROOT = Path(__file__).parent.parent


def same(actual: Any, expected: Any) -> bool:
    """Equal in value, type and structure."""
    if isinstance(expected, torch.Tensor):
        return actual.dtype == expected.dtype and torch.equal(actual, expected)
    if type(actual) is not type(expected):
        return False
    if isinstance(expected, dict):
        return list(actual) == list(expected) and all(same(actual[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    return actual == expected


# --- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_tree_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    for name, state in odd_trees(dtype).items():
        path = tmp_path / f"{name}.safetensors"
        with assert_untouched(state):
            assert save_checkpoint(path, state) == path
        like = nonzero_like(state, 1)
        with assert_untouched(like):
            found = load_checkpoint(path, like)
        assert_same(found, state)


def test_numbers_strings_and_containers_come_back_without_like(tmp_path: Path) -> None:
    state = {
        "numbers": [1, -(2**70), 0.1, float("inf"), True, None, "text"],
        "nested": ({3: {"x": torch.tensor(1.5)}, "three": ()}, OrderedDict(b=1, a=2), Counter({2: 1})),
        "": torch.zeros(0),
    }
    assert same(load_checkpoint(save_checkpoint(tmp_path / "a.safetensors", state)), state)
    nan = load_checkpoint(save_checkpoint(tmp_path / "a.safetensors", {"loss": float("nan")}))
    assert nan["loss"] != nan["loss"]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.uint8, torch.complex64, torch.complex128]
)
def test_every_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"x": torch.arange(-3, 3).to(dtype), "y": torch.tensor(1).to(dtype)}
    if dtype.is_complex:
        state["conjugate"] = (state["x"] + 1j).conj()
    assert same(load_checkpoint(save_checkpoint(tmp_path / "a.safetensors", state), state), state)


def test_paths_that_look_alike_stay_apart(tmp_path: Path) -> None:
    state = {"a.b": torch.tensor(1.0), "a": {"b": torch.tensor(2.0)}, 1: torch.tensor(3.0), "1": torch.tensor(4.0)}
    assert same(load_checkpoint(save_checkpoint(tmp_path / "a.safetensors", state)), state)


def test_other_programs_read_the_parameters(tmp_path: Path) -> None:
    state = TrainState(torch.tensor(3), {"encoder.weight": torch.ones(2)}, ())
    with safetensors.safe_open(save_checkpoint(tmp_path, state), framework="pt") as file:
        assert_same(file.get_tensor("params.encoder.weight"), torch.ones(2))


def test_memory_format_and_device_follow_like(tmp_path: Path) -> None:
    weight = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    path = save_checkpoint(tmp_path / "a.safetensors", {"w": weight})
    found = load_checkpoint(path, {"w": nn.Parameter(torch.zeros_like(weight))})["w"]
    assert found.stride() == weight.stride()
    assert type(found) is torch.Tensor
    assert not found.requires_grad
    assert_same(found, weight)


@pytest.mark.cuda
def test_tensors_go_back_to_the_gpu(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0, device="cuda"), "key": random.key(0)}
    found = load_checkpoint(save_checkpoint(tmp_path / "a.safetensors", state), state)
    assert (found["w"].device.type, found["key"].device.type) == ("cuda", "cpu")
    assert_same(found, state)


def test_a_loaded_tensor_owns_its_memory(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a.safetensors", {"w": torch.zeros(3)})
    before = path.read_bytes()
    for like in (None, {"w": torch.ones(3)}):
        load_checkpoint(path, like)["w"].add_(1)
    assert path.read_bytes() == before


# --- ties ------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(5, 300), nn.Linear(300, 5, bias=False)
        self.decoder.weight = self.encoder.weight


def test_a_shared_tensor_is_stored_once_and_tied_again(tmp_path: Path) -> None:
    model = Tied()
    path = save_checkpoint(tmp_path / "a.safetensors", {"model": model.state_dict()})
    assert path.stat().st_size < 1.5 * model.encoder.weight.nbytes
    for like in (None, {"model": Tied().state_dict()}):
        found = load_checkpoint(path, like)["model"]
        assert found["encoder.weight"] is found["decoder.weight"]
    other = Tied()
    other.load_state_dict(found)
    assert other.encoder.weight is other.decoder.weight
    assert_same(other.encoder.weight.detach(), model.encoder.weight.detach())


def test_tensors_that_only_overlap_are_no_tie(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    state = {"all": base, "head": base[:3], "tail": base[3:], "square": base.view(2, 3), "turned": base.view(2, 3).t()}
    found = load_checkpoint(save_checkpoint(tmp_path / "a.safetensors", state), state)
    assert_same(found, state)
    assert len({leaf.data_ptr() for leaf in found.values()}) == 5


# --- resuming --------------------------------------------------------------------------------------------------------


def test_a_pure_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    # C27: the scaler's scale and its tracker survive
    def loss(params: Any, batch: Any, key: Any) -> Any:
        noise = random.uniform(key, (4,))
        return ((params["w"] * batch - noise) ** 2).mean(), random.fold_in(key, 1)

    optimizer = chain(skip_nonfinite(adamw(schedules.linear_warmup(0.1, 4))))
    step = train_step(gradient(loss, has_carry=True), optimizer, loss_scale=dynamic_loss_scale(4.0, growth_interval=2))
    start = step.init({"w": torch.ones(4)}, random.key(3))
    batches = [torch.full((4,), x) for x in (0.5, float("inf"), 0.25, 2.0, 1.0, 3.0)]
    state = start
    for i, batch in enumerate(batches):
        if i == 3:
            save_checkpoint(tmp_path, state)
        state, _ = step.update(state, batch)
    resumed = load_checkpoint(tmp_path, start)
    assert type(resumed) is TrainState
    assert resumed.loss_scale.scale == 2.0  # halved by the step that was skipped
    assert resumed.loss_scale.growth_tracker == 1
    for batch in batches[3:]:
        resumed, _ = step.update(resumed, batch)
    assert_same(resumed, state)


def test_a_classic_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    def make() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
                torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3]),
            ],
            [2],
        )
        return model, optimizer, scheduler, torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def train(parts: tuple[Any, ...], batches: range) -> None:
        model, optimizer, scheduler, scaler = parts
        for i in batches:
            optimizer.zero_grad()
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(i))
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()

    def state_of(parts: tuple[Any, ...]) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler")
        return {
            **{name: part.state_dict() for name, part in zip(names, parts, strict=True)},
            "rng": torch.get_rng_state(),
        }

    whole = make()
    train(whole, range(3))
    save_checkpoint(tmp_path, state_of(whole), step=3)
    train(whole, range(3, 7))
    again = make()
    loaded = load_checkpoint(
        tmp_path, {"model": again[0].state_dict()} | dict.fromkeys(("optimizer", "scheduler", "scaler", "rng"))
    )
    for part, name in zip(again, ("model", "optimizer", "scheduler", "scaler"), strict=True):
        part.load_state_dict(loaded[name])
    torch.set_rng_state(loaded["rng"])
    train(again, range(3, 7))
    assert same(state_of(again), state_of(whole))


@pytest.mark.slow
def test_a_run_that_is_killed_fifty_times_ends_as_if_it_never_were(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tests/killed_run.py", tmp_path, "50"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == 50
    assert found["finished"] >= 1
    assert found["half_written"] > 0  # some instants lay inside a save


# --- files -----------------------------------------------------------------------------------------------------------


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("step-").removesuffix(".safetensors") for path in folder.iterdir())


def test_a_directory_keeps_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    for step in (8, 9, 10, 11):
        save_checkpoint(folder, {"step": torch.tensor(step)}, keep=2)
    assert steps_in(folder) == ["00000010", "00000011"]
    assert load_checkpoint(folder)["step"] == 11
    save_checkpoint(folder, {"x": 1}, step=5, keep=2)  # a run that went back keeps what it has just saved
    assert steps_in(folder) == ["00000005", "00000011"]
    save_checkpoint(folder, {"x": 1}, step=123456789, keep=None)
    assert len(steps_in(folder)) == 3
    assert load_checkpoint(folder) == {"x": 1}


def test_other_files_in_a_directory_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-best.safetensors").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    for step in range(3):
        save_checkpoint(tmp_path, {"x": step}, step=step, keep=1)
    assert steps_in(tmp_path) == ["00000002", "best", "notes.txt"]


def test_the_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    path = save_checkpoint(tmp_path / "a.safetensors", {"x": torch.ones(1)})
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("name", ["replace", "chmod"])
def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # X09: between the write and the rename
    path = save_checkpoint(tmp_path / "a.safetensors", {"x": 1})

    def fail(*args: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, name, fail)
        with pytest.raises(OSError, match="no space left"):
            save_checkpoint(path, {"x": 2})
    assert load_checkpoint(path) == {"x": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib, torch; from functricks.adapter import save_checkpoint\n"
        "pathlib.Path.replace = lambda *args: os.kill(os.getpid(), 9)\n"
        f"save_checkpoint({str(tmp_path / 'a.safetensors')!r}, {{'x': torch.ones(3)}})"
    )
    save_checkpoint(tmp_path / "a.safetensors", {"x": 1})
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert len(list(tmp_path.iterdir())) == 2
    assert load_checkpoint(tmp_path / "a.safetensors") == {"x": 1}
    save_checkpoint(tmp_path / "a.safetensors", {"x": 2})
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


# --- errors ----------------------------------------------------------------------------------------------------------


class Code:
    def __reduce__(self) -> Any:
        return exec, ("open('ran', 'w')",)


def bad_files(good: bytes) -> dict[str, bytes]:
    header = int.from_bytes(good[:8], "little")
    return {
        "empty": b"",
        "short": good[:5],
        "half a header": good[: 8 + header // 2],
        "half the data": good[:-5],
        "too long": good + b"more",
        "text": b"step,loss\n1,0.5\n" * 10,
        "pickle": pickle.dumps(Code()),
        "torch.save": _torch_file(Code()),
        "no JSON": good.replace(b'[\\"dict\\"', b'[\\"dict\\\\\\'),
        "no node": good.replace(b'[\\"dict\\"', b'["bad"    '),
        "version": good.replace(b'"version":"1"', b'"version":"9"'),
    }


def _torch_file(value: Any) -> bytes:
    import io

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("name", bad_files(b"").keys())
def test_a_bad_file_is_one_clear_error(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save_checkpoint(tmp_path / "step-00000001.safetensors", {"w": torch.arange(100.0)})
    good, bad = path.read_bytes(), bad_files(path.read_bytes())[name]
    assert good != bad
    path.write_bytes(bad)
    like = {"w": torch.ones(100)}
    with assert_untouched(like), pytest.raises(ValueError, match=r"step-00000001\.safetensors is no whole checkpoint"):
        load_checkpoint(tmp_path, like)
    assert path.read_bytes() == bad
    assert not (tmp_path / "ran").exists()


def test_safetensors_of_another_program_are_foreign(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors is no whole checkpoint of functricks: another program"):
        load_checkpoint(tmp_path / "a.safetensors")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*a\.safetensors"):
        load_checkpoint(tmp_path / "a.safetensors")
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .* in .*"):
        load_checkpoint(tmp_path)


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    ("like", "problem"),
    [
        (
            {"p": {"w": torch.ones(3), "n": 1}},
            r"p\.w is a tensor \[2\] of float32 .* tensor \[3\] of float32 in like",
        ),
        (
            {"p": {"w": torch.ones(2).double(), "n": 1}},
            r"p\.w is a tensor \[2\] of float32 .*\[2\] of float64 in like",
        ),
        ({"p": {"w": 1, "n": 1}}, r"p\.w is a tensor \[2\] of float32 in the file, and 1 in like"),
        ({"p": {"w": torch.ones(2), "n": torch.ones(1)}}, r"p\.n is 1 in the file, and a tensor \[1\]"),
        ({"p": {"w": torch.ones(2)}}, r"p\.n is in the file, not in like"),
        ({"p": {"w": torch.ones(2), "n": 1, "m": 1}}, r"p\.m is not in the file"),
        ({"p": [1]}, r"p is a dict in the file, and a list of 1 in like"),
        (Pair({}, 1), "the state is a dict in the file, and a Pair in like"),
        (torch.ones(1), r"the state is a dict in the file, and a tensor \[1\]"),
    ],
)
def test_a_mismatch_names_path_and_both_shapes(tmp_path: Path, like: Any, problem: str) -> None:
    path = save_checkpoint(tmp_path / "a.safetensors", {"p": {"w": torch.zeros(2), "n": 1}})
    with assert_untouched(like), pytest.raises(ValueError, match=rf"a\.safetensors does not fit: .*{problem}"):
        load_checkpoint(path, like)


def test_a_mismatch_of_rows_and_named_tuples(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a.safetensors", Pair([1, 2], ()))
    with pytest.raises(ValueError, match=r"first is a list of 2 in the file, and a list of 1 in like"):
        load_checkpoint(path, Pair([1], ()))
    with pytest.raises(ValueError, match=r"second is a tuple in the file, and a list of 0 in like"):
        load_checkpoint(path, Pair([1, 2], []))
    with pytest.raises(ValueError, match=r"the state is a NamedTuple in the file, and a dict in like"):
        load_checkpoint(path, {"first": [1, 2], "second": ()})
    with pytest.raises(ValueError, match=r"step is not in the file; .*; first is in the file, not in like"):
        load_checkpoint(path, TrainState(torch.tensor(1), {}, ()))
    with pytest.raises(ValueError, match=r"; and 20 more$"):
        load_checkpoint(save_checkpoint(path, [torch.ones(1)] * 30), [torch.ones(2)] * 30)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"a": {1, 2}}, "a is a set"),
        ({"a": [print]}, r"a\.0 is a builtin_function_or_method"),
        ({"a": torch.eye(2).to_sparse()}, r"a is a Tensor \(torch.sparse_coo"),
        ({"a": torch.ones(1, device="meta")}, r"a is a Tensor \(.*meta"),
        ({(1, 2): 1}, r"the state has the key \(1, 2\)"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, state: Any, problem: str) -> None:
    with pytest.raises(TypeError, match=f"save_checkpoint: {problem}"):
        save_checkpoint(tmp_path / "new", state, step=1)
    assert not (tmp_path / "new").exists()


def test_arguments(tmp_path: Path) -> None:
    for keep in (0, True, 1.5):
        with pytest.raises(ValueError, match="keep must be an integer >= 1, or None"):
            save_checkpoint(tmp_path, {}, step=1, keep=keep)
    with pytest.raises(ValueError, match="the state has no step"):
        save_checkpoint(tmp_path, {"x": 1})
    for step in (-1, torch.tensor([1, 2])):
        with pytest.raises(ValueError, match="step must be one integer >= 0"):
            save_checkpoint(tmp_path, {"x": 1}, step=step)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [lambda path: save_checkpoint(path, {}), load_checkpoint])
def test_without_safetensors(tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(tmp_path / "a.safetensors", {})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"_checkpoint needs safetensors: pip install 'functricks-torch\[adapter\]'"):
        call(path)
