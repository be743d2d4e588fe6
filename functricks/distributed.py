"""Several processes: gradients averaged over ranks, each by its weight, and experiments shared out over ranks.

One process a device, started by ``torchrun``; every rank computes the gradient of its own rows, one all-reduce sums
them, and every rank takes the same step for itself. Nothing is sent out again afterwards: equal parameters and equal
gradients stay equal. ::

    from functricks import distributed

    with distributed.init() as rank:                              # torchrun --nproc-per-node 2 train.py
        step = train_step(distributed.all_reduce(gradient(loss_fn)), adamw(1e-3))
        state = step.init(distributed.broadcast(params))          # every rank starts from rank 0's values
        for batch in batches:                                     # the same batches on every rank, of which
            state, info = step.update(state, distributed.shard(batch))  # each takes its own rows

**The mean is the mean over tokens, not over ranks.** ``DistributedDataParallel`` divides the sum of the ranks'
gradients by their number, so that a rank with one token counts as much as one with a thousand. :func:`all_reduce` sums
numerators and weights and divides once: ranks add up to the whole batch as micro-batches do in
:func:`functricks.accumulate`, and the result does not depend on how rows fall on ranks. A DDP-wrapped module gets the
same numbers with :func:`global_mean` as its loss.

**How processes share the work.** All of these are data parallel: each device has the whole model, and a part of the
batch.

- *All-reduce* (``DistributedDataParallel``, and this module): every rank ends up with the sum and steps by itself. Rank
  0 sends its parameters once, at the start (DDP also its buffers, before each forward pass), and no gradients ever. A
  ring of N ranks sends 2 (N - 1) / N times the gradient's bytes per rank, nearly constant in N, while its latency grows
  with N.
- *Parameter server*: servers hold the parameters, workers pull them and push gradients. It can be synchronous, or
  asynchronous, when a gradient may be that of older parameters. The servers' links carry traffic that grows with N.
- ``nn.DataParallel``: one process and one thread a GPU. At every forward pass it copies the module to each GPU and
  scatters the batch, gathers the outputs on the first GPU, and sums the gradients there: the threads share one
  interpreter lock, the first GPU holds more than the others, and it ends at one machine. What the copies write into
  buffers is lost but for the first's. Use DDP, also on one machine; modules wrapped in ``nn.DataParallel`` work with
  the rest of this package all the same.

**BatchNorm and keys.** A carry stays with its rank. Under DDP, rank 0's buffers replace the others' before each forward
pass, which in training never reads the running statistics: rank 0's buffers are the same as here, so evaluate and save
those of rank 0, or make them equal by ``broadcast(buffers)``. Give each rank its own random key, by
``random.fold_in(key, rank.rank)``, unless all are to draw the same dropout masks.

**When a rank dies**, the others' next collective raises, at the latest after ``init(timeout=)`` (with nccl, torch ends
the process then); the run ends, and starts again from its last checkpoint
(:func:`functricks.adapter.save_checkpoint`). ``torchrun --max-restarts`` does that by itself.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.utils.data import Sampler

from functricks import experiments, random, tree
from functricks.experiments.configs import Config
from functricks.experiments.configs import group as grouped
from functricks.experiments.running import Progress
from functricks.gradients._accumulation import added, divided
from functricks.types import Batch, Carry, GradFn, Gradient, Loss, Number, Params, weight_of

__all__ = [
    "Idle",
    "Rank",
    "ShardedSampler",
    "all_reduce",
    "broadcast",
    "global_mean",
    "init",
    "join",
    "run",
    "shard",
]

Group = Any  # a process group of torch.distributed; None is the default one


# --- processes -------------------------------------------------------------------------------------------------------


class Rank(NamedTuple):
    """This process among all: its number, how many there are, its number on this machine, and its device."""

    rank: int
    size: int
    local: int
    device: torch.device


@contextmanager
def init(backend: str | None = None, *, timeout: float = 300.0) -> Iterator[Rank]:
    """Join the processes that ``torchrun`` started, and leave them at the end.

    Classic: ``init_process_group``, ``set_device(int(os.environ["LOCAL_RANK"]))``, ``destroy_process_group``. The
    device follows the *local* rank: the rank itself counts over all machines.

    Args:
        backend: of torch.distributed; by default gloo for CPU tensors, and nccl for CUDA tensors where there are GPUs.
        timeout: seconds after which a collective whose other ranks do not come raises.

    Without ``torchrun`` (no ``RANK`` in the environment) this is rank 0 of 1, and no process group is made.

    Raises ``ValueError`` for a timeout that is not positive, and where there are fewer GPUs than local ranks.

    >>> with init() as rank:
    ...     rank.rank, rank.size
    (0, 1)
    """
    if not timeout > 0:
        raise ValueError(f"init: timeout must be positive, got {timeout!r}")
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = _device(local)
    if "RANK" not in os.environ:
        yield Rank(0, 1, local, device)
        return
    backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    limit = timedelta(seconds=timeout)
    store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
    # torchrun keeps its store when it restarts the ranks: without a prefix they may find addresses of the dead ones
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    try:
        yield Rank(rank, size, local, device)
    finally:
        dist.destroy_process_group()


def _device(local: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local >= torch.cuda.device_count():
        raise ValueError(
            f"init: local rank {local} has no GPU, there are {torch.cuda.device_count()}; start fewer processes with "
            "torchrun --nproc-per-node"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _place(group: Group) -> tuple[int, int]:
    """Return the rank in the group, and its size; (0, 1) without torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _flag_device(group: Group) -> torch.device:
    """Return a device whose tensors the group can send."""
    only_cuda = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if only_cuda else torch.device("cpu")


