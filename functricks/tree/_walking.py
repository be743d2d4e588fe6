"""Walk a tree: its leaves in insertion order, their dotted paths, and how two trees differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

Tree: TypeAlias = Any

_NAMESPACE = "functricks"
# Entered once, for good, since inside a traced function it would break fullgraph; dropping the object would leave it.
_ORDERED = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_ORDERED.__enter__()


def flatten(tree: Tree) -> tuple[list[Any], Any]:
    """Return the leaves in insertion order, and a structure for :func:`unflatten`.

    >>> flatten({"b": 1, "a": (2, 3)})[0]
    [1, 2, 3]
    """
    if torch.compiler.is_compiling():  # optree's traced form sorts dict keys and cannot take an empty dict
        return [leaf for _, leaf in _walk(tree)], tree
    _check_tree(tree)
    return optree.tree_flatten(tree, namespace=_NAMESPACE)


_KNOWN = (dict, tuple, list, Tensor, str)


def _check_tree(tree: Any) -> None:
    """Raise for what only looks like a tree, and would count as one leaf: a generator, a view of values, a module."""
    if not isinstance(tree, _KNOWN) and (hasattr(tree, "__iter__") or hasattr(tree, "named_parameters")):
        raise TypeError(
            f"tree: must be a tensor or a dict, tuple or list of tensors, got {type(tree).__name__}; "
            "functricks.functional(model).params are a module's, as a dict by name"
        )


def unflatten(structure: Any, new_leaves: Iterable[Any]) -> Tree:
    """Put leaves into the structure that :func:`flatten` returned."""
    if torch.compiler.is_compiling():
        return _rebuild(structure, iter(list(new_leaves)))
    return optree.tree_unflatten(structure, new_leaves)


def leaves(tree: Tree) -> list[Any]:
    """Return the leaves in insertion order."""
    return flatten(tree)[0]


def map(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply ``function`` leaf by leaf; the other trees are matched to the first by name."""
    if torch.compiler.is_compiling():
        columns = [leaves(tree), *(_flatten_like(tree, other) for other in rest)]
        return unflatten(tree, [function(*row) for row in zip(*columns, strict=True)])
    _check_tree(tree)
    return optree.tree_map(function, tree, *rest, namespace=_NAMESPACE)


def named_leaves(tree: Tree) -> dict[str, Any]:
    """Return ``{dotted path: leaf}`` in insertion order.

    >>> named_leaves({"layer": {"weight": 1}, "heads": (2, 3)})
    {'layer.weight': 1, 'heads.0': 2, 'heads.1': 3}

    Raises ``ValueError`` where a key with a dot makes two leaves share a path.
    """
    _check_tree(tree)
    found = _walk(tree)
    named = dict(found)
    if len(named) != len(found):
        seen = [path for path, _ in found]
        twice = sorted({path for path in seen if seen.count(path) > 1})
        raise ValueError(f"tree: two leaves share a path: {twice}; rename a key")
    return named


def paths(tree: Tree) -> list[str]:
    """Return the dotted paths of the leaves."""
    return [path for path, _ in _walk(tree)]


def path_number(path: str) -> int:
    """Return a number in [0, 2**32) that belongs to a path, the same in every process: the FNV-1a hash.

    >>> path_number("encoder.weight")
    356579535
    """
    number = 0x811C9DC5
    for byte in path.encode():
        number = (number ^ byte) * 0x01000193 % 2**32
    return number


path_number.__dict__["_dynamo_marked_constant"] = True  # a loop over bytes need not be traced


def pick(tree: Tree, chosen: dict[str, bool]) -> dict[str, Any]:
    """Return the chosen leaves as a flat ``{path: leaf}``; ``chosen`` is from :func:`select`.

    Raises ``ValueError`` where the leaves are not those that it chose from.
    """
    named = named_leaves(tree)
    if named.keys() != chosen.keys():
        raise ValueError(structure_error("tree: the leaves to choose from", chosen, named))
    return {path: leaf for path, leaf in named.items() if chosen[path]}


def from_named(tree: Tree, named: dict[str, Any]) -> Tree:
    """Return ``tree`` with the leaves at the paths in ``named`` replaced.

    >>> from_named({"a": 1, "b": {"c": 2}}, {"b.c": 3})
    {'a': 1, 'b': {'c': 3}}
    """
    old, structure = flatten(tree)
    return unflatten(structure, [named.get(path, leaf) for path, leaf in zip(paths(tree), old, strict=True)])


def children_of(node: Any) -> list[tuple[str, Any]] | None:
    """Return the named children of an inner node, None for a leaf."""
    if node is None:
        return []
    if isinstance(node, dict):
        return [(str(key), child) for key, child in node.items()]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, (tuple, list)):
        return [(str(index), child) for index, child in enumerate(node)]
    return None


