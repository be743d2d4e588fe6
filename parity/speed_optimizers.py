"""Time and measure AdamW alone against ``torch.optim.AdamW``, in one process: ``python -m parity.speed_optimizers``.

Both sides do the whole step: moments, direction, decay, and the new parameters. Ours makes new parameters and a new
state; PyTorch's writes over the old ones. One round is a few steps of each side in turn, so that slow spells of the
machine hit all of them; medians are compared.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from functricks import adamw, apply_updates, tree
from functricks.types import Params

LANES = 64
LR = 1e-3

Step = Callable[[], object]


class Row(NamedTuple):
    case: str
    functional_ms: float
    classic_ms: float
    ratio: float  # classic / functional
    target: float | None
    ok: bool


# --- what to step on -------------------------------------------------------------------------------------------------


def leaves(shapes: list[tuple[int, ...]], seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {f"leaf{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}


MANY_SMALL: list[tuple[int, ...]] = [(64, 128), (64,)] * 72  # 144 leaves, 0.6 M parameters
FEW_LARGE: list[tuple[int, ...]] = [(512, 1024), (512,)] * 36  # 72 leaves, 19 M parameters
PERCEPTRON: list[tuple[int, ...]] = [(64, 64), (64,), (64, 64), (64,), (10, 64), (10,)]


def classic(shapes: list[tuple[int, ...]], models: int = 1, **flags: bool) -> Step:
    optimizers = []
    for seed in range(models):
        parameters = [nn.Parameter(leaf) for leaf in leaves(shapes, seed).values()]
        for parameter, grad in zip(parameters, leaves(shapes, seed + models).values(), strict=True):
            parameter.grad = grad
        optimizers.append(torch.optim.AdamW(parameters, lr=LR, **flags))

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


def functional(shapes: list[tuple[int, ...]], *, compile: bool = False) -> Step:
    optimizer = adamw(LR)

    def update(params: Params, state: object, grads: Params) -> tuple[Params, object]:
        updates, state = optimizer.update(grads, state, params)
        return apply_updates(params, updates), state

    return _stepper(torch.compile(update, fullgraph=True) if compile else update, leaves(shapes), leaves(shapes, 1))


def lanes(shapes: list[tuple[int, ...]], models: int = LANES) -> Step:
    """As many models, each with a learning rate of its own, in one vmapped step."""

    def stacked(first: int) -> Params:
        return tree.map(lambda *own: torch.stack(own), *[leaves(shapes, first + i) for i in range(models)])

    rates = torch.logspace(-4, -2, models)

    def update(lr: Tensor, params: Params, state: object, grads: Params) -> tuple[Params, object]:
        updates, state = adamw(lr).update(grads, state, params)
        return apply_updates(params, updates), state

    mapped = torch.vmap(update)
    start = stacked(0)
    state = torch.vmap(lambda lr, params: adamw(lr).init(params))(rates, start)
    return _stepper(partial(mapped, rates), start, stacked(models), state)


def _stepper(update: Callable[..., tuple[Params, object]], params: Params, grads: Params, state: object = None) -> Step:
    kept = [params, adamw(LR).init(params) if state is None else state]

    def step() -> None:
        kept[:] = update(*kept, grads)

    return step


# --- time ------------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    name: str
    functional: Callable[[], Step]
    classic: Callable[[], Step]
    target: float  # at least so many times as fast as the classic step
    steps: int  # a round


SMALL, LARGE = "144 leaves, 0.6 M parameters", "72 leaves, 19 M parameters"
CASES = [
    Case(f"adamw, {SMALL}, eager, against foreach", partial(functional, MANY_SMALL),
         partial(classic, MANY_SMALL, foreach=True), 1 / 1.1, 20),
    Case(f"adamw, {SMALL}, compiled, against fused", partial(functional, MANY_SMALL, compile=True),
         partial(classic, MANY_SMALL, fused=True), 1 / 2.5, 20),
    Case(f"adamw, {LARGE}, eager, against foreach", partial(functional, FEW_LARGE),
         partial(classic, FEW_LARGE, foreach=True), 1 / 1.6, 2),
    Case(f"adamw, {LARGE}, compiled, against fused", partial(functional, FEW_LARGE, compile=True),
         partial(classic, FEW_LARGE, fused=True), 1 / 1.5, 4),
    Case(f"adamw, {LANES} lanes, eager, against default", partial(lanes, PERCEPTRON),
         partial(classic, PERCEPTRON, LANES), 5.0, 4),
    Case(f"adamw, {LANES} lanes, eager, against fused", partial(lanes, PERCEPTRON),
         partial(classic, PERCEPTRON, LANES, fused=True), 2.0, 4),
]  # fmt: skip


def measure(case: Case, rounds: int) -> Row:
    sides = (case.functional(), case.classic())
    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for side in sides:
            for _ in range(3):
                side()
        for _ in range(rounds):
            for side, found in zip(sides, times, strict=True):
                began = time.perf_counter()
                for _ in range(case.steps):
                    side()
                found.append((time.perf_counter() - began) * 1e3 / case.steps)
    ours, theirs = (statistics.median(found) for found in times)
    return Row(case.name, ours, theirs, theirs / ours, case.target, theirs / ours >= case.target)


# --- memory ----------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    case: str
    peak_mb: float  # above parameters, gradients and old state
    bound_mb: float  # new state, two trees of updates, the largest leaf
    ok: bool


def peak(shapes: list[tuple[int, ...]]) -> Memory:
    """The most that is allocated at once during an update, from the profiler's record of every allocation."""
    params, grads, optimizer = leaves(shapes), leaves(shapes, 1), adamw(LR)
    state = optimizer.init(params)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profiler:
        kept = optimizer.update(grads, state, params)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    del kept
    sizes = [leaf.nbytes for leaf in params.values()]
    bound = 4 * sum(sizes) + max(sizes) + 4096  # and the counters
    return Memory(f"adamw, {LARGE}, peak of an update", highest / 2**20, bound / 2**20, 0 < highest <= bound)


@cache
def _threads() -> None:
    torch.set_num_threads(2)


def main() -> int:
    _threads()
    rows = []
    for case in CASES:
        rows.append(measure(case, 9))
        torch.compiler.reset()
        row = rows[-1]
        print(f"{row.case:62} {row.functional_ms:9.3f} {row.classic_ms:9.3f} ms  ratio {row.ratio:6.2f}"
              f"  target {row.target:5.2f}  {'ok' if row.ok else 'NO'}", flush=True)  # fmt: skip
    memory = peak(FEW_LARGE)
    print(f"{memory.case:62} {memory.peak_mb:9.1f} MB, bound {memory.bound_mb:9.1f} MB  {'ok' if memory.ok else 'NO'}")
    return 0 if all(row.ok for row in rows) and memory.ok else 1


if __name__ == "__main__":
    sys.exit(main())
