"""The ``functricks`` command.

``functricks ablate`` compares training techniques on a data set, ``functricks schedules`` draws learning rate
schedules. Everything here is the command's own: the library underneath needs none of its dependencies, which are those
of the extra ``cli``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

_OF_THE_EXTRA = {"matplotlib", "polars", "rich", "sklearn", "typer"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 2 for bad input (one line on stderr), 130 when interrupted."""
    try:
        from functricks.cli.app import run_app

        return run_app(arguments)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _OF_THE_EXTRA:
            raise
        sys.stderr.write(f"error: the command needs {missing}; install it with: pip install 'functricks-torch[cli]'\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: nothing was written\n")
        return 130
