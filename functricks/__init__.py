"""Deep-learning training techniques for PyTorch, as pure functions over parameter pytrees.

Losses, schedules, random numbers, trees and experiments stay in their namespaces (``functricks.losses``, ...);
everything else is here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from functricks import tree
from functricks.adversarial import attack, fgm, pgd
from functricks.clipping import adaptive_clip, clip_by_global_norm, clip_by_leaf_norm, clip_by_value
from functricks.gradients import accumulate, gradient
from functricks.modules import (
    Functional,
    SupervisedCarry,
    functional,
    no_decay,
    supervised,
    supervised_carry,
)
from functricks.optimizers import (
    adam,
    adamax,
    adamw,
    nadam,
    radam,
    sgd,
)
from functricks.training import train_step
from functricks.transforms import (
    add_decayed_weights,
    add_noise,
    apply_updates,
    centralize,
    chain,
    freeze,
    inject_hyperparams,
    layer_decay,
    lookahead,
    masked,
    master_weights,
    multi_steps,
    named_chain,
    partition,
    scale,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_rms,
    scale_by_schedule,
    scale_by_trust_ratio,
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
    from functricks.averaging import averaged, ema, swa, update_bn
    from functricks.optimizers import (
        adadelta,
        adafactor,
        adagrad,
        asgd,
        lamb,
        lion,
        muon,
        rmsprop,
        rprop,
        schedule_free_adamw,
    )

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
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "adaptive_clip",
    "add_decayed_weights",
    "add_noise",
    "apply_updates",
    "asgd",
    "attack",
    "averaged",
    "centralize",
    "chain",
    "clip_by_global_norm",
    "clip_by_leaf_norm",
    "clip_by_value",
    "ema",
    "experiments",
    "fgm",
    "freeze",
    "functional",
    "gradient",
    "inject_hyperparams",
    "lamb",
    "layer_decay",
    "lion",
    "lookahead",
    "losses",
    "masked",
    "master_weights",
    "multi_steps",
    "muon",
    "nadam",
    "named_chain",
    "no_decay",
    "partition",
    "pgd",
    "radam",
    "random",
    "rmsprop",
    "rprop",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_rms",
    "scale_by_schedule",
    "scale_by_trust_ratio",
    "schedule_free_adamw",
    "schedules",
    "sgd",
    "skip_nonfinite",
    "supervised",
    "supervised_carry",
    "swa",
    "trace",
    "train_step",
    "tree",
    "update_bn",
]

_NAMESPACES = ("experiments", "losses", "random", "schedules")  # loaded when first asked for: imports stay quick

_LATER = {
    **dict.fromkeys(("averaged", "ema", "swa", "update_bn"), "averaging"),
    **dict.fromkeys(
        (
            "adadelta",
            "adafactor",
            "adagrad",
            "asgd",
            "lamb",
            "lion",
            "muon",
            "rmsprop",
            "rprop",
            "schedule_free_adamw",
        ),
        "optimizers",
    ),
}


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return import_module(f"functricks.{name}")
    if name in _LATER:
        return getattr(import_module(f"functricks.{_LATER[name]}"), name)
    raise AttributeError(f"module 'functricks' has no attribute {name!r}")
