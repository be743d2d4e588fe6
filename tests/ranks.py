"""Checks that need several ranks: ``python tests/ranks.py checks FOLDER`` runs every one of them in 2 and 4 processes.

The ranks are forked from a process that has imported everything. Each check has a process group of its own, so that one
that fails does not drag the next along; what failed goes to ``FOLDER/<size>/<rank>.json``, a traceback a check.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random as python_random
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.func loads it when it first differentiates, which takes a second
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_close, assert_nonzero, assert_run_close, assert_same, assert_untouched, lane
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from functricks import (
    accumulate,
    adamw,
    adapter,
    chain,
    clip_by_global_norm,
    distributed,
    dynamic_loss_scale,
    experiments,
    fgm,
    functional,
    gradient,
    losses,
    random,
    sgd,
    supervised,
    supervised_carry,
    train_step,
    tree,
)
from functricks.types import Loss

F64 = torch.float64
IGNORED = -100
SIZES = (2, 4)
LIMIT = 120  # seconds after which a rank that hangs says where
AGREE = 1e-12  # relative: the same sums in another order, in float64, over a run

Check = Callable[[int, int], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


# --- a small problem: tokens, some of them ignored, with class weights -----------------------------------------------

CLASS_WEIGHT = torch.tensor([0.3, 1.0, 2.0, 0.7], dtype=F64)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def tokens(seed: int, rows: int = 9) -> tuple[Tensor, Tensor]:
    """Rows of five tokens; row 1 has none that counts, and other rows lack some."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, 12, (rows, 5), generator=generator)
    targets = torch.randint(0, 4, (rows, 5), generator=generator)
    targets[torch.rand(rows, 5, generator=generator) < 0.3] = IGNORED
    targets[1] = IGNORED
    return inputs, targets


def score(logits: Tensor, targets: Tensor) -> Loss:
    return losses.cross_entropy(logits.transpose(1, 2), targets, weight=CLASS_WEIGHT, ignore_index=IGNORED)


def loss_fn(net: nn.Module) -> Callable[..., Any]:
    def of(params: Any, batch: Any) -> Any:
        logits = functional_call(net, params, (batch[0],))
        right = (logits.argmax(2) == batch[1]) & (batch[1] != IGNORED)
        return score(logits, batch[1]), {"right": right.double().sum()}

    return of


def start_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: leaf.detach().clone() for name, leaf in net.named_parameters()}


def assert_agree(actual: Any, expected: Any) -> None:
    assert_close(actual, expected, eps=AGREE / torch.finfo(F64).eps)


def assert_same_on_all_ranks(values: Any) -> None:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    for other in found[1:]:
        assert_same(other, found[0])


# --- gradients -------------------------------------------------------------------------------------------------------


@check
def unequal_ranks_give_the_global_mean(rank: int, size: int) -> None:
    # C02: rank 0 has [1], rank 1 has [4, 4, 4], others nothing: 3.25, where the mean of the means of two is 2.5
    x = torch.tensor([[1.0]] if rank == 0 else [[4.0]] * 3 if rank == 1 else [], dtype=F64).reshape(-1, 1)

    def loss(params: Any, x: Tensor) -> Loss:
        values = (x * params["w"])[:, 0]
        return Loss(values, torch.ones_like(values))

    params = {"w": torch.tensor(1.0, dtype=F64)}
    found = distributed.all_reduce(gradient(loss))(params, x)
    assert_same((found.grads["w"], found.weight), (torch.tensor(3.25, dtype=F64), torch.tensor(4.0, dtype=F64)))
    by_mean = distributed.all_reduce(gradient(lambda params, x: (x * params["w"]).mean()))(params, x)
    assert_same(by_mean.grads["w"], torch.tensor(3.25, dtype=F64))  # NaN on the ranks that have nothing

    module = DistributedDataParallel(nn.Linear(1, 1, bias=False).double())
    with torch.no_grad():
        module.module.weight.fill_(1.0)
    values = module(x)[:, 0]
    mean = distributed.global_mean(Loss(values, torch.ones_like(values)))
    mean.backward()
    assert_same(module.module.weight.grad, torch.tensor([[3.25]], dtype=F64))
    total = mean.detach().clone()
    dist.all_reduce(total)
    assert_same(total / size, torch.tensor(3.25, dtype=F64))
    if size == 2:
        module.zero_grad()
        module(x).mean().backward()
        assert_same(module.module.weight.grad, torch.tensor([[2.5]], dtype=F64))  # what the fault looks like


