"""Scheduled sampling and weight tying: what goes wrong in the usual recipes."""

from __future__ import annotations

import random as global_random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functricks import random, schedules
from functricks.sequences import scheduled_sampling, tied_logits
from parity.faults.registry import fault, show


def always_guesses_zero(state: tuple[()], token: Tensor) -> tuple[Tensor, tuple[()]]:
    """Logits whose best token is 0, and whose last one tells the input."""
    return torch.stack((torch.zeros(len(token)), -1.0 - token), 1), state


def taught(coin: Any) -> Tensor:
    """Which of three inputs after the start are true tokens, for two examples: bool [1000, 2, 3]."""

    def one(key: Tensor) -> Tensor:
        targets = torch.full((2, 4), 7)
        return scheduled_sampling(always_guesses_zero, (), targets, 0.5, key, coin=coin)[:, 1:, 1] == -8

    return torch.vmap(one)(random.split(random.key(0), 1000))


@fault(
    "scheduled sampling",
    "draw one coin for the whole batch (`random.random() < p` in front of the loop)",
    "sequences are all true or all guessed, and all examples alike: the decoder never mends a mistake midway",
    "`scheduled_sampling` throws a coin for every example and step; `coin=` names the others",
)
def one_coin() -> str:
    batch, token = (taught(coin).all(2)[:, 0].double().mean() for coin in ("batch", "token"))
    return f"P(3 true tokens) at p = 0.5: {batch:.2f} instead of {token:.2f} (exactly 1/2 and 1/8)"


@fault(
    "scheduled sampling",
    "take the coins from the global generator, unseeded",
    "no run repeats, and no checkpoint resumes with the same coins",
    "the coins come from the key in the carry",
)
def global_coins() -> str:
    state = global_random.getstate()
    runs = []
    for _ in range(2):
        global_random.seed()
        runs.append([global_random.random() < 0.5 for _ in range(64)])
    global_random.setstate(state)
    same = runs[0] == runs[1]
    keyed = torch.equal(random.bernoulli(random.key(0), 0.5, (64,)), random.bernoulli(random.key(0), 0.5, (64,)))
    return f"two runs agree on 64 coins: {same} instead of {keyed}"


@fault(
    "scheduled sampling",
    "a table `[i / (phases - 1) for i in range(phases)]` of probabilities, indexed by the epoch",
    "divides by zero with one phase, and ends with an IndexError in the epoch after the last",
    "a schedule has a value at every step",
)
def table_of_phases() -> str:
    phases, table = 3, [i / 2 for i in range(3)]
    try:
        found = show(table[phases])
    except IndexError as error:
        found = type(error).__name__
    return f"epoch {phases} of {phases}: {found} instead of {show(schedules.linear(1.0, 0.0, 1.0, 2)(phases))}"


@fault(
    "weight tying",
    "let the decoder return a softmax, and give that to cross entropy",
    "a second softmax: the loss of a sure and right answer cannot fall to 0, and gradients shrink",
    "`tied_logits` returns logits; losses take logits",
)
def double_softmax() -> str:
    hidden, embedding = torch.tensor([[4.0, 0.0, 0.0]]), torch.eye(3)
    logits, target = tied_logits(hidden, embedding), torch.tensor([0])
    return f"loss {show(F.cross_entropy(logits.softmax(1), target))} instead of {show(F.cross_entropy(logits, target))}"


@fault(
    "weight tying",
    "copy the embedding into the output layer (`out.weight.data = embedding.weight.data.clone()`)",
    "the two drift apart with the first step; and each counts in the norm, the decay and the checkpoint",
    "one leaf, used twice: `tied_logits(hidden, embedding)`",
)
def copied_weights() -> str:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    model[1].weight.data = model[0].weight.data.clone()
    F.cross_entropy(model(torch.tensor([0])), torch.tensor([1])).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    return f"apart by {show((model[0].weight - model[1].weight).abs().max())} after one step instead of 0"
