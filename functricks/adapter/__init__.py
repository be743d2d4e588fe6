"""The techniques in a classic loop: ``nn.Module``, ``.grad``, ``torch.optim``, with PyTorch's habits and numbers.

Every piece calls the pure function and keeps its state where PyTorch's users look for it. This is the only part of the
library that writes in place.
"""

from functricks.adapter._attacks import FGM, PGD
from functricks.adapter._loop import Loop
from functricks.adapter._losses import FocalLoss, InfoNCE, LabelSmoothingCrossEntropy, LossModule
from functricks.adapter._sampling import ScheduledSampler

__all__ = [
    "FGM",
    "PGD",
    "FocalLoss",
    "InfoNCE",
    "LabelSmoothingCrossEntropy",
    "Loop",
    "LossModule",
    "ScheduledSampler",
]
