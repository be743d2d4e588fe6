"""Hooks, gradient reversal and ties: registered on a module, against values of a call.

The classic versions register hooks on modules, assign one parameter to several of them, and reverse a gradient by an
``autograd.Function`` of their own. The functional ones name the place: ``intervene``, ``probes``, ``tie``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from functricks import adamw as functional_adamw
from functricks import (
    chain,
    clip_by_global_norm,
    clip_gradient,
    fgm,
    functional,
    gradient,
    losses,
    replace_gradient,
    reverse_gradient,
    sgd,
    tie,
)
from functricks.types import Batch, GradFn, Gradient, Params
from parity import tasks
from parity.adversarial import Backward, fgm_attack, whole
from parity.harness import Run, Technique, classic_loop, functional_loop
from parity.tasks import CLASSES, FEATURES, HIDDEN, VOCABULARY, Task

LR, MOMENTUM = 0.05, 0.9


# --- forward hooks and full backward hooks that replace -------------------------------------------------------------

Register = Callable[[nn.Module], Any]


def hooked(register: Register, task: Task) -> Run:
    def make_optimizer(model: nn.Module) -> SGD:
        register(model)
        return SGD(model.parameters(), LR, MOMENTUM)

    def backward(model: nn.Module, batch: Batch) -> None:
        inputs = batch[0].clone().requires_grad_()  # a full backward hook on the first module warns without
        F.cross_entropy(model(inputs), batch[1]).backward()

    return classic_loop(task, make_optimizer, backward)


def intervened(changes: dict[str, Callable[[Any], Any]], task: Task) -> Run:
    model = functional(task.prototype, intervene=changes)

    def loss_fn(params: Params, batch: Batch) -> Any:
        return losses.cross_entropy(model.apply(params, {}, batch[0])[0], batch[1])

    return functional_loop(task, gradient(loss_fn), sgd(LR, MOMENTUM))


def register_forward(model: nn.Module) -> None:
    model[0].register_forward_hook(lambda module, args, output: 1.5 * output)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(1, keepdim=True),))


def register_backward(model: nn.Module) -> None:
    model[2].register_full_backward_hook(lambda module, into, out: (into[0].clamp(-0.01, 0.01),))
    model[0].register_full_backward_pre_hook(lambda module, out: (out[0] * out[0].abs().sqrt(),))


FORWARD = {"0": lambda y: 1.5 * y, "2:input": lambda x: x - x.mean(1, keepdim=True)}
BACKWARD = {
    "2:input": lambda x: clip_gradient(x, 0.01),
    "0": replace_gradient(lambda g: g * g.abs().sqrt()),
}


# --- the gradient of an activation, read and used: an attack on looked-up embeddings ---------------------------------

EPSILON = 0.5


def attacked_by_hooks(task: Task) -> Run:
    """Miyato, Dai and Goodfellow 2017: one step along the normalised gradient of the embedded sequence."""

    def backward(model: nn.Module, batch: Batch) -> None:
        kept: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            output.retain_grad()
            kept.append(output)

        handle = model.embedding.register_forward_hook(keep)
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        handle.remove()
        direction = kept[0].grad
        delta = EPSILON * direction / torch.linalg.vector_norm(direction)
        handle = model.embedding.register_forward_hook(lambda module, args, output: output + delta)
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        handle.remove()

    return classic_loop(task, lambda model: SGD(model.parameters(), LR, MOMENTUM), backward)


def attacked_by_probes(task: Task) -> Run:
    model = functional(task.prototype, probes="embedding")

    def loss_fn(both: Params, batch: Batch) -> Any:
        output, _ = model.apply(both["params"], {}, batch[0], probes={"embedding": both["probe"]})
        return losses.cross_entropy(output, batch[1])

    return functional_loop(task, through_the_probe(gradient(loss_fn)), sgd(LR, MOMENTUM))


def through_the_probe(grad_fn: GradFn) -> GradFn:
    """Add the gradient at the attacked embeddings to the clean one: parameters and probe in one tree."""

    def attacked(params: Params, batch: Batch, carry: Any = (), *, scale: Any = None) -> Gradient:
        zeros = params["embedding.weight"].new_zeros(*batch[0].shape, HIDDEN)
        clean = grad_fn({"params": params, "probe": zeros}, batch, carry, scale=scale)
        direction = clean.grads["probe"]
        delta = EPSILON * direction / torch.linalg.vector_norm(direction)
        moved = grad_fn({"params": params, "probe": delta}, batch, carry, scale=scale)
        both = {name: g + moved.grads["params"][name] for name, g in clean.grads["params"].items()}
        return clean._replace(grads=both)

    return attacked


# --- gradient reversal -----------------------------------------------------------------------------------------------


class Reversal(torch.autograd.Function):
    """The layer that every implementation of domain-adversarial training writes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.neg() * ctx.factor, None


