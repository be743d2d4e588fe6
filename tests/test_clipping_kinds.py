"""Clipping: PyTorch's numbers to the bit where they are asked for, the right ones otherwise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same, lane, odd_trees
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import functricks as F

INF = math.inf
ORDERS = [1.0, 2.0, 3.0, INF]


def apply(clip: F.Transform, grads: Any, params: Any = None) -> Any:
    params = grads if params is None else params
    return clip.update(grads, clip.init(params), params)[0]


def classic(grads: dict[str, Tensor], max_norm: float, order: float) -> dict[str, Tensor]:
    leaves = {name: nn.Parameter(torch.zeros_like(leaf)) for name, leaf in grads.items()}
    for name, leaf in leaves.items():
        leaf.grad = grads[name].clone()
    clip_grad_norm_(leaves.values(), max_norm, order)
    return {name: leaf.grad for name, leaf in leaves.items()}  # type: ignore[misc]


def some(dtype: torch.dtype, size: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (size * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in {"w": (7, 5), "b": (13,), "s": ()}.items()
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", [*ORDERS, 0.5])
@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1.0, 1e3, INF])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_classic_is_clip_grad_norm_to_the_bit(dtype: torch.dtype, order: float, max_norm: float, size: float) -> None:
    grads = some(dtype, size)
    found = apply(F.clip_by_global_norm(max_norm, norm_type=order, classic=True), grads)
    assert_same(found, classic(grads, max_norm, order))


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, INF])
def test_classic_with_leaves_of_several_dtypes(order: float) -> None:
    """PyTorch sums dtype by dtype, in an order that it does not promise: in that order it is the same to the bit."""
    dtypes = [torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.float32, torch.float16]
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        grads = {f"p{i}": torch.randn(5 + i, generator=generator).to(dtype) for i, dtype in enumerate(dtypes)}
        groups = [key[1] for key in torch._C._group_tensors_by_device_and_dtype([list(grads.values())], False)]
        grouped = dict(sorted(grads.items(), key=lambda item: groups.index(item[1].dtype)))
        clip, expected = F.clip_by_global_norm(0.3, norm_type=order, classic=True), classic(grads, 0.3, order)
        found = apply(clip, grouped)
        assert_same({path: found[path] for path in grads}, expected)
        assert_close(apply(clip, grads), expected, eps=2)


def test_classic_keeps_what_is_odd_about_it() -> None:
    """Field case C30d: 1e-6 in the denominator shrinks what is not too long; infinite gradients become NaN."""
    tiny = {"w": torch.tensor([6e-7, 8e-7])}
    assert_close(apply(F.clip_by_global_norm(1e-6, classic=True), tiny)["w"], torch.tensor([3e-7, 4e-7]))
    assert_close(apply(F.clip_by_global_norm(1e-6), tiny)["w"], tiny["w"])
    endless = {"w": torch.tensor([INF, 1.0])}
    assert_same(apply(F.clip_by_global_norm(1.0, classic=True), endless), classic(endless, 1.0, 2.0))
    assert_same(apply(F.clip_by_global_norm(1.0), endless), endless)


def test_error_if_nonfinite_is_a_value() -> None:
    for kind in (True, False):
        clip = F.clip_by_global_norm(1.0, classic=kind, error_if_nonfinite=True)
        state = clip.init({})
        for value, count in ((1.0, 0), (math.nan, 1), (2.0, 1), (INF, 2)):
            _, state = clip.update({"w": torch.tensor(value)}, state, {})
            assert state.nonfinite == count
    leaf = nn.Parameter(torch.zeros(()))
    leaf.grad = torch.tensor(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([leaf], 1.0, error_if_nonfinite=True)
    assert F.clip_by_global_norm(1.0).init({}) == ()


def test_error_if_nonfinite_by_lane() -> None:
    clip = F.clip_by_global_norm(1.0, error_if_nonfinite=True)
    found = torch.vmap(lambda g: clip.update({"w": g}, clip.init({}), {})[1].nonfinite)(torch.tensor([1.0, INF, 2.0]))
    assert_same(found, torch.tensor([0, 1, 0]))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1e-300, 1e-160, 1.0, 1e160, 1e300])
def test_any_size_keeps_its_direction(order: float, size: float) -> None:
    direction = torch.tensor([3.0, -4.0, 0.5], dtype=torch.float64)
    found = apply(F.clip_by_global_norm(size / 10, norm_type=order), {"a": direction * size})["a"]
    expected = direction / torch.linalg.vector_norm(direction, order) * (size / 10)
    torch.testing.assert_close(found / size, expected / size, rtol=1e-13, atol=0)
    assert_same(
        apply(F.clip_by_global_norm(size * 100, norm_type=order), {"a": direction * size})["a"], direction * size
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1e-323, 3e-310, 1e-300, 1.0, 1e300, 1.7e308])
def test_a_bound_of_zero_makes_zero_of_any_size(order: float, size: float) -> None:
    grads = {"a": torch.tensor([1.0, -0.5], dtype=torch.float64) * size}
    assert_same(apply(F.clip_by_global_norm(0.0, norm_type=order), grads)["a"], torch.zeros(2, dtype=torch.float64))
    assert_same(apply(F.clip_by_leaf_norm(0.0), grads)["a"], torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("order", ORDERS)
def test_subnormal_gradients_keep_their_direction(order: float) -> None:
    """One over a subnormal norm is infinite in float64."""
    grads = {"a": torch.tensor([3e-310, -4e-310], dtype=torch.float64)}
    direction = torch.tensor([3.0, -4.0], dtype=torch.float64)
    found = apply(F.clip_by_global_norm(1e-310, norm_type=order), grads)["a"] / 1e-310
    torch.testing.assert_close(found, direction / torch.linalg.vector_norm(direction, order), rtol=1e-11, atol=0)


UNITS = torch.tensor([[3.0, -4.0], [0.6, 0.8]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 1.6e4), (torch.bfloat16, 8e37), (torch.float32, 8e37), (torch.float32, 1e-37),
     (torch.float64, 4e307), (torch.float64, 1e-300), (torch.float64, 1e-310), (torch.float64, 1.0)],
)  # fmt: skip
def test_leaves_and_units_of_any_size_keep_their_direction(dtype: torch.dtype, size: float) -> None:
    """The bound is a tenth of the norm, and for whole leaves 1 as well where the norm is more."""
    eps = 1e-12 if size == 1e-310 else 8 * torch.finfo(dtype).eps  # a subnormal number has fewer digits
    leaf = (UNITS * size).to(dtype)
    bound = 0.1 * size
    direction = leaf.double() / size / (leaf.double() / size).norm()
    for limit in {bound, min(1.0, bound)}:
        found = apply(F.clip_by_leaf_norm(limit), {"w": leaf})["w"]
        torch.testing.assert_close(found.double() / limit, direction, rtol=eps, atol=eps)
    weights = {"w": (torch.tensor([[1.0, 0.0], [0.0, 0.1]], dtype=torch.float64) * size).to(dtype)}
    found = apply(F.adaptive_clip(0.5, eps=0.0), {"w": leaf}, weights)["w"].double() / size
    expected = torch.tensor([[0.3, -0.4], [0.03, 0.04]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=eps, atol=eps)


@pytest.mark.parametrize("make", [F.clip_by_leaf_norm, F.adaptive_clip])
@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_nonfinite_leaves_pass_for_the_check_to_see(make: Any, bad: float) -> None:
    """Only the leaf, or the unit, that is not finite; its neighbours are clipped."""
    grads = {"bad": torch.tensor([3.0, bad]), "good": torch.tensor([30.0, 40.0])}
    found = apply(make(0.5), grads, {"bad": torch.ones(2), "good": torch.tensor([0.6, 0.8])})
    assert_same(found["bad"], grads["bad"])
    assert_close(found["good"], torch.tensor([0.3, 0.4]))


@pytest.mark.parametrize("options", [{}, {"classic": True}, {"norm_type": INF}])
def test_a_generator_is_no_tree(options: Any) -> None:
    """Field case C30a: PyTorch clips nothing, and says nothing, where it was used up before."""
    used_up = (leaf for leaf in [torch.tensor(3.0), torch.tensor(4.0)])
    list(used_up)
    for given in (used_up, (leaf for leaf in [torch.tensor(3.0)])):
        with pytest.raises(TypeError, match="must be a tensor or a dict, tuple or list of tensors, got generator"):
            apply(F.clip_by_global_norm(1.0, **options), given)


@pytest.mark.parametrize(
    ("grads", "bound", "order", "expected"),
    [
        ({"a": [0.0, 0.0], "b": []}, 0.0, INF, {"a": [0.0, 0.0], "b": []}),
        ({"a": [], "b": [-5.0], "c": []}, 2.0, 1.0, {"a": [], "b": [-2.0], "c": []}),
        ({"a": [2.0], "b": [-2.0, 1.0]}, 1.0, 1.0, {"a": [0.4], "b": [-0.4, 0.2]}),
        ({"a": [2.0, -8.0], "b": [4.0]}, 2.0, INF, {"a": [0.5, -2.0], "b": [1.0]}),
        ({"a": [3e-7, 4e-7]}, 5e-7, 2.0, {"a": [3e-7, 4e-7]}),
        ({"a": [6e-9, 8e-9]}, 1e-9, 2.0, {"a": [6e-10, 8e-10]}),
        ({}, 1.0, INF, {}),
    ],
)
def test_cases_like_c30(grads: Any, bound: float, order: float, expected: Any) -> None:
    found = apply(F.clip_by_global_norm(bound, norm_type=order), {k: torch.tensor(v) for k, v in grads.items()})
    assert_close(found, {path: torch.tensor(leaf) for path, leaf in expected.items()})


def test_large_float32_and_half() -> None:
    found = apply(F.clip_by_global_norm(1.0), {"w": torch.tensor([3e38, 3e38])})["w"]
    assert_close(found, torch.tensor([0.5**0.5, 0.5**0.5]))
    half = torch.full((100,), 60000.0, dtype=torch.float16)
    assert_same(apply(F.clip_by_global_norm(1.0), {"w": half})["w"], torch.full((100,), 0.1, dtype=torch.float16))


@pytest.mark.parametrize("order", ORDERS)
def test_empty_and_zero(order: float) -> None:
    """Field case C30b and c."""
    clip = F.clip_by_global_norm(1.0, norm_type=order)
    grads = {"none": torch.zeros(0), "some": torch.tensor([3.0])}
    assert_close(apply(clip, grads), {"none": torch.zeros(0), "some": torch.tensor([1.0])})
    assert apply(clip, {}) == {}
    for bound in (0.0, 1.0):
        zero = {"w": torch.zeros(2)}
        for kind in (
            F.clip_by_global_norm(bound, norm_type=order),
            F.clip_by_leaf_norm(bound),
            F.adaptive_clip(bound),
            F.clip_by_value(bound),
        ):
            assert_same(apply(kind, zero), zero)
    assert_same(apply(F.clip_by_global_norm(0.0, norm_type=order), grads)["some"], torch.zeros(1))


@pytest.mark.parametrize(
    "clip", [F.clip_by_value(0.1), F.clip_by_leaf_norm(0.1), F.adaptive_clip(), F.clip_by_global_norm(0.1)]
)
def test_odd_trees_keep_their_form(clip: F.Transform) -> None:
    for tree in odd_trees(torch.float32).values():
        found = F.tree.named_leaves(apply(clip, tree))
        for path, leaf in F.tree.named_leaves(tree).items():
            assert (found[path].shape, found[path].dtype) == (leaf.shape, leaf.dtype)


def test_value_is_clip_grad_value_() -> None:
    grads = some(torch.float32)
    leaves = {name: nn.Parameter(torch.zeros_like(leaf)) for name, leaf in grads.items()}
    for name, leaf in leaves.items():
        leaf.grad = grads[name].clone()
    clip_grad_value_(leaves.values(), 0.5)
    assert_same(apply(F.clip_by_value(0.5), grads), {name: leaf.grad for name, leaf in leaves.items()})
    assert math.isnan(apply(F.clip_by_value(0.5), {"w": torch.tensor(math.nan)})["w"])


def test_leaf_norm_is_the_global_norm_of_every_leaf() -> None:
    grads = some(torch.float64)
    found = apply(F.clip_by_leaf_norm(0.7), grads)
    for name, leaf in grads.items():
        assert_close(found[name], apply(F.clip_by_global_norm(0.7), {"one": leaf})["one"])
    nan = {"a": torch.tensor([math.nan, 1.0]), "b": torch.tensor([3.0, 4.0])}
    assert_close(apply(F.clip_by_leaf_norm(1.0), nan)["b"], torch.tensor([0.6, 0.8]))
    assert_same(apply(F.clip_by_leaf_norm(1.0), nan)["a"], nan["a"])


def unit_norm(x: Tensor) -> Tensor:
    return x.norm() if x.ndim < 2 else x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.ndim - 1))


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (4, 3, 2, 2)])
def test_adaptive_clip_is_the_paper(shape: tuple[int, ...]) -> None:
    """Equation 3 of arXiv:2102.06171, a unit at a time."""
    generator = torch.Generator().manual_seed(2)
    params = torch.randn(shape, generator=generator, dtype=torch.float64)
    grads = torch.randn(shape, generator=generator, dtype=torch.float64)
    limit = 0.3 * unit_norm(params).clamp(min=0.5)
    length = unit_norm(grads)
    expected = torch.where(length > limit, grads * limit / length, grads)
    assert_close(apply(F.adaptive_clip(0.3, eps=0.5), {"w": grads}, {"w": params})["w"], expected)


@pytest.mark.parametrize("make", [F.clip_by_global_norm, F.clip_by_leaf_norm, F.clip_by_value, F.adaptive_clip])
def test_bounds_by_lane(make: Any) -> None:
    grads, params, bounds = some(torch.float32), some(torch.float32, 3.0), torch.tensor([0.1, 1.0, 1000.0])
    found = torch.vmap(lambda bound: apply(make(bound), grads, params))(bounds)
    for i in range(3):
        assert_close(lane(found, i), apply(make(bounds[i].item()), grads, params))


def test_clipping_before_unscaling_cannot_happen() -> None:
    """Field case C26: the true gradient has norm 0.5, the scaled one 512."""
    loss = lambda params, _: (params["w"] * torch.tensor([0.3, 0.4])).sum()  # noqa: E731
    found = F.gradient(loss)({"w": torch.zeros(2)}, (), scale=1024.0)
    assert_close(apply(F.clip_by_global_norm(1.0), found.grads)["w"], torch.tensor([0.3, 0.4]))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: F.clip_by_global_norm(-1.0), "max_norm must be >= 0"),
        (lambda: F.clip_by_global_norm(1.0, norm_type=0.5), "norm_type must be >= 1, or inf"),
        (lambda: F.clip_by_value(-1.0), "bound must be >= 0"),
        (lambda: F.clip_by_leaf_norm(-1.0), "max_norm must be >= 0"),
        (lambda: F.adaptive_clip(-1.0), "clipping must be >= 0"),
        (lambda: F.adaptive_clip(eps=-1.0), "eps must be >= 0"),
    ],
)
def test_bad_arguments(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


# --- complex leaves, extreme bounds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_complex_leaves_count_in_the_norm(order: float) -> None:
    close = torch.testing.assert_close
    grads = {"z": torch.tensor([3 + 4j, 0j]), "w": torch.tensor([12.0])}
    found = apply(F.clip_by_global_norm(1.0, norm_type=order), grads)
    close(found, classic(grads, 1.0, order), rtol=2e-6, atol=0)  # which adds 1e-6 to the norm
    lanes = {path: torch.stack([leaf, 2 * leaf]) for path, leaf in grads.items()}
    mapped = torch.vmap(lambda g: apply(F.clip_by_global_norm(1.0, norm_type=order), g))(lanes)
    close(lane(mapped, 1), found)
    close(apply(F.clip_by_leaf_norm(1.0), grads), {"z": torch.tensor([0.6 + 0.8j, 0]), "w": torch.ones(1)})
    half_of_its_own = apply(F.adaptive_clip(0.5), grads, {"z": torch.tensor([0j, 5]), "w": torch.tensor([12.0])})
    close(half_of_its_own, {"z": torch.tensor([1.5 + 2j, 0]), "w": torch.tensor([6.0])})


def test_a_bound_beyond_the_dtype_clips_nothing() -> None:
    for dtype, bound in ((torch.float16, 1e6), (torch.bfloat16, 1e39), (torch.float32, 1e40)):
        grads = {"w": torch.tensor([3.0, -60000.0, math.nan, -math.inf], dtype=dtype)}
        assert_same(apply(F.clip_by_value(bound), grads), grads)
        lanes = {"w": torch.stack([grads["w"]] * 2)}
        assert_same(torch.vmap(lambda g, b=bound: apply(F.clip_by_value(b), g))(lanes), lanes)
    mixed = {"half": torch.tensor([9.0], dtype=torch.float16), "wide": torch.tensor([2e6])}
    assert apply(F.clip_by_value(1e6), mixed)["wide"] == 1e6


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e37])
def test_adaptive_clip_of_huge_gradients_keeps_their_direction(size: float) -> None:
    """By a factor in float32, which is subnormal here, it lost all but two digits."""
    shape = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    found = apply(F.adaptive_clip(1e-4), {"w": shape * size}, {"w": torch.zeros(2, 3)})["w"]
    right = 1e-7 * shape / shape.norm(dim=1, keepdim=True)
    torch.testing.assert_close(found, right, rtol=3e-7, atol=0)
