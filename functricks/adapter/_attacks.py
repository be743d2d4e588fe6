"""FGM and PGD for a classic loop: move parameters against us, and put them back, bit for bit, in the same storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from functricks import tree
from functricks.adversarial._geometry import Norm, check_norm, check_steps, project, step
from functricks.transforms.base import check_number
from functricks.types import Number

__all__ = ["FGM", "PGD", "Attack", "unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, DataParallel and ``torch.compile``."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class Attack:
    """What FGM and PGD share: which parameters, how to measure them, and what to put back."""

    steps = 1

    def __init__(self, model: nn.Module, epsilon: Number, where: tree.Where, norm: Norm) -> None:
        name = type(self).__name__
        check_number(f"{name}: epsilon", epsilon, minimum=0.0)
        check_norm(name, norm, ("leaf", "global"))
        self.model, self.epsilon, self.where, self.norm = model, epsilon, where, norm
        self._values: dict[str, Tensor] = {}  # of the chosen parameters, while they are moved
        self._moved: dict[str, nn.Parameter] = {}
        self._others: list[Tensor] = []  # have gradients too, and are not the model's: a loss's
        self._grads: list[tuple[Tensor, Tensor | None]] = []
        self._chosen()

    @property
    def names(self) -> list[str]:
        """The parameters that are perturbed, as the model names them; a tied one once."""
        return list(self._chosen())

    def attack(self) -> None:
        """Move the chosen parameters along their ``.grad``; no step where that is None, zero, inf or NaN."""
        self._begin()
        self._move(step(self._slopes(), self._length(), self.norm))

    @torch.no_grad()
    def restore(self) -> None:
        """Put the parameters back as they were before the first ``attack()``; without one, do nothing."""
        for name, parameter in self._moved.items():
            parameter.copy_(self._values[name])
        self._forget()

    def backup_grad(self) -> None:
        """Keep the gradients of all parameters, those that are None too."""
        grads = [(parameter, parameter.grad) for parameter in self._holders()]
        self._grads = [(parameter, None if grad is None else grad.detach().clone()) for parameter, grad in grads]

    @torch.no_grad()
    def restore_grad(self) -> None:
        """Put back the gradients that ``backup_grad()`` kept, into the same storage where there still is one."""
        for parameter, grad in self._grads:
            if grad is None or parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad.copy_(grad)
        self._grads = []

    def _holders(self) -> list[Tensor]:
        return [*self.model.parameters(), *self._others]

    def _length(self) -> Number:
        return self.epsilon

    def _chosen(self) -> dict[str, nn.Parameter]:
        """Find the parameters anew: they may have been replaced, as by a resized embedding."""
        by_name = isinstance(self.where, (str, tuple, list)) or callable(self.where)
        # either name of a tied parameter may be asked for, while a tree of bools has one
        named = dict(unwrapped(self.model).named_parameters(remove_duplicate=not by_name))
        found: dict[str, nn.Parameter] = {}
        for name, taken in tree.select(self.where, named, name=type(self).__name__).items():
            if taken and not any(named[name] is other for other in found.values()):
                found[name] = named[name]
        return found

    def _begin(self) -> None:
        if self._moved:
            raise RuntimeError(f"{type(self).__name__}: attack() again without restore(); call restore() in between")
        self._moved = self._chosen()
        self._values = {name: parameter.detach().clone() for name, parameter in self._moved.items()}

    def _slopes(self) -> dict[str, Tensor]:
        return {name: _dense(parameter) for name, parameter in self._moved.items()}

    @torch.no_grad()
    def _move(self, shift: dict[str, Tensor]) -> None:
        for name, value in tree.add(self._values, shift).items():
            self._moved[name].copy_(value)
        torch.clear_autocast_cache()  # an autocast region around the attack would go on with its copies of the weights

    def _forget(self) -> None:
        self._moved, self._values = {}, {}
        torch.clear_autocast_cache()

    def _rounds(self) -> Iterator[bool]:
        """Attack ``steps`` times; yield, each time, whether the backward pass to come is the one to keep."""
        if self.steps > 1:
            self.backup_grad()
        for number in range(1, self.steps + 1):
            self.attack()
            last = number == self.steps
            if not last:
                self._zero_grad()
            elif self.steps > 1:
                self.restore_grad()
            yield last

    @torch.no_grad()
    def _zero_grad(self) -> None:
        """Zero the gradients in place, so that they stay views into the buckets that others made."""
        for parameter in self._holders():
            if parameter.grad is not None:
                parameter.grad.zero_()


class FGM(Attack):
    r"""The fast gradient method for a classic loop: backward passes inside add the gradient at moved parameters.

    .. math:: r = \epsilon \frac{g}{\lVert g \rVert_2}

    with :math:`g` what ``.grad`` holds. Its length does not matter, so that gradients may still be scaled by a
    GradScaler or summed over micro-batches; one that is None, zero or not finite gives no perturbation.

    Classic: the ``FGM`` class of the usual recipe: ``attack()``, ``backward()``, ``restore()``. This one raises for a
    name that matches nothing, keeps backups by name, survives an infinite norm, and restores into the same storage,
    so that flat buffers and the buckets of DDP stay valid. Functional: :func:`functricks.fgm`, the same numbers.
    Reference: Miyato et al. 2017, arXiv:1605.07725.

    Args:
        model: may be wrapped by DDP, DataParallel or ``torch.compile``; names are those of the module inside.
        epsilon: the length of the perturbation, >= 0; the attribute may be changed between steps.
        where: the parameters to perturb (a selector); a tied one goes by any of its names, and is perturbed once.
        norm: ``"leaf"`` normalises every parameter by itself, ``"global"`` all of them together.

    Raises ``ValueError`` when ``where`` matches nothing, and ``RuntimeError`` for a second ``attack()`` before
    ``restore()``. Between the two the parameters are moved: keep optimizer steps and checkpoints out of there.

    The norm is that of the whole matrix, as in the recipe, so the strength per example falls with the batch size; the
    papers' norm per example needs the functional ``probe=``.

    Every pass draws its own dropout masks and moves BatchNorm's statistics, as in the usual recipe.

    Under DDP the clean backward pass must have averaged the gradients over the ranks (no ``no_sync``), or every rank
    attacks in its own direction; replicas stay equal in both cases.

    >>> model = nn.ParameterDict({"head": nn.Parameter(torch.tensor(1.0)), "emb": nn.Parameter(torch.tensor(2.0))})
    >>> fgm = FGM(model, 1.0, "emb")
    >>> loss = lambda: (model["head"] * model["emb"]).square()
    >>> loss().backward()
    >>> with fgm.attacked():
    ...     loss().backward()
    >>> model["head"].grad, model["emb"].grad, model["emb"].item()
    (tensor(26.), tensor(10.), 2.0)
    """

    def __init__(self, model: nn.Module, epsilon: Number, where: tree.Where, norm: Norm = "leaf") -> None:
        super().__init__(model, epsilon, where, norm)

    def __repr__(self) -> str:
        return f"FGM(epsilon={self.epsilon!r}, names={self.names}, norm={self.norm!r})"

    @contextmanager
    def attacked(self) -> Iterator[Self]:
        """Attack, and restore at the end, also when the block raises."""
        try:
            self.attack()
            yield self
        finally:
            self.restore()


class PGD(Attack):
    r"""Projected gradient descent for a classic loop: several steps of attack, kept in a ball, the last one counts.

    .. math::
        r_0 = 0, \qquad r_{k+1} = \Pi_{\lVert r \rVert \le \epsilon}
        \left(r_k + \alpha \frac{g(\theta + r_k)}{\lVert g(\theta + r_k) \rVert_2}\right)

    Classic: the ``PGD`` class of the usual recipe, whose ``is_first_attack`` is known here: it is the first since
    ``restore()``. ``restore_grad()`` goes by what ``backup_grad()`` kept, for *all* parameters: also those whose
    gradient is None by now, or was None then. Functional: :func:`functricks.pgd`, the same numbers. Reference: Madry et
    al. 2018, arXiv:1706.06083. The projection acts only where ``steps * step_size > epsilon``.

    Args:
        model: see :class:`FGM`.
        epsilon: the radius of the ball, >= 0.
        where: see :class:`FGM`.
        step_size: the length of one step, >= 0.
        steps: how many rounds ``attacked()`` has, >= 1; a loop of ``attack()`` calls may have any number.
        norm: see :class:`FGM`.

    Parameters outside ``model`` (those of a loss) add up the gradients of all rounds, unless :class:`Loop` runs them.

    Either ``for _ in rounds`` as below, or by hand::

        pgd.backup_grad()
        for step in range(3):
            pgd.attack()
            if step < 2:
                model.zero_grad()
            else:
                pgd.restore_grad()
            loss().backward()
        pgd.restore()

    >>> model = nn.ParameterDict({"head": nn.Parameter(torch.tensor(1.0)), "emb": nn.Parameter(torch.tensor(2.0))})
    >>> pgd = PGD(model, 0.5, "emb", step_size=0.3, steps=2)
    >>> loss = lambda: (model["head"] * model["emb"]).square()
    >>> loss().backward()
    >>> with pgd.attacked() as rounds:
    ...     for _ in rounds:
    ...         loss().backward()
    >>> model["head"].grad, model["emb"].grad, model["emb"].item()
    (tensor(20.5000), tensor(9.), 2.0)
    """

    def __init__(
        self,
        model: nn.Module,
        epsilon: Number,
        where: tree.Where,
        *,
        step_size: Number = 0.3,
        steps: int = 3,
        norm: Norm = "leaf",
    ) -> None:
        super().__init__(model, epsilon, where, norm)
        check_number("PGD: step_size", step_size, minimum=0.0)
        check_steps("PGD", steps)
        self.step_size, self.steps = step_size, steps
        self._shift: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        sizes = f"epsilon={self.epsilon!r}, step_size={self.step_size!r}, steps={self.steps}"
        return f"PGD({sizes}, names={self.names}, norm={self.norm!r})"

    def attack(self) -> None:
        """Take one more step along ``.grad``, and stay in the ball around where the first step began."""
        if not self._moved:
            self._begin()
            self._shift = tree.zeros_like(self._values)
        further = tree.add(self._shift, step(self._slopes(), self.step_size, self.norm))
        self._shift = project(further, self.epsilon, self.norm)
        self._move(self._shift)

    @contextmanager
    def attacked(self) -> Iterator[Iterator[Any]]:
        """Yield the rounds; before each, attack and clear the gradients, or, before the last, restore them.

        At the end the parameters are as before; where the block raises or breaks before the last round, so are the
        gradients.
        """
        try:
            yield self._rounds()
        finally:
            self.restore_grad()
            self.restore()

    def _forget(self) -> None:
        super()._forget()
        self._shift = {}


# --- helpers ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _dense(parameter: nn.Parameter) -> Tensor:
    """Return the gradient, zeros for None; in the parameter's shape also where it is sparse."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(parameter)
    return grad.to_dense() if grad.layout != torch.strided else grad.detach()
