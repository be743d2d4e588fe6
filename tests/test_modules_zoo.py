"""The usual architectures through ``functional``: output, gradient and buffers are those of the module itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_half_close, assert_nonzero, assert_same, stack
from test_modules import record
from torch import Tensor, nn
from torch.func import grad, vmap

from functricks import apply_updates, gradient, random, sgd
from functricks.modules import functional


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, ...]]
    output: Callable[[Any], Tensor] = lambda output: output
    lanes_eps: float = 64  # a batched kernel sums in another order, layer by layer


def first(output: Any) -> Tensor:
    return output[0]


def cnn(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))


class Text(nn.Module):
    def __init__(self, kind: Any, **form: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6, padding_idx=0)
        self.rnn = kind(6, 5, num_layers=2, batch_first=True, bidirectional=True, **form)
        self.head = nn.Linear(2 * form.get("proj_size", 5), 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(ids))[0][:, -1])


class TiedDecoder(nn.Module):
    """A transformer with one embedding for source, target and output."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(9, 8)
        self.target = self.source
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.output = nn.Linear(8, 9, bias=False)
        self.output.weight = self.source.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.output(self.body(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True))


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x)


def hugging_face(name: str) -> nn.Module:
    import transformers as hf

    if name == "bert":
        small = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = hf.BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=3, **small, **off)
        return hf.BertForSequenceClassification(config)
    if name == "gpt2":
        small = {"n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=20, **small, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
        )
    config = hf.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3)
    return hf.ResNetForImageClassification(config)


def sequences() -> tuple[Tensor, ...]:
    return (torch.randn(2, 5, 8),)


def ids() -> tuple[Tensor, ...]:
    return (torch.randint(1, 9, (2, 6)),)


def images() -> tuple[Tensor, ...]:
    return (torch.randn(3, 2, 8, 8),)


