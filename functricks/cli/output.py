"""Files that appear whole, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from functricks.cli.errors import CommandError

__all__ = ["staged"]


@contextmanager
def staged(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Give a hidden folder to write into; when the body succeeds, move its files to ``folder``, else remove all traces.

    Raises :class:`CommandError` at once where ``folder`` cannot be written to, or where one of ``names``, the files to
    come, is there and no file.
    """
    made = _missing_parents(folder)
    try:
        for name in names:
            if (folder / name).exists() and not (folder / name).is_file():
                raise CommandError(f"--out {folder}: {name} is there and is no regular file; move it away")
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
    """Move the files of ``stage`` to ``folder``: all of them, or none, and what was there before is there again."""
    names = sorted(file.name for file in stage.iterdir())
    name = ""
    try:
        aside = Path(tempfile.mkdtemp(prefix=".functricks-", dir=folder))
    except OSError as error:
        raise CommandError(f"--out {folder}: cannot write there ({error.strerror})") from error
    try:
        for name in names:
            with suppress(FileNotFoundError):
                (folder / name).rename(aside / name)
            (stage / name).rename(folder / name)
    except BaseException as error:
        for moved in [name for name in names if not (stage / name).exists()]:
            (folder / moved).unlink(missing_ok=True)
        for old in sorted(aside.iterdir()):
            old.replace(folder / old.name)
        _remove_empty([aside])
        if isinstance(error, OSError):
            raise CommandError(
                f"--out {folder}: {name} cannot be written ({error.strerror}); nothing was changed"
            ) from error
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _missing_parents(folder: Path) -> list[Path]:
    """Return the folders that will have to be made, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # not ours alone, or never made
            folder.rmdir()
