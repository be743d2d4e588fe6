"""Pytrees: walk them, name their leaves, and do arithmetic on them.

A tree is any nesting of dict, NamedTuple, tuple and list with tensors as leaves. Leaves are matched by name, and dicts
keep their insertion order, so that sums run in the order of ``named_parameters()`` and agree with PyTorch's to the bit.

All arithmetic on trees goes through one seam, :func:`_pointwise`, which picks the faster of two ways of doing the same
thing:

- plain tensors, and the lanes of a single ``vmap`` level (the stacked tensors underneath, coefficients broadcast,
  which is what the batching rules do at a multiple of the cost): PyTorch's ``torch._foreach_*`` kernels, one call for
  all leaves;
- anything else (nested transforms, differentiation, ``torch.compile``): ordinary operations, a leaf at a time.

Coefficients are Python numbers or 0-d tensors. A tensor coefficient is cast to the leaf's compute dtype (float32 for
half) before it meets the leaf, because under ``vmap`` a 0-d tensor is no longer 0-d and would promote it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._functorch.vmap import vmap_increment_nesting
from torch.autograd import forward_ad

from functricks.types import Number

__all__ = [
    "Where",
    "above_lanes",
    "adam",
    "add",
    "add_scaled",
    "all_finite",
    "below_lanes",
    "cast",
    "check_like",
    "clamp",
    "compute_dtype",
    "ema",
    "ema_of_squares",
    "flatten",
    "from_named",
    "is_transformed",
    "label",
    "lanes",
    "leaves",
    "map",
    "map_lanes",
    "maximum",
    "mul",
    "named_leaves",
    "norm",
    "norm_parts",
    "outside_lanes",
    "path_number",
    "paths",
    "pick",
    "pointwise",
    "root_ratio",
    "scale",
    "scaled_sum",
    "select",
    "sqrt",
    "structure_error",
    "sub",
    "unflatten",
    "where",
    "wide",
    "zeros_like",
]

Tree: TypeAlias = Any
Where: TypeAlias = Any
"""A selector: a glob on dotted paths, several globs, a predicate ``(path, leaf) -> bool``, or a tree of bools."""

_NAMESPACE = "functricks"
# Entered once, for good, since inside a traced function it would break fullgraph; dropping the object would leave it.
_ORDERED = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_ORDERED.__enter__()


# --- walking ---------------------------------------------------------------------------------------------------------


def flatten(tree: Tree) -> tuple[list[Any], Any]:
    """Return the leaves in insertion order, and a structure for :func:`unflatten`.

    >>> flatten({"b": 1, "a": (2, 3)})[0]
    [1, 2, 3]
    """
    if torch.compiler.is_compiling():  # optree's traced form sorts dict keys and cannot take an empty dict
        return [leaf for _, leaf in _walk(tree)], tree
    return optree.tree_flatten(tree, namespace=_NAMESPACE)


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
    return optree.tree_map(function, tree, *rest, namespace=_NAMESPACE)


def named_leaves(tree: Tree) -> dict[str, Any]:
    """Return ``{dotted path: leaf}`` in insertion order.

    >>> named_leaves({"layer": {"weight": 1}, "heads": (2, 3)})
    {'layer.weight': 1, 'heads.0': 2, 'heads.1': 3}

    Raises ``ValueError`` where a key with a dot makes two leaves share a path.
    """
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
    """Return the chosen leaves as a flat ``{path: leaf}``; ``chosen`` is from :func:`select`."""
    return {path: leaf for path, leaf in named_leaves(tree).items() if chosen[path]}


def from_named(tree: Tree, named: dict[str, Any]) -> Tree:
    """Return ``tree`` with the leaves at the paths in ``named`` replaced.

    >>> from_named({"a": 1, "b": {"c": 2}}, {"b.c": 3})
    {'a': 1, 'b': {'c': 3}}
    """
    old, structure = flatten(tree)
    return unflatten(structure, [named.get(path, leaf) for path, leaf in zip(paths(tree), old, strict=True)])


def _children(node: Any) -> list[tuple[str, Any]] | None:
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
    children = _children(tree)
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
    children = _children(tree)
    if children is None:
        return [other]
    named = dict(_children(other) or [])
    if named.keys() != {name for name, _ in children}:
        raise ValueError(structure_error("tree", tree, other))
    found = []
    for name, child in children:
        found += _flatten_like(child, named[name])
    return found


def _columns(trees: Sequence[Tree]) -> tuple[list[list[Any]], Any]:
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


def check_like(what: str, expected: Tree, got: Tree) -> None:
    """Raise ``ValueError`` unless two trees have the same paths and shapes; the text names those that differ.

    >>> check_like("state", {"w": torch.zeros(2)}, {"v": torch.zeros(2)})
    Traceback (most recent call last):
    ValueError: state: trees differ; missing: ['w'], unexpected: ['v'], shapes: []
    """
    try:
        columns, _ = _columns((expected, got))
        same = all(a.shape == b.shape for a, b in zip(*columns, strict=True))
    except (ValueError, AttributeError):
        same = False
    if not same:
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
    return f"{what}: trees differ; missing: {missing}, unexpected: {extra}, shapes: {shapes}"


# --- selecting -------------------------------------------------------------------------------------------------------


def _match(names: tuple[str, ...], globs: tuple[str, ...]) -> tuple[bool, ...]:
    return tuple(any(fnmatchcase(name, glob) for glob in globs) for name in names)


# fnmatch does not trace, and paths are constants. This is all that torch.compiler.assume_constant_result does, but for
# importing the compiler, which takes a second.
_match.__dict__["_dynamo_marked_constant"] = True


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
    elif callable(where):
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
    if callable(labels):
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


# --- the seam --------------------------------------------------------------------------------------------------------


def lanes() -> int | None:
    """Return the current ``vmap`` level if it is the only transform and nothing is being traced, else None."""
    if torch.compiler.is_compiling() or _is_dual():
        return None
    interpreter: Any = functorch.peek_interpreter_stack()
    if interpreter is None or interpreter.level() != 1 or interpreter.key() != functorch.TransformType.Vmap:
        return None
    return 1


def _is_dual() -> bool:
    """Is forward-mode differentiation on? It sees neither ``requires_grad`` nor ``torch.no_grad``."""
    return forward_ad._current_level >= 0


def below_lanes(value: Any) -> tuple[Any, bool]:
    """Return the stacked tensor under a lane of a single ``vmap`` level, lanes first, and whether there was one."""
    if isinstance(value, Tensor) and functorch.is_batchedtensor(value):
        stacked, dim = functorch.get_unwrapped(value), functorch.maybe_get_bdim(value)
        return (stacked if dim == 0 else stacked.movedim(dim, 0)), True
    return value, False


def above_lanes(stacked: Tensor, level: int) -> Tensor:
    """Turn a stacked tensor, lanes first, into a lane again."""
    lane: Tensor = functorch._add_batch_dim(stacked, 0, level)
    return lane


def map_lanes(function: Callable[..., Tree], axes: Sequence[int | None], inputs: Sequence[Tree]) -> Tree:
    """Do what ``torch.vmap(function, axes)(*inputs)`` does, for axes 0 and None and leaves that are tensors.

    ``vmap`` walks every tree several times in Python, which for a small model costs a twentieth of a training step.
    """
    size = next(leaf.shape[0] for x, axis in zip(inputs, axes, strict=True) if axis is not None for leaf in leaves(x))
    with vmap_increment_nesting(size, "error") as level:
        own = [
            x if axis is None else map(lambda leaf: functorch._add_batch_dim(leaf, 0, level), x)
            for x, axis in zip(inputs, axes, strict=True)
        ]
        return map(lambda leaf: functorch._remove_batch_dim(leaf, level, size, 0), function(*own))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which scalars and sums for this dtype are computed: float32 for half."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def outside_lanes() -> Any:
    """Return the context in which stacked tensors from :func:`below_lanes` are ordinary tensors."""
    return temporarily_pop_interpreter_stack() if is_transformed() else nullcontext()


def is_transformed() -> bool:
    """Are we inside a ``torch.func`` transform?"""
    return functorch.peek_interpreter_stack() is not None


One: TypeAlias = Callable[..., Tensor]
Many: TypeAlias = Callable[..., Sequence[Tensor]]


def _pointwise(one: One, many: Many | None, trees: Sequence[Tree], coefficients: Sequence[Number] = ()) -> Tree:
    """Apply a pointwise operation to trees of one structure; the result keeps the first tree's leaf dtypes.

    ``one(*leaves, *coefficients)`` does a leaf with out-of-place operations. ``many(*columns, *coefficients)`` does
    the same to lists of plain tensors, where a coefficient is a Python number or a list with one tensor a leaf, ready
    to broadcast; without it, all goes through ``one``.
    """
    columns, structure = _columns(trees)
    if not columns[0]:
        return trees[0]
    results = None if many is None else _fast(many, columns, coefficients)
    if results is None:
        rows = zip(*columns, strict=True)
        results = [one(*row, *[_fit(value, row[0]) for value in coefficients]) for row in rows]
    kept = zip(results, columns[0], strict=True)
    return unflatten(structure, [new if new.dtype == old.dtype else new.to(old.dtype) for new, old in kept])


def _fit(value: Number, leaf: Tensor) -> Number:
    """Cast a tensor coefficient to the dtype in which it meets the leaf."""
    if isinstance(value, Tensor) and value.dtype != torch.bool and leaf.is_floating_point():
        return value.to(compute_dtype(leaf.dtype))
    return value


def _fast(many: Many, columns: list[list[Any]], coefficients: Sequence[Number]) -> Sequence[Tensor] | None:
    """Do it on plain tensors, or on the stacked tensors below the lanes; None where neither is what we have."""
    if torch.compiler.is_compiling():
        return None
    if not is_transformed():
        if _any_differentiable((*columns, coefficients)):
            return None
        return many(*columns, *[_spread(_look(value), columns[0]) for value in coefficients])
    level = lanes()
    return None if level is None else _fast_lanes(many, columns, coefficients, level)


def _fast_lanes(
    many: Many, columns: list[list[Any]], coefficients: Sequence[Number], level: int
) -> Sequence[Tensor] | None:
    found = [[below_lanes(leaf) for leaf in column] for column in columns]
    numbers = [below_lanes(value) for value in coefficients]
    everything = [pair for column in (*found, numbers) for pair in column]
    if _any_differentiable([[value for value, _ in everything]]):
        return None
    sizes = [value.shape[0] for value, laned in everything if laned]
    with outside_lanes():
        if not sizes:
            return many(*columns, *[_spread(value, columns[0]) for value in coefficients])
        # Leaves that all lanes share are expanded, so that what an operation makes of them has room for every lane.
        below = [[x if laned else x.expand(sizes[0], *x.shape) for x, laned in column] for column in found]
        results = many(*below, *[_spread(value, below[0], laned) for value, laned in numbers])
        return [above_lanes(new, level) for new in results]


def _any_differentiable(columns: Iterable[Iterable[Any]]) -> bool:
    """Would autograd have to see an operation on any of these?"""
    if _is_dual():
        return True
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for column in columns for value in column
    )


def _spread(value: Number, column: list[Tensor], laned: bool = False) -> Any:
    """Turn a tensor coefficient into one tensor a leaf; one a lane, ``[K]``, becomes ``[K, 1, ...]``."""
    if not isinstance(value, Tensor):
        return value
    shapes = [(-1, *[1] * (leaf.ndim - 1)) if laned else () for leaf in column]
    return [_fit(value.view(shape), leaf) for shape, leaf in zip(shapes, column, strict=True)]


# --- arithmetic ------------------------------------------------------------------------------------------------------


def zeros_like(tree: Tree, dtype: torch.dtype | None = None) -> Tree:
    """Return zeros with the structure and shapes of ``tree``."""
    return map(lambda leaf: torch.zeros_like(leaf, dtype=dtype), tree)


def cast(tree: Tree, dtype: torch.dtype) -> Tree:
    """Cast the floating-point leaves; others pass."""
    return map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)


def wide(tree: Tree) -> Tree:
    """Return the tree with half-precision leaves in float32."""
    return map(lambda leaf: leaf.to(compute_dtype(leaf.dtype)), tree)


def pointwise(function: One, *trees: Tree, coefficients: Sequence[Number] = ()) -> Tree:
    """Apply ``function(*leaves, *coefficients)`` leaf by leaf; the result has the dtypes of the first tree.

    For what is not worth a function of its own here: ordinary operations only, with coefficients in the leaf's dtype.

    >>> pointwise(lambda x, c: (x * c).sign(), {"w": torch.tensor([2.0, 0.0])}, coefficients=(-1.0,))
    {'w': tensor([-1., 0.])}
    """
    return _pointwise(function, None, trees, coefficients)


def add(a: Tree, b: Tree) -> Tree:
    """Return ``a + b``."""
    return _pointwise(torch.add, torch._foreach_add, (a, b))


def sub(a: Tree, b: Tree) -> Tree:
    """Return ``a - b``."""
    return _pointwise(torch.sub, torch._foreach_sub, (a, b))


def mul(a: Tree, b: Tree) -> Tree:
    """Return ``a * b``."""
    return _pointwise(torch.mul, torch._foreach_mul, (a, b))


def maximum(a: Tree, b: Tree) -> Tree:
    """Return the larger of ``a`` and ``b``, entry by entry."""
    return _pointwise(torch.maximum, torch._foreach_maximum, (a, b))


def scale(a: Tree, c: Number) -> Tree:
    """Return ``c * a``."""
    return _pointwise(torch.mul, torch._foreach_mul, (a,), (c,))


def add_scaled(a: Tree, b: Tree, c: Number) -> Tree:
    """Return ``a + c * b``."""

    def many(a: list[Tensor], b: list[Tensor], c: Any) -> Sequence[Tensor]:
        b = _as(b, a)
        if isinstance(c, list):
            return torch._foreach_addcmul(a, b, _as(c, a))
        return torch._foreach_add(a, b, alpha=c)

    return _pointwise(lambda a, b, c: a + b * c, many, (a, b), (c,))


def scaled_sum(c: Number, a: Tree, k: Number, b: Tree) -> Tree:
    """Return ``c * (a + k * b)``."""

    def many(a: list[Tensor], b: list[Tensor], c: Any, k: Any) -> Sequence[Tensor]:
        b = _as(b, a)
        out = torch._foreach_addcmul(a, b, _as(k, a)) if isinstance(k, list) else torch._foreach_add(a, b, alpha=k)
        torch._foreach_mul_(out, c)
        return out

    return _pointwise(lambda a, b, c, k: (a + b * k) * c, many, (a, b), (c, k))


def clamp(a: Tree, low: Number, high: Number) -> Tree:
    """Return ``a`` with every entry in ``[low, high]``; NaN stays NaN."""

    def one(leaf: Tensor, low: Number, high: Number) -> Tensor:
        low, high = (torch.as_tensor(bound, dtype=leaf.dtype, device=leaf.device) for bound in (low, high))
        return torch.minimum(torch.maximum(leaf, low), high)

    def many(leaves: list[Tensor], low: Any, high: Any) -> Sequence[Tensor]:
        out = torch._foreach_clamp_min(leaves, low)
        torch._foreach_clamp_max_(out, high)
        return out

    return _pointwise(one, many, (a,), (low, high))


def ema(average: Tree, new: Tree, decay: Number) -> Tree:
    """Return ``decay * average + (1 - decay) * new``, by PyTorch's ``lerp``."""

    def many(average: list[Tensor], new: list[Tensor], weight: Any) -> Sequence[Tensor]:
        average = [leaf.to(compute_dtype(leaf.dtype)) for leaf in average]  # lerp takes no float32 weight for half
        return torch._foreach_lerp(average, _as(new, average), weight)

    def one(average: Tensor, new: Tensor, weight: Number) -> Tensor:
        average = average.to(compute_dtype(average.dtype))
        return torch.lerp(average, new.to(average.dtype), weight)

    return _pointwise(one, many, (average, new), (1 - decay,))


