"""reduce_on_plateau against ReduceLROnPlateau, bit for bit, and what a pure state machine can do beyond it."""

from __future__ import annotations

import io
import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap
from torch.optim.lr_scheduler import ReduceLROnPlateau

from functricks.schedules import PlateauState, linear_warmup, reduce_on_plateau

NAN, INF = math.nan, math.inf


def run(metrics: list[float], lr: float = 0.1, **options: Any) -> tuple[list[float], list[float]]:
    plateau = reduce_on_plateau(**options)
    state, rates, best = plateau.init(lr), [], []
    for metric in metrics:
        rate, state = plateau.update(metric, state)
        assert rate.dtype == state.best.dtype == torch.float64
        assert state.num_bad_epochs.dtype == state.cooldown_counter.dtype == torch.int64
        rates.append(float(rate))
        best.append(float(state.best))
    return rates, best


def classic(metrics: list[float], lr: float = 0.1, **options: Any) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = ReduceLROnPlateau(optimizer, **options)
    rates, best = [], []
    for metric in metrics:
        scheduler.step(metric)
        rates.append(optimizer.param_groups[0]["lr"])
        best.append(scheduler.best)
    return rates, best


def stream(seed: int, length: int = 60) -> list[float]:
    draw = random.Random(seed)
    odd = [NAN, INF, -INF, 0.0, -0.0, 1.0]
    return [draw.choice(odd) if draw.random() < 0.15 else draw.gauss(0, 1) / (1 + step) for step in range(length)]


GRID = list(itertools.product(["min", "max"], ["rel", "abs"], [0, 1, 3], [0, 2]))


@pytest.mark.parametrize(("mode", "threshold_mode", "patience", "cooldown"), GRID)
@pytest.mark.parametrize(
    "rest", [{}, {"threshold": 0.0, "min_lr": 0.02}, {"threshold": 1.0, "eps": 0.01, "factor": 0.7}]
)
def test_bit_for_bit(mode: str, threshold_mode: str, patience: int, cooldown: int, rest: dict[str, float]) -> None:
    options = {"mode": mode, "threshold_mode": threshold_mode, "patience": patience, "cooldown": cooldown, **rest}
    for seed in range(3):
        metrics = stream(seed)
        assert repr(run(metrics, **options)) == repr(classic(metrics, **options))  # as text, where NaN equals NaN


@settings(max_examples=100)
@given(
    st.lists(st.floats(width=64), min_size=1, max_size=30),
    st.fixed_dictionaries(
        {
            "mode": st.sampled_from(["min", "max"]),
            "threshold_mode": st.sampled_from(["rel", "abs"]),
            "factor": st.floats(0, 0.99),
            "patience": st.integers(0, 4),
            "threshold": st.floats(0, 2),
            "cooldown": st.integers(0, 4),
            "min_lr": st.floats(0, 0.2),
            "eps": st.floats(0, 0.1),
        }
    ),
)
def test_bit_for_bit_on_any_stream(metrics: list[float], options: dict[str, Any]) -> None:
    assert repr(run(metrics, **options)) == repr(classic(metrics, **options))


@pytest.mark.parametrize(
    ("options", "metrics", "rates"),
    [
        ({"patience": 2}, [0.0] * 10, [0.1] * 3 + [0.01] * 3 + [0.001] * 3 + [0.0001]),
        ({"patience": 2, "cooldown": 1}, [0.0] * 10, [0.1] * 3 + [0.01] * 4 + [0.001] * 3),
        ({"lr": 1e-8, "factor": 0.5, "patience": 0}, [0.0, 0.0], [1e-8, 1e-8]),
        ({"lr": 1e-8, "factor": 0.5, "patience": 0, "eps": 0.0}, [0.0, 0.0], [1e-8, 5e-9]),
        ({"patience": 0}, [NAN, 1.0, NAN, 0.5], [0.01, 0.01, 0.001, 0.001]),
        ({"patience": 0, "mode": "max"}, [NAN, 1.0, NAN, 2.0], [0.01, 0.01, 0.001, 0.001]),
        ({"patience": 5}, [1.0] * 8, [0.1] * 6 + [0.01] * 2),  # the sixth bad update reduces, at the seventh call
    ],
)
def test_counting(options: dict[str, Any], metrics: list[float], rates: list[float]) -> None:
    assert run(metrics, **options)[0] == pytest.approx(rates, rel=1e-15)


