"""Deep-learning training techniques for PyTorch, as pure functions over parameter pytrees.

Losses, schedules, random numbers, trees, experiments and the adapter stay in their namespaces
(``functricks.losses``, ...); everything else is here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functricks import adapter, distributed, experiments, losses, random, schedules, sequences, tree
    from functricks.adversarial import (
        attack,
        awp,
        fgm,
        free_lb,
        pgd,
        r_drop,
        sam,
        vat,
    )
    from functricks.averaging import (
        averaged,
        ema,
        swa,
        update_bn,
    )
    from functricks.clipping import (
        adaptive_clip,
        clip_by_global_norm,
        clip_by_leaf_norm,
        clip_by_value,
    )
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
        clip_gradient,
        functional,
        no_decay,
        replace_gradient,
        reverse_gradient,
        scale_gradient,
        stack,
        stack_init,
        supervised,
        supervised_carry,
        tie,
        unstack,
        untie,
    )
    from functricks.optimizers import (
        adadelta,
        adafactor,
        adagrad,
        adam,
        adamax,
        adamw,
        asgd,
        lamb,
        lion,
        muon,
        nadam,
        radam,
        rmsprop,
        rprop,
        schedule_free_adamw,
        sgd,
    )
    from functricks.precision import (
        LossScale,
        LossScaleState,
        autocast,
        cast,
        dynamic_loss_scale,
        static_loss_scale,
    )
    from functricks.training import (
        train_step,
    )
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
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "adapter",
    "adaptive_clip",
    "add_decayed_weights",
    "add_noise",
    "apply_updates",
    "asgd",
    "attack",
    "autocast",
    "averaged",
    "awp",
    "bn_momentum_for",
    "cast",
    "centralize",
    "chain",
    "clip_by_global_norm",
    "clip_by_leaf_norm",
    "clip_by_value",
    "clip_gradient",
    "clip_per_example",
    "distributed",
    "dynamic_loss_scale",
    "ema",
    "experiments",
    "fgm",
    "free_lb",
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
    "multi_task",
    "muon",
    "nadam",
    "named_chain",
    "no_decay",
    "partition",
    "per_example_gradient",
    "pgd",
    "r_drop",
    "radam",
    "random",
    "replace_gradient",
    "reverse_gradient",
    "rmsprop",
    "rprop",
    "sam",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_rms",
    "scale_by_schedule",
    "scale_by_trust_ratio",
    "scale_gradient",
    "schedule_free_adamw",
    "schedules",
    "sequences",
    "sgd",
    "skip_nonfinite",
    "stack",
    "stack_init",
    "static_loss_scale",
    "supervised",
    "supervised_carry",
    "swa",
    "tie",
    "trace",
    "train_step",
    "tree",
    "unstack",
    "untie",
    "update_bn",
    "vat",
]

_NAMESPACES = ("adapter", "distributed", "experiments", "losses", "random", "schedules", "sequences", "tree")
_FLAT = (
    "types",
    "transforms",
    "clipping",
    "optimizers",
    "gradients",
    "adversarial",
    "precision",
    "averaging",
    "modules",
    "training",
)


def __getattr__(name: str) -> Any:
    """Load a name when it is first asked for, so that ``import functricks`` costs next to nothing."""
    if name in _NAMESPACES:
        return import_module(f"functricks.{name}")
    if name in __all__:
        for module in map(import_module, [f"functricks.{part}" for part in _FLAT]):
            if name in module.__all__:
                value = globals()[name] = getattr(module, name)
                return value
    raise AttributeError(f"module 'functricks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
