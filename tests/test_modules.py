"""functricks.modules against the modules themselves: values, buffers, masks; and the user's module stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap

from functricks import accumulate, gradient, random
from functricks.losses import cross_entropy
from functricks.modules import Functional, SupervisedCarry, functional, no_decay, supervised, supervised_carry
from tests.helpers import assert_same


class Net(nn.Module):
    """Everything at once: BatchNorm, a dropout that is called twice, another one, a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(6, 6)
        self.bn = nn.BatchNorm1d(6)
        self.d = nn.Dropout(0.5)
        self.g = nn.Linear(6, 6)
        self.g.weight = self.f.weight
        self.e = nn.Dropout(0.25)
        self.h = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.e(self.g(self.d(self.d(torch.tanh(self.bn(self.f(x))))))))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 6), torch.randint(0, 4, (16,))


def stacked(values: dict[str, Tensor], lanes: int) -> dict[str, Tensor]:
    return {
        name: torch.stack([v * (1 + i / 10) if v.is_floating_point() else v for i in range(lanes)])
        for name, v in values.items()
    }


def lane(values: Any, i: int) -> Any:
    return {name: v[i] for name, v in values.items()}


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=1e-5, atol=1e-6
        )  # other kernels for lanes: sums in other order


def record(model: nn.Module) -> Callable[[], None]:
    """Return a function that asserts that the module is exactly what it was."""
    slots = {
        (path, kind, name): (t, None if t is None else (t.detach().clone(), t._version, t.data_ptr(), t.grad))
        for path, module in model.named_modules(remove_duplicate=False)
        for kind in ("_parameters", "_buffers")
        for name, t in getattr(module, kind).items()
    }
    flags = {
        path: (id(m), type(m), m.training, set(m.__dict__)) for path, m in model.named_modules(remove_duplicate=False)
    }

    def check() -> None:
        assert flags == {
            path: (id(m), type(m), m.training, set(m.__dict__))
            for path, m in model.named_modules(remove_duplicate=False)
        }
        for (path, kind, name), (t, before) in slots.items():
            now = getattr(model.get_submodule(path), kind)[name]
            assert now is t
            if before is not None:
                assert torch.equal(now.detach(), before[0]), (path, name)
                assert (now._version, now.data_ptr()) == before[1:3]
                assert now.grad is before[3]

    return check


