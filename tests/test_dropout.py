"""Dropout from keys wherever a model drops: functions that ``forward`` calls, attention, HuggingFace models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same
from torch import Tensor, nn
from torch.func import grad, vmap

from functricks import random
from functricks.modules import Functional, functional
from functricks.modules._functions import draws_by_function


class Calls(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def caller(model: Functional) -> Callable[..., Any]:
    return lambda x, key=None, **kw: model.apply(model.params, model.buffers, x, key=key, **kw)[0]


def assert_keyed(call: Callable[..., Any], x: Any, lanes: int = 3) -> None:
    """From the key and nothing else, other keys give other masks, and a lane is the call alone; all leave torch's."""
    state, keys = torch.get_rng_state(), random.split(random.key(1), lanes)
    solo = [call(x, key) for key in keys]
    assert_same(call(x, keys[0]), solo[0])
    assert not torch.equal(solo[0], solo[1])
    together = vmap(lambda key: call(x, key))(keys)
    assert_close([together[i] for i in range(lanes)], solo)
    assert torch.equal(torch.get_rng_state(), state)


# --- functions that forward calls ------------------------------------------------------------------------------------


FUNCTIONS: dict[str, tuple[Callable[..., Any], nn.Module, tuple[int, ...]]] = {
    "F.dropout": (lambda m, x: F.dropout(x, 0.4, m.training), nn.Dropout(0.4), (50,)),
    "F.dropout, the defaults": (lambda m, x: nn.functional.dropout(x), nn.Dropout(0.5), (50,)),
    "F.dropout, by name": (lambda m, x: F.dropout(input=x, p=0.4, training=m.training), nn.Dropout(0.4), (50,)),
    "torch.dropout": (lambda m, x: torch.dropout(x, 0.4, train=m.training), nn.Dropout(0.4), (50,)),
    "F.dropout1d": (lambda m, x: F.dropout1d(x, 0.4), nn.Dropout1d(0.4), (4, 8, 3)),
    "F.dropout2d": (lambda m, x: F.dropout2d(x, 0.4), nn.Dropout2d(0.4), (4, 8, 3, 2)),
    "F.dropout3d": (lambda m, x: F.dropout3d(x, 0.4), nn.Dropout3d(0.4), (4, 8, 3, 2, 2)),
    "F.alpha_dropout": (lambda m, x: F.alpha_dropout(x, 0.4, m.training), nn.AlphaDropout(0.4), (50,)),
    "F.feature_alpha_dropout": (
        lambda m, x: F.feature_alpha_dropout(x, 0.4, m.training),
        nn.FeatureAlphaDropout(0.4),
        (4, 8, 3),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_draws_what_the_module_would(name: str) -> None:
    function, module, shape = FUNCTIONS[name]
    x = torch.rand(shape) + 1
    call, as_module = caller(functional(Calls(function))), caller(functional(module))
    assert_same(call(x, random.key(3)), as_module(x, random.key(3)))  # both are the root: the same path
    assert_same(call(x, random.key(3), dropout=0.2), as_module(x, random.key(3), dropout=0.2))
    assert_close(call(x, random.key(3), dropout=torch.tensor(0.2)), as_module(x, random.key(3), dropout=0.2))
    assert_same(call(x, dropout=0.0), x)
    assert_keyed(call, x)
    with pytest.raises(ValueError, match="'' is dropout in training mode and has no key to draw from; pass key="):
        call(x)
    if "training" in name or name in ("F.dropout", "torch.dropout", "F.alpha_dropout"):
        assert_same(call(x, train=False), x)


def test_the_path_is_that_of_the_module_that_calls() -> None:
    drop = lambda m, x: F.dropout(x, 0.5, m.training)  # noqa: E731

    class Outer(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({name: Calls(drop) for name in names})

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            first = F.dropout(x, 0.5, self.training)
            values = {name: torch.stack([m(x), m(x)]) for name, m in self.parts.items()}
            return {**values, "": torch.stack([first, F.dropout(x, 0.5, self.training)])}

    x, key = torch.ones(200), random.key(0)
    one, more = (caller(functional(Outer(*names)))(x, key) for names in (("a",), ("b", "a")))
    assert_same(one["a"], more["a"])
    assert_same(one[""], more[""])
    masks = [mask for draw in more.values() for mask in draw != 0]
    for i in range(len(masks)):
        for j in range(i):
            assert 0.3 < (masks[i] == masks[j]).float().mean() < 0.7
    call = caller(functional(Outer("a", "b")))
    some = call(x, key, dropout={"parts.*": 0.0})
    assert_same(some["a"], x.expand(2, -1))
    assert_same(some[""], more[""])
    tenth = call(x, key, dropout={"*": 0.0, "parts.b": torch.tensor(0.1)})["b"]
    assert 0.8 < (tenth != 0).float().mean() < 0.98
    with pytest.raises(ValueError, match="dropout: where='nope' matches no parameter"):
        call(x, key, dropout={"nope": 0.1})


def test_a_functional_inside_of_another() -> None:
    inner = functional(Calls(lambda m, x: F.dropout(x, 0.5)))
    outer = functional(Calls(lambda m, x: inner.apply({}, {}, F.dropout(x, 0.5), key=random.key(9))[0]))
    x = torch.ones(100)
    own = lambda key, x: inner.apply({}, {}, x, key=key)[0]  # noqa: E731
    assert_same(caller(outer)(x, random.key(0)), own(random.key(9), own(random.key(0), x)))


def test_an_exception_leaves_the_place_as_it_was() -> None:
    def broken(m: nn.Module, x: Tensor) -> Tensor:
        if x.sum() == 0:
            raise RuntimeError("in the middle")
        return F.dropout(x, 0.5)

    call = caller(functional(nn.Sequential(Calls(broken), Calls(broken))))
    before = call(torch.ones(50), random.key(0))
    with pytest.raises(RuntimeError, match="in the middle"):
        call(torch.zeros(50), random.key(0))
    assert_same(call(torch.ones(50), random.key(0)), before)


# --- scaled_dot_product_attention ------------------------------------------------------------------------------------


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, key: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return random.dropout(random.fold_in(key, 0), weights, rate) @ v


@pytest.mark.parametrize("form", ["plain", "causal", "bool", "float", "grouped", "scale"])
def test_attention_function(form: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5, 6).unbind()
    k, v = (k[:, :2], v[:, :2]) if form == "grouped" else (k, v)
    allowed = torch.rand(5, 5) > 0.4
    allowed[2] = False  # a row that may look at nothing gives zeros in torch
    kw: dict[str, Any] = {
        "plain": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": allowed},
        "float": {"attn_mask": torch.randn(5, 5)},
        "grouped": {"enable_gqa": True},
        "scale": {"scale": 0.3},
    }[form]
    attend = lambda m, rate: F.scaled_dot_product_attention(q, k, v, dropout_p=rate, **kw)  # noqa: E731
    model = functional(Calls(lambda m, x: attend(m, 0.4) + 0 * x))
    call, x = caller(model), torch.zeros(())
    expected = F.scaled_dot_product_attention(q, k, v, **kw)
    assert_close(call(x, random.key(0), dropout=torch.tensor(0.0)), expected)
    assert_same(call(x, dropout=0.0), expected)
    assert_keyed(call, x)
    mean = vmap(lambda key: call(x, key))(random.split(random.key(5), 4000)).mean(0)
    assert (mean - expected).abs().max() < 0.15  # of 4000 draws: five standard errors
    if form == "plain":
        assert_close(call(x, random.key(0)), attention_by_hand(q, k, v, None, 0.4, random.key(0)))


# --- nn.MultiheadAttention -------------------------------------------------------------------------------------------


MHA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "self": ({}, {}),
    "no weights": ({}, {"need_weights": False}),
    "per head": ({"batch_first": True}, {"average_attn_weights": False}),
    "padding": ({"batch_first": True}, {"key_padding_mask": torch.tensor([[False] * 3 + [True] * 2] * 2)}),
    "causal": (
        {"batch_first": True},
        {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True, "need_weights": False},
    ),
    "both masks": (
        {"batch_first": True},
        {
            "key_padding_mask": torch.tensor([[False] * 3 + [True] * 2] * 2),
            "attn_mask": torch.triu(torch.ones(5, 5, dtype=torch.bool), 1),
        },
    ),
    "a mask per head": ({"batch_first": True}, {"attn_mask": torch.linspace(-1, 1, 100).reshape(4, 5, 5)}),
    "biases and a zero": (
        {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
        {"attn_mask": torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)},
    ),
    "no bias": ({"bias": False}, {}),
    "other widths": ({"kdim": 3, "vdim": 2}, {}),
    "unbatched": ({}, {}),
    "unbatched padding": ({"batch_first": True}, {"key_padding_mask": torch.tensor([False] * 3 + [True] * 2)}),
}


@pytest.mark.parametrize("name", MHA)
def test_multihead_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    form, kw = MHA[name]
    attention = nn.MultiheadAttention(4, 2, dropout=0.4, **form)
    shape = (5,) if "unbatched" in name else (2, 5)
    q, k, v = torch.randn(*shape, 4), torch.randn(*shape, form.get("kdim", 4)), torch.randn(*shape, form.get("vdim", 4))
    model, key = functional(attention), random.key(3)

    def both(params: Any, key: Tensor | None, **given: Any) -> Any:
        return model.apply(params, {}, q, k, v, key=key, **kw, **given)[0]

    for off in (both(model.params, None, dropout=0.0), both(model.params, None, train=False)):
        attention.eval()
        assert_close([t for t in off if t is not None], [t for t in attention(q, k, v, **kw) if t is not None])
    # torch's own forward, with the same mask in the place of its own
    attention.train()
    masked = lambda w, p=0.5, training=True: random.dropout(random.fold_in(key, 0), w.reshape(-1, 2, *w.shape[1:]), p)  # noqa: E731
    monkeypatch.setattr(F, "dropout", lambda w, p=0.5, training=True: masked(w, p).reshape(w.shape))
    torch_kw = {**kw, "need_weights": True}
    torch_kw["is_causal"] = False
    expected = attention(q, k, v, **torch_kw)
    monkeypatch.undo()
    got = both(model.params, key)
    assert_close(got[0], expected[0].detach())
    if got[1] is None:
        assert kw["need_weights"] is False
    else:
        assert_close(got[1], expected[1].detach())
    assert_keyed(lambda x, key: both(model.params, key)[0], None)
    slopes = grad(lambda p: both(p, key)[0].square().sum())(model.params)
    monkeypatch.setattr(F, "dropout", lambda w, p=0.5, training=True: masked(w, p).reshape(w.shape))
    loss = attention(q, k, v, **torch_kw)[0].square().sum()
    wanted = dict(zip(slopes, torch.autograd.grad(loss, list(attention.parameters())), strict=True))
    assert_close(slopes, wanted, eps=32, at_least=1.0)  # k's bias has the gradient 0 up to rounding


def test_attention_without_a_mask_cannot_be_causal() -> None:
    model, x = functional(nn.MultiheadAttention(4, 2, 0.1)), torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match="is_causal=True needs attn_mask"):
        model.apply(model.params, {}, x, x, x, is_causal=True, key=random.key(0))


@pytest.mark.parametrize("kind", ["encoder", "decoder", "whole"])
def test_transformers_of_torch(kind: str) -> None:
    torch.manual_seed(0)
    form: dict[str, Any] = {"dim_feedforward": 8, "batch_first": True, "dropout": 0.2}
    module: nn.Module = {
        "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, **form), 2),
        "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, **form), 2),
        "whole": lambda: nn.Transformer(4, 2, 1, 1, **form),
    }[kind]()
    model = functional(module)
    args = [torch.randn(2, 5, 4) for _ in range(1 if kind == "encoder" else 2)]
    call = lambda _, key=None, **kw: model.apply(model.params, {}, *args, key=key, **kw)[0]  # noqa: E731
    assert not draws_by_function(module)  # no mode: it works in a scan
    assert_keyed(call, None)
    assert_close(call(None, dropout=0.0), module.eval()(*args).detach())
    attentions = call(None, random.key(0), dropout={"*": 0.0, "*attn": 0.3})
    assert not torch.equal(attentions, call(None, dropout=0.0))


# --- HuggingFace -----------------------------------------------------------------------------------------------------


def hugging_face(name: str, attention: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=8, attn_implementation=attention,
        )  # fmt: skip
        return transformers.BertModel(config).train()
    own = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, attn_implementation=attention,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2Model(own).train()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_hugging_face(name: str, attention: str) -> None:
    module = hugging_face(name, attention)
    model, ids = functional(module), torch.arange(12).reshape(2, 6)

    def call(ids: Tensor, key: Tensor | None = None, **kw: Any) -> Tensor:
        return model.apply(model.params, model.buffers, ids, key=key, return_dict=False, **kw)[0][0]

    assert_keyed(call, ids)
    own = "encoder.layer.*.attention.self" if name == "bert" else "h.*.attn"
    only = {"*": 0.0, own: 0.5, f"{own}.*dropout": 0.5}
    quiet = call(ids, dropout=0.0)
    assert not torch.equal(call(ids, random.key(0), dropout=only), quiet)
    with torch.no_grad():
        assert_same(quiet, module.eval()(ids, return_dict=False)[0])


# --- what cannot be keyed --------------------------------------------------------------------------------------------


UNKEYED: dict[str, Callable[..., Any]] = {
    "rand": lambda m, x: x + torch.rand(3),
    "randn_like": lambda m, x: x + torch.randn_like(x),
    "bernoulli": lambda m, x: torch.bernoulli(x),
    "bernoulli_": lambda m, x: x.clone().bernoulli_(0.5),
    "normal_": lambda m, x: torch.empty(3).normal_(),
    "gumbel_softmax": lambda m, x: F.gumbel_softmax(x),
    "rrelu": lambda m, x: F.rrelu(x, training=m.training),
    "normal": lambda m, x: torch.distributions.Normal(x, 1.0).rsample(),
    "native_dropout": lambda m, x: torch.native_dropout(x, 0.5, True)[0],
    "multi_head_attention_forward": lambda m, x: F.multi_head_attention_forward(
        x[None], x[None], x[None], 3, 1, torch.ones(9, 3), None, None, None, False, 0.1, torch.ones(3, 3), None
    )[0],
}


@pytest.mark.parametrize("name", UNKEYED)
def test_draws_that_no_key_controls(name: str) -> None:
    module, x = nn.Sequential(nn.Identity(), Calls(UNKEYED[name])), torch.full((3,), 0.5)
    called = "normal_" if name == "normal" else name
    with pytest.raises(ValueError, match=rf"'1' calls {called}, which draws random numbers .*randomness=\"global\""):
        caller(functional(module))(x, random.key(0))
    torch.manual_seed(0)
    got = caller(functional(module, randomness="global"))(x, random.key(0))
    torch.manual_seed(0)
    assert_same(got, module(x))


def test_what_does_not_draw_passes() -> None:
    module = Calls(lambda m, x: F.rrelu(x, training=False) + F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False))
    x = torch.randn(3)
    assert_same(caller(functional(module))(x), module(x))


