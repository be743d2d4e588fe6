"""Scheduled sampling for a classic loop: an object that knows the probability of the day, and draws new coins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functricks import random, sequences
from functricks.sequences import Coin, DecodeStep
from functricks.types import Schedule, State

__all__ = ["ScheduledSampler"]


class ScheduledSampler:
    """Decode with the true previous token as often as a schedule says, and the decoder's own guess else.

    Classic: the ``ScheduledSampler(phases)`` of the usual recipe: one coin an epoch from an unseeded generator that no
    checkpoint holds, an error after the last phase, a division by zero for a single one. Here each token has its own
    coin, drawn from a key. Functional: :func:`functricks.sequences.scheduled_sampling`, which does the work.

    Args:
        teacher_probability: a number in [0, 1], or a schedule of the step, such as ``schedules.linear(1.0, 1.0,
            0.25, total_iters=10)`` or ``schedules.inverse_sigmoid(1.0, k=500.0)``.
        seed: an int, or a key from :mod:`functricks.random`; give every rank its own.
        coin: ``"token"``, ``"sequence"`` or ``"batch"``.

    :meth:`step` moves the schedule on, once an epoch or once an update, as you count. Every call draws new coins.

    >>> from functricks import schedules
    >>> sampler = ScheduledSampler(schedules.linear(1.0, 1.0, 0.5, total_iters=2))
    >>> def decode_step(state, token):  # counts on from its input
    ...     return torch.nn.functional.one_hot((token + 1) % 5, 5), state
    >>> sampler(decode_step, (), torch.tensor([[3, 3, 3]])).argmax(-1)  # teacher forcing
    tensor([[1, 4, 4]])
    >>> sampler.step()
    >>> sampler.teacher_probability
    0.75
    """

    def __init__(self, teacher_probability: float | Schedule, seed: int | Tensor = 0, *, coin: Coin = "token") -> None:
        if not callable(teacher_probability) and not 0 <= teacher_probability <= 1:
            raise ValueError(f"ScheduledSampler: teacher_probability must be in [0, 1], got {teacher_probability!r}")
        self.schedule, self.coin = teacher_probability, coin
        self.key = seed if isinstance(seed, Tensor) else random.key(seed)
        self.steps = self.calls = 0

    def __repr__(self) -> str:
        return f"ScheduledSampler({self.schedule!r}, coin={self.coin!r}, steps={self.steps})"

    @property
    def teacher_probability(self) -> float:
        """How often the input is the true token, at this step."""
        return float(self.schedule(self.steps) if callable(self.schedule) else self.schedule)

    def __call__(self, decode_step: DecodeStep, state: State, targets: Tensor, **more: Any) -> Tensor:
        """Return the logits [B, T, V]; arguments as for :func:`functricks.sequences.scheduled_sampling`."""
        key = random.fold_in(self.key, self.calls).to(targets.device)
        self.calls += 1
        probability = self.teacher_probability
        return sequences.scheduled_sampling(decode_step, state, targets, probability, key, coin=self.coin, **more)

    def step(self) -> None:
        """Move the schedule on by one."""
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what it remembers: the steps, the calls and the key. The schedule belongs to the code."""
        return {"steps": self.steps, "calls": self.calls, "key": self.key.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called."""
        if set(state) != {"steps", "calls", "key"}:
            raise ValueError(f"ScheduledSampler: the state must have steps, calls and key, got {sorted(state)}")
        self.steps, self.calls, self.key = int(state["steps"]), int(state["calls"]), torch.as_tensor(state["key"])
