"""functricks.random against jax's bits, a slow Threefry of Python integers, and itself: alone, in lanes, compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from functricks import random

CASES = json.loads((Path(__file__).parent / "data" / "threefry_vectors.json").read_text())["cases"]
WORD = 2**32


def slow_threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32-20 as the paper writes it, on Python integers."""
    k = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + k[0]) % WORD, (counter[1] + k[1]) % WORD
    for i in range(20):
        r = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
        x = (x + y) % WORD
        y = (y * 2**r % WORD | y >> (32 - r)) ^ x
        if i % 4 == 3:
            j = i // 4 + 1
            x, y = (x + k[j % 3]) % WORD, (y + k[(j + 1) % 3] + j) % WORD
    return x, y


def everything(key: Tensor, x: Tensor, rate: Tensor) -> dict[str, Tensor]:
    """One draw of each kind; a size that no vector width divides, so that scalar tails are covered."""
    return {
        "split": random.split(key, 3),
        "fold_in": random.fold_in(key, torch.arange(5)),
        "bits": random.bits(key, (13,)),
        "uniform": random.uniform(key, (7, 3)),
        "uniform of a range": random.uniform(key, (7, 3), -2.0, rate),
        "normal": random.normal(key, (5,)),
        "bernoulli": random.bernoulli(key, rate, (9,)),
        "randint": random.randint(key, (11,), -5, 1_000_000),
        "permutation": random.permutation(key, 19),
        "dropout": random.dropout(key, x, rate),
        "dropout of slices": random.dropout(key, x, 0.3, mask_shape=(7, 1)),
    }


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], ulp: tuple[str, ...] = ()) -> None:
    for name in a:
        if name in ulp:
            torch.testing.assert_close(a[name], b[name], rtol=1e-6, atol=0, msg=name)
        else:
            assert a[name].dtype == b[name].dtype, name
            assert torch.equal(a[name], b[name]), name


# --- known answers ---------------------------------------------------------------------------------------------------


def test_slow_threefry_has_the_published_answers() -> None:
    # Random123's kat_vectors: threefry 2x32, 20 rounds
    assert slow_threefry((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    assert slow_threefry((WORD - 1, WORD - 1), (WORD - 1, WORD - 1)) == (0x1CB996FC, 0xBB002BE7)
    assert slow_threefry((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)) == (0xC4923A9C, 0x483DF7A0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case['seed']}")
def test_the_bits_are_those_of_jax(case: dict) -> None:
    key = random.key(case["seed"])
    assert key.tolist() == case["key"]
    assert random.split(key, 3).tolist() == case["split3"]
    for data, expected in case["fold_in"].items():
        assert random.fold_in(key, int(data)).tolist() == expected
        assert random.fold_in(key, torch.tensor(int(data))).tolist() == expected
    assert random.bits(key, (3, 5)).tolist() == case["bits_3x5"]
    assert random.uniform(key, (7,)).tolist() == case["uniform_7"]
    assert random.bernoulli(key, 0.3, (12,)).tolist() == case["bernoulli_0.3_12"]
    assert random.bernoulli(key, torch.tensor(0.3), (12,)).tolist() == case["bernoulli_0.3_12"]
    # jax computes erfinv differently: 4 ulp
    torch.testing.assert_close(random.normal(key, (7,)), torch.tensor(case["normal_7"]), rtol=5e-7, atol=0)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, WORD - 1), st.integers(0, WORD - 1), st.integers(0, WORD - 1))
def test_fold_in_is_threefry(k0: int, k1: int, data: int) -> None:
    key, expected = torch.tensor([k0, k1]), list(slow_threefry((k0, k1), (0, data)))
    assert random.fold_in(key, data).tolist() == expected
    assert random.fold_in(key, torch.tensor(data)).tolist() == expected