@contextmanager
def _together(what: str, group: Group) -> Iterator[None]:
    """Say in one sentence what happened when another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        rank, size = _place(group)
        reason = re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0]).split(". ")[0]  # without the place in gloo
        raise RuntimeError(
            f"{what}: rank {rank} of {size} lost another rank, or waited for one too long ({reason}); end this run and "
            "start it again from its last checkpoint"
        ) from error


# --- gradients -------------------------------------------------------------------------------------------------------


class Idle(NamedTuple):
    """A batch that only keeps step: :func:`all_reduce` gives it no weight, and leaves the carry alone."""

    batch: Batch


def all_reduce(grad_fn: GradFn, group: Group = None) -> GradFn:
    r"""Average a gradient over all ranks, each rank by its weight.

    .. math:: g = \frac{\sum_r w_r g_r}{\sum_r w_r}

    with :math:`w_r` the weight of rank *r* (its valid tokens, class weights, ...): the gradient of the whole batch,
    however its rows fall on ranks. ``loss`` and ``metrics`` are averaged alike, ``weight`` is the sum: every rank gets
    the same bits, and so :func:`functricks.train_step` decides the same on every rank. A non-finite gradient on one
    rank is non-finite on all, and all skip.

    Classic: ``DistributedDataParallel``, which averages over ranks instead of tokens; see :func:`global_mean`.
    Reference: the fault is described in https://github.com/pytorch/pytorch/issues/67253.

    Args:
        grad_fn: the gradient function of this rank's batch; wrappers go inside (``all_reduce(accumulate(fgm(...)))``,
            one all-reduce a step; each rank then perturbs by its own gradient, as FGM under DDP with ``no_sync`` does)
            or outside (``fgm(all_reduce(...))``, one an evaluation; the perturbation of the whole batch).
        group: a process group; by default the group of all ranks.

    A rank without weight contributes nothing, be its gradient NaN (the mean of an empty batch). Where no rank has
    weight, gradient and loss are zero. Sums are float32 or wider; there is one all-reduce a dtype, so one in all as a
    rule; lanes of a ``vmap`` go together. The carry (buffers, key) is the rank's own. Without a process group, or in
    one of a single rank, ``grad_fn``'s result is returned as it is.

    Raises ``ValueError`` on every rank when the first gradients of the ranks differ in names, shapes or dtypes
    (metrics that only one rank computes), and ``RuntimeError`` when another rank is gone.

    >>> from functricks import gradient
    >>> grad_fn = all_reduce(gradient(lambda params, x: (params["w"] * x).mean()))  # alone: nothing to add
    >>> grad_fn({"w": torch.tensor(1.0)}, torch.tensor([1.0, 4.0, 4.0])).grads["w"]
    tensor(3.)
    """
    checked = False

    def reduced(params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        nonlocal checked
        idle = isinstance(batch, Idle)
        found = grad_fn(params, batch.batch if idle else batch, carry, scale=scale)
        if _place(group)[1] == 1 and not idle:
            return found
        sums = added(None, _without_nonsense(found))
        if idle:
            sums = tree.zeros_like(sums)
        if _place(group)[1] > 1:
            if not checked and not torch.compiler.is_compiling():
                _check_same("all_reduce", sums, group)
                checked = True
            leaves, structure = tree.flatten(sums)
            sums = tree.unflatten(structure, _summed("all_reduce", leaves, group))
        return divided(sums, params, carry if idle else found.carry)

    return reduced


def _without_nonsense(found: Gradient) -> Gradient:
    """Where nothing has weight, what is not finite is the mean of nothing, and counts as zero."""
    nothing = found.weight == 0

    def kept(leaf: Tensor) -> Tensor:
        return torch.where(nothing, leaf.nan_to_num(0.0, 0.0, 0.0), leaf)

    grads, loss = tree.map(kept, (found.grads, found.loss))
    return found._replace(grads=grads, loss=loss)


def _summed(what: str, tensors: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Sum each tensor over the ranks: one all-reduce a dtype and device. Lanes of a ``vmap`` are summed together."""
    if torch.compiler.is_compiling():
        return _summed_plain(list(tensors), group)
    level = tree.lanes()
    below = [tree.below_lanes(tensor) for tensor in tensors]
    with tree.outside_lanes(), _together(what, group):
        summed = _summed_plain([tensor for tensor, _ in below], group)
    return [
        tree.above_lanes(tensor, level) if laned and level is not None else tensor
        for tensor, (_, laned) in zip(summed, below, strict=True)
    ]


