"""Every optimizer against ``torch.optim``, over every configuration that PyTorch itself tests.

PyTorch's list is ``optim_db`` of ``torch.testing._internal.common_optimizers``. An optimizer or an argument that joins
it makes a test here fail until it is here too, or among the exclusions with a reason.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import RUN_F64, assert_nonzero, assert_run_close
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import OptimizerInput, optim_db

import functricks as F
from functricks import optimizers

EXCLUDED = {
    "LBFGS": "calls the loss several times within a step",
    "SparseAdam": "takes sparse gradients, which torch.func does not make",
}
# What PyTorch's optimizers have beside the arithmetic.
NOT_ARITHMETIC = {"params", "foreach", "fused", "capturable", "differentiable"}
PEERLESS = {"lamb", "lion", "schedule_free_adamw"}  # test_optimizers_reference.py

Params = dict[str, Tensor]


def configurations() -> Iterator[Any]:
    for info in optim_db:
        if info.optim_cls.__name__ in EXCLUDED:
            continue
        for given in info.optim_inputs_func(device="cpu"):
            name = ", ".join(f"{key}={value}" for key, value in given.kwargs.items())
            yield pytest.param(info.optim_cls, given, id=f"{info.optim_cls.__name__}({name})")


def functional(theirs: type) -> Callable[..., F.Transform]:
    maker: Callable[..., F.Transform] = getattr(optimizers, theirs.__name__.lower())
    return maker


# --- the list --------------------------------------------------------------------------------------------------------


def test_every_optimizer_of_pytorch_is_here_or_excluded() -> None:
    theirs = {info.optim_cls.__name__ for info in optim_db}
    ours = {name.lower() for name in optimizers.__all__} - PEERLESS
    assert {name.lower() for name in theirs - EXCLUDED.keys()} == ours
    assert EXCLUDED.keys() <= theirs
    offered = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    assert offered == theirs, "optim_db does not list them all"


@pytest.mark.parametrize("theirs", [info.optim_cls for info in optim_db if info.optim_cls.__name__ not in EXCLUDED])
def test_arguments_and_defaults_are_those_of_pytorch(theirs: type) -> None:
    classic = {
        name: parameter.default
        for name, parameter in inspect.signature(theirs).parameters.items()
        if name not in NOT_ARITHMETIC
    }
    ours = {name: parameter.default for name, parameter in inspect.signature(functional(theirs)).parameters.items()}
    if theirs is torch.optim.AdamW:
        classic.setdefault("maximize", False)
    assert {name: ours.get(name, "missing") for name in classic} == classic
    assert set(ours) - set(classic) <= {"decay_where", "learning_rates", "maximize"}
    assert next(iter(ours)) == "lr"


# --- runs ------------------------------------------------------------------------------------------------------------


def start(dtype: torch.dtype) -> Params:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {"tall": draw(5, 3), "wide": draw(3, 4)} | ({"bias": draw(4), "deep": draw(2, 3, 2)})


def gradients_at(params: Params, step: int) -> Params:
    """The gradient of a curved, noisy loss: no entry is zero, and the noise never ends, so that the run never rests."""
    generator = torch.Generator().manual_seed(step)
    found = {}
    for name, leaf in params.items():
        noise = torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.dtype)
        found[name] = torch.tanh(leaf) + 0.3 * leaf * leaf.sum().tanh() + noise
    return found


def chosen(theirs: type, dtype: torch.dtype) -> Params:
    params = start(dtype)
    return {name: leaf for name, leaf in params.items() if theirs is not torch.optim.Muon or leaf.ndim == 2}


def classic_run(theirs: type, kwargs: dict[str, Any], params: Params, steps: int, noise_only: bool) -> Params:
    leaves = {name: nn.Parameter(leaf.clone()) for name, leaf in params.items()}
    optimizer = theirs(list(leaves.values()), **kwargs)
    for step in range(steps):
        at = params if noise_only else {name: leaf.detach() for name, leaf in leaves.items()}
        for name, grad in gradients_at(at, step).items():
            leaves[name].grad = grad
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def functional_run(theirs: type, kwargs: dict[str, Any], params: Params, steps: int, noise_only: bool) -> Params:
    optimizer = functional(theirs)(**kwargs)
    start, state = params, optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(gradients_at(start if noise_only else params, step), state, params)
        params = F.apply_updates(params, updates)
    return params


def both(theirs: type, given: OptimizerInput, dtype: torch.dtype, steps: int) -> tuple[Params, Params, Params]:
    # PyTorch keeps scalars of ASGD and NAdam in the default dtype: in float32 they would be off by 1e-8.
    torch.set_default_dtype(dtype)
    params = chosen(theirs, dtype)
    assert_nonzero(params, gradients_at(params, 0))
    # Muon rounds to bfloat16: a gradient that is off by 1e-16 now and then rounds to the other side, off by 0.4 %.
    noise_only = theirs is torch.optim.Muon
    # Muon computes 1 - lr * weight_decay in the dtype of a tensor lr, which would be float32.
    kwargs = {key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in given.kwargs.items()}
    runs = (run(theirs, kwargs, params, steps, noise_only) for run in (classic_run, functional_run))
    return params, *runs


@pytest.mark.slow
@pytest.mark.parametrize(("theirs", "given"), list(configurations()))
def test_a_thousand_steps_in_float64(theirs: type, given: OptimizerInput) -> None:
    params, classic, ours = both(theirs, given, torch.float64, 1000)
    assert_run_close(ours, classic, params, RUN_F64)


# A step's rounding is an ulp; over a run they add up, and a curved loss makes them grow or fade. functricks.optimizers
# states these numbers.
F32_ULPS = {100: 64, 1000: 256}


def assert_within_ulps(theirs: type, given: OptimizerInput, steps: int) -> None:
    """In ulps of the leaf's largest entry, at the start or at the end."""
    params, classic, ours = both(theirs, given, torch.float32, steps)
    for name, leaf in classic.items():
        size = max(params[name].abs().max().item(), leaf.abs().max().item())
        ulps = (ours[name] - leaf).abs().max().item() / (torch.finfo(torch.float32).eps * size)
        assert ulps <= F32_ULPS[steps], f"{name}: {ulps:.1f} ulps"


