"""Classic loops: the same techniques with PyTorch's own habits, for an ``nn.Module`` that is trained in place.

Everything here is thin: it keeps PyTorch's numbers, names and order of operations, and calls the pure function for the
rest. It is the one place in functricks that writes over its inputs.
"""

from functricks.adapter._attacks import FGM, PGD
from functricks.adapter._checkpoints import load_checkpoint, save_checkpoint
from functricks.adapter._hooks import hooks
from functricks.adapter._loop import Loop
from functricks.adapter._losses import FocalLoss, InfoNCE, LabelSmoothingCrossEntropy, LossModule
from functricks.adapter._optimizer import Optimizer
from functricks.adapter._sampling import ScheduledSampler
from functricks.adapter._scheduler import Scheduler

__all__ = [
    "FGM",
    "PGD",
    "FocalLoss",
    "InfoNCE",
    "LabelSmoothingCrossEntropy",
    "Loop",
    "LossModule",
    "Optimizer",
    "ScheduledSampler",
    "Scheduler",
    "hooks",
    "load_checkpoint",
    "save_checkpoint",
]