@check
def ranks_add_up_to_the_whole_batch(rank: int, size: int) -> None:
    net, batch = network(), tokens(1)
    whole_grad_fn = gradient(loss_fn(net), has_metrics=True)
    whole = whole_grad_fn(start_of(net), batch)
    assert_nonzero(whole.grads)
    params, mine = start_of(net), distributed.shard(batch)
    for grad_fn in (
        whole_grad_fn,
        accumulate(whole_grad_fn, 2),
        gradient(loss_fn(net), has_metrics=True, backend="autograd"),
    ):
        with assert_untouched(params, mine):
            found = distributed.all_reduce(grad_fn)(params, mine)
        assert_agree(found._replace(metrics={}), whole._replace(metrics={}))
        assert_same_on_all_ranks(tuple(found))
    # a metric is a mean by weight
    own = whole_grad_fn(params, mine)
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, (own.metrics["right"] * own.weight, own.weight))
    right = sum(part[0] for part in parts) / sum(part[1] for part in parts)
    assert_agree(distributed.all_reduce(whole_grad_fn)(params, mine).metrics["right"], right)


@check
def a_rank_with_nothing_valid_contributes_nothing(rank: int, size: int) -> None:
    net, (inputs, targets) = network(), tokens(2, 8)
    inputs, targets = distributed.shard((inputs, targets))
    if rank == size - 1:
        targets = torch.full_like(targets, IGNORED)
    grad_fn = distributed.all_reduce(gradient(loss_fn(net), has_metrics=True))
    found = grad_fn(start_of(net), (inputs, targets))
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, (inputs, targets))
    whole = tuple(torch.cat([part[i] for part in parts]) for i in range(2))
    assert_agree(found[:3], gradient(loss_fn(net), has_metrics=True)(start_of(net), whole)[:3])
    x = torch.full((0 if rank == size - 1 else 2,), 3.0, dtype=F64)
    of_mean = distributed.all_reduce(gradient(lambda params, x: params["w"] * (x.sum() / len(x))))  # NaN on that rank
    found = of_mean({"w": torch.tensor(1.0, dtype=F64)}, x)
    assert_same((found.loss, found.grads["w"]), (torch.tensor(3.0, dtype=F64),) * 2)
    nothing = grad_fn(start_of(net), (inputs, torch.full_like(targets, IGNORED)))
    assert_same(nothing.grads, tree.zeros_like(start_of(net)))
    assert_same((nothing.loss, nothing.weight), (torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)))


@check
def half_precision_is_summed_in_float32(rank: int, size: int) -> None:
    params = {"w": torch.ones(3, dtype=torch.bfloat16), "v": torch.ones((), dtype=F64)}
    x = torch.full((5 + rank,), 1 + 2.0**-7, dtype=torch.bfloat16)

    def loss(params: Any, x: Tensor) -> Loss:
        values = x.float() * params["w"][0].float() * params["v"]
        return Loss(values, torch.ones_like(values))

    found = distributed.all_reduce(gradient(loss))(params, x)
    assert_same(found.grads["w"], torch.tensor([1 + 2.0**-7, 0, 0], dtype=torch.bfloat16))
    assert found.grads["v"].dtype == F64
    assert float(found.weight) == sum(5 + r for r in range(size))


@check
def perturbation_of_the_whole_batch_or_of_the_rank(rank: int, size: int) -> None:
    net, batch, params = network(), tokens(3), start_of(network())
    plain = gradient(loss_fn(net), has_metrics=True)
    attack = partial(fgm, epsilon=0.3, where="0.*")
    whole = attack(plain)(params, batch)
    mine = distributed.shard(batch)
    assert_agree(attack(distributed.all_reduce(plain))(params, mine)[:3], whole[:3])
    inside = distributed.all_reduce(attack(plain))(params, mine)
    own = attack(plain)(params, mine)
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, (tree.scale(own.grads, own.weight), own.weight))
    total = parts[0][0]
    for grads, _ in parts[1:]:
        total = tree.add(total, grads)
    assert_agree(inside.grads, tree.scale(total, 1 / sum(weight for _, weight in parts)))


