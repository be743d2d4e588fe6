"""Any transform as the step of an optimizer: its state is kept as PyTorch keeps it, and the results are written back.

A transform's state is one pytree. ``torch.optim`` has a dict a parameter, which is what frameworks move, shard and
save. So the pytree is taken apart and put together again: a leaf that lies under a parameter's name is that
parameter's, as ``state[p]["mu"]``; counters and other leaves that belong to all are the group's, as
``group["shared_state"]["step"]``.

A parameter without a gradient is left out of the step as a whole. Then the transform does not see it, and its part of
the state stays where it is.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree

from functricks import tree
from functricks.adapter._recipe import Recipe
from functricks.transforms import apply_updates, partition
from functricks.transforms.base import is_schedule
from functricks.types import Params, State, Transform

__all__: list[str] = []  # nothing here is public

SHARED = "shared_state"


class Live(NamedTuple):
    """Stands for a number that may change from step to step without a new program."""

    number: int


class Place(NamedTuple):
    """Where a leaf of the state is kept: at a parameter (by name), or at a group (by index); and under which key."""

    owner: str | int
    key: str


@dataclass
class Plan:
    """What does not change from step to step, for one choice of parameters and one structure of the transform."""

    labels: dict[str, str]
    places: list[Place]
    spec: Any
    program: Callable[..., None] | None = None
    live: list[Tensor] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def write(self, values: list[Any]) -> None:
        """Tell the program the numbers that have changed."""
        for i, buffer in enumerate(self.live):
            if isinstance(values[i], Tensor):
                buffer.copy_(values[i])
            elif isinstance(self.values[i], Tensor) or values[i] != self.values[i]:
                buffer.fill_(values[i])
        self.values = values


def names_of(groups: list[dict[str, Any]]) -> list[list[str]]:
    """Return the names of all parameters, group by group; positions where there are no names."""
    return [
        list(group["param_names"]) if "param_names" in group else [f"{i}.{j}" for j in range(len(group["params"]))]
        for i, group in enumerate(groups)
    ]


class Chains:
    """Runs the step of any transform."""

    def __init__(self, recipe: Recipe, compile: bool) -> None:
        self.recipe, self.compile = recipe, compile
        self.defaults = {
            name: float(value(0)) if is_schedule(value) else value for name, value in recipe.hyperparameters.items()
        }
        self.plans: dict[Any, Plan] = {}

    def adopt(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        """Refuse what the transform cannot give to one group alone."""
        if self.recipe.maker is None and "lr" in group:
            optimizer.param_groups.pop()
            raise ValueError(
                "Optimizer: a group has an lr of its own, but this transform does not say how it was made; "
                "give a factory, as in Optimizer(groups, functricks.adamw, lr=1e-3)"
            )

    def step(self, optimizer: Optimizer) -> None:
        """Take the step: gather the state, update, write back."""
        groups = optimizer.param_groups
        params: dict[str, Tensor] = {}
        labels: dict[str, str] = {}
        for i, (group, names) in enumerate(zip(groups, names_of(groups), strict=True)):
            for name, param in zip(names, group["params"], strict=True):
                if param.grad is not None:
                    params[name], labels[name] = param, _label(i)
        if not params:
            return
        templates, live = self._templates(groups, labels)
        plan = self._plan(optimizer, params, labels, templates, live)
        state = _pytree.tree_unflatten(
            [_dict_of(optimizer, params, place)[place.key] for place in plan.places], plan.spec
        )
        values = {name: param.detach() for name, param in params.items()}
        grads = {name: param.grad.detach() for name, param in params.items() if param.grad is not None}
        if plan.program is not None:
            plan.program(values, grads, state, plan.live)
            return
        transform = self._transform(templates, live, labels)
        updates, state = transform.update(grads, state, values)
        _write(list(values.values()), list(apply_updates(values, updates).values()))
        for place, leaf in zip(plan.places, _pytree.tree_leaves(state), strict=True):
            _dict_of(optimizer, params, place)[place.key] = leaf

    def state(self, optimizer: Optimizer) -> tuple[Params, State]:
        """Return the parameters by name, and the state of the transform over all of them."""
        groups = optimizer.param_groups
        params, labels = _everything(groups)
        plan = self._plan(optimizer, params, labels, *self._templates(groups, labels))
        leaves = [_dict_of(optimizer, params, place)[place.key] for place in plan.places]
        return {name: param.detach() for name, param in params.items()}, _pytree.tree_unflatten(leaves, plan.spec)

    # --- the transform -----------------------------------------------------------------------------------------------

    def _templates(self, groups: list[dict[str, Any]], labels: dict[str, str]) -> tuple[dict[str, Any], list[Any]]:
        """Return the hyper-parameters of every group, with numbers that may change replaced, and those numbers."""
        live: list[Any] = []

        def taken_out(name: str, value: Any) -> Any:
            number = isinstance(value, float) or (name == "lr" and isinstance(value, int))
            if isinstance(value, Tensor) or (number and (value != 0 or name == "lr")):  # zero is structure
                live.append(value)
                return Live(len(live) - 1)
            return tuple(taken_out(name, one) for one in value) if isinstance(value, (tuple, list)) else value

        templates = {
            label: {name: taken_out(name, groups[_index(label)][name]) for name in self.recipe.hyperparameters}
            for label in dict.fromkeys(labels.values())
        }
        return templates, live

    def _transform(self, templates: dict[str, Any], live: list[Any], labels: dict[str, str]) -> Transform:
        if self.recipe.maker is None:
            return self.recipe.whole(None)
        parts = {label: self.recipe.part(_filled(template, live)) for label, template in templates.items()}
        return self.recipe.whole(partition(parts, lambda path, leaf: labels[path]))

    # --- the plan ----------------------------------------------------------------------------------------------------

    def _plan(
        self,
        optimizer: Optimizer,
        params: dict[str, Tensor],
        labels: dict[str, str],
        templates: dict[str, Any],
        live: list[Any],
    ) -> Plan:
        structure = tuple((label, *template.items()) for label, template in templates.items())
        key = tuple(params), tuple(labels.values()), structure
        if key not in self.plans:
            self.plans[key] = self._new_plan(params, labels, templates, live)
        plan = self.plans[key]
        if any(place.key not in _dict_of(optimizer, params, place) for place in plan.places):
            self._fill_in(optimizer, params, plan, templates, live)
        plan.write(live)
        return plan

    def _new_plan(
        self, params: dict[str, Tensor], labels: dict[str, str], templates: dict[str, Any], live: list[Any]
    ) -> Plan:
        with torch.no_grad():
            state = self._transform(templates, live, labels).init({name: p.detach() for name, p in params.items()})
        paths, spec = _pytree.tree_flatten_with_path(state)
        plan = Plan(labels, _places([path for path, _ in paths], labels), spec)
        if self.compile:
            device = next(iter(params.values())).device
            plan.program = _compiled(lambda live: self._transform(templates, live, labels))
            plan.live = [torch.zeros((), dtype=torch.float64, device=device) for _ in live]
            plan.values = [None] * len(live)
        return plan

    def _fill_in(
        self, optimizer: Optimizer, params: dict[str, Tensor], plan: Plan, templates: dict[str, Any], live: list[Any]
    ) -> None:
        """Start the state where there is none."""
        with torch.no_grad():
            fresh = self._transform(templates, live, plan.labels).init({k: p.detach() for k, p in params.items()})
        for place, leaf in zip(plan.places, _pytree.tree_leaves(fresh), strict=True):
            _dict_of(optimizer, params, place).setdefault(place.key, leaf)

    # --- loading -----------------------------------------------------------------------------------------------------

    def restored(self, optimizer: Optimizer) -> None:
        """Nothing to fill in."""

    def check(self, found: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Raise where the groups of a state to load lack a hyper-parameter."""
        for i, saved in enumerate(found["param_groups"]):
            lacking = [name for name in self.recipe.hyperparameters if name not in saved]
            if lacking:
                raise ValueError(
                    f"Optimizer.load_state_dict: group {i} of the state has no {', '.join(lacking)}, which this "
                    "transform needs; it was saved by another optimizer"
                )

    def check_loaded(self, optimizer: Optimizer) -> None:
        """Raise where a loaded state is another transform's."""
        groups = optimizer.param_groups
        params, labels = _everything(groups)
        plan = self._new_plan(params, labels, *self._templates(groups, labels))
        expected: dict[str | int, set[str]] = {}
        for place in plan.places:
            expected.setdefault(place.owner, set()).add(place.key)
        found: dict[str | int, set[str]] = {name: set(optimizer.state.get(p, ())) for name, p in params.items()}
        found.update({i: set(group.get(SHARED, ())) for i, group in enumerate(groups)})
        for owner, keys in found.items():
            lacking, extra = expected.get(owner, set()) - keys, keys - expected.get(owner, set())
            # A hyper-parameter that was switched on or off leaves too few keys or too many, but not both.
            switched = self.recipe.maker is not None and not (lacking and extra)
            if keys and keys != expected.get(owner, set()) and not switched:
                where = f"group {owner}" if isinstance(owner, int) else owner
                raise ValueError(
                    f"Optimizer.load_state_dict: the state of {where} has {', '.join(sorted(keys))}; this transform "
                    f"keeps {', '.join(sorted(expected.get(owner, set()))) or 'nothing'}"
                )


