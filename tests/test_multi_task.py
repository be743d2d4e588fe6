"""Several tasks: fixed and learned weights, masked tasks, conflicts, and the same numbers as one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import LiveBytes, assert_close, assert_nonzero, assert_same, lane, stack
from torch import Tensor

from functricks import Loss, accumulate, gradient, losses, multi_task, random, sgd, train_step, tree


def regression(name: str, power: int = 1) -> Any:
    """One head a task on a shared trunk."""

    def loss_fn(params: Any, batch: Any) -> Any:
        error = (torch.tanh(batch["x"] @ params["trunk"]) @ params[name] - batch[name]).abs() ** (power + 1)
        mask = batch.get(f"{name}_mask", torch.ones_like(error))
        return Loss(error * mask, mask), {"error": Loss(error.sqrt() * mask, mask).mean()}

    return loss_fn


def problem(dtype: torch.dtype = torch.float64, seed: int = 0, rows: int = 8) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    params = {"trunk": draw(3, 4), "a": draw(4), "b": draw(4), "s": {"a": draw(), "b": draw()}}
    return params, {"x": draw(rows, 3), "a": draw(rows), "b": draw(rows)}


TASKS = {name: gradient(regression(name, power), has_metrics=True) for name, power in (("a", 1), ("b", 2))}


def whole(weights: Any) -> Any:
    """The same as one loss and one graph."""

    def loss_fn(params: Any, batch: Any) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name, power in (("a", 1), ("b", 2)):
            loss = regression(name, power)(params, batch)[0].mean()
            s = params["s"][name]
            total = total + (torch.exp(-s) * loss + s if weights is None else weights[name] * loss)
        return total

    return gradient(loss_fn)


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 0.3, "b": 2.0}, {"a": 0.0, "b": 1.0}])
def test_fixed_weights_are_one_graph_s_numbers(weights: Any) -> None:
    params, batch = problem()
    found, expected = multi_task(TASKS, weights)(params, batch), whole(weights)(params, batch)
    assert_nonzero(expected.grads["trunk"])
    assert_close(found.grads, expected.grads)
    assert_close(found.loss, expected.loss)
    assert list(found.metrics) == ["a.loss", "a.weighted_loss", "a.error", "b.loss", "b.weighted_loss", "b.error"]
    assert_close(found.metrics["b.weighted_loss"], found.metrics["b.loss"] * weights["b"])


def test_default_weighs_one_each() -> None:
    params, batch = problem()
    assert_same(multi_task(TASKS)(params, batch).grads, multi_task(TASKS, {"a": 1.0, "b": 1.0})(params, batch).grads)


def test_learned_weights_are_one_graph_s_numbers() -> None:
    params, batch = problem()
    found, expected = multi_task(TASKS, "s")(params, batch), whole(None)(params, batch)
    assert_nonzero(expected.grads)
    assert_close(found.grads, expected.grads)
    assert_close(found.loss, expected.loss)


def test_c15_log_variances() -> None:
    """A negative total is fine; the gradient of s is 1 - exp(-s) L, and its root is s = log L."""
    losses = {"a": 0.01, "b": 4.0}
    tasks = {name: gradient(lambda params, x, value=value: params["w"] * value) for name, value in losses.items()}
    grad_fn = multi_task(tasks, "s")
    params = {"w": torch.tensor(1.0), "s": {"a": torch.tensor(-4.0), "b": torch.tensor(1.0)}}
    found = grad_fn(params, ())
    assert found.loss.item() == pytest.approx(-0.9825008, abs=1e-6)
    assert [found.grads["s"][name].item() for name in losses] == pytest.approx([0.4540185, -0.4715178], abs=1e-6)
    params["s"] = {name: torch.tensor(value).log() for name, value in losses.items()}
    best = grad_fn(params, ())
    assert [best.grads["s"][name].item() for name in losses] == pytest.approx([0, 0], abs=1e-6)
    assert best.loss.item() == pytest.approx(-1.2188759, abs=1e-6)


def test_log_variances_train_to_the_log_of_the_loss() -> None:
    tasks = {
        name: gradient(lambda params, x, value=value: torch.tensor(value)) for name, value in (("a", 0.5), ("b", 3.0))
    }
    step = train_step(multi_task(tasks, "s"), sgd(0.2))
    state = step.init({"s": {"a": torch.tensor(0.0), "b": torch.tensor(0.0)}})
    for _ in range(200):
        state, _ = step.update(state, ())
    assert_close(state.params["s"], {"a": torch.tensor(0.5).log(), "b": torch.tensor(3.0).log()}, 64)  # at its limit


@pytest.mark.parametrize("weights", [None, "s", {"a": 1.0, "b": 0.5}])
@pytest.mark.parametrize("conflicts", ["keep", "project"])
def test_a_masked_task_pushes_nothing(weights: Any, conflicts: Any) -> None:
    params, batch = problem()
    masked = multi_task(TASKS, weights, conflicts=conflicts)(params, {**batch, "b_mask": torch.zeros(8).double()})
    one = "s" if weights == "s" else weights and {"a": weights["a"]}
    alone = multi_task({"a": TASKS["a"]}, one, conflicts=conflicts)(params, batch)
    assert_close(masked.grads, alone.grads)
    assert_close(masked.loss, alone.loss)
    assert masked.grads["s"]["b"].item() == 0
    assert masked.metrics["b.weighted_loss"].item() == 0


@pytest.mark.parametrize("conflicts", ["keep", "project"])
def test_a_task_of_no_weight_pushes_nothing_though_it_has_a_numerator(conflicts: Any) -> None:
    """Smoothed rows of a class of weight 0; in one lane only."""
    class_weight = torch.tensor([0.0, 1.0])

    def classify(params: Any, labels: Tensor) -> Loss:
        return losses.cross_entropy(params["w"].expand(2, 2), labels, weight=class_weight, label_smoothing=0.2)

    tasks = {"a": gradient(classify), "b": gradient(lambda params, labels: params["w"].square().mean())}
    params, labels = {"w": torch.tensor([1.0, -2.0])}, torch.tensor([[0, 0], [0, 1]])
    assert_nonzero(gradient(classify)(params, labels[0]).grads)
    alone = multi_task({"b": tasks["b"]})(params, labels[0]).grads
    run = multi_task(tasks, conflicts=conflicts)
    assert_close(run(params, labels[0]).grads, alone)
    lanes = torch.vmap(lambda labels: run(params, labels).grads)(labels)
    assert_close(lane(lanes, 0), alone)
    assert_close(lane(lanes, 1), run(params, labels[1]).grads)
    assert not torch.allclose(lanes["w"][1], alone["w"])


# --- conflicts -------------------------------------------------------------------------------------------------------


def pcgrad(grads: list[Tensor], order: list[list[int]]) -> Tensor:
    """The paper's algorithm 1, on vectors."""
    total = torch.zeros_like(grads[0])
    for i, own in enumerate(grads):
        g = own.clone()
        for j in order[i]:
            if j != i and g @ grads[j] < 0:
                g = g - (g @ grads[j]) / (grads[j] @ grads[j]) * grads[j]
        total += g
    return total


