"""Clipping by the global norm: PyTorch to the bit, or right for gradients of every size."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from helpers import (
    FLOAT16_EPS,
    assert_close,
    assert_half_close,
    assert_same,
    lane,
    nonzero_like,
    odd_trees,
    stack,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functricks import clip_by_global_norm
from functricks.types import Empty

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def clip(grads: Any, max_norm: Any, **options: Any) -> Any:
    transform = clip_by_global_norm(max_norm, **options)
    clipped, state = transform.update(grads, transform.init(grads), grads)
    assert state == Empty()
    return clipped


def by_torch(grads: dict[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    """clip_grad_norm_ on parameters with copies of these gradients."""
    params = []
    for grad in grads.values():
        params.append(torch.nn.Parameter(torch.zeros_like(grad)))
        params[-1].grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    return {name: p.grad for name, p in zip(grads, params, strict=True)}


def tree_of(dtype: torch.dtype, size: float) -> dict[str, Tensor]:
    made = {
        "weight": torch.empty(7, 5, dtype=dtype),
        "bias": torch.empty(5, dtype=dtype),
        "a": torch.empty((), dtype=dtype),
    }
    return {name: leaf * size for name, leaf in nonzero_like(made, 1).items()}


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("max_norm", [1e-6, 0.1, 1.0, 6.3, 1e4, math.inf])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_classic_is_clip_grad_norm_to_the_bit(size: float, max_norm: float, dtype: torch.dtype) -> None:
    grads = tree_of(dtype, size)
    expected = by_torch(grads, max_norm)
    assert_same(clip(grads, max_norm, classic=True), expected)
    if dtype in (F32, F64):  # torch divides a number by a tensor as number * (1 / tensor), a tensor by a tensor at once
        assert_close(clip(grads, torch.tensor(max_norm, dtype=dtype), classic=True), expected)


def test_classic_with_odd_gradients_is_clip_grad_norm_too() -> None:
    """Zero, tiny (C30 d), a zero-element leaf, overflow, NaN."""
    cases = [
        {"a": torch.zeros(2)},
        {"a": torch.tensor([6e-7, 8e-7])},
        {"a": torch.zeros(0), "b": torch.tensor([3.0])},
        {"a": torch.full((3,), 3e38)},
        {"a": torch.full((3,), 6e4, dtype=F16)},
        {"a": torch.tensor([1.0, math.nan]), "b": torch.ones(1)},
        {"a": torch.tensor([1.0, math.inf]), "b": torch.ones(1)},
    ]
    for grads in cases:
        for max_norm in (0.0, 1e-6, 1.0):
            assert_same(clip(grads, max_norm, classic=True), by_torch(grads, max_norm))
    tiny = clip({"a": torch.tensor([6e-7, 8e-7])}, 1e-6, classic=True)["a"]
    assert_close(tiny, torch.tensor([3e-7, 4e-7]))


@given(
    sizes=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6),
    max_norm=st.floats(0, 100, allow_subnormal=False),
)
def test_classic_for_any_numbers(sizes: list[float], max_norm: float) -> None:
    grads = {"a": torch.tensor(sizes), "b": torch.tensor(sizes[:1])}
    assert_same(clip(grads, max_norm, classic=True), by_torch(grads, max_norm))


@pytest.mark.parametrize("classic", [False, True])
def test_a_norm_below_the_bound_changes_nothing(classic: bool) -> None:
    grads = {"a": torch.tensor([0.3]), "b": torch.tensor([0.4])}
    assert_same(clip(grads, 1.0, classic=classic), grads)
    assert_same(clip(grads, math.inf, classic=classic), grads)
    assert_same(clip(grads, 0.5000001, classic=False), grads)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_the_result_has_the_length_of_the_bound_and_the_direction_of_the_gradient(dtype: torch.dtype) -> None:
    grads = {"a": torch.tensor([30.0], dtype=dtype), "b": torch.tensor([[-40.0]], dtype=dtype)}
    expected = {"a": torch.tensor([1.5], dtype=F64), "b": torch.tensor([[-2.0]], dtype=F64)}
    assert_half_close(clip(grads, 2.5), expected, FLOAT16_EPS)
    assert_half_close(clip(grads, torch.tensor(2.5)), expected, FLOAT16_EPS)


@pytest.mark.parametrize("name", odd_trees(F32))
def test_odd_trees(name: str) -> None:
    grads = odd_trees(F32)[name]
    found = clip(grads, 0.5)
    entries = [leaf.double().reshape(-1) for leaf in torch.utils._pytree.tree_leaves(grads)]
    norm = torch.cat([torch.zeros(1, dtype=F64), *entries]).norm()
    expected = torch.utils._pytree.tree_map(lambda leaf: leaf * min(1.0, 0.5 / max(norm.item(), 1e-9)), wide(grads))
    assert_half_close(found, expected, 8)  # one step in another order


@pytest.mark.parametrize(
    ("grads", "max_norm"),
    [
        ([3e38, -3e38, 1e38], 1.0),  # the squares and the norm overflow in float32
        ([3e38, -3e38, 1e38], 1e30),
        ([1e30, 1e20], 1e-3),
        ([3e-30, 4e-30], 1e-30),  # the squares underflow
    ],
)
def test_float32_of_any_size_keeps_its_direction(grads: list[float], max_norm: float) -> None:
    found = clip({"a": torch.tensor(grads)}, max_norm)["a"].double()
    expected = torch.tensor(grads).double()
    expected *= max_norm / expected.norm()
    # the factor, 1 / 4e38, is subnormal in float32, where 2**-149 is a last place: 19 bits are left of it
    allowed = 1e-6 if max_norm / torch.tensor(grads).double().norm() > 1e-37 else 2**-18
    assert (found - expected).norm() <= allowed * max_norm


@pytest.mark.parametrize("size", [1e308, 1e200, 1e-200, 1e-307])
def test_float64_of_any_size_keeps_its_direction(size: float) -> None:
    direction = torch.tensor([0.6, -0.8], dtype=F64)
    max_norm = 1.0 if size > 1 else size / 4
    found = clip({"a": direction * size}, max_norm)["a"]
    torch.testing.assert_close(found / max_norm, direction, rtol=1e-13, atol=0)
    if size > 1:  # 1e308 * sqrt(2) is beyond float64
        both = clip({"a": torch.tensor([size, size], dtype=F64)}, 1.0)["a"]
        torch.testing.assert_close(both, torch.full((2,), 0.5, dtype=F64).sqrt(), rtol=1e-13, atol=0)


def test_half_does_not_overflow() -> None:
    found = clip({"a": torch.full((4,), 6e4, dtype=F16)}, 1.0)["a"]
    assert_half_close(found, torch.full((4,), 0.5, dtype=F64), FLOAT16_EPS)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_gradients_pass_unchanged(bad: float, max_norm: float, dtype: torch.dtype) -> None:
    grads = {"a": torch.tensor([1.0, bad, 50.0], dtype=dtype), "b": torch.full((2,), 70.0, dtype=dtype)}
    assert_same(clip(grads, max_norm), grads)


def test_zero_stays_zero_and_a_bound_of_zero_makes_zero() -> None:
    for max_norm in (0.0, 1.0):
        assert_same(clip({"a": torch.zeros(2)}, max_norm), {"a": torch.zeros(2)})
    assert_same(clip({"a": torch.tensor([3.0, 4.0])}, 0.0), {"a": torch.zeros(2)})


@pytest.mark.parametrize("classic", [False, True])
def test_bounds_differ_by_lane(classic: bool) -> None:
    """One lane has NaN, one overflows, one is below its bound: each is as alone."""
    lanes = [
        {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[1.0]])},
        {"a": torch.tensor([3.0, math.nan]), "b": torch.tensor([[1.0]])},
        {"a": torch.tensor([3e38, 3e38]), "b": torch.tensor([[1.0]])},
        {"a": torch.tensor([0.3, 0.4]), "b": torch.tensor([[0.1]])},
    ]
    bounds = torch.tensor([1.0, 0.5, 2.0, 3.0])
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            found = torch.vmap(lambda grads, bound: clip(grads, bound, classic=classic))(stack(lanes), bounds)
        for i, grads in enumerate(lanes):
            assert_close(lane(found, i), clip(grads, bounds[i], classic=classic))


def test_gradients_are_not_written_to() -> None:
    grads = {"a": torch.tensor([3.0, 4.0])}
    before = copy.deepcopy(grads)
    clip(grads, 1.0)
    clip(grads, 1.0, classic=True)
    assert_same(grads, before)


@pytest.mark.parametrize(
    ("max_norm", "error", "match"),
    [
        (-1.0, ValueError, "clip_by_global_norm: max_norm must be >= 0, got -1.0"),
        (math.nan, ValueError, "clip_by_global_norm: max_norm must be >= 0, got nan"),
        ("1", TypeError, "clip_by_global_norm: max_norm must be a number"),
        (True, TypeError, "clip_by_global_norm: max_norm must be a number"),
        (lambda step: 1.0, TypeError, "clip_by_global_norm: max_norm must be a number"),
    ],
)
def test_bad_bounds(max_norm: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        clip_by_global_norm(max_norm)


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, math.inf, -math.inf, -1.0])
def test_empty_leaves_play_no_part(norm_type: float) -> None:
    """Field case C30 b: PyTorch raises for an empty leaf under the infinity norm, and so did ``classic``."""
    full = {"w": torch.tensor([3.0, 4.0])}
    empty = {"e": torch.zeros(0), "f": torch.zeros(3, 0)}
    for classic in (True, False) if norm_type >= 1 else (True,):
        options = {"norm_type": norm_type, "classic": classic}
        expected = clip(full, 0.5, **options)
        assert expected["w"][0] < 3.0
        assert_same(clip({**empty, **full}, 0.5, **options), {**empty, **expected})
        assert_same(clip(empty, 0.5, **options), empty)
        assert clip({}, 0.5, **options) == {}
        lanes = {name: torch.stack([leaf, leaf]) for name, leaf in ({**empty, **full}).items()}
        per_lane = torch.vmap(lambda grads, c, options=options: clip(grads, c, **options))(lanes, torch.full((2,), 0.5))
        assert_same(lane(per_lane, 1), {**empty, **expected})


@pytest.mark.parametrize("size", [5e-324, 2.8e-309, 2.3e-308, 1e-300])
@pytest.mark.parametrize("max_norm", [0.0, 5e-324, 1e-310, 1e-301])
def test_the_smallest_gradients_have_a_direction(size: float, max_norm: float) -> None:
    """One over them is infinite in float64."""
    grads = {"w": torch.tensor([size, 0.0, -size], dtype=F64)}
    expected = min(size, max_norm / 2**0.5)
    gap = (clip(grads, max_norm)["w"] - torch.tensor([expected, 0.0, -expected], dtype=F64)).abs().max()
    assert gap <= max(8 * torch.finfo(F64).eps * expected, 1e-323)
