"""Parity with torch.optim over whole runs, and the arguments that are refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import assert_nonzero, assert_run_close, assert_same, ulps
from torch import Tensor

import functricks as F
from functricks import averaging, clipping, optimizers, schedules, transforms

F32, F64 = torch.float32, torch.float64
STEPS = 1000


def start(dtype: torch.dtype = F64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (4, 3), "bias": (4,), "alpha": ()}
    return {name: torch.randn(shape, generator=generator, dtype=F64).to(dtype) for name, shape in shapes.items()}


def slopes(params: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Gradients that depend on the parameters, so that errors would grow, and on the step, so that nothing settles."""
    return {name: (leaf * (1 + 0.1 * (step % 7))).sin() + 0.3 * leaf + 0.1 for name, leaf in params.items()}


def by_torch(make: Any, params: dict[str, Tensor], steps: int, scheduler: Any = None) -> dict[str, Tensor]:
    leaves = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in params.items()}
    optimizer = make(leaves.values())
    schedule = None if scheduler is None else scheduler(optimizer)
    for step in range(steps):
        for name, grad in slopes({name: p.detach() for name, p in leaves.items()}, step).items():
            leaves[name].grad = grad
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return {name: p.detach() for name, p in leaves.items()}


def by_us(transform: F.Transform, params: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
    state = transform.init(params)
    for step in range(steps):
        updates, state = transform.update(slopes(params, step), state, params)
        params = F.apply_updates(params, updates)
    return params


def combinations(**axes: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values())]


SGD = [
    options
    for options in combinations(
        momentum=[0.0, 0.9],
        dampening=[0.0, 0.1],
        nesterov=[False, True],
        weight_decay=[0.0, 0.01],
        maximize=[False, True],
    )
    if not (options["nesterov"] and (options["momentum"] == 0 or options["dampening"] != 0))
]
ADAM = combinations(weight_decay=[0.0, 0.01], amsgrad=[False, True], maximize=[False, True])
CASES = [
    *[("sgd", torch.optim.SGD, F.sgd, {"lr": 0.01, **options}) for options in SGD],
    *[("adam", torch.optim.Adam, F.adam, {"lr": 0.01, **options}) for options in ADAM],
    *[("adamw", torch.optim.AdamW, F.adamw, {"lr": 0.01, **options}) for options in ADAM],
    ("adam", torch.optim.Adam, F.adam, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3}),
    ("adamw", torch.optim.AdamW, F.adamw, {"lr": 0.01, "betas": (0.0, 0.999), "eps": 1e-10}),
]
IDS = [f"{name}-{'-'.join(f'{key}={value}' for key, value in options.items() if value)}" for name, *_, options in CASES]


def steps_of(options: dict[str, Any]) -> int:
    return 300 if options.get("maximize") else STEPS  # ascent: the parameters grow, and errors with them


@pytest.mark.parametrize(("name", "classic", "ours", "options"), CASES, ids=IDS)
def test_a_run_in_float64(name: str, classic: Any, ours: Any, options: dict[str, Any]) -> None:
    params, steps = start(), steps_of(options)
    assert_nonzero(params, slopes(params, 0))
    expected = by_torch(lambda leaves: classic(leaves, **options), params, steps)
    assert_run_close(by_us(ours(**options), params, steps), expected, params)


@pytest.mark.parametrize(("name", "classic", "ours", "options"), CASES, ids=IDS)
def test_one_step_in_float32(name: str, classic: Any, ours: Any, options: dict[str, Any]) -> None:
    """In ulps of the parameter: PyTorch decays the parameter first, we add one update, so the last place may differ."""
    params = start(F32)
    expected = by_torch(lambda leaves: classic(leaves, **options), params, 1)
    assert ulps(by_us(ours(**options), params, 1), expected) <= 1


def test_ten_steps_of_adamw_in_float32() -> None:
    params = start(F32)
    expected = by_torch(lambda leaves: torch.optim.AdamW(leaves, lr=0.01), params, 10)
    assert ulps(by_us(F.adamw(0.01), params, 10), expected) <= 16  # a last place a step, where an entry is near zero


@pytest.mark.parametrize(("classic", "ours"), [(torch.optim.SGD, F.sgd), (torch.optim.Adam, F.adam)])
def test_defaults_are_those_of_torch(classic: Any, ours: Any) -> None:
    params = start()
    assert_run_close(by_us(ours(), params, 20), by_torch(classic, params, 20), params)


def test_the_default_of_adamw_decays() -> None:
    params = start()
    expected = by_torch(torch.optim.AdamW, params, 20)
    assert_run_close(by_us(F.adamw(), params, 20), expected, params)


