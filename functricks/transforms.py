"""Gradient transforms: gradients in, updates out, memory as a value.

A :class:`~functricks.Transform` is a pair of pure functions. They compose with :func:`chain`, and an optimizer is
nothing but a chain whose last link is :func:`scale_by_learning_rate`; its updates are *added* to the parameters by
:func:`apply_updates`.

Every hyper-parameter may be a tensor, so a batch of transforms is one transform under ``vmap``. Which links a chain has
follows from Python numbers alone: ``momentum=0.0`` leaves the link out, a tensor always puts it in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functricks import tree
from functricks.types import Empty, Grads, Number, Params, Schedule, State, Transform, Updates

__all__ = [
    "add_decayed_weights",
    "apply_updates",
    "chain",
    "partition",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "skip_nonfinite",
    "trace",
]


def apply_updates(params: Params, updates: Updates) -> Params:
    """Add the updates to the parameters; every parameter keeps its dtype.

    >>> apply_updates({"w": torch.tensor(1.0)}, {"w": torch.tensor(-0.5)})
    {'w': tensor(0.5000)}
    """
    return tree.add(params, updates)


# --- composing -------------------------------------------------------------------------------------------------------


def chain(*transforms: Transform) -> Transform:
    """Apply transforms one after the other; the state is the tuple of theirs.

    >>> both = chain(scale(2.0), scale_by_learning_rate(0.1))
    >>> both.update({"w": torch.tensor(1.0)}, both.init({}), {})[0]
    {'w': tensor(-0.2000)}
    """
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise TypeError(f"chain: every link must be a Transform, got {transform!r}")

    def init(params: Params) -> State:
        return tuple(transform.init(params) for transform in transforms)

    def update(grads: Grads, state: State, params: Params) -> tuple[Updates, State]:
        states = []
        for transform, one in zip(transforms, state, strict=True):
            grads, one = transform.update(grads, one, params)
            states.append(one)
        return grads, tuple(states)

    return Transform(init, update)


def partition(transforms: dict[str, Transform], labels: Any) -> Transform:
    """Give every leaf to the transform of its label.

    Classic: ``torch.optim`` parameter groups.

    Args:
        transforms: ``{label: transform}``. Each sees its leaves as a flat ``{path: leaf}``.
        labels: a callable ``(path, leaf) -> label``, or a tree of strings with the structure of the parameters.

    Raises ``ValueError`` that names every leaf whose label is missing or unknown: nothing is silently left out.

    >>> rates = {"slow": scale(-0.1), "fast": scale(-1.0)}
    >>> slow_fast = partition(rates, lambda path, leaf: "fast" if path == "b" else "slow")
    >>> params = {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}
    >>> slow_fast.update(params, slow_fast.init(params), params)[0]
    {'a': tensor(-0.1000), 'b': tensor(-1.)}
    """

    def parts(params: Params) -> dict[str, list[str]]:
        found = tree.label(labels, params, name="partition: labels")
        unknown = {path: label for path, label in found.items() if label not in transforms}
        if unknown:
            raise ValueError(f"partition: labels without a transform: {unknown}; have: {', '.join(transforms)}")
        return {label: [path for path, one in found.items() if one == label] for label in transforms}

    def init(params: Params) -> State:
        named = tree.named_leaves(params)
        return {
            label: transforms[label].init({path: named[path] for path in part}) for label, part in parts(params).items()
        }

    def update(grads: Grads, state: State, params: Params) -> tuple[Updates, State]:
        named_grads, named_params = tree.named_leaves(grads), tree.named_leaves(params)
        updates, states = {}, {}
        for label, part in parts(params).items():
            own_grads, own_params = ({path: named[path] for path in part} for named in (named_grads, named_params))
            own, states[label] = transforms[label].update(own_grads, state[label], own_params)
            updates.update(own)
        return tree.from_named(grads, updates), states

    return Transform(init, update)


class SkipNonfiniteState(NamedTuple):
    inner: State
    skipped: Tensor


def skip_nonfinite(transform: Transform) -> Transform:
    """Skip a step whose gradients are not all finite: zero updates, and ``transform`` keeps its state.

    Classic: what ``torch.amp.GradScaler.step`` does. :func:`functricks.train_step` does it for the whole step; this is
    for loops that own their state. ``state.skipped`` counts the skips.

    >>> safe = skip_nonfinite(scale(-1.0))
    >>> safe.update({"w": torch.tensor(float("nan"))}, safe.init({}), {})[0]
    {'w': tensor(0.)}
    """

    def init(params: Params) -> SkipNonfiniteState:
        return SkipNonfiniteState(transform.init(params), _counter())

    def update(grads: Grads, state: SkipNonfiniteState, params: Params) -> tuple[Updates, SkipNonfiniteState]:
        finite = tree.all_finite(grads)
        updates, inner = transform.update(grads, state.inner, params)
        updates = tree.where(finite, updates, tree.zeros_like(updates))
        return updates, SkipNonfiniteState(tree.where(finite, inner, state.inner), state.skipped + ~finite)

    return Transform(init, update)


# --- scaling ---------------------------------------------------------------------------------------------------------


def _counter() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _stateless(update: Any) -> Transform:
    return Transform(lambda params: Empty(), lambda grads, state, params: (update(grads, params), state))


def scale(factor: Number) -> Transform:
    """Multiply the gradients by ``factor``.

    >>> scale(-0.5).update({"w": torch.tensor(2.0)}, (), {})[0]
    {'w': tensor(-1.)}
    """
    return _stateless(lambda grads, params: tree.scale(grads, factor))


class ScaleByScheduleState(NamedTuple):
    step: Tensor


def scale_by_schedule(schedule: Schedule) -> Transform:
    """Multiply the gradients by ``schedule(step)``; ``step`` is 0 at the first update.

    >>> decayed = scale_by_schedule(lambda step: 0.5**step)
    >>> state = decayed.init({})
    >>> for _ in range(2):
    ...     updates, state = decayed.update({"w": torch.tensor(8.0)}, state, {})
    >>> updates
    {'w': tensor(4.)}
    """

    def init(params: Params) -> ScaleByScheduleState:
        return ScaleByScheduleState(_counter())

    def update(grads: Grads, state: ScaleByScheduleState, params: Params) -> tuple[Updates, ScaleByScheduleState]:
        return tree.scale(grads, schedule(state.step)), ScaleByScheduleState(state.step + 1)

    return Transform(init, update)


def scale_by_learning_rate(lr: Number | Schedule) -> Transform:
    """Multiply the gradients by ``-lr``: the last link of an optimizer.

    Args:
        lr: a number, a 0-d tensor (batched by ``vmap``: one rate a lane), or a schedule of the number of updates so
        far.

    >>> scale_by_learning_rate(0.1).update({"w": torch.tensor(1.0)}, (), {})[0]
    {'w': tensor(-0.1000)}
    """
    if callable(lr) and not isinstance(lr, Tensor):
        schedule = lr
        return scale_by_schedule(lambda step: -schedule(step))
    check_number("lr", lr, minimum=0.0)
    return scale(-lr)


class TraceState(NamedTuple):
    step: Tensor
    trace: Grads


def trace(momentum: Number, dampening: Number = 0.0, nesterov: bool = False) -> Transform:
    r"""Replace the gradient by a running sum of gradients: momentum.

    .. math:: b_1 = g_1, \qquad b_t = \mu b_{t-1} + (1 - \tau) g_t

    The update is :math:`b_t`, or :math:`g_t + \mu b_t` with ``nesterov``.

    Classic: ``torch.optim.SGD(momentum=, dampening=, nesterov=)``, the undamped first step included.
    Reference: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning".

    Args:
        momentum: :math:`\mu`, in [0, 1).
        dampening: :math:`\tau`, in [0, 1].
        nesterov: look one step ahead.

    >>> heavy = trace(0.9)
    >>> state = heavy.init({"w": torch.tensor(0.0)})
    >>> for _ in range(2):
    ...     updates, state = heavy.update({"w": torch.tensor(1.0)}, state, {})
    >>> updates
    {'w': tensor(1.9000)}
    """
    check_number("momentum", momentum, minimum=0.0)
    check_number("dampening", dampening)

    def init(params: Params) -> TraceState:
        return TraceState(_counter(), _zeros(params))

    def update(grads: Grads, state: TraceState, params: Params) -> tuple[Updates, TraceState]:
        grads = tree.map(lambda leaf, like: leaf.to(like.dtype), grads, state.trace)  # half: float32 from here on
        if isinstance(dampening, Tensor) or dampening:
            fresh = 1.0 - (state.step > 0).double() * _double(dampening)
            damped = tree.scale(grads, fresh)
        else:
            damped = grads
        new = tree.add_scaled(damped, state.trace, momentum)
        updates = tree.add_scaled(grads, new, momentum) if nesterov else new
        return updates, TraceState(state.step + 1, new)

    return Transform(init, update)


class ScaleByAdamState(NamedTuple):
    step: Tensor
    mu: Grads
    nu: Grads
    nu_max: Grads


def scale_by_adam(betas: tuple[Number, Number] = (0.9, 0.999), eps: Number = 1e-8, amsgrad: bool = False) -> Transform:
    r"""Divide a running mean of the gradient by the root of a running mean of its square.

    .. math::
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2, \quad
        u_t = \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    Classic: ``torch.optim.Adam``. Reference: Kingma and Ba 2015, arXiv:1412.6980; AMSGrad: Reddi et al. 2018,
    arXiv:1904.09237.

    Args:
        betas: the two decay rates, in [0, 1).
        eps: added to the root, >= 0.
        amsgrad: divide by the root of the largest :math:`v` so far.

    The moments are float32 for half-precision gradients.

    >>> adam = scale_by_adam()
    >>> adam.update({"w": torch.tensor(3.0)}, adam.init({"w": torch.tensor(0.0)}), {})[0]
    {'w': tensor(1.)}
    """
    check_betas(betas)
    check_number("eps", eps, minimum=0.0)
    beta1, beta2 = betas

    def init(params: Params) -> ScaleByAdamState:
        return ScaleByAdamState(_counter(), _zeros(params), _zeros(params), _zeros(params) if amsgrad else ())

    def update(grads: Grads, state: ScaleByAdamState, params: Params) -> tuple[Updates, ScaleByAdamState]:
        step = state.step + 1
        mu = tree.ema(state.mu, grads, beta1)
        nu = tree.ema_of_squares(state.nu, grads, beta2)
        nu_max = tree.maximum(state.nu_max, nu) if amsgrad else ()
        correction, root_correction = 1 - _power(beta1, step), torch.sqrt(1 - _power(beta2, step))
        updates = tree.root_ratio(mu, nu_max if amsgrad else nu, correction, root_correction, eps)
        return updates, ScaleByAdamState(step, mu, nu, nu_max)

    return Transform(init, update)


def add_decayed_weights(weight_decay: Number, where: tree.Where | None = None) -> Transform:
    r"""Add :math:`\lambda \theta` to the gradient.

    Before an adaptive scaling this is L2 regularisation (``torch.optim.Adam(weight_decay=)``), after it decoupled
    weight decay (``torch.optim.AdamW``). Reference: Loshchilov and Hutter 2019, arXiv:1711.05101.

    Args:
        weight_decay: :math:`\lambda \ge 0`.
        where: the leaves that decay (a selector); all by default.

    >>> decay = add_decayed_weights(0.1, where="*weight")
    >>> params = {"weight": torch.tensor(2.0), "bias": torch.tensor(2.0)}
    >>> decay.update({"weight": torch.tensor(1.0), "bias": torch.tensor(1.0)}, (), params)[0]
    {'weight': tensor(1.2000), 'bias': tensor(1.)}
    """
    check_number("weight_decay", weight_decay, minimum=0.0)

    def update(grads: Grads, params: Params) -> Updates:
        if where is None:
            return tree.add_scaled(grads, params, weight_decay)
        chosen = tree.select(where, params, name="add_decayed_weights")
        picked_grads, picked_params = tree.pick(grads, chosen), tree.pick(params, chosen)
        return tree.from_named(grads, tree.add_scaled(picked_grads, picked_params, weight_decay))

    return _stateless(update)


# --- helpers ---------------------------------------------------------------------------------------------------------


def check_number(name: str, value: Any, *, minimum: float | None = None, below: float | None = None) -> None:
    """Validate a hyper-parameter where it is a Python number; tensors pass."""
    if isinstance(value, Tensor):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number or a 0-d tensor, got {value!r}")
    if minimum is not None and not value >= minimum:
        raise ValueError(f"{name} must be >= {minimum:g}, got {value!r}")
    if below is not None and not value < below:
        raise ValueError(f"{name} must be < {below:g}, got {value!r}")


def check_betas(betas: tuple[Number, Number]) -> None:
    """Validate a pair of decay rates."""
    for index, beta in enumerate(betas):
        check_number(f"betas[{index}]", beta, minimum=0.0, below=1.0)


def _double(value: Number) -> Number:
    return value.double() if isinstance(value, Tensor) else value


def _power(beta: Number, step: Tensor) -> Tensor:
    """Return beta**step in float64: in float32, 1 - 0.999**t is off by 1e-5."""
    return torch.pow(_double(beta), step.double())


def _zeros(params: Params) -> Grads:
    """Return zeros for a running statistic: float32 for half-precision parameters."""
    return tree.map(lambda leaf: torch.zeros_like(leaf, dtype=tree.compute_dtype(leaf.dtype)), params)
