"""Several losses on the same parameters, one graph alive at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from functricks import random, tree
from functricks.gradients._gradient import check_grad_fn
from functricks.transforms.base import check_number
from functricks.types import Batch, Carry, GradFn, Gradient, Grads, Number, Params

__all__ = ["multi_task"]

Weights = Mapping[str, Number] | str | None


def multi_task(
    grad_fns: Mapping[str, GradFn],
    weights: Weights = None,
    *,
    conflicts: Literal["keep", "project"] = "keep",
    key: Tensor | Callable[[Carry], tuple[Tensor, Carry]] | None = None,
) -> GradFn:
    r"""Sum the tasks' gradients, each with its weight.

    .. math:: g = \sum_t \lambda_t \nabla L_t \qquad \text{or, learned,} \qquad
        \nabla \sum_t \left(e^{-s_t} L_t + s_t\right)

    Each task's gradient is complete before the next one starts, so the memory is that of the largest task. A task of
    zero weight in this batch (all of it masked) pushes nothing, not even its :math:`s_t`.

    Classic: one ``backward`` for each loss, each on a forward pass of its own: on a shared graph it saves nothing.
    Reference: Kendall et al. 2018, arXiv:1705.07115 (learned weights; :math:`s_t` is a log-variance, the factor 1/2 is
    left out); Yu et al. 2020, arXiv:2001.06782 (PCGrad).

    Args:
        grad_fns: ``{name: grad_fn}``; all see the same batch, and the carry goes from one to the next, in this order.
        weights: ``{name: number}``, 1 each by default; or the dotted path of a dict ``{name: log-variance}`` of 0-d
            tensors in the parameters, trained along.
        conflicts: ``"project"`` removes from each task's (weighted) gradient what points against another task's:
            PCGrad. It keeps all tasks' gradients at once.
        key: draws the order in which conflicts are removed, as in the paper: a key, or ``carry -> (key, carry)``. By
            default it is the order of ``grad_fns``.

    ``loss`` is the weighted sum (with :math:`s_t`; it may be negative). ``metrics`` has ``"<task>.loss"``,
    ``"<task>.weighted_loss"`` and, but for those two names, the task's own metrics as ``"<task>.<metric>"``. ``weight``
    is that of the task which weighs most.

    Raises ``ValueError`` for names in ``weights`` that are no tasks, tasks without a weight, and log-variances with
    axes.

    >>> import torch
    >>> from functricks import gradient
    >>> tasks = {"a": gradient(lambda params, x: params["w"]), "b": gradient(lambda params, x: -params["w"])}
    >>> found = multi_task(tasks, {"a": 1.0, "b": 0.25})({"w": torch.tensor(2.0)}, ())
    >>> found.grads["w"], found.loss, found.metrics["b.loss"]
    (tensor(0.7500), tensor(1.5000), tensor(-2.))
    """
    _check(grad_fns, weights, conflicts)

    def summed(params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        tasks = [_task(name, weights, params) for name in grad_fns]
        total: Gradient | None = None
        slopes, parts = {}, []
        for task, grad_fn in zip(tasks, grad_fns.values(), strict=True):
            found = grad_fn(params, batch, carry, scale=scale)
            carry = found.carry
            present = found.weight != 0
            slopes.update(task.slope(found.loss, present))
            found = task.weigh(found, present)
            if conflicts == "project":
                parts.append(found.grads)
                found = found._replace(grads=())
            total = found if total is None else _joined(total, found)
        assert total is not None
        if conflicts == "project":
            order, carry = _order(key, len(parts), carry)
            total = total._replace(grads=_without_conflicts(parts, order))
        return total._replace(grads=_placed(total.grads, params, slopes), carry=carry)

    return summed


class _Task:
    """A task's name and weight; ``s`` is the log-variance of a learned one."""

    def __init__(self, name: str, factor: Number, path: str | None = None, s: Tensor | None = None) -> None:
        self.name, self.factor, self.path, self.s = name, factor, path, s

    def weigh(self, found: Gradient, present: Tensor) -> Gradient:
        """Return the weighted gradient, and metrics under the task's name."""
        weighted = found.loss * _as(self.factor, found.loss)
        if self.s is not None:
            weighted = weighted + self.s.to(weighted.dtype)
        weighted = torch.where(present, weighted, 0.0).to(found.loss.dtype)
        own = {f"{self.name}.{metric}": value for metric, value in found.metrics.items()}
        ours = {f"{self.name}.loss": found.loss, f"{self.name}.weighted_loss": weighted}
        metrics = {**ours, **own, **ours}  # in this order, and a task's own "loss" does not replace ours
        grads = tree.scale(tree.wide(found.grads), self.factor)
        if not tree.holds_everywhere(present):
            # over no weight there may be a numerator, as of smoothed rows of a class of no weight
            grads = tree.pointwise(lambda leaf, kept: torch.where(kept, leaf, 0.0), grads, coefficients=(present,))
        return Gradient(grads, weighted, found.weight, found.carry, metrics)

    def slope(self, loss: Tensor, present: Tensor) -> dict[str, Tensor]:
        """Return the derivative of the weighted loss with respect to ``s``, by the path of ``s``."""
        if self.path is None or self.s is None:
            return {}
        slope = 1 - loss * _as(self.factor, loss)
        return {self.path: torch.where(present, slope, 0.0).to(self.s.dtype)}


