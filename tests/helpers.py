"""What the tests compare with: one table of tolerances, comparisons over trees, and a corpus of odd trees.

Every comparison here can fail, and ``test_tree.py`` shows it: it moves one entry of one leaf by two tolerances. A
comparison of zeros with zeros proves nothing, so :func:`assert_nonzero` guards inputs and gradients.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BFLOAT16_EPS",
    "FLOAT16_EPS",
    "ONE_STEP_EPS",
    "RUN_F64",
    "Block",
    "LiveBytes",
    "assert_close",
    "assert_half_close",
    "assert_nonzero",
    "assert_run_close",
    "assert_same",
    "assert_untouched",
    "lane",
    "named",
    "nonzero_like",
    "odd_trees",
    "perturbed",
    "repeated",
    "stack",
    "tensors",
    "ulps",
    "wide",
]

# --- the table of tolerances (design.md, section 5) ------------------------------------------------------------------
# Same operations in the same order: assert_same, which is torch.equal and the dtype.
ONE_STEP_EPS = 8  # one step, another order of operations: eps of the dtype, relative to the leaf's largest entry
RUN_F64 = 1e-10  # a run of N steps in float64: relative to the displacement from the start
FLOAT16_EPS = 2  # half precision, against a float64 reference: one rounding of the result is 0.5 eps, a few are 2
BFLOAT16_EPS = 2


# --- trees, by PyTorch's own pytree, so that functricks.tree is not its own judge ------------------------------------


def named(tree: Any) -> dict[str, Any]:
    """Every leaf by PyTorch's own name for its place."""
    return {_pytree.keystr(path): leaf for path, leaf in _pytree.tree_flatten_with_path(tree)[0]}


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in named(tree).values() if isinstance(leaf, Tensor)]


