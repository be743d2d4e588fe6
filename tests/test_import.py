"""`import functricks` is cheap and brings nothing along."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent

PROBE = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import functricks
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before)}))
"""

COMPILED = """
import torch
import functricks as F

def descend(w):
    step = F.train_step(F.gradient(lambda p, x: p * p), F.sgd(0.25))
    return step.update(step.init(w), ())[0].params

print(torch.compile(descend, fullgraph=True, backend="eager")(torch.tensor(4.0)).item())
"""


def probe() -> tuple[float, list[str]]:
    """Import torch, then functricks, in a fresh process: the seconds and the modules that functricks adds."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["seconds"], found["modules"]


def test_import_costs_at_most_50_ms_more_than_torch() -> None:
    probe()  # writes the bytecode
    seconds: list[float] = []
    while len(seconds) < 9:
        seconds.append(probe()[0])
        if min(seconds) <= 0.050:  # other load only ever adds to a reading, so the least one is nearest to the cost
            return
    raise AssertionError(f"import functricks took {min(seconds) * 1e3:.0f} ms at best; -X importtime shows where")


def test_import_brings_only_the_dependencies() -> None:
    names = {name.partition(".")[0] for name in probe()[1]}
    allowed = {"functricks", "torch", "numpy", "optree", "typing_extensions"}
    assert names - set(sys.stdlib_module_names) <= allowed


def test_import_leaves_the_heavy_parts_of_torch_alone() -> None:
    heavy = ("torch._dynamo", "torch._inductor", "sympy", "matplotlib", "sklearn", "scipy", "pandas", "polars")
    added = probe()[1]
    assert [name for name in added if any(name == h or name.startswith(f"{h}.") for h in heavy)] == []


def test_a_name_may_be_asked_for_first_while_compiling() -> None:
    """It is then that its module is imported."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "2.0\n", done.stderr


def test_pins_of_the_build_are_the_pins_of_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["build-system"]["requires"]) <= set(pins)
    assert len({pin.partition("==")[0] for pin in pins}) == len(pins)
    assert "torch==2.13.0" in pins


def test_core_dependencies_are_three() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [dependency.partition(">=")[0] for dependency in project["dependencies"]] == ["torch", "optree", "numpy"]
