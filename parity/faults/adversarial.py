"""FGM and PGD: what goes wrong in the usual recipes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD

from functricks import (
    attack,
    fgm,
    gradient,
    pgd,
)
from functricks.types import Params
from parity.faults.registry import fault, show, slope


def squared(params: Params, _: object) -> Tensor:
    """The loss of one head weight and one embedding: (w e)²."""
    loss: Tensor = (params["head"] * params["embedding"]).square()
    return loss


def toy() -> dict[str, Tensor]:
    return {"head": torch.tensor(1.0), "embedding": torch.tensor(2.0)}


@fault(
    "FGM",
    'attack the parameters with "word_embeddings" in their name',
    "in another model nothing is called that: training goes on without any attack",
    "a selector that matches nothing raises, and lists the paths",
)
def fgm_no_match() -> str:
    clean = gradient(squared)(toy(), ()).grads["head"]
    attacked = fgm(gradient(squared), 1.0, where="embedding")(toy(), ()).grads["head"]
    try:
        fgm(gradient(squared), 1.0, where="word_embeddings")(toy(), ())
    except ValueError as error:
        raised = type(error).__name__
    return f"gradient of the head {show(clean)} instead of {show(attacked)}; here {raised}"


@fault(
    "FGM",
    "guard the norm against 0 and NaN only",
    "one infinite entry gives inf / inf = NaN, which is written into the weights",
    "a gradient that is not finite, or zero, gives no perturbation",
)
def fgm_infinite() -> str:
    weight, found = torch.tensor([1.0, 1.0]), torch.tensor([torch.inf, 1.0])
    norm = found.norm()
    usual = weight + found / norm if norm != 0 and not torch.isnan(norm) else weight
    seen = []

    def loss_fn(params: Params, batch: Tensor) -> Tensor:
        seen.append(params["embedding"].detach())
        return (params["embedding"] * batch).sum()

    fgm(gradient(loss_fn, backend="autograd"), 1.0, where="embedding")({"embedding": weight}, found)
    return f"weights 1, 1 become {show(usual)}; here {show(seen[1])}"


@fault(
    "FGM",
    "divide by the norm of the gradient of the whole embedding matrix",
    "the papers normalise each example's looked-up embeddings; one norm for all weakens the attack as the batch grows",
    '`norm="leaf"` is the recipe; `attack(..., per="example")` the paper',
)
def fgm_norm() -> str:
    table, ids = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([[0, 1], [0, 2]])
    direction = torch.tensor([1.0, 2.0])

    def loss(x: Tensor) -> Tensor:
        return (x @ direction).square().sum(1).mean()

    found = slope(lambda table: loss(table[ids]), table)
    usual = loss((table + found / found.norm())[ids])
    ours = loss(attack(lambda x: loss(x) * len(x), table[ids], norm="l2", per="example", epsilon=1.0))
    return f"adversarial loss {show(usual)}, per example {show(ours)} (ε = 1, clean {show(loss(table[ids]))})"


@fault(
    "PGD",
    "ε = 1, α = 0.3, K = 3",
    "three steps of 0.3 never leave the ball: the projection does nothing",
    "the docstring says when it acts: `steps * step_size > epsilon`",
)
def pgd_inside() -> str:
    found = []
    for steps in (3, 4):
        seen: list[Tensor] = []

        def loss_fn(params: Params, batch: object, seen: list[Tensor] = seen) -> Tensor:
            seen.append(params["embedding"].detach())
            return squared(params, batch)

        pgd(gradient(loss_fn, backend="autograd"), 1.0, 0.3, steps, where="embedding")(toy(), ())
        found.append(seen[-1] - 2)
    return f"the perturbation is {show(found[0])} long; with K = 4 {show(found[1])}"


@fault(
    "PGD",
    "back up the gradients of the attacked parameters only",
    "all others keep the gradient of an attack step in place of the clean one",
    "gradients are values: nothing to back up",
)
def pgd_partial_backup() -> str:
    head, embedding = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0))
    optimizer = SGD([head, embedding], lr=0.1)
    (head * embedding).square().backward()
    backup = embedding.grad.clone()
    for step, moved in enumerate((2.3, 2.5)):  # 2 + 0.3, and 2 + 0.6 projected to the ball of 0.5
        with torch.no_grad():
            embedding.copy_(torch.tensor(moved))
        if step == 0:
            optimizer.zero_grad()
        else:
            embedding.grad = backup
        (head * embedding).square().backward()
    ours = pgd(gradient(squared), 0.5, 0.3, 2, where="embedding")(toy(), ()).grads["head"]
    return f"gradient of the head {show(head.grad)} instead of {show(ours)}"


@fault(
    "PGD",
    "restore gradients where `grad is not None`",
    "`zero_grad` sets None, so a parameter that the last attack step did not touch loses its clean gradient",
    "gradients are values: a leaf that a pass does not use has gradient 0 there",
)
def pgd_none() -> str:
    embedding, skipped = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(1.0))
    optimizer = SGD([embedding, skipped], lr=0.1)

    def loss(embedding: Tensor, skipped: Tensor, use: bool) -> Tensor:
        return embedding.square() + (skipped if use else 0.0)  # a layer that is dropped in the attack

    loss(embedding, skipped, True).backward()
    backup = {parameter: parameter.grad.clone() for parameter in (embedding, skipped)}
    optimizer.zero_grad()
    loss(embedding, skipped, False).backward()
    for parameter in (embedding, skipped):
        if parameter.grad is not None:
            parameter.grad = backup[parameter]
    loss(embedding, skipped, False).backward()

    def loss_fn(params: Params, batch: object, calls: Tensor) -> tuple[Tensor, Tensor]:
        return loss(params["embedding"], params["skipped"], bool(calls == 0)), calls + 1

    grad_fn = pgd(gradient(loss_fn, has_carry=True, backend="autograd"), 1.0, 0.3, 2, where="embedding")
    ours = grad_fn({"embedding": torch.tensor(2.0), "skipped": torch.tensor(1.0)}, (), torch.tensor(0)).grads["skipped"]
    return f"gradient {skipped.grad} instead of {show(ours)}"
