"""Adversarial training: the gradient at the parameters, plus the gradient at parameters moved against us.

``fgm`` and ``pgd`` wrap a gradient function and return one. Parameters are values, so there is nothing to back up and
nothing to restore. :func:`attack` is the same on an input instead of a parameter, to train on or to measure robustness
with.

The classic recipe perturbs the whole embedding *matrix* (``norm="leaf"``), so that its strength per example falls with
the batch size; the papers normalise each example's activations, which is ``attack`` with ``per="example"``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from functricks import tree
from functricks.gradients import gradient
from functricks.transforms.base import check_number
from functricks.types import Batch, Carry, GradFn, Gradient, Number, Params

__all__ = ["attack", "fgm", "pgd"]

Norm = Literal["leaf", "global"]


def fgm(grad_fn: GradFn, epsilon: Number = 1.0, *, where: tree.Where, norm: Norm = "leaf") -> GradFn:
    r"""Add the gradient at parameters moved by ``epsilon`` along the gradient: the fast gradient method.

    .. math:: g(\theta) + g(\theta + r), \qquad r = \epsilon \frac{g(\theta)}{\lVert g(\theta) \rVert_2}

    Classic: attack the embedding, ``backward`` again, restore. Reference: Miyato et al. 2017, arXiv:1605.07725;
    Goodfellow et al. 2015, arXiv:1412.6572.

    Args:
        grad_fn: the gradient function; called twice, the carry goes through both calls.
        epsilon: the length of the perturbation, >= 0, in the units of the parameter.
        where: the leaves to perturb (a selector); one that matches nothing raises.
        norm: ``"leaf"`` normalises every leaf by itself, ``"global"`` all chosen leaves together.

    ``loss`` is the clean loss, ``metrics["adversarial_loss"]`` the other one. A gradient that is zero or not finite
    gives a zero perturbation; norms neither overflow nor underflow.

    >>> import torch
    >>> from functricks import gradient
    >>> loss = lambda params, _: (params["head"] * params["emb"]).square()
    >>> attacked = fgm(gradient(loss), 1.0, where="emb")
    >>> attacked({"head": torch.tensor(1.0), "emb": torch.tensor(2.0)}, ()).grads
    {'head': tensor(26.), 'emb': tensor(10.)}
    """
    check_number("fgm: epsilon", epsilon, minimum=0.0)
    _check_norm("fgm", norm)

    def perturbed(params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        chosen = tree.select(where, params, name="fgm")
        clean = grad_fn(params, batch, carry, scale=scale)
        moved = tree.add(tree.pick(params, chosen), _step(tree.pick(clean.grads, chosen), epsilon, norm))
        other = grad_fn(tree.from_named(params, moved), batch, clean.carry, scale=scale)
        return _added(clean, other)

    return perturbed


def pgd(
    grad_fn: GradFn,
    epsilon: Number = 1.0,
    step_size: Number = 0.3,
    steps: int = 3,
    *,
    where: tree.Where,
    norm: Norm = "leaf",
) -> GradFn:
    r"""Add the gradient at parameters moved against us in several steps, kept in a ball: projected gradient descent.

    .. math::
        r_0 = 0, \qquad r_{k+1} = \Pi_{\lVert r \rVert \le \epsilon}
        \left(r_k + \alpha \frac{g(\theta + r_k)}{\lVert g(\theta + r_k) \rVert_2}\right), \qquad g(\theta) + g(\theta
        + r_K)

    Classic: K rounds of attack and ``backward``, gradients backed up and restored before the last. Reference: Madry et
    al. 2018, arXiv:1706.06083. The projection acts only where ``steps * step_size > epsilon``.

    Args:
        grad_fn: the gradient function; called ``steps + 1`` times, the carry goes through all calls.
        epsilon: the radius of the ball, >= 0.
        step_size: the length of one step, >= 0.
        steps: how many, >= 1.
        where: the leaves to perturb (a selector); one that matches nothing raises.
        norm: ``"leaf"`` measures every leaf by itself, ``"global"`` all chosen leaves together.

    ``loss``, ``metrics["adversarial_loss"]`` and odd gradients as in :func:`fgm`.

    >>> import torch
    >>> from functricks import gradient
    >>> loss = lambda params, _: (params["head"] * params["emb"]).square()
    >>> attacked = pgd(gradient(loss), 0.5, 0.3, 2, where="emb")
    >>> attacked({"head": torch.tensor(1.0), "emb": torch.tensor(2.0)}, ()).grads
    {'head': tensor(20.5000), 'emb': tensor(9.)}
    """
    check_number("pgd: epsilon", epsilon, minimum=0.0)
    check_number("pgd: step_size", step_size, minimum=0.0)
    _check_steps("pgd", steps)
    _check_norm("pgd", norm)

    def perturbed(params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        chosen = tree.select(where, params, name="pgd")
        clean = grad_fn(params, batch, carry, scale=scale)
        start = tree.pick(params, chosen)
        shift, last = tree.zeros_like(start), clean
        for _ in range(steps):
            shift = tree.add(shift, _step(tree.pick(last.grads, chosen), step_size, norm))
            shift = _project(shift, epsilon, norm)
            last = grad_fn(tree.from_named(params, tree.add(start, shift)), batch, last.carry, scale=scale)
        return _added(clean, last)

    return perturbed


def attack(
    loss_of_input: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    norm: Literal["l2", "linf"] = "linf",
    per: Literal["leaf", "example"] = "example",
    epsilon: Number,
    step_size: Number | None = None,
    steps: int = 1,
    clamp: tuple[float, float] | None = None,
) -> Tensor:
    r"""Move an input against the model, within ``epsilon`` of where it was.

    .. math:: x_{k+1} = \Pi_{\lVert x - x_0 \rVert \le \epsilon}\left(x_k + \alpha\, d(\nabla_x L(x_k))\right)

    with :math:`d` the sign (``"linf"``) or the unit vector (``"l2"``) of the gradient.

    Reference: Madry et al. 2018, arXiv:1706.06083; with one step, Goodfellow et al. 2015, arXiv:1412.6572.

    Args:
        loss_of_input: ``x -> loss``, 0-d; summed over examples, since a mean makes gradients small.
        x: the input, examples first.
        norm: which ball.
        per: under ``"l2"``, whether every example has a ball of its own or the whole of ``x`` has one.
        epsilon: the radius, >= 0, in the units of ``x``.
        step_size: the length of a step; ``epsilon`` for one step, else ``2.5 * epsilon / steps``, as Madry et al.
        steps: how many, >= 1.
        clamp: the range in which inputs are valid, e.g. ``(0.0, 1.0)``.

    Returns the moved input, detached from nothing: differentiate through it or not.

    >>> import torch
    >>> attack(lambda x: (2.0 * x).sum(), torch.tensor([[0.0], [0.95]]), epsilon=0.1, clamp=(0.0, 1.0))
    tensor([[0.1000],
            [1.0000]])
    """
    check_number("attack: epsilon", epsilon, minimum=0.0)
    _check_steps("attack", steps)
    if norm not in ("l2", "linf") or per not in ("leaf", "example"):
        raise ValueError(f"attack: norm must be 'l2' or 'linf' and per 'leaf' or 'example', got {norm!r}, {per!r}")
    length = step_size if step_size is not None else (epsilon if steps == 1 else 2.5 * epsilon / steps)
    dims = tuple(range(1, x.ndim)) if per == "example" else tuple(range(x.ndim))
    gradient_of = gradient(lambda x, _: loss_of_input(x))

    moved = x
    for _ in range(steps):
        slope = gradient_of(moved, ()).grads
        if norm == "linf":
            shift = moved + length * torch.nan_to_num(slope).sign() - x
            shift = torch.clamp(
                shift, *(torch.as_tensor(b, dtype=x.dtype, device=x.device) for b in (-epsilon, epsilon))
            )
        else:
            shift = moved - x + _unit(slope, dims) * length
            shift = shift * _shrink(_norm_of(shift, dims), epsilon).to(shift.dtype)
        moved = (x + shift).to(x.dtype)
        moved = moved if clamp is None else moved.clamp(*clamp)
    return moved


# --- helpers ---------------------------------------------------------------------------------------------------------


def _added(clean: Gradient, other: Gradient) -> Gradient:
    """Sum the two gradients; the loss stays the clean one, the carry is the one that saw both."""
    metrics = {**clean.metrics, "adversarial_loss": other.loss}
    return clean._replace(grads=tree.add(clean.grads, other.grads), carry=other.carry, metrics=metrics)


def _norms(parts: dict[str, Tensor], norm: Norm) -> dict[str, tuple[Tensor, Tensor]]:
    """Return ``(peak, relative)`` of the norm by which each leaf is measured."""
    if norm == "global":
        return dict.fromkeys(parts, tree.norm_parts(parts))
    return {path: tree.norm_parts(leaf) for path, leaf in parts.items()}


def _step(grads: dict[str, Tensor], length: Number, norm: Norm) -> dict[str, Tensor]:
    """Return steps of the given length along the gradients; zero where the norm is zero or not finite."""
    norms = _norms(grads, norm)
    return {path: _along(leaf, *norms[path], length) for path, leaf in grads.items()}


def _along(leaf: Tensor, peak: Tensor, relative: Tensor, length: Number) -> Tensor:
    usable = torch.isfinite(peak) & torch.isfinite(relative) & (relative > 0)
    unit = leaf.double() / torch.where(usable, peak, 1.0) / torch.where(usable, relative, 1.0)
    return torch.where(usable, unit * length, 0.0).to(leaf.dtype)


def _project(shift: dict[str, Tensor], epsilon: Number, norm: Norm) -> dict[str, Tensor]:
    """Pull perturbations that are longer than ``epsilon`` back to the ball."""
    norms = _norms(shift, norm)
    return {path: leaf * _shrink(_product(norms[path]), epsilon).to(leaf.dtype) for path, leaf in shift.items()}


def _product(parts: tuple[Tensor, Tensor]) -> Tensor:
    return parts[0] * parts[1]


def _shrink(length: Tensor, epsilon: Number) -> Tensor:
    outside = length > epsilon
    return torch.where(outside, epsilon / torch.where(outside, length, 1.0), 1.0)


def _norm_of(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    wide = x.double()
    return tree.sqrt(wide.square().sum(dims, keepdim=True)) if dims else wide.abs()  # sum(()) would sum over all


def _unit(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    wide = x.double()
    if dims and x.numel():  # float64 squares overflow and underflow; dividing by the largest entry first avoids it
        peak = wide.detach().abs().amax(dims, keepdim=True)
        wide = wide / torch.where(torch.isfinite(peak) & (peak > 0), peak, 1.0)
    length = _norm_of(wide, dims)
    usable = torch.isfinite(length) & (length > 0)
    return torch.where(usable, wide / torch.where(usable, length, 1.0), 0.0)


def _check_norm(name: str, norm: Any) -> None:
    if norm not in ("leaf", "global"):
        raise ValueError(f"{name}: norm must be 'leaf' or 'global', got {norm!r}")


def _check_steps(name: str, steps: Any) -> None:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"{name}: steps must be an integer >= 1, got {steps!r}")
