"""Skipped steps, accumulation and clipping: what goes wrong in the usual recipes."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, lr_scheduler

from functricks import (
    accumulate,
    clip_by_global_norm,
    gradient,
    schedules,
    sgd,
    train_step,
)
from functricks.types import Loss
from parity.faults.registry import fault, show, slope


@fault(
    "skipped steps",
    "skip the optimizer when a gradient is not finite, step the scheduler all the same",
    "the rate decays without any training",
    "`train_step` is atomic: parameters, optimizer, carry and step count move together or not at all",
)
def schedule_on_skipped_step() -> str:
    gradients = (torch.inf, torch.inf, 0.1)
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer = SGD([weight], lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    for value in gradients:
        weight.grad = torch.tensor(value)
        if torch.isfinite(weight.grad):
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step()
    step = train_step(gradient(lambda w, x: (w * x).sum()), sgd(schedules.step_decay(1.0, step_size=1, gamma=0.5)))
    state = step.init(torch.tensor(1.0))
    for value in gradients:
        state, _ = step.update(state, torch.tensor([value]))
    return f"gradients ∞, ∞, 0.1 from 1: {show(weight)} instead of {show(state.params)}"


@fault(
    "gradient accumulation",
    "average the means of the micro-batches, or forget to divide",
    "short micro-batches count too much; or the gradient is k times too large",
    "`accumulate` weighs each micro-batch by what is in it",
)
def mean_of_means() -> str:
    parts = [torch.tensor([1.0]), torch.tensor([4.0, 4.0, 4.0])]
    means = sum(slope(lambda w, part=part: (w * part).mean(), torch.tensor(1.0)) for part in parts)
    grad_fn = gradient(lambda w, batch: Loss(w * batch[0], batch[1]))
    tokens = torch.tensor([[1.0, 0.0, 0.0], [4.0, 4.0, 4.0]])  # a row a micro-batch, zeros are padding
    ours = accumulate(grad_fn, 2)(torch.tensor(1.0), (tokens, (tokens > 0).float())).grads
    return f"tokens 1 | 4, 4, 4: {show(means / 2)}, or {show(means)}, instead of {show(ours)}"


@fault(
    "gradient accumulation",
    "`if (i + 1) % k == 0: step()`, and nothing after the loop",
    "the left-over micro-batches are lost, or leak into the first update of the next epoch",
    "`accumulate` takes the batch, so nothing can be left over",
)
def left_over_micro_batches() -> str:
    weight = nn.Parameter(torch.tensor(0.0))
    optimizer = SGD([weight], lr=0.1)
    updates = []
    for _ in range(2):
        for i in range(7):
            (weight / 4).backward()
            if (i + 1) % 4 == 0:
                updates.append(float(weight.grad))
                optimizer.step()
                optimizer.zero_grad()
    grad_fn = accumulate(gradient(lambda w, x: (w * x).mean()), micro_batch_size=1)
    ours = [grad_fn(torch.tensor(0.0), torch.ones(size)).grads for size in (4, 3)]
    return f"7 micro-batches, k = 4: gradients {show(*updates)} in 2 epochs, instead of {show(*ours)} in each"


@fault(
    "clipping",
    "`clip_grad_norm_` when gradients are tiny",
    "1e-6 is added to the norm, so that a norm of max_norm is clipped all the same",
    "nothing is added; `classic=True` reproduces PyTorch to the bit",
)
def clip_tiny() -> str:
    tiny = torch.tensor([6e-7, 8e-7])
    return f"{show(tiny)} with max_norm 1e-6: {show(_clipped(tiny, 1e-6))}; here {show(_ours_clipped(tiny, 1e-6))}"


@fault(
    "clipping",
    "`clip_grad_norm_` when gradients are huge",
    "the squares overflow, the norm is infinite and the gradient becomes 0",
    "the norm is computed without overflow",
)
def clip_huge() -> str:
    huge = torch.tensor([3e30, 4e30])
    return f"{show(huge)}: {show(_clipped(huge, 1.0))}; here {show(_ours_clipped(huge, 1.0))}"


def _clipped(gradient: Tensor, max_norm: float) -> Tensor:
    leaf = nn.Parameter(torch.zeros_like(gradient))
    leaf.grad = gradient.clone()
    clip_grad_norm_([leaf], max_norm)
    return leaf.grad


def _ours_clipped(gradient: Tensor, max_norm: float) -> Tensor:
    clip = clip_by_global_norm(max_norm)
    clipped: Tensor = clip.update(gradient, clip.init(gradient), gradient)[0]
    return clipped


@fault(
    "clipping",
    "keep `filter(lambda p: p.requires_grad, ...)` and use it for the optimizer and for clipping",
    "an iterator is empty the second time: nothing is clipped, silently",
    "trees, not iterators",
)
def clip_exhausted() -> str:
    model = nn.Linear(1, 1)
    trainable = filter(lambda parameter: parameter.requires_grad, model.parameters())
    SGD(trainable, lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        norm = clip_grad_norm_(trainable, 1.0)
    ours = clip_by_global_norm(1.0).update({n: p.grad for n, p in model.named_parameters()}, (), {})[0]
    return f"norm {show(norm)}, gradient {show(model.weight.grad)}; here {show(ours['weight'])}"
