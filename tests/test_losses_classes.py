"""Cross entropy, NLL, focal loss: parity with PyTorch over the whole grid, and the places where PyTorch is left."""

from __future__ import annotations

import itertools
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

C = 4
SHAPES = {"(N,C)": (6,), "(N,C,d)": (5, 3), "(C,)": ()}
INF = math.inf


def eps8(dtype: torch.dtype) -> float:
    return 8 * torch.finfo(dtype).eps


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Compare relative to the largest entry: losses and gradients are sums, whose rounding is that of their terms."""
    assert got.dtype == want.dtype
    finite = want[want.isfinite()].abs()
    scale = max(1e-3, float(finite.max()) if finite.numel() else 0.0)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def case(shape: str, soft: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = SHAPES[shape]
    full = (*rows[:1], C, *rows[1:])
    logits = 3 * torch.randn(full, generator=generator, dtype=torch.float64)
    if soft:
        return logits, torch.randn(full, generator=generator, dtype=torch.float64).softmax(min(1, len(full) - 1))
    return logits, torch.randint(0, C, rows, generator=generator)


WEIGHT = torch.tensor([0.5, 2.0, 1.5, 0.25], dtype=torch.float64)


def torch_ce(x: Tensor, t: Tensor, reduction: str, **options: Any) -> Tensor:
    return F.cross_entropy(x, t, reduction=reduction, **options)


def reduce(loss: Loss, reduction: str) -> Tensor:
    return {"mean": loss.mean, "sum": loss.sum, "none": lambda: loss.values}[reduction]()


GRID = list(
    itertools.product(SHAPES, (False, True), (False, True), ("absent", "in range", "out of range"), (0.0, 0.1, 1.0))
)


@pytest.mark.parametrize(("shape", "soft", "weighted", "ignore", "smoothing"), GRID)
def test_cross_entropy_is_pytorch_s(shape: str, soft: bool, weighted: bool, ignore: str, smoothing: float) -> None:
    logits, targets = case(shape, soft)
    options: dict[str, Any] = {"label_smoothing": smoothing}
    if ignore == "in range":
        options["ignore_index"] = 1
    if ignore == "out of range":
        options["ignore_index"] = -7 if soft else 255
        if not soft and targets.ndim:
            targets[0] = 255
    if soft and ignore == "in range":  # PyTorch raises, and so do we
        with pytest.raises(RuntimeError):
            torch_ce(logits, targets, "mean", **options)
        with pytest.raises(ValueError, match="ignore_index=1 has no meaning"):
            losses.cross_entropy(logits, targets, **options)
        return
    if not soft:
        assert shape == "(C,)" or ignore == "absent" or bool((targets == options["ignore_index"]).any())
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        half = dtype in (torch.bfloat16, torch.float16)
        # half: the same logits, exactly, in the float64 reference
        x = logits.to(dtype)
        weight = WEIGHT if weighted else None
        reference = torch.float64 if half else dtype
        soft_targets = targets.to(reference) if soft else targets
        for reduction in ("mean", "sum", "none"):

            def ours(x: Tensor, reduction: str = reduction, weight: Any = weight) -> Tensor:
                return reduce(losses.cross_entropy(x, targets, weight=weight, **options), reduction)

            def theirs(x: Tensor, reduction: str = reduction, t: Any = soft_targets, d: Any = reference) -> Tensor:
                return torch_ce(x, t, reduction, weight=WEIGHT.to(d) if weighted else None, **options)

            tolerance = eps8(dtype) if not half else 4 * torch.finfo(dtype).eps  # values, and one sum, are rounded once
            close(ours(x), theirs(x.to(reference)).to(dtype), tolerance)
            if reduction != "none":
                want = torch.func.grad(theirs)(x.to(reference)).to(dtype)
                assert bool(want.isnan().any()) or bool((want != 0).any()) or ignore != "absent"
                close(torch.func.grad(ours)(x), want, tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore", [-100, 1, 255])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nll_loss_is_pytorch_s(shape: str, weighted: bool, ignore: int, dtype: torch.dtype) -> None:
    logits, targets = case(shape, False)
    log_p = logits.log_softmax(min(1, logits.ndim - 1)).to(dtype)
    weight = WEIGHT.to(dtype) if weighted else None
    if targets.ndim and ignore != 1:
        targets[0] = ignore
    for reduction in ("mean", "sum", "none"):
        got = reduce(losses.nll_loss(log_p, targets, weight=weight, ignore_index=ignore), reduction)
        close(got, F.nll_loss(log_p, targets, weight, ignore_index=ignore, reduction=reduction), eps8(dtype))

        def ours(x: Tensor, reduction: str = reduction) -> Tensor:
            return reduce(losses.nll_loss(x, targets, weight=weight, ignore_index=ignore), reduction).sum()

        def theirs(x: Tensor, reduction: str = reduction) -> Tensor:
            return F.nll_loss(x, targets, weight, ignore_index=ignore, reduction=reduction).sum()

        close(torch.func.grad(ours)(log_p), torch.func.grad(theirs)(log_p), eps8(dtype))


def test_the_comparison_can_fail() -> None:
    logits, targets = case("(N,C)", False)
    want = torch_ce(logits, targets, "mean")
    with pytest.raises(AssertionError):
        close(losses.cross_entropy(logits * (1 + 100 * eps8(torch.float64)), targets).mean(), want, eps8(torch.float64))


# --- field cases -----------------------------------------------------------------------------------------------------


def test_c04_weighted_micro_batches_add_up() -> None:
    logits, targets = torch.tensor([[0.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])
    weight = torch.tensor([1.0, 3.0])
    whole = losses.cross_entropy(logits, targets, weight=weight)
    assert whole.weights.tolist() == [1.0, 3.0]
    torch.testing.assert_close(whole.values, torch.tensor([0.6931472, 0.3807842]))
    torch.testing.assert_close(whole.mean(), torch.tensor(0.2684828))
    micro = [losses.cross_entropy(logits[i : i + 1], targets[i : i + 1], weight=weight) for i in (0, 1)]
    torch.testing.assert_close(torch.stack([m.mean() for m in micro]), torch.tensor([0.6931472, 0.1269280]))
    torch.testing.assert_close(
        sum(m.sum() for m in micro) / sum(m.weights.sum() for m in micro), torch.tensor(0.2684828)
    )


@pytest.mark.parametrize(
    ("smoothing", "weight", "mean", "total"),
    [
        (0.1, None, 2.5416446, 2.5416446),
        (0.1, [0.2, 0.3], 2.5404506, 0.7621352),
        (0.0, None, 2.6716447, 2.6716447),
        (0.0, [0.2, 0.3], 2.6716447, 0.3 * 2.6716447),
    ],
)
@pytest.mark.parametrize("garbage", [1.0, math.nan, INF])
def test_c09_ignored_rows_do_not_leak(
    smoothing: float, weight: list[float] | None, mean: float, total: float, garbage: float
) -> None:
    logits, targets = torch.tensor([[garbage, 2.0], [3.0, 0.4]]), torch.tensor([-100, 1])
    w = None if weight is None else torch.tensor(weight)
    options: dict[str, Any] = {"weight": w, "label_smoothing": smoothing}
    loss = losses.cross_entropy(logits, targets, **options)
    torch.testing.assert_close(loss.mean(), torch.tensor(mean))
    torch.testing.assert_close(loss.values, torch.tensor([0.0, total]))
    assert torch.equal(loss.mean(), losses.cross_entropy(logits[1:], targets[1:], **options).mean())
    gradient = torch.func.grad(lambda x: losses.cross_entropy(x, targets, **options).mean())(logits)
    assert gradient.isfinite().all()
    assert torch.equal(gradient[0], torch.zeros(2))


def argmin_p0(weight_mode: Any, soft: bool) -> tuple[float, float]:
    """The probability of class 0 that minimises the loss on one row of target 0, and the loss there."""
    p = torch.linspace(0.0005, 0.9995, 1999, dtype=torch.float64)
    logits = torch.stack([p.log(), (1 - p).log()], 1)
    index = torch.zeros(len(p), dtype=torch.long)
    targets = F.one_hot(index, 2).double() if soft else index
    loss = losses.cross_entropy(
        logits, targets, weight=torch.tensor([1.0, 100.0]), label_smoothing=0.1, weight_mode=weight_mode
    ).values
    return float(p[loss.argmin()]), float(loss.min())


@pytest.mark.parametrize("soft", [False, True])
def test_c10_class_weights_move_the_smoothed_optimum_unless_they_weigh_the_row(soft: bool) -> None:
    place, least = argmin_p0("class", soft)
    assert place == pytest.approx(0.1597, abs=5e-4)
    assert least == pytest.approx(2.6127167, abs=1e-4)  # the grid's nearest point, not the minimum itself
    assert argmin_p0("row", soft)[0] == pytest.approx(0.95, abs=5e-4)


@given(st.floats(0.01, 0.9), st.lists(st.floats(0.1, 100), min_size=3, max_size=3), st.integers(0, 2))
def test_row_weights_keep_the_smoothed_optimum(smoothing: float, weight: list[float], target: int) -> None:
    q = torch.full((3,), smoothing / 3, dtype=torch.float64)
    q[target] += 1 - smoothing
    t, w = torch.tensor([target]), torch.tensor(weight, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return losses.cross_entropy(x[None], t, weight=w, label_smoothing=smoothing, weight_mode="row").sum()

    gradient = torch.func.grad(loss)(q.log())  # zero where the prediction is q
    assert float(gradient.abs().max()) < 1e-12 * max(weight)
    elsewhere = torch.func.grad(loss)(q.log() + torch.tensor([0.1, 0.0, 0.0]))
    assert float(elsewhere.abs().max()) > 1e-5


@pytest.mark.parametrize("gamma", [0, 0.5, 1, 2.0, torch.tensor(0.0), torch.tensor(0.5), torch.tensor(2.0)])
def test_c11_focal_is_finite_when_saturated(gamma: Any) -> None:
    """Two-class logits (0, x) are the sigmoid's logit x."""
    x, targets = torch.tensor([-100.0, -100.0, 100.0, 100.0]), torch.tensor([0, 1, 0, 1])

    def loss(x: Tensor) -> Tensor:
        return losses.focal_loss(torch.stack([torch.zeros(4), x], 1), targets, gamma=gamma).mean()

    assert loss(x) == 50.0
    torch.testing.assert_close(torch.func.grad(loss)(x), torch.tensor([0.0, -0.25, 0.25, 0.0]), rtol=0, atol=1e-30)
    assert torch.func.hessian(loss)(x).isfinite().all()


