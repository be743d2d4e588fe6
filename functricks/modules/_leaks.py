"""Values that ``forward`` reads or leaves where ``apply`` cannot put or fetch them; each would be silently wrong.

A parameter that it writes to or replaces, and a buffer that it fills although it was None, show in the first call: to
look costs a copy of the parameters. One that it reads from a list beside the registered ones raises when it is read.
"""

from __future__ import annotations

import copy
import functools
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch._C._functorch as functorch
from torch import Tensor, nn
from torch.utils import _pytree

from functricks import tree


class FirstCall:
    """What a copy holds before its first call, for the checks after it.

    Args:
        title: whom errors speak for.
        module: the copy.
        excused: the parameters that are known to be written to, and are copies in every call.
    """

    def __init__(self, title: str, module: nn.Module, excused: Sequence[str]) -> None:
        self.title, self.excused = title, excused
        self.stores = {path: [dict(store) for store in _stores(child)] for path, child in module.named_modules()}

    def record(self, params: Mapping[str, Tensor]) -> list[_Before]:
        """Return what the parameters are, below any transform."""
        bases = {name: _base(value) for name, value in params.items() if name not in self.excused}
        return [_Before(name, base, _version(base), base.detach().clone()) for name, base in bases.items()]

    def check(
        self,
        module: nn.Module,
        before: Sequence[_Before],
        params: Mapping[str, tuple[Tensor, Any]],
        buffers: Mapping[str, Any],
    ) -> None:
        """Raise for what the call left behind, and put parameters that it wrote to back.

        Args:
            module: the copy, after the call.
            before: from :meth:`record`.
            params: by slot, the parameter that was put there and what lies there now.
            buffers: the new buffers, by name.
        """
        self._check_filled(module)
        written = [slot for slot, (put, left) in params.items() if put is not left]
        for one in before:
            if one.differs():
                written.append(one.name)
                with torch.no_grad(), _outside():
                    one.base.copy_(one.values)
        if written:
            raise ValueError(
                f"{self.title}: forward writes to the parameter {written[0]!r}, which apply does not return; make it a "
                f"buffer, or change it between steps"
            )
        for name, buffer in buffers.items():
            if not isinstance(buffer, Tensor):
                raise ValueError(f"{self.title}: forward takes the buffer {name!r} away; leave a tensor in its place")

    def _check_filled(self, module: nn.Module) -> None:
        for path, child in module.named_modules():
            for store, old in zip(_stores(child), self.stores.get(path, ({}, {})), strict=True):
                late = [name for name, value in store.items() if value is not None and old.get(name) is None]
                if late:
                    store.clear()
                    store.update(old)
                    raise ValueError(
                        f"{self.title}: forward fills {late[0]!r} of {path!r}, which had no value, so that it belongs "
                        f"to no parameters or buffers; call the model once on a batch before functional"
                    )


def _stores(module: nn.Module) -> tuple[Any, Any]:
    return module._parameters, module._buffers


def _base(value: Tensor) -> Tensor:
    while functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    return value


@contextmanager
def _outside() -> Iterator[None]:
    """Leave all transforms; below each lie the values of the next."""
    with ExitStack() as stack:
        while tree.is_transformed():
            stack.enter_context(tree.outside_lanes())
        yield


def _version(base: Tensor) -> int:
    return 0 if base.is_inference() else base._version


class _Before(NamedTuple):
    """A parameter before a call."""

    name: str
    base: Tensor
    version: int
    values: Tensor

    def differs(self) -> bool:
        """Was it written to, as far as looking is possible? Its version misses what goes through ``.data``."""
        if _version(self.base) != self.version:
            return True
        plain = type(self.base) in (Tensor, nn.Parameter) and not self.base.is_meta and not self.base.is_sparse
        if not plain or torch._C._len_torch_dispatch_stack():
            return False  # no values, or none that may be read
        now = self.base.detach()
        return not torch.equal(now, self.values) and not bool(((now == self.values) | (now != now)).all())


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
