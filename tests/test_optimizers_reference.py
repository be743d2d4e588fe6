"""Optimizers that PyTorch lacks, against their papers written out a tensor at a time, in place and without sharing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import RUN_F64, assert_close, assert_run_close
from torch import Tensor

import functricks as F

Params = dict[str, Tensor]
STEPS = 1000


def start() -> Params:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in
            {"weight": (4, 3), "bias": (4,), "scale": ()}.items()}  # fmt: skip


def gradient(params: Params, step: int) -> Params:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.tanh(leaf) + torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        for name, leaf in params.items()
    }


def run(optimizer: F.Transform, steps: int = STEPS) -> tuple[Params, Any]:
    params = start()
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(gradient(params, step), state, params)
        params = F.apply_updates(params, updates)
    return params, state


def lion(params: Params, lr: float, beta1: float, beta2: float, decay: float) -> None:
    """Algorithm 2 of arXiv:2302.06675, line by line."""
    momentum = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    for step in range(STEPS):
        for name, g in gradient(params, step).items():
            update = (beta1 * momentum[name] + (1 - beta1) * g).sign()
            momentum[name] = beta2 * momentum[name] + (1 - beta2) * g
            params[name] = params[name] - lr * (update + decay * params[name])


def lamb(params: Params, lr: float, beta1: float, beta2: float, decay: float) -> None:
    """Algorithm 2 of arXiv:1904.00962 with phi(z) = z and eps = 1e-6."""
    m = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    v = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    for step in range(STEPS):
        for name, g in gradient(params, step).items():
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g**2
            ratio = m[name] / (1 - beta1 ** (step + 1)) / ((v[name] / (1 - beta2 ** (step + 1))).sqrt() + 1e-6)
            ratio = ratio + decay * params[name]
            params[name] = params[name] - lr * params[name].norm() / ratio.norm() * ratio


REFERENCES: list[tuple[Callable[..., None], Callable[..., F.Transform], tuple[float, ...]]] = [
    (lion, F.lion, (0.01, 0.9, 0.99, 0.0)),
    (lion, F.lion, (0.003, 0.95, 0.98, 0.3)),
    (lamb, F.lamb, (0.01, 0.9, 0.999, 0.0)),
    (lamb, F.lamb, (0.03, 0.8, 0.95, 0.1)),
]


@pytest.mark.parametrize(("reference", "ours", "numbers"), REFERENCES)
def test_runs_as_the_paper(
    reference: Callable[..., None], ours: Callable[..., F.Transform], numbers: tuple[float, ...]
) -> None:
    lr, beta1, beta2, decay = numbers
    expected = start()
    reference(expected, *numbers)
    found, _ = run(ours(lr, (beta1, beta2), weight_decay=decay))
    assert_run_close(found, expected, start(), RUN_F64)


def test_lion_moves_every_entry_by_lr() -> None:
    """Section 4.2 of the paper: the update has uniform magnitude."""
    updates, _ = F.lion(0.25).update(gradient(start(), 0), F.lion(0.25).init(start()), start())
    assert all((leaf.abs() == 0.25).all() for leaf in updates.values())


def test_lamb_moves_every_leaf_by_lr_times_its_norm() -> None:
    params = start()
    updates, _ = F.lamb(0.25).update(gradient(params, 0), F.lamb(0.25).init(params), params)
    for name, leaf in params.items():
        torch.testing.assert_close(updates[name].norm(), 0.25 * leaf.norm(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["lion", "lamb", "schedule_free_adamw"])
def test_ascent_is_descent_of_the_negative(name: str) -> None:
    params, make = start(), getattr(F, name)
    up, down = make(0.1, weight_decay=0.0, maximize=True), make(0.1, weight_decay=0.0)
    grads = gradient(params, 0)
    found, _ = up.update(grads, up.init(params), params)
    expected, _ = down.update({path: -leaf for path, leaf in grads.items()}, down.init(params), params)
    assert_close(found, expected)


# --- schedule-free ---------------------------------------------------------------------------------------------------


def schedule_free(lr: float, beta1: float, beta2: float, decay: float, warmup: int, r: float, power: float) -> Any:
    """The three sequences of arXiv:2405.15682, algorithm 1: x, y and z, with x kept by itself."""
    x, z = start(), start()
    y = start()
    v = {name: torch.zeros_like(leaf) for name, leaf in x.items()}
    total = peak = 0.0
    for step in range(STEPS):
        rate = lr * min(1.0, (step + 1) / warmup) if warmup else lr
        peak = max(peak, rate)
        weight = (step + 1) ** r * peak**power
        total += weight
        c = weight / total
        for name, g in gradient(y, step).items():
            v[name] = beta2 * v[name] + (1 - beta2) * g**2
            ratio = g / ((v[name] / (1 - beta2 ** (step + 1))).sqrt() + 1e-8)
            z[name] = z[name] - rate * (ratio + decay * y[name])
            x[name] = (1 - c) * x[name] + c * z[name]
        y = {name: (1 - beta1) * z[name] + beta1 * x[name] for name in x}
    return x, y


@pytest.mark.parametrize(
    ("lr", "beta1", "beta2", "decay", "warmup", "r", "power"),
    [(0.01, 0.9, 0.999, 0.0, 0, 0.0, 2.0), (0.03, 0.95, 0.99, 0.1, 20, 0.0, 2.0), (0.01, 0.5, 0.9, 0.1, 5, 1.0, 1.0)],
)
def test_schedule_free_runs_as_the_paper(
    lr: float, beta1: float, beta2: float, decay: float, warmup: int, r: float, power: float
) -> None:
    x, y = schedule_free(lr, beta1, beta2, decay, warmup, r, power)
    optimizer = F.schedule_free_adamw(lr, (beta1, beta2), 1e-8, decay, warmup, r, power)
    params, state = run(optimizer)
    assert_run_close(params, y, start(), RUN_F64)
    assert_run_close(F.averaged(state, params), x, start(), RUN_F64)


def test_schedule_free_average_before_the_first_step_is_the_start() -> None:
    optimizer = F.schedule_free_adamw()
    assert_close(F.averaged(optimizer.init(start()), start()), start())


def test_schedule_free_wants_a_beta() -> None:
    with pytest.raises(ValueError, match=r"betas\[0\] must be > 0"):
        F.schedule_free_adamw(betas=(0.0, 0.9))


def test_asgd_average_is_that_of_pytorch() -> None:
    torch.set_default_dtype(torch.float64)
    leaves = {name: torch.nn.Parameter(leaf) for name, leaf in start().items()}
    classic = torch.optim.ASGD(leaves.values(), lr=0.1, t0=20, lambd=0.01)
    for step in range(STEPS):
        for name, grad in gradient({name: leaf.detach() for name, leaf in leaves.items()}, step).items():
            leaves[name].grad = grad
        classic.step()
    params, state = run(F.asgd(0.1, t0=20, lambd=0.01))
    expected = {name: classic.state[leaf]["ax"] for name, leaf in leaves.items()}
    assert_run_close(F.averaged(state, params), expected, start(), RUN_F64)
    optimizer = F.asgd(0.1)
    assert_close(F.averaged(optimizer.init(start()), start()), start())


# --- what they refuse ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: F.muon().init({"w": torch.ones(2, 2), "b": torch.ones(2)}), r"muon: .*\{'b': \(2,\)\}"),
        (lambda: F.muon(ns_steps=100), "ns_steps must be below 100"),
        (lambda: F.muon(adjust_lr_fn="other"), "adjust_lr_fn must be"),
        (lambda: F.muon(ns_coefficients=(1.0, 2.0)), "three numbers"),
        (lambda: F.rprop(lr=0.1, etas=(1.2, 0.5)), r"etas must be 0 < etas\[0\] < 1 < etas\[1\]"),
        (lambda: F.adafactor(d=0.5), "d must be >= 1"),
        (lambda: F.adafactor(beta2_decay=0.8), "beta2_decay must be <= 0"),
        (lambda: F.adam(betas=(1.0, 0.9)), r"betas\[0\] must be < 1"),
        (lambda: F.nadam(momentum_decay=-1.0), "momentum_decay must be >= 0"),
        (lambda: F.rmsprop(alpha=1.5), "alpha must be <= 1"),
        (lambda: F.adagrad(lr_decay=-1.0), "lr_decay must be >= 0"),
        (lambda: F.lion(lr=-1.0), "lr must be >= 0"),
        (lambda: F.adadelta(rho=2.0), "rho must be <= 1"),
        (lambda: F.sgd(weight_decay=-0.1), "weight_decay must be >= 0"),
    ],
)
def test_bad_arguments(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda schedule: F.rprop(lr=schedule),
        lambda schedule: F.adamw(weight_decay=schedule),
        lambda schedule: F.clip_by_global_norm(schedule),
    ],
)
def test_a_schedule_where_there_is_no_step_is_refused(make: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="inject_hyperparams"):
        make(F.schedules.constant(0.1))


def test_adafactor_state_is_a_row_and_a_column() -> None:
    state = F.adafactor().init({"w": torch.ones(30, 20), "b": torch.ones(30), "conv": torch.ones(2, 3, 4, 5)})[0]
    assert {path: tuple(leaf.shape) for path, leaf in state.rows.items()} == {"w": (30, 1), "conv": (2, 3, 4, 1)}
    assert {path: tuple(leaf.shape) for path, leaf in state.columns.items()} == {"w": (1, 20), "conv": (2, 3, 1, 5)}
    assert {path: tuple(leaf.shape) for path, leaf in state.squares.items()} == {"b": (30,)}