def test_c12_ignored_rows_leave_the_denominator() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    loss = losses.focal_loss(logits, torch.tensor([0, 1, -100]), gamma=2.0)
    torch.testing.assert_close(loss.values, torch.tensor([0.0108693, 0.0990818, 0.0]), rtol=1e-5, atol=0)  # as printed
    torch.testing.assert_close(loss.mean(), torch.tensor(0.0549756), rtol=1e-5, atol=0)
    assert losses.focal_loss(logits, torch.tensor([0, 1, 255]), ignore_index=255).mean() == loss.mean()


@pytest.mark.parametrize("soft_loss", [losses.cross_entropy, losses.focal_loss])
def test_x02_nothing_left(soft_loss: Any) -> None:
    loss = soft_loss(torch.randn(3, 4), torch.full((3,), -100), label_smoothing=0.1)
    assert loss.mean().isnan()
    assert loss.sum() == 0
    assert torch.equal(loss.values, torch.zeros(3))
    assert torch.equal(loss.weights, torch.zeros(3))


def test_a_micro_batch_of_zero_rows() -> None:
    loss = losses.cross_entropy(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))
    assert loss.values.shape == loss.weights.shape == (0,)
    assert loss.sum() == 0


# --- properties ------------------------------------------------------------------------------------------------------

