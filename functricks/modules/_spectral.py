"""Spectral normalisation whose power iteration assigns its vectors: writing to ``out=`` has no batching rule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


class PureSpectralNorm(_SpectralNorm):
    """That of :func:`torch.nn.utils.parametrizations.spectral_norm`."""

    @torch.no_grad()
    def _power_method(self, weight_mat: Tensor, n_power_iterations: int) -> None:
        for _ in range(n_power_iterations):
            self._u = F.normalize(torch.mv(weight_mat, self._v), dim=0, eps=self.eps)
            self._v = F.normalize(torch.mv(weight_mat.H, self._u), dim=0, eps=self.eps)


class PureSpectralHook(SpectralNorm):
    """That of :func:`torch.nn.utils.spectral_norm`, which is a forward pre-hook."""

    def compute_weight(self, module: Any, do_power_iteration: bool) -> Tensor:
        if do_power_iteration:
            weight = self.reshape_weight_to_matrix(getattr(module, f"{self.name}_orig").detach())
            u = getattr(module, f"{self.name}_u")
            for _ in range(self.n_power_iterations):
                v = F.normalize(torch.mv(weight.t(), u), dim=0, eps=self.eps)
                u = F.normalize(torch.mv(weight, v), dim=0, eps=self.eps)
            setattr(module, f"{self.name}_u", u)
            setattr(module, f"{self.name}_v", v)
        return super().compute_weight(module, False)


def purify_norm(module: nn.Module) -> None:
    """Do so for a module of a private copy, and for its hooks."""
    own: Any = module
    if type(module) is _SpectralNorm:
        own.__class__ = PureSpectralNorm
    for hook in module._forward_pre_hooks.values():
        if type(hook) is SpectralNorm:
            own = hook
            own.__class__ = PureSpectralHook
