"""Compute dtypes and loss scaling: GradScaler's numbers, and a step that scales, checks and skips in order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_nonzero, assert_same, lane, stack
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from functricks import (
    LossScaleState,
    accumulate,
    adamw,
    autocast,
    cast,
    chain,
    clip_by_global_norm,
    dynamic_loss_scale,
    fgm,
    functional,
    gradient,
    losses,
    random,
    scale_by_learning_rate,
    sgd,
    static_loss_scale,
    supervised,
    supervised_carry,
    train_step,
    tree,
)

# --- the state machine -----------------------------------------------------------------------------------------------


class Scaler:
    """torch.amp.GradScaler's kernel on the CPU."""

    def __init__(self, init: float, growth: float, backoff: float, interval: int) -> None:
        self.scale, self.tracker = torch.tensor(init), torch.tensor(0, dtype=torch.int32)
        self.options = growth, backoff, interval

    def update(self, finite: bool) -> None:
        torch._amp_update_scale_(self.scale, self.tracker, torch.tensor(float(not finite)), *self.options)


@given(
    st.lists(st.booleans(), min_size=1, max_size=60),
    st.sampled_from([1.0, 4.0, 2.0**16, 2.0**126, 3.3]),
    st.sampled_from([1.1, 2.0, 7.3]),
    st.sampled_from([0.3, 0.5, 0.9]),
    st.integers(1, 5),
)
def test_numbers_of_grad_scaler(stream: list[bool], init: float, growth: float, backoff: float, interval: int) -> None:
    classic, scaler = Scaler(init, growth, backoff, interval), dynamic_loss_scale(init, growth, backoff, interval)
    state = scaler.init()
    for finite in stream:
        classic.update(finite)
        state = scaler.update(state, torch.tensor(finite))
        assert_same(state.scale, classic.scale)
        assert state.growth_tracker.item() == classic.tracker.item()


def test_grad_scaler_itself_over_a_random_stream() -> None:
    """The class, not only its kernel: scale, unscale_, step, update on the CPU."""
    classic = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([weight], 0.125)
    step = train_step(
        gradient(lambda w, g: w * g), sgd(0.125), loss_scale=dynamic_loss_scale(2.0**10, growth_interval=3)
    )
    state = step.init(torch.tensor(1.0))
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        g = torch.randn((), generator=generator)
        g = g * math.inf if torch.rand((), generator=generator) < 0.2 else g
        optimizer.zero_grad()
        classic.scale(weight * g).backward()
        classic.step(optimizer)
        classic.update()
        state, info = step.update(state, g)
        assert info.applied.item() == math.isfinite(g)
        assert state.loss_scale.scale.item() == classic.get_scale()
        assert state.loss_scale.growth_tracker.item() == classic._get_growth_tracker()
        assert state.params.item() == weight.item()


def test_c27_resume_growth_cap_and_floor() -> None:
    step = train_step(gradient(lambda w, g: w * g), sgd(1.0), loss_scale=dynamic_loss_scale(4.0, growth_interval=2))
    state = step.init(torch.tensor(1.0))
    seen = []
    for index, g in enumerate((0.5, 0.25, math.inf, 0.5)):
        state, _ = step.update(state, torch.tensor(g))
        seen.append((state.loss_scale.scale.item(), state.params.item()))
        if index == 1:  # saved and loaded: a tree of tensors, nothing else
            leaves, structure = tree.flatten(state)
            assert all(isinstance(leaf, Tensor) for leaf in leaves)
            state = tree.unflatten(structure, [torch.tensor(leaf.tolist(), dtype=leaf.dtype) for leaf in leaves])
    assert seen == [(4, 0.5), (8, 0.25), (4, 0.25), (4, -0.25)]
    assert state.loss_scale.growth_tracker.item() == 1
    capped = dynamic_loss_scale(2.0**126, growth_interval=1)
    large = capped.init()
    for _ in range(5):
        large = capped.update(large, torch.tensor(True))
    assert large.scale.item() == 2.0**127
    small = capped.init()
    for _ in range(500):
        small = capped.update(small, torch.tensor(False))
    assert small.scale.item() == 2.0**-126
    for _ in range(3):
        small = capped.update(small, torch.tensor(True))
    assert small.scale.item() == 2.0**-123


