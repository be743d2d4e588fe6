"""How the speed rows are measured: both versions take turns in one process, and medians are compared."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

THREADS = 2
WARM_UP = 2  # rounds that do not count: they compile, and fill caches


class Row(NamedTuple):
    case: str
    functional_ms: float
    classic_ms: float
    ratio: float  # classic over functional
    target: float | None  # the least ratio; None: for information
    ok: bool


Measure: TypeAlias = Callable[[int], Row]
"""From the number of rounds to the row."""


def to_row(case: str, functional: float, classic: float, target: float | None) -> Row:
    ratio = classic / functional
    return Row(case, functional, classic, ratio, target, target is None or ratio >= target)


def in_turns(
    case: str,
    functional: Callable[[], Any],
    classic: Callable[[], Any],
    target: float | None,
    rounds: int,
    *,
    calls: int = 1,
    lanes: int = 1,
) -> Row:
    """Time ``calls`` calls of one, then of the other, ``rounds`` times; a functional call does ``lanes`` runs."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + WARM_UP):
        for column, call, share in zip(times, (functional, classic), (calls * lanes, calls), strict=True):
            began = time.perf_counter()
            for _ in range(calls):
                call()
            column.append((time.perf_counter() - began) * 1e3 / share)
    return to_row(case, *(statistics.median(column[WARM_UP:]) for column in times), target)


def keep_freed_memory() -> None:
    """Ask the C library to keep what is freed, as a GPU's caching allocator does; elsewhere than in glibc do nothing.

    Otherwise large tensors go back to the system and come again page by page, or do not, as their neighbours on the
    heap have it: the same program takes half as long again, at random. The same as the environment variables
    ``MALLOC_TRIM_THRESHOLD_`` and ``MALLOC_MMAP_THRESHOLD_``.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**30)
