"""Stacks of models against the models themselves, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from functricks import Functional, adamw, functional, no_decay, random, stack, stack_init, train_step, unstack
from functricks.gradients import gradient
from functricks.losses import cross_entropy
from tests.helpers import assert_close, assert_nonzero, assert_same, lane
from tests.test_modules import record


class Tied(nn.Module):
    """A tie, a submodule with two paths, BatchNorm, a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight
        self.again = self.encoder
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.norm(self.again(torch.tanh(self.decoder(torch.tanh(self.encoder(x))))))))


def models(make: Callable[[], nn.Module] = Tied, number: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    made = [make().double() for _ in range(number)]
    for i, model in enumerate(made):
        for buffer in model.buffers():
            buffer += i
    return made


X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def gradients(model: Functional, params: Any, buffers: Any, key: Tensor) -> Any:
    def loss(params: Any) -> Any:
        output, new = model.apply(params, buffers, X, key=key)
        return cross_entropy(output, Y).mean(), new

    return grad(loss, has_aux=True)(params)


def test_lanes_are_the_models() -> None:
    made = models()
    checks = [record(model) for model in made]
    stacked = stack(made)
    assert stacked.params.keys() == functional(made[0]).params.keys()
    assert "decoder.weight" not in stacked.params
    assert stacked.buffers["norm.running_mean"].shape == (3, 4)
    keys = random.split(random.key(0), 3)
    found, buffers = vmap(lambda p, b, k: gradients(stacked, p, b, k))(stacked.params, stacked.buffers, keys)
    for i, model in enumerate(made):
        alone = functional(model)
        expected, new = gradients(alone, alone.params, alone.buffers, keys[i])
        assert_nonzero({name: g for name, g in expected.items() if "bias" not in name})
        assert_close(lane(found, i), expected, eps=64, at_least=1.0)  # BatchNorm cancels; lanes sum in another order
        assert_close(lane(buffers, i), new)
    for check in checks:
        check()


def test_gradient_of_a_tie_is_that_of_the_module() -> None:
    made = models(number=2)
    for model in made:
        model.dropout.p = 0.0
    stacked = stack(made)
    key = random.key(0)
    found, _ = vmap(lambda p, b: gradients(stacked, p, b, key))(stacked.params, stacked.buffers)
    for i, model in enumerate(made):
        cross_entropy(model(X), Y).mean().backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        assert_close(lane(found, i), expected, eps=64, at_least=1.0)  # BatchNorm cancels; lanes sum in another order


def test_stacks_train_as_the_models_do() -> None:
    made = models(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    stacked = stack(made)

    def step_of(model: Functional) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            return cross_entropy(model.apply(params, {}, batch[0])[0], batch[1])

        return train_step(gradient(loss), adamw(0.1, weight_decay=0.1))

    step = step_of(stacked)
    states = vmap(step.init)(stacked.params)
    for _ in range(3):
        states, _ = vmap(step.update, in_dims=(0, None))(states, (X, Y))
    for i, trained in enumerate(unstack(states)):
        alone = functional(made[i])
        step = step_of(alone)
        state = step.init(alone.params)
        for _ in range(3):
            state, _ = step.update(state, (X, Y))
        assert_close(trained, state, eps=64)  # three steps


def test_unstack_gives_back_what_was_stacked() -> None:
    made = models()
    for one, model in zip(unstack(stack(made)), made, strict=True):
        assert isinstance(one, Functional)
        alone = functional(model)
        assert_same((one.params, one.buffers), (alone.params, alone.buffers))
        key = random.key(5)
        assert_same(
            one.apply(one.params, one.buffers, X, key=key), alone.apply(alone.params, alone.buffers, X, key=key)
        )


def test_stacking_a_single_model_and_one_without_tensors() -> None:
    assert stack([nn.Linear(2, 3)]).params["weight"].shape == (1, 3, 2)
    assert stack([nn.Tanh(), nn.Tanh()]).params == {}


def test_train_and_eval_and_values_may_be_chosen_per_call() -> None:
    stacked = stack(models())
    found, new = vmap(lambda p, b: stacked.apply(p, b, X, train=False))(stacked.params, stacked.buffers)
    for i, model in enumerate(models()):
        assert_close(found[i], model.eval()(X).detach())
    assert_same(new, stacked.buffers)


@pytest.mark.slow
def test_a_gpt_2_keeps_its_tie_in_a_stack() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, **quiet, attn_implementation="eager")
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    torch.manual_seed(0)
    made = [transformers.GPT2LMHeadModel(config) for _ in range(2)]
    stacked = stack(made)
    assert "lm_head.weight" not in stacked.params

    def loss(params: Any, buffers: Any) -> Tensor:
        logits = stacked.apply(params, buffers, tokens)[0].logits
        return cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:]).mean()

    found = vmap(grad(loss))(stacked.params, stacked.buffers)
    for i, model in enumerate(made):
        cross_entropy(model(tokens).logits[:, :-1].transpose(1, 2), tokens[:, 1:]).mean().backward()
        assert_close(lane(found, i), {name: p.grad for name, p in model.named_parameters()}, at_least=1.0)


# --- initialising ----------------------------------------------------------------------------------------------------