def test_static_scale_stays() -> None:
    scaler = static_loss_scale(128.0)
    state = scaler.init()
    assert_same(scaler.update(state, torch.tensor(False)), state)
    assert_same(state, LossScaleState(torch.tensor(128.0), torch.tensor(0)))


def test_scale_per_lane() -> None:
    """Lanes with their own initial scale, interval and stream."""
    streams = torch.rand(20, 3) < 0.7
    inits, intervals = torch.tensor([4.0, 1024.0, 3.3]), torch.tensor([1, 2, 5])

    def step(state: Any, init: Tensor, interval: Tensor, finite: Tensor) -> Any:
        return dynamic_loss_scale(init, growth_interval=interval, backoff_factor=init / init * 0.5).update(
            state, finite
        )

    state = torch.vmap(lambda init: dynamic_loss_scale(init).init())(inits)
    alone = [dynamic_loss_scale(init.item()).init() for init in inits]
    for finite in streams:
        state = torch.vmap(step)(state, inits, intervals, finite)
        for index in range(3):
            scaler = dynamic_loss_scale(inits[index].item(), growth_interval=int(intervals[index]))
            alone[index] = scaler.update(alone[index], finite[index])
            assert_same(lane(state, index), alone[index])


# --- the step --------------------------------------------------------------------------------------------------------


def test_c25_a_skipped_step_moves_no_schedule() -> None:
    lr = scale_by_learning_rate(lambda step: torch.pow(torch.tensor(0.5, dtype=torch.float64), torch.as_tensor(step)))
    step = train_step(gradient(lambda w, g: w * g), lr, loss_scale=dynamic_loss_scale(4.0))
    state = step.init(torch.tensor(1.0))
    applied = []
    for g in (math.inf, math.inf, 0.1):
        state, info = step.update(state, torch.tensor(g))
        applied.append(info.applied.item())
    assert applied == [False, False, True]
    assert state.params.item() == pytest.approx(0.9)
    assert state.step.item() == 1
    state, _ = step.update(state, torch.tensor(0.1))
    assert state.params.item() == pytest.approx(0.85)


def test_c26_unscale_before_the_clip() -> None:
    true = torch.tensor([0.3, 0.4])
    step = train_step(
        gradient(lambda w, g: (w * g).sum()),
        chain(clip_by_global_norm(1.0), sgd(1.0)),
        loss_scale=static_loss_scale(1024.0),
    )
    state, info = step.update(step.init(torch.zeros(2)), true)
    assert_same(state.params, -true)
    assert info.grad_norm.item() == pytest.approx(0.5)
    clipped, info = step.update(step.init(torch.zeros(2)), 10 * true)
    assert_close(clipped.params, -true * 2)
    assert info.grad_norm.item() == pytest.approx(5)  # before clipping


def test_c30_empty_and_zero_gradients() -> None:
    step = train_step(
        gradient(lambda p, x: (p["some"] * x).sum() + p["none"].sum()), chain(clip_by_global_norm(0.0), sgd(1.0))
    )
    params = {"none": torch.zeros(0), "some": torch.zeros(1)}
    for g in (3.0, 0.0):
        state, info = step.update(step.init(params), torch.tensor(g))
        assert_same(state.params, params)
        assert info.grad_norm.item() == g
        assert info.applied
    nothing = train_step(gradient(lambda p, x: x.mean()), chain(clip_by_global_norm(1.0), adamw(1e-3)))
    state, info = nothing.update(nothing.init({}), torch.ones(3))
    assert (info.grad_norm.item(), info.applied.item(), state.step.item()) == (0, True, 1)


def test_a_skip_moves_nothing_but_the_scale() -> None:
    def loss_fn(params: Any, batch: Tensor, carry: Any) -> Any:
        key, following = random.split(carry["key"]).unbind()
        return (params["w"] * batch).sum() + random.uniform(key), {
            "key": following,
            "seen": carry["seen"] + batch.sum(),
        }

    step = train_step(
        gradient(loss_fn, has_carry=True), chain(clip_by_global_norm(1.0), adamw(0.1)), loss_scale=dynamic_loss_scale()
    )
    state = step.init({"w": torch.ones(3)}, {"key": random.key(0), "seen": torch.tensor(0.0)})
    state, _ = step.update(state, torch.ones(3))
    for bad in (math.nan, math.inf, -math.inf):
        after, info = step.update(state, torch.tensor([1.0, bad, 1.0]))
        assert not info.applied
        assert_same(after._replace(loss_scale=()), state._replace(loss_scale=()))
        assert after.loss_scale.scale == state.loss_scale.scale / 2
    bare = train_step(gradient(loss_fn, has_carry=True), adamw(0.1), skip_nonfinite=False)
    after, info = bare.update(bare.init({"w": torch.ones(3)}, state.carry), torch.full((3,), math.nan))
    assert info.applied
    assert after.params["w"].isnan().all()


