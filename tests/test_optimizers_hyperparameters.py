"""Every hyper-parameter of every optimizer: a tensor, one a lane, a schedule, and differentiable."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from helpers import RUN_F64, assert_close, assert_nonzero, assert_run_close, lane
from torch import Tensor
from torch.utils import _pytree

import functricks as F
from functricks import optimizers, schedules

F64 = torch.float64
Params = dict[str, Tensor]

BETAS = ((0.9, 0.99), (0.5, 0.9), (0.3, 0.6))
DECAY = (0.1, 0.01, 0.3)
EPS = (1e-3, 0.1, 1e-2)
LR = (0.1, 0.2, 0.3)
# Every number that an optimizer takes, one value a lane; test_no_number_is_left_out holds this to the signatures.
NUMBERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "adadelta": {"lr": LR, "rho": (0.9, 0.5, 0.2), "eps": EPS, "weight_decay": DECAY},
    "adafactor": {"lr": LR, "beta2_decay": (-0.8, -1.0, -0.5), "eps": ((1e-4, 1e-3), (3.0, 5.0), (1e-2, 2.0)),
                  "d": (1.05, 1.5, 2.0), "weight_decay": DECAY},
    "adagrad": {"lr": LR, "lr_decay": (0.1, 0.5, 1.0), "weight_decay": DECAY,
                "initial_accumulator_value": (0.1, 1.0, 0.5), "eps": EPS},
    "adam": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
    "adamax": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
    "adamw": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
    "asgd": {"lr": LR, "lambd": (0.1, 0.5, 0.01), "alpha": (0.75, 0.5, 1.0), "t0": (0.5, 1.5, 2.5),
             "weight_decay": DECAY},
    "lamb": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
    "lion": {"lr": LR, "betas": ((0.9, 0.99), (0.1, 0.2), (0.5, 0.6)), "weight_decay": DECAY},
    "muon": {"lr": LR, "weight_decay": DECAY, "momentum": (0.9, 0.5, 0.2),
             "ns_coefficients": ((2.0, -1.5, 0.5), (3.4445, -4.775, 2.0315), (1.5, -0.5, 0.0)),
             "eps": (1e-3, 10.0, 3.0)},
    "nadam": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "momentum_decay": (0.004, 0.1, 0.5)},
    "radam": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
    "rmsprop": {"lr": LR, "alpha": (0.9, 0.5, 0.2), "eps": EPS, "weight_decay": DECAY, "momentum": (0.9, 0.5, 0.2)},
    "rprop": {"lr": LR, "etas": ((0.5, 1.2), (0.3, 2.0), (0.9, 1.1)),
              "step_sizes": ((0.029, 0.19), (0.12, 0.3), (0.28, 0.31))},
    "schedule_free_adamw": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "warmup_steps": (2, 3, 0),
                            "r": (0.5, 1.0, 2.0), "weight_lr_power": (2.0, 1.0, 0.5)},
    "sgd": {"lr": LR, "momentum": (0.9, 0.5, 0.2), "dampening": (0.1, 0.5, 0.2), "weight_decay": DECAY},
}  # fmt: skip
# Structure, and selectors; learning_rates is tested below.
FIXED = {"amsgrad", "centered", "nesterov", "maximize", "decoupled_weight_decay", "adjust_lr_fn", "ns_steps",
         "decay_where", "learning_rates"}  # fmt: skip
EVERY = pytest.mark.parametrize("name", NUMBERS)
RATES = [name for name in NUMBERS if "learning_rates" in inspect.signature(getattr(optimizers, name)).parameters]
# Variants that Python flags choose.
FLAGS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in NUMBERS],
    ("adam", {"amsgrad": True, "maximize": True}),
    ("adamw", {"amsgrad": True, "decay_where": "tall"}),
    ("nadam", {"decoupled_weight_decay": True}),
    ("radam", {"decoupled_weight_decay": True}),
    ("rmsprop", {"centered": True}),
    ("muon", {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
]
VARIANTS = pytest.mark.parametrize(("name", "flags"), FLAGS, ids=[f"{name}{list(flags)}" for name, flags in FLAGS])


def start(name: str) -> Params:
    """No random numbers: this is called in lanes too."""
    shapes = {"tall": (4, 3), "wide": (2, 3)} | ({} if name == "muon" else {"bias": (3,)})
    return {path: wave(shape, phase) for phase, (path, shape) in enumerate(shapes.items())}


def wave(shape: tuple[int, ...], phase: float) -> Tensor:
    return (1.7 * torch.arange(math.prod(shape), dtype=F64) + 2.1 * phase + 0.4).sin().reshape(shape)


def slopes(params: Params, step: int) -> Params:
    """Gradients away from zero, of which some keep their sign, as rprop needs; they do not see the parameters."""
    waves = {path: wave(tuple(leaf.shape), 1.3 * step + len(path)) for path, leaf in params.items()}
    return {path: (1 + step % 4) * (leaf + leaf.sign() * 0.2 + 0.3) for path, leaf in waves.items()}


def run(name: str, numbers: Any, steps: int = 8, **flags: Any) -> Params:
    """The parameters after some steps, and the average that some optimizers keep of them."""
    optimizer = getattr(optimizers, name)(**flags, **numbers)
    params = start(name)
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(slopes(params, step), state, params)
        params = F.apply_updates(params, updates)
    return {**params, **averages(name, state, params)}


def averages(name: str, state: Any, params: Params) -> Params:
    if name not in ("asgd", "schedule_free_adamw"):
        return {}
    return {f"mean of {path}": leaf for path, leaf in F.averaged(state, params).items()}


def tensors(numbers: Any) -> Any:
    return _pytree.tree_map(lambda x: torch.tensor(x, dtype=F64 if isinstance(x, float) else torch.int64), numbers)


def values(name: str, index: int) -> dict[str, Any]:
    return {key: lanes[index] for key, lanes in NUMBERS[name].items()}


# --- the table -------------------------------------------------------------------------------------------------------


def test_no_number_is_left_out() -> None:
    assert set(NUMBERS) == set(optimizers.__all__)
    for name, numbers in NUMBERS.items():
        assert set(inspect.signature(getattr(optimizers, name)).parameters) - FIXED == set(numbers), name


@EVERY
def test_every_number_counts(name: str) -> None:
    """Else equal lanes and zero derivatives would prove nothing."""
    base = run(name, values(name, 0))
    assert_nonzero(slopes(base, 0))
    for key in NUMBERS[name]:
        moved = run(name, {**values(name, 0), key: values(name, 1)[key]})
        assert any(not torch.equal(moved[path], base[path]) for path in base), f"{key} has no effect"


# --- tensors and lanes -----------------------------------------------------------------------------------------------


@VARIANTS
def test_lanes_are_solo_runs_with_python_numbers(name: str, flags: dict[str, Any]) -> None:
    stacked = _pytree.tree_map(lambda *own: torch.stack(own), *[tensors(values(name, i)) for i in range(3)])
    steps = 2 if name == "muon" else 8
    found = torch.vmap(lambda numbers: run(name, numbers, steps, **flags))(stacked)
    for i in range(3):
        alone = run(name, values(name, i), steps, **flags)
        if name == "muon":  # it computes in bfloat16, tensor coefficients by another operation
            for path, leaf in alone.items():
                torch.testing.assert_close(found[path][i], leaf, rtol=0, atol=0.2 * values(name, i)["lr"])
        else:
            assert_close(lane(found, i), alone, eps=256)  # eight steps


@EVERY
def test_float32_tensors_on_float32_leaves_are_solo_runs(name: str) -> None:
    """What experiments pass. The lanes keep the leaves' dtype."""

    def half_way(numbers: Any) -> Params:
        optimizer = getattr(optimizers, name)(**numbers)
        params = {path: leaf.float() for path, leaf in start(name).items()}
        grads = {path: leaf.float() for path, leaf in slopes(params, 0).items()}
        return F.apply_updates(params, optimizer.update(grads, optimizer.init(params), params)[0])

    singles = [_pytree.tree_map(lambda x: x.float() if x.is_floating_point() else x, tensors(values(name, i)))
               for i in range(3)]  # fmt: skip
    found = torch.vmap(half_way)(_pytree.tree_map(lambda *own: torch.stack(own), *singles))
    for i in range(3):
        alone = half_way(_pytree.tree_map(lambda x: x.item(), singles[i]))
        if name == "muon":
            for path, leaf in alone.items():
                torch.testing.assert_close(found[path][i], leaf, rtol=0, atol=0.2 * values(name, i)["lr"])
        else:
            assert_close(lane(found, i), alone, eps=16)


