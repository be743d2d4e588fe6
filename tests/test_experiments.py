"""Batched experiments: the loop and the lanes agree, seeds keep their results, and results mean what they say."""

from __future__ import annotations

import csv
import importlib
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import scipy.stats
import torch
from helpers import assert_close, assert_same, lane, stack
from torch import Tensor, nn

import functricks as F
from functricks import adamw, gradient, losses, random, train_step, tree
from functricks.experiments import Experiment, Results, grid, minibatches, run, t_interval, zipped
from functricks.experiments.configs import group

KEY = random.key(7)


def toy_data(rows: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator)
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()


DATA = toy_data()


def dropout_experiment() -> Experiment:
    """A model with dropout, whose masks come from the seed's key, and BatchNorm, whose buffers are carried."""
    torch.manual_seed(0)
    # no bias before BatchNorm: its gradient is zero but for rounding, which Adam would blow up to whole steps
    layers = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)
    model = F.functional(nn.Sequential(*layers))

    def step(config: Any) -> F.TrainStep:
        smoothed = F.supervised(
            model, lambda output, y: losses.cross_entropy(output, y, label_smoothing=config.get("smoothing", 0.0))
        )
        grad_fn = gradient(smoothed, has_carry=True, has_metrics=True)
        if config.get("attack"):
            grad_fn = F.fgm(grad_fn, config["epsilon"], where="0.weight")
        return train_step(grad_fn, F.chain(F.clip_by_global_norm(1.0), adamw(config["lr"])))

    def init(config: Any, key: Tensor) -> F.TrainState:
        keys = random.split(key)
        params = {
            name: leaf + 0.1 * random.normal(random.fold_in(keys[0], i), leaf.shape)
            for i, (name, leaf) in enumerate(model.params.items())
        }
        return step(config).init(params, F.supervised_carry(model, keys[1]))

    def evaluate(config: Any, state: F.TrainState, data: Any) -> dict[str, Tensor]:
        output, _ = model.apply(state.params, state.carry.buffers, data[0], train=False)
        return {"loss": losses.cross_entropy(output, data[1]).mean(), "steps": state.step.float()}

    return Experiment(init, lambda config, state, batch: step(config).update(state, batch), evaluate)


def linear_experiment(seen: list[Any] | None = None) -> Experiment:
    """Least squares by gradient descent: small enough for anything."""

    def init(config: Any, key: Tensor) -> Any:
        return {"w": random.normal(key, (4,)), "total": torch.zeros(()), "rows": torch.zeros((), dtype=torch.int64)}

    def update(config: Any, state: Any, batch: Any) -> Any:
        if seen is not None:
            seen.append(batch[0].shape)
        w, (x, y) = state["w"], batch
        slope = x.T @ (x @ w - y) / len(x)
        return {
            "w": w - config["lr"] * slope,
            "total": state["total"] * config.get("decay", 0.5) + x.sum(),
            "rows": state["rows"] + len(x),
        }, ()

    def evaluate(config: Any, state: Any, data: Any) -> dict[str, Tensor]:
        return {"w": state["w"].sum(), "total": state["total"], "rows": state["rows"]}

    return Experiment(init, update, evaluate)


def metrics_of(results: Results) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in results.metrics]


def assert_rows_close(found: list[dict[str, Any]], expected: list[dict[str, Any]], rel: float = 1e-4) -> None:
    assert [list(row) for row in found] == [list(row) for row in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=rel, nan_ok=True)


# --- configurations --------------------------------------------------------------------------------------------------


def test_grids() -> None:
    assert grid(a=[1, 2], b=["x"], c=3.0) == [{"a": 1, "b": "x", "c": 3.0}, {"a": 2, "b": "x", "c": 3.0}]
    assert grid() == [{}]
    assert len(grid(a=range(3), b=range(4)) + grid(a=[0])) == 13
    assert zipped(a=[1, 2], b=[3, 4], c=5) == [{"a": 1, "b": 3, "c": 5}, {"a": 2, "b": 4, "c": 5}]
    assert zipped() == []