def test_float16_with_a_scale_saves_small_gradients() -> None:
    """1e-8 underflows in float16; scaled by 2**12 it does not. The loss overflows at 2**16, backs off, and goes on."""
    params, x = {"w": torch.tensor([1.0, 2.0])}, torch.tensor([1.0, 1.0])
    grad_fn = gradient(cast(lambda p, x: (p["w"] * x).sum() * 1e-4, torch.float16))
    tiny = gradient(cast(lambda p, x: ((p["w"] * x) * 1e-4).sum() * 1e-4, torch.float16))
    assert not tiny(params, x).grads["w"].any()
    # subnormal in float16: a spacing of 2**-24 beside 4e-5
    assert torch.allclose(tiny(params, x, scale=2.0**12).grads["w"], torch.tensor(1e-8), rtol=4e-3)
    step = train_step(
        gradient(cast(lambda p, x: (p["w"] * x).sum(), torch.float16)), sgd(0.1), loss_scale=dynamic_loss_scale(2.0**18)
    )
    state = step.init(params)
    applied = []
    for _ in range(4):
        state, info = step.update(state, x)
        applied.append(info.applied.item())
    assert applied == [False, False, False, True]
    assert grad_fn(params, x).grads["w"].dtype == torch.float32


def test_the_finite_check_looks_at_the_unscaled_gradient() -> None:
    """Finite while scaled down and infinite when unscaled: skipped. The other way round, it backs off."""
    wide = gradient(lambda w, g: w.double() * g)
    step = train_step(wide, sgd(1.0), loss_scale=static_loss_scale(2.0**-20))
    state = step.init(torch.tensor(0.0))
    after, info = step.update(state, torch.tensor(1e42, dtype=torch.float64))
    assert not info.applied
    assert_same(after, state)
    assert step.update(state, torch.tensor(1e38, dtype=torch.float64))[1].applied
    step = train_step(gradient(lambda w, g: w * g), sgd(1.0), loss_scale=dynamic_loss_scale(2.0**20))
    after, info = step.update(step.init(torch.tensor(0.0)), torch.tensor(1e35))
    assert (info.applied.item(), after.params.item(), after.loss_scale.scale.item()) == (False, 0.0, 2.0**19)


def test_freeze_after_consecutive_skips() -> None:
    step = train_step(gradient(lambda w, g: w * g), sgd(0.5), freeze_nonfinite=2)
    state = step.init(torch.tensor(1.0))
    seen = []
    for g in (1.0, math.nan, 1.0, math.nan, math.inf, 1.0, 1.0):
        state, info = step.update(state, torch.tensor(g))
        seen.append((info.applied.item(), state.params.item(), state.skips.item()))
    assert seen == [
        (True, 0.5, 0),
        (False, 0.5, 1),
        (True, 0.0, 0),
        (False, 0.0, 1),
        (False, 0.0, 2),
        (False, 0.0, 3),
        (False, 0.0, 4),
    ]
    per_lane = torch.vmap(
        lambda n, g, s: train_step(gradient(lambda w, g: w * g), sgd(0.5), freeze_nonfinite=n).update(s, g)[0]
    )
    states = stack([state] * 2)
    assert per_lane(torch.tensor([3, 9]), torch.tensor([1.0, 1.0]), states).params.tolist() == [0.0, -0.5]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_neighbours_of_a_bad_lane_do_not_notice(bad: float) -> None:
    """Bit by bit the same as a run in which that lane is well."""
    grad_fn = accumulate(fgm(gradient(lambda p, x: (torch.sin(p["w"]) * x).square().mean()), 0.1, where="w"), 2)
    step = train_step(
        grad_fn, chain(clip_by_global_norm(0.5), adamw(0.1)), loss_scale=dynamic_loss_scale(2.0), freeze_nonfinite=2
    )
    params = {"w": torch.tensor([[0.5, 1.0], [0.7, -1.0], [0.9, 0.3]])}
    batches = torch.randn(6, 3, 4, 2)
    poisoned = batches.clone()
    poisoned[1:, 1, 2] = bad

    def run(batches: Tensor) -> Any:
        with torch.no_grad():
            state = torch.vmap(step.init)(params)
            for batch in batches:
                state, info = torch.vmap(step.update)(state, batch)
        return state, info

    (well, _), (ill, info) = run(batches), run(poisoned)
    for index in (0, 2):
        assert_same(lane(ill, index), lane(well, index))
    assert info.applied.tolist() == [True, False, True]
    assert ill.step.tolist() == [6, 1, 6]


