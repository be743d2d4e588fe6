"""Dropout that ``forward`` calls as a function, drawn from keys; and an error for draws that no key can control.

A function mode sees every torch function that the model calls. Inside a ``scan`` no mode can be entered, and each call
costs about two microseconds more, so the mode is there only for models whose code names a function that draws.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from functricks import random
from functricks.modules._attention import attend
from functricks.modules._keyed import Rate, have_lanes, no_key, under_transform
from functricks.modules._pure import drop_alpha, drop_alpha_channels, drop_channels, drop_elements

_DROPOUTS: dict[str, tuple[Callable[[Tensor, Tensor, Any], Tensor], float, bool]] = {  # draw, rate, training
    "dropout": (drop_elements, 0.5, True),
    "dropout1d": (functools.partial(drop_channels, batched=3), 0.5, True),
    "dropout2d": (drop_channels, 0.5, True),
    "dropout3d": (functools.partial(drop_channels, batched=5), 0.5, True),
    "alpha_dropout": (drop_alpha, 0.5, False),
    "feature_alpha_dropout": (drop_alpha_channels, 0.5, False),
    "feature_dropout": (drop_channels, 0.5, True),
}
_DROPOUTS |= {f"{name}_": _DROPOUTS[name] for name in ("dropout", "alpha_dropout", "feature_dropout")}
_DROPOUTS |= {"feature_alpha_dropout_": _DROPOUTS["feature_alpha_dropout"]}
_WITH_RATE = {  # name -> where its rate and its training flag are
    "multi_head_attention_forward": (10, "dropout_p", 13, "training"),
    "lstm": (5, "dropout", 6, "train"),
    "gru": (5, "dropout", 6, "train"),
    "rnn_tanh": (5, "dropout", 6, "train"),
    "rnn_relu": (5, "dropout", 6, "train"),
    "native_dropout": (1, "p", 2, "train"),
}
_METHODS = {  # of tensors and of distributions
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal_",
    "random_", "uniform_",
}  # fmt: skip
_ALWAYS = _METHODS | {
    "_sample_dirichlet", "_standard_gamma", "binomial", "fractional_max_pool2d", "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d", "fractional_max_pool3d_with_indices", "gumbel_softmax", "normal", "poisson", "rand",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
}  # fmt: skip
_DRAWING = {*_DROPOUTS, *_ALWAYS, *_WITH_RATE, "rrelu", "rrelu_", "scaled_dot_product_attention"}


class Site:
    """Which module is running, by its path."""

    def __init__(self) -> None:
        self.path = ""


class AtSite(nn.Module):
    """A module that says that it is running, for the key of what its ``forward`` draws."""

    site: Site
    site_path: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outer, self.site.path = self.site.path, self.site_path
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.site.path = outer


class KeyedFunctions(TorchFunctionMode):
    """Draws the dropout functions from keys, folded from the path of the running module and the number of the draw."""

    def __init__(
        self,
        site: Site,
        hashes: Mapping[str, int],
        key: Tensor | None,
        rates: Mapping[str, Rate],
        strict: bool,
    ) -> None:
        super().__init__()
        self.site, self.hashes, self.key, self.rates, self.strict = site, hashes, key, rates, strict
        self.counts: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _DRAWING:
            return func(*args, **kwargs)
        if name in _DROPOUTS:
            return self._dropout(name, *args, **kwargs)
        if name == "scaled_dot_product_attention":
            return self._attention(func, *args, **kwargs)
        if self.strict and _draws(name, args, kwargs):
            raise ValueError(
                f"apply: {self.site.path!r} calls {name}, which draws random numbers that no key controls; draw them "
                f'outside and pass them in, or accept the global generator with functional(..., randomness="global")'
            )
        return func(*args, **kwargs)

    def _dropout(
        self,
        name: str,
        input: Tensor,
        p: float | None = None,
        training: bool | None = None,
        inplace: bool = False,
        train: bool | None = None,
    ) -> Tensor:
        draw, usual, on = _DROPOUTS[name]
        for flag in (train, training):
            on = on if flag is None else flag
        rate = self.rates.get(self.site.path, usual if p is None else p)
        if not on or (not isinstance(rate, Tensor) and rate == 0):
            return input
        return draw(self._next_key(), input, rate)

    def _attention(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        # Rate 0 is how a caller says that it does not train, so that nothing overrides it.
        rate = self.rates.get(self.site.path, dropout_p) if dropout_p else 0.0
        quiet = not isinstance(rate, Tensor) and rate == 0
        if quiet and not (under_transform() and have_lanes((query, key, value, attn_mask))):
            return func(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        own = None if quiet else self._next_key()
        return attend(own, query, key, value, attn_mask, rate, causal=is_causal, scale=scale, grouped=enable_gqa)

    def _next_key(self) -> Tensor:
        path = self.site.path
        if self.key is None:
            raise no_key(path)
        count = self.counts.get(path, 0)
        self.counts[path] = count + 1
        return random.fold_in(self.key, self.hashes[path]) + count


class Watch(TorchFunctionMode):
    """Raises where something draws that :func:`draws_by_function` did not foresee; for the first call of a model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _DRAWING and _draws(name, args, kwargs or {}):
            raise ValueError(
                f"apply: {name} draws random numbers, and the code of the model's forward does not name it, so that no "
                f"key controls it; call it by its name, as in F.dropout(x), or accept the global generator with "
                f'functional(..., randomness="global")'
            )
        return func(*args, **(kwargs or {}))


