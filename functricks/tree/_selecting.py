"""Choose leaves by their dotted paths, and label them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from functricks.tree._walking import Tree, children_of, named_leaves, structure_error

Where: TypeAlias = Any
"""A selector: a glob on dotted paths, several globs, a predicate ``(path, leaf) -> bool``, or a tree of bools."""


def _match(names: tuple[str, ...], globs: tuple[str, ...]) -> tuple[bool, ...]:
    return tuple(any(fnmatchcase(name, glob) for glob in globs) for name in names)


# fnmatch does not trace, and paths are constants. This is all that torch.compiler.assume_constant_result does, but for
# importing the compiler, which takes a second.
_match.__dict__["_dynamo_marked_constant"] = True


def is_function(given: Any) -> bool:
    """Is this a function of path and leaf? A tree of bools may be callable too: a NamedTuple with ``__call__``."""
    return callable(given) and children_of(given) is None


def select(where: Where, tree: Tree, *, name: str = "select") -> dict[str, bool]:
    """Return ``{path: chosen}`` for every leaf.

    Args:
        where: a glob on the whole dotted path (``*`` crosses dots), a sequence of globs, a callable
            ``(path, leaf) -> bool``, or a tree of bools with the structure of ``tree``.
        tree: the tree whose leaves are chosen.
        name: the caller's name, for errors.

    Raises ``ValueError`` when a selector, or one glob of several, matches nothing; the text lists the paths.

    >>> select("*.weight", {"fc": {"weight": 0, "bias": 1}})
    {'fc.weight': True, 'fc.bias': False}
    """
    named = named_leaves(tree)
    globs = (where,) if isinstance(where, str) else where
    if isinstance(globs, (tuple, list)) and globs and all(isinstance(glob, str) for glob in globs):
        for glob in globs:
            if named and not any(_match(tuple(named), (glob,))):
                raise ValueError(f"{name}: where={glob!r} matches no parameter; have: {', '.join(named)}")
        chosen = dict(zip(named, _match(tuple(named), tuple(globs)), strict=True))
    elif is_function(where):
        chosen = {path: bool(where(path, leaf)) for path, leaf in named.items()}
    else:
        chosen = _bools(where, tree, name)
    if named and not any(chosen.values()):
        raise ValueError(f"{name}: where={where!r} matches no parameter; have: {', '.join(named)}")
    return chosen


def _bools(where: Any, tree: Tree, name: str) -> dict[str, bool]:
    chosen, named = named_leaves(where), named_leaves(tree)
    if chosen.keys() != named.keys():
        raise ValueError(structure_error(f"{name}: where", tree, where))
    bad = {path: value for path, value in chosen.items() if not isinstance(value, bool)}
    if bad:
        raise TypeError(f"{name}: where must be globs, a callable or a tree of bools, got {bad!r}")
    return {path: chosen[path] for path in named}


def label(labels: Any, tree: Tree, *, name: str = "labels") -> dict[str, str]:
    """Return ``{path: label}``: exactly one label for every leaf.

    Args:
        labels: a callable ``(path, leaf) -> label``, or a tree of strings with the structure of ``tree``.
        tree: the tree whose leaves are labelled.
        name: the caller's name, for errors.

    Raises ``ValueError`` that names the leaves without a label.
    """
    named = named_leaves(tree)
    if is_function(labels):
        found = {path: labels(path, leaf) for path, leaf in named.items()}
    else:
        given = named_leaves(labels)
        if given.keys() != named.keys():
            raise ValueError(structure_error(name, tree, labels))
        found = {path: given[path] for path in named}
    without = [path for path in named if not isinstance(found[path], str)]
    if without:
        raise ValueError(f"{name}: every parameter needs one label (a string); without: {', '.join(without)}")
    return found
