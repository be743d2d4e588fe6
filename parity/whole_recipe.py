"""Everything at once: FGM on every micro-batch, accumulated; label smoothing; clipping; AdamW without decay of biases;
warm-up and cosine. Once as one loop, once as one composed function, once as a lane of a batched experiment.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer, lr_scheduler

from functricks import (
    TrainState,
    TrainStep,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    fgm,
    gradient,
    losses,
    random,
    train_step,
)
from functricks.experiments import Experiment, run, zipped
from functricks.schedules import cosine_schedule_with_warmup
from functricks.types import GradFn, Loss, Number, Transform
from parity import tasks
from parity.adversarial import accumulated, fgm_attack
from parity.harness import Run, Technique, classic_loop, functional_loop
from parity.tasks import Batch, Net, Task

LR, EPSILON, SMOOTHING, DECAY, MAX_NORM, WARMUP, STEPS, SIZE = 1e-2, 0.3, 0.1, 0.1, 0.3, 6, 40, 4


def classic(task: Task) -> Run:
    def loss(model: nn.Module, rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(rows), labels, label_smoothing=SMOOTHING)

    def ready(model: nn.Module) -> bool:
        clip_grad_norm_(model.parameters(), MAX_NORM)
        return True

    def make_optimizer(model: nn.Module) -> Optimizer:
        decaying = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        return AdamW([{"params": decaying}, {"params": others, "weight_decay": 0.0}], LR, weight_decay=DECAY)

    def factor(step: int) -> float:
        if step < WARMUP:
            return step / WARMUP
        return max(0.0, 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))))

    return classic_loop(
        task,
        make_optimizer,
        accumulated(fgm_attack(EPSILON, "embedding"), SIZE, loss),
        ready=ready,
        make_scheduler=lambda optimizer: lr_scheduler.LambdaLR(optimizer, factor),
    )


def grad_fn(task: Task, epsilon: Number, smoothing: Number) -> GradFn:
    def score(net: Net, batch: Batch) -> Loss:
        return losses.cross_entropy(net(batch[0]), batch[1], label_smoothing=smoothing)

    return accumulate(fgm(gradient(task.loss_fn(score)), epsilon, where="embedding.*"), micro_batch_size=SIZE)


def optimizer(lr: Number, max_norm: Number, decay: Number) -> Transform:
    schedule = cosine_schedule_with_warmup(lr, WARMUP, STEPS)
    no_decay = adamw(schedule, weight_decay=decay, decay_where=lambda path, leaf: leaf.ndim >= 2)
    return chain(clip_by_global_norm(max_norm, classic=True), no_decay)


def functional(task: Task) -> Run:
    return functional_loop(task, grad_fn(task, EPSILON, SMOOTHING), optimizer(LR, MAX_NORM, DECAY))


def lane(task: Task) -> Run:
    """Train the recipe beside others of other strengths, as one program, and take out its lane."""

    def step(config: dict[str, Tensor]) -> TrainStep:
        moves = optimizer(config["lr"], config["max_norm"], config["decay"])
        return train_step(grad_fn(task, config["epsilon"], config["smoothing"]), moves)

    def init(config: dict[str, Tensor], key: Tensor) -> TrainState:
        return step(config).init(task.start())

    experiment = Experiment(init, lambda config, state, batch: step(config).update(state, batch), lambda *_: {})
    strengths = {
        "lr": (0.03, LR, 0.001),
        "max_norm": (MAX_NORM, MAX_NORM, 1.0),
        "decay": (0.0, DECAY, 0.3),
        "epsilon": (1.0, EPSILON, 0.0),
        "smoothing": (0.0, SMOOTHING, 0.2),
    }
    wide = {name: [torch.tensor(value, dtype=torch.float64) for value in values] for name, values in strengths.items()}
    results = run(experiment, zipped(**wide), task.batches, key=random.key(0))
    trained = Run(task.start(), dict(results.state(1).params), steps=len(task.batches))
    trained.saw(grad_fn(task, EPSILON, SMOOTHING)(task.start(), task.batches[0]).grads.items())
    return trained


task = partial(tasks.tokens, steps=STEPS)
TECHNIQUES = [
    Technique("whole recipe", classic, functional, task),
    Technique("whole recipe, a lane of a batched experiment", classic, lane, task),
]