def _draws(name: str, args: Any, kwargs: Any) -> bool:
    if name in _DROPOUTS:
        _, usual, on = _DROPOUTS[name]
        given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        return bool(given.get("p", usual)) and bool(given.get("train", given.get("training", on)))
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if name in ("rrelu", "rrelu_"):
        return bool(kwargs.get("training", args[3] if len(args) > 3 else False))
    if name not in _WITH_RATE:
        return True
    at, rate, flag_at, flag = _WITH_RATE[name]
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and len(args) == 9 and isinstance(args[3], tuple | list):
        at, flag_at = at + 1, flag_at + 1  # of packed data: their sizes come in between
    chance = kwargs.get(rate, args[at] if len(args) > at else 0.0)
    on = kwargs.get(flag, args[flag_at] if len(args) > flag_at else True)
    return bool(chance) and on is not False


# --- does a model's code name a function that draws? -----------------------------------------------------------------


def of_torch(module: nn.Module) -> bool:
    """Is the class of the module torch's own?"""
    return _of_torch(type(module))


def draws_by_function(model: nn.Module, others: Iterable[Any] = ()) -> bool:
    """Does the code behind the model's ``forward`` name a torch function that draws, as far as it can be followed?

    Or the code of its hooks, or of ``others``, which run in it too?

    Followed are methods of the model's own classes, global names, attributes of Python modules, and closures. What a
    table or a computed attribute holds is not seen, so that :class:`Watch` looks at the first call.
    """
    modules = list(model.modules())
    if any(_may_drop(m) and not _of_torch(type(m).forward) for m in modules):
        return True  # whose method of torch's may be what theirs calls
    kinds = {kind for m in modules for kind in type(m).__mro__ if kind is not object and not _of_torch(kind)}
    spaces = [vars(kind) for kind in kinds]
    todo: list[Any] = [space["forward"] for space in spaces if "forward" in space]
    todo += [v for m in modules for v in vars(m).values() if callable(v) and not isinstance(v, nn.Module | type)]
    todo += [hook for m in modules for hooks in (m._forward_pre_hooks, m._forward_hooks) for hook in hooks.values()]
    todo += [part for other in others for part in _called(other)]
    seen: dict[int, Any] = {}  # by identity, and kept alive: an id names nothing else
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, str):
            if item in _METHODS:
                return True
            todo += [space[item] for space in spaces if item in space]
        elif _is_draw(item):
            return True
        elif not _of_torch(item):
            todo += _parts(item)
    return False


def _called(item: Any) -> list[Any]:
    """Return what calling an object runs: a function is itself, and of an object it is the class that tells."""
    if isinstance(item, nn.Module):
        drawing = any(_may_drop(m) or isinstance(m, nn.RReLU) for m in item.modules()) or draws_by_function(item)
        return [F.dropout] if drawing else []
    plain = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type)
    return [item] if isinstance(item, plain) else [item, vars(type(item)).get("__call__")]


def _may_drop(module: Any) -> bool:
    rated = isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
    return isinstance(module, _DropoutNd) or rated


def _package(item: Any) -> str:
    name = item.__name__ if isinstance(item, types.ModuleType) else getattr(item, "__module__", None)
    if not name and isinstance(item, types.BuiltinFunctionType | types.MethodDescriptorType):
        return "torch" if item in _BUILT_IN else ""  # torch.rand and the like name no module
    return name if isinstance(name, str) else ""


_BUILT_IN = {getattr(torch, name) for name in _DRAWING if hasattr(torch, name)}


def _of_torch(item: Any) -> bool:
    """Is it torch's, or functricks' own, which draws from keys?"""
    return _package(item).split(".")[0] in ("torch", "functricks")


def _is_draw(item: Any) -> bool:
    package = _package(item)
    if package.startswith("torch.distributions"):
        return True
    return package.split(".")[0] == "torch" and callable(item) and getattr(item, "__name__", "") in _DRAWING


def _parts(item: Any) -> Iterator[Any]:
    """Yield what a piece of code leads to: objects, and names of attributes of we do not know what."""
    if isinstance(item, functools.partial):
        yield item.func
    elif isinstance(item, staticmethod | classmethod | types.MethodType):
        yield item.__func__
    elif isinstance(item, property | functools.cached_property):
        yield item.fget if isinstance(item, property) else item.func
    elif isinstance(item, type):
        yield from (vars(item)[name] for name in ("__call__", "forward") if name in vars(item))
    elif isinstance(item, types.FunctionType):
        for cell in item.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # an empty cell
                continue
        yield from _named(item.__code__, item.__globals__)


_UNKNOWN = object()


def _named(code: types.CodeType, scope: Mapping[str, Any]) -> Iterator[Any]:
    """Follow chains such as ``nn.functional.dropout`` from their global, and yield where each ends."""
    held: Any = _UNKNOWN
    imports = False  # of torch, inside of the function: then every name counts
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            held = scope.get(step.argval, _UNKNOWN)
        elif step.opname == "IMPORT_NAME":
            imports, held = imports or step.argval.split(".")[0] == "torch", _UNKNOWN
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            whole = isinstance(held, types.ModuleType | type)
            held = getattr(held, step.argval, _UNKNOWN) if whole else _UNKNOWN
            if held is _UNKNOWN:
                yield torch.rand if imports and step.argval in _DRAWING else step.argval
        else:
            held = _UNKNOWN
        if held is not _UNKNOWN:
            yield held
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant, scope)