ENCODER = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
ZOO: dict[str, Case] = {
    "mlp": Case(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), lambda: (torch.randn(5, 4),), lanes_eps=16
    ),
    "cnn, batch norm": Case(lambda: cnn(nn.BatchNorm2d(4)), images, lanes_eps=256),  # the variance is a difference
    "cnn, group norm": Case(lambda: cnn(nn.GroupNorm(2, 4)), images),
    "embedding, lstm": Case(lambda: Text(nn.LSTM), ids),
    "embedding, lstm, projection": Case(lambda: Text(nn.LSTM, proj_size=4, bias=False), ids),
    "embedding, gru": Case(lambda: Text(nn.GRU), ids),
    "encoder": Case(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**ENCODER), 2), sequences),
    "decoder": Case(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**ENCODER, norm_first=True), 2),
        lambda: sequences() + sequences(),
    ),
    "tied transformer": Case(TiedDecoder, lambda: ids() + ids()),
    "attention": Case(lambda: SelfAttention(8, 2, batch_first=True), sequences, first),
    "bert": Case(lambda: hugging_face("bert"), ids, lambda output: output.logits),
    "gpt2": Case(lambda: hugging_face("gpt2"), ids, lambda output: output.logits),
    "resnet": Case(lambda: hugging_face("resnet"), lambda: (torch.randn(3, 3, 16, 16),), lambda o: o.logits, 1024),
}
HF_WARNING = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
pytestmark = [HF_WARNING, pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")]


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().sum()


@pytest.mark.parametrize("name", ZOO)
def test_equal_to_the_module(name: str) -> None:
    torch.manual_seed(0)
    case = ZOO[name]
    ours = case.make().train()
    theirs, unchanged = copy.deepcopy(ours), record(ours)
    model = functional(ours)
    buffers = model.buffers
    for _ in range(2):
        data = case.data()
        params = {n: p.clone().requires_grad_() for n, p in model.params.items()}
        output, new = model.apply(params, buffers, *data)
        expected = theirs(*data)
        assert_same(case.output(output), case.output(expected))
        gradient = torch.autograd.grad(loss_of(case.output(output)), list(params.values()))
        wanted = torch.autograd.grad(loss_of(case.output(expected)), list(theirs.parameters()))
        assert_same(list(gradient), list(wanted))
        assert any(bool(g.any()) for g in wanted)
        assert_same(new, dict(theirs.named_buffers()))
        buffers = new
    theirs.eval()
    with torch.no_grad():
        output, kept = model.apply(params, buffers, *data, train=False)  # with grad, as theirs: the same kernels
        assert_same(case.output(output), case.output(theirs(*data)))
    assert_same(kept, buffers)
    unchanged()


@pytest.mark.parametrize("name", ZOO)
def test_lanes_equal_the_call_alone(name: str) -> None:
    torch.manual_seed(0)
    case = ZOO[name]
    model, data = functional(case.make().train()), case.data()

    def step(params: Any, buffers: Any) -> Any:
        def value(params: Any) -> Any:
            output, new = model.apply(params, buffers, *data)
            return loss_of(case.output(output)), (case.output(output), new)

        return grad(value, has_aux=True)(params)

    lanes = [model.params, {n: p * 1.25 for n, p in model.params.items()}]
    gradients, (outputs, new) = vmap(step, (0, None))(stack(lanes), model.buffers)
    for i, params in enumerate(lanes):
        expected, (output, own) = step(params, model.buffers)
        assert_nonzero([output])
        assert_close(outputs[i], output, eps=case.lanes_eps)
        assert_close({n: b[i] for n, b in new.items()}, own, eps=case.lanes_eps)
        # some gradients are zero up to rounding, such as that of a bias before a norm
        largest = max(float(g.abs().max()) for g in expected.values())
        assert_close({n: g[i] for n, g in gradients.items()}, expected, eps=case.lanes_eps, at_least=largest / 10)


def test_lanes_of_an_encoder_that_infers() -> None:
    """The kernel that torch has for this has no batching rule, and says so in a warning."""
    torch.manual_seed(0)
    model = functional(ZOO["encoder"].make().eval())
    x = torch.randn(3, 2, 5, 8)
    with torch.no_grad():
        together = vmap(lambda x: model.apply(model.params, {}, x)[0])(x)
        for i in range(3):
            assert_close(together[i], model.apply(model.params, {}, x[i])[0], eps=16)


@pytest.mark.parametrize("name", ["cnn, batch norm", "tied transformer", "embedding, lstm", "bert"])
def test_an_exception_leaves_the_module_alone(name: str) -> None:
    torch.manual_seed(0)
    case = ZOO[name]
    module = case.make()
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    unchanged = record(module)
    list(module.children())[-1].register_forward_pre_hook(_fail)
    model = functional(module)
    with pytest.raises(RuntimeError, match="in the middle"):
        model.apply(model.params, model.buffers, *case.data(), key=random.key(0))
    unchanged()


def _fail(module: nn.Module, args: Any) -> None:
    raise RuntimeError("in the middle")


# --- buffers ---------------------------------------------------------------------------------------------------------


def test_batch_norm_under_autocast() -> None:
    torch.manual_seed(0)
    module = cnn(nn.BatchNorm2d(4))
    exact = copy.deepcopy(module).double()
    model, (x,) = functional(module), images()

    def step(params: Any, buffers: Any, x: Tensor) -> Any:
        def value(params: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                output, new = model.apply(params, buffers, x)
            return loss_of(output), (output, new)

        return grad(value, has_aux=True)(params)

    gradients, (output, new) = step(model.params, model.buffers, x)
    reference = exact(x.double()).detach()
    assert output.dtype == torch.bfloat16
    assert_half_close(output, reference, eps=4)  # conv, norm and linear round one after the other
    theirs = copy.deepcopy(module)
    with torch.autocast("cpu", torch.bfloat16):
        theirs(x)
    for name, buffer in theirs.named_buffers():
        assert new[name].dtype == buffer.dtype
        assert_close(new[name], buffer)
    together, (outputs, _) = vmap(step, (None, None, 0))(model.params, model.buffers, torch.stack([x, 2 * x]))
    assert_half_close(outputs[0], reference, eps=4)
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, slope in together.items():
        assert slope.dtype == torch.float32
        assert (slope[0] - gradients[name]).abs().max() < 2**-5 * largest  # bfloat16 arithmetic in another order


@pytest.mark.slow
def test_batch_norm_compiled() -> None:
    torch.manual_seed(0)
    model, (x,) = functional(cnn(nn.BatchNorm2d(4))), images()
    step = lambda p, b, x: model.apply(p, b, x)[1]  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_close(compiled(model.params, model.buffers, x), step(model.params, model.buffers, x))
    assert int(model.buffers["1.num_batches_tracked"]) == 0


# --- activation checkpoints ------------------------------------------------------------------------------------------


def test_a_checkpoint_that_recomputes_fails_loudly() -> None:
    """In the backward pass the call is over, and the copy holds no values any more."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=False)

    model = functional(Checkpointed())
    value = lambda p, x: model.apply(p, {}, x)[0].square().sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="meta"):
        gradient(value, backend="autograd")(model.params, torch.randn(2, 3))
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        gradient(value)(model.params, torch.randn(2, 3))
    outside = functional(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))  # where it works
    whole = lambda p, x: checkpoint(lambda x: outside.apply(p, {}, x)[0], x, use_reentrant=False).sum()  # noqa: E731
    assert_nonzero(list(gradient(whole, backend="autograd")(outside.params, torch.randn(2, 3)).grads.values()))


# --- ties ------------------------------------------------------------------------------------------------------------


def test_c34_a_name_of_a_tie_counts_once() -> None:
    module = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    module["b"].weight = module["a"].weight
    model = functional(module)
    assert list(model.params) == ["a.weight"]
    with pytest.raises(ValueError, match=r"params lack \[\] and have unknown names \['b.weight'\]"):
        model.apply({**model.params, "b.weight": torch.ones(1, 1)}, {}, torch.ones(1, 1))


def test_c40_a_shared_parameter_is_updated_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.zeros(()))
            self.y = self.x

        def forward(self) -> Tensor:
            return (self.x + self.y) / 2

    model, optimizer = functional(Shared()), sgd(0.1)
    slope = grad(lambda p: model.apply(p, {})[0])(model.params)
    assert {n: float(g) for n, g in slope.items()} == {"x": 1.0}
    updates, _ = optimizer.update(slope, optimizer.init(model.params), model.params)
    assert apply_updates(model.params, updates)["x"].item() == pytest.approx(-0.1)


def test_c40_loading_keeps_or_loses_the_tie_as_the_module_does() -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        module[1].weight = module[0].weight
        return module

    module = make()
    module.load_state_dict(make().state_dict())
    assert list(functional(module).params) == ["0.weight"]
    state = {name: value.clone() for name, value in make().state_dict().items()}
    module.load_state_dict(state, assign=True)
    assert list(functional(module).params) == ["0.weight", "1.weight"]


def test_the_loss_of_a_language_model() -> None:
    """Keyword arguments, an output that is a dataclass, tied embeddings."""
    torch.manual_seed(0)
    module = hugging_face("gpt2").train()
    model, (tokens,) = functional(module), ids()
    assert "lm_head.weight" not in model.params
    output, _ = model.apply(model.params, model.buffers, input_ids=tokens, labels=tokens)
    with torch.no_grad():
        expected = module(input_ids=tokens, labels=tokens)
    assert_close(output.loss, expected.loss)
    logits = output.logits[:, :-1].reshape(-1, 20)
    assert_close(output.loss, F.cross_entropy(logits, tokens[:, 1:].reshape(-1)))


def test_a_padded_encoder_in_evaluation_has_lanes_and_takes_probes() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module = nn.TransformerEncoder(layer, 2).eval()
    model, probed = functional(module), functional(module, probes="layers.0")
    mask = torch.tensor([[False, False, False], [False, False, True]])
    x = torch.randn(2, 2, 3, 8)

    def run(x: Tensor) -> Tensor:
        return model.apply(model.params, model.buffers, x, src_key_padding_mask=mask)[0]

    def probe(p: Tensor) -> Tensor:
        out = probed.apply(probed.params, probed.buffers, x[0], src_key_padding_mask=mask, probes={"layers.0": p})[0]
        return out[~mask].square().sum()

    expected = torch.stack([module(one, src_key_padding_mask=mask)[~mask] for one in x])
    with torch.no_grad():
        assert_close(vmap(run)(x)[:, ~mask], expected.detach())
    assert_nonzero(grad(probe)(torch.zeros(2, 3, 8))[~mask])
