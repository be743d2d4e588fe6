"""Run every technique in every setting: ``python -m parity.matrix``.

A cell is a technique in one of five settings:

- ``pure``: the inputs stay untouched, and two calls give the same answer;
- ``vmap``: a lane for each value of its hyper-parameters is the loop over them;
- ``compiled``: ``torch.compile(fullgraph=True)``, once for all values, gives what eager gives;
- ``hyper-gradient``: derivatives by hyper-parameters and inputs are finite at zero, and are central differences;
- ``adapter``: in a classic loop it gives the same numbers.

Techniques and laws are those of ``tests/laws.py``, here each on one small problem; the tests take every odd tree. A
cell that does not apply is ok, and its reason says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import functricks as ft
from functricks import adapter, losses
from parity.__main__ import as_json, select

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import laws
from helpers import RUN_F64, assert_close, assert_run_close, assert_same, nonzero_like, odd_trees

COLUMNS = ("pure", "vmap", "compiled", "hyper-gradient", "adapter")
TREE, SMALL = "unsorted", "scalars"
STEPS = 4

Numbers = dict[str, float]


class Row(NamedTuple):
    technique: str
    column: str
    ok: bool
    reason: str  # what is off, or why the cell does not apply


class Entry(NamedTuple):
    """A technique: its cases, and how it runs in a classic loop."""

    case: laws.Case  # float64
    at_zero: laws.Case
    to_compile: Callable[[], laws.Case]  # float32
    adapter: Callable[[], None] | str  # or why there is none
    no_slope: str = ""  # why there is no derivative to compare, if so


# --- in a classic loop -----------------------------------------------------------------------------------------------


def _first(numbers: laws.Numbers) -> Numbers:
    return {name: values[0] for name, values in numbers.items()}


def transform_in_optimizer(name: str) -> None:
    """The transform as a ``torch.optim.Optimizer`` against init, update and apply."""
    entry, start = laws.TRANSFORMS[name], odd_trees(torch.float64)[TREE]
    transform = entry.make(**_first(entry.numbers))
    modules = {path: nn.Parameter(leaf.clone()) for path, leaf in start.items()}
    optimizer = adapter.Optimizer(list(modules.items()), transform)
    params, state = start, transform.init(start)
    for step in range(STEPS):
        grads = nonzero_like(start, step)
        updates, state = transform.update(grads, state, params)
        params = ft.apply_updates(params, updates)
        for path, parameter in modules.items():
            parameter.grad = grads[path].clone()
        optimizer.step()
    found = {path: parameter.detach() for path, parameter in modules.items()}
    if all(torch.equal(params[path], leaf) for path, leaf in start.items()):
        assert_close(found, params)  # frozen: nothing to divide by
    else:
        # torch.optim, on whose kernels these run, keeps a product, or the learning rate, in float32
        coarse = name.split(":")[0] in ("nadam", "asgd")
        assert_run_close(found, params, start, 1e-7 if coarse else RUN_F64)


def schedule_in_scheduler(case: laws.Case) -> None:
    """The learning rates that a ``Scheduler`` writes against the values of the schedule."""
    schedule, weight = partial(case.function, _first(case.numbers)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    scheduler = adapter.Scheduler(optimizer, schedule)
    for step in range(STEPS):
        assert_same(torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64), schedule(step))
        weight.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()


def loss_in_module(case: laws.Case) -> None:
    """The loss as a module against the mean of its values."""
    numbers, inputs = _first(case.numbers), case.inputs(0)
    module = adapter.LossModule(lambda *inputs, **numbers: case.function(numbers, inputs), **numbers)
    assert_same(module(*inputs), case.function(numbers, inputs).mean())


def _problem() -> tuple[nn.Module, Any, Callable[[nn.Module, Any], ft.Loss], ft.GradFn]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    batch = nonzero_like(torch.empty(5, 4, dtype=torch.float64), 1), torch.tensor([0, 1, 1, -100, 0])

    def loss_of(model: nn.Module, batch: Any) -> ft.Loss:
        return losses.cross_entropy(model(batch[0]), batch[1])

    def loss_fn(params: Any, batch: Any) -> ft.Loss:
        return losses.cross_entropy(torch.func.functional_call(model, params, (batch[0],)), batch[1])

    return model, batch, loss_of, ft.gradient(loss_fn)


def gradient_in_loop(
    wrap: Callable[[ft.GradFn], ft.GradFn], attack: Callable[[nn.Module], Any] | None, parts: Sequence[int]
) -> None:
    """One step of an ``adapter.Loop`` against one of ``train_step``."""
    model, batch, loss_of, grad_fn = _problem()
    start = {name: leaf.detach().clone() for name, leaf in model.named_parameters()}
    step = ft.train_step(wrap(grad_fn), ft.sgd(0.1))
    expected, _ = step.update(step.init(start), batch)
    loop = adapter.Loop(
        model,
        loss_of,
        torch.optim.SGD(model.parameters(), 0.1),
        accumulate=len(parts),
        adversarial=None if attack is None else attack(model),
    )
    for part in zip(*(leaf.split(list(parts)) for leaf in batch), strict=True):
        loop.step(part)
    assert_run_close({name: leaf.detach() for name, leaf in model.named_parameters()}, expected.params, start)


FIRST = "0.weight"
IN_LOOP: dict[str, Callable[[], None]] = {
    "gradient": partial(gradient_in_loop, lambda grad_fn: grad_fn, None, [5]),
    "accumulate": partial(gradient_in_loop, lambda grad_fn: ft.accumulate(grad_fn, 2), None, [3, 2]),
    "fgm": partial(
        gradient_in_loop,
        lambda grad_fn: ft.fgm(grad_fn, 0.5, where=FIRST),
        lambda model: adapter.FGM(model, 0.5, FIRST),
        [5],
    ),
    "pgd": partial(
        gradient_in_loop,
        lambda grad_fn: ft.pgd(grad_fn, 0.5, where=FIRST),
        lambda model: adapter.PGD(model, 0.5, FIRST),
        [5],
    ),
}


# --- the techniques --------------------------------------------------------------------------------------------------


def entries() -> dict[str, Callable[[], Entry]]:
    """Return ``{name: how to make the entry}``."""
    found: dict[str, Callable[[], Entry]] = {name: partial(_transform, name) for name in laws.TRANSFORMS}
    found |= {name: partial(_grad_fn, name) for name in laws.GRAD_FNS}
    for kind in ("losses", "attacks", "schedules"):
        found |= {name: partial(_other, kind, name) for name in laws.cases_of(kind, torch.float64)}
    return found


def _transform(name: str) -> Entry:
    case = laws.transform_cases(name, torch.float64)[TREE]
    no_slope = "" if laws.TRANSFORMS[name].smooth else "its derivative jumps"
    return Entry(
        case, case, partial(laws.compiled_case, name, torch.float32), partial(transform_in_optimizer, name), no_slope
    )


def _grad_fn(name: str) -> Entry:
    def case(shape: str, dtype: torch.dtype = torch.float64, tree: str = TREE) -> laws.Case:
        return laws.grad_fn_cases(name, dtype, shape)[tree]

    in_loop = IN_LOOP.get(name, "the adapter has none: wrap the functional one")
    return Entry(case("smooth"), case("bowl"), partial(case, "smooth", torch.float32, SMALL), in_loop)


def _other(kind: str, name: str) -> Entry:
    case = laws.cases_of(kind, torch.float64)[name]
    in_loop: Callable[[], None] | str

    def to_compile() -> laws.Case:
        return laws.cases_of(kind, torch.float32)[name]

    if kind == "schedules":
        no_slope = "schedules have corners; where they are smooth, the tests do it"
        plateau = "ReduceLROnPlateau of torch.optim.lr_scheduler has its numbers"
        in_loop = plateau if name == "reduce_on_plateau" else partial(schedule_in_scheduler, case)
        return Entry(case, case, to_compile, in_loop, no_slope)
    if kind == "attacks" or name in ("softmax", "log_softmax"):
        in_loop = "the adapter has none: a function of tensors is at home in any loop"
    else:
        in_loop = partial(loss_in_module, case)
    return Entry(case, case, to_compile, in_loop)


# --- the cells -------------------------------------------------------------------------------------------------------


def cells(name: str, entry: Entry) -> Iterator[Row]:
    """Run the cells of a technique; what raises is off, and the others go on."""
    wide = torch.float64

    def derivatives() -> None:
        laws.has_finite_derivatives_at_zero(entry.at_zero, wide)
        if not entry.no_slope:
            laws.has_the_right_derivative(entry.case, wide)

    def pure() -> None:
        laws.leaves_its_inputs_alone(entry.case, wide)
        laws.answers_the_same_twice(entry.case, wide)

    checks: dict[str, Callable[[], None] | str] = {
        "pure": pure,
        "vmap": lambda: laws.is_its_own_loop_under_vmap(entry.case, wide),
        "compiled": lambda: laws.compiles_once(entry.to_compile(), torch.float32),
        "hyper-gradient": derivatives,
        "adapter": entry.adapter,
    }
    for column, check in checks.items():
        reason = entry.no_slope if column == "hyper-gradient" else ""
        if isinstance(check, str):
            yield Row(name, column, True, check)
            continue
        torch.manual_seed(0)
        try:
            check()
        except Exception as error:
            yield Row(name, column, False, f"{type(error).__name__}: {error}")
        else:
            yield Row(name, column, True, reason)
    torch.compiler.reset()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m parity.matrix", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    parser.add_argument("--only", metavar="NAME", help="one technique, or a glob such as 'adam*'")
    given = parser.parse_args(arguments)
    everything = entries()
    chosen = select(list(everything), given.only, parser)
    width = max(len(name) for name in chosen)
    if not given.json:
        print(f"{'technique':{width}}  {'  '.join(COLUMNS)}")
    rows: list[Row] = []
    for name in chosen:
        own = list(cells(name, everything[name]()))
        rows += own
        if not given.json:
            print(_line(name, own, width), flush=True)
    bad = [row for row in rows if not row.ok]
    for row in bad:
        print(f"{row.technique}, {row.column}: {row.reason}", file=sys.stderr)
    if given.json:
        print(as_json(rows))
    else:
        print(f"{len(rows) - len(bad)} of {len(rows)} cells are ok")
    return 1 if bad else 0


def _line(name: str, rows: Sequence[Row], width: int) -> str:
    marks = [("ok" if not row.reason else "-") if row.ok else "NO" for row in rows]
    return f"{name:{width}}  {'  '.join(f'{mark:{len(row.column)}}' for mark, row in zip(marks, rows, strict=True))}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
