"""adapter.Scheduler: the rate after every step, in whatever order things are made, loaded and copied."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import functricks
from functricks import adapter, schedules
from functricks.types import Schedule

LABELS = {"body": schedules.constant(0.5), "head": schedules.exponential_decay(1.0, gamma=0.5)}


def parameter() -> nn.Parameter:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), 0.1)
    return weight


def ours(lr: Any = 0.1) -> torch.optim.Optimizer:
    return adapter.Optimizer([parameter()], functricks.sgd, lr=lr)


def theirs(lr: Any = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter()], lr=lr)


EITHER = pytest.mark.parametrize("make", [ours, theirs])


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    """The rate that each step used."""
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


PAIRS: dict[str, tuple[Schedule, Callable[[torch.optim.Optimizer], Any]]] = {
    "cosine": (schedules.cosine_annealing(0.1, 5), lambda o: lr_scheduler.CosineAnnealingLR(o, 5)),
    "steps": (schedules.step_decay(0.1, 2, gamma=0.5), lambda o: lr_scheduler.StepLR(o, 2, 0.5)),
    "exponential": (schedules.exponential_decay(0.1, gamma=0.9), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
}


@pytest.mark.parametrize("name", PAIRS)
@EITHER
def test_rates_are_those_of_torchs_scheduler(name: str, make: Callable[[], torch.optim.Optimizer]) -> None:
    schedule, classic = PAIRS[name]
    mine, expected = make(), make()
    assert rates(mine, adapter.Scheduler(mine, schedule), 6) == pytest.approx(rates(expected, classic(expected), 6))


def test_rate_is_the_schedule_to_the_bit() -> None:
    schedule = schedules.cosine_schedule_with_warmup(3e-4, 2, 7)
    optimizer = ours(lr=5e-5)  # the default is 5e-5: nothing to scale by
    scheduler = adapter.Scheduler(optimizer, schedule)
    assert rates(optimizer, scheduler, 7) == [float(schedule(i)) for i in range(7)]
    assert scheduler.get_last_lr() == [float(schedule(7))]
    assert isinstance(scheduler, lr_scheduler.LRScheduler)


@EITHER
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_tensor_rates_alias_nothing(make: Callable[..., torch.optim.Optimizer], kind: Any) -> None:
    optimizer = make(kind(0.5))
    scheduler = adapter.Scheduler(optimizer, schedules.constant(0.25))
    held = scheduler.get_last_lr()
    assert rates(optimizer, scheduler, 4) == [0.25] * 4
    optimizer.param_groups[0]["lr"] = kind(7.0)
    assert float(held[0]) == 0.25
    assert isinstance(held[0], type(kind(0.5)))


# --- what counts as a step -------------------------------------------------------------------------------------------


@EITHER
def test_calls_without_a_step_do_not_count(make: Callable[[], torch.optim.Optimizer]) -> None:
    optimizer = make()
    scheduler = adapter.Scheduler(optimizer, schedules.exponential_decay(1.0, gamma=0.5))
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]
    optimizer.step()
    scheduler.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]
    optimizer.step()
    optimizer.step()
    scheduler.step()  # once an epoch: one step of the schedule, however many of the optimizer
    assert scheduler.get_last_lr() == [0.25]


@EITHER
def test_waits_when_a_scaled_step_was_skipped(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Case C25: w = 1, gradients inf, inf, 0.1; the third update is the first, at rate 1."""
    optimizer = make(lr=1.0)
    (weight,) = optimizer.param_groups[0]["params"]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scheduler = adapter.Scheduler(optimizer, schedules.step_decay(1.0, 1, gamma=0.5))
    for size in (torch.inf, torch.inf, 0.1):
        optimizer.zero_grad()
        scaler.scale((weight * size).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert weight.item() == pytest.approx(0.9)
    assert scheduler.get_last_lr() == [0.5]


def test_waits_when_a_fused_kernel_skipped_inside() -> None:
    weight = parameter()
    optimizer = torch.optim.AdamW([weight], lr=1.0, fused=True)
    scheduler = adapter.Scheduler(optimizer, schedules.step_decay(1.0, 1, gamma=0.5))
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()  # as the scaler calls it for kernels that take its flags
    del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]
    assert weight.item() == 1.0


