"""Speed rows: composed gradient functions against nested classic loops.

Three questions. What does PGD cost beside the forward and backward passes that it needs? What does ``accumulate``
cost beside the classic accumulation loop? And what do lanes and compilation bring to the whole step (FGM on each of
four micro-batches, clipping, AdamW)?
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from functricks import (
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    fgm,
    functional,
    gradient,
    losses,
    pgd,
    train_step,
    tree,
)
from functricks.types import GradFn, Loss, Params
from parity.adversarial import accumulated, fgm_attack
from parity.timing import Measure, Row, in_turns

VOCABULARY, WIDTH, CLASSES, ROWS, LENGTH = 2000, 128, 16, 512, 32
MANY_ROWS = 2048  # in eager, a micro-batch costs half a millisecond of Python more, whatever its size
STEPS, PARTS, LANES = 3, 8, 32
SMALL_PARTS = 4


class Text(nn.Module):
    """An embedding and two layers on top."""

    def __init__(self, vocabulary: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden, self.head = nn.Linear(width, hidden), nn.Linear(hidden, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.embedding(ids))).mean(1))


def problem(vocabulary: int, width: int, hidden: int, rows: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        batch = torch.randint(vocabulary, (rows, LENGTH)), torch.randint(CLASSES, (rows,))
        return Text(vocabulary, width, hidden), batch


def large(rows: int = ROWS) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return problem(VOCABULARY, WIDTH, 1024, rows)


def small() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return problem(50, 16, 32, 32)


def grad_fn_of(model: nn.Module, backend: Any) -> tuple[GradFn, Params]:
    apply, params, buffers = functional(model)

    def loss_fn(params: Params, batch: Any) -> Loss:
        return losses.cross_entropy(apply(params, buffers, batch[0])[0], batch[1], ignore_index=None)

    return gradient(loss_fn, backend=backend), params


def backward_passes(model: nn.Module, batch: tuple[Tensor, Tensor], count: int) -> None:
    for _ in range(count):
        model.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()


def pgd_row(case: str, rounds: int, *, compile: bool) -> Row:
    """K steps of PGD on the embedding against K + 1 forward and backward passes, compiled or not."""
    model, batch = large()
    grad_fn, params = grad_fn_of(model, "func" if compile else "autograd")
    attacked: Any = pgd(grad_fn, 0.5, 0.3, STEPS, where="embedding.*")
    passes: Any = partial(backward_passes, model, batch, STEPS + 1)
    if compile:
        attacked = torch.compile(attacked, fullgraph=True)
        one: Any = torch.compile(grad_fn, fullgraph=True)

        def passes() -> None:
            for _ in range(STEPS + 1):
                one(params, batch)

    return in_turns(case, lambda: attacked(params, batch), passes, 1 / 1.05, rounds)


def accumulate_row(case: str, rounds: int, *, size: int = MANY_ROWS, compile: bool) -> Row:
    """accumulate over 8 micro-batches against ``(loss / 8).backward()`` eight times, the model compiled or not."""
    model, batch = large(size)
    grad_fn, params = grad_fn_of(model, "func" if compile else "autograd")
    summed: Any = accumulate(grad_fn, PARTS)
    called: Any = model
    if compile:
        summed, called = torch.compile(summed, fullgraph=True), torch.compile(model, fullgraph=True)

    def loop() -> None:
        model.zero_grad()
        for ids, labels in zip(*(leaf.chunk(PARTS) for leaf in batch), strict=True):
            (F.cross_entropy(called(ids), labels) / PARTS).backward()

    return in_turns(case, lambda: summed(params, batch), loop, 1 / 1.05 if size == MANY_ROWS else None, rounds)


def whole_step_row(case: str, rounds: int) -> Row:
    """FGM in accumulate over 4, clip, AdamW: 32 lanes in one compiled program against the classic loop of one."""
    model, batch = small()
    grad_fn, params = grad_fn_of(model, "func")
    rates = torch.logspace(-4, -2, LANES)

    def update(state: Any, lr: Tensor) -> Any:
        attacked = accumulate(fgm(grad_fn, 0.3, where="embedding.*"), SMALL_PARTS)
        step = train_step(attacked, chain(clip_by_global_norm(1.0), adamw(lr)))
        return step.update(state, batch)[0]

    init = train_step(grad_fn, chain(clip_by_global_norm(1.0), adamw(1e-3))).init
    lanes = {name: leaf.expand(LANES, *leaf.shape).clone() for name, leaf in params.items()}
    states = [tree.map(torch.Tensor.contiguous, torch.vmap(init)(lanes))]
    compiled = torch.compile(torch.vmap(update), fullgraph=True)

    def step() -> None:
        with torch.no_grad():
            states[0] = compiled(states[0], rates)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    backward = accumulated(fgm_attack(0.3, "embedding"), len(batch[0]) // SMALL_PARTS)

    def loop() -> None:
        optimizer.zero_grad()
        backward(model, batch)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return in_turns(case, step, loop, 15.0, rounds, lanes=LANES)


_PGD, _ACCUMULATE = f"pgd, {STEPS} steps, against {STEPS + 1} passes", f"accumulate over {PARTS}"
_SHORT = f"accumulate over {PARTS} of a fourth of the rows, eager"
_WHOLE = f"fgm in accumulate over {SMALL_PARTS}, clip, AdamW: {LANES} lanes, compiled"
CASES: dict[str, Measure] = {
    f"{_PGD}, eager": partial(pgd_row, f"{_PGD}, eager", compile=False),
    f"{_PGD}, compiled": partial(pgd_row, f"{_PGD}, compiled", compile=True),
    f"{_ACCUMULATE}, eager": partial(accumulate_row, f"{_ACCUMULATE}, eager", compile=False),
    _SHORT: partial(accumulate_row, _SHORT, size=ROWS, compile=False),
    f"{_ACCUMULATE}, compiled": partial(accumulate_row, f"{_ACCUMULATE}, compiled", compile=True),
    _WHOLE: partial(whole_step_row, _WHOLE),
}
