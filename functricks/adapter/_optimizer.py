"""A ``torch.optim.Optimizer`` made of a transform."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from functricks.adapter._chains import SHARED, Chains, names_of
from functricks.adapter._kernels import Kernels, torch_class
from functricks.adapter._recipe import recipe
from functricks.averaging import averaged
from functricks.transforms.base import is_schedule
from functricks.types import Schedule, Transform

__all__ = ["Optimizer"]

COUNT = "schedule_step"


class Optimizer(torch.optim.Optimizer):
    r"""A transform as a ``torch.optim.Optimizer``: for classic loops, schedulers, scalers and trainers.

    The parameter groups show the hyper-parameters (``lr``, ``weight_decay``, ``betas``, ...), and what is written to
    ``group["lr"]`` holds from the next step on. ``state_dict`` has PyTorch's structure. Parameters whose gradient is
    None are skipped: they do not decay, and their state stays as it is.

    - An optimizer that PyTorch has too (``adamw``, ``sgd``, ...; plain numbers, no ``decay_where`` or
      ``learning_rates``) runs on PyTorch's own kernels, with its keys (``exp_avg``, ...): the same bits, and its
      ``state_dict`` loads into that class of ``torch.optim`` and from it.
    - Any other transform runs as it is, and with ``compile=True`` as one program that updates parameters and state in
      place. A parameter's own state is in ``optimizer.state[p]``, counters that belong to all are in
      ``group["shared_state"]``. A chain around one optimizer, as ``chain(clip_by_global_norm(1.0), adamw(1e-3))``,
      shows that optimizer's hyper-parameters; clipping sees the gradients of all groups.

    Classic: :class:`torch.optim.AdamW` and its siblings.

    Args:
        params: parameters, ``model.named_parameters()``, or groups (dicts) with hyper-parameters of their own. Names
            are what selectors in the transform (``decay_where="*.weight"``) match, and what ``load_state_dict`` goes
            by: then the order of the parameters may differ. Without names a parameter is called ``"0.3"``: group 0,
            place 3.
        transform: a transform, or a factory of one, as ``functricks.adamw``.
        compile: compile the step, where PyTorch has no kernel for it.
        fused: passed on to the class of ``torch.optim``; by default the fused kernel wherever the parameters allow it.
            Sparse gradients need ``fused=False``.
        foreach: passed on as well.
        hyperparameters: the factory's. ``lr`` may be a schedule: then ``group["lr"]`` shows its value, the group's
            ``"schedule_step"`` counts, and writing ``group["lr"]`` raises at the next step.

    The same parameter twice in a group warns, as in PyTorch, but is updated once.

    >>> import functricks
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = Optimizer(model.named_parameters(), functricks.adamw, lr=1e-3, weight_decay=0.1)
    >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]
    (0.001, (0.9, 0.999))
    >>> model(torch.ones(2)).sum().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[model.weight])
    ['exp_avg', 'exp_avg_sq', 'step']
    """

    def __init__(
        self,
        params: ParamsT,
        transform: Transform | Callable[..., Transform],
        *,
        compile: bool = False,
        fused: bool | None = None,
        foreach: bool | None = None,
        **hyperparameters: Any,
    ) -> None:
        self._recipe = recipe(transform, hyperparameters)
        flags = {name: flag for name, flag in (("fused", fused), ("foreach", foreach)) if flag is not None}
        self._options: tuple[bool, dict[str, Any]] = (compile, flags)
        self._schedules: dict[int, Schedule] = {}
        self._runner = self._make_runner()
        super().__init__(params, self._runner.defaults)

    def _make_runner(self) -> Kernels | Chains:
        compile, flags = self._options
        cls = torch_class(self._recipe)
        if cls is not None:
            return Kernels(self._recipe, cls, flags)
        if flags:
            raise TypeError(f"Optimizer: torch.optim has no kernel for this, so that {', '.join(flags)} says nothing")
        return Chains(self._recipe, compile)

    # --- groups ------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with hyper-parameters of their own; see :meth:`torch.optim.Optimizer.add_param_group`."""
        schedule = None
        if isinstance(param_group, dict):
            schedule = self._take_schedule(param_group)
            self._recipe.check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _drop_repeated(group)
        twice = [name for name, n in Counter(chain.from_iterable(names_of(self.param_groups))).items() if n > 1]
        if twice:
            self.param_groups.pop()
            raise ValueError(f"Optimizer: names must be unique; more than one parameter is called {', '.join(twice)}")
        if schedule is not None:
            self._schedules[len(self.param_groups) - 1] = schedule
        self._runner.adopt(self, group)

    def _take_schedule(self, group: dict[str, Any]) -> Schedule | None:
        """Replace a schedule by its value at step 0, and return it."""
        lr = group.get("lr", self._recipe.hyperparameters.get("lr"))
        if not is_schedule(lr):
            return None
        group["lr"], group[COUNT] = float(lr(0)), 0
        return lr

    # --- the step ----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by their gradients; return the loss of ``closure``, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for i, schedule in self._schedules.items():
            _check_shown(self.param_groups[i], schedule)
        with torch.no_grad():
            self._runner.step(self)
        for i, schedule in self._schedules.items():
            group = self.param_groups[i]
            group[COUNT] += 1
            group["lr"] = float(schedule(group[COUNT]))
        return loss

    def averaged(self) -> dict[str, Tensor]:
        """Return the averaged parameters that the transform keeps, by name; see :func:`functricks.averaged`.

        Load them for evaluation with ``model.load_state_dict(optimizer.averaged(), strict=False)``, on a copy of the
        model. Raises ``ValueError`` where the transform keeps no average.
        """
        if isinstance(self._runner, Kernels):
            raise ValueError("Optimizer.averaged: the step is PyTorch's own, and its state holds no average to read")
        params, state = self._runner.state(self)
        found: dict[str, Tensor] = averaged(state, params)
        return found

    # --- saving and loading ------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; see :meth:`torch.optim.Optimizer.load_state_dict`.

        With names on both sides it goes by name, and raises ``ValueError`` with the names that only one side has. A
        state of another transform raises, too, and nothing is changed. Leaves keep the dtype in which they were saved:
        float32 statistics of half-precision parameters stay so.
        """
        before = self.state, self.param_groups
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, found: self._match(found)),
            self.register_load_state_dict_post_hook(lambda _: self._settle(), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self.state, self.param_groups = before
            raise
        finally:
            for hook in hooks:
                hook.remove()
            self.__dict__.pop("_loading", None)

    def _match(self, found: dict[str, Any]) -> dict[str, Any]:
        """Put a state into the order of the parameters here; remember it for its dtypes."""
        found = _by_name(found, self.param_groups)
        if len(found["param_groups"]) == len(self.param_groups):  # else PyTorch raises
            self._runner.check(found, self.param_groups)
        self._loading = found
        return found

    def _settle(self) -> None:
        """Finish what PyTorch's loading leaves undone."""
        for i in self._schedules:
            if COUNT not in self.param_groups[i]:
                raise ValueError(
                    f"Optimizer.load_state_dict: the learning rate of group {i} is a schedule here, but the state has "
                    f"no {COUNT!r}; it was saved without a schedule"
                )
        if isinstance(self._runner, Kernels):
            return
        for group, saved in zip(self.param_groups, self._loading["param_groups"], strict=True):
            for param, number in zip(group["params"], saved["params"], strict=True):
                if number in self._loading["state"]:
                    own = self._loading["state"][number]
                    self.state[param] = {key: _copied(value, param) for key, value in own.items()}
            if SHARED in group:
                group[SHARED] = {key: _copied(value, group["params"][0]) for key, value in group[SHARED].items()}
        self._runner.check_loaded(self)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_recipe": self._recipe, "_options": self._options, "_schedules": self._schedules}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_runner" not in self.__dict__:  # unpickled or copied
            self._runner = self._make_runner()
        self._runner.restored(self)


