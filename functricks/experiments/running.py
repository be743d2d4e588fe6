"""Run a batch of configurations: one program a structure, lanes chunked, steps in a compiled scan or an eager loop."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functricks import random, tree
from functricks.experiments.batches import Minibatches, take
from functricks.experiments.configs import Config, Group, group, is_integer
from functricks.experiments.results import Results
from functricks.gradients._loop import scan
from functricks.types import Batch, State

__all__ = ["Experiment", "run"]

Progress = Callable[[int, int], None]

_CHUNK_BYTES = 8 * 2**20  # of state a chunk: 64 lanes of a small MLP with AdamW, the fastest count measured
_MIN_LANES = 8
_STEPS_PER_CALL = 50  # steps in one compiled scan
_SECONDS = "seconds"  # the metric that run adds


class Experiment(NamedTuple):
    """A training run as three pure functions of its configuration.

    - ``init(config, key) -> state``: any pytree of tensors, e.g. a :class:`~functricks.TrainState`;
    - ``update(config, state, batch) -> (state, info)``;
    - ``evaluate(config, state, data) -> {name: 0-d tensor}``.

    ``config`` is a dict in which numbers are 0-d tensors, one value a lane.
    """

    init: Callable[[Config, Tensor], State]
    update: Callable[[Config, State, Batch], tuple[State, Any]]
    evaluate: Callable[[Config, State, Any], dict[str, Tensor]]


def run(
    experiment: Experiment,
    configs: Sequence[Config],
    batches: Minibatches | Iterable[Batch],
    *,
    key: Tensor,
    eval_data: Any = (),
    eval_every: int | None = None,
    chunk_size: int | Literal["auto"] = "auto",
    compile: bool = False,
    backend: Literal["vmap", "loop"] = "vmap",
    progress: bool | Progress = False,
) -> Results:
    """Train every configuration and evaluate it.

    Args:
        experiment: the run, as three functions.
        configs: from :func:`grid` and :func:`zipped`. Their numbers become tensors with a leading axis; those that
            share everything else form one program.
        batches: :func:`minibatches`, or an iterable of batches that every lane sees.
        key: from :func:`functricks.random.key`. A configuration's own key is ``fold_in(key, config.get("seed", 0))``,
            so that the result of a seed depends neither on what runs beside it nor on its place.
        eval_data: handed to ``evaluate``.
        eval_every: evaluate every so many steps too, into ``Results.history``.
        chunk_size: how many lanes at a time; ``"auto"`` keeps the state of a chunk in cache.
        compile: compile the step; with :func:`minibatches`, several steps in one scan.
        backend: ``"loop"`` runs one configuration at a time, without ``vmap``: the same numbers, slower.
        progress: show progress on stderr, or call ``progress(done, total)`` with lane-steps.

    Gradients are computed under ``torch.no_grad()``: nothing here is differentiated through.

    Every row gets the metrics of ``evaluate``, and ``seconds``: its share of the time of its chunk. A metric must not
    have the name of a setting, nor either be named ``seconds``, nor, with ``eval_every``, be named ``config`` or
    ``step``: that raises ``ValueError``.

    >>> from functricks import TrainState
    >>> from functricks.experiments import grid
    >>> descend = Experiment(
    ...     init=lambda config, key: torch.tensor(1.0),
    ...     update=lambda config, w, batch: (w - config["lr"] * 2 * w, ()),
    ...     evaluate=lambda config, w, data: {"loss": w * w},
    ... )
    >>> results = run(descend, grid(lr=[0.1, 0.5]), [torch.zeros(1)] * 2, key=random.key(0))
    >>> [round(row["loss"], 4) for row in results]
    [0.4096, 0.0]
    """
    groups = group(configs)
    _check(configs, eval_every, chunk_size, backend)
    if not isinstance(batches, Minibatches):
        batches = list(batches)
    metrics: list[dict[str, float]] = [{} for _ in configs]
    states: list[Any] = [None] * len(configs)
    history: list[dict[str, float]] = []
    total = len(configs) * (batches.total_steps if isinstance(batches, Minibatches) else len(batches))
    report = _Report(progress, total)
    with torch.no_grad():
        for one in groups:
            program = _Program(experiment, one.static, batches, compile, backend == "vmap")
            for chunk in _chunks(program, one, key, chunk_size if backend == "vmap" else 1):
                start = time.perf_counter()
                state, found, seen = program.train(chunk, key, eval_data, eval_every, report)
                lanes = {index: lane for lane, index in enumerate(chunk.indices)}  # the last lane may be there twice
                seconds = (time.perf_counter() - start) / len(lanes)
                for index, lane in lanes.items():
                    metrics[index] = {
                        **{name: float(column[lane]) for name, column in found.items()},
                        _SECONDS: seconds,
                    }
                    states[index] = (state, lane)
                history += [
                    {"config": index, "step": step, **{name: float(column[lane]) for name, column in values.items()}}
                    for step, values in seen
                    for index, lane in lanes.items()
                ]
    history.sort(key=lambda row: (row["config"], row["step"]))
    return Results(configs, metrics, states, history)


def _check(configs: Sequence[Config], eval_every: Any, chunk_size: Any, backend: str) -> None:
    if len(configs) == 0:
        raise ValueError("run: no configurations; pass e.g. grid(lr=[1e-3, 1e-2], seed=range(8))")
    if backend not in ("vmap", "loop"):
        raise ValueError(f"run: backend must be 'vmap' or 'loop', got {backend!r}")
    if chunk_size != "auto" and (not is_integer(chunk_size) or chunk_size < 1):
        raise ValueError(f"run: chunk_size must be 'auto' or an integer >= 1, got {chunk_size!r}")
    if eval_every is not None and (not is_integer(eval_every) or eval_every < 1):
        raise ValueError(f"run: eval_every must be an integer >= 1, got {eval_every!r}")
    if any(_SECONDS in config for config in configs):
        raise ValueError(f"run: a setting must not be named {_SECONDS!r}: run reports the time under it")


# --- lanes -----------------------------------------------------------------------------------------------------------


class _Program:
    """The three functions of one structure, over lanes."""

    def __init__(
        self, experiment: Experiment, static: Config, batches: Minibatches | list[Batch], compile: bool, vmapped: bool
    ) -> None:
        self.batches = batches
        over_lanes = _vmapped if vmapped else _one_lane
        own_rows = isinstance(batches, Minibatches) and batches.order == "per-lane"

        def init(numbers: Config, key: Tensor) -> State:
            return experiment.init({**static, **numbers}, key)

        def update(numbers: Config, state: State, batch: Batch) -> State:
            return experiment.update({**static, **numbers}, state, batch)[0]

        def evaluate(numbers: Config, state: State, data: Any) -> dict[str, Tensor]:
            config = {**static, **numbers}
            return _checked(config, experiment.evaluate(config, state, data))

        self.init = over_lanes(init, (0, 0))
        self.evaluate = over_lanes(evaluate, (0, 0, None))
        step = over_lanes(update, (0, 0, 0 if own_rows else None))
        # isolated: every structure compiles anew, which is no recompilation of the one before
        compiled = partial(torch.compile, fullgraph=True, dynamic=False, isolate_recompiles=True)
        self.step = compiled(step) if compile else step
        self.scan = compiled(_scan_of(step)) if compile else None

    def train(
        self, chunk: Group, key: Tensor, eval_data: Any, eval_every: int | None, report: _Report
    ) -> tuple[State, dict[str, Tensor], list[tuple[int, dict[str, Tensor]]]]:
        """Train a chunk of lanes; return the states, the final metrics, and those on the way."""
        keys = _keys(chunk, key)
        state = tree.map(torch.Tensor.contiguous, self.init(chunk.numbers, keys))
        done, seen = 0, []
        for steps, advance in self._advances(chunk.numbers, keys, key, eval_every):
            state = advance(state)
            done += steps
            report.add(steps * len(set(chunk.indices)))
            if eval_every is not None and done % eval_every == 0:
                seen.append((done, _historic(self.evaluate(chunk.numbers, state, eval_data))))
        return state, self.evaluate(chunk.numbers, state, eval_data), seen

    def _advances(
        self, numbers: Config, keys: Tensor, key: Tensor, eval_every: int | None
    ) -> Iterator[tuple[int, Callable[[State], State]]]:
        """Yield (how many steps, the function from state to state that does them)."""
        if not isinstance(self.batches, Minibatches):
            for batch in self.batches:
                yield 1, partial(self._one_step, numbers, batch)
            return
        plan, left, epoch = self.batches, self.batches.total_steps, 0
        many = 1 if self.scan is None else _steps_a_call(plan.steps_per_epoch, eval_every)
        while left:
            rows = plan.indices(keys, epoch) if plan.order == "per-lane" else plan.indices(key[None], epoch)[0]
            for block in plan.blocks(rows, many, left):
                left -= len(block)
                if len(block) == 1:
                    yield 1, partial(self._one_step, numbers, take(plan.data, block[0]))
                else:
                    yield len(block), partial(self._many_steps, numbers, block, plan.data)
            epoch += 1

    def _one_step(self, numbers: Config, batch: Batch, state: State) -> State:
        return self.step(numbers, state, batch)

    def _many_steps(self, numbers: Config, block: Tensor, data: Any, state: State) -> State:
        assert self.scan is not None
        return self.scan(numbers, state, block, data)


def _checked(config: Config, metrics: Any) -> dict[str, Tensor]:
    """Check what ``evaluate`` returned for one lane."""
    if not isinstance(metrics, dict):
        raise TypeError(f"run: evaluate must return a dict of 0-d tensors, got {type(metrics).__name__}")
    for name, value in metrics.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"run: evaluate: metric {name!r} must be a 0-d tensor, got {type(value).__name__}")
        if value.ndim:
            raise ValueError(
                f"run: evaluate: metric {name!r} must be a 0-d tensor, got shape {list(value.shape)}; reduce it, "
                "e.g. by .mean()"
            )
        if name == _SECONDS:
            raise ValueError(f"run: evaluate: a metric must not be named {name!r}: run reports the time under it")
        if name in config:
            raise ValueError(f"run: evaluate: metric {name!r} has the name of a setting; rename one of them")
    return metrics


def _historic(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Check that metrics on the way do not have the names of the other columns of the history."""
    if both := [name for name in ("config", "step") if name in metrics]:
        raise ValueError(f"run: evaluate: metric {both[0]!r} has the name of a column of Results.history; rename it")
    return metrics


