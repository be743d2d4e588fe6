"""Loop, FGM and PGD under DistributedDataParallel: several processes are one process with the whole batch.

All checks run in one set of gloo processes, because starting them takes most of the time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from helpers import assert_nonzero, assert_same
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import functricks as ft
from functricks import losses
from functricks.adapter import FGM, PGD, Loop

WORLD = 2
IGNORED = -100
TOLERANCE = 1e-12  # float64, relative to the largest entry: the ranks' sums are in another order
Batch = Any


class Tagger(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 5)
        self.hidden = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 9 if tied else 3)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.hidden(self.embedding(tokens)))
        return self.head(x).transpose(1, 2)


def token_loss(model: nn.Module, batch: Batch) -> ft.Loss:
    return losses.cross_entropy(model(batch[0]), batch[1])


def batch_of(seed: int, rows: int, ignored: float = 0.3) -> Batch:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (rows, 3), generator=g)
    labels[torch.rand(rows, 3, generator=g) < ignored] = IGNORED
    return torch.randint(9, (rows, 3), generator=g), labels


def share_of(rank: int, steps: int, ignored: float = 0.3) -> list[Batch]:
    """What one rank sees: unlike numbers of rows and tokens."""
    return [batch_of(100 * rank + step, 2 + 2 * rank + step % 2, ignored) for step in range(steps)]


def everything(steps: int, *, ignored: float = 0.3) -> list[Batch]:
    """What one process sees that does it all."""
    columns = [share_of(rank, steps, ignored) for rank in range(WORLD)]
    return [tuple(torch.cat(leaves) for leaves in zip(*parts, strict=True)) for parts in zip(*columns, strict=True)]


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


def agree(actual: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor] | None = None) -> None:
    for name, want in expected.items():
        gap = (actual[name] - want).abs().max().item()
        assert gap <= TOLERANCE * want.abs().max().item(), f"{name}: off by {gap}"
        if start is not None:
            assert not torch.equal(want, start[name]), f"{name} did not move"


def replicas_are_equal(model: nn.Module) -> None:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    found = [torch.empty_like(flat) for _ in range(WORLD)]
    dist.all_gather(found, flat)
    assert all(torch.equal(found[0], other) for other in found)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), 0.5, momentum=0.9)


def wrapped(tied: bool = False, *, bucket_view: bool = False, unused: bool = False) -> DDP:
    model = Tagger(tied)
    if not unused:
        del model.norm
    return DDP(model, gradient_as_bucket_view=bucket_view, find_unused_parameters=unused)


def alone(tied: bool = False) -> Tagger:
    model = Tagger(tied)
    del model.norm
    return model


def counted(calls: list[int], bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotation that is a string
    calls.append(1)
    return dist.all_reduce(bucket.buffer() / WORLD, async_op=True).get_future().then(lambda done: done.value()[0])


counted.__annotations__.clear()


# --- the checks ------------------------------------------------------------------------------------------------------


def mean_of_rank_means_is_not_the_mean(rank: int) -> None:
    """C02."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    replica = DDP(model)
    x = torch.tensor([[1.0]] if rank == 0 else [[4.0]] * 3, dtype=torch.float64)
    loop = Loop(replica, lambda model, x: model(x).mean(), SGD(model.parameters(), 1.0))
    info = loop.step(x)
    assert model.weight.grad.item() == 3.25
    assert (info.loss.item(), info.weight.item(), info.grad_norm.item()) == (3.25, 4.0, 3.25)


def accumulation_synchronises_once_a_window(rank: int) -> None:
    for bucket_view in (False, True):
        replica, single = wrapped(bucket_view=bucket_view), alone()
        start, calls = values(single), list[int]()

        replica.register_comm_hook(calls, counted)
        ours = Loop(replica, token_loss, sgd(replica), accumulate=3, clip=0.5)
        want = Loop(single, token_loss, sgd(single), accumulate=3, clip=0.5)
        for mine, all_of_it in zip(share_of(rank, 6), everything(6), strict=True):
            info, other = ours.step(mine), want.step(all_of_it)
        assert len(calls) == 2  # one bucket, two windows
        agree(values(replica), values(single), start)
        agree({"loss": info.loss, "norm": info.grad_norm}, {"loss": other.loss, "norm": other.grad_norm})
        assert info.weight.item() == other.weight.item()
        replicas_are_equal(replica)


