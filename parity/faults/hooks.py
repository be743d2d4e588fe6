"""Hooks and ties: what goes wrong in the usual recipes."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from functricks import functional, reverse_gradient, scale_gradient, stack, tie
from functricks.adapter import hooks
from parity.faults.registry import fault, show, slope


class Twice(nn.Module):
    """Two operations in one module: 3 exp(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * torch.exp(x)


@fault(
    "backward hooks",
    "`register_backward_hook`",
    "of a module of several operations it sees the gradient at the input of the last one",
    '`probes=["block:input"]`: the gradient of what goes in',
)
def backward_hook_of_a_block() -> str:
    model, seen = nn.Sequential(Twice()), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model[0].register_backward_hook(lambda module, into, out: seen.append(into[0]))
        x = torch.tensor([1.0], requires_grad=True)
        model(x).sum().backward()
    pure = functional(nn.Sequential(Twice()), probes="0:input")
    right = grad(lambda probe: pure.apply({}, {}, x.detach(), probes={"0:input": probe})[0].sum())(torch.zeros(1))
    return f"{show(seen[0])} instead of {show(right)}"


@fault(
    "backward hooks",
    "a full backward hook on a layer that a ReLU in place follows",
    "the output of the layer is a view of the hook's, which may not be written to",
    "a copy passes on, so that writes in place reach neither what was observed nor its gradient",
)
def backward_hook_before_a_write() -> str:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 1), nn.ReLU(inplace=True))

    x, hooked = torch.ones(1, 1), model()
    hooked[0].register_full_backward_hook(lambda module, into, out: None)
    found = "no error"
    try:
        hooked(x)
    except RuntimeError as error:
        found = type(error).__name__
    observed = model()
    with hooks(observed, gradients="0") as seen:
        observed(x).sum().backward()
    return f"{found}; here the gradient is {show(seen.gradients['0'])}"


@fault(
    "backward hooks",
    "`tensor.register_hook` in a function that `torch.func.grad` differentiates twice",
    "the hook acts on one level of derivatives only; inside of a `vmap` that is differentiated it raises",
    "`scale_gradient`, `reverse_gradient`, `clip_gradient`, `replace_gradient`: under grad, vmap and compile",
)
def tensor_hook_under_grad() -> str:
    def hooked(x: Tensor) -> Tensor:
        y = x * 1.0
        y.register_hook(lambda g: 0.5 * g)
        return y**2

    x = torch.tensor(3.0)
    right = grad(grad(lambda x: scale_gradient(x, 0.5) ** 2))(x)
    return f"second derivative {show(grad(grad(hooked))(x))} instead of {show(right)}"


@fault(
    "gradient reversal",
    "`-c * x + ((1 + c) * x).detach()`",
    "the value is not x any more: rounding, and infinity becomes NaN",
    "`reverse_gradient` passes the value on to the bit",
)
def reversal_by_formula() -> str:
    x = torch.tensor([0.7, torch.inf])
    formula = -0.3 * x + ((1 + 0.3) * x).detach()
    moved = (formula - x)[0].abs() / torch.finfo(x.dtype).eps
    same = torch.equal(reverse_gradient(x, 0.3), x)
    return f"0.7 moves by {show(moved)} eps, inf becomes {show(formula[1])}; here {'the same' if same else 'moved'}"


@fault(
    "hooks in a loop",
    "`handle.remove()` after the forward",
    "an exception in the forward leaves the hook on the model for good",
    "`adapter.hooks` removes its handles however the block is left",
)
def handles_after_an_exception() -> str:
    def left_by(use: Any) -> int:
        model = nn.Linear(2, 1)
        with contextlib.suppress(RuntimeError):
            use(model, torch.ones(3))  # a wrong shape
        return len(model._forward_hooks)

    def by_hand(model: nn.Module, x: Tensor) -> None:
        handle = model.register_forward_hook(lambda module, args, output: None)
        model(x)
        handle.remove()

    def in_a_block(model: nn.Module, x: Tensor) -> None:
        with hooks(model, observe=""):
            model(x)

    return f"{left_by(by_hand)} hook left; here {left_by(in_a_block)}"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.last.weight = self.first.weight
        with torch.no_grad():
            self.first.weight.fill_(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


@fault(
    "tied weights",
    "`load_state_dict(state, assign=True)`",
    "the two names get a tensor each: from then on they train apart",
    "one entry a tie in the parameters, so that no checkpoint can untie them",
)
def tie_lost_on_load() -> str:
    model = Tied()
    before = len(list(model.parameters()))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    params = tie(functional(model), {"last.weight": "first.weight"}).params
    return f"{len(list(model.parameters()))} parameters instead of {before}; `tie` makes it {len(params)}"


@fault(
    "tied weights in an ensemble",
    "`stack_module_state`, and a copy of the model on the meta device to call",
    "moving to meta unties the copy, and the second name computes with memory that nobody wrote",
    "`stack`: one value and one gradient a tie and lane",
)
def tie_lost_in_a_stack() -> str:
    models = [Tied(), Tied()]
    x = torch.ones(1, 1)
    params, _ = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    found = vmap(lambda p: functional_call(base, p, (x,)))(params)
    stacked = stack(models)
    right = vmap(lambda p: stacked.apply(p, {}, x)[0])(stacked.params)
    slopes = vmap(grad(lambda p: stacked.apply(p, {}, x)[0].sum()))(stacked.params)["first.weight"]
    assert torch.equal(slopes[0].flatten(), slope(lambda w: w * w, torch.tensor(3.0)).reshape(1))
    return f"{show(found) if torch.equal(found, right) else 'anything'} instead of {show(right)}"
