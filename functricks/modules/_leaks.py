"""Values that ``forward`` reads or leaves where ``apply`` cannot put or fetch them; each would be silently wrong.

A parameter that it writes to or replaces, and a buffer that it fills although it was None, show in the first call: to
look costs a copy of the parameters. One that it reads from a list beside the registered ones raises when it is read.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    def local(leaf: Any, within: tuple[Any, ...] = ()) -> Any:
        if id(leaf) in names:
            return Unplaced.named(names[id(leaf)])
        if isinstance(leaf, types.FunctionType) and leaf.__closure__ and leaf not in within:
            return _rebound(leaf, lambda held: local(inside(held), (*within, leaf)))
        return leaf

    def inside(held: Any) -> Any:
        if isinstance(held, types.MethodType) and id(held.__self__) in copies:
            return types.MethodType(held.__func__, copies[id(held.__self__)])
        return copies.get(id(held), held)

    for module in made.modules():
        for attribute, value in list(vars(module).items()):
            if attribute in ("_parameters", "_buffers", "_modules", "_flat_weights"):  # an RNN renews the last
                continue
            leaves = _pytree.tree_leaves(value)
            if any(local(leaf) is not leaf for leaf in leaves):
                vars(module)[attribute] = _pytree.tree_map(local, value)
    return made


def _rebound(function: types.FunctionType, change: Callable[[Any], Any]) -> types.FunctionType:
    """Return a function with other values in its closure, or itself where none changes."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            new = change(cell.cell_contents)
            cells.append(cell if new is cell.cell_contents else types.CellType(new))
        except ValueError:  # an empty cell
            cells.append(cell)
    if all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True)):
        return function
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    made.__dict__.update(function.__dict__)
    return made
