"""Split a data set once and for all into rows to train on, to choose by and to report, and bring it to one scale."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from functricks import random
from functricks.cli.data import Dataset
from functricks.cli.errors import CommandError

__all__ = ["Split", "split"]

_KEY = 0
_SHARE = 0.2  # of every class, for validation and for test each

Part = tuple[Tensor, Tensor]


class Split(NamedTuple):
    """Standardised features (float32) and class indices of the three parts, and the classes that no test row has."""

    train: Part
    validation: Part
    test: Part
    untested: list[str]


def split(data: Dataset) -> Split:
    """Split 60 / 20 / 20 within every class, the same way every time, and standardise by the training rows.

    A class with one or two rows is trained on and neither validated nor tested. A constant feature becomes 0.
    """
    order = random.permutation(random.key(_KEY), len(data.labels)).numpy()
    train, validation, test = _stratified(order, data.labels)
    if not len(test) or not len(validation):
        raise CommandError(
            f"{data.name}: {len(data.labels)} rows in {len(data.classes)} classes leave none to test on; "
            "give at least three rows of some class"
        )
    features = _standardised(data.features, train)
    if not np.isfinite(features).all():
        column = data.columns[int(np.flatnonzero(~np.isfinite(features).all(0))[0])]
        raise CommandError(f"{data.name}: column {column!r} is too large for float32; rescale it, or --drop it")
    tested = set(data.labels[test].tolist())
    parts = [_tensors(features, data.labels, rows) for rows in (train, validation, test)]
    untested = [name for index, name in enumerate(data.classes) if index not in tested]
    return Split(parts[0], parts[1], parts[2], untested)


def _stratified(order: NDArray[np.int64], labels: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    parts: list[list[NDArray[np.int64]]] = [[], [], []]
    for label in np.unique(labels):
        rows = order[labels[order] == label]
        held_out = int(_SHARE * len(rows) + 0.5)
        test, validation, train = np.split(rows, [held_out, 2 * held_out])
        for part, own in zip(parts, (train, validation, test), strict=True):
            part.append(own)
    return [np.sort(np.concatenate(part)) for part in parts]


def _standardised(features: NDArray[np.float64], train: NDArray[np.int64]) -> NDArray[np.float32]:
    scale = np.abs(features).max(0)
    scaled = features / np.where(scale > 0, scale, 1)  # so that no square overflows
    mean, deviation = scaled[train].mean(0), scaled[train].std(0)
    varies = deviation > 1e-12
    with np.errstate(over="ignore"):
        standard = np.where(varies, (scaled - mean) / np.where(varies, deviation, 1), 0)
        return standard.astype(np.float32)


def _tensors(features: NDArray[np.float32], labels: NDArray[np.int64], rows: NDArray[np.int64]) -> Part:
    return torch.from_numpy(features[rows]), torch.from_numpy(labels[rows])
