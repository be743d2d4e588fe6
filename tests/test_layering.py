"""The module order and the purity rules, read from the sources with `ast`.

A module imports only from modules above it in ``LAYERS``. What is impure (``nn.Module``, ``.grad``, writes in place,
process groups) stays in the few modules that are made for it. Every rule is also fed bad sources, so that a rule which
catches nothing fails here.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import functricks

ROOT = Path(functricks.__file__).parent

LAYERS = (
    "types",
    "tree",
    "random",
    "losses",
    "schedules",
    "transforms",
    "clipping",
    "optimizers",
    "gradients",
    "adversarial",
    "precision",
    "averaging",
    "modules",
    "sequences",
    "training",
    "experiments",
    "distributed",
    "adapter",
    "cli",
)
NAMESPACES = {"losses", "schedules", "random", "tree", "experiments", "distributed", "adapter", "sequences"}
FLAT = [layer for layer in LAYERS if layer not in NAMESPACES | {"cli"}]

IMPURE = {"modules", "distributed", "adapter"}
THIRD_PARTY = {"torch", "numpy", "optree"}
TYPES_MAY_IMPORT = {"torch", "typing", "collections", "__future__"}
NOT_A_WRITE = {"requires_grad_"}  # a flag on a tensor that was just detached


def dotted(node: ast.expr) -> str:
    """`a.b.c` as a string; what is no chain of names becomes a question mark."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def imported(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, str]]:
    """The (module, name) pairs that a statement imports; the name is empty for `import module`."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
        return
    module = node.module or ""
    if node.level:
        parents = package.split(".")
        parents = parents[: len(parents) - node.level + 1]
        module = ".".join([*parents, module] if module else parents)
    yield from ((module, alias.name) for alias in node.names)


class Checker(ast.NodeVisitor):
    """Collects what one source file does wrong."""

    def __init__(self, layer: str, package: str) -> None:
        self.layer, self.package = layer, package
        self.problems: list[str] = []
        self.functions = 0
        self.typing_only = False
        self.classes: list[str] = []

    def problem(self, node: ast.AST, text: str) -> None:
        self.problems.append(f"{self.layer}, line {node.lineno}: {text}")  # type: ignore[attr-defined]

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self.functions += 1
        self.generic_visit(node)
        self.functions -= 1

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.classes.append(node.name)
        self.generic_visit(node)
        self.classes.pop()

    def visit_If(self, node: ast.If) -> None:
        before = self.typing_only
        self.typing_only = before or dotted(node.test).split(".")[-1] == "TYPE_CHECKING"
        for child in node.body:
            self.visit(child)
        self.typing_only = before
        self.visit(node.test)
        for child in node.orelse:
            self.visit(child)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for module, name in imported(node, self.package):
            self.check_import(node, module, name)

    visit_ImportFrom = visit_Import

    def check_import(self, node: ast.AST, module: str, name: str) -> None:
        top, _, rest = module.partition(".")
        if top == "functricks":
            self.check_layer(node, rest.partition(".")[0] or name)
        if self.layer == "types" and top not in TYPES_MAY_IMPORT:
            self.problem(node, f"types imports {top}")
        if top == "optree" and self.layer != "tree":
            self.problem(node, "only tree imports optree")
        library = top not in {"functricks", *THIRD_PARTY, *sys.stdlib_module_names}
        if library and self.layer != "cli" and not self.functions and not self.typing_only:
            self.problem(node, f"{top} is imported outside a function")
        if self.layer not in IMPURE:
            whole = f"{module}.{name}" if name else module
            if whole.startswith("torch.distributed"):
                self.problem(node, "process groups")
            if whole.startswith(("torch.nn.Module", "torch.nn.modules")):
                self.problem(node, "nn.Module")

    def check_layer(self, node: ast.AST, other: str) -> None:
        if other not in LAYERS:
            self.problem(node, f"imports functricks.{other}, which is no layer; name the module that defines it")
        elif LAYERS.index(other) > LAYERS.index(self.layer):
            self.problem(node, f"imports {other}, which is below it")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        path = dotted(node)
        if self.layer in IMPURE:
            return
        if path in {"nn.Module", "torch.nn.Module"}:
            self.problem(node, "nn.Module")
        if node.attr == "grad" and not path.endswith(("func.grad", "autograd.grad")):
            self.problem(node, ".grad")
        if path.startswith(("torch.distributed.", "dist.")):
            self.problem(node, "process groups")

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = dotted(node.func).split(".")[-1]
        may_write = IMPURE | {"tree"}
        writes = name.endswith("_") and not name.endswith("__") and name.strip("_") != ""
        if writes and name not in NOT_A_WRITE and self.layer not in may_write:
            self.problem(node, f"writes in place: {name}")
        if any(keyword.arg == "out" for keyword in node.keywords) and self.layer not in may_write:
            self.problem(node, "writes in place: out=")
        results = self.layer == "experiments" and "Results" in self.classes
        if name == "item" and not node.args and self.layer not in {"adapter", "cli"} and not results:
            self.problem(node, ".item()")


def check(layer: str, source: str, package: str = "functricks") -> list[str]:
    checker = Checker(layer, package)
    checker.visit(ast.parse(source))
    return checker.problems


def sources() -> Iterator[tuple[str, Path]]:
    """Every source file below functricks/ and its layer, but for __init__.py and __main__.py at the top."""
    for path in sorted(ROOT.rglob("*.py")):
        inside = path.relative_to(ROOT)
        if inside.name in {"__init__.py", "__main__.py"} and len(inside.parts) == 1:
            continue
        yield inside.parts[0].removesuffix(".py"), path


def layers() -> dict[str, Path]:
    """The file that holds each layer's public names: the module, or the package's __init__.py."""
    return {
        layer: path
        for layer, path in sources()
        if path.parent == ROOT or (path.name == "__init__.py" and path.parent.parent == ROOT)
    }


def public_names(source: str) -> list[str]:
    """The entries of `__all__`, which is a literal list."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [dotted(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    raise AssertionError("no __all__")


