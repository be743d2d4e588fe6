"""Two ranks: ``DistributedDataParallel`` with a loss divided by all ranks' tokens, against ``distributed.all_reduce``.

Left to itself, DDP averages the means of the ranks, which is wrong as soon as their tokens differ; the classic version
here divides each rank's sum by the tokens of all, and multiplies by the number of ranks, which DDP divides by. The two
processes start once, and then run every version.
"""

from __future__ import annotations

import atexit
import io
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from functricks import accumulate, adamw, chain, clip_by_global_norm, distributed, gradient, losses
from parity import tasks
from parity.harness import Run, Technique, classic_loop, functional_loop
from parity.tasks import IGNORED, Batch, Task

LR = 3e-3
RANKS = 2
Version = Callable[[Task], Run]


# --- starting processes ----------------------------------------------------------------------------------------------


@cache
def processes() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(RANKS, mp_context=get_context("spawn"))
    atexit.register(pool.shutdown)
    return pool


def in_ranks(version: Version, task: Task) -> Run:
    """Run a version in every rank; return what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        found = [processes().submit(one_rank, version, packed(task), folder, rank) for rank in range(RANKS)]
        results = [future.result(timeout=120) for future in found]
    run: Run = unpacked(results[0])
    return run


def one_rank(version: Version, task: bytes, folder: str, rank: int) -> bytes:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        return packed(version(unpacked(task)))
    finally:
        dist.destroy_process_group()


def packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)  # from our own process


# --- the two versions, as a rank runs them ---------------------------------------------------------------------------


def ddp(micro_batches: int, task: Task) -> Run:
    wrapped: list[DistributedDataParallel] = []

    def make_optimizer(model: nn.Module) -> AdamW:
        wrapped.append(DistributedDataParallel(model))
        return AdamW(model.parameters(), LR)

    def backward(model: nn.Module, batch: Batch) -> None:
        inputs, targets = distributed.shard(batch)
        tokens = (targets != IGNORED).sum()
        dist.all_reduce(tokens)
        parts = zip(inputs.tensor_split(micro_batches), targets.tensor_split(micro_batches), strict=True)
        for number, (rows, labels) in enumerate(parts, 1):
            with nullcontext() if number == micro_batches else wrapped[0].no_sync():
                (F.cross_entropy(wrapped[0](rows), labels, reduction="sum") * RANKS / tokens).backward()

    def ready(model: nn.Module) -> bool:
        clip_grad_norm_(model.parameters(), 0.3)
        return True

    return classic_loop(task, make_optimizer, backward, ready=ready)


def pure(micro_batches: int, task: Task) -> Run:
    loss_fn = task.loss_fn(lambda net, batch: losses.cross_entropy(net(batch[0]), batch[1]))
    reduced = distributed.all_reduce(accumulate(gradient(loss_fn), micro_batches))

    def grad_fn(params: Any, batch: Batch, carry: Any = (), *, scale: Any = None) -> Any:
        return reduced(params, distributed.shard(batch), carry, scale=scale)

    return functional_loop(task, grad_fn, chain(clip_by_global_norm(0.3, classic=True), adamw(LR)))


def technique(name: str, micro_batches: int) -> Technique:
    return Technique(
        name,
        partial(in_ranks, partial(ddp, micro_batches)),
        partial(in_ranks, partial(pure, micro_batches)),
        tasks.tokens,
    )


TECHNIQUES = [technique("all_reduce, two ranks", 1), technique("all_reduce around accumulate, two ranks", 3)]
