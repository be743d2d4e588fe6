"""Deep-learning training techniques for PyTorch, as pure functions over parameter pytrees."""

from functricks import adversarial, clipping, gradients, optimizers, training, transforms, tree, types
from functricks.adversarial import attack, fgm, pgd
from functricks.clipping import clip_by_global_norm
from functricks.gradients import accumulate, gradient
from functricks.optimizers import adam, adamw, sgd
from functricks.training import train_step
from functricks.transforms import (
    add_decayed_weights,
    apply_updates,
    chain,
    partition,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_schedule,
    skip_nonfinite,
    trace,
)
from functricks.types import Gradient, Loss, StepInfo, TrainState, TrainStep, Transform

__version__ = "0.1.0"

__all__ = [
    "Gradient",
    "Loss",
    "StepInfo",
    "TrainState",
    "TrainStep",
    "Transform",
    "accumulate",
    "adam",
    "adamw",
    "add_decayed_weights",
    "adversarial",
    "apply_updates",
    "attack",
    "chain",
    "clip_by_global_norm",
    "clipping",
    "fgm",
    "gradient",
    "gradients",
    "optimizers",
    "partition",
    "pgd",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "sgd",
    "skip_nonfinite",
    "trace",
    "train_step",
    "training",
    "transforms",
    "tree",
    "types",
]
