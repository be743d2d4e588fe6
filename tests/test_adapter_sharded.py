"""adapter.Optimizer on the DTensor parameters of FSDP2 (``fully_shard``): two processes end where one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing, nn

import functricks
from functricks import adapter, schedules

MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "kernel": lambda model: adapter.Optimizer(model.named_parameters(), functricks.adamw, lr=0.01),
    "chain": lambda model: adapter.Optimizer(
        model.named_parameters(), functricks.chain(functricks.clip_by_global_norm(0.1), functricks.adamw(0.01))
    ),
    "lion": lambda model: adapter.Optimizer(model.named_parameters(), functricks.lion, lr=0.01),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    scheduler = adapter.Scheduler(optimizer, schedules.exponential_decay(0.01, gamma=0.9))
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        scheduler.step()


def sharded(rank: int, rendezvous: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, make in MAKERS.items():
        whole, model = network(), network()
        train(whole, make(whole))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = make(model)
        train(model, optimizer)
        for parameter, expected, start in zip(
            model.parameters(), whole.parameters(), network().parameters(), strict=True
        ):
            assert isinstance(parameter, DTensor), name
            assert all(isinstance(leaf, DTensor) for leaf in optimizer.state[parameter].values() if leaf.ndim), name
            assert not torch.equal(expected, start), name
            torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-5, atol=1e-7)  # norms add otherwise
        again = make(model)
        again.load_state_dict(optimizer.state_dict())
        again.step()
    distributed.destroy_process_group()


@pytest.mark.slow  # starts two processes
def test_two_processes_with_sharded_parameters_end_where_one_does(tmp_path: Path) -> None:
    multiprocessing.spawn(sharded, (str(tmp_path / "rendezvous"),), nprocs=2)
