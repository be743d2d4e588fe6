"""InfoNCE, NT-Xent and supervised contrastive losses, against slow loops over rows and pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
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

D = 5
TIGHT = 1e-12  # float64, other order


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def oracle(z: Tensor, keys: Tensor, partners: list[list[int]], allowed: Callable[[int, int], bool], T: float) -> Loss:
    """One row, one partner, one candidate at a time."""
    z, keys = F.normalize(z), F.normalize(keys)
    values, weights = [], []
    for i in range(len(z)):
        mine = [p for p in partners[i] if allowed(i, p)]
        shares = {j: (z[i] @ keys[j] / T).exp() for j in range(len(keys)) if allowed(i, j)}
        terms = [-(shares[p] / sum(shares.values())).log() for p in mine]
        values.append(torch.stack(terms).mean() if terms else torch.tensor(0.0, dtype=z.dtype))
        weights.append(1.0 if terms else 0.0)
    return Loss(torch.stack(values), torch.tensor(weights, dtype=z.dtype))


def close(got: Loss, want: Loss, tolerance: float = TIGHT) -> None:
    torch.testing.assert_close(got.values, want.values, rtol=tolerance, atol=tolerance)
    assert torch.equal(got.weights, want.weights)


@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 2**16), st.sampled_from([0.05, 0.5, 2.0]))
def test_info_nce_is_its_definition(n: int, extra: int, seed: int, temperature: float) -> None:
    q, k = rows(n, seed), rows(n + extra, seed + 1)
    got = losses.info_nce(q, k, temperature=temperature)
    close(got, oracle(q, k, [[i] for i in range(n)], lambda i, j: True, temperature))
    classic = F.cross_entropy(F.normalize(q) @ F.normalize(k).T / temperature, torch.arange(n))
    torch.testing.assert_close(got.mean(), classic, rtol=TIGHT, atol=TIGHT)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(n, n + extra, generator=generator) < 0.6
    labels = torch.randint(0, n + extra, (n,), generator=generator)
    labels[torch.rand(n, generator=generator) < 0.2] = -100
    partners = [[] if y < 0 else [y] for y in labels.tolist()]
    got = losses.info_nce(q, k, temperature=temperature, labels=labels, mask=mask)
    close(got, oracle(q, k, partners, lambda i, j: bool(mask[i, j]), temperature))


@given(st.integers(1, 5), st.integers(0, 2**16), st.sampled_from([0.05, 0.5, 2.0]))
def test_ntxent_is_its_definition(n: int, seed: int, temperature: float) -> None:
    z1, z2 = rows(n, seed), rows(n, seed + 1)
    z = torch.cat([z1, z2])
    partners = [[(i + n) % (2 * n)] for i in range(2 * n)]
    close(losses.ntxent(z1, z2, temperature=temperature), oracle(z, z, partners, lambda i, j: i != j, temperature))
    generator = torch.Generator().manual_seed(seed)
    real = torch.rand(n, generator=generator) < 0.6
    close(
        losses.ntxent(z1, z2, temperature=temperature, mask=real),
        oracle(z, z, partners, lambda i, j: i != j and bool(real[i % n]) and bool(real[j % n]), temperature),
    )
    pairs = torch.rand(2 * n, 2 * n, generator=generator) < 0.7
    close(
        losses.ntxent(z1, z2, temperature=temperature, mask=pairs),
        oracle(z, z, partners, lambda i, j: i != j and bool(pairs[i, j]), temperature),
    )


@given(st.integers(1, 8), st.integers(0, 2**16), st.sampled_from([0.05, 0.5, 2.0]))
def test_supervised_contrastive_is_its_definition(n: int, seed: int, temperature: float) -> None:
    z = rows(n, seed)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1, 2, (n,), generator=generator)  # any integers are labels
    labels[torch.rand(n, generator=generator) < 0.2] = -100
    y = labels.tolist()
    partners = [[j for j in range(n) if j != i and y[i] == y[j] != -100] for i in range(n)]
    got = losses.supervised_contrastive(z, labels, temperature=temperature)
    close(got, oracle(z, z, partners, lambda i, j: i != j and y[j] != -100, temperature))
    kept = labels != -100
    part = losses.supervised_contrastive(z[kept], labels[kept], temperature=temperature)
    close(Loss(got.values[kept], got.weights[kept]), part)


def test_two_views_with_one_label_each_are_ntxent() -> None:
    z1, z2 = rows(4, 1), rows(4, 2)
    labels = torch.arange(4).repeat(2)
    got = losses.supervised_contrastive(torch.cat([z1, z2]), labels, temperature=0.3)
    close(got, losses.ntxent(z1, z2, temperature=0.3))


def test_length_plays_no_part_unless_asked() -> None:
    q, k = rows(4, 1), rows(4, 2)
    sizes = torch.tensor([1e-200, 1e-3, 1e3, 1e200], dtype=torch.float64)[:, None]
    close(losses.info_nce(q * sizes, k), losses.info_nce(q, k))
    q32, k32 = q.float(), k.float()
    scaled = losses.info_nce(q32 * torch.tensor([1e-30, 1.0, 1e4, 1e30])[:, None], k32)
    torch.testing.assert_close(scaled.values, losses.info_nce(q32, k32).values)
    raw = losses.info_nce(q, k, normalize=False, temperature=0.5)
    torch.testing.assert_close(raw.mean(), F.cross_entropy(q @ k.T / 0.5, torch.arange(4)), rtol=TIGHT, atol=TIGHT)


def test_zero_vectors_have_finite_derivatives() -> None:
    q, k = torch.zeros(3, D), torch.randn(3, D)
    for call in (
        lambda q: losses.info_nce(q, k).mean(),
        lambda q: losses.ntxent(q, k).mean(),
        lambda q: losses.supervised_contrastive(q, torch.tensor([0, 0, 0])).mean(),
    ):
        assert call(q).isfinite()
        assert torch.func.grad(call)(q).isfinite().all()
        assert torch.func.hessian(call)(q).isfinite().all()


# --- masks never poison ----------------------------------------------------------------------------------------------

BAD = [math.nan, math.inf, -math.inf]


def padded_info_nce(q: Tensor, k: Tensor, T: Tensor) -> Loss:
    real = torch.tensor([True, True, True, False, False])
    return losses.info_nce(q, k, temperature=T, mask=real)


def padded_queries(q: Tensor, k: Tensor, T: Tensor) -> Loss:
    return losses.info_nce(q, k, temperature=T, labels=torch.tensor([0, 1, 2, -100, -100]), mask=REAL)


REAL = torch.tensor([[True] * 3 + [False] * 2])


def padded_ntxent(q: Tensor, k: Tensor, T: Tensor) -> Loss:
    return losses.ntxent(q, k, temperature=T, mask=torch.tensor([True, True, True, False, False]))


def padded_supervised(q: Tensor, k: Tensor, T: Tensor) -> Loss:
    return losses.supervised_contrastive(q + k, torch.tensor([0, 0, 1, -100, -100]), temperature=T)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("temperature", [0.01, 0.5])
@pytest.mark.parametrize("loss", [padded_info_nce, padded_queries, padded_ntxent, padded_supervised])
def test_padding_is_as_good_as_absent(
    loss: Callable[[Tensor, Tensor, Tensor], Loss], temperature: float, bad: float
) -> None:
    q, k = torch.randn(5, D), torch.randn(5, D)
    T = torch.tensor(temperature)

    def total(q: Tensor, k: Tensor, T: Tensor) -> Tensor:
        return loss(q, k, T).sum()

    clean, clean_gradients = loss(q, k, T), torch.func.grad(total, argnums=(0, 1, 2))(q, k, T)
    q[3:], k[3:] = bad, bad
    dirty, gradients = loss(q, k, T), torch.func.grad(total, argnums=(0, 1, 2))(q, k, T)
    assert torch.equal(dirty.values, clean.values)
    assert torch.equal(dirty.weights, clean.weights)
    assert dirty.weights[3:5].tolist() == [0.0, 0.0]
    for got, want in zip(gradients, clean_gradients, strict=True):
        assert got.isfinite().all()
        assert torch.equal(got, want)
    assert gradients[0].abs().sum() > 0
    assert torch.func.hessian(total, argnums=2)(q, k, T).isfinite()


@pytest.mark.parametrize("loss", [padded_info_nce, padded_ntxent, padded_supervised])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saturated_and_half_stay_finite(loss: Any, dtype: torch.dtype) -> None:
    q = (1e4 * torch.randn(5, D)).to(dtype)
    k = (1e4 * torch.randn(5, D)).to(dtype)
    T = torch.tensor(0.01)
    assert loss(q, k, T).values.dtype == dtype
    assert loss(q, k, T).weights.dtype == torch.float32

    def mean(q: Tensor, T: Tensor) -> Tensor:
        return loss(q, k, T).mean()

    assert mean(q, T).isfinite()
    assert all(g.isfinite().all() for g in torch.func.grad(mean, argnums=(0, 1))(q, T))
    assert all(h.isfinite().all() for pair in torch.func.hessian(mean, argnums=(0, 1))(q, T) for h in pair)


def test_everything_masked() -> None:
    q, k = torch.randn(3, D), torch.randn(3, D)
    nothing = torch.zeros(3, 3, dtype=torch.bool)

    def loss(q: Tensor, T: Tensor) -> Tensor:
        return losses.info_nce(q, k, temperature=T, mask=nothing).sum()

    empty = losses.info_nce(q, k, mask=nothing)
    assert empty.mean().isnan()
    assert empty.sum() == 0
    assert not empty.weights.any()
    gradients = torch.func.grad(loss, argnums=(0, 1))(q, torch.tensor(0.1))
    assert not any(g.any() for g in gradients)
    for labels in (torch.tensor([0, 1, 2]), torch.tensor([-100, -100, -100])):
        assert not losses.supervised_contrastive(q, labels).weights.any()
        assert losses.supervised_contrastive(q, labels).sum() == 0


def test_a_learned_temperature_by_gradcheck() -> None:
    q, k = rows(4, 1).requires_grad_(), rows(4, 2).requires_grad_()
    T = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, True, False])
    for loss in (
        lambda q, k, T: losses.info_nce(q, k, temperature=T, mask=mask).sum(),
        lambda q, k, T: losses.ntxent(q, k, temperature=T, mask=mask).sum(),
        lambda q, k, T: losses.supervised_contrastive(q + k, torch.tensor([0, 1, 0, -100]), temperature=T).sum(),
    ):
        assert torch.autograd.gradcheck(loss, (q, k, T))
        assert torch.autograd.gradgradcheck(loss, (q, k, T))


# --- vmap, compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes_in", ["hyper", "input", "both"])
@pytest.mark.parametrize("loss", [padded_info_nce, padded_queries, padded_ntxent, padded_supervised])
def test_lanes_equal_the_loop(loss: Any, lanes_in: str) -> None:
    q, k = torch.randn(3, 5, D), torch.randn(3, 5, D)
    temperatures = torch.tensor([0.05, 0.5, 2.0], dtype=torch.float64)

    def one(q: Tensor, k: Tensor, T: Tensor) -> tuple[Loss, Tensor, Tensor]:
        return loss(q, k, T), *torch.func.grad(lambda q, T: loss(q, k, T).mean(), argnums=(0, 1))(q, T)

    hyper, batch = lanes_in != "input", lanes_in != "hyper"
    args = (q if batch else q[0], k if batch else k[0], temperatures if hyper else temperatures[1])
    dims = (0 if batch else None, 0 if batch else None, 0 if hyper else None)
    got, *gradients = torch.func.vmap(one, in_dims=dims)(*args)
    assert got.values.dtype == torch.float32
    for i in range(3):
        want, *solo = one(q[i if batch else 0], k[i if batch else 0], temperatures[i if hyper else 1])
        torch.testing.assert_close(got.values[i], want.values)  # the batched matrix product sums in another order
        assert torch.equal(got.weights[i], want.weights)
        for batched, alone in zip(gradients, solo, strict=True):
            torch.testing.assert_close(batched[i], alone, rtol=1e-4, atol=1e-6)  # and T = 0.05 multiplies that by 20


def test_per_lane_labels_and_masks() -> None:
    q, k = torch.randn(3, 4, D), torch.randn(3, 4, D)
    labels = torch.tensor([[0, 1, 2, 3], [3, 2, -100, 0], [0, 0, 0, 0]])
    mask = torch.rand(3, 4, 4) < 0.8
    got = torch.func.vmap(lambda q, k, y, m: losses.info_nce(q, k, labels=y, mask=m))(q, k, labels, mask)
    lanes = torch.func.vmap(losses.supervised_contrastive)(q, labels)
    for i in range(3):
        want = losses.info_nce(q[i], k[i], labels=labels[i], mask=mask[i])
        torch.testing.assert_close(got.values[i], want.values)
        assert torch.equal(got.weights[i], want.weights)
        torch.testing.assert_close(lanes.values[i], losses.supervised_contrastive(q[i], labels[i]).values)


def test_compiled() -> None:
    def step(q: Tensor, k: Tensor, T: Tensor) -> Tensor:
        return sum((f(q, k, T).mean() for f in (padded_info_nce, padded_ntxent, padded_supervised)), torch.tensor(0.0))

    gradient = torch.func.vmap(torch.func.grad(step, argnums=(0, 2)))
    args = torch.randn(2, 5, D), torch.randn(2, 5, D), torch.tensor([0.1, 1.0])
    for got, want in zip(torch.compile(gradient, fullgraph=True)(*args), gradient(*args), strict=True):
        torch.testing.assert_close(got, want)


# --- the boundary ----------------------------------------------------------------------------------------------------

Z = torch.randn(4, D)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.info_nce(Z, Z[:, :3]), "rows of one length"),
        (lambda: losses.info_nce(Z[0], Z[0]), "must be matrices"),
        (lambda: losses.info_nce(Z, Z[:3]), "4 queries but only 3 keys"),
        (lambda: losses.info_nce(Z, Z, labels=torch.tensor([0, 1, 2, 4])), r"labels must lie in \[0, 3\]"),
        (lambda: losses.info_nce(Z, Z, labels=torch.tensor([0, 1])), "labels must be 4 integers"),
        (lambda: losses.info_nce(Z, Z, labels=torch.rand(4)), "labels must be 4 integers"),
        (lambda: losses.info_nce(Z, Z, mask=torch.ones(4, 4)), "mask must be bool"),
        (lambda: losses.info_nce(Z, Z, mask=torch.ones(3, 4, dtype=torch.bool)), "mask of shape"),
        (lambda: losses.info_nce(Z, Z, temperature=0.0), "info_nce: temperature must be > 0"),
        (lambda: losses.info_nce(Z, Z, temperature=torch.ones(4)), "must be one number"),
        (lambda: losses.info_nce(Z.long(), Z), "must be floating point"),
        (lambda: losses.ntxent(Z, Z[:3]), "must have the same shape"),
        (lambda: losses.ntxent(Z, Z, mask=torch.ones(3, dtype=torch.bool)), "mask of shape"),
        (lambda: losses.ntxent(Z, Z, temperature=-1.0), "ntxent: temperature"),
        (lambda: losses.supervised_contrastive(Z, torch.tensor([0, 1, 2])), "labels must be 4 integers"),
        (lambda: losses.supervised_contrastive(Z, torch.zeros(4)), "labels must be 4 integers"),
        (lambda: losses.supervised_contrastive(Z[0], torch.tensor([0])), "must be matrices"),
    ],
)
def test_errors(call: Callable[[], Loss], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_defaults() -> None:
    k = torch.randn(4, D)
    assert torch.equal(losses.info_nce(Z, k).values, losses.info_nce(Z, k, temperature=0.1).values)
    assert torch.equal(losses.ntxent(Z, k).values, losses.ntxent(Z, k, temperature=0.5).values)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda z: losses.info_nce(z, z, labels=[0, 1]), TypeError, "info_nce: labels must be a tensor, got list"),
        (lambda z: losses.info_nce(z, z, mask=[True, True]), TypeError, "info_nce: mask must be a tensor, got list"),
        (lambda z: losses.ntxent(z, z, mask=[True, True]), TypeError, "ntxent: mask must be a tensor, got list"),
        (
            lambda z: losses.supervised_contrastive(z, [0, 1]),
            TypeError,
            "supervised_contrastive: labels must be a tensor, got list",
        ),
        (lambda z: losses.info_nce(z[:, :0], z[:, :0]), ValueError, "info_nce: rows of queries must hold at least one"),
        (
            lambda z: losses.info_nce(z, z[:0], labels=torch.tensor([-100, -100])),
            ValueError,
            "info_nce: keys must hold at least one row",
        ),
    ],
)
def test_arguments_of_the_wrong_kind(call: Callable[[Tensor], Loss], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(rows(2))
