"""Speed rows: whole training steps in lanes, against the classic loop.

The problem: a perceptron 64-64-64-10, batches of 32, AdamW. The classic loop trains one run: draw a minibatch by a
shuffled index, ``zero_grad``, forward, ``backward``, ``AdamW.step``. The functional program trains 64 runs that differ
in their learning rate, each with the whole atomic step and its own minibatches drawn from keys, through
:func:`functricks.experiments.run`. Times are milliseconds for one training step of one run.

One round is an epoch of the functional program, then an epoch of the classic loop with AdamW's default flags, then one
with ``fused=True``: slow spells of the machine hit all three. Rounds that compile are dropped; medians are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Literal, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from functricks import TrainState, TrainStep, adamw, gradient, losses, random, train_step, tree
from functricks.experiments import Experiment, minibatches, run, running, zipped
from functricks.types import Batch, GradFn, Loss, Params
from parity.timing import WARM_UP, Measure, Row, to_row

LANES = 64
ROWS, FEATURES, CLASSES, BATCH = 1437, 64, 10, 32  # scikit-learn's digits have this size
EPOCH = ROWS // BATCH


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


@cache
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, FEATURES, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)


class Times(NamedTuple):
    """Milliseconds for a training step of one run, a number a round."""

    functional: list[float]
    default: list[float]
    fused: list[float]


# --- the classic loop ------------------------------------------------------------------------------------------------


def classic_epoch(fused: bool) -> Callable[[], float]:
    """Return the function that trains for an epoch and returns the milliseconds a step."""
    x, y = data()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **({"fused": True} if fused else {}))

    def epoch() -> float:
        with torch.enable_grad():
            start = time.perf_counter()
            order = torch.randperm(ROWS)
            for step in range(EPOCH):
                rows = order[step * BATCH : (step + 1) * BATCH]
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            return (time.perf_counter() - start) * 1e3 / EPOCH

    return epoch


# --- the functional step ---------------------------------------------------------------------------------------------


def grad_fn(backend: Literal["func", "autograd"] = "func") -> GradFn:
    module = network()

    def loss_fn(params: Params, batch: Batch) -> Loss:
        return losses.cross_entropy(functional_call(module, params, (batch[0],)), batch[1], ignore_index=None)

    return gradient(loss_fn, backend=backend)


def start() -> Params:
    return {name: parameter.detach() for name, parameter in network().named_parameters()}


def batched(rounds: int, *, compile: bool, steps_a_call: int | None = None) -> Times:
    """Time 64 lanes through ``run``; the classic epochs run in its progress callback, between two functional ones."""
    times = Times([], [], [])
    default, fused = classic_epoch(False), classic_epoch(True)
    began, spent, reported = 0.0, 0.0, 0

    def progress(done: int, total: int) -> None:
        nonlocal began, spent, reported
        spent += time.perf_counter() - began
        if done - reported >= EPOCH * LANES:
            times.functional.append(spent * 1e3 / (done - reported))
            times.default.append(default())
            times.fused.append(fused())
            spent, reported = 0.0, done
        began = time.perf_counter()

    params, slopes = start(), grad_fn()

    def step(config: dict[str, Tensor]) -> TrainStep:
        return train_step(slopes, adamw(config["lr"]))

    experiment = Experiment(
        init=lambda config, key: step(config).init(tree.map(torch.clone, params)),
        update=lambda config, state, batch: step(config).update(state, batch),
        evaluate=lambda config, state, data: {"norm": tree.norm(state.params)},
    )
    configs = zipped(lr=torch.logspace(-4, -2, LANES).tolist(), seed=range(LANES))
    plan = minibatches(data(), BATCH, epochs=WARM_UP + rounds, order="per-lane")
    patch: AbstractContextManager[object] = nullcontext()
    if steps_a_call is not None:
        patch = mock.patch.object(running, "_STEPS_PER_CALL", steps_a_call)
    with patch:
        began = time.perf_counter()
        run(experiment, configs, plan, key=random.key(0), chunk_size=LANES, compile=compile, progress=progress)
    return Times(*(column[WARM_UP:] for column in times))


def alone(rounds: int, *, backend: Literal["func", "autograd"], compile: bool = False) -> Times:
    """Time one run without lanes: what the functional step costs where nothing is batched."""
    x, y = data()
    step = train_step(grad_fn(backend), adamw(1e-3))
    update = torch.compile(step.update, fullgraph=True) if compile else step.update
    state = step.init(start())

    def epoch(state: TrainState, number: int) -> TrainState:
        order = random.permutation(random.fold_in(random.key(0), number), ROWS)
        for i in range(EPOCH):
            rows = order[i * BATCH : (i + 1) * BATCH]
            state, _ = update(state, (x[rows], y[rows]))
        return state

    times = Times([], [], [])
    default, fused = classic_epoch(False), classic_epoch(True)
    for number in range(WARM_UP + rounds):
        began = time.perf_counter()
        with torch.no_grad():
            state = epoch(state, number)
        times.functional.append((time.perf_counter() - began) * 1e3 / EPOCH)
        times.default.append(default())
        times.fused.append(fused())
    return Times(*(column[WARM_UP:] for column in times))


# --- cases -----------------------------------------------------------------------------------------------------------


TimesOf = Callable[[int], Times]


def both(name: str, times_of: TimesOf, default: float | None, fused: float | None) -> dict[str, Measure]:
    """Return two rows of one measurement: against AdamW with its default flags, and against ``fused=True``."""
    measured = cache(times_of)

    def row(title: str, against: Literal["default", "fused"], target: float | None, rounds: int) -> Row:
        times = measured(rounds)
        return to_row(title, statistics.median(times.functional), statistics.median(getattr(times, against)), target)

    titles = (name, "default", default), (f"{name}, against fused", "fused", fused)
    return {title: partial(row, title, against, target) for title, against, target in titles}


def one(name: str, times_of: TimesOf) -> dict[str, Measure]:
    """Return the row against the default flags alone, for information."""
    return {name: both(name, times_of, None, None)[name]}


CASES: dict[str, Measure] = {
    **both(f"{LANES} lanes, eager", partial(batched, compile=False), 5.0, 4.0),
    **both(f"{LANES} lanes, compiled, one step a call", partial(batched, compile=True, steps_a_call=1), 10.0, 8.5),
    **both(f"{LANES} lanes, compiled, several steps a call", partial(batched, compile=True), 14.0, 11.0),
    **one("one run, eager, torch.func", partial(alone, backend="func")),
    **one("one run, eager, autograd", partial(alone, backend="autograd")),
    **one("one run, compiled", partial(alone, backend="func", compile=True)),
}
