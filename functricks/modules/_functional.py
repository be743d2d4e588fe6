"""``functional``: a module as a pure function of its parameters and buffers."""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
import torch._C._functorch as functorch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils import _pytree

from functricks import random, tree
from functricks.modules._copies import private
from functricks.modules._functions import AtSite, KeyedFunctions, Site, Watch, draws_by_function, of_torch
from functricks.modules._hooks import Plan, Replace, Select, Taps
from functricks.modules._keyed import Keyed, Rate
from functricks.modules._leaks import FirstCall
from functricks.modules._pure import POOLED, PureBatchNorm, draws_unkeyed, join, purify, subtype, unwrapped

Buffers: TypeAlias = dict[str, Tensor]
Dropout: TypeAlias = Rate | Mapping[str, Rate]
Apply: TypeAlias = Callable[..., tuple[Any, Buffers]]

EMPTY: Replace = MappingProxyType({})
OFF = torch.empty(0)  # in the place of a rate: this dropout is switched off, whatever the key


class Functional(NamedTuple):
    """A module as values: a pure function, and the parameters and buffers that it was made with.

    ``apply(params, buffers, *args, key=None, train=None, dropout=None, probes=None, **kwargs) -> (output, buffers)``,
    where ``args`` and ``kwargs`` are those of the module's ``forward``; see :func:`functional`.
    """

    apply: Apply
    params: dict[str, Tensor]
    buffers: Buffers