@pytest.mark.parametrize("name", RATES)
def test_learning_rates_are_numbers_too(name: str) -> None:
    factors = torch.tensor([10.0, 0.5, 0.0], dtype=F64)
    found = torch.vmap(lambda factor: run(name, {"lr": 0.1}, 1, learning_rates={"ta*": factor}))(factors)
    plain, origin = run(name, {"lr": 0.1}, 1), start(name)
    for path, leaf in origin.items():
        for i, factor in enumerate(factors if path == "tall" else [1.0, 1.0, 1.0]):
            torch.testing.assert_close(found[path][i] - leaf, factor * (plain[path] - leaf), rtol=1e-12, atol=1e-14)


# --- derivatives -----------------------------------------------------------------------------------------------------


@VARIANTS
def test_derivatives_are_differences(name: str, flags: dict[str, Any]) -> None:
    """Of the parameters after a run, by each number; against central differences."""
    numbers, structure = _pytree.tree_flatten(tensors(values(name, 0)))
    labels = [_pytree.keystr(path) for path, _ in _pytree.tree_flatten_with_path(values(name, 0))[0]]

    def loss(numbers: list[Tensor]) -> Tensor:
        params = run(name, _pytree.tree_unflatten(numbers, structure), **flags)
        return torch.stack([(leaf * torch.linspace(1, 2, leaf.numel(), dtype=F64).view_as(leaf)).sum()
                            for leaf in params.values()]).sum()  # fmt: skip

    places = [i for i, number in enumerate(numbers) if number.is_floating_point()]

    def of_floats(floats: list[Tensor]) -> Tensor:
        filled = list(numbers)
        for place, value in zip(places, floats, strict=True):
            filled[place] = value
        return loss(filled)

    floats = [numbers[i] for i in places]
    found = torch.func.grad(of_floats)(floats)
    for index, place in enumerate(places):
        assert torch.isfinite(found[index]), labels[place]
        if name == "muon" and labels[place] not in ("['lr']", "['weight_decay']"):
            continue  # a difference of bfloat16 numbers says nothing
        step = 1e-5 * max(1e-2, floats[index].abs().item())
        ahead, behind = (of_floats([x + sign * step if i == index else x for i, x in enumerate(floats)])
                         for sign in (1, -1))  # fmt: skip
        expected = (ahead - behind).item() / (2 * step)
        assert found[index].item() == pytest.approx(expected, rel=1e-5, abs=1e-5), labels[place]


