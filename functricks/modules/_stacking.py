"""Several models of one architecture as one: parameters and buffers with a leading axis, for ``vmap``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from functricks import tree
from functricks.modules._functional import Functional, functional
from functricks.modules._pure import unwrapped

_SETTING = (
    bool,
    int,
    float,
    str,
)  # attributes that say how a module computes: rates, flags; also in tuples, lists and dicts


def stack(models: Sequence[nn.Module]) -> Functional:
    """Return the models as one :func:`functional` whose parameters and buffers have a leading axis, one lane a model.

    ``apply`` is that of one model, to be mapped over the lanes, alone or as part of a whole training step::

        model = stack(models)
        outputs, buffers = vmap(model.apply, in_dims=(0, 0, None))(model.params, model.buffers, x)

    Tensors that a model shares are one entry, as in ``functional``: a tie has one value and one gradient in each lane.

    Classic: :func:`torch.func.stack_module_state` and :func:`torch.func.functional_call` on a copy that was moved to
    the meta device, which breaks ties.

    Args:
        models: at least one; they may differ in the values of parameters and buffers, and in nothing else.

    Raises ValueError for models that differ in the names, shapes or dtypes of their parameters or buffers, in what they
    share, in the type or a setting of a module (a dropout rate, a stride, the training flag, a function that it holds)
    or in its hooks, and names the place.

    >>> model = stack([nn.Linear(2, 3), nn.Linear(2, 3)])
    >>> model.params["weight"].shape
    torch.Size([2, 3, 2])
    >>> x = torch.ones(4, 2)
    >>> torch.func.vmap(model.apply, in_dims=(0, 0, None))(model.params, model.buffers, x)[0].shape
    torch.Size([2, 4, 3])
    """
    if not models:
        raise ValueError("stack: no models; give at least one")
    models = [unwrapped(model) for model in models]
    first = functional(models[0])
    for index, model in enumerate(models[1:], 1):
        _check_alike(models[0], model, index)
    params = [dict(model.named_parameters()) for model in models]
    buffers = [{name: b for name, b in model.named_buffers() if name in first.buffers} for model in models]
    return Functional(first.apply, _stacked(params), _stacked(buffers))


def _stacked(values: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name].detach() for one in values]) for name in values[0]}


def unstack(stacked: Any) -> list[Any]:
    """Return the lanes of a stacked model, or of any tree of tensors with a common leading axis, as a list.

    Args:
        stacked: a :class:`Functional` from :func:`stack`, of which each lane becomes one; or a tree, such as trained
            parameters or a whole training state.

    Raises ValueError for leaves without a leading axis and for leading axes of different lengths, which it names.

    >>> [lane["w"].tolist() for lane in unstack({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})]
    [[1.0, 2.0], [3.0, 4.0]]
    """
    if isinstance(stacked, Functional):
        lanes = unstack({"params": stacked.params, "buffers": stacked.buffers})
        return [Functional(stacked.apply, lane["params"], lane["buffers"]) for lane in lanes]
    named = tree.named_leaves(stacked)
    if not named:
        raise ValueError("unstack: there is no leaf, so that the number of lanes is unknown")
    scalars = [path for path, leaf in named.items() if not isinstance(leaf, Tensor) or leaf.dim() == 0]
    if scalars:
        raise ValueError(f"unstack: {', '.join(map(repr, scalars))} has no leading axis")
    lengths = {path: len(leaf) for path, leaf in named.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"unstack: the leading axes differ: {lengths}")
    return [tree.map(lambda leaf, lane=lane: leaf[lane], stacked) for lane in range(next(iter(lengths.values())))]


def stack_init(make_model: Callable[[], nn.Module], keys: Tensor) -> Functional:
    """Return a :func:`stack` of new models, lane ``i`` initialised from key ``i`` alone.

    Each model is made with torch's global generators seeded from its key, and they are put back afterwards. So a lane
    is the same alone and among others, in any order, and making models does not disturb what is drawn elsewhere.

    Classic: ``torch.manual_seed(seed)`` before each ``make_model()``.

    Args:
        make_model: makes a model, freshly initialised by torch's own functions; what it draws from other generators
            (numpy, Python's) is not controlled.
        keys: int64 [K, 2], from :func:`functricks.random.split`.

    >>> from functricks import random
    >>> keys = random.split(random.key(0), 3)
    >>> together = stack_init(lambda: nn.Linear(2, 3), keys)
    >>> alone = stack_init(lambda: nn.Linear(2, 3), keys[1:2])
    >>> torch.equal(together.params["weight"][1], alone.params["weight"][0])
    True
    """
    if keys.dim() != 2 or keys.shape[1] != 2 or keys.is_floating_point():
        raise ValueError(f"stack_init: keys must be int64 [K, 2], got {keys.dtype} {list(keys.shape)}")
    cuda: Any = torch.cuda
    # Devices that nobody has used yet have no generator to put back.
    devices = list(range(cuda.device_count())) if cuda.is_initialized() else []
    models = []
    for high, low in keys.tolist():
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(high << 32 | low)
            models.append(make_model())
    return stack(models)


def _check_alike(first: nn.Module, other: nn.Module, index: int) -> None:
    """Raise ValueError for the first difference but values: in modules, then in their tensors."""
    modules = [dict(model.named_modules(remove_duplicate=False)) for model in (first, other)]
    _compare(index, "module", *({path: type(m).__name__ for path, m in one.items()} for one in modules))
    for path, module in modules[0].items():
        _compare(index, f"setting of {path!r},", _settings(module), _settings(modules[1][path]))
    for kind in ("parameters", "buffers"):
        tensors = [dict(getattr(model, f"named_{kind}")(remove_duplicate=False)) for model in (first, other)]
        _compare(index, kind[:-1], *({name: _form(t) for name, t in one.items()} for one in tensors))
        _compare(index, f"tie of the {kind[:-1]}", *map(_ties, tensors))


def _compare(index: int, what: str, first: dict[str, Any], other: dict[str, Any]) -> None:
    for name in [*first, *other]:
        mine, its = (one.get(name, "missing") for one in (first, other))
        if mine != its:
            raise ValueError(f"stack: models differ at the {what} {name!r}: {mine} in model 0, {its} in model {index}")


def _settings(module: nn.Module) -> dict[str, Any]:
    shown = {name: _shown(value) for name, value in vars(module).items() if name[0] != "_"}
    for hooks in ("_forward_pre_hooks", "_forward_hooks"):  # which compute, too
        shown[hooks] = _shown(list(getattr(module, hooks).values()))
    return {name: value for name, value in shown.items() if value is not None}


def _shown(value: Any) -> str | None:
    """Return a setting as text, by which two can be compared; None for what is no setting."""
    if isinstance(value, _SETTING):
        return repr(value)
    if isinstance(value, dict):
        items = _shown(list(value.values()))
        return None if items is None else f"{list(value)}: {items}"
    if isinstance(value, tuple | list):
        parts = [_shown(item) for item in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if not isinstance(value, nn.Module | Tensor) and callable(value):
        return getattr(value, "__qualname__", None)  # not the identity: a lambda of __init__ is another in each model
    return None


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}".removeprefix("torch.")


def _ties(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return for every name the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
