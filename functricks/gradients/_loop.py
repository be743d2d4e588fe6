"""One loop for everything that repeats: a Python loop in eager, a scan where unrolling would cost compile time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functricks import tree

__all__ = ["UNROLLED", "collect", "fold", "repeat", "scan"]

UNROLLED = 2  # a scan of one or two iterations costs more to compile and to run than its body


def fold(body: Callable[[Any, Any], Any], state: Any, items: list[Any], *, unroll: bool = False) -> Any:
    """Return ``body(... body(body(state, items[0]), items[1]) ...)``.

    While compiling, items of equal shapes are stacked and scanned, so that compile time does not grow with their
    number. The caller runs the first iteration itself, because a scan needs a state that no longer changes its form:
    under ``vmap``, zeros have no lanes yet.

    Args:
        body: ``(state, item) -> state``, of the same structure, shapes and dtypes.
        state: a pytree of tensors.
        items: pytrees of one structure.
        unroll: never scan; ``torch.func.grad`` cannot differentiate through a scan.
    """
    if unroll or not torch.compiler.is_compiling() or len(items) <= UNROLLED:
        for item in items:
            state = body(state, item)
        return state
    return scan(body, state, tree.map(lambda *column: torch.stack(column), *items))


def repeat(body: Callable[[Any, Tensor], Any], state: Any, times: int, *, first: int = 0, unroll: bool = False) -> Any:
    """Return ``state`` after ``times`` calls of ``body(state, index)``; ``index`` is a 0-d int64 tensor."""
    return fold(body, state, list(torch.arange(first, first + times).unbind()), unroll=unroll)


def scan(body: Callable[[Any, Any], Any], state: Any, items: Any) -> Any:
    """Return what :func:`fold` does for items that are stacked along a leading axis; only inside ``torch.compile``."""

    def step(state: Any, item: Any) -> tuple[Any, Tensor]:
        # a scan needs something to stack
        return body(state, item), tree.leaves(item)[0].reshape(-1)[:1]

    return collect(step, state, items)[0]


def collect(body: Callable[[Any, Any], tuple[Any, Any]], state: Any, items: Any) -> tuple[Any, Any]:
    """Scan with results: ``body(state, item) -> (state, result)``; return the last state and the stacked results."""
    from torch._higher_order_ops.scan import scan as torch_scan

    leaves, structure = tree.flatten(state)
    stacked, item_structure = tree.flatten(items)

    def step(carry: list[Tensor], rows: list[Tensor]) -> tuple[list[Tensor], Any]:
        new, result = body(tree.unflatten(structure, carry), tree.unflatten(item_structure, rows))
        # a scan must not return an input unchanged
        return [leaf.clone() for leaf in tree.leaves(new)], tree.map(torch.clone, result)

    last, results = torch_scan(step, leaves, stacked)
    return tree.unflatten(structure, last), results