def borrowed(source: str, layer: str) -> set[str]:
    """The public names that a layer only imports from elsewhere: their home is the layer that defines them."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias, (module, _) in zip(node.names, imported(node, f"functricks.{layer}"), strict=True):
                if not f"{module}.".startswith(f"functricks.{layer}."):
                    names.add(alias.asname or alias.name)
    return names & set(public_names(source))


def flat_problems(package: ModuleType, modules: dict[str, ModuleType]) -> list[str]:
    """What is wrong with the names that the package offers at its top, given the layers that exist."""
    offered = getattr(package, "__all__", None)
    if offered is None:
        return []
    flat = {name: module for layer, module in modules.items() if layer in FLAT for name in module.__all__}
    spaces = {layer: module for layer, module in modules.items() if layer in NAMESPACES}
    problems = [f"{name} is listed twice" for name in set(offered) if offered.count(name) > 1]
    problems += [f"{name} is missing" for name in (flat.keys() | spaces.keys()) - set(offered)]
    problems += [f"{name} is no public name" for name in set(offered) - flat.keys() - spaces.keys() - {"__version__"}]
    problems += [
        f"{name} is not that of {module.__name__}"
        for name, module in flat.items()
        if name in offered and getattr(package, name, None) is not getattr(module, name)
    ]
    problems += [
        f"{name} is not the module"
        for name, module in spaces.items()
        if name in offered and getattr(package, name, None) is not module
    ]
    return sorted(problems)


def label(path: object) -> str:
    return str(path.relative_to(ROOT)) if isinstance(path, Path) else str(path)


@pytest.mark.parametrize(("layer", "path"), list(sources()), ids=label)
def test_source_obeys(layer: str, path: Path) -> None:
    assert layer in LAYERS, f"{layer} is no layer: give it a place in the order"
    package = ".".join(["functricks", *path.relative_to(ROOT).parts[:-1]])
    assert check(layer, path.read_text(), package) == []


@pytest.mark.parametrize("layer", [layer for layer in layers() if layer != "cli"])
def test_public_names_are_defined_where_they_are_listed(layer: str) -> None:
    source = layers()[layer].read_text()
    names = public_names(source)
    assert sorted(set(names)) == sorted(names), f"{layer}.__all__ lists a name twice"
    assert borrowed(source, layer) == set()
    module = importlib.import_module(f"functricks.{layer}")
    assert [name for name in names if not hasattr(module, name)] == []


def test_flat_names_have_one_home() -> None:
    homes: dict[str, list[str]] = {}
    for layer, path in layers().items():
        if layer in FLAT:
            for name in public_names(path.read_text()):
                homes.setdefault(name, []).append(layer)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
    assert homes.keys() & set(LAYERS) == set(), "a flat name would hide a module"


def test_package_offers_each_public_name_at_one_path() -> None:
    modules = {layer: importlib.import_module(f"functricks.{layer}") for layer in layers() if layer != "cli"}
    assert flat_problems(functricks, modules) == []


BAD = [
    ("tree", "from functricks import losses", "imports losses, which is below it"),
    ("tree", "import functricks.losses", "imports losses, which is below it"),
    ("tree", "from functricks.losses import mse_loss", "imports losses, which is below it"),
    ("tree", "from . import losses", "imports losses, which is below it"),
    ("tree", "from .losses import mse_loss", "imports losses, which is below it"),
    ("tree", "def f():\n    from functricks import training", "imports training, which is below it"),
    ("optimizers", "from functricks import adamw", "which is no layer"),
    ("optimizers", "import functricks", "which is no layer"),
    ("types", "import numpy", "types imports numpy"),
    ("types", "import functools", "types imports functools"),
    ("losses", "import optree", "only tree imports optree"),
    ("losses", "from optree import tree_map", "only tree imports optree"),
    ("losses", "import scipy.special", "scipy is imported outside a function"),
    ("experiments", "import matplotlib.pyplot as plt", "matplotlib is imported outside a function"),
    ("adapter", "try:\n    import transformers\nexcept ImportError:\n    pass", "transformers is imported outside"),
    ("training", "from torch import nn\nclass A(nn.Module): ...", "nn.Module"),
    ("training", "import torch\ndef f(model: torch.nn.Module): ...", "nn.Module"),
    ("training", "from torch.nn import Module", "nn.Module"),
    ("gradients", "g = parameter.grad", ".grad"),
    ("gradients", "x.grad = None", ".grad"),
    ("gradients", "g = f(x).grad", ".grad"),
    ("optimizers", "p.add_(g)", "writes in place: add_"),
    ("optimizers", "p.detach().mul_(2).add_(g)", "writes in place: mul_"),
    ("optimizers", "torch._foreach_add_(p, g)", "writes in place: _foreach_add_"),
    ("optimizers", "zeros_(p)", "writes in place: zeros_"),
    ("optimizers", "torch.add(p, g, out=p)", "writes in place: out="),
    ("experiments", "import torch.distributed as dist", "process groups"),
    ("experiments", "from torch import distributed", "process groups"),
    ("experiments", "from torch.distributed import all_reduce", "process groups"),
    ("experiments", "torch.distributed.all_reduce(x)", "process groups"),
    ("losses", "if loss.item() > 0: ...", ".item()"),
    ("experiments", "def run(): return x.item()", ".item()"),
    ("experiments", "class Other:\n    def f(self): return x.item()", ".item()"),
]

GOOD = [
    ("losses", "from functricks import tree\nfrom functricks.types import Loss\nimport math, torch, numpy"),
    ("losses", "from .types import Loss"),
    ("tree", "import optree\ntorch._foreach_add_(new, x)"),
    ("types", "from collections.abc import Callable\nfrom typing import Any\nimport torch"),
    ("gradients", "torch.func.grad(f)(x)\ntorch.autograd.grad(y, x)\nx.detach().requires_grad_()"),
    ("experiments", "def plot():\n    import matplotlib.pyplot as plt"),
    ("experiments", "if TYPE_CHECKING:\n    import polars"),
    ("experiments", "class Results:\n    def best(self): return self.values.max().item()"),
    ("cli", "import typer\nfrom functricks import adapter, experiments\nx.item()"),
    ("modules", "from torch import nn\nclass A(nn.Module): ...\nx.copy_(y)"),
    ("distributed", "import torch.distributed as dist\ndist.all_reduce(x)"),
    ("adapter", "p.grad.add_(1)"),
    ("transforms", "type(x).__len__()\n_()\nstate._replace(a=1)\nd.items()"),
]


@pytest.mark.parametrize(("layer", "source", "problem"), BAD)
def test_checker_catches(layer: str, source: str, problem: str) -> None:
    assert any(problem in found for found in check(layer, source))


@pytest.mark.parametrize(("layer", "source"), GOOD)
def test_checker_lets_pass(layer: str, source: str) -> None:
    assert check(layer, source) == []


def test_checker_knows_files_inside_a_package() -> None:
    source = "from .focal import focal_loss\nfrom ..types import Loss\nfrom functricks.losses.focal import focal_loss"
    assert check("losses", source, "functricks.losses") == []
    assert check("losses", "from ..training import train_step", "functricks.losses") != []


def test_borrowed_names_are_found() -> None:
    source = '__all__ = ["Loss", "focal_loss", "mse"]\nfrom functricks.types import Loss\nfrom .focal import focal_loss'
    assert borrowed(f"{source}\ndef mse(): ...", "losses") == {"Loss"}


def test_flat_problems_are_found() -> None:
    clipping, losses, package = ModuleType("clipping"), ModuleType("losses"), ModuleType("functricks")
    clipping.__dict__.update(__all__=["clip"], clip=object())
    losses.__dict__.update(__all__=["mse"], mse=object())
    modules = {"clipping": clipping, "losses": losses}

    def problems(**names: object) -> list[str]:
        package.__dict__.update({"clip": clipping.clip, "losses": losses, **names})
        return flat_problems(package, modules)

    assert problems() == []  # a package without __all__ promises nothing yet
    assert problems(__all__=["clip", "losses", "__version__"]) == []
    assert problems(__all__=["losses"]) == ["clip is missing"]
    assert problems(__all__=["clip"]) == ["losses is missing"]
    assert problems(__all__=["clip", "losses", "losses"]) == ["losses is listed twice"]
    assert problems(__all__=["clip", "losses", "mse"], mse=losses.mse) == ["mse is no public name"]
    assert problems(__all__=["clip", "losses"], clip=object()) == ["clip is not that of clipping"]
    assert problems(__all__=["clip", "losses"], losses=object()) == ["losses is not the module"]
