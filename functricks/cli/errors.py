"""The one kind of error that the command shows to its user."""

from __future__ import annotations

__all__ = ["CommandError"]


class CommandError(Exception):
    """Bad input: one line that says what is wrong and what to do. The command ends with exit code 2."""
