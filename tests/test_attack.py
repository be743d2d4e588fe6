"""attack(): both balls, all groupings, masks, ranges, targets, random starts, and a trained digits model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same, assert_untouched
from torch import Tensor

from functricks import adamw, attack, gradient, losses, random, train_step

SHAPE = (4, 3, 5)


def inputs(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(2))


def curved(weight: Tensor) -> Any:
    return lambda x: (torch.sin(x * 2) * weight + x.square() / 3).sum()


def classic(loss: Any, x0: Tensor, norm: str, dims: tuple[int, ...], epsilon: float, step: float, steps: int) -> Tensor:
    """Written out with autograd; dims are those that one ball spans."""
    x = x0.clone()
    for _ in range(steps):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(loss(x), x)
        if norm == "linf":
            x = x0 + (x.detach() + step * slope.sign() - x0).clamp(-epsilon, epsilon)
        else:
            shift = x.detach() + step * slope / slope.square().sum(dims, keepdim=True).sqrt() - x0
            size = shift.square().sum(dims, keepdim=True).sqrt()
            x = x0 + torch.where(size > epsilon, shift * epsilon / size, shift)
    return x.detach()


DIMS = {"leaf": (0, 1, 2), "example": (1, 2), "token": (2,)}


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("per", ["leaf", "example", "token"])
@pytest.mark.parametrize("steps", [1, 4])
def test_equals_the_loop_written_out(norm: Any, per: Any, steps: int) -> None:
    x, weight = inputs()
    with assert_untouched(x):
        found = attack(curved(weight), x, norm=norm, per=per, epsilon=0.5, step_size=0.3, steps=steps)
    assert_close(found, classic(curved(weight), x, norm, DIMS[per], 0.5, 0.3, steps))
    assert not torch.equal(found, x)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("start", [None, 3])
def test_stays_in_the_ball_and_in_the_range_and_the_loss_rises(norm: Any, start: Any) -> None:
    x, weight = inputs()
    x = x.sigmoid()
    key = None if start is None else random.key(start)
    found = attack(curved(weight), x, norm=norm, epsilon=0.2, steps=10, clamp=(0.0, 1.0), key=key)
    size = (found - x).abs().amax((1, 2)) if norm == "linf" else (found - x).square().sum((1, 2)).sqrt()
    assert (size <= 0.2 * (1 + 1e-12)).all()
    assert size.max() > 0.15
    assert ((found >= 0) & (found <= 1)).all()
    assert curved(weight)(found) > curved(weight)(x)
    down = attack(curved(weight), x, norm=norm, epsilon=0.2, steps=10, clamp=(0.0, 1.0), key=key, targeted=True)
    assert curved(weight)(down) < curved(weight)(x)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_each_example_is_attacked_alone(norm: Any) -> None:
    x, weight = inputs()
    whole = attack(curved(weight), x, norm=norm, epsilon=0.5, steps=3)
    for row in range(len(x)):
        assert_close(whole[row], attack(curved(weight[row]), x[row : row + 1], norm=norm, epsilon=0.5, steps=3)[0])


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("per", ["example", "token"])
def test_mask(norm: Any, per: Any) -> None:
    """What is masked does not move and does not count: as if it were not there."""
    x, weight = inputs()
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
    found = attack(curved(weight), x, norm=norm, per=per, epsilon=0.5, steps=3, mask=mask, key=random.key(0))
    assert_same(found[~mask], x[~mask])
    assert (found != x)[mask].any(-1).all()
    plain = attack(curved(weight), x, norm=norm, per=per, epsilon=0.5, steps=3, mask=mask)
    for row in range(3):
        kept = int(mask[row].sum())
        alone = attack(curved(weight[row, :kept]), x[row : row + 1, :kept], norm=norm, per=per, epsilon=0.5, steps=3)
        assert_close(plain[row, :kept], alone[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("odd", [0.0, math.nan, math.inf])
def test_odd_gradients_move_nothing(dtype: torch.dtype, norm: Any, odd: float) -> None:
    x = torch.ones(2, 3, dtype=dtype)
    weight = torch.tensor([[1.0] * 3, [odd] * 3], dtype=dtype)
    found = attack(lambda x: (x * weight).sum(), x, norm=norm, epsilon=0.5)
    assert found.dtype == dtype
    assert_same(found[1], x[1])
    assert (found[0] > 1).all()


def test_overflowing_gradients_keep_their_direction() -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        weight = torch.full((1, 4), torch.finfo(dtype).max / 8, dtype=dtype)
        found = attack(lambda x, w=weight: (x * w).sum(), torch.zeros(1, 4, dtype=dtype), norm="l2", epsilon=0.5)
        assert_close(found, torch.full((1, 4), 0.25, dtype=dtype), 1)


TINY = {torch.float16: 1e-7, torch.bfloat16: 1e-38, torch.float32: 1e-44, torch.float64: 1e-300}


@pytest.mark.parametrize(("dtype", "size"), [*TINY.items(), (torch.float32, 1e-33), (torch.float32, 1.0)])
def test_a_targeted_attack_is_the_other_way_however_small_the_gradient(size: float, dtype: torch.dtype) -> None:
    weight = (torch.tensor([[3.0, 4.0]], dtype=torch.float64) * size).to(dtype)
    assert weight.all()
    exact = weight.double() / weight.double().div(size).norm() / size
    for targeted in (False, True):
        found = attack(
            lambda x: (x * weight).sum(), torch.zeros(1, 2, dtype=dtype), norm="l2", epsilon=1.0, targeted=targeted
        )
        assert_close(found, (-exact if targeted else exact).to(dtype))


def test_targeted_lanes_of_tiny_gradients() -> None:
    sizes = torch.tensor([1.0, 1e-44])

    def run(size: Tensor) -> Tensor:
        weight = torch.tensor([[3.0, 4.0]]) * size
        return attack(lambda x: (x * weight).sum(), torch.zeros(1, 2), norm="l2", epsilon=1.0, targeted=True)

    assert_close(torch.vmap(run)(sizes), torch.tensor([[[-0.6, -0.8]]] * 2))


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("key", [None, random.key(0)])
def test_an_empty_batch(norm: Any, key: Any) -> None:
    x, mask = torch.zeros(0, 3, 5), torch.zeros(0, 3, dtype=torch.bool)
    for per in DIMS:
        found = attack(lambda x: x.square().sum(), x, norm=norm, per=per, epsilon=0.5, steps=3, mask=mask, key=key)
        assert_same(found, x)


def test_default_step_sizes() -> None:
    x = torch.zeros(1, 3)
    assert_close(attack(lambda x: x.sum(), x, epsilon=0.4), torch.full((1, 3), 0.4))
    assert_close(attack(lambda x: x.sum(), x, epsilon=4.0, steps=5, step_size=0.5), torch.full((1, 3), 2.5))
    assert_close(attack(lambda x: x.sum(), x, epsilon=0.4, steps=5), torch.full((1, 3), 0.4))


def test_random_start_is_a_function_of_the_key() -> None:
    x, weight = inputs()
    for norm in ("l2", "linf"):
        one, same, other = (
            attack(curved(weight), x, norm=norm, epsilon=0.5, step_size=0.0, key=random.key(k)) for k in (1, 1, 2)
        )
        assert_same(one, same)
        assert not torch.equal(one, other)
        assert not torch.equal(one, x)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_vmap_compile_and_derivative(norm: Any) -> None:
    x, weight = inputs(torch.float32)
    epsilons = torch.tensor([0.0, 0.2, 0.5], dtype=torch.float64)
    keys = torch.stack([random.key(i) for i in range(3)])

    def run(epsilon: Tensor, key: Tensor, **options: Any) -> Tensor:
        return attack(
            curved(weight), x, norm=norm, epsilon=epsilon, steps=4, key=key, clamp=(-1.0, epsilon + 2), **options
        )

    looped = [run(*row) for row in zip(epsilons, keys, strict=True)]
    found = torch.vmap(run)(epsilons, keys)
    assert found.dtype == torch.float32
    for lane, expected in zip(found, looped, strict=True):
        assert_close(lane, expected)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(epsilons[1], keys[1])
    assert_close(compiled, looped[1])

    def loss(epsilon: Tensor) -> Tensor:
        return curved(weight.double())(
            attack(curved(weight.double()), x.double(), norm=norm, epsilon=epsilon, steps=3, step_size=0.1)
        )

    slope = torch.func.grad(loss)(epsilons[1])
    assert slope.item() == pytest.approx(
        ((loss(epsilons[1] + 1e-6) - loss(epsilons[1] - 1e-6)) / 2e-6).item(), rel=1e-5
    )


def test_on_activations_as_a_probe() -> None:
    """Zeros that are added to looked-up embeddings: C33's per-example number."""
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    x, v = table[torch.tensor([[0, 1], [0, 2]])], torch.tensor([1.0, 2.0], dtype=torch.float64)

    def loss(shift: Tensor) -> Tensor:
        return ((x + shift) @ v).square().sum()

    for per, expected in (("example", 24.5710678), ("leaf", 18.6602535)):
        shift = attack(loss, torch.zeros_like(x), norm="l2", per=per, epsilon=1.0)
        assert loss(shift).item() / 2 == pytest.approx(expected, abs=1e-6)