def test_nan_leaves_the_best() -> None:
    assert run([NAN, 1.0, NAN, 0.5], patience=0)[1] == [INF, 1.0, 1.0, 0.5]


def test_magnitude_is_right_for_negative_metrics() -> None:
    worse = [-1.0, -0.99995, -0.99991]
    assert run(worse, patience=0)[0] == pytest.approx([0.1, 0.1, 0.1])  # PyTorch's rule: "improving"
    assert run(worse, patience=0, relative_to="magnitude")[0] == pytest.approx([0.1, 0.01, 0.001])
    better = [-1.0, -1.001, -1.1]
    assert run(better, patience=0, relative_to="magnitude")[0] == pytest.approx([0.1, 0.1, 0.1])
    assert run([1.0, 0.99995], patience=0, relative_to="magnitude")[0] == pytest.approx([0.1, 0.01])
    for mode in ("min", "max"):
        one = [1.0, 1.0, 0.5, 2.0, 2.0, 1.9999]
        ours = run(one, mode=mode, patience=0, relative_to="magnitude")
        assert ours == run(one, mode=mode, patience=0)  # the same where metrics are positive


@pytest.mark.parametrize("threshold", [0.0, 1e-4])
def test_magnitude_takes_the_first_metric(threshold: float) -> None:
    for mode in ("min", "max"):
        rates, best = run([-3.0], mode=mode, patience=0, threshold=threshold, relative_to="magnitude")
        assert (rates, best) == ([0.1], [-3.0])


def test_state_is_all_that_resumes() -> None:
    plateau = reduce_on_plateau(patience=2)
    state = plateau.init(0.1)
    for metric in (1.0, 1.0, 1.0):
        lr, state = plateau.update(metric, state)
    file = io.BytesIO()
    torch.save(state._asdict(), file)
    file.seek(0)
    restored = PlateauState(**torch.load(file, weights_only=True))
    lr, after = reduce_on_plateau(patience=2).update(1.0, restored)
    assert float(lr) == pytest.approx(0.01)
    assert all(torch.equal(a, b) for a, b in zip(after, plateau.update(1.0, state)[1], strict=True))
    assert state.num_bad_epochs == 2  # the old state is as it was


def test_nothing_aliases_the_callers_tensors() -> None:
    lr, factor = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    plateau = reduce_on_plateau(patience=0, factor=factor)
    state = plateau.init(lr)
    lr.mul_(100)
    factor.mul_(0)
    for _ in range(2):
        rate, state = plateau.update(1.0, state)
    assert rate == 0.05


def test_rates_of_groups_shrink_together() -> None:
    plateau = reduce_on_plateau(patience=0, min_lr=torch.tensor([0.0, 0.2], dtype=torch.float64))
    state = plateau.init(torch.tensor([0.1, 0.5], dtype=torch.float64))
    for metric in (1.0, 1.0):
        lr, state = plateau.update(metric, state)
    assert lr.tolist() == pytest.approx([0.01, 0.2])


METRICS = torch.tensor(stream(5, 40), dtype=torch.float64)


def lane(patience: Any, factor: Any, cooldown: Any, threshold: Any) -> Tensor:
    plateau = reduce_on_plateau("min", factor, patience, threshold, cooldown=cooldown)
    state, rates = plateau.init(0.1), []
    for metric in METRICS:
        lr, state = plateau.update(metric, state)
        rates.append(lr)
    return torch.stack(rates)


def test_lanes_have_their_own_patience() -> None:
    patience, factor = torch.tensor([0, 1, 4]), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    cooldown, threshold = torch.tensor([0, 2, 1]), torch.tensor([0.0, 1e-4, 0.5], dtype=torch.float64)
    batched = vmap(lane)(patience, factor, cooldown, threshold)
    assert len(set(batched[:, -1].tolist())) == 3
    for i in range(3):
        options = {"patience": int(patience[i]), "factor": float(factor[i]), "threshold": float(threshold[i])}
        theirs, _ = classic(METRICS.tolist(), cooldown=int(cooldown[i]), **options)
        assert batched[i].tolist() == theirs


def test_state_batches() -> None:
    plateau = reduce_on_plateau(patience=0)
    state = plateau.init(torch.tensor([0.1, 0.2]))
    lr, state = vmap(plateau.update)(torch.tensor([1.0, 2.0]), state)
    lr, state = vmap(plateau.update)(torch.tensor([1.0, 1.0]), state)
    assert lr.tolist() == pytest.approx([0.01, 0.2])