# --- values are the module's own -------------------------------------------------------------------------------------


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), lambda: torch.randn(5, 4)),
    "bn1d": (lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), lambda: torch.randn(5, 4)),
    "bn1d of sequences": (lambda: nn.BatchNorm1d(4), lambda: torch.randn(5, 4, 3)),
    "bn2d": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), lambda: torch.randn(4, 2, 6, 6)),
    "bn as root": (lambda: nn.BatchNorm1d(4), lambda: torch.randn(5, 4)),
    "bn cumulative": (lambda: nn.BatchNorm1d(4, momentum=None), lambda: torch.randn(5, 4)),
    "bn momentum": (lambda: nn.BatchNorm1d(4, momentum=0.37), lambda: torch.randn(5, 4)),
    "bn plain": (lambda: nn.BatchNorm1d(4, affine=False), lambda: torch.randn(5, 4)),
    "bn without statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), lambda: torch.randn(5, 4)),
    "bn bfloat16": (lambda: nn.BatchNorm1d(4), lambda: torch.randn(5, 4).bfloat16()),
    "instance norm": (lambda: nn.InstanceNorm1d(4, track_running_stats=True), lambda: torch.randn(5, 4, 3)),
    "group and layer norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(4)), lambda: torch.randn(5, 4)),
    "parametrized": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
        lambda: torch.randn(5, 4),
    ),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2)), lambda: torch.arange(7)),
    "lstm": (lambda: nn.LSTM(4, 3, batch_first=True), lambda: torch.randn(2, 5, 4)),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        lambda: torch.randn(2, 5, 4),
    ),
}


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_equal_the_module(name: str) -> None:
    torch.manual_seed(0)
    make, data = MODELS[name]
    ours, theirs = make(), None
    theirs = copy.deepcopy(ours)
    unchanged = record(ours)
    model = functional(ours)
    buffers = model.buffers
    exact = name != "bn cumulative"  # the kernel contracts a * b + c * d to an fma there: one ulp
    for _ in range(3):
        x = data()
        before = {n: (b.clone(), b._version) for n, b in buffers.items()}
        params = {n: p.clone().requires_grad_() for n, p in model.params.items()}  # as the module's: the same kernels
        output, new = model.apply(params, buffers, x)
        expected = theirs(x)
        assert torch.equal(first(output), first(expected))
        assert list(new) == [n for n, _ in theirs.named_buffers()]
        for n, b in theirs.named_buffers():
            torch.testing.assert_close(new[n], b, rtol=0 if exact else 2e-7, atol=0)
            assert torch.equal(buffers[n], before[n][0])
            assert buffers[n]._version == before[n][1]
        if params:
            loss = lambda output: first(output).float().square().sum()  # noqa: E731
            wanted = torch.autograd.grad(loss(expected), list(theirs.parameters()))
            for g, w in zip(torch.autograd.grad(loss(output), list(params.values())), wanted, strict=True):
                assert torch.equal(g, w)
            grads = grad(lambda p, x=x, b=buffers, loss=loss: loss(model.apply(p, b, x)[0]))(model.params)
            for g, w in zip(grads.values(), wanted, strict=True):
                torch.testing.assert_close(g, w, rtol=2e-6, atol=1e-6)  # torch.func may take other kernels
        buffers = new
    x = data()
    theirs.eval()
    with torch.no_grad():  # the same grad mode: TransformerEncoderLayer has a kernel of its own for inference
        output, kept = model.apply(model.params, buffers, x, train=False)
        torch.testing.assert_close(
            first(output), first(theirs(x)), rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6
        )
    for n in buffers:
        assert torch.equal(kept[n], buffers[n])
    unchanged()


def test_c35_batch_norm() -> None:
    model = functional(nn.BatchNorm1d(1))
    x = torch.tensor([[1.0], [3.0]])
    output, new = model.apply(model.params, model.buffers, x)
    assert new["running_mean"].item() == pytest.approx(0.2)
    assert new["running_var"].item() == pytest.approx(1.1)
    assert new["num_batches_tracked"].item() == 1
    assert model.buffers["num_batches_tracked"].item() == 0
    assert torch.equal(output, nn.BatchNorm1d(1)(x))
    # three batches over shared buffers
    batched = vmap(model.apply, (None, None, 0))(model.params, model.buffers, torch.stack([x, 2 * x, 3 * x]))[1]
    torch.testing.assert_close(batched["running_mean"].flatten(), torch.tensor([0.2, 0.4, 0.6]))


def test_flags() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    net[0].eval()
    model, x = functional(net), torch.randn(5, 3)
    counts = {
        train: [
            int(model.apply(model.params, model.buffers, x, train=train)[1][f"{i}.num_batches_tracked"]) for i in (0, 1)
        ]
        for train in (None, True, False)
    }
    assert counts == {None: [0, 1], True: [1, 1], False: [0, 0]}


def test_frozen_by_their_own_train_method() -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    model = functional(Frozen(nn.BatchNorm1d(3)))
    assert model.apply(model.params, model.buffers, torch.randn(5, 3), train=True)[1]["0.num_batches_tracked"] == 0


# --- ties ------------------------------------------------------------------------------------------------------------


