"""What cached operations cost the client in two checkouts: its thread's processor time, in processes that take turns.

    python benchmarks/hot_path_pairs.py ../before .                # four pairs of processes, a minute and a half
    python benchmarks/hot_path_pairs.py ../before . --pairs 8      # where the ranges are too wide to decide

Each process runs twelve operations in turn against an embedded worker, with the Python that runs this and with the
operations of this file, and keeps the lower quartile of each. A row's ratio is the median of the pairs' ratios, with
their minimum and maximum; two checkouts of the same commit show what is noise. Time of the thread leaves out what other
processes take, though not what they do to the processor's caches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _figures import Spread, number

_LONGEST_RUN_SECONDS = 300.0
_WARM_CALLS = 300
_CALLS = 400


def _operations() -> dict[str, Callable[[], object]]:
    import torch
    from _small_ops import cases

    device = "sky:0"
    x, y = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device)
    more: dict[str, Callable[[], object]] = {
        "torch.relu(x)": lambda: torch.relu(x),
        "x.max(1)": lambda: x.max(1),
        "torch.cat((x, y))": lambda: torch.cat((x, y)),
        "torch.zeros(4)": lambda: torch.zeros(4, device=device),
    }
    return {**{name: call for name, (call, _) in cases(device).items()}, **more}


def measure(rounds: int) -> dict[str, float]:
    """Return the microseconds of this thread that each operation takes: the lower quartile of the rounds."""
    import torch

    import skyproxy  # noqa: F401

    torch.set_num_threads(1)
    operations = _operations()
    for call in operations.values():
        _microseconds(call, _WARM_CALLS)
    found: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(rounds):
        for name, call in operations.items():
            torch.sky.synchronize()
            found[name].append(_microseconds(call, _CALLS))
    return {name: sorted(samples)[len(samples) // 4] for name, samples in found.items()}


def _microseconds(call: Callable[[], object], count: int) -> float:
    started = time.thread_time_ns()
    for _ in range(count):
        call()
    return (time.thread_time_ns() - started) / count / 1e3


def _measured_in(checkout: Path, rounds: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--measure", "--rounds", str(rounds), str(checkout)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=_LONGEST_RUN_SECONDS,
        capture_output=True,
        text=True,
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def table(before: list[dict[str, float]], after: list[dict[str, float]]) -> list[str]:
    """Return the lines to print: for each operation both medians, and the ratios of the pairs."""
    rows = [f"{'operation':<24} {'before us':>9} {'after us':>9} {'ratio':>7}   minimum to maximum"]
    every: list[float] = []
    for name in before[0]:
        pairs = [(old[name], new[name]) for old, new in zip(before, after, strict=True)]
        ratios = Spread.of([new / old for old, new in pairs])
        every.append(ratios.middle)
        old, new = (statistics.median(side) for side in zip(*pairs, strict=True))
        figures = f"{number(old):>9} {number(new):>9} {ratios.middle:>7.2f}"
        rows.append(f"{name:<24} {figures}   {ratios.low:.2f} to {ratios.high:.2f}")
    rows.append(f"{'median of all':<44} {statistics.median(every):>7.2f}   {min(every):.2f} to {max(every):.2f}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT", help="two: before and after")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of processes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=25, help="rounds of each process (default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        import skyproxy

        used = Path(skyproxy.__file__).resolve()
        assert used.is_relative_to(given.checkouts[0].resolve()), f"{used} is of another checkout"
        print(json.dumps(measure(given.rounds)))
        return 0
    if len(given.checkouts) != 2:
        parser.error("two checkouts are compared")
    sides: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for pair in range(given.pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):  # so that drift favours neither
            sides[side].append(_measured_in(given.checkouts[side].resolve(), given.rounds))
    print("\n".join(table(*sides)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