class Adapting(nn.Module):
    """Features that tell the class and not the domain (Ganin and Lempitsky 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh())
        self.label = nn.Linear(HIDDEN, CLASSES)
        self.domain = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor, reverse: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        return self.label(features), self.domain(reverse(features))


def domains(dtype: torch.dtype, steps: int = 40) -> Task:
    """Rows with a class and a domain each, and how far the training is: the factor grows with it."""
    task = tasks.classes(dtype, steps, network=Adapting)
    batches = [
        (x, labels, (x[:, 0] > 0).long(), torch.tensor(2 / (1 + math.exp(-10 * step / steps)) - 1 + 0.1, dtype=dtype))
        for step, (x, labels) in enumerate(task.batches)
    ]
    return Task(task.prototype, batches)


def reversed_by_function(task: Task) -> Run:
    def backward(model: nn.Module, batch: Batch) -> None:
        x, labels, domains, factor = batch
        label, domain = model(x, lambda features: Reversal.apply(features, factor.item()))
        (F.cross_entropy(label, labels) + F.cross_entropy(domain, domains)).backward()

    return classic_loop(task, lambda model: SGD(model.parameters(), LR, MOMENTUM), backward)


def reversed_as_value(task: Task) -> Run:
    model = functional(task.prototype)

    def loss_fn(params: Params, batch: Batch) -> Any:
        x, labels, domains, factor = batch
        (label, domain), _ = model.apply(params, {}, x, lambda features: reverse_gradient(features, factor))
        return losses.cross_entropy(label, labels).mean() + losses.cross_entropy(domain, domains).mean()

    return functional_loop(task, gradient(loss_fn), sgd(LR, MOMENTUM))


# --- ties ------------------------------------------------------------------------------------------------------------

TIES = {"decoder.weight": "encoder.weight", "output.1.weight": "encoder.weight"}


class Translator(nn.Module):
    """Two embeddings and an output behind a projection, which share one table or not."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, FEATURES)
        self.decoder = nn.Embedding(VOCABULARY, FEATURES)
        self.hidden = nn.Linear(2 * FEATURES, HIDDEN)
        self.output = nn.Sequential(nn.Linear(HIDDEN, FEATURES, bias=False), nn.Linear(FEATURES, VOCABULARY))
        if tied:
            self.decoder.weight = self.encoder.weight
            self.output[1].weight = self.encoder.weight

    def forward(self, tokens: Tensor) -> Tensor:
        both = torch.cat([self.encoder(tokens), self.decoder(tokens.flip(1))], -1)
        return self.output(torch.tanh(self.hidden(both))).transpose(1, 2)


def sentences(dtype: torch.dtype, steps: int = 40) -> Task:
    """Tokens, and for each the next one."""
    task = tasks.tokens(dtype, steps, ignored=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        prototype = Translator().to(dtype)
    return Task(prototype, [(tokens, tokens.roll(-1, 1)) for tokens, _ in task.batches])


def clip(model: nn.Module) -> bool:
    clip_grad_norm_(model.parameters(), 0.3)
    return True


def tied_by_assignment(attack: Backward, task: Task) -> Run:
    return classic_loop(task, lambda model: AdamW(model.parameters(), 0.01, weight_decay=0.1), attack, ready=clip)


def tied_by_name(task: Task) -> Run:
    model = tie(functional(Translator(tied=False).to(next(task.prototype.parameters()).dtype)), TIES)

    def loss_fn(params: Params, batch: Batch) -> Any:
        return losses.cross_entropy(model.apply(params, {}, batch[0])[0], batch[1])

    grad_fn = fgm(gradient(loss_fn), 0.3, where="encoder.*")
    optimizer = chain(clip_by_global_norm(0.3, classic=True), functional_adamw(0.01, weight_decay=0.1))
    return functional_loop(task, grad_fn, optimizer)


TECHNIQUES = [
    Technique(
        "forward hooks and pre-hooks",
        partial(hooked, register_forward),
        partial(intervened, FORWARD),
        tasks.classes,
    ),
    Technique(
        "full backward hooks and pre-hooks",
        partial(hooked, register_backward),
        partial(intervened, BACKWARD),
        tasks.classes,
    ),
    Technique("attack on embedded tokens by hooks", attacked_by_hooks, attacked_by_probes, tasks.tokens),
    Technique("gradient reversal", reversed_by_function, reversed_as_value, domains),
    Technique(
        "tied embeddings and output, fgm, clipped, decayed",
        partial(tied_by_assignment, whole(fgm_attack(0.3, "encoder"))),
        tied_by_name,
        sentences,
    ),
]
