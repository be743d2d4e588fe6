"""The network that ``functricks ablate`` trains, with weights from keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from functricks import random

__all__ = ["initial_weights", "perceptron"]

FIRST_LAYER = "0.weight"
WEIGHTS = "*.weight"


def perceptron(features: int, hidden: Sequence[int], classes: int) -> nn.Sequential:
    """Return linear layers with ReLU and dropout (rate 0, for the caller to override) between them."""
    layers: list[Any] = []
    for fan_in, fan_out in pairwise([features, *hidden]):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU(), nn.Dropout(0.0)]
    return nn.Sequential(*layers, nn.Linear([features, *hidden][-1], classes))


def initial_weights(key: Tensor, params: dict[str, Tensor]) -> dict[str, Tensor]:
    r"""Draw what ``nn.Linear`` draws, uniform in :math:`\pm 1/\sqrt{\text{fan-in}}`, from a key that may be a lane.

    Args:
        key: from :mod:`functricks.random`; the same key gives the same weights, alone or in a batch.
        params: ``{path: parameter}`` of linear layers, of which only names and shapes are read.

    >>> import torch
    >>> weights = initial_weights(random.key(0), {"0.weight": torch.zeros(1, 4), "0.bias": torch.zeros(1)})
    >>> weights["0.weight"].abs().amax() <= 0.5
    tensor(True)
    """
    drawn = {}
    for index, (path, leaf) in enumerate(params.items()):
        fan_in = params[path.removesuffix("bias") + "weight"].shape[1] if path.endswith("bias") else leaf.shape[1]
        bound = 1 / math.sqrt(fan_in)
        drawn[path] = random.uniform(random.fold_in(key, index), tuple(leaf.shape), -bound, bound)
    return drawn