class TwoPaths(nn.Module):
    def __init__(self, shared: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        if shared == "parameter":
            self.b.weight = self.a.weight
        elif shared == "module":
            self.b = self.a
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.broken:
            raise RuntimeError("in the middle")
        return self.b(x)


@pytest.mark.parametrize("shared", ["parameter", "module"])
def test_c34_ties(shared: str) -> None:
    net = TwoPaths(shared)
    nn.init.constant_(net.a.weight, 2.0)
    unchanged = record(net)
    model = functional(net)
    assert list(model.params) == ["a.weight"]
    params = {"a.weight": torch.tensor([[3.0]])}
    value = lambda p: model.apply(p, {}, torch.ones(1, 1))[0].sum()  # noqa: E731
    grads, out = grad_and_value(value)(params)
    assert (out.item(), grads["a.weight"].item()) == (9.0, 6.0)
    assert not value(params).requires_grad  # nothing of the module's own parameters leaks in
    assert vmap(value)({"a.weight": torch.tensor([1.0, 3.0]).reshape(2, 1, 1)}).tolist() == [1.0, 9.0]
    unchanged()


@pytest.mark.parametrize("shared", ["nothing", "parameter", "module"])
def test_an_exception_in_the_middle_leaves_nothing_behind(shared: str) -> None:
    net = TwoPaths(shared)
    net.broken = True
    unchanged = record(net)
    model = functional(net)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="in the middle"):
            model.apply({n: p + 1 for n, p in model.params.items()}, {}, torch.ones(1, 1))
    unchanged()


def test_shared_buffers_stay_shared() -> None:
    class Counter(nn.Module):
        def __init__(self, count: Tensor) -> None:
            super().__init__()
            self.register_buffer("count", count)

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x * self.count

    count = torch.zeros(())
    net = nn.Sequential(Counter(count), Counter(count))
    model = functional(net)
    output, new = model.apply(model.params, model.buffers, torch.ones(()))
    assert (list(new), new["0.count"].item(), output.item(), count.item()) == (["0.count"], 2.0, 2.0, 0.0)
    lanes = vmap(model.apply, (None, None, 0))({}, model.buffers, torch.ones(3))
    assert lanes[1]["0.count"].tolist() == [2.0, 2.0, 2.0]


