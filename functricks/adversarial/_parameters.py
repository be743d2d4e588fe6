"""Gradient functions that look at the loss at moved parameters, or at moved activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from functricks import tree
from functricks.adversarial._geometry import (
    Norm,
    check_norm,
    check_steps,
    length_of,
    masked,
    norms,
    project,
    random_point,
    step,
)
from functricks.gradients._gradient import check_grad_fn
from functricks.gradients._loop import repeat
from functricks.transforms.base import check_number
from functricks.types import Batch, Carry, GradFn, Gradient, Grads, Number, Params

__all__ = ["awp", "fgm", "free_lb", "pgd", "sam"]

Key: TypeAlias = Tensor | Callable[[Carry], tuple[Tensor, Carry]]
Probe: TypeAlias = Callable[[Params, Batch], Any]
Mask: TypeAlias = Callable[[Batch], Tensor]


def fgm(
    grad_fn: GradFn,
    epsilon: Number = 1.0,
    *,
    where: tree.Where | None = None,
    probe: Probe | None = None,
    norm: Norm = "leaf",
    mask: Mask | None = None,
) -> GradFn:
    r"""Add the gradient at parameters moved by ``epsilon`` along the gradient: the fast gradient method.

    .. math:: g(\theta) + g(\theta + r), \qquad r = \epsilon \frac{g(\theta)}{\lVert g(\theta) \rVert_2}

    Classic: attack the embedding, ``backward`` again, restore. Reference: Miyato et al. 2017, arXiv:1605.07725;
    Goodfellow et al. 2015, arXiv:1412.6572.

    Args:
        grad_fn: the gradient function; called twice, the carry goes through both calls.
        epsilon: the length of the perturbation, >= 0, in the units of what is perturbed.
        where: the parameters to perturb (a selector); one that matches nothing raises. Or
        probe: perturb activations instead: ``(params, batch) -> zeros`` of their shape, examples first (a tensor or a
            tree). ``grad_fn`` is then that of a loss function whose parameters are the pair ``(params, probe)``, where
            the probe is added to the activations: ``model.apply(..., probes={"embedding": probe})``. The result takes,
            and returns gradients for, ``params`` alone.
        norm: ``"leaf"`` normalises every leaf by itself, ``"global"`` all of them together; with ``probe`` also
            ``"example"`` and ``"token"``, whose strength does not depend on the size of the batch.
        mask: with ``probe``: ``batch -> bool`` over its leading axes, False where nothing moves (padding), which does
            not enter the norm either.

    ``loss`` is the clean loss, ``metrics["adversarial_loss"]`` the other one. A gradient that is zero or not finite
    gives a zero perturbation; norms neither overflow nor underflow.

    >>> import torch
    >>> from functricks import gradient
    >>> loss = lambda params, _: (params["head"] * params["emb"]).square()
    >>> attacked = fgm(gradient(loss), 1.0, where="emb")
    >>> attacked({"head": torch.tensor(1.0), "emb": torch.tensor(2.0)}, ()).grads
    {'head': tensor(26.), 'emb': tensor(10.)}
    """
    check_grad_fn("fgm", grad_fn)
    check_number("fgm: epsilon", epsilon, minimum=0.0)
    aim = _aim("fgm", where, probe, norm, mask)

    def perturbed(params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        target = aim(params, batch)
        clean = grad_fn(target.clean, batch, carry, scale=scale)
        moved = target.moved(step(target.pick(clean.grads), epsilon, norm))
        other = grad_fn(moved, batch, clean.carry, scale=scale)
        return _added(clean, target.own(clean.grads), target.own(other.grads), other.loss, other.carry)

    return perturbed


def pgd(
    grad_fn: GradFn,
    epsilon: Number = 1.0,
    step_size: Number = 0.3,
    steps: int = 3,
    *,
    where: tree.Where | None = None,
    probe: Probe | None = None,
    norm: Norm = "leaf",
    mask: Mask | None = None,
    key: Key | None = None,
    unroll: bool = False,
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
        where: what to perturb, see :func:`fgm`; like ``probe``, ``norm`` and ``mask``.
        probe: see :func:`fgm`.
        norm: see :func:`fgm`.
        mask: see :func:`fgm`.
        key: start at a random point of the ball, which takes one more call. A key starts every call at the same point;
            ``carry -> (key, carry)`` draws a new one from the carry, after the clean gradient.
        unroll: compile a loop without a scan, for those who differentiate through it.

    ``loss``, ``metrics["adversarial_loss"]`` and odd gradients as in :func:`fgm`.

    >>> import torch
    >>> from functricks import gradient
    >>> loss = lambda params, _: (params["head"] * params["emb"]).square()
    >>> attacked = pgd(gradient(loss), 0.5, 0.3, 2, where="emb")
    >>> attacked({"head": torch.tensor(1.0), "emb": torch.tensor(2.0)}, ()).grads
    {'head': tensor(20.5000), 'emb': tensor(9.)}
    """
    check_grad_fn("pgd", grad_fn)
    check_number("pgd: epsilon", epsilon, minimum=0.0)
    check_number("pgd: step_size", step_size, minimum=0.0)
    check_steps("pgd", steps)
    aim = _aim("pgd", where, probe, norm, mask)

    def perturbed(params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        target = aim(params, batch)

        def at(shift: dict[str, Tensor], carry: Carry) -> _Visit:
            return _Visit.of(shift, grad_fn(target.moved(shift), batch, carry, scale=scale))

        def advance(last: _Visit, _: Any) -> _Visit:
            return at(_further(last, target, epsilon, step_size, norm), last.carry)

        clean = grad_fn(target.clean, batch, carry, scale=scale)
        visit = _Visit.of(tree.zeros_like(target.start), clean)
        if key is not None:
            visit = at(*_random_start(key, clean.carry, target, epsilon, norm))
        visit = repeat(advance, advance(visit, None), steps - 1, unroll=unroll)
        return _added(clean, target.own(clean.grads), target.own(visit.grads), visit.loss, visit.carry)

    return perturbed


def free_lb(
    grad_fn: GradFn,
    epsilon: Number = 1.0,
    step_size: Number = 0.3,
    steps: int = 3,
    *,
    where: tree.Where | None = None,
    probe: Probe | None = None,
    norm: Norm = "leaf",
    mask: Mask | None = None,
    key: Key | None = None,
    unroll: bool = False,
) -> GradFn:
    r"""Average the gradient over the steps of an attack, so that K steps cost K gradients: free large-batch training.

    .. math::
        g = \frac{1}{K} \sum_{k=0}^{K-1} g(\theta + r_k), \qquad r_{k+1} = \Pi_{\lVert r \rVert \le \epsilon}
        \left(r_k + \alpha \frac{g(\theta + r_k)}{\lVert g(\theta + r_k) \rVert_2}\right)

    Classic: K backward passes of ``loss / K`` with a ``delta`` that is moved by its own gradient between them.
    Reference: Zhu et al. 2020, arXiv:1909.11764, on the word embeddings of each example: ``probe=``,
    ``norm="example"``.

    Args:
        grad_fn: the gradient function; called ``steps`` times.
        epsilon: the radius of the ball, >= 0.
        step_size: the length of one step, >= 0.
        steps: K, >= 1.
        where: what to perturb, see :func:`fgm`; like ``probe``, ``norm`` and ``mask``.
        probe: see :func:`fgm`.
        norm: see :func:`fgm`.
        mask: see :func:`fgm`.
        key: where to start, see :func:`pgd`; by default :math:`r_0 = 0`.
        unroll: see :func:`pgd`.

    ``loss`` is the mean over the steps, whose gradient this is; ``metrics["adversarial_loss"]`` is the last one. Other
    metrics are those of the first step.

    >>> import torch
    >>> from functricks import gradient
    >>> loss = lambda params, _: (params["head"] * params["emb"]).square()
    >>> attacked = free_lb(gradient(loss), 1.0, 1.0, 2, where="emb")
    >>> attacked({"head": torch.tensor(1.0), "emb": torch.tensor(2.0)}, ()).grads
    {'head': tensor(13.), 'emb': tensor(5.)}
    """
    check_grad_fn("free_lb", grad_fn)
    check_number("free_lb: epsilon", epsilon, minimum=0.0)
    check_number("free_lb: step_size", step_size, minimum=0.0)
    check_steps("free_lb", steps)
    aim = _aim("free_lb", where, probe, norm, mask)

    def averaged(params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        target = aim(params, batch)
        shift = tree.zeros_like(target.start)
        if key is not None:
            shift, carry = _random_start(key, carry, target, epsilon, norm)
        first = grad_fn(target.moved(shift), batch, carry, scale=scale)

        def advance(state: tuple[_Visit, Any], _: Any) -> tuple[_Visit, Any]:
            last, sums = state
            shift = _further(last, target, epsilon, step_size, norm)
            found = grad_fn(target.moved(shift), batch, last.carry, scale=scale)
            return _Visit.of(shift, found), tree.add(sums, (tree.wide(target.own(found.grads)), found.loss))

        state = (_Visit.of(shift, first), (tree.wide(target.own(first.grads)), first.loss))
        if steps > 1:
            state = repeat(advance, advance(state, None), steps - 2, unroll=unroll)
        last, sums = state
        grads, loss = tree.scale(sums, 1 / steps)
        grads = tree.map(lambda leaf, like: leaf.to(like.dtype), grads, params)
        return Gradient(grads, loss, first.weight, last.carry, {**first.metrics, "adversarial_loss": last.loss})

    return averaged


def sam(grad_fn: GradFn, rho: Number = 0.05, *, where: tree.Where | None = None) -> GradFn:
    r"""Return the gradient at parameters moved by ``rho`` along the gradient, alone: sharpness-aware minimisation.

    .. math:: g\left(\theta + \rho \frac{g(\theta)}{\lVert g(\theta) \rVert_2}\right)

    Classic: ``first_step`` and ``second_step`` around two backward passes. Reference: Foret et al. 2021,
    arXiv:2010.01412.

    Args:
        grad_fn: the gradient function; called twice, the carry goes through both calls.
        rho: the length of the perturbation, >= 0; the norm is that of all chosen leaves together.
        where: the leaves to perturb (a selector); all by default.

    ``loss``, ``metrics["adversarial_loss"]`` and odd gradients as in :func:`fgm`.

    >>> import torch
    >>> from functricks import gradient
    >>> sam(gradient(lambda params, _: params["w"].square()), 0.5)({"w": torch.tensor(1.0)}, ()).grads
    {'w': tensor(3.)}
    """
    check_grad_fn("sam", grad_fn)
    check_number("sam: rho", rho, minimum=0.0)

    def moves(params: Params, grads: Grads) -> dict[str, Tensor]:
        chosen = tree.select(_everything if where is None else where, params, name="sam")
        return step(tree.pick(grads, chosen), rho, "global")

    return _elsewhere(grad_fn, moves)


def awp(grad_fn: GradFn, gamma: Number = 0.01, *, where: tree.Where | None = None) -> GradFn:
    r"""Return the gradient at weights moved in proportion to their own length, alone: adversarial weight perturbation.

    .. math:: g(\theta + v), \qquad v_l = \gamma \lVert \theta_l \rVert_2 \frac{g_l(\theta)}{\lVert g_l(\theta)
        \rVert_2} \text{ for every leaf } l

    Classic: ``perturb``, ``backward``, ``restore``. Reference: Wu et al. 2020, arXiv:2004.05884, which does it on
    adversarial examples: with :func:`attack` in the loss, or around an adversarial gradient function.

    Args:
        grad_fn: the gradient function; called twice, the carry goes through both calls.
        gamma: the relative length of the perturbation, >= 0.
        where: the leaves to perturb (a selector); by default those of two axes or more, as in the paper.

    ``loss``, ``metrics["adversarial_loss"]`` and odd gradients as in :func:`fgm`.

    >>> import torch
    >>> from functricks import gradient
    >>> awp(gradient(lambda params, _: params["w"].square()), 0.5, where="w")({"w": torch.tensor(2.0)}, ()).grads
    {'w': tensor(6.)}
    """
    check_grad_fn("awp", grad_fn)
    check_number("awp: gamma", gamma, minimum=0.0)

    def moves(params: Params, grads: Grads) -> dict[str, Tensor]:
        chosen = tree.select(_is_matrix if where is None else where, params, name="awp")
        lengths = norms(tree.pick(params, chosen), "leaf")
        slopes = tree.pick(grads, chosen)
        return {
            path: step({path: slope}, gamma * length_of(lengths[path]), "leaf")[path] for path, slope in slopes.items()
        }

    return _elsewhere(grad_fn, moves)


# --- helpers ---------------------------------------------------------------------------------------------------------


class _Visit(NamedTuple):
    """A point of an attack and what was found there."""

    shift: dict[str, Tensor]
    grads: Grads
    loss: Tensor
    carry: Carry

    @classmethod
    def of(cls, shift: dict[str, Tensor], found: Gradient) -> _Visit:
        return cls(shift, found.grads, found.loss, found.carry)


class _Target(NamedTuple):
    """What is perturbed: where it starts, and how it goes into and comes out of the gradient function."""

    clean: Params
    start: dict[str, Tensor]
    moved: Callable[[dict[str, Tensor]], Params]
    pick: Callable[[Grads], dict[str, Tensor]]
    own: Callable[[Grads], Grads]
    mask: Tensor | None


def _aim(
    name: str, where: tree.Where | None, probe: Probe | None, norm: Norm, mask: Mask | None
) -> Callable[[Params, Batch], _Target]:
    """Check what is to be perturbed, and return the function that finds it."""
    if (where is None) == (probe is None):
        raise ValueError(f"{name}: give exactly one of where (parameters) and probe (activations)")
    if mask is not None and probe is None:
        raise ValueError(f"{name}: mask needs probe; parameters have no padding")
    check_norm(name, norm, ("leaf", "global") if probe is None else ("leaf", "global", "example", "token"))

    def parameters(params: Params, batch: Batch) -> _Target:
        chosen = tree.select(where, params, name=name)
        start = tree.pick(params, chosen)

        def moved(shift: dict[str, Tensor]) -> Params:
            return tree.from_named(params, tree.add(start, shift))

        return _Target(params, start, moved, lambda grads: tree.pick(grads, chosen), lambda grads: grads, None)

    def activations(params: Params, batch: Batch) -> _Target:
        assert probe is not None
        zeros = probe(params, batch)
        kept = None if mask is None else mask(batch)

        def moved(shift: dict[str, Tensor]) -> Params:
            return params, tree.from_named(zeros, shift)

        def pick(grads: Grads) -> dict[str, Tensor]:
            return masked(tree.named_leaves(grads[1]), kept)

        start = tree.named_leaves(zeros)
        return _Target((params, zeros), start, moved, pick, lambda grads: grads[0], kept)

    return parameters if probe is None else activations


def _further(last: _Visit, target: _Target, epsilon: Number, step_size: Number, norm: Norm) -> dict[str, Tensor]:
    """Return where to go next: a step along the gradient, kept in the ball."""
    return project(tree.add(last.shift, step(target.pick(last.grads), step_size, norm)), epsilon, norm)


def _random_start(
    key: Key, carry: Carry, target: _Target, epsilon: Number, norm: Norm
) -> tuple[dict[str, Tensor], Carry]:
    drawn, carry = key(carry) if callable(key) else (key, carry)
    return random_point(drawn, target.start, epsilon, norm, target.mask), carry


def _added(clean: Gradient, grads: Grads, other: Grads, loss: Tensor, carry: Carry) -> Gradient:
    """Sum the two gradients; the loss stays the clean one, the carry is the one that saw both."""
    metrics = {**clean.metrics, "adversarial_loss": loss}
    return clean._replace(grads=tree.add(grads, other), carry=carry, metrics=metrics)


def _elsewhere(grad_fn: GradFn, moves: Callable[[Params, Grads], dict[str, Tensor]]) -> GradFn:
    """Return the gradient function that looks at moved parameters alone."""

    def perturbed(params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        clean = grad_fn(params, batch, carry, scale=scale)
        shift = moves(params, clean.grads)
        named = tree.named_leaves(params)
        moved = tree.add({path: named[path] for path in shift}, shift)
        other = grad_fn(tree.from_named(params, moved), batch, clean.carry, scale=scale)
        metrics = {**clean.metrics, "adversarial_loss": other.loss}
        return clean._replace(grads=other.grads, carry=other.carry, metrics=metrics)

    return perturbed


def _everything(path: str, leaf: Tensor) -> bool:
    return True


def _is_matrix(path: str, leaf: Tensor) -> bool:
    return leaf.ndim > 1
