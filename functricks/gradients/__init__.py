"""From a loss function to its gradient, and from one gradient function to another.

A ``LossFn`` is ``(params, batch) -> Loss``. :func:`gradient` makes a ``GradFn`` of it, ``(params, batch, carry) ->
Gradient``, and everything else that needs the loss again (on parts of the batch, at other parameters) is a wrapper
``GradFn -> GradFn``. So ``accumulate(fgm(gradient(loss)), 4)`` is a gradient function like any other.

Three rules hold for all of them. The carry (buffers, random key) goes through every evaluation in the order in which a
classic loop would have mutated it. A ``Gradient`` carries its weight, so parts add up to the whole. And a loss scale
enters and leaves inside :func:`gradient`: nobody else ever sees a scaled gradient.
"""

from functricks.gradients._accumulation import accumulate
from functricks.gradients._batch_norm import bn_momentum_for
from functricks.gradients._gradient import gradient
from functricks.gradients._multi_task import multi_task
from functricks.gradients._per_example import clip_per_example, per_example_gradient

__all__ = ["accumulate", "bn_momentum_for", "clip_per_example", "gradient", "multi_task", "per_example_gradient"]
