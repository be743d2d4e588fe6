"""Every public technique obeys every law; see laws.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import laws
import pytest
import torch

import functricks as F

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
EAGER = pytest.mark.parametrize("law", laws.EAGER_LAWS, ids=lambda law: law.__name__)

Law = Callable[[laws.Case, torch.dtype], None]


def test_every_public_technique_is_registered() -> None:
    assert list(laws.unregistered()) == []


def test_every_registered_name_is_public() -> None:
    public = {name for module in laws.NOT_A_TECHNIQUE for name in module.__all__}
    assert laws.registered() - public == set()


@EAGER
@DTYPES
@pytest.mark.parametrize("name", laws.TRANSFORMS)
def test_transforms(name: str, law: Law, dtype: torch.dtype) -> None:
    smooth = laws.TRANSFORMS[name].smooth
    if law is laws.has_the_right_derivative and not smooth:
        pytest.skip("its derivative jumps")
    laws.each(laws.transform_cases(name, dtype), law, dtype)


@DTYPES
@pytest.mark.parametrize("name", laws.TRANSFORMS)
def test_the_state_of_a_transform_keeps_its_form(name: str, dtype: torch.dtype) -> None:
    laws.state_keeps_its_form(name, dtype)


@DTYPES
@pytest.mark.parametrize("name", laws.TRANSFORMS)
def test_the_state_of_a_transform_survives_between_calls(name: str, dtype: torch.dtype) -> None:
    laws.state_survives_between_calls(name, dtype)


@pytest.mark.parametrize("name", laws.TRANSFORMS)
def test_transforms_compile(name: str) -> None:
    laws.compiles_once(laws.compiled_case(name, torch.float32), torch.float32)


@pytest.mark.parametrize("tree", ["empty", "nested", "mixed"])
def test_a_transform_compiles_on_odd_trees(tree: str) -> None:
    laws.compiles_once(laws.transform_cases("skip_nonfinite", torch.float32)[tree], torch.float32)


@EAGER
@DTYPES
@pytest.mark.parametrize("name", laws.GRAD_FNS)
def test_gradient_functions(name: str, law: Law, dtype: torch.dtype) -> None:
    shape = "bowl" if law is laws.has_finite_derivatives_at_zero else "smooth"
    laws.each(laws.grad_fn_cases(name, dtype, shape), law, dtype)


@DTYPES
@pytest.mark.parametrize("name", laws.GRAD_FNS)
def test_a_gradient_keeps_its_form(name: str, dtype: torch.dtype) -> None:
    laws.gradient_keeps_its_form(name, dtype)


@pytest.mark.parametrize("name", laws.GRAD_FNS)
def test_gradient_functions_compile(name: str) -> None:
    laws.compiles_once(laws.grad_fn_cases(name, torch.float32)["scalars"], torch.float32)


@EAGER
@DTYPES
@pytest.mark.parametrize("kind", ["attacks", "losses", "schedules"])
def test_the_rest(kind: str, law: Law, dtype: torch.dtype) -> None:
    if kind == "schedules" and law is laws.has_the_right_derivative:
        pytest.skip("test_schedules_functional.py does it where they are smooth")
    laws.each(laws.cases_of(kind, dtype), law, dtype)


@pytest.mark.parametrize("kind", ["attacks", "losses", "schedules"])
def test_the_rest_compiles(kind: str) -> None:
    """All of a kind in one program, which is compiled in the time of one."""
    cases = laws.cases_of(kind, torch.float32)

    def all_of_them(numbers: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, case in cases.items():
            own = {key.split("/")[1]: value for key, value in numbers.items() if key.split("/")[0] == name}
            found[name] = case.function(own, inputs[name])
        return found

    numbers = {f"{name}/{key}": values for name, case in cases.items() for key, values in case.numbers.items()}
    together = laws.Case(all_of_them, numbers, lambda i: {name: case.inputs(i) for name, case in cases.items()})
    laws.compiles_once(together, torch.float32)


def test_the_laws_can_fail() -> None:
    """Each law refuses a function that breaks it."""
    calls = []

    def in_place(numbers: Any, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(numbers["c"])

    def forgetful(numbers: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * len(calls)

    def sees_its_lanes(numbers: Any, x: torch.Tensor) -> torch.Tensor:
        return x * numbers["c"] if torch._C._functorch.maybe_get_level(x) == -1 else x * numbers["c"] * 1.00001

    def only_without_grad(numbers: Any, x: torch.Tensor) -> torch.Tensor:
        return x * numbers["c"] * (1.0 if torch.is_grad_enabled() else 1.00001)

    def root(numbers: Any, x: torch.Tensor) -> torch.Tensor:
        return numbers["c"] * x.square().sum().sqrt()

    def detached(numbers: Any, x: torch.Tensor) -> torch.Tensor:
        return numbers["c"].detach() * x

    def breaks_the_graph(numbers: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if numbers["c"] > 1 else x

    def recompiles(numbers: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * numbers["c"] + 0 * len(calls)

    x = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def case(function: Any) -> laws.Case:
        return laws.Case(function, {"c": (0.5, 2.0, 3.0)}, lambda i: x + i, torch.zeros_like(x))

    for law, broken in [
        (laws.leaves_its_inputs_alone, in_place),
        (laws.answers_the_same_twice, forgetful),
        (laws.is_its_own_loop_under_vmap, sees_its_lanes),
        (laws.is_its_own_loop_under_vmap, only_without_grad),
        (laws.is_its_own_loop_under_two_vmaps, sees_its_lanes),
        (laws.has_finite_derivatives_at_zero, root),
        (laws.has_the_right_derivative, detached),
    ]:
        with pytest.raises(AssertionError, match=r"written|not equal|off by|derivative"):
            law(case(broken), torch.float64)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        laws.compiles_once(case(breaks_the_graph), torch.float64)
    with pytest.raises(AssertionError, match="compiled 2 times"):
        laws.compiles_once(case(recompiles), torch.float64)


def test_a_state_that_changes_its_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad() -> F.Transform:
        return F.Transform(lambda params: torch.zeros(()), lambda grads, state, params: (grads, state.double()))

    monkeypatch.setitem(laws.TRANSFORMS, "bad", laws.TransformEntry(bad, {}))
    with pytest.raises(AssertionError, match="bad, empty: state"):
        laws.state_keeps_its_form("bad", torch.float32)
