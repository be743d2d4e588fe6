r"""Different transforms, or different rates, for different leaves.

Leaves are told apart by their dotted path, and every function here accounts for every leaf: one that no label, glob or
layer covers raises and is named, and so does one that two of them cover.

To train a head alone, do not differentiate the body at all; then nothing is computed, stored or written for it::

    head = tree.pick(params, tree.select("head.*", params))
    step = train_step(gradient(lambda head, batch: loss_fn(tree.from_named(params, head), batch)), adamw(1e-3))

``partition({"head": adamw(1e-3), "body": freeze()}, labels)`` keeps the body in the parameters and pays for its
gradient only: it has no state, and its updates are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from functricks import tree
from functricks.transforms.base import check_number, check_transform, stateless
from functricks.types import Grads, Number, Params, State, Transform, Updates

__all__ = ["freeze", "masked", "partition"]


def partition(transforms: dict[str, Transform], labels: Any) -> Transform:
    """Give every leaf to the transform of its label.

    Classic: ``torch.optim`` parameter groups.

    Args:
        transforms: ``{label: transform}``. Each sees its leaves as a flat ``{path: leaf}``.
        labels: a callable ``(path, leaf) -> label``, or a tree of strings with the structure of the parameters.

    Raises ``ValueError`` that names every leaf whose label is missing or unknown: nothing is silently left out.

    >>> import torch
    >>> from functricks import scale
    >>> rates = {"slow": scale(-0.1), "fast": scale(-1.0)}
    >>> slow_fast = partition(rates, lambda path, leaf: "fast" if path == "b" else "slow")
    >>> params = {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}
    >>> slow_fast.update(params, slow_fast.init(params), params)[0]
    {'a': tensor(-0.1000), 'b': tensor(-1.)}
    """

    if not isinstance(transforms, dict):
        raise TypeError(f"partition: transforms must be a dict {{label: transform}}, got {transforms!r}")
    for label, transform in transforms.items():
        check_transform(f"partition: {label}", transform)

    def parts(params: Params) -> dict[str, dict[str, bool]]:
        found = tree.label(labels, params, name="partition: labels")
        unknown = {path: label for path, label in found.items() if label not in transforms}
        if unknown:
            raise ValueError(f"partition: labels without a transform: {unknown}; have: {', '.join(transforms)}")
        return {label: {path: one == label for path, one in found.items()} for label in transforms}

    def init(params: Params) -> State:
        return {label: transforms[label].init(tree.pick(params, part)) for label, part in parts(params).items()}

    def update(grads: Grads, state: State, params: Params) -> tuple[Updates, State]:
        if state.keys() != transforms.keys():
            raise ValueError(f"partition: the state has {list(state)}, the labels are {list(transforms)}")
        updates, states = {}, {}
        for label, part in parts(params).items():
            own, states[label] = transforms[label].update(tree.pick(grads, part), state[label], tree.pick(params, part))
            updates.update(own)
        return tree.from_named(grads, updates), states

    return Transform(init, update)


def masked(transform: Transform, where: tree.Where) -> Transform:
    """Apply ``transform`` to the chosen leaves only; the others pass unchanged and have no state.

    They pass as *gradients*. To leave parameters alone, use :func:`freeze`.

    Args:
        transform: sees the chosen leaves as a flat ``{path: leaf}``, so that masks nest.
        where: a selector; one that matches nothing raises, also a tree that is False everywhere: then the transform
            would do nothing, and leaving it out says so.

    >>> import torch
    >>> from functricks import scale
    >>> half = masked(scale(0.5), "a")
    >>> params = {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}
    >>> half.update(params, half.init(params), params)[0]
    {'a': tensor(0.5000), 'b': tensor(1.)}
    """
    check_transform("masked: transform", transform)

    def init(params: Params) -> State:
        return transform.init(tree.pick(params, tree.select(where, params, name="masked")))

    def update(grads: Grads, state: State, params: Params) -> tuple[Updates, State]:
        chosen = tree.select(where, params, name="masked")
        updates, state = transform.update(tree.pick(grads, chosen), state, tree.pick(params, chosen))
        return tree.from_named(grads, updates), state

    return Transform(init, update)


def freeze(where: tree.Where | None = None) -> Transform:
    """Make the updates of the chosen leaves zero, NaN included.

    Classic: ``requires_grad_(False)``. Last in a chain it overrules weight decay and momentum too. As the transform of
    a label of :func:`partition` it saves the state of the others as well.

    Args:
        where: a selector; all leaves by default.

    >>> import torch
    >>> from functricks import chain, sgd
    >>> params = {"body": torch.tensor(1.0), "head": torch.tensor(1.0)}
    >>> optimizer = chain(sgd(0.1), freeze("body"))
    >>> optimizer.update(params, optimizer.init(params), params)[0]
    {'body': tensor(0.), 'head': tensor(-0.1000)}
    """

    def update(grads: Grads, params: Params) -> Updates:
        if where is None:
            return tree.zeros_like(grads)
        frozen = tree.pick(grads, tree.select(where, params, name="freeze"))
        return tree.from_named(grads, tree.zeros_like(frozen))

    return stateless(update)


def scale_by_path(factors: dict[str, Number], *, name: str) -> Callable[[Grads], Updates]:
    """Return the function that multiplies the leaves that match a glob by its number; the other leaves pass.

    ``name`` is the caller's, for errors: a glob that matches nothing, and a leaf that two globs match.
    """
    if not isinstance(factors, dict):
        raise TypeError(f"{name} must be a dict {{glob: factor}}, got {factors!r}")
    for glob, factor in factors.items():
        check_number(f"{name}[{glob!r}]", factor, minimum=0.0)

    def update(grads: Grads) -> Updates:
        matches = {glob: tree.select(glob, grads, name=name) for glob in factors}
        check_once(matches, name)
        updates: dict[str, Any] = {}
        for glob, factor in factors.items():
            updates.update(tree.scale(tree.pick(grads, matches[glob]), factor))
        return tree.from_named(grads, updates)

    return update


def check_once(matches: dict[str, dict[str, bool]], name: str) -> None:
    """Raise for leaves that more than one glob matches, and name both."""
    owners: dict[str, list[str]] = {}
    for glob, chosen in matches.items():
        for path, hit in chosen.items():
            owners.setdefault(path, []).extend([glob] * hit)
    twice = {path: globs for path, globs in owners.items() if len(globs) > 1}
    if twice:
        raise ValueError(f"{name}: parameters that more than one glob matches: {twice}")