def test_the_users_training_is_not_seen(net: Net, batch: tuple[Tensor, Tensor]) -> None:
    model = functional(net)
    before = model.apply(model.params, model.buffers, batch[0], train=False)[0]
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert torch.equal(model.apply(model.params, model.buffers, batch[0], train=False)[0], before)


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_the_mask_depends_on_path_and_call_only() -> None:
    key, x = random.key(3), torch.ones(500)

    def masks(**modules: nn.Module) -> dict[str, Tensor]:
        class Each(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                for name, module in modules.items():
                    self.add_module(name, module)

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                return {f"{name}{i}": m(x) for name, m in self.named_children() for i in range(2)}

        model = functional(Each())
        return model.apply({}, {}, x, key=key)[0]

    one = masks(a=nn.Dropout(0.5))
    more = masks(b=nn.Dropout(0.3), zero=nn.Dropout(0.0), a=nn.Dropout(0.5))
    assert torch.equal(one["a0"], more["a0"])
    assert torch.equal(one["a1"], more["a1"])
    assert torch.equal(more["zero0"], x)
    draws = [one["a0"] != 0, one["a1"] != 0, more["b0"] != 0, more["b1"] != 0]
    for i in range(4):
        for j in range(i):
            assert 0.3 < (draws[i] == draws[j]).float().mean() < 0.7  # independent, not equal and not opposite
    assert not torch.equal(masks(a=nn.Dropout(0.5))["a0"], functional(nn.Dropout(0.5)).apply({}, {}, x, key=key)[0])


def test_rates(net: Net, batch: tuple[Tensor, Tensor]) -> None:
    model, key, x = functional(net), random.key(1), batch[0]
    call = lambda **kw: model.apply(model.params, model.buffers, x, **kw)[0]  # noqa: E731
    own = call(key=key)
    assert torch.equal(call(key=key, dropout={"d": 0.5, "e": torch.tensor(0.25)}), own)
    assert torch.equal(call(key=key, dropout={"e": 0.25}), own)
    assert torch.equal(call(key=key, dropout=torch.tensor(0.3)), call(key=key, dropout={"*": 0.9, "[de]": 0.3}))
    assert not torch.equal(call(key=key, dropout=0.3), own)
    off = copy.deepcopy(net)
    off.d.p = off.e.p = 0.0
    for kw in ({"dropout": 0.0}, {"key": key, "dropout": 0.0}, {"key": key, "dropout": torch.tensor(0.0)}):
        assert torch.equal(call(**kw), off(x))
        off.bn.reset_running_stats()
    assert torch.equal(call(key=key, dropout=1.0), net.h.bias.expand(16, 4))


CHANNELS = [
    (nn.Dropout1d, (4, 5, 6), 2),
    (nn.Dropout1d, (5, 6), 1),
    (nn.Dropout2d, (4, 5, 6, 3), 2),
    (nn.Dropout3d, (4, 5, 6, 3, 2), 2),
    (nn.Dropout3d, (5, 6, 3, 2), 1),
    (nn.FeatureAlphaDropout, (4, 5, 6), 2),
]


@pytest.mark.parametrize(("kind", "shape", "kept"), CHANNELS)
def test_channels_are_dropped_together(kind: type[nn.Module], shape: tuple[int, ...], kept: int) -> None:
    y = functional(kind(0.5)).apply({}, {}, torch.ones(shape), key=random.key(5))[0]
    by_channel = y.flatten(kept)
    assert (by_channel == by_channel[..., :1]).all()
    values = torch.tensor([-0.779194, 1.665599] if kind is nn.FeatureAlphaDropout else [0.0, 2.0])
    torch.testing.assert_close(y.unique(), values)


@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.FeatureAlphaDropout])
@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_alpha_dropout_has_the_values_of_torch(kind: type[nn.Module], rate: float) -> None:
    torch.manual_seed(0)
    x = torch.full((64, 64, 2), 0.7)
    expected = kind(rate)(x).unique()
    model = functional(kind(rate))
    for kw in ({}, {"dropout": torch.tensor(rate)}):
        y = model.apply({}, {}, x, key=random.key(5), **kw)[0]
        torch.testing.assert_close(y.unique(), expected)
        gradient = grad(lambda x, kw=kw: model.apply({}, {}, x, key=random.key(5), **kw)[0].sum())(x)
        assert gradient.isfinite().all()


def test_subclasses_keep_their_type_and_meaning() -> None:
    class Mine(nn.Dropout):
        pass

    class Other(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, self.p, self.training)

    seen = []
    net = nn.Sequential(Mine(0.5), nn.BatchNorm1d(3))
    net.register_forward_hook(
        lambda m, i, o: seen.append([isinstance(c, k) for c, k in zip(m, (Mine, nn.BatchNorm1d), strict=True)])
    )
    model = functional(net)
    model.apply(model.params, model.buffers, torch.ones(4, 3), key=random.key(0))
    assert seen == [[True, True]]
    other = functional(nn.Sequential(Other(0.5))).apply({}, {}, torch.ones(50), key=random.key(0))[0]
    assert other.unique().tolist() == [0.0, 2.0]


# --- transforms ------------------------------------------------------------------------------------------------------


def step(model: Functional, batch: tuple[Tensor, Tensor]) -> Callable[..., Any]:
    def loss(params: Any, buffers: Any, key: Tensor, rate: Tensor) -> tuple[Tensor, Any]:
        output, buffers = model.apply(params, buffers, batch[0], key=key, dropout=rate)
        return F.cross_entropy(output, batch[1]), buffers

    return grad_and_value(loss, has_aux=True)


