"""What a batch of experiments found: one row a configuration, and differences that mean something."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from functricks import tree
from functricks.experiments.configs import Config

__all__ = ["Comparison", "Interval", "Results", "t_interval"]


class Interval(NamedTuple):
    """A mean, and the half-width of its 95 % confidence interval (NaN for a single value)."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.half_width:.2g}"


class Comparison(NamedTuple):
    """One configuration (seeds apart) against the baseline: the metric, and the paired difference."""

    config: Config
    value: Interval
    difference: Interval
    pairs: int


def t_interval(values: Iterable[float], confidence: float = 0.95) -> Interval:
    r"""Return the mean and the half-width of its confidence interval by Student's t distribution.

    .. math:: \bar x \pm t_{n-1} \frac{s}{\sqrt{n}}

    Reference: Student 1908, "The probable error of a mean".

    >>> print(t_interval([1.0, 2.0, 3.0]))
    2 ± 2.5
    """
    sample = np.asarray(list(values), dtype=np.float64)
    if sample.size < 2:
        return Interval(float(sample.mean()) if sample.size else math.nan, math.nan)
    spread = float(sample.std(ddof=1)) / math.sqrt(sample.size)
    return Interval(float(sample.mean()), _t_quantile(0.5 + confidence / 2, sample.size - 1) * spread)


@lru_cache
def _t_quantile(p: float, df: int) -> float:
    """Return the quantile of Student's t, p > 1/2, by bisection of its integral."""
    # With t = sqrt(df) tan(a) the density is proportional to cos(a)**(df - 1), smooth on a finite interval.
    nodes, weights = np.polynomial.legendre.leggauss(200)

    def integral(angle: float) -> float:
        return float(angle / 2 * (weights * np.cos(angle / 2 * (nodes + 1)) ** (df - 1)).sum())

    whole = integral(math.pi / 2)
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if integral(middle) / whole < 2 * p - 1 else (low, middle)
    return math.sqrt(df) * math.tan(low)


