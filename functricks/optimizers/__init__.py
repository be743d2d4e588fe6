"""Optimizers: each a chain of transforms, with PyTorch's argument names and defaults where PyTorch has it.

The learning rate is the first argument, ``lr``: a number, a 0-d tensor or a schedule. ``decay_where`` selects the
leaves that decay, ``learning_rates={"head.*": 10.0}`` multiplies the rate of some. What PyTorch's optimizers have
beside the arithmetic (``foreach``, ``fused``, ``capturable``, ``differentiable``) is no argument here: the fast way is
taken where it exists, and everything is differentiable.

After 1,000 steps in float64 the displacement is PyTorch's to 1e-10, relative. In float32 a leaf is within 64 ulps of
its largest entry after 100 steps and 256 after 1,000: decoupled decay and the step are one update here, added once,
where PyTorch writes twice. For half-precision parameters the state is float32 here, and half in PyTorch.

Not here: ``LBFGS``, which calls the loss again within a step, and ``SparseAdam``, since gradients are dense.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from functricks.optimizers.adaptive import adam, adamax, adamw, nadam, radam
from functricks.optimizers.momentum import sgd

if TYPE_CHECKING:
    from functricks.optimizers.averaging import asgd, schedule_free_adamw
    from functricks.optimizers.matrices import adafactor, lamb, muon
    from functricks.optimizers.signs import lion, rprop
    from functricks.optimizers.squares import adadelta, adagrad, rmsprop

__all__ = [
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "asgd",
    "lamb",
    "lion",
    "muon",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "schedule_free_adamw",
    "sgd",
]

_LATER = {  # loaded when first asked for: imports stay quick
    **dict.fromkeys(("asgd", "schedule_free_adamw"), "averaging"),
    **dict.fromkeys(("adafactor", "lamb", "muon"), "matrices"),
    **dict.fromkeys(("lion", "rprop"), "signs"),
    **dict.fromkeys(("adadelta", "adagrad", "rmsprop"), "squares"),
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"functricks.optimizers.{_LATER[name]}"), name)
    raise AttributeError(f"module 'functricks.optimizers' has no attribute {name!r}")
