"""Modules that keep, write or read values in unusual places: they are right through ``functional``, or they raise."""

from __future__ import annotations

import copy
import functools
import threading
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same, stack
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

import functricks
from functricks import random
from functricks.modules import functional

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")

NORMS: dict[str, Callable[[], nn.Module]] = {
    "weight": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "weight, as a hook": lambda: old_weight_norm(nn.Linear(4, 3)),
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(4, 3), n_power_iterations=2),
    "spectral, as a hook": lambda: old_spectral_norm(nn.Linear(4, 3), n_power_iterations=2),
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def batch() -> Tensor:
    return torch.randn(5, 4)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own weight norm, under vmap
def test_normalised_weights_in_training(name: str) -> None:
    """Power iteration in ``out=`` has no batching rule, and deepcopy refuses the weight that a hook has computed."""
    module = nn.Sequential(NORMS[name](), nn.Tanh())
    x = batch()
    module(x)
    model = functional(module)
    buffers = model.buffers
    lanes = [model.params, {n: p * 1.25 for n, p in model.params.items()}]
    for _ in range(2):
        outputs, new = vmap(model.apply, (0, None, None))(stack(lanes), buffers, x)
        for lane, params in enumerate(lanes):
            output, own = model.apply(params, buffers, x)
            assert_close(outputs[lane], output, eps=16)
            assert_close({n: b[lane] for n, b in new.items()}, own, eps=16)
        output, new_buffers = model.apply(model.params, buffers, x)
        assert_same(output, module(x))
        assert_same(new_buffers, dict(module.named_buffers()))
        slopes = grad(lambda p, b=buffers: model.apply(p, b, x)[0].square().sum())(model.params)
        assert all(bool(slope.any()) for slope in slopes.values())
        buffers = new_buffers


def test_spectral_norm_compiled() -> None:
    model = functional(parametrizations.spectral_norm(nn.Linear(4, 3)))
    x = batch()
    compiled = torch.compile(model.apply, fullgraph=True, backend="eager")
    assert_same(compiled(model.params, model.buffers, x), model.apply(model.params, model.buffers, x))


class Kept(nn.Module):
    """Keeps what it computed, as attention maps are kept for a look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.last = {"maps": [self.fc(x)]}
        return self.last["maps"][0]


def test_an_activation_that_a_call_left_behind_is_no_obstacle() -> None:
    module, x = Kept(), batch()
    expected = module(x)
    model = functional(module)
    assert_same(model.apply(model.params, {}, x)[0], expected)


class Returnless(nn.Sequential):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self[1].eval()  # frozen statistics; and no return self, as in many code bases


def test_a_train_that_returns_nothing() -> None:
    model = functional(Returnless(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    _, buffers = model.apply(model.params, model.buffers, batch(), train=True)
    assert_same(buffers, model.buffers)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def test_cached_parametrizations_do_not_outlive_a_call() -> None:
    layer, x = nn.Linear(4, 3), batch()
    parametrize.register_parametrization(layer, "weight", Twice())
    model = functional(layer)
    lanes = [model.params, {n: p * 3 for n, p in model.params.items()}]
    with parametrize.cached():
        together = [model.apply(params, {}, x)[0] for params in lanes]
        layer(x)
        cached = layer.weight
        model.apply(model.params, {}, x)
        assert layer.weight is cached
    for params, output in zip(lanes, together, strict=True):
        assert_same(output, model.apply(params, {}, x)[0])


def test_a_buffer_that_was_computed() -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("twice", module.weight * 2)
    model = functional(module)
    assert_same(model.buffers, {"twice": module.weight.detach() * 2})
    assert_same(model.apply(model.params, model.buffers, torch.ones(1, 4))[1], model.buffers)


class Alias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))
        self.register_buffer("same", self.w)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w * self.same


def test_a_buffer_that_is_a_parameter_is_one_value() -> None:
    model, x = functional(Alias()), batch()
    assert (list(model.params), list(model.buffers)) == (["w"], [])
    assert_same(model.apply({"w": torch.full((4,), 3.0)}, {}, x), (x * 3.0 * 3.0, {}))
    models = functricks.stack([Alias(), Alias()])
    assert (list(models.params), list(models.buffers)) == (["w"], [])


class Closures(nn.Module):
    """Calls itself through functions that hold it, and through a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.seen: list[Tensor] = []
        first = self.a.forward
        self.heads = {"b": lambda x: self.b(first(x))}
        self.a.register_forward_hook(lambda module, args, output: self.seen.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        return self.heads["b"](x) + self.a(x).sum() + self.seen[0].sum()


def test_functions_that_hold_the_module_hold_the_copy() -> None:
    module, x = Closures(), batch()
    expected = module(x)
    model = functional(module)
    assert_same(model.apply(model.params, {}, x)[0], expected)
    assert len(module.seen) == 1  # that of its own call
    slopes = grad(lambda p: model.apply(p, {}, x)[0].sum())(model.params)
    wanted = dict(zip(model.params, torch.autograd.grad(expected.sum(), list(module.parameters())), strict=True))
    assert_same(slopes, wanted)


class Rounded:
    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x).round(decimals=3) + self.function(x)