def test_watches_the_optimizer_inside_a_wrapper() -> None:
    """As accelerate's, which takes the place of an optimizer without being made like one."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.defaults = optimizer.defaults

        @property
        def param_groups(self) -> Any:  # type: ignore[override]
            return self.optimizer.param_groups

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.optimizer.step(closure)

    wrapper = Wrapper(ours(1.0))
    scheduler = adapter.Scheduler(wrapper, schedules.exponential_decay(1.0, gamma=0.5))
    assert rates(wrapper, scheduler, 3) == [1.0, 0.5, 0.25]


# --- groups ----------------------------------------------------------------------------------------------------------


@EITHER
def test_group_added_later_keeps_its_share(make: Callable[[], torch.optim.Optimizer]) -> None:
    """Case C22 b."""
    optimizer = make()
    scheduler = adapter.Scheduler(optimizer, schedules.step_decay(0.1, 1, gamma=0.5))
    optimizer.add_param_group({"params": [parameter()], "lr": 0.5})
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.05, 0.25])


def test_group_added_late_follows_from_its_first_step() -> None:
    optimizer = ours()
    scheduler = adapter.Scheduler(optimizer, schedules.step_decay(0.1, 1, gamma=0.5))
    rates(optimizer, scheduler, 2)
    new = parameter()
    new.grad = torch.ones(1)
    optimizer.add_param_group({"params": [new], "lr": 0.5})
    optimizer.step()
    assert new.item() == pytest.approx(1 - 0.5 / 4)


def test_schedules_by_label() -> None:
    groups = [{"params": [parameter()], "name": "body"}, {"params": [parameter()], "name": "head"}]
    optimizer = adapter.Optimizer(groups, functricks.sgd, lr=0.1)
    scheduler = adapter.Scheduler(optimizer, LABELS)
    assert scheduler.get_last_lr() == [0.5, 1.0]
    rates(optimizer, scheduler, 1)
    assert scheduler.get_last_lr() == [0.5, 0.5]
    optimizer.add_param_group({"params": [parameter()], "name": "neck"})
    with pytest.raises(ValueError, match="group 2 has the label 'neck', which has no schedule; have: 'body', 'head'"):
        optimizer.step()


def test_label_is_the_index_where_there_is_no_name() -> None:
    optimizer = ours()
    assert adapter.Scheduler(optimizer, {0: schedules.constant(0.5)}).get_last_lr() == [0.5]


def test_errors() -> None:
    with pytest.raises(TypeError, match="needs a schedule or a dict of them, got 0"):
        adapter.Scheduler(ours(), 0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs at least one"):
        adapter.Scheduler(ours(), {})
    rateless = adapter.Optimizer([parameter()], functricks.chain(functricks.sgd(0.1), functricks.sgd(1.0)))
    with pytest.raises(ValueError, match="group 0 of the optimizer shows no lr"):
        adapter.Scheduler(rateless, schedules.constant(0.1))
    with pytest.raises(TypeError, match="is not an Optimizer"):
        adapter.Scheduler(None, schedules.constant(0.1))  # type: ignore[arg-type]


# --- saving and loading ----------------------------------------------------------------------------------------------


def saved_after(steps: int) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    optimizer = ours(1.0)
    scheduler = adapter.Scheduler(optimizer, schedules.exponential_decay(1.0, gamma=0.9))
    rates(optimizer, scheduler, steps)
    states = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    return *states, rates(optimizer, scheduler, 3)


def test_load_order_does_not_matter() -> None:
    """Case C18."""
    first, second, expected = saved_after(5)
    for order in ("optimizer first", "scheduler first", "optimizer before making", "scheduler alone"):
        optimizer = ours(1.0)
        if order == "optimizer before making":
            optimizer.load_state_dict(copy.deepcopy(first))
        scheduler = adapter.Scheduler(optimizer, schedules.exponential_decay(1.0, gamma=0.9))
        if order == "optimizer first":
            optimizer.load_state_dict(copy.deepcopy(first))
        scheduler.load_state_dict(second)
        if order == "scheduler first":
            optimizer.load_state_dict(copy.deepcopy(first))
        assert optimizer.param_groups[0]["lr"] == expected[0] == scheduler.get_last_lr()[0], order
        assert rates(optimizer, scheduler, 3) == expected, order


def test_saved_between_the_optimizers_step_and_its_own() -> None:
    optimizer = ours(1.0)
    scheduler = adapter.Scheduler(optimizer, schedules.exponential_decay(1.0, gamma=0.5))
    optimizer.step()
    state = scheduler.state_dict()
    other = adapter.Scheduler(ours(1.0), schedules.exponential_decay(1.0, gamma=0.5))
    other.load_state_dict(state)
    other.step()
    assert other.get_last_lr() == [0.5]


def test_state_is_plain_and_without_the_schedule() -> None:
    _, state, _ = saved_after(2)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state
    assert state == {"last_epoch": 2, "_step_count": 3, "_last_lr": [pytest.approx(0.81)], "pending": False}


def test_takes_over_from_a_scheduler_of_torch() -> None:
    classic = theirs(1.0)
    before = lr_scheduler.ExponentialLR(classic, 0.9)
    rates(classic, before, 3)
    optimizer = ours(1.0)
    scheduler = adapter.Scheduler(optimizer, schedules.exponential_decay(1.0, gamma=0.9))
    scheduler.load_state_dict(before.state_dict())
    assert rates(optimizer, scheduler, 2) == pytest.approx(rates(classic, before, 2))


def test_checkpoint_of_an_optimizer_that_had_no_scheduler() -> None:
    optimizer = ours(0.1)
    optimizer.step()
    state = optimizer.state_dict()
    other = ours(0.1)
    scheduler = adapter.Scheduler(other, schedules.constant(0.3))
    other.load_state_dict(state)
    assert rates(other, scheduler, 2) == [0.3, 0.3]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_go_on_by_themselves(how: Callable[[Any], Any]) -> None:
    optimizer = ours(1.0)
    scheduler = adapter.Scheduler(optimizer, schedules.exponential_decay(1.0, gamma=0.5))
    rates(optimizer, scheduler, 1)
    other, follower = how((optimizer, scheduler))
    assert follower.optimizer is other
    (weight,) = other.param_groups[0]["params"]
    weight.grad = torch.ones(1)
    assert rates(other, follower, 2) == [0.5, 0.25]
    assert scheduler.get_last_lr() == [0.5]


def test_start_after_some_steps() -> None:
    optimizer = ours(1.0)
    optimizer.param_groups[0]["initial_lr"] = 1.0
    scheduler = adapter.Scheduler(optimizer, schedules.exponential_decay(1.0, gamma=0.5), last_epoch=1)
    assert scheduler.get_last_lr() == [0.25]
    optimizer.step()
    with pytest.warns(UserWarning, match="epoch parameter"):
        scheduler.step(4)
    assert scheduler.get_last_lr() == [0.0625]


@EITHER
def test_starts_in_the_middle_with_a_fresh_optimizer(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Case C18 c."""
    optimizer = make(1.0)
    scheduler = adapter.Scheduler(optimizer, schedules.cosine_annealing(1.0, 10), last_epoch=3)
    assert scheduler.get_last_lr() == pytest.approx([0.6545085])
    assert optimizer.param_groups[0]["initial_lr"] == 1.0


