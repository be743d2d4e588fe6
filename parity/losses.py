"""Losses: PyTorch's own, and the ones that everybody writes by hand, against :mod:`functricks.losses`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD

from functricks import gradient, losses, sgd
from parity import tasks
from parity.harness import Run, Technique, classic_loop, functional_loop
from parity.tasks import Batch, Net, Score, Task

CLASS_WEIGHT = (0.3, 1.0, 2.0, 0.7)


class Case(NamedTuple):
    name: str
    classic: Score  # (net, batch) -> 0-d tensor
    functional: Score  # (net, batch) -> Loss or 0-d tensor
    task: Callable[..., Task]
    lr: float = 0.3


def classic(case: Case, task: Task) -> Run:
    def backward(model: Net, batch: Batch) -> None:
        case.classic(model, batch).backward()

    return classic_loop(task, lambda model: SGD(model.parameters(), case.lr), backward)


def functional(case: Case, task: Task) -> Run:
    return functional_loop(task, gradient(task.loss_fn(case.functional)), sgd(case.lr))


# --- classic losses that PyTorch does not have, with their usual faults mended ---------------------------------------


def _weight(like: Tensor) -> Tensor:
    return torch.tensor(CLASS_WEIGHT, dtype=like.dtype)


def cross_entropy_of_weighted_rows(logits: Tensor, targets: Tensor, smoothing: float, weight: Tensor) -> Tensor:
    """Weigh each smoothed row as a whole by the class of its target."""
    rows = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")
    return (weight[targets] * rows).sum() / weight[targets].sum()


def focal(logits: Tensor, targets: Tensor, gamma: float, weight: Tensor | None = None) -> Tensor:
    """Divide by what is not ignored; keep p off 1, where the power has an infinite slope for gamma < 1."""
    kept = targets != tasks.IGNORED
    logits, targets = logits[kept], targets[kept]
    log_p = F.log_softmax(logits, 1).gather(1, targets[:, None])[:, 0]
    rest = (1 - log_p.exp()).clamp(min=torch.finfo(logits.dtype).eps)
    factor = torch.ones_like(log_p) if weight is None else weight[targets]
    return (factor * rest**gamma * -log_p).sum() / factor.sum()


def sigmoid_focal(logits: Tensor, targets: Tensor, gamma: float, alpha: float) -> Tensor:
    p = torch.sigmoid(logits)
    right = p * targets + (1 - p) * (1 - targets)
    alpha_t = alpha * targets + (1 - alpha) * (1 - targets)
    plain = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (alpha_t * (1 - right) ** gamma * plain).mean()


def info_nce(queries: Tensor, keys: Tensor, temperature: float | Tensor) -> Tensor:
    similarity = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T / temperature
    return F.cross_entropy(similarity, torch.arange(len(queries)))


def ntxent(z1: Tensor, z2: Tensor, temperature: float | Tensor) -> Tensor:
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    similarity = z @ z.T / temperature
    similarity = similarity.masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(similarity, torch.arange(len(z)).roll(len(z1)))


def supervised_contrastive(z: Tensor, labels: Tensor, temperature: float) -> Tensor:
    z = F.normalize(z, dim=1)
    itself = torch.eye(len(z), dtype=torch.bool)
    log_p = F.log_softmax((z @ z.T / temperature).masked_fill(itself, -torch.inf), 1)
    partners = (labels[:, None] == labels) & ~itself
    have = partners.any(1)
    mean = log_p.masked_fill(~partners, 0).sum(1)[have] / partners.sum(1)[have]
    return -mean.mean()


# --- pairs -----------------------------------------------------------------------------------------------------------


def on_outputs(name: str, classic: Callable, functional: Callable, task: Callable[..., Task], lr: float = 0.3) -> Case:
    """A pair of losses ``(output, target) -> loss``."""
    return Case(
        name,
        lambda net, batch: classic(net(batch[0]), batch[1]),
        lambda net, batch: functional(net(batch[0]), batch[1]),
        task,
        lr,
    )


def on_views(name: str, classic: Callable, functional: Callable) -> Case:
    """A pair of losses ``(z1, z2, learned temperature) -> loss``."""
    return Case(
        name,
        lambda net, batch: classic(*net(*batch[:2])),
        lambda net, batch: functional(*net(*batch[:2])),
        tasks.views,
        lr=0.02,
    )


def _softened(z: Tensor) -> Tensor:
    return F.log_softmax(z / 2.0, 1)


with_ignored = partial(tasks.classes, ignored=0.3)

CASES = [
    on_outputs("cross_entropy", F.cross_entropy, losses.cross_entropy, tasks.classes),
    on_outputs("cross_entropy, ignored rows", F.cross_entropy, losses.cross_entropy, with_ignored),
    on_outputs("cross_entropy, probabilities", F.cross_entropy, losses.cross_entropy, tasks.distributions),
    on_outputs(
        "cross_entropy, sum",
        lambda x, y: F.cross_entropy(x, y, reduction="sum"),
        lambda x, y: losses.cross_entropy(x, y).sum(),
        tasks.classes,
        lr=0.02,
    ),
    on_outputs(
        "label smoothing",
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        lambda x, y: losses.cross_entropy(x, y, label_smoothing=0.1),
        tasks.classes,
    ),
    on_outputs(
        "class weights",
        lambda x, y: F.cross_entropy(x, y, weight=_weight(x)),
        lambda x, y: losses.cross_entropy(x, y, weight=_weight(x)),
        tasks.classes,
    ),
    on_outputs(
        "label smoothing, class weights, ignored rows",
        lambda x, y: F.cross_entropy(x, y, weight=_weight(x), label_smoothing=0.1),
        lambda x, y: losses.cross_entropy(x, y, weight=_weight(x), label_smoothing=0.1),
        with_ignored,
    ),
    on_outputs(
        "label smoothing, weights of whole rows",
        lambda x, y: cross_entropy_of_weighted_rows(x, y, 0.1, _weight(x)),
        lambda x, y: losses.cross_entropy(x, y, weight=_weight(x), label_smoothing=0.1, weight_mode="row"),
        tasks.classes,
    ),
    on_outputs(
        "cross_entropy, an ignored class",
        lambda x, y: F.cross_entropy(x, y, ignore_index=2),
        lambda x, y: losses.cross_entropy(x, y, ignore_index=2),
        tasks.classes,
    ),
    on_outputs(
        "temperature",
        lambda x, y: F.cross_entropy(x / 0.5, y),
        lambda x, y: losses.cross_entropy(x, y, temperature=0.5),
        tasks.classes,
    ),
    on_outputs(
        "log_softmax, nll_loss",
        lambda x, y: F.nll_loss(F.log_softmax(x, 1), y, weight=_weight(x)),
        lambda x, y: losses.nll_loss(losses.log_softmax(x, 1), y, weight=_weight(x)),
        with_ignored,
    ),
    on_outputs(
        "focal_loss",
        lambda x, y: focal(x, y, 2.0),
        lambda x, y: losses.focal_loss(x, y, gamma=2.0),
        tasks.classes,
    ),
    on_outputs(
        "focal_loss, gamma 0.5, class weights, ignored rows",
        lambda x, y: focal(x, y, 0.5, _weight(x)),
        lambda x, y: losses.focal_loss(x, y, gamma=0.5, weight=_weight(x)),
        with_ignored,
    ),
    on_outputs(
        "sigmoid_focal_loss",
        lambda x, y: sigmoid_focal(x, y, 2.0, 0.25),
        lambda x, y: losses.sigmoid_focal_loss(x, y, gamma=2.0, alpha=0.25),
        tasks.answers,
    ),
    on_outputs("mse_loss", F.mse_loss, losses.mse_loss, tasks.numbers),
    on_outputs(
        "mse_loss, weights",
        lambda x, y: F.mse_loss(x, y, weight=_weight(x).expand_as(x)),
        lambda x, y: losses.mse_loss(x, y, weight=_weight(x).expand_as(x)),
        tasks.numbers,
    ),
    on_outputs("l1_loss", F.l1_loss, losses.l1_loss, tasks.numbers),
    on_outputs(
        "binary_cross_entropy",
        lambda x, y: F.binary_cross_entropy(torch.sigmoid(x), y),
        lambda x, y: losses.binary_cross_entropy(torch.sigmoid(x), y),
        tasks.answers,
    ),
    on_outputs(
        "binary_cross_entropy, weight",
        lambda x, y: F.binary_cross_entropy(torch.sigmoid(x), y, _weight(x)),
        lambda x, y: losses.binary_cross_entropy(torch.sigmoid(x), y, weight=_weight(x)),
        tasks.answers,
    ),
    on_outputs(
        "binary_cross_entropy_with_logits, weight",
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, _weight(x)),
        lambda x, y: losses.binary_cross_entropy_with_logits(x, y, weight=_weight(x)),
        tasks.answers,
    ),
    on_outputs(
        "binary_cross_entropy_with_logits, pos_weight",
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=_weight(x)),
        lambda x, y: losses.binary_cross_entropy_with_logits(x, y, pos_weight=_weight(x)),
        tasks.answers,
    ),
    on_outputs(
        "kl_divergence, batchmean, distillation at temperature 2",
        lambda x, y: F.kl_div(_softened(x), y, reduction="batchmean"),
        lambda x, y: losses.kl_divergence(losses.log_softmax(x, 1, temperature=2.0), y).sum() / len(y),
        tasks.distributions,
    ),
    on_outputs(
        "kl_divergence, log_target",
        lambda x, y: F.kl_div(F.log_softmax(x, 1), y.log(), reduction="batchmean", log_target=True),
        lambda x, y: losses.kl_divergence(losses.log_softmax(x, 1), y.log(), log_target=True).sum() / len(y),
        tasks.distributions,
    ),
    on_views(
        "info_nce, learned temperature",
        info_nce,
        lambda z1, z2, temperature: losses.info_nce(z1, z2, temperature=temperature),
    ),
    on_views(
        "ntxent, learned temperature",
        ntxent,
        lambda z1, z2, temperature: losses.ntxent(z1, z2, temperature=temperature),
    ),
    Case(
        "supervised_contrastive",
        lambda net, batch: supervised_contrastive(net(batch[0]), batch[1], 0.5),
        lambda net, batch: losses.supervised_contrastive(net(batch[0]), batch[1], temperature=0.5),
        tasks.classes,
    ),
]

TECHNIQUES = [Technique(case.name, partial(classic, case), partial(functional, case), case.task) for case in CASES]