@check
def lanes_are_reduced_together(rank: int, size: int) -> None:
    net, params = network(), start_of(network())
    lanes = tree.map(lambda leaf: torch.stack([leaf, 0.5 * leaf, leaf + 0.1]), params)
    grad_fn = distributed.all_reduce(gradient(loss_fn(net), has_metrics=True))
    batch = distributed.shard(tokens(4))
    found = torch.vmap(grad_fn, (0, None))(lanes, batch)
    for i in range(3):
        assert_agree(lane(found, i), grad_fn(lane(lanes, i), batch))


@check
def one_graph_with_the_all_reduce_in_it(rank: int, size: int) -> None:
    if size != SIZES[0]:
        return  # once is enough: it compiles
    grad_fn = distributed.all_reduce(gradient(lambda params, x: (params["w"] * x).square().mean()))
    compiled = torch.compile(grad_fn, fullgraph=True, backend="aot_eager")
    params, x = {"w": torch.tensor(2.0, dtype=F64)}, torch.arange(1.0, 3.0 + rank, dtype=F64)
    assert_agree(compiled(params, x), grad_fn(params, x))


@check
def a_group_of_some_ranks(rank: int, size: int) -> None:
    group = dist.new_group([0, 1])
    if rank < 2:
        batch = distributed.shard(tokens(5), group)
        found = distributed.all_reduce(gradient(loss_fn(network()), has_metrics=True), group)(
            start_of(network()), batch
        )
        assert_agree(found[:3], gradient(loss_fn(network()), has_metrics=True)(start_of(network()), tokens(5))[:3])
    alone = dist.new_group([size - 1])
    if rank == size - 1:
        plain = gradient(loss_fn(network()), has_metrics=True)
        found = distributed.all_reduce(plain, alone)(start_of(network()), tokens(5))
        assert_same(found, plain(start_of(network()), tokens(5)))


@check
def different_leaves_raise_on_every_rank(rank: int, size: int) -> None:
    def loss(params: Any, x: Tensor) -> Any:
        return (params["w"] * x).mean(), {"extra": x.sum()} if rank == 0 else {}

    grad_fn = distributed.all_reduce(gradient(loss, has_metrics=True))
    with pytest.raises(ValueError, match="all_reduce: the ranks have different leaves"):
        grad_fn({"w": torch.tensor(1.0)}, torch.ones(2))
    with pytest.raises(ValueError, match="broadcast: the ranks have different leaves"):
        distributed.broadcast({"w": torch.zeros(2 + rank)})


# --- runs ------------------------------------------------------------------------------------------------------------


def functional_run(steps: int, micro_batches: int) -> dict[str, Tensor]:
    net = network()
    grad_fn = distributed.all_reduce(accumulate(gradient(loss_fn(net), has_metrics=True), micro_batches))
    step = train_step(grad_fn, chain(clip_by_global_norm(0.5, classic=True), adamw(1e-2)))
    state = step.init(start_of(net))
    for i in range(steps):
        state, info = step.update(state, distributed.shard(tokens(i)))
        assert info.applied
    assert_same_on_all_ranks(state)
    return state.params


