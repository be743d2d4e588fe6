"""Speed rows: AdamW alone against ``torch.optim.AdamW``, and the memory of an update.

Both sides do the whole step: moments, direction, decay, and the new parameters. Ours makes new parameters and a new
state; PyTorch's writes over the old ones. One round is a few steps of each side in turn, so that slow spells of the
machine hit both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from functricks import adamw, apply_updates, tree
from functricks.types import Params
from parity.timing import Measure, Row, in_turns, to_row

LANES = 64
LR = 1e-3

Step = Callable[[], object]


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

    start = stacked(0)
    state = torch.vmap(lambda lr, params: adamw(lr).init(params))(rates, start)

    def mapped(*inputs: Any) -> tuple[Params, object]:
        return tree.map_lanes(update, (0, 0, 0, 0), (rates, *inputs))  # torch.vmap, as experiments.run calls it

    return _stepper(mapped, start, stacked(models), state)


def _stepper(update: Callable[..., tuple[Params, object]], params: Params, grads: Params, state: object = None) -> Step:
    kept = [params, adamw(LR).init(params) if state is None else state]

    def step() -> None:
        kept[:] = update(*kept, grads)

    return step


# --- time ------------------------------------------------------------------------------------------------------------


def timed(
    case: str, ours: Callable[[], Step], theirs: Callable[[], Step], target: float, calls: int, rounds: int
) -> Row:
    with torch.no_grad():
        return in_turns(case, ours(), theirs(), target, rounds, calls=calls)


# --- memory ----------------------------------------------------------------------------------------------------------


def peak(case: str, shapes: list[tuple[int, ...]], rounds: int) -> Row:
    """The most that is allocated at once during an update, above what was there: from the record of every allocation.

    Megabytes in the place of milliseconds; the bound is the new state, two trees of updates and the largest leaf.
    """
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
    return to_row(case, highest / 2**20, bound / 2**20, 1.0)


# --- cases -----------------------------------------------------------------------------------------------------------

SMALL, LARGE = "144 leaves, 0.6 M parameters", "72 leaves, 19 M parameters"
_CASES: list[tuple[str, Callable[[], Step], Callable[[], Step], float, int]] = [
    (f"adamw, {SMALL}, eager, against foreach", partial(functional, MANY_SMALL),
     partial(classic, MANY_SMALL, foreach=True), 1 / 1.1, 20),
    (f"adamw, {SMALL}, compiled, against fused", partial(functional, MANY_SMALL, compile=True),
     partial(classic, MANY_SMALL, fused=True), 1 / 2.5, 20),
    (f"adamw, {LARGE}, eager, against foreach", partial(functional, FEW_LARGE),
     partial(classic, FEW_LARGE, foreach=True), 1 / 1.6, 2),
    (f"adamw, {LARGE}, compiled, against fused", partial(functional, FEW_LARGE, compile=True),
     partial(classic, FEW_LARGE, fused=True), 1 / 1.5, 4),
    (f"adamw, {LANES} lanes, eager, against default", partial(lanes, PERCEPTRON),
     partial(classic, PERCEPTRON, LANES), 5.0, 4),
    (f"adamw, {LANES} lanes, eager, against fused", partial(lanes, PERCEPTRON),
     partial(classic, PERCEPTRON, LANES, fused=True), 2.0, 4),
]  # fmt: skip
_MEMORY = f"adamw, {LARGE}, peak of an update in MB, against its bound"
CASES: dict[str, Measure] = {case[0]: partial(timed, *case) for case in _CASES}
CASES[_MEMORY] = partial(peak, _MEMORY, FEW_LARGE)
