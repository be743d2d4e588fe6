"""The list of faults, and how each gets into it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Fault(NamedTuple):
    technique: str
    usual: str  # what the usual recipe does
    wrong: str  # what goes wrong
    number: str  # computed
    remedy: str  # what functricks does


# of this package, in the order of the table
MODULES = ("losses", "schedules", "steps", "adversarial", "optimizers", "hooks", "sequences")

_registered: dict[str, list[Callable[[], Fault]]] = {}


def fault(technique: str, usual: str, wrong: str, remedy: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register a function that computes the number of a fault."""

    def register(number: Callable[[], str]) -> Callable[[], str]:
        own = _registered.setdefault(number.__module__, [])
        own.append(lambda: Fault(technique, usual, wrong, number(), remedy))
        return number

    return register


def show(*values: float | Tensor) -> str:
    """Write numbers with four digits."""
    flat = torch.cat([torch.as_tensor(value, dtype=torch.float64).detach().flatten() for value in values])
    return ", ".join(f"{x:.4g}" for x in flat.tolist())


def slope(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return the derivative, as ``backward`` leaves it."""
    x = at.clone().requires_grad_()
    function(x).backward()
    assert x.grad is not None
    return x.grad


def faults() -> list[Fault]:
    """Compute all of them."""
    modules = [importlib.import_module(f"parity.faults.{name}") for name in MODULES]
    return [one() for module in modules for one in _registered[module.__name__]]


def markdown() -> str:
    """Return the table of ``parity/README.md``."""
    head = "| technique | the usual recipe | what goes wrong | the number | functricks |\n|---|---|---|---|---|"
    return "\n".join([head, *("| " + " | ".join(cell.replace("|", "\\|") for cell in one) + " |" for one in faults())])