def ddp_run(steps: int, micro_batches: int) -> dict[str, Tensor]:
    """What a careful practitioner writes, with ``global_mean`` for the mean over tokens."""
    net = network()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for i in range(steps):
        optimizer.zero_grad()
        inputs, targets = distributed.shard(tokens(i))
        weight = CLASS_WEIGHT[targets[targets != IGNORED]].sum()
        parts = list(zip(inputs.tensor_split(micro_batches), targets.tensor_split(micro_batches), strict=True))
        for own in parts[:-1]:
            with model.no_sync():
                distributed.global_mean(score(model(own[0]), own[1]), weight=weight).backward()
        distributed.global_mean(score(model(parts[-1][0]), parts[-1][1]), weight=weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return start_of(net)


@check
def ddp_and_the_pure_form_agree(rank: int, size: int) -> None:
    for micro_batches in (1, 2):
        classic = ddp_run(20, micro_batches)
        assert_run_close(functional_run(20, micro_batches), classic, start_of(network()), AGREE)


@check
def layers_used_in_turn_under_no_sync(rank: int, size: int) -> None:
    # X07: layer a in micro-batch 1 (no_sync), b in 2, inputs rank + 1: the mean on every rank
    model = DistributedDataParallel(Turns().double(), find_unused_parameters=True)
    x = torch.full((1, 1), rank + 1.0, dtype=F64)
    with model.no_sync():
        model(x, "a").sum().backward()
    model(x, "b").sum().backward()
    expected = torch.full((1, 1), (size + 1) / 2, dtype=F64)
    assert_same([layer.weight.grad for layer in (model.module.a, model.module.b)], [expected, expected])

    def loss(params: Any, batch: Any) -> Tensor:
        return params["a"] * batch["a"].sum() + params["b"] * batch["b"].sum()

    params = {name: torch.tensor(1.0, dtype=F64) for name in "ab"}
    batch = {"a": torch.tensor([rank + 1.0, 0.0], dtype=F64), "b": torch.tensor([0.0, rank + 1.0], dtype=F64)}
    found = distributed.all_reduce(accumulate(gradient(loss), 2))(params, batch)
    assert_same(found.grads, {name: torch.tensor((size + 1) / 4, dtype=F64) for name in "ab"})  # mean of two rows


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor, name: str) -> Tensor:
        return getattr(self, name)(x)


@check
def one_bad_rank_skips_the_step_on_all(rank: int, size: int) -> None:
    def loss(params: Any, batch: Tensor) -> Tensor:
        return (params["w"] * batch).square().mean()

    step = train_step(distributed.all_reduce(gradient(loss)), adamw(0.1), loss_scale=dynamic_loss_scale(8.0))
    state = step.init({"w": torch.ones(3)})
    bad = float("nan") if rank == 1 else 1.0
    applied = []
    for x in (1.0 + rank, bad, float("inf") if rank == 0 else 2.0, 3.0):
        before = state
        state, info = step.update(state, torch.full((2 + rank, 3), x))
        applied.append(bool(info.applied))
        if not info.applied:
            assert_same(state._replace(loss_scale=()), before._replace(loss_scale=()))
    assert applied == [True, False, False, True]
    assert float(state.loss_scale.scale) == 2.0
    assert_same_on_all_ranks(state)


@check
def buffers_of_rank_0_are_those_of_ddp(rank: int, size: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model = functional(net)
    loss = supervised(model, lambda outputs, targets: losses.mse_loss(outputs, targets))
    step = train_step(distributed.all_reduce(gradient(loss, has_carry=True, has_metrics=True)), sgd(0.1))
    state = step.init(model.params, supervised_carry(model, random.fold_in(random.key(0), rank)))
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for i in range(4):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(size * i + rank), dtype=F64)
        state, _ = step.update(state, (x, x[:, :2]))
        optimizer.zero_grad()
        F.mse_loss(ddp(x), x[:, :2]).backward()
        optimizer.step()
    assert_agree(state.params, start_of(net))
    if rank == 0:
        assert_agree(state.carry.buffers, dict(net.named_buffers()))
    assert_same_on_all_ranks(distributed.broadcast(state.carry))


@check
def any_tree_is_broadcast(rank: int, size: int) -> None:
    def value(i: int) -> Any:
        return {
            "bf16": torch.full((2, 3), 1.5 + i, dtype=torch.bfloat16),
            "row": (torch.tensor(i), [torch.tensor([i == 0, True]), torch.zeros(0)]),
            "f64": torch.full((2,), i + 0.1, dtype=F64).expand(3, 2),
            "f16": nn.Parameter(torch.full((4,), i + 0.5, dtype=torch.float16)),
            "nothing": (),
        }

    mine = value(rank)
    with assert_untouched(mine):
        found = distributed.broadcast(mine)
    assert_same(tree.map(Tensor.detach, found), tree.map(Tensor.detach, value(0)))


