"""Asks every entry of PyTorch's operator database with its tensors on several devices: `make mixed-devices`.

Each tensor in turn, whole and without dimensions, is on the CPU while the rest is on a worker; each target and result
that is given, too, and on another worker. CI asks two samples of each entry in float32; this asks more.

    python -m tests.conformance.mixed_sweep                           # float32, up to 12 samples of each entry
    python -m tests.conformance.mixed_sweep --dtype int64 --part 2/8  # the third eighth of the entries
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from tests.conformance.mixed_checks import check_mixed
from tests.conformance.op_checks import Tally, entry_name
from tests.operator_database import op_db

_SAMPLES = 12


def sweep(
    operators: Iterable[Any], *, dtype: torch.dtype = torch.float32, samples: int = _SAMPLES
) -> Iterable[tuple[str, Tally]]:
    """Ask the entries on "sky:1", with "sky:0" as the other worker; yield what was found of each."""
    for op in operators:
        if op.supports_dtype(dtype, "cpu"):
            yield entry_name(op), check_mixed(op, "sky:1", "sky:0", dtype=dtype, limit=samples, looked_at=4 * samples)


def main(arguments: list[str] | None = None) -> int:
    """Ask what the command line names; return 1 if anything was neither right nor refused, or nothing ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="entries whose names have this part")
    parser.add_argument("--part", default="0/1", help="K/N: each Nth entry, from the Kth on")
    parser.add_argument("--dtype", default="float32", help="of the samples: float32, bfloat16, int64 and so on")
    parser.add_argument("--samples", type=int, default=_SAMPLES, help="of each entry, at most")
    options = parser.parse_args(arguments)
    import skyproxy
    from skyproxy.tensor.core.devices import DEVICES

    while len(DEVICES.existing()) < 2:
        skyproxy.launch_local("cpu")
    first, step = map(int, options.part.split("/"))
    operators = [op for op in op_db if options.only in entry_name(op)][first::step]
    asked = entries = wrong = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, tally in sweep(operators, dtype=getattr(torch, options.dtype), samples=options.samples):
            asked, entries = asked + tally.ran, entries + (tally.ran > 0)
            wrong += bool(tally.problems)
            if tally.problems:
                print(f"{name}: {len(tally.problems)} of {tally.ran}", flush=True)
                print(*(f"    {problem}" for problem in tally.problems[:5]), sep="\n", flush=True)
    print(f"{asked:,} calls of {entries} entries, {wrong} differ")
    return 1 if wrong or not asked else 0


if __name__ == "__main__":
    sys.exit(main())
