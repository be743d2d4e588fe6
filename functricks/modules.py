"""``nn.Module`` as a pure function: parameters and buffers in, output and new buffers out, dropout from a key.

``functional`` makes private copies of the module and never touches the user's again. Whatever belongs to one call
reaches the copy through :func:`torch.func.functional_call`, as parameters and buffers: the parameters, fresh copies of
the buffers (which BatchNorm and others may then write to), and for each dropout a key, folded from the caller's key,
the module's path and the number of the call. Nothing stays behind, so ``apply`` works under ``grad``, ``vmap`` and
``torch.compile``, and in a scan.

Ties are kept by name: a parameter that several modules share is one entry of ``params``, under its first name, and is
put into every place where it occurs.
"""

from __future__ import annotations

import copy
import functools
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
import torch._C._functorch as functorch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from functricks import random, tree
from functricks.types import Batch, Loss, LossFn, Params

__all__ = ["Functional", "SupervisedCarry", "functional", "no_decay", "supervised", "supervised_carry"]

Buffers: TypeAlias = dict[str, Tensor]
Rate: TypeAlias = float | Tensor
Dropout: TypeAlias = Rate | Mapping[str, Rate]
Draw: TypeAlias = Callable[[Tensor, Tensor, Any], Tensor]
Apply: TypeAlias = Callable[..., tuple[Any, Buffers]]

_OFF = torch.empty(0)  # in the place of a rate: this dropout is switched off, whatever the key
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Functional(NamedTuple):
    """A module as values: a pure function, and the parameters and buffers that it was made with.

    ``apply(params, buffers, *args, key=None, train=None, dropout=None, **kwargs) -> (output, buffers)``, where ``args``
    and ``kwargs`` are those of the module's ``forward``; see :func:`functional`.
    """

    apply: Apply
    params: dict[str, Tensor]
    buffers: Buffers


