"""A schedule as a ``torch.optim.lr_scheduler.LRScheduler``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from functricks.transforms.base import is_schedule
from functricks.types import Schedule

__all__ = ["Scheduler"]


class Scheduler(LRScheduler):
    r"""A schedule that writes the learning rates of an optimizer, after every step that the optimizer really took.

    .. math:: \eta_g = f(t) \cdot \frac{\eta_g^{(0)}}{\eta^{(0)}}

    with :math:`t` the number of calls of :meth:`step` that counted, :math:`\eta_g^{(0)}` the learning rate with which
    the group was made and :math:`\eta^{(0)}` the optimizer's default: a group made with ten times the default keeps
    ten times the rate, and a group that says nothing gets :math:`f(t)` itself.

    Classic: ``torch.optim.lr_scheduler``. What differs:

    - A call counts only if the optimizer has stepped since the last one that did. A step that a ``GradScaler`` skipped
      moves no schedule, and several processes or micro-batches that each call :meth:`step` count once.
    - The rate is a function of one integer. So it makes no difference whether the optimizer or the scheduler is
      loaded first, or made first, and loading writes the rate.
    - Where no group has the default, and all have one rate, that rate takes its place.
    - Groups that are added later follow the schedule as well, from their first step on.

    Args:
        optimizer: any ``torch.optim.Optimizer``, :class:`Optimizer` among them.
        schedule: a schedule, as from :mod:`functricks.schedules`; or ``{label: schedule}``, where a group's label is
            its ``"name"``, or else its index, and the schedule gives the rate itself.
        last_epoch: go on with the step after this one, as PyTorch does, also with a fresh optimizer; -1 to start.

    Raises ``ValueError`` for a group whose label has no schedule, and where one schedule is given for groups of unlike
    rates of which none is the optimizer's default: it does not say whose rate it gives.

    >>> from functricks import adapter, schedules, sgd
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = adapter.Optimizer([weight], sgd, lr=0.1)
    >>> scheduler = Scheduler(optimizer, schedules.exponential_decay(0.1, gamma=0.5))
    >>> weight.grad = torch.ones(1)
    >>> optimizer.step()
    >>> scheduler.step()
    >>> optimizer.param_groups[0]["lr"], scheduler.get_last_lr()
    (0.05, [0.05])
    >>> scheduler.step()  # the optimizer did not step: nothing to count
    >>> scheduler.get_last_lr()
    [0.05]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule | Mapping[Any, Schedule],
        last_epoch: int = -1,
    ) -> None:
        schedules = list(schedule.values()) if isinstance(schedule, Mapping) else [schedule]
        for one in schedules:
            if not is_schedule(one):
                raise TypeError(f"Scheduler: needs a schedule or a dict of them, got {one!r}")
        if not schedules:
            raise ValueError("Scheduler: a dict of schedules needs at least one")
        self.schedule = schedule
        self._pending = False
        default = getattr(optimizer, "defaults", {}).get("lr")
        self._default = float(default) if isinstance(default, (int, float, Tensor)) else None  # a copy of a tensor
        for i, group in enumerate(getattr(optimizer, "param_groups", ())):
            if "lr" not in group:
                raise ValueError(
                    f"Scheduler: group {i} of the optimizer shows no lr: its transform has learning rates of its own; "
                    "give the schedule to the transform"
                )
            if last_epoch >= 0:  # a fresh optimizer will do: the rate does not come from the last one
                group.setdefault("initial_lr", group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"])
        self.optimizer = optimizer
        if hasattr(optimizer, "param_groups") and not isinstance(schedule, Mapping) and not self._refer():
            rates = ", ".join(str(float(group.get("initial_lr", group["lr"]))) for group in optimizer.param_groups)
            raise ValueError(
                f"Scheduler: one schedule for groups of the rates {rates}, of which none is the optimizer's default "
                f"({self._default}); give the optimizer the lr that the schedule describes, or {{index: schedule}} here"
            )
        super().__init__(optimizer, last_epoch)
        self._watch()

    # --- the schedule ------------------------------------------------------------------------------------------------

    def step(self, epoch: int | None = None) -> None:
        """Write the next learning rates, if the optimizer has stepped since they were last written.

        Args:
            epoch: go to this step instead; PyTorch warns that this is deprecated.
        """
        if epoch is None and not self._is_initial and not self._pending:
            return
        self._pending = False
        if epoch is not None:
            super().step(epoch)
            return
        self._step_count += 1  # as PyTorch does, which here also looks for a first step of the optimizer: there was one
        self._update_lr()

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of all groups at the current step."""
        return [self._rate(i) for i in range(len(self.optimizer.param_groups))]

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the current learning rates of all groups, those added later among them."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]

    def _rate(self, index: int) -> float:
        group = self.optimizer.param_groups[index]
        if isinstance(self.schedule, Mapping):
            return float(self._labelled(index, group)(self.last_epoch))
        default, own = self._default, float(group.get("initial_lr", group["lr"]))
        share = 1.0 if not default or own == default else own / default
        return float(self.schedule(self.last_epoch)) * share

    def _refer(self) -> bool:
        """Let the one rate of all groups stand for a default that none of them has; False where rates are unlike."""
        own = {float(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups}
        if self._default not in own and len(own) == 1:
            self._default = own.pop()
        return self._default in own or not own

    def _labelled(self, index: int, group: dict[str, Any]) -> Schedule:
        assert isinstance(self.schedule, Mapping)
        for label in (group.get("name"), index):
            if label in self.schedule:
                found: Schedule = self.schedule[label]
                return found
        raise ValueError(
            f"Scheduler: group {index} has the label {group.get('name', index)!r}, which has no schedule; have: "
            f"{', '.join(map(repr, self.schedule))}"
        )

    def _write(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = self.get_last_lr()

    # --- watching the optimizer --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        watched: Any = self.optimizer
        while isinstance(getattr(watched, "optimizer", None), torch.optim.Optimizer):
            watched = watched.optimizer  # a framework's wrapper has no hooks of its own
        watched.register_step_pre_hook(self._before_step)
        watched.register_step_post_hook(self._after_step)
        watched.register_load_state_dict_post_hook(self._after_load)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take in groups that are new."""
        new = [group for group in self.optimizer.param_groups if "initial_lr" not in group]
        for group in new:
            group["initial_lr"] = group["lr"].clone() if isinstance(group["lr"], Tensor) else group["lr"]
            self.base_lrs.append(group["initial_lr"])
        if new:
            self._write()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note that a step was taken; a fused kernel that got the scaler's flag may have skipped it inside."""
        skipped = getattr(optimizer, "found_inf", None)
        if skipped is None or not skipped.item():
            self._pending = True

    def _after_load(self, optimizer: Any) -> None:
        """The rate follows from the step, whatever was loaded."""
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=False):
            group.setdefault("initial_lr", base)  # one that was saved without a scheduler does not have it
        self._refer()
        self._write()

    # --- saving and loading ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the number of counted steps, and what goes with it; plain numbers, without the schedule."""
        rates = [float(rate) for rate in self.get_last_lr()]
        return {
            "last_epoch": self.last_epoch,
            "_step_count": self._step_count,
            "_last_lr": rates,
            "pending": self._pending,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the step of a state, and write its learning rates; a state of one of PyTorch's schedulers will do."""
        if "last_epoch" not in state_dict:
            raise ValueError(f"Scheduler.load_state_dict: the state has no 'last_epoch', only {sorted(state_dict)}")
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = int(state_dict.get("_step_count", self.last_epoch + 1))
        self._pending = bool(state_dict.get("pending", False))
        self._write()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch()  # an optimizer loses its hooks when it is copied
