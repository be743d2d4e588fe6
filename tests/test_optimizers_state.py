"""Optimizer state: keyed by path, float32 for half precision, and never another parameter's."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same

import functricks as F

STATEFUL = {
    "sgd": lambda: F.sgd(0.1, momentum=0.9),
    "adamw": lambda: F.adamw(0.1),
    "amsgrad": lambda: F.adam(0.1, amsgrad=True),
    "nadam": lambda: F.nadam(0.1),
    "radam": lambda: F.radam(0.1),
    "adamax": lambda: F.adamax(0.1),
    "adagrad": lambda: F.adagrad(0.1),
    "adadelta": lambda: F.adadelta(0.1),
    "rmsprop": lambda: F.rmsprop(0.1, centered=True, momentum=0.5),
    "rprop": lambda: F.rprop(0.1),
    "asgd": lambda: F.asgd(0.1),
    "lion": lambda: F.lion(0.1),
    "lamb": lambda: F.lamb(0.1),
    "adafactor": lambda: F.adafactor(0.1),
    "schedule_free_adamw": lambda: F.schedule_free_adamw(0.1),
    "muon": lambda: F.muon(0.1),
    "multi_steps": lambda: F.multi_steps(F.sgd(0.1), 2),
    "lookahead": lambda: F.lookahead(F.sgd(0.1)),
    "master_weights": lambda: F.master_weights(F.sgd(0.1)),
    "ema": lambda: F.chain(F.sgd(0.1), F.ema(0.9)),
    "swa": lambda: F.chain(F.sgd(0.1), F.swa()),
    "skip_nonfinite": lambda: F.skip_nonfinite(F.adamw(0.1, weight_decay=0.1)),
    "inject_hyperparams": lambda: F.inject_hyperparams(F.adamw)(lr=0.1, weight_decay=0.1),
    "partition": lambda: F.partition({"own": F.adamw(0.1)}, lambda path, leaf: "own"),
    "masked": lambda: F.masked(F.adamw(0.1), lambda path, leaf: True),
    "named_chain": lambda: F.named_chain(momentum=F.trace(0.9, 0.1), rms=F.scale_by_rms(), rate=F.scale(-0.1)),
}
EVERY = pytest.mark.parametrize("name", STATEFUL)


def params(*names: str, shape: tuple[int, ...] = (2, 2)) -> dict[str, torch.Tensor]:
    return {name: (i + 1) * torch.linspace(-1.0, 1.3, 4).reshape(shape) for i, name in enumerate(names)}


def after(optimizer: Any, start: Any, steps: int = 3) -> Any:
    state = optimizer.init(start)
    for step in range(steps):
        grads = {name: torch.cos(leaf + step) for name, leaf in start.items()}
        _, state = optimizer.update(grads, state, start)
    return state


@EVERY
def test_a_renamed_parameter_is_refused(name: str) -> None:
    """Field case C40: same shapes, so that only the name tells them apart."""
    optimizer, start = STATEFUL[name](), params("a", "b")
    state, renamed = after(optimizer, start), params("a", "c")
    with pytest.raises(ValueError, match=r"missing: \['[bc]'\], unexpected: \['[bc]'\]"):
        optimizer.update(renamed, state, renamed)


@EVERY
@pytest.mark.parametrize("now", [("a",), ("a", "b", "c")])
def test_a_parameter_that_went_or_came_is_refused(name: str, now: tuple[str, ...]) -> None:
    optimizer, start = STATEFUL[name](), params("a", "b")
    state, other = after(optimizer, start), params(*now)
    with pytest.raises(ValueError, match=r"'b'|'c'"):
        optimizer.update(other, state, other)


@EVERY
def test_another_shape_is_refused(name: str) -> None:
    optimizer, start = STATEFUL[name](), params("a", "b")
    state, other = after(optimizer, start), {**start, "b": torch.ones(1, 2)}  # would broadcast
    with pytest.raises(ValueError, match=r"shapes: \['b \("):
        optimizer.update(other, state, other)


@EVERY
def test_another_order_is_the_same_state(name: str) -> None:
    optimizer, start = STATEFUL[name](), params("a", "b")
    state = after(optimizer, start)
    turned = {name: start[name] for name in ("b", "a")}
    expected, _ = optimizer.update(start, state, start)
    found, _ = optimizer.update(turned, state, turned)
    assert_same({name: found[name] for name in expected}, expected)


@EVERY
def test_saved_and_loaded_it_goes_on_to_the_bit(name: str) -> None:
    optimizer, start = STATEFUL[name](), params("a", "b")
    state = after(optimizer, start)
    file = io.BytesIO()
    torch.save([leaf.clone() for leaf in F.tree.leaves(state)], file)
    file.seek(0)
    loaded = F.tree.unflatten(F.tree.flatten(optimizer.init(start))[1], torch.load(file, weights_only=True))
    assert_same(optimizer.update(start, loaded, start), optimizer.update(start, state, start))


@EVERY
def test_loaded_by_path_it_finds_its_parameters_in_any_order(name: str) -> None:
    """The model was reordered between saving and loading; parameters of one shape."""
    optimizer, start = STATEFUL[name](), params("a", "b", "c")
    state = after(optimizer, start)
    file = io.BytesIO()
    torch.save(F.tree.named_leaves(state), file)
    file.seek(0)
    turned = {path: start[path] for path in ("c", "a", "b")}
    loaded = F.tree.from_named(optimizer.init(turned), torch.load(file, weights_only=True))
    expected, _ = optimizer.update(start, state, start)
    found, _ = optimizer.update(turned, loaded, turned)
    assert_same({path: found[path] for path in expected}, expected)


HALF = {name: make for name, make in STATEFUL.items() if name != "master_weights"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [0.0, 6e-8, 1e-4, 1.0])
@pytest.mark.parametrize("name", HALF)
def test_half_precision_gives_the_float32_answer(name: str, size: float, dtype: torch.dtype) -> None:
    """Zero and tiny gradients too: 6e-8 is the smallest float16, and its square is no float16 at all."""
    optimizer = HALF[name]()
    start = {"w": torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=dtype), "b": torch.tensor([0.5, 1.0], dtype=dtype)}
    if name == "muon":
        start = {"w": start["w"]}
    grads = {path: size * torch.linspace(1.0, 2.0, leaf.numel()).reshape(leaf.shape).to(dtype) for path, leaf in
             start.items()}  # fmt: skip
    half, exact = start, {path: leaf.float() for path, leaf in start.items()}
    state, memory = optimizer.init(half), optimizer.init(exact)
    for leaf in F.tree.leaves(state):
        assert leaf.dtype in (torch.float32, torch.float64, torch.int64)
    for _ in range(2):
        updates, state = optimizer.update(grads, state, half)
        expected, memory = optimizer.update({p: g.float() for p, g in grads.items()}, memory, exact)
        assert_close(updates, expected, eps=64)
        assert all(torch.isfinite(leaf).all() for leaf in updates.values())
