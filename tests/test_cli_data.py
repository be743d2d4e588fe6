"""Reading and splitting data: odd tables that work, and what is said about those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
import torch

from functricks.cli.data import Dataset, load
from functricks.cli.errors import CommandError
from functricks.cli.splits import split

ROWS = 40


def table(**columns: Any) -> polars.DataFrame:
    base = {"a": np.linspace(-1, 1, ROWS), "b": np.arange(ROWS) % 7, "target": np.arange(ROWS) % 2}
    return polars.DataFrame({**base, **columns})


def saved(folder: Path, frame: polars.DataFrame, suffix: str = ".csv") -> Path:
    path = folder / f"data{suffix}"
    frame.write_csv(path) if suffix == ".csv" else frame.write_parquet(path)
    return path


def same(a: Dataset, b: Dataset) -> bool:
    arrays = np.array_equal(a.features, b.features) and np.array_equal(a.labels, b.labels)
    return bool(arrays and a.columns == b.columns and a.classes == b.classes and a.target == b.target)


# --- what works ------------------------------------------------------------------------------------------------------


def test_digits_are_the_default() -> None:
    digits = load(None)
    assert digits.features.shape == (1797, 64)
    assert digits.classes == [str(i) for i in range(10)]


def test_csv_and_parquet_are_the_same(tmp_path: Path) -> None:
    frame = table(c=np.arange(ROWS) / 3)
    assert same(
        load(saved(tmp_path, frame))._replace(name=""), load(saved(tmp_path, frame, ".parquet"))._replace(name="")
    )


def test_npz(tmp_path: Path) -> None:
    x, y = np.random.rand(ROWS, 2, 3), np.arange(ROWS) % 3 + 5
    np.savez(tmp_path / "data.npz", x=x, y=y)
    found = load(tmp_path / "data.npz")
    assert np.array_equal(found.features, x.reshape(ROWS, 6))
    assert found.classes == ["5", "6", "7"]
    assert found.columns[5] == "x[:, 5]"
    np.savez(tmp_path / "data.npz", data=x, other=y, target=y % 2)
    assert load(tmp_path / "data.npz").classes == ["0", "1"]
    assert load(tmp_path / "data.npz", "other").classes == ["5", "6", "7"]


@pytest.mark.parametrize(
    ("names", "chosen"), [(["x", "Label", "z"], "Label"), (["x", "y", "class"], "class"), (["p", "q"], "q")]
)
def test_target_by_name_else_the_last(tmp_path: Path, names: list[str], chosen: str) -> None:
    path = saved(tmp_path, polars.DataFrame({name: np.arange(ROWS) % 3 for name in names}))
    assert load(path).target == chosen
    assert load(path, names[0]).target == names[0]


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        (["cat", "dog"] * 20, ["cat", "dog"]),
        ([True, False] * 20, ["False", "True"]),
        ([3, -7] * 20, ["-7", "3"]),
        ([1.0, 2.0] * 20, ["1", "2"]),
        ([0.5, 1.5] * 20, ["0.5", "1.5"]),
        ([f"city {i % 10}" for i in range(40)], [f"city {i}" for i in range(10)]),
    ],
    ids=["text", "bool", "integers", "whole floats", "floats", "ten"],
)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_kinds_of_class(tmp_path: Path, values: list[Any], classes: list[str], suffix: str) -> None:
    found = load(saved(tmp_path, table(target=values), suffix))
    assert found.classes == classes
    assert [classes[label] for label in found.labels] == [
        str(int(v) if v in (1.0, 2.0) and v is not True else v) for v in values
    ]


def test_bool_columns_and_wide_integers_are_numbers(tmp_path: Path) -> None:
    found = load(saved(tmp_path, table(a=[True, False] * 20, b=[2**40, 1] * 20), ".parquet"))
    assert found.features[0].tolist() == [1.0, 2.0**40]


def test_drop_leaves_columns_out(tmp_path: Path) -> None:
    path = saved(tmp_path, table(name=["x"] * ROWS))
    assert load(path, drop=["name", "b"]).columns == ["a"]


def test_split_is_fixed_stratified_and_whole() -> None:
    digits = load(None)
    parts, again = split(digits), split(digits)
    assert torch.equal(parts.train[0], again.train[0])
    sizes = [len(part[1]) for part in parts[:3]]
    assert sum(sizes) == 1797
    shares = [torch.bincount(part[1], minlength=10) / len(part[1]) for part in parts[:3]]
    assert (torch.stack(shares) - shares[0]).abs().max() < 0.005
    assert parts.untested == []


def test_split_standardises_by_the_training_rows() -> None:
    train = split(load(None)).train[0].double()
    varies = train.std(0) > 0
    assert train.mean(0).abs().max() < 1e-5
    assert (train.std(0, correction=0)[varies] - 1).abs().max() < 1e-5
    assert 0 < int((~varies).sum()) < 10  # pixels that are always blank


def test_tiny_single_feature_constant_and_rare(tmp_path: Path) -> None:
    rare = ["a"] * 20 + ["b"] * 9 + ["only one"]
    path = saved(tmp_path, polars.DataFrame({"constant": [3.5] * 30, "x": np.arange(30.0), "target": rare}))
    parts = split(load(path))
    assert parts.untested == ["only one"]
    assert 2 in parts.train[1]
    assert [len(part[1]) for part in parts[:3]] == [18, 6, 6]
    assert all((part[0][:, 0] == 0).all() for part in parts[:3])
    assert split(load(path, drop=["constant"])).train[0].shape == (18, 1)


def test_huge_numbers_are_brought_to_scale(tmp_path: Path) -> None:
    parts = split(load(saved(tmp_path, table(a=np.linspace(0, 1e300, ROWS)))))
    assert parts.train[0].isfinite().all()
    assert parts.train[0].abs().max() < 10


# --- what does not ---------------------------------------------------------------------------------------------------


def refused(path: Path | None, match: str, **options: Any) -> None:
    with pytest.raises(CommandError, match=match) as caught:
        split(load(path, **options))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    refused(tmp_path / "none.csv", r"none\.csv: no such file; give a \.csv")
    refused(tmp_path, r"is a folder; give a \.csv")
    for name in ("data.xlsx", "data"):
        (tmp_path / name).write_text("x")
        refused(tmp_path / name, r"unknown kind of file .*; known: \.csv, \.parquet, \.npz")
    for name, kind in (("empty.csv", "CSV"), ("broken.parquet", "PARQUET")):
        (tmp_path / name).write_bytes(b"" if kind == "CSV" else b"nonsense")
        refused(tmp_path / name, rf"cannot be read as {kind}: \S")


def test_npz_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "broken.npz"
    for content in (b"", b"nonsense", b"\x80\x04N."):
        path.write_bytes(content)
        refused(path, r"broken\.npz: is not a readable NPZ file: it is no archive of arrays as numpy\.savez writes it$")
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "one.npy").rename(path)
    refused(path, "is not a readable NPZ file: it is no archive")
    np.savez(path, x=np.zeros((ROWS, 2)))
    path.write_bytes(path.read_bytes()[:200])
    refused(path, "is not a readable NPZ file: ")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_tables_without_rows(tmp_path: Path, suffix: str) -> None:
    refused(saved(tmp_path, table().head(0), suffix), "has column names but no rows; at least 10 are needed")


def test_npz_with_other_arrays_or_shapes(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, a=np.zeros((ROWS, 2)))
    refused(path, r"needs arrays x \(rows first\) and y \(a class a row\); it has: a")
    np.savez(path, x=np.zeros((ROWS, 2)), y=np.zeros(3))
    refused(path, r"their shapes are \(40, 2\) and \(3,\)")
    np.savez(path, x=np.full((ROWS, 2), "a"), y=np.arange(ROWS) % 2)
    refused(path, r"x holds <U1; encode it as real numbers")
    np.savez(path, x=np.array([[None]] * ROWS), y=np.arange(ROWS) % 2)
    refused(path, "is not a readable NPZ file: Object arrays")


def test_non_numeric_feature_is_named(tmp_path: Path) -> None:
    for suffix in (".csv", ".parquet"):
        path = saved(tmp_path, table(city=["Oslo", "Rome"] * 20), suffix)
        refused(path, r"feature column 'city' is not numeric \('Oslo'\); encode it .* --drop 'city'", target="target")


def test_gaps_are_counted_and_named(tmp_path: Path) -> None:
    bad = np.linspace(0, 1, ROWS)
    for wrong in (np.nan, np.inf, -np.inf):
        bad[[3, 5]] = wrong
        for suffix in (".csv", ".parquet"):
            refused(
                saved(tmp_path, table(a=bad), suffix),
                r"column 'a' \(a feature\): 2 rows have NaN, infinity or an empty",
            )
    refused(
        saved(tmp_path, table(a=[None, *range(ROWS - 1)])), r"column 'a' \(a feature\): 1 row has .*; fill or remove"
    )
    refused(
        saved(tmp_path, table(target=[None, *["x", "y", "y"] * 13])),
        r"column 'target' \(the target\): 1 row has an empty",
    )
    refused(saved(tmp_path, table(target=bad), ".parquet"), r"column 'target' \(the target\): 2 rows have NaN")
    np.savez(tmp_path / "data.npz", x=bad[:, None], y=np.arange(ROWS) % 2)
    refused(tmp_path / "data.npz", r"column 'x\[:, 0\]' \(a feature\): 2 rows have NaN")


def test_targets_that_are_no_classes(tmp_path: Path) -> None:
    refused(
        saved(tmp_path, table(target=[1] * ROWS)), r"'target' has one class only \('1'\); give data with at least two"
    )
    for values in (np.arange(ROWS), np.linspace(0, 1, ROWS), [f"id {i}" for i in range(ROWS)]):
        refused(saved(tmp_path, table(target=values)), r"40 distinct values in 40 rows, which looks like a regression")
    refused(saved(tmp_path, table(target=np.arange(ROWS) % 25)), "25 distinct values in 40 rows")
    refused(
        saved(tmp_path, table()),
        r"--target: no column 'targe'; did you mean 'target'\? columns: a, b, target",
        target="targe",
    )


def test_tables_that_are_too_small(tmp_path: Path) -> None:
    refused(saved(tmp_path, table().head(9)), "has 9 rows; at least 10 are needed")
    refused(saved(tmp_path, polars.DataFrame({"a": [1, 2]})), "has 1 column; it needs a target column and at least one")
    refused(saved(tmp_path, table()), "no feature column is left", drop=["a", "b"])
    few = polars.DataFrame({"x": range(10), "target": [i // 2 for i in range(10)]})
    refused(saved(tmp_path, few), "10 rows in 5 classes leave none to test on; give at least three rows")


def test_header_that_is_data(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("\n".join(f"5.{i},3.5,{i % 2}" for i in range(20)))
    refused(path, r"the first row holds numbers \(5\.0, 3\.5, 0\); add a row of column names")
    saved(tmp_path, polars.DataFrame({str(i): np.arange(ROWS) % 2 for i in range(3)}))
    assert load(path).columns == ["0", "1"]


def test_columns_that_cannot_be_dropped(tmp_path: Path) -> None:
    path = saved(tmp_path, table())
    refused(path, r"--drop: no column 'c'; columns: a, b, target", drop=["c"])
    refused(path, "--drop target: that is the target", drop=["target"])
    refused(None, "--target and --drop choose columns of a file", target="digit")