def linear_tasks(count: int, size: int, seed: int) -> tuple[Any, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    slopes = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(count)]
    tasks = {
        str(i): gradient(lambda p, x, slope=slope: p["u"] @ slope[:2] + p["v"] @ slope[2:])
        for i, slope in enumerate(slopes)
    }
    return tasks, slopes


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_project_is_pcgrad(seed: int) -> None:
    tasks, slopes = linear_tasks(4, 6, seed)
    params = {"u": torch.zeros(2, dtype=torch.float64), "v": torch.zeros(4, dtype=torch.float64)}
    found = multi_task(tasks, conflicts="project")(params, ()).grads
    expected = pcgrad(slopes, [list(range(4))] * 4)
    assert_close(torch.cat([found["u"], found["v"]]), expected, 64)  # coefficients from a Gram matrix, then one sum
    assert not torch.allclose(expected, sum(slopes))  # there were conflicts


def test_project_draws_its_order_from_a_key() -> None:
    tasks, slopes = linear_tasks(4, 6, 0)
    params = {"u": torch.zeros(2, dtype=torch.float64), "v": torch.zeros(4, dtype=torch.float64)}
    key = random.key(3)
    order = [random.permutation(random.fold_in(key, i), 4).tolist() for i in range(4)]
    found = multi_task(tasks, conflicts="project", key=key)(params, ()).grads
    assert_close(torch.cat([found["u"], found["v"]]), pcgrad(slopes, order), 64)  # as above
    drawn = multi_task(tasks, conflicts="project", key=lambda carry: tuple(random.split(carry).unbind()))(
        params, (), key
    )
    assert not torch.equal(drawn.carry, key)