# --- data ------------------------------------------------------------------------------------------------------------


@check
def uneven_numbers_of_batches(rank: int, size: int) -> None:
    # X08: rank r has r + 1 batches; the divisor follows the ranks that still have data
    def loss(params: Any, x: Tensor, carry: Any) -> Any:
        return Loss((params["w"] * x).square(), torch.ones_like(x)), carry + 1

    step = train_step(distributed.all_reduce(gradient(loss, has_carry=True)), sgd(0.1))
    start = {"w": torch.tensor(1.0, dtype=F64)}
    batches = [[torch.full((1 + r,), 0.1 * (1 + r + i), dtype=F64) for i in range(r + 1)] for r in range(size)]
    state = step.init(start, torch.tensor(0))
    seen = []
    for batch in distributed.join(iter(batches[rank])):
        seen.append(isinstance(batch, distributed.Idle))
        state, info = step.update(state, batch)
        alive = [r for r in range(size) if len(batches[r]) >= len(seen)]
        assert float(info.weight) == sum(1 + r for r in alive)
    assert seen == [False] * (rank + 1) + [True] * (size - 1 - rank)
    assert int(state.carry) == rank + 1  # an idle batch leaves the carry alone

    alone = train_step(gradient(loss, has_carry=True), sgd(0.1))
    expected = alone.init(start, torch.tensor(0))
    for i in range(size):
        together = torch.cat([own[i] for own in batches if i < len(own)])
        expected, _ = alone.update(expected, together)
    assert_run_close(state.params, expected.params, start, AGREE)


@check
def a_rank_without_any_batch(rank: int, size: int) -> None:
    mine = [torch.ones(2)] * (0 if rank == 0 else 2)
    with pytest.raises(ValueError, match=r"join: 1 of the ranks have no batch at all.* join\(like=\)"):
        list(distributed.join(mine))
    found = list(distributed.join(mine, like=torch.zeros(3)))
    assert [isinstance(batch, distributed.Idle) for batch in found] == [rank == 0] * 2
    assert list(distributed.join([])) == []


