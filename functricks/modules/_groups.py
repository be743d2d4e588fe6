"""Which parameters of a module weight decay leaves out."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from functricks import tree
from functricks.modules._pure import unwrapped
from functricks.types import Params

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def no_decay(model_or_params: nn.Module | Params) -> dict[str, bool]:
    """Say for every parameter whether weight decay should leave it out: biases and the parameters of normalisation.

    Chosen by kind, not by the layer's name: every parameter with at most one axis (biases, gains, scalars), every
    parameter of a normalisation layer, and what its own module calls a bias. A matrix in a layer that is called
    ``bias_proj`` decays.

    Classic: two parameter groups filled by ``if "bias" in name or "LayerNorm" in name``, which misses ``norm1``.

    Args:
        model_or_params: the module; the names are those of ``functional(model).params``. Or a tree of parameters,
            which knows the axes alone: a gain of two axes, as of ``nn.LayerNorm((4, 4))``, decays then.

    >>> no_decay(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
    {'0.weight': False, '0.bias': True, '1.weight': True, '1.bias': True}
    >>> decay_where = {name: not left_out for name, left_out in no_decay(nn.Linear(2, 3)).items()}
    """
    if not isinstance(model_or_params, nn.Module):
        return {path: leaf.ndim <= 1 for path, leaf in tree.named_leaves(model_or_params).items()}
    model = unwrapped(model_or_params)
    left_out: dict[int, bool] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                kind = isinstance(module, _NORMS) or attribute.startswith("bias") or attribute == "in_proj_bias"
                left_out[id(parameter)] = left_out.get(id(parameter), False) or kind or parameter.dim() <= 1
    return {name: left_out[id(parameter)] for name, parameter in model.named_parameters()}
