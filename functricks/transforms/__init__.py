"""Gradient transforms: gradients in, updates out, memory as a value.

A :class:`~functricks.Transform` is a pair of pure functions. They compose with :func:`chain`, and an optimizer is
nothing but a chain whose last link is :func:`scale_by_learning_rate`; its updates are *added* to the parameters by
:func:`apply_updates`.

What holds for all of them:

- **Hyper-parameters** may be tensors, so a batch of transforms is one transform under ``vmap``, and derivatives with
  respect to them exist. Which links a chain has follows from Python numbers alone: ``momentum=0.0`` leaves the link
  out, a tensor always puts it in. A learning rate may be a schedule; :func:`inject_hyperparams` makes any other
  hyper-parameter one.
- **State** is a tree of tensors, named like the parameters. A state that is not of these parameters, after a rename or
  from another model, raises ``ValueError`` with the paths and shapes that differ; order does not matter.
- **Half precision**: statistics, and what is computed from them, are float32.
"""

from functricks.transforms.composing import apply_updates, chain, named_chain, skip_nonfinite
from functricks.transforms.groups import freeze, masked, partition
from functricks.transforms.layers import layer_decay
from functricks.transforms.moments import scale_by_adam, scale_by_rms, trace
from functricks.transforms.scaling import (
    add_decayed_weights,
    add_noise,
    centralize,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    scale_by_trust_ratio,
)
from functricks.transforms.wrappers import inject_hyperparams, lookahead, master_weights, multi_steps

__all__ = [
    "add_decayed_weights",
    "add_noise",
    "apply_updates",
    "centralize",
    "chain",
    "freeze",
    "inject_hyperparams",
    "layer_decay",
    "lookahead",
    "masked",
    "master_weights",
    "multi_steps",
    "named_chain",
    "partition",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_rms",
    "scale_by_schedule",
    "scale_by_trust_ratio",
    "skip_nonfinite",
    "trace",
]