LOSSES: dict[str, Any] = {
    "cross_entropy": losses.cross_entropy,
    "smoothed": lambda x, t, **o: losses.cross_entropy(x, t, label_smoothing=0.1, **o),
    "row": lambda x, t, **o: losses.cross_entropy(x, t, label_smoothing=0.3, weight_mode="row", **o),
    "warm": lambda x, t, **o: losses.cross_entropy(x, t, temperature=0.5, **o),
    "focal": lambda x, t, **o: losses.focal_loss(x, t, gamma=0.7, **o),
    "focal smoothed": lambda x, t, **o: losses.focal_loss(x, t, gamma=2, label_smoothing=0.1, **o),
    "nll": lambda x, t, **o: losses.nll_loss(x.log_softmax(1), t, **o),
}

rows = st.integers(1, 8)
seeds = st.integers(0, 2**16)
weights = st.sampled_from([None, WEIGHT])


def draw(n: int, seed: int, ignore: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.randn(n, C, generator=generator, dtype=torch.float64)
    t = torch.randint(0, C, (n,), generator=generator)
    t[torch.rand(n, generator=generator) < 0.4] = ignore
    return x, t


@pytest.mark.parametrize("name", LOSSES)
@given(rows, seeds, st.sampled_from([-100, 1, 255]), weights)
def test_deleting_ignored_rows_changes_nothing(
    name: str, n: int, seed: int, ignore: int, weight: Tensor | None
) -> None:
    x, t = draw(n, seed, ignore)
    kept = t != ignore
    x[~kept] = math.nan

    def mean(x: Tensor, t: Tensor) -> Tensor:
        return LOSSES[name](x, t, weight=weight, ignore_index=ignore).sum()

    whole = LOSSES[name](x, t, weight=weight, ignore_index=ignore)
    part = LOSSES[name](x[kept], t[kept], weight=weight, ignore_index=ignore)
    assert torch.equal(whole.values[kept], part.values)
    assert torch.equal(whole.weights[kept], part.weights)
    assert not whole.values[~kept].any()
    assert not whole.weights[~kept].any()
    if name != "nll":  # there the caller's own log_softmax sees the NaN
        gradient = torch.func.grad(mean)(x, t)
        assert torch.equal(gradient[~kept], torch.zeros_like(gradient[~kept]))
        close(gradient[kept], torch.func.grad(mean)(x[kept], t[kept]), eps8(x.dtype))


@pytest.mark.parametrize("name", LOSSES)
@given(rows, seeds, weights)
def test_rows_are_independent_and_parts_add_up(name: str, n: int, seed: int, weight: Tensor | None) -> None:
    x, t = draw(n, seed, -100)
    whole = LOSSES[name](x, t, weight=weight)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    shuffled = LOSSES[name](x[order], t[order], weight=weight)
    close(shuffled.values, whole.values[order], eps8(x.dtype))
    assert torch.equal(shuffled.weights, whole.weights[order])
    cuts = sorted(torch.randint(0, n + 1, (2,), generator=torch.Generator().manual_seed(seed)).tolist())
    parts = [
        LOSSES[name](x[a:b], t[a:b], weight=weight) for a, b in itertools.pairwise([0, *cuts, n])
    ]  # some may be empty
    mean = sum(part.sum() for part in parts) / sum(part.weights.sum() for part in parts)
    close(mean, whole.mean(), eps8(x.dtype))


@given(rows, seeds, weights, st.sampled_from([0.0, 0.1]), st.sampled_from(["class", "row"]))
def test_focal_without_gamma_is_cross_entropy(
    n: int, seed: int, weight: Tensor | None, smoothing: float, mode: Any
) -> None:
    x, t = draw(n, seed, -100)
    options: dict[str, Any] = {"weight": weight, "label_smoothing": smoothing, "weight_mode": mode}
    want = losses.cross_entropy(x, t, **options)
    for gamma in (0, 0.0, torch.tensor(0.0)):
        got = losses.focal_loss(x, t, gamma=gamma, **options)
        assert torch.equal(got.values, want.values)
        assert torch.equal(got.weights, want.weights)
        gradient = torch.func.grad(lambda x, g=gamma: losses.focal_loss(x, t, gamma=g, **options).sum())(x)
        close(gradient, torch.func.grad(lambda x: losses.cross_entropy(x, t, **options).sum())(x), eps8(x.dtype))


@given(rows, seeds, weights, st.booleans())
def test_a_tensor_at_its_default_is_the_plain_loss(n: int, seed: int, weight: Tensor | None, soft: bool) -> None:
    x, t = draw(n, seed, -100)
    targets = F.one_hot(t.clamp(min=0), C).to(x.dtype) if soft else t
    want = losses.cross_entropy(x, targets, weight=weight)
    for options in ({"label_smoothing": torch.tensor(0.0)}, {"temperature": torch.tensor(1)}):
        assert torch.equal(losses.cross_entropy(x, targets, weight=weight, **options).values, want.values)  # type: ignore[arg-type]


@given(rows, seeds, st.floats(0, 5))
def test_focal_is_its_formula(n: int, seed: int, gamma: float) -> None:
    """Where 1 - p does not cancel, the recipe's formula is right; class probabilities extend it linearly."""
    x, t = draw(n, seed, -100)
    p = x.softmax(1)
    full = -((1 - p) ** gamma) * p.log()
    soft = torch.rand(n, C, dtype=x.dtype, generator=torch.Generator().manual_seed(seed)).softmax(1)
    got = losses.focal_loss(x, soft, gamma=gamma).values
    torch.testing.assert_close(got, (soft * full).sum(1), rtol=1e-9, atol=1e-12)  # the formula's 1 - p cancels
    index = t.clamp(min=0)
    torch.testing.assert_close(
        losses.focal_loss(x, index, gamma=gamma).values,
        full.gather(1, index[:, None]).squeeze(1),
        rtol=1e-9,
        atol=1e-12,
    )


def test_focal_derivatives_by_gradcheck() -> None:
    x = (3 * torch.randn(5, C, dtype=torch.float64)).requires_grad_()
    gamma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0, 3, 1, 2, -100])

    def loss(x: Tensor, gamma: Tensor) -> Tensor:
        return losses.focal_loss(x, t, gamma=gamma, weight=WEIGHT, label_smoothing=0.1).sum()

    assert torch.autograd.gradcheck(loss, (x, gamma))
    assert torch.autograd.gradgradcheck(loss, (x, gamma))


