"""Transforms around a transform, and the smaller links: their numbers and their errors."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same, lane
from torch import Tensor

import functricks as F

ONE = {"w": torch.tensor(1.0)}


def w(value: float) -> dict[str, Tensor]:
    return {"w": torch.tensor(value)}


def moved(optimizer: Any, values: list[float], flush: bool = False) -> float:
    """Where a parameter at 0 goes when its gradients are these."""
    params = w(0.0)
    state = optimizer.init(params)
    for value in values:
        updates, state = optimizer.update(w(value), state, params)
        params = F.apply_updates(params, updates)
    if flush:
        params = F.apply_updates(params, optimizer.flush(state, params)[0])
    return params["w"].item()


# --- multi_steps -----------------------------------------------------------------------------------------------------


def test_left_over_micro_batches_are_flushed() -> None:
    """Field case C05: dropping them gives -0.1, dividing by k -0.175."""
    steps = F.multi_steps(F.sgd(0.1), 4)
    assert moved(steps, [1.0] * 7) == pytest.approx(-0.1)
    assert moved(steps, [1.0] * 7, flush=True) == pytest.approx(-0.2)
    assert moved(steps, [1.0] * 8, flush=True) == pytest.approx(-0.2)  # nothing is left


def test_flush_empties_the_window() -> None:
    steps = F.multi_steps(F.sgd(0.1, 0.9), 4)
    state = steps.init(ONE)
    _, state = steps.update(w(5.0), state, ONE)
    _, state = steps.flush(state, ONE)
    assert (state.seen, state.weight, state.total["w"]) == (0, 0, 0)
    updates, again = steps.flush(state, ONE)
    assert_same(updates, w(0.0))
    assert_same(again, state)  # momentum too: nothing happened


def test_weights_count() -> None:
    """Field case C01: one token of 1, three of 4."""
    steps = F.multi_steps(F.sgd(1.0), 2)
    state = steps.init(ONE)
    for size, weight in ((1.0, 1.0), (4.0, 3.0)):
        found = F.Gradient(w(size), torch.tensor(0.0), torch.tensor(weight), (), {})
        updates, state = steps.update(found, state, ONE)
    assert_close(updates, w(-3.25))


def found_of(size: float, weight: torch.Tensor) -> Any:
    return F.Gradient(w(size), torch.tensor(0.0), weight, (), {})


def test_large_windows_are_counted_exactly() -> None:
    """2**24 + 1 is no float32, and 257 no bfloat16."""
    steps = F.multi_steps(F.sgd(1.0), 9)
    state = steps.init(ONE)
    for weight in (torch.tensor(2.0**24), torch.tensor(1.0), torch.tensor(1.0, dtype=torch.bfloat16)):
        _, state = steps.update(found_of(1.0, weight), state, ONE)
    assert (state.weight.dtype, state.weight) == (torch.float64, 2**24 + 2)


def test_a_numerator_over_no_weight_counts() -> None:
    """A smoothed row of a class of weight 0: gradient divides by 1, and so must who multiplies again."""
    weight = torch.tensor([0.0, 1.0])

    def grad_of(rows: slice) -> Any:
        return F.gradient(
            lambda p, batch: F.losses.cross_entropy(batch[0] + p["w"], batch[1], weight=weight, label_smoothing=0.2)
        )(params, (logits[rows], targets[rows]))

    params = {"w": torch.tensor([0.3, -0.1])}
    logits, targets = torch.tensor([[1.0, 2.0], [0.5, -1.0]]), torch.tensor([0, 1])
    steps = F.multi_steps(F.sgd(1.0), 2)
    state = steps.init(params)
    for row in range(2):
        updates, state = steps.update(grad_of(slice(row, row + 1)), state, params)
    assert grad_of(slice(0, 1)).weight == 0
    assert_close(updates, {"w": -grad_of(slice(0, 2)).grads["w"]})


def test_dropped_micro_batches() -> None:
    """Field case X11: 1, NaN, 3, 5 with k = 2 steps by 2, and 5 waits until it is flushed."""
    steps = F.multi_steps(F.sgd(1.0), 2)
    safe = F.skip_nonfinite(steps)
    params, state = w(0.0), safe.init(w(0.0))
    for value in (1.0, math.nan, 3.0, 5.0):
        updates, state = safe.update(w(value), state, params)
        params = F.apply_updates(params, updates)
    assert (params["w"], state.skipped, state.inner.seen) == (-2.0, 1, 1)
    assert_close(steps.flush(state.inner, params)[0], w(-5.0))


def test_schedules_run_in_steps_of_the_optimizer() -> None:
    steps = F.multi_steps(F.sgd(lambda step: 1.0 + step), 2)
    assert moved(steps, [1.0] * 4) == -(1.0 + 2.0)


def test_every_by_lane() -> None:
    every = torch.tensor([1, 2, 3])

    def run(every: Any) -> Tensor:
        steps = F.multi_steps(F.sgd(1.0, 0.9), every)
        params, state = w(0.0), steps.init(w(0.0))
        for value in (1.0, 2.0, 3.0, 4.0):
            updates, state = steps.update(w(value), state, params)
            params = F.apply_updates(params, updates)
        return F.apply_updates(params, steps.flush(state, params)[0])["w"]

    found = torch.vmap(run)(every)
    assert_close(found, torch.stack([run(k) for k in (1, 2, 3)]))


def test_multi_steps_trains_in_a_step() -> None:
    step = F.train_step(F.gradient(lambda params, x: params["w"] * x.mean()), F.chain(F.multi_steps(F.sgd(1.0), 2)))
    state = step.init(w(0.0))
    for x in (1.0, 3.0):
        state, _ = step.update(state, torch.tensor([x]))
    assert state.params["w"] == -2.0


# --- inject_hyperparams ----------------------------------------------------------------------------------------------


def test_hyperparams_are_read_and_written() -> None:
    optimizer = F.inject_hyperparams(F.adamw)(0.1, betas=(0.5, 0.9), weight_decay=0.0, amsgrad=True)
    state = optimizer.init(ONE)
    assert list(state.hyperparams) == ["lr", "betas", "weight_decay"]
    assert state.hyperparams["lr"] == 0.1
    assert state.hyperparams["betas"][1] == 0.9
    state = state._replace(hyperparams={**state.hyperparams, "lr": torch.tensor(0.0)})
    updates, state = optimizer.update(w(3.0), state, ONE)
    assert_same(F.tree.map(torch.abs, updates), w(0.0))
    assert state.hyperparams["lr"] == 0.0  # stays written


def test_injected_runs_as_plain() -> None:
    for maker in (F.sgd, F.adamw, F.lion, F.rmsprop, F.lamb):
        plain, injected = maker(0.1), F.inject_hyperparams(maker)(0.1)
        values = [1.0, -2.0, 0.5, 3.0]
        assert moved(injected, values) == pytest.approx(moved(plain, values), rel=1e-6)


def test_any_hyper_parameter_may_be_a_schedule() -> None:
    optimizer = F.inject_hyperparams(F.sgd)(lr=1.0, momentum=lambda step: 0.5 * step)
    # b1 = 1 (momentum 0), b2 = 1 + 0.5 * 1, b3 = 1 + 1.0 * 1.5
    assert moved(optimizer, [1.0, 1.0, 1.0]) == -(1.0 + 1.5 + 2.5)
    clip = F.inject_hyperparams(F.clip_by_global_norm)(lambda step: 1.0 / (1 + step))
    state = clip.init(ONE)
    for expected in (1.0, 0.5):
        updates, state = clip.update(w(10.0), state, ONE)
        assert_close(updates, w(expected))
        assert_close(state.hyperparams["max_norm"], torch.tensor(expected, dtype=torch.float64))


def test_plateau_writes_the_rate() -> None:
    plateau = F.schedules.reduce_on_plateau(factor=0.5, patience=0)
    optimizer = F.inject_hyperparams(F.sgd)(lr=1.0)
    state, memory = optimizer.init(ONE), plateau.init(1.0)
    seen = []
    for metric in (1.0, 1.0, 0.5, 0.5):
        lr, memory = plateau.update(metric, memory)
        state = state._replace(hyperparams={"lr": lr})
        updates, state = optimizer.update(ONE, state, ONE)
        seen.append(-updates["w"].item())
    assert seen == [1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("lr", [0.1, 0.5])
@pytest.mark.parametrize("patience", [0, 1, 3])
def test_plateau_drives_adam_as_in_pytorch(lr: float, patience: int) -> None:
    """By PyTorch, alone and as lanes with a patience each."""
    metrics = [1.0, 0.9, 0.95, 0.9, 0.91, 0.92, 0.5, 0.5, 0.6, 0.7, 0.8, 0.9]
    leaf = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    classic = torch.optim.Adam([leaf], lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(classic, factor=0.5, patience=patience)
    for metric in metrics:
        leaf.grad = torch.cos(leaf.detach())
        classic.step()
        scheduler.step(metric)

    def run(patience: Any) -> Tensor:
        plateau = F.schedules.reduce_on_plateau(factor=0.5, patience=patience)
        optimizer = F.inject_hyperparams(F.adam)(lr=lr)
        params: Any = {"w": torch.tensor(1.0, dtype=torch.float64)}
        state, memory = optimizer.init(params), plateau.init(lr)
        for metric in metrics:
            updates, state = optimizer.update({"w": torch.cos(params["w"])}, state, params)
            params = F.apply_updates(params, updates)
            rate, memory = plateau.update(metric, memory)
            state = state._replace(hyperparams={**state.hyperparams, "lr": rate})
        return params["w"]

    torch.testing.assert_close(run(patience), leaf.detach(), rtol=1e-12, atol=0)
    lanes = torch.vmap(run)(torch.tensor([patience, 9]))
    torch.testing.assert_close(lanes[0], leaf.detach(), rtol=1e-12, atol=0)
    assert lanes[1] != lanes[0]


def test_master_weights_by_lane() -> None:
    """Each lane keeps its own float32 copies: small steps of one rate add up, of another they are large enough."""
    rates = torch.tensor([1e-3, 1e-2, 0.25])

    def run(lr: Any) -> Any:
        optimizer = F.master_weights(F.sgd(lr))
        params: Any = {"w": torch.ones(2, dtype=torch.bfloat16)}
        state = optimizer.init(params)
        for _ in range(6):
            updates, state = optimizer.update({"w": torch.ones(2, dtype=torch.bfloat16)}, state, params)
            params = F.apply_updates(params, updates)
        return params, state.master

    found = torch.vmap(run)(rates)
    for i, rate in enumerate(rates):
        params, master = lane(found, i)
        assert_close(master, {"w": torch.full((2,), 1 - 6 * rate.item())})
        assert_same(params, {"w": master["w"].bfloat16()})


def test_hyperparams_by_lane_and_their_gradient() -> None:
    def loss(lr: Tensor) -> Tensor:
        optimizer = F.inject_hyperparams(F.sgd)(lr=lr)
        params = w(1.0)
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        return F.apply_updates(params, updates)["w"].square()

    lrs = torch.tensor([0.1, 0.2, 0.3])
    assert_close(torch.vmap(loss)(lrs), (1 - lrs).square())
    assert_close(torch.vmap(torch.func.grad(loss))(lrs), -2 * (1 - lrs))


def test_inject_hyperparams_checks_at_construction() -> None:
    with pytest.raises(ValueError, match="lr must be >= 0"):
        F.inject_hyperparams(F.sgd)(lr=-1.0)
    with pytest.raises(ValueError, match="are no arguments of sgd"):
        F.inject_hyperparams(F.sgd, static=["beta"])
    with pytest.raises(TypeError, match="unexpected keyword"):
        F.inject_hyperparams(F.sgd)(beta=1.0)
    optimizer = F.inject_hyperparams(F.sgd)(lr=0.1)
    with pytest.raises(ValueError, match=r"the state has \[\], expected \['lr'\]"):
        optimizer.update(ONE, optimizer.init(ONE)._replace(hyperparams={}), ONE)


# --- master weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [partial(F.sgd, 1e-3, 0.9), partial(F.adamw, 1e-4), partial(F.lion, 1e-5)])
def test_master_weights_are_the_float32_run(dtype: torch.dtype, make: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    start = {"a": torch.randn(4, 3, generator=generator).to(dtype), "b": torch.randn(3, generator=generator).to(dtype)}
    optimizer, plain = F.master_weights(make()), make()
    params, state = start, optimizer.init(start)
    exact: Any = {name: leaf.float() for name, leaf in start.items()}
    memory = plain.init(exact)
    for _ in range(50):
        grads = {name: torch.randn(leaf.shape, generator=generator).to(dtype) for name, leaf in start.items()}
        updates, state = optimizer.update(grads, state, params)
        params = F.apply_updates(params, updates)
        updates, memory = plain.update({name: leaf.float() for name, leaf in grads.items()}, memory, exact)
        exact = F.apply_updates(exact, updates)
        assert_same(params, {name: leaf.to(dtype) for name, leaf in exact.items()})
    assert_same(state.master, exact)


# --- the smaller links -----------------------------------------------------------------------------------------------


def test_named_chain() -> None:
    optimizer = F.named_chain(clip=F.clip_by_global_norm(1.0), momentum=F.trace(0.9), rate=F.scale(-0.1))
    state = optimizer.init(ONE)
    updates, state = optimizer.update(w(10.0), state, ONE)
    assert_close(updates, w(-0.1))
    assert state["momentum"].step == 1
    with pytest.raises(ValueError, match=r"the state has \['a'\], the links are \['clip', 'momentum', 'rate'\]"):
        optimizer.update(ONE, {"a": ()}, ONE)
    with pytest.raises(TypeError, match="named_chain: clip must be a Transform"):
        F.named_chain(clip=3.0)  # type: ignore[arg-type]


def test_centralize() -> None:
    grads = {"w": torch.randn(3, 4, 2, dtype=torch.float64) + 2, "b": torch.randn(4, dtype=torch.float64)}
    found, _ = F.centralize().update(grads, (), grads)
    assert_close(found["w"], grads["w"] - grads["w"].mean((1, 2), keepdim=True))
    assert_same(found["b"], grads["b"])


def test_trust_ratio_and_its_zeros() -> None:
    params = {"w": torch.tensor([3.0, 4.0]), "zero": torch.zeros(2), "still": torch.ones(2)}
    grads = {"w": torch.tensor([0.0, 0.5]), "zero": torch.ones(2), "still": torch.zeros(2)}
    found, _ = F.scale_by_trust_ratio(0.1).update(grads, (), params)
    assert_close(found, {"w": torch.tensor([0.0, 0.5]), "zero": torch.ones(2), "still": torch.zeros(2)})


def test_noise_fades_and_goes_by_key_step_and_path() -> None:
    params = {"a": torch.zeros(20000), "b": torch.zeros(20000)}
    noise = F.add_noise(F.random.key(0), eta=0.04, gamma=0.5)
    first, state = noise.update(params, noise.init(params), params)
    second, _ = noise.update(params, state, params)
    assert first["a"].std().item() == pytest.approx(0.2, rel=0.03)
    assert second["a"].std().item() == pytest.approx((0.04 / 2**0.5) ** 0.5, rel=0.03)
    for one, other in ((first["a"], first["b"]), (first["a"], second["a"])):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1].item()) < 0.03
    more = {"c": torch.zeros(3), "b": params["b"], "a": params["a"]}
    again, _ = noise.update(more, noise.init(more), more)
    assert_same({"a": again["a"], "b": again["b"]}, first)


def test_noise_by_lane_is_the_solo_noise() -> None:
    params = {"a": torch.zeros(5)}
    keys = F.random.split(F.random.key(1), 3)

    def run(key: Tensor) -> Any:
        noise = F.add_noise(key)
        return noise.update(params, noise.init(params), params)[0]

    found = torch.vmap(run)(keys)
    for i in range(3):
        assert_close(lane(found, i), run(keys[i]))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: F.multi_steps(F.sgd(), 0), "every must be an integer >= 1"),
        (lambda: F.multi_steps(F.sgd(), True), "every must be an integer >= 1"),
        (lambda: F.add_noise(F.random.key(0), eta=-1.0), "eta must be >= 0"),
        (lambda: F.scale_by_trust_ratio(-1.0), "trust_coefficient must be >= 0"),
        (lambda: F.scale_by_rms(alpha=-1.0), "alpha must be >= 0"),
    ],
)
def test_bad_arguments(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_a_pair_may_hold_schedules_and_any_range_may_be_one() -> None:
    def falling(start: float) -> Any:
        return lambda step: start - 0.01 * step.double()

    makers = {
        F.adam: {"lr": 0.1, "betas": (falling(0.9), 0.99)},
        F.lion: {"betas": (0.9, falling(0.99))},
        F.rprop: {"lr": 0.1, "etas": (falling(0.5), falling(1.2))},
        F.adafactor: {"d": falling(1.5)},
    }
    for maker, given in makers.items():
        optimizer = F.inject_hyperparams(maker)(**given)
        params = {"w": torch.tensor([1.0, -2.0])}
        state, plain = optimizer.init(params), None
        for step in range(3):
            count = torch.tensor(step)
            now = {
                name: tuple(x(count) if callable(x) else x for x in value)
                if isinstance(value, tuple)
                else value(count)
                if callable(value)
                else value
                for name, value in given.items()
            }
            own = maker(**now)
            plain = own.init(params) if plain is None else plain
            grads = {"w": torch.tensor([0.3, -0.1]) * (step - 1.5)}
            updates, state = optimizer.update(grads, state, params)
            expected, plain = own.update(grads, plain, params)
            assert_close(updates, expected)


def test_a_key_and_a_count_are_no_hyper_parameters_to_write() -> None:
    state = F.inject_hyperparams(F.add_noise)(F.random.key(0), eta=0.1).init(ONE)
    assert list(state.hyperparams) == ["eta"]
    slow = F.inject_hyperparams(F.schedule_free_adamw)(0.1, warmup_steps=torch.tensor(3))
    assert list(slow.init(ONE).hyperparams) == ["lr"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_noise_that_has_faded_is_not_rounded_away(dtype: torch.dtype) -> None:
    noise = F.add_noise(F.random.key(0), eta=1e-8, gamma=0.0)
    half, single = {"w": torch.ones(64, dtype=dtype)}, {"w": torch.ones(64)}
    updates, expected = (noise.update(one, noise.init(one), one)[0] for one in (half, single))
    assert_same(updates, expected)
    assert (updates["w"] != 1.0).any()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: F.rprop(etas=0.5), "rprop: etas must be a pair"),  # type: ignore[arg-type]
        (lambda: F.rprop(step_sizes=(0.1,)), "rprop: step_sizes must be a pair"),  # type: ignore[arg-type]
        (lambda: F.adafactor(eps=1e-3), "adafactor: eps must be a pair"),  # type: ignore[arg-type]
    ],
)
def test_what_must_be_a_pair(make: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        make()


def test_a_window_within_skip_nonfinite_is_flushed() -> None:
    steps = F.multi_steps(F.sgd(1.0), 3)
    safe = F.skip_nonfinite(steps)
    state = safe.init(ONE)
    for value in (1.0, math.nan, 5.0):
        _, state = safe.update(w(value), state, ONE)
    updates, inner = steps.flush(state.inner, ONE)
    assert_close(updates, w(-3.0))
    assert_same(safe.update(w(0.0), state._replace(inner=inner), ONE)[1].inner.total, w(0.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_master_beyond_the_range_comes_back(dtype: torch.dtype) -> None:
    """Through infinity the parameter became NaN, for good."""
    edge = torch.finfo(dtype).max
    params = {"w": torch.tensor([edge, -edge], dtype=dtype)}
    optimizer = F.master_weights(F.sgd(1.0))
    state = optimizer.init(params)
    push = torch.tensor([-1.0, 1.0]) * edge * 2**-10
    for grads, inside in ((push, False), (push, False), (-32 * push, True), (push, True)):
        updates, state = optimizer.update({"w": grads.to(dtype)}, state, params)
        params = F.apply_updates(params, updates)
        assert (params["w"].abs() < edge).all() == inside
        assert_same(params["w"], state.master["w"].clamp(-edge, edge).to(dtype))
    _, state = optimizer.update({"w": torch.full((2,), math.inf, dtype=dtype)}, state, params)
    updates, _ = optimizer.update({"w": torch.zeros(2, dtype=dtype)}, state, params)
    assert not torch.isfinite(updates["w"]).any()  # what has diverged shows


def test_transforms_are_not_hyper_parameters() -> None:
    optimizer = F.inject_hyperparams(F.lookahead)(F.sgd(1.0), sync_period=1, slow_step_size=0.5)
    state = optimizer.init(ONE)
    assert list(state.hyperparams) == ["slow_step_size"]
    assert_close(optimizer.update(ONE, state, ONE)[0], w(-0.5))
    both = F.inject_hyperparams(F.chain)(F.scale(2.0), F.scale(3.0))
    assert_close(both.update(ONE, both.init(ONE), ONE)[0], w(6.0))
    clip = F.inject_hyperparams(F.clip_by_global_norm)(max_norm=0.5, norm_type=1.0)
    assert_close(clip.update(ONE, clip.init(ONE), ONE)[0], w(0.5))


def test_names_in_a_state_may_come_in_any_order() -> None:
    named = F.named_chain(twice=F.scale(2.0), heavy=F.trace(0.5))
    state = named.init(ONE)
    assert_same(named.update(ONE, dict(reversed(state.items())), ONE), named.update(ONE, state, ONE))
    injected = F.inject_hyperparams(F.adamw)(lr=0.1, weight_decay=0.2)
    state = injected.init(ONE)
    turned = state._replace(hyperparams=dict(reversed(state.hyperparams.items())))
    assert_same(injected.update(ONE, turned, ONE), injected.update(ONE, state, ONE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trust_ratio_of_subnormal_updates(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny / 64
    update, param = torch.tensor([0.0, tiny], dtype=dtype), torch.tensor([3.0, 4.0], dtype=dtype)
    found = F.scale_by_trust_ratio().update({"w": update}, (), {"w": param})[0]["w"]
    torch.testing.assert_close(found, torch.tensor([0.0, 5.0], dtype=dtype))


def test_complex_gradients_that_are_not_finite_are_skipped() -> None:
    params = {"w": torch.tensor([1 + 1j])}
    safe = F.skip_nonfinite(F.sgd(1.0))
    for bad in (complex(math.nan, 0), complex(0, math.inf)):
        updates, state = safe.update({"w": torch.tensor([bad])}, safe.init(params), params)
        assert updates["w"] == 0
        assert state.skipped == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda t: F.masked(t, "w"),
        lambda t: F.partition({"all": t}, lambda path, leaf: "all"),
        F.master_weights,
        F.lookahead,
        F.skip_nonfinite,
        lambda t: F.multi_steps(t, 2),
    ],
)
def test_a_maker_in_place_of_a_transform_is_named(make: Any) -> None:
    with pytest.raises(TypeError, match="must be a Transform, got <function sgd"):
        make(F.sgd)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: F.inject_hyperparams(F.sgd(0.1)), "maker must be the function that makes a transform"),  # type: ignore[arg-type]
        (lambda: F.partition([F.sgd()], "a"), "partition: transforms must be a dict {label: transform}, got"),  # type: ignore[arg-type]
        (lambda: F.adamw(0.1, learning_rates=["w"]), r"learning_rates must be a dict {glob: factor}, got \['w'\]"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_kind_are_named(make: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        make()