def functional(
    model: nn.Module,
    *,
    observe: Select = (),
    intervene: Replace = EMPTY,
    probes: Select = (),
    randomness: Literal["error", "global"] = "error",
) -> Functional:
    """Turn a module into a pure function of its parameters and buffers.

    Classic: calling the module, which updates its buffers in place and draws dropout masks from a global generator;
    :func:`torch.func.functional_call` takes the parameters as values, but does both as well.

    The result's ``apply(params, buffers, *args, key=None, train=None, dropout=None, probes=None, **kwargs)`` returns
    ``(output, buffers)``:

    - ``params``, ``buffers``: dicts with the names of the module's ``named_parameters()`` and ``named_buffers()``,
      each tensor once, also when it is shared (a parameter that is a buffer too is a parameter). They are never written
      to; the new buffers are returned.
    - ``key``: int64 [2], from :mod:`functricks.random`. The mask of a dropout depends on this key, the module's path
      and how often it was called before in this ``apply``: adding a layer never shifts the masks of another, and lane
      ``i`` of a ``vmap`` draws what the call alone would.
    - ``train``: True and False as ``model.train()`` and ``model.eval()``; None as the flags were when
      :func:`functional` was called.
    - ``dropout``: overrides the rate of every dropout: a number in [0, 1], a 0-d tensor (which may be batched by
      ``vmap``), or a dict from globs on the modules' paths to these, the last match counting. 0 is exactly no dropout.
    - ``probes``: ``{site: tensor}``, each added to the activation at that site; its gradient is the activation's.
    - all else is for ``forward``, whose own arguments of these names are passed by position.

    Forward hooks, forward pre-hooks and full backward hooks become values. A *site* is where an activation passes:
    ``"fc1"`` is what the module ``fc1`` returns, ``"fc1:input"`` its positional arguments (the one, or the tuple), and
    ``"fc1#1"``, ``"fc1#1:input"`` belong to its second call. A selector is a glob on the modules' paths (``*`` crosses
    dots) with these endings; without ``#`` it means every call. The root is ``""``, which only ``""`` selects.

    Args:
        model: any module whose ``forward`` depends on its parameters, buffers and arguments only. It is copied, once;
            its own hooks are copied along, and run before what follows here. ``nn.DataParallel`` stands for its module.
        observe: selectors (one, several, or a callable ``(path, module) -> bool``); the output then is
            ``(output, {site: activation})``: what the module returned, which no later write in place edits.
        intervene: ``{selector: function}``; the function's result passes on instead of the activation. With
            :func:`replace_gradient` as the function, what passes on is the activation, with another gradient. What
            differs from call to call or from lane to lane reaches a module as an argument of ``forward``, not here.
        probes: selectors of the sites that ``apply`` takes a probe for; a probe is added after ``intervene``, has the
            shape of the activation (or its structure) and may be left out, which is a probe of zeros.
        randomness: what to do where the model draws random numbers in a way that no key controls (RReLU, ``torch.rand``
            and the like in ``forward``): raise, or let it draw from the global generator. Dropout needs its key anyway.

    ``params`` and ``buffers`` are detached copies of the module's. BatchNorm on inputs in half precision computes in
    the precision of its statistics. A dropout with ``inplace=True`` does not write to its input. An embedding with
    ``max_norm`` looks rows up at their bounded length, and leaves those in ``params`` as they are.

    Raises ValueError for a lazy module that has not seen a batch, for SyncBatchNorm and for TorchScript; ``apply`` does
    for names that are missing or unknown, for dropout that has to draw without a key, and for modules that draw random
    numbers in a way that no key controls, which it names; the first eager call also for a ``forward`` that writes to a
    parameter, fills a buffer that was None or takes one away. A selector that matches no module, or no call of the
    forward, raises and lists what there is.

    LSTM, GRU and RNN run step by step under ``vmap`` and ``torch.compile`` and are torch's own kernel otherwise.
    Dropout that ``forward`` calls as a function (``F.dropout``, ``F.scaled_dot_product_attention``, dropout inside of
    attention) draws from the key too, by the path of the module that calls it. That takes a function mode, which is
    entered where the code of the model's ``forward`` names a function that draws: such a model cannot be called inside
    of a ``scan``. A draw that only a table or a computed name leads to raises in the first eager call that trains.
    What a function of ``intervene`` or a hook of the module's own draws counts as drawn by the module around it.
    A padded TransformerEncoder in evaluation makes no nested tensor under a transform, so that padded positions then
    hold what they hold under ``nn.Module`` with gradients on, not zeros.
    An activation checkpoint that recomputes in the backward pass raises; call it outside of the module.

    >>> from functricks import random
    >>> model = functional(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)))
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> output, buffers = model.apply(model.params, model.buffers, x, key=random.key(0))
    >>> output.shape, buffers["1.num_batches_tracked"], model.buffers["1.num_batches_tracked"]
    (torch.Size([2, 3]), tensor(1), tensor(0))

    >>> model = functional(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), observe="0", probes="0")
    >>> def loss(probe):
    ...     (output, seen), _ = model.apply(model.params, {}, x, probes={"0": probe})
    ...     return output.sum(), seen["0"]
    >>> gradient, activation = torch.func.grad(loss, has_aux=True)(torch.zeros(2, 3))
    >>> torch.allclose(gradient, 1 - activation.tanh() ** 2)
    True
    """
    if randomness not in ("error", "global"):
        raise ValueError(f"functional: randomness must be 'error' or 'global', got {randomness!r}")
    model = unwrapped(model)
    _check_supported(model)
    title = f"functional of {type(model).__name__}"
    plan = Plan(title, model, observe=observe, intervene=intervene, probes=probes)  # a probe is added last
    made = _Made(plan, draws_by_function(model, intervene.values()), randomness == "error")
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    own = {id(p) for p in model.parameters()}  # a parameter that is a buffer as well counts once, as what is trained
    buffers = {name: b.detach().clone() for name, b in model.named_buffers() if id(b) not in own}
    # The private copies hold these tensors in the place of the user's, as placeholders that no call ever reads.
    # Without storage: most that read one all the same, such as an activation checkpoint that recomputes, fail loudly.
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers() if id(b) not in own}
    names = {id(memo[id(t)]): name for name, t in [*model.named_buffers(), *model.named_parameters()]}
    memo = {id(t): t.detach().clone() for t in _computed(model)} | memo
    # One copy a mode: a call then flips no flag, and a module's own train() decides what stays frozen. RNNs need others
    # to be traced.
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    calls = {
        (train, traced): _Call(private(model, memo, names), names, train, traced, made)
        for train in (None, True, False)
        for traced in ((False, True) if recurrent else (False,))
    }

    def apply(
        params: dict[str, Tensor],
        buffers: Buffers,
        *args: Any,
        key: Tensor | None = None,
        train: bool | None = None,
        dropout: Dropout | None = None,
        probes: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Buffers]:
        call = calls[train, recurrent and torch.compiler.is_compiling()]
        return call(params, buffers, args, kwargs, key, dropout, probes)

    return Functional(apply, params, buffers)


