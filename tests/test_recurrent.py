"""LSTM, GRU and RNN of functional modules against torch's own kernels: step by step, compiled, with keyed dropout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_nonzero, assert_same
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.utils.rnn import pack_sequence

from functricks import random
from functricks.modules import functional
from functricks.modules._recurrent import KeyedRNN

# torch says so once, of any projection on the CPU
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
FORMS = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"batch_first": True, "bias": False},
    {"num_layers": 3, "bidirectional": True, "batch_first": True},
]
CASES: list[tuple[str, dict[str, Any]]] = [*itertools.product(KINDS, FORMS)]
CASES += [("LSTM", {"proj_size": 2, **form}) for form in FORMS]


def make(kind: str, **form: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return KINDS[kind](3, 4, **form)


def leaves(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [leaf for part in output for leaf in leaves(part)]


def size(output: Any) -> Tensor:
    return sum((i + 1.0) * leaf.square().sum() for i, leaf in enumerate(leaves(output)))  # type: ignore[return-value]


def first_state(rnn: nn.RNNBase, *batch: int) -> Any:
    layers = rnn.num_layers * (2 if rnn.bidirectional else 1)
    h = torch.randn(layers, *batch, rnn.proj_size or rnn.hidden_size)
    return (h, torch.randn(layers, *batch, rnn.hidden_size)) if rnn.mode == "LSTM" else h


@pytest.mark.parametrize(("kind", "form"), CASES, ids=str)
def test_lanes_equal_the_kernel(kind: str, form: dict[str, Any]) -> None:
    rnn = make(kind, **form)
    model = functional(rnn)
    x, h = torch.randn(2, 5, 6, 3), first_state(rnn, 6 if not rnn.batch_first else 5)
    params = {name: torch.stack([p, 1.5 * p]) for name, p in model.params.items()}
    for start in ((), (h,)):
        value = lambda p, x, start=start: size(model.apply(p, {}, x, *start)[0])  # noqa: E731
        outputs = vmap(lambda p, x, start=start: model.apply(p, {}, x, *start)[0])(params, x)
        slopes = vmap(grad(value))(params, x)
        for i in range(2):
            own = {name: p[i].clone().requires_grad_() for name, p in params.items()}
            expected = torch.func.functional_call(rnn, own, (x[i], *start))
            assert_close([leaf[i] for leaf in leaves(outputs)], [leaf.detach() for leaf in leaves(expected)])
            wanted = torch.autograd.grad(size(expected), list(own.values()))
            assert_nonzero(list(wanted))
            # the gradients sum over the steps and the batch in another order
            assert_close([s[i] for s in slopes.values()], list(wanted), eps=64)


@pytest.mark.parametrize("kind", KINDS)
def test_without_lanes_it_is_the_kernel(kind: str) -> None:
    rnn = make(kind, num_layers=2, dropout=0.5)
    model, x = functional(rnn), torch.randn(5, 2, 3)
    key = random.key(0)
    with torch.no_grad():
        assert_same(leaves(model.apply(model.params, {}, x, train=False)[0]), leaves(rnn.eval()(x)))
        rnn.train().dropout = 0.0
        assert_same(leaves(model.apply(model.params, {}, x, dropout=0.0)[0]), leaves(rnn(x)))
    packed = pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    assert_same(model.apply(model.params, {}, packed, train=False)[0][0].data, rnn(packed)[0].data.detach())
    with pytest.raises(ValueError, match="'' got a PackedSequence, which it takes only in eager mode"):
        model.apply(model.params, {}, packed, key=key)


@pytest.mark.parametrize("kind", KINDS)
def test_unbatched(kind: str) -> None:
    rnn = make(kind, num_layers=2, bidirectional=True, batch_first=True)
    model, x, h = functional(rnn), torch.randn(2, 5, 3), first_state(make(kind, num_layers=2, bidirectional=True))
    outputs = vmap(lambda x: model.apply(model.params, {}, x, h)[0])(x)
    for i in range(2):
        expected = model.apply(model.params, {}, x[i], h)[0]
        assert_close([leaf[i] for leaf in leaves(outputs)], leaves(expected))
        assert_same(leaves(expected), [leaf.detach() for leaf in leaves(rnn(x[i], h))])


def dropped(rnn: nn.RNNBase, x: Tensor, key: Tensor, rate: float) -> Any:
    """Run the layers one by one by torch's kernels, with functricks' mask between them."""
    own = random.fold_in(key, 0)  # zlib.crc32(b"") == 0: the module is the root
    directions = 2 if rnn.bidirectional else 1
    kind, ends = type(rnn), []
    for layer in range(rnn.num_layers):
        own_form = {"proj_size": rnn.proj_size} if rnn.proj_size else {}
        one = kind(x.shape[-1], rnn.hidden_size, bidirectional=rnn.bidirectional, **own_form)
        names = [name for i in range(directions) for name in rnn._all_weights[layer * directions + i]]
        one.load_state_dict({name.replace(f"_l{layer}", "_l0"): getattr(rnn, name) for name in names})
        x, end = one(x)
        ends.append(end if isinstance(end, tuple) else (end,))
        if layer < rnn.num_layers - 1:
            x = random.dropout(random.fold_in(own, layer), x, rate)
    return x, tuple(torch.cat(states) for states in zip(*ends, strict=True))


@pytest.mark.parametrize(("kind", "proj"), [("LSTM", 0), ("LSTM", 2), ("GRU", 0), ("tanh", 0)])
def test_dropout_between_the_layers(kind: str, proj: int) -> None:
    rnn = make(kind, num_layers=3, bidirectional=True, dropout=0.5, **({"proj_size": proj} if proj else {}))
    model, x, key = functional(rnn), torch.randn(5, 2, 3), random.key(3)
    call = lambda key, **kw: model.apply(model.params, {}, x, key=key, **kw)[0]  # noqa: E731
    assert_close(leaves(call(key)), [leaf.detach() for leaf in leaves(dropped(rnn, x, key, 0.5))])
    assert_same(leaves(call(key)), leaves(call(key, dropout={"*": torch.tensor(0.5)})))
    assert_close(leaves(call(key, dropout=0.25)), [leaf.detach() for leaf in leaves(dropped(rnn, x, key, 0.25))])
    keys = random.split(key, 3)
    lanes = vmap(call)(keys)
    for i in range(3):
        assert_close([leaf[i] for leaf in leaves(lanes)], leaves(call(keys[i])))
    with pytest.raises(ValueError, match="'' is dropout in training mode and has no key"):
        call(None)


def test_one_layer_has_nothing_to_drop() -> None:
    with pytest.warns(UserWarning, match="dropout option adds dropout after all but last"):
        rnn = nn.LSTM(3, 4, dropout=0.5)
    model, x = functional(rnn), torch.randn(5, 2, 3)
    assert_same(model.apply(model.params, {}, x)[0][0], rnn(x)[0].detach())
    assert_same(model.apply(model.params, {}, x, dropout=0.5)[0][0], rnn(x)[0].detach())


def test_two_calls_draw_two_masks_and_ties_hold() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 3, 2, dropout=0.5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.rnn(x)[0], self.rnn(x)[0]])

    model = functional(Twice())
    one, two = model.apply(model.params, {}, torch.randn(4, 2, 3), key=random.key(0))[0]
    assert not torch.equal(one, two)


@pytest.mark.parametrize(
    ("shape", "state", "match"),
    [((5, 2, 4), None, r"'' takes \[time, 3\] or three"), ((5, 2, 3), (1, 3, 4), r"first state of shape \[1, 2, 4\]")],
)
def test_errors(shape: tuple[int, ...], state: Any, match: str) -> None:
    model = functional(make("GRU"))
    start = () if state is None else (torch.zeros(state),)
    with pytest.raises(ValueError, match=match):
        vmap(lambda x: model.apply(model.params, {}, x, *start)[0])(torch.zeros(2, *shape))


def test_subclasses_keep_their_own_forward() -> None:
    class Mine(nn.LSTM):
        def forward(self, x: Tensor, hx: Any = None) -> Any:
            return super().forward(2 * x, hx)

    torch.manual_seed(0)
    mine = Mine(3, 4, 2, dropout=0.5)
    model, x = functional(mine), torch.randn(5, 2, 3)
    assert_same(model.apply(model.params, {}, x, train=False)[0][0], mine.eval()(x)[0].detach())
    with pytest.raises(ValueError, match="'' calls lstm, which draws random numbers that no key controls"):
        model.apply(model.params, {}, x, key=random.key(0))


@pytest.mark.slow
def test_it_traces() -> None:
    """Differentiated (unrolled) and as it is (a scan), with lanes; the trace is at question, not inductor."""
    rnn = make("LSTM", num_layers=2, dropout=0.3)
    model, x, keys = functional(rnn), torch.randn(2, 4, 2, 3), random.split(random.key(0), 2)
    value = lambda p, x, key: size(model.apply(p, {}, x, key=key)[0])  # noqa: E731
    for function, eps in ((vmap(value, (None, 0, 0)), 8), (vmap(grad(value), (None, 0, 0)), 64)):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        assert_close(compiled(model.params, x, keys), function(model.params, x, keys), eps=eps)


@pytest.mark.slow
def test_compiled() -> None:
    model, x = functional(make("GRU")), torch.randn(4, 2, 3)
    call = lambda x: model.apply(model.params, {}, x)[0]  # noqa: E731
    assert_close(torch.compile(call, fullgraph=True)(x), call(x))


def test_a_scan_keeps_the_program_short() -> None:
    model, sizes = functional(make("GRU")), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.append(sum(len(list(m.graph.nodes)) for m in graph.modules() if isinstance(m, torch.fx.GraphModule)))
        return graph

    for steps in (5, 50):
        torch.compiler.reset()
        x = torch.randn(steps, 2, 3)
        call = torch.compile(lambda x: model.apply(model.params, {}, x)[0], fullgraph=True, backend=backend)
        assert_close(leaves(call(x)), leaves(model.apply(model.params, {}, x)[0]))
    assert sizes[0] == sizes[1]


def test_it_stays_its_kind() -> None:
    model = functional(nn.Sequential(make("LSTM")))
    assert [*model.params] == [f"0.{n}" for n in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")]
    assert issubclass(KeyedRNN, nn.RNNBase)
