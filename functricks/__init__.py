"""Deep-learning training techniques for PyTorch, as pure functions over parameter pytrees.

Losses, schedules, random numbers, trees and experiments stay in their namespaces (``functricks.losses``, ...);
everything else is here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from functricks import tree
from functricks.adversarial import attack, awp, fgm, free_lb, pgd, r_drop, sam, vat
from functricks.clipping import clip_by_global_norm
from functricks.gradients import (
    accumulate,
    bn_momentum_for,
    clip_per_example,
    gradient,
    multi_task,
    per_example_gradient,
)
from functricks.modules import (
    Functional,
    SupervisedCarry,
    functional,
    no_decay,
    supervised,
    supervised_carry,
)
from functricks.optimizers import adam, adamw, sgd
from functricks.precision import (
    LossScale,
    LossScaleState,
    autocast,
    cast,
    dynamic_loss_scale,
    static_loss_scale,
)
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
from functricks.types import (
    Batch,
    Carry,
    Empty,
    GradFn,
    Gradient,
    Grads,
    Loss,
    LossFn,
    Number,
    Params,
    Schedule,
    State,
    StepInfo,
    TrainState,
    TrainStep,
    Transform,
    Updates,
)

if TYPE_CHECKING:
    from functricks import experiments, losses, random, schedules

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Carry",
    "Empty",
    "Functional",
    "GradFn",
    "Gradient",
    "Grads",
    "Loss",
    "LossFn",
    "LossScale",
    "LossScaleState",
    "Number",
    "Params",
    "Schedule",
    "State",
    "StepInfo",
    "SupervisedCarry",
    "TrainState",
    "TrainStep",
    "Transform",
    "Updates",
    "accumulate",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "attack",
    "autocast",
    "awp",
    "bn_momentum_for",
    "cast",
    "chain",
    "clip_by_global_norm",
    "clip_per_example",
    "dynamic_loss_scale",
    "experiments",
    "fgm",
    "free_lb",
    "functional",
    "gradient",
    "losses",
    "multi_task",
    "no_decay",
    "partition",
    "per_example_gradient",
    "pgd",
    "r_drop",
    "random",
    "sam",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "schedules",
    "sgd",
    "skip_nonfinite",
    "static_loss_scale",
    "supervised",
    "supervised_carry",
    "trace",
    "train_step",
    "tree",
    "vat",
]

_NAMESPACES = ("experiments", "losses", "random", "schedules")  # loaded when first asked for: imports stay quick


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return import_module(f"functricks.{name}")
    raise AttributeError(f"module 'functricks' has no attribute {name!r}")