def test_every_element_is_the_encryption_of_its_index() -> None:
    key = random.fold_in(random.key(4), 9)
    blocks = [slow_threefry(tuple(key.tolist()), (0, i)) for i in range(8)]
    assert random.split(key, 8).tolist() == [list(block) for block in blocks]
    assert random.bits(key, (2, 4)).flatten().tolist() == [x ^ y for x, y in blocks]
    assert random.uniform(key, (8,)).tolist() == [((x ^ y) >> 9) * 2.0**-23 for x, y in blocks]


def test_uniform_rounds_its_bounds_as_jax_does() -> None:
    key, low, high = random.key(1), -0.1, 0.7
    unit = random.uniform(key, (1000,))
    low32, high32 = torch.tensor(low), torch.tensor(high)
    expected = torch.maximum(unit * (high32 - low32) + low32, low32)
    assert torch.equal(random.uniform(key, (1000,), low, high), expected)
    assert torch.equal(random.uniform(key, (1000,), low32.double(), high32), expected)


# --- the same alone, in lanes, below them, compiled ------------------------------------------------------------------


@pytest.fixture
def lanes() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return random.split(random.key(5), 6), torch.randn(6, 7, 3), torch.linspace(0, 1, 6)


def test_a_lane_is_the_solo_draw(lanes: tuple[Tensor, Tensor, Tensor]) -> None:
    together = vmap(everything)(*lanes)
    for i in range(6):
        assert_same({k: v[i] for k, v in together.items()}, everything(*(t[i] for t in lanes)))


def test_numpy_and_torch_compute_the_same(
    lanes: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = vmap(everything)(*lanes)
    monkeypatch.setattr(random, "_draw_numpy", lambda *args: None)
    slow = vmap(everything)(*lanes)
    assert_same(fast, slow)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, lanes: tuple[Tensor, Tensor, Tensor]) -> None:
    whole = vmap(everything)(*lanes)
    monkeypatch.setattr(random, "_NUMPY_CHUNK", 16)
    assert_same(whole, vmap(everything)(*lanes))


def test_nested_lanes_in_any_axis() -> None:
    keys, data = random.split(random.key(2), 4), torch.arange(3)
    expected = torch.stack([torch.stack([random.fold_in(k, int(d)) for d in data]) for k in keys])
    assert torch.equal(vmap(vmap(random.fold_in, (None, 0)), (0, None))(keys, data), expected)
    assert torch.equal(vmap(vmap(random.fold_in, (0, None)), (None, 0), out_dims=1)(keys, data), expected)
    assert torch.equal(vmap(random.fold_in, (0, None))(keys, data), expected)
    assert torch.equal(vmap(random.split, 1)(keys.T.contiguous()), vmap(random.split)(keys))
    both = vmap(vmap(random.fold_in), (1, 0))(keys[None].expand(3, 4, 2), data.expand(4, 3))
    assert torch.equal(both, expected)


def test_keys_made_inside_a_gradient_level() -> None:
    keys = random.split(random.key(2), 4)

    def loss(x: Tensor, key: Tensor) -> Tensor:
        return random.dropout(random.fold_in(key + 0, 3), x, 0.5).sum()  # + 0: wrapped by the level of grad

    together = vmap(grad(loss), (None, 0))(torch.ones(8), keys)
    for i in range(4):
        assert torch.equal(together[i], random.dropout(random.fold_in(keys[i], 3), torch.ones(8), 0.5))


def test_compiled_alone() -> None:
    function = lambda key: random.bits(random.fold_in(key, 7), (1001,))  # noqa: E731
    key = random.key(3)
    assert torch.equal(torch.compile(function, fullgraph=True)(key), function(key))


@pytest.mark.slow
def test_compiled_lanes(lanes: tuple[Tensor, Tensor, Tensor]) -> None:
    function, args = vmap(everything), lanes
    compiled = torch.compile(function, fullgraph=True)
    # inductor fuses the multiplication and the addition of a range, and has an erfinv of its own: one rounding less
    assert_same(function(*args), compiled(*args), ulp=("normal", "uniform of a range"))


def test_make_fx_sees_operations_not_constants() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    keys = random.split(random.key(2), 2)
    traced = make_fx(lambda key: random.bits(key, (3,)))(keys[0])
    assert torch.equal(traced(keys[1]), random.bits(keys[1], (3,)))