def functional(model: nn.Module) -> Functional:
    """Turn a module into a pure function of its parameters and buffers.

    Classic: calling the module, which updates its buffers in place and draws dropout masks from a global generator;
    :func:`torch.func.functional_call` takes the parameters as values, but does both as well.

    The result's ``apply(params, buffers, *args, key=None, train=None, dropout=None, **kwargs)`` returns
    ``(output, buffers)``:

    - ``params``, ``buffers``: dicts with the names of the module's ``named_parameters()`` and ``named_buffers()``,
      each tensor once, also when it is shared. They are never written to; the new buffers are returned.
    - ``key``: int64 [2], from :mod:`functricks.random`. The mask of a dropout depends on this key, the module's path
      and how often it was called before in this ``apply``: adding a layer never shifts the masks of another, and lane
      ``i`` of a ``vmap`` draws what the call alone would.
    - ``train``: True and False as ``model.train()`` and ``model.eval()``; None as the flags were when
      :func:`functional` was called.
    - ``dropout``: overrides the rate of every dropout: a number in [0, 1], a 0-d tensor (which may be batched by
      ``vmap``), or a dict from globs on the modules' paths to these, the last match counting. 0 is exactly no dropout.

    Args:
        model: any module whose ``forward`` depends on its parameters, buffers and arguments only. It is copied, once;
            its hooks are copied along.

    ``params`` and ``buffers`` are detached copies of the module's. BatchNorm on inputs in half precision computes in
    the precision of its statistics. A dropout with ``inplace=True`` does not write to its input.

    Raises ValueError for a lazy module that has not seen a batch and for SyncBatchNorm; ``apply`` does for names that
    are missing or unknown, for dropout that has to draw without a key, and for modules that draw random numbers in a
    way that no key controls (dropout inside RNNs and MultiheadAttention, RReLU), which it names.

    Dropout that ``forward`` calls as a function (``F.dropout``) draws from the global generator, as in PyTorch: use a
    module. An activation checkpoint that recomputes in the backward pass raises; call it outside of the module.

    >>> from functricks import random
    >>> model = functional(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)))
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> output, buffers = model.apply(model.params, model.buffers, x, key=random.key(0))
    >>> output.shape, buffers["1.num_batches_tracked"], model.buffers["1.num_batches_tracked"]
    (torch.Size([2, 3]), tensor(1), tensor(0))
    """
    _check_supported(model)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    # The private copies hold these tensors in the place of the user's, as placeholders that no call ever reads.
    # Without storage: what reads one all the same, such as an activation checkpoint in the backward pass, fails loudly.
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    names = {id(memo[id(t)]): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    # One copy a mode: a call then flips no flag, and a module's own train() decides what stays frozen.
    calls = {train: _Call(copy.deepcopy(model, dict(memo)), names, train) for train in (None, True, False)}

    def apply(
        params: dict[str, Tensor],
        buffers: Buffers,
        *args: Any,
        key: Tensor | None = None,
        train: bool | None = None,
        dropout: Dropout | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Buffers]:
        return calls[train](params, buffers, args, kwargs, key, dropout)

    return Functional(apply, params, buffers)


def _check_supported(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if any(nn.parameter.is_lazy(t) for t in [*module._parameters.values(), *module._buffers.values()]):
            raise ValueError(f"functional: {path!r} is lazy and has no shape yet; call the model once on a batch first")
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(f"functional: {path!r} is SyncBatchNorm, which talks to other ranks; use BatchNorm")


class _Call:
    """A private copy of a module in one mode, and which value goes where in it."""

    def __init__(self, module: nn.Module, names: Mapping[int, str], train: bool | None) -> None:
        self.module = module if train is None else module.train(train)
        self.title = type(module).__name__
        self.turn = threading.RLock()
        # Pairs (slot, name): a shared tensor has one name and several slots.
        self.params: list[tuple[str, str]] = []
        self.read: list[tuple[str, str]] = []  # buffers of which we know that this mode only reads them
        self.written: list[tuple[str, str]] = []  # all others, which may be written to in place
        self.buffer_slots: dict[str, str] = {}  # name -> the slot that its new value is read from
        self.pooled_slots: dict[str, str] = {}  # the same, for what accumulate puts beside BatchNorm's statistics
        self.rates: dict[str, float] = {}  # of the dropouts that are in training mode
        self.hashes: dict[str, int] = {}
        self.unkeyed: list[str] = []
        for path, child in module.named_modules():
            self._add(path, child, names)
        self.param_names = dict.fromkeys(name for _, name in self.params)

    def _add(self, path: str, module: nn.Module, names: Mapping[int, str]) -> None:
        self.params += [(_join(path, a), names[id(p)]) for a, p in module._parameters.items() if p is not None]
        buffers = [(_join(path, a), names[id(b)]) for a, b in module._buffers.items() if b is not None]
        if module.training and _draws_unkeyed(module):
            self.unkeyed.append(path)
        _purify(module, path)
        (self.read if isinstance(module, _PureBatchNorm) and not module.training else self.written).extend(buffers)
        for slot, name in buffers:
            self.buffer_slots.setdefault(name, slot)
            if isinstance(module, _PureBatchNorm) and slot == _join(path, "running_mean"):
                prefix = name.removesuffix("running_mean")
                self.pooled_slots.update({f"{prefix}{sibling}": _join(path, sibling) for sibling in _POOLED})
        if isinstance(module, _KeyedDropout) and module.training:
            self.rates[path] = module.p
            self.hashes[path] = zlib.crc32(path.encode())  # not hash(), which differs from process to process

    def __call__(
        self,
        params: dict[str, Tensor],
        buffers: Buffers,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Tensor | None,
        dropout: Dropout | None,
    ) -> tuple[Any, Buffers]:
        pooled = {name: buffer for name, buffer in buffers.items() if name in self.pooled_slots}
        own = {name: buffer for name, buffer in buffers.items() if name not in pooled} if pooled else buffers
        self._check(params, own)
        values = {slot: params[name] for slot, name in self.params}
        values.update({slot: buffers[name] for slot, name in self.read})
        if self.written:
            zero = _zero_with_lanes([params, buffers, args, kwargs, key, dropout])
            fresh = {name: _renew(buffers[name], zero) for _, name in self.written}  # one a name: ties stay ties
            values.update({slot: fresh[name] for slot, name in self.written})
            values.update({self.pooled_slots[name]: _renew(buffer, zero) for name, buffer in pooled.items()})
        if self.rates:
            values.update(self._draws(key, dropout))
        # The values sit in the copy while it runs, so that two threads must take turns; a trace has one thread.
        with nullcontext() if torch.compiler.is_compiling() else self.turn:
            output = functional_call(self.module, values, args, kwargs, tie_weights=False)
        new = {name: values[self.buffer_slots[name]] for name in own}
        new.update({name: values.get(self.pooled_slots[name], buffer) for name, buffer in pooled.items()})
        return output, new

    def _check(self, params: dict[str, Tensor], buffers: Buffers) -> None:
        for what, given, expected in (("params", params, self.param_names), ("buffers", buffers, self.buffer_slots)):
            if given.keys() != expected.keys():
                missing, unknown = [n for n in expected if n not in given], [n for n in given if n not in expected]
                raise ValueError(f"apply of {self.title}: {what} lack {missing} and have unknown names {unknown}")
        if self.unkeyed:
            raise ValueError(
                f"apply of {self.title}: {', '.join(map(repr, self.unkeyed))} would draw random numbers that no key "
                f"controls; set the dropout inside to 0, or call with train=False"
            )

    def _draws(self, key: Tensor | None, dropout: Dropout | None) -> dict[str, Tensor]:
        """Return the keys and the rates of this call, as values for the buffers of the dropout modules."""
        rates: dict[str, Rate] = dict(self.rates) if dropout is None else self._overridden(dropout)
        values: dict[str, Tensor] = {}
        if dropout is not None:
            values.update({_join(path, "keyed_rate"): _as_tensor(rate, key) for path, rate in rates.items()})
        drawing = [path for path, rate in rates.items() if isinstance(rate, Tensor) or rate != 0]
        if key is not None and drawing:
            hashes = torch.tensor([self.hashes[path] for path in drawing], device=key.device)
            # Cloned, so that it belongs to the present functorch level: the modules advance their keys in place.
            keys = random.fold_in(key, hashes).clone().unbind()
            values.update({_join(path, "keyed_key"): k for path, k in zip(drawing, keys, strict=True)})
        return values

    def _overridden(self, dropout: Dropout) -> dict[str, Rate]:
        if not isinstance(dropout, Mapping):
            return dict.fromkeys(self.rates, dropout)
        rates: dict[str, Rate] = dict(self.rates)
        for glob, rate in dropout.items():
            chosen = tree.select(glob, self.rates, name=f"apply of {self.title}: dropout")
            rates.update({path: rate for path in rates if chosen[path]})
        return rates


def _zero_with_lanes(given: Any) -> Tensor | None:
    """Return a zero that has the lanes of everything given, under ``vmap``; None where there are none.

    What is written in place must already have the lanes of what is written, and those are not known before the call.
    One lane too many does no harm: ``vmap`` gives each result all lanes anyway.
    """
    leaves = [leaf for leaf in tree.leaves(given) if isinstance(leaf, Tensor)]
    if not torch.compiler.is_compiling():
        leaves = [leaf for leaf in leaves if functorch.is_functorch_wrapped_tensor(leaf)]
    zeros = [leaf.detach().new_zeros((), dtype=torch.float32) for leaf in leaves]
    return functools.reduce(torch.add, zeros) if zeros else None


def _renew(buffer: Tensor, zero: Tensor | None) -> Tensor:
    if zero is None:
        return buffer.clone()
    return buffer | zero.bool() if buffer.dtype == torch.bool else buffer + zero.to(buffer.dtype)


def _join(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute


def _as_tensor(rate: Rate, key: Tensor | None) -> Tensor:
    if isinstance(rate, Tensor):
        return rate
    if not 0 <= rate <= 1:
        raise ValueError(f"apply: dropout must be in [0, 1], got {rate!r}")
    return torch.full((), rate, dtype=torch.float64, device=None if key is None else key.device) if rate else _OFF


# --- modules that write or draw, made pure ---------------------------------------------------------------------------


def _purify(module: Any, path: str) -> None:
    """Give a module of a private copy a pure ``forward``, if its own is one that we know; its type stays a subtype."""
    kind: Any = type(module)
    if isinstance(module, _BatchNorm) and kind.forward is _BatchNorm.forward:
        module.__class__ = _subtype(_PureBatchNorm, kind)
        for sibling in _POOLED:
            module.register_buffer(sibling, None, persistent=False)
    for known, draw in _DRAWS.items():
        if isinstance(module, known) and kind.forward is known.forward:
            module.__class__ = _subtype(_KeyedDropout, kind)
            _prepare(module, path, draw)


def _prepare(module: Any, path: str, draw: Draw) -> None:
    module.keyed_path, module.keyed_draw = path, draw
    module.register_buffer("keyed_key", None, persistent=False)
    module.register_buffer("keyed_rate", None, persistent=False)


@functools.cache
def _subtype(pure: Any, kind: Any) -> Any:
    return type(kind.__name__, (pure, kind), {})


def _draws_unkeyed(module: Any) -> bool:
    """Does the module, in training mode, draw from the global generator?"""
    if isinstance(module, nn.RNNBase):
        return bool(module.dropout > 0 and module.num_layers > 1)
    if isinstance(module, nn.MultiheadAttention):
        return bool(module.dropout > 0)
    if isinstance(module, _DropoutNd):
        return bool(module.p > 0) and not any(type(module).forward is known.forward for known in _DRAWS)
    return isinstance(module, nn.RReLU)


_POOLED = tuple(f"pooled_{name}" for name in ("count", "mean", "m2", "start_mean", "start_var", "start_batches"))


class _PureBatchNorm(_BatchNorm):
    """BatchNorm whose cumulative average reads no tensor, and which takes half precision under ``vmap`` too.

    It writes in place to its running statistics, as torch's kernel does: the call gave it fresh ones.
    """

    pooled_count: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        if mean is None or var is None:
            return super().forward(input)
        wide = input.to(mean.dtype)  # torch's batching rule refuses mixed dtypes
        if self.training and isinstance(self.pooled_count, Tensor):
            return self._pool(wide).to(input.dtype)
        check: Callable[[Tensor], None] = self._check_input_dim
        check(wide)
        tracks = self.training and self.track_running_stats
        if tracks and count is not None:
            count.add_(1)
        if not tracks or count is None or self.momentum is not None:
            own = self.training and not tracks  # normalise by the batch, and forget its statistics
            momentum = 0.0 if self.momentum is None else self.momentum
            return self._apply_to(wide, None if own else mean, None if own else var, momentum).to(input.dtype)
        output, batch_mean, batch_var = self._normalise(wide)
        factor = 1.0 / count.double()
        for running, new in ((mean, batch_mean), (var, batch_var)):
            running.copy_(factor * new.double() + (1.0 - factor) * running.double())
        return output.to(input.dtype)

    def _normalise(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and the mean and the unbiased variance of the batch."""
        old: Any = self.running_mean  # with the lanes of everything: what is written in place needs them
        mean, var = torch.zeros_like(old), torch.ones_like(old)
        return self._apply_to(input, mean, var, 1.0), mean, var

    def _apply_to(self, input: Tensor, mean: Tensor | None, var: Tensor | None, momentum: float) -> Tensor:
        affine: Any = (self.weight, self.bias)  # None without affine=True
        weight, bias = (None if p is None else p.to(input.dtype) for p in affine)
        return F.batch_norm(input, mean, var, weight, bias, self.training, momentum, self.eps)

    def _pool(self, input: Tensor) -> Tensor:
        """Merge the batch into those of the window, and take one step from its start: see ``accumulate``.

        Reference: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm".
        """
        own: Any = self  # whose buffers are all there
        own._check_input_dim(input)
        output, batch_mean, batch_var = self._normalise(input)
        size = input.numel() / batch_mean.numel()
        total = own.pooled_count + size
        apart = batch_mean - own.pooled_mean
        mean = own.pooled_mean + apart * (size / total)
        m2 = own.pooled_m2 + batch_var * (size - 1) + apart.square() * (own.pooled_count * size / total)
        factor = own.momentum
        if isinstance(own.pooled_start_batches, Tensor):
            batches = own.pooled_start_batches + 1
            factor = (1.0 / batches.double()).to(mean.dtype) if factor is None else factor
            own.num_batches_tracked.copy_(batches)
        for old, new in (
            (own.running_mean, (1 - factor) * own.pooled_start_mean + factor * mean),
            (own.running_var, (1 - factor) * own.pooled_start_var + factor * (m2 / (total - 1))),
            (own.pooled_count, total),
            (own.pooled_mean, mean),
            (own.pooled_m2, m2),
        ):
            old.copy_(new)
        return output


class _KeyedDropout(_DropoutNd):
    """Dropout whose key, and rate where it is overridden, are buffers that the call supplies."""

    keyed_path: str
    keyed_draw: Draw
    keyed_key: Tensor | None
    keyed_rate: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        rate: Rate = self.p if self.keyed_rate is None else self.keyed_rate
        if not self.training or (rate.numel() == 0 if isinstance(rate, Tensor) else rate == 0):
            return input
        key = self.keyed_key
        if key is None:
            raise ValueError(
                f"apply: {self.keyed_path!r} is dropout in training mode and has no key to draw from; pass key=, "
                f"train=False or dropout=0.0"
            )
        output = self.keyed_draw(key, input, rate)
        key.add_(1)  # for the module's next call; Threefry under a neighbouring key is as good as under any other
        return output


def _drop_elements(key: Tensor, x: Tensor, rate: Rate) -> Tensor:
    return random.dropout(key, x, rate)


def _drop_channels(key: Tensor, x: Tensor, rate: Rate, batched: int = 0) -> Tensor:
    """Drop whole channels; the channel axis is 1, or 0 where the input has fewer axes than ``batched``."""
    kept = 1 if x.dim() < batched else 2
    return random.dropout(key, x, rate, mask_shape=(*x.shape[:kept], *(1 for _ in x.shape[kept:])))


def _drop_alpha(key: Tensor, x: Tensor, rate: Rate, mask_shape: tuple[int, ...] | None = None) -> Tensor:
    r"""Send elements to SELU's negative limit :math:`-\lambda\alpha` and restore mean 0 and variance 1."""
    limit = 1.7580993408473766
    mask = random.dropout(key, torch.ones(mask_shape or x.shape, dtype=x.dtype, device=x.device), rate)
    drop = torch.as_tensor(rate, dtype=torch.float64, device=x.device)
    some = drop < 1  # at rate 1 everything is zero, as in PyTorch
    scale = some / ((limit**2 * drop + 1) * torch.where(some, 1 - drop, 1.0)).sqrt()
    shift = limit * drop * scale
    return torch.where(mask > 0, x, -limit) * scale.to(x.dtype) + shift.to(x.dtype)


def _drop_alpha_channels(key: Tensor, x: Tensor, rate: Rate) -> Tensor:
    return _drop_alpha(key, x, rate, (*x.shape[:2], *(1 for _ in x.shape[2:])))


_DRAWS: dict[type[nn.Module], Draw] = {
    nn.Dropout: _drop_elements,
    nn.Dropout1d: functools.partial(_drop_channels, batched=3),
    nn.Dropout2d: _drop_channels,
    nn.Dropout3d: functools.partial(_drop_channels, batched=5),
    nn.AlphaDropout: _drop_alpha,
    nn.FeatureAlphaDropout: _drop_alpha_channels,
}


# --- the common case -------------------------------------------------------------------------------------------------


class SupervisedCarry(NamedTuple):
    """What a supervised loss function carries from one evaluation to the next: the buffers and the random key."""

    buffers: Buffers
    key: Tensor


def supervised_carry(model: Functional, key: Tensor) -> SupervisedCarry:
    """Return the first carry of :func:`supervised`: the buffers of the model, and the key of the run.

    Args:
        model: from :func:`functional`.
        key: int64 [2], from :mod:`functricks.random`.

    >>> carry = supervised_carry(functional(nn.Linear(2, 3)), random.key(0))
    >>> carry
    SupervisedCarry(buffers={}, key=tensor([0, 0]))
    """
    return SupervisedCarry(model.buffers, key)


def supervised(
    model: Functional,
    loss: Callable[[Any, Any], Loss | Tensor],
    *,
    train: bool | None = None,
    dropout: Dropout | None = None,
) -> LossFn:
    """Make the loss function of a model and a loss: ``(params, batch, carry) -> (loss, carry, metrics)``.

    A batch is ``(inputs, targets)``; the model is called on ``inputs`` and the loss on ``(output, targets)``. Every
    evaluation advances the key, so that the next one draws other masks.

    Classic: ``loss(model(inputs), targets)``.

    Args:
        model: from :func:`functional`.
        loss: ``(output, targets) -> Loss`` (or a 0-d tensor), such as :func:`functricks.losses.cross_entropy`.
        train, dropout: as for ``apply``; a tensor as ``dropout`` may be batched by ``vmap``.

    The result is for :func:`functricks.gradient` with ``has_carry=True, has_metrics=True``. Where the targets are
    class indices and the output holds scores with the class axis 1, ``metrics["accuracy"]`` is the share of correct
    predictions among the targets other than -100 (0 where there are none).

    >>> from functricks.losses import cross_entropy
    >>> model = functional(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)))
    >>> batch = torch.ones(4, 2), torch.tensor([0, 1, 2, -100])
    >>> loss_fn = supervised(model, cross_entropy)
    >>> loss, carry, metrics = loss_fn(model.params, batch, supervised_carry(model, random.key(0)))
    >>> loss.values.shape, list(metrics), carry.key.tolist() == [0, 0]
    (torch.Size([4]), ['accuracy'], False)
    """

    def loss_fn(
        params: Params, batch: Batch, carry: SupervisedCarry
    ) -> tuple[Loss | Tensor, SupervisedCarry, dict[str, Tensor]]:
        inputs, targets = batch
        following, key = random.split(carry.key).unbind()
        output, buffers = model.apply(params, carry.buffers, inputs, key=key, train=train, dropout=dropout)
        return loss(output, targets), SupervisedCarry(buffers, following), _metrics(output, targets)

    return loss_fn


def _metrics(output: Any, targets: Any) -> dict[str, Tensor]:
    if not (isinstance(output, Tensor) and isinstance(targets, Tensor)) or targets.is_floating_point():
        return {}
    if output.dim() < 2 or output.shape[:1] + output.shape[2:] != targets.shape:
        return {}
    valid = targets != -100  # torch's ignore_index
    correct = (output.detach().argmax(1) == targets) & valid
    return {"accuracy": correct.sum() / valid.sum().clamp(min=1)}


def no_decay(model: nn.Module) -> dict[str, bool]:
    """Say for every parameter whether weight decay should leave it out: biases and the parameters of normalisation.

    Chosen by kind, not by the layer's name: every parameter with at most one axis (biases, gains, scalars), every
    parameter of a normalisation layer, and what its own module calls a bias. A matrix in a layer that is called
    ``bias_proj`` decays.

    Classic: two parameter groups filled by ``if "bias" in name or "LayerNorm" in name``, which misses ``norm1``.

    Args:
        model: the module; the names are those of ``functional(model).params``.

    >>> no_decay(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
    {'0.weight': False, '0.bias': True, '1.weight': True, '1.bias': True}
    >>> decay_where = {name: not left_out for name, left_out in no_decay(nn.Linear(2, 3)).items()}
    """
    left_out: dict[int, bool] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                kind = isinstance(module, _NORMS) or attribute.startswith("bias") or attribute == "in_proj_bias"
                left_out[id(parameter)] = left_out.get(id(parameter), False) or kind or parameter.dim() <= 1
    return {name: left_out[id(parameter)] for name, parameter in model.named_parameters()}