def test_numbers_share_a_program_and_structure_does_not() -> None:
    configs = grid(lr=[0.1, 1], attack=[False, True], name=["a", None], seed=range(2))
    groups = group(configs)
    assert len(groups) == 4
    assert sorted(i for one in groups for i in one.indices) == list(range(16))
    first = groups[0]
    assert first.static == {"attack": False, "name": "a"}
    assert first.numbers["lr"].dtype == torch.float32  # an int among floats is a float
    assert first.numbers["lr"].tolist() == pytest.approx([0.1, 0.1, 1, 1])
    assert first.numbers["seed"].dtype == torch.int64
    torch.set_default_dtype(torch.float64)
    assert group(configs)[0].numbers["lr"].dtype == torch.float64


def test_numbers_of_numpy_are_numbers() -> None:
    values = [numpy.float32(0.5), 1, numpy.int64(2), 0.25]
    (one,) = group([{"lr": lr, "seed": seed} for lr, seed in zip(values, numpy.arange(4), strict=True)])
    assert one.static == {}
    assert one.numbers["lr"].dtype == torch.float32
    assert one.numbers["lr"].tolist() == [0.5, 1, 2, 0.25]
    assert one.numbers["seed"].dtype == torch.int64
    assert group([{"a": numpy.int64(3)}])[0].numbers["a"].dtype == torch.int64
    assert group([{"a": numpy.bool_(True)}])[0].static == {"a": numpy.bool_(True)}
    (one,) = group([{"a": numpy.float64(0.5)}, {"a": torch.tensor(1.0)}])
    assert one.numbers["a"].dtype == torch.float32