def _check_shown(group: dict[str, Any], schedule: Schedule) -> None:
    if group["lr"] != float(schedule(group[COUNT])):
        raise ValueError(
            f"Optimizer: {group['lr']!r} was written to group['lr'], but a schedule decides this learning rate; "
            "give a number as lr and the schedule to adapter.Scheduler, or write nothing"
        )


def _drop_repeated(group: dict[str, Any]) -> None:
    """Keep every parameter once: a second entry would update it twice."""
    first = {param: i for i, param in reversed(list(enumerate(group["params"])))}
    if len(first) < len(group["params"]):
        kept = sorted(first.values())
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][i] for i in kept]


def _copied(value: Any, param: Tensor) -> Any:
    return value.detach().to(param.device, copy=True) if isinstance(value, Tensor) else value


def _by_name(found: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a state whose groups list the parameters as ``groups`` do, where both have names."""
    saved = found["param_groups"]
    if len(saved) != len(groups) or not all("param_names" in group for group in (*saved, *groups)):
        return found
    numbers = {name: n for group in saved for name, n in zip(group["param_names"], group["params"], strict=True)}
    names = [name for group in groups for name in group["param_names"]]
    if numbers.keys() != set(names):
        missing, extra = sorted(set(names) - numbers.keys()), sorted(numbers.keys() - set(names))
        raise ValueError(
            f"Optimizer.load_state_dict: parameters differ; only here: {', '.join(missing) or 'none'}; only in the "
            f"state: {', '.join(extra) or 'none'}"
        )
    matched = [
        {**one, "param_names": list(group["param_names"]), "params": [numbers[name] for name in group["param_names"]]}
        for one, group in zip(saved, groups, strict=True)
    ]
    return cast(dict[str, Any], {**found, "param_groups": matched})