def _vmapped(function: Callable[..., Any], axes: tuple[int | None, ...]) -> Callable[..., Any]:
    def over_lanes(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.vmap(function, in_dims=axes)(*inputs)
        return tree.map_lanes(function, axes, inputs)

    return over_lanes


def _one_lane(function: Callable[..., Any], axes: tuple[int | None, ...]) -> Callable[..., Any]:
    """Do what ``vmap`` does, for a leading axis of length one and without ``vmap``."""

    def once(*inputs: Any) -> Any:
        own = [x if axis is None else tree.map(lambda leaf: leaf[0], x) for x, axis in zip(inputs, axes, strict=True)]
        return tree.map(lambda leaf: leaf[None], function(*own))

    return once


def _scan_of(step: Callable[..., State]) -> Callable[..., State]:
    """Return the function that does one step for each row of ``block``; its compile time does not grow with them."""

    def many(numbers: Config, state: State, block: Tensor, data: Any) -> State:
        def body(state: State, rows: Tensor) -> State:
            return step(numbers, state, take(data, rows))

        return scan(body, state, block)

    return many


def _steps_a_call(steps_per_epoch: int, eval_every: int | None) -> int:
    """Return how many steps one scan does: a divisor of the epoch where there is a fair one, for a single program."""
    whole = math.gcd(steps_per_epoch, eval_every) if eval_every else steps_per_epoch
    most = min(whole, _STEPS_PER_CALL)
    return next((size for size in range(most, most // 4, -1) if whole % size == 0), most if not eval_every else 1)


def _keys(chunk: Group, key: Tensor) -> Tensor:
    seeds = chunk.numbers.get("seed", torch.zeros(len(chunk.indices), dtype=torch.int64))
    return torch.vmap(lambda seed: random.fold_in(key, seed))(seeds)


def _chunks(program: _Program, whole: Group, key: Tensor, size: int | Literal["auto"]) -> list[Group]:
    """Cut a group into chunks of nearly equal size (of equal size where they are compiled)."""
    count = len(whole.indices)
    if isinstance(size, str):
        first = _part(whole, [0])
        state = program.init(first.numbers, _keys(first, key))
        a_lane = sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(state))
        limit = max(_MIN_LANES, _CHUNK_BYTES // max(1, a_lane))
    else:
        limit = size
    number = -(-count // limit)
    if program.scan is not None:  # one shape, one compilation: the last chunk repeats its last lane
        each = -(-count // number)
        return [_part(whole, [min(lane, count - 1) for lane in range(i * each, (i + 1) * each)]) for i in range(number)]
    bounds = [count * i // number for i in range(number + 1)]
    return [_part(whole, range(low, high)) for low, high in pairwise(bounds)]


def _part(whole: Group, lanes: Sequence[int]) -> Group:
    numbers = {name: column[list(lanes)] for name, column in whole.numbers.items()}
    return Group([whole.indices[lane] for lane in lanes], whole.static, numbers)


class _Report:
    """Progress in lane-steps: to a function, or as one line on stderr."""

    def __init__(self, progress: bool | Progress, total: int) -> None:
        self.total, self.done = total, 0
        self.tell = progress if callable(progress) else (self._print if progress else None)

    def add(self, count: int) -> None:
        self.done += count
        if self.tell is not None:
            self.tell(self.done, self.total)

    def _print(self, done: int, total: int) -> None:
        end = "\n" if done == total else ""
        sys.stderr.write(f"\r{done / total:6.1%} of {total} steps{end}")
        sys.stderr.flush()
