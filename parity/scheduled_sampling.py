"""Scheduled sampling, two passes and the whole g2p recipe: the loop over tokens, against :mod:`functricks.sequences`.

The usual recipe draws one coin a batch, or an epoch, with ``random.random()``, which no checkpoint remembers; here the
loop has the coins that the key gives, one for every example and step. In float32 two versions that sum in another order
may guess another token, where two are equally likely to the last digit; in these runs none do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from functricks import adamw, gradient, losses, random
from functricks import functional as pure
from functricks.sequences import scheduled_sampling, two_pass
from functricks.types import Loss, Params
from parity import g2p, tasks
from parity.harness import Run, Technique, classic_loop, functional_loop
from parity.tasks import HIDDEN, VOCABULARY, Task

LR, RATE, SEED, LENGTH, ROWS = 3e-3, 0.6, 5, 6, 14
END, PAD, START = 1, 0, 2


# --- a decoder step by step, and one that sees all positions ---------------------------------------------------------


class Decoder(nn.Module):
    """A recurrent decoder whose output is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.cell = nn.Linear(2 * HIDDEN, HIDDEN)

    def step(self, state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(self.cell(torch.cat((state, self.embedding(token)), 1)))
        return F.linear(state, self.embedding.weight), state

    def forward(self, targets: Tensor, key: Tensor, coin: Any) -> Tensor:
        state = self.embedding.weight.new_zeros(len(targets), HIDDEN)
        return scheduled_sampling(self.step, state, targets, RATE, key, start=START, coin=coin, end=END, pad=PAD)


class Parallel(nn.Module):
    """A causal decoder: every position sees the mean of the inputs up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.hidden = nn.Linear(HIDDEN, HIDDEN)

    def decode(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        count = torch.arange(1, inputs.shape[1] + 1, dtype=x.dtype)[:, None]
        return F.linear(torch.tanh(self.hidden(x + x.cumsum(1) / count)), self.embedding.weight)

    def forward(self, targets: Tensor, key: Tensor, coin: Any) -> Tensor:
        return two_pass(self.decode, targets, RATE, key, start=START, coin=coin, end=END, pad=PAD)


def coins_of(key: Tensor, shape: torch.Size, coin: str) -> Tensor:
    if coin == "token":
        return random.bernoulli(key, RATE, shape)
    return random.bernoulli(key, RATE, shape[:1])[:, None].expand(shape)


def next_input(guess: Tensor, true: Tensor, coins: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
    """Return the true token or the guess, which is padding once the sequence has ended, and whether it has now."""
    token = torch.where(coins, true, guess.masked_fill(ended, PAD))
    return token, (token == END) | torch.where(coins, token == PAD, ended)


def token_by_token(model: Any, targets: Tensor, coins: Tensor) -> Tensor:
    state = model.embedding.weight.new_zeros(len(targets), HIDDEN)
    token, ended = torch.full((len(targets),), START), torch.zeros(len(targets), dtype=torch.bool)
    rows: list[Tensor] = []
    for t in range(targets.shape[1]):
        if t:
            token, ended = next_input(rows[-1].detach().argmax(1), targets[:, t - 1], coins[:, t], ended)
        logits, state = model.step(state, token)
        rows.append(logits)
    return torch.stack(rows, 1)


def twice(model: Any, targets: Tensor, coins: Tensor) -> Tensor:
    start = torch.full((len(targets), 1), START)
    with torch.no_grad():
        guesses = model.decode(torch.cat((start, targets[:, :-1]), 1)).argmax(2)
    inputs, ended = [start[:, 0]], torch.zeros(len(targets), dtype=torch.bool)
    for t in range(1, targets.shape[1]):
        token, ended = next_input(guesses[:, t - 1], targets[:, t - 1], coins[:, t], ended)
        inputs.append(token)
    return model.decode(torch.stack(inputs, 1))


class Case(NamedTuple):
    name: str
    logits: Callable[[Any, Tensor, Tensor], Tensor]
    network: Callable[[], nn.Module]
    coin: str = "token"


def sequences(network: Callable[[], nn.Module], dtype: torch.dtype, steps: int = 40) -> Task:
    """Targets that end at different steps, and the number of the batch."""

    def draw(g: torch.Generator) -> Any:
        targets = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=g)
        last = torch.randint(2, LENGTH, (ROWS, 1), generator=g)
        place = torch.arange(LENGTH)
        return (torch.where(place < last, targets, torch.where(place == last, END, PAD)),)

    return tasks._task(network, draw, dtype, steps)


def classic(case: Case, task: Task) -> Run:
    keys = [random.key(SEED)]

    def backward(model: nn.Module, batch: tasks.Batch) -> None:
        keys[0], own = random.split(keys[0]).unbind()
        (targets,) = batch
        logits = case.logits(model, targets, coins_of(own, targets.shape, case.coin))
        F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=PAD).backward()

    return classic_loop(task, lambda model: AdamW(model.parameters(), LR), backward)


def functional(case: Case, task: Task) -> Run:
    model = pure(task.prototype)

    def loss_fn(params: Params, batch: tasks.Batch, key: Tensor) -> tuple[Loss, Tensor]:
        following, own = random.split(key).unbind()
        logits, _ = model.apply(params, {}, batch[0], own, case.coin)
        return losses.cross_entropy(logits.movedim(-1, 1), batch[0], ignore_index=PAD), following

    return functional_loop(task, gradient(loss_fn, has_carry=True), adamw(LR), carry=random.key(SEED))


CASES = [
    Case("scheduled sampling", token_by_token, Decoder),
    Case("scheduled sampling, a coin a sequence", token_by_token, Decoder, "sequence"),
    Case("scheduled sampling, two passes", twice, Parallel),
]


# --- the whole recipe of g2p -----------------------------------------------------------------------------------------

RECIPE = g2p.Recipe(warmup=3, steps=12, floor=0.3)


def words(dtype: torch.dtype, steps: int = RECIPE.steps) -> Task:
    """Random spellings with random pronunciations, of several lengths."""

    def rows(g: torch.Generator, size: int, end: int | None) -> Tensor:
        tokens = torch.randint(3, size, (ROWS, LENGTH), generator=g)
        last = torch.randint(2, LENGTH, (ROWS, 1), generator=g)
        place = torch.arange(LENGTH)
        return torch.where(place < last, tokens, torch.where(place == last, tokens if end is None else end, PAD))

    def draw(g: torch.Generator) -> Any:
        return rows(g, g2p.LETTERS, None), rows(g, g2p.PHONEMES, g2p.END)

    return tasks._task(partial(g2p.G2P, 16, 8), draw, dtype, steps)


def with_probability(number: int, batch: tasks.Batch) -> tasks.Batch:
    return (*batch, RECIPE.teacher_probability(number).float())


def classic_recipe(task: Task) -> Run:
    model = task.module()
    run = Run({name: p.detach().clone() for name, p in model.named_parameters()})
    loop = g2p.Classic(model, RECIPE, random.key(SEED))
    for number, batch in enumerate(task.batches):
        loop.step(with_probability(number, batch))
        run.saw((name, p.grad) for name, p in model.named_parameters())
        run.steps += 1
    run.end = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def functional_recipe(task: Task) -> Run:
    batches = [with_probability(number, batch) for number, batch in enumerate(task.batches)]
    grad_fn = g2p.make_grad_fn(pure(task.prototype).apply, RECIPE)
    optimizer = g2p.make_optimizer(RECIPE, classic=True)
    return functional_loop(task._replace(batches=batches), grad_fn, optimizer, carry=random.key(SEED))


TECHNIQUES = [
    *(
        Technique(case.name, partial(classic, case), partial(functional, case), partial(sequences, case.network))
        for case in CASES
    ),
    Technique("g2p: the whole recipe with scheduled sampling", classic_recipe, functional_recipe, words),
]
