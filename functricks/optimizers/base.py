"""What the optimizers share: the links that an argument puts into a chain or leaves out."""

from __future__ import annotations

from functricks import tree
from functricks.transforms import add_decayed_weights, scale
from functricks.transforms.base import is_zero
from functricks.types import Number, Transform

__all__: list[str] = []  # nothing here is public


def ascend(maximize: bool) -> list[Transform]:
    """Return the link that turns descent into ascent, if asked for."""
    return [scale(-1.0)] if maximize else []


def decay(weight_decay: Number, where: tree.Where | None) -> list[Transform]:
    """Return the link that adds the decayed weights; none for the Python number 0."""
    return [] if is_zero(weight_decay) else [add_decayed_weights(weight_decay, where)]


def decoupled(weight_decay: Number, where: tree.Where | None, apart: bool) -> tuple[list[Transform], list[Transform]]:
    """Return the decay as links before the scaling (L2 regularisation) and after it (decoupled)."""
    links = decay(weight_decay, where)
    return ([], links) if apart else (links, [])