def a_rank_with_nothing_valid(rank: int) -> None:
    replica, single = wrapped(), alone()
    start = values(single)
    mine = [(x, y if rank == 0 else torch.full_like(y, IGNORED)) for x, y in share_of(rank, 3)]
    ours, want = Loop(replica, token_loss, sgd(replica)), Loop(single, token_loss, sgd(single))
    for one, only in zip(mine, share_of(0, 3), strict=True):
        ours.step(one)
        want.step(only)
    agree(values(replica), values(single), start)
    # and nothing on any rank: no NaN
    before = values(replica)
    plain = Loop(replica, token_loss, SGD(replica.parameters(), 0.5))
    x, y = mine[0]
    info = plain.step((x, torch.full_like(y, IGNORED)))
    assert (info.loss.item(), info.weight.item(), info.grad_norm.item()) == (0.0, 0.0, 0.0)
    assert_same(values(replica), before)


def attacks_agree_with_one_process(rank: int) -> None:
    kinds: list[Callable[[nn.Module], Any]] = [
        lambda model: FGM(model, 0.5, "embedding.*"),
        lambda model: PGD(model, 0.5, ["embedding.weight", "hidden.bias"], steps=3),
    ]
    for make in kinds:
        for tied, bucket_view in ((False, True), (True, False)):
            replica, single = wrapped(tied, bucket_view=bucket_view), alone(tied)
            start = values(single)
            ours = Loop(replica, token_loss, sgd(replica), accumulate=2, adversarial=make(replica), ema=0.5)
            want = Loop(single, token_loss, sgd(single), accumulate=2, adversarial=make(single), ema=0.5)
            infos = list(ours.epoch(share_of(rank, 5)))  # one is left over
            others = list(want.epoch(everything(5)))
            assert len(infos) == len(others) == 3
            agree(values(replica), values(single), start)
            agree(values(ours.ema), values(want.ema))
            for info, other in zip(infos, others, strict=True):
                agree(info.metrics, other.metrics)
                assert info.metrics["adversarial_loss"] > info.loss
            replicas_are_equal(replica)


def a_classic_attack_by_hand_keeps_replicas_equal(rank: int) -> None:
    replica, single = wrapped(), alone()
    start = values(single)
    for model, data in ((replica, share_of(rank, 4, 0.0)), (single, everything(4, ignored=0.0))):
        attack, optimizer = PGD(model, 0.5, "embedding.*"), AdamW(model.parameters(), 1e-2)
        for tokens, labels in data:
            rows = len(tokens) * WORLD / sum(2 + 2 * other + (len(tokens) % 2) for other in range(WORLD))

            def loss(model: Any = model, tokens: Any = tokens, labels: Any = labels, rows: float = rows) -> Tensor:
                mean = F.cross_entropy(model(tokens), labels)
                return mean * rows if isinstance(model, DDP) else mean

            optimizer.zero_grad()
            loss().backward()
            with attack.attacked() as rounds:
                for _ in rounds:
                    loss().backward()
            optimizer.step()
    agree(values(replica), values(single), start)
    replicas_are_equal(replica)


def left_overs_and_unused_parameters(rank: int) -> None:
    """A window that ends early is averaged by hand; a parameter that no rank uses keeps having no gradient."""
    replica, single = wrapped(unused=True), alone()
    start = values(single)
    ours = Loop(replica, token_loss, sgd(replica), accumulate=4)
    want = Loop(single, token_loss, sgd(single), accumulate=4)
    assert len(list(ours.epoch(share_of(rank, 6)))) == len(list(want.epoch(everything(6)))) == 2
    agree(values(replica), values(single), start)
    assert replica.module.norm.weight.grad is None or not replica.module.norm.weight.grad.any()
    replicas_are_equal(replica)


