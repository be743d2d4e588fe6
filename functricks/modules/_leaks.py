"""Values that ``forward`` leaves where ``apply`` cannot fetch them; each would be silently wrong in a later call.

A parameter that it writes to or replaces, and a buffer that it fills although it was None, show in the first call: to
look costs a copy of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch._C._functorch as functorch
from torch import Tensor, nn

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
