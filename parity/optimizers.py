"""Optimizers and parameter groups: :mod:`torch.optim` against chains of transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn, optim
from torch.optim import Optimizer

from functricks import (
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamax,
    adamw,
    asgd,
    chain,
    layer_decay,
    muon,
    nadam,
    no_decay,
    partition,
    radam,
    rmsprop,
    rprop,
    sgd,
)
from functricks.types import Transform
from parity import tasks
from parity.harness import (
    Run,
    Technique,
    backward_of_cross_entropy,
    classic_loop,
    functional_loop,
    gradient_of_cross_entropy,
)
from parity.tasks import Task


class Case(NamedTuple):
    name: str
    classic: Callable[[nn.Module], Optimizer]
    functional: Transform


def classic(case: Case, task: Task) -> Run:
    before = torch.get_default_dtype()
    torch.set_default_dtype(next(iter(task.start().values())).dtype)  # in which NAdam and ASGD keep their scalars
    try:
        return classic_loop(task, case.classic, backward_of_cross_entropy)
    finally:
        torch.set_default_dtype(before)


def functional(case: Case, task: Task) -> Run:
    return functional_loop(task, gradient_of_cross_entropy(task), case.functional)


# --- parameter groups ------------------------------------------------------------------------------------------------


def no_decay_groups(model: nn.Module) -> Optimizer:
    """Weights decay, biases do not; every parameter is in exactly one group, by its shape and not by its name."""
    decaying = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return optim.AdamW([{"params": decaying}, {"params": others, "weight_decay": 0.0}], lr=3e-3, weight_decay=0.1)


def layer_groups(model: nn.Module) -> Optimizer:
    """The head learns ten times as fast, and with another optimizer's momentum."""
    body, head = model[0], model[2]
    return optim.SGD(
        [{"params": body.parameters()}, {"params": head.parameters(), "lr": 0.5, "momentum": 0.5}],
        lr=0.05,
        momentum=0.9,
    )


def depth_groups(model: nn.Module) -> Optimizer:
    """Layer-wise decay by hand: the head at the full rate, the layer below at half of it."""
    body, head = model[0], model[2]
    return optim.AdamW([{"params": body.parameters(), "lr": 1.5e-3}, {"params": head.parameters()}], lr=3e-3)


def decaying() -> dict[str, bool]:
    with torch.device("meta"):  # names and kinds are all that counts
        model = tasks.mlp()
    return {name: not left_out for name, left_out in no_decay(model).items()}


layer_rates = partition(
    {"body": sgd(0.05, momentum=0.9), "head": sgd(0.5, momentum=0.5)},
    labels=lambda path, leaf: "head" if path.startswith("2.") else "body",
)

# --- pairs -----------------------------------------------------------------------------------------------------------


def same(
    name: str, theirs: Callable[..., Optimizer], ours: Callable[..., Transform], **arguments: float | bool
) -> Case:
    """The same arguments on both sides."""
    return Case(name, lambda model: theirs(model.parameters(), **arguments), ours(**arguments))


CASES = [
    same("sgd", optim.SGD, sgd, lr=0.3),
    same("sgd, momentum", optim.SGD, sgd, lr=0.1, momentum=0.9),
    same("sgd, nesterov", optim.SGD, sgd, lr=0.1, momentum=0.9, nesterov=True),
    same("sgd, dampening", optim.SGD, sgd, lr=0.3, momentum=0.9, dampening=0.5),
    same("sgd, weight decay", optim.SGD, sgd, lr=0.3, momentum=0.5, weight_decay=0.05),
    same("sgd, maximize", optim.SGD, sgd, lr=0.01, maximize=True),
    same("adam", optim.Adam, adam, lr=3e-3),
    same("adam, weight decay", optim.Adam, adam, lr=3e-3, weight_decay=0.05),
    same("adam, amsgrad", optim.Adam, adam, lr=3e-3, amsgrad=True),
    same("adamw", optim.AdamW, adamw, lr=3e-3, weight_decay=0.1),
    same("adamw, amsgrad", optim.AdamW, adamw, lr=3e-3, weight_decay=0.1, amsgrad=True),
    same("nadam", optim.NAdam, nadam, lr=3e-3),
    same("nadam, decoupled weight decay", optim.NAdam, nadam, lr=3e-3, weight_decay=0.1, decoupled_weight_decay=True),
    same("radam", optim.RAdam, radam, lr=3e-2, weight_decay=0.05),
    same("adamax", optim.Adamax, adamax, lr=3e-3, weight_decay=0.05),
    same("adagrad", optim.Adagrad, adagrad, lr=3e-2, lr_decay=0.01),
    same("adadelta", optim.Adadelta, adadelta, lr=0.5, weight_decay=0.05),
    same("rmsprop", optim.RMSprop, rmsprop, lr=3e-3),
    same("rmsprop, centered, momentum", optim.RMSprop, rmsprop, lr=1e-3, centered=True, momentum=0.9),
    same("rprop", optim.Rprop, rprop, lr=1e-3),
    same("asgd", optim.ASGD, asgd, lr=0.3, lambd=0.01),
    same("adafactor", optim.Adafactor, adafactor, lr=3e-2, weight_decay=0.1),
    same("muon", optim.Muon, muon, lr=0.02),
    Case("no-decay groups", no_decay_groups, adamw(3e-3, weight_decay=0.1, decay_where=decaying())),
    Case("learning rates per layer", layer_groups, layer_rates),
    Case("layer_decay", depth_groups, chain(adamw(3e-3), layer_decay(0.5, layers=["0.*", "2.*"]))),
]


def matrices() -> nn.Module:
    """Muon takes matrices alone."""
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))


def technique(case: Case) -> Technique:
    if case.name == "muon":  # it rounds to bfloat16, whose last place is 2**16 of float32, now and then the other way
        versions = partial(classic, case), partial(functional, case)
        return Technique(case.name, *versions, partial(tasks.classes, network=matrices), ulps=2.0**16)
    return Technique(case.name, partial(classic, case), partial(functional, case), tasks.classes)


TECHNIQUES = [technique(case) for case in CASES]
