"""How a transform is made again when a hyper-parameter changes.

A transform is a pair of closures: nobody can write to its learning rate. But recorded makers
(:func:`functricks.transforms.base.recorded`) leave a note, so that ``chain(clip_by_global_norm(1.0), adamw(1e-3))`` is
known as a chain around one optimizer, whose arguments the parameter groups show and change.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim.optimizer import required

from functricks import optimizers
from functricks.transforms.base import Made, is_schedule, made
from functricks.types import Transform

__all__: list[str] = []  # nothing here is public


class Hole:
    """Stands for the optimizer in what is around it."""


class Opaque:
    """A transform that is not known how it was made. It is used as it is."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def __deepcopy__(self, memo: Any) -> Opaque:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "Optimizer: a transform of closures cannot be pickled; give a factory that is defined at the top of a "
            "module, and its hyper-parameters"
        )


@dataclass(frozen=True)
class Recipe:
    """A maker, its arguments, and what is around it.

    Args:
        maker: makes the part whose hyper-parameters the groups show; None where there is no such part.
        hyperparameters: its arguments that a group may have its own value of.
        fixed: its other arguments: selectors, dicts of rates.
        around: the whole transform, with a :class:`Hole` for what ``maker`` makes.
    """

    maker: Callable[..., Transform] | None = None
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    around: Any = Hole

    def part(self, values: dict[str, Any]) -> Transform:
        """Make the part of one group."""
        assert self.maker is not None
        return self.maker(**{name: values.get(name, own) for name, own in self.hyperparameters.items()}, **self.fixed)

    def whole(self, part: Transform | None) -> Transform:
        """Make the whole, around a part."""
        whole: Transform = _put_together(self.around, part)
        return whole

    def check(self, values: dict[str, Any]) -> None:
        """Raise where a value is out of its range."""
        if self.maker is not None and not any(values.get(name) is required for name in self.hyperparameters):
            self.part(values)


def recipe(transform: Any, hyperparameters: dict[str, Any]) -> Recipe:
    """Find out how a transform is made, or take a factory and its hyper-parameters."""
    if hasattr(transform, "init") and hasattr(transform, "update"):
        if hyperparameters:
            raise TypeError(
                f"Optimizer: got {', '.join(hyperparameters)} beside a transform; hyper-parameters go with a factory, "
                "as in Optimizer(params, functricks.adamw, lr=1e-3)"
            )
        return _of_transform(transform)
    if not callable(transform):
        raise TypeError(f"Optimizer: needs a transform or a factory of transforms, got {transform!r}")
    if isinstance(transform, functools.partial) and not transform.args:
        return recipe(transform.func, {**transform.keywords, **hyperparameters})
    return _of_factory(transform, hyperparameters)


def _of_transform(transform: Transform) -> Recipe:
    found: list[Made] = []
    around = _taken_apart(transform, found)
    if len(found) != 1:
        return Recipe(around=_taken_apart(transform, None))
    given = inspect.signature(found[0].maker).bind(*found[0].args, **found[0].kwargs)
    given.apply_defaults()
    return _split(found[0].maker, given.arguments, around)


def _of_factory(factory: Callable[..., Transform], given: dict[str, Any]) -> Recipe:
    parameters = inspect.signature(factory).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    own = {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [name for name in given if name not in own]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        name = getattr(factory, "__name__", repr(factory))
        raise TypeError(f"Optimizer: {name} takes no {', '.join(unknown)}; it has: {', '.join(own)}")
    defaults = {name: required if p.default is p.empty else p.default for name, p in own.items()}
    return _split(factory, {**defaults, **given}, Hole)


def _split(maker: Callable[..., Transform], arguments: dict[str, Any], around: Any) -> Recipe:
    shown = {name: value for name, value in arguments.items() if _is_shown(name, value)}
    return Recipe(maker, shown, {name: value for name, value in arguments.items() if name not in shown}, around)


def _is_shown(name: str, value: Any) -> bool:
    """May a group show this: numbers, flags and the learning rate, but no selectors."""
    if name in ("where", "decay_where", "labels", "learning_rates"):
        return False
    if isinstance(value, (tuple, list)):
        return all(_is_shown(name, one) for one in value)
    plain = value is None or value is required or isinstance(value, (bool, int, float, str, Tensor))
    return plain or (name == "lr" and is_schedule(value))


def _taken_apart(value: Any, found: list[Made] | None) -> Any:
    """Replace transforms by how they were made, and optimizers, which ``found`` collects, by a hole (not for None)."""
    if isinstance(value, (tuple, list)) and not hasattr(value, "update"):
        return tuple(_taken_apart(one, found) for one in value)
    if not (hasattr(value, "init") and hasattr(value, "update")):
        return value
    note = made(value)
    if note is None:
        return Opaque(value)
    if found is not None and _is_optimizer(note.maker):
        found.append(note)
        return Hole
    return Made(note.maker, _taken_apart(note.args, found), {k: _taken_apart(v, found) for k, v in note.kwargs.items()})


def _is_optimizer(maker: Any) -> bool:
    name = getattr(maker, "__name__", "")
    return name in optimizers.__all__ and maker is getattr(optimizers, name)


def _put_together(value: Any, part: Any) -> Any:
    if value is Hole:
        return part
    if isinstance(value, Opaque):
        return value.transform
    if isinstance(value, Made):
        args = [_put_together(one, part) for one in value.args]
        return value.maker(*args, **{name: _put_together(one, part) for name, one in value.kwargs.items()})
    if isinstance(value, tuple) and any(one is Hole or isinstance(one, (Made, Opaque)) for one in value):
        return tuple(_put_together(one, part) for one in value)
    return value
