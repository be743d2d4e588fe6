"""Scaling updates, and adding to them: rates, weight decay, noise."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functricks import random, tree
from functricks.transforms.base import check_moves, check_number, check_rate, counter, is_schedule, stateless
from functricks.transforms.groups import scale_by_path
from functricks.types import Grads, Number, Params, Schedule, State, Transform, Updates

__all__ = [
    "add_decayed_weights",
    "add_noise",
    "centralize",
    "scale",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "scale_by_trust_ratio",
]


def scale(factor: Number) -> Transform:
    """Multiply the gradients by ``factor``; half precision goes on in float32, in which tiny products do not vanish.

    >>> scale(-0.5).update({"w": torch.tensor(2.0)}, (), {})[0]
    {'w': tensor(-1.)}
    """
    check_number("scale: factor", factor)
    return stateless(lambda grads, params: tree.scale(tree.wide(grads), factor))


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
    if not is_schedule(schedule):
        raise TypeError(f"scale_by_schedule: schedule must be a function of the step, got {schedule!r}; see scale")

    def init(params: Params) -> ScaleByScheduleState:
        return ScaleByScheduleState(counter(params))

    def update(grads: Grads, state: ScaleByScheduleState, params: Params) -> tuple[Updates, ScaleByScheduleState]:
        return tree.scale(tree.wide(grads), schedule(state.step)), ScaleByScheduleState(state.step + 1)

    return Transform(init, update)


def scale_by_learning_rate(lr: Number | Schedule, learning_rates: dict[str, Number] | None = None) -> Transform:
    """Multiply the gradients by ``-lr``: the last link of an optimizer.

    Args:
        lr: a number, a 0-d tensor (batched by ``vmap``: one rate a lane), or a schedule of the number of updates so
            far.
        learning_rates: ``{glob: factor}``: what ``lr`` is multiplied by for the leaves that a glob matches, as in
            ``{"head.*": 10.0}``; 1 for the others. A glob that matches nothing raises, and so does a leaf that two
            globs match.

    Classic: parameter groups with an ``lr`` of their own.

    >>> scale_by_learning_rate(0.1).update({"w": torch.tensor(1.0)}, (), {})[0]
    {'w': tensor(-0.1000)}
    >>> rates = scale_by_learning_rate(0.1, {"head.*": 10.0})
    >>> rates.update({"body.w": torch.tensor(1.0), "head.w": torch.tensor(1.0)}, (), {})[0]
    {'body.w': tensor(-0.1000), 'head.w': tensor(-1.)}
    """
    check_rate("lr", lr)
    if is_schedule(lr):
        schedule = lr
        base = scale_by_schedule(lambda step: -schedule(step))
    else:
        base = scale(-lr)

    def init(params: Params) -> State:
        check_moves("scale_by_learning_rate", params, linear=True)
        return base.init(params)

    if not learning_rates:
        return Transform(init, base.update)
    factors = scale_by_path(learning_rates, name="learning_rates")

    def update(grads: Grads, state: State, params: Params) -> tuple[Updates, State]:
        updates, state = base.update(grads, state, params)
        return factors(updates), state

    return Transform(init, update)


def add_decayed_weights(weight_decay: Number, where: tree.Where | None = None) -> Transform:
    r"""Add :math:`\lambda \theta` to the gradient.

    Classic: before an adaptive scaling this is L2 regularisation (``torch.optim.Adam(weight_decay=)``), after it
    decoupled weight decay (``torch.optim.AdamW``). Reference: Loshchilov and Hutter 2019, arXiv:1711.05101.

    Args:
        weight_decay: :math:`\lambda \ge 0`.
        where: the leaves that decay (a selector); all by default.

    The sum is float32 for half-precision gradients.

    >>> decay = add_decayed_weights(0.1, where="*weight")
    >>> params = {"weight": torch.tensor(2.0), "bias": torch.tensor(2.0)}
    >>> decay.update({"weight": torch.tensor(1.0), "bias": torch.tensor(1.0)}, (), params)[0]
    {'weight': tensor(1.2000), 'bias': tensor(1.)}
    """
    check_number("weight_decay", weight_decay, minimum=0.0)

    def update(grads: Grads, params: Params) -> Updates:
        grads = tree.wide(grads)
        if where is None:
            return tree.add_scaled(grads, params, weight_decay)
        chosen = tree.select(where, params, name="add_decayed_weights")
        picked_grads, picked_params = tree.pick(grads, chosen), tree.pick(params, chosen)
        return tree.from_named(grads, tree.add_scaled(picked_grads, picked_params, weight_decay))

    return stateless(update)


class AddNoiseState(NamedTuple):
    step: Tensor


def add_noise(key: Tensor, eta: Number = 0.01, gamma: Number = 0.55) -> Transform:
    r"""Add Gaussian noise that fades: it helps very deep networks to start, and to leave sharp minima.

    .. math:: g_t \mapsto g_t + \mathcal{N}\left(0, \frac{\eta}{(1 + t)^\gamma}\right), \qquad t = 0, 1, \dots

    PyTorch has none. Reference: Neelakantan et al. 2015, arXiv:1511.06807, with the paper's values as defaults.

    Args:
        key: from :func:`functricks.random.key`. The draw of a leaf depends on the key, the step and the leaf's path
            only, so that adding a parameter leaves the noise of the others as it was.
        eta: the variance at the first step, >= 0.
        gamma: how fast it fades, >= 0.

    The sum is float32 for half-precision gradients, in which noise that has faded would round away.

    >>> noisy = add_noise(random.key(0), eta=0.0)
    >>> params = {"w": torch.tensor(1.0)}
    >>> noisy.update(params, noisy.init(params), params)[0]
    {'w': tensor(1.)}
    """
    check_number("add_noise: eta", eta, minimum=0.0)
    check_number("add_noise: gamma", gamma, minimum=0.0)

    def init(params: Params) -> AddNoiseState:
        return AddNoiseState(counter(params))

    def update(grads: Grads, state: AddNoiseState, params: Params) -> tuple[Updates, AddNoiseState]:
        variance = torch.as_tensor(eta, dtype=torch.float64) / (1.0 + state.step.double()) ** gamma
        step_key = random.fold_in(key, state.step)
        grads = tree.wide(grads)
        noise = {
            path: random.normal(random.fold_in(step_key, tree.path_number(path)), leaf.shape).to(leaf.dtype)
            for path, leaf in tree.named_leaves(grads).items()
        }
        noisy = tree.add_scaled(grads, tree.from_named(grads, noise), tree.sqrt(variance))
        return noisy, AddNoiseState(state.step + 1)

    return Transform(init, update)


def centralize() -> Transform:
    r"""Subtract from the gradient of every output unit its mean, for leaves with two axes or more.

    .. math:: g_i \mapsto g_i - \frac{1}{n} \sum_{j=1}^n g_{ij}

    with :math:`i` the first axis, as in ``torch.nn.Linear`` and convolutions, and :math:`j` all others.

    PyTorch has none. Reference: Yong et al. 2020, "Gradient centralization", arXiv:2004.01461.

    >>> centralize().update({"w": torch.tensor([[1.0, 3.0]]), "b": torch.tensor([5.0])}, (), {})[0]
    {'w': tensor([[-1.,  1.]]), 'b': tensor([5.])}
    """

    def centre(leaf: Tensor) -> Tensor:
        if leaf.ndim < 2 or not leaf.numel():
            return leaf
        wide = leaf.to(tree.compute_dtype(leaf.dtype))
        return wide - wide.mean(tuple(range(1, leaf.ndim)), keepdim=True)

    return stateless(lambda grads, params: tree.pointwise(centre, grads))


def scale_by_trust_ratio(trust_coefficient: Number = 1.0, eps: Number = 0.0) -> Transform:
    r"""Give every leaf's update a length in proportion to the leaf's own: the layer-wise step of LARS and LAMB.

    .. math:: u \mapsto u \cdot \frac{c\, \lVert \theta \rVert}{\lVert u \rVert + \epsilon}

    and unchanged where one of the two norms is zero.

    PyTorch has none. Reference: You et al. 2017, arXiv:1708.03888; You et al. 2020, arXiv:1904.00962.

    Args:
        trust_coefficient: :math:`c \ge 0`.
        eps: added to the update's norm, >= 0.

    >>> ratio = scale_by_trust_ratio()
    >>> ratio.update({"w": torch.tensor([0.0, 2.0])}, (), {"w": torch.tensor([3.0, 4.0])})[0]
    {'w': tensor([0., 5.])}
    """
    check_number("scale_by_trust_ratio: trust_coefficient", trust_coefficient, minimum=0.0)
    check_number("scale_by_trust_ratio: eps", eps, minimum=0.0)

    def one(update: Tensor, param: Tensor, coefficient: Number, eps: Number) -> Tensor:
        length, own = tree.norm(update), tree.norm(param)
        usable = (length > 0) & (own > 0)
        wide = update.to(torch.promote_types(update.dtype, torch.float64))
        # one after the other: the ratio for a tiny update is huge
        return wide / torch.where(usable, length + eps, 1.0) * torch.where(usable, coefficient * own, 1.0)

    return stateless(lambda grads, params: tree.pointwise(one, grads, params, coefficients=(trust_coefficient, eps)))