def test_large_draws_have_the_bits_of_small_ones() -> None:
    key, n = random.key(8), random._NUMPY_LIMIT + 5
    large = random.bits(key, (n,))
    assert torch.equal(large[:100], random.bits(key, (100,)))
    x, y = slow_threefry((0, 8), (0, n - 1))
    assert large[-1].item() == x ^ y


# --- distributions ---------------------------------------------------------------------------------------------------


def test_moments() -> None:
    key, n = random.key(11), 200_000
    se = n**-0.5  # five standard errors everywhere
    assert abs(random.uniform(key, (n,)).mean() - 0.5) < 5 * se * 12**-0.5
    z = random.normal(key, (n,)).double()
    assert abs(z.mean()) < 5 * se
    assert abs(z.var() - 1) < 5 * se * 2**0.5
    assert z.abs().max() < 5.43
    assert abs(random.bernoulli(key, 0.2, (n,)).double().mean() - 0.2) < 5 * se * 0.4
    kept = random.dropout(key, torch.ones(n), 0.2) != 0
    assert abs(kept.double().mean() - 0.8) < 5 * se * 0.4
    counts = torch.bincount(random.randint(key, (n,), 3, 10))
    assert counts[:3].sum() == 0
    assert len(counts) == 10
    assert (((counts[3:] - n / 7) ** 2).sum() / (n / 7)) < 30  # chi-square, 6 degrees of freedom: p < 1e-4


def test_normal_is_finite_at_the_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_draw", lambda *args: torch.tensor([0.0, 1.0 - 2.0**-23]))
    z = random.normal(random.key(0), (2,))
    assert z.isfinite().all()
    assert z[0] < -5
    assert z[1] > 5


