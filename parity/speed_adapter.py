"""Speed rows: ``adapter.Optimizer`` against ``torch.optim``.

Both sides write over the same kind of parameters. The targets: an optimizer that PyTorch has takes at most 1.1 times as
long as PyTorch's fused step, and any other chain, compiled, at most twice as long as the fused step of AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
from parity.speed_optimizers import FEW_LARGE, LARGE, LR, MANY_SMALL, SMALL, leaves
from parity.timing import Measure, Row, in_turns

Shapes = list[tuple[int, ...]]


Make = Callable[[Shapes], torch.optim.Optimizer]


def parameters(shapes: Shapes) -> list[nn.Parameter]:
    own = [nn.Parameter(leaf) for leaf in leaves(shapes).values()]
    for parameter, grad in zip(own, leaves(shapes, 1).values(), strict=True):
        parameter.grad = grad
    return own


def ours(transform: Transform, compile: bool = False) -> Make:
    return lambda shapes: adapter.Optimizer(parameters(shapes), transform, compile=compile)


def theirs(cls: Callable[..., torch.optim.Optimizer], **arguments: float) -> Make:
    return lambda shapes: cls(parameters(shapes), lr=LR, fused=True, **arguments)


def clipped() -> Transform:
    return chain(clip_by_global_norm(1e9), adamw(LR))


def by_hand() -> Transform:
    """AdamW without decay from its parts, which nothing recognises."""
    return chain(scale_by_adam(), scale_by_learning_rate(LR))


def row(case: str, mine: Make, classic: Make, at_most: float, shapes: Shapes, steps: int, rounds: int) -> Row:
    return in_turns(case, mine(shapes).step, classic(shapes).step, 1 / at_most, rounds, calls=steps)


ADAMW, ADAM, SGD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD
_CASES: list[tuple[str, Make, Make, float, Shapes, int]] = [
    (f"adapter, adamw, {SMALL}", ours(adamw(LR)), theirs(ADAMW), 1.1, MANY_SMALL, 20),
    (f"adapter, adamw, {LARGE}", ours(adamw(LR)), theirs(ADAMW), 1.1, FEW_LARGE, 3),
    (f"adapter, adam, {SMALL}", ours(adam(LR)), theirs(ADAM), 1.1, MANY_SMALL, 20),
    (f"adapter, sgd, momentum, {SMALL}", ours(sgd(LR, momentum=0.9)), theirs(SGD, momentum=0.9), 1.1, MANY_SMALL, 20),
    (f"adapter, adam from its parts, compiled, {SMALL}", ours(by_hand(), True), theirs(ADAM), 2.0, MANY_SMALL, 20),
    (f"adapter, clip and adamw, compiled, {LARGE}", ours(clipped(), True), theirs(ADAMW), 2.0, FEW_LARGE, 3),
    (f"adapter, adam from its parts, compiled, {LARGE}", ours(by_hand(), True), theirs(ADAM), 2.0, FEW_LARGE, 3),
    (f"adapter, lion, compiled, {LARGE}", ours(lion(LR), True), theirs(ADAMW), 2.0, FEW_LARGE, 3),
]
CASES: dict[str, Measure] = {case[0]: partial(row, *case) for case in _CASES}
