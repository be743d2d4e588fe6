"""Hooks for a classic loop that are gone when the block is left, however it is left."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from functricks.modules._hooks import Passing, Plan, Replace, Select, Step, Taps

_NOTHING: Replace = MappingProxyType({})


class Observed(Taps):
    """What the last forward of the model, and the backward through it, brought by.

    ``activations`` and ``gradients`` are dicts from sites to values, in the order of the calls.
    """

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        # The first and the last hook of a forward: one begins an empty record, the other looks for what was missed.
        first = module.register_forward_pre_hook(self._begin)
        super().__init__(module, plan)
        self.handles += [first, module.register_forward_hook(self._end)]
        self.activations: dict[str, Any] = {}
        self.gradients: dict[str, Any] = {}

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.present = [Passing({})]
        self.activations, self.gradients = self.present[0].seen, {}

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.present:
            now, self.present = self.present[0], None
            self._check(now)

    def _take(self, step: Step, now: Passing, site: str, value: Any) -> Any:
        if step.kind == "gradients":
            return _recorded(self.gradients, site, value)
        return super()._take(step, now, site, value)


def _recorded(gradients: dict[str, Any], site: str, value: Any) -> Any:
    """Return a copy of the value, so that only what came this way arrives here, and have autograd record it."""
    leaves, structure = _pytree.tree_flatten(value)
    found: list[Tensor | None] = [None] * len(leaves)

    def put(index: int, gradient: Tensor) -> None:
        found[index] = gradient
        gradients[site] = _pytree.tree_unflatten(list(found), structure)

    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            copy: Any = leaf.clone()  # a view would lose its hook where the next module writes in place
            copy.register_hook(functools.partial(put, index))
            leaves[index] = copy
    return _pytree.tree_unflatten(leaves, structure)


@contextmanager
def hooks(
    model: nn.Module, *, observe: Select = (), intervene: Replace = _NOTHING, gradients: Select = ()
) -> Iterator[Observed]:
    """Observe and replace what passes through the modules of a model, inside of a ``with`` block only.

    Classic: ``register_forward_hook``, ``register_forward_pre_hook`` and ``register_full_backward_hook`` with a
    ``handle.remove()`` for each that an exception skips. The same selectors as in :func:`functricks.functional`, so
    that what was found in a loop carries over.

    Args:
        model: is called as usual, as ``model(...)``, forwards and backwards inside the block.
        observe: selectors of the activations that are kept: ``"fc1"`` is what a module returns, ``"fc1:input"`` what it
            is called with, ``"fc1#1"`` its second call; globs, or a callable ``(path, module) -> bool``.
        intervene: ``{selector: function}``; what the function returns passes on. With a function such as
            :func:`functricks.reverse_gradient` the activation passes, and its gradient is replaced.
        gradients: selectors of the activations whose gradient is kept; a copy of the activation passes on, after
            ``intervene``, and what is kept is the copy's.

    Yields an object with the dicts ``activations`` and ``gradients``: those of the last call of ``model``, under the
    names of their sites. A gradient is there after ``backward``; a structure of tensors has one of gradients. Modules
    that write in place are no obstacle. The values keep their graph; ``detach()`` what is to outlive the step.

    Raises ValueError for a selector that matches no module, and in the forward for one that matches no call.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    >>> with hooks(model, observe="0", gradients="0") as seen:
    ...     model(torch.ones(4, 2)).sum().backward()
    >>> seen.activations["0"].shape, seen.gradients["0"].shape, len(model[0]._forward_hooks)
    (torch.Size([4, 3]), torch.Size([4, 3]), 0)
    """
    title = f"hooks of {type(model).__name__}"
    seen = Observed(model, Plan(title, model, observe=observe, intervene=intervene, gradients=gradients))
    try:
        yield seen
    finally:
        for handle in seen.handles:
            handle.remove()
