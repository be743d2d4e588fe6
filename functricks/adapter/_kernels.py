"""Optimizers that PyTorch has too: its own kernels do the step, on the groups and the state of the adapter's."""

from __future__ import annotations

import inspect
from collections import defaultdict
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

    def check(self, found: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Raise where a state to load is not of this class, which would tell in the middle of a later step."""
        name = type(self.engine).__name__
        for i, (saved, group) in enumerate(zip(found["param_groups"], groups, strict=False)):
            filled = {**saved, "params": []}
            self.engine.param_groups, self.engine.state = [filled], defaultdict(dict)
            self.engine.__setstate__({})  # what the class adds to older states is not missing
            lacking = [key for key in self.parameters if key in self.defaults and key not in filled]
            if lacking:
                raise ValueError(
                    f"Optimizer.load_state_dict: group {i} of the state has no {', '.join(lacking)}, which {name} "
                    "needs; it was saved by another optimizer"
                )
            needed: dict[int, set[str]] = {}
            for number, param in zip(saved["params"], group["params"], strict=False):
                own = found["state"].get(number)
                if own and param.ndim not in needed:
                    needed[param.ndim] = self._keys(filled, param.ndim)
                if own and not needed[param.ndim] <= own.keys():
                    raise ValueError(
                        f"Optimizer.load_state_dict: the state of parameter {number} has {', '.join(sorted(own))}; "
                        f"{name} keeps {', '.join(sorted(needed[param.ndim]))}"
                    )

    def _keys(self, group: dict[str, Any], ndim: int) -> set[str]:
        """Return what the class cannot step without, found out on a parameter of one element."""
        skipped = ("params", "lr", "foreach", "fused", "capturable")
        options = {key: group[key] for key in self.parameters if key in group and key not in skipped}
        probe = torch.zeros([1] * ndim, device="cpu")
        probe.grad = torch.zeros_like(probe)
        engine = type(self.engine)([probe], **options)
        with torch.no_grad():
            self.unhooked_step(engine)
        return set(engine.state[probe]) - {"momentum_buffer"}  # SGD starts one where there is none

    def restored(self, optimizer: torch.optim.Optimizer) -> None:
        """Fill in what an older state lacks, as the class does."""
        self._lend(optimizer)
        self.engine.__setstate__({})

    def _lend(self, optimizer: torch.optim.Optimizer) -> None:
        self.engine.param_groups, self.engine.state = optimizer.param_groups, optimizer.state
