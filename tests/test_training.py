"""One training step: everything happens, or nothing does; per lane, compiled, and differentiable."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as nnf
from helpers import assert_close, assert_nonzero, assert_run_close, assert_same, assert_untouched, lane, stack
from torch import Tensor

import functricks as F
from functricks import TrainState, accumulate, gradient, losses, schedules, train_step

F32, F64 = torch.float32, torch.float64


def mlp(seed: int, dtype: torch.dtype = F64) -> dict[str, Tensor]:
    draw = numpy.random.default_rng(seed)  # not torch's, which draws nothing under vmap
    shapes = {"w1": (5, 4), "b1": (5,), "w2": (3, 5), "b2": (3,)}
    return {name: torch.as_tensor(draw.standard_normal(shape)).to(dtype) for name, shape in shapes.items()}


def forward(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return nnf.linear(nnf.linear(x, params["w1"], params["b1"]).tanh(), params["w2"], params["b2"])


def batch(seed: int, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    draw = numpy.random.default_rng(100 + seed)
    return torch.as_tensor(draw.standard_normal((6, 4))).to(dtype), torch.as_tensor(draw.integers(0, 3, 6))


def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor], carry: Any) -> Any:
    """A carry as a classic loop has it: a running mean, and a count."""
    logits = forward(params, batch[0])
    carry = {"mean": 0.9 * carry["mean"] + 0.1 * logits.mean().detach(), "calls": carry["calls"] + 1}
    return losses.cross_entropy(logits, batch[1]), carry, {"accuracy": (logits.argmax(1) == batch[1]).double().mean()}


def make(lr: Any = 0.05, **options: Any) -> F.TrainStep:
    grad_fn = gradient(loss_fn, has_carry=True, has_metrics=True)
    return train_step(grad_fn, F.chain(F.clip_by_global_norm(1.0), F.adamw(lr)), **options)


def carry(dtype: torch.dtype = F64) -> dict[str, Tensor]:
    return {"mean": torch.tensor(0.25, dtype=dtype), "calls": torch.tensor(0)}


def poisoned(seed: int, bad: float = math.nan) -> tuple[Tensor, Tensor]:
    x, y = batch(seed)
    return torch.where(torch.arange(6)[:, None] == 2, bad, x), y


# --- it is the classic loop ------------------------------------------------------------------------------------------


def test_a_run_is_the_classic_loop() -> None:
    step = make(schedules.step_decay(0.05, 10, 0.5))
    params = mlp(0)
    leaves = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in params.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    state = step.init(params, carry())
    for i in range(50):
        optimizer.zero_grad()
        loss = nnf.cross_entropy(forward(leaves, batch(i)[0]), batch(i)[1])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
        # torch adds 1e-6 to the norm before it divides; the right number is without
        for p in leaves.values():
            p.grad.mul_((norm + 1e-6) / norm if norm > 1 else 1)
        optimizer.step()
        scheduler.step()
        state, info = step.update(state, batch(i))
        assert info.loss.item() == pytest.approx(loss.item(), rel=1e-9)
        assert info.grad_norm.item() == pytest.approx(norm.item(), rel=1e-9)
        assert info.applied
    expected = {name: p.detach() for name, p in leaves.items()}
    # clip_grad_norm_ leaves gradients of norm just below 1 short by 1e-6, once or twice in a run
    assert_run_close(state.params, expected, params, relative=1e-7)
    assert state.step == state.carry["calls"] == 50


def test_nothing_is_written_to() -> None:
    step = make()
    state = step.init(mlp(0), carry())
    for data in (batch(0), poisoned(0)):
        with assert_untouched(state, data):
            step.update(state, data)


def test_the_state_is_a_pytree_of_tensors_that_keeps_its_form() -> None:
    step = make()
    state = step.init(mlp(0), carry())
    after, info = step.update(state, batch(0))
    assert isinstance(after, TrainState)
    old, new = (torch.utils._pytree.tree_leaves_with_path(one) for one in (state, after))
    assert [(path, leaf.shape, leaf.dtype) for path, leaf in old] == [
        (path, leaf.shape, leaf.dtype) for path, leaf in new
    ]
    assert info.applied.dtype == torch.bool
    assert info.weight == 6
    assert 0 <= info.metrics["accuracy"] <= 1


# --- atomic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_step_changes_nothing(bad: float) -> None:
    step = make(schedules.exponential_decay(0.05, 0.5))
    state = step.init(mlp(0), carry())
    state, _ = step.update(state, batch(0))
    after, info = step.update(state, poisoned(1, bad))
    assert_same(after, state)  # parameters, optimizer and its step, carry, counter
    assert not info.applied
    assert not torch.isfinite(info.grad_norm)
    ahead, info = step.update(after, batch(2))
    assert info.applied
    assert_same(ahead, step.update(state, batch(2))[0])


def test_c25_a_skipped_step_does_not_move_the_schedule() -> None:
    step = train_step(gradient(lambda params, g: (params["w"] * g).sum()), F.sgd(schedules.step_decay(1.0, 1, 0.5)))
    state = step.init({"w": torch.tensor(1.0)})
    applied = []
    for g in (math.inf, math.inf, 0.1):
        state, info = step.update(state, torch.tensor([g]))
        applied.append(bool(info.applied))
    assert applied == [False, False, True]
    assert state.params["w"] == pytest.approx(0.9)
    state, _ = step.update(state, torch.tensor([0.1]))
    assert state.params["w"] == pytest.approx(0.85)  # lr 0.5 only now
    assert state.step == 2


def test_c26_clipping_sees_the_gradient_not_the_scaled_one() -> None:
    """A gradient of norm 0.5 under a loss scale of 1024 is not clipped at 1."""
    scaled = gradient(lambda params, g: (params["w"] * g).sum())

    def grad_fn(params: Any, batch: Any, carry: Any = (), *, scale: Any = None) -> Any:
        return scaled(params, batch, carry, scale=1024.0)

    step = train_step(grad_fn, F.chain(F.clip_by_global_norm(1.0), F.sgd(1.0)))
    state, info = step.update(step.init({"w": torch.zeros(2)}), torch.tensor([0.3, 0.4]))
    assert_same(state.params["w"], -torch.tensor([0.3, 0.4]))
    assert info.grad_norm == pytest.approx(0.5)


def test_without_the_guard_every_step_is_applied() -> None:
    step = make(skip_nonfinite=False)
    state, info = step.update(step.init(mlp(0), carry()), poisoned(0))
    assert info.applied
    assert state.step == 1
    assert state.params["w1"].isnan().any()


def test_a_large_finite_gradient_is_applied() -> None:
    """Its norm is beyond float64; it is finite all the same, and clipped to 1."""
    step = train_step(
        gradient(lambda params, g: (params["w"] * g).sum()), F.chain(F.clip_by_global_norm(1.0), F.sgd(1.0))
    )
    state, info = step.update(step.init({"w": torch.zeros(2, dtype=F64)}), torch.full((2,), 1.5e308, dtype=F64))
    assert info.applied
    assert info.grad_norm.isinf()
    assert_close(state.params["w"], torch.full((2,), -math.sqrt(0.5), dtype=F64))


@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_diverged_lane_never_touches_its_neighbours(grad_mode: bool) -> None:
    """To the bit, over several steps: the neighbours of a bad lane, and of a good lane in its place."""
    step = make()
    starts = [step.init(mlp(i), carry()) for i in range(3)]

    def run(middle: Any) -> TrainState:
        state = stack(starts)
        for i in range(4):
            data = stack([batch(i), middle(i), batch(i + 20)])
            state, info = torch.vmap(step.update)(state, data)
            seen.append(info.applied.tolist())
        return state

    with torch.set_grad_enabled(grad_mode):
        seen: list[list[bool]] = []
        good = run(batch)
        assert seen == [[True, True, True]] * 4
        seen = []
        bad = run(lambda i: poisoned(i) if i else batch(i))
        assert seen == [[True, True, True]] + [[True, False, True]] * 3
    for i in (0, 2):
        assert_same(lane(bad, i), lane(good, i))
    first_step = step.update(starts[1], batch(0))[0]
    assert_close(lane(bad, 1), first_step)
    assert_nonzero(lane(good, 1).params)


@pytest.mark.parametrize("lanes", [3, 6])  # of one lane PyTorch's products round otherwise than of several
def test_without_the_diverged_lane_the_others_are_the_same(lanes: int) -> None:
    """To the bit against a run that never had the bad lane, with BatchNorm, dropout, an attack and a loss scale."""
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3)
    )
    model = F.functional(net)
    grad_fn = gradient(F.supervised(model, losses.cross_entropy), has_carry=True, has_metrics=True)
    step = train_step(
        accumulate(F.fgm(grad_fn, 0.1, where="0.weight"), 2),
        F.chain(F.clip_by_global_norm(0.5), F.adamw(0.05)),
        loss_scale=F.dynamic_loss_scale(2.0),
        freeze_nonfinite=2,
    )

    def start(index: int) -> TrainState:
        params = {name: leaf * (1 + 0.1 * index) for name, leaf in model.params.items()}
        return step.init(params, F.supervised_carry(model, F.random.key(index)))

    def run(chosen: list[int]) -> Any:
        state = stack([start(index) for index in chosen])
        with torch.no_grad():
            for i in range(4):
                data = [(poisoned if index == 1 and i else batch)(10 * index + i) for index in chosen]
                state, info = torch.vmap(step.update)(state, stack([(x.float(), y) for x, y in data]))
        return state, info

    everyone = list(range(lanes))
    (found, info), (expected, _) = run(everyone), run([index for index in everyone if index != 1])
    assert info.applied.tolist() == [index != 1 for index in everyone]
    assert found.step.tolist() == [4 if index != 1 else 1 for index in everyone]
    for place, index in enumerate(index for index in everyone if index != 1):
        assert_same(lane(found, index), lane(expected, place))


def test_lanes_are_the_runs_by_themselves() -> None:
    rates = torch.tensor([0.001, 0.05, 0.3], dtype=F64)

    def run(lr: Tensor, params: Any) -> TrainState:
        step = make(lr)
        state = step.init(params, carry())
        for i in range(5):
            state, _ = step.update(state, batch(i))
        return state

    expected = stack([run(lr, mlp(i)) for i, lr in enumerate(rates)])
    with torch.no_grad():
        found = torch.vmap(run)(rates, stack([mlp(i) for i in range(3)]))
    assert_run_close(found.params, expected.params, stack([mlp(i) for i in range(3)]))
    assert_close(found.carry, expected.carry)


def test_accumulation_is_one_step() -> None:
    grad_fn = gradient(lambda params, b: losses.cross_entropy(forward(params, b[0]), b[1]))
    whole, parts = (train_step(g, F.sgd(0.1, momentum=0.9)) for g in (grad_fn, accumulate(grad_fn, 4)))
    states = [step.init(mlp(0)) for step in (whole, parts)]
    for i in range(20):
        states = [step.update(state, batch(i))[0] for step, state in zip((whole, parts), states, strict=True)]
    assert_run_close(states[1].params, states[0].params, mlp(0))
    assert states[1].step == 20


# --- differentiable --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_hyper_gradient_through_three_steps_is_a_finite_difference(optimizer: str) -> None:
    makers = {"sgd": lambda lr: F.sgd(lr, momentum=0.9), "adamw": lambda lr: F.adamw(lr, amsgrad=True)}

    def after(lr: Tensor) -> Tensor:
        step = train_step(
            gradient(lambda params, b: losses.cross_entropy(forward(params, b[0]), b[1])),
            F.chain(F.clip_by_global_norm(1.0), makers[optimizer](lr)),
        )
        state = step.init(mlp(0))
        for i in range(3):
            state, _ = step.update(state, batch(i))
        return nnf.cross_entropy(forward(state.params, batch(9)[0]), batch(9)[1])

    lr, h = torch.tensor(0.05, dtype=F64), 1e-6
    expected = (after(lr + h) - after(lr - h)) / (2 * h)
    found = torch.func.grad(after)(lr)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert found.abs() > 1e-3
    leaf = lr.clone().requires_grad_()
    assert torch.autograd.grad(after(leaf), leaf)[0].item() == pytest.approx(found.item(), rel=1e-12)
    lanes = torch.vmap(torch.func.grad(after))(torch.stack([lr, 2 * lr]))
    assert lanes[0].item() == pytest.approx(found.item(), rel=1e-10)
    assert lanes[1].item() == pytest.approx(torch.func.grad(after)(2 * lr).item(), rel=1e-10)


def test_the_hyper_gradient_from_outside_the_lanes() -> None:
    """grad(vmap(run)): the faster ways below the lanes must not cut the derivative."""

    def after(rates: Tensor) -> Tensor:
        def one(lr: Tensor) -> Tensor:
            step = train_step(
                gradient(lambda params, b: losses.cross_entropy(forward(params, b[0]), b[1])), F.adamw(lr)
            )
            state = step.init(mlp(0))
            for i in range(2):
                state, _ = step.update(state, batch(i))
            return nnf.cross_entropy(forward(state.params, batch(9)[0]), batch(9)[1])

        return torch.vmap(one)(rates).sum()

    rates = torch.tensor([0.01, 0.1], dtype=F64)
    h = 1e-6
    steps = torch.eye(2, dtype=F64) * h
    expected = torch.stack([(after(rates + one) - after(rates - one)) / (2 * h) for one in steps])
    for found in (
        torch.func.grad(after)(rates),
        torch.autograd.grad(after(leaf := rates.clone().requires_grad_()), leaf)[0],
    ):
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-5)


# --- compiled --------------------------------------------------------------------------------------------------------


def test_lanes_compile_whole_and_once() -> None:
    """The step, the learning rate, the data and a bad batch do not matter. test_experiments.py has generated code."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    alone = make()
    start = stack([alone.init(mlp(i, F32), carry(F32)) for i in range(2)])

    def update(lr: Tensor, state: TrainState, data: Any) -> Any:
        return make(lr).update(state, data)

    compiled = torch.compile(torch.vmap(update), fullgraph=True, backend=counter)
    with torch.no_grad():
        ours, expected = start, start
        for i in range(4):
            rates = torch.tensor([0.01, 0.05]) * (i + 1)
            data = stack([batch(i, F32), (poisoned(i)[0].float(), poisoned(i)[1]) if i == 2 else batch(i + 9, F32)])
            ours, info = compiled(rates, ours, data)
            expected, eager_info = torch.vmap(update)(rates, expected, data)
            assert info.applied.tolist() == eager_info.applied.tolist() == [True, i != 2]
    assert counter.frame_count == 1
    assert ours.step.tolist() == [4, 3]
    # float32 over four steps of Adam, where eps of a gradient near zero is a sizeable part of the step
    assert_run_close(ours.params, expected.params, start.params, relative=1e-4)


def test_a_step_alone_compiles_whole_and_once() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    step = make(schedules.linear_schedule_with_warmup(0.05, 2, 10))
    compiled = torch.compile(step.update, fullgraph=True, backend=counter)
    ours = expected = step.init(mlp(0), carry())
    for i in range(4):
        ours, expected = compiled(ours, batch(i))[0], step.update(expected, batch(i))[0]
    assert_run_close(ours.params, expected.params, mlp(0))
    assert counter.frame_count == 1


def test_a_maker_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match="train_step: optimizer must be a Transform, got <function adamw"):
        train_step(gradient(lambda params, batch: params["w"]), F.adamw)  # type: ignore[arg-type]  # the mistake
