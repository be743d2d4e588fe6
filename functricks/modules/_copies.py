"""A private copy of a module, in which nothing leads back to the module and nothing hides from the values of a call."""

from __future__ import annotations

import copy
import functools
import operator
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree


class Unplaced(Tensor):
    """What stands for a parameter or buffer in an attribute that is no registration, such as a list: raises if read."""

    what: str

    @classmethod
    def named(cls, name: str) -> Unplaced:
        made = torch.empty(0).as_subclass(cls)
        made.what = name
        return made

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _pytree.tree_leaves((args, kwargs))
        name = next((leaf.what for leaf in given if isinstance(leaf, cls)), "")
        raise ValueError(
            f"apply: forward reads {name!r} from a list or another attribute beside the registered one, where no value "
            f"can be put; read it from the module that holds it (nn.ParameterList, nn.ParameterDict)"
        )


def private(model: nn.Module, memo: Mapping[int, Any], names: Mapping[int, str]) -> nn.Module:
    """Return a deep copy in which nothing leads back to the model.

    Functions are not copied, so that a lambda would still call the model that its closure holds; and an attribute such
    as a list, which no call puts values into, would still hold placeholders.

    Args:
        model: what to copy.
        memo: what to put in the place of what, as for :func:`copy.deepcopy`.
        names: of the placeholders of parameters and buffers, by their ids.
    """
    copies = dict(memo)
    made = copy.deepcopy(model, copies)
    local = _Local(copies, names)
    for module in made.modules():
        for attribute, value in list(vars(module).items()):
            if attribute in ("_parameters", "_buffers", "_modules", "_flat_weights"):  # an RNN renews the last
                continue
            if any(local(leaf) is not leaf for leaf in _pytree.tree_leaves(value)):
                vars(module)[attribute] = _pytree.tree_map(local, value)
    return made


_LONG = 1000  # longer lists are data
_DEPTH = 5  # a forward that was replaced by one that holds an object that holds the old one, and some to spare


class _Local:
    """Returns what stands for a thing in a private copy: itself, unless it leads to the model."""

    def __init__(self, copies: dict[int, Any], names: Mapping[int, str]) -> None:
        self.copies, self.names = copies, names
        self.within: list[Any] = []  # what leads here, as things may lead to themselves

    def __call__(self, held: Any) -> Any:
        held = self.copies.get(id(held), held)
        if id(held) in self.names:
            return Unplaced.named(self.names[id(held)])
        if isinstance(held, nn.Module | Tensor | type | types.ModuleType) or any(held is one for one in self.within):
            return held
        if len(self.within) == _DEPTH:
            return held
        self.within.append(held)
        try:
            return self._rebound(held)
        finally:
            self.within.pop()

    def _rebound(self, held: Any) -> Any:
        if isinstance(held, types.FunctionType):
            return self._function(held)
        if isinstance(held, types.MethodType):
            owner = self(held.__self__)
            return held if owner is held.__self__ else types.MethodType(held.__func__, owner)
        if isinstance(held, functools.partial):
            parts = [held.func, *held.args, *held.keywords.values()]
            func, *rest = new = [self(part) for part in parts]
            if all(map(operator.is_, new, parts)):
                return held
            count = len(held.args)
            return functools.partial(func, *rest[:count], **dict(zip(held.keywords, rest[count:], strict=True)))
        if isinstance(held, list | tuple | dict) and len(held) <= _LONG:
            changes = any(self(leaf) is not leaf for leaf in _pytree.tree_leaves(held))
            return _pytree.tree_map(self, held) if changes else held
        if len(self.within) > 1 and hasattr(held, "__dict__"):  # reached from a function; others are copies already
            own = {name: self(value) for name, value in vars(held).items()}
            if not all(map(operator.is_, own.values(), vars(held).values())):
                held = copy.copy(held)
                vars(held).update(own)
        return held

    def _function(self, held: types.FunctionType) -> types.FunctionType:
        cells = [types.CellType() for _ in held.__closure__ or ()]
        made = types.FunctionType(held.__code__, held.__globals__, held.__name__, held.__defaults__, tuple(cells))
        made.__kwdefaults__, made.__qualname__ = held.__kwdefaults__, held.__qualname__
        self.copies[id(held)] = made  # for what leads back to it
        changed = False
        for cell, old in zip(cells, held.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self(old.cell_contents)
            except ValueError:  # an empty cell
                continue
            changed = changed or (cell.cell_contents is not old.cell_contents and cell.cell_contents is not made)
        for name, value in vars(held).items():
            vars(made)[name] = self(value)
            changed = changed or vars(made)[name] is not value
        if not changed:
            del self.copies[id(held)]
        return made if changed else held
