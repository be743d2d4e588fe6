"""Averages of parameters: equal to ``torch.optim.swa_utils``, wherever they sit in an optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import RUN_F64, assert_close, assert_run_close, assert_same, lane, stack
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import swa_utils

import functricks as F

STEPS = 20


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def batch(step: int) -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def classic(average: swa_utils.AveragedModel, net: nn.Module, every: int = 1, start: int = 0) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()
        if step + 1 > start and (step + 1 - start) % every == 0:
            average.update_parameters(net)


def functional(average: Any, buffer_average: Any = None) -> tuple[Any, Any, Any, Any]:
    net = model()
    params = {name: leaf.detach() for name, leaf in net.named_parameters()}
    buffers = dict(net.named_buffers())
    optimizer = F.chain(F.sgd(0.1), average)
    state = optimizer.init(params)
    kept = buffer_average.init(buffers) if buffer_average else None

    def loss_fn(params: Any, x: Tensor, buffers: Any) -> Any:
        new = {name: leaf.clone() for name, leaf in buffers.items()}
        out = functional_call(net, {**params, **new}, (x,))
        return out.square().mean(), new

    grad_fn = F.gradient(loss_fn, has_carry=True)
    for step in range(STEPS):
        found = grad_fn(params, batch(step), buffers)
        updates, state = optimizer.update(found.grads, state, params)
        params, buffers = F.apply_updates(params, updates), found.carry
        kept = buffer_average.observe(buffers, kept) if buffer_average else None
    return params, buffers, state, kept


def named(average: swa_utils.AveragedModel) -> dict[str, Tensor]:
    return {name: leaf.detach() for name, leaf in average.module.named_parameters()}


def origin() -> dict[str, Tensor]:
    return {name: leaf.detach() for name, leaf in model().named_parameters()}


@pytest.mark.parametrize("every", [1, 3])
def test_ema_is_that_of_pytorch(every: int) -> None:
    net = model()
    average = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    classic(average, net, every)
    params, _, state, _ = functional(F.ema(0.9, every=every))
    assert_run_close(F.averaged(state, params), named(average), origin(), RUN_F64)


@pytest.mark.parametrize(("every", "start"), [(1, 0), (4, 0), (2, 7)])
def test_swa_is_that_of_pytorch(every: int, start: int) -> None:
    net = model()
    average = swa_utils.AveragedModel(net)
    classic(average, net, every, start)
    params, _, state, _ = functional(F.swa(every, start))
    assert_run_close(F.averaged(state, params), named(average), origin(), RUN_F64)


def test_buffers_are_averaged_as_by_use_buffers() -> None:
    net = model()
    average = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    classic(average, net)
    _, buffers, _, kept = functional(F.ema(0.9), F.ema(0.9))
    found = F.averaged(kept, buffers)
    for name, leaf in average.module.named_buffers():
        if leaf.is_floating_point():
            torch.testing.assert_close(found[name], leaf, rtol=1e-12, atol=0)
    assert found["1.num_batches_tracked"] == STEPS  # PyTorch averages the count, and rounds it down


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
def test_update_bn_is_that_of_pytorch(momentum: float | None) -> None:
    net = model()
    net[1].momentum = momentum
    batches = [batch(100 + i) for i in range(5)]
    params, buffers = origin(), {name: leaf.clone() for name, leaf in net.named_buffers()}

    def apply(params: Any, buffers: Any, x: Tensor) -> Any:
        new = {name: leaf.clone() for name, leaf in buffers.items()}
        functional_call(net, {**params, **new}, (x,))
        return new

    if momentum is None:  # BatchNorm itself takes the mean of all batches then
        with pytest.raises(TypeError, match="momentum must be a number"):
            F.update_bn(apply, params, buffers, batches, momentum=momentum)
        return
    found = F.update_bn(apply, params, buffers, batches, momentum=momentum)
    swa_utils.update_bn(batches, net)
    for name, leaf in net.named_buffers():
        torch.testing.assert_close(found[name], leaf, rtol=1e-12, atol=1e-15)
    assert_same(F.update_bn(apply, params, buffers, []), buffers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_in_other_dtypes_it_is_that_of_pytorch_in_float32(kind: str, dtype: torch.dtype) -> None:
    """PyTorch averages half-precision parameters in half, where 0.999 * a + 0.001 * b is a."""
    values = [torch.randn(7, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(50)]
    net = nn.Linear(7, 1, bias=False)
    how = {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)} if kind == "ema" else {}
    average = swa_utils.AveragedModel(net, **how)
    ours = F.ema(0.9) if kind == "ema" else F.swa()
    state = ours.init({"w": values[0]})
    for value in values:
        net.weight.data = value.float()[None]
        average.update_parameters(net)
        state = ours.observe({"w": value}, state)
    expected = average.module.weight.detach()[0]
    assert_close(state.averaged({"w": values[0]})["w"], expected, eps=16)
    assert F.averaged(state, {"w": values[0]})["w"].dtype == dtype


def test_debiased_start() -> None:
    average = F.ema(0.9, debias=True)
    state = average.init({"w": torch.tensor(0.0)})
    assert_same(F.averaged(state, {"w": torch.tensor(5.0)}), {"w": torch.tensor(5.0)})
    for value in (1.0, 3.0):
        state = average.observe({"w": torch.tensor(value)}, state)
    expected = torch.tensor((0.9 * 0.1 * 1.0 + 0.1 * 3.0) / (1 - 0.9**2))
    torch.testing.assert_close(F.averaged(state, {"w": torch.tensor(3.0)})["w"], expected)


def test_lanes_have_decays_of_their_own() -> None:
    values = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, -1.0])}]
    decays = torch.tensor([0.0, 0.5, 0.9])

    def run(decay: Any) -> Any:
        average = F.ema(decay)
        state = average.init(values[0])
        for value in values:
            state = average.observe(value, state)
        return F.averaged(state, values[0])

    assert_close(torch.vmap(run)(decays), stack([run(decay.item()) for decay in decays]))


# --- finding them ----------------------------------------------------------------------------------------------------


def test_averages_are_found_at_any_depth() -> None:
    params = {"a": {"w": torch.tensor(0.0)}, "b": torch.tensor(0.0)}
    labels = lambda path, leaf: "averaged" if path == "a.w" else "plain"  # noqa: E731
    optimizer = F.chain(
        F.clip_by_global_norm(100.0),
        F.partition({"averaged": F.chain(F.sgd(1.0), F.swa()), "plain": F.sgd(1.0)}, labels),
    )
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update({"a": {"w": torch.tensor(-1.0)}, "b": torch.tensor(-1.0)}, state, params)
        params = F.apply_updates(params, updates)
    assert_same(F.averaged(state, params), {"a": {"w": torch.tensor(2.0)}, "b": torch.tensor(3.0)})


def test_no_average_and_two_averages_raise() -> None:
    params = {"w": torch.tensor(0.0)}
    with pytest.raises(ValueError, match="holds no average"):
        F.averaged(F.sgd(0.1).init(params), params)
    both = F.chain(F.sgd(0.1), F.ema(0.9), F.swa())
    with pytest.raises(ValueError, match="two averages of w"):
        F.averaged(both.init(params), params)
    with pytest.raises(ValueError, match="the state averages w; have: v"):
        F.averaged(F.swa().init(params), {"v": torch.tensor(0.0)})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: F.ema(1.5), "decay must be <= 1"),
        (lambda: F.ema(every=0), "every must be an integer >= 1"),
        (lambda: F.swa(start=-1), "start must be an integer >= 0"),
        (lambda: F.lookahead(F.sgd(), 0), "sync_period must be an integer >= 1"),
        (lambda: F.lookahead(F.sgd(), 2, 1.5), "slow_step_size must be <= 1"),
    ],
)
def test_bad_arguments(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_a_bare_leaf_and_half_precision() -> None:
    leaf = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    optimizer = F.chain(F.sgd(0.001), F.ema(0.5))
    state = optimizer.init(leaf)
    assert state[1].average.dtype == torch.float32
    _, state = optimizer.update(torch.ones_like(leaf), state, leaf)
    assert_close(state[1].average, torch.tensor([0.999, 1.999]))  # not rounded to bfloat16 on the way
    assert F.averaged(state, leaf).dtype == torch.bfloat16


# --- lookahead -------------------------------------------------------------------------------------------------------


def test_lookahead_is_algorithm_1() -> None:
    """arXiv:1907.08610, algorithm 1, with SGD inside."""
    target, k, alpha, lr = torch.tensor([3.0, -2.0], dtype=torch.float64), 3, 0.4, 0.2
    slow = fast = torch.zeros(2, dtype=torch.float64)
    for step in range(12):
        fast = fast - lr * (fast - target)
        if (step + 1) % k == 0:
            slow = slow + alpha * (fast - slow)
            fast = slow
    optimizer = F.lookahead(F.sgd(lr), k, alpha)
    params: Any = {"w": torch.zeros(2, dtype=torch.float64)}
    state = optimizer.init(params)
    for _ in range(12):
        updates, state = optimizer.update({"w": params["w"] - target}, state, params)
        params = F.apply_updates(params, updates)
    torch.testing.assert_close(params["w"], fast, rtol=1e-12, atol=0)
    torch.testing.assert_close(F.averaged(state, params)["w"], slow, rtol=1e-12, atol=0)


def test_lookahead_lanes() -> None:
    def run(alpha: Any, k: Any) -> Any:
        optimizer = F.lookahead(F.sgd(0.5), k, alpha)
        params: Any = {"w": torch.tensor([1.0, 2.0])}
        state = optimizer.init(params)
        for _ in range(4):
            updates, state = optimizer.update(params, state, params)
            params = F.apply_updates(params, updates)
        return params, F.averaged(state, params)

    found = torch.vmap(run)(torch.tensor([0.5, 0.1, 1.0]), torch.tensor([1, 2, 3]))
    for i, (alpha, k) in enumerate([(0.5, 1), (0.1, 2), (1.0, 3)]):
        assert_close(lane(found, i), run(alpha, k))


@pytest.mark.parametrize("average", [F.ema(0.5), F.ema(0.5, debias=True), F.swa()], ids=["ema", "debiased", "swa"])
def test_counts_are_copied(average: Any) -> None:
    buffers = {"running_mean": torch.tensor(8.0), "num_batches_tracked": torch.tensor(0)}
    state = average.init(buffers)
    for step in range(1, 4):
        state = average.observe({**buffers, "num_batches_tracked": torch.tensor(step)}, state)
    assert_same(F.averaged(state, buffers), {**buffers, "num_batches_tracked": torch.tensor(3)})


def test_update_bn_adds_up_half_precision_in_float32() -> None:
    buffers = {"running_var": torch.tensor(0.0, dtype=torch.float16)}
    ones = [torch.ones(())] * 600
    found = F.update_bn(lambda params, own, x: {"running_var": (0.1 * x).half()}, {}, buffers, ones)
    assert_close(found, {"running_var": torch.tensor(1.0, dtype=torch.float16)}, eps=2)  # 6000 / 600
    with pytest.raises(ValueError, match="update_bn: momentum must be > 0"):
        F.update_bn(lambda params, own, x: own, {}, buffers, ones, momentum=0.0)


@pytest.mark.parametrize("average", [F.ema(0.5), F.ema(0.5, debias=True), F.swa()])
def test_complex_parameters_are_averaged(average: Any) -> None:
    """As in PyTorch, where they are two real ones; they were copied."""
    values = [torch.tensor(1.0 - 2j), torch.tensor(5.0 + 4j)]
    state, real = average.init({"w": values[0]}), average.init({"w": torch.zeros(2)})
    for value in values:
        state = average.observe({"w": value}, state)
        real = average.observe({"w": torch.view_as_real(value)}, real)
    found = F.averaged(state, {"w": values[1]})["w"]
    torch.testing.assert_close(torch.view_as_real(found), F.averaged(real, {"w": torch.zeros(2)})["w"])


def test_a_decay_of_one_debiased_weighs_nothing() -> None:
    average = F.ema(1.0, debias=True)
    state = average.observe({"w": torch.tensor(2.0)}, average.init({"w": torch.tensor(0.0)}))
    assert F.averaged(state, {"w": torch.tensor(3.0)}) == {"w": torch.tensor(3.0)}


def test_a_decay_may_be_a_schedule() -> None:
    """timm's and torch-ema's warm-up: min(decay, (1 + t) / (10 + t))."""
    optimizer = F.chain(F.sgd(1.0), F.inject_hyperparams(F.ema)(decay=lambda step: (1.0 + step) / (10.0 + step)))
    params, expected = {"w": torch.tensor(0.0)}, None
    state = optimizer.init(params)
    for step in range(4):
        updates, state = optimizer.update({"w": torch.tensor(-1.0)}, state, params)
        params = F.apply_updates(params, updates)
        decay = (1 + step) / (10 + step)
        expected = params["w"].item() if expected is None else decay * expected + (1 - decay) * params["w"].item()
    assert F.averaged(state, params)["w"].item() == pytest.approx(expected)
