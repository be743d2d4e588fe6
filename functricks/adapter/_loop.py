"""The classic training loop with its usual tricks, each in its right place, as one readable class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from functricks import tree
from functricks.adapter._attacks import FGM, PGD, Attack, unwrapped
from functricks.distributed import in_step
from functricks.gradients._answers import mean_and_weight
from functricks.transforms.base import check_integer, check_number
from functricks.types import Batch, Loss, StepInfo, Transform

__all__ = ["Loop"]

LossOf = Callable[[nn.Module, Batch], Any]
Leftover = Literal["flush", "drop", "carry"]


class _Found(NamedTuple):
    """A loss function's answer: the mean loss, ready for ``backward``, what it weighs, and the metrics."""

    mean: Tensor
    weight: Tensor
    metrics: dict[str, Tensor]


@dataclass
class _Window:
    """What the micro-batches since the last update add up to; their gradients are in ``.grad``."""

    micro_batches: int = 0
    reference: Tensor | None = None  # the weight by which those gradients are divided so far
    sums: dict[str, Tensor] = field(default_factory=dict)  # of loss and metrics, each times its weight
    weight: Tensor | None = None

    def add(self, found: _Found) -> None:
        none = found.weight == 0  # a metric over nothing is NaN, and counts for nothing
        parts = {"loss": found.mean.detach() * torch.where(none, 1, found.weight)}
        parts |= {f"metrics.{name}": torch.where(none, 0, x) * found.weight for name, x in found.metrics.items()}
        self.sums = {name: self.sums.get(name, 0) + value for name, value in parts.items()}
        self.weight = found.weight if self.weight is None else self.weight + found.weight
        self.micro_batches += 1


