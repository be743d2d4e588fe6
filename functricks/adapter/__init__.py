"""Classic loops: the same techniques with PyTorch's own habits, for an ``nn.Module`` that is trained in place.

Everything here is thin: it keeps PyTorch's numbers and manners, and calls the pure function for the rest. It is the one
place in functricks that writes over its inputs.
"""

from functricks.adapter._optimizer import Optimizer
from functricks.adapter._scheduler import Scheduler

__all__ = ["Optimizer", "Scheduler"]
