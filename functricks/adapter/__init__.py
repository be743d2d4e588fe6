"""Classic loops: the same techniques with PyTorch's own habits."""

from functricks.adapter._hooks import hooks

__all__ = ["hooks"]
