"""Time ``functional(model).apply`` against the module's own call: ``python -m parity.speed_modules``.

Two questions. Compiled: what do parameters and buffers as values cost, beside a module that is compiled itself? Eager:
what does ``apply`` add to :func:`torch.func.functional_call`, which updates buffers in place? Both versions of a row
take turns in one process, and medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from functricks import functional
from parity.__main__ import as_json, select

EAGER_TARGET_MS = 0.03  # what apply may add to functional_call


class Row(NamedTuple):
    case: str
    functional_ms: float
    classic_ms: float
    ratio: float  # classic over functional
    target: float | None  # none where the difference is bounded, not the ratio
    ok: bool


def mlp(rows: int) -> tuple[nn.Module, Tensor]:
    layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return layers, torch.randn(rows, 256)


def cnn(rows: int) -> tuple[nn.Module, Tensor]:
    def block(inner: int, outer: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]

    body = nn.Sequential(*block(3, 16), *block(16, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return body, torch.randn(rows, 3, 32, 32)


def encoder(rows: int) -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(rows, 32, 64)


MODELS: dict[str, Callable[[int], tuple[nn.Module, Tensor]]] = {"mlp": mlp, "cnn": cnn, "encoder": encoder}
ROWS = {"mlp": 128, "cnn": 16, "encoder": 32}


def medians(rounds: int, *calls: Callable[[], Any]) -> list[float]:
    """Return the median time of each, in milliseconds; they take turns, and so share what else the machine does."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 3):
        for column, call in zip(times, calls, strict=True):
            start = time.perf_counter()
            call()
            column.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(column[3:]) for column in times]


def row(name: str, rounds: int, *, compile: bool) -> Row:
    """One forward pass in training mode, and no backward pass."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module, x = MODELS[name](ROWS[name] if compile else 1)  # eager, the overhead is at question: little work
        model = functional(module)
        # As the module's: torch takes another matrix product for weights that require no gradient.
        params, buffers = {name: p.requires_grad_() for name, p in model.params.items()}, model.buffers
        if compile:
            apply, own = torch.compile(model.apply, fullgraph=True), torch.compile(module, fullgraph=True)
            fast, slow = medians(rounds, lambda: apply(params, buffers, x), lambda: own(x))
            return Row(f"{name}, compiled, against the module", fast, slow, slow / fast, 1 / 1.05, 1.05 * slow >= fast)
        values = {**params, **buffers}
        fast, slow = medians(
            rounds, lambda: model.apply(params, buffers, x), lambda: functional_call(module, values, (x,))
        )
        title = f"{name}, eager, against functional_call: {1e3 * (fast - slow):+.0f} us"
        return Row(title, fast, slow, slow / fast, None, fast - slow <= EAGER_TARGET_MS)


CASES: dict[str, Callable[[int], Row]] = {
    f"{name}, {'compiled' if compile else 'eager'}": partial(row, name, compile=compile)
    for compile in (False, True)
    for name in MODELS
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m parity.speed_modules", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    parser.add_argument("--only", metavar="CASE", help="one case, or a glob such as '*eager*'")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run? The numbers are rough")
    given = parser.parse_args(arguments)
    rows = []
    for name in select(list(CASES), given.only, parser):
        rows.append(CASES[name](5 if given.quick else 500))
        torch.compiler.reset()
        if not given.json:
            one = rows[-1]
            target = "-" if one.target is None else f"{one.target:.2f}"
            print(
                f"{one.case:60} {one.functional_ms:9.3f} {one.classic_ms:9.3f} {one.ratio:6.2f} {target:>6} "
                f"{'ok' if one.ok else 'NO'}",
                flush=True,
            )
    if given.json:
        print(as_json(rows))
    return 0 if all(one.ok for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