def test_a_state_without_a_step_is_none_of_a_scheduler() -> None:
    with pytest.raises(ValueError, match=r"the state has no 'last_epoch', only \['gamma'\]"):
        adapter.Scheduler(ours(), schedules.constant(0.1)).load_state_dict({"gamma": 0.5})


def test_two_schedules_on_one_rate_raise() -> None:
    optimizer = ours(schedules.constant(0.1))
    adapter.Scheduler(optimizer, schedules.constant(0.2))
    with pytest.raises(ValueError, match="a schedule decides this learning rate"):
        optimizer.step()


# --- whose rate a schedule gives -------------------------------------------------------------------------------------


@EITHER
def test_one_rate_that_is_not_the_default_is_the_schedules(make: Callable[[], torch.optim.Optimizer]) -> None:
    """Groups that all name their rate leave the optimizer's default, 1e-3, without a meaning."""
    groups = [{"params": [parameter()], "lr": 0.1}, {"params": [parameter()], "lr": 0.1}]
    optimizer = type(make())(groups, functricks.sgd) if make is ours else torch.optim.SGD(groups)  # type: ignore[call-arg]
    scheduler = adapter.Scheduler(optimizer, schedules.exponential_decay(0.1, gamma=0.5))
    assert scheduler.get_last_lr() == [0.1, 0.1]
    optimizer.add_param_group({"params": [parameter()], "lr": 0.2})
    rates(optimizer, scheduler, 1)
    assert scheduler.get_last_lr() == pytest.approx([0.05, 0.05, 0.1])


def test_unlike_rates_without_the_default_need_a_schedule_each() -> None:
    groups = [{"params": [parameter()], "lr": 0.1}, {"params": [parameter()], "lr": 0.2}]
    optimizer = adapter.Optimizer(groups, functricks.sgd)
    with pytest.raises(ValueError, match=r"rates 0\.1, 0\.2, of which none is the optimizer's default \(0\.001\)"):
        adapter.Scheduler(optimizer, schedules.constant(0.1))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    each = adapter.Scheduler(optimizer, {0: schedules.constant(0.5), 1: schedules.constant(1.0)})
    assert each.get_last_lr() == [0.5, 1.0]


def test_a_factory_without_a_default_rate() -> None:
    def factory(lr: float) -> functricks.Transform:
        return functricks.chain(functricks.clip_by_global_norm(1.0), functricks.sgd(lr))

    optimizer = adapter.Optimizer([{"params": [parameter()], "lr": 0.1}], factory)
    scheduler = adapter.Scheduler(optimizer, schedules.exponential_decay(0.1, gamma=0.5))
    assert rates(optimizer, scheduler, 2) == [0.1, 0.05]


@pytest.mark.parametrize("first", ["load", "make"])
def test_resumes_under_another_rate(first: str) -> None:
    """The rate is the schedule's, not its share of the rate with which the saved run began."""
    old = ours(0.1)
    adapter.Scheduler(old, schedules.constant(0.1))
    optimizer = ours(0.01)
    if first == "load":
        optimizer.load_state_dict(old.state_dict())
    scheduler = adapter.Scheduler(optimizer, schedules.constant(0.01))
    if first == "make":
        optimizer.load_state_dict(old.state_dict())
    assert scheduler.get_last_lr() == [0.01]
