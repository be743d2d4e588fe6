"""Adversarial training: the gradient at the parameters, plus the gradient at parameters moved against us.

``fgm``, ``pgd``, ``free_lb``, ``sam`` and ``awp`` wrap a gradient function and return one. Parameters are values, so
there is nothing to back up and nothing to restore. :func:`attack` is the same on an input instead of a parameter, to
train on or to measure robustness with; ``vat`` and ``r_drop`` ask for outputs that stay the same under a perturbation.

The classic recipe perturbs the whole embedding *matrix* (``where=``, ``norm="leaf"``), so that its strength per example
falls with the batch size. The papers normalise each example's looked-up embeddings: ``probe=``, ``norm="example"``.
"""

from functricks.adversarial._consistency import r_drop, vat
from functricks.adversarial._inputs import attack
from functricks.adversarial._parameters import awp, fgm, free_lb, pgd, sam

__all__ = ["attack", "awp", "fgm", "free_lb", "pgd", "r_drop", "sam", "vat"]
