"""Which modules are made pure, and how: BatchNorm and dropout, whose values of one call arrive as buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from functricks import random
from functricks.modules._attention import KeyedAttention, LanesEncoder, LanesEncoderLayer
from functricks.modules._keyed import Keyed, Rate, prepare
from functricks.modules._recurrent import KeyedRNN
from functricks.modules._spectral import purify_norm

Draw: TypeAlias = Callable[[Tensor, Tensor, Any], Tensor]


def join(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute


def unwrapped(model: nn.Module) -> nn.Module:
    """Return what ``nn.DataParallel`` wraps: functional_call refuses the wrapper, which has nothing to do here."""
    return unwrapped(model.module) if isinstance(model, nn.DataParallel) else model


def purify(module: Any, path: str, *, traced: bool = False) -> None:
    """Give a module of a private copy a pure ``forward``, if its own is one that we know; its type stays a subtype.

    ``traced`` says that the copy is for ``torch.compile``, which takes no subtype of an RNN.
    """
    kind: Any = type(module)
    purify_norm(module)
    if isinstance(module, _BatchNorm) and kind.forward is _BatchNorm.forward:
        module.__class__ = subtype(PureBatchNorm, kind)
        for sibling in POOLED:
            module.register_buffer(sibling, None, persistent=False)
    if isinstance(module, nn.TransformerEncoderLayer) and kind.forward is nn.TransformerEncoderLayer.forward:
        module.__class__ = subtype(LanesEncoderLayer, kind)
    if isinstance(module, nn.TransformerEncoder) and kind.forward is nn.TransformerEncoder.forward:
        module.__class__ = subtype(LanesEncoder, kind)
    own: Any = module  # after isinstance, mypy would know too much
    for known, draw in _DRAWS.items():
        if isinstance(module, known) and kind.forward is known.forward:
            own.__class__ = subtype(KeyedDropout, kind)
            own.keyed_draw = draw
            prepare(own, path, own.p)
    for keyed, owners in _WRITTEN_OUT.items():
        if any(isinstance(module, known) and kind.forward is known.forward for known in owners):
            alone = traced and kind in _RNNS
            own.__class__ = type(kind.__name__, (keyed,), {}) if alone else subtype(cast(Any, keyed), kind)
            prepare(own, path, own.dropout)
            own.dropout = 0.0  # torch's own code draws nothing


@functools.cache
def subtype(pure: Any, kind: Any) -> Any:
    return type(kind.__name__, (pure, kind), {})


def draws_unkeyed(module: Any) -> bool:
    """Is the module one of torch's that draw from the global generator, and for which no key is made?"""
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return module._random_samples is None
    return isinstance(module, nn.RReLU) and bool(module.training)


POOLED = tuple(f"pooled_{name}" for name in ("count", "mean", "m2", "start_mean", "start_var", "start_batches"))