def test_an_overflow_is_seen_through_drop_and_a_bad_micro_batch_is_not() -> None:
    """A gradient that overflows under the scale must make it fall; a micro-batch that is bad in itself must not."""
    grad_fn = accumulate(gradient(lambda w, x: (w * x).mean()), 2, nonfinite="drop")
    step = train_step(grad_fn, sgd(0.5), loss_scale=dynamic_loss_scale(2.0**127))
    state = step.init(torch.tensor(1.0))
    state, info = step.update(state, torch.tensor([4.0, 4.0]))
    assert (info.applied, state.params, state.loss_scale.scale) == (False, 1.0, 2.0**126)
    state, info = step.update(state, torch.tensor([1.0, math.nan]))
    assert (info.applied, info.weight, state.params, state.loss_scale.scale) == (True, 1, 0.5, 2.0**126)


def test_errors() -> None:
    for options, text in (
        ({"init_scale": 0.0}, "init_scale must be > 0"),
        ({"growth_factor": 1.0}, "growth_factor must be > 1"),
        ({"backoff_factor": 1.0}, "backoff_factor must be < 1"),
        ({"backoff_factor": 0.0}, "backoff_factor must be > 0"),
        ({"growth_interval": 0}, "growth_interval must be an integer >= 1"),
        ({"growth_interval": 2.5}, "growth_interval must be an integer >= 1"),
        ({"init_scale": 1e39}, r"init_scale must be > 0 and in the range of float32, got 1e\+39"),
        ({"min_scale": 1e-50}, "min_scale must be > 0 and in the range of float32, got 1e-50"),
        ({"min_scale": 0.0}, "min_scale must be > 0"),
    ):
        with pytest.raises(ValueError, match=f"dynamic_loss_scale: {text}"):
            dynamic_loss_scale(**options)
    with pytest.raises(ValueError, match="static_loss_scale: scale must be > 0"):
        static_loss_scale(-1.0)
    with pytest.raises(TypeError, match="train_step: optimizer must be a Transform, got <function sgd"):
        train_step(gradient(lambda w, g: w), sgd)
    with pytest.raises(TypeError, match="loss_scale must be a LossScale, got 1024"):
        train_step(gradient(lambda w, g: w), sgd(), loss_scale=1024)
    with pytest.raises(ValueError, match="freeze_nonfinite must be an integer >= 1, got 0"):
        train_step(gradient(lambda w, g: w), sgd(), freeze_nonfinite=0)
    with pytest.raises(ValueError, match="freeze_nonfinite needs skip_nonfinite"):
        train_step(gradient(lambda w, g: w), sgd(), freeze_nonfinite=1, skip_nonfinite=False)


# --- dtypes ----------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def mlp_problem() -> tuple[Any, Any, Any, Any]:
    model = functional(mlp())
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    return supervised(model, losses.cross_entropy), model.params, batch, supervised_carry(model, random.key(0))


def test_autocast_is_torch_autocast() -> None:
    """Without dropout's draw: the module under torch.autocast, loss outside of it or inside, is the same."""
    _, params, batch, carry = mlp_problem()
    model = mlp()
    model[3].p = 0.0
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    plain = supervised(functional(model), losses.cross_entropy)
    grad_fn = gradient(autocast(plain, "cpu", torch.bfloat16), has_carry=True, has_metrics=True)
    found = grad_fn(params, batch, carry)
    assert found.loss.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert found.grads[name].dtype == torch.float32
        largest = parameter.grad.abs().max()
        assert_nonzero(parameter.grad)
        # the biases before BatchNorm have a gradient of rounding errors alone
        bound = 2 * torch.finfo(torch.bfloat16).eps * (largest if name != "0.bias" else 1.0)
        assert (found.grads[name] - parameter.grad).abs().max() <= bound
    exact = gradient(plain, has_carry=True, has_metrics=True)(params, batch, carry)
    assert not torch.equal(found.loss, exact.loss)  # half precision did happen