def test_cross_entropy_derivatives_by_gradcheck() -> None:
    x = (3 * torch.randn(5, C, dtype=torch.float64)).requires_grad_()
    hypers = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.1, 0.7)]
    weight = WEIGHT.clone().requires_grad_()
    t = torch.tensor([0, 3, 1, 2, -100])

    def loss(x: Tensor, smoothing: Tensor, temperature: Tensor, weight: Tensor) -> Tensor:
        return losses.cross_entropy(
            x, t, weight=weight, label_smoothing=smoothing, temperature=temperature, weight_mode="row"
        ).mean()

    assert torch.autograd.gradcheck(loss, (x, *hypers, weight))
    assert torch.autograd.gradgradcheck(loss, (x, *hypers, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("cross_entropy", {"temperature": t, "label_smoothing": s}) for t in (1.0, 0.01) for s in (0.0, 0.1)),
        *(("focal_loss", {"gamma": g}) for g in (0.0, 1e-3, 0.5, 1.0, 2.0, 5.0)),
    ],
)
def test_saturated_logits_stay_finite(name: str, options: dict[str, float], scale: float, dtype: torch.dtype) -> None:
    x = scale * torch.tensor([[1, -1, 0], [-1, 1, 0], [-1, -1, 1], [1, 1, 1], [0, 0, 0]]).to(dtype)
    t = torch.tensor([0, 0, 2, 1, -100])
    hypers = {key: torch.tensor(value) for key, value in options.items()}

    def loss(x: Tensor, hypers: dict[str, Any]) -> Tensor:
        return getattr(losses, name)(x, t, **hypers).mean()

    for given_as in (options, hypers):
        assert loss(x, given_as).isfinite()
        assert torch.func.grad(loss)(x, given_as).isfinite().all()
        assert torch.func.hessian(loss)(x, given_as).isfinite().all()
    gradient = torch.func.grad(loss, argnums=1)(x, hypers)
    assert all(value.isfinite() for value in gradient.values())
    second = torch.func.hessian(loss, argnums=1)(x, hypers)
    assert all(value.isfinite() for inner in second.values() for value in inner.values())
    wrong = torch.func.grad(loss)(x, options)[1]
    assert float(wrong.abs().max()) > 0  # the row that is confidently wrong still learns


