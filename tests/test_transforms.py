"""Composing transforms, and each transform against its formula written out."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from helpers import FLOAT16_EPS, assert_close, assert_half_close, assert_same, lane, stack
from torch import Tensor

import functricks as F
from functricks import schedules
from functricks.types import Empty, Transform

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def drive(transform: Transform, slopes: list[Any], params: Any) -> tuple[list[Any], Any]:
    """The updates for a list of gradients, at parameters that stand still."""
    state, found = transform.init(params), []
    for grads in slopes:
        updates, state = transform.update(grads, state, params)
        found.append(updates)
    return found, state


def scalars(*values: float, dtype: torch.dtype = F64) -> list[dict[str, Tensor]]:
    return [{"w": torch.tensor(value, dtype=dtype)} for value in values]


W = {"w": torch.tensor(1.5, dtype=F64)}


# --- composing -------------------------------------------------------------------------------------------------------


def test_chain_runs_left_to_right_and_keeps_a_tuple_of_states() -> None:
    counting = F.scale_by_schedule(lambda step: step + 1.0)
    both = F.chain(F.clip_by_global_norm(1.0), counting)
    found, state = drive(both, scalars(10.0, 10.0), W)
    assert [one["w"].item() for one in found] == [1.0, 2.0]  # clipped first, scaled after
    assert state[0] == Empty()
    assert state[1].step == 2
    other_way = drive(F.chain(counting, F.clip_by_global_norm(1.0)), scalars(10.0, 10.0), W)[0]
    assert [one["w"].item() for one in other_way] == [1.0, 1.0]


def test_chains_nest() -> None:
    links = F.trace(0.9), F.add_decayed_weights(0.1), F.scale(-0.5)
    flat = drive(F.chain(*links), scalars(1.0, 2.0), W)[0]
    assert_same(drive(F.chain(F.chain(links[0]), F.chain(*links[1:])), scalars(1.0, 2.0), W)[0], flat)


def test_chain_refuses_what_is_no_transform() -> None:
    with pytest.raises(TypeError, match=r"chain: every link must be a Transform, got 0\.1"):
        F.chain(F.scale(1.0), 0.1)  # type: ignore[arg-type]


def test_partition_is_each_transform_on_its_own_leaves() -> None:
    params = {"z": torch.tensor([1.0, 2.0]), "a": {"b": torch.tensor(3.0), "c": torch.tensor(-1.0)}}
    labels = {"z": "adam", "a": {"b": "sgd", "c": "adam"}}
    parts = {"adam": F.adam(0.1), "sgd": F.sgd(0.5, momentum=0.9)}
    both = F.partition(parts, labels)
    own = {
        name: {"z": params["z"], "a.c": params["a"]["c"]} if name == "adam" else {"a.b": params["a"]["b"]}
        for name in parts
    }
    state, states = both.init(params), {name: parts[name].init(own[name]) for name in parts}
    for step in range(3):
        grads = torch.utils._pytree.tree_map(lambda leaf, step=step: (leaf + step).cos(), params)
        updates, state = both.update(grads, state, params)
        flat = {"z": grads["z"], "a.b": grads["a"]["b"], "a.c": grads["a"]["c"]}
        found = {}
        for name in parts:
            mine, states[name] = parts[name].update({path: flat[path] for path in own[name]}, states[name], own[name])
            found.update(mine)
        assert_same(updates, {"z": found["z"], "a": {"b": found["a.b"], "c": found["a.c"]}})


def test_partition_labels_by_function_and_for_nobody() -> None:
    parts = {"slow": F.scale(-0.1), "fast": F.scale(-1.0), "unused": F.adam(1.0)}
    found = drive(
        F.partition(parts, lambda path, leaf: "fast" if leaf.ndim else "slow"),
        [{"a": torch.ones(2), "b": torch.tensor(1.0)}],
        {"a": torch.ones(2), "b": torch.tensor(1.0)},
    )[0]
    assert_same(found[0], {"a": torch.full((2,), -1.0), "b": torch.tensor(-0.1)})


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        (lambda path, leaf: None, r"partition: labels: every parameter needs one label .*without: a, b.0"),
        (
            lambda path, leaf: "fast" if path == "a" else "fsat",
            r"labels without a transform: {'b.0': 'fsat'}; have: fast",
        ),
        ({"a": "fast"}, r"partition: labels: trees differ; missing: \['b.0'\], unexpected: \[\]"),
        ({"a": "fast", "b": ["fast"], "c": "fast"}, r"missing: \[\], unexpected: \['c'\]"),
    ],
)
def test_partition_names_every_leaf_that_it_cannot_place(labels: Any, match: str) -> None:
    params = {"a": torch.ones(1), "b": [torch.ones(1)]}
    with pytest.raises(ValueError, match=match):
        F.partition({"fast": F.scale(1.0)}, labels).init(params)


def test_c39_case_a_a_mask_decides_what_decays() -> None:
    params = {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}
    grads = {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}
    for where in ({"a": True, "b": False}, "a", lambda path, leaf: path == "a", ["a"]):
        optimizer = F.adamw(0.1, weight_decay=0.1, decay_where=where)
        found = drive(optimizer, [grads], params)[0][0]
        assert_close(found, {"a": torch.tensor(-0.11), "b": torch.tensor(-0.10)})
    classic = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in params.items()}
    groups = [{"params": [classic["a"]], "weight_decay": 0.1}, {"params": [classic["b"]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for p in classic.values():
        p.grad = torch.tensor(1.0)
    optimizer.step()
    assert_close(F.apply_updates(params, found), {name: p.detach() for name, p in classic.items()})


def test_a_decay_mask_that_matches_nothing_raises() -> None:
    optimizer = F.sgd(0.1, weight_decay=0.1, decay_where="*.weigth")
    with pytest.raises(
        ValueError, match=r"add_decayed_weights: where='\*.weigth' matches no parameter; have: fc.weight"
    ):
        drive(optimizer, [{"fc": {"weight": torch.ones(1)}}], {"fc": {"weight": torch.ones(1)}})


# --- skip_nonfinite --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_skipped_step_leaves_no_trace(bad: float) -> None:
    safe = F.skip_nonfinite(F.adam(0.1))
    good = scalars(1.0, -2.0, 0.5)
    expected, end = drive(safe, good, W)
    found, state = drive(safe, [good[0], *scalars(bad), good[1], *scalars(bad), good[2]], W)
    assert_same([found[i] for i in (0, 2, 4)], expected)
    assert_same([found[1], found[3]], scalars(0.0, 0.0))
    assert_same(state.inner, end.inner)
    assert (state.skipped, end.skipped) == (2, 0)


def test_lanes_skip_for_themselves() -> None:
    safe = F.skip_nonfinite(F.sgd(0.1, momentum=0.9))
    params = {"w": torch.ones(3, dtype=F64)}
    grads = [torch.tensor([1.0, math.nan, 3.0], dtype=F64), torch.tensor([1.0, 2.0, math.inf], dtype=F64)]
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            state, found = torch.vmap(safe.init)(params), []
            for grad in grads:
                updates, state = torch.vmap(safe.update)({"w": grad}, state, params)
                found.append(updates)
        assert state.skipped.tolist() == [0, 1, 1]
        for i in range(3):
            alone = drive(safe, [{"w": grad[i]} for grad in grads], {"w": params["w"][i]})
            assert_same((lane(found, i), lane(state, i)), alone)


# --- the formulas ----------------------------------------------------------------------------------------------------


def test_scale_and_learning_rate() -> None:
    assert_same(drive(F.scale(-0.5), scalars(2.0), W)[0], scalars(-1.0))
    for lr in (0.25, torch.tensor(0.25), schedules.constant(0.25)):
        assert_same(drive(F.scale_by_learning_rate(lr), scalars(2.0), W)[0], scalars(-0.5))


def test_a_schedule_sees_zero_at_the_first_update() -> None:
    seen = []

    def schedule(step: Tensor) -> Tensor:
        seen.append(step)
        return 0.5**step

    found = drive(F.scale_by_learning_rate(schedule), scalars(1.0, 1.0, 1.0), W)[0]
    assert seen == [0, 1, 2]
    assert all(step.dtype == torch.int64 for step in seen)
    assert [one["w"].item() for one in found] == [-1.0, -0.5, -0.25]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_trace_against_the_recursion(dampening: float, nesterov: bool) -> None:
    slopes = [1.0, -0.5, 2.0, 0.25]
    expected, b = [], None
    for g in slopes:
        b = g if b is None else 0.9 * b + (1 - dampening) * g
        expected.append(g + 0.9 * b if nesterov else b)
    for numbers in ((0.9, dampening), (torch.tensor(0.9, dtype=F64), torch.tensor(dampening, dtype=F64))):
        assert_close(drive(F.trace(*numbers, nesterov), scalars(*slopes), W)[0], scalars(*expected))


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_against_the_recursion(amsgrad: bool) -> None:
    slopes = [1.0, -0.5, 0.01, 2.0, 0.25]
    beta1, beta2, eps = 0.8, 0.9, 1e-3
    m = v = largest = 0.0
    expected = []
    for t, g in enumerate(slopes, 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        largest = max(largest, v)
        root = math.sqrt((largest if amsgrad else v) / (1 - beta2**t))
        expected.append(m / (1 - beta1**t) / (root + eps))
    assert_close(drive(F.scale_by_adam((beta1, beta2), eps, amsgrad), scalars(*slopes), W)[0], scalars(*expected))


def test_bias_corrections_are_float64() -> None:
    """In float32, 1 - 0.999**t is off by 1e-5 at the first step, and so would be the update."""
    found = drive(F.scale_by_adam(), scalars(3.0, dtype=F32), {"w": torch.tensor(0.0)})[0][0]["w"]
    assert found.item() == pytest.approx(1.0, abs=2e-7)


def test_decay_is_that_of_the_parameters() -> None:
    found = drive(F.add_decayed_weights(0.1), scalars(2.0), W)[0]
    assert_close(found, scalars(2.15))
    params = {"fc": {"weight": torch.tensor(2.0), "bias": torch.tensor(2.0)}}
    zero = torch.utils._pytree.tree_map(torch.zeros_like, params)
    found = drive(F.add_decayed_weights(torch.tensor(0.5), where="*.weight"), [zero], params)[0]
    assert_same(found[0], {"fc": {"weight": torch.tensor(1.0), "bias": torch.tensor(0.0)}})


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_half_gradients_gather_in_float32(dtype: torch.dtype) -> None:
    """1,024 steps of 0.01: a float16 or bfloat16 sum stops growing long before."""
    params, grads = {"w": torch.ones(2, dtype=dtype)}, {"w": torch.full((2,), 0.01, dtype=dtype)}
    for transform, expected in [
        (F.trace(1.0), 1024 * grads["w"].double()),
        (F.scale_by_adam(), torch.ones(2, dtype=F64)),
    ]:
        found, state = drive(transform, [grads] * 1024, params)
        assert_half_close(found[-1]["w"].to(dtype), expected, FLOAT16_EPS)
        memory = state.trace["w"] if hasattr(state, "trace") else state.mu["w"]
        assert memory.dtype == F32


def test_apply_updates_keeps_the_parameters_dtype() -> None:
    params = {"a": torch.ones(2, dtype=F16), "b": torch.ones(1, dtype=F64), "c": torch.ones(1)}
    updates = {name: torch.full(leaf.shape, 2.0**-11, dtype=F32) for name, leaf in params.items()}
    found = F.apply_updates(params, updates)
    assert [leaf.dtype for leaf in found.values()] == [F16, F64, F32]
    assert found["c"] == 1 + 2.0**-11


# --- hyper-parameters as tensors -------------------------------------------------------------------------------------


def test_a_tensor_hyper_parameter_is_structure_a_number_zero_is_not() -> None:
    """Zero as a number leaves the link out; as a tensor it stays, and changes nothing."""
    assert len(F.sgd(0.1).init(W)) < len(F.sgd(0.1, momentum=torch.tensor(0.0)).init(W))
    slopes = scalars(1.0, 2.0)
    zero = torch.tensor(0.0, dtype=F64)
    assert_close(drive(F.sgd(0.1, momentum=zero, weight_decay=zero), slopes, W)[0], drive(F.sgd(0.1), slopes, W)[0])


def test_hyper_parameters_in_float32_serve_float64_leaves() -> None:
    """As experiments pass them: a float32 tensor is the number that it holds."""
    lr = torch.tensor(0.1)
    found = drive(F.adamw(lr, (torch.tensor(0.9), torch.tensor(0.99))), scalars(1.0, 2.0), W)[0]
    expected = drive(F.adamw(lr.item(), (torch.tensor(0.9).item(), torch.tensor(0.99).item())), scalars(1.0, 2.0), W)[0]
    assert_close(found, expected)


def test_c38_one_learning_rate_a_member() -> None:
    lr = torch.tensor([0.1, 0.2, 0.3])
    params = {"w": torch.ones(3)}

    def one(lr: Tensor, params: Any, clip: bool) -> Any:
        optimizer = F.chain(F.clip_by_global_norm(1.0), F.sgd(lr)) if clip else F.sgd(lr)
        updates, _ = optimizer.update({"w": 2 * params["w"]}, optimizer.init(params), params)
        return F.apply_updates(params, updates)["w"]

    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            assert_close(torch.vmap(lambda *args: one(*args, False))(lr, params), torch.tensor([0.8, 0.6, 0.4]))
            assert_close(torch.vmap(lambda *args: one(*args, True))(lr, params), torch.tensor([0.9, 0.8, 0.7]))


def test_a_frozen_member_by_a_mask_over_lanes() -> None:
    frozen = torch.tensor([0.0, 1.0])

    def one(moves: Tensor, params: Any) -> Any:
        optimizer = F.chain(F.adam(0.1), F.scale(moves))
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        return F.apply_updates(params, updates)["w"]

    found = torch.vmap(one, (0, None))(frozen, {"w": torch.tensor(2.0)})
    assert found[0] == 2.0
    assert found[1] == pytest.approx(1.9)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: F.scale_by_learning_rate(-0.1), ValueError, "lr must be >= 0, got -0.1"),
        (lambda: F.scale_by_learning_rate("0.1"), TypeError, "lr must be a number or a 0-d tensor, got '0.1'"),
        (lambda: F.scale_by_learning_rate(math.nan), ValueError, "lr must be >= 0, got nan"),
        (lambda: F.trace(-0.9), ValueError, "momentum must be >= 0, got -0.9"),
        (lambda: F.trace(None), TypeError, "momentum must be a number or a 0-d tensor, got None"),
        (lambda: F.trace(0.9, "x"), TypeError, "dampening must be a number or a 0-d tensor, got 'x'"),
        (lambda: F.scale_by_adam((0.9, 1.0)), ValueError, r"betas\[1\] must be < 1, got 1.0"),
        (lambda: F.scale_by_adam((-0.1, 0.9)), ValueError, r"betas\[0\] must be >= 0, got -0.1"),
        (lambda: F.scale_by_adam(eps=-1.0), ValueError, "eps must be >= 0, got -1.0"),
        (lambda: F.add_decayed_weights(-1.0), ValueError, "weight_decay must be >= 0, got -1.0"),
        (lambda: F.add_decayed_weights(lambda step: 0.1), TypeError, "weight_decay must be a number or a 0-d tensor"),
        (lambda: F.trace(schedules.constant(0.9)), TypeError, "momentum must be a number or a 0-d tensor"),
    ],
)
def test_bad_arguments(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_states_of_lanes_stack() -> None:
    """The state of a vmapped init is the stack of the single ones: what Results.state and stack rely on."""
    optimizer = F.chain(F.clip_by_global_norm(1.0), F.adamw(0.1, amsgrad=True))
    params = [{"w": torch.randn(2)} for _ in range(3)]
    assert_same(
        torch.vmap(optimizer.init)(stack(params)),
        torch.utils._pytree.tree_map(lambda *leaves: torch.stack(leaves), *[optimizer.init(one) for one in params]),
    )


# --- what would broadcast silently -----------------------------------------------------------------------------------

THREE = torch.tensor([0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: F.scale(THREE), "scale: factor"),
        (lambda: F.sgd(THREE), "lr"),
        (lambda: F.sgd(0.1, momentum=THREE), "momentum"),
        (lambda: F.adamw(THREE), "lr"),
        (lambda: F.adam(betas=(0.9, THREE)), r"betas\[1\]"),
        (lambda: F.adamw(weight_decay=THREE), "weight_decay"),
        (lambda: F.asgd(lambd=THREE), "asgd: lambd"),
        (lambda: F.adafactor(d=THREE), "adafactor: d"),
        (lambda: F.muon(ns_coefficients=(3.4, -4.8, THREE)), r"muon: ns_coefficients\[2\]"),
        (lambda: F.schedule_free_adamw(warmup_steps=THREE), "schedule_free_adamw: warmup_steps"),
        (lambda: F.rprop(THREE), "rprop: lr"),
        (lambda: F.sgd(0.1, learning_rates={"w": THREE}), r"learning_rates\['w'\]"),
        (lambda: F.layer_decay(THREE), "layer_decay: rate"),
        (lambda: F.clip_by_value(THREE), "clip_by_value: bound"),
        (lambda: F.multi_steps(F.sgd(0.1), torch.tensor([2, 3, 4])), "multi_steps: every"),
        (lambda: F.lookahead(F.sgd(0.1), torch.tensor([2, 3, 4])), "lookahead: sync_period"),
        (lambda: F.swa(start=torch.tensor([2, 3, 4])), "swa: start"),
        (lambda: F.ema(THREE), "ema: decay"),
        (lambda: F.inject_hyperparams(F.sgd)(lr=THREE), "lr"),
    ],
)
def test_a_hyper_parameter_with_axes_raises(make: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.* must be a 0-d tensor, got shape \(3,\)"):
        make()
    assert THREE[0].ndim == 0  # as a lane sees it: the makers take that, see laws.py


@pytest.mark.parametrize(
    "maker", [F.sgd, F.adamw, F.adafactor, F.asgd, F.schedule_free_adamw, F.scale_by_schedule], ids=lambda m: m.__name__
)
def test_a_schedule_of_several_values_raises(maker: Any) -> None:
    params = {"w": torch.ones(2, 3)}
    with pytest.raises(ValueError, match=r"0-d.*got shape \(3,\)"):
        drive(maker(lambda step: THREE.double()), [params], params)


def test_scale_by_schedule_refuses_a_number() -> None:
    with pytest.raises(TypeError, match=r"scale_by_schedule: schedule must be a function of the step, got 0\.1"):
        F.scale_by_schedule(0.1)  # type: ignore[arg-type]


STATELESS = {
    "sgd": F.sgd(0.1),
    "decayed sgd": F.sgd(0.1, weight_decay=0.1),
    "trust": F.chain(F.scale_by_trust_ratio(), F.scale_by_learning_rate(0.1)),
    "adaptive_clip": F.chain(F.adaptive_clip(), F.scale(-1.0)),
    "adamw": F.adamw(0.1),
    "ema": F.chain(F.sgd(0.1), F.ema(0.9)),
    "lookahead": F.lookahead(F.sgd(0.1)),
}


@pytest.mark.parametrize("shape", [(3, 1), (3,), (), (1, 3, 3)])
@pytest.mark.parametrize("name", STATELESS)
def test_a_gradient_of_another_shape_raises(name: str, shape: tuple[int, ...]) -> None:
    params = {"fc": {"weight": torch.ones(3, 3)}, "b": torch.ones(3)}
    grads = {"fc": {"weight": torch.ones(shape)}, "b": torch.ones(3)}
    optimizer = STATELESS[name]
    with pytest.raises(ValueError, match=r"fc\.weight .*\(3, 3\)") as caught:
        F.apply_updates(params, optimizer.update(grads, optimizer.init(params), params)[0])
    assert str(shape) in str(caught.value)


def test_apply_updates_names_what_would_broadcast_in_lanes_and_when_compiled() -> None:
    params, updates = {"w": torch.ones(2, 3, 3)}, {"w": torch.ones(2, 3, 1)}
    with pytest.raises(ValueError, match=r"shapes: \['w \(3, 3\) != \(3, 1\)'\]"):
        torch.vmap(F.apply_updates)(params, updates)
    with pytest.raises(Exception, match=r"w \(2, 3, 3\) != \(2, 3, 1\)"):  # dynamo wraps it
        torch.compile(F.apply_updates, backend="eager", fullgraph=True)(params, updates)


@pytest.mark.parametrize("name", STATELESS)
def test_a_gradient_that_is_none_is_named(name: str) -> None:
    params = {"head": {"w": torch.ones(2)}, "pooler": torch.ones(2)}
    optimizer = STATELESS[name]
    grads = {"head": {"w": torch.ones(2)}, "pooler": None}
    with pytest.raises(ValueError, match=r"pooler"):
        F.apply_updates(params, optimizer.update(grads, optimizer.init(params), params)[0])
    with pytest.raises(ValueError, match=r"None in place of a tensor: \['pooler'\], give zeros or leave"):
        F.apply_updates(params, {"head": {"w": torch.ones(2)}, "pooler": None})


@pytest.mark.parametrize(
    "maker",
    [F.sgd, F.adam, F.adamw, F.nadam, F.radam, F.adamax, F.adagrad, F.adadelta, F.rmsprop, F.rprop, F.asgd, F.lion,
     F.lamb, F.adafactor, F.schedule_free_adamw, partial(F.sgd, momentum=0.9)],
    ids=lambda maker: getattr(maker, "__name__", "momentum"),
)  # fmt: skip
def test_a_leaf_that_cannot_move_is_named_at_init(maker: Any) -> None:
    params = {"bn": {"weight": torch.ones(2), "num_batches_tracked": torch.tensor(3)}}
    with pytest.raises(TypeError, match=r"floating-point tensors, bn\.num_batches_tracked is torch\.int64"):
        maker().init(params)
    apart = F.partition({"moves": maker(), "rests": F.freeze()}, lambda path, leaf: "moves" if leaf.ndim else "rests")
    updates, _ = apart.update(params, apart.init(params), params)
    assert updates["bn"]["num_batches_tracked"] == 0


def test_complex_leaves_move_by_linear_updates_only() -> None:
    params = {"w": torch.tensor([1.0 + 2.0j, -1.0j])}
    with pytest.raises(TypeError, match=r"scale_by_adam: parameters must be real .* w is torch\.complex64"):
        F.adam().init(params)
    w = torch.nn.Parameter(params["w"].clone())
    classic = torch.optim.SGD([w], 0.1, momentum=0.9)
    optimizer = F.sgd(0.1, momentum=0.9)
    state = optimizer.init(params)
    for step in range(3):
        grads = {"w": (step + 1.0j) * params["w"].detach()}
        w.grad = grads["w"].clone()
        classic.step()
        updates, state = optimizer.update(grads, state, params)
        params = F.apply_updates(params, updates)
    assert (params["w"] - w.detach()).abs().max() < 1e-6


def test_skip_nonfinite_looks_at_what_the_transform_gets() -> None:
    """A metric or a carry that is NaN says nothing about the gradient; a weight that is NaN would spoil the mean."""
    safe = F.skip_nonfinite(F.multi_steps(F.sgd(1.0), 2))
    params = {"w": torch.tensor(0.0)}
    nan = torch.tensor(math.nan)

    def found(grad: float, weight: float = 1.0, other: Tensor = nan) -> F.types.Gradient:
        return F.types.Gradient({"w": torch.tensor(grad)}, other, torch.tensor(weight), (other,), {"auc": other})

    state = safe.init(params)
    for one in (found(1.0), found(math.inf, other=torch.tensor(0.0)), found(7.0, math.nan)):
        updates, state = safe.update(one, state, params)
        assert_same(updates, {"w": torch.tensor(0.0)})
    updates, state = safe.update(found(4.0, 2.0), state, params)
    assert_same(updates, {"w": torch.tensor(-3.0)})  # (1 * 1 + 2 * 4) / 3
    assert state.skipped == 2
