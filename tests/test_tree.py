"""Walking, naming, selecting, arithmetic on trees, and the comparisons that all other tests rely on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import (
    BFLOAT16_EPS,
    FLOAT16_EPS,
    ONE_STEP_EPS,
    RUN_F64,
    assert_close,
    assert_half_close,
    assert_nonzero,
    assert_run_close,
    assert_same,
    assert_untouched,
    lane,
    named,
    nonzero_like,
    odd_trees,
    perturbed,
    stack,
    ulps,
    wide,
)
from torch.utils import _pytree

import functricks as F
from functricks import tree

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TREES = pytest.mark.parametrize("name", odd_trees(F32))


class Pair(NamedTuple):
    left: Any
    right: Any


# --- the test of the test --------------------------------------------------------------------------------------------


def _leaves_to_perturb(found: Any) -> list[str]:
    return [path for path, leaf in named(found).items() if leaf.numel()]


@pytest.mark.parametrize("dtype", [F32, F64])
@TREES
def test_two_tolerances_off_in_one_leaf_fails(name: str, dtype: torch.dtype) -> None:
    found = odd_trees(dtype)[name]
    assert_nonzero(found)
    assert_same(found, found)
    assert_close(found, found)
    for path in _leaves_to_perturb(found):
        eps = torch.finfo(named(found)[path].dtype).eps
        off = perturbed(found, path, 2 * ONE_STEP_EPS * eps)
        with pytest.raises(AssertionError, match="off by"):
            assert_close(off, found)
        with pytest.raises(AssertionError, match="not equal"):
            assert_same(perturbed(found, path, 2 * eps), found)


@TREES
def test_two_tolerances_off_in_a_run_fails(name: str) -> None:
    start = wide(odd_trees(F64)[name])
    end = _pytree.tree_map(lambda leaf: leaf + 1, start)
    assert_run_close(end, end, start)
    for path in _leaves_to_perturb(end):
        moved = named(end)[path].numel() ** 0.5  # the norm of the displacement
        largest = named(end)[path].abs().max().item()
        assert_run_close(perturbed(end, path, 0.5 * RUN_F64 * moved / largest), end, start)
        with pytest.raises(AssertionError, match="displacement off"):
            assert_run_close(perturbed(end, path, 2 * RUN_F64 * moved / largest), end, start)


def test_a_run_that_did_not_move_proves_nothing() -> None:
    start = {"w": torch.ones(2, dtype=F64)}
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_run_close(start, start, start)


@pytest.mark.parametrize(("dtype", "eps"), [(F16, FLOAT16_EPS), (BF16, BFLOAT16_EPS)])
def test_two_tolerances_off_in_half_precision_fails(dtype: torch.dtype, eps: float) -> None:
    reference = {"w": torch.tensor([1.0, 2.0], dtype=F64)}
    exact = {"w": reference["w"].to(dtype)}
    assert_half_close(exact, reference, eps)
    with pytest.raises(AssertionError, match="off by"):
        assert_half_close(perturbed(exact, "['w']", 2 * eps * torch.finfo(dtype).eps), reference, eps)
    with pytest.raises(AssertionError, match="must be float64"):
        assert_half_close(exact, exact, eps)


def test_comparisons_see_dtype_shape_structure_and_odd_numbers() -> None:
    x = torch.tensor([1.0, math.nan, math.inf])
    assert_same(x, x.clone())
    assert_close(x, x.clone())
    for other in (
        x.double(),
        x[None],
        {"w": x},
        torch.tensor([1.0, 0.0, math.inf]),
        torch.tensor([1.0, math.nan, -math.inf]),
        torch.tensor([1.0, math.nan, 1.0]),
    ):
        for compare in (assert_same, assert_close):
            with pytest.raises(AssertionError):
                compare(other, x)
    with pytest.raises(AssertionError, match="containers differ"):
        assert_same([x], (x,))


def test_zero_and_nonfinite_inputs_are_refused() -> None:
    for bad in (torch.zeros(2), torch.tensor([1.0, math.nan])):
        with pytest.raises(AssertionError, match="zero or not finite"):
            assert_nonzero({"ok": torch.ones(1), "bad": bad})


def test_ulps_count_neighbours() -> None:
    x = torch.tensor([1.0, 1e30, 1e-40])
    assert ulps(x, x) == 0
    assert ulps(torch.nextafter(x, torch.full((3,), math.inf)), x) == 1


def test_writes_in_place_are_seen() -> None:
    for write in (lambda x: x.add_(1), lambda x: x.add_(0), lambda x: x.data.add_(1)):
        x = torch.ones(2)
        with pytest.raises(AssertionError, match=r"written to|not equal"), assert_untouched({"x": x}):
            write(x)


# --- walking ---------------------------------------------------------------------------------------------------------


@TREES
def test_leaves_come_back_in_their_places(name: str) -> None:
    found = odd_trees(F32)[name]
    leaves, structure = tree.flatten(found)
    assert_same(tree.unflatten(structure, leaves), found)
    assert len(leaves) == len(tree.paths(found)) == len(named(found))


def test_dicts_keep_their_insertion_order_everywhere() -> None:
    found = {"b": torch.tensor(1.0), "a": {"d": torch.tensor(2.0), "c": torch.tensor(3.0)}}
    assert [leaf.item() for leaf in tree.leaves(found)] == [1, 2, 3]
    assert list(tree.named_leaves(found)) == ["b", "a.d", "a.c"]
    assert list(tree.map(torch.neg, found)["a"]) == ["d", "c"]
    assert list(tree.add(found, found)) == ["b", "a"]


def test_trees_are_matched_by_name_not_by_position() -> None:
    one = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
    other = {"b": torch.tensor(20.0), "a": torch.tensor(10.0)}
    expected = {"a": torch.tensor(11.0), "b": torch.tensor(22.0)}
    assert_same(tree.add(one, other), expected)
    assert_same(torch.compile(tree.add, fullgraph=True, backend="eager")(one, other), expected)
    assert_same(torch.vmap(tree.add)(stack([one]), stack([other])), stack([expected]))


def test_paths_are_keys_joined_by_dots() -> None:
    found = {"layer": [Pair(1, (2,))], "x": 3}
    assert tree.named_leaves(found) == {"layer.0.left": 1, "layer.0.right.0": 2, "x": 3}
    assert tree.named_leaves(5) == {"": 5}
    assert tree.named_leaves({}) == {}
    assert tree.from_named(found, {"layer.0.right.0": 7}) == {"layer": [Pair(1, (7,))], "x": 3}
    assert tree.pick(found, {"layer.0.left": True, "layer.0.right.0": False, "x": True}) == {"layer.0.left": 1, "x": 3}


def test_different_structures_are_refused() -> None:
    one = {"a": torch.ones(1), "b": torch.ones(1)}
    for compiled in (False, True):
        add = torch.compile(tree.add, fullgraph=True, backend="eager") if compiled else tree.add
        with pytest.raises(Exception, match="b"):  # optree's ValueError names the keys; traced it is torch's own error
            add(one, {"a": torch.ones(1)})
    text = tree.structure_error("load", one, {"a": torch.ones(2), "c": torch.ones(1)})
    assert text == "load: trees differ; missing: ['b'], unexpected: ['c'], shapes: ['a (1,) != (2,)']"


# --- selecting -------------------------------------------------------------------------------------------------------

MODEL = {"encoder": {"fc1": {"weight": 1, "bias": 2}, "fc10": {"weight": 3}}, "bias_proj": 4}


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        ("encoder.*", ["encoder.fc1.weight", "encoder.fc1.bias", "encoder.fc10.weight"]),
        ("*.weight", ["encoder.fc1.weight", "encoder.fc10.weight"]),
        ("encoder.fc1.*", ["encoder.fc1.weight", "encoder.fc1.bias"]),  # layer 1 is not layer 10
        ("*bias", ["encoder.fc1.bias"]),  # the whole path: bias_proj is no bias
        (["bias_proj", "*.fc10.*"], ["encoder.fc10.weight", "bias_proj"]),
        (("bias_proj",), ["bias_proj"]),
        (lambda path, leaf: leaf > 2, ["encoder.fc10.weight", "bias_proj"]),
        (
            {"encoder": {"fc1": {"weight": True, "bias": False}, "fc10": {"weight": False}}, "bias_proj": False},
            ["encoder.fc1.weight"],
        ),
    ],
)
def test_selectors(where: Any, chosen: list[str]) -> None:
    found = tree.select(where, MODEL)
    assert list(found) == tree.paths(MODEL)
    assert [path for path, yes in found.items() if yes] == chosen


@pytest.mark.parametrize(
    ("where", "error", "match"),
    [
        ("word_emb*", ValueError, r"fgm: where='word_emb\*' matches no parameter; have: encoder.fc1.weight, enc"),
        (["*.weight", "nothing"], ValueError, "where='nothing' matches no parameter; have: encoder"),
        ("Encoder.*", ValueError, "matches no parameter"),
        (lambda path, leaf: False, ValueError, "matches no parameter; have: encoder"),
        ({"encoder": True}, ValueError, r"fgm: where: trees differ; missing: \['encoder.fc1.weight'"),
        ([], ValueError, "fgm: where: trees differ; missing"),
        (
            {"encoder": {"fc1": {"weight": 1, "bias": False}, "fc10": {"weight": False}}, "bias_proj": False},
            TypeError,
            "must be globs, a callable or a tree of bools",
        ),
    ],
)
def test_selectors_that_cannot_be_meant(where: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tree.select(where, MODEL, name="fgm")


def test_every_leaf_has_one_label() -> None:
    found = {"a": torch.ones(1), "b": [torch.ones(1)]}
    assert tree.label(lambda path, leaf: path.upper(), found) == {"a": "A", "b.0": "B.0"}
    assert tree.label({"b": ["y"], "a": "x"}, found) == {"a": "x", "b.0": "y"}
    with pytest.raises(ValueError, match=r"rates: every parameter needs one label \(a string\); without: b.0"):
        tree.label(lambda path, leaf: "x" if path == "a" else None, found, name="rates")
    with pytest.raises(ValueError, match=r"labels: trees differ; missing: \['b.0'\]"):
        tree.label({"a": "x"}, found)


def test_selecting_traces() -> None:
    def chosen(found: Any) -> Any:
        return tree.pick(found, tree.select("*.weight", found))

    found = {"fc": {"weight": torch.ones(2), "bias": torch.ones(1)}}
    assert list(torch.compile(chosen, fullgraph=True, backend="eager")(found)) == ["fc.weight"]


# --- arithmetic: every way of doing it agrees with plain tensors -----------------------------------------------------

C, D = 0.3125, 0.6875  # exact in every dtype
OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int, tuple[float, ...]]] = {
    # name: (on trees, on float64 tensors, number of trees, coefficients)
    "add": (tree.add, lambda a, b: a + b, 2, ()),
    "sub": (tree.sub, lambda a, b: a - b, 2, ()),
    "mul": (tree.mul, lambda a, b: a * b, 2, ()),
    "maximum": (tree.maximum, torch.maximum, 2, ()),
    "scale": (tree.scale, lambda a, c: a * c, 1, (C,)),
    "add_scaled": (tree.add_scaled, lambda a, b, c: a + b * c, 2, (C,)),
    "clamp": (lambda a, c: tree.clamp(a, -c, c), lambda a, c: a.clamp(-c, c), 1, (D,)),
    "ema": (tree.ema, lambda a, b, c: c * a + (1 - c) * b, 2, (D,)),
    "ema_of_squares": (tree.ema_of_squares, lambda a, b, c: c * a + (1 - c) * b * b, 2, (D,)),
    "root_ratio": (
        lambda a, b, c: tree.root_ratio(a, tree.mul(b, b), c, c + 0.5, 0.1),
        lambda a, b, c: a / c / ((b * b).sqrt() / (c + 0.5) + 0.1),
        2,
        (C,),
    ),
    "where": (
        lambda a, b, c: tree.where(torch.as_tensor(c) > 0.5, a, b),
        lambda a, b, c: torch.where(torch.as_tensor(c) > 0.5, a, b),
        2,
        (D,),
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@TREES
def test_arithmetic_in_every_context(name: str, operation: str) -> None:
    """Numbers and tensors as coefficients; plain, lanes, lanes with shared trees, two levels of lanes, under grad."""
    ours, plain, count, coefficients = OPERATIONS[operation]
    trees = [nonzero_like(odd_trees(F32)[name], seed) for seed in range(2 * count)]
    first, second = trees[:count], trees[count:]

    def check(actual: Any, own: list[Any], numbers: tuple[float, ...]) -> None:
        expected = [wide(one) for one in own]
        reference = _pytree.tree_map(lambda *leaves: plain(*leaves, *numbers), *expected)
        for path, leaf in named(actual).items():
            assert leaf.dtype == named(own[0])[path].dtype
            assert_half_close({path: leaf}, {path: named(reference)[path]}, eps=4)  # up to four roundings, in any dtype

    with assert_untouched(trees):
        as_tensors = [torch.tensor(c) for c in coefficients]
        other = [torch.tensor(c + 0.0625) for c in coefficients]
        other_numbers = tuple(c + 0.0625 for c in coefficients)
        check(ours(*first, *coefficients), first, coefficients)
        check(ours(*first, *as_tensors), first, coefficients)
        both = [stack([one, two]) for one, two in zip(first, second, strict=True)]
        laned = [torch.stack([one, two]) for one, two in zip(as_tensors, other, strict=True)]
        if named(first[0]):
            for axis in (0, None):  # every tree has lanes, or the first one alone, which the others share
                axes = [0, *[axis] * (count - 1), *[0] * len(laned)]
                second_trees = second if axis == 0 else [second[0], *first[1:]]
                args = [tree_ if a == 0 else one for tree_, one, a in zip(both, first, axes, strict=False)]
                for grad_mode in (True, False):
                    with torch.set_grad_enabled(grad_mode):
                        found = torch.vmap(ours, tuple(axes))(*args, *laned)
                    check(lane(found, 0), first, coefficients)
                    check(lane(found, 1), second_trees, other_numbers)
            twice = torch.vmap(torch.vmap(ours))(
                *[stack([one, one]) for one in both], *[torch.stack([one, one]) for one in laned]
            )
            check(lane(lane(twice, 1), 1), second, other_numbers)
            only = torch.vmap(lambda *numbers: ours(*first, *numbers))(*laned) if laned else None
            if only is not None:
                check(lane(only, 1), first, other_numbers)

        def under_grad(scale: torch.Tensor) -> Any:
            found = ours(
                *[_pytree.tree_map(lambda leaf: leaf * scale.to(leaf.dtype), one) for one in first], *as_tensors
            )
            return sum((leaf.double().sum() for leaf in named(found).values()), scale * 0), found

        slope, found = torch.func.grad(under_grad, has_aux=True)(torch.tensor(1.0, dtype=F64))
        check(found, first, coefficients)
        assert torch.isfinite(slope)


def test_autograd_sees_tree_arithmetic() -> None:
    """The faster ways make way for differentiation, also of the coefficient, and from outside of the lanes."""
    x = {"w": torch.tensor([1.0, 2.0], requires_grad=True)}
    c = torch.tensor(3.0, requires_grad=True)
    tree.scale(x, c)["w"].sum().backward()
    assert x["w"].grad is not None
    assert x["w"].grad.tolist() == [3.0, 3.0]
    assert c.grad == 3.0
    c = torch.tensor([3.0, 4.0], requires_grad=True)
    torch.vmap(lambda c: tree.scale({"w": torch.ones(2)}, c))(c)["w"].sum().backward()
    assert c.grad is not None
    assert c.grad.tolist() == [2.0, 2.0]


def test_nan_survives_a_clamp() -> None:
    x = {"w": torch.tensor([math.nan, math.inf, -math.inf])}
    for clamp in (tree.clamp, torch.vmap(tree.clamp, (None, 0, 0))):
        bounds = (torch.tensor([-1.0]), torch.tensor([1.0])) if clamp is not tree.clamp else (-1.0, 1.0)
        found = clamp(x, *bounds)["w"].reshape(-1)
        assert_same(found, torch.tensor([math.nan, 1.0, -1.0]))


def test_cast_and_zeros() -> None:
    found = {"w": torch.ones(2, dtype=F64), "n": torch.tensor(3)}
    assert [leaf.dtype for leaf in tree.leaves(tree.cast(found, F16))] == [F16, torch.int64]
    assert_same(tree.zeros_like(found), {"w": torch.zeros(2, dtype=F64), "n": torch.tensor(0)})
    assert tree.zeros_like(found, F32)["w"].dtype == F32


# --- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64])
@TREES
def test_norm_is_that_of_all_entries_together(name: str, dtype: torch.dtype) -> None:
    found = odd_trees(dtype)[name]
    entries = [leaf.double().reshape(-1) for leaf in named(found).values()]
    expected = torch.cat([torch.zeros(1, dtype=F64), *entries]).norm()
    eps = ONE_STEP_EPS * torch.finfo(dtype).eps / torch.finfo(F64).eps  # float32 leaves add up in float32
    assert_close(tree.norm(found), expected, eps)
    if named(found):
        assert_close(torch.vmap(tree.norm)(stack([found, found]))[1], expected, eps)


@pytest.mark.parametrize("size", [1e200, 1e-200, 5e-324])
def test_a_float64_norm_neither_overflows_nor_underflows(size: float) -> None:
    assert tree.norm({"a": torch.tensor([3.0, 4.0], dtype=F64) * size}) == pytest.approx(5 * size, rel=1e-14)
    found = torch.vmap(tree.norm)({"a": torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=F64) * size})
    assert found.tolist() == [pytest.approx(5 * size, rel=1e-14), pytest.approx(2 * size, rel=1e-14)]


def test_norms_of_half_and_float32_do_not_overflow() -> None:
    assert tree.norm({"a": torch.full((4,), 6e4, dtype=F16)}) == pytest.approx(12e4, rel=1e-3)
    assert tree.norm({"a": torch.full((4,), 3e38)}) == pytest.approx(6e38, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_all_finite_sees_every_odd_number(bad: float, dtype: torch.dtype) -> None:
    good = {"a": torch.ones(3, dtype=dtype), "b": torch.full((2,), torch.finfo(dtype).max, dtype=dtype)}
    off = {**good, "a": torch.tensor([1.0, bad, 1.0], dtype=dtype)}
    assert tree.all_finite(good)
    assert not tree.all_finite(off)
    assert torch.vmap(tree.all_finite)(stack([good, off, good])).tolist() == [True, False, True]


def test_integers_play_no_part_in_a_norm() -> None:
    assert tree.norm({"w": torch.tensor([3.0, 4.0]), "count": torch.tensor(100)}) == 5


def test_sqrt_has_no_infinite_slope_at_zero() -> None:
    x = torch.tensor([0.0, 4.0])
    assert tree.sqrt(x).tolist() == [0.0, 2.0]
    assert torch.func.grad(lambda x: tree.sqrt(x).sum())(x).tolist() == [0.0, 0.25]
    assert torch.vmap(torch.func.grad(tree.sqrt))(x).tolist() == [0.0, 0.25]
    assert torch.func.grad(lambda x: torch.vmap(tree.sqrt)(x).sum())(x).tolist() == [0.0, 0.25]
    leaf = x.clone().requires_grad_()
    tree.sqrt(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0, 0.25]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, in its first jvp
def test_sqrt_has_no_infinite_slope_at_zero_in_forward_mode() -> None:
    x = torch.tensor([0.0, 4.0])
    assert torch.func.jvp(tree.sqrt, (x,), (torch.ones(2),))[1].tolist() == [0.0, 0.25]


def test_lanes_are_seen_at_one_level_only() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(tree.lanes())
        return x

    look(torch.ones(1))
    torch.vmap(look)(torch.ones(1))
    torch.vmap(torch.vmap(look))(torch.ones(1, 1))
    torch.func.grad(look)(torch.tensor(1.0))
    torch.vmap(torch.func.grad(look))(torch.ones(1))
    torch.func.grad(lambda x: torch.vmap(look)(x).sum())(torch.ones(1))
    assert seen == [None, 1, None, None, None, None]


def test_add_scaled_widens_a_half_precision_term_before_it_multiplies() -> None:
    """1 + 1/128 has eight digits, three times it ten: bfloat16 would round the product, in whichever way."""
    total, term, c = {"w": torch.zeros(2)}, {"w": torch.full((2,), 1.0078125, dtype=torch.bfloat16)}, torch.tensor(3.0)
    compiled = torch.compile(tree.add_scaled, fullgraph=True, backend="aot_eager")
    differentiable = {"w": torch.zeros(2, requires_grad=True)}
    found = [tree.add_scaled(total, term, c), compiled(total, term, c), tree.add_scaled(differentiable, term, c)]
    assert [one["w"].tolist() for one in found] == [[3.0234375] * 2] * 3


@pytest.mark.parametrize(
    "given", [lambda p: (x for x in p.values()), lambda p: p.values(), lambda p: torch.nn.Linear(1, 1)]
)
def test_what_only_looks_like_a_tree_is_named(given: Any) -> None:
    params = {"w": torch.ones(2)}
    match = "must be a tensor or a dict, tuple or list of tensors, got (generator|dict_values|Linear)"
    with pytest.raises(TypeError, match=match):
        F.adamw().init(given(params))
    for transform in (F.adamw(), F.sgd(), F.clip_by_global_norm(1.0), F.masked(F.scale(2.0), "w")):
        with pytest.raises(TypeError, match=match):
            transform.update(given(params), transform.init(params), params)
    with pytest.raises(TypeError, match=match):
        F.apply_updates(params, given(params))


def test_a_number_in_place_of_a_tensor_is_named() -> None:
    params = {"w": torch.ones(())}
    for optimizer in (F.adamw(), F.ema()):
        with pytest.raises(TypeError, match="parameters must be tensors, w is float"):
            optimizer.init({"w": 1.0})
    with pytest.raises(ValueError, match=r"no tensors: \{'w': 'float'\}"):
        F.apply_updates(params, {"w": 1.0})