def _task(name: str, weights: Weights, params: Params) -> _Task:
    if not isinstance(weights, str):
        return _Task(name, 1.0 if weights is None else weights[name])
    path, named = f"{weights}.{name}", tree.named_leaves(params)
    if path not in named:
        raise ValueError(f"multi_task: no log-variance at {path!r} in the parameters; have: {', '.join(named)}")
    s = named[path]
    if s.ndim:
        raise ValueError(f"multi_task: the log-variance at {path!r} must be 0-d, got shape {tuple(s.shape)}")
    return _Task(name, torch.exp(-s.to(tree.compute_dtype(s.dtype))), path, s)


def _as(value: Number, like: Tensor) -> Number:
    return value.to(like.dtype) if isinstance(value, Tensor) else value


def _joined(total: Gradient, one: Gradient) -> Gradient:
    grads = tree.add(total.grads, one.grads) if total.grads != () else ()
    weight = torch.maximum(total.weight, one.weight)
    return Gradient(grads, total.loss + one.loss, weight, one.carry, {**total.metrics, **one.metrics})


def _placed(grads: Grads, params: Params, slopes: dict[str, Tensor]) -> Grads:
    """Return the gradients in the parameters' dtypes, with those of the log-variances added."""
    grads = tree.map(lambda leaf, like: leaf.to(like.dtype), grads, params)
    named = tree.named_leaves(grads)
    return tree.from_named(grads, {path: named[path] + slope for path, slope in slopes.items()})


# --- PCGrad ----------------------------------------------------------------------------------------------------------


def _order(
    key: Tensor | Callable[[Carry], tuple[Tensor, Carry]] | None, count: int, carry: Carry
) -> tuple[Tensor, Carry]:
    """Return for each task the order of the tasks against which it is projected, ``[T, T]``."""
    if key is None:
        return torch.arange(count).expand(count, count), carry
    drawn, carry = key(carry) if callable(key) else (key, carry)
    return torch.stack([random.permutation(random.fold_in(drawn, task), count) for task in range(count)]), carry


def _without_conflicts(parts: list[Grads], order: Tensor) -> Grads:
    """Return the sum of the tasks' gradients, each projected on the normal planes of those it conflicts with.

    Every projection stays in the span of the gradients, so it is done on coefficients, by their inner products: a
    gradient that is projected is a row of ``T`` numbers.
    """
    columns = [tree.leaves(part) for part in parts]
    gram = _gram(columns)
    count = len(parts)
    squares = gram.diagonal()
    tasks = torch.arange(count, device=gram.device)
    rows = []
    for task in range(count):
        row = (tasks == task).to(gram.dtype)
        for turn in range(count):
            other = tasks == order[task, turn].to(gram.device)
            along = torch.where(other, gram @ row, 0.0)
            conflict = (along < 0) & (squares > 0) & (tasks != task)
            row = row - torch.where(conflict, along / torch.where(conflict, squares, 1.0), 0.0)
        rows.append(row)
    coefficients = torch.stack(rows).sum(0)
    total = tree.scale(parts[0], coefficients[0])
    for index, part in enumerate(parts[1:], 1):
        total = tree.add(total, tree.scale(part, coefficients[index]))
    return total


def _gram(columns: list[list[Tensor]]) -> Tensor:
    """Return the inner products of the gradients, float64 ``[T, T]``."""
    if not columns[0]:
        return torch.zeros(len(columns), len(columns), dtype=torch.float64)
    total: Any = 0.0
    for leaves in zip(*columns, strict=True):
        rows = torch.stack([_numbers(leaf) for leaf in leaves])
        total = total + rows @ rows.mT
    return torch.as_tensor(total)


def _numbers(leaf: Tensor) -> Tensor:
    """Return the entries in float64; a complex one is two numbers."""
    return tree.as_real(leaf).reshape(-1).double()


def _check(grad_fns: Mapping[str, GradFn], weights: Weights, conflicts: str) -> None:
    if not grad_fns:
        raise ValueError("multi_task: needs at least one task")
    for name, grad_fn in grad_fns.items():
        check_grad_fn(f"multi_task: task {name!r}", grad_fn)
    if conflicts not in ("keep", "project"):
        raise ValueError(f"multi_task: conflicts must be 'keep' or 'project', got {conflicts!r}")
    if weights is None or isinstance(weights, str):
        return
    if weights.keys() != grad_fns.keys():
        raise ValueError(f"multi_task: weights are for {sorted(weights)}, tasks are {sorted(grad_fns)}")
    for name, weight in weights.items():
        check_number(f"multi_task: weights[{name!r}]", weight)
