"""Gradients that ask for the same output under a perturbation: of the input (VAT), or by dropout (R-Drop)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from functricks import tree
from functricks.adversarial._geometry import Norm, check_norm, check_steps, masked, random_point, step
from functricks.adversarial._parameters import Key, Mask, Probe
from functricks.gradients import gradient
from functricks.gradients._gradient import check_grad_fn
from functricks.transforms.base import check_number
from functricks.types import Batch, Carry, GradFn, Gradient, Loss, Number, Params

__all__ = ["r_drop", "vat"]


def vat(
    grad_fn: GradFn,
    predict: Callable[[tuple[Params, Any], Batch, Carry], Tensor],
    epsilon: Number = 1.0,
    *,
    probe: Probe,
    key: Key,
    weight: Number = 1.0,
    xi: Number = 1e-3,
    steps: int = 1,
    norm: Norm = "example",
    mask: Mask | None = None,
) -> GradFn:
    r"""Add the gradient of how far the output moves under the worst small perturbation: virtual adversarial training.

    .. math::
        g + \lambda \nabla_\theta\, \mathrm{KL}\left(p(x, \hat\theta) \,\Vert\, p(x + r, \theta)\right), \qquad
        r \approx \arg\max_{\lVert r \rVert \le \epsilon} \mathrm{KL}\left(p(x) \,\Vert\, p(x + r)\right)

    by power iteration from a random direction. It needs no labels, so unlabelled examples may be in the batch.

    Classic: ``_l2_normalize(d)``, ``kl_div``, ``backward`` to ``d``, and again for the loss. Reference: Miyato et al.
    2018, arXiv:1704.03976.

    Args:
        grad_fn: the gradient of the supervised loss, with ``params`` alone.
        predict: ``((params, probe), batch, carry) -> logits``, classes on axis 1, where the probe is added to the input
            or to an activation. It is called with one carry for all its calls, so that dropout masks are the same, and
            the carry does not move on (BatchNorm's statistics do not see perturbed inputs).
        epsilon: the length of the perturbation, >= 0.
        probe: ``(params, batch) -> zeros`` of the perturbation's shape, examples first.
        key: draws the first direction: a key, or ``carry -> (key, carry)``.
        weight: :math:`\lambda`, >= 0.
        xi: the length at which the KL divergence is differentiated for its direction, > 0. It has to show in the
            activations: where these are half precision (autocast included), take 0.1, as 1e-3 is lost in rounding.
        steps: the number of power iterations, >= 1.
        norm: see :func:`fgm`.
        mask: see :func:`fgm`.

    ``loss`` is that of ``grad_fn``; ``metrics["vat_loss"]`` is the divergence.
    """
    check_grad_fn("vat", grad_fn)
    check_number("vat: epsilon", epsilon, minimum=0.0)
    check_number("vat: weight", weight, minimum=0.0)
    check_number("vat: xi", xi, minimum=0.0)
    if not isinstance(xi, Tensor) and xi == 0:
        raise ValueError("vat: xi must be > 0, got 0: at a distance of zero the divergence has no slope")
    check_steps("vat", steps)
    check_norm("vat", norm, ("leaf", "global", "example", "token"))

    def virtual(params: Params, batch: Batch, carry: Carry = (), *, scale: Number | None = None) -> Gradient:
        clean = grad_fn(params, batch, carry, scale=scale)
        drawn, new_carry = key(clean.carry) if callable(key) else (key, clean.carry)
        zeros = probe(params, batch)
        like, kept = tree.named_leaves(zeros), None if mask is None else mask(batch)
        target = torch.log_softmax(predict((params, zeros), batch, carry), 1)

        def divergence(params: Params, shift: dict[str, Tensor]) -> Tensor:
            logits = predict((params, tree.from_named(zeros, shift)), batch, carry)
            return _kl(target, torch.log_softmax(logits, 1))

        direction = random_point(drawn, like, xi, norm, kept)
        for turn in range(steps):
            shift = step(direction, xi, norm)
            slope = torch.func.grad(lambda shift: divergence(params, shift).sum())(shift)
            direction = step(masked(slope, kept), epsilon if turn == steps - 1 else xi, norm)
        shift = direction

        def loss_fn(params: Params, batch: Batch) -> Loss:
            values = divergence(params, shift)
            return Loss(values, torch.ones_like(values))

        extra = gradient(loss_fn)(params, batch, scale=scale)
        metrics = {**clean.metrics, "vat_loss": extra.loss}
        return clean._replace(grads=tree.add_scaled(clean.grads, extra.grads, weight), carry=new_carry, metrics=metrics)

    return virtual


def r_drop(
    predict: Callable[[Params, Batch, Carry], tuple[Tensor, Carry]],
    loss: Callable[[Tensor, Batch], Loss],
    alpha: Number = 1.0,
    *,
    backend: Literal["func", "autograd"] = "func",
) -> GradFn:
    r"""Return the gradient of two passes with different dropout, and of how far their outputs are apart: R-Drop.

    .. math::
        L(p_1) + L(p_2) + \frac{\alpha}{2} \left(\mathrm{KL}(p_1 \Vert p_2) + \mathrm{KL}(p_2 \Vert p_1)\right)

    A maker, not a wrapper: both passes belong to one graph.

    Classic: ``model(x)`` twice and ``F.kl_div`` both ways. Reference: Liang et al. 2021, arXiv:2106.14448.

    Args:
        predict: ``(params, batch, carry) -> (logits, carry)``, classes on axis 1; the carry holds the key that dropout
            draws from, so the second pass draws anew.
        loss: ``(logits, batch) -> Loss`` of the shape of the logits without their class axis. Its weights weigh the
            divergences too, so what it ignores does not count.
        alpha: >= 0.
        backend: see :func:`gradient`.

    ``loss`` is the whole; ``metrics["divergence"]`` is the mean of the two divergences.
    """
    check_number("r_drop: alpha", alpha, minimum=0.0)

    def loss_fn(params: Params, batch: Batch, carry: Carry) -> tuple[Loss, Carry, dict[str, Tensor]]:
        logits1, carry = predict(params, batch, carry)
        logits2, carry = predict(params, batch, carry)
        loss1, loss2 = loss(logits1, batch), loss(logits2, batch)
        rows = (logits1.shape[0], *logits1.shape[2:])
        if loss1.values.shape != rows:
            raise ValueError(
                f"r_drop: the loss must have the shape of the logits without classes, {rows}, "
                f"got {tuple(loss1.values.shape)}"
            )
        # before log_softmax, whose derivative spreads a NaN
        kept = (loss1.weights != 0).unsqueeze(1)
        log1, log2 = (torch.log_softmax(torch.where(kept, logits, 0.0), 1) for logits in (logits1, logits2))
        apart = (_kl(log1, log2) + _kl(log2, log1)) / 2
        apart = apart * loss1.weights.to(apart.dtype)
        values = loss1.values + loss2.values + apart * (alpha.to(apart.dtype) if isinstance(alpha, Tensor) else alpha)
        return Loss(values, loss1.weights), carry, {"divergence": Loss(apart, loss1.weights).mean()}

    return gradient(loss_fn, has_carry=True, has_metrics=True, backend=backend)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) over axis 1; a class that p excludes counts for nothing, and NaN stays NaN."""
    p = log_p.exp()
    return torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(1)