def ema_of_squares(average: Tree, new: Tree, decay: Number) -> Tree:
    """Return ``decay * average + (1 - decay) * new**2``."""

    def many(average: list[Tensor], new: list[Tensor], decay: Any, weight: Any) -> Sequence[Tensor]:
        new = _as(new, average)
        out = torch._foreach_mul(average, decay)
        if isinstance(weight, float):
            torch._foreach_addcmul_(out, new, new, value=weight)  # in place on what the line above made
        else:
            squares = torch._foreach_mul(new, new)
            torch._foreach_mul_(squares, weight)
            torch._foreach_add_(out, squares)
        return out

    def one(average: Tensor, new: Tensor, decay: Number, weight: Number) -> Tensor:
        new = new.to(average.dtype)
        return average * decay + new * new * weight

    return _pointwise(one, many, (average, new), (decay, 1 - decay))


def _as(column: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    pairs = zip(column, like, strict=True)
    return [leaf if leaf.dtype == other.dtype else leaf.to(other.dtype) for leaf, other in pairs]


def adam(
    mu: Tree, nu: Tree, grads: Tree, betas: tuple[Number, Number], eps: Number, step: Tensor
) -> tuple[Tree, Tree, Tree]:
    r"""Return Adam's direction and its two moments, see :func:`functricks.scale_by_adam`.

    On plain tensors by PyTorch's fused kernel: it writes into copies, with a learning rate of -1 and zeros as the
    parameters, which leaves the direction there.
    """
    columns, structure = _columns((grads, mu, nu))
    numbers = [value for value in (_look(one) for one in (*betas, eps)) if not isinstance(value, Tensor)]
    if len(numbers) < 3 or not _fusable(columns, step):
        return _adam_by_parts(mu, nu, grads, betas, eps, step)
    out = [torch.zeros_like(leaf) for leaf in columns[0]]
    new_mu, new_nu = ([leaf.clone() for leaf in column] for column in columns[1:])
    (beta1, beta2, epsilon), steps = numbers, [step.float()] * len(out)
    torch._fused_adamw_(
        out, columns[0], new_mu, new_nu, [], steps,
        lr=-1.0, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=epsilon, amsgrad=False, maximize=False,
    )  # fmt: skip
    return unflatten(structure, out), unflatten(structure, new_mu), unflatten(structure, new_nu)


def _adam_by_parts(
    mu: Tree, nu: Tree, grads: Tree, betas: tuple[Number, Number], eps: Number, step: Tensor
) -> tuple[Tree, Tree, Tree]:
    mu, nu = ema(mu, grads, betas[0]), ema_of_squares(nu, grads, betas[1])
    wide = [beta.double() if isinstance(beta, Tensor) else beta for beta in betas]
    kept = [torch.pow(beta, step.double()) for beta in wide]  # float64: in float32, 1 - 0.999**t is off by 1e-5
    return root_ratio(mu, nu, 1 - kept[0], torch.sqrt(1 - kept[1]), eps), mu, nu


def _fusable(columns: list[list[Any]], step: Tensor) -> bool:
    """May the fused kernel do it: plain, dense CPU leaves of one dtype?"""
    if torch.compiler.is_compiling() or is_transformed() or not columns[0] or not step.is_cpu:
        return False
    dtype = columns[0][0].dtype
    if dtype not in (torch.float32, torch.float64) or _any_differentiable(columns):
        return False
    return all(leaf.dtype == dtype and leaf.is_cpu and leaf.is_contiguous() for column in columns for leaf in column)


def _look(value: Number) -> Number:
    """Return a plain 0-d CPU tensor as a Python number: a look is free there, and so is an operation with a number."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or torch.compiler.is_compiling():
        return value
    if is_transformed() or _any_differentiable([[value]]) or not _may_look(value):
        return value
    whole: Any = value.full_tensor() if hasattr(value, "full_tensor") else value  # a norm of sharded leaves
    return float(whole.tolist())


def root_ratio(a: Tree, b: Tree, correction: Number, root_correction: Number, eps: Number) -> Tree:
    r"""Return :math:`\frac{a / c}{\sqrt{b} / r + \epsilon}`, the direction of the Adam family."""

    def many(a: list[Tensor], b: list[Tensor], c: Any, r: Any, eps: Any) -> Sequence[Tensor]:
        below = torch._foreach_sqrt(b)
        torch._foreach_div_(below, r)
        torch._foreach_add_(below, eps)
        torch._foreach_mul_(below, c)
        return [torch.div(x, y, out=y) for x, y in zip(a, below, strict=True)]

    def one(a: Tensor, b: Tensor, c: Number, r: Number, eps: Number) -> Tensor:
        return a / ((sqrt(b) / r + eps) * c)

    return _pointwise(one, many, (a, b), (correction, root_correction, eps))


def where(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """Return ``a`` where the 0-d bool ``condition`` holds, else ``b``, leaf by leaf."""
    if _holds_everywhere(condition):
        return a

    def many(a: list[Tensor], b: list[Tensor], condition: list[Tensor]) -> Sequence[Tensor]:
        return [torch.where(*row) for row in zip(condition, a, b, strict=True)]

    return _pointwise(lambda a, b, condition: torch.where(condition, a, b), many, (a, b), (condition,))


def _holds_everywhere(condition: Tensor) -> bool:
    """Look, where that is free: in eager on the CPU. Nearly always there is nothing to choose, and copies cost."""
    if torch.compiler.is_compiling() or (is_transformed() and lanes() is None):
        return False
    stacked, _ = below_lanes(condition)
    with outside_lanes():
        return _may_look(stacked) and bool(stacked.all())


def _may_look(value: Tensor) -> bool:
    """Is reading a value free, and does it have one? Not on a GPU, and not where fake tensors stand in."""
    return value.device.type == "cpu" and torch._C._len_torch_dispatch_stack() == 0


def sqrt(x: Tensor) -> Tensor:
    """Return the square root, with derivative zero, not infinity, at zero.

    The guard costs a few operations, and is there only where ``x`` is being differentiated or traced.
    """
    if not _is_differentiated(x):
        return torch.sqrt(x)
    zero = x == 0
    return torch.where(zero, 0.0, torch.sqrt(torch.where(zero, 1.0, x)))


def _is_differentiated(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return True
    if functorch.is_gradtrackingtensor(x):
        return True
    return functorch.is_batchedtensor(x) and _is_differentiated(functorch.get_unwrapped(x))


# --- reductions ------------------------------------------------------------------------------------------------------


def norm(tree: Tree, order: float = 2.0) -> Tensor:
    """Return the norm of all leaves together: 0-d float64, no overflow on the way."""
    peak, relative = norm_parts(tree, order)
    return peak * relative


def all_finite(tree: Tree) -> Tensor:
    """Return a 0-d bool: is every entry of every leaf finite?"""
    peak, relative = norm_parts(tree)
    return torch.isfinite(peak) & torch.isfinite(relative)


def norm_parts(tree: Tree, order: float = 2.0) -> tuple[Tensor, Tensor]:
    r"""Return ``(peak, relative)``, 0-d float64, whose product is the norm; both finite if all leaves are.

    The norm is :math:`(\sum |x|^p)^{1/p}` with ``order`` p, the Euclidean one by default, and the largest entry where
    it is ``inf``. Squares of float32 and half fit into float64, so ``peak`` is 1 there. Otherwise leaves are divided
    by their largest entry first: the norm itself may lie outside float64.
    """
    columns = [leaf for leaf in leaves(tree) if leaf.numel() and leaf.is_floating_point()]
    device = columns[0].device if columns else None
    one = torch.ones((), dtype=torch.float64, device=device)
    if order == math.inf:
        return one, _peak(columns) if columns else torch.zeros_like(one)
    peak = one
    if order != 2.0 or any(leaf.dtype == torch.float64 for leaf in columns):
        peak = _peak([leaf.detach() for leaf in columns]) if columns else one
        peak = torch.where(peak == 0, 1.0, peak)
        columns = [leaf.double() / peak for leaf in columns]
    if order == 2.0:
        return peak, sqrt(_sum_of_squares(columns))
    return peak, _root(sum((_sum_of_powers(leaf, order) for leaf in columns), torch.zeros_like(one)), order)


def _peak(columns: list[Tensor]) -> Tensor:
    return torch.stack([leaf.abs().amax().double() for leaf in columns]).amax()


def _sum_of_powers(leaf: Tensor, order: float) -> Tensor:
    size = leaf.abs()
    return size.sum() if order == 1.0 else (size**order).sum()


def _root(total: Tensor, order: float) -> Tensor:
    """Return the p-th root, with derivative zero at zero."""
    zero = total == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, total) ** (1.0 / order))


def _sum_of_squares(columns: list[Tensor]) -> Tensor:
    level = lanes()
    found = [below_lanes(leaf) if level is not None else (leaf, False) for leaf in columns]
    traced = torch.compiler.is_compiling() or (level is None and is_transformed())
    if not columns or traced or _any_differentiable([[x for x, _ in found]]):
        return sum((leaf.double().square().sum() for leaf in columns), torch.zeros((), dtype=torch.float64))
    with outside_lanes():
        total = _squares_of_rows([x.reshape(x.shape[0] if laned else 1, -1) for x, laned in found])
    laned = any(laned for _, laned in found)
    return above_lanes(total, level) if laned and level is not None else total.squeeze(0)


def _squares_of_rows(leaves: list[Tensor]) -> Tensor:
    """Return the sum of squares of every row, over all leaves, in float64: by float32 where that is exact enough."""

    lane_count = max(rows.shape[0] for rows in leaves)

    def stacked(columns: list[Tensor]) -> Tensor:
        return torch.stack([column.expand(lane_count) for column in columns])

    def exactly() -> Tensor:
        return stacked([rows.double().square().sum(1) for rows in leaves])

    if any(rows.dtype != torch.float32 or not _may_look(rows) or not _block(rows.shape[1]) for rows in leaves):
        return exactly().sum(0)
    blocks = [rows.reshape(rows.shape[0], -1, _block(rows.shape[1])) for rows in leaves]
    norms = [torch.linalg.vector_norm(block, dim=2) for block in blocks]  # ten times as fast as in float64
    squares = stacked([norm.double().square().sum(1) for norm in norms])
    safe = (squares > 1e-30) & (squares < 1e36)  # no square overflowed, and what underflowed does not count
    return (squares if bool(safe.all()) else torch.where(safe, squares, exactly())).sum(0)


def _block(length: int) -> int:
    """Return how many entries float32 may sum at a time, within a few ulps: a divisor of the length; 0 for none."""
    block = length if length <= 1024 else math.gcd(length, 1024)
    return block if block * 64 >= length or block >= 64 else 0