def test_errors() -> None:
    x = torch.zeros(2, 3)
    for options, text in (
        ({"epsilon": -1.0}, "attack: epsilon must be >= 0"),
        ({"epsilon": 1.0, "step_size": -1.0}, "attack: step_size must be >= 0"),
        ({"epsilon": 1.0, "steps": 0}, "attack: steps must be an integer >= 1, got 0"),
        ({"epsilon": 1.0, "norm": "l1"}, "norm must be 'l2' or 'linf'"),
        ({"epsilon": 1.0, "per": "row"}, "got 'linf', 'row'"),
        ({"epsilon": torch.ones(2)}, r"attack: epsilon must be a 0-d tensor, got shape \(2,\)"),
        ({"epsilon": 1.0, "clamp": (1.0, 0.0)}, r"clamp must be \(low, high\) with low <= high, got \(1\.0, 0\.0\)"),
        (
            {"epsilon": 1.0, "mask": torch.ones(3).bool()},
            r"mask, of shape \(3,\), must be over the leading axes .* \(2, 3",
        ),
        ({"epsilon": 1.0, "mask": torch.ones(2, 2, 3).bool()}, r"mask, of shape \(2, 2, 3\), must be over the leading"),
        ({"epsilon": 1.0, "per": "token", "norm": "l2"}, "per='token' needs an input of three axes or more"),
    ):
        with pytest.raises(ValueError, match=text):
            attack(lambda x: x.sum(), x, **options)
    with pytest.raises(ValueError, match=r"loss_of_input must return a 0-d tensor, got shape \(2,\); sum it over"):
        attack(lambda x: x.sum(1), x, epsilon=1.0)
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(ValueError, match=r"attack: x must be floating point \(complex under norm='l2' only\), got"):
            attack(lambda x: x.sum().abs(), x.to(dtype), epsilon=0.1)