def layers_that_only_some_micro_batches_use(rank: int) -> None:
    """X07: layer a in the first micro-batch, which is not synchronised, layer b in the second."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "ab"}).double()

        def forward(self, name: str, x: Tensor) -> Tensor:
            y: Tensor = self.layers[name](x)
            return y

    replica = DDP(Two(), find_unused_parameters=True)

    def loss_fn(model: nn.Module, batch: Batch) -> ft.Loss:
        name, x = batch
        return ft.Loss(model(name, x), torch.full_like(x, 0.5))

    loop = Loop(replica, loss_fn, SGD(replica.parameters(), 0.0), accumulate=2)
    x = torch.tensor([[rank + 1.0]], dtype=torch.float64)
    loop.step(("a", x))
    info = loop.step(("b", x))
    assert info.weight.item() == 2.0  # half for each of two micro-batches on two ranks
    assert [p.grad.item() for p in replica.parameters()] == [1.5, 1.5]


def unlike_numbers_of_batches(rank: int) -> None:
    lengths = (5, 2)
    mine = share_of(rank, lengths[rank])
    shares = [share_of(other, lengths[other]) for other in range(WORLD)]
    merged = [
        tuple(torch.cat(leaves) for leaves in zip(*[s[i] for s in shares if i < len(s)], strict=True)) for i in range(5)
    ]
    for stream in (lambda data: data, iter):
        replica, single = wrapped(), alone()
        start = values(single)
        kinds = [FGM(model, 0.5, "embedding.*") for model in (replica, single)]
        ours = Loop(replica, token_loss, sgd(replica), accumulate=2, adversarial=kinds[0])
        want = Loop(single, token_loss, sgd(single), accumulate=2, adversarial=kinds[1])
        infos = list(ours.epoch(stream(mine)))
        others = list(want.epoch(merged))
        assert len(infos) == len(others) == 3
        agree(values(replica), values(single), start)
        agree({"loss": infos[-1].loss}, {"loss": others[-1].loss})
        replicas_are_equal(replica)
        found, expected = ours.evaluate(mine), want.evaluate(merged)
        assert math.isclose(found["loss"], expected["loss"], rel_tol=TOLERANCE)
        assert math.isclose(ours.evaluate(mine if rank == 0 else [])["loss"], want.evaluate(shares[0])["loss"])
    with pytest.raises(ValueError, match=r"Loop.epoch: a rank has no batch at all; give every rank at least one"):
        list(ours.epoch(mine if rank == 0 else []))


def one_bad_rank_skips_the_step_on_all(rank: int) -> None:
    replica = wrapped()
    before = values(replica)
    optimizer = sgd(replica)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def loss_fn(model: nn.Module, batch: Batch) -> ft.Loss:
        loss = token_loss(model, batch)
        return loss._replace(values=loss.values * (math.inf if rank == 1 and bad else 1.0))

    loop = Loop(replica, loss_fn, optimizer, scheduler=StepLR(optimizer, 1, 0.5), scaler=scaler)
    bad = True
    info = loop.step(share_of(rank, 1)[0])
    assert not bool(info.applied)
    assert_same(values(replica), before)
    assert (scaler.get_scale(), optimizer.param_groups[0]["lr"]) == (2.0, 0.5)
    bad = False
    assert bool(loop.step(share_of(rank, 1)[0]).applied)
    assert optimizer.param_groups[0]["lr"] == 0.25
    replicas_are_equal(replica)


def a_state_loads_with_and_without_ranks(rank: int) -> None:
    replica, single = wrapped(), alone()
    ours = Loop(replica, token_loss, sgd(replica), accumulate=2)
    for batch in share_of(rank, 2):
        ours.step(batch)
    state = copy.deepcopy(ours.state_dict())
    want = Loop(single, token_loss, sgd(single), accumulate=2)
    want.load_state_dict(state)
    assert_same(values(single), values(replica))
    other = wrapped()
    again = Loop(other, token_loss, sgd(other), accumulate=2)
    again.load_state_dict(want.state_dict())
    assert_nonzero(*[s["momentum_buffer"] for s in again.optimizer.state.values()])
    for batch in share_of(rank, 2):
        again.step(batch)
        ours.step(batch)
    assert_same(values(other), values(replica))


CHECKS = [
    mean_of_rank_means_is_not_the_mean,
    accumulation_synchronises_once_a_window,
    a_rank_with_nothing_valid,
    attacks_agree_with_one_process,
    a_classic_attack_by_hand_keeps_replicas_equal,
    left_overs_and_unused_parameters,
    layers_that_only_some_micro_batches_use,
    unlike_numbers_of_batches,
    one_bad_rank_skips_the_step_on_all,
    a_state_loads_with_and_without_ranks,
]


# with four processes: what has no numbers for two in it
FEW = [accumulation_synchronises_once_a_window, a_rank_with_nothing_valid, attacks_agree_with_one_process]


def work(rank: int, folder: str, world: int, checks: list[Callable[[int], None]]) -> None:
    global WORLD
    WORLD = world
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        for check in checks:
            check(rank)
            dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("world", "checks"), [(2, CHECKS), (4, FEW)], ids=["two", "four"])
def test_processes_are_one_with_the_whole_batch(
    world: int, checks: list[Callable[[int], None]], tmp_path: Path
) -> None:
    mp.spawn(work, (str(tmp_path), world, checks), nprocs=world)
