"""Loss arithmetic, and that every type passes through torch.func."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as nnf

from functricks import Gradient, Loss, StepInfo, TrainState, Transform
from functricks.types import Empty


def test_mean_divides_by_the_weights() -> None:
    loss = Loss(torch.tensor([[1.0, 6.0], [0.0, 2.0]]), torch.tensor([[1.0, 3.0], [0.0, 1.0]]))
    assert loss.mean() == torch.tensor(9.0 / 5.0)
    assert loss.sum() == torch.tensor(9.0)


def test_a_mean_over_no_weight_is_nan_as_in_pytorch() -> None:
    classic = nnf.cross_entropy(torch.zeros(2, 3), torch.tensor([-100, -100]))
    assert classic.isnan()
    assert Loss(torch.zeros(2), torch.zeros(2)).mean().isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_adds_up_in_float32_and_casts_last(dtype: torch.dtype) -> None:
    values = torch.full((4096,), 100.0, dtype=dtype)  # the sum is 409,600: beyond float16, and beyond bfloat16's digits
    mean = Loss(values, torch.ones(4096)).mean()
    assert mean.dtype == dtype
    assert mean == 100.0


def test_the_mean_of_parts_is_the_sum_of_numerators_over_the_sum_of_weights() -> None:
    values, weights = torch.rand(7, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    whole = Loss(values, weights)
    parts = [Loss(*pair) for pair in zip(values.split(3), weights.split(3), strict=True)]
    together = sum(part.sum() for part in parts) / sum(part.weights.sum() for part in parts)
    torch.testing.assert_close(together, whole.mean(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.int64])
def test_weights_are_counted_in_float32(dtype: torch.dtype) -> None:
    """4097 is odd and beyond the digits of half precision."""
    hits = torch.arange(4097) % 2 == 0
    mean = Loss(hits, torch.ones(4097).to(dtype)).mean()
    assert mean.dtype == torch.float32  # and not bool, in which a share is 0 or 1
    assert mean.item() == pytest.approx(2049 / 4097, rel=1e-7)


def test_weights_are_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"values and weights must have the same shape, got \(4, 2\) and \(4,\)"):
        Loss(torch.ones(4, 2), torch.ones(4)).mean()


def test_types_pass_through_vmap_and_grad() -> None:
    x = torch.arange(3.0)
    state = TrainState(x, {"w": x}, (Empty(), x), {"key": x})
    doubled = torch.vmap(lambda state: state._replace(params={"w": 2 * state.params["w"]}))(state)
    assert isinstance(doubled, TrainState)
    assert doubled.params["w"].tolist() == [0.0, 2.0, 4.0]
    found = torch.vmap(lambda x: Gradient({"w": x}, x, x, (), {}))(x)
    assert isinstance(found, Gradient)
    info = torch.vmap(lambda x: StepInfo(x, x, x, x > 1, {"m": x}))(x)
    assert info.applied.tolist() == [False, False, True]
    slope = torch.func.grad(lambda loss: loss.mean())(Loss(x, torch.ones(3)))
    assert isinstance(slope, Loss)
    assert slope.values.tolist() == [pytest.approx(1 / 3)] * 3


def test_empty_is_an_empty_tuple() -> None:
    assert Empty() == ()
    assert torch.vmap(lambda x: (x, Empty()))(torch.zeros(2))[1] == Empty()


def test_states_are_picklable() -> None:
    state = TrainState(torch.tensor(3), {"w": torch.ones(2)}, (Empty(),))
    back = pickle.loads(pickle.dumps(state))
    assert back.step == 3
    assert back.params["w"].tolist() == [1.0, 1.0]


def test_a_transform_is_a_pair() -> None:
    init, update = Transform(lambda params: Empty(), lambda grads, state, params: (grads, state))
    assert init({}) == ()
    assert update({"w": 1}, (), {}) == ({"w": 1}, ())


def test_a_mean_over_no_weight_is_nan_whatever_the_values() -> None:
    assert Loss(torch.tensor([1.0, 2.0]), torch.zeros(2)).mean().isnan()
    assert Loss(torch.tensor([1.0, 2.0]), torch.tensor([1.0, -1.0])).mean().isnan()
    means = torch.vmap(lambda values, weights: Loss(values, weights).mean())(torch.ones(2, 3), torch.eye(2, 3) * 0.5)
    assert means.tolist() == [6.0, 6.0]
    values, weights = torch.ones(2, requires_grad=True), torch.tensor([1.0, 3.0], requires_grad=True)
    Loss(values, weights).mean().backward()
    assert values.grad is not None
    assert weights.grad is not None
    assert values.grad.tolist() == [0.25, 0.25]
    assert weights.grad.tolist() == [-0.125, -0.125]