def test_a_learning_rate_can_be_learned_with_every_optimizer() -> None:
    """One step downhill in the learning rate makes the loss after a step smaller."""
    for name in NUMBERS:
        origin = start(name)

        def after(lr: Tensor, name: str = name, origin: Params = origin) -> Tensor:
            optimizer = getattr(optimizers, name)(lr)
            updates, _ = optimizer.update(origin, optimizer.init(origin), origin)
            return sum((leaf.square().sum() for leaf in F.apply_updates(origin, updates).values()), torch.zeros(()))

        lr = torch.tensor(1e-3, dtype=F64)
        slope, loss = torch.func.grad_and_value(after)(lr)
        assert slope < 0, name
        assert after(lr - 1e-3 * slope / slope.abs()) < loss, name


# --- schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theirs", ["Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "Muon", "NAdam",
                                    "RAdam", "RMSprop", "SGD"])  # fmt: skip
def test_a_schedule_is_a_scheduler_of_pytorch(theirs: str) -> None:
    torch.set_default_dtype(F64)
    name = theirs.lower()
    origin = start(name)
    leaves = {path: torch.nn.Parameter(leaf.clone()) for path, leaf in origin.items()}
    classic = getattr(torch.optim, theirs)(leaves.values(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(classic, 0.8)
    for step in range(20):
        for path, grad in slopes(origin, step).items():
            leaves[path].grad = grad
        classic.step()
        scheduler.step()
    expected = {path: leaf.detach() for path, leaf in leaves.items()}
    assert_run_close(run(name, {"lr": schedules.exponential_decay(0.1, 0.8)}, 20), expected, origin, RUN_F64)


def test_asgd_takes_a_schedule_at_once() -> None:
    """PyTorch computes the rate of a step at the end of the one before: there a scheduler acts one step late."""
    rates = [0.1 * 0.8**step for step in range(20)]
    expected = start("asgd")
    for step, rate in enumerate(rates):
        eta = rate / (1 + 0.5 * rate * step) ** 0.75
        grads = slopes(expected, step)
        expected = {path: (1 - 0.5 * eta) * leaf - eta * grads[path] for path, leaf in expected.items()}
    found = run("asgd", {"lr": schedules.exponential_decay(0.1, 0.8), "lambd": 0.5}, 20)
    assert_run_close({path: found[path] for path in expected}, expected, start("asgd"), RUN_F64)


@pytest.mark.parametrize("name", ["lamb", "lion", "schedule_free_adamw"])
def test_a_schedule_is_a_rate_a_step(name: str) -> None:
    """A state goes from a step with one rate to a step with the next."""
    make, params = getattr(optimizers, name), start(name)
    state = make(0.1).init(params)
    for step in range(6):
        updates, state = make(0.1 * 0.8**step).update(slopes(params, step), state, params)
        params = F.apply_updates(params, updates)
    found = run(name, {"lr": schedules.exponential_decay(0.1, 0.8)}, 6)
    assert_run_close({path: found[path] for path in params}, params, start(name), RUN_F64)


@EVERY
def test_every_number_may_be_a_schedule_by_injection(name: str) -> None:
    """Each number moves by itself over the steps; the reference is a new optimizer a step, with Python numbers."""

    def at(step: int, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(at(step, one) for one in value)
        return value if isinstance(value, int) else value * (1 - 0.01 * step)

    def scheduled(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(scheduled(one) for one in value)
        return value if isinstance(value, int) else lambda step: value * (1 - 0.01 * step.double())

    make, origin = getattr(optimizers, name), start(name)
    for key in NUMBERS[name]:
        fixed = values(name, 0)
        own = fixed.pop(key)
        params, state = origin, make(**fixed, **{key: own}).init(origin)
        for step in range(4):
            updates, state = make(**fixed, **{key: at(step, own)}).update(slopes(params, step), state, params)
            params = F.apply_updates(params, updates)
        injected = F.inject_hyperparams(make)(**fixed, **{key: scheduled(own)})
        found, memory = origin, injected.init(origin)
        for step in range(4):
            updates, memory = injected.update(slopes(found, step), memory, found)
            found = F.apply_updates(found, updates)
        if name == "muon":
            for path, leaf in params.items():
                torch.testing.assert_close(found[path], leaf, rtol=0, atol=0.05)
        else:
            assert_close(found, params, eps=256)
        if not isinstance(own, int):
            now = _pytree.tree_map(lambda x: x.item(), memory.hyperparams[key])
            assert now == pytest.approx(at(3, own))


# --- one program -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_numbers_of_all_optimizers_are_inputs_of_one_program() -> None:
    """A second set of numbers compiles nothing."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    several = {name: tensors(values(name, 0)) for name in NUMBERS}
    others = {name: tensors(values(name, 1)) for name in NUMBERS}

    def step(numbers: Any, grads: Any) -> Any:
        found = {}
        for name, own in numbers.items():
            optimizer = getattr(optimizers, name)(**own)
            found[name] = optimizer.update(grads[name], optimizer.init(grads[name]), grads[name])[0]
        return found

    grads = {name: start(name) for name in NUMBERS}
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for numbers in (several, others):
        found, expected = compiled(numbers, grads), step(numbers, grads)
        muon, plain = found.pop("muon"), expected.pop("muon")
        assert_close(found, expected, eps=64)
        for path, leaf in plain.items():
            torch.testing.assert_close(muon[path], leaf, rtol=0, atol=0.02)
    assert counter.frame_count == 1