def test_a_schedule_is_a_scheduler() -> None:
    params = start()
    expected = by_torch(
        lambda leaves: torch.optim.AdamW(leaves, lr=0.1),
        params,
        200,
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.5),
    )
    assert_run_close(by_us(F.adamw(schedules.step_decay(0.1, 30, 0.5)), params, 200), expected, params)


def test_parameter_groups_are_a_partition() -> None:
    params = start()

    def classic(leaves: Any) -> torch.optim.Optimizer:
        weight, bias, alpha = leaves
        groups = [{"params": [weight], "lr": 0.1}, {"params": [bias, alpha], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)

    ours = F.partition(
        {"big": F.adamw(0.1, weight_decay=0.1), "rest": F.adamw(0.01, weight_decay=0.0)},
        lambda path, leaf: "big" if path == "weight" else "rest",
    )
    assert_run_close(by_us(ours, params, 100), by_torch(classic, params, 100), params)


def test_numbers_and_tensors_are_the_same_hyper_parameters() -> None:
    params = start()

    def tensor(value: float) -> Tensor:
        return torch.tensor(value, dtype=F64)

    for numbers, tensors in [
        (F.sgd(0.01, 0.9, 0.1, 0.01), F.sgd(*map(tensor, (0.01, 0.9, 0.1, 0.01)))),
        (
            F.adamw(0.01, (0.9, 0.99), 1e-6, 0.1, amsgrad=True),
            F.adamw(tensor(0.01), (tensor(0.9), tensor(0.99)), tensor(1e-6), tensor(0.1), amsgrad=True),
        ),
    ]:
        assert_run_close(by_us(tensors, params, 100), by_us(numbers, params, 100), params)


def test_half_parameters_move_though_the_step_is_small() -> None:
    """The moments are float32: 1e-4 squared is zero in float16, and the step would be 1e-4 / eps."""
    for dtype in (torch.float16, torch.bfloat16):
        params = {"w": torch.ones(3, dtype=dtype)}
        grads = {"w": torch.full((3,), 1e-4, dtype=dtype)}
        optimizer = F.adam(0.125)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        assert_same(F.apply_updates(params, updates), {"w": torch.full((3,), 0.875, dtype=dtype)})


# Plumbing, which has no formula, no paper and no counterpart of its own.
PLUMBING = {"apply_updates", "averaged", "chain", "masked", "named_chain", "scale", "scale_by_schedule"}


@pytest.mark.parametrize("module", [optimizers, transforms, clipping, averaging])
def test_docstrings_have_formula_paper_and_counterpart(module: Any) -> None:
    for name in set(module.__all__) - PLUMBING:
        text = " ".join((getattr(module, name).__doc__ or "").split())
        assert "Classic:" in text or "PyTorch has no" in text, f"{name}: what of PyTorch is this?"
        assert ">>> " in text, name
        if module is optimizers:
            assert ".. math::" in text, f"{name}: no formula"
            assert "Reference:" in text, f"{name}: no paper"


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: F.sgd(0.1, nesterov=True), ValueError, "sgd: nesterov needs a momentum and no dampening"),
        (lambda: F.sgd(0.1, 0.9, 0.1, nesterov=True), ValueError, "sgd: nesterov needs a momentum and no dampening"),
        (lambda: F.sgd(-0.1), ValueError, "lr must be >= 0, got -0.1"),
        (lambda: F.sgd(0.1, -0.9), ValueError, "momentum must be >= 0, got -0.9"),
        (lambda: F.sgd(0.1, weight_decay=-0.1), ValueError, "weight_decay must be >= 0, got -0.1"),
        (lambda: F.adam(0.1, (0.9, 1.0)), ValueError, r"betas\[1\] must be < 1, got 1.0"),
        (lambda: F.adamw(0.1, eps=-1e-8), ValueError, "eps must be >= 0, got -1e-08"),
        (lambda: F.adamw("fast"), TypeError, "lr must be a number or a 0-d tensor, got 'fast'"),
        (lambda: F.adamw(True), TypeError, "lr must be a number or a 0-d tensor, got True"),
    ],
)
def test_bad_arguments(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_nadams_momentum_is_float64() -> None:
    """A count times a Python number is float32: the momentum was off by 1e-8, a number and a tensor differed."""
    runs = [by_us(F.nadam(0.1, momentum_decay=decay), start(), 20) for decay in (0.03, torch.tensor(0.03, dtype=F64))]
    assert_run_close(runs[0], runs[1], start())
