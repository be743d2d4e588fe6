"""The laws that every technique obeys, and the registry of everything public that they are run on.

Each technique is registered as a pure function of hyper-parameters (one value a lane) and inputs, on every odd tree
where it works on trees. Whatever it is, the same must hold: it leaves its inputs alone, answers the same twice, is its
own loop under ``vmap``, compiles without graph breaks and once only, and has finite, right derivatives.

To add a technique, register it below; ``test_laws.py`` fails for a public name that is in no registry.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from helpers import (
    ONE_STEP_EPS,
    assert_close,
    assert_nonzero,
    assert_same,
    assert_untouched,
    lane,
    named,
    nonzero_like,
    odd_trees,
    stack,
    tensors,
)
from torch import Tensor
from torch.utils import _pytree

import functricks as F
from functricks import adversarial, averaging, clipping, gradients, losses, optimizers, schedules, transforms
from functricks.types import Loss, Transform

LANES = 3
Numbers = dict[str, tuple[float, ...]]  # one value a lane; ints become int64 tensors
F16, F32, F64 = torch.float16, torch.float32, torch.float64


class Case(NamedTuple):
    """A technique as a pure function ``(numbers, inputs) -> outputs``."""

    function: Callable[[dict[str, Tensor], Any], Any]
    numbers: Numbers
    inputs: Callable[[int], Any]  # lane -> inputs, different in every lane, nothing zero
    at_zero: Any = None  # inputs at which gradients are zero
    coarse: torch.dtype | None = None  # in which it computes, where that is coarser than its inputs


# --- the laws --------------------------------------------------------------------------------------------------------


def _numbers(case: Case, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    def tensor(value: float) -> Tensor:
        return torch.tensor(value, dtype=dtype if isinstance(value, float) else torch.int64)

    return [{name: tensor(values[i]) for name, values in case.numbers.items()} for i in range(LANES)]


def over_lanes(function: Callable[..., Any], axes: tuple[int | None, ...] = (0, 0)) -> Callable[..., Any]:
    """``torch.vmap`` that has a lane axis also where no argument has a tensor."""

    def mapped(*args: Any) -> Any:
        return torch.vmap(lambda index, *own: function(*own), (0, *axes))(torch.arange(LANES), *args)

    return mapped


def assert_lanes_close(actual: Any, expected: Any, computed: torch.dtype | None = None) -> None:
    """One step in another order, where what comes from a half-precision leaf counts in eps of that leaf.

    Such an update may be float32, but the arithmetic before it rounds to half: once a step below the lanes, once an
    operation on plain tensors.
    """
    eps = 2 * ONE_STEP_EPS  # two updates, or the gradients of up to three evaluations
    if computed is not None:  # Muon's iteration triples what is small, its rounding included, five times over
        eps *= 4
    small = 0.1  # inputs are 0.5 to 1.5 in size; a difference of them below this has lost the digits itself
    coarse = {"half": F16, "brain": torch.bfloat16}
    got, want = named(actual), named(expected)
    assert_close(actual, expected, eps=1e30)  # the form
    for path, leaf in want.items():
        dtype = next((dtype for name, dtype in coarse.items() if name in path), computed or leaf.dtype)
        coarser = max(1.0, torch.finfo(dtype).eps / torch.finfo(leaf.dtype).eps) if leaf.is_floating_point() else 1
        assert_close({path: got[path]}, {path: leaf}, eps * coarser, small)


def leaves_its_inputs_alone(case: Case, dtype: torch.dtype) -> None:
    numbers, inputs = _numbers(case, dtype)[0], case.inputs(0)
    with assert_untouched(numbers, inputs):
        case.function(numbers, inputs)
    with assert_untouched(numbers, inputs), torch.no_grad():
        case.function(numbers, inputs)
    stacked = stack([(one, case.inputs(i)) for i, one in enumerate(_numbers(case, dtype))])
    with assert_untouched(stacked), torch.no_grad():
        over_lanes(case.function)(*stacked)


def answers_the_same_twice(case: Case, dtype: torch.dtype) -> None:
    numbers, inputs = _numbers(case, dtype)[1], case.inputs(1)
    first = case.function(numbers, inputs)
    case.function(_numbers(case, dtype)[2], case.inputs(2))  # something else in between leaves no trace
    assert_same(case.function(numbers, inputs), first)


def is_its_own_loop_under_vmap(case: Case, dtype: torch.dtype) -> None:
    """With grad mode on and off, since there are faster ways below the lanes, and with shared inputs."""
    numbers, inputs = _numbers(case, dtype), [case.inputs(i) for i in range(LANES)]
    looped = stack([case.function(*pair) for pair in zip(numbers, inputs, strict=True)])
    shared = stack([case.function(one, inputs[0]) for one in numbers])
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            mapped = over_lanes(case.function)(stack(numbers), stack(inputs))
            assert_lanes_close(mapped, looped, case.coarse)
            assert_lanes_close(over_lanes(case.function, (0, None))(stack(numbers), inputs[0]), shared, case.coarse)


def is_its_own_loop_under_two_vmaps(case: Case, dtype: torch.dtype) -> None:
    numbers, inputs = _numbers(case, dtype), [case.inputs(i) for i in range(LANES)]
    looped = stack([stack([case.function(one, own) for own in inputs]) for one in numbers])
    inner = over_lanes(case.function, (None, 0))
    with torch.no_grad():
        assert_lanes_close(over_lanes(inner, (0, None))(stack(numbers), stack(inputs)), looped, case.coarse)


def compiles_once(case: Case, dtype: torch.dtype) -> None:
    """The whole graph, alone and in lanes; no second one for other numbers. "aot_eager" traces all of it and generates
    no code."""
    from torch._dynamo.testing import CompileCounterWithBackend

    def both(numbers: Any, inputs: Any) -> Any:
        return case.function(lane(numbers, 0), lane(inputs, 0)), over_lanes(case.function)(numbers, inputs)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(both, fullgraph=True, backend=counter)
    numbers, inputs = _numbers(case, dtype), [case.inputs(i) for i in range(LANES)]
    for _ in range(2):
        numbers, inputs = numbers[::-1], inputs[::-1]
        looped = [case.function(*pair) for pair in zip(numbers, inputs, strict=True)]
        alone, mapped = compiled(stack(numbers), stack(inputs))
        assert_lanes_close(alone, looped[0], case.coarse)
        assert_lanes_close(mapped, stack(looped), case.coarse)
    if counter.frame_count != 1:
        raise AssertionError(f"compiled {counter.frame_count} times for two sets of numbers")


def _floats(tree: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    leaves, structure = _pytree.tree_flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if leaf.is_floating_point()]

    def back(new: list[Tensor]) -> Any:
        filled = list(leaves)
        for place, leaf in zip(places, new, strict=True):
            filled[place] = leaf
        return _pytree.tree_unflatten(filled, structure)

    return [leaves[i] for i in places], back


def _scalar(outputs: Any) -> Tensor:
    """A sum over all floating-point outputs in which no two entries weigh the same."""
    total = torch.zeros((), dtype=F64)
    for leaf in tensors(outputs):
        if leaf.is_floating_point():
            flat = leaf.double().reshape(-1)
            total = total + (flat * (1 + torch.arange(flat.numel(), dtype=F64) / 7).cos()).sum()
    return total


def has_finite_derivatives_at_zero(case: Case, dtype: torch.dtype) -> None:
    if case.at_zero is None:
        return
    for numbers in _numbers(case, dtype)[:2]:
        points, back = _floats((numbers, case.at_zero))
        if not points:
            continue

        def value(points: list[Tensor], back: Callable[[list[Tensor]], Any] = back) -> Tensor:
            return _scalar(case.function(*back(points)))

        for name, found in {
            "func": torch.func.grad(value)(points),
            "vmap of func": lane(torch.vmap(torch.func.grad(value))(stack([points, points])), 0),
        }.items():
            for path, leaf in named(back(found)).items():
                if leaf.dtype == F16:  # cannot hold 1 / eps, which is right
                    continue
                if leaf.is_floating_point() and not torch.isfinite(leaf).all():
                    raise AssertionError(f"{name}: the derivative at {path} is {leaf}")


def has_the_right_derivative(case: Case, dtype: torch.dtype) -> None:
    """Along one direction through all numbers and inputs, against a central difference; float64 only."""
    numbers = _numbers(case, dtype)[0]
    points, back = _floats((numbers, case.inputs(0)))
    if dtype != F64 or not points or any(leaf.dtype != F64 for leaf in points):
        return

    def value(points: list[Tensor]) -> Tensor:
        return _scalar(case.function(*back(points)))

    slopes = torch.func.grad(value)(points)
    for index in range(len(points)):  # each hyper-parameter and each input by itself, so that none hides another
        if not points[index].numel():
            continue
        direction = points[index] * (0.5 + torch.rand(points[index].shape, dtype=F64))
        step = 1e-5
        ahead, behind = (
            value([leaf + sign * step * direction if i == index else leaf for i, leaf in enumerate(points)])
            for sign in (1, -1)
        )
        expected = (ahead - behind) / (2 * step)
        found = (slopes[index] * direction).sum()
        size = max(1.0, value(points).abs().item())
        if not (found - expected).abs().item() <= 1e-7 * size:  # a central difference in float64 is right to about 1e-9
            raise AssertionError(f"input {index}: derivative {found.item()}, central difference {expected.item()}")


EAGER_LAWS = (
    leaves_its_inputs_alone,
    answers_the_same_twice,
    is_its_own_loop_under_vmap,
    is_its_own_loop_under_two_vmaps,
    has_finite_derivatives_at_zero,
    has_the_right_derivative,
)


def each(cases: dict[str, Case], law: Callable[[Case, torch.dtype], None], dtype: torch.dtype) -> None:
    """Run a law over cases; a failure names the case."""
    for name, case in cases.items():
        try:
            law(case, dtype)
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise


# --- transforms and optimizers ---------------------------------------------------------------------------------------


class TransformEntry(NamedTuple):
    """A transform to register: the maker, called with 0-d tensors, and one value a lane for each of them."""

    make: Callable[..., Transform]
    numbers: Numbers
    smooth: bool = True  # False: the derivative has jumps where a central difference would look
    coarse: torch.dtype | None = None  # as of a Case


_LR = {"lr": (0.1, 0.02, 0.5)}
_BETAS = {"beta1": (0.9, 0.5, 0.0), "beta2": (0.99, 0.9, 0.5)}


def _anything(path: str, leaf: Tensor) -> bool:
    return True


def _by_size(path: str, leaf: Tensor) -> str:
    return "scalars" if leaf.ndim == 0 else "rest"


def _by_axes(path: str, leaf: Tensor) -> str:
    return "matrix" if leaf.ndim == 2 else "rest"


def _length(path: str) -> int:
    return len(path)


def _moments(
    make: Callable[..., Transform], lr: Tensor, beta1: Tensor, beta2: Tensor, weight_decay: Tensor, **fixed: Any
) -> Transform:
    return make(lr, (beta1, beta2), weight_decay=weight_decay, **fixed)


# "name" or "name: variant"; the public name is what stands before the colon.
TRANSFORMS: dict[str, TransformEntry] = {
    "scale": TransformEntry(F.scale, {"factor": (-0.5, 2.0, 0.1)}),
    "scale_by_learning_rate": TransformEntry(F.scale_by_learning_rate, _LR),
    "scale_by_learning_rate: schedule": TransformEntry(
        lambda lr: F.scale_by_learning_rate(schedules.linear_schedule_with_warmup(lr, 2, 10)), _LR
    ),
    "scale_by_schedule": TransformEntry(
        lambda lr, gamma: F.scale_by_schedule(schedules.exponential_decay(lr, gamma)),
        {**_LR, "gamma": (0.9, 0.5, 1.0)},
    ),
    "trace": TransformEntry(F.trace, {"momentum": (0.9, 0.5, 0.0)}),
    "trace: dampened": TransformEntry(F.trace, {"momentum": (0.9, 0.5, 0.0), "dampening": (0.1, 0.5, 0.0)}),
    "trace: nesterov": TransformEntry(partial(F.trace, nesterov=True), {"momentum": (0.9, 0.5, 0.0)}),
    "scale_by_adam": TransformEntry(
        lambda beta1, beta2, eps: F.scale_by_adam((beta1, beta2), eps), {**_BETAS, "eps": (1e-3, 1e-2, 1e-1)}
    ),
    "scale_by_adam: amsgrad": TransformEntry(
        lambda beta1, beta2: F.scale_by_adam((beta1, beta2), amsgrad=True), _BETAS, smooth=False
    ),
    "scale_by_adam: default": TransformEntry(lambda: F.scale_by_adam(), {}),
    "add_decayed_weights": TransformEntry(F.add_decayed_weights, {"weight_decay": (0.1, 0.01, 0.0)}),
    "add_decayed_weights: where": TransformEntry(
        partial(F.add_decayed_weights, where=_anything), {"weight_decay": (0.1, 0.01, 0.0)}
    ),
    "chain": TransformEntry(
        lambda lr, bound: F.chain(F.clip_by_global_norm(bound), F.trace(0.9), F.scale(-lr)),
        {**_LR, "bound": (1.0, 0.1, 100.0)},
    ),
    "chain: of nothing": TransformEntry(lambda: F.chain(), {}),
    "partition": TransformEntry(
        lambda lr, momentum: F.partition({"scalars": F.scale(-lr), "rest": F.sgd(lr, momentum)}, _by_size),
        {**_LR, "momentum": (0.9, 0.5, 0.0)},
    ),
    "skip_nonfinite": TransformEntry(lambda lr: F.skip_nonfinite(F.sgd(lr, 0.9)), _LR),
    "clip_by_global_norm": TransformEntry(F.clip_by_global_norm, {"max_norm": (1.0, 0.1, 1000.0)}),
    "clip_by_global_norm: classic": TransformEntry(
        partial(F.clip_by_global_norm, classic=True), {"max_norm": (1.0, 0.1, 1000.0)}
    ),
    "sgd": TransformEntry(F.sgd, _LR),
    "sgd: all": TransformEntry(
        partial(F.sgd, nesterov=False, maximize=True),
        {**_LR, "momentum": (0.9, 0.5, 0.0), "dampening": (0.1, 0.5, 0.0), "weight_decay": (0.1, 0.01, 0.0)},
    ),
    "adam": TransformEntry(
        lambda lr, beta1, beta2, weight_decay: F.adam(lr, (beta1, beta2), weight_decay=weight_decay),
        {**_LR, **_BETAS, "weight_decay": (0.1, 0.01, 0.0)},
    ),
    "adamw": TransformEntry(
        lambda lr, beta1, beta2, weight_decay: F.adamw(lr, (beta1, beta2), weight_decay=weight_decay),
        {**_LR, **_BETAS, "weight_decay": (0.1, 0.01, 0.0)},
    ),
    **{
        name: TransformEntry(
            partial(_moments, make, **fixed), {**_LR, **_BETAS, "weight_decay": (0.1, 0.01, 0.0)}, smooth
        )
        for name, make, fixed, smooth in [
            ("adam: decoupled", F.adam, {"decoupled_weight_decay": True}, True),
            ("nadam", F.nadam, {}, True),
            ("nadam: decoupled", F.nadam, {"decoupled_weight_decay": True}, True),
            ("radam", F.radam, {}, True),
            ("adamax", F.adamax, {}, False),
            ("lamb", F.lamb, {}, True),
            ("lion", F.lion, {}, False),
        ]
    },
    "schedule_free_adamw": TransformEntry(
        lambda lr, beta1, beta2, weight_decay: F.schedule_free_adamw(
            lr, (beta1, beta2), weight_decay=weight_decay, warmup_steps=2
        ),
        {**_LR, "beta1": (0.9, 0.5, 0.1), "beta2": (0.99, 0.9, 0.5), "weight_decay": (0.1, 0.01, 0.0)},
    ),
    "adagrad": TransformEntry(F.adagrad, {**_LR, "lr_decay": (0.1, 0.0, 1.0), "weight_decay": (0.1, 0.01, 0.0)}),
    "adadelta": TransformEntry(F.adadelta, {**_LR, "rho": (0.9, 0.5, 0.0), "weight_decay": (0.1, 0.01, 0.0)}),
    "rmsprop": TransformEntry(
        F.rmsprop, {**_LR, "alpha": (0.9, 0.5, 0.1), "momentum": (0.9, 0.5, 0.0), "weight_decay": (0.1, 0.01, 0.0)}
    ),
    "rmsprop: centered": TransformEntry(
        partial(F.rmsprop, centered=True), {**_LR, "alpha": (0.9, 0.5, 0.1), "eps": (1.0, 0.1, 0.5)}
    ),
    "scale_by_rms": TransformEntry(F.scale_by_rms, {"alpha": (0.9, 0.5, 0.1), "eps": (1e-3, 1e-2, 1e-1)}),
    "rprop": TransformEntry(
        lambda lr, shrink, grow: F.rprop(lr, (shrink, grow)),
        {**_LR, "shrink": (0.5, 0.1, 0.9), "grow": (1.2, 2.0, 1.1)},
        smooth=False,
    ),
    "asgd": TransformEntry(
        F.asgd, {**_LR, "lambd": (0.1, 0.0, 0.01), "alpha": (0.75, 0.5, 1.0), "weight_decay": (0.1, 0.01, 0.0)}
    ),
    "adafactor": TransformEntry(
        lambda lr, beta2_decay, d, weight_decay: F.adafactor(lr, beta2_decay, d=d, weight_decay=weight_decay),
        {**_LR, "beta2_decay": (-0.8, -1.0, -0.5), "d": (1.0, 1.5, 2.0), "weight_decay": (0.1, 0.01, 0.0)},
        smooth=False,
    ),
    "muon": TransformEntry(
        lambda lr, momentum, weight_decay: F.partition(
            {"matrix": F.muon(lr, weight_decay, momentum), "rest": F.sgd(lr)}, _by_axes
        ),
        {**_LR, "momentum": (0.9, 0.5, 0.0), "weight_decay": (0.1, 0.01, 0.0)},
        smooth=False,
        coarse=torch.bfloat16,  # the orthogonalisation, as PyTorch's: products in another order round elsewhere
    ),
    "clip_by_value": TransformEntry(F.clip_by_value, {"bound": (1.0, 0.1, 1000.0)}, smooth=False),
    "clip_by_leaf_norm": TransformEntry(F.clip_by_leaf_norm, {"max_norm": (1.0, 0.1, 1000.0)}),
    "adaptive_clip": TransformEntry(F.adaptive_clip, {"clipping": (0.01, 1.0, 0.1), "eps": (1e-3, 1.0, 10.0)}),
    "clip_by_global_norm: largest entry": TransformEntry(
        partial(F.clip_by_global_norm, norm_type=float("inf"), error_if_nonfinite=True),
        {"max_norm": (1.0, 0.1, 1000.0)},
        smooth=False,
    ),
    "clip_by_global_norm: p": TransformEntry(
        partial(F.clip_by_global_norm, norm_type=3.0), {"max_norm": (1.0, 0.1, 1000.0)}
    ),
    "named_chain": TransformEntry(lambda lr: F.named_chain(momentum=F.trace(0.9), rate=F.scale(-lr)), _LR),
    "masked": TransformEntry(lambda lr: F.masked(F.masked(F.sgd(lr, 0.9), _anything), _anything), _LR),
    "freeze": TransformEntry(lambda lr: F.chain(F.scale(lr), F.freeze()), _LR),
    "layer_decay": TransformEntry(
        lambda lr, rate: F.chain(F.scale(-lr), F.layer_decay(rate, layers=_length)), {**_LR, "rate": (0.5, 0.9, 1.0)}
    ),
    "scale_by_learning_rate: learning_rates": TransformEntry(
        lambda lr, factor: F.scale_by_learning_rate(lr, {"*": factor}), {**_LR, "factor": (10.0, 0.1, 0.0)}
    ),
    "multi_steps": TransformEntry(lambda lr, every: F.multi_steps(F.sgd(lr, 0.9), every), {**_LR, "every": (1, 2, 3)}),
    "lookahead": TransformEntry(
        lambda lr, sync_period, slow: F.lookahead(F.sgd(lr), sync_period, slow),
        {**_LR, "sync_period": (1, 2, 3), "slow": (0.5, 0.1, 1.0)},
    ),
    "inject_hyperparams": TransformEntry(
        lambda lr, momentum: F.inject_hyperparams(F.sgd)(lr=lr, momentum=momentum),
        {**_LR, "momentum": (0.9, 0.5, 0.0)},
    ),
    "inject_hyperparams: schedule": TransformEntry(
        lambda lr: F.inject_hyperparams(F.adamw)(lr=lr, weight_decay=schedules.linear_warmup(lr, 3)), _LR
    ),
    "master_weights": TransformEntry(lambda lr: F.master_weights(F.sgd(lr, 0.9)), _LR, smooth=False),
    "add_noise": TransformEntry(
        lambda eta, gamma: F.add_noise(F.random.key(3), eta, gamma),
        {"eta": (0.1, 1.0, 0.01), "gamma": (0.55, 0.0, 1.0)},
    ),
    "centralize": TransformEntry(lambda lr: F.chain(F.centralize(), F.scale(-lr)), _LR),
    "scale_by_trust_ratio": TransformEntry(
        F.scale_by_trust_ratio, {"trust_coefficient": (1.0, 0.1, 0.001), "eps": (0.1, 0.01, 1.0)}
    ),
    "ema": TransformEntry(lambda lr, decay: F.chain(F.sgd(lr), F.ema(decay)), {**_LR, "decay": (0.9, 0.5, 0.0)}),
    "ema: debiased": TransformEntry(
        lambda lr, decay, every: F.chain(F.sgd(lr), F.ema(decay, debias=True, every=every)),
        {**_LR, "decay": (0.9, 0.5, 0.0), "every": (1, 2, 3)},
    ),
    "swa": TransformEntry(lambda lr, start: F.chain(F.sgd(lr), F.swa(start=start)), {**_LR, "start": (0, 1, 2)}),
}


def _two_updates(entry: TransformEntry, numbers: dict[str, Tensor], inputs: Any) -> Any:
    params, first, second = inputs
    transform = entry.make(**numbers)
    state = transform.init(params)
    updates, state = transform.update(first, state, params)
    params = F.apply_updates(params, updates)
    updates, state = transform.update(second, state, params)
    return updates, state, F.apply_updates(params, updates)


def transform_cases(name: str, dtype: torch.dtype) -> dict[str, Case]:
    """Two updates of a transform on every odd tree."""
    entry = TRANSFORMS[name]
    cases = {}
    for tree_name, tree in odd_trees(dtype).items():

        def inputs(index: int, tree: Any = tree) -> Any:
            made = tuple(nonzero_like(tree, 10 * index + kind) for kind in range(3))
            assert_nonzero(made)
            return made

        zero = _pytree.tree_map(torch.zeros_like, tree)
        cases[tree_name] = Case(partial(_two_updates, entry), entry.numbers, inputs, (tree, zero, zero), entry.coarse)
    return cases


def compiled_case(name: str, dtype: torch.dtype) -> Case:
    """One update of a transform from a state in the middle of a run, on a small tree."""
    entry, tree = TRANSFORMS[name], odd_trees(dtype)["unsorted"]

    def update(numbers: dict[str, Tensor], inputs: Any) -> Any:
        grads, state, params = inputs
        updates, state = entry.make(**numbers).update(grads, state, params)
        return updates, state, F.apply_updates(params, updates)

    def inputs(index: int) -> Any:
        made = [nonzero_like(tree, 10 * index + kind) for kind in range(3)]
        _, state, params = _two_updates(entry, _numbers(Case(update, entry.numbers, inputs), dtype)[index], made)
        return made[0], state, params

    return Case(update, entry.numbers, inputs, coarse=entry.coarse)


def state_keeps_its_form(name: str, dtype: torch.dtype) -> None:
    """Structure, shapes and dtypes of the state; tensors only; counters are 0-d int64."""
    entry = TRANSFORMS[name]
    for tree_name, tree in odd_trees(dtype).items():
        transform = entry.make(**{key: torch.tensor(values[0], dtype=dtype) for key, values in entry.numbers.items()})
        start = state = transform.init(tree)
        for step in range(2):
            updates, state = transform.update(nonzero_like(tree, step), state, tree)
            _same_form(f"{name}, {tree_name}: state", start, state)
        _same_form(f"{name}, {tree_name}: applied", tree, F.apply_updates(tree, updates))
        for path, leaf in named(tree).items():
            kept = {leaf.dtype, torch.promote_types(leaf.dtype, F32)}  # half may go on as float32: one rounding fewer
            if named(updates)[path].dtype not in kept:
                raise AssertionError(f"{name}, {tree_name}: the update of {path} ({leaf.dtype}) is {updates}")
        for path, leaf in named(start).items():
            if not isinstance(leaf, Tensor):
                raise AssertionError(f"{name}, {tree_name}: the state holds {leaf!r} at {path}")
            if not leaf.is_floating_point() and (leaf.ndim or leaf.dtype != torch.int64):
                raise AssertionError(f"{name}, {tree_name}: the counter {path} is {leaf.dtype} {tuple(leaf.shape)}")


def _same_form(what: str, expected: Any, actual: Any) -> None:
    def form(tree: Any) -> Any:
        return {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in named(tree).items()}

    if form(expected) != form(actual) or _pytree.tree_structure(expected) != _pytree.tree_structure(actual):
        raise AssertionError(f"{what}: {form(actual)}, expected {form(expected)}")


def state_survives_between_calls(name: str, dtype: torch.dtype) -> None:
    """init and update mapped each by itself, as a loop does it, are the two in one."""
    entry = TRANSFORMS[name]
    for case in transform_cases(name, dtype).values():
        numbers = stack(_numbers(case, dtype))
        params, first, second = stack([case.inputs(i) for i in range(LANES)])

        def update(numbers: Any, grads: Any, state: Any, params: Any) -> Any:
            return entry.make(**numbers).update(grads, state, params)

        with torch.no_grad():
            expected = over_lanes(case.function)(numbers, (params, first, second))
            state = over_lanes(lambda numbers, params: entry.make(**numbers).init(params))(numbers, params)
            updates, state = over_lanes(update, (0, 0, 0, 0))(numbers, first, state, params)
            params = over_lanes(F.apply_updates)(params, updates)
            updates, state = over_lanes(update, (0, 0, 0, 0))(numbers, second, state, params)
            assert_lanes_close((updates, state, over_lanes(F.apply_updates)(params, updates)), expected, entry.coarse)


# --- gradient functions ----------------------------------------------------------------------------------------------


def _loss_fn(shape: str, params: Any, batch: dict[str, Tensor], carry: Any) -> Any:
    """A per-row loss of any tree of parameters: ``"smooth"`` has no zero gradient, ``"bowl"`` has one at zero."""
    x, weights = batch["x"], batch["weights"]
    values = torch.zeros_like(x)
    for leaf in tensors(params):
        reach = leaf.to(x.dtype).reshape(-1, 1) * x
        values = values + (reach.sin() if shape == "smooth" else reach.square()).sum(0)
    seen = {"rows": carry["rows"] + x.shape[0], "sum": carry["sum"] * 0.5 + values.sum()}
    return Loss(values * weights, weights), seen, {"largest": values.amax()}


def _grad_fn(shape: str) -> Any:
    return F.gradient(partial(_loss_fn, shape), has_carry=True, has_metrics=True)


class GradFnEntry(NamedTuple):
    """A wrapper to register: ``(grad_fn, **numbers) -> grad_fn``, or ``scale`` as the loss scale of the call."""

    wrap: Callable[..., Any]
    numbers: Numbers


_EPSILON = {"epsilon": (0.5, 0.01, 2.0)}
GRAD_FNS: dict[str, GradFnEntry] = {
    "gradient": GradFnEntry(lambda grad_fn: grad_fn, {}),
    "gradient: scaled": GradFnEntry(lambda grad_fn: grad_fn, {"scale": (1.0, 8.0, 1024.0)}),
    "accumulate": GradFnEntry(lambda grad_fn: F.accumulate(grad_fn, 3), {"scale": (1.0, 8.0, 1024.0)}),
    "accumulate: size": GradFnEntry(lambda grad_fn: F.accumulate(grad_fn, micro_batch_size=2), {}),
    "fgm": GradFnEntry(partial(F.fgm, where=_anything), _EPSILON),
    "fgm: global": GradFnEntry(partial(F.fgm, where="*", norm="global"), _EPSILON),
    "pgd": GradFnEntry(
        partial(F.pgd, where=_anything, steps=2), {**_EPSILON, "step_size": (0.3, 0.1, 0.5), "scale": (1.0, 4.0, 8.0)}
    ),
    "pgd: global": GradFnEntry(partial(F.pgd, where="*", steps=2, norm="global"), _EPSILON),
    "free_lb": GradFnEntry(partial(F.free_lb, where=_anything, steps=2), _EPSILON),
    "sam": GradFnEntry(F.sam, {"rho": (0.5, 0.01, 2.0)}),
    "awp": GradFnEntry(partial(F.awp, where=_anything), {"gamma": (0.1, 0.01, 0.5)}),
    "multi_task": GradFnEntry(
        lambda grad_fn, weight: F.multi_task({"a": grad_fn, "b": grad_fn}, {"a": 1.0, "b": weight}),
        {"weight": (0.5, 1.0, 2.0)},
    ),
}


def _call_grad_fn(entry: GradFnEntry, shape: str, numbers: dict[str, Tensor], inputs: Any) -> Any:
    own = {name: value for name, value in numbers.items() if name != "scale"}
    return entry.wrap(_grad_fn(shape), **own)(*inputs, scale=numbers.get("scale"))


def _batch(index: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.rand(5, generator=generator, dtype=F64) + 0.25
    return {"x": x.to(dtype), "weights": torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0], dtype=dtype)}


def _carry(index: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"rows": torch.tensor(index), "sum": torch.tensor(1.0 + index, dtype=dtype)}


def grad_fn_cases(name: str, dtype: torch.dtype, shape: str = "smooth") -> dict[str, Case]:
    """A gradient function of a smooth loss on every odd tree; the gradient of the ``"bowl"`` at zero is zero."""
    entry = GRAD_FNS[name]
    cases = {}
    for tree_name, tree in odd_trees(dtype).items():

        def inputs(index: int, tree: Any = tree) -> Any:
            return nonzero_like(tree, index), _batch(index, dtype), _carry(index, dtype)

        zero = (
            (_pytree.tree_map(torch.zeros_like, tree), _batch(0, dtype), _carry(0, dtype)) if shape == "bowl" else None
        )
        cases[tree_name] = Case(partial(_call_grad_fn, entry, shape), entry.numbers, inputs, zero)
    return cases


def gradient_keeps_its_form(name: str, dtype: torch.dtype) -> None:
    """Gradients look like the parameters, the carry like the carry; loss, weight and metrics are 0-d."""
    for case_name, case in grad_fn_cases(name, dtype).items():
        params, batch, carry = case.inputs(0)
        found = case.function(_numbers(case, dtype)[0], (params, batch, carry))
        _same_form(f"{name}, {case_name}: grads", params, found.grads)
        _same_form(f"{name}, {case_name}: carry", carry, found.carry)
        for what, leaf in {"loss": found.loss, "weight": found.weight, **found.metrics}.items():
            if leaf.ndim or leaf.dtype != dtype:
                raise AssertionError(f"{name}, {case_name}: {what} is {leaf!r}")
        assert_nonzero(found.grads)


# --- inputs: attacks -------------------------------------------------------------------------------------------------


def _attack(norm: Any, steps: int, numbers: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.attack(lambda x: (x * x.cos()).sum() + x.square().sum(), x, norm=norm, steps=steps, **numbers)


def _attacks(dtype: torch.dtype) -> dict[str, Case]:
    def inputs(index: int) -> Tensor:
        return nonzero_like(torch.empty(2, 3, dtype=dtype), index)

    zero = torch.zeros(2, 3, dtype=dtype)
    numbers = {"epsilon": (0.1, 0.5, 1.0)}
    more = {**numbers, "step_size": (0.07, 0.3, 0.6)}
    return {
        "attack": Case(partial(_attack, "linf", 1), numbers, inputs, zero),
        "attack: linf": Case(partial(_attack, "linf", 3), numbers, inputs, zero),
        "attack: l2": Case(partial(_attack, "l2", 2), more, inputs, zero),
    }


# --- losses ----------------------------------------------------------------------------------------------------------


def _draw(index: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return nonzero_like(torch.empty(shape, dtype=dtype), index + 50)


def _classes(index: int, *shape: int, classes: int = 3) -> Tensor:
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(index))


def _chances(index: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.sigmoid(_draw(index, *shape, dtype=dtype))


def _losses(dtype: torch.dtype) -> dict[str, Case]:
    weight = torch.tensor([1.0, 3.0, 0.5], dtype=dtype)
    draw, chances = partial(_draw, dtype=dtype), partial(_chances, dtype=dtype)
    smooth = {"label_smoothing": (0.1, 0.3, 0.0)}
    temperature = {"temperature": (0.5, 0.1, 2.0)}

    def case(loss: Callable[..., Any], numbers: Numbers, inputs: Callable[[int], Any]) -> Case:
        def zero(leaf: Tensor) -> Tensor:
            return torch.zeros_like(leaf) if leaf.is_floating_point() else leaf

        first, *rest = inputs(0)
        return Case(lambda numbers, inputs: loss(*inputs, **numbers), numbers, inputs, (zero(first), *rest))

    def logits_and_classes(index: int) -> Any:
        return draw(index, 4, 3), torch.where(torch.arange(4) == 1, -100, _classes(index, 4))

    def logits_and_bits(index: int) -> Any:
        return draw(index, 4), _classes(index, 4, classes=2).to(dtype)

    return {
        "cross_entropy": case(
            partial(losses.cross_entropy, weight=weight), {**smooth, **temperature}, logits_and_classes
        ),
        "cross_entropy: probabilities": case(
            losses.cross_entropy, smooth, lambda i: (draw(i, 4, 3), draw(i + 9, 4, 3).softmax(1))
        ),
        "focal_loss": case(partial(losses.focal_loss, weight=weight), {"gamma": (2.0, 0.5, 0.0)}, logits_and_classes),
        "nll_loss": case(
            partial(losses.nll_loss, weight=weight),
            {},
            lambda i: (draw(i, 4, 3).log_softmax(1), logits_and_classes(i)[1]),
        ),
        "binary_cross_entropy": case(
            losses.binary_cross_entropy, {}, lambda i: (chances(i, 4), chances(i + 9, 4))
        )._replace(at_zero=None),
        "binary_cross_entropy_with_logits": case(
            losses.binary_cross_entropy_with_logits, {"pos_weight": (2.0, 1.0, 0.5)}, logits_and_bits
        ),
        "sigmoid_focal_loss": case(
            losses.sigmoid_focal_loss, {"gamma": (2.0, 0.5, 0.0), "alpha": (0.25, 0.5, 0.9)}, logits_and_bits
        ),
        "l1_loss": case(losses.l1_loss, {}, lambda i: (draw(i, 4), 3 + draw(i + 9, 4))),
        "mse_loss": case(losses.mse_loss, {}, lambda i: (draw(i, 4), draw(i + 9, 4))),
        "kl_divergence": case(
            losses.kl_divergence, {}, lambda i: (draw(i, 4, 3).log_softmax(1), draw(i + 9, 4, 3).softmax(1))
        ),
        "info_nce": case(losses.info_nce, temperature, lambda i: (draw(i, 4, 5), draw(i + 9, 4, 5))),
        "ntxent": case(losses.ntxent, temperature, lambda i: (draw(i, 4, 5), draw(i + 9, 4, 5))),
        "supervised_contrastive": case(
            losses.supervised_contrastive, temperature, lambda i: (draw(i, 4, 5), torch.tensor([0, 1, 0, 1]))
        ),
        "softmax": case(losses.softmax, temperature, lambda i: (draw(i, 4, 3),)),
        "log_softmax": case(losses.log_softmax, temperature, lambda i: (draw(i, 4, 3),)),
    }


# --- schedules -------------------------------------------------------------------------------------------------------


def _plateau(numbers: dict[str, Tensor], metrics: Tensor) -> Any:
    patience, lr = numbers["patience"], numbers["lr"]
    plateau = schedules.reduce_on_plateau(factor=numbers["factor"], patience=patience)
    state = plateau.init(lr)
    rates = []
    for metric in metrics.unbind():
        rate, state = plateau.update(metric, state)
        rates.append(rate)
    return torch.stack(rates), state


def _schedules() -> dict[str, Case]:
    S = schedules
    lr = {"lr": (0.1, 0.2, 1.0)}
    warm = {**lr, "num_warmup_steps": (2, 0, 4)}
    train = {**warm, "num_training_steps": (9, 6, 5)}
    cyclic = {"lr": (0.01, 0.02, 0.0), "max_lr": (0.1, 0.2, 1.0), "step_size_up": (2, 1, 4)}
    makers: dict[str, tuple[Callable[..., Any], Numbers]] = {
        "constant": (S.constant, {**lr, "factor": (0.5, 1.0, 2.0), "total_iters": (3, 0, 9)}),
        "constant_schedule": (S.constant_schedule, lr),
        "constant_schedule_with_warmup": (S.constant_schedule_with_warmup, warm),
        "cosine_annealing": (S.cosine_annealing, {**lr, "T_max": (5, 1, 9), "eta_min": (0.01, 0.0, 0.3)}),
        "cosine_restarts": (S.cosine_restarts, {**lr, "T_0": (3, 1, 4), "T_mult": (2, 1, 3)}),
        "cosine_schedule_with_warmup": (S.cosine_schedule_with_warmup, train),
        "cosine_with_hard_restarts_schedule_with_warmup": (S.cosine_with_hard_restarts_schedule_with_warmup, train),
        "cyclic": (S.cyclic, cyclic),
        "exponential_decay": (S.exponential_decay, {**lr, "gamma": (0.9, 1.0, 0.5)}),
        "inverse_sigmoid": (S.inverse_sigmoid, {**lr, "k": (1.0, 4.0, 20.0)}),
        "inverse_sqrt": (S.inverse_sqrt, warm),
        "inverse_sqrt_schedule": (S.inverse_sqrt_schedule, warm),
        "join": (
            lambda lr, boundary: S.join([S.linear_warmup(lr, 3), S.exponential_decay(lr, 0.5)], [boundary]),
            {**lr, "boundary": (3, 0, 5)},
        ),
        "lambda_schedule": (lambda lr: S.lambda_schedule(lr, lambda step: 0.9**step), lr),
        "linear": (S.linear, {**lr, "total_iters": (5, 0, 9)}),
        "linear_schedule_with_warmup": (S.linear_schedule_with_warmup, train),
        "linear_warmup": (S.linear_warmup, {**warm, "first_step": (0, 1, 1)}),
        "multistep": (lambda lr, a, b: S.multistep(lr, [a, b], 0.5), {**lr, "a": (2, 0, 3), "b": (4, 9, 4)}),
        "one_cycle": (lambda lr, total_steps: S.one_cycle(lr, total_steps), {**lr, "total_steps": (10, 5, 20)}),
        "polynomial": (S.polynomial, {**lr, "total_iters": (5, 1, 9), "power": (2.0, 1.0, 0.5)}),
        "polynomial_decay_schedule_with_warmup": (S.polynomial_decay_schedule_with_warmup, train),
        "product": (
            lambda lr, gamma: 2 * S.linear_warmup(1.0, 3) * S.exponential_decay(lr, gamma),
            {**lr, "gamma": (0.9, 1.0, 0.5)},
        ),
        "step_decay": (S.step_decay, {**lr, "step_size": (3, 1, 7), "gamma": (0.5, 0.0, 1.0)}),
        "wsd": (S.wsd, {**warm, "num_decay_steps": (3, 0, 1), "num_training_steps": (9, 6, 5)}),
        "wsd_schedule": (S.wsd_schedule, {**warm, "num_decay_steps": (3, 0, 1), "num_training_steps": (9, 6, 5)}),
    }

    def case(make: Callable[..., Any], numbers: Numbers) -> Case:
        return Case(
            lambda numbers, steps: make(**numbers)(steps), numbers, lambda i: torch.tensor([0, 1, 2, 3, 5, 9, 30]) + i
        )

    return {
        **{name: case(*pair) for name, pair in makers.items()},
        "reduce_on_plateau": Case(
            _plateau,
            {**lr, "factor": (0.1, 0.5, 0.9), "patience": (0, 1, 2)},
            lambda i: torch.tensor([1.0, 0.5, 0.5, 0.7, 0.4, 0.4, 0.4, 0.4], dtype=F64) + i,
        ),
    }


# --- what is public, and what of it is registered --------------------------------------------------------------------

# module -> {public name: why it is in no registry}
NOT_A_TECHNIQUE: dict[ModuleType, dict[str, str]] = {
    transforms: {"apply_updates": "the sum of two trees, inside every case of a transform"},
    clipping: {},
    optimizers: {},
    averaging: {"averaged": "reads a state", "update_bn": "a loop over batches; test_averaging.py"},
    gradients: {
        "bn_momentum_for": "a number; test_accumulate.py",
        "clip_per_example": "a maker; its laws are in test_per_example.py",
        "per_example_gradient": "a maker; its laws are in test_per_example.py",
    },
    adversarial: {
        "r_drop": "a maker; its laws are in test_perturbed_gradients.py",
        "vat": "needs a model's outputs; its laws are in test_perturbed_gradients.py",
    },
    losses: {},
    schedules: {
        "Curve": "the base class",
        "Plateau": "what reduce_on_plateau returns",
        "PlateauState": "its state",
        "horizon": "drawing",
        "plot": "drawing",
        "sample": "drawing",
    },
}


for later in ("precision", "sequences"):  # their names are demanded as soon as the modules are there
    if importlib.util.find_spec(f"functricks.{later}") is not None:
        module = importlib.import_module(f"functricks.{later}")
        wraps = "wraps a loss or a step; its laws are in test_precision.py and test_pipeline.py"
        decodes = "decodes with a function that it is given; its laws are in test_sequences.py"
        NOT_A_TECHNIQUE[module] = dict.fromkeys(module.__all__, wraps if later == "precision" else decodes)


def registered() -> set[str]:
    """The public names in the registries."""
    registries = (TRANSFORMS, GRAD_FNS, _attacks(F64), _losses(F64), _schedules())
    return {name.split(":")[0] for registry in registries for name in registry}


def unregistered() -> Iterator[str]:
    """The public names of techniques that are in no registry."""
    known = registered()
    for module, exempt in NOT_A_TECHNIQUE.items():
        for name in module.__all__:
            if name not in known and name not in exempt:
                yield f"{module.__name__}.{name}"


def cases_of(kind: str, dtype: torch.dtype) -> dict[str, Case]:
    """The cases that are not on trees."""
    return {"attacks": _attacks, "losses": _losses}[kind](dtype) if kind != "schedules" else _schedules()


__all__ = [
    "EAGER_LAWS",
    "GRAD_FNS",
    "TRANSFORMS",
    "Case",
    "cases_of",
    "compiled_case",
    "compiles_once",
    "each",
    "grad_fn_cases",
    "gradient_keeps_its_form",
    "registered",
    "state_keeps_its_form",
    "state_survives_between_calls",
    "transform_cases",
    "unregistered",
]