def test_zero_and_false_are_different_structures() -> None:
    assert len(group([{"a": False}, {"a": 0}, {"a": None}, {}])) == 4


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: grid(lr=[]), ValueError, "lr has no values; give at least one"),
        (lambda: zipped(a=[1, 2], b=[1, 2, 3]), ValueError, "zipped: every axis needs 3 values or one, got {'a': 2}"),
        (lambda: group([{"a": [1]}]), TypeError, r"run: a=\[1\] is neither a number nor hashable"),
        (lambda: group([{"a": ([1],)}]), TypeError, r"run: a=\(\[1\],\) is neither a number nor hashable"),
        (lambda: group([{"seed": "1"}]), ValueError, r"run: seed must be an int in \[0, 2\*\*32\) .* got '1' in"),
        (lambda: group([{"seed": None}]), ValueError, "run: seed must be an int in .* got None in configuration 0"),
        (lambda: group([{"seed": 0}, {"seed": True}]), ValueError, "run: seed must .* got True in configuration 1"),
        (lambda: group([{"seed": numpy.bool_(True)}]), ValueError, "run: seed must be an int in .* got "),
        (lambda: group([{"seed": 0.5}]), ValueError, "run: seed must be an int in .* got 0.5"),
        (lambda: group([{"seed": torch.ones(2)}]), ValueError, "run: seed must be an int .* 0-d integer tensor, got"),
        (lambda: group([{"seed": -1}]), ValueError, "run: seed must be an int in .* got -1"),
        (lambda: group([{"seed": 2**32}]), ValueError, "run: seed must be an int in .* got 4294967296"),
        (lambda: group([3]), TypeError, "run: configuration 0 must be a dict, got 3"),  # type: ignore[list-item]
    ],
)
def test_bad_configurations(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


# --- minibatches -----------------------------------------------------------------------------------------------------


def test_an_epoch_sees_every_row_once() -> None:
    for order, per_lane in (("shared", False), ("per-lane", True)):
        plan = minibatches(torch.arange(10), 4, epochs=2, order=order, drop_last=False)  # type: ignore[arg-type]
        assert (plan.steps_per_epoch, plan.total_steps) == (3, 6)
        keys = torch.stack([random.key(0), random.key(1)])
        rows = plan.indices(keys, 0)
        assert rows.sort(1).values.tolist() == [list(range(10))] * 2
        assert not torch.equal(rows[0], rows[1])
        assert not torch.equal(rows, plan.indices(keys, 1))  # another epoch, another order
        own = rows if per_lane else rows[0]
        blocks = list(plan.blocks(own, 1, 100))
        assert [block.shape[-1] for block in blocks] == [4, 4, 2]
        assert_same(torch.cat([block[0] for block in blocks], -1), own)


@pytest.mark.parametrize("rows", [8, 10])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("most", [1, 2, 3, 9])
@pytest.mark.parametrize("drop_last", [False, True])
def test_blocks_are_the_epoch_cut_anywhere(rows: int, size: int, most: int, drop_last: bool) -> None:
    plan = minibatches(torch.arange(rows), 4, steps=9, drop_last=drop_last)
    blocks = list(plan.blocks(torch.arange(rows), size, most))
    steps = [row.tolist() for block in blocks for row in block]
    everything = [list(range(i, min(i + 4, rows))) for i in range(0, rows, 4)]
    expected = [one for one in everything if len(one) == 4 or not drop_last][:most]
    assert steps == expected


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"data": {}, "batch_size": 1, "epochs": 1}, "leaves of data must share one leading axis, got {}"),
        ({"data": (torch.ones(2), torch.ones(3)), "batch_size": 1, "epochs": 1}, "must share one leading axis"),
        ({"data": torch.tensor(1.0), "batch_size": 1, "epochs": 1}, "must share one leading axis"),
        ({"batch_size": 0, "epochs": 1}, "batch_size must be an integer from 1 to the number of rows, 4, got 0"),
        ({"batch_size": 5, "epochs": 1}, "batch_size must be an integer from 1 to the number of rows, 4, got 5"),
        ({"batch_size": 2.5, "epochs": 1}, "batch_size must be an integer from 1 to the number of rows, 4, got 2.5"),
        ({"batch_size": True, "epochs": 1}, "batch_size must be an integer from 1 to the number of rows, 4, got True"),
        ({"batch_size": 2, "steps": 1.5}, "give either steps or epochs, an integer >= 1, got 1.5"),
        ({"batch_size": 2}, "give either steps or epochs, an integer >= 1, got None and None"),
        ({"batch_size": 2, "steps": 1, "epochs": 1}, "give either steps or epochs"),
        ({"batch_size": 2, "steps": 0}, "give either steps or epochs, an integer >= 1, got 0"),
        ({"batch_size": 2, "epochs": 1, "order": "random"}, "order must be 'shared' or 'per-lane', got 'random'"),
    ],
)
def test_bad_minibatches(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        minibatches(**{"data": torch.ones(4), **arguments})


def test_minibatches_take_integers_of_numpy() -> None:
    data = torch.ones(4)
    assert minibatches(data, numpy.int64(2), epochs=numpy.int32(3)).total_steps == 6  # type: ignore[arg-type]
    plan = minibatches(data, 2, steps=numpy.int64(3))  # type: ignore[arg-type]
    assert type(plan.total_steps) is int
    assert plan.total_steps == 3


# --- run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["shared", "per-lane"])
def test_the_loop_and_the_lanes_agree(order: Any) -> None:
    """Dropout and BatchNorm included, structure in the configurations, and whole states, not only metrics."""
    configs = grid(lr=[0.01, 0.1], smoothing=[0.0, 0.2], seed=range(2)) + grid(
        lr=[0.05], attack=True, epsilon=[0.1, 0.5], seed=[0, 5]
    )
    plan = minibatches(DATA, 8, steps=7, order=order)
    experiment = dropout_experiment()
    lanes, loop = (run(experiment, configs, plan, key=KEY, eval_data=DATA, backend=b) for b in ("vmap", "loop"))
    assert_rows_close(metrics_of(lanes), metrics_of(loop))
    assert {row["steps"] for row in lanes.rows} == {7}
    assert len({row["loss"] for row in lanes.rows}) == len(configs)
    for i in range(len(configs)):
        ours, alone = lanes.state(i), loop.state(i)
        assert_same(ours.carry.key, alone.carry.key)
        # seven steps of Adam in float32: a gradient near zero turns its rounding into a step
        for name, leaf in alone.params.items():
            torch.testing.assert_close(ours.params[name], leaf, rtol=1e-3, atol=2e-4)


def test_the_lanes_are_a_loop_that_somebody_writes() -> None:
    """Without any of our machinery for batches, lanes and keys."""
    plan = minibatches(DATA, 16, epochs=2, drop_last=False)
    experiment = dropout_experiment()
    results = run(experiment, grid(lr=[0.1, 0.01], seed=[3]), plan, key=KEY, eval_data=DATA)
    state = experiment.init({"lr": torch.tensor(0.01)}, random.fold_in(KEY, 3))
    for epoch in range(2):
        rows = plan.indices(KEY[None], epoch)[0]
        for part in rows.split(16):
            state, _ = experiment.update({"lr": torch.tensor(0.01)}, state, (DATA[0][part], DATA[1][part]))
    expected = experiment.evaluate({}, state, DATA)
    assert results[1]["loss"] == pytest.approx(expected["loss"].item(), rel=1e-4)
    assert results[1]["steps"] == 6


@pytest.mark.parametrize("order", ["shared", "per-lane"])
def test_a_seeds_result_depends_on_nothing_beside_it(order: Any) -> None:
    """To the bit for the key and the batches; to rounding for the rest, since kernels differ by the batch's size."""
    plan = minibatches(DATA, 8, steps=5, order=order)
    experiment = dropout_experiment()
    many = grid(lr=[0.01, 0.1], seed=range(4))
    whole = run(experiment, many, plan, key=KEY, eval_data=DATA)
    alone = run(experiment, [many[5]], plan, key=KEY, eval_data=DATA)
    backwards = run(experiment, many[::-1], plan, key=KEY, eval_data=DATA)
    assert_rows_close(metrics_of(alone), metrics_of(whole)[5:6])
    assert_rows_close(metrics_of(backwards)[::-1], metrics_of(whole))
    for size in (1, 3, 8, 100):
        chunked = run(experiment, many, plan, key=KEY, eval_data=DATA, chunk_size=size)
        assert_rows_close(metrics_of(chunked), metrics_of(whole))
        for i in range(len(many)):
            assert_same(chunked.state(i).carry.key, whole.state(i).carry.key)
    assert len({row["loss"] for row in whole.rows}) == 8


def test_the_same_call_gives_the_same_rows() -> None:
    plan = minibatches(DATA, 8, steps=3)
    first, second = (
        run(dropout_experiment(), grid(lr=[0.01], seed=range(2)), plan, key=KEY, eval_data=DATA) for _ in range(2)
    )
    assert metrics_of(first) == metrics_of(second)
    other = run(dropout_experiment(), grid(lr=[0.01], seed=range(2)), plan, key=random.key(8), eval_data=DATA)
    assert other[0]["loss"] != first[0]["loss"]


def test_seeds_pair() -> None:
    """One seed has one start, whatever else differs; without a seed all lanes are seed 0."""
    start = {}
    for configs in (grid(lr=[0.0, 1.0], seed=range(2)), grid(lr=[0.0])):
        results = run(linear_experiment(), configs, [], key=KEY)
        for i, config in enumerate(configs):
            start.setdefault(config.get("seed", 0), []).append(results.state(i)["w"])
    for same in start.values():
        for other in same[1:]:
            assert_same(other, same[0])
    assert not torch.equal(start[0][0], start[1][0])


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_iterables_of_batches(backend: Any) -> None:
    x, y = DATA[0], DATA[0].sum(1)
    batches = [
        (x[i : i + 10], y[i : i + 10]) for i in range(0, 35, 10)
    ]  # the last one has ten rows too; then a short one
    batches.append((x[:3], y[:3]))
    configs = grid(lr=[0.0, 0.1])
    for given in (batches, (one for one in batches)):  # a generator serves every configuration
        results = run(linear_experiment(), configs, given, key=KEY, backend=backend)
        assert [row["rows"] for row in results.rows] == [43, 43]
    w = random.normal(random.fold_in(KEY, 0), (4,))
    assert results[0]["w"] == pytest.approx(w.sum().item(), rel=1e-6)
    for bx, by in batches:
        w = w - 0.1 * bx.T @ (bx @ w - by) / len(bx)
    assert results[1]["w"] == pytest.approx(w.sum().item(), rel=1e-5)


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_drop_last(backend: Any) -> None:
    x = DATA[0][:11]
    for drop_last, rows, shapes in ((True, 16, {(4, 4)}), (False, 22, {(4, 4), (3, 4)})):
        seen: list[Any] = []
        plan = minibatches((x, x.sum(1)), 4, epochs=2, drop_last=drop_last)
        results = run(linear_experiment(seen), grid(lr=[0.1]), plan, key=KEY, backend=backend)
        assert results[0]["rows"] == rows
        assert set(seen) == shapes


@pytest.mark.parametrize("name", ["step", "config"])
def test_a_metric_does_not_replace_a_column_of_the_history(name: str) -> None:
    experiment = linear_experiment()._replace(evaluate=lambda config, state, data: {name: torch.ones(())})
    plan = minibatches((DATA[0], DATA[0].sum(1)), 10, steps=2)
    assert run(experiment, grid(lr=[0.1]), plan, key=KEY)[0][name] == 1
    with pytest.raises(ValueError, match=f"run: evaluate: metric '{name}' has the name of a column of Results.history"):
        run(experiment, grid(lr=[0.1]), plan, key=KEY, eval_every=1)


def test_eval_every_writes_a_history() -> None:
    plan = minibatches((DATA[0], DATA[0].sum(1)), 10, steps=7)
    for backend in ("vmap", "loop"):
        results = run(
            linear_experiment(),
            grid(lr=[0.1, 0.2]) + grid(lr=[0.1], tag="x"),
            plan,
            key=KEY,
            eval_every=3,
            chunk_size=1,
            backend=backend,  # type: ignore[arg-type]
        )
        assert [(row["config"], row["step"], row["rows"]) for row in results.history] == [
            (config, step, 10 * step) for config in range(3) for step in (3, 6)
        ]
        assert [row["rows"] for row in results.rows] == [70] * 3


def test_progress_counts_lane_steps(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int]] = []
    plan = minibatches((DATA[0], DATA[0].sum(1)), 10, steps=3)
    configs = grid(lr=[0.1, 0.2], seed=range(2))
    run(
        linear_experiment(),
        configs,
        plan,
        key=KEY,
        chunk_size=3,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (12, 12)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    run(linear_experiment(), configs, plan, key=KEY, progress=True)
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.endswith("100.0% of 12 steps\n")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"configs": []}, "run: no configurations; pass e.g. grid"),
        ({"backend": "jit"}, "run: backend must be 'vmap' or 'loop', got 'jit'"),
        ({"chunk_size": 0}, "run: chunk_size must be 'auto' or an integer >= 1, got 0"),
        ({"chunk_size": "big"}, "run: chunk_size must be 'auto' or an integer >= 1, got 'big'"),
        ({"eval_every": 0}, "run: eval_every must be an integer >= 1, got 0"),
        ({"configs": grid(lr=[0.1], seconds=1)}, "run: a setting must not be named 'seconds'"),
    ],
)
def test_bad_runs(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        run(**{"experiment": linear_experiment(), "configs": grid(lr=[0.1]), "batches": [], "key": KEY, **options})


@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize(
    ("metrics", "error", "match"),
    [
        ({"loss": 0.5}, TypeError, "run: evaluate: metric 'loss' must be a 0-d tensor, got float"),
        ({"loss": torch.ones(3)}, ValueError, r"run: evaluate: metric 'loss' must be a 0-d tensor, got shape \[3\]"),
        ((torch.ones(()),), TypeError, "run: evaluate must return a dict of 0-d tensors, got tuple"),
        ({"lr": torch.ones(())}, ValueError, "run: evaluate: metric 'lr' has the name of a setting"),
        ({"name": torch.ones(())}, ValueError, "run: evaluate: metric 'name' has the name of a setting"),
        ({"seconds": torch.ones(())}, ValueError, "run: evaluate: a metric must not be named 'seconds'"),
    ],
)
def test_bad_metrics(backend: Any, metrics: Any, error: type[Exception], match: str) -> None:
    experiment = linear_experiment()._replace(evaluate=lambda config, state, data: metrics)
    with pytest.raises(error, match=match):
        run(experiment, grid(lr=[0.1, 0.2], name="a"), [], key=KEY, backend=backend)


def test_a_diverged_configuration_keeps_to_itself() -> None:
    plan = minibatches((DATA[0], DATA[0].sum(1)), 10, steps=40)
    together = run(linear_experiment(), grid(lr=[0.1, 1e30, 0.2]), plan, key=KEY)
    assert not math.isfinite(together[1]["w"])
    for i in (0, 2):
        alone = run(linear_experiment(), [together.configs[i]], plan, key=KEY)
        assert together[i]["w"] == pytest.approx(alone[0]["w"], rel=1e-5)


# --- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_is_eager() -> None:
    """With code generated: scans of several steps, an epoch that they do not divide, a short batch, padded chunks."""
    x = DATA[0][:31]
    plan = minibatches((x, x.sum(1)), 4, steps=19, drop_last=False)
    configs = grid(lr=[0.05, 0.1, 0.15])
    options: dict[str, Any] = {"key": KEY, "eval_every": 4, "chunk_size": 2}
    eager = run(linear_experiment(), configs, plan, **options)
    compiled = run(linear_experiment(), configs, plan, **options, compile=True)
    assert_rows_close(metrics_of(compiled), metrics_of(eager))
    assert_rows_close(compiled.history, eager.history)
    assert [row["step"] for row in eager.history] == [4, 8, 12, 16] * 3


def test_many_structures_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """More programs than torch's limit of recompilations; the back-end generates no code."""
    compile_with_code = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile_with_code(function, **{**options, "backend": "eager"})
    )
    data = (DATA[0], DATA[0].sum(1))
    configs = grid(lr=[0.1], tag=[f"program {i}" for i in range(10)])
    results = run(linear_experiment(), configs, [data, data], key=KEY, compile=True)
    eager = run(linear_experiment(), configs, [data, data], key=KEY)
    assert_rows_close(metrics_of(results), metrics_of(eager))