def test_project_without_conflict_is_the_sum() -> None:
    tasks = {
        name: gradient(lambda p, x, k=k: (p * torch.tensor([1.0, k])).sum()) for name, k in (("a", 1.0), ("b", 2.0))
    }
    assert_close(multi_task(tasks, conflicts="project")(torch.ones(2), ()).grads, torch.tensor([2.0, 3.0]))


def test_project_of_opposite_and_zero_gradients() -> None:
    tasks = {name: gradient(lambda p, x, k=k: (p * k).sum()) for name, k in (("a", 1.0), ("b", -1.0), ("c", 0.0))}
    assert_same(multi_task(tasks, conflicts="project")(torch.ones(2), ()).grads, torch.zeros(2))


# --- the laws --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conflicts", ["keep", "project"])
def test_vmap_over_weights_equals_the_loop(conflicts: Any) -> None:
    lanes = [problem(torch.float32, seed)[0] for seed in range(3)]
    batch = problem(torch.float32)[1]
    weights = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)

    def run(params: Any, weight: Tensor) -> Any:
        return tuple(multi_task(TASKS, {"a": 1.0, "b": weight}, conflicts=conflicts)(params, batch))

    with torch.no_grad():
        found = torch.vmap(run)(stack(lanes), weights)
    for index, params in enumerate(lanes):
        assert_close(
            lane(found, index), run(params, weights[index]), 32
        )  # batched matrix products sum in another order


def test_compiles_and_differentiates() -> None:
    params, batch = problem()

    def run(params: Any, weight: Tensor) -> Any:
        return multi_task(TASKS, {"a": 1.0, "b": weight}, conflicts="project", key=random.key(0))(params, batch).grads

    weight = torch.tensor(0.7, dtype=torch.float64)
    assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(params, weight), run(params, weight), 32)

    def size(weight: Tensor) -> Tensor:
        return tree.norm(run(params, weight))

    slope = torch.func.grad(size)(weight)
    assert slope.item() == pytest.approx(((size(weight + 1e-6) - size(weight - 1e-6)) / 2e-6).item(), rel=1e-6)


def test_inside_and_around_accumulate() -> None:
    params, batch = problem()
    expected = whole({"a": 1.0, "b": 0.5})(params, batch)
    inside = multi_task({name: accumulate(task, 3) for name, task in TASKS.items()}, {"a": 1.0, "b": 0.5})
    around = accumulate(multi_task(TASKS, {"a": 1.0, "b": 0.5}), 3)
    for grad_fn in (inside, around):
        assert_close(grad_fn(params, batch).grads, expected.grads)


def test_inside_accumulate_is_exact_where_tasks_weigh_differently() -> None:
    params, batch = problem()
    batch = {**batch, "b_mask": torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0]).double()}
    expected = whole(None)(params, batch)
    found = multi_task({name: accumulate(task, micro_batch_size=2) for name, task in TASKS.items()}, "s")(params, batch)
    assert_close(found.grads, expected.grads)
    assert_close(found.loss, expected.loss)


