"""The identities with another gradient, against tensor hooks of ordinary autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from functricks import clip_gradient, gradient, replace_gradient, reverse_gradient, scale_gradient
from tests.helpers import ONE_STEP_EPS, assert_close, assert_nonzero, assert_same

X = torch.tensor([0.3, -1.7, 2.5, -0.4])
W = torch.tensor([1.5, -0.2, 0.7, 3.0])


class Case(NamedTuple):
    identity: Callable[[Tensor, float | Tensor], Tensor]
    hook: Callable[[Tensor, float | Tensor], Tensor]


_cubed = replace_gradient(lambda g, c: c * g**3)

CASES = {
    "scale_gradient": Case(scale_gradient, lambda g, c: g * c),
    "reverse_gradient": Case(reverse_gradient, lambda g, c: g * -c),
    "clip_gradient, bound": Case(clip_gradient, lambda g, c: g.clamp(-c, c)),
    "clip_gradient, max_norm": Case(
        lambda x, c: clip_gradient(x, max_norm=c), lambda g, c: g * torch.clamp(c / g.norm(), max=1.0)
    ),
    "replace_gradient": Case(lambda x, c: _cubed(x, torch.as_tensor(c)), lambda g, c: c * g**3),
}
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def loss(case: Case, x: Tensor, c: float | Tensor) -> Tensor:
    return (case.identity(torch.sin(x), c) ** 2 * W).sum()


def hooked(case: Case, x: Tensor, c: float | Tensor) -> Tensor:
    """The gradient by ordinary autograd and a tensor hook."""
    x = x.clone().requires_grad_()
    h = torch.sin(x)
    h.register_hook(lambda g: case.hook(g, c))
    (h**2 * W).sum().backward()
    assert_nonzero(x.grad)
    return x.grad


@every
def test_value_is_the_input_to_the_bit(case: Case) -> None:
    x = torch.tensor([1.5, -0.0, 0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3.4e38])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        values = x.to(dtype)
        bits = {4: torch.int32, 8: torch.int64, 2: torch.int16}[values.element_size()]
        assert torch.equal(case.identity(values, 0.5).view(bits), values.view(bits))
        assert grad(lambda v: (case.identity(v, 0.5) ** 2).sum())(torch.ones(3, dtype=dtype)).dtype == dtype


@every
@pytest.mark.parametrize("c", [0.3, torch.tensor(0.3), 0.0])
def test_gradient_is_that_of_a_tensor_hook(case: Case, c: float | Tensor) -> None:
    found = grad(lambda x: loss(case, x, c))(X)
    if c == 0.0:
        assert not found.any()
        return
    assert_close(found, hooked(case, X, c), eps=0 if case is not CASES["clip_gradient, max_norm"] else ONE_STEP_EPS)
    x = X.clone().requires_grad_()
    assert_close(torch.autograd.grad(loss(case, x, c), x)[0], found)


@every
def test_lanes_are_a_loop(case: Case) -> None:
    numbers, xs = torch.tensor([0.2, 0.7, 1.1]), torch.stack([X, 2 * X, X - 1])
    alone = [[grad(lambda v, c=c: loss(case, v, c))(x) for c in numbers] for x in xs]
    assert_nonzero(alone)
    assert_close(vmap(grad(lambda x, c: loss(case, x, c)))(xs, numbers), torch.stack([alone[i][i] for i in range(3)]))
    both = vmap(vmap(grad(lambda x, c: loss(case, x, c)), (None, 0)), (0, None))(xs, numbers)
    assert_close(both, torch.stack([torch.stack(row) for row in alone]))
    # the derivative outside of the lanes: what the function closes over is gone by then, its operands are not
    outside = grad(lambda x: vmap(lambda c: loss(case, x, c))(numbers).sum())(X)
    assert_close(outside, torch.stack(alone[0]).sum(0))


@every
def test_lanes_of_ordinary_autograd_below_them(case: Case) -> None:
    numbers = torch.tensor([0.2, 0.7, 1.1])

    def one(c: Tensor) -> Tensor:
        return gradient(lambda x, batch: loss(case, x, c))(X, ()).grads

    with torch.no_grad():  # one level of vmap and nothing to differentiate further: gradient goes below the lanes
        found = vmap(one)(numbers)
    assert_close(found, torch.stack([one(c) for c in numbers]))


@every
def test_compiled_is_eager(case: Case) -> None:
    numbers = torch.tensor([0.2, 0.7])
    function = vmap(grad(lambda x, c: loss(case, x, c)), (None, 0))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_close(compiled(X, numbers), function(X, numbers))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_close(compiled(2 * X, 3 * numbers), function(2 * X, 3 * numbers))


@pytest.mark.slow
def test_compiled_by_inductor_also_twice_differentiated() -> None:
    def second(x: Tensor, c: Tensor) -> Tensor:
        return grad(lambda v: grad(lambda u: loss(CASES["scale_gradient"], u, c))(v).sum())(x)

    assert_close(torch.compile(second, fullgraph=True)(X, torch.tensor(0.5)), second(X, torch.tensor(0.5)))


def test_second_derivatives_see_the_gradient_that_was_replaced() -> None:
    c = torch.tensor(0.3, dtype=torch.float64)
    x = X.double()

    def first(x: Tensor, c: Tensor) -> Tensor:
        return grad(lambda v: (scale_gradient(v**2, c) ** 2).sum())(x)  # c * 2 v**2 * 2 v

    assert_close(first(x, c), 4 * c * x**3)
    # v**2 passes through the identity once more: its part of the second derivative is scaled again
    assert_close(grad(lambda x: first(x, c).sum())(x), 4 * c * x**2 * (1 + 2 * c))
    assert_close(grad(lambda c: first(x, c).sum())(c), 4 * (x**3).sum())


def test_gradient_reversal_by_hand() -> None:
    # C = 1 on both sides of w -> y = w x: the head goes down, the trunk up
    trunk, head = grad(lambda w, v: (reverse_gradient(w * 3.0, 0.5) * v) ** 2, argnums=(0, 1))(
        torch.tensor(2.0), torch.tensor(1.0)
    )
    assert (trunk.item(), head.item()) == (-0.5 * 2 * 6 * 3, 2 * 6 * 6)


def test_clipped_norm_is_safe() -> None:
    def clipped(g: Tensor, m: float) -> Tensor:
        return grad(lambda x: (clip_gradient(x, max_norm=m) * g).sum())(torch.zeros_like(g))

    assert_same(clipped(torch.zeros(3), 1.0), torch.zeros(3))
    assert_close(clipped(torch.tensor([3e30, 4e30]), 1.0), torch.tensor([0.6, 0.8]))
    assert_same(clipped(torch.tensor([0.3, 0.4]), 1.0), torch.tensor([0.3, 0.4]))


def test_half_precision_rounds_once() -> None:
    x = X.bfloat16()
    found = grad(lambda v: (scale_gradient(v, 0.3) * W.bfloat16()).sum().float())(x)
    assert torch.equal(found, W.bfloat16() * 0.3)  # as a hook: the number is not rounded first


@every
def test_what_follows_may_write_in_place(case: Case) -> None:
    def writes(x: Tensor) -> Tensor:
        return (case.identity(torch.sin(x), 0.3).relu_() ** 2 * W).sum()

    def plain(x: Tensor) -> Tensor:
        return (case.identity(torch.sin(x), 0.3).relu() ** 2 * W).sum()

    assert_same(grad(writes)(X), grad(plain)(X))


def test_errors() -> None:
    with pytest.raises(ValueError, match="give bound or max_norm, one of them; got None and None"):
        clip_gradient(X)
    with pytest.raises(ValueError, match="give bound or max_norm, one of them; got 1"):
        clip_gradient(X, 1.0, max_norm=2.0)
    with pytest.raises(ValueError, match="bound must be >= 0, got -1"):
        clip_gradient(X, -1.0)
    with pytest.raises(ValueError, match="max_norm must be >= 0, got -1"):
        clip_gradient(X, max_norm=-1.0)
    with pytest.raises(TypeError, match=r"must return a tensor of the gradient's shape \(4,\), got shape \(\)"):
        grad(lambda x: replace_gradient(torch.sum)(x).sum())(X)
    with pytest.raises(TypeError, match="got NoneType"):
        grad(lambda x: replace_gradient(lambda g: None)(x).sum())(X)
    with pytest.raises(Exception, match="make the identity outside and call it inside"):
        torch.compile(lambda x: replace_gradient(torch.relu)(x), fullgraph=True, backend="eager")(X)
