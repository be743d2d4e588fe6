"""Optimizers that know a leaf as a matrix: Adafactor, Muon, and LAMB, which knows it as one layer."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from functricks import tree
from functricks.optimizers.base import ascend, decay, descend
from functricks.transforms import chain, scale, scale_by_adam, scale_by_learning_rate, scale_by_trust_ratio
from functricks.transforms.base import (
    check_integer,
    check_number,
    check_pair,
    check_rate,
    counter,
    double,
    is_zero,
    matched,
    rate_at,
    recorded,
    statistic,
)
from functricks.types import Grads, Number, Params, Schedule, Transform, Updates

__all__ = ["adafactor", "lamb", "muon"]


# --- Adafactor -------------------------------------------------------------------------------------------------------


class AdafactorState(NamedTuple):
    step: Tensor
    rows: dict[str, Tensor]
    columns: dict[str, Tensor]
    squares: dict[str, Tensor]


def step_adafactor(
    lr: Number | Schedule,
    beta2_decay: Number,
    eps: tuple[Number | None, Number],
    d: Number,
    weight_decay: Number,
    decay_where: tree.Where | None,
) -> Transform:
    """The step of :func:`adafactor`, not yet negated."""

    def init(params: Params) -> AdafactorState:
        leaves = tree.named_leaves(statistic("adafactor", params))
        rows = {path: leaf[..., :1].clone() for path, leaf in leaves.items() if leaf.ndim > 1}
        columns = {path: leaf[..., :1, :].clone() for path, leaf in leaves.items() if leaf.ndim > 1}
        squares = {path: leaf for path, leaf in leaves.items() if leaf.ndim < 2}
        return AdafactorState(counter(params), rows, columns, squares)

    def update(grads: Grads, state: AdafactorState, params: Params) -> tuple[Updates, AdafactorState]:
        _check_adafactor(state, grads)
        step = state.step + 1
        rate = torch.as_tensor(rate_at(lr, state.step), dtype=torch.float64)
        bounded = torch.minimum(rate, step.double() ** -0.5)
        fresh = step.double() ** double(beta2_decay)
        own = tree.named_leaves(params)
        new = AdafactorState(step, {}, {}, {})
        updates = {}
        for path, grad in tree.named_leaves(tree.wide(grads)).items():
            variance = _variance(path, grad, state, new, fresh, eps[0])
            size = torch.maximum(_root_mean_square(own[path]), torch.as_tensor(eps[1], dtype=torch.float64))
            updates[path] = _clipped(grad * _inverse_root(variance, eps[0]), d, bounded * size)
        wide = tree.wide(grads)
        found = tree.from_named(wide, updates)
        if is_zero(weight_decay):
            return found, new
        (decays,) = decay(double(weight_decay) * rate, decay_where)
        return decays.update(found, (), params)[0], new

    return Transform(init, update)


def _check_adafactor(state: AdafactorState, grads: Grads) -> None:
    grads = tree.named_leaves(grads)
    expected = {path: (leaf[..., :1] if leaf.ndim > 1 else leaf) for path, leaf in grads.items()}
    tree.check_like("adafactor: the state and the gradients", expected, {**state.rows, **state.squares})
    columns = {path: leaf[..., :1, :] for path, leaf in grads.items() if leaf.ndim > 1}
    tree.check_like("adafactor: the state and the gradients", columns, state.columns)


def _smallest(eps: Number | None, leaf: Tensor) -> Tensor:
    eps = torch.finfo(leaf.dtype).eps if eps is None else eps
    return torch.as_tensor(eps, dtype=leaf.dtype, device=leaf.device)


def _variance(
    path: str, grad: Tensor, state: AdafactorState, new: AdafactorState, fresh: Tensor, eps: Number | None
) -> Tensor:
    """Update the statistics of a leaf in ``new``, and return what they say about every entry's square."""
    weight = fresh.to(grad.dtype)
    squares = grad * grad
    if grad.ndim < 2:
        new.squares[path] = torch.lerp(state.squares[path], squares, weight)
        return new.squares[path]
    rows = new.rows[path] = torch.lerp(state.rows[path], squares.mean(-1, keepdim=True), weight)
    columns = new.columns[path] = torch.lerp(state.columns[path], squares.mean(-2, keepdim=True), weight)
    if not grad.numel():
        return squares
    product: Tensor = rows @ columns
    return product / torch.maximum(rows.mean(-2, keepdim=True), _smallest(eps, grad))


