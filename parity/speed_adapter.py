"""Time ``adapter.Optimizer`` against ``torch.optim``, in one process: ``python -m parity.speed_adapter``.

Both sides write over the same kind of parameters. One round is a few steps of each side in turn, so that slow spells
of the machine hit both; medians are compared. The targets: an optimizer that PyTorch has takes at most 1.1 times as
long as PyTorch's fused step, and any other chain, compiled, at most twice as long as the fused step of AdamW.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from functricks import (
    adam,
    adamw,
    adapter,
    chain,
    clip_by_global_norm,
    lion,
    scale_by_adam,
    scale_by_learning_rate,
    sgd,
)
from functricks.types import Transform
from parity.speed_optimizers import FEW_LARGE, LARGE, LR, MANY_SMALL, SMALL, Row, leaves

Shapes = list[tuple[int, ...]]
Step = Callable[[], object]


class Case(NamedTuple):
    name: str
    adapter: Callable[[Shapes], torch.optim.Optimizer]
    classic: Callable[[Shapes], torch.optim.Optimizer]
    target: float  # at most so many times as long as the classic step
    shapes: Shapes
    steps: int  # a round


def parameters(shapes: Shapes) -> list[nn.Parameter]:
    own = [nn.Parameter(leaf) for leaf in leaves(shapes).values()]
    for parameter, grad in zip(own, leaves(shapes, 1).values(), strict=True):
        parameter.grad = grad
    return own


def ours(transform: Transform, compile: bool = False) -> Callable[[Shapes], torch.optim.Optimizer]:
    return lambda shapes: adapter.Optimizer(parameters(shapes), transform, compile=compile)


def theirs(cls: Callable[..., torch.optim.Optimizer], **arguments: float) -> Callable[[Shapes], torch.optim.Optimizer]:
    return lambda shapes: cls(parameters(shapes), lr=LR, fused=True, **arguments)


def clipped() -> Transform:
    return chain(clip_by_global_norm(1e9), adamw(LR))


def by_hand() -> Transform:
    """AdamW without decay from its parts, which nothing recognises."""
    return chain(scale_by_adam(), scale_by_learning_rate(LR))


ADAMW, ADAM, SGD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD
CASES = [
    Case(f"adamw, {SMALL}", ours(adamw(LR)), theirs(ADAMW), 1.1, MANY_SMALL, 20),
    Case(f"adamw, {LARGE}", ours(adamw(LR)), theirs(ADAMW), 1.1, FEW_LARGE, 3),
    Case(f"adam, {SMALL}", ours(adam(LR)), theirs(ADAM), 1.1, MANY_SMALL, 20),
    Case(f"sgd, momentum, {SMALL}", ours(sgd(LR, momentum=0.9)), theirs(SGD, momentum=0.9), 1.1, MANY_SMALL, 20),
    Case(f"adam from its parts, compiled, {SMALL}", ours(by_hand(), True), theirs(ADAM), 2.0, MANY_SMALL, 20),
    Case(f"clip and adamw, compiled, {LARGE}", ours(clipped(), True), theirs(ADAMW), 2.0, FEW_LARGE, 3),
    Case(f"adam from its parts, compiled, {LARGE}", ours(by_hand(), True), theirs(ADAM), 2.0, FEW_LARGE, 3),
    Case(f"lion, compiled, {LARGE}", ours(lion(LR), True), theirs(ADAMW), 2.0, FEW_LARGE, 3),
]


def measure(case: Case, rounds: int = 30) -> Row:
    """Time both sides in turn; the first step of each compiles and is not counted."""
    steps = [case.adapter(case.shapes).step, case.classic(case.shapes).step]
    times: list[list[float]] = [[], []]
    for _ in range(2):
        for step in steps:
            step()
    for _ in range(rounds):
        for step, spent in zip(steps, times, strict=True):
            start = time.perf_counter()
            for _ in range(case.steps):
                step()
            spent.append((time.perf_counter() - start) / case.steps * 1e3)
    mine, classic = (statistics.median(spent) for spent in times)
    return Row(case.name, mine, classic, classic / mine, 1.0 / case.target, mine <= case.target * classic)


def main() -> int:
    width = max(len(case.name) for case in CASES)
    print(f"{'case':{width}}  adapter ms  classic ms  times as long  at most  ok")
    good = True
    for case in CASES:
        row = measure(case)
        good &= row.ok
        print(
            f"{row.case:{width}}  {row.functional_ms:10.3f}  {row.classic_ms:10.3f}  "
            f"{row.functional_ms / row.classic_ms:13.2f}  {case.target:7g}  {'ok' if row.ok else 'FAIL'}",
            flush=True,
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
