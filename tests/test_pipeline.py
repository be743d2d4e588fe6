"""Compositions of depth two and three: every pair and triple of techniques keeps the laws.

The laws: inputs stay as they were; the state keeps its structure, shapes and dtypes; lanes equal the loop; two calls
agree; the carry saw every evaluation; a loss scale changes no bit; derivatives are finite where a gradient is zero;
and, for a few of them, compiled equals eager. ``parity/compositions.py`` has a nested classic loop beside each.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_nonzero, assert_same, assert_untouched, lane, stack
from torch import Tensor

from functricks import (
    Loss,
    accumulate,
    adamw,
    autocast,
    awp,
    chain,
    clip_by_global_norm,
    dynamic_loss_scale,
    fgm,
    free_lb,
    gradient,
    losses,
    multi_task,
    pgd,
    random,
    sam,
    sgd,
    train_step,
    tree,
    vat,
)

FEATURES, HIDDEN, CLASSES, ROWS = 4, 5, 3, 9


class Numbers(dict[str, Any]):
    """The hyper-parameters of all techniques, each a number or a lane."""


def numbers(lanes: int | None = None) -> Numbers:
    values = {"fgm": 0.3, "pgd": 0.2, "sam": 0.1, "weight": 0.5, "lr": 0.05, "smoothing": 0.1, "decay": 0.02}
    if lanes is None:
        return Numbers({name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()})
    spread = torch.linspace(0.5, 1.5, lanes, dtype=torch.float64)
    return Numbers({name: value * spread for name, value in values.items()})


def make_params(dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (FEATURES, HIDDEN), "head": (HIDDEN, CLASSES), "other": (HIDDEN,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def make_batch(dtype: torch.dtype, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    labels[2] = -100
    return {
        "x": torch.randn(ROWS, FEATURES, generator=generator).to(dtype),
        "labels": labels,
        "y": torch.randn(ROWS, generator=generator).to(dtype),
    }


def make_carry() -> dict[str, Tensor]:
    return {"key": random.key(3), "calls": torch.tensor(0)}


def hidden(params: Any, batch: Any, carry: Any) -> tuple[Tensor, Any]:
    key, following = random.split(carry["key"]).unbind()
    x = torch.tanh(batch["x"] @ params["embedding"])
    noise = random.uniform(key, (HIDDEN,)).to(x.dtype)  # one draw a call: a batch and its parts see the same
    return x * (1 + 0 * noise), {"key": following, "calls": carry["calls"] + 1}


def classify(smoothing: Any) -> Any:
    def loss_fn(params: Any, batch: Any, carry: Any) -> Any:
        x, carry = hidden(params, batch, carry)
        logits = (x @ params["head"]).to(batch["y"].dtype)
        loss = losses.cross_entropy(logits, batch["labels"], label_smoothing=smoothing)
        return loss, carry, {"size": Loss(logits.square().mean(1) * loss.weights, loss.weights).mean()}

    return loss_fn


def regress(params: Any, batch: Any, carry: Any) -> Any:
    x, carry = hidden(params, batch, carry)
    return losses.mse_loss((x @ params["other"]).to(batch["y"].dtype), batch["y"]), carry, {}


WRAP: dict[str, Callable[[Any, Numbers], Any]] = {
    "accumulate": lambda g, n: accumulate(g, 3),
    "fgm": lambda g, n: fgm(g, n["fgm"], where="embedding"),
    "pgd": lambda g, n: pgd(g, n["pgd"], n["pgd"] * 0.7, 2, where=["embedding", "head"], norm="global"),
    "sam": lambda g, n: sam(g, n["sam"]),
    "multi_task": lambda g, n: multi_task(
        {"main": g, "side": gradient(regress, has_carry=True, has_metrics=True)}, {"main": 1.0, "side": n["weight"]}
    ),
}
BELOW = {"autocast": lambda f: autocast(f, "cpu", torch.bfloat16)}
ABOVE = {"loss scale": dynamic_loss_scale}

NAMES = [*WRAP, "autocast", "loss scale"]
PAIRS = list(permutations(WRAP, 2)) + [("autocast", name) for name in WRAP] + [(name, "loss scale") for name in WRAP]
PAIRS += [("autocast", "loss scale")] + [(name, name) for name in WRAP if name != "multi_task"]
TRIPLES = (
    list(permutations(WRAP, 3))
    + [("autocast", *pair) for pair in permutations(WRAP, 2)]
    + [(*pair, "loss scale") for pair in permutations(WRAP, 2)]
    + [("autocast", name, "loss scale") for name in WRAP]
)
COMPOSITIONS = PAIRS + TRIPLES


def step_of(names: tuple[str, ...], n: Numbers) -> Any:
    """The training step in which the named techniques are applied from the inside out."""
    loss_fn = classify(n["smoothing"])
    if "autocast" in names:
        loss_fn = BELOW["autocast"](loss_fn)
    grad_fn = gradient(loss_fn, has_carry=True, has_metrics=True)
    for name in names:
        if name in WRAP:
            grad_fn = WRAP[name](grad_fn, n)
    scaling = dynamic_loss_scale(2.0**10, growth_interval=2) if "loss scale" in names else None
    optimizer = chain(clip_by_global_norm(1.0), adamw(n["lr"], weight_decay=n["decay"]))
    return train_step(grad_fn, optimizer, loss_scale=scaling)


CALLS = {"accumulate": 3, "fgm": 2, "pgd": 3, "sam": 2}


def calls(names: tuple[str, ...]) -> int:
    """How often the loss functions are called in one step."""
    count = 1
    for name in names:
        count = count + 1 if name == "multi_task" else count * CALLS.get(name, 1)
    return count


def title(names: Any) -> str:
    return " in ".join(names)


@pytest.mark.parametrize("names", COMPOSITIONS, ids=title)
def test_pure_repeatable_and_of_one_structure(names: tuple[str, ...]) -> None:
    step, batch = step_of(names, numbers()), make_batch(torch.float32)
    state = step.init(make_params(torch.float32), make_carry())
    with assert_untouched(state, batch):
        (after, info), again = step.update(state, batch), step.update(state, batch)
    assert_same((after, info), again)
    assert tree.paths(after) == tree.paths(state)
    for path, leaf in tree.named_leaves(state).items():
        new = tree.named_leaves(after)[path]
        assert (new.shape, new.dtype) == (leaf.shape, leaf.dtype)
    assert info.applied
    moved = [name for name in state.params if not torch.equal(state.params[name], after.params[name])]
    assert {"embedding", "head"} <= set(moved)
    assert after.carry["calls"].item() == calls(names)
    key = random.key(3)
    for _ in range(calls(names)):
        key = random.split(key)[1]
    assert_same(after.carry["key"], key)
    attacked = {"fgm", "pgd", "sam"} & set(names)
    assert any(name.endswith("adversarial_loss") for name in info.metrics) == bool(attacked)


@pytest.mark.parametrize("names", COMPOSITIONS, ids=title)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lanes_equal_the_loop(names: tuple[str, ...], dtype: torch.dtype) -> None:
    lanes, batch, n = 3, make_batch(dtype), numbers(3)
    params = stack([make_params(dtype, seed) for seed in range(lanes)])

    def run(params: Any, n: Any) -> Any:
        step = step_of(names, n)
        state = step.init(params, make_carry())
        for _ in range(2):
            state, info = step.update(state, batch)
        return state, info

    with torch.no_grad():
        found = torch.vmap(run)(params, dict(n))
        for index in range(lanes):
            expected = run(lane(params, index), lane(dict(n), index))
            start = lane(params, index)
            for name, leaf in expected[0].params.items():
                gap, size = (lane(found, index)[0].params[name] - leaf).abs().max(), (leaf - start[name]).abs().max()
                # two steps of AdamW on displacements, whose gradients batched products sum in another order; bfloat16
                # rounds such a difference to a whole unit
                eps = torch.finfo(torch.bfloat16 if "autocast" in names else dtype).eps
                assert gap <= size * eps * (8 if "autocast" in names else 2000), (name, (gap / size / eps).item())
            assert_same(lane(found, index)[0].carry, expected[0].carry)


@pytest.mark.parametrize("names", COMPOSITIONS, ids=title)
def test_accumulation_is_transparent(names: tuple[str, ...]) -> None:
    """accumulate around a composition without attacks, or inside of any, changes no number."""
    if "accumulate" not in names or "autocast" in names:
        return
    inside = names[: names.index("accumulate")]
    if {"fgm", "pgd", "sam"} & set(inside):
        return  # each part attacks for itself
    params, batch = make_params(torch.float64), make_batch(torch.float64)
    if "multi_task" in inside:
        batch["labels"] = batch["labels"].clamp(min=0)  # parts are weighed alike, see accumulate
    without = tuple(name for name in names if name != "accumulate")
    n = Numbers({**numbers(), "smoothing": 0.1})
    (_, info), (expected, expected_info) = (
        (s := step_of(some, n)).update(s.init(params, make_carry()), batch) for some in (names, without)
    )
    assert_nonzero(expected.params)
    assert_close(info.loss, expected_info.loss, 32)  # losses at perturbed points
    assert_close(info.grad_norm, expected_info.grad_norm, 64)  # as above


@pytest.mark.parametrize("names", [names for names in COMPOSITIONS if "loss scale" in names], ids=title)
def test_a_loss_scale_changes_no_bit(names: tuple[str, ...]) -> None:
    """Powers of two come out again exactly, whatever is around the gradient."""
    (scaled, info), (expected, expected_info) = (
        (s := step_of(some, numbers())).update(s.init(make_params(torch.float32), make_carry()), batch)
        for batch in [make_batch(torch.float32)]
        for some in (names, tuple(name for name in names if name != "loss scale"))
    )
    assert_same((scaled._replace(loss_scale=()), info), (expected, expected_info))


def assert_finite_at_zero(names: tuple[str, ...]) -> None:
    """Under heads of zeros the embedding's gradient is zero, and so is what divides an attack's step."""
    params = make_params(torch.float64)
    params = {name: leaf if name == "embedding" else torch.zeros_like(leaf) for name, leaf in params.items()}

    def after(n: Any) -> Tensor:
        step = step_of(names, n)
        state, info = step.update(step.init(params, make_carry()), make_batch(torch.float64))
        return tree.norm(state.params) + info.grad_norm

    slopes = torch.func.grad(after)(dict(numbers()))
    assert all(torch.isfinite(slope) for slope in slopes.values()), slopes
    assert slopes["lr"] != 0


@pytest.mark.parametrize("names", PAIRS, ids=title)
def test_derivatives_at_a_zero_gradient_are_finite(names: tuple[str, ...]) -> None:
    assert_finite_at_zero(names)


@pytest.mark.slow
@pytest.mark.parametrize("names", TRIPLES, ids=title)
def test_derivatives_at_a_zero_gradient_are_finite_three_deep(names: tuple[str, ...]) -> None:
    assert_finite_at_zero(names)


COMPILED = [  # a minute each on a slow machine, so not all: each technique inside and outside, and scans in scans
    ("fgm", "accumulate"),
    ("accumulate", "pgd"),
    ("pgd", "accumulate", "loss scale"),
    ("autocast", "sam", "multi_task"),
    ("multi_task", "accumulate", "fgm"),
]


@pytest.mark.slow
@pytest.mark.parametrize("names", COMPILED, ids=title)
def test_compiled_equals_eager(names: tuple[str, ...]) -> None:
    step, batch = step_of(names, numbers()), make_batch(torch.float32)
    state = step.init(make_params(torch.float32), make_carry())
    compiled = torch.compile(step.update, fullgraph=True, backend="aot_eager")
    (found, info), (expected, expected_info) = compiled(state, batch), step.update(state, batch)
    assert_same((found.carry, found.step, info.applied), (expected.carry, expected.step, expected_info.applied))
    eps = torch.finfo(torch.bfloat16 if "autocast" in names else torch.float32).eps
    assert (
        info.grad_norm - expected_info.grad_norm
    ).abs() <= 64 * eps * expected_info.grad_norm  # other orders of sums


@pytest.mark.slow
def test_compiled_under_vmap_with_all_of_them() -> None:
    """Inductor's own kernels, lanes, and a scan in a scan."""
    names, batch = ("pgd", "accumulate", "loss scale"), make_batch(torch.float32)
    params = stack([make_params(torch.float32, seed) for seed in range(3)])

    def run(params: Any, n: Any) -> Any:
        step = step_of(names, n)
        return step.update(step.init(params, make_carry()), batch)

    n = dict(numbers(3))
    found, expected = torch.compile(torch.vmap(run), fullgraph=True)(params, n), torch.vmap(run)(params, n)
    assert_close(found[1].grad_norm, expected[1].grad_norm, 64 * 2**29)  # float32 gradients under a float64 norm
    assert_same(found[0].carry, expected[0].carry)


