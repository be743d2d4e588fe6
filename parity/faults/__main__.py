"""Print what the usual recipes do wrong, and the numbers that show it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from parity.faults.registry import faults, markdown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m parity.faults", description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the table of parity/README.md")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.markdown:
        print(markdown())
        return 0
    for technique, usual, wrong, number, remedy in faults():
        print(f"{technique}: {usual}\n    {wrong}\n    -> {number}\n    functricks: {remedy}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
