"""A training run that saves after every step, killed at random instants: ``python tests/killed_run.py FOLDER KILLS``.

Children are forked from a process that has imported everything, so that a run costs no imports. The parent itself
never differentiates: autograd does not work in a fork of a process in which it has.
"""

from __future__ import annotations

import json
import os
import random as python_random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch.func loads it when it first differentiates, which takes a second
from torch import Tensor, nn

from functricks import (
    adamw,
    adapter,
    chain,
    clip_by_global_norm,
    dynamic_loss_scale,
    functional,
    gradient,
    losses,
    random,
    schedules,
    supervised,
    supervised_carry,
    train_step,
)
from functricks.types import TrainState, TrainStep

STEPS = 60
WIDTH = 4096  # 0.7 MB in a checkpoint, so that a good part of the time is spent in saving
LONGEST = 0.15  # seconds until the kill


def training() -> tuple[TrainStep, TrainState]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.5), nn.Linear(WIDTH, 4))
    model = functional(net)
    loss_fn = supervised(model, lambda logits, targets: losses.cross_entropy(logits, targets))
    optimizer = chain(clip_by_global_norm(1.0), adamw(schedules.cosine_annealing(0.01, STEPS)))
    grad_fn = gradient(loss_fn, has_carry=True, has_metrics=True)
    step = train_step(grad_fn, optimizer, loss_scale=dynamic_loss_scale(2.0**8, growth_interval=7))
    return step, step.init(model.params, supervised_carry(model, random.key(1)))


def batch_of(step: Tensor) -> tuple[Tensor, Tensor]:
    """The position in the data is the step counter."""
    key = random.fold_in(random.key(2), step)
    return random.normal(key, (8, 6)), random.randint(key, (8,), 0, 4)


def run(folder: Path, report: int) -> None:
    """Go on from the last checkpoint, or start; tell the parent each step that is safe."""
    step, state = training()
    if folder.exists() and any(folder.glob("step-*")):
        state = adapter.load_checkpoint(folder, like=state)
    while int(state.step) < STEPS:
        state, _ = step.update(state, batch_of(state.step))
        adapter.save_checkpoint(folder, state, keep=2)
        os.write(report, int(state.step).to_bytes(8, "big"))


def forked(folder: Path, kill_after: float | None) -> tuple[bool, int]:
    """Run in a child; return whether it was killed, and the last step that it reported as saved."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(folder, writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run itself failed"
    return os.WIFSIGNALED(status), int.from_bytes(told[-8:], "big")


def tensors(tree: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(tree)


def main(folder: Path, kills: int) -> dict[str, int]:
    draw = python_random.Random(int(os.environ.get("KILL_SEED", "0")))
    forked(folder / "whole", None)
    whole = tensors(adapter.load_checkpoint(folder / "whole"))
    done = half_written = finished = 0
    place = folder / "killed0"
    while True:
        killed, told = forked(place, draw.uniform(0, LONGEST) if done < kills else None)
        done += killed
        half_written += place.exists() and any(place.glob(".*.tmp"))
        if place.exists() and any(place.glob("step-*")):
            last = adapter.load_checkpoint(place)
            assert int(last["step"]) >= told, "a checkpoint that was reported as saved is gone"
            if int(last["step"]) == STEPS:
                assert all(torch.equal(a, b) for a, b in zip(tensors(last), whole, strict=True))
                assert len(list(place.iterdir())) <= 4  # two, at most one too many, and one that is half-written
                finished += 1
                if done == kills:
                    return {"kills": done, "half_written": half_written, "finished": finished, "leaves": len(whole)}
                place = folder / f"killed{finished}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