def _walk(tree: Tree, prefix: str = "") -> list[tuple[str, Any]]:
    children = children_of(tree)
    if children is None:
        return [(prefix, tree)]
    found = []
    for name, child in children:
        found += _walk(child, f"{prefix}.{name}" if prefix else name)
    return found


def _rebuild(node: Any, new_leaves: Iterator[Any]) -> Any:
    if node is None:
        return None
    if isinstance(node, dict):
        return {key: _rebuild(child, new_leaves) for key, child in node.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*[_rebuild(child, new_leaves) for child in node])
    if isinstance(node, (tuple, list)):
        children = [_rebuild(child, new_leaves) for child in node]
        return children if isinstance(node, list) else tuple(children)
    return next(new_leaves)


def _flatten_like(tree: Tree, other: Tree) -> list[Any]:
    """Flatten ``other`` in the order of ``tree``: dicts are matched by key, not by position."""
    children = children_of(tree)
    if children is None:
        return [other]
    others = children_of(other)
    named = dict(others or [])
    if others is None or named.keys() != {name for name, _ in children}:
        raise ValueError(structure_error("tree", tree, other))
    found = []
    for name, child in children:
        found += _flatten_like(child, named[name])
    return found


def columns_of(trees: Sequence[Tree]) -> tuple[list[list[Any]], Any]:
    """Flatten several trees of one structure, all in the order of the first."""
    first, structure = flatten(trees[0])
    columns = [first]
    for other in trees[1:]:
        if torch.compiler.is_compiling():
            columns.append(_flatten_like(trees[0], other))
        else:
            columns.append(_flatten_up_to(structure, trees[0], other))
    return columns, structure


def _flatten_up_to(structure: Any, tree: Tree, other: Tree) -> list[Any]:
    try:
        found: list[Any] = structure.flatten_up_to(other)
    except ValueError:
        raise ValueError(structure_error("tree", tree, other)) from None
    return found


def same_shapes(columns: Sequence[Sequence[Any]]) -> bool:
    """Have the leaves of every row one shape? No, where one is no tensor."""
    try:
        first = [leaf.shape for leaf in columns[0]]
        return all([leaf.shape for leaf in column] == first for column in columns[1:])
    except AttributeError:
        return False


def check_shapes(trees: Sequence[Tree], columns: Sequence[Sequence[Any]]) -> None:
    """Raise unless the leaves of every row are tensors of one shape: broadcasting would hide a wrong gradient."""
    if same_shapes(columns):
        return
    for other, column in zip(trees[1:], columns[1:], strict=True):
        if not same_shapes((columns[0], column)):
            raise ValueError(structure_error("tree", trees[0], other))


def check_like(what: str, expected: Tree, got: Tree) -> list[list[Any]]:
    """Return the leaves of two trees, matched by name, if they have the same paths and shapes.

    Raises ``ValueError`` that names those that differ.

    >>> check_like("state", {"w": torch.zeros(2)}, {"v": torch.zeros(2)})
    Traceback (most recent call last):
    ValueError: state: trees differ; missing: ['w'], unexpected: ['v'], shapes: []
    """
    try:
        columns, _ = columns_of((expected, got))
        if same_shapes(columns):
            return columns
    except ValueError:
        pass
    raise ValueError(structure_error(what, expected, got))


def structure_error(what: str, expected: Tree, got: Tree) -> str:
    """Return one sentence that names the paths (and shapes) in which two trees differ."""
    want, have = named_leaves(expected), named_leaves(got)
    missing, extra = [p for p in want if p not in have], [p for p in have if p not in want]
    shapes = [
        f"{p} {tuple(want[p].shape)} != {tuple(have[p].shape)}"
        for p in want
        if p in have and isinstance(want[p], Tensor) and isinstance(have[p], Tensor) and want[p].shape != have[p].shape
    ]
    text = f"{what}: trees differ; missing: {missing}, unexpected: {extra}, shapes: {shapes}"
    empty = [path for path in _empty(got) if path in want]
    if empty:
        return f"{text}; None in place of a tensor: {empty}, give zeros or leave the parameter out"
    others = {
        p: type(leaf).__name__
        for p, leaf in have.items()
        if isinstance(want.get(p), Tensor) and not isinstance(leaf, Tensor)
    }
    return f"{text}; no tensors: {others}" if others else text


def _empty(tree: Tree, prefix: str = "") -> list[str]:
    """Return the paths at which there is None, as ``p.grad`` is for a parameter that no loss has reached."""
    if tree is None:
        return [prefix]
    found = []
    for name, child in children_of(tree) or []:
        found += _empty(child, f"{prefix}.{name}" if prefix else name)
    return found
