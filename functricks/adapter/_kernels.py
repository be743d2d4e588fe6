"""Optimizers that PyTorch has too: its own kernels do the step, on the groups and the state of the adapter's."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from functricks import optimizers
from functricks.adapter._recipe import Hole, Recipe
from functricks.transforms.base import is_schedule

__all__: list[str] = []  # nothing here is public

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "muon": torch.optim.Muon,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
}


def torch_class(recipe: Recipe) -> type[torch.optim.Optimizer] | None:
    """Return PyTorch's own class, where it computes what the recipe says."""
    name = getattr(recipe.maker, "__name__", "")
    if recipe.around is not Hole or name not in _CLASSES or recipe.maker is not getattr(optimizers, name):
        return None
    if any(value is not None for value in recipe.fixed.values()) or any(
        map(_is_tensor, recipe.hyperparameters.values())
    ):
        return None
    known = inspect.signature(_CLASSES[name]).parameters
    more = [value for key, value in recipe.hyperparameters.items() if key not in known]
    return None if any(more) else _CLASSES[name]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(map(_is_tensor, value)))


class Kernels:
    """Runs the step of a class of torch.optim.

    An instance of that class lends its ``step``; it works on the groups and the state of the adapter's optimizer, which
    have its keys. What is not said (``fused``, ``foreach``) is the fastest that the parameters allow.
    """

    def __init__(self, recipe: Recipe, cls: type[torch.optim.Optimizer], flags: dict[str, Any]) -> None:
        self.parameters = inspect.signature(cls).parameters
        unknown = [name for name in flags if name not in self.parameters]
        if unknown:
            raise TypeError(f"Optimizer: torch.optim.{cls.__name__} has no {', '.join(unknown)}; leave it out")
        given = {name: value for name, value in recipe.hyperparameters.items() if name in self.parameters}
        if is_schedule(given["lr"]):
            given["lr"] = float(given["lr"](0))
        self.engine = cls([torch.zeros(1, 1)], **given, **flags)
        self.engine.state.clear()
        self.unhooked_step: Any = inspect.unwrap(cls.step)  # hooks see the adapter's optimizer, once
        self.defaults = dict(self.engine.defaults)

    def adopt(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Choose the kernel of a new group; Adagrad, alone in this, wants its state before the first step."""
        if "fused" in self.defaults and group["fused"] is None and not group["foreach"]:
            group["fused"] = _default_to_fused_or_foreach(group["params"], False, use_fused=True)[0] or None
        if isinstance(self.engine, torch.optim.Adagrad):
            own = {name: group[name] for name in self.parameters if name in group and name != "params"}
            optimizer.state.update(torch.optim.Adagrad(group["params"], **own).state)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the step."""
        self._lend(optimizer)
        self.unhooked_step(self.engine)

    def restored(self, optimizer: torch.optim.Optimizer) -> None:
        """Fill in what an older state lacks, as the class does."""
        self._lend(optimizer)
        self.engine.__setstate__({})

    def _lend(self, optimizer: torch.optim.Optimizer) -> None:
        self.engine.param_groups, self.engine.state = optimizer.param_groups, optimizer.state
