"""Binary cross entropy and its focal form, squared and absolute error, Kullback-Leibler divergence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functricks import losses
from functricks.types import Loss

# torch's own forward mode, inside torch.func.hessian, still scripts its decompositions
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

INF = math.inf
WIDE = [torch.float32, torch.float64]
HALF = [torch.bfloat16, torch.float16]


def eps8(dtype: torch.dtype) -> float:
    return 8 * torch.finfo(dtype).eps


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.dtype == want.dtype
    finite = want[want.isfinite()].abs()
    scale = max(1e-3, float(finite.max()) if finite.numel() else 0.0)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def reduce(loss: Loss, reduction: str) -> Tensor:
    return {"mean": loss.mean, "sum": loss.sum, "none": lambda: loss.values}[reduction]()


REDUCTIONS = ("mean", "sum", "none")


# --- binary cross entropy --------------------------------------------------------------------------------------------

EDGES = torch.tensor([0.0, 1e-30, 1e-12, 1e-7, 0.3, 0.5, 1 - 1e-7, 1.0])


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("weighted", [False, True])
def test_binary_cross_entropy_is_pytorch_s_to_the_bit(weighted: bool, dtype: torch.dtype) -> None:
    p = torch.cat([EDGES.to(dtype), torch.rand(24, dtype=dtype)]).repeat(3, 1)
    t = torch.stack([torch.zeros(32), torch.ones(32), torch.rand(32)]).to(dtype)  # soft targets too
    weight = torch.rand(32, dtype=dtype) if weighted else None
    loss = losses.binary_cross_entropy(p, t, weight=weight)
    for reduction in REDUCTIONS:
        assert torch.equal(reduce(loss, reduction), F.binary_cross_entropy(p, t, weight, reduction=reduction))
    got = torch.func.grad(lambda p: losses.binary_cross_entropy(p, t, weight=weight).sum())(p)
    want = torch.func.grad(lambda p: F.binary_cross_entropy(p, t, weight, reduction="sum"))(p)
    if weighted:
        close(got, want, eps8(dtype))  # the weight multiplies outside torch's kernel
    else:
        assert torch.equal(got, want)
    mean = torch.func.grad(lambda p: losses.binary_cross_entropy(p, t, weight=weight).mean())(p)
    close(mean, torch.func.grad(lambda p: F.binary_cross_entropy(p, t, weight))(p), eps8(dtype))


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("weight", [None, (32,), (3, 1), (3, 32), ()])
@pytest.mark.parametrize("pos_weight", [None, (32,), (3, 1), ()])
def test_binary_cross_entropy_with_logits_is_pytorch_s(weight: Any, pos_weight: Any, dtype: torch.dtype) -> None:
    x = 5 * torch.randn(3, 32, dtype=dtype)
    t = torch.stack([torch.zeros(32), torch.ones(32), torch.rand(32)]).to(dtype)
    w = None if weight is None else torch.rand(weight, dtype=dtype)
    c = None if pos_weight is None else 3 * torch.rand(pos_weight, dtype=dtype)
    loss = losses.binary_cross_entropy_with_logits(x, t, weight=w, pos_weight=c)
    for reduction in REDUCTIONS:
        want = F.binary_cross_entropy_with_logits(x, t, w, pos_weight=c, reduction=reduction)
        assert torch.equal(reduce(loss, reduction), want)
    got = torch.func.grad(lambda x: losses.binary_cross_entropy_with_logits(x, t, weight=w, pos_weight=c).mean())(x)
    want = torch.func.grad(lambda x: F.binary_cross_entropy_with_logits(x, t, w, pos_weight=c))(x)
    assert bool((want != 0).any())
    close(got, want, eps8(dtype))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("ours", "theirs", "squash"),
    [
        (losses.binary_cross_entropy, F.binary_cross_entropy, True),
        (losses.binary_cross_entropy_with_logits, F.binary_cross_entropy_with_logits, False),
        (losses.l1_loss, F.l1_loss, False),
        (losses.mse_loss, F.mse_loss, False),
    ],
)
def test_half_precision_is_the_rounded_reference(ours: Any, theirs: Any, squash: bool, dtype: torch.dtype) -> None:
    x = torch.randn(4, 16).to(dtype)
    x = x.sigmoid() if squash else x
    t = torch.rand(4, 16).to(dtype)
    loss = ours(x, t)
    assert loss.weights.dtype == torch.float32
    for reduction in REDUCTIONS:
        want = theirs(x.double(), t.double(), reduction=reduction).to(dtype)
        close(reduce(loss, reduction), want, 2 * torch.finfo(dtype).eps)  # each value, and the sum, is rounded once
    got = torch.func.grad(lambda x: ours(x, t).mean())(x)
    close(got, torch.func.grad(theirs)(x.double(), t.double()).to(dtype), 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(("x", "value", "from_probability"), [(-50.0, 50.0, -1.93e-10), (-200.0, 200.0, 0.0)])
def test_c13_the_clamp_of_bce_kills_the_gradient(x: float, value: float, from_probability: float) -> None:
    logit, t = torch.tensor(x), torch.tensor(1.0)
    loss = losses.binary_cross_entropy_with_logits(logit, t)
    assert loss.mean() == value
    assert torch.func.grad(lambda x: losses.binary_cross_entropy_with_logits(x, t).mean())(logit) == -1.0
    assert losses.binary_cross_entropy(logit.sigmoid(), t).mean() == min(value, 100.0)
    slope = torch.func.grad(lambda x: losses.binary_cross_entropy(x.sigmoid(), t).mean())(logit)
    torch.testing.assert_close(slope, torch.tensor(from_probability), rtol=1e-2, atol=0)  # three digits are printed


def test_c13_the_floor_of_the_derivative() -> None:
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    assert losses.binary_cross_entropy(zero, one).mean() == 100.0
    slope = torch.func.grad(lambda p: losses.binary_cross_entropy(p, one).mean())(zero)
    torch.testing.assert_close(slope, torch.tensor(-1e12))


# --- sigmoid focal loss ----------------------------------------------------------------------------------------------

GAMMAS = [0, 0.5, 1, 2.0, torch.tensor(0.0), torch.tensor(0.5), torch.tensor(2.0)]


@pytest.mark.parametrize("gamma", GAMMAS)
def test_c11_sigmoid_focal_is_finite_when_saturated(gamma: Any) -> None:
    x, t = torch.tensor([-100.0, -100.0, 100.0, 100.0]), torch.tensor([0, 1, 0, 1])

    def loss(x: Tensor) -> Tensor:
        return losses.sigmoid_focal_loss(x, t, gamma=gamma, alpha=None).mean()

    assert loss(x) == 50.0
    torch.testing.assert_close(torch.func.grad(loss)(x), torch.tensor([0.0, -0.25, 0.25, 0.0]), rtol=0, atol=1e-30)
    assert torch.func.hessian(loss)(x).isfinite().all()


@pytest.mark.parametrize(
    ("x", "t", "gamma", "alpha", "value", "slope"),
    [
        (2.0, 1.0, 2.0, None, 0.00180356, -0.00487094),
        (2.0, 1.0, 2.0, 0.25, 0.00045089, None),
        (2.0, 1.0, 0.5, None, 0.04382288, -0.06045527),
        (0.0, 1.0, 2.0, 0.25, 0.0433217, None),
        (0.0, 0.0, 2.0, 0.25, 0.1299651, None),  # the negatives get 1 - alpha
    ],
)
def test_c11_anchors(x: float, t: float, gamma: float, alpha: float | None, value: float, slope: float | None) -> None:
    logit, target = torch.tensor(x), torch.tensor(t)

    def loss(x: Tensor) -> Tensor:
        return losses.sigmoid_focal_loss(x, target, gamma=gamma, alpha=alpha).mean()

    torch.testing.assert_close(loss(logit), torch.tensor(value), rtol=1e-5, atol=0)  # digits as printed
    if slope is not None:
        torch.testing.assert_close(torch.func.grad(loss)(logit), torch.tensor(slope), rtol=1e-5, atol=0)


@given(st.integers(0, 2**16), st.floats(0, 5), st.sampled_from([None, 0.0, 0.25, 1.0]))
def test_sigmoid_focal_is_torchvision_s_formula_for_hard_targets(seed: int, gamma: float, alpha: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(20, generator=generator, dtype=torch.float64)
    t = torch.randint(0, 2, (20,), generator=generator).double()
    p = x.sigmoid()
    p_t = p * t + (1 - p) * (1 - t)
    want = F.binary_cross_entropy_with_logits(x, t, reduction="none") * (1 - p_t) ** gamma
    if alpha is not None:
        want = (alpha * t + (1 - alpha) * (1 - t)) * want
    got = losses.sigmoid_focal_loss(x, t, gamma=gamma, alpha=alpha).values
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)  # 1 - p_t cancels in the formula
    for i in range(20):  # a soft target is the expected loss
        one, zero, half = (
            losses.sigmoid_focal_loss(x[i], torch.tensor(v, dtype=x.dtype), gamma=gamma, alpha=alpha).mean()
            for v in (1.0, 0.0, 0.3)
        )
        torch.testing.assert_close(half, 0.3 * one + 0.7 * zero)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8), st.floats(0, 1, width=32))
def test_sigmoid_focal_without_gamma_is_bce(x: list[float], t: float) -> None:
    logits = torch.tensor(x, dtype=torch.float64)
    targets = torch.full_like(logits, t)
    want = losses.binary_cross_entropy_with_logits(logits, targets).values
    assert torch.equal(losses.sigmoid_focal_loss(logits, targets, gamma=0, alpha=None).values, want)
    got = losses.sigmoid_focal_loss(logits, targets, gamma=torch.tensor(0.0), alpha=None).values
    # log(sigmoid(-x)) here, log(sigmoid(x)) - x in torch: that cancels
    torch.testing.assert_close(got, want, rtol=eps8(want.dtype), atol=float(logits.abs().max()) * eps8(want.dtype))
    torch.testing.assert_close(
        losses.sigmoid_focal_loss(logits, targets, gamma=0, alpha=0.5).values, want / 2, rtol=1e-12, atol=1e-11
    )


@pytest.mark.parametrize("dtype", [*WIDE, *HALF])
@pytest.mark.parametrize("gamma", [0.0, 1e-3, 0.5, 1.0, 2.0, 5.0])
def test_saturated_logits_stay_finite(gamma: float, dtype: torch.dtype) -> None:
    x = torch.tensor([-1e4, -1e4, -1e4, -100, 0, 100, 1e4, 1e4, 1e4]).to(dtype)
    t = torch.tensor([0, 1, 0.3, 1, 0.5, 0, 0, 1, 0.7])

    def focal(x: Tensor, gamma: Any, alpha: Any) -> Tensor:
        return losses.sigmoid_focal_loss(x, t, gamma=gamma, alpha=alpha).mean()

    def plain(x: Tensor, pos_weight: Any, _: Any) -> Tensor:
        return losses.binary_cross_entropy_with_logits(x, t, pos_weight=pos_weight).mean()

    for loss in (focal, plain):
        hypers = torch.tensor(gamma), torch.tensor(0.25)
        for args in ((x, gamma, 0.25), (x, *hypers)):
            assert loss(*args).isfinite()
            assert torch.func.grad(loss)(*args).isfinite().all()
            assert torch.func.hessian(loss)(*args).isfinite().all()
        assert torch.func.grad(loss, argnums=1)(x, *hypers).isfinite()
        assert torch.func.hessian(loss, argnums=1)(x, *hypers).isfinite()


def test_sigmoid_focal_derivatives_by_gradcheck() -> None:
    x = (3 * torch.randn(6, dtype=torch.float64)).requires_grad_()
    t = torch.rand(6, dtype=torch.float64).requires_grad_()
    gamma, alpha = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.7, 0.3))

    def loss(x: Tensor, t: Tensor, gamma: Tensor, alpha: Tensor) -> Tensor:
        return losses.sigmoid_focal_loss(x, t, gamma=gamma, alpha=alpha).sum()

    assert torch.autograd.gradcheck(loss, (x, t, gamma, alpha))
    assert torch.autograd.gradgradcheck(loss, (x, t, gamma, alpha))


# --- what the binary losses share ------------------------------------------------------------------------------------

BINARY: dict[str, Any] = {
    "bce": lambda x, t, **o: losses.binary_cross_entropy(x.sigmoid(), t, **o),
    "logits": losses.binary_cross_entropy_with_logits,
    "positives": lambda x, t, **o: losses.binary_cross_entropy_with_logits(x, t, pos_weight=3.0, **o),
    "focal": losses.sigmoid_focal_loss,
}


@pytest.mark.parametrize("name", BINARY)
@given(st.integers(1, 12), st.integers(0, 2**16), st.sampled_from([-100, 255, 1, 0.5]), st.booleans())
def test_deleting_ignored_elements_changes_nothing(name: str, n: int, seed: int, ignore: float, integers: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.randn(n, generator=generator, dtype=torch.float64)
    t = torch.randint(0, 2, (n,), generator=generator).to(torch.int64 if integers and ignore != 0.5 else x.dtype)
    t[torch.rand(n, generator=generator) < 0.4] = ignore
    kept = t != ignore
    if name != "bce":  # there the sigmoid is the caller's
        x[~kept] = math.nan

    def total(x: Tensor, t: Tensor) -> Tensor:
        return BINARY[name](x, t, ignore_index=ignore).sum()

    whole, part = BINARY[name](x, t, ignore_index=ignore), BINARY[name](x[kept], t[kept], ignore_index=ignore)
    assert torch.equal(whole.values[kept], part.values)
    assert torch.equal(whole.weights, kept.double())
    assert not whole.values[~kept].any()
    gradient = torch.func.grad(total)(x, t)
    assert torch.equal(gradient[~kept], torch.zeros_like(gradient[~kept]))
    close(gradient[kept], torch.func.grad(total)(x[kept], t[kept]), eps8(x.dtype))
    cut = n // 2
    first, second = (BINARY[name](x[part], t[part], ignore_index=ignore) for part in (slice(cut), slice(cut, n)))
    close((first.sum() + second.sum()) / (first.weights.sum() + second.weights.sum()), whole.mean(), eps8(x.dtype))


@pytest.mark.parametrize("name", BINARY)
def test_nothing_left(name: str) -> None:
    loss = BINARY[name](torch.randn(3), torch.full((3,), -100.0))
    assert loss.mean().isnan()
    assert loss.sum() == 0
    assert not loss.weights.any()


HYPERS: dict[str, tuple[Any, Tensor]] = {
    "gamma": (losses.sigmoid_focal_loss, torch.tensor([0.0, 0.5, 2.0])),
    "alpha": (losses.sigmoid_focal_loss, torch.tensor([0.1, 0.5, 0.9])),
    "pos_weight": (losses.binary_cross_entropy_with_logits, torch.tensor([0.5, 1.0, 4.0])),
    "weight": (losses.binary_cross_entropy_with_logits, torch.tensor([[0.5, 1.0], [2.0, 3.0], [1.0, 4.0]])),
    "bce weight": (losses.binary_cross_entropy, torch.tensor([[0.5, 1.0], [2.0, 3.0], [1.0, 4.0]])),
}


@pytest.mark.parametrize("lanes_in", ["hyper", "input", "both"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("key", HYPERS)
def test_lanes_equal_the_loop(key: str, wide: bool, lanes_in: str) -> None:
    loss, values = HYPERS[key]
    values = values.double() if wide else values
    x, t = torch.rand(3, 5, 2), torch.randint(0, 2, (3, 5, 2)).float()
    t[:, 0] = -100
    name = key.split()[-1]

    def one(x: Tensor, t: Tensor, value: Tensor) -> tuple[Loss, Tensor, Tensor]:
        def mean(x: Tensor, value: Tensor) -> Tensor:
            return loss(x, t, **{name: value}).mean()

        return loss(x, t, **{name: value}), *torch.func.grad(mean, argnums=(0, 1))(x, value)

    hyper, batch = lanes_in != "input", lanes_in != "hyper"
    args = (x if batch else x[0], t if batch else t[0], values if hyper else values[1])
    dims = (0 if batch else None, 0 if batch else None, 0 if hyper else None)
    got, *gradients = torch.func.vmap(one, in_dims=dims)(*args)
    assert got.values.dtype == got.weights.dtype == torch.float32
    for i in range(3):
        want, *solo = one(x[i if batch else 0], t[i if batch else 0], values[i if hyper else 1])
        close(got.values[i], want.values, eps8(torch.float32))
        assert torch.equal(got.weights[i], want.weights)
        for batched, alone in zip(gradients, solo, strict=True):
            assert bool((alone != 0).any())
            close(batched[i], alone, eps8(torch.float32))


def test_compiled() -> None:
    def step(x: Tensor, t: Tensor, h: Tensor) -> Tensor:
        focal = losses.sigmoid_focal_loss(x, t, gamma=h, alpha=h / 2).mean()
        plain = losses.binary_cross_entropy_with_logits(x, t, pos_weight=h).mean()
        errors = losses.mse_loss(x, t).mean() + losses.l1_loss(x, t, weight=x.sigmoid()).mean()
        return focal + plain + errors + losses.kl_divergence(x.log_softmax(1), t.softmax(1)).mean()

    gradient = torch.func.vmap(torch.func.grad(step))
    args = torch.randn(2, 3, 4), torch.rand(2, 3, 4), torch.tensor([0.5, 1.0])
    close(torch.compile(gradient, fullgraph=True)(*args), gradient(*args), eps8(torch.float32))


# --- absolute and squared error --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(7,), (3, 4), ()])
@pytest.mark.parametrize(("ours", "theirs"), [(losses.l1_loss, F.l1_loss), (losses.mse_loss, F.mse_loss)])
def test_errors_are_pytorch_s(ours: Any, theirs: Any, shape: Any, weighted: bool, dtype: torch.dtype) -> None:
    x, t = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    weight = torch.rand(shape, dtype=dtype) + 0.1 if weighted else None
    for reduction in REDUCTIONS:
        want = theirs(x, t, weight=weight, reduction=reduction)
        close(reduce(ours(x, t, weight=weight), reduction), want, eps8(dtype))
    got = torch.func.grad(lambda x: ours(x, t, weight=weight).mean())(x)
    want = torch.func.grad(lambda x: theirs(x, t, weight=weight))(x)
    assert bool((want != 0).all())
    close(got, want, eps8(dtype))
    micro = [
        ours(x.flatten()[i], t.flatten()[i], weight=None if weight is None else weight.flatten()[i])
        for i in range(x.numel())
    ]
    total: Any = sum(m.sum() for m in micro)
    close(total / sum(m.weights for m in micro), ours(x, t, weight=weight).mean(), eps8(dtype))


def test_errors_of_mixed_dtypes() -> None:
    assert losses.mse_loss(torch.ones(2), torch.ones(2).double()).values.dtype == torch.float64
    assert losses.l1_loss(torch.ones(2), torch.ones(2).long()).values.dtype == torch.float32
    assert losses.mse_loss(torch.ones(2).bfloat16(), torch.ones(2).half()).values.dtype == torch.float32


def test_float16_errors_saturate_and_keep_their_gradient() -> None:
    x, t = torch.tensor([1e3], dtype=torch.float16), torch.tensor([0.0], dtype=torch.float16)
    assert losses.mse_loss(x, t).values.tolist() == [65504.0]
    assert torch.func.grad(lambda x: losses.mse_loss(x, t).mean())(x).tolist() == [2000.0]


# --- Kullback-Leibler ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss:UserWarning")
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_divergence_is_pytorch_s(log_target: bool, dtype: torch.dtype) -> None:
    x = torch.randn(5, 4, dtype=dtype).log_softmax(1)
    t = (3 * torch.randn(5, 4, dtype=dtype)).log_softmax(1)
    t = t if log_target else t.exp()
    loss = losses.kl_divergence(x, t, log_target=log_target)
    for reduction in REDUCTIONS:
        want = F.kl_div(x, t, reduction=reduction, log_target=log_target)
        close(reduce(loss, reduction), want, eps8(dtype))
    close(loss.sum() / len(x), F.kl_div(x, t, reduction="batchmean", log_target=log_target), eps8(dtype))
    for argument in (0, 1):
        got = torch.func.grad(lambda x, t: losses.kl_divergence(x, t, log_target=log_target).sum(), argument)(x, t)
        want = torch.func.grad(lambda x, t: F.kl_div(x, t, reduction="sum", log_target=log_target), argument)(x, t)
        close(got, want, eps8(dtype))


@pytest.mark.parametrize("log_target", [False, True])
def test_impossible_targets_cost_nothing(log_target: bool) -> None:
    x = torch.tensor([-INF, -3.0, 0.0])
    t = torch.tensor([0.0, 0.0, 1.0])
    t = t.log() if log_target else t
    assert losses.kl_divergence(x, t, log_target=log_target).values.tolist() == [0.0, 0.0, 0.0]
    for argument in (0, 1):
        gradient = torch.func.grad(lambda x, t: losses.kl_divergence(x, t, log_target=log_target).sum(), argument)(x, t)
        assert gradient.isfinite().all()
    assert losses.kl_divergence(x, torch.tensor([1.0, 0.0, 0.0])).values.tolist() == [INF, 0.0, 0.0]


# --- the boundary ----------------------------------------------------------------------------------------------------

P = torch.rand(4, 2)


@pytest.mark.parametrize(
    "loss",
    [
        losses.l1_loss,
        losses.mse_loss,
        losses.kl_divergence,
        losses.binary_cross_entropy,
        losses.binary_cross_entropy_with_logits,
        losses.sigmoid_focal_loss,
    ],
)
def test_nothing_broadcasts_silently(loss: Any) -> None:
    for a, b in (((4, 1), (4,)), ((4,), (4, 1)), ((4, 2), (2,)), ((1,), (4,)), ((4,), ())):
        x, t = torch.full(a, 0.5), torch.full(b, 0.5)
        with pytest.raises(ValueError, match="must have the same shape"):
            loss(x, t)
        with pytest.raises(ValueError, match="must have the same shape"):  # in a trace too
            torch.func.grad(lambda x, t=t: loss(x, t).mean())(x)
    with pytest.raises(ValueError, match="must be floating point"):
        loss(torch.ones(3, dtype=torch.long), torch.ones(3))
    with pytest.raises(TypeError, match="must be a tensor, got float"):
        loss(torch.ones(()), 1.0)


@pytest.mark.parametrize("loss", [losses.l1_loss, losses.mse_loss])
def test_element_weights_have_the_shape_of_the_input(loss: Any) -> None:
    for shape in ((2,), (4, 1), (4,), ()):
        with pytest.raises(ValueError, match="input and weight must have the same shape"):
            loss(P, P, weight=torch.ones(shape))


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (losses.binary_cross_entropy, "weight"),
        (losses.binary_cross_entropy_with_logits, "weight"),
        (losses.binary_cross_entropy_with_logits, "pos_weight"),
    ],
)
def test_factors_never_enlarge_the_result(loss: Any, name: str) -> None:
    for x, factor in ((P, (4,)), (P[:, :1], (4,)), (P, (3, 4, 2)), (P, (4, 3)), (P[0], (2, 1))):
        with pytest.raises(ValueError, match=f"{name} of shape"):
            loss(x, x, **{name: torch.ones(factor)})


@pytest.mark.parametrize(
    ("loss", "x", "t", "options", "message"),
    [
        (losses.binary_cross_entropy, 1.5, 1.0, {}, "got 1.5.*logits belong in binary_cross_entropy_with_logits"),
        (losses.binary_cross_entropy, -0.5, 1.0, {}, r"input must lie in \[0, 1\]; got -0.5"),
        (losses.binary_cross_entropy, math.nan, 1.0, {}, "got nan"),
        (losses.binary_cross_entropy, 0.5, -1.0, {}, r"target must lie in \[0, 1\] or equal ignore_index=-100; got -1"),
        (losses.binary_cross_entropy_with_logits, 0.5, -1.0, {}, "got -1"),
        (losses.binary_cross_entropy_with_logits, 0.5, 2.0, {}, "got 2"),
        (losses.binary_cross_entropy_with_logits, 0.5, -100.0, {"ignore_index": None}, "got -100"),
        (losses.sigmoid_focal_loss, 0.5, 2.0, {}, "got 2"),
        (losses.sigmoid_focal_loss, 0.5, 1.0, {"gamma": -1.0}, "gamma must lie in"),
        (losses.sigmoid_focal_loss, 0.5, 1.0, {"alpha": 1.5}, r"alpha must lie in \[0, 1\], got 1.5"),
        (losses.sigmoid_focal_loss, 0.5, 1.0, {"alpha": torch.ones(3)}, "alpha must be one number"),
    ],
)
def test_errors(loss: Any, x: float, t: float, options: dict[str, Any], message: str) -> None:
    good, bad_t = torch.full((3,), 0.5), torch.tensor([1.0, t, 0.0])
    bad_x = good.clone()
    bad_x[1] = x
    with pytest.raises(ValueError, match=message):
        loss(bad_x, bad_t, **options)


def test_ignored_probabilities_may_be_anything() -> None:
    loss = losses.binary_cross_entropy(torch.tensor([math.nan, 7.0, 0.5]), torch.tensor([-100.0, -100.0, 1.0]))
    assert loss.weights.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float64])
def test_yes_and_no_in_any_dtype(dtype: torch.dtype) -> None:
    t = torch.tensor([0, 1, 1]).to(dtype)
    for loss in (losses.binary_cross_entropy, losses.binary_cross_entropy_with_logits, losses.sigmoid_focal_loss):
        got = loss(torch.tensor([0.2, 0.7, 0.1]), t)
        assert torch.equal(got.values, loss(torch.tensor([0.2, 0.7, 0.1]), t.float()).values)
        assert got.values.dtype == torch.float32


def test_values_are_not_checked_in_a_trace() -> None:
    x, t = torch.randn(3), torch.tensor([0.0, 2.0, 1.0])  # a target of 2 is an error in a plain call

    def mean(x: Tensor) -> Tensor:
        return losses.binary_cross_entropy_with_logits(x, t).mean()

    torch.func.grad(mean)(x)
    torch.compile(mean, fullgraph=True, backend="eager")(x)
    with pytest.raises(ValueError, match="got 2"):
        mean(x)


def test_inputs_are_untouched() -> None:
    x, t = torch.rand(4), torch.tensor([0.0, 1.0, -100.0, 1.0])
    before = [(v.clone(), v._version) for v in (x, t)]
    for loss in (losses.binary_cross_entropy, losses.binary_cross_entropy_with_logits, losses.sigmoid_focal_loss):
        loss(x, t)
    losses.l1_loss(x, t, weight=x)
    losses.mse_loss(x, t, weight=x)
    losses.kl_divergence(x.log(), t.clamp(0, 1))
    for value, (copy, version) in zip((x, t), before, strict=True):
        assert torch.equal(value, copy)
        assert value._version == version


# --- learned weights, and arguments of the wrong kind ----------------------------------------------------------------


def _by_parts(x: Tensor, t: Tensor, weight: Tensor, pos_weight: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return (-weight * (pos_weight * t * p.log() + (1 - t) * (1 - p).log())).sum()


def test_binary_cross_entropy_with_logits_learns_its_weights() -> None:
    x, t = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
    weight = torch.rand(3, dtype=torch.float64).requires_grad_()
    pos_weight = (torch.rand(3, dtype=torch.float64) * 3).requires_grad_()
    score = losses.binary_cross_entropy_with_logits
    loss = score(x, t, weight=weight, pos_weight=pos_weight).sum()
    got = torch.autograd.grad(loss, (weight, pos_weight))
    want = torch.autograd.grad(_by_parts(x, t, weight, pos_weight), (weight, pos_weight))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    fixed = (x, weight.detach(), pos_weight.detach())
    hessian = torch.func.hessian(lambda x, w, c: score(x, t, weight=w, pos_weight=c).sum())(*fixed)
    torch.testing.assert_close(hessian, torch.func.hessian(lambda x, w, c: _by_parts(x, t, w, c))(*fixed))
    lanes = torch.vmap(lambda c: score(x, t, pos_weight=c).values)(torch.tensor([0.5, 2.0], dtype=torch.float64))
    assert torch.equal(lanes[1], score(x, t, pos_weight=2.0).values)
    compiled = torch.compile(
        lambda x, w, c: score(x, t, weight=w, pos_weight=c).values, fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(*fixed), score(x, t, weight=fixed[1], pos_weight=fixed[2]).values)


@pytest.mark.parametrize("dtype", WIDE)
def test_weights_of_binary_cross_entropy_with_logits_are_pytorch_s_to_the_bit(dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(40, dtype=dtype), torch.tensor([-200.0, 200.0, 1e30, -1e30, 0.0], dtype=dtype)])
    for t in (torch.rand_like(x), torch.ones_like(x), torch.zeros_like(x)):
        weight, pos_weight = torch.rand_like(x), torch.rand_like(x) * 3
        for options in ({"weight": weight}, {"pos_weight": pos_weight}, {"weight": weight, "pos_weight": pos_weight}):
            got = losses.binary_cross_entropy_with_logits(x, t, **options).values
            assert torch.equal(got, F.binary_cross_entropy_with_logits(x, t, reduction="none", **options))


def test_float16_keeps_huge_values_and_their_gradients() -> None:
    largest = torch.finfo(torch.float16).max
    x = torch.tensor([60000.0, -60000.0, 1.0, INF], dtype=torch.float16)
    values = losses.mse_loss(x, torch.zeros_like(x)).values
    assert values.tolist() == [largest, largest, 1.0, INF]
    huge = torch.tensor([65504.0], dtype=torch.float16)
    scaled = losses.mse_loss(huge, -huge, weight=torch.full_like(huge, 60000.0))
    assert scaled.values.tolist() == [largest]
    wide = torch.tensor([1e30], requires_grad=True)
    narrow = losses._boundary.finish(wide, torch.ones(1), torch.float16).values  # its rounding step is far above 65504
    narrow.sum().backward()
    assert narrow.tolist() == [largest]
    assert wide.grad is not None
    assert wide.grad.tolist() == [1.0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weight": 2.0}, TypeError, "weight must be a tensor, got float"),
        ({"pos_weight": -1.0}, ValueError, "pos_weight must be finite and >= 0, got -1.0"),
        ({"pos_weight": math.nan}, ValueError, "pos_weight must be finite and >= 0, got nan"),
        ({"pos_weight": [1.0, 2.0]}, TypeError, "pos_weight must be a number or a tensor, got list"),
    ],
)
def test_weights_of_the_wrong_kind(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"binary_cross_entropy_with_logits: {message}"):
        losses.binary_cross_entropy_with_logits(torch.zeros(2), torch.ones(2), **options)
    if "weight" in options:
        with pytest.raises(error, match=f"binary_cross_entropy: {message}"):
            losses.binary_cross_entropy(torch.full((2,), 0.5), torch.ones(2), **options)


# --- transforms in transforms ----------------------------------------------------------------------------------------

X, Y = torch.tensor([[0.3, -1.2], [0.8, 0.1]]).double(), torch.tensor([[0.7, 0.2], [0.4, 0.9]]).double()
NESTED: dict[str, Any] = {
    "l1_loss": lambda x, y: losses.l1_loss(x, y),
    "mse_loss": lambda x, y: losses.mse_loss(x, y),
    "mse_loss, weighted": lambda x, y: losses.mse_loss(x, y, weight=y),
    "kl_divergence": lambda x, y: losses.kl_divergence(x.log_softmax(1), y),
    "binary_cross_entropy": lambda x, y: losses.binary_cross_entropy(x.sigmoid(), y),
    "binary_cross_entropy_with_logits": lambda x, y: losses.binary_cross_entropy_with_logits(x, y),
    "sigmoid_focal_loss": lambda x, y: losses.sigmoid_focal_loss(x, y),
    "cross_entropy": lambda x, y: losses.cross_entropy(x, y.softmax(1), label_smoothing=0.1),
    "cross_entropy, indices": lambda x, y: losses.cross_entropy(x * y, torch.tensor([0, 1]), label_smoothing=0.1),
    "focal_loss": lambda x, y: losses.focal_loss(x * y, torch.tensor([0, 1])),
    "nll_loss": lambda x, y: losses.nll_loss((x * y).log_softmax(1), torch.tensor([0, 1])),
    "info_nce": lambda x, y: losses.info_nce(x, y),
    "ntxent": lambda x, y: losses.ntxent(x, y),
    "supervised_contrastive": lambda x, y: losses.supervised_contrastive(torch.cat([x, y]), torch.tensor([0, 1, 0, 1])),
}


@pytest.mark.parametrize("name", NESTED)
def test_grad_of_vmap_of_vmap_of_grad(name: str) -> None:
    """An inner level batches the input, another the target, and both are differentiated through."""
    grad, vmap = torch.func.grad, torch.func.vmap
    xs, ys = torch.stack([X, 0.5 * X]), torch.stack([Y, 0.8 * Y])

    def step(x: Tensor, y: Tensor, rate: Tensor) -> Tensor:
        loss = NESTED[name]
        return loss(x - rate * grad(lambda x: loss(x, y).mean())(x), y).mean()

    def lanes(rate: Tensor) -> Tensor:
        return vmap(lambda x: vmap(lambda y: step(x, y, rate))(ys).sum())(xs).sum()

    def loop(rate: Tensor) -> Tensor:
        return sum((step(x, y, rate) for x in xs for y in ys), torch.zeros(()))

    rates, nudge = torch.tensor([0.3, 0.7]).double(), 1e-6
    for value, slope, rate in zip(vmap(lanes)(rates), vmap(grad(lanes))(rates), rates, strict=True):
        assert value.item() == pytest.approx(loop(rate).item(), rel=1e-12)
        assert slope.item() == pytest.approx(((loop(rate + nudge) - loop(rate - nudge)) / (2 * nudge)).item(), rel=1e-6)
        assert slope != 0