def test_compiled_without_recompiling() -> None:
    plateau = reduce_on_plateau(patience=1, cooldown=1)
    compiled = torch.compile(plateau.update, fullgraph=True, backend="eager")
    for metrics, recompiles in ((METRICS[~METRICS.isnan()], False), (METRICS, True)):
        state, theirs = plateau.init(0.1), classic(metrics.tolist(), patience=1, cooldown=1)[0]
        # dynamo guards on whether a 0-d float64 CPU input is NaN, so the first NaN costs one more graph
        with torch._dynamo.config.patch(error_on_recompile=not recompiles):
            for metric, rate in zip(metrics, theirs, strict=True):
                lr, state = compiled(metric, state)
                assert float(lr) == rate


def test_a_half_precision_metric_is_taken_as_it_is() -> None:
    metrics = torch.tensor([1.0, 0.9999, 0.9], dtype=torch.float16)
    assert run(list(metrics), patience=0)[0] == classic(metrics.tolist(), patience=0)[0]


def test_warmup_then_plateau() -> None:
    plateau, warmup = reduce_on_plateau(patience=0, factor=0.5), linear_warmup(1.0, 4)
    state, rates = plateau.init(0.8), []
    for step in range(8):
        rates.append(float(warmup(step) * state.lr))
        if step >= 4:  # no verdict on the warm-up
            _, state = plateau.update(1.0, state)
    assert rates == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.4, 0.2])


def test_factor_takes_a_gradient() -> None:
    def final(factor: Tensor) -> Tensor:
        plateau = reduce_on_plateau(patience=0, factor=factor)
        state = plateau.init(1.0)
        for _ in range(3):
            lr, state = plateau.update(1.0, state)
        return lr

    assert torch.func.grad(final)(torch.tensor(0.5, dtype=torch.float64)) == 1.0  # of factor squared


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "low"}, "mode must be one of 'min', 'max', got 'low'"),
        ({"threshold_mode": "relative"}, "threshold_mode must be one of"),
        ({"relative_to": "best"}, "relative_to must be one of"),
        ({"relative_to": "magnitude", "threshold_mode": "abs"}, "needs threshold_mode='rel'"),
        ({"factor": 1.0}, "factor must be < 1"),
        ({"factor": -0.1}, "factor must be >= 0"),
        ({"patience": -1}, "patience must be >= 0"),
        ({"threshold": NAN}, "threshold must be >= 0"),
        ({"cooldown": 0.5}, "cooldown must be a whole number"),
        ({"cooldown": -1}, "cooldown must be >= 0"),
        ({"eps": -1e-8}, "eps must be >= 0"),
    ],
)
def test_bad_numbers(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        reduce_on_plateau(**options)


def test_bad_type() -> None:
    with pytest.raises(TypeError, match="patience must be a number or a tensor, got '3'"):
        reduce_on_plateau(patience="3")  # type: ignore[arg-type]


def test_a_metric_of_one_element_keeps_the_shape_of_the_state() -> None:
    plateau = reduce_on_plateau(patience=0, factor=0.5)
    for lr, shape in ((0.1, ()), (torch.tensor([0.1, 0.2]), (2,))):
        rate, state = plateau.update(torch.tensor([[1.0]]), plateau.init(lr))
        assert rate.shape == state.best.shape == shape
    with pytest.raises(ValueError, match=r"metric must be one number, .* shape \(\), got shape \(2,\)"):
        plateau.update(torch.tensor([1.0, 2.0]), plateau.init(0.1))
    with pytest.raises(ValueError, match="metric must be one number"):
        plateau.update(torch.ones(2), plateau.init(torch.ones(2, 1)))


def test_min_lr_may_be_a_list() -> None:
    plateau = reduce_on_plateau(patience=0, factor=0.1, min_lr=[0.05, 0.001])
    state = plateau.init(torch.tensor([0.1, 0.1]))
    for _ in range(2):
        rate, state = plateau.update(1.0, state)
    torch.testing.assert_close(rate, torch.tensor([0.05, 0.01], dtype=torch.float64), rtol=1e-6, atol=0)
    with pytest.raises(TypeError, match="min_lr must be a number"):
        reduce_on_plateau(min_lr=["0.1"])  # type: ignore[list-item]