HALF = torch.bfloat16
OF_HALF: dict[str, tuple[Any, Any]] = {
    "cross_entropy": (lambda x, t: losses.cross_entropy(x, t.argmax(1)), lambda x, t: F.cross_entropy(x, t.argmax(1))),
    "nll_loss": (lambda x, t: losses.nll_loss(x, t.argmax(1)), lambda x, t: F.nll_loss(x, t.argmax(1))),
    "mse_loss": (losses.mse_loss, F.mse_loss),
    "l1_loss": (losses.l1_loss, F.l1_loss),
    "kl_divergence": (losses.kl_divergence, F.kl_div),
    "binary_cross_entropy": (
        lambda x, t: losses.binary_cross_entropy(x.sigmoid(), t),
        lambda x, t: F.binary_cross_entropy(x.sigmoid(), t),
    ),
    "binary_cross_entropy_with_logits": (
        losses.binary_cross_entropy_with_logits,
        F.binary_cross_entropy_with_logits,
    ),
}


@pytest.mark.parametrize("name", OF_HALF)
@pytest.mark.filterwarnings("ignore:reduction.*mean:UserWarning")  # F.kl_div's advice
def test_losses_stay_float32_under_autocast(name: str) -> None:
    """As PyTorch's do; otherwise a value is rounded to bfloat16, and with it the gradient of every row."""
    ours, classic = OF_HALF[name]
    torch.manual_seed(0)
    x, t = torch.randn(7, 3).to(HALF), torch.rand(7, 3).to(HALF)
    with torch.autocast("cpu", HALF):
        loss = ours(x, t)
        expected = classic(x, t)
    assert loss.values.dtype == expected.dtype == torch.float32
    assert_close(loss.mean(), expected)
    assert ours(x, t).values.dtype == HALF


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_contrastive_losses_under_autocast_have_a_float32_softmax(dtype: torch.dtype) -> None:
    """The product is PyTorch's under autocast; dividing by a temperature of 0.1 in half precision costs a tenth."""
    torch.manual_seed(0)
    q, k = torch.randn(6, 5), torch.randn(6, 5)
    pairs, labels = torch.cat([q, k]), torch.arange(6).repeat(2)
    alone = torch.eye(12, dtype=torch.bool)
    with torch.autocast("cpu", dtype):
        products = (q @ k.T).float(), (pairs @ pairs.T).float()
        found = [
            losses.info_nce(q, k, temperature=0.1, normalize=False),
            losses.ntxent(q, k, temperature=0.1, normalize=False),
            losses.supervised_contrastive(pairs, labels, temperature=0.1, normalize=False),
        ]
    both = F.cross_entropy(
        (products[1] / 0.1).masked_fill(alone, -math.inf), torch.arange(12).roll(6), reduction="none"
    )
    expected = F.cross_entropy(products[0] / 0.1, torch.arange(6), reduction="none"), both, both
    for loss, values in zip(found, expected, strict=True):
        assert_nonzero(values)
        assert loss.weights.dtype == torch.float32
        assert_close(loss.values, values)


def test_log_softmax_stays_float32_under_autocast() -> None:
    logits = torch.randn(5, 3).to(HALF)
    for ours, classic in ((losses.log_softmax, F.log_softmax), (losses.softmax, F.softmax)):
        with torch.autocast("cpu", HALF):
            assert_same(ours(logits), classic(logits.float(), -1))
        assert ours(logits).dtype == HALF


