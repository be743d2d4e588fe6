"""Classic training loops: the same techniques with PyTorch's own habits, and the same numbers.

The only place that writes in place. Each piece is thin: it calls the pure function, and keeps PyTorch's order of
operations, names and state.
"""

from functricks.adapter._checkpoints import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
