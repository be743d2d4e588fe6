"""The same output under a perturbation: virtual adversarial training of inputs, and R-Drop's two dropout masks.

Both versions draw the same numbers: VAT's first direction from its key, dropout's masks as in ``dropout_batchnorm``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD

from functricks import functional as pure
from functricks import gradient, losses, r_drop, random, sgd, vat
from functricks.types import Params
from parity import tasks
from parity.dropout_batchnorm import RATE, SEED, ClassicDropout
from parity.harness import Run, Technique, classic_loop, functional_loop
from parity.tasks import CLASSES, FEATURES, HIDDEN, Batch, Task

LR, MOMENTUM = 0.05, 0.5
EPSILON, XI, WEIGHT = 0.5, 0.1, 2.0
ALPHA = 1.5


# --- virtual adversarial training ------------------------------------------------------------------------------------


def classic_vat(task: Task, *, steps: int) -> Run:
    key = random.split(random.key(SEED))[1]  # its other half draws the length, which does not matter here

    def backward(model: nn.Module, batch: Batch) -> None:
        rows, labels = batch
        target = F.softmax(model(rows), 1).detach()

        def divergence(shift: Tensor) -> Tensor:
            return F.kl_div(F.log_softmax(model(rows + shift), 1), target, reduction="batchmean")

        direction = random.normal(random.fold_in(key, 0), rows.shape).to(rows.dtype)
        for _ in range(steps):
            shift = (XI * F.normalize(direction)).requires_grad_()
            (direction,) = torch.autograd.grad(divergence(shift), shift)
        (F.cross_entropy(model(rows), labels) + WEIGHT * divergence(EPSILON * F.normalize(direction))).backward()

    return classic_loop(task, lambda model: SGD(model.parameters(), LR, MOMENTUM), backward)


def functional_vat(task: Task, *, steps: int) -> Run:
    def predict(params: tuple[Params, Tensor], batch: Batch, carry: Any) -> Tensor:
        return functional_call(task.prototype, params[0], batch[0] + params[1])

    def loss_fn(params: Params, batch: Batch) -> Any:
        return losses.cross_entropy(functional_call(task.prototype, params, batch[0]), batch[1])

    grad_fn = vat(
        gradient(loss_fn),
        predict,
        EPSILON,
        probe=lambda params, batch: torch.zeros_like(batch[0]),
        key=random.key(SEED),
        weight=WEIGHT,
        xi=XI,
        steps=steps,
    )
    return functional_loop(task, grad_fn, sgd(LR, MOMENTUM))


# --- R-Drop ----------------------------------------------------------------------------------------------------------


def dropped(dropout: type[nn.Module]) -> nn.Module:
    # The dropout sits where ClassicDropout learns its masks from: at the path "3".
    layers = nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Identity(), dropout(RATE), nn.Linear(HIDDEN, CLASSES)
    return nn.Sequential(*layers)


def with_dropout(dtype: torch.dtype, steps: int = 40) -> Task:
    return tasks.classes(dtype, steps, ignored=0.3, network=partial(dropped, ClassicDropout))


def classic_r_drop(task: Task) -> Run:
    def backward(model: nn.Module, batch: Batch) -> None:
        rows, labels = batch
        first, second = model(rows), model(rows)
        kept = labels != tasks.IGNORED
        log1, log2 = F.log_softmax(first[kept], 1), F.log_softmax(second[kept], 1)
        there = F.kl_div(log1, log2, reduction="batchmean", log_target=True)
        back = F.kl_div(log2, log1, reduction="batchmean", log_target=True)
        likelihood = F.cross_entropy(first, labels) + F.cross_entropy(second, labels)
        (likelihood + ALPHA * (there + back) / 2).backward()

    return classic_loop(task, lambda model: SGD(model.parameters(), LR, MOMENTUM), backward)


def functional_r_drop(task: Task) -> Run:
    model = pure(dropped(nn.Dropout).to(next(task.prototype.parameters()).dtype))

    def predict(params: Params, batch: Batch, key: Tensor) -> tuple[Tensor, Tensor]:
        following, own = random.split(key).unbind()
        return model.apply(params, model.buffers, batch[0], key=own)[0], following

    grad_fn = r_drop(predict, lambda logits, batch: losses.cross_entropy(logits, batch[1]), ALPHA)
    return functional_loop(task, grad_fn, sgd(LR, MOMENTUM), carry=random.key(SEED))


TECHNIQUES = [
    Technique("vat", partial(classic_vat, steps=1), partial(functional_vat, steps=1), tasks.classes),
    Technique("vat, two iterations", partial(classic_vat, steps=2), partial(functional_vat, steps=2), tasks.classes),
    Technique("r-drop", classic_r_drop, functional_r_drop, with_dropout),
]