def test_float16_values_saturate_and_keep_their_gradient() -> None:
    x = torch.tensor([[-1e4, 1e4]], dtype=torch.float16)
    loss = losses.cross_entropy(x, torch.tensor([0]), temperature=0.01)
    assert loss.values.tolist() == [65504.0]
    gradient = torch.func.grad(lambda x: losses.cross_entropy(x, torch.tensor([0]), temperature=0.01).mean())(x)
    assert gradient.tolist() == [[-100.0, 100.0]]
    impossible = torch.tensor([[-INF, 1.0]], dtype=torch.float16)
    assert losses.cross_entropy(impossible, torch.tensor([0])).values.tolist() == [INF]  # an honest infinity stays


FORBIDDEN = torch.tensor([[0.0, -INF, 1.0], [2.0, -INF, 0.0]])
ALLOWED = torch.tensor([0, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("loss", "hypers"),
    [
        (losses.cross_entropy, {}),
        (losses.cross_entropy, {"temperature": torch.tensor(0.5)}),
        (losses.cross_entropy, {"label_smoothing": torch.tensor(0.0)}),
        (losses.cross_entropy, {"label_smoothing": torch.tensor(0.0), "weight": torch.tensor([1.0, 0.0, 2.0])}),
        (losses.cross_entropy, {"label_smoothing": torch.tensor(0.3), "weight": torch.tensor([1.0, 0.0, 2.0])}),
        (losses.focal_loss, {"gamma": torch.tensor(0.5)}),
        (losses.focal_loss, {"gamma": torch.tensor(2.0), "weight": torch.tensor([1.0, 1.0, 2.0])}),
    ],
)
@pytest.mark.parametrize("soft", [False, True])
def test_forbidden_classes_poison_nothing(loss: Any, hypers: dict[str, Tensor], soft: bool, dtype: torch.dtype) -> None:
    """A class with logit -inf, which no target needs, is as good as absent."""
    targets = F.one_hot(ALLOWED, 3).float() if soft else ALLOWED
    logits = FORBIDDEN.to(dtype)
    value = loss(logits, targets, **hypers)
    assert value.values.isfinite().all()
    assert torch.func.grad(lambda x: loss(x, targets, **hypers).sum())(logits).isfinite().all()
    for key in hypers:
        one = torch.func.grad(lambda h, key=key: loss(logits, targets, **{**hypers, key: h}).sum())(hypers[key])
        assert one.isfinite().all(), key
    if not soft and hypers.keys() <= {"temperature", "gamma"}:
        assert torch.equal(value.values, loss(logits[:, [0, 2]], torch.tensor([0, 1]), **hypers).values)


# --- vmap, hyper-gradients, compile ----------------------------------------------------------------------------------

LANES = 3
HYPERS: dict[str, tuple[Any, Tensor]] = {
    "label_smoothing": (losses.cross_entropy, torch.tensor([0.0, 0.1, 1.0])),
    "temperature": (losses.cross_entropy, torch.tensor([0.01, 1.0, 3.0])),
    "weight": (losses.cross_entropy, torch.rand(LANES, C, generator=torch.Generator().manual_seed(1)) + 0.1),
    "gamma": (losses.focal_loss, torch.tensor([0.0, 0.5, 2.0])),
}


@pytest.mark.parametrize("lanes_in", ["hyper", "input", "both"])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("key", HYPERS)
def test_lanes_equal_the_loop(key: str, wide: bool, soft: bool, lanes_in: str) -> None:
    loss, values = HYPERS[key]
    values = values.double() if wide else values  # a float64 hyper-parameter must not widen float32 logits
    x = torch.randn(LANES, 6, C)
    t = torch.randn(LANES, 6, C).softmax(2) if soft else torch.randint(0, C, (LANES, 6))
    if not soft:
        t[:, 0] = -100

    def one(x: Tensor, t: Tensor, value: Tensor) -> tuple[Loss, Tensor, Tensor]:
        def mean(x: Tensor, value: Tensor) -> Tensor:
            return loss(x, t, **{key: value}).mean()

        return loss(x, t, **{key: value}), *torch.func.grad(mean, argnums=(0, 1))(x, value)

    hyper, batch = lanes_in != "input", lanes_in != "hyper"
    args = (x if batch else x[0], t if batch else t[0], values if hyper else values[1])
    got, *gradients = torch.func.vmap(one, in_dims=(0 if batch else None, 0 if batch else None, 0 if hyper else None))(
        *args
    )
    assert got.values.dtype == got.weights.dtype == torch.float32
    for i in range(LANES):
        want, *solo = one(x[i if batch else 0], t[i if batch else 0], values[i if hyper else 1])
        close(got.values[i], want.values, eps8(torch.float32))
        close(got.weights[i], want.weights, eps8(torch.float32))
        for batched, alone in zip(gradients, solo, strict=True):
            assert bool((alone != 0).any())
            close(batched[i], alone, eps8(torch.float32))


def test_a_single_example_in_lanes() -> None:
    x, t = torch.randn(5, C), torch.tensor([0, 1, 2, 3, -100])
    lanes = torch.func.vmap(lambda x, t: losses.cross_entropy(x, t, weight=WEIGHT.float(), label_smoothing=0.1))(x, t)
    whole = losses.cross_entropy(x, t, weight=WEIGHT.float(), label_smoothing=0.1)
    close(lanes.values, whole.values, eps8(x.dtype))
    assert torch.equal(lanes.weights, whole.weights)


def test_a_learned_temperature_of_shape_one() -> None:
    """`nn.Parameter(torch.ones(1))` is how people write it."""
    temperature = torch.nn.Parameter(torch.full((1,), 0.5))
    loss = losses.cross_entropy(torch.randn(4, C), torch.tensor([0, 1, 2, 3]), temperature=temperature)
    assert loss.values.shape == (4,)
    loss.mean().backward()
    assert temperature.grad is not None
    assert temperature.grad.abs() > 0


def test_the_hyper_gradient_of_smoothing_at_zero() -> None:
    x, t = torch.randn(6, C, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, -100])
    got = torch.func.grad(lambda e: losses.cross_entropy(x, t, label_smoothing=e).mean())(torch.tensor(0.0))
    at = [F.cross_entropy(x, t, label_smoothing=e) for e in (0.0, 1.0)]  # linear in the smoothing
    torch.testing.assert_close(got, (at[1] - at[0]).float())