def test_gradients_under_autocast_are_pytorch_s() -> None:
    """Within a quarter of bfloat16's eps of the largest entry: no rounding of its own, forward or back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    x, labels = torch.randn(14, 6), torch.randint(4, (14,)).index_fill(0, torch.tensor([2, 5, 6]), -100)
    with torch.autocast("cpu", HALF):
        loss = F.cross_entropy(model(x), labels)
    loss.backward()
    loss_fn = supervised(functional(model), losses.cross_entropy)
    grad_fn = gradient(autocast(loss_fn, "cpu", HALF), has_carry=True, has_metrics=True)
    params = {name: leaf.detach() for name, leaf in model.named_parameters()}
    found = grad_fn(params, (x, labels), supervised_carry(functional(model), random.key(0)))
    assert_close(found.loss, loss.detach())
    for name, leaf in model.named_parameters():
        assert_nonzero(leaf.grad)
        assert_close(found.grads[name], leaf.grad, torch.finfo(HALF).eps / torch.finfo(torch.float32).eps / 4)


@pytest.mark.parametrize("grad_mode", [False, True])
@pytest.mark.parametrize("wrap", ["autocast", "cast"])
def test_bfloat16_under_vmap_with_batch_norm(wrap: str, grad_mode: bool) -> None:
    loss_fn, params, batch, carry = mlp_problem()
    low = autocast(loss_fn, "cpu", torch.bfloat16) if wrap == "autocast" else cast(loss_fn, torch.bfloat16)
    step = train_step(gradient(low, has_carry=True, has_metrics=True), adamw(1e-2))
    lanes = stack([params, tree.scale(params, 0.5)])
    with torch.set_grad_enabled(grad_mode):
        states = torch.vmap(lambda p: step.init(p, carry))(lanes)
        found, info = torch.vmap(step.update, in_dims=(0, None))(states, batch)
        for index in range(2):
            alone, alone_info = step.update(lane(states, index), batch)
            assert (info.loss[index] - alone_info.loss).abs() <= 4 * torch.finfo(torch.bfloat16).eps
            for name, buffer in alone.carry.buffers.items():
                got = found.carry.buffers[name][index]
                assert got.dtype == buffer.dtype
                assert (got - buffer).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * buffer.abs().max()
    assert info.applied.all()
    assert found.params["0.weight"].dtype == torch.float32


def test_cast_passes_what_is_no_tensor_and_takes_a_list() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        assert batch["task"] == "mnli"
        values = params * batch["x"]
        return [losses.mse_loss(values, torch.zeros_like(values)), {"rows": len(values)}]

    found = gradient(cast(loss_fn, HALF), has_metrics=True)(torch.tensor(1.0), {"x": torch.ones(3), "task": "mnli"})
    assert found.grads == 2
    assert found.loss.dtype == found.grads.dtype == torch.float32


def test_cast_changes_floats_only() -> None:
    seen = {}

    def loss_fn(params: Any, batch: Any, carry: Any) -> Any:
        seen.update(w=params["w"].dtype, x=batch["x"].dtype, ids=batch["ids"].dtype, carry=carry.dtype)
        return (params["w"] * batch["x"]).mean(), carry, {"m": batch["x"].mean()}

    batch = {"x": torch.ones(2), "ids": torch.ones(2, dtype=torch.int64)}
    grad_fn = gradient(cast(loss_fn, torch.bfloat16), has_carry=True, has_metrics=True)
    found = grad_fn({"w": torch.tensor(1.001)}, batch, torch.tensor(1.0))
    assert seen == {"w": torch.bfloat16, "x": torch.bfloat16, "ids": torch.int64, "carry": torch.float32}
    assert (found.loss.dtype, found.grads["w"].dtype, found.loss.item()) == (torch.float32, torch.float32, 1.0)


@pytest.mark.parametrize("wrap", [lambda f: autocast(f, "cpu", torch.bfloat16), lambda f: cast(f, torch.bfloat16)])
def test_compiles(wrap: Any) -> None:
    loss_fn, params, batch, carry = mlp_problem()
    step = train_step(
        gradient(wrap(loss_fn), has_carry=True, has_metrics=True), adamw(1e-2), loss_scale=dynamic_loss_scale()
    )
    state = step.init(params, carry)
    compiled = torch.compile(step.update, fullgraph=True, backend="aot_eager")
    (got, info), (expected, expected_info) = compiled(state, batch), step.update(state, batch)
    assert_same(info.applied, expected_info.applied)
    assert (info.loss - expected_info.loss).abs() <= 4 * torch.finfo(torch.bfloat16).eps
    assert_same((got.loss_scale, got.carry.key), (expected.loss_scale, expected.carry.key))