def _computed(model: nn.Module) -> list[Tensor]:
    """Return what an earlier call left as attributes, such as a normalised weight; deepcopy raises for them."""
    held = [leaf for module in model.modules() for leaf in _pytree.tree_leaves(vars(module))]
    return [leaf for leaf in held if isinstance(leaf, Tensor) and not leaf.is_leaf]


def _check_supported(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"functional: {path!r} is TorchScript, which takes no values; use the module it came from")
        if any(nn.parameter.is_lazy(t) for t in [*module._parameters.values(), *module._buffers.values()]):
            raise ValueError(f"functional: {path!r} is lazy and has no shape yet; call the model once on a batch first")
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(f"functional: {path!r} is SyncBatchNorm, which talks to other ranks; use BatchNorm")


class _Made(NamedTuple):
    """What holds for all copies of a module."""

    plan: Plan
    watched: bool  # may its code call functions that draw?
    strict: bool  # must all that it draws come from a key?


class _Call:
    """A private copy of a module in one mode, and which value goes where in it."""

    def __init__(
        self, module: nn.Module, names: Mapping[int, str], train: bool | None, traced: bool, made: _Made
    ) -> None:
        if train is not None:
            module.train(train)  # which those that freeze a part override, and then often return nothing
        self.module = module
        self.traced = traced
        self.taps = Taps(self.module, made.plan)
        self.title = type(module).__name__
        self.turn = threading.RLock()
        self.places: dict[str, tuple[dict[str, Any], str]] = {}
        # Pairs (slot, name): a shared tensor has one name and several slots.
        self.params: list[tuple[str, str]] = []
        self.read: list[tuple[str, str]] = []  # buffers of which we know that this mode only reads them
        self.written: list[tuple[str, str]] = []  # all others, which may be written to in place
        self.buffer_slots: dict[str, str] = {}  # name -> the slot that its new value is read from
        self.pooled_slots: dict[str, str] = {}  # the same, for what accumulate puts beside BatchNorm's statistics
        self.renormed: list[str] = []  # parameters that an embedding with max_norm writes to
        self.rates: dict[str, float] = {}  # of the dropouts that are in training mode
        self.hashes: dict[str, int] = {}  # by path: what a key is folded with
        self.site = Site() if made.watched else None
        self.sites: list[str] = []  # the modules that may call dropout as a function
        self.strict = made.strict
        # Until a call has shown that nothing draws; in evaluation a mode would switch torch's faster kernels off.
        unseen = made.strict and not made.watched
        self.watching = unseen and any(m.training and not of_torch(m) for m in self.module.modules())
        self.unkeyed: list[str] = []
        for path, child in module.named_modules():
            self._add(path, child, names)
        self.param_names = dict.fromkeys(name for _, name in self.params)
        self.first: FirstCall | None = FirstCall(f"apply of {self.title}", module, self.renormed)

    def _add(self, path: str, module: nn.Module, names: Mapping[int, str]) -> None:
        held = [(a, t) for a, t in [*module._parameters.items(), *module._buffers.items()] if t is not None]
        self.params += [(join(path, a), names[id(t)]) for a, t in held if isinstance(t, nn.Parameter)]
        buffers = [(join(path, a), names[id(t)]) for a, t in held if not isinstance(t, nn.Parameter)]
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            self.renormed.append(names[id(module.weight)])
        if self.strict and draws_unkeyed(module):
            self.unkeyed.append(path)
        purify(module, path, traced=self.traced)
        (self.read if isinstance(module, PureBatchNorm) and not module.training else self.written).extend(buffers)
        for slot, name in buffers:
            self.buffer_slots.setdefault(name, slot)
            if isinstance(module, PureBatchNorm) and slot == join(path, "running_mean"):
                prefix = name.removesuffix("running_mean")
                self.pooled_slots.update({f"{prefix}{sibling}": join(path, sibling) for sibling in POOLED})
        if isinstance(module, Keyed) and module.training and module.drops():
            self.rates[path] = module.p
            self.hashes[path] = _hash(path)
        elif self.site is not None and (not path or not of_torch(module)):
            own, kind = cast(Any, module), cast(Any, type(module))
            own.__class__ = subtype(AtSite, kind)
            own.site, own.site_path = self.site, path
            self.sites.append(path)
            self.hashes[path] = _hash(path)

    def __call__(
        self,
        params: dict[str, Tensor],
        buffers: Buffers,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Tensor | None,
        dropout: Dropout | None,
        probes: Mapping[str, Any] | None,
    ) -> tuple[Any, Buffers]:
        pooled = {name: buffer for name, buffer in buffers.items() if name in self.pooled_slots}
        own = {name: buffer for name, buffer in buffers.items() if name not in pooled} if pooled else buffers
        self._check(params, own)
        if key is not None:
            _check_key(self.title, key)
        if self.renormed:
            params = {**params, **{name: params[name].clone() for name in self.renormed}}
        values = {slot: params[name] for slot, name in self.params}
        values.update({slot: buffers[name] for slot, name in self.read})
        if self.written:
            zero = _zero_with_lanes([params, buffers, args, kwargs, key, dropout, probes])
            fresh = {name: _renew(buffers[name], zero) for _, name in self.written}  # one a name: ties stay ties
            values.update({slot: fresh[name] for slot, name in self.written})
            values.update({self.pooled_slots[name]: _renew(buffer, zero) for name, buffer in pooled.items()})
        rates = self.rates if dropout is None else self._overridden(dropout)
        if self.rates:
            values.update(self._draws(key, rates, dropout is not None))

        def run() -> tuple[Any, Buffers]:
            with self._functions(key, rates), _no_cache():
                output = self.taps.run(probes, self._run, values, args, kwargs)
            if not torch.compiler.is_compiling() and self.watching:  # in this order: a trace would guard on the flag
                self.watching = False
            new = {name: values[self.buffer_slots[name]] for name in own}
            new.update({name: values.get(self.pooled_slots[name], buffer) for name, buffer in pooled.items()})
            return output, new

        # The values sit in the copy while it runs, so that two threads must take turns; a trace has one thread.
        if torch.compiler.is_compiling():
            return run()
        with self.turn:
            return run() if self.first is None else self._first_call(run, params, values)

    def _first_call(
        self, run: Callable[[], tuple[Any, Buffers]], params: Mapping[str, Tensor], values: Mapping[str, Any]
    ) -> tuple[Any, Buffers]:
        """Look at what the first call leaves behind."""
        first, self.first = cast(FirstCall, self.first), None  # a call within it finds the values of this one in place
        try:
            before = first.record(params)
            output, new = run()
            first.check(self.module, before, {s: (params[name], values[s]) for s, name in self.params}, new)
        except BaseException:
            self.first = first
            raise
        return output, new

    def _run(self, values: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module with values in its slots, and leave in ``values`` what is there afterwards.

        As :func:`torch.func.functional_call`, which looks every slot up anew: a tenth of a small model's time.
        """
        if torch.compiler.is_compiling():
            return functional_call(self.module, values, args, kwargs, tie_weights=False)
        places = [self._place(slot) for slot in values]
        placeholders = [store[name] for store, name in places]
        try:
            for (store, name), value in zip(places, values.values(), strict=True):
                store[name] = value
            return self.module(*args, **kwargs)
        finally:
            for slot, (store, name), placeholder in zip(list(values), places, placeholders, strict=True):
                values[slot] = store.get(name)
                store[name] = placeholder

    def _place(self, slot: str) -> tuple[dict[str, Any], str]:
        """Return the module's dict that holds a slot, and its name there."""
        if slot not in self.places:
            path, _, name = slot.rpartition(".")
            module = self.module.get_submodule(path)
            store: Any = module._parameters if name in module._parameters else module._buffers
            self.places[slot] = store, name
        return self.places[slot]

    def _check(self, params: dict[str, Tensor], buffers: Buffers) -> None:
        for what, given, expected in (("params", params, self.param_names), ("buffers", buffers, self.buffer_slots)):
            if given.keys() != expected.keys():
                missing, unknown = [n for n in expected if n not in given], [n for n in given if n not in expected]
                apart = [n.removesuffix(".pooled_count") for n in unknown if n.endswith(".pooled_count")]
                if apart:
                    raise ValueError(
                        f'apply of {self.title}: accumulate(batch_norm="pooled") pools BatchNorm only, and '
                        f"{', '.join(map(repr, apart))} has running statistics too; use another batch_norm="
                    )
                raise ValueError(f"apply of {self.title}: {what} lack {missing} and have unknown names {unknown}")
        if self.unkeyed:
            raise ValueError(
                f"apply of {self.title}: {', '.join(map(repr, self.unkeyed))} would draw random numbers that no key "
                f'controls; accept the global generator with functional(..., randomness="global"), or call with '
                f"train=False where that switches it off"
            )

    def _functions(self, key: Tensor | None, rates: Mapping[str, Rate]) -> AbstractContextManager[Any]:
        """Return the mode that draws what is called as a function, if anything may be."""
        if self.site is None:
            return Watch() if not torch.compiler.is_compiling() and self.watching else nullcontext()
        own = {path: rate for path, rate in rates.items() if path not in self.rates}
        return KeyedFunctions(self.site, self.hashes, key, own, self.strict)

    def _draws(self, key: Tensor | None, rates: Mapping[str, Rate], overridden: bool) -> dict[str, Tensor]:
        """Return the keys and the rates of this call, as values for the buffers of the modules that drop."""
        own = {path: rates[path] for path in self.rates}
        values: dict[str, Tensor] = {}
        if overridden:
            values.update({join(path, "keyed_rate"): _as_tensor(rate, key) for path, rate in own.items()})
        drawing = [path for path, rate in own.items() if isinstance(rate, Tensor) or rate != 0]
        if key is not None and drawing:
            hashes = torch.tensor([self.hashes[path] for path in drawing], device=key.device)
            # Cloned, so that it belongs to the present functorch level: the modules advance their keys in place.
            keys = random.fold_in(key, hashes).clone().unbind()
            values.update({join(path, "keyed_key"): k for path, k in zip(drawing, keys, strict=True)})
        return values

    def _overridden(self, dropout: Dropout) -> dict[str, Rate]:
        """Return the rates: of the modules that drop, and of those that call dropout and are named by a glob."""
        places = [*self.rates, *(path for path in self.sites if path not in self.rates)]
        if not isinstance(dropout, Mapping):
            return dict.fromkeys(places, _checked(dropout))
        rates: dict[str, Rate] = dict(self.rates)
        for glob, rate in dropout.items():
            chosen = tree.select(glob, dict.fromkeys(places, 0.0), name=f"apply of {self.title}: dropout")
            rates.update({path: _checked(rate) for path in places if chosen[path]})
        return rates


def _check_key(title: str, key: Any) -> None:
    if not isinstance(key, Tensor):
        raise TypeError(f"apply of {title}: key must come from functricks.random.key(seed), got {key!r}")
    if key.shape != (2,) or key.is_floating_point():
        raise ValueError(
            f"apply of {title}: key must come from functricks.random.key(seed), int64 [2], got {key.dtype} "
            f"{list(key.shape)}; where forward takes a key of its own, pass that by position"
        )


def _no_cache() -> AbstractContextManager[None]:
    """Keep ``parametrize.cached()`` around several calls from handing one call the weights of another."""
    if torch.compiler.is_compiling() or not parametrize._cache_enabled:
        return nullcontext()
    return _emptied()


@contextmanager
def _emptied() -> Iterator[None]:
    outer, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = outer


def _hash(path: str) -> int:
    return zlib.crc32(path.encode())  # not hash(), which differs from process to process


def _checked(rate: Rate) -> Rate:
    if not isinstance(rate, Tensor) and not 0 <= rate <= 1:
        raise ValueError(f"apply: dropout must be in [0, 1], got {rate!r}")
    return rate


def _zero_with_lanes(given: Any) -> Tensor | None:
    """Return a zero that has the lanes of everything given, under ``vmap``; None where there are none.

    What is written in place must already have the lanes of what is written, and those are not known before the call.
    One lane too many does no harm: ``vmap`` gives each result all lanes anyway.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and not tree.is_transformed():
        return None  # no vmap: spares looking at every leaf
    leaves = [leaf for leaf in tree.leaves(given) if isinstance(leaf, Tensor)]
    if not compiling:
        leaves = [leaf for leaf in leaves if functorch.is_functorch_wrapped_tensor(leaf)]
    zeros = [leaf.detach().new_zeros((), dtype=torch.float32) for leaf in leaves]
    return functools.reduce(torch.add, zeros) if zeros else None


def _renew(buffer: Tensor, zero: Tensor | None) -> Tensor:
    if zero is None:
        return buffer.clone()
    return buffer | zero.bool() if buffer.dtype == torch.bool else buffer + zero.to(buffer.dtype)


def _as_tensor(rate: Rate, key: Tensor | None) -> Tensor:
    if isinstance(rate, Tensor):
        return rate
    return torch.full((), rate, dtype=torch.float64, device=None if key is None else key.device) if rate else OFF