def test_randint_covers_its_range() -> None:
    key = random.key(0)
    assert random.randint(key, (1000,), -1, 2).unique().tolist() == [-1, 0, 1]
    wide = random.randint(key, (1000,), 0, 2**31)
    assert wide.min() >= 0
    assert 2**31 * 0.99 < wide.max() < 2**31
    low, high = torch.tensor([0, 100, 7]), torch.tensor([1, 101, 7])
    assert random.randint(key, (2, 3), low, high).tolist() == [[0, 100, 7], [0, 100, 7]]
    # the product needs 95 bits: against Python integers
    x, y = random.split(key, 5).unbind(-1)
    exact = [((b * WORD + a) * 1_000_003) >> 64 for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    assert random.randint(key, (5,), 0, 1_000_003).tolist() == exact


@pytest.mark.parametrize("n", [0, 1, 2, 3, 8, 9, 1000])
def test_permutation_has_every_index_once(n: int) -> None:
    keys = random.split(random.key(1), 3)
    for order in vmap(lambda key: random.permutation(key, n))(keys):
        assert order.sort().values.tolist() == list(range(n))


def test_permutation_is_fair() -> None:
    orders = vmap(lambda key: random.permutation(key, 3))(random.split(random.key(1), 6000))
    counts = torch.bincount(orders @ torch.tensor([9, 3, 1]))
    counts = counts[counts > 0]
    assert len(counts) == 6
    assert ((counts - 1000) ** 2 / 1000).sum() < 26


def test_permutation_of_a_tensor_shuffles_rows() -> None:
    key, x = random.key(3), torch.arange(10.0).reshape(5, 2)
    assert torch.equal(random.permutation(key, x), x[random.permutation(key, 5)])


# --- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_scales_what_it_keeps(dtype: torch.dtype) -> None:
    key, x = random.key(3), torch.linspace(-3, 3, 1001, dtype=dtype)
    y = random.dropout(key, x, 0.3)
    kept = y != 0
    expected = x * torch.tensor(1 / 0.7, dtype=dtype)
    assert y.dtype == dtype
    assert 600 < kept.sum() < 800
    assert torch.equal(y[kept], expected[kept])
    assert torch.equal(y, random.dropout(key, x, torch.tensor(0.3, dtype=torch.float64)))


def test_dropout_at_its_ends() -> None:
    key, x = random.key(3), torch.randn(1001)
    for rate in (0.0, torch.tensor(0.0)):
        assert torch.equal(random.dropout(key, x, rate), x)
    for rate in (1.0, torch.tensor(1.0)):
        assert torch.equal(random.dropout(key, x, rate), torch.zeros(1001))
        assert torch.equal(grad(lambda x, rate=rate: random.dropout(key, x, rate).sum())(x), torch.zeros(1001))
    at_one = grad(lambda rate: random.dropout(key, x, rate).sum())(torch.tensor(1.0))
    assert at_one.isfinite()


def test_a_higher_rate_only_drops_more() -> None:
    masks = vmap(lambda rate: random.dropout(random.key(3), torch.ones(500), rate) != 0)(torch.linspace(0, 1, 11))
    assert masks[0].all()
    assert not masks[-1].any()
    assert all((masks[i + 1] <= masks[i]).all() for i in range(10))


def test_dropout_of_slices() -> None:
    y = random.dropout(random.key(3), torch.ones(6, 8, 4, 4), 0.5, mask_shape=(6, 8, 1, 1))
    assert (y.flatten(2) == y[..., 0, :1]).all()
    assert 0 < (y[..., 0, 0] == 0).sum() < 48


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda k: random.key(-1), ValueError, r"seed must be in \[0, 2\*\*32\), got -1"),
        (lambda k: random.key(2**32), ValueError, "seed must be in"),
        (lambda k: random.key(1.0), TypeError, "seed must be an int"),
        (lambda k: random.key(torch.tensor(1.0)), TypeError, "integer tensor"),
        (lambda k: random.key(torch.arange(3)), ValueError, "torch.func.vmap"),
        (lambda k: random.split(7), ValueError, "random.key"),
        (lambda k: random.split(k.float()), ValueError, r"torch.float32 of shape \[2\]"),
        (lambda k: random.bits(random.split(k)), ValueError, r"index one of several \(keys\[i\]\)"),
        (lambda k: random.fold_in(k, -1), ValueError, "data must be in"),
        (lambda k: random.fold_in(k, 0.5), TypeError, "data must be an int"),
        (lambda k: random.fold_in(k, torch.tensor(0.5)), TypeError, "integer tensor"),
        (lambda k: random.split(k, -1), ValueError, "must not be negative"),
        (lambda k: random.bits(k, (2**16, 2**17)), ValueError, "at most 2"),
        (lambda k: random.bernoulli(k, 1.5, (3,)), ValueError, r"p must be in \[0, 1\]"),
        (
            lambda k: random.bernoulli(k, torch.ones(3)),
            ValueError,
            r"p of shape \[3\] does not broadcast to shape \[\]",
        ),
        (lambda k: random.uniform(k, (2,), torch.zeros(3)), ValueError, "minval of shape"),
        (lambda k: random.randint(k, (2,), 3, 3), ValueError, "maxval - minval"),
        (lambda k: random.randint(k, (2,), 0, 2**31 + 1), ValueError, "maxval - minval"),
        (lambda k: random.randint(k, (2,), torch.tensor(0.0), 3), TypeError, "integer tensor"),
        (lambda k: random.permutation(k, torch.tensor(3)), ValueError, "0-d"),
        (lambda k: random.dropout(k, torch.ones(2), -0.1), ValueError, "rate must be in"),
        (lambda k: random.dropout(k, torch.ones(2), torch.ones(2)), ValueError, "rate must be 0-d"),
        (lambda k: random.dropout(k, torch.ones(2, dtype=torch.int64), 0.5), TypeError, "floating-point"),
        (lambda k: random.dropout(k, torch.ones(2), 0.5, mask_shape=(3,)), ValueError, "mask_shape"),
    ],
)
def test_errors(call, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call(random.key(0))


def test_inputs_are_untouched() -> None:
    key, x = random.key(3), torch.ones(7, 3)
    everything(key, x, torch.tensor(0.5))
    assert key.tolist() == [0, 3]
    assert key._version == 0
    assert x._version == 0