def test_initialisations_depend_on_the_key_alone() -> None:
    keys = random.split(random.key(7), 4)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    together = stack_init(Tied, keys)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    for i, one in enumerate(unstack(together)):
        assert_same(unstack(stack_init(Tied, keys[i : i + 1]))[0][1:], one[1:])
    assert_same(stack_init(Tied, keys.flip(0)).params, {n: p.flip(0) for n, p in together.params.items()})
    for name in ("encoder.weight", "head.bias"):
        assert len(set(together.params[name].flatten(1)[:, 0].tolist())) == 4


def test_initialisations_are_those_of_the_seed_that_the_key_spells() -> None:
    torch.manual_seed((5 << 32) + 4000000000)
    expected = nn.Linear(3, 2)
    found = stack_init(lambda: nn.Linear(3, 2), torch.tensor([[5, 4000000000], [2**32 - 1, 2**32 - 1]]))
    assert_same(found.params["weight"][0], expected.weight.detach())


def test_a_failing_maker_leaves_the_generator_alone() -> None:
    def fails() -> nn.Module:
        torch.rand(1)
        raise ArithmeticError("no model")

    before = torch.get_rng_state()
    with pytest.raises(ArithmeticError, match="no model"):
        stack_init(fails, random.split(random.key(0), 2))
    assert torch.equal(torch.get_rng_state(), before)


# --- errors ----------------------------------------------------------------------------------------------------------


def untied() -> nn.Module:
    model = Tied()
    model.decoder.weight = nn.Parameter(model.decoder.weight.detach().clone())
    return model


def no_second_path() -> nn.Module:
    model = Tied()
    model.again = nn.Linear(4, 4)
    return model


def half() -> nn.Module:
    model = Tied()
    model.head = model.head.bfloat16()
    return model


def rated() -> nn.Module:
    model = Tied()
    model.dropout.p = 0.1
    return model


def with_buffer() -> nn.Module:
    model = Tied()
    model.register_buffer("extra", torch.zeros(2))
    return model


def with_(name: str, module: nn.Module) -> nn.Module:
    model = Tied()
    setattr(model, name, module)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: with_("head", nn.Linear(4, 5)), r"setting of 'head', 'out_features': 3 in model 0, 5 in model 1"),
        (
            lambda: with_("head", nn.Linear(4, 3, bias=False)),
            r"parameter 'head.bias': float32 \[3\] on cpu in model 0, m",
        ),
        (half, r"parameter 'head.weight': float32 \[3, 4\] on cpu in model 0, bfloat16 \[3, 4\] on cpu in model 1"),
        (untied, r"tie of the parameter 'decoder.weight': encoder.weight in model 0, decoder.weight in model 1"),
        (no_second_path, r"tie of the parameter 'again.weight': encoder.weight in model 0, again.weight in model 1"),
        (rated, r"setting of 'dropout', 'p': 0.5 in model 0, 0.1 in model 1"),
        (lambda: with_("norm", nn.BatchNorm1d(4, eps=1e-3)), r"setting of 'norm', 'eps': 1e-05 in model 0, 0.001 in"),
        (lambda: Tied().eval(), r"setting of '', 'training': True in model 0, False in model 1"),
        (with_buffer, r"buffer 'extra': missing in model 0, float32 \[2\] on cpu in model 1"),
        (lambda: with_("norm", nn.LayerNorm(4)), r"module 'norm': BatchNorm1d in model 0, LayerNorm in model 1"),
        (lambda: with_("more", nn.Tanh()), r"module 'more': missing in model 0, Tanh in model 1"),
    ],
)
def test_models_that_differ_raise(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=f"stack: models differ at the {message}"):
        stack([Tied(), make()])


def test_errors() -> None:
    with pytest.raises(ValueError, match="stack: no models; give at least one"):
        stack([])
    with pytest.raises(ValueError, match=r"unstack: the leading axes differ: \{'a': 2, 'b.c': 3\}"):
        unstack({"a": torch.zeros(2), "b": {"c": torch.zeros(3, 1)}})
    with pytest.raises(ValueError, match="unstack: 'a' has no leading axis"):
        unstack({"a": torch.zeros(())})
    with pytest.raises(ValueError, match="unstack: there is no leaf"):
        unstack({})
    with pytest.raises(ValueError, match=r"keys must be int64 \[K, 2\], got torch.int64 \[2\]"):
        stack_init(Tied, random.key(0))


def test_data_parallel_stands_for_its_module() -> None:
    model = stack([nn.DataParallel(Tied()), Tied()])
    assert list(model.params) == list(functional(Tied()).params) == list(no_decay(nn.DataParallel(Tied())))
    assert [lane.apply(lane.params, lane.buffers, torch.ones(3, 4), train=False)[0].shape for lane in unstack(model)]


class Holds(nn.Module):
    def __init__(self, function: Any, config: dict[str, int]) -> None:
        super().__init__()
        self.function, self.config = function, config

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * self.config["factor"]


def test_models_that_hold_other_functions_settings_or_hooks_raise() -> None:
    def hooked() -> nn.Module:
        model = Holds(torch.relu, {"factor": 1})
        model.register_forward_hook(lambda module, args, output: 2 * output)
        return model

    first = Holds(torch.relu, {"factor": 1})
    for other, name in (
        (Holds(torch.tanh, {"factor": 1}), "function"),
        (Holds(torch.relu, {"factor": 2}), "config"),
        (hooked(), "_forward_hooks"),
    ):
        with pytest.raises(ValueError, match=f"models differ at the setting of '', '{name}'"):
            stack([first, other])
    stack([hooked(), hooked()])
    stack([Holds(lambda x: x, {"factor": 1}) for _ in range(2)])
