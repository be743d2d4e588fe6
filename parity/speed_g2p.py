"""Time lanes of the g2p model against its classic loop: ``python -m parity.speed_g2p``.

A step is scheduled sampling, label smoothing, clipping and AdamW. 16 lanes, which differ in learning rate, teacher
probability and seed, against one model at a time, token by token; eager, and compiled. The steps of the decoder are
written out in the compiled program, since torch differentiates through no scan: it takes minutes to compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from functricks import adamw, chain, clip_by_global_norm, functional, gradient, losses, random, train_step, tree
from functricks.types import Batch, Loss, Params
from parity.__main__ import as_json, select
from parity.g2p import END, G2P, LETTERS, PAD, PHONEMES, classic_logits, initial
from parity.speed_pipeline import Row, in_turns

LANES, ROWS, LENGTH, WIDTH, EMBEDDING = 16, 32, 6, 32, 16
SMOOTHING, MAX_NORM, LR, RATE = 0.1, 1.0, 1e-3, 0.75


def words() -> tuple[Tensor, Tensor]:
    """Random spellings and pronunciations, as long as those of short words."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(1, LETTERS, (ROWS, LENGTH), generator=generator)
    phonemes = torch.randint(3, PHONEMES, (ROWS, LENGTH), generator=generator)
    last = torch.randint(2, LENGTH, (ROWS, 1), generator=generator)
    place = torch.arange(LENGTH)
    return letters, torch.where(place < last, phonemes, torch.where(place == last, END, PAD))


def lanes(*, compile: bool) -> Callable[[], None]:
    """Return the function that takes one step of all lanes."""
    model, batch = functional(G2P(WIDTH, EMBEDDING)), words()

    def update(state: Any, lr: Tensor, probability: Tensor) -> Any:
        def loss_fn(params: Params, batch: Batch, key: Tensor) -> tuple[Loss, Tensor]:
            following, own = random.split(key).unbind()
            logits, _ = model.apply(params, {}, *batch, probability, own)
            loss = losses.cross_entropy(logits.movedim(-1, 1), batch[1], ignore_index=PAD, label_smoothing=SMOOTHING)
            return loss, following

        step = train_step(gradient(loss_fn, has_carry=True), chain(clip_by_global_norm(MAX_NORM), adamw(lr)))
        return step.update(state, batch)[0]

    def init(key: Tensor) -> Any:
        first = train_step(gradient(lambda params, batch: batch), chain(clip_by_global_norm(MAX_NORM), adamw(LR)))
        return first.init(initial(model.params, key), key)

    states = [tree.map(Tensor.contiguous, torch.vmap(init)(random.split(random.key(0), LANES)))]
    rates, probabilities = torch.logspace(-4, -2, LANES), torch.linspace(0.5, 1.0, LANES)
    program = torch.vmap(update)
    if compile:
        program = torch.compile(program, fullgraph=True)

    def step() -> None:
        with torch.no_grad():
            states[0] = program(states[0], rates, probabilities)

    return step


def loop() -> Callable[[], None]:
    """Return the function that takes one step of one model, as it is usually written."""
    model, (letters, phonemes) = G2P(WIDTH, EMBEDDING), words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        coins = torch.rand(phonemes.shape) < RATE
        logits = classic_logits(model, letters, phonemes, coins).transpose(1, 2)
        F.cross_entropy(logits, phonemes, ignore_index=PAD, label_smoothing=SMOOTHING).backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

    return step


def row(rounds: int, *, compile: bool) -> Row:
    title = f"g2p, scheduled sampling: {LANES} lanes, {'compiled' if compile else 'eager'}, a run"
    return in_turns(title, lanes(compile=compile), loop(), 4.0 if compile else None, rounds, per=LANES)


CASES: dict[str, Callable[[int], Row]] = {"eager": partial(row, compile=False), "compiled": partial(row, compile=True)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m parity.speed_g2p", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    parser.add_argument("--only", metavar="CASE", help="eager, compiled, or a glob")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run? The numbers are rough")
    given = parser.parse_args(arguments)
    rows = []
    for name in select(list(CASES), given.only, parser):
        rows.append(CASES[name](2 if given.quick else 40))
        torch.compiler.reset()
        if not given.json:
            one = rows[-1]
            target = "-" if one.target is None else f"{one.target:.2f}"
            print(
                f"{one.case:60} {one.functional_ms:9.3f} {one.classic_ms:9.3f} {one.ratio:6.2f} {target:>6} "
                f"{'ok' if one.ok else 'NO'}",
                flush=True,
            )
    if given.json:
        print(as_json(rows))
    return 0 if all(one.ok for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
