"""Time functricks against classic PyTorch, in one process: ``python -m parity.speed``.

Every row says what is timed; the modules named ``speed_*`` have the details. The two versions of a row take turns, so
that slow spells of the machine hit both, rounds that compile are dropped, and medians are compared. Freed memory stays
with the process, see :func:`parity.timing.keep_freed_memory`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

import torch

from parity import speed_adapter, speed_g2p, speed_lanes, speed_modules, speed_optimizers, speed_pipeline
from parity.__main__ import as_json, select
from parity.timing import THREADS, Measure, Row, keep_freed_memory

MODULES = (speed_lanes, speed_pipeline, speed_optimizers, speed_modules, speed_adapter, speed_g2p)
ROUNDS, QUICK_ROUNDS = 15, 2


def cases() -> dict[str, Measure]:
    """Return ``{the row's name: how it is measured}``."""
    return {name: measure for module in MODULES for name, measure in module.CASES.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m parity.speed", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    parser.add_argument("--only", metavar="CASE", help="one case, or a glob such as '*eager*'")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run? The numbers are rough")
    given = parser.parse_args(arguments)
    everything = cases()
    chosen = select(list(everything), given.only, parser)
    torch.set_num_threads(THREADS)
    keep_freed_memory()
    width = max(len(name) for name in chosen)
    if not given.json:
        print(f"{THREADS} threads; milliseconds, for lanes those of one run")
        print(f"{'case':{width}}  functional  classic   ratio  target  ok")
    rows: list[Row] = []
    for name in chosen:
        rows.append(everything[name](QUICK_ROUNDS if given.quick else ROUNDS))
        torch.compiler.reset()
        if not given.json:
            print(_line(rows[-1], width), flush=True)
    if given.json:
        print(as_json(rows))
    return 0 if all(row.ok for row in rows) else 1


def _line(row: Row, width: int) -> str:
    target = "-" if row.target is None else f"{math.floor(row.target * 1000) / 1000:g}"
    ok = "ok" if row.ok else "NO"
    return (
        f"{row.case:{width}}  {row.functional_ms:10.4f} {row.classic_ms:8.4f}  {math.floor(row.ratio * 100) / 100:6.2f}"
        f"  {target:>6}  {ok}"
    )


if __name__ == "__main__":
    sys.exit(main())