def _inverse_root(variance: Tensor, eps: Number | None) -> Tensor:
    smallest = _smallest(eps, variance)
    return torch.rsqrt(torch.maximum(variance, smallest * smallest))


def _root_mean_square(leaf: Tensor) -> Tensor:
    size: float = max(leaf.numel(), 1) ** 0.5
    return tree.norm(leaf) / size


def _clipped(update: Tensor, d: Number, rate: Tensor) -> Tensor:
    """Return the update at its rate, made smaller where its root mean square is more than ``d``."""
    excess = torch.clamp(_root_mean_square(update) / double(d), min=1.0)
    return update * (rate / excess).to(update.dtype)


@recorded
def adafactor(
    lr: Number | Schedule = 1e-2,
    beta2_decay: Number = -0.8,
    eps: tuple[Number | None, Number] = (None, 1e-3),
    d: Number = 1.0,
    weight_decay: Number = 0.0,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
) -> Transform:
    r"""Adaptive steps with the memory of a row and a column for every matrix: the second moment is their product.

    .. math::
        R_t = \hat\beta R_{t-1} + (1 - \hat\beta)\, \overline{g^2}^{\text{rows}}, \quad
        C_t = \hat\beta C_{t-1} + (1 - \hat\beta)\, \overline{g^2}^{\text{columns}}, \quad
        U = \frac{g}{\sqrt{R C / \bar R}}, \quad
        \theta \mapsto \theta - \frac{\max(\epsilon_2, \mathrm{rms}(\theta)) \min(\eta, t^{-1/2})}{\max(1,
        \mathrm{rms}(U) / d)} U

    with :math:`1 - \hat\beta = t^{\gamma}`. Leaves of one axis keep the whole second moment; leaves of more than two
    are factored over their last two.

    Classic: :class:`torch.optim.Adafactor`. Reference: Shazeer and Stern 2018, arXiv:1804.04235. For half-precision
    parameters PyTorch keeps the statistics in half; here they are float32, and ``eps[0]`` is that of float32.

    Args:
        lr: the largest learning rate: a number, a 0-d tensor or a schedule. A rate for some leaves: ``partition``.
        beta2_decay: :math:`\gamma \le 0`.
        eps: :math:`\epsilon_1`, which keeps the root from zero (None: that of the dtype), and :math:`\epsilon_2`.
        d: :math:`\ge 1`, bounds the root mean square of an update.
        weight_decay: decoupled.
        maximize: ascend instead of descend.
        decay_where: the leaves that decay; all by default.

    >>> optimizer = adafactor(0.1)
    >>> params = {"w": torch.tensor([[2.0]])}
    >>> optimizer.update({"w": torch.tensor([[3.0]])}, optimizer.init(params), params)[0]
    {'w': tensor([[-0.2000]])}
    """
    check_rate("lr", lr)
    check_number("adafactor: beta2_decay", beta2_decay, maximum=0.0)
    check_number("adafactor: d", d, minimum=1.0)
    check_pair("adafactor: eps", eps)
    check_number("adafactor: eps[1]", eps[1], minimum=0.0)
    check_number("adafactor: weight_decay", weight_decay, minimum=0.0)
    if eps[0] is not None:
        check_number("adafactor: eps[0]", eps[0], minimum=0.0)
    own = step_adafactor(lr, beta2_decay, eps, d, weight_decay, decay_where)
    return chain(*ascend(maximize), own, scale(-1.0))