def patched(kind: str) -> nn.Module:
    """Replace the forward of a module, as libraries do to convert what it returns."""
    module: Any = nn.Sequential(nn.Linear(4, 3))
    old = module.forward
    if kind == "lambda":
        module.forward = lambda x: old(x) * 2
    elif kind == "method":
        module.forward = types.MethodType(lambda self, x: self[0](x) * 2, module)
    elif kind == "partial":
        module.forward = functools.partial(lambda owner, x: old(x) * 2, module)
    elif kind == "wrapped":

        @functools.wraps(old)
        def forward(x: Tensor) -> Tensor:
            return forward.__wrapped__(x) * 2

        module.forward = forward
    elif kind == "list":
        layers = {"all": [module[0]]}
        module.forward = lambda x: layers["all"][0](x) * 2
    else:
        rounded = Rounded(old)
        module.forward = lambda x: rounded(x)
    return module


@pytest.mark.parametrize("kind", ["lambda", "method", "partial", "wrapped", "list", "object"])
def test_a_forward_that_was_replaced_is_of_the_copy(kind: str) -> None:
    module, x = patched(kind), batch()
    model = functional(module)
    assert_same(model.apply(model.params, {}, x)[0], module(x))
    slopes = grad(lambda p: model.apply(p, {}, x)[0].sum())(model.params)
    assert_same(list(slopes.values()), list(torch.autograd.grad(module(x).sum(), list(module.parameters()))))
    assert all(bool(slope.any()) for slope in slopes.values())


# --- values where apply cannot follow them ---------------------------------------------------------------------------