# --- hyper-gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [(), ("fgm",), ("fgm", "accumulate"), ("accumulate", "pgd"), ("sam", "multi_task")], ids=title
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_hyper_gradient_through_many_steps(names: tuple[str, ...], optimizer: str) -> None:
    """d(validation loss)/d(hyper-parameters) after 6 steps, against central differences."""
    params, batch, held_out = make_params(torch.float64), make_batch(torch.float64), make_batch(torch.float64, 9)

    def validation(n: Any) -> Tensor:
        grad_fn = gradient(classify(n["smoothing"]), has_carry=True, has_metrics=True)
        for name in names:
            grad_fn = WRAP[name](grad_fn, n)
        make = (
            sgd(n["lr"], 0.9, weight_decay=n["decay"])
            if optimizer == "sgd"
            else adamw(n["lr"], weight_decay=n["decay"])
        )
        step = train_step(grad_fn, chain(clip_by_global_norm(1.0), make))
        state = step.init(params, make_carry())
        for _ in range(6):
            state, _ = step.update(state, batch)
        return classify(0.0)(state.params, held_out, make_carry())[0].mean()

    n, h = dict(numbers()), 1e-5
    slopes = torch.func.grad(validation)(n)
    used = {
        "lr",
        "smoothing",
        "decay",
        *({"sam", "fgm", "pgd"} & set(names)),
        *(["weight"] if "multi_task" in names else []),
    }
    for name in n:
        up, down = ({**n, name: n[name] + sign * h} for sign in (1, -1))
        expected = ((validation(up) - validation(down)) / (2 * h)).item()
        assert slopes[name].item() == pytest.approx(expected, rel=1e-5, abs=1e-9)
        assert (slopes[name] != 0).item() == (name in used)


