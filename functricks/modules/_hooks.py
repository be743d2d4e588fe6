"""Hooks as values: what passes through chosen modules is returned, replaced, or gets a value added to it.

A *site* is where an activation passes: ``"fc1"`` is what the module ``fc1`` returns, ``"fc1:input"`` what it is called
with. A module that is called several times has a site a call: ``"fc1"``, ``"fc1#1"``, ``"fc1#2:input"``. A selector is
a glob on the paths of modules (``*`` crosses dots), with the same endings; without ``#`` it means every call.

The private copy of the module carries ordinary forward hooks. What they collect belongs to one call, which puts it
there and takes it away again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

Select: TypeAlias = str | Sequence[str] | Callable[[str, nn.Module], bool]
Replace: TypeAlias = Mapping[str, Callable[[Any], Any]]
Point: TypeAlias = tuple[str, bool]  # the path of a module, and whether its input is meant

_SITE = re.compile(r"(?P<glob>.*?)(#(?P<call>\d+))?(?P<input>:input)?", re.DOTALL)


class Step(NamedTuple):
    """What one selector does where an activation passes."""

    kind: str  # "observe", "intervene", "probes", and what others add
    selector: str
    call: int | None  # None is every call
    replace: Callable[[Any], Any] | None


class Plan:
    """Which steps are taken where, in the order in which their kinds are given; one for all copies of a module."""

    def __init__(self, title: str, model: nn.Module, **kinds: Select | Replace) -> None:
        self.title = title
        self.paths: dict[str, str] = {}  # every path -> the first path of the same module
        first: dict[int, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self.paths[path] = first.setdefault(id(module), path)
        self.points: dict[Point, list[Step]] = {}
        self.steps: list[Step] = []
        for kind, given in kinds.items():
            for selector in _selectors(given, model):
                self._add(kind, selector, given[selector] if isinstance(given, Mapping) else None)
        self.observes = any(step.kind == "observe" for step in self.steps)

    def _add(self, kind: str, selector: str, replace: Callable[[Any], Any] | None) -> None:
        if not isinstance(selector, str):
            raise TypeError(f"{self.title}: {kind} takes globs such as 'encoder.*', got {selector!r}")
        if (kind == "intervene") != callable(replace):
            raise TypeError(f"{self.title}: intervene maps selectors to functions; {selector!r} has {replace!r}")
        parts: Any = _SITE.fullmatch(selector)
        glob, call = parts["glob"], None if parts["call"] is None else int(parts["call"])
        step = Step(kind, selector, call, replace)
        found = {first for path, first in self.paths.items() if fnmatchcase(path, glob) and bool(path) == bool(glob)}
        if not found:
            have = ", ".join(path for path in self.paths if path)
            raise ValueError(f"{self.title}: {kind}={selector!r} matches no module; have: {have}")
        for path in found:
            self.points.setdefault((path, bool(parts["input"])), []).append(step)
        self.steps.append(step)


def _selectors(given: Select | Replace, model: nn.Module) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif callable(given):
        chosen = [path for path, module in model.named_modules() if given(path, module)]
        if not chosen:
            have = ", ".join(path for path, _ in model.named_modules() if path)
            raise ValueError(f"functional: the selector {given!r} chooses no module; have: {have}")
        yield from chosen
    else:
        yield from given


class Passing:
    """What one call of the module collects."""

    def __init__(self, probes: Mapping[str, Any]) -> None:
        self.probes = probes
        self.seen: dict[str, Any] = {}
        self.calls: dict[Point, int] = {}
        self.sites: list[str] = []
        self.probed: dict[str, bool] = {}  # an ordered set of sites
        self.taken: dict[tuple[str, str], bool] = {}  # (kind, selector), likewise


class Taps:
    """The hooks of one copy of a module, and the call that they serve at present."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.plan = plan
        self.present: list[Passing] | None = None
        self.handles = [self._hook(module.get_submodule(path), (path, before)) for path, before in plan.points]

    def _hook(self, module: nn.Module, point: Point) -> RemovableHandle:
        if not point[1]:
            return module.register_forward_hook(lambda module, args, output: self._pass(point, output))

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if not args:
                raise ValueError(
                    f"{self.plan.title}: {_site(point, 0)!r} is called with keyword arguments only, and its input is "
                    f"the positional ones; choose the output of the module before it"
                )
            passed = self._pass(point, args[0] if len(args) == 1 else args)
            if len(args) == 1:
                return (passed,)
            if not isinstance(passed, tuple | list):
                raise TypeError(
                    f"{self.plan.title}: intervene at {_site(point, 0)!r}, which has {len(args)} positional arguments, "
                    f"must return the tuple of them, got {type(passed).__name__}"
                )
            return tuple(passed)

        return module.register_forward_pre_hook(before)

    def run(self, probes: Mapping[str, Any] | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function, which runs the module; return ``(output, seen)`` where something is observed."""
        if not self.plan.points and not probes:
            return function(*args, **kwargs)
        # Empty when it is set and put back at the end: the one change to what lives outside that a scan lets pass.
        present: list[Passing] = []
        outer, self.present = self.present, present
        present.append(Passing(probes or {}))
        try:
            output = function(*args, **kwargs)
        finally:
            self.present = outer
        self._check(present[0])
        return (output, present[0].seen) if self.plan.observes else output

    def _pass(self, point: Point, value: Any) -> Any:
        if not self.present:
            return value
        now = self.present[0]
        number = now.calls.get(point, 0)
        now.calls[point] = number + 1
        site = _site(point, number)
        now.sites.append(site)
        for step in self.plan.points[point]:
            if step.call is None or step.call == number:
                now.taken[step.kind, step.selector] = True
                value = self._take(step, now, site, value)
        return value

    def _take(self, step: Step, now: Passing, site: str, value: Any) -> Any:
        if step.kind == "observe" and site not in now.seen:
            # A module may write to its input, and the next one to this output: neither reaches what was observed, and
            # observing keeps no write from where it goes.
            now.seen[site], value = (_clone(value), value) if site.endswith(":input") else (value, _clone(value))
        elif step.kind == "probes":
            now.probed[site] = True
            if site in now.probes:
                value = _add(f"{self.plan.title}: the probe {site!r}", value, now.probes[site])
        elif step.replace is not None:
            value = step.replace(value)
            if value is None:
                raise TypeError(
                    f"{self.plan.title}: intervene={step.selector!r} returned None instead of an activation"
                )
        return value

    def _check(self, now: Passing) -> None:
        for step in self.plan.steps:
            if (step.kind, step.selector) not in now.taken:
                raise ValueError(
                    f"{self.plan.title}: {step.kind}={step.selector!r} matches no call of this forward; "
                    f"have: {', '.join(now.sites)}"
                )
        for site in now.probes:
            if site not in now.probed:
                raise ValueError(
                    f"{self.plan.title}: {site!r} in probes is no activation chosen by functional(probes=); "
                    f"have: {', '.join(now.probed)}"
                )


def _site(point: Point, number: int) -> str:
    return f"{point[0]}{f'#{number}' if number else ''}{':input' if point[1] else ''}"


def _clone(value: Any) -> Any:
    return _pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def _add(what: str, value: Any, probe: Any) -> Any:
    """Add a probe of the same structure; None in it leaves that part alone."""
    leaves, structure = _pytree.tree_flatten(value)
    deltas, other = _pytree.tree_flatten(probe)
    shapes = [[getattr(leaf, "shape", None) for leaf in both] for both in (leaves, deltas)]
    if structure != other or any(d is not None and d.shape != v for v, d in zip(shapes[0], deltas, strict=True)):
        raise ValueError(f"{what} has the shapes {shapes[1]}, the activation {shapes[0]}")
    added = [v if d is None else v + d.to(v.dtype) for v, d in zip(leaves, deltas, strict=True)]
    return _pytree.tree_unflatten(added, structure)