def scan_in_python(body: Any, carry: Any, items: list[Tensor]) -> Any:
    outputs = []
    for row in zip(*items, strict=True):
        carry, output = body(carry, list(row))
        outputs.append(output)
    return carry, torch.stack(outputs)


@pytest.mark.parametrize("eval_every", [None, 2, 3, 5])
def test_steps_in_one_call_are_steps(monkeypatch: pytest.MonkeyPatch, eval_every: int | None) -> None:
    """The scans of the compiled path, run uncompiled: the same rows and history, nothing doubled by padding."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(importlib.import_module("torch._higher_order_ops.scan"), "scan", scan_in_python)
    x = DATA[0][:26]
    for drop_last in (True, False):
        plan = minibatches((x, x.sum(1)), 4, steps=15, drop_last=drop_last)
        configs = grid(lr=[0.05, 0.1, 0.15])
        options: dict[str, Any] = {"key": KEY, "eval_every": eval_every, "chunk_size": 2}
        steps: list[tuple[int, int]] = []
        with_scans = run(
            linear_experiment(),
            configs,
            plan,
            compile=True,
            **options,
            progress=lambda done, total, steps=steps: steps.append((done, total)),
        )
        plain = run(linear_experiment(), configs, plan, **options)
        assert_rows_close(metrics_of(with_scans), metrics_of(plain))
        assert_rows_close(with_scans.history, plain.history)
        assert steps[-1] == (45, 45)


# --- results ---------------------------------------------------------------------------------------------------------


def made_up(values: dict[tuple[float, int], float]) -> Results:
    configs = [{"lr": lr, "seed": seed} for lr, seed in values]
    return Results(configs, [{"accuracy": value} for value in values.values()], [])


def test_t_interval_is_that_of_scipy() -> None:
    draw = numpy.random.default_rng(0)
    for count in (2, 3, 8, 50, 1000):
        sample = draw.normal(3.0, 2.0, count)
        for confidence in (0.5, 0.95, 0.999):
            expected = scipy.stats.t.interval(confidence, count - 1, sample.mean(), scipy.stats.sem(sample))
            found = t_interval(sample, confidence)
            assert found.mean == pytest.approx(sample.mean())
            assert found.half_width == pytest.approx((expected[1] - expected[0]) / 2, rel=1e-9)
    assert math.isnan(t_interval([1.0]).half_width)
    assert math.isnan(t_interval([]).mean)
    assert t_interval([2.0, 2.0]).half_width == 0
    assert str(t_interval([1.0, 2.0, 3.0])) == "2 ± 2.5"


def test_compare_is_a_paired_t_test() -> None:
    draw = numpy.random.default_rng(1)
    values = {(lr, seed): draw.normal(lr, 1.0) + 10 * seed for lr in (0.1, 0.2, 0.3) for seed in range(6)}
    base, *others = made_up(values).compare(to={"lr": 0.1}, metric="accuracy")
    assert base.config == {"lr": 0.1}
    assert base.difference == (0, 0)
    for one in others:
        pair = [numpy.array([values[lr, seed] for seed in range(6)]) for lr in (one.config["lr"], 0.1)]
        expected = scipy.stats.ttest_rel(*pair).confidence_interval(0.95)
        low, high = one.difference.mean - one.difference.half_width, one.difference.mean + one.difference.half_width
        assert (low, high) == pytest.approx((expected.low, expected.high), rel=1e-9)
        assert one.value.mean == pytest.approx(pair[0].mean())
        assert one.value.half_width > 3 * one.difference.half_width  # pairing takes the seeds' spread out
        assert one.pairs == 6


def test_compare_pairs_only_what_both_have() -> None:
    values = {(0.1, 0): 1.0, (0.1, 1): 2.0, (0.2, 1): 5.0, (0.2, 2): 100.0}
    _, other = made_up(values).compare(to={"lr": 0.1}, metric="accuracy")
    assert other.pairs == 1
    assert other.difference.mean == 3.0


def test_compare_takes_the_first_metric() -> None:
    results = Results([{"lr": 0.1}, {"lr": 0.2}], [{"loss": 1.0, "other": 7.0}, {"loss": 3.0, "other": 7.0}], [])
    assert results.compare(to={"lr": 0.1}, by="seed") == results.compare(to={"lr": 0.1}, metric="loss")
    assert results.plot(to={"lr": 0.1}).axes[0].get_xlabel().startswith("loss: ")
    with pytest.raises(ValueError, match="Results: there are no metrics"):
        Results([], [], []).compare(to={})


def test_compare_takes_tensors_by_value() -> None:
    configs = [
        {"lr": torch.tensor(lr), "betas": torch.tensor(betas), "mixed": (torch.tensor(1), "a"), "seed": seed}
        for lr in (0.5, 0.25)
        for betas in ([0.5, 0.25], [0.0, 0.0])
        for seed in (torch.tensor(0), torch.tensor(1))
    ]
    results = Results(configs, [{"loss": float(i)} for i in range(8)], [])
    found = results.compare(to={"lr": 0.5, "betas": torch.tensor([0.5, 0.25])})
    assert [one.pairs for one in found] == [2] * 4
    assert [one.difference.mean for one in found] == [0, 2, 4, 6]
    assert found[0].config == {"lr": 0.5, "betas": (0.5, 0.25), "mixed": (1, "a")}
    results.plot(to=found[0].config)
    with pytest.raises(ValueError, match="compare: configuration 1 is there twice"):
        Results(configs[:1] * 2, [{"loss": 0.0}] * 2, []).compare(to={})


def test_bad_results() -> None:
    configs = [{"lr": 0.1}, {"lr": 0.2}]
    with pytest.raises(ValueError, match="Results: configuration 1: 'lr' names a setting and a metric"):
        Results(configs, [{"loss": 1.0}, {"lr": 1.0}], [])
    uneven = Results(configs, [{"loss": 1.0}, {"accuracy": 1.0}], [])
    with pytest.raises(ValueError, match="Results: configuration 1 lacks metric 'loss'; it has: accuracy"):
        uneven.best("loss")
    with pytest.raises(ValueError, match="Results: configuration 0 lacks metric 'accuracy'; it has: loss"):
        uneven.compare(to={"lr": 0.1}, metric="accuracy")
    with pytest.raises(ValueError, match="best: mode must be 'max' or 'min', got 'maximum'"):
        made_up({(0.1, 0): 1.0}).best("accuracy", mode="maximum")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            {"to": {"lr": 9.0}, "metric": "accuracy"},
            r"compare: to={'lr': 9.0} fits 0 configurations, it must fit one; have",
        ),
        (
            {"to": {}, "metric": "accuracy"},
            r"compare: to={} fits 2 configurations, it must fit one; have: \[{'lr': 0.1}, ",
        ),
        ({"to": {"lr": 0.1}, "metric": "loss"}, "Results: no metric 'loss'; have: accuracy"),
    ],
)
def test_bad_comparisons(arguments: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        made_up({(0.1, 0): 1.0, (0.2, 0): 2.0}).compare(**arguments)


def test_nan_never_wins() -> None:
    results = made_up({(0.1, 0): math.nan, (0.2, 0): 2.0, (0.3, 0): 3.0, (0.4, 0): math.nan})
    assert results.best("accuracy")["lr"] == 0.3
    assert results.best("accuracy", mode="min")["lr"] == 0.2
    with pytest.raises(ValueError, match="Results: no metric 'loss'; have: accuracy"):
        results.best("loss")


def test_rows_and_csv(tmp_path: Path) -> None:
    configs = grid(lr=[0.1], seed=range(2)) + grid(lr=[0.2], attack=True)
    results = run(linear_experiment(), configs, [], key=KEY)
    assert len(results) == len(list(results)) == 3
    assert repr(results).startswith("Results(3 configurations, metrics: w, total, rows")
    assert list(results[2]) == ["lr", "attack", "w", "total", "rows", "seconds"]
    target = tmp_path / "results.csv"
    results.to_csv(target)
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["lr"] for row in rows] == ["0.1", "0.1", "0.2"]
    assert [row["attack"] for row in rows] == ["", "", "True"]
    assert [float(row["w"]) for row in rows] == [row["w"] for row in results.rows]
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]
    with pytest.raises(OSError, match="No such file"):
        results.to_csv(tmp_path / "nowhere" / "results.csv")


def test_plot(tmp_path: Path) -> None:
    figure = made_up({(lr, seed): lr + seed for lr in (0.1, 0.2) for seed in range(3)}).plot("accuracy", to={"lr": 0.1})
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["lr=0.1", "lr=0.2"]
    assert "accuracy" in axes.get_xlabel()
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    single = made_up({(0.1, 0): 1.0, (0.2, 0): 2.0})  # one seed: no interval
    single.plot("accuracy", to={"lr": 0.1}, labels=["base", "other"]).savefig(tmp_path / "single.png")


def test_a_final_state_trains_on_in_a_loop_of_ones_own() -> None:
    plan = minibatches(DATA, 8, steps=3)
    results = run(dropout_experiment(), grid(lr=[0.01, 0.1], seed=range(2)), plan, key=KEY, eval_data=DATA)
    experiment = dropout_experiment()
    state = results.state(2)
    assert isinstance(state, F.TrainState)
    assert state.step == 3
    after, info = experiment.update({"lr": torch.tensor(0.1)}, state, (DATA[0][:8], DATA[1][:8]))
    assert after.step == 4
    assert info.applied


def test_map_lanes_is_vmap() -> None:
    """tree.map_lanes, on which the eager lanes run, against torch.vmap."""
    trees = [{"b": torch.tensor([1.0, 2.0]) * i, "a": (torch.tensor(i),)} for i in range(3)]

    def function(one: Any, shared: Tensor, nothing: Any) -> Any:
        return {"sum": tree.add(one, one), "shared": shared * 2, "mix": one["b"] * shared}

    inputs = (stack(trees), torch.tensor([3.0, 4.0]), ())
    expected = torch.vmap(function, (0, None, None))(*inputs)
    found = tree.map_lanes(function, (0, None, None), inputs)
    assert_same(found, expected)
    assert_close(lane(found, 2), function(trees[2], *inputs[1:]))