@pytest.mark.parametrize(("theirs", "given"), list(configurations()))
def test_a_hundred_steps_in_float32(theirs: type, given: OptimizerInput) -> None:
    assert_within_ulps(theirs, given, 100)


@pytest.mark.slow
@pytest.mark.parametrize(("theirs", "given"), list(configurations()))
def test_a_thousand_steps_in_float32(theirs: type, given: OptimizerInput) -> None:
    assert_within_ulps(theirs, given, 1000)


def test_the_ulps_are_those_that_the_documentation_states() -> None:
    text = " ".join((optimizers.__doc__ or "").split())
    assert f"{F32_ULPS[100]} ulps of its largest entry after 100 steps and {F32_ULPS[1000]} after 1,000" in text
    for name in EXCLUDED:
        assert f"``{name}``" in text


def test_an_optimizer_or_an_argument_that_joins_pytorch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above fail, as they promise."""

    class Newcomer(torch.optim.SGD):
        pass

    class Adam(torch.optim.Adam):
        def __init__(self, params: Any, lr: float = 1e-3, curvature: float = 0.0) -> None:
            super().__init__(params, lr)

    known = list(optim_db)
    monkeypatch.setattr(torch.optim, "Newcomer", Newcomer, raising=False)
    with pytest.raises(AssertionError, match="optim_db does not list them all"):
        test_every_optimizer_of_pytorch_is_here_or_excluded()
    monkeypatch.setattr(f"{__name__}.optim_db", [*known, copy_of(known[0], Newcomer)])
    with pytest.raises(AssertionError, match="newcomer"):
        test_every_optimizer_of_pytorch_is_here_or_excluded()
    with pytest.raises(AssertionError, match="curvature"):
        test_arguments_and_defaults_are_those_of_pytorch(Adam)


def copy_of(info: Any, theirs: type) -> Any:
    other = copy.copy(info)
    other.optim_cls = theirs
    return other


def test_a_difference_is_seen() -> None:
    given = OptimizerInput(params=None, kwargs={"lr": 0.01}, desc="")
    params, classic, ours = both(torch.optim.Adam, given, torch.float64, 20)
    moved = {**ours, "bias": ours["bias"] + 3 * RUN_F64 * (classic["bias"] - params["bias"])}
    assert_run_close(ours, classic, params)
    with pytest.raises(AssertionError, match="bias"):
        assert_run_close(moved, classic, params)
