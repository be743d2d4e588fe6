"""Ties in a dict of parameters: one entry, one value, one gradient, however many places it goes to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from functricks.modules._functional import Buffers, Functional

T = TypeVar("T", Functional, dict[str, Tensor])


def tie(params: T, ties: Mapping[str, str]) -> T:
    """Take out the entries that are tied to others, so that one entry is left for each tie.

    :func:`untie` puts them back for a call, and the gradient of the one entry then is the sum over all its places.
    Everything that works on the parameters (attacks, weight decay, clipping, checkpoints, stacking) sees the tied
    parameter once, and the tie cannot get lost in them.

    Classic: ``model.decoder.weight = model.encoder.weight``. Parameters that a module shares in this way are one entry
    of ``functional(model).params`` already; ``tie`` is for those that it does not share.
    Reference: Press and Wolf 2017, arXiv:1608.05859, "Using the output embedding to improve language models"; Inan,
    Khosravi and Socher 2017, arXiv:1611.01462.

    Args:
        params: a dict of parameters; or a :class:`Functional`, whose ``apply`` then unties by itself.
        ties: ``{name that goes: name that stays}``, with tensors of the same shape and dtype. The value that stays
            counts. Several names may go to one that stays: encoder embedding, decoder embedding, output.

    Where the widths differ, project: an output of width ``E`` after hidden states of width ``H`` is
    ``nn.Sequential(nn.Linear(H, E, bias=False), nn.Linear(E, V))``, and its second weight ``[V, E]`` is tied to the
    embedding's.

    Raises ValueError for a name that is not there, shapes or dtypes that differ, and a name that goes and stays.

    >>> import torch
    >>> from torch import nn
    >>> from functricks import functional
    >>> net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2), nn.Linear(2, 3, bias=False), nn.Linear(3, 5))
    >>> model = tie(functional(net), {"3.weight": "0.weight"})
    >>> list(model.params)
    ['0.weight', '1.weight', '1.bias', '2.weight', '3.bias']
    >>> model.apply(model.params, model.buffers, torch.tensor([4]))[0].shape
    torch.Size([1, 5])
    """
    if isinstance(params, Functional):
        return _tied(params, ties)
    for goes, stays in ties.items():
        missing = [name for name in (goes, stays) if name not in params]
        if missing:
            raise ValueError(f"tie: {missing[0]!r} is no parameter; have: {', '.join(params)}")
        if stays in ties:
            raise ValueError(f"tie: {stays!r} is tied itself; tie {goes!r} to what stays")
        if params[goes].shape != params[stays].shape or params[goes].dtype != params[stays].dtype:
            forms = [f"{params[name].dtype} {list(params[name].shape)}" for name in (goes, stays)]
            raise ValueError(
                f"tie: {goes!r} is {forms[0]} and {stays!r} {forms[1]}; they must agree: put a projection between them"
            )
    return {name: value for name, value in params.items() if name not in ties}


def untie(params: dict[str, Tensor], ties: Mapping[str, str]) -> dict[str, Tensor]:
    """Put back what :func:`tie` took out: every name that was tied has the value of the one that stayed.

    In a loss function this is the tie: ``apply(untie(params, ties), ...)``. On trained parameters it ends the tie: the
    entries are then trained apart.

    Args:
        params: from :func:`tie`.
        ties: the same as for :func:`tie`.

    Raises ValueError where the name that stays is missing, and where one that went is there.

    >>> import torch
    >>> untie({"encoder.weight": torch.ones(2)}, {"decoder.weight": "encoder.weight"})
    {'encoder.weight': tensor([1., 1.]), 'decoder.weight': tensor([1., 1.])}
    """
    for goes, stays in ties.items():
        if stays not in params:
            raise ValueError(f"untie: {stays!r}, which {goes!r} is tied to, is no parameter; have: {', '.join(params)}")
        if goes in params:
            raise ValueError(f"untie: {goes!r} is there already; give the parameters that tie returned")
    return {**params, **{goes: params[stays] for goes, stays in ties.items()}}


def _tied(model: Functional, ties: Mapping[str, str]) -> Functional:
    own = dict(ties)  # the caller's may change later

    def apply(params: dict[str, Tensor], buffers: Buffers, *args: Any, **kwargs: Any) -> tuple[Any, Buffers]:
        return model.apply(untie(params, own), buffers, *args, **kwargs)

    return Functional(apply, tie(model.params, own), model.buffers)
