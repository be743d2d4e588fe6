"""Speed rows: ``functional(model).apply`` against the module's own call.

Two questions. Compiled: what do parameters and buffers as values cost, beside a module that is compiled itself? Eager:
what does ``apply`` add to :func:`torch.func.functional_call`, which updates buffers in place?
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from functricks import functional
from parity.timing import Measure, Row, in_turns, to_row

ALLOWANCE_MS = 0.03  # what apply may add to functional_call


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


def row(case: str, name: str, rounds: int, *, compile: bool) -> Row:
    """One forward pass in training mode, and no backward pass."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module, x = MODELS[name](ROWS[name] if compile else 1)  # eager, the overhead is at question: little work
        model = functional(module)
        # As the module's: torch takes another matrix product for weights that require no gradient.
        params, buffers = {name: p.requires_grad_() for name, p in model.params.items()}, model.buffers
        if compile:
            apply, own = torch.compile(model.apply, fullgraph=True), torch.compile(module, fullgraph=True)
            return in_turns(case, lambda: apply(params, buffers, x), lambda: own(x), 1 / 1.05, rounds, calls=20)
        values = {**params, **buffers}
        times = in_turns(
            case,
            lambda: model.apply(params, buffers, x),
            lambda: functional_call(module, values, (x,)),
            None,
            20 * rounds,
        )
        return to_row(case, times.functional_ms, times.classic_ms + ALLOWANCE_MS, 1.0)


def _cases(compile: bool, against: str) -> dict[str, Measure]:
    titles = {f"functional, {name}, {'compiled' if compile else 'eager'}, against {against}": name for name in MODELS}
    return {title: partial(row, title, name, compile=compile) for title, name in titles.items()}


CASES = {**_cases(False, "functional_call and 30 us"), **_cases(True, "the module")}