def _write(params: list[Tensor], new: list[Tensor]) -> None:
    if all(type(param) is Tensor for param in params):
        torch._foreach_copy_(params, new)
        return
    for param, leaf in zip(params, new, strict=True):  # sharded tensors have no such list operation
        param.copy_(leaf)


def _label(index: int) -> str:
    return f"group {index}"


def _index(label: str) -> int:
    return int(label.removeprefix("group "))


def _everything(groups: list[dict[str, Any]]) -> tuple[dict[str, Tensor], dict[str, str]]:
    params: dict[str, Tensor] = {}
    labels: dict[str, str] = {}
    for i, (group, names) in enumerate(zip(groups, names_of(groups), strict=True)):
        params.update(zip(names, group["params"], strict=True))
        labels.update(dict.fromkeys(names, _label(i)))
    return params, labels


def _filled(template: Any, live: list[Any]) -> Any:
    if isinstance(template, Live):
        return live[template.number]
    if isinstance(template, dict):
        return {name: _filled(value, live) for name, value in template.items()}
    return tuple(_filled(one, live) for one in template) if isinstance(template, tuple) else template


def _dict_of(optimizer: Optimizer, params: dict[str, Tensor], place: Place) -> dict[str, Tensor]:
    if isinstance(place.owner, str):
        own: dict[str, Tensor] = optimizer.state[params[place.owner]]
        return own
    shared: dict[str, Tensor] = optimizer.param_groups[place.owner].setdefault(SHARED, {})
    return shared