class Loop:
    r"""Run the steps of a classic training loop, with accumulation, mixed precision, attacks, clipping and averaging.

    An update, over a window of ``accumulate`` micro-batches with the numerators :math:`v` and weights :math:`w` of
    their losses, on all ranks, is

    .. math:: g = \frac{\sum_k \nabla \sum_i v_{ki}}{\sum_k \sum_i w_{ki}}

    and then: unscale, finite check, clip, ``optimizer.step()``, ``scheduler.step()``, average; where the gradient is
    not finite none of them, but the scaler backs off.

    Classic: ``zero_grad``, ``autocast``, ``scaler.scale(loss / k).backward()``, attack, restore, ``unscale_``,
    ``clip_grad_norm_``, ``scaler.step``, ``scaler.update``, ``scheduler.step``; the same numbers, to the bit with
    ``accumulate=1``. Functional: :func:`functricks.train_step` around :func:`functricks.accumulate`.

    Args:
        model: an ``nn.Module``, also wrapped by DistributedDataParallel, DataParallel or ``torch.compile``.
        loss_fn: ``(model, batch) -> loss``, a :class:`functricks.Loss` or a 0-d tensor, which counts as the mean over
            the batch's leading axis. Only a ``Loss`` is exact where parts of a batch hold unlike numbers of tokens.
        optimizer: any ``torch.optim.Optimizer``; its parameters are clipped and checked.
        scheduler: anything with ``step()``; called after updates that were applied, and no others.
        accumulate: how many calls of :meth:`step` make an update.
        clip: the largest norm of the gradient, as :func:`torch.nn.utils.clip_grad_norm_` has it; or a transform such as
            :func:`functricks.clip_by_value`.
        autocast: the dtype of a :class:`torch.autocast` region around the loss.
        scaler: a :class:`torch.amp.GradScaler`, for float16.
        adversarial: an :class:`FGM` or :class:`PGD` of this model, which attacks every micro-batch by its own gradient.
        ema: the decay of an exponential moving average of the parameters, or a
            :class:`torch.optim.swa_utils.AveragedModel`; it is ``loop.ema``.
        skip_nonfinite: False applies every update, as a bare PyTorch loop does without a scaler.
        has_metrics: ``loss_fn`` returns ``(loss, metrics)``, with metrics a dict of 0-d tensors.

    Under DDP, gradients are averaged once a window (``no_sync`` before that), by the weights of all ranks together: a
    rank without a valid target contributes nothing, and every rank may have its own number of tokens. With
    ``adversarial`` the clean gradients are averaged for every micro-batch, because all ranks must attack in one
    direction.

    A micro-batch whose loss raises takes its window with it: parameters are as before, gradients are cleared.

    >>> from functricks import losses
    >>> model = nn.Linear(1, 1)
    >>> _ = nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    >>> loss_fn = lambda model, batch: losses.mse_loss(model(batch[0]), batch[1])
    >>> loop = Loop(model, loss_fn, torch.optim.SGD(model.parameters(), 0.5), accumulate=2)
    >>> [bool(loop.step((torch.ones(rows, 1), torch.ones(rows, 1))).applied) for rows in (1, 3)]
    [False, True]
    >>> model.weight.item(), model.bias.item()
    (1.0, 1.0)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossOf,
        optimizer: Optimizer,
        *,
        scheduler: Any = None,
        accumulate: int = 1,
        clip: float | Transform | None = None,
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        adversarial: FGM | PGD | None = None,
        ema: float | AveragedModel | None = None,
        skip_nonfinite: bool = True,
        has_metrics: bool = False,
    ) -> None:
        check_integer("Loop: accumulate", accumulate, 1)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError("Loop: a plateau scheduler needs a metric; step it yourself, with what evaluate() returns")
        if adversarial is not None and not isinstance(adversarial, Attack):
            raise TypeError(f"Loop: adversarial must be an adapter.FGM or adapter.PGD, got {adversarial!r}")
        if adversarial is not None and unwrapped(adversarial.model) is not unwrapped(model):
            raise ValueError("Loop: adversarial attacks another model; make it of the one that the loop trains")
        given: Any = clip
        if callable(given):
            raise TypeError(f"Loop: clip must be a number or a transform, as of clip_by_value(1), got {clip!r}")
        if clip is not None and not isinstance(clip, Transform):
            check_number("Loop: clip", clip, minimum=0.0)
        self.model, self.loss_fn, self.optimizer, self.scheduler = model, loss_fn, optimizer, scheduler
        self.accumulate, self.clip, self.autocast, self.scaler = accumulate, clip, autocast, scaler
        self.adversarial, self.ema = adversarial, _average(ema, model)
        self.skip_nonfinite, self.has_metrics = skip_nonfinite, has_metrics
        self.updates = 0
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._window = _Window()
        self._clip_state: Any = None

    @property
    def pending(self) -> int:
        """How many micro-batches wait for their update."""
        return self._window.micro_batches

    def step(self, batch: Batch) -> StepInfo:
        """Take one micro-batch; every ``accumulate``-th call updates the parameters.

        Returns what happened: for an update, its mean loss and weight over the window and all ranks, the norm of the
        gradient before clipping, and whether it was applied; in between, the loss and weight of this micro-batch, a
        norm of NaN, and ``applied`` False. With ``adversarial``, ``metrics["adversarial_loss"]`` is the loss under
        attack, ``loss`` the clean one.
        """
        return self._step(batch)

    def flush(self) -> StepInfo | None:
        """Update with the micro-batches left over, divided by what they really weigh; None where there are none.

        Call it at the end of an epoch, on every rank; :meth:`epoch` does.
        """
        if not self.pending:
            return None
        self._average_gradients()
        return self._update()

    def epoch(
        self, batches: Iterable[Batch], *, progress: bool = False, leftover: Leftover = "flush"
    ) -> Iterator[StepInfo]:
        """Step through the batches, update with those left over, and yield the report of every update.

        Ranks may have unlike numbers of batches: one that has run out takes part with a weight of zero, by its last
        batch, until all have (which moves BatchNorm's statistics once more, and fails on a rank without any batch).

        Args:
            batches: a DataLoader, say; remember ``sampler.set_epoch``.
            progress: show a bar, by ``rich``.
            leftover: what becomes of a last window that is not full: ``"flush"`` updates with it, divided by what it
                really weighs; ``"drop"`` forgets it; ``"carry"`` goes on with it in the next epoch.

        >>> model = nn.Linear(1, 1)
        >>> loop = Loop(model, lambda model, x: model(x).mean(), torch.optim.SGD(model.parameters(), 0.1), accumulate=2)
        >>> len(list(loop.epoch([torch.ones(2, 1)] * 5)))
        3
        """
        if leftover not in ("flush", "drop", "carry"):
            raise ValueError(f"Loop.epoch: leftover must be 'flush', 'drop' or 'carry', got {leftover!r}")
        shown = _with_bar(batches) if progress else batches
        for batch, blank in self._until_all_have_ended(batches, shown):
            info = self._step(batch, blank=blank)
            if not self.pending:
                yield info
        if leftover == "drop":
            self.reset()
        left = self.flush() if leftover == "flush" else None
        if left is not None:
            yield left

    def reset(self) -> None:
        """Forget the micro-batches of an unfinished window, and clear the gradients."""
        self._window = _Window()
        self.model.zero_grad()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], *, averaged: bool = False) -> dict[str, float]:
        """Return the mean loss and metrics in evaluation mode, over all batches and all ranks by their weights.

        The modes of all modules are put back afterwards.

        Args:
            batches: as for :meth:`step`; ranks may have unlike numbers of them.
            averaged: evaluate ``loop.ema`` instead.
        """
        if averaged and self.ema is None:
            raise ValueError("Loop.evaluate: averaged=True needs a loop with ema=")
        model: nn.Module = self.ema.module if averaged and self.ema is not None else unwrapped(self.model)
        total = _Window()
        with _evaluating(model):
            for batch in batches:
                total.add(self._evaluate(model, batch))
        weight = 0.0 if total.weight is None else float(total.weight)
        sums = {name: float(value) for name, value in total.sums.items()}
        gathered = self._gathered((weight, sums))
        weight = sum(one[0] for one in gathered)
        names = dict.fromkeys(["loss", *(name for one in gathered for name in one[1])])
        means = {name: sum(one[1].get(name, 0.0) for one in gathered) for name in names}
        return {name.removeprefix("metrics."): x / weight if weight else math.nan for name, x in means.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the loop remembers, also in the middle of a window; it loads with ``weights_only``.

        The model's part has the names of the module inside DDP, so that it loads with and without. In the middle of a
        window, every rank has a state of its own.
        """
        state: dict[str, Any] = {name: part.state_dict() for name, part in self._parts().items()}
        if isinstance(self.clip, Transform):
            state["clip"] = tree.leaves(self._clip_state)
        window = self._window
        grads = {name: p.grad.clone() for name, p in self._parameters().items() if p.grad is not None}
        state["window"] = {
            "micro_batches": window.micro_batches,
            "reference": window.reference,
            "sums": dict(window.sums),
            "weight": window.weight,
            "grads": grads if window.micro_batches else {},
            "updates": self.updates,
        }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called; ``ValueError`` where it is from another loop, changing nothing."""
        parts = self._parts()
        clips = {"clip"} if isinstance(self.clip, Transform) else set()
        _check_names("the state", {*parts, *clips, "window"}, state)
        window = dict(state["window"])
        _check_names("the window", {"micro_batches", "reference", "sums", "weight", "grads", "updates"}, window)
        tree.check_like("Loop: the model", _shaped(parts["model"].state_dict()), _shaped(state["model"]))
        if self.ema is not None:
            tree.check_like("Loop: the average", _shaped(self.ema.state_dict()), _shaped(state["ema"]))
        parameters, grads = self._parameters(), window.pop("grads")
        tree.check_like("Loop: the gradients", {name: parameters.get(name, _NONE) for name in grads}, grads)
        if self.scaler is not None and self.scaler.is_enabled():
            _check_names("the scaler's state", set(self.scaler.state_dict()), state["scaler"])
        clip = self._clip_from(state["clip"]) if isinstance(self.clip, Transform) else None
        self.optimizer.load_state_dict(state["optimizer"])  # checks before it writes
        for name, part in parts.items():
            if name != "optimizer":
                part.load_state_dict(state[name])
        self._clip_state = clip
        self.reset()
        for name, grad in grads.items():
            parameters[name].grad = grad.to(parameters[name].device, copy=True)
        self.updates = window.pop("updates")
        device = next(iter(parameters.values())).device
        self._window = _Window(**tree.map(lambda x: x.to(device) if isinstance(x, Tensor) else x, window))

    def _clip_from(self, saved: list[Tensor]) -> Any:
        """Return the state of the transform that clips, with the saved leaves; raise where it has others."""
        assert isinstance(self.clip, Transform)
        leaves, structure = tree.flatten(self.clip.init(self._values()))
        if saved:
            tree.check_like("Loop: the state of clip", leaves, saved)
        moved = [leaf.to(own.device, copy=True) for leaf, own in zip(saved, leaves, strict=False)]
        return tree.unflatten(structure, moved or leaves)

    # --- a step ------------------------------------------------------------------------------------------------------

    def _step(self, batch: Batch, *, blank: bool = False) -> StepInfo:
        last = self.pending + 1 >= self.accumulate
        try:
            if not self.pending:
                self.reset()
            found = self._differentiate(batch, last, blank)
            self._window.add(found)
        except BaseException:
            self.reset()
            raise
        if last:
            return self._update()
        no = torch.zeros_like(found.weight, dtype=torch.bool)
        return StepInfo(found.mean, found.weight, torch.full_like(found.mean, math.nan), no, found.metrics)

    def _differentiate(self, batch: Batch, last: bool, blank: bool) -> _Found:
        """Add the gradient of one micro-batch to ``.grad``, the adversarial one included."""
        attack = self.adversarial
        if attack is None:
            return self._backward(batch, synchronise=last, blank=blank)
        earlier = self._take_gradients()
        attack._others = [p for name, p in self._parameters().items() if name.startswith("optimizer.")]
        clean = self._backward(batch, synchronise=True, blank=blank)
        try:
            for counts in attack._rounds():
                if counts:
                    self._add_gradients(earlier)
                other = self._backward(batch, synchronise=last or not counts, blank=blank)
        finally:
            attack.restore()
        return clean._replace(metrics={**clean.metrics, "adversarial_loss": other.mean})

    def _backward(self, batch: Batch, *, synchronise: bool, blank: bool) -> _Found:
        alone = self._ddp is not None and not synchronise
        with self._ddp.no_sync() if alone and self._ddp is not None else nullcontext():
            found = self._evaluate(self.model, batch)
            if blank:
                found = found._replace(mean=0 * found.mean, weight=torch.zeros_like(found.weight))
            share = found.mean * self._share(found.weight)
            torch.autograd.backward(share if self.scaler is None else self.scaler.scale(share))
        return found._replace(mean=found.mean.detach(), metrics={k: x.detach() for k, x in found.metrics.items()})

    def _evaluate(self, model: nn.Module, batch: Batch) -> _Found:
        with self._autocast():
            answer = self.loss_fn(model, batch)
        loss, metrics = _with_metrics(answer) if self.has_metrics else (answer, {})
        mean, weight = mean_and_weight(loss, _tensors(batch), name="Loop", what="loss_fn", items="tensors", graph=True)
        return _Found(mean, weight.detach().to(torch.promote_types(mean.dtype, weight.dtype)), metrics)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(next(self.model.parameters()).device.type, self.autocast)

    def _share(self, weight: Tensor) -> Tensor:
        """Return the factor of a micro-batch's mean loss: exactly 1 for the first of a window on one rank.

        Gradients are divided by the weight of the window's first micro-batches, and rescaled when the weight of all is
        known: sums would leave the range of half precision. DDP divides by the number of ranks, hence that factor.
        """
        if self._window.reference is None:
            total = self._sum_over_ranks(weight)
            self._window.reference = torch.where(total == 0, 1, total)
        ranks = 1 if self._ddp is None else dist.get_world_size(self._ddp.process_group)
        return torch.where(weight == 0, 1, weight) * ranks / self._window.reference

    # --- an update ---------------------------------------------------------------------------------------------------

    def _update(self) -> StepInfo:
        window, self._window = self._window, _Window()
        assert window.weight is not None
        assert window.reference is not None
        dtype = torch.promote_types(window.weight.dtype, window.sums["loss"].dtype)
        totals = self._sum_over_ranks(torch.stack([x.to(dtype) for x in (window.weight, *window.sums.values())]))
        weight = torch.where(totals[0] == 0, 1, totals[0])
        means = dict(zip(window.sums, totals[1:] / weight, strict=True))
        metrics = {name.removeprefix("metrics."): value for name, value in means.items() if name != "loss"}
        try:
            norm, applied = self._apply(window.reference / weight if window.micro_batches > 1 else None)
        except BaseException:
            if self.scaler is not None:
                self.scaler.update(self.scaler.get_scale())  # else it takes the next gradients for unscaled already
            raise
        if norm is None:
            norm = torch.zeros_like(weight)
        flag = torch.full_like(weight, applied, dtype=torch.bool)
        return StepInfo(means["loss"], totals[0], norm, flag, metrics)

    def _apply(self, factor: Tensor | None) -> tuple[Tensor | None, bool]:
        """Rescale, unscale, check, clip, step; return the norm, None without a gradient, and whether it was applied."""
        parameters = {name: p for name, p in self._parameters().items() if p.grad is not None}
        grads = [p.grad for p in parameters.values() if p.grad is not None]
        if not grads:
            return None, False
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if factor is not None:
            for grad in grads:
                grad.mul_(factor.to(grad.device))
        norm = nn.utils.get_total_norm([_entries(grad) for grad in grads])
        if not torch.isfinite(norm):  # the norm may have left the range of half precision, with finite gradients
            norm = _wide_norm([_entries(grad) for grad in grads])
        scaling = self.scaler is not None and self.scaler.is_enabled()
        applied = bool(torch.isfinite(norm)) or not (self.skip_nonfinite or scaling)
        if applied:
            self._clip(parameters, norm)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
        if self.scaler is not None:
            self.scaler.update()
        if applied:
            self._advance()
        return norm, applied

    @torch.no_grad()
    def _clip(self, parameters: dict[str, Tensor], norm: Tensor) -> None:
        if self.clip is None:
            return
        if not isinstance(self.clip, Transform):
            nn.utils.clip_grads_with_norm_(parameters.values(), self.clip, norm)
            return
        values = self._values()
        if self._clip_state is None:
            self._clip_state = self.clip.init(values)
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self._parameters().items()}
        clipped, self._clip_state = self.clip.update(grads, self._clip_state, values)
        for name in parameters:
            grads[name].copy_(clipped[name])

    def _advance(self) -> None:
        self.updates += 1
        if self.scheduler is not None:
            self.scheduler.step()
        if self.ema is not None:
            self.ema.update_parameters(unwrapped(self.model))

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _parameters(self) -> dict[str, Tensor]:
        """Return what the optimizer moves: the model's parameters in its order, then those of a loss, say."""
        moved = [p for group in self.optimizer.param_groups for p in group["params"]]
        own = {id(p) for p in moved}
        named = {name: p for name, p in unwrapped(self.model).named_parameters() if id(p) in own}
        known = {id(p) for p in named.values()}
        others = [p for p in moved if id(p) not in known]
        return {**named, **{f"optimizer.{index}": p for index, p in enumerate(others)}}

    def _values(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._parameters().items()}

    def _all_parameters(self) -> dict[int, Tensor]:
        """Return every parameter that may have a gradient, by identity."""
        return {id(p): p for p in (*self.model.parameters(), *self._parameters().values())}

    def _take_gradients(self) -> dict[int, Tensor]:
        """Take earlier micro-batches' gradients out of ``.grad``, as copies, since those of DDP are views."""
        if not self.pending:
            return {}
        with torch.no_grad():
            taken = {key: p.grad.clone() for key, p in self._all_parameters().items() if p.grad is not None}
        self.model.zero_grad()
        self.optimizer.zero_grad()
        return taken

    @torch.no_grad()
    def _add_gradients(self, earlier: dict[int, Tensor]) -> None:
        parameters = self._all_parameters() if earlier else {}
        for key, grad in earlier.items():
            own = parameters[key].grad
            if own is None:
                parameters[key].grad = grad
            else:
                own.add_(grad)

    # --- ranks -------------------------------------------------------------------------------------------------------

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self._ddp is None:
            return value
        total = value.clone()
        dist.all_reduce(total, group=self._ddp.process_group)
        return total

    def _gathered(self, value: Any) -> list[Any]:
        if self._ddp is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size(self._ddp.process_group)
        dist.all_gather_object(found, value, group=self._ddp.process_group)
        return found

    @torch.no_grad()
    def _average_gradients(self) -> None:
        """Average the gradients over the ranks, as DDP would have done had it known that the window ends here."""
        if self._ddp is None:
            return
        parameters = [p for p in unwrapped(self.model).parameters() if p.requires_grad]
        device = parameters[0].device
        there = self._sum_over_ranks(torch.tensor([p.grad is not None for p in parameters], device=device).float())
        ranks = dist.get_world_size(self._ddp.process_group)
        for p, count in zip(parameters, there.tolist(), strict=True):
            if count:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad.copy_(self._sum_over_ranks(p.grad) / ranks)

    def _until_all_have_ended(self, batches: Iterable[Batch], shown: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
        """Yield ``(batch, blank)`` until every rank has run out; those that have repeat their last one, blank."""
        lengths = self._gathered(_length(batches))
        if self._ddp is None or (None not in lengths and len(set(lengths)) == 1):
            yield from ((batch, False) for batch in shown)
            return
        missing = "a rank has no batch at all; give every rank at least one"
        device = next(self.model.parameters()).device
        yield from in_step("Loop.epoch", shown, self._ddp.process_group, missing, device=device)

    def _parts(self) -> dict[str, Any]:
        """Return what has a ``state_dict`` of its own."""
        parts: dict[str, Any] = {"model": unwrapped(self.model), "optimizer": self.optimizer}
        for name in ("scheduler", "scaler", "ema"):
            part = getattr(self, name)
            if part is not None:
                parts[name] = part
        return parts


# --- helpers ---------------------------------------------------------------------------------------------------------

_NONE = torch.empty(0)


def _check_names(what: str, expected: set[str], state: Mapping[str, Any]) -> None:
    if state.keys() != expected:
        missing, extra = sorted(expected - state.keys()), sorted(state.keys() - expected)
        raise ValueError(f"Loop: {what} is from another loop; missing: {missing}, unexpected: {extra}")


def _average(ema: float | AveragedModel | None, model: nn.Module) -> AveragedModel | None:
    if ema is None or isinstance(ema, AveragedModel):
        return ema
    check_number("Loop: ema", ema, minimum=0.0, maximum=1.0)
    return AveragedModel(unwrapped(model), multi_avg_fn=get_ema_multi_avg_fn(ema))  # type: ignore[no-untyped-call]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _with_metrics(answer: Any) -> tuple[Any, dict[str, Tensor]]:
    if not isinstance(answer, tuple) or isinstance(answer, Loss) or len(answer) != 2 or not isinstance(answer[1], dict):
        raise TypeError(f"Loop: with has_metrics, loss_fn must return (loss, dict), got a {type(answer).__name__}")
    for name, value in answer[1].items():
        if not isinstance(value, Tensor) or value.ndim:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise TypeError(f"Loop: the metric {name!r} must be a 0-d tensor, got {got}")
    return answer


def _tensors(batch: Any) -> dict[str, Tensor]:
    """Return the tensors in a batch, which may hold other things too."""
    plain = dict(batch) if isinstance(batch, Mapping) else batch  # a BatchEncoding is a Mapping, and no dict
    return {path: leaf for path, leaf in tree.named_leaves(plain).items() if isinstance(leaf, Tensor)}


def _entries(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.layout == torch.sparse_coo else grad


def _wide_norm(grads: list[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64).to(grads[0].device) for grad in grads]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _shaped(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _length(batches: Any) -> int | None:
    try:
        return len(batches)
    except TypeError:  # an iterator, or a DataLoader over a stream
        return None


def _with_bar(batches: Iterable[Batch]) -> Iterable[Batch]:
    try:
        from rich.progress import track
    except ImportError as error:
        raise ImportError("Loop.epoch: progress=True needs rich; pip install rich") from error
    return track(batches, description="training", total=_length(batches))