def test_a_lane_is_the_solo_call(net: Net, batch: tuple[Tensor, Tensor]) -> None:
    model, n = functional(net), 5
    one = step(model, batch)
    params, keys, rates = stacked(model.params, n), random.split(random.key(0), n), torch.linspace(0, 1, n)
    for buffers, axis in ((stacked(model.buffers, n), 0), (model.buffers, None)):
        grads, (losses, new) = vmap(one, (0, axis, 0, 0))(params, buffers, keys, rates)
        for i in range(n):
            g, (loss, b) = one(lane(params, i), buffers if axis is None else lane(buffers, i), keys[i], rates[i])
            torch.testing.assert_close(losses[i], loss)
            assert_close(lane(grads, i), g)
            assert_close(lane(new, i), b)


@pytest.mark.parametrize("mapped", ["params", "buffers", "key", "rate", "inputs"])
def test_lanes_of_one_thing_alone(net: Net, batch: tuple[Tensor, Tensor], mapped: str) -> None:
    model, n = functional(net), 3
    given = {
        "params": stacked(model.params, n),
        "buffers": stacked(model.buffers, n),
        "key": random.split(random.key(0), n),
        "rate": torch.tensor([0.1, 0.5, 0.9]),
        "inputs": torch.randn(n, 16, 6),
    }
    alone = {name: (v[0] if isinstance(v, Tensor) else lane(v, 0)) for name, v in given.items()}
    axes = tuple(0 if name == mapped else None for name in given)
    call = lambda p, b, k, r, x: model.apply(p, b, x, key=k, dropout=r)  # noqa: E731
    output, new = vmap(call, axes)(*(given[name] if name == mapped else alone[name] for name in given))
    for i in range(n):
        at_i = given[mapped][i] if isinstance(given[mapped], Tensor) else lane(given[mapped], i)
        o, b = call(*(at_i if name == mapped else alone[name] for name in given))
        torch.testing.assert_close(output[i], o, rtol=1e-5, atol=1e-6)
        assert_close(lane(new, i), b)


@pytest.mark.slow
def test_compiled(net: Net, batch: tuple[Tensor, Tensor]) -> None:
    model, n = functional(net), 3
    many = vmap(step(model, batch))
    args = (
        stacked(model.params, n),
        stacked(model.buffers, n),
        random.split(random.key(0), n),
        torch.linspace(0, 1, n),
    )
    grads, (losses, new) = many(*args)
    unchanged = record(net)
    g, (loss, b) = torch.compile(many, fullgraph=True)(*args)
    torch.testing.assert_close(loss, losses)
    assert_close(g, grads)
    assert_close(b, new)
    unchanged()


