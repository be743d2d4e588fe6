"""Time composed gradient functions against nested classic loops: ``python -m parity.speed_pipeline``.

Three questions. What does PGD cost beside the forward and backward passes that it needs? What does ``accumulate``
cost beside the classic accumulation loop? And what do lanes and compilation bring to the whole step (FGM on each of
four micro-batches, clipping, AdamW)? Both versions of a row take turns in one process, and medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_

from functricks import accumulate, adamw, chain, clip_by_global_norm, fgm, gradient, losses, pgd, train_step, tree
from functricks.types import GradFn, Loss, Params
from parity.__main__ import as_json, select
from parity.adversarial import accumulated, fgm_attack

VOCABULARY, WIDTH, CLASSES, ROWS, LENGTH = 2000, 128, 16, 128, 32
STEPS, PARTS, LANES = 3, 8, 32
SMALL_PARTS = 4


class Row(NamedTuple):
    case: str
    functional_ms: float
    classic_ms: float
    ratio: float  # classic over functional
    target: float | None
    ok: bool


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


def large() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return problem(VOCABULARY, WIDTH, 1024, ROWS)


def small() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return problem(50, 16, 32, 32)


def grad_fn_of(model: nn.Module, backend: Any) -> tuple[GradFn, Params]:
    def loss_fn(params: Params, batch: Any) -> Loss:
        return losses.cross_entropy(functional_call(model, params, (batch[0],)), batch[1], ignore_index=None)

    return gradient(loss_fn, backend=backend), {name: p.detach().clone() for name, p in model.named_parameters()}


def in_turns(
    name: str,
    functional: Callable[[], Any],
    classic: Callable[[], Any],
    target: float | None,
    rounds: int,
    per: int = 1,
) -> Row:
    """Time both, one after the other, ``rounds`` times; ``per`` runs are done by one call of ``functional``."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 2):
        for column, call, share in zip(times, (functional, classic), (per, 1), strict=True):
            start = time.perf_counter()
            call()
            column.append((time.perf_counter() - start) * 1e3 / share)
    fast, slow = (statistics.median(column[2:]) for column in times)
    return Row(name, fast, slow, slow / fast, target, target is None or slow / fast >= target)


def backward_passes(model: nn.Module, batch: tuple[Tensor, Tensor], count: int) -> None:
    for _ in range(count):
        model.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()


def pgd_row(rounds: int, *, compile: bool) -> Row:
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

    title = f"pgd, {STEPS} steps, against {STEPS + 1} passes, {'compiled' if compile else 'eager'}"
    return in_turns(title, lambda: attacked(params, batch), passes, 1 / 1.05, rounds)


def accumulate_row(rounds: int, *, compile: bool) -> Row:
    """accumulate over 8 micro-batches against ``(loss / 8).backward()`` eight times, the model compiled or not."""
    model, batch = large()
    grad_fn, params = grad_fn_of(model, "func" if compile else "autograd")
    summed: Any = accumulate(grad_fn, PARTS)
    called: Any = model
    if compile:
        summed, called = torch.compile(summed, fullgraph=True), torch.compile(model, fullgraph=True)

    def loop() -> None:
        model.zero_grad()
        for ids, labels in zip(*(leaf.chunk(PARTS) for leaf in batch), strict=True):
            (F.cross_entropy(called(ids), labels) / PARTS).backward()

    title = f"accumulate over {PARTS}, {'compiled' if compile else 'eager'}"
    return in_turns(title, lambda: summed(params, batch), loop, 1 / 1.05, rounds)


def whole_step_row(rounds: int) -> Row:
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

    title = f"fgm in accumulate over {SMALL_PARTS}, clip, AdamW: {LANES} lanes, compiled"
    return in_turns(title, step, loop, 15.0, rounds, per=LANES)


CASES: dict[str, Callable[[int], Row]] = {
    "pgd, eager": partial(pgd_row, compile=False),
    "pgd, compiled": partial(pgd_row, compile=True),
    "accumulate, eager": partial(accumulate_row, compile=False),
    "accumulate, compiled": partial(accumulate_row, compile=True),
    "whole step": whole_step_row,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m parity.speed_pipeline", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    parser.add_argument("--only", metavar="CASE", help="one case, or a glob such as '*eager*'")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run? The numbers are rough")
    given = parser.parse_args(arguments)
    rows = []
    for name in select(list(CASES), given.only, parser):
        rows.append(CASES[name](2 if given.quick else 40))
        torch.compiler.reset()
        if not given.json:
            row = rows[-1]
            target = "-" if row.target is None else f"{row.target:.2f}"
            print(
                f"{row.case:72} {row.functional_ms:9.3f} {row.classic_ms:9.3f} {row.ratio:6.2f} {target:>6} "
                f"{'ok' if row.ok else 'NO'}",
                flush=True,
            )
    if given.json:
        print(as_json(rows))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