def test_compiled_without_recompiling() -> None:
    def step(x: Tensor, t: Tensor, smoothing: Tensor, temperature: Tensor, gamma: Tensor) -> Tensor:
        plain = losses.cross_entropy(x, t, label_smoothing=smoothing, temperature=temperature).mean()
        return plain + losses.focal_loss(x, t, gamma=gamma).mean()

    gradient = torch.func.vmap(torch.func.grad(step), in_dims=(0, 0, 0, 0, 0))
    compiled = torch.compile(gradient, fullgraph=True)
    for seed in range(3):
        torch.manual_seed(seed)
        x, t = torch.randn(2, 5, C), torch.randint(0, C, (2, 5))
        t[0, 0] = -100
        hypers = [torch.rand(2) + 0.1 for _ in range(3)]
        with torch.compiler.set_stance("fail_on_recompile" if seed else "default"):
            close(compiled(x, t, *hypers), gradient(x, t, *hypers), eps8(x.dtype))


def test_half_precision_lanes_return_half() -> None:
    x, t = torch.randn(2, 5, C).bfloat16(), torch.randint(0, C, (2, 5))
    loss = torch.func.vmap(lambda x, t, e: losses.cross_entropy(x, t, label_smoothing=e))(
        x, t, torch.tensor([0.0, 0.1])
    )
    assert loss.values.dtype == torch.bfloat16
    assert loss.weights.dtype == torch.float32