def test_randomness_is_checked() -> None:
    with pytest.raises(ValueError, match="randomness must be 'error' or 'global', got 'local'"):
        functional(nn.Identity(), randomness="local")  # type: ignore[arg-type]


# --- the mode is there only where it is needed -----------------------------------------------------------------------


def helper(x: Tensor) -> Tensor:
    return nn.functional.dropout(x)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.weight = nn.Dropout(0.5), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.relu(x * self.weight))


class Hidden(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.other(super().forward(x))

    def other(self, x: Tensor) -> Tensor:
        return torch.stack([helper(y) for y in x])


class Imports(Plain):
    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.functional import dropout as drop

        return drop(x)


class Holds(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.drop = F.dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x)


def test_the_mode_is_entered_where_the_code_names_a_draw() -> None:
    assert not draws_by_function(Plain())
    assert not draws_by_function(nn.Sequential(Plain(), nn.LSTM(3, 3, 2, dropout=0.1), nn.Linear(3, 3)))
    for module in (Hidden(), Imports(), Holds(), nn.Sequential(Plain(), Hidden())):
        assert draws_by_function(module), type(module)
        assert_keyed(caller(functional(module)), torch.ones(30, 3))


def test_a_draw_that_no_code_names_raises() -> None:
    computed = Calls(lambda m, x: getattr(nn.functional, "drop" + "out")(x, 0.5, m.training))
    module, x = nn.Sequential(nn.Linear(3, 3), computed), torch.ones(2, 3)
    assert not draws_by_function(module)
    model = functional(module)
    for _ in range(2):
        with pytest.raises(ValueError, match="dropout draws random numbers, and the code of the model's forward does"):
            model.apply(model.params, {}, x, key=random.key(0))
    assert_same(model.apply(model.params, {}, x, train=False)[0], module.eval()(x).detach())
    loose = functional(module.train(), randomness="global")
    torch.manual_seed(0)
    got = loose.apply(loose.params, {}, x, key=random.key(0))[0]
    torch.manual_seed(0)
    assert_same(got, module(x).detach())


# --- compiled --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, 0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.attention(x, x, x, need_weights=False)[0], 0.1, self.training)


@pytest.mark.slow
def test_it_traces() -> None:
    torch.manual_seed(0)
    model = functional(nn.Sequential(Block()))
    value = lambda p, x, key: model.apply(p, {}, x, key=key)[0].square().sum()  # noqa: E731
    step = vmap(grad(value), (None, None, 0))
    args = (model.params, torch.randn(2, 3, 4), random.split(random.key(0), 2))
    compiled = torch.compile(step, fullgraph=True, backend="eager")  # the trace is at question, not inductor
    assert_close(compiled(*args), step(*args), eps=32, at_least=1.0)  # sums in another order
