"""Read a table of numbers and a class column from a file, and say clearly what is wrong with it."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from functricks.cli.errors import CommandError

__all__ = ["Dataset", "load"]

TARGET_NAMES = ("target", "label", "class", "y")
MIN_ROWS = 10
_MANY_CLASSES = 20  # from here on, few rows a class look like a regression
_ROWS_A_CLASS = 5


class Dataset(NamedTuple):
    """Features as float64 [N, D] with the names of their columns, class indices [N], and the names of the classes."""

    name: str
    features: NDArray[np.float64]
    columns: list[str]
    target: str
    labels: NDArray[np.int64]
    classes: list[str]


def load(path: Path | None, target: str | None = None, drop: Sequence[str] = ()) -> Dataset:
    """Load a file, or scikit-learn's digits where there is none; raise :class:`CommandError` where it does not fit."""
    if path is None:
        return _digits(target, drop)
    if not path.exists():
        raise CommandError(f"{path}: no such file; give a .csv, .parquet or .npz file, or none for the digits")
    if path.is_dir():
        raise CommandError(f"{path} is a folder; give a .csv, .parquet or .npz file in it")
    suffix = path.suffix.lower()
    if suffix == ".npz":
        columns, chosen = _from_npz(path, target)
    elif suffix in (".csv", ".parquet"):
        columns, chosen = _from_table(path, suffix, target, drop)
    else:
        raise CommandError(f"{path}: unknown kind of file {suffix or 'without extension'}; known: .csv, .parquet, .npz")
    columns = _without(path, columns, chosen, drop)
    return _dataset(str(path), columns, chosen)


Columns = dict[str, NDArray[Any]]


def _digits(target: str | None, drop: Sequence[str]) -> Dataset:
    from sklearn.datasets import load_digits

    if target is not None or drop:
        raise CommandError("--target and --drop choose columns of a file; give one as DATA, or leave them out")
    found = load_digits()
    columns = dict(zip(found.feature_names, found.data.T, strict=True))
    return _dataset("digits", {**columns, "digit": found.target}, "digit")


# --- files -----------------------------------------------------------------------------------------------------------


def _from_table(path: Path, suffix: str, target: str | None, drop: Sequence[str]) -> tuple[Columns, str]:
    import polars

    try:
        table = polars.read_csv(path, infer_schema_length=None) if suffix == ".csv" else polars.read_parquet(path)
    except Exception as error:  # polars raises its own kinds, OSError, and on odd bytes whatever its parts raise
        raise CommandError(f"{path}: cannot be read as {suffix[1:].upper()}: {_first_line(error)}") from error
    if suffix == ".csv":
        _check_header(path, table.columns)
    if table.columns and not table.height:
        raise CommandError(f"{path}: has column names but no rows; at least {MIN_ROWS} are needed")
    chosen = _choose_target(path, table.columns, target)
    columns = {}
    for name in table.columns:
        column = table[name]
        text = not (column.dtype.is_numeric() or column.dtype == polars.Boolean)
        if text and name != chosen and name not in drop:
            raise _not_numeric(path, name, column.drop_nulls().head(1).to_list())
        if name == chosen and column.null_count():
            raise _gaps(path, name, column.null_count(), "an empty cell", "the target")
        columns[name] = _values(column, text)
    return columns, chosen


def _values(column: Any, text: bool) -> NDArray[Any]:
    """Return a polars column as an array: text as strings, numbers with NaN for empty cells."""
    import polars

    if text:
        return np.asarray([str(value) for value in column.to_list()], dtype=str)
    if column.null_count() or column.dtype.is_decimal():
        column = column.cast(polars.Float64)
    array: NDArray[Any] = column.to_numpy()
    return array


def _check_header(path: Path, names: Sequence[str]) -> None:
    """Refuse a CSV file whose first row holds data; 0, 1, 2, ... are column names that pandas writes."""
    if names and all(_is_float(name) for name in names) and list(names) != [str(i) for i in range(len(names))]:
        raise CommandError(f"{path}: the first row holds numbers ({', '.join(names[:3])}); add a row of column names")


def _is_float(text: str) -> bool:
    try:
        float(text.partition("_duplicated")[0])
    except ValueError:
        return False
    return True


def _from_npz(path: Path, target: str | None) -> tuple[Columns, str]:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # a broken zip, a pickle, a wrong header: numpy raises half a dozen kinds
        other = not isinstance(error, OSError) and not zipfile.is_zipfile(path)
        reason = "it is no archive of arrays as numpy.savez writes it" if other else _first_line(error)
        raise CommandError(f"{path}: is not a readable NPZ file: {reason}") from error
    x_name = _named(arrays, ("x", "data", "features"))
    y_name = target if target is not None else _named(arrays, ("y", *TARGET_NAMES))
    if x_name is None or y_name is None or y_name not in arrays:
        have = ", ".join(arrays) or "none"
        raise CommandError(f"{path}: needs arrays x (rows first) and {target or 'y'} (a class a row); it has: {have}")
    x, y = arrays[x_name], arrays[y_name]
    if x.ndim < 1 or y.ndim != 1 or len(x) != len(y):
        raise CommandError(
            f"{path}: {x_name} must be rows first and {y_name} one class a row; "
            f"their shapes are {x.shape} and {y.shape}"
        )
    x = x.reshape(len(x), -1) if len(x) else x.reshape(0, math.prod(x.shape[1:]))
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_) or np.iscomplexobj(x):
        raise CommandError(f"{path}: {x_name} holds {x.dtype}; encode it as real numbers")
    return {**{f"{x_name}[:, {i}]": x[:, i] for i in range(x.shape[1])}, y_name: y}, y_name


