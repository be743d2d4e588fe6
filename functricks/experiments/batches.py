"""Minibatches drawn from keys: which rows a step sees is a function of the key, the epoch and the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from functricks import random, tree
from functricks.experiments.configs import is_integer

__all__ = ["Minibatches", "minibatches"]

_DATA = 0x64617461  # separates the keys of the data from those that an experiment derives from the same key


@dataclass(frozen=True, eq=False)
class Minibatches:
    """A plan of minibatches; made by :func:`minibatches`."""

    data: Any
    batch_size: int
    total_steps: int
    order: Literal["shared", "per-lane"]
    drop_last: bool

    @property
    def length(self) -> int:
        """The number of rows."""
        return int(tree.leaves(self.data)[0].shape[0])

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in one pass over the data."""
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)

    def indices(self, keys: Tensor, epoch: int) -> Tensor:
        """Return the rows in the order of this epoch: ``[K, length]`` for keys of shape ``[K, 2]``."""

        def one(key: Tensor) -> Tensor:
            return random.permutation(random.fold_in(random.fold_in(key, _DATA), epoch), self.length)

        return torch.vmap(one)(keys)

    def blocks(self, rows: Tensor, size: int, most: int) -> Iterator[Tensor]:
        """Yield an epoch's batches in blocks ``[steps, ..., B]``: of ``size`` while they last, then one by one."""
        steps = min(self.length // self.batch_size, most)
        whole = rows[..., : steps * self.batch_size].reshape(*rows.shape[:-1], steps, self.batch_size).movedim(-2, 0)
        in_blocks = steps // size * size
        for first in range(0, in_blocks, size):
            yield whole[first : first + size]
        for first in range(in_blocks, steps):
            yield whole[first : first + 1]
        rest = rows[..., self.length // self.batch_size * self.batch_size :]
        if not self.drop_last and rest.shape[-1] and most > steps:
            yield rest[None]


def take(data: Any, rows: Tensor) -> Any:
    """Return the batch of these rows, ``[..., B]``."""
    return tree.map(lambda leaf: leaf[rows], data)


def minibatches(
    data: Any,
    batch_size: int,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    order: Literal["shared", "per-lane"] = "shared",
    drop_last: bool = True,
) -> Minibatches:
    """Plan shuffled minibatches of ``data``, drawn anew from a key every epoch.

    Classic: ``DataLoader(dataset, batch_size, shuffle=True, drop_last=)``, whose order depends on a global generator.

    Args:
        data: a tree of tensors with one leading axis.
        batch_size: rows a batch, 1 to the number of rows.
        steps: how many batches in all; or
        epochs: how many passes over the data.
        order: ``"shared"``: every lane sees the same batches; ``"per-lane"``: each its own, from its seed's key, so
        that
            lanes of one seed still see the same ones.
        drop_last: drop the left-over rows of every epoch.

    Raises ``ValueError`` for sizes that do not fit, or unless exactly one of ``steps`` and ``epochs`` is given.

    >>> plan = minibatches(torch.arange(10), 4, epochs=3)
    >>> plan.steps_per_epoch, plan.total_steps
    (2, 6)
    """
    lengths = {path: tuple(leaf.shape)[:1] for path, leaf in tree.named_leaves(data).items()}
    if not lengths or len(set(lengths.values())) != 1 or () in lengths.values():
        raise ValueError(f"minibatches: the leaves of data must share one leading axis, got {lengths}")
    length = next(iter(lengths.values()))[0]
    if not is_integer(batch_size) or not 1 <= batch_size <= length:
        raise ValueError(
            f"minibatches: batch_size must be an integer from 1 to the number of rows, {length}, got {batch_size!r}"
        )
    if order not in ("shared", "per-lane"):
        raise ValueError(f"minibatches: order must be 'shared' or 'per-lane', got {order!r}")
    given = steps if epochs is None else epochs
    if (steps is None) == (epochs is None) or given is None or not is_integer(given) or given < 1:
        raise ValueError(f"minibatches: give either steps or epochs, an integer >= 1, got {steps!r} and {epochs!r}")
    plan = Minibatches(data, int(batch_size), 0, order, drop_last)
    total = int(given) if epochs is None else int(given) * plan.steps_per_epoch
    return replace(plan, total_steps=total)
