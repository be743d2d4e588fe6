"""What a schedule is: its numbers, its edges, a value that compares, prints and pickles, and clear errors."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functricks import schedules as S

F64 = torch.float64


def values(schedule: Callable[[int], Tensor], steps: int) -> list[float]:
    return [float(schedule(step)) for step in range(steps)]


def halved(step: Any) -> Any:
    """A function that can be pickled."""
    return 0.5**step


ONE_OF_EACH = [
    S.constant(0.1),
    S.constant(0.1, 0.5, 3),
    S.linear(0.1),
    S.linear(0.1, 0.0, 2.0, 0),
    S.polynomial(0.1, 5, 0.5),
    S.exponential_decay(0.1, 0.9),
    S.step_decay(0.1, 3),
    S.multistep(0.1, [2, 4]),
    S.cosine_annealing(0.1, 5, 0.01),
    S.inverse_sigmoid(1.0, 10.0),
    S.cosine_restarts(0.1, 3, 2),
    S.cosine_restarts(0.1, 3, inclusive=True),
    S.one_cycle(0.1, 10),
    S.one_cycle(0.1, 10, anneal_strategy="linear", three_phase=True),
    S.cyclic(0.01, 0.1, 3, 2, "exp_range", 0.9),
    S.cyclic(0.01, 0.1, 3, scale_fn=halved),
    S.linear_warmup(0.1, 4, 1, 0.1),
    S.constant_schedule(0.1),
    S.constant_schedule_with_warmup(0.1, 4),
    S.linear_schedule_with_warmup(0.1, 3, 8),
    S.cosine_schedule_with_warmup(0.1, 3, 8, min_lr=0.01),
    S.cosine_with_hard_restarts_schedule_with_warmup(0.1, 3, 9, 2),
    S.polynomial_decay_schedule_with_warmup(0.1, 3, 8),
    S.inverse_sqrt(0.1, 3),
    S.inverse_sqrt(0.1, 0, 100),
    S.wsd(0.1, 2, 3, 9),
    S.wsd(0.1, 2, 3, num_stable_steps=4, warmup_type="1-sqrt", decay_type="1-sqrt"),
    S.join([S.linear_warmup(0.1, 3), S.cosine_annealing(0.1, 5), S.constant(0.01)], [3, 8]),
    S.lambda_schedule(0.1, halved),
    2 * S.linear_warmup(1.0, 3) * S.exponential_decay(0.1, 0.9),
]
EACH = pytest.mark.parametrize("schedule", ONE_OF_EACH, ids=lambda one: repr(one).partition(" at 0x")[0])


def as_tensors(value: Any) -> Any:
    """The same schedule with a tensor for every number."""
    if isinstance(value, S.Curve):
        fields = {field.name: as_tensors(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return type(value)(**fields)
    if isinstance(value, tuple):
        return [as_tensors(item) for item in value]
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return torch.tensor(value, dtype=F64) if plain else value


@EACH
def test_every_step_has_a_value(schedule: S.Curve) -> None:
    steps = torch.arange(-3, 40)
    every = schedule(steps)
    assert every.dtype == F64
    assert every.shape == steps.shape
    assert every.isfinite().all()
    for kind in (int, torch.tensor):  # an int, a 0-d tensor: the same to the last bits, where vectors round otherwise
        alone = torch.stack([schedule(kind(int(step))) for step in steps])
        assert alone.dtype == F64
        assert (alone - every).abs().max() < 1e-15
    assert torch.equal(schedule(steps.view(1, -1, 1)).flatten(), every)
    assert schedule(steps.to(torch.float32)).dtype == F64
    assert torch.equal(every[:3], every[3].expand(3))  # a negative step is step 0


@EACH
def test_numbers_and_tensors_agree(schedule: S.Curve) -> None:
    steps = torch.arange(40)
    assert (as_tensors(schedule)(steps) - schedule(steps)).abs().max() < 1e-15


@EACH
def test_value_semantics(schedule: S.Curve) -> None:
    for one in (schedule, as_tensors(schedule)):
        restored = pickle.loads(pickle.dumps(one))
        assert restored == one
        assert hash(restored) == hash(one)
        assert torch.equal(restored(7), one(7))
        assert repr(restored) == repr(one)
        if "function" not in repr(one):
            assert eval(repr(one), vars(S)) == one
    assert schedule != as_tensors(schedule)
    assert schedule != S.constant(0.123)
    assert schedule != repr(schedule)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.lr = 1.0  # type: ignore[attr-defined]


@EACH
def test_inputs_stay_and_answers_stay(schedule: S.Curve) -> None:
    tensors = as_tensors(schedule)
    step = torch.tensor(5)
    first, held = tensors(step), tensors(step).clone()
    assert torch.equal(tensors(step), first)
    first.mul_(0)  # the caller's to write into
    assert torch.equal(tensors(step), held)
    assert step == 5


def test_repr_reads_and_keeps_every_digit() -> None:
    assert repr(S.cosine_annealing(0.1, 5)) == "cosine_annealing(lr=0.1, T_max=5, eta_min=0.0)"
    digits = torch.tensor(1 / 3, dtype=F64)
    assert eval(repr(S.constant(digits)), vars(S)).lr == digits
    assert eval(repr(S.constant(torch.tensor(0.1))), vars(S)).lr == torch.tensor(0.1)
    assert (
        repr(0.5 * S.linear(1.0))
        == "0.5 * linear(lr=1.0, start_factor=0.3333333333333333, end_factor=1.0, total_iters=5)"
    )
    odd = S.constant(torch.tensor([math.nan, math.inf, -math.inf, 0.1]))
    assert eval(repr(odd), vars(S)) == odd


def test_equality_is_by_value() -> None:
    assert S.multistep(1, [2, 4]) == S.multistep(1.0, (2, 4.0))
    assert S.multistep(1.0, torch.tensor([2, 4])) == S.multistep(1.0, [torch.tensor(2), torch.tensor(4.0)])
    assert S.constant(torch.tensor(0.1)) == S.constant(torch.tensor(0.1))
    assert S.constant(torch.tensor(0.1)) != S.constant(torch.tensor(0.2))
    assert S.constant(torch.tensor([0.1])) != S.constant(torch.tensor(0.1))
    assert S.linear_schedule_with_warmup(0.1, 3, 8) != S.cosine_schedule_with_warmup(0.1, 3, 8)
    a, b, c = S.linear(1.0), S.exponential_decay(0.1, 0.9), S.step_decay(1.0, 5)
    assert (a * b) * c == a * (b * c)
    assert 2 * (a * 3) == 6 * a
    assert a * torch.tensor(2.0) == torch.tensor(2.0) * a
    assert len({S.constant(0.1), S.constant(0.1), S.constant(torch.tensor(0.1)), 1 * S.constant(0.1)}) == 3
    assert S.lambda_schedule(1.0, halved) == S.lambda_schedule(1.0, halved)
    assert S.lambda_schedule(1.0, lambda step: 1) != S.lambda_schedule(1.0, lambda step: 1)


def test_a_learned_rate_can_be_copied_and_pickled() -> None:
    lr = torch.tensor(0.5, requires_grad=True)
    schedule = S.exponential_decay(lr, 0.5) * S.constant(1.0)
    for copied in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert copied == schedule
    for _ in range(2):  # the schedule is made once and differentiated again and again
        schedule(1).backward()
    assert lr.grad == 1.0


def test_replace_makes_a_variant() -> None:
    assert dataclasses.replace(S.cosine_annealing(0.1, 5), lr=0.2) == S.cosine_annealing(0.2, 5)


def test_products() -> None:
    assert values(2 * S.linear(1.0, 0.0, 1.0, 4) * S.constant(0.1), 3) == pytest.approx([0.0, 0.05, 0.1])
    assert S.constant(torch.tensor(0.5)) * torch.tensor(3.0) != S.constant(0.5)
    assert (torch.tensor(3.0) * S.constant(0.5))(0) == 1.5
    for wrong in ("2", None, True, halved):
        with pytest.raises(TypeError):
            S.constant(1.0) * wrong  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"factors must be schedules.*wrap it in lambda_schedule"):
        S.product(1.0, [halved])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one schedule"):
        S.product(1.0, ())


# Cases from the field


def test_resume_needs_one_integer() -> None:
    assert float(S.multistep(1.0, [2, 4], 0.1)(5)) == pytest.approx(0.01)
    cosine = S.cosine_annealing(1.0, 10)
    assert float(cosine(4)) == pytest.approx(0.6545085, abs=1e-7)
    assert float(S.exponential_decay(1.0, 0.9)(2)) == pytest.approx(0.81)
    ahead = values(cosine, 10)
    backwards = [float(cosine(step)) for step in reversed(range(10))]
    assert ahead == backwards[::-1]


def test_a_tensor_rate_is_not_an_alias() -> None:
    lr = torch.tensor(1.0)
    milestones = torch.tensor([2, 4])
    schedule = S.lambda_schedule(lr, lambda step: 0.5)
    stepped = S.multistep(lr, milestones, 0.1)
    seen, held = [], schedule(0)
    for step in range(4):
        seen.append(float(schedule(step)))
        lr.copy_(schedule(step))  # what an optimizer with a tensor rate does
    milestones.mul_(0)
    assert seen == [0.5] * 4
    assert held == 0.5
    assert stepped(0) == 1.0


@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)])
def test_warmup_then_cosine(lr: Any) -> None:
    schedule = S.join([S.linear(lr, 0.1, total_iters=2), S.cosine_annealing(lr, 4)], [2])
    assert values(schedule, 7) == pytest.approx([0.1, 0.55, 1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)


def test_warmup_names_its_convention() -> None:
    assert values(S.linear_warmup(1.0, 4), 6) == [0, 0.25, 0.5, 0.75, 1, 1]
    assert values(S.linear_warmup(1.0, 4, first_step=1), 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert values(S.linear_warmup(1.0, 5, first_step=1), 6) == [0.2, 0.4, 0.6, 0.8, 1, 1]
    assert values(S.linear_warmup(1.0, 4, start_factor=0.2), 6) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    for first_step in (0, 1):
        assert values(S.linear_warmup(1.0, 0, first_step), 3) == [1, 1, 1]
        assert values(S.linear_warmup(torch.tensor(1.0), torch.tensor(0), first_step), 3) == [1, 1, 1]


def test_nanogpt() -> None:
    warmup, total, lr, low = 5, 20, 6e-4, 6e-5

    def nanogpt(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / (warmup + 1)
        if step > total:
            return low
        return low + 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) * (lr - low)

    parts = [
        S.linear_warmup(lr, warmup + 1, first_step=1),
        S.cosine_annealing(lr, total - warmup, low),
        S.constant(low),
    ]
    assert values(S.join(parts, [warmup, total]), 30) == pytest.approx([nanogpt(step) for step in range(30)], rel=1e-14)


def test_the_clock_counts_updates() -> None:
    schedule, seen, updates = S.step_decay(1.0, 2, 0.5), [], 0
    for micro_batch in range(8):
        if micro_batch % 2 == 1:
            seen.append(float(schedule(updates)))
            updates += 1
    assert seen == [1, 1, 0.5, 0.5]


def test_cosine_restarts_reach_the_bottom_where_asked() -> None:
    four = [0.1, 0.0853553, 0.05, 0.0146447]
    assert values(S.cosine_restarts(0.1, 4), 9) == pytest.approx([*four, *four, 0.1], abs=1e-7)
    inclusive = S.cosine_restarts(0.1, 4, eta_min=0.01, inclusive=True)
    assert values(inclusive, 8) == pytest.approx([0.1, 0.0775, 0.0325, 0.01] * 2)
    longer = S.cosine_restarts(1.0, 2, 2, inclusive=True)
    assert [step for step in range(30) if longer(step) == 0] == [1, 5, 13, 29]
    assert values(S.cosine_restarts(0.1, 1, inclusive=True), 3) == [0.1] * 3
    assert values(S.cosine_restarts(0.1, 1), 3) == [0.1] * 3


def test_cosine_annealing_of_five() -> None:
    expected = [0.5, 0.4522543, 0.3272543, 0.1727458, 0.0477458, 0, 0.0477458]
    assert values(S.cosine_annealing(0.5, 5), 7) == pytest.approx(expected, abs=1e-7)


@given(first=st.integers(1, 1000), ratio=st.integers(1, 12), cycle=st.integers(0, 25), offset=st.integers(-2, 2))
def test_cosine_restarts_are_exact_at_borders(first: int, ratio: int, cycle: int, offset: int) -> None:
    start, length = 0, first
    for _ in range(cycle):
        start, length = start + length, length * ratio
    step = max(start + offset, 0)
    if step + length * ratio > 2**52:
        return
    position, size = step, first
    while position >= size:
        position, size = position - size, size * ratio
    expected = 0.5 * (1 + math.cos(math.pi * position / size))
    for one in (S.cosine_restarts(1.0, first, ratio), S.cosine_restarts(1.0, torch.tensor(first), torch.tensor(ratio))):
        assert abs(float(one(step)) - expected) < 1e-15
        assert abs(float(one(torch.tensor(step))) - expected) < 1e-15


def test_huge_steps() -> None:
    step = 3 * 10**15
    assert S.cosine_restarts(1.0, 10)(step) == 1
    assert S.cosine_restarts(1.0, 1, 2)(2**50 - 1) == 1
    assert S.cosine_restarts(1.0, 1, 2)(2**50 - 2) < 1e-12
    assert float(S.cosine_annealing(1.0, 4)(8 * 10**14 + 2)) == pytest.approx(0.5)
    for schedule in ONE_OF_EACH:
        assert schedule(step).isfinite()


# Edges


WITH_WARMUP = [
    S.linear_schedule_with_warmup,
    S.cosine_schedule_with_warmup,
    S.cosine_with_hard_restarts_schedule_with_warmup,
    S.polynomial_decay_schedule_with_warmup,
]
NUMBERS = pytest.mark.parametrize("number", [lambda n: n, torch.tensor], ids=["number", "tensor"])


@NUMBERS
@pytest.mark.parametrize("make", WITH_WARMUP)
def test_no_warmup_starts_whole(make: Any, number: Any) -> None:
    assert make(number(1.0), number(0), number(10))(0) == 1
    assert 0 < make(number(1.0), number(0), number(10))(3) < 1


@NUMBERS
@pytest.mark.parametrize(("make", "at_end"), list(zip(WITH_WARMUP, [0, 1, 1, 1e-7], strict=True)))
def test_nothing_after_the_warmup(make: Any, at_end: float, number: Any) -> None:
    schedule = make(number(1.0), number(4), number(4))
    assert values(schedule, 5) == pytest.approx([0, 0.25, 0.5, 0.75, at_end])
    assert float(schedule(5)) == pytest.approx(0, abs=1e-6)


@NUMBERS
def test_after_the_end(number: Any) -> None:
    lr, ten = number(1.0), number(10)
    assert S.linear_schedule_with_warmup(lr, 2, ten)(1000) == 0
    assert S.cosine_with_hard_restarts_schedule_with_warmup(lr, 2, ten)(1000) == 0
    assert S.polynomial_decay_schedule_with_warmup(lr, 2, ten, 0.25)(1000) == 0.25
    assert float(S.cosine_schedule_with_warmup(lr, 2, ten)(18)) == pytest.approx(1)  # the wave goes on
    assert S.wsd(lr, 2, 2, ten, min_lr_ratio=0.25)(1000) == 0.25
    assert S.polynomial(lr, ten, 2.0)(1000) == 0
    assert S.polynomial(lr, ten, number(0.0))(1000) == 1
    assert S.linear(lr, 0.5, 0.25, ten)(1000) == 0.25
    assert S.linear(lr, 0.5, 0.25, number(0))(0) == 0.25
    for strategy in ("cos", "linear"):
        schedule = S.one_cycle(lr, ten, anneal_strategy=strategy)
        assert float(schedule(9)) == pytest.approx(4e-6)
        assert schedule(1000) == schedule(9)


@NUMBERS
def test_one_cycle_with_phases_of_no_length(number: Any) -> None:
    for three_phase in (False, True):
        for total in (1, 2, 10):
            for part in (0.0, 0.1, 0.5, 1.0):
                every = S.one_cycle(number(1.0), number(total), number(part), three_phase=three_phase)(torch.arange(12))
                assert every.isfinite().all()
                assert every.max() <= 1
                assert every.min() >= 0
    assert S.one_cycle(number(1.0), number(10), number(0.0))(0) < 1


@NUMBERS
def test_wsd_parts_may_be_empty(number: Any) -> None:
    assert values(S.wsd(number(1.0), number(0), number(0), num_stable_steps=number(2)), 4) == [1, 1, 0, 0]
    assert values(S.wsd(number(1.0), number(2), number(2), number(4), decay_type="linear"), 5) == [0, 0.5, 1, 0.5, 0]
    assert S.wsd(1.0, 2, 2, 4) == S.wsd(1.0, 2, 2, 4)
    assert values(S.wsd(1.0, 2, 2, 4, 0), 5) == values(S.wsd(1.0, 2, 2, 4), 5)


def test_join_counts_from_each_start() -> None:
    clock = S.lambda_schedule(1.0, lambda step: step)
    assert values(S.join([clock, clock, clock], [2, 5]), 8) == [0, 1, 0, 1, 2, 0, 1, 2]
    for boundaries in ([2, 5], [2, torch.tensor(5)], torch.tensor([2, 5])):
        joined = S.join([clock, clock, clock], boundaries)
        assert joined(torch.arange(8)).tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
        assert values(joined, 8) == [0, 1, 0, 1, 2, 0, 1, 2]
    assert values(S.join([S.linear_warmup(1.0, 0), S.constant(2.0)], [0]), 2) == [2, 2]  # a warm-up of no steps
    assert values(S.join([clock, S.constant(-1.0), clock], [2, 2]), 4) == [0, 1, 0, 1]
    assert values(S.join([clock], []), 3) == [0, 1, 2]
    assert values(S.join([S.join([clock, clock], [1]), clock], [3]), 5) == [0, 0, 1, 0, 1]
    assert values(S.join([lambda step: torch.tensor(7.0), clock], [1]), 2) == [7, 0]


def test_lambda_schedule_broadcasts_a_constant() -> None:
    assert S.lambda_schedule(0.5, lambda step: 1)(torch.arange(3)).tolist() == [0.5] * 3
    assert S.lambda_schedule(0.5, lambda step: torch.tensor(0.1))(3).dtype == F64
    assert float(S.lambda_schedule(1.0, lambda step: 0.95**step)(torch.tensor(30))) == pytest.approx(
        0.95**30, rel=1e-15
    )


# Errors


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: S.constant(math.nan), "constant: lr must be finite, got nan"),
        (lambda: S.constant(0.1, total_iters=-1), "constant: total_iters must be >= 0, got -1"),
        (lambda: S.linear(0.1, total_iters=-1), "linear: total_iters must be >= 0"),
        (lambda: S.linear(0.1, math.inf), "linear: start_factor must be finite"),
        (lambda: S.polynomial(0.1, 5, -1.0), "polynomial: power must be >= 0"),
        (lambda: S.exponential_decay(0.1, -0.5), "exponential_decay: gamma must be >= 0"),
        (lambda: S.step_decay(0.1, 0), "step_decay: step_size must be > 0, got 0"),
        (lambda: S.step_decay(0.1, 3, -1), "step_decay: gamma must be >= 0"),
        (lambda: S.multistep(0.1, [-1, 2]), "multistep: every one of milestones must be >= 0"),
        (lambda: S.cosine_annealing(0.1, 0), "cosine_annealing: T_max must be > 0, got 0"),
        (lambda: S.cosine_restarts(0.1, 0), "cosine_restarts: T_0 must be >= 1"),
        (lambda: S.cosine_restarts(0.1, 2.5), "cosine_restarts: T_0 must be a whole number, got 2.5"),
        (lambda: S.cosine_restarts(0.1, 2, 0), "cosine_restarts: T_mult must be >= 1"),
        (lambda: S.inverse_sigmoid(1.0, 0.5), "inverse_sigmoid: k must be >= 1"),
        (lambda: S.one_cycle(0.1, 0), "one_cycle: total_steps must be >= 1"),
        (lambda: S.one_cycle(0.1, 10, 1.5), "one_cycle: pct_start must be <= 1"),
        (lambda: S.one_cycle(0.1, 10, anneal_strategy="exp"), "anneal_strategy must be one of 'cos', 'linear'"),
        (lambda: S.one_cycle(0.1, 10, div_factor=0), "one_cycle: div_factor must be > 0"),
        (lambda: S.cyclic(0.1, 1.0, 0), "cyclic: step_size_up must be > 0"),
        (lambda: S.cyclic(0.1, 1.0, 2, -1), "cyclic: step_size_down must be >= 0"),
        (lambda: S.cyclic(0.1, 1.0, mode="square"), "cyclic: mode must be one of 'triangular'"),
        (lambda: S.cyclic(0.1, 1.0, scale_mode="epoch"), "cyclic: scale_mode must be one of"),
        (lambda: S.linear_warmup(0.1, -1), "linear_warmup: num_warmup_steps must be >= 0"),
        (lambda: S.linear_warmup(0.1, 4, first_step=2), "linear_warmup: first_step must be 0"),
        (lambda: S.constant_schedule_with_warmup(0.1, -1), "num_warmup_steps must be >= 0"),
        (lambda: S.inverse_sqrt(0.1, -1), "inverse_sqrt: num_warmup_steps must be >= 0"),
        (lambda: S.inverse_sqrt(0.1, 1, 0), "inverse_sqrt: timescale must be > 0"),
        (lambda: S.polynomial_decay_schedule_with_warmup(0.1, 0, 5, lr_end=0.2), "lr_end must be smaller than lr"),
        (lambda: S.cosine_with_hard_restarts_schedule_with_warmup(0.1, 0, 5, 0), "num_cycles must be > 0"),
        (lambda: S.wsd(0.1, 2, 2), "wsd: give num_stable_steps or num_training_steps"),
        (lambda: S.wsd(0.1, 2, 2, 3), "wsd: num_training_steps must be warm-up"),
        (lambda: S.wsd(0.1, 2, 2, 9, 4), r"wsd: num_training_steps must be .* got 9 for 2 \+ 4 \+ 2"),
        (lambda: S.wsd(0.1, 2, -2, 9), "wsd: num_decay_steps must be >= 0"),
        (lambda: S.wsd(0.1, 2, 2, 9, warmup_type="fast"), "wsd: warmup_type must be one of"),
        (lambda: S.wsd(0.1, 2, 2, 9, decay_type="fast"), "wsd: decay_type must be one of"),
        (lambda: S.join([], []), "got 0 schedules and 0 boundaries"),
        (lambda: S.join([S.constant(1.0)], [3]), "one fewer, got 1 schedules and 1 boundaries"),
        (lambda: S.join([S.constant(1.0)] * 3, [5, 3]), "join: boundaries must not decrease"),
        *[
            (lambda make=make: make(0.1, -1, 5), f"{make.__name__}: num_warmup_steps must be >= 0, got -1")
            for make in WITH_WARMUP
        ],
        *[
            (lambda make=make: make(0.1, 6, 5), "num_training_steps .* must be >= num_warmup_steps")
            for make in WITH_WARMUP
        ],
    ],
)
def test_bad_values(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: S.constant("0.1"), "constant: lr must be a number or a tensor, got '0.1'"),
        (lambda: S.constant(None), "constant: lr must be a number"),
        (lambda: S.constant(True), "constant: lr must be a number"),
        (lambda: S.constant(S.constant(0.1)), "constant: lr must be a number or a tensor, got constant"),
        (lambda: S.constant(torch.tensor(1j)), "must be real"),
        (lambda: S.multistep(0.1, ["2"]), "every one of milestones must be a number"),
        (lambda: S.multistep(0.1, torch.tensor(3)), "needs an axis"),
        (lambda: S.multistep(0.1, 2), r"multistep: milestones must be a list of step numbers, got 2; give \[2\]"),
        (
            lambda: S.join([S.constant(1.0)] * 2, 2),
            r"join: boundaries must be a list of step numbers, got 2; give \[2\]",
        ),
        (lambda: S.one_cycle(0.1, 10, three_phase="no"), "one_cycle: three_phase must be True or False, got 'no'"),
        (lambda: S.linear_schedule_with_warmup(0.1, 3, None), "num_training_steps must be a number"),
        (lambda: S.cosine_restarts(0.1, 3, inclusive=1), "inclusive must be True or False"),
        (lambda: S.cyclic(0.1, 1.0, scale_fn=2.0), "scale_fn must be a function"),
        (lambda: S.lambda_schedule(0.1, 0.5), "lr_lambda must be a function"),
        (lambda: S.join([0.1, S.constant(1.0)], [3]), r"join: schedules must be callable, got 0.1; use constant"),
        (lambda: S.linear_warmup(lambda step: 0.1, 5), "lr must be a number"),
    ],
)
def test_bad_types(make: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        make()


def test_tensors_are_never_looked_at() -> None:
    wrong = torch.tensor(-1.0)
    S.linear_schedule_with_warmup(wrong, wrong, wrong)
    S.multistep(wrong, [wrong, wrong], wrong)
    S.wsd(wrong, wrong, wrong, wrong)


# Looking at them


@EACH
def test_sample_and_horizon(schedule: S.Curve) -> None:
    steps, sampled = S.sample(schedule)
    assert steps[-1] == S.horizon(schedule) - 1 >= 2
    assert torch.equal(sampled, torch.stack([schedule(step) for step in steps.tolist()]))
    assert S.horizon(as_tensors(schedule)) == S.horizon(schedule)


def test_sample_thins_out_long_runs() -> None:
    steps, sampled = S.sample(S.linear(1.0, 0.0, 1.0, 99_999), 100_000, points=11)
    assert steps.tolist() == [0, 10_000, 20_000, 30_000, 40_000, 50_000, 59_999, 69_999, 79_999, 89_999, 99_999]
    assert sampled[-1] == 1
    with pytest.raises(ValueError, match="steps must be >= 1"):
        S.sample(S.constant(1.0), 0)


def test_plot(tmp_path: Any) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axes = S.cosine_annealing(torch.tensor(0.1, requires_grad=True), 50).plot()
    assert len(axes.lines[0].get_xdata()) == 150
    again = S.constant(0.1).plot(10, ax=axes)
    assert again is axes
    assert len(axes.lines) == 2
    axes.figure.savefig(tmp_path / "schedule.png")
    pyplot.close(axes.figure)


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"schedule\.plot needs matplotlib; install it: pip install matplotlib"):
        S.constant(0.1).plot()


@pytest.mark.parametrize("milestones", [[4, 2], [2, 2, 5], [5, 2, 2, 5], []])
def test_milestones_may_repeat_and_come_in_any_order(milestones: list[int]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.3)
    ours = S.multistep(0.5, milestones, 0.3)
    for step in range(8):
        assert float(ours(step)) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-14)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    "child",
    [lambda t: 1, lambda t: 0.5, lambda t: torch.tensor(0.5), lambda t: torch.tensor([0.5]), lambda t: torch.tensor(2)],
)
def test_join_makes_float64_of_whatever_a_child_returns(child: Any) -> None:
    for schedule in (S.join([child], []), S.join([child, S.constant(1.0)], [2]), S.join([S.constant(1.0), child], [2])):
        for step in (0, 3, torch.tensor(0), torch.arange(4), torch.tensor([[3]])):
            value = schedule(step)
            assert value.dtype == F64
            assert value.shape == torch.as_tensor(step).shape
            assert torch.equal(value, schedule(torch.as_tensor(step)))


def test_horizon_of_phases() -> None:
    assert S.horizon(S.wsd(1.0, 10, 40, num_stable_steps=50)) == S.horizon(S.wsd(1.0, 10, 40, 100)) == 111
    assert S.horizon(S.wsd(1.0, torch.tensor(10), 40, num_stable_steps=torch.tensor(50))) == 111
    assert S.horizon(S.cyclic(0.0, 1.0, 10, 30)) == 120
    assert S.horizon(S.cyclic(0.0, 1.0, 10)) == 60
    assert S.horizon(S.step_decay(1.0, 0.25)) == 1
