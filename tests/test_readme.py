"""Every code block of README.md runs.

A ``python`` block runs in a fresh namespace, in an empty folder; a first line ``# continues`` keeps the namespace of
the block before it. A block with ``>>>`` is a doctest. In a ``console`` block each line that starts with ``$`` is a
command: those that start with ``functricks`` run as written; .ci/run must run the others and the long ones, as written
too. A block in any other language fails, so that nothing goes untested.
"""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
LONG = {"functricks ablate"}  # here --help stands in for it; .ci/run has the time
TIMED = {"python -m parity.speed"}  # says whether this machine is fast, not whether the code is right


class Block(NamedTuple):
    line: int
    language: str
    text: str


def blocks(markdown: str) -> list[Block]:
    """The fenced blocks, in order, with the line on which the text of each starts."""
    found = re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL)
    return [Block(markdown[: m.start(2)].count("\n") + 1, m[1], m[2]) for m in found]


def commands(block: Block) -> list[str]:
    """The single commands of a console block: `a && b` is two."""
    lines = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    return [command.strip() for line in lines for command in line.split("&&")]


def run_python(block: Block, namespace: dict[str, Any], name: str = "README.md") -> None:
    if ">>>" in block.text:
        test = doctest.DocTestParser().get_doctest(block.text, namespace, name, name, block.line - 1)
        runner = doctest.DebugRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
        try:
            runner.run(test, clear_globs=False)
        except doctest.DocTestFailure as failure:
            want = f"expected:\n{failure.example.want}got:\n{failure.got}"
            line = block.line + failure.example.lineno
            raise AssertionError(f"{name}, line {line}: {failure.example.source}{want}") from None
        except doctest.UnexpectedException as unexpected:
            raise unexpected.exc_info[1] from None
        namespace.update(test.globs)
    else:
        padded = "\n" * (block.line - 1) + block.text  # so that a traceback has the README's line numbers
        exec(compile(padded, name, "exec"), namespace)


README = blocks((ROOT / "README.md").read_text())
PYTHON = [block for block in README if block.language == "python"]
COMMANDS = [command for block in README if block.language == "console" for command in commands(block)]


def test_readme_has_only_blocks_that_run() -> None:
    assert {block.language for block in README} <= {"python", "console"}
    assert all(commands(block) for block in README if block.language == "console")


def test_python_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for block in PYTHON:
        if not block.text.startswith("# continues"):
            namespace = {"__name__": "readme"}
        run_python(block, namespace)


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path: Path) -> None:
    words = shlex.split(command.removeprefix("python -m "))
    if words[0] == "functricks":
        done = subprocess.run(
            [sys.executable, "-m", *words, *(["--help"] if command in LONG else [])],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    if command in TIMED:
        assert importlib.util.find_spec(words[0]), f"there is no {words[0]}"
    elif words[0] != "functricks" or command in LONG:
        ci = (ROOT / ".ci" / "run").read_text()
        assert re.search(rf"(^|&& ){re.escape(command)}($|\))", ci, re.MULTILINE), f".ci/run does not run: {command}"


def test_blocks_are_found() -> None:
    text = "a\n```python\nx = 1\n```\nb\n```console\n$ a b && c\nout\n$ d\n```\n"
    assert blocks(text) == [Block(3, "python", "x = 1\n"), Block(7, "console", "$ a b && c\nout\n$ d\n")]
    assert commands(blocks(text)[1]) == ["a b", "c", "d"]


def test_python_block_that_rots_fails() -> None:
    namespace: dict[str, Any] = {}
    run_python(Block(1, "python", ">>> x = 2\n>>> x + 1\n3\n"), namespace)
    run_python(Block(1, "python", "# continues\nassert x == 2\n"), namespace)
    with pytest.raises(AssertionError, match="line 8: x"):
        run_python(Block(7, "python", ">>> x = 2\n>>> x\n3\n"), {})
    with pytest.raises(ZeroDivisionError):
        run_python(Block(1, "python", ">>> 1 / 0\n"), {})
    with pytest.raises(NameError):
        run_python(Block(1, "python", "y\n"), {})