@pytest.mark.parametrize("conflicts", ["keep", "project"])
@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_one_graph_is_alive_at_a_time(backend: Any, conflicts: Any) -> None:
    """Four tasks take the memory of one, where their sum takes that of four."""

    def deep(params: Tensor, x: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.tanh(x * params)
        return x.square().mean()

    def peak(grad_fn: Any) -> int:
        x, params = torch.randn(512, 64), torch.ones(64)
        with LiveBytes() as live:
            grad_fn(params, x)
        return live.peak

    one = gradient(deep, backend=backend)
    together = gradient(lambda params, x: sum(deep(params, x) for _ in range(4)), backend=backend)
    assert peak(together) > 3 * peak(one)  # the measure sees the graphs
    assert peak(multi_task(dict.fromkeys("abcd", one), conflicts=conflicts)) < 1.1 * peak(one)


def test_carry_goes_from_task_to_task() -> None:
    tasks = {
        name: gradient(lambda p, x, carry, digit=digit: (p * 1.0, carry * 10 + digit), has_carry=True)
        for digit, name in enumerate("abc", 1)
    }
    assert multi_task(tasks)(torch.tensor(1.0), (), torch.tensor(0)).carry.item() == 123


def test_half_precision_keeps_dtypes() -> None:
    params, batch = problem(torch.bfloat16)
    found = multi_task(TASKS, "s")(params, batch)
    assert {leaf.dtype for leaf in tree.leaves(found.grads)} == {torch.bfloat16}
    assert found.loss.dtype == torch.float32
    s = params["s"]["a"].float()
    one = gradient(regression("a"), has_metrics=True)(params, batch)
    assert_close(found.metrics["a.weighted_loss"], one.loss * torch.exp(-s) + s)  # the exponential is not rounded


def test_a_task_s_own_loss_does_not_replace_what_is_reported() -> None:
    grad_fn = gradient(lambda params, x: (params * x, {"loss": torch.tensor(9.0), "error": x}), has_metrics=True)
    found = multi_task({"a": grad_fn}, {"a": 2.0})(torch.tensor(1.0), torch.tensor(3.0))
    assert {name: value.item() for name, value in found.metrics.items()} == {
        "a.loss": 3,
        "a.weighted_loss": 6,
        "a.error": 3,
    }


def test_conflicts_of_complex_gradients_are_those_of_their_parts() -> None:
    aims = {"a": (1.0, 2.0), "b": (-3.0, 1.0)}
    whole = {n: gradient(lambda p, _, z=complex(*z): (p["z"] - z).abs().square()) for n, z in aims.items()}
    parts = {
        n: gradient(lambda p, _, x=x, y=y: (p["x"] - x).square() + (p["y"] - y).square()) for n, (x, y) in aims.items()
    }
    found = multi_task(whole, conflicts="project")({"z": torch.tensor(0.1 + 0.2j)}, ()).grads["z"]
    expected = multi_task(parts, conflicts="project")({"x": torch.tensor(0.1), "y": torch.tensor(0.2)}, ()).grads
    assert_nonzero(expected)
    assert_close(torch.view_as_real(found), torch.stack([expected["x"], expected["y"]]))


def test_errors() -> None:
    params, batch = problem()
    with pytest.raises(ValueError, match="multi_task: needs at least one task"):
        multi_task({})
    with pytest.raises(ValueError, match=r"weights are for \['a', 'c'\], tasks are \['a', 'b'\]"):
        multi_task(TASKS, {"a": 1.0, "c": 1.0})
    with pytest.raises(ValueError, match="conflicts must be 'keep' or 'project', got 'drop'"):
        multi_task(TASKS, conflicts="drop")
    with pytest.raises(ValueError, match=r"no log-variance at 'sigma\.a' in the parameters; have: trunk"):
        multi_task(TASKS, "sigma")(params, batch)
    with pytest.raises(ValueError, match=r"the log-variance at 's\.a' must be 0-d, got shape \(1,\)"):
        multi_task(TASKS, "s")({**params, "s": {"a": torch.zeros(1), "b": torch.zeros(1)}}, batch)
    with pytest.raises(ValueError, match=r"weights\['a'\] must be a 0-d tensor, got shape \(2,\)"):
        multi_task(TASKS, {"a": torch.ones(2), "b": 1.0})
    with pytest.raises(TypeError, match=r"weights\['a'\] must be a number"):
        multi_task(TASKS, {"a": "much", "b": 1.0})