def test_hyper_gradient_descent_tunes_smoothing_and_learning_rate() -> None:
    """Following the hyper-gradient lowers the validation loss."""
    params, batch, held_out = make_params(torch.float64), make_batch(torch.float64), make_batch(torch.float64, 9)

    def validation(n: Any) -> Tensor:
        step = train_step(
            gradient(classify(n["smoothing"].sigmoid()), has_carry=True, has_metrics=True), sgd(n["log_lr"].exp())
        )
        state = step.init(params, make_carry())
        for _ in range(10):
            state, _ = step.update(state, batch)
        return classify(0.0)(state.params, held_out, make_carry())[0].mean()

    n = {"smoothing": torch.tensor(-3.0, dtype=torch.float64), "log_lr": torch.tensor(-1.0, dtype=torch.float64)}
    seen = []
    for _ in range(15):
        slopes, value = torch.func.grad_and_value(validation)(n)
        seen.append(value.item())
        n = {name: n[name] - 0.3 * slopes[name] for name in n}
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < seen[0] - 0.01


def test_every_pair_and_triple_is_here() -> None:
    """autocast wraps the loss and the loss scale belongs to the step, so each has one place; the rest, any order."""
    for size, have in ((2, PAIRS), (3, TRIPLES)):
        wanted = {
            names
            for names in product(NAMES, repeat=size)
            if len(set(names)) == size and "autocast" not in names[1:] and "loss scale" not in names[:-1]
        }
        assert wanted <= set(have)


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("accumulate", lambda f: accumulate(f, 2)),
        ("fgm", lambda f: fgm(f, where="w")),
        ("pgd", lambda f: pgd(f, where="w")),
        ("free_lb", lambda f: free_lb(f, where="w")),
        ("sam", sam),
        ("awp", awp),
        ("vat", lambda f: vat(f, lambda *_: None, probe=lambda *_: None, key=random.key(0))),
        ("multi_task: task 'a'", lambda f: multi_task({"a": f})),
        ("train_step", lambda f: train_step(f, sgd(0.1))),
    ],
)
def test_a_loss_function_in_place_of_a_gradient_function_is_named(name: str, wrap: Any) -> None:
    def my_loss(params: Any, batch: Any) -> Tensor:
        return params["w"] * batch

    with pytest.raises(TypeError, match=f"{name}: a gradient function is .*, got 'my_loss'; gradient\\(loss_fn\\)"):
        wrap(my_loss)
    with pytest.raises(TypeError, match=f"{name}: a gradient function is .*, got 'Gradient'"):
        wrap(gradient(my_loss)({"w": torch.ones(())}, torch.ones(())))
    for own in (lambda params, batch, carry=(), scale=None: None, lambda *args, **rest: None, Own()):
        wrap(own)


class Own:
    """A gradient function of one's own may be any callable."""

    def __call__(self, params: Any, batch: Any, carry: Any = (), *, scale: Any = None) -> Any:
        raise NotImplementedError