@pytest.mark.slow
def test_a_compiled_scan_of_steps(batch: tuple[Tensor, Tensor]) -> None:
    from torch._higher_order_ops.scan import scan

    torch.manual_seed(0)
    model, n = functional(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))), 2
    loss_fn = supervised(model, lambda output, targets: F.cross_entropy(output, targets))
    names = list(model.params), list(model.buffers)

    def update(params: Any, carry: SupervisedCarry) -> tuple[Any, SupervisedCarry, Tensor]:
        def loss(params: Any) -> tuple[Tensor, SupervisedCarry]:
            value, after, _ = loss_fn(params, batch, carry)
            return value, after

        grads, (value, after) = grad_and_value(loss, has_aux=True)(params)
        return {k: params[k] - 0.1 * grads[k] for k in params}, after, value

    def flat(params: Any, carry: SupervisedCarry) -> list[Tensor]:
        return [*params.values(), *carry.buffers.values(), carry.key]

    def body(state: list[Tensor], _: Tensor) -> tuple[list[Tensor], Tensor]:
        params = dict(zip(names[0], state, strict=False))
        buffers = dict(zip(names[1], state[len(params) : -1], strict=True))
        params, carry, value = vmap(update)(params, SupervisedCarry(buffers, state[-1]))
        return [t.clone() for t in flat(params, carry)], value

    start = flat(stacked(model.params, n), SupervisedCarry(stacked(model.buffers, n), random.split(random.key(0), n)))
    state, losses = torch.compile(lambda s: scan(body, s, torch.arange(3)), fullgraph=True)(start)
    expected, values = start, []
    for i in range(3):
        expected, value = body(expected, torch.tensor(i))
        values.append(value)
    torch.testing.assert_close(losses, torch.stack(values), rtol=1e-5, atol=1e-6)
    for a, b in zip(state, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # three steps of accumulated rounding


def test_gradients_flow_to_the_rate(net: Net, batch: tuple[Tensor, Tensor]) -> None:
    model = functional(net)
    slope = grad(lambda r: step(model, batch)(model.params, model.buffers, random.key(0), r)[1][0])(torch.tensor(0.3))
    assert slope.isfinite()
    assert slope != 0


# --- errors ----------------------------------------------------------------------------------------------------------


def test_errors(net: Net, batch: tuple[Tensor, Tensor]) -> None:
    model, x, key = functional(net), batch[0], random.key(0)
    with pytest.raises(ValueError, match=r"'d' is dropout in training mode and has no key.*pass key="):
        model.apply(model.params, model.buffers, x)
    with pytest.raises(ValueError, match=r"params lack \['f.bias'\] and have unknown names \['nope'\]"):
        model.apply({("nope" if k == "f.bias" else k): v for k, v in model.params.items()}, model.buffers, x)
    with pytest.raises(ValueError, match=r"buffers lack \['bn.running_mean', "):
        model.apply(model.params, {}, x)
    with pytest.raises(ValueError, match="dropout: where='drop' matches no parameter; have: d, e"):
        model.apply(model.params, model.buffers, x, key=key, dropout={"drop": 0.1})
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\], got 1.5"):
        model.apply(model.params, model.buffers, x, key=key, dropout=1.5)
    with pytest.raises(ValueError, match="'0' is lazy"):
        functional(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(ValueError, match="'1' is SyncBatchNorm"):
        functional(nn.Sequential(nn.ReLU(), nn.SyncBatchNorm(3)))


@pytest.mark.parametrize("module", [nn.RReLU(), nn.FractionalMaxPool2d(2, 2)], ids=lambda m: type(m).__name__)
def test_draws_that_no_key_controls_are_named(module: nn.Module) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            return x

    model = functional(Holder())
    with pytest.raises(ValueError, match="'inner' would draw random numbers that no key controls"):
        model.apply(model.params, model.buffers, torch.ones(3), key=random.key(0))
    functional(Holder(), randomness="global").apply({}, {}, torch.ones(3), key=random.key(0))
    if isinstance(module, nn.RReLU):
        model.apply(model.params, model.buffers, torch.ones(3), train=False)


# --- supervised ------------------------------------------------------------------------------------------------------


def test_supervised(net: Net, batch: tuple[Tensor, Tensor]) -> None:
    model = functional(net)
    loss_fn = supervised(model, cross_entropy)
    carry = supervised_carry(model, random.key(7))
    loss, after, metrics = loss_fn(model.params, batch, carry)
    output, buffers = model.apply(model.params, model.buffers, batch[0], key=random.split(carry.key)[1])
    torch.testing.assert_close(loss.mean(), F.cross_entropy(output, batch[1]))
    assert_close(after.buffers, buffers)
    torch.testing.assert_close(metrics["accuracy"], (output.argmax(1) == batch[1]).float().mean())
    again, third, _ = loss_fn(model.params, batch, after)
    assert len({tuple(c.key.tolist()) for c in (carry, after, third)}) == 3
    assert not torch.equal(loss.values, again.values)  # other masks
    eval_loss, _, _ = supervised(model, cross_entropy, train=False)(model.params, batch, carry)
    expected = model.apply(model.params, model.buffers, batch[0], train=False)[0]
    torch.testing.assert_close(eval_loss.mean(), F.cross_entropy(expected, batch[1]))


def test_supervised_names_what_does_not_fit(net: Net, batch: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(TypeError, match=r"model must be a Functional, as of functional\(model\), got Net"):
        supervised(net, cross_entropy)  # type: ignore[arg-type]  # the mistake
    model = functional(net)
    loss_fn = supervised(model, cross_entropy)
    with pytest.raises(TypeError, match=r"carry must be a SupervisedCarry, got tuple; start with supervised_carry"):
        loss_fn(model.params, batch, ())
    carry = supervised_carry(model, random.key(7))
    with pytest.raises(TypeError, match=r"must be a pair \(inputs, targets\), got a dict with 'x', 'y'; see its"):
        loss_fn(model.params, {"x": batch[0], "y": batch[1]}, carry)
    with pytest.raises(TypeError, match=r"must be a pair \(inputs, targets\), got Tensor"):
        loss_fn(model.params, batch[0], carry)


def test_accuracy_leaves_out_what_is_ignored() -> None:
    model = functional(nn.Identity())
    loss_fn = supervised(model, lambda output, targets: output.sum())
    carry = supervised_carry(model, random.key(0))
    scores = torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    accuracy = lambda t: loss_fn({}, (scores, t), carry)[2]["accuracy"].item()  # noqa: E731
    assert accuracy(torch.tensor([0, 0, -100])) == 0.5
    assert accuracy(torch.tensor([-100, -100, -100])) == 0.0
    tokens = scores.T[None].contiguous()  # [B, C, T]
    assert loss_fn({}, (tokens, torch.tensor([[0, 1, 0]])), carry)[2]["accuracy"].item() == pytest.approx(2 / 3)
    assert loss_fn({}, (scores, torch.randn(3, 2)), carry)[2] == {}  # a regression


# --- no_decay --------------------------------------------------------------------------------------------------------


def test_no_decay_goes_by_kind() -> None:
    class Model(nn.Module):  # C39, case b
        def __init__(self) -> None:
            super().__init__()
            self.layernorm = nn.LayerNorm(4)
            self.norm1 = nn.LayerNorm((2, 4))  # a gain with two axes
            self.bias_proj = nn.Linear(4, 4)
            self.fc = nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)  # bias_k has three axes
            self.bn = nn.BatchNorm1d(4)
            self.tied = nn.Linear(4, 4)
            self.tied.weight = self.fc.weight

    decays = [name for name, left_out in no_decay(Model()).items() if not left_out]
    assert decays == [
        "bias_proj.weight", "fc.weight", "attention.in_proj_weight", "attention.out_proj.weight",
    ]  # fmt: skip
    assert list(no_decay(Model())) == list(functional(Model()).params)


@pytest.mark.parametrize("module", [nn.Embedding(5, 3, max_norm=0.5), nn.EmbeddingBag(5, 3, max_norm=0.5)])
def test_an_embedding_with_max_norm_leaves_its_parameters_alone(module: nn.Module) -> None:
    model, x = functional(module), torch.tensor([[1, 2], [2, 4]])
    before = model.params["weight"].clone()
    found = grad(lambda p: model.apply(p, {}, x)[0].square().sum())(model.params)["weight"]
    output = model.apply(model.params, {}, x)[0]
    assert_same(model.params["weight"], before)
    expected = module(x)  # which writes to the module's own
    expected.square().sum().backward()
    assert_same(output, expected.detach())
    assert_same(found, module.weight.grad)


def test_a_key_that_is_a_number_raises() -> None:
    model = functional(nn.Dropout(0.5))
    with pytest.raises(TypeError, match=r"apply of Dropout: key must come from functricks.random.key\(seed\), got 3"):
        model.apply({}, {}, torch.ones(2), key=3)


def test_pooling_names_what_it_cannot_pool() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True))
    model = functional(module)
    loss_fn = supervised(model, lambda output, target: (output - target).square().mean())
    pooled = accumulate(gradient(loss_fn, has_carry=True, has_metrics=True), 2, batch_norm="pooled")
    x = torch.randn(4, 2, 3)
    with pytest.raises(ValueError, match="pools BatchNorm only, and '1' has running statistics too"):
        pooled(model.params, (x, x), supervised_carry(model, random.key(0)))