def test_complex_inputs_keep_their_phase() -> None:
    x = torch.tensor([[3.0 + 4.0j], [0.0 - 2.0j]], dtype=torch.complex128)
    moved = attack(lambda x: (x.abs() ** 2).sum(), x, norm="l2", epsilon=0.5, steps=2)
    assert_close(torch.view_as_real(moved), torch.view_as_real(x * (1 + 0.5 / x.abs())), eps=16)


# --- a digits model: what adversarial training is for ----------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1200], order[1200:]
    return x[train], y[train], x[test], y[test]


def mlp(params: Any, x: Tensor) -> Tensor:
    return torch.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def trained(adversarial: bool, x: Tensor, y: Tensor, steps: int = 300) -> Any:
    generator = torch.Generator().manual_seed(1)
    shapes = {"w1": (64, 64), "b1": (64,), "w2": (64, 10), "b2": (10,)}
    params = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def loss_fn(params: Any, batch: Any) -> Any:
        x, y = batch
        if adversarial:
            x = attack(
                lambda x: losses.cross_entropy(mlp(params, x), y).sum(), x, epsilon=0.1, steps=3, clamp=(0.0, 1.0)
            )
        return losses.cross_entropy(mlp(params, x), y)

    step = train_step(gradient(loss_fn, backend="func"), adamw(3e-3))
    state = step.init(params)
    for index in range(steps):
        rows = torch.arange(64 * index, 64 * (index + 1)) % len(x)
        with torch.no_grad():
            state, _ = step.update(state, (x[rows], y[rows]))
    return state.params


def robust_accuracy(params: Any, x: Tensor, y: Tensor, norm: Any, epsilon: float, key: Any = None) -> float:
    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(mlp(params, x), y, reduction="sum")

    step = epsilon / 4
    moved = attack(loss, x, norm=norm, epsilon=epsilon, step_size=step, steps=10, clamp=(0.0, 1.0), key=key)
    return (mlp(params, moved).argmax(1) == y).double().mean().item()


@pytest.mark.slow
def test_adversarial_training_makes_digits_robust() -> None:
    x, y, x_test, y_test = digits()
    plain, hard = trained(False, x, y), trained(True, x, y)
    for norm, epsilon in (("linf", 0.1), ("l2", 0.5)):
        assert (
            robust_accuracy(hard, x_test, y_test, norm, epsilon)
            > robust_accuracy(plain, x_test, y_test, norm, epsilon) + 0.1
        )
    assert robust_accuracy(hard, x_test, y_test, "linf", 0.0) > 0.9
