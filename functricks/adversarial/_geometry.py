"""Directions and balls: norms of what is perturbed, steps of a given length, projections.

What is perturbed is a flat ``{path: tensor}``, measured leaf by leaf (``"leaf"``), all together (``"global"``), or, in
tensors whose first axis is examples, by example or by token (all axes but the first one or two).

A norm is a pair ``(peak, relative)`` whose product it is, because in float64 the product itself may overflow.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from functricks import random, tree
from functricks.types import Number

__all__ = [
    "Norm",
    "check_norm",
    "check_steps",
    "length_of",
    "masked",
    "norms",
    "over",
    "project",
    "random_point",
    "step",
]

Norm = Literal["leaf", "global", "example", "token"]
Named: TypeAlias = dict[str, Tensor]
Parts: TypeAlias = tuple[Tensor, Tensor]

_KEPT = {"example": 1, "token": 2}  # the leading axes that are measured apart
_LARGE = 2.0**100  # a factor below it times a float32 below 1 is finite


def norms(parts: Named, norm: Norm) -> dict[str, Parts]:
    """Return the norm by which each leaf is measured, ready to broadcast against it."""
    if norm == "global":
        return dict.fromkeys(parts, tree.norm_parts(parts))
    if norm == "leaf":
        return {path: tree.norm_parts(leaf) for path, leaf in parts.items()}
    return {path: _norm_over(leaf, tuple(range(_KEPT[norm], leaf.ndim))) for path, leaf in parts.items()}


def _norm_over(leaf: Tensor, dims: tuple[int, ...]) -> Parts:
    wide = leaf.double()
    if not dims:
        return torch.ones_like(wide), wide.abs()
    peak = torch.ones_like(wide.detach().sum(dims, keepdim=True))
    if leaf.dtype == torch.float64 and leaf.numel():
        peak = wide.detach().abs().amax(dims, keepdim=True)
        peak = torch.where(peak == 0, 1.0, peak)
        wide = wide / peak
    return peak, tree.sqrt(wide.square().sum(dims, keepdim=True))


def length_of(parts: Parts) -> Tensor:
    """Return the norm itself."""
    return parts[0] * parts[1]


def step(grads: Named, length: Number, norm: Norm) -> Named:
    """Return steps of the given length along the gradients; zero where the norm is zero or not finite."""
    if _any_complex(grads):
        return _complex(step(_real(grads), length, norm), grads)
    measured = norms(grads, norm)
    exact = norm == "global" and any(leaf.dtype == torch.float64 for leaf in grads.values())
    return {path: _along(leaf, *measured[path], length, exact) for path, leaf in grads.items()}


def _along(leaf: Tensor, peak: Tensor, relative: Tensor, length: Number, exact: bool) -> Tensor:
    """Return ``length * leaf / (peak * relative)``; in float32 it takes two factors, as one may overflow."""
    usable = torch.isfinite(peak) & torch.isfinite(relative) & (relative > 0)
    factor = length / torch.where(usable, relative, 1.0)
    safe = leaf if tree.holds_everywhere(usable) else torch.where(usable, leaf, 0.0)
    if exact or leaf.dtype == torch.float64:
        return (safe.double() / torch.where(usable, peak, 1.0) * factor).to(leaf.dtype)
    size = factor.abs()  # a step down the gradient has a negative length
    if tree.holds_everywhere(size <= _LARGE):
        return (safe.float() * factor.float()).to(leaf.dtype)
    first = torch.clamp(factor, -_LARGE, _LARGE)
    second = torch.where(size > _LARGE, size / _LARGE, 1.0)
    return (safe.float() * first.float() * second.float()).to(leaf.dtype)


def project(shift: Named, epsilon: Number, norm: Norm) -> Named:
    """Pull perturbations that are longer than ``epsilon`` back to the ball."""
    if _any_complex(shift):
        return _complex(project(_real(shift), epsilon, norm), shift)
    lengths = {path: length_of(parts) for path, parts in norms(shift, norm).items()}
    inside = {path: tree.holds_everywhere(length <= epsilon) for path, length in lengths.items()}
    return {
        path: leaf if inside[path] else leaf * _shrink(lengths[path], epsilon).to(leaf.dtype)
        for path, leaf in shift.items()
    }


def _shrink(length: Tensor, epsilon: Number) -> Tensor:
    outside = length > epsilon
    return torch.where(outside, epsilon / torch.where(outside, length, 1.0), 1.0)


def random_point(key: Tensor, like: Named, epsilon: Number, norm: Norm, mask: Tensor | None = None) -> Named:
    """Draw a point of the ball: its direction is uniform, and so is its distance from the centre."""
    if _any_complex(like):
        return _complex(random_point(key, _real(like), epsilon, norm, mask), like)
    radius_key, key = random.split(key).unbind()
    drawn = {
        path: random.normal(random.fold_in(key, index), leaf.shape).to(leaf.dtype)
        for index, (path, leaf) in enumerate(like.items())
    }
    drawn = masked(drawn, mask)
    found = {}
    for index, path in enumerate(drawn):
        own = {path: drawn[path]} if norm != "global" else drawn
        shape = norms({path: drawn[path]}, norm)[path][1].shape
        radius = random.uniform(random.fold_in(radius_key, 0 if norm == "global" else index), shape)
        found[path] = step(own, epsilon * radius.double(), norm)[path]
    return found


def _any_complex(parts: Named) -> bool:
    return any(leaf.is_complex() for leaf in parts.values())


def _real(parts: Named) -> Named:
    """Return complex leaves as real ones: a complex number is as long as its two parts are together."""
    return {path: tree.as_real(leaf) for path, leaf in parts.items()}


def _complex(parts: Named, like: Named) -> Named:
    return {path: torch.complex(*leaf.unbind(-1)) if like[path].is_complex() else leaf for path, leaf in parts.items()}


def masked(parts: Named, mask: Tensor | None) -> Named:
    """Return zeros where the mask, over the leading axes, is False."""
    if mask is None:
        return parts
    return {path: torch.where(over(mask, leaf), leaf, 0.0) for path, leaf in parts.items()}


def over(mask: Tensor, leaf: Tensor) -> Tensor:
    """Return a mask over the leading axes as one that broadcasts to the leaf; raise where it would enlarge it."""
    sizes = zip(mask.shape, leaf.shape, strict=False)
    if mask.ndim > leaf.ndim or any(size not in (1, full) for size, full in sizes):
        raise ValueError(
            f"adversarial: the mask, of shape {tuple(mask.shape)}, must be over the leading axes of what is perturbed, "
            f"of shape {tuple(leaf.shape)}"
        )
    return mask.view(*mask.shape, *[1] * (leaf.ndim - mask.ndim)).bool()


def check_norm(name: str, norm: Any, allowed: tuple[str, ...]) -> None:
    """Raise unless the norm is one of those allowed."""
    if norm not in allowed:
        names = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
        raise ValueError(f"{name}: norm must be {names}, got {norm!r}")


def check_steps(name: str, steps: Any) -> None:
    """Raise unless ``steps`` is an integer >= 1."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"{name}: steps must be an integer >= 1, got {steps!r}")
