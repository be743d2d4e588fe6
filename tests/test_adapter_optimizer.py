"""adapter.Optimizer against torch.optim, and against the transform that it is made of."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import functricks
from functricks import adapter, schedules
from functricks.adapter._kernels import _CLASSES
from functricks.types import Transform
from tests.helpers import assert_close, assert_same

Make = Callable[[nn.Module], torch.optim.Optimizer]


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def backward(model: nn.Module, i: int = 0) -> Tensor:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(i)).to(next(model.parameters()).dtype)
    loss: Tensor = model(x).square().sum()
    loss.backward()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, start: int = 0) -> nn.Module:
    for i in range(start, start + steps):
        optimizer.zero_grad()
        backward(model, i)
        optimizer.step()
    return model


def trained(make: Make, steps: int = 4, **kwargs: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(**kwargs)
    optimizer = make(model)
    return train(model, optimizer, steps), optimizer


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def with_gradient(*sizes: int) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


# --- the optimizers that PyTorch has ---------------------------------------------------------------------------------

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "adam": {"amsgrad": True, "weight_decay": 0.1},
    "adamw": {"betas": (0.8, 0.9), "maximize": True},
    "sgd": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "rmsprop": {"centered": True, "momentum": 0.5},
}


def classic(name: str, **flags: bool) -> Make:
    cls = CLASSES[name]
    if "fused" in inspect.signature(cls).parameters:
        flags = {"fused": True, **flags}
    return lambda model: cls(model.named_parameters(), lr=0.01, **ARGUMENTS.get(name, {}), **flags)  # type: ignore[call-arg]


def ours(name: str, **flags: bool) -> Make:
    maker = getattr(functricks, name)
    return lambda model: adapter.Optimizer(model.named_parameters(), maker, lr=0.01, **ARGUMENTS.get(name, {}), **flags)


@pytest.mark.parametrize("name", CLASSES)
def test_runs_on_torchs_own_kernels(name: str) -> None:
    (expected, theirs), (found, mine) = trained(classic(name)), trained(ours(name))
    assert_same(values(found), values(expected))
    assert_same(mine.state_dict()["state"], theirs.state_dict()["state"])
    assert mine.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("to_torch", [True, False])
def test_state_goes_to_torchs_class_and_back(name: str, to_torch: bool) -> None:
    first, second = (ours(name), classic(name)) if to_torch else (classic(name), ours(name))
    expected, begun = trained(first, 2)
    model = network()
    model.load_state_dict(expected.state_dict())
    other = second(model)
    other.load_state_dict(copy.deepcopy(begun.state_dict()))
    assert_same(values(train(model, other, 2, 2)), values(train(expected, begun, 2, 2)))


@pytest.mark.parametrize("flags", [{"fused": False}, {"foreach": True}, {"fused": False, "foreach": False}])
def test_kernel_may_be_chosen(flags: dict[str, bool]) -> None:
    (expected, _), (found, _) = trained(classic("adamw", **{"fused": False, **flags})), trained(ours("adamw", **flags))
    assert_same(values(found), values(expected))


def test_muon_runs_on_torchs_own() -> None:
    parameters = [[nn.Parameter(torch.eye(3)[:2] + 0.1)] for _ in range(2)]
    optimizers = [
        torch.optim.Muon(parameters[0], lr=0.1),
        adapter.Optimizer(parameters[1], functricks.muon, lr=0.1),
    ]
    for (parameter,), optimizer in zip(parameters, optimizers, strict=True):
        parameter.grad = torch.arange(6.0).view(2, 3)
        optimizer.step()
    assert_same(parameters[1], parameters[0])
    assert optimizers[1].state_dict()["state"].keys() == optimizers[0].state_dict()["state"].keys()


@pytest.mark.parametrize(
    "transform", [functricks.adamw(0.01), functools.partial(functricks.adamw, lr=0.01)], ids=["transform", "partial"]
)
def test_recognises_a_transform_that_was_made_before(transform: Any) -> None:
    (expected, _), (found, optimizer) = (
        trained(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)),
        trained(lambda model: adapter.Optimizer(model.parameters(), transform)),
    )
    assert_same(values(found), values(expected))
    assert optimizer.param_groups[0]["fused"] is True


@pytest.mark.parametrize(
    "transform",
    [
        functricks.adamw(0.01, decay_where="*.weight"),
        functricks.adamw(torch.tensor(0.01)),
        functricks.adam(0.01, learning_rates={"2.*": 2.0}),
        functricks.lion(0.01),
    ],
    ids=["selector", "tensor", "rates", "lion"],
)
def test_what_torch_lacks_is_not_taken_for_its_own(transform: Transform) -> None:
    model, optimizer = trained(lambda model: adapter.Optimizer(model.named_parameters(), transform))
    assert "exp_avg" not in optimizer.state[model[0].weight]
    assert "fused" not in optimizer.param_groups[0]


def test_half_precision_parameters_as_torch() -> None:
    (expected, _), (found, _) = (
        trained(classic("adamw"), dtype=torch.bfloat16),
        trained(ours("adamw"), dtype=torch.bfloat16),
    )
    assert_same(values(found), values(expected))


# --- any other transform ---------------------------------------------------------------------------------------------


def functional(transform: Transform, steps: int = 4) -> dict[str, Tensor]:
    """The same run with the transform itself."""
    model = network()
    params = values(model)
    state = transform.init(params)
    for i in range(steps):
        model.zero_grad()
        model.load_state_dict(params)
        backward(model, i)
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        updates, state = transform.update(grads, state, params)
        params = functricks.apply_updates(params, updates)
    return params


def clipped() -> Transform:
    return functricks.chain(functricks.clip_by_global_norm(0.5), functricks.adamw(0.01, weight_decay=0.1))


OTHERS: dict[str, Callable[[], Transform]] = {
    "clip, adamw": clipped,
    "lion": lambda: functricks.lion(0.01, weight_decay=0.1),
    "lamb": lambda: functricks.lamb(0.01),
    "schedule-free": lambda: functricks.schedule_free_adamw(0.01),
    "lookahead": lambda: functricks.lookahead(functricks.sgd(0.01, momentum=0.9), 2),
    "skip_nonfinite": lambda: functricks.skip_nonfinite(functricks.adafactor(0.01, decay_where="*.weight")),
    "parts": lambda: functricks.chain(
        functricks.trace(0.9), functricks.trace(0.5), functricks.scale_by_learning_rate(0.01)
    ),
    "partition": lambda: functricks.partition(
        {"a": functricks.adamw(0.01), "b": functricks.sgd(0.1, momentum=0.9)},
        lambda path, leaf: "a" if path.startswith("0") else "b",
    ),
    "multi_steps": lambda: functricks.multi_steps(functricks.sgd(0.01), 2),  # type: ignore[dict-item,return-value]
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_transform_runs_as_itself(name: str) -> None:
    transform = OTHERS[name]()
    found, optimizer = trained(lambda model: adapter.Optimizer(model.named_parameters(), transform))
    assert_same(values(found), functional(transform))
    state = optimizer.state_dict()
    assert all(isinstance(leaf, Tensor) for own in state["state"].values() for leaf in own.values())


@pytest.mark.slow
def test_compiled_step_is_the_step() -> None:
    """Also when the learning rate changes, without another program."""

    def run(compile: bool) -> tuple[dict[str, Tensor], adapter.Optimizer]:
        model = nn.Linear(3, 2)  # every leaf costs seconds to compile
        torch.manual_seed(0)
        nn.init.normal_(model.weight)
        nn.init.normal_(model.bias)
        transform = functricks.chain(functricks.adamw(0.01, weight_decay=0.1), functricks.scale(1.0))
        optimizer = adapter.Optimizer(model.named_parameters(), transform, compile=compile)
        train(model, optimizer, 2)
        pointers = [leaf.data_ptr() for own in optimizer.state.values() for leaf in own.values()]
        optimizer.param_groups[0]["lr"] = 0.1
        with torch._dynamo.config.patch(error_on_recompile=True):
            train(model, optimizer, 2, 2)
        if compile:  # in place
            assert [leaf.data_ptr() for own in optimizer.state.values() for leaf in own.values()] == pointers
        return values(model), optimizer

    (expected, _), (found, optimizer) = run(False), run(True)
    assert_close(found, expected)
    copied = copy.deepcopy(optimizer)
    assert copied.param_groups[0]["lr"] == 0.1


def test_state_is_kept_as_torch_keeps_it() -> None:
    model, optimizer = trained(lambda model: adapter.Optimizer(model.named_parameters(), clipped()))
    assert set(optimizer.state) == set(model.parameters())
    assert {key: leaf.shape for key, leaf in optimizer.state[model[0].weight].items()} == {"mu": (4, 3), "nu": (4, 3)}
    assert optimizer.param_groups[0]["shared_state"]["step"] == 4
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("name", ["lookahead", "schedule-free"])
def test_average_is_that_of_the_transform(name: str) -> None:
    model, optimizer = trained(lambda model: adapter.Optimizer(model.named_parameters(), OTHERS[name]()))
    assert isinstance(optimizer, adapter.Optimizer)
    transform, params = OTHERS[name](), values(network())
    state = transform.init(params)
    for i in range(4):
        other = network()
        other.load_state_dict(params)
        backward(other, i)
        grads = {path: parameter.grad for path, parameter in other.named_parameters()}
        updates, state = transform.update(grads, state, params)
        params = functricks.apply_updates(params, updates)
    assert_same(values(model), params)
    assert_same(optimizer.averaged(), functricks.averaged(state, params))
    with pytest.raises(ValueError, match="holds no average to read"):
        adapter.Optimizer(with_gradient(1), functricks.adamw).averaged()


def test_two_links_of_a_kind_have_keys_of_their_own() -> None:
    model, optimizer = trained(lambda model: adapter.Optimizer(model.named_parameters(), OTHERS["parts"]()))
    assert list(optimizer.state[model[0].weight]) == ["trace", "trace 2"]


def test_factory_of_ones_own_per_group() -> None:
    def factory(lr: float, momentum: float = 0.9, *, bound: float = 0.1) -> Transform:
        return functricks.chain(functricks.clip_by_value(bound), functricks.sgd(lr, momentum))

    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5, "bound": 0.01}]
    optimizer = adapter.Optimizer(groups, factory, lr=0.1)
    before = values(model)
    train(model, optimizer, 1)
    moved = {name: (leaf - before[name]).abs().max().item() for name, leaf in values(model).items()}
    assert moved["0.bias"] == pytest.approx(0.1 * 0.1)
    assert moved["2.bias"] == pytest.approx(0.5 * 0.01)
    with pytest.raises(ValueError, match="required optimization parameter lr"):
        adapter.Optimizer(with_gradient(1), factory)


def test_clipping_sees_all_groups() -> None:
    a, b = with_gradient(1, 1)
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    groups = [{"params": [a]}, {"params": [b], "lr": 0.5}]
    optimizer = adapter.Optimizer(groups, functricks.chain(functricks.clip_by_global_norm(1.0), functricks.sgd(1.0)))
    optimizer.step()
    assert [a.item(), b.item()] == pytest.approx([1 - 0.6, 1 - 0.5 * 0.8])


def test_statistics_of_half_precision_stay_wide_when_loaded() -> None:
    make: Make = lambda model: adapter.Optimizer(model.named_parameters(), clipped())  # noqa: E731 - a Make
    expected, begun = trained(make, 2, dtype=torch.bfloat16)
    model = network(torch.bfloat16)
    model.load_state_dict(expected.state_dict())
    optimizer = make(model)
    optimizer.load_state_dict(begun.state_dict())
    assert optimizer.state[model[0].weight]["mu"].dtype == torch.float32
    assert optimizer.param_groups[0]["shared_state"]["step"].dtype == torch.int64
    assert_same(values(train(model, optimizer, 2, 2)), values(train(expected, begun, 2, 2)))


def test_loaded_state_is_a_copy() -> None:
    make: Make = lambda model: adapter.Optimizer(model.named_parameters(), clipped())  # noqa: E731 - a Make
    _, begun = trained(make, 2)
    saved = copy.deepcopy(begun.state_dict())
    model = network()
    optimizer = make(model)
    optimizer.load_state_dict(saved)
    train(model, optimizer)
    assert_same(saved["state"], begun.state_dict()["state"])


# --- groups ----------------------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("transform", [functricks.sgd(0.1), clipped()], ids=["kernel", "chain"])


@pytest.mark.parametrize("chained", [False, True])
def test_writing_a_learning_rate_takes_effect(chained: bool) -> None:
    (parameter,) = with_gradient(1)
    sgd = functricks.sgd(0.1)
    optimizer = adapter.Optimizer([parameter], functricks.chain(sgd) if chained else sgd)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert parameter.item() == pytest.approx(0.4)
    optimizer.param_groups[0]["weight_decay"] = 1.0
    optimizer.step()
    assert parameter.item() == pytest.approx(0.4 - 0.5 * 1.4)


@pytest.mark.parametrize("chained", [False, True])
def test_groups_have_hyper_parameters_of_their_own(chained: bool) -> None:
    a, b, c = with_gradient(1, 1, 1)
    transform = functricks.sgd(0.1, momentum=0.5)
    optimizer = adapter.Optimizer(
        [{"params": [a]}, {"params": [b], "lr": 0.2}], functricks.chain(transform) if chained else transform
    )
    optimizer.step()
    optimizer.add_param_group({"params": c, "lr": 0.4})
    optimizer.step()
    assert [a.item(), b.item(), c.item()] == pytest.approx([0.75, 0.5, 0.6])


def test_adagrad_takes_new_groups() -> None:
    a, b = with_gradient(1, 1)
    optimizer = adapter.Optimizer([a], functricks.adagrad, lr=0.1)
    optimizer.add_param_group({"params": [b]})
    optimizer.step()
    assert b.item() == pytest.approx(0.9)


@BOTH
def test_errors_of_groups_are_torchs(transform: Transform) -> None:
    (parameter,) = with_gradient(1)
    with pytest.raises(ValueError, match="empty parameter list"):
        adapter.Optimizer([], transform)
    with pytest.raises(TypeError, match="should be an iterable of Tensors or dicts"):
        adapter.Optimizer(parameter, transform)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        adapter.Optimizer([parameter * 2], transform)
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        adapter.Optimizer([1.0], transform)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="more than one parameter group"):
        adapter.Optimizer([{"params": [parameter]}, {"params": [parameter]}], transform)
    optimizer = adapter.Optimizer([parameter], transform)
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": set(with_gradient(1))})
    with pytest.raises(TypeError, match="must be a dict"):
        optimizer.add_param_group([parameter])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="with/without names"):
        optimizer.add_param_group({"params": [("a", with_gradient(1)[0])]})


@BOTH
def test_a_parameter_that_is_listed_twice_moves_once(transform: Transform) -> None:
    once, twice = with_gradient(1, 1)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = adapter.Optimizer([twice, twice], transform)
    optimizer.step()
    adapter.Optimizer([once], transform).step()
    assert torch.equal(once, twice)


def test_errors_of_its_own() -> None:
    a, b = with_gradient(1, 1)
    with pytest.raises(TypeError, match="hyper-parameters go with a factory"):
        adapter.Optimizer([a], functricks.sgd(0.1), lr=0.1)
    with pytest.raises(TypeError, match="sgd takes no learning_rate; it has: lr, momentum"):
        adapter.Optimizer([a], functricks.sgd, learning_rate=0.1)
    with pytest.raises(TypeError, match="needs a transform or a factory"):
        adapter.Optimizer([a], 0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lr must be >= 0"):
        adapter.Optimizer([{"params": [a], "lr": -1.0}], functricks.sgd, lr=0.1)
    with pytest.raises(ValueError, match="names must be unique"):
        adapter.Optimizer([("w", a), ("w", b)], functricks.sgd)
    with pytest.raises(ValueError, match="does not say how it was made"):
        adapter.Optimizer([{"params": [a], "lr": 0.1}], functricks.scale(-0.1))
    with pytest.raises(TypeError, match="RMSprop has no fused"):
        adapter.Optimizer([a], functricks.rmsprop, fused=True)
    with pytest.raises(TypeError, match="foreach says nothing"):
        adapter.Optimizer([a], functricks.lion, foreach=True)


# --- the step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chained", [False, True])
def test_without_a_gradient_nothing_moves(chained: bool) -> None:
    """Neither the parameter nor its state, though others decay; when the gradient is back, it goes on."""
    a, b = with_gradient(2, 2)
    transform = functricks.adamw(0.1, weight_decay=0.5)
    optimizer = adapter.Optimizer([("a", a), ("b", b)], functricks.chain(transform) if chained else transform)
    optimizer.step()
    before, state = b.detach().clone(), copy.deepcopy(dict(optimizer.state[b]))
    gradient, b.grad = b.grad, None
    optimizer.step()
    assert_same(b.detach(), before)
    assert_same(dict(optimizer.state[b]), state)
    assert (a < before).all()
    b.grad = gradient
    optimizer.step()
    assert (b < before).all()
    optimizer.zero_grad()
    last = a.detach().clone()
    optimizer.step()
    assert_same(a.detach(), last)


def test_a_parameter_may_get_its_first_gradient_late() -> None:
    a, b = with_gradient(2, 2)
    b.grad = None
    optimizer = adapter.Optimizer([("a", a), ("b", b)], clipped())
    optimizer.step()
    assert b not in optimizer.state
    b.grad = torch.ones(2)
    optimizer.step()
    assert sorted(optimizer.state[b]) == ["mu", "nu"]
    assert optimizer.param_groups[0]["shared_state"]["step"] == 2


@BOTH
def test_closure_runs_with_gradients_and_its_loss_comes_back(transform: Transform) -> None:
    model = network()
    optimizer = adapter.Optimizer(model.parameters(), transform)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(model)

    with torch.no_grad():
        first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    assert optimizer.step() is None


@BOTH
def test_zero_grad(transform: Transform) -> None:
    (parameter,) = with_gradient(1)
    optimizer = adapter.Optimizer([parameter], transform)
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad is not None
    assert parameter.grad.item() == 0
    optimizer.zero_grad()
    assert parameter.grad is None


@BOTH
def test_hooks_are_called_once_and_in_order(transform: Transform) -> None:
    (parameter,) = with_gradient(1)
    optimizer = adapter.Optimizer([parameter], transform)
    calls: list[str] = []

    def noted(name: str) -> Any:
        def hook(found: torch.optim.Optimizer, *rest: Any) -> None:
            assert found is optimizer
            calls.append(name)

        return hook

    everywhere = register_optimizer_step_pre_hook(noted("global"))
    handles = [
        optimizer.register_step_pre_hook(noted("before")),
        optimizer.register_step_post_hook(noted("after")),
        optimizer.register_state_dict_pre_hook(noted("saving")),
        optimizer.register_state_dict_post_hook(noted("saved")),
        optimizer.register_load_state_dict_pre_hook(noted("loading")),
        optimizer.register_load_state_dict_post_hook(noted("loaded")),
    ]
    try:
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        everywhere.remove()
    assert calls == ["global", "before", "after", "saving", "saved", "loading", "loaded"]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(calls) == 7


def test_hook_may_rename_before_names_are_matched() -> None:
    def renamed(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        groups = [
            {**group, "param_names": [name.removeprefix("module.") for name in group["param_names"]]}
            for group in state["param_groups"]
        ]
        return {**state, "param_groups": groups}

    a, b = with_gradient(1, 1)
    wrapped = adapter.Optimizer([("module.w", a)], functricks.adamw)
    wrapped.step()
    optimizer = adapter.Optimizer([("w", b)], functricks.adamw)
    with pytest.raises(ValueError, match=r"only here: w; only in the state: module\.w"):
        optimizer.load_state_dict(wrapped.state_dict())
    optimizer.register_load_state_dict_pre_hook(renamed)
    optimizer.load_state_dict(wrapped.state_dict())
    assert_same(optimizer.state[b], wrapped.state[a])


# --- saving, loading, copying ----------------------------------------------------------------------------------------

KINDS: dict[str, Make] = {
    "kernel": lambda model: adapter.Optimizer(model.named_parameters(), functricks.adamw, lr=0.01),
    "chain": lambda model: adapter.Optimizer(model.named_parameters(), clipped()),
    "schedule": lambda model: adapter.Optimizer(
        model.named_parameters(), functricks.adamw, lr=schedules.cosine_annealing(0.1, 10)
    ),
    "two groups": lambda model: adapter.Optimizer(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}], functricks.lion, lr=0.01
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["state_dict", "file", "deepcopy", "pickle"])
def test_goes_on_where_it_was(kind: str, how: str) -> None:
    model, optimizer = trained(KINDS[kind], 2)
    if how in ("deepcopy", "pickle"):
        both = (model, optimizer)
        other, copied = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    else:
        state = copy.deepcopy(optimizer.state_dict())  # which holds the tensors themselves
        if how == "file":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        other = network()
        other.load_state_dict(model.state_dict())
        copied = KINDS[kind](other)
        copied.load_state_dict(state)
    assert_same(values(train(other, copied, 3, 2)), values(train(model, optimizer, 3, 2)))
    assert copied.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("transform", [functricks.adamw(0.1), clipped()], ids=["kernel", "chain"])
def test_state_is_matched_by_name(transform: Transform) -> None:
    """Same shapes in another order: by position, the moments would be swapped without a word."""
    a, b = with_gradient(2, 2)
    b.grad = torch.full((2,), -3.0)
    optimizer = adapter.Optimizer([("a", a), ("b", b)], transform)
    optimizer.step()
    turned = adapter.Optimizer([("b", b), ("a", a)], transform)
    turned.load_state_dict(optimizer.state_dict())
    for parameter in (a, b):
        assert_same(dict(turned.state[parameter]), dict(optimizer.state[parameter]))
    assert turned.param_groups[0]["param_names"] == ["b", "a"]


def test_load_changes_nothing_when_it_fails() -> None:
    _, optimizer = trained(KINDS["chain"])
    before = copy.deepcopy(optimizer.state_dict())
    _, other = trained(KINDS["kernel"])
    with pytest.raises(ValueError, match=r"the state of 0\.weight has exp_avg, exp_avg_sq, step; .* keeps mu, nu"):
        optimizer.load_state_dict(other.state_dict())
    _, two = trained(KINDS["two groups"])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(two.state_dict())
    assert_same(optimizer.state_dict()["state"], before["state"])
    _, scheduled = trained(KINDS["schedule"])
    with pytest.raises(ValueError, match="saved without a schedule"):
        scheduled.load_state_dict(other.state_dict())


@pytest.mark.parametrize("kernel", [True, False])
def test_a_state_of_another_optimizer_is_refused_at_once(kernel: bool) -> None:
    """Before anything is changed, and not by a KeyError in the middle of a later step."""
    model, optimizer = trained(KINDS["kernel" if kernel else "chain"], 2)
    before = copy.deepcopy(optimizer.state_dict())
    sgd = torch.optim.SGD(model.named_parameters(), 0.1, momentum=0.9)
    fresh = sgd.state_dict()
    sgd.step()
    match = "group 0 of the state has no betas, eps.*saved by another optimizer"
    for state in (fresh, sgd.state_dict()):
        with pytest.raises(ValueError, match=match):
            optimizer.load_state_dict(state)
    assert_same(optimizer.state_dict()["state"], before["state"])
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    train(model, optimizer, 2, 0)


@pytest.mark.parametrize("name", sorted(_CLASSES))
def test_every_kernel_loads_its_own_state_again_and_again(name: str) -> None:
    shapes: list[tuple[int, ...]] = [(3, 2)] if name == "muon" else [(), (3,), (3, 2), (2, 3, 2)]
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = adapter.Optimizer(parameters, getattr(functricks, name), lr=0.1)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    another = {"adam": "sgd", "adamw": "sgd"}.get(name, "adamw")
    if name != "radam":  # which has the keys of adam
        single = adapter.Optimizer([nn.Parameter(torch.ones(shapes[-1]))], getattr(functricks, name), lr=0.1)
        with pytest.raises(ValueError, match=r"saved by another optimizer|keeps"):
            single.load_state_dict(_one_step(another).state_dict())


def _one_step(name: str) -> torch.optim.Optimizer:
    optimizer = adapter.Optimizer(with_gradient(2), getattr(functricks, name), lr=0.1)
    optimizer.step()
    return optimizer


def test_a_state_of_a_chain_is_refused_by_a_kernel() -> None:
    model, optimizer = trained(KINDS["kernel"], 2)
    _, other = trained(KINDS["chain"], 2)
    with pytest.raises(ValueError, match="the state of parameter 0 has mu, nu; AdamW keeps exp_avg, exp_avg_sq, step"):
        optimizer.load_state_dict(other.state_dict())
    train(model, optimizer, 2, 0)


def test_momentum_may_have_been_switched_before_saving() -> None:
    model, optimizer = trained(
        lambda model: adapter.Optimizer(model.parameters(), functricks.sgd, lr=0.1, momentum=0.9)
    )
    optimizer.param_groups[0]["momentum"] = 0.0
    copied = adapter.Optimizer(model.parameters(), functricks.sgd, lr=0.1)
    copied.load_state_dict(optimizer.state_dict())
    train(model, copied, 1, 0)
    copied.param_groups[0]["momentum"] = 0.5
    copied.load_state_dict(copied.state_dict())
    train(model, copied, 1, 0)


def test_a_chain_loads_its_own_state_after_a_switch() -> None:
    model, optimizer = trained(
        lambda model: adapter.Optimizer(model.parameters(), functricks.chain(functricks.sgd(0.1, momentum=0.9)))
    )
    for momentum in (0.0, 0.5):
        optimizer.param_groups[0]["momentum"] = momentum
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, 1, 0)


def test_closures_cannot_be_pickled_but_copied() -> None:
    _, optimizer = trained(lambda model: adapter.Optimizer(model.named_parameters(), OTHERS["partition"]()))
    copy.deepcopy(optimizer).step()
    with pytest.raises(TypeError, match="a transform of closures cannot be pickled"):
        pickle.dumps(optimizer)


# --- a schedule as the learning rate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chained", [False, True])
def test_schedule_counts_steps_and_shows_its_value(chained: bool) -> None:
    (parameter,) = with_gradient(1)
    sgd = functricks.sgd(schedules.exponential_decay(1.0, gamma=0.5))
    optimizer = adapter.Optimizer([parameter], functricks.chain(sgd) if chained else sgd)
    shown = [optimizer.param_groups[0]["lr"]]
    for _ in range(2):
        optimizer.step()
        shown.append(optimizer.param_groups[0]["lr"])
    assert shown == [1.0, 0.5, 0.25]
    assert parameter.item() == pytest.approx(1 - 1.5)
    assert optimizer.param_groups[0]["schedule_step"] == 2
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(ValueError, match=r"a schedule decides this learning rate"):
        optimizer.step()


def test_schedule_of_a_group() -> None:
    a, b = with_gradient(1, 1)
    groups = [{"params": [a]}, {"params": [b], "lr": schedules.constant(0.5)}]
    optimizer = adapter.Optimizer(groups, functricks.sgd, lr=0.1)
    optimizer.step()
    assert [a.item(), b.item()] == pytest.approx([0.9, 0.5])


def test_tensor_learning_rate_may_be_written_in_place() -> None:
    (parameter,) = with_gradient(1)
    lr = torch.tensor(0.1)
    optimizer = adapter.Optimizer([parameter], functricks.sgd, lr=lr)
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(0.5)
    optimizer.step()
    assert parameter.item() == pytest.approx(0.4)