def _pairs(actual: Any, expected: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    got, want = named(actual), named(expected)
    if got.keys() != want.keys():
        raise AssertionError(
            f"trees differ: only in actual {got.keys() - want.keys()}, only in expected {want.keys() - got.keys()}"
        )
    shapes = [_pytree.tree_structure(tree) for tree in (actual, expected)]
    if shapes[0] != shapes[1]:
        raise AssertionError(f"containers differ: {shapes[0]} and {shapes[1]}")
    for path, leaf in want.items():
        a, b = torch.as_tensor(got[path]), torch.as_tensor(leaf)
        if a.shape != b.shape:
            raise AssertionError(f"{path}: shape {tuple(a.shape)}, expected {tuple(b.shape)}")
        yield path, a, b


def _check_dtype(path: str, a: Tensor, b: Tensor) -> None:
    if a.dtype != b.dtype:
        raise AssertionError(f"{path}: dtype {a.dtype}, expected {b.dtype}")


def assert_same(actual: Any, expected: Any) -> None:
    """Equal to the bit but for the sign of zero and the payload of NaN; same structure, shapes and dtypes."""
    for path, a, b in _pairs(actual, expected):
        _check_dtype(path, a, b)
        if not torch.equal(torch.nan_to_num(a, 0, 1, -1), torch.nan_to_num(b, 0, 1, -1)) or not all(
            torch.equal(is_odd(a), is_odd(b)) for is_odd in (torch.isnan, torch.isposinf, torch.isneginf)
        ):
            gap = (a.double() - b.double()).abs().max() if a.numel() else 0
            raise AssertionError(f"{path}: not equal, largest difference {gap}\n{a}\n{b}")


def assert_close(actual: Any, expected: Any, eps: float = ONE_STEP_EPS, at_least: float = 0.0) -> None:
    """Within ``eps`` eps of the leaf's dtype, relative to the leaf's largest entry; integers and bools are equal.

    ``at_least`` is the size that a leaf counts as at least: that of the terms where a difference of them is compared.
    """
    for path, a, b in _pairs(actual, expected):
        _check_dtype(path, a, b)
        if not b.is_floating_point():
            assert_same({path: a}, {path: b})
            continue
        _within(path, a, b, eps * torch.finfo(b.dtype).eps, at_least)


def assert_half_close(actual: Any, reference: Any, eps: float) -> None:
    """Within ``eps`` eps of the actual leaf's (half) dtype from a float64 reference."""
    for path, a, b in _pairs(actual, reference):
        if b.dtype != torch.float64:
            raise AssertionError(f"{path}: the reference must be float64, got {b.dtype}")
        _within(path, a, b, eps * torch.finfo(a.dtype).eps)


def _within(path: str, a: Tensor, b: Tensor, relative: float, at_least: float = 0.0) -> None:
    a, b = a.detach().double(), b.detach().double()
    finite = torch.isfinite(b)
    assert_same({path: torch.where(finite, 0, a)}, {path: torch.where(finite, 0, b)})
    a, b = a[finite], b[finite]
    if not a.numel():
        return
    gap, size = (a - b).abs().max().item(), max(at_least, b.abs().max().item())
    if not gap <= relative * size:
        raise AssertionError(f"{path}: off by {gap:.3g}, allowed {relative * size:.3g}")


def assert_run_close(actual: Any, expected: Any, start: Any, relative: float = RUN_F64) -> None:
    """The displacements from the start agree, as vectors, leaf by leaf; a leaf that did not move proves nothing."""
    starts = named(start)
    for path, a, b in _pairs(actual, expected):
        origin = starts[path].double()
        moved = (b.double() - origin).norm().item()
        if b.numel() and not 0 < moved < math.inf:
            raise AssertionError(f"{path}: the expected run moved by {moved}; nothing to compare with")
        gap = (a.double() - b.double()).norm().item()
        if not gap <= relative * moved:
            raise AssertionError(f"{path}: displacement off by {gap / moved:.3g}, allowed {relative:.3g}")


def ulps(actual: Any, expected: Any) -> float:
    """The largest distance in units in the last place of the expected entry, over all leaves."""
    worst = 0.0
    for path, a, b in _pairs(actual, expected):
        _check_dtype(path, a, b)
        if b.numel():
            last_place = torch.nextafter(b.abs(), torch.full_like(b, math.inf)) - b.abs()
            worst = max(worst, ((a - b).abs() / last_place).max().item())
    return worst


def assert_nonzero(*trees: Any) -> None:
    """Every floating-point leaf with elements has a finite, non-zero entry."""
    for tree in trees:
        for path, leaf in named(tree).items():
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
                continue
            if not torch.isfinite(leaf).all() or not leaf.any():
                raise AssertionError(f"{path}: zero or not finite, so that comparing it proves little: {leaf}")


@contextmanager
def assert_untouched(*trees: Any) -> Iterator[None]:
    """Inside, no tensor of the trees is written to: neither its version nor its value changes."""
    before = [(leaf, leaf._version, leaf.detach().clone()) for tree in trees for leaf in tensors(tree)]
    yield
    for leaf, version, value in before:
        if leaf._version != version:
            raise AssertionError(f"an input was written to in place (version {version} -> {leaf._version})")
        assert_same(leaf.detach(), value)


# --- making trees ----------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A NamedTuple inside the odd trees."""

    weight: Any
    bias: Any


def _tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of size 0.5 to 1.5, of both signs, that no rounding turns into zero."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    sign = 1.0 - 2.0 * torch.randint(0, 2, shape, generator=generator)
    return (size * sign).to(dtype)


def nonzero_like(tree: Any, seed: int) -> Any:
    """A tree of the same structure, shapes, dtypes and strides, with new entries."""
    counter = iter(range(1000 * (seed + 1), 1000 * (seed + 2)))
    return _pytree.tree_map(
        lambda leaf: torch.empty_like(leaf).copy_(_tensor(next(counter), tuple(leaf.shape), leaf.dtype)), tree
    )


def odd_trees(dtype: torch.dtype) -> dict[str, Any]:
    """Trees that break careless code; leaves are of ``dtype`` where the name does not say otherwise."""

    def make(seed: int, *shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return _tensor(seed, shape, dtype)

    return {
        "empty": {},
        "empty-nested": {"a": {}, "b": ((), [])},
        "leaf": make(0, 3),
        "scalars": {"z": make(1), "a": make(2)},
        "nested": (
            Block(make(3, 2, 3), make(4, 2)),
            [make(5, 2), {"z": make(6, 1), "b": make(7), "a": (make(8, 3),)}],
        ),
        "unsorted": {"weight": make(9, 2, 2), "bias": make(10, 2), "alpha": make(11)},
        "zero-elements": {"none": make(12, 0, 3), "some": make(13, 2), "no": make(14, 0)},
        "mixed": {
            "half": make(15, 3, dtype=torch.float16),
            "wide": make(16, 2, dtype=torch.float64),
            "brain": make(17, 2, 2, dtype=torch.bfloat16),
            "half_scalar": make(18, dtype=torch.float16),
            "own": make(19, 2),
        },
        "strided": {"transposed": make(20, 3, 4).t(), "expanded": make(21, 1).expand(4), "sliced": make(22, 9)[::2]},
        "large": {"table": make(23, 65, 33), "vector": make(24, 1031)},
    }


def wide(tree: Any) -> Any:
    """The same tree in float64."""
    return _pytree.tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)


def stack(trees: list[Any]) -> Any:
    """One tree with a leading axis."""
    return _pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def lane(tree: Any, index: int) -> Any:
    """One lane of a stacked tree."""
    return _pytree.tree_map(lambda leaf: leaf[index], tree)


def repeated(function: Callable[[Any, int], Any], state: Any, steps: int) -> Any:
    """``state = function(state, i)``, ``steps`` times."""
    for i in range(steps):
        state = function(state, i)
    return state


def perturbed(tree: Any, path: str, amount: float) -> Any:
    """The tree with the largest entry of one leaf moved by ``amount``, relative to that entry."""
    leaves, structure = _pytree.tree_flatten(tree)
    index = list(named(tree)).index(path)
    leaf = leaves[index].clone(memory_format=torch.contiguous_format)
    flat = leaf.view(-1)
    flat[flat.abs().argmax()] *= 1 + amount
    return _pytree.tree_unflatten([*leaves[:index], leaf, *leaves[index + 1 :]], structure)


# --- memory -----------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """The largest number of bytes alive at once among tensors made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self.known or not size:
            return
        self.known.add(place)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, place, size)

    def _drop(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size
