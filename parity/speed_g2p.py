"""Speed rows: lanes of the g2p model against its classic loop.

A step is scheduled sampling, label smoothing, clipping and AdamW. 16 lanes, which differ in learning rate, teacher
probability and seed, against one model at a time, token by token; eager, and compiled. The steps of the decoder are
written out in the compiled program, since torch differentiates through no scan: it takes minutes to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from functricks import adamw, chain, clip_by_global_norm, functional, gradient, losses, random, train_step, tree
from functricks.types import Batch, Loss, Params
from parity.g2p import END, G2P, LETTERS, PAD, PHONEMES, classic_logits, initial
from parity.timing import Measure, Row, in_turns

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


def row(case: str, rounds: int, *, compile: bool) -> Row:
    return in_turns(case, lanes(compile=compile), loop(), 4.0 if compile else None, rounds, lanes=LANES)


_TITLE = f"g2p, scheduled sampling: {LANES} lanes"
CASES: dict[str, Measure] = {
    f"{_TITLE}, eager": partial(row, f"{_TITLE}, eager", compile=False),
    f"{_TITLE}, compiled": partial(row, f"{_TITLE}, compiled", compile=True),
}