def test_inputs_are_untouched() -> None:
    x, t = torch.randn(4, C), torch.tensor([0, 1, -100, 3])
    before = [(v.clone(), v._version) for v in (x, t)]
    losses.cross_entropy(x, t, label_smoothing=0.1, temperature=0.5, weight=WEIGHT)
    losses.focal_loss(x, t)
    losses.nll_loss(x, t)
    for value, (copy, version) in zip((x, t), before, strict=True):
        assert torch.equal(value, copy)
        assert value._version == version


# --- softmax ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_is_pytorch_s_and_takes_a_temperature(name: str) -> None:
    x = torch.randn(3, C)
    ours, theirs = getattr(losses, name), getattr(F, name)
    assert torch.equal(ours(x), theirs(x, -1))
    assert torch.equal(ours(x, 0), theirs(x, 0))
    assert torch.equal(ours(x, temperature=0.5), theirs(x / 0.5, -1))
    lanes = torch.func.vmap(lambda T: ours(x, temperature=T))(torch.tensor([0.5, 2.0]).double())
    assert torch.equal(lanes[0], theirs(x / 0.5, -1))
    half = ours((1e4 * x).half(), temperature=0.01)
    assert half.dtype == torch.float16
    assert not half.isnan().any()
    # a forbidden class does not reach the temperature's gradient
    gradient = torch.func.grad(lambda T: ours(FORBIDDEN, temperature=T)[:, 0].sum())(torch.tensor(0.5))
    assert gradient.isfinite()
    assert gradient != 0


# --- the boundary ----------------------------------------------------------------------------------------------------

X = torch.randn(5, C, generator=torch.Generator().manual_seed(3))
T = torch.tensor([0, 1, 2, 3, 0])


@pytest.mark.parametrize("loss", [losses.cross_entropy, losses.focal_loss])
@pytest.mark.parametrize(
    ("logits", "targets", "options", "message"),
    [
        (X, F.one_hot(T, C), {}, "one-hot targets must be floating point"),
        (X, T[:, None], {}, r"must have the shape \(5,\), got \(5, 1\)"),
        (X, T[:4], {}, r"must have the shape \(5,\), got \(4,\)"),
        (X, T.float(), {}, "class indices must be integers"),
        (X, T > 0, {}, "torch.bool"),
        (X, torch.tensor([0, 1, 2, 4, 0]), {}, r"must lie in \[0, 3\] or equal ignore_index=-100; got 4 at \(3,\)"),
        (X, torch.tensor([0, 1, 2, -1, 0]), {}, r"got -1 at \(3,\)"),
        (X, torch.tensor([0, 1, 2, -100, 0]), {"ignore_index": None}, r"got -100 at \(3,\)"),
        (X, T, {"weight": torch.ones(3)}, r"shape \(4,\), got \(3,\)"),
        (X, T, {"weight": torch.ones(5)}, r"shape \(4,\), got \(5,\)"),
        (X, T, {"weight": torch.ones(4, 1)}, r"shape \(4,\), got \(4, 1\)"),
        (X.long(), T, {}, "logits must be floating point"),
        (torch.tensor(1.0), torch.tensor(0), {}, "class axis"),
        (X[0], torch.tensor(4), {}, r"got 4 at \(\)"),
        (X, X.softmax(1), {"ignore_index": 2}, "no meaning"),
        (X, X.softmax(1), {"ignore_index": 255}, "no meaning"),
        (X, X.softmax(1)[:, :3], {}, "must have the shape of the logits"),
        (X, T, {"label_smoothing": 1.5}, r"label_smoothing must lie in \[0, 1\], got 1.5"),
        (X, T, {"label_smoothing": -0.1}, "label_smoothing"),
        (X, T, {"label_smoothing": torch.zeros(C)}, "must be one number"),
        (X, T, {"weight_mode": "rows"}, "'class' or 'row'"),
    ],
)
def test_errors(loss: Any, logits: Tensor, targets: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss(logits, targets, **options)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, INF])
def test_temperature_must_be_positive(temperature: float) -> None:
    for call in (losses.cross_entropy, lambda *a, **o: losses.softmax(X, **o)):
        with pytest.raises(ValueError, match="temperature must"):
            call(X, T, temperature=temperature)


