"""``nn.Module`` as a pure function: parameters and buffers in, output and new buffers out, dropout from a key.

``functional`` makes private copies of the module and never touches the user's again. Whatever belongs to one call
reaches the copy through :func:`torch.func.functional_call`, as parameters and buffers: the parameters, fresh copies of
the buffers (which BatchNorm and others may then write to), and for each dropout a key, folded from the caller's key,
the module's path and the number of the call. Nothing stays behind, so ``apply`` works under ``grad``, ``vmap`` and
``torch.compile``, and in a scan.

Ties are kept by name: a parameter that several modules share is one entry of ``params``, under its first name, and is
put into every place where it occurs. ``tie`` does the same for parameters that the module does not share, and ``stack``
keeps it for several models at once, one lane each.

What hooks do becomes values too: ``functional`` can return activations, put functions in their place, and add probes,
whose gradients are those of the activations. The gradient identities (``scale_gradient`` and its siblings) are what
backward hooks return.
"""

from functricks.modules._functional import Functional, functional
from functricks.modules._groups import no_decay
from functricks.modules._identities import clip_gradient, replace_gradient, reverse_gradient, scale_gradient
from functricks.modules._stacking import stack, stack_init, unstack
from functricks.modules._supervised import SupervisedCarry, supervised, supervised_carry
from functricks.modules._ties import tie, untie

__all__ = [
    "Functional",
    "SupervisedCarry",
    "clip_gradient",
    "functional",
    "no_decay",
    "replace_gradient",
    "reverse_gradient",
    "scale_gradient",
    "stack",
    "stack_init",
    "supervised",
    "supervised_carry",
    "tie",
    "unstack",
    "untie",
]
