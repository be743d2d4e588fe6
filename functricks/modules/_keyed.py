"""What every module with keyed randomness shares: the key and the rate of a call arrive as buffers."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
import torch._C._functorch as functorch
from torch import Tensor, nn

from functricks import tree

Rate: TypeAlias = float | Tensor


class Drawn(NamedTuple):
    """The key and the rate of one draw."""

    key: Tensor
    rate: Rate


class Keyed(nn.Module):
    """A module that drops from a key: ``keyed_key`` and, where it is overridden, ``keyed_rate`` are of one call."""

    p: float
    keyed_path: str
    keyed_key: Tensor | None
    keyed_rate: Tensor | None

    def drops(self) -> bool:
        """Return False for a module that has no place to drop at, whatever the rate."""
        return True

    def next_draw(self) -> Drawn | None:
        """Return what the module's next draw takes; None where there is nothing to drop."""
        rate: Rate = self.p if self.keyed_rate is None else self.keyed_rate
        if not self.training or (rate.numel() == 0 if isinstance(rate, Tensor) else rate == 0):
            return None
        key = self.keyed_key
        if key is None:
            raise no_key(self.keyed_path)
        own = key.clone()
        key.add_(1)  # for the module's next call; Threefry under a neighbouring key is as good as under any other
        return Drawn(own, rate)


def prepare(module: Any, path: str, rate: float) -> None:
    """Give a module the attributes of :class:`Keyed`."""
    module.p, module.keyed_path = rate, path
    module.register_buffer("keyed_key", None, persistent=False)
    module.register_buffer("keyed_rate", None, persistent=False)


def no_key(path: str) -> ValueError:
    return ValueError(
        f"apply: {path!r} is dropout in training mode and has no key to draw from; pass key=, train=False or "
        f"dropout=0.0"
    )


def under_transform() -> bool:
    """Is there a functorch level at all? Always False in a trace, which cannot tell."""
    return not torch.compiler.is_compiling() and tree.is_transformed()


def have_lanes(given: Any) -> bool:
    """Does ``vmap`` map over any tensor of these, which may be nested? Not for a trace."""
    for leaf in given:
        if isinstance(leaf, tuple | list):
            if have_lanes(leaf):
                return True
            continue
        while isinstance(leaf, Tensor) and functorch.is_functorch_wrapped_tensor(leaf):
            if functorch.is_batchedtensor(leaf):
                return True
            leaf = functorch.get_unwrapped(leaf)
    return False
