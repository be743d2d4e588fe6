from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from functricks import accumulate, distributed, experiments, functional, gradient, losses, random, sgd, train_step
from functricks.adapter import load_checkpoint
from functricks.types import Loss

ROOT = Path(__file__).parent.parent
SOURCE = Path(__file__).with_name("ranks.py").read_text()
SIZES = (2, 4)
CHECKS = re.findall(r"^@check\ndef (\w+)", SOURCE, re.MULTILINE)  # importing it would load what only ranks need


def environment() -> dict[str, str]:
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def start(what: str, folder: Path) -> tuple[dict[str, list[int]], str]:
    """Run ranks; return their exit codes, and what they wrote to stderr."""
    done = subprocess.run(
        [sys.executable, "tests/ranks.py", what, str(folder)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


# --- several ranks ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, str]]]:
    """The tracebacks of every check, for each number of ranks and each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    codes, errors = start("checks", folder)
    assert codes == {str(size): [0] * size for size in SIZES}, errors
    return {
        size: [json.loads((folder / str(size) / f"{rank}.json").read_text()) for rank in range(size)] for size in SIZES
    }


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", CHECKS)
def test_in_ranks(problems: Any, check: str, size: int) -> None:
    found = {f"rank {rank}": own[check] for rank, own in enumerate(problems[size]) if check in own}
    assert not found, "\n".join(f"--- {rank}\n{text}" for rank, text in found.items())


def test_there_are_checks() -> None:
    assert len(CHECKS) > 15


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_the_checkpoint_resumes(tmp_path: Path) -> None:
    begin = time.monotonic()
    codes, errors = start("killed", tmp_path)
    assert time.monotonic() - begin < 100
    assert codes == {"killed": [1, -9, 1], "again": [0, 0, 0], "whole": [0, 0, 0]}
    for rank in (0, 2):
        assert re.search(rf"RuntimeError: all_reduce: rank {rank} of 3 lost another rank, .* last checkpoint", errors)
    found = load_checkpoint(tmp_path / "killed")
    assert int(found["step"]) == 8
    assert_same(found, load_checkpoint(tmp_path / "whole"))


SCRIPT = """
import os, signal, sys, time
import torch
from functricks import adapter, distributed, experiments, gradient, random, sgd, train_step

folder = sys.argv[1]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and os.environ["RANK"] == "0":
    time.sleep(float(sys.argv[2]))  # the other rank must not find the address that this one had before the restart
with distributed.init(timeout=60) as rank:
    assert (rank.rank, rank.size, rank.local) == tuple(int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    step = train_step(distributed.all_reduce(gradient(lambda p, x: (p["w"] * x).square().mean())), sgd(0.1))
    state = step.init(distributed.broadcast({"w": torch.tensor(1.0 + rank.rank)}))
    if os.path.isdir(folder):
        state = adapter.load_checkpoint(folder, like=state)
    for i in range(int(state.step), 6):
        if i == 3 and rank.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        batch = random.normal(random.fold_in(random.key(0), i), (5,))
        state, _ = step.update(state, distributed.shard(batch))
        if rank.rank == 0:
            adapter.save_checkpoint(folder, state)
    descend = experiments.Experiment(
        init=lambda config, key: torch.tensor(1.0),
        update=lambda config, w, batch: (w - config["lr"] * w, ()),
        evaluate=lambda config, w, data: {"loss": w},
    )
    found = distributed.run(descend, experiments.grid(lr=[0.0, 0.5, 1]), [torch.zeros(1)], key=random.key(0))
    assert (found is None) == (rank.rank != 0)
    if found is not None:
        sys.stdout.write(f"losses {[row['loss'] for row in found]}\\n")
"""


@pytest.mark.slow
def test_torchrun_restarts_from_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "train.py"), str(tmp_path / "run"), "6"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "losses [1.0, 0.5, 0.0]" in done.stdout
    step = train_step(gradient(lambda params, x: (params["w"] * x).square().mean()), sgd(0.1))
    state = step.init({"w": torch.tensor(1.0)})
    for i in range(6):
        state, _ = step.update(state, random.normal(random.fold_in(random.key(0), i), (5,)))
    found = load_checkpoint(tmp_path / "run", like=state)
    assert int(found.step) == 6
    assert float((found.params["w"] - state.params["w"]).abs()) < 1e-6


# --- alone -----------------------------------------------------------------------------------------------------------


def loss(params: Any, x: Any) -> Loss:
    return Loss((params["w"] * x).square(), torch.ones_like(x))


def test_alone_everything_is_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    params, batch = {"w": torch.tensor(2.0)}, torch.tensor([1.0, 3.0])
    with distributed.init() as rank:
        assert rank[:3] == (0, 1, 0)
        assert rank.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert_same(distributed.all_reduce(gradient(loss))(params, batch), gradient(loss)(params, batch))
    assert distributed.broadcast(params) is params
    assert_same(distributed.shard((batch, torch.tensor(1))), (batch, torch.tensor(1)))
    batches = [batch, batch]
    assert [one is batch for one in distributed.join(iter(batches))] == [True, True]
    assert_same(distributed.global_mean(loss(params, batch)), loss(params, batch).mean())
    hits = Loss(torch.tensor([True, False, True]), torch.ones(3))
    assert_same(distributed.global_mean(hits), hits.mean())
    nothing = Loss(torch.zeros(2), torch.zeros(2))
    assert_same(distributed.global_mean(nothing), torch.tensor(0.0))
    assert_same(
        distributed.global_mean(nothing._replace(values=torch.ones(2)), weight=torch.tensor(4.0)), torch.tensor(0.5)
    )


def test_an_idle_batch_has_no_weight() -> None:
    grad_fn = distributed.all_reduce(gradient(lambda params, x, n: (loss(params, x), n + 1), has_carry=True))
    params, batch = {"w": torch.tensor(2.0)}, torch.tensor([1.0, 3.0])
    found = grad_fn(params, distributed.Idle(batch), torch.tensor(5))
    assert_same(found.grads, {"w": torch.tensor(0.0)})
    assert_same((found.loss, found.weight, found.carry), (torch.tensor(0.0), torch.tensor(0.0), torch.tensor(5)))
    outside = accumulate(distributed.all_reduce(gradient(loss)), 2)  # the micro-batches of an idle batch are idle
    assert float(outside(params, distributed.Idle(batch)).weight) == 0


def test_a_run_without_ranks_is_that_of_experiments() -> None:
    descend = experiments.Experiment(
        init=lambda config, key: random.uniform(key),
        update=lambda config, w, batch: (w - config["lr"] * w, ()),
        evaluate=lambda config, w, data: {"loss": w},
    )
    configs = experiments.grid(lr=[0.1, 0.2], seed=range(2))
    told: list[tuple[int, int]] = []
    found = distributed.run(
        descend, configs, [torch.zeros(1)], key=random.key(1), progress=lambda *step: told.append(step), chunk_size=1
    )
    alone = experiments.run(descend, configs, [torch.zeros(1)], key=random.key(1), chunk_size=1)
    assert found is not None
    assert [row["loss"] for row in found] == [row["loss"] for row in alone]
    assert told[-1] == (4, 4)


def test_a_sampler_in_a_loader_resumes_in_the_middle_of_an_epoch() -> None:
    rows = TensorDataset(torch.arange(10))
    sampler = distributed.ShardedSampler(len(rows), seed=1)
    loader = DataLoader(rows, batch_size=3, sampler=sampler)

    def epoch(number: int, start: int = 0) -> list[list[int]]:
        sampler.set_epoch(number, start)
        assert len(loader) == -(-(10 - start) // 3)
        return [batch[0].tolist() for batch in loader]

    first, second = epoch(0), epoch(1)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(10))
    assert first != second
    assert epoch(0) == first
    step = 5  # what the checkpoint has: 4 steps an epoch, so one in the second
    assert epoch(*divmod(step, 4)) != second  # a start in rows, not in steps
    assert epoch(step // 4, start=step % 4 * 3) == second[1:]
    assert epoch(0, start=12) == []


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="init: timeout must be positive, got 0"), distributed.init(timeout=0):
        pass
    with pytest.raises(ValueError, match="ShardedSampler: length must be >= 1, got 0"):
        distributed.ShardedSampler(0)
    with pytest.raises(ValueError, match="set_epoch: epoch and start must be >= 0, got 0 and -1"):
        distributed.ShardedSampler(3).set_epoch(0, -1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.raises(ValueError, match=r"init: local rank 3 has no GPU, there are 2; .*--nproc-per-node"),
        distributed.init(),
    ):
        pass


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_group_of_one_rank(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with distributed.init() as rank:
        assert (rank.rank, rank.size, rank.device.type) == (0, 1, device)
        tensors = [torch.ones(2, device=device), torch.tensor(3.0, device=device), torch.ones(1)]
        assert_same(distributed._summed("test", tensors, None), tensors)
        assert distributed._counts([True, False], None) == [1, 0]
    assert not torch.distributed.is_initialized()


# --- nn.DataParallel -------------------------------------------------------------------------------------------------


def test_a_module_in_data_parallel_works_as_any_other() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    wrapped, plain = functional(nn.DataParallel(net)), functional(net)
    assert_same(wrapped.params, plain.params)
    x = torch.randn(6, 3)
    assert_same(wrapped.apply(wrapped.params, wrapped.buffers, x), plain.apply(plain.params, plain.buffers, x))
    # and in a classic loop
    parallel, targets = nn.DataParallel(net), torch.randint(0, 2, (6,))
    losses.cross_entropy(parallel(x), targets).mean().backward()
    found = {name: parameter.grad for name, parameter in net.named_parameters()}
    net.zero_grad()
    nn.functional.cross_entropy(net(x), targets).backward()
    assert_same(found, {name: parameter.grad for name, parameter in net.named_parameters()})