def _places(paths: list[Any], labels: dict[str, str]) -> list[Place]:
    """Tell for every leaf of a state whose it is, and give it a key of its own there."""
    places: list[Place] = []
    groups = set(labels.values())
    for path in paths:
        keys = [entry.key for entry in path if isinstance(entry, _pytree.MappingKey)]
        owners = [key for key in keys if key in labels]
        group = next((_index(key) for key in keys if key in groups), 0)
        owner = owners[-1] if owners else group
        parts = [
            entry.name if isinstance(entry, _pytree.GetAttrKey) else entry.key
            for entry in path
            if not isinstance(entry, _pytree.SequenceKey)
        ]
        key = ".".join(str(part) for part in parts if part not in labels and part not in groups) or "state"
        same = sum(place.owner == owner and place.key.partition(" ")[0] == key for place in places)
        places.append(Place(owner, f"{key} {same + 1}" if same else key))
    return places


def _compiled(make: Callable[[list[Tensor]], Transform]) -> Callable[..., None]:
    """Compile one program that updates parameters and state in place."""

    def program(params: Params, grads: Params, state: State, live: list[Tensor]) -> None:
        updates, new = make(live).update(grads, state, params)
        moved = apply_updates(params, updates)
        # A new leaf may be an old one from elsewhere in the state: all are taken before the first is written over.
        taken = [leaf.clone() for leaf in tree.leaves(new)]
        for old, leaf in zip(tree.leaves(state), taken, strict=True):
            old.copy_(leaf)
        for name, leaf in moved.items():
            params[name].copy_(leaf)

    # Compiled code is cached, and limited, by the code object: every optimizer gets one of its own.
    own = types.FunctionType(program.__code__.replace(), program.__globals__, closure=program.__closure__)
    # Numbers that all leaves share (a clip factor, a bias correction) are computed once. By default the compiler writes
    # them out into every place that uses them: twice the time a step, and a compile time that explodes with the leaves.
    return torch.compile(own, fullgraph=True, dynamic=False, options={"realize_opcount_threshold": 8})