# --- Muon ------------------------------------------------------------------------------------------------------------


class ScaleByMuonState(NamedTuple):
    mu: Grads


AdjustLr = Literal["original", "match_rms_adamw"]


def scale_by_muon(
    momentum: Number,
    nesterov: bool,
    ns_coefficients: tuple[Number, Number, Number],
    eps: Number,
    ns_steps: int,
    adjust_lr_fn: AdjustLr | None,
) -> Transform:
    """The direction of :func:`muon`."""

    def direction(leaf: Tensor, *numbers: Number) -> Tensor:
        return _orthogonal(leaf, numbers[:3], numbers[3], ns_steps).to(leaf.dtype) * _gain(leaf, adjust_lr_fn)

    def init(params: Params) -> ScaleByMuonState:
        _check_matrices(params)
        return ScaleByMuonState(statistic("muon", params))

    def update(grads: Grads, state: ScaleByMuonState, params: Params) -> tuple[Updates, ScaleByMuonState]:
        _check_matrices(grads)
        grads = matched("muon", grads, state.mu)
        mu = tree.ema(state.mu, grads, momentum)
        ahead = tree.pointwise(torch.lerp, grads, mu, coefficients=(momentum,)) if nesterov else mu
        return tree.pointwise(direction, ahead, coefficients=(*ns_coefficients, eps)), ScaleByMuonState(mu)

    return Transform(init, update)


def _check_matrices(params: Params) -> None:
    others = {path: tuple(leaf.shape) for path, leaf in tree.named_leaves(params).items() if leaf.ndim != 2}
    if others:
        raise ValueError(f"muon: takes leaves of two axes only (give it its own with partition); others: {others}")


def _orthogonal(leaf: Tensor, coefficients: tuple[Number, ...], eps: Number, steps: int) -> Tensor:
    """Return the matrix with its singular values near 1, by Newton-Schulz steps in bfloat16."""
    a, b, c = coefficients
    tall = leaf.shape[0] > leaf.shape[1]
    x = leaf.bfloat16().T if tall else leaf.bfloat16()
    length = torch.linalg.vector_norm(x)
    x = x / torch.maximum(length, torch.as_tensor(eps, dtype=x.dtype, device=x.device))
    for _ in range(steps):
        gram = x @ x.T
        x = _mixed(x, _mixed(gram, gram, gram, b, c), x, a, 1.0)
    return x.T if tall else x


def _mixed(x: Tensor, left: Tensor, right: Tensor, beta: Number, alpha: Number) -> Tensor:
    """Return ``beta * x + alpha * left @ right``, in PyTorch's one operation where the numbers are Python's."""
    if isinstance(beta, Tensor) or isinstance(alpha, Tensor):
        beta, alpha = (torch.as_tensor(value, dtype=x.dtype, device=x.device) for value in (beta, alpha))
        return beta * x + alpha * (left @ right)
    mixed: Tensor = torch.addmm(x, left, right, beta=beta, alpha=alpha)
    return mixed


def _gain(leaf: Tensor, adjust_lr_fn: AdjustLr | None) -> float:
    rows, columns = leaf.shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns)) if columns else 1.0


