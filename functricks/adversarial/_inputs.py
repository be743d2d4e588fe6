"""Attacks on an input, or on anything that is added to an activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from functricks import random
from functricks.adversarial._geometry import check_steps, masked, over, project, random_point, step
from functricks.gradients import gradient
from functricks.gradients._loop import repeat
from functricks.transforms.base import check_number
from functricks.types import Number

__all__ = ["attack"]


def attack(
    loss_of_input: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    norm: Literal["l2", "linf"] = "linf",
    per: Literal["leaf", "example", "token"] = "example",
    epsilon: Number,
    step_size: Number | None = None,
    steps: int = 1,
    mask: Tensor | None = None,
    clamp: tuple[Number, Number] | None = None,
    targeted: bool = False,
    key: Tensor | None = None,
    unroll: bool = False,
) -> Tensor:
    r"""Move an input against the model, within ``epsilon`` of where it was.

    .. math:: x_{k+1} = \Pi_{\lVert x - x_0 \rVert \le \epsilon}\left(x_k + \alpha\, d(\nabla_x L(x_k))\right)

    with :math:`d` the sign (``"linf"``) or the unit vector (``"l2"``) of the gradient.

    Classic: torchattacks' ``FGSM``, ``PGD``, ``PGDL2``. Reference: Madry et al. 2018, arXiv:1706.06083; with one step,
    Goodfellow et al. 2015, arXiv:1412.6572.

    Args:
        loss_of_input: ``x -> loss``, 0-d; summed over examples, since a mean makes gradients small.
        x: the input, examples first. Activations (looked-up embeddings) are attacked as a probe: ``x`` is zeros that
            are added to them.
        norm: which ball.
        per: under ``"l2"``, what has a ball of its own: the whole of ``x``, each example, or each token (all axes but
            the first two).
        epsilon: the radius, >= 0, in the units of ``x``.
        step_size: the length of a step; ``epsilon`` for one step, else ``2.5 * epsilon / steps``, as Madry et al.
        steps: how many, >= 1.
        mask: bool over the leading axes of ``x``; what is False (padding) does not move, and does not enter a norm.
        clamp: the range in which inputs are valid, e.g. ``(0.0, 1.0)``.
        targeted: go down instead of up: ``loss_of_input`` is that of the label to be reached.
        key: start at a random point of the ball (``"linf"``: uniform; ``"l2"``: uniform in direction and in distance)
            instead of at ``x``.
        unroll: compile a loop without a scan, for those who differentiate through it.

    Raises ``ValueError`` for numbers out of range, a loss with axes, a mask that does not fit, and ``x`` of integers.

    Returns the moved input, detached from nothing: differentiate through it or not. Where a gradient is zero or not
    finite, nothing moves.

    >>> import torch
    >>> attack(lambda x: (2.0 * x).sum(), torch.tensor([[0.0], [0.95]]), epsilon=0.1, clamp=(0.0, 1.0))
    tensor([[0.1000],
            [1.0000]])
    """
    check_number("attack: epsilon", epsilon, minimum=0.0)
    if step_size is not None:
        check_number("attack: step_size", step_size, minimum=0.0)
    check_steps("attack", steps)
    if norm not in ("l2", "linf") or per not in ("leaf", "example", "token"):
        raise ValueError(
            f"attack: norm must be 'l2' or 'linf' and per 'leaf', 'example' or 'token', got {norm!r}, {per!r}"
        )
    if not (x.is_floating_point() or (x.is_complex() and norm == "l2")):
        raise ValueError(f"attack: x must be floating point (complex under norm='l2' only), got {x.dtype}")
    if per == "token" and x.ndim < 3:
        raise ValueError(f"attack: per='token' needs an input of three axes or more, got shape {tuple(x.shape)}")
    if clamp is not None and not any(isinstance(bound, Tensor) for bound in clamp) and not clamp[0] <= clamp[1]:
        raise ValueError(f"attack: clamp must be (low, high) with low <= high, got {clamp!r}")
    length = step_size if step_size is not None else (epsilon if steps == 1 else 2.5 * epsilon / steps)
    length = -length if targeted else length

    def loss_fn(x: Tensor, _: Any) -> Any:
        loss: Any = loss_of_input(x)
        if isinstance(loss, Tensor) and loss.ndim:
            raise ValueError(
                f"attack: loss_of_input must return a 0-d tensor, got shape {tuple(loss.shape)}; sum it over examples"
            )
        return loss

    gradient_of = gradient(loss_fn)

    def ascend(moved: Tensor, _: Any) -> Tensor:
        slope = masked({"": gradient_of(moved, ()).grads}, mask)
        if norm == "linf":
            shift = moved - x + _sign(slope[""]) * _like(length, x)
            shift = torch.minimum(torch.maximum(shift, _like(-epsilon, x)), _like(epsilon, x))
        else:
            shift = project({"": moved - x + step(slope, length, per)[""]}, epsilon, per)[""]
        return _clamped(x + shift, clamp)

    moved = x if key is None else _clamped(x + _start(key, x, epsilon, norm, per, mask), clamp)
    moved = repeat(ascend, ascend(moved, None), steps - 1, unroll=unroll)
    return moved if mask is None else torch.where(over(mask, x), moved, x)


def _start(key: Tensor, x: Tensor, epsilon: Number, norm: str, per: Any, mask: Tensor | None) -> Tensor:
    if norm == "l2":
        return random_point(key, {"": x}, epsilon, per, mask)[""]
    drawn = {"": random.uniform(key, x.shape).to(x.dtype) * 2 - 1}
    return masked(drawn, mask)[""] * _like(epsilon, x)


def _sign(slope: Tensor) -> Tensor:
    return torch.where(torch.isfinite(slope), slope, 0.0).sign()


def _like(value: Number, x: Tensor) -> Tensor:
    """Return a tensor of the dtype of ``x``: under ``vmap`` a 0-d tensor of another would promote it."""
    return torch.as_tensor(value, dtype=x.dtype, device=x.device)


def _clamped(x: Tensor, clamp: tuple[Number, Number] | None) -> Tensor:
    if clamp is None:
        return x
    return torch.minimum(torch.maximum(x, _like(clamp[0], x)), _like(clamp[1], x))