class Results:
    """The outcome of :func:`~functricks.experiments.run`.

    ``rows`` has one dict a configuration, in the order in which they were given: the configuration itself, then
    its metrics. ``history`` has the same for every evaluation on the way, with ``config`` (an index) and ``step``.
    ``len``, indexing and iteration are those of ``rows``.
    """

    def __init__(
        self,
        configs: Sequence[Config],
        metrics: Sequence[dict[str, float]],
        states: Sequence[Any],
        history: Sequence[dict[str, float]] = (),
    ) -> None:
        self.configs = list(configs)
        self.metrics = list(metrics)
        self.history = list(history)
        for index, (config, found) in enumerate(zip(self.configs, self.metrics, strict=True)):
            if both := [name for name in config if name in found]:
                raise ValueError(
                    f"Results: configuration {index}: {', '.join(map(repr, both))} names a setting and a metric; "
                    "rename one of them"
                )
        self._states = list(states)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dict a configuration: its settings and its metrics."""
        return [{**config, **metrics} for config, metrics in zip(self.configs, self.metrics, strict=True)]

    def __len__(self) -> int:
        return len(self.configs)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def __repr__(self) -> str:
        return f"Results({len(self)} configurations, metrics: {', '.join(self.metrics[0]) if self.metrics else 'none'})"

    def state(self, index: int) -> Any:
        """Return the final state of a configuration, for the loop that it will live in."""
        states, lane = self._states[index]
        return tree.map(lambda leaf: leaf[lane], states)

    def best(self, metric: str, *, mode: Literal["max", "min"] = "max") -> dict[str, Any]:
        """Return the row with the best value of ``metric``; NaN never wins."""
        self._check_metric(metric)
        if mode not in ("max", "min"):
            raise ValueError(f"best: mode must be 'max' or 'min', got {mode!r}")
        sign = 1 if mode == "max" else -1
        return max(self.rows, key=lambda row: -math.inf if math.isnan(row[metric]) else sign * row[metric])

    def compare(self, *, to: Config, metric: str | None = None, by: str = "seed") -> list[Comparison]:
        """Compare every configuration with the baseline, paired by seed.

        The same seed means the same initial weights, batches and masks, so that the difference of a pair is the effect
        of the technique, and its interval is far narrower than that of two separate means.

        Args:
            to: the baseline: the settings that single it out.
            metric: which metric; without it, the first that ``evaluate`` returned.
            by: the setting that pairs runs.

        Settings that are tensors are compared by value, and appear as numbers (0-d) or tuples in the result.

        Raises ``ValueError`` when ``to`` fits no configuration, or several.
        """
        metric = self._check_metric(metric)
        to = {name: _plain(value) for name, value in to.items()}
        groups = self._groups(by)
        fits = [settings for settings, _ in groups if all(settings.get(name) == value for name, value in to.items())]
        if len(fits) != 1:
            raise ValueError(
                f"compare: to={to!r} fits {len(fits)} configurations, it must fit one; have: {fits or self.configs}"
            )
        base = next(members for settings, members in groups if settings == fits[0])
        found = []
        for settings, members in groups:
            pairs = [
                self.metrics[i][metric] - self.metrics[base[seed]][metric]
                for seed, i in members.items()
                if seed in base
            ]
            value = t_interval(self.metrics[i][metric] for i in members.values())
            found.append(Comparison(settings, value, t_interval(pairs), len(pairs)))
        return found

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows; the file appears whole or not at all."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        target = Path(path)
        part = target.with_name(target.name + ".part")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(self.rows)
        part.replace(target)

    def plot(
        self, metric: str | None = None, *, to: Config, by: str = "seed", labels: Sequence[str] | None = None
    ) -> Any:
        """Draw a forest plot of the paired differences to a baseline; returns the matplotlib figure.

        Args:
            metric: which metric; without it, the first that ``evaluate`` returned.
            to: the baseline, as in :meth:`compare`.
            by: the setting that pairs runs.
            labels: a name for every configuration that :meth:`compare` returns, instead of its settings.
        """
        from matplotlib.figure import Figure

        metric = self._check_metric(metric)
        found = self.compare(to=to, metric=metric, by=by)
        names = list(labels) if labels is not None else [_describe(one.config, found) for one in found]
        figure = Figure(figsize=(7, 1.2 + 0.32 * len(found)), layout="constrained")
        axes = figure.subplots()
        rows = range(len(found))
        axes.axvline(0, color="0.6", linewidth=1)
        axes.errorbar(
            [one.difference.mean for one in found],
            rows,
            xerr=[0 if math.isnan(one.difference.half_width) else one.difference.half_width for one in found],
            fmt="o",
            capsize=3,
        )
        axes.set_yticks(rows, names)
        axes.invert_yaxis()
        axes.set_xlabel(f"{metric}: paired difference to the baseline, 95 % interval")
        return figure

    def _groups(self, by: str) -> list[tuple[Config, dict[Any, int]]]:
        """Return the configurations without ``by``, each with ``{value of by: row}``."""
        found: list[tuple[Config, dict[Any, int]]] = []
        for index, config in enumerate(self.configs):
            settings = {name: _plain(value) for name, value in config.items() if name != by}
            own = _plain(config.get(by))
            members = next((members for known, members in found if known == settings), None)
            if members is None:
                members = {}
                found.append((settings, members))
            if own in members:
                raise ValueError(f"compare: configuration {index} is there twice: {config}")
            members[own] = index
        return found

    def _check_metric(self, metric: str | None) -> str:
        """Return the metric, by default the first, once every configuration has it."""
        have = list(self.metrics[0]) if self.metrics else []
        if metric is None:
            if not have:
                raise ValueError("Results: there are no metrics")
            metric = have[0]
        lacking = [index for index, found in enumerate(self.metrics) if metric not in found]
        if not have or len(lacking) == len(self.metrics):
            raise ValueError(f"Results: no metric {metric!r}; have: {', '.join(have)}")
        if lacking:
            first = lacking[0]
            raise ValueError(
                f"Results: configuration {first} lacks metric {metric!r}; it has: {', '.join(self.metrics[first])}"
            )
        return metric


def _plain(value: Any) -> Any:
    """Return a tensor, alone or in tuples, as numbers in tuples: what can be compared and hashed by value."""
    if isinstance(value, Tensor):
        return _tuples(value.tolist())
    return tuple(_plain(item) for item in value) if type(value) is tuple else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _describe(config: Config, found: Sequence[Comparison]) -> str:
    """Name a configuration by the settings in which the configurations differ."""
    differing = [name for name, value in config.items() if any(other.config.get(name) != value for other in found)]
    return ", ".join(f"{name}={config[name]}" for name in differing) or "baseline"