@recorded
def muon(
    lr: Number | Schedule = 1e-3,
    weight_decay: Number = 0.1,
    momentum: Number = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[Number, Number, Number] = (3.4445, -4.7750, 2.0315),
    eps: Number = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: AdjustLr | None = None,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
    learning_rates: dict[str, Number] | None = None,
) -> Transform:
    r"""Momentum whose every matrix is made nearly orthogonal, so that all directions move alike.

    .. math::
        m_t = \mu m_{t-1} + (1 - \mu) g_t, \quad X_0 = \frac{\tilde m_t}{\lVert \tilde m_t \rVert}, \quad
        X_{k+1} = a X_k + (b X_k X_k^\top + c (X_k X_k^\top)^2) X_k, \quad
        \theta \mapsto \theta - \eta (s X_K + \lambda \theta)

    with :math:`\tilde m = (1 - \mu) g + \mu m` for ``nesterov`` and :math:`s = \sqrt{\max(1, rows / columns)}`. For the
    matrices of hidden layers; embeddings, heads, biases and norms belong to another optimizer: ``partition``.

    Classic: :class:`torch.optim.Muon`, with its sequence of operations in bfloat16.
    Reference: Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule.
        weight_decay: :math:`\lambda`, decoupled.
        momentum: :math:`\mu`, in [0, 1).
        nesterov: look one step ahead.
        ns_coefficients: :math:`a, b, c`.
        eps: what the norm counts as at least.
        ns_steps: :math:`K`, below 100.
        adjust_lr_fn: None or ``"original"`` for :math:`s` above, ``"match_rms_adamw"`` for
            :math:`s = 0.2 \sqrt{\max(rows, columns)}`, which suits the learning rates of AdamW.
        maximize: see :func:`~functricks.adam`, as ``decay_where`` and ``learning_rates``.

    Raises ``ValueError`` that names the leaves which do not have two axes.

    >>> optimizer = muon(0.1, weight_decay=0.0)
    >>> params = {"w": torch.eye(2)}
    >>> optimizer.update({"w": torch.eye(2)}, optimizer.init(params), params)[0]["w"].abs().max() < 0.12
    tensor(True)
    """
    if len(ns_coefficients) != 3:
        raise ValueError(f"muon: ns_coefficients must be three numbers, got {ns_coefficients!r}")
    for index, coefficient in enumerate(ns_coefficients):
        check_number(f"muon: ns_coefficients[{index}]", coefficient)
    check_integer("muon: ns_steps", ns_steps, 0)
    if ns_steps >= 100:
        raise ValueError(f"muon: ns_steps must be below 100, got {ns_steps!r}")
    if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"muon: adjust_lr_fn must be None, 'original' or 'match_rms_adamw', got {adjust_lr_fn!r}")
    check_number("muon: momentum", momentum, minimum=0.0)
    check_number("muon: eps", eps, minimum=0.0)
    return chain(
        *ascend(maximize),
        scale_by_muon(momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn),
        descend(lr, weight_decay, decay_where, learning_rates),
    )


# --- LAMB ------------------------------------------------------------------------------------------------------------


@recorded
def lamb(
    lr: Number | Schedule = 1e-3,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-6,
    weight_decay: Number = 1e-2,
    *,
    maximize: bool = False,
    decay_where: tree.Where | None = None,
    learning_rates: dict[str, Number] | None = None,
) -> Transform:
    r"""AdamW whose every leaf moves by a step in proportion to its own length: for very large batches.

    .. math:: \theta \mapsto \theta - \eta \frac{\lVert \theta \rVert}{\lVert r_t \rVert} r_t,
        \qquad r_t = u_t + \lambda \theta

    with Adam's :math:`u_t`, see :func:`~functricks.scale_by_adam`, and the ratio 1 where one of the norms is zero.

    PyTorch has no LAMB. Reference: You et al. 2020, arXiv:1904.00962, with :math:`\phi(z) = z`.

    Args:
        lr: the learning rate: a number, a 0-d tensor or a schedule.
        betas: see :func:`~functricks.scale_by_adam`, as ``eps``.
        eps: >= 0.
        weight_decay: :math:`\lambda`, decoupled, and part of what the ratio scales.
        maximize: see :func:`~functricks.adam`, as ``decay_where`` and ``learning_rates``.

    >>> optimizer = lamb(0.1, weight_decay=0.0)
    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> optimizer.update({"w": torch.tensor([1.0, 0.0])}, optimizer.init(params), params)[0]
    {'w': tensor([-0.5000, -0.0000])}
    """
    return chain(
        *ascend(maximize),
        scale_by_adam(betas, eps),
        *decay(weight_decay, decay_where),
        scale_by_trust_ratio(),
        scale_by_learning_rate(lr, learning_rates),
    )