def _summed_plain(tensors: list[Tensor], group: Group) -> list[Tensor]:
    summed = list(tensors)
    for where in _alike(tensors):
        flat = torch.cat([tensors[i].reshape(-1) for i in where])
        dist.all_reduce(flat, group=group)
        for i, part in zip(where, torch.split(flat, [tensors[i].numel() for i in where]), strict=True):
            summed[i] = part.reshape(tensors[i].shape)
    return summed


def _alike(tensors: list[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors, grouped by dtype and device."""
    found: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        found.setdefault((tensor.dtype, tensor.device), []).append(i)
    return list(found.values())


def _check_same(what: str, whole: Any, group: Group) -> None:
    """Raise on every rank unless all have the same leaves: unequal buffers would hang, or add up to nonsense."""
    leaves = {path: (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in tree.named_leaves(whole).items()}
    number = zlib.crc32(repr(leaves).encode())
    with tree.outside_lanes(), _together(what, group):
        extremes = torch.tensor([number, -number], device=_flag_device(group))
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    high, low = extremes.tolist()
    if high != -low:
        raise ValueError(
            f"{what}: the ranks have different leaves (names, shapes or dtypes); every rank must have the same, "
            f"rank {_place(group)[0]} has: {', '.join(leaves)}"
        )


def global_mean(loss: Loss, group: Group = None, *, weight: Tensor | None = None) -> Tensor:
    r"""Return what a DDP-wrapped module must differentiate for the gradient of the mean over all ranks.

    .. math:: \frac{R \sum_i v_i}{\sum_r w_r}

    on each of *R* ranks. DDP divides the sum of the ranks' gradients by *R*, which leaves the gradient of the mean over
    all elements. The mean of the ranks' returned values is that mean.

    Classic: ``local_sum * world_size / global_count``.
    Reference: https://github.com/pytorch/pytorch/issues/67253.

    Args:
        loss: of this rank's batch, from :mod:`functricks.losses`.
        group: the process group of the DDP module.
        weight: 0-d; this rank's weight of the whole window where ``loss`` is one of its micro-batches, of which all but
            the last are differentiated under ``no_sync``.

    The weights are summed by one all-reduce a call. Where no rank has weight, the sum counts instead of the mean.

    >>> from functricks.types import Loss
    >>> global_mean(Loss(torch.tensor([1.0, 6.0]), torch.tensor([1.0, 3.0])))
    tensor(1.7500)
    """
    own = (weight_of(loss) if weight is None else weight).detach()
    size = _place(group)[1]
    total = _summed("global_mean", [own], group)[0] if size > 1 else own
    numerator = loss.values.sum(dtype=torch.promote_types(loss.values.dtype, torch.float32))
    return numerator * size / torch.where(total == 0, 1, total).to(numerator.dtype)


def broadcast(values: Any, group: Group = None) -> Any:
    """Return rank 0's values of a pytree of tensors on every rank, bit for bit.

    Classic: what ``DistributedDataParallel`` does with parameters and buffers when it wraps a module.

    Raises ``ValueError`` on every rank unless all have the same paths, shapes and dtypes.

    >>> broadcast({"w": torch.tensor(1.0)})
    {'w': tensor(1.)}
    """
    if _place(group)[1] == 1:
        return values
    _check_same("broadcast", values, group)
    leaves, structure = tree.flatten(values)
    found = list(leaves)
    with torch.no_grad(), _together("broadcast", group):
        for where in _alike(leaves):
            flat = torch.cat([leaves[i].detach().reshape(-1) for i in where])
            dist.broadcast(flat, group=group, group_src=0)
            for i, part in zip(where, torch.split(flat, [leaves[i].numel() for i in where]), strict=True):
                found[i] = part.reshape(leaves[i].shape)
    return tree.unflatten(structure, found)


# --- data ------------------------------------------------------------------------------------------------------------


def shard(batch: Batch, group: Group = None) -> Batch:
    """Return this rank's rows of a batch that all ranks have: every R-th row, from the rank's own number on.

    When there are fewer rows than ranks, some ranks have none, and :func:`all_reduce` lets them contribute nothing. 0-d
    leaves go to every rank.

    >>> shard({"x": torch.arange(3)})  # alone
    {'x': tensor([0, 1, 2])}
    """
    rank, size = _place(group)
    return tree.map(lambda leaf: leaf[rank::size] if leaf.ndim else leaf, batch)


def join(batches: Iterable[Batch], group: Group = None, *, like: Batch | None = None) -> Iterator[Batch | Idle]:
    """Yield batches until every rank is done: a rank that has run out goes on with ``Idle(its last batch)``.

    Without it, ranks with fewer batches leave the others waiting in a collective that never ends.
    :func:`all_reduce` gives an idle batch no weight, so the divisor follows the ranks that still have data.

    Classic: ``torch.distributed.algorithms.join.Join``.
    Reference: https://github.com/pytorch/pytorch/issues/38174.

    Args:
        batches: this rank's batches.
        group: a process group.
        like: a batch for a rank that may have none at all.

    One all-reduce of a single number a batch.

    Raises ``ValueError`` on every rank when one has no batch and others do, unless it has ``like``.

    >>> list(join([torch.tensor(1), torch.tensor(2)]))
    [tensor(1), tensor(2)]
    """
    if _place(group)[1] == 1:
        yield from batches
        return
    missing = "{} of the ranks have no batch at all, nothing to keep step with; give them join(like=)"
    for batch, ended in in_step("join", batches, group, missing, last=_NOTHING if like is None else like):
        yield Idle(batch) if ended else batch


_NOTHING: Any = object()


def in_step(
    what: str,
    batches: Iterable[Batch],
    group: Group,
    missing: str,
    *,
    device: torch.device | None = None,
    last: Batch = _NOTHING,
) -> Iterator[tuple[Batch, bool]]:
    """Yield ``(batch, whether this rank has run out and it is its last one again)`` until all ranks have run out.

    Args:
        what: the caller's name, for errors.
        batches: this rank's.
        group: a process group.
        missing: the error where ranks, ``{}`` of them, have no batch while others do.
        device: one whose tensors the group can send; found out by default.
        last: stands for the last batch of a rank that has none.
    """
    iterator = iter(batches)
    while True:
        batch = next(iterator, _NOTHING)
        last = last if batch is _NOTHING else batch
        going, lost = _counts([batch is not _NOTHING, last is _NOTHING], group, what, device)
        if not going:
            return
        if lost:
            raise ValueError(f"{what}: {missing.format(lost)}")
        yield last, batch is _NOTHING


def _counts(flags: list[bool], group: Group, what: str = "join", device: torch.device | None = None) -> list[int]:
    """Return on how many ranks each flag is set."""
    with _together(what, group):
        counts = torch.tensor(flags, dtype=torch.int64, device=device or _flag_device(group))
        dist.all_reduce(counts, group=group)
    found: list[int] = counts.tolist()
    return found


class ShardedSampler(Sampler[int]):
    """Shuffle the rows of a data set by a key, and give each rank its own: for a ``DataLoader``.

    The order of an epoch is a function of seed and epoch alone, and ranks take its rows in turn, so that the batches of
    all ranks together hold the same rows for any number of ranks, at equal size in all. Nothing is repeated: with
    left-over rows, some ranks have one more (:func:`join`).

    Classic: ``torch.utils.data.DistributedSampler``, which repeats rows to even the ranks out, and cannot resume.

    Args:
        length: how many rows the data set has.
        seed: of the key.
        shuffle: or the rows in their order.
        group: a process group.

    Call ``set_epoch(epoch)`` before every epoch, or each has the same order. To resume in the middle, tell it how many
    rows of this rank the epoch has used: ``set_epoch(epoch, start=steps_done * batch_size)``. So the sampler's position
    is the step counter, which is in the checkpoint, and a loader that reads ahead does no harm.

    >>> sampler = ShardedSampler(6, seed=0)
    >>> whole = list(sampler)
    >>> sampler.set_epoch(0, start=2)
    >>> list(sampler) == whole[2:], len(sampler)
    (True, 4)
    """

    def __init__(self, length: int, *, seed: int = 0, shuffle: bool = True, group: Group = None) -> None:
        if length < 1:
            raise ValueError(f"ShardedSampler: length must be >= 1, got {length!r}")
        self.length, self.shuffle = length, shuffle
        self.key = random.key(seed)
        self.rank, self.size = _place(group)
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Go to an epoch; ``start`` is how many of this rank's rows it has used."""
        if epoch < 0 or start < 0:
            raise ValueError(f"set_epoch: epoch and start must be >= 0, got {epoch!r} and {start!r}")
        self.epoch, self.start = epoch, start

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            rows: list[int] = list(range(self.length))
        else:
            rows = random.permutation(random.fold_in(self.key, self.epoch), self.length).tolist()
        return iter(rows[self.rank :: self.size][self.start :])

    def __len__(self) -> int:
        return max(0, len(range(self.rank, self.length, self.size)) - self.start)


# --- experiments -----------------------------------------------------------------------------------------------------


def run(
    experiment: experiments.Experiment,
    configs: Sequence[Config],
    batches: experiments.Minibatches | Iterable[Batch],
    *,
    key: Tensor,
    eval_data: Any = (),
    eval_every: int | None = None,
    chunk_size: int | Literal["auto"] = "auto",
    compile: bool = False,
    backend: Literal["vmap", "loop"] = "vmap",
    progress: bool | Callable[[int, int], None] = False,
    group: Group = None,
) -> experiments.Results | None:
    """Do what :func:`functricks.experiments.run` does, with the configurations shared out over the ranks.

    Rank 0 returns the :class:`~functricks.experiments.Results` of all, in the order of ``configs``; the others None.
    The key of a configuration comes from its seed, so the numbers do not depend on how many ranks there are. Ranks get
    neighbouring configurations, which tend to share a program. Without a process group this is ``experiments.run``.

    Arguments are those of ``experiments.run``, the same on every rank; ``group`` is a process group. ``progress`` shows
    rank 0's share. Final states arrive on the CPU, by pickle, so their types must be importable.

    >>> from functricks import experiments
    >>> descend = experiments.Experiment(
    ...     init=lambda config, key: torch.tensor(1.0),
    ...     update=lambda config, w, batch: (w - config["lr"] * 2 * w, ()),
    ...     evaluate=lambda config, w, data: {"loss": w * w},
    ... )
    >>> results = run(descend, experiments.grid(lr=[0.1, 0.5]), [torch.zeros(1)] * 2, key=random.key(0))
    >>> [round(row["loss"], 4) for row in results]
    [0.4096, 0.0]
    """
    rank, size = _place(group)

    def share(own: Sequence[Config], progress: bool | Progress) -> experiments.Results:
        return experiments.run(
            experiment,
            own,
            batches,
            key=key,
            eval_data=eval_data,
            eval_every=eval_every,
            chunk_size=chunk_size,
            compile=compile,
            backend=backend,
            progress=progress,
        )

    if size == 1 or not configs:  # no configurations: the error of experiments.run
        return share(configs, progress)
    first, end = len(configs) * rank // size, len(configs) * (rank + 1) // size
    own = _as_in_the_whole(configs)[first:end]
    found = share(own, progress if rank == 0 else False) if own else experiments.Results([], [], [])
    parts: list[Any] | None = [None] * size if rank == 0 else None
    with _together("run", group):
        dist.gather_object(_portable(found, first), parts, group=group, group_dst=0)
    if parts is None:
        return None
    metrics, states, history = ([row for part in parts for row in part[i]] for i in range(3))
    return experiments.Results(configs, metrics, states, history)


def _as_in_the_whole(configs: Sequence[Config]) -> list[Config]:
    """Turn ints into floats where another rank's share makes their column one of floats."""
    found = [dict(config) for config in configs]
    for one in grouped(configs):
        for name, column in one.numbers.items():
            for index in one.indices:
                if column.is_floating_point() and not isinstance(found[index][name], Tensor):
                    found[index][name] = float(found[index][name])
    return found


def _portable(results: experiments.Results, first: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Return a rank's metrics, states on the CPU, and history, whose indices count from ``first``."""
    moved: dict[int, Any] = {}  # lanes of a chunk share their stacked states
    for states, _ in results._states:
        if id(states) not in moved:
            moved[id(states)] = tree.map(lambda leaf: leaf.detach().cpu(), states)
    own = [(moved[id(states)], lane) for states, lane in results._states]
    return results.metrics, own, [{**row, "config": row["config"] + first} for row in results.history]