class Odd(nn.Module):
    """Does one thing to its tensors in ``forward``."""

    def __init__(self, act: Callable[[Any], None]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("state", torch.ones(4))
        self.register_buffer("empty", None)
        self.listed, weight = [self.fc.weight], self.fc.weight
        self.held = lambda: weight * 2
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.act(self)
        return self.fc(x)


def clamp(module: Odd) -> None:
    with torch.no_grad():
        module.fc.weight.clamp_(max=0.0)


def clamp_data(module: Odd) -> None:
    module.fc.weight.data.clamp_(max=0.0)


def swap_data(module: Odd) -> None:
    module.fc.weight.data = module.fc.weight.data * 2


def replace(module: Odd) -> None:
    module.fc.weight = nn.Parameter(module.fc.weight * 2)


def fill(module: Odd) -> None:
    if module.empty is None:
        module.empty = torch.ones(4)


def register(module: Odd) -> None:
    if not hasattr(module, "late"):
        module.register_buffer("late", torch.ones(4))


def delete(module: Odd) -> None:
    del module.state


def take(module: Odd) -> None:
    module.state = None


def read_list(module: Odd) -> None:
    module.listed[0] * 2


def read_closure(module: Odd) -> None:
    module.held()


LEAKS: list[tuple[Callable[[Any], None], str]] = [
    (clamp, "forward writes to the parameter 'fc.weight'"),
    (clamp_data, "forward writes to the parameter 'fc.weight'"),
    (swap_data, "forward writes to the parameter 'fc.weight'"),
    (replace, "forward writes to the parameter 'fc.weight'"),
    (fill, "forward fills 'empty' of '', which had no value"),
    (register, "forward fills 'late' of '', which had no value"),
    (delete, "forward takes the buffer 'state' away"),
    (take, "forward takes the buffer 'state' away"),
    (read_list, "forward reads 'fc.weight' from a list"),
    (read_closure, "forward reads 'fc.weight' from a list"),
]


@pytest.mark.parametrize(("act", "match"), LEAKS, ids=[act.__name__ for act, _ in LEAKS])
def test_what_apply_could_not_return_raises(act: Callable[[Any], None], match: str) -> None:
    """Else a later call would compute with it: a module keeps it, and a functional must not."""
    model, x = functional(Odd(act)), batch()
    params = copy.deepcopy(model.params)
    for _ in range(2):
        with pytest.raises(ValueError, match=match):
            model.apply(params, model.buffers, x)
        assert_same(params, model.params)


@pytest.mark.parametrize("act", [clamp, clamp_data, replace, fill])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_so_it_does_under_transforms(act: Callable[[Any], None]) -> None:
    model, x = functional(Odd(act)), batch()
    lanes = stack([model.params, {n: torch.full_like(p, torch.nan) for n, p in model.params.items()}])
    before = copy.deepcopy(lanes)
    with pytest.raises(ValueError, match=r"forward (writes|fills)"):
        vmap(grad(lambda p: model.apply(p, model.buffers, x)[0].sum()))(lanes)
    for name, lane in before.items():
        assert_same(lanes[name].nan_to_num(), lane.nan_to_num())


def test_a_parameter_of_nan_is_not_one_that_was_written_to() -> None:
    model = functional(nn.Linear(4, 3))
    assert model.apply({n: p * torch.nan for n, p in model.params.items()}, {}, batch())[0].isnan().all()


def test_a_deleted_buffer_leaves_no_value_of_the_call_behind() -> None:
    calls: list[int] = []
    model, x = functional(Odd(lambda own: delete(own) if calls else None)), batch()
    expected = model.apply(model.params, model.buffers, x)
    calls.append(1)
    model.apply(model.params, model.buffers, x)
    calls.clear()
    assert_same(model.apply(model.params, model.buffers, x), expected)


def test_a_call_within_the_first_call() -> None:
    calls: list[Tensor] = []

    def again(y: Tensor) -> Tensor:
        if not calls:
            calls.append(y)
            calls.append(model.apply({n: p * 2 for n, p in model.params.items()}, {}, x, key=random.key(1))[0])
        return y

    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    x = batch()
    model = functional(net, intervene={"1": again})
    plain = functional(net)
    assert_same(
        model.apply(model.params, {}, x, key=random.key(0)), plain.apply(model.params, {}, x, key=random.key(0))
    )
    doubled = {n: p * 2 for n, p in model.params.items()}
    assert_same(calls[1], plain.apply(doubled, {}, x, key=random.key(1))[0])


def test_first_calls_of_several_threads() -> None:
    x = batch()
    model = functional(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)))
    keys = random.split(random.key(0), 8)
    start = threading.Barrier(len(keys))

    def call(key: Tensor) -> Any:
        start.wait()
        return model.apply(model.params, model.buffers, x, key=key)

    with ThreadPoolExecutor(len(keys)) as pool:
        together = list(pool.map(call, keys))
    for key, found in zip(keys, together, strict=True):
        assert_same(found, model.apply(model.params, model.buffers, x, key=key))


def test_torch_script_is_named() -> None:
    class Scripted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        scripted = torch.jit.script(Scripted())
    with pytest.raises(ValueError, match="functional: '0' is TorchScript"):
        functional(nn.Sequential(scripted))


def test_a_key_of_forward_is_not_taken_for_the_random_key() -> None:
    class Lookup(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return query * key

    model, x = functional(Lookup()), batch()
    assert_same(model.apply({}, {}, x, x)[0], x * x)
    with pytest.raises(ValueError, match=r"key must come from functricks.random.key.*float32 \[5, 4\].*by position"):
        model.apply({}, {}, x, key=x)
    assert vmap(lambda key: model.apply({}, {}, x, x, key=key)[0])(random.split(random.key(0), 2)).shape == (2, 5, 4)
