"""Small problems to train on: a network with a fixed start, and a fixed stream of batches.

A network is called the same way on both sides: ``net(inputs)``. In the classic version ``net`` is the module, in the
functional one it is the module's function with parameters filled in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

Batch = Any
Net = Callable[..., Any]
Score = Callable[[Net, Batch], Any]

FEATURES, HIDDEN, CLASSES = 6, 8, 4
ROWS, LENGTH, VOCABULARY = 14, 5, 12
IGNORED = -100


class Task(NamedTuple):
    """A problem in one dtype; every :meth:`module` has the same start."""

    prototype: nn.Module
    batches: list[Batch]

    def module(self) -> nn.Module:
        return copy.deepcopy(self.prototype)

    def start(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.prototype.named_parameters()}

    def loss_fn(self, score: Score) -> Callable[[dict[str, Tensor], Batch], Any]:
        """Turn ``score(net, batch)`` into ``loss_fn(params, batch)``."""

        def loss_fn(params: dict[str, Tensor], batch: Batch) -> Any:
            return score(lambda *inputs: functional_call(self.prototype, params, inputs), batch)

        return loss_fn


# --- networks --------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


class Tagger(nn.Module):
    """Token indices ``[B, T]`` to class logits ``[B, C, T]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.hidden = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = torch.tanh(self.hidden(x + x.mean(1, keepdim=True)))
        return self.head(x).transpose(1, 2)


class TwoViews(nn.Module):
    """Two views of the inputs to two embeddings, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp()
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.encoder(first), self.encoder(second), self.log_temperature.exp()


# --- streams of batches ----------------------------------------------------------------------------------------------


def _task(
    network: Callable[[], nn.Module], draw: Callable[[torch.Generator], Batch], dtype: torch.dtype, steps: int
) -> Task:
    generator = torch.Generator().manual_seed(1)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            yield tuple(x.to(dtype) if x.is_floating_point() else x for x in draw(generator))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        prototype = network().to(dtype)
    return Task(prototype, list(batches()))


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _labels(generator: torch.Generator, *shape: int, ignored: float = 0.0) -> Tensor:
    labels = torch.randint(CLASSES, shape, generator=generator)
    return labels.masked_fill(torch.rand(shape, generator=generator) < ignored, IGNORED)


def classes(
    dtype: torch.dtype, steps: int = 40, *, ignored: float = 0.0, network: Callable[[], nn.Module] = mlp
) -> Task:
    """Rows of features with a class each; a share of the classes is ``IGNORED``."""
    return _task(
        network,
        lambda g: (_normal(g, ROWS, FEATURES), _labels(g, ROWS, ignored=ignored)),
        dtype,
        steps,
    )


def distributions(dtype: torch.dtype, steps: int = 40) -> Task:
    """Rows of features with a distribution over classes each."""
    return _task(mlp, lambda g: (_normal(g, ROWS, FEATURES), _normal(g, ROWS, CLASSES).softmax(1)), dtype, steps)


def numbers(dtype: torch.dtype, steps: int = 40) -> Task:
    """Rows of features with ``CLASSES`` real numbers each."""
    return _task(mlp, lambda g: (_normal(g, ROWS, FEATURES), _normal(g, ROWS, CLASSES)), dtype, steps)


def answers(dtype: torch.dtype, steps: int = 40) -> Task:
    """Rows of features with ``CLASSES`` answers of 0 or 1 each."""
    return _task(mlp, lambda g: (_normal(g, ROWS, FEATURES), (_normal(g, ROWS, CLASSES) > 0.5).double()), dtype, steps)


def tokens(dtype: torch.dtype, steps: int = 40, *, ignored: float = 0.3) -> Task:
    """Sequences of tokens with a class a token, some of them padding; the whole first sequence is padding."""

    def draw(g: torch.Generator) -> Batch:
        labels = _labels(g, ROWS, LENGTH, ignored=ignored)
        if ignored:
            labels[:2] = IGNORED
        return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g), labels

    return _task(Tagger, draw, dtype, steps)


def views(dtype: torch.dtype, steps: int = 40) -> Task:
    """Two noisy views of the same rows, and a class for each."""

    def draw(g: torch.Generator) -> Batch:
        rows = _normal(g, ROWS, FEATURES)
        noisy = (rows + 0.3 * _normal(g, ROWS, FEATURES) for _ in range(2))
        return *noisy, _labels(g, ROWS)

    return _task(TwoViews, draw, dtype, steps)