class PureBatchNorm(_BatchNorm):
    """BatchNorm whose cumulative average reads no tensor, and which takes half precision under ``vmap`` too.

    It writes in place to its running statistics, as torch's kernel does: the call gave it fresh ones.
    """

    pooled_count: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        if mean is None or var is None or self._is_plain(input, mean):
            return super().forward(input)
        if self.training and isinstance(self.pooled_count, Tensor):
            return self._pool(input.to(self.pooled_count.dtype)).to(input.dtype)
        wide = input.to(mean.dtype)  # torch's batching rule refuses mixed dtypes
        check: Callable[[Tensor], None] = self._check_input_dim
        check(wide)
        tracks = self.training and self.track_running_stats
        if tracks and count is not None:
            count.add_(1)
        if not tracks or count is None or self.momentum is not None:
            own = self.training and not tracks  # normalise by the batch, and forget its statistics
            momentum = 0.0 if self.momentum is None else self.momentum
            return self._apply_to(wide, None if own else mean, None if own else var, momentum).to(input.dtype)
        output, batch_mean, batch_var = self._normalise(wide, mean)
        factor = 1.0 / count.double()
        for running, new in ((mean, batch_mean), (var, batch_var)):
            running.copy_(factor * new.double() + (1.0 - factor) * running.double())
        return output.to(input.dtype)

    def _is_plain(self, input: Tensor, mean: Tensor) -> bool:
        """May torch's own do it? Its cumulative average reads a tensor, and mixed dtypes have no batching rule."""
        alike = input.dtype == mean.dtype and (not self.affine or self.weight.dtype == mean.dtype)
        return alike and self.momentum is not None and self.pooled_count is None

    def _normalise(self, input: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and the mean and the unbiased variance of the batch."""
        # like a buffer, with the lanes of everything: what is written in place needs them
        mean, var = torch.zeros_like(like), torch.ones_like(like)
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
        output, batch_mean, batch_var = self._normalise(input, own.pooled_mean)
        size = input.numel() / batch_mean.numel()
        total = own.pooled_count + size
        apart = batch_mean - own.pooled_mean
        mean = own.pooled_mean + apart * (size / total)
        m2 = own.pooled_m2 + batch_var * (size - 1) + apart.square() * (own.pooled_count * size / total)
        start_mean, start_var = own.pooled_start_mean.to(mean.dtype), own.pooled_start_var.to(mean.dtype)
        factor = own.momentum
        if isinstance(own.pooled_start_batches, Tensor):
            batches = own.pooled_start_batches + 1
            factor = (1.0 / batches.double()).to(mean.dtype) if factor is None else factor
            own.num_batches_tracked.copy_(batches)
        for old, new in (
            (own.running_mean, (1 - factor) * start_mean + factor * mean),
            (own.running_var, (1 - factor) * start_var + factor * (m2 / (total - 1))),
            (own.pooled_count, total),
            (own.pooled_mean, mean),
            (own.pooled_m2, m2),
        ):
            old.copy_(new)
        return output


class KeyedDropout(Keyed, _DropoutNd):
    """Dropout whose key, and rate where it is overridden, are buffers that the call supplies."""

    keyed_draw: Draw

    def forward(self, input: Tensor) -> Tensor:
        draw = self.next_draw()
        return input if draw is None else self.keyed_draw(draw.key, input, draw.rate)


def drop_elements(key: Tensor, x: Tensor, rate: Rate) -> Tensor:
    return random.dropout(key, x, rate)


def drop_channels(key: Tensor, x: Tensor, rate: Rate, batched: int = 0) -> Tensor:
    """Drop whole channels; the channel axis is 1, or 0 where the input has fewer axes than ``batched``."""
    kept = 1 if x.dim() < batched else 2
    return random.dropout(key, x, rate, mask_shape=(*x.shape[:kept], *(1 for _ in x.shape[kept:])))


def drop_alpha(key: Tensor, x: Tensor, rate: Rate, mask_shape: tuple[int, ...] | None = None) -> Tensor:
    r"""Send elements to SELU's negative limit :math:`-\lambda\alpha` and restore mean 0 and variance 1."""
    limit = 1.7580993408473766
    mask = random.dropout(key, torch.ones(mask_shape or x.shape, dtype=x.dtype, device=x.device), rate)
    drop = torch.as_tensor(rate, dtype=torch.float64, device=x.device)
    some = drop < 1  # at rate 1 everything is zero, as in PyTorch
    scale = some / ((limit**2 * drop + 1) * torch.where(some, 1 - drop, 1.0)).sqrt()
    shift = limit * drop * scale
    return torch.where(mask > 0, x, -limit) * scale.to(x.dtype) + shift.to(x.dtype)


def drop_alpha_channels(key: Tensor, x: Tensor, rate: Rate) -> Tensor:
    return drop_alpha(key, x, rate, (*x.shape[:2], *(1 for _ in x.shape[2:])))


_DRAWS: dict[type[nn.Module], Draw] = {
    nn.Dropout: drop_elements,
    nn.Dropout1d: functools.partial(drop_channels, batched=3),
    nn.Dropout2d: drop_channels,
    nn.Dropout3d: functools.partial(drop_channels, batched=5),
    nn.AlphaDropout: drop_alpha,
    nn.FeatureAlphaDropout: drop_alpha_channels,
}
_RNNS = (nn.LSTM, nn.GRU, nn.RNN)
_WRITTEN_OUT: dict[type[Keyed], tuple[type[nn.Module], ...]] = {
    KeyedAttention: (nn.MultiheadAttention,),
    KeyedRNN: _RNNS,
}