def _named(arrays: Columns, wanted: Sequence[str]) -> str | None:
    return next((name for want in wanted for name in arrays if name.lower() == want), None)


# --- checks ----------------------------------------------------------------------------------------------------------


def _choose_target(path: Path, names: Sequence[str], target: str | None) -> str:
    if len(names) < 2:
        raise CommandError(f"{path}: has {len(names)} column; it needs a target column and at least one feature")
    if target is None:
        usual = [name for want in TARGET_NAMES for name in names if name.lower() == want]
        return usual[0] if usual else names[-1]
    if target not in names:
        raise _missing(path, "--target", target, names)
    return target


def _missing(path: Path, option: str, name: str, names: Sequence[str]) -> CommandError:
    near = get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return CommandError(f"{path}: {option}: no column {name!r}; {hint}columns: {shown}")


def _without(path: Path, columns: Columns, target: str, drop: Sequence[str]) -> Columns:
    for name in drop:
        if name not in columns:
            raise _missing(path, "--drop", name, list(columns))
        if name == target:
            raise CommandError(f"{path}: --drop {name}: that is the target; choose another one with --target")
    return {name: column for name, column in columns.items() if name not in drop}


def _not_numeric(path: Path, name: str, example: list[Any]) -> CommandError:
    shown = f" ({str(example[0])[:30]!r})" if example else ""
    return CommandError(
        f"{path}: feature column {name!r} is not numeric{shown}; "
        f"encode it as numbers or leave it out with --drop {name!r}"
    )


def _gaps(path: str | Path, name: str, rows: int, what: str, role: str) -> CommandError:
    plural = "row has" if rows == 1 else "rows have"
    return CommandError(
        f"{path}: column {name!r} ({role}): {rows} {plural} {what}; fill or remove them"
        + ("" if role == "the target" else f", or leave the column out with --drop {name!r}")
    )


def _dataset(name: str, columns: Columns, target: str) -> Dataset:
    labels, classes = _classes(name, target, columns[target])
    features = {column: values for column, values in columns.items() if column != target}
    if not features:
        raise CommandError(f"{name}: no feature column is left; it needs at least one beside the target {target!r}")
    if len(labels) < MIN_ROWS:
        raise CommandError(
            f"{name}: has {len(labels)} rows; at least {MIN_ROWS} are needed to train, validate and test"
        )
    _check_classes(name, target, columns[target], classes, len(labels))
    for column, values in features.items():
        bad = int((~np.isfinite(values.astype(np.float64))).sum())
        if bad:
            raise _gaps(name, column, bad, "NaN, infinity or an empty cell", "a feature")
    stacked = np.stack([values.astype(np.float64) for values in features.values()], axis=1)
    return Dataset(name, stacked, list(features), target, labels, classes)


def _classes(name: str, target: str, values: NDArray[Any]) -> tuple[NDArray[np.int64], list[str]]:
    """Number the classes in the order of their values."""
    if np.issubdtype(values.dtype, np.floating):
        bad = int((~np.isfinite(values)).sum())
        if bad:
            raise _gaps(name, target, bad, "NaN or infinity", "the target")
        if (values == np.floor(values)).all() and (np.abs(values) < 2**53).all():
            values = values.astype(np.int64)
    elif values.dtype.kind not in "biuUS":
        raise CommandError(f"{name}: target column {target!r} holds {values.dtype}; give text, integers or bools")
    distinct, labels = np.unique(values, return_inverse=True)
    return labels.astype(np.int64), [str(value) for value in distinct.tolist()]


def _check_classes(name: str, target: str, values: NDArray[Any], classes: list[str], rows: int) -> None:
    count = len(classes)
    if count == 1:
        raise CommandError(
            f"{name}: target column {target!r} has one class only ({classes[0]!r}); "
            "give data with at least two classes, or choose another column with --target"
        )
    continuous = np.issubdtype(values.dtype, np.floating) and not (values == np.floor(values)).all()
    if rows < 2 * count or (count > _MANY_CLASSES and (continuous or rows < _ROWS_A_CLASS * count)):
        raise CommandError(
            f"{name}: target column {target!r} has {count} distinct values in {rows} rows, "
            "which looks like a regression or an identifier; choose a class column with --target, or bin it"
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:;") if lines else type(error).__name__