@pytest.mark.parametrize("gamma", [-0.5, math.nan, INF])
def test_gamma_must_not_be_negative(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma must lie"):
        losses.focal_loss(X, T, gamma=gamma)


def test_what_is_not_a_tensor() -> None:
    with pytest.raises(TypeError, match="logits must be a tensor, got list"):
        losses.cross_entropy([[1.0, 2.0]], T)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="targets must be a tensor, got list"):
        losses.cross_entropy(X, [0, 1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cross_entropy takes probabilities"):
        losses.nll_loss(X, X.softmax(1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integers_are_indices(dtype: torch.dtype) -> None:
    assert torch.equal(losses.cross_entropy(X, T.to(dtype)).values, losses.cross_entropy(X, T).values)


def test_uint8_targets_do_not_wrap() -> None:
    """In PyTorch `torch.tensor([156], dtype=torch.uint8) == -100` is True."""
    x = torch.randn(2, 200)
    loss = losses.cross_entropy(x, torch.tensor([156, 3], dtype=torch.uint8))
    assert loss.weights.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="got 156"):
        losses.cross_entropy(x[:, :100], torch.tensor([156, 3], dtype=torch.uint8))


def test_python_numbers_stay_arguments_of_a_compiled_function() -> None:
    def mean(x: Tensor, smoothing: float, temperature: float, gamma: float) -> Tensor:
        plain = losses.cross_entropy(x, T, label_smoothing=smoothing, temperature=temperature).mean()
        return plain + losses.focal_loss(x, T, gamma=gamma).mean()

    compiled = torch.compile(mean, fullgraph=True, backend="eager", dynamic=True)
    for value in (0.1, 0.2, 0.3):
        close(compiled(X, value, 2 * value, 3 * value), mean(X, value, 2 * value, 3 * value), eps8(X.dtype))


LOOKS = "look like probabilities"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_probabilities_as_logits_warn(dtype: torch.dtype) -> None:
    p, t = (3 * torch.randn(64, 10)).softmax(1).to(dtype), torch.randint(0, 10, (64,))
    for call in (losses.cross_entropy, losses.focal_loss, losses.nll_loss):
        with pytest.warns(UserWarning, match=LOOKS) as caught:
            call(p, t)
        assert caught[0].filename == __file__  # the caller's line
    with pytest.warns(UserWarning, match=LOOKS):
        losses.cross_entropy(p.reshape(8, 8, 10).movedim(2, 1), t.reshape(8, 8))
    with pytest.warns(UserWarning, match=LOOKS):
        losses.kl_divergence(p, p)


@pytest.mark.parametrize(
    "logits",
    [
        torch.eye(C)[T],  # one-hot toy logits sum to 1
        torch.full((5, C), 1 / C),  # all alike
        torch.full((5, C), 1 / C) + 0.01,
        X.softmax(1).log(),
        X.softmax(1) * 1.01,
        X.abs(),
        torch.zeros(5, C),
        torch.full((5, C), math.nan),
        torch.cat([X.softmax(1)[:4], X[:1]]),
    ],
)
def test_logits_that_only_resemble_probabilities_do_not_warn(logits: Tensor) -> None:
    losses.cross_entropy(logits, T)  # warnings are errors here


def test_values_are_not_checked_in_a_trace() -> None:
    """Neither an error nor a warning, and no host sync, where the values are not there to be looked at."""
    p = X.softmax(1)

    def mean(x: Tensor) -> Tensor:
        return losses.cross_entropy(x, T).mean()

    torch.func.grad(mean)(p)
    torch.func.vmap(mean)(p[None])
    torch.compile(mean, fullgraph=True, backend="eager")(p)
    assert torch.fx.experimental.proxy_tensor.make_fx(mean)(p) is not None
    half = losses.cross_entropy(X.to("meta", torch.float16), T.to("meta"))
    assert (half.values.device.type, half.values.dtype) == ("meta", torch.float16)
    meta = losses.cross_entropy(X.to("meta"), T.to("meta"))
    assert meta.values.shape == (5,)
    wrong = T + 7
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fake = losses.cross_entropy(mode.from_tensor(p), mode.from_tensor(wrong))
    assert fake.values.shape == (5,)


def test_shapes_are_checked_in_a_trace() -> None:
    with pytest.raises(ValueError, match="one-hot targets must be floating point"):
        torch.func.grad(lambda x: losses.cross_entropy(x, F.one_hot(T, C)).mean())(X)
    with pytest.raises(ValueError, match="must have the shape"):
        torch.func.vmap(lambda x: losses.cross_entropy(x, T[:, None]).mean())(X[None])


def test_weight_must_be_a_tensor() -> None:
    with pytest.raises(TypeError, match="cross_entropy: weight must be a tensor, got list"):
        losses.cross_entropy(torch.zeros(2, 2), torch.tensor([0, 1]), weight=[1.0, 2.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("gamma", [0.0, 2.0, torch.tensor(0.0), torch.tensor(2.0)], ids=str)
def test_focal_loss_of_a_forbidden_right_class_is_infinite(gamma: float | Tensor) -> None:
    logits = torch.tensor([[-math.inf, 1.0, 0.0], [-math.inf, 1.0, 0.0]])
    values = losses.focal_loss(logits, torch.tensor([0, 1]), gamma=gamma).values
    assert values[0] == math.inf
    assert values[1].isfinite()
    slope = torch.func.grad(lambda x: losses.focal_loss(x, torch.tensor([1, 1]), gamma=gamma).sum())(logits)
    assert slope.isfinite().all()