@check
def samplers_split_the_rows(rank: int, size: int) -> None:
    mine = distributed.ShardedSampler(11, seed=3)
    alone = random.permutation(random.fold_in(random.key(3), 5), 11).tolist()
    mine.set_epoch(5)
    every: list[Any] = [None] * size
    dist.all_gather_object(every, list(mine))
    assert [len(rows) for rows in every] == [len(range(r, 11, size)) for r in range(size)]
    for i in range(11):  # in turn: the same rows in a step for any number of ranks
        assert every[i % size][i // size] == alone[i]
    assert len(mine) == len(list(mine))
    whole = list(mine)
    mine.set_epoch(5, start=2)
    assert list(mine) == whole[2:]
    mine.set_epoch(6)
    assert list(mine) != whole
    assert list(distributed.ShardedSampler(11, shuffle=False)) == list(range(11))[rank::size]


# --- experiments -----------------------------------------------------------------------------------------------------


def descent() -> experiments.Experiment:
    def loss(config: Any, params: Any, x: Tensor) -> Tensor:
        return (params["w"] * x - config["target"]).square().mean()

    def update(config: Any, state: Any, x: Tensor) -> Any:
        step = train_step(gradient(partial(loss, config)), adamw(config["lr"]))
        return step.update(state, x)

    def init(config: Any, key: Tensor) -> Any:
        step = train_step(gradient(partial(loss, config)), adamw(config["lr"]))
        return step.init({"w": random.normal(key, (2,)).double()})

    def evaluate(config: Any, state: Any, x: Tensor) -> dict[str, Tensor]:
        floats = torch.tensor(float(config["lr"].is_floating_point() and config["target"].is_floating_point()))
        return {"loss": loss(config, state.params, x), "floats": floats}

    return experiments.Experiment(init, update, evaluate)


@check
def experiments_are_shared_out(rank: int, size: int) -> None:
    data = torch.linspace(0.5, 2, 24, dtype=F64).reshape(12, 2)
    configs = experiments.grid(lr=[0.1, 1], target=[0, 0.5], seed=range(3), kind=["a", "b"])
    plan = experiments.minibatches(data, 4, epochs=2, order="per-lane")
    options = {"key": random.key(7), "eval_data": data, "eval_every": 2}
    alone = experiments.run(descent(), configs, plan, **options)
    found = distributed.run(descent(), configs, plan, **options)
    if rank != 0:
        assert found is None
        return
    assert found is not None
    assert found.configs == alone.configs == configs
    assert [[row[name] for name in ("config", "step")] for row in found.history] == [
        [row[name] for name in ("config", "step")] for row in alone.history
    ]
    # lanes fall into other chunks: the same operations, but for how a kernel sums
    for ours, theirs in ((found.rows, alone.rows), (found.history, alone.history)):
        assert_agree(
            torch.tensor([row["loss"] for row in ours]).double(), torch.tensor([row["loss"] for row in theirs]).double()
        )
    for i in range(len(configs)):
        assert_agree(found.state(i), alone.state(i))
    assert all(row["seconds"] > 0 for row in found)
    assert all(row["floats"] == 1 for row in found)  # an int among floats is one in every share


@check
def fewer_configurations_than_ranks(rank: int, size: int) -> None:
    configs = experiments.grid(lr=0.1, target=0.5)
    found = distributed.run(descent(), configs, [torch.ones(2, dtype=F64)], key=random.key(0), eval_data=torch.ones(2))
    assert (found is not None and len(found) == 1) if rank == 0 else found is None
    with pytest.raises(ValueError, match="run: no configurations"):
        distributed.run(descent(), [], [], key=random.key(0))


# --- starting ranks --------------------------------------------------------------------------------------------------


def main(rank: int, size: int, folder: Path) -> None:
    problems = {}
    for name, function in CHECKS.items():
        store = f"file://{folder}/{name}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
        try:
            function(rank, size)
        except BaseException:
            problems[name] = traceback.format_exc()
        finally:
            dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(problems))


def doomed(rank: int, size: int, folder: Path) -> None:
    """Train and save; rank 1 dies in the middle, unless the folder says that it has."""
    with distributed.init(timeout=20) as place:
        assert (place.rank, place.size, place.local, place.device) == (rank, size, rank, torch.device("cpu"))
        net = network()
        grad_fn = distributed.all_reduce(gradient(loss_fn(net), has_metrics=True))
        step = train_step(grad_fn, adamw(1e-2))
        state = step.init(start_of(net))
        if any(folder.glob("step-*")):
            state = adapter.load_checkpoint(folder, state)
        while int(state.step) < 8:
            if rank == 1 and int(state.step) == 4 and not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state, _ = step.update(state, distributed.shard(tokens(int(state.step))))
            if rank == 0:
                adapter.save_checkpoint(folder, state)


def forked(size: int, function: Callable[[int, int, Path], None], folder: Path) -> list[int]:
    """Run a function in ``size`` ranks; return their exit codes, negative for a signal."""
    port = str(python_random.SystemRandom().randrange(20000, 30000))
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            try:
                function(rank, size, folder)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def every_check(folder: Path) -> dict[str, list[int]]:
    codes = {}
    for size in SIZES:
        own = folder / str(size)
        own.mkdir()
        codes[str(size)] = forked(size, main, own)
    return codes


def killed_and_resumed(folder: Path) -> dict[str, list[int]]:
    """A run in which a rank dies, the same run again, and a whole one."""
    killed, whole = folder / "killed", folder / "whole"
    killed.mkdir()
    whole.mkdir()
    (whole / "died").touch()  # it will not
    return {name: forked(3, doomed, place) for name, place in (("killed", killed), ("again", killed), ("whole", whole))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    chosen = {"checks": every_check, "killed": killed_and_resumed}[sys.argv[1]]
    sys.stdout.write(json.dumps(chosen(Path(sys.argv[2]))))
