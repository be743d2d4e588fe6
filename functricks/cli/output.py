"""Files that appear whole, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from functricks.cli.errors import CommandError

__all__ = ["staged"]


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Give a hidden folder to write into; when the body succeeds, move its files to ``folder``, else remove all traces.

    Raises :class:`CommandError` at once where ``folder`` cannot be written to.
    """
    made = _missing_parents(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".functricks-", dir=folder))
    except OSError as error:
        _remove_empty(made)
        reason = error.strerror or type(error).__name__
        raise CommandError(f"--out {folder}: cannot write there ({reason}); choose another folder") from error
    done = False
    try:
        yield stage
        _move(stage, folder)
        done = True
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if not done:
            _remove_empty(made)


def _move(stage: Path, folder: Path) -> None:
    try:
        for file in sorted(stage.iterdir()):
            file.replace(folder / file.name)
    except OSError as error:
        raise CommandError(
            f"--out {folder}: {file.name} cannot be replaced ({error.strerror}); move it away"
        ) from error


def _missing_parents(folder: Path) -> list[Path]:
    """Return the folders that will have to be made, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # not ours alone, or never made
            folder.rmdir()
