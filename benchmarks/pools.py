"""What a call on a pool costs: a function that does nothing, against others who send functions to processes, in one
run.

    python benchmarks/pools.py            # the table
    python benchmarks/pools.py --json x   # and every figure

All pools are warm and have two processes. A figure is the median time of one call from its start to its result; the
ratios are to skyproxy's. A broadcast of 100 MiB stands beside two single calls with the same argument.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _figures import Row, describe, interleaved, latencies, percentile

import skyproxy as sky

PROCESSES = 2
MIB = 1 << 20


def nothing(argument: Any = None) -> None:
    """The function that is sent."""


def competitors(stack: ExitStack) -> dict[str, Callable[[], object]]:
    """One call of each, to its result."""
    executor = stack.enter_context(ProcessPoolExecutor(PROCESSES))
    found: dict[str, Callable[[], object]] = {"ProcessPoolExecutor": lambda: executor.submit(nothing).result()}
    try:
        from distributed import Client, LocalCluster
    except ModuleNotFoundError:
        print("distributed is not installed, so Dask is left out")
        return found
    cluster = stack.enter_context(LocalCluster(n_workers=PROCESSES, threads_per_worker=1, dashboard_address=None))
    client = stack.enter_context(Client(cluster))
    found["Dask distributed"] = lambda: client.submit(nothing, pure=False).result()
    return found


def measure(rounds: int, count: int, large_bytes: int) -> list[Row]:
    """All figures."""
    rows: list[Row] = []

    def add(name: str, unit: str, own: list[float], other: list[float] | None = None, against: str = "") -> None:
        rows.append(Row("pools", name, "ws", unit, own, other, against))
        print(describe(rows[-1]), flush=True)

    with ExitStack() as stack:
        calls = competitors(stack)
        pool = stack.enter_context(sky.Compute(provider=sky.Local(device="cpu"), nodes=PROCESSES))
        calls["skyproxy"] = lambda: pool.run(nothing)
        for call in calls.values():
            for _ in range(5):
                call()

        def one(call: Callable[[], object]) -> Callable[[], float]:
            return lambda: percentile(latencies(call, count), 50)

        figures = interleaved({name: one(call) for name, call in calls.items()}, rounds)
        own = figures.pop("skyproxy")
        add("a call that does nothing", "us", own)
        for name, samples in figures.items():
            add("a call that does nothing", "us", own, samples, name)

        large = os.urandom(large_bytes)

        def seconds(call: Callable[[], object]) -> float:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started

        big = interleaved(
            {
                "all": lambda: seconds(lambda: pool.broadcast(nothing, large)),
                "each": lambda: seconds(lambda: [pool.run(nothing, large) for _ in range(PROCESSES)]),
            },
            rounds,
        )
        name = f"{large_bytes // MIB} MiB to {PROCESSES} processes at once"
        add(name, "s", big["all"], big["each"], "one after the other")
    return rows


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="samples of each figure (default: %(default)s)")
    parser.add_argument("--count", type=int, default=50, help="calls a sample (default: %(default)s)")
    parser.add_argument("--mib", type=int, default=100, help="size of the large argument (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    arguments = parser.parse_args()
    rows = measure(arguments.rounds, arguments.count, arguments.mib * MIB)
    if arguments.json:
        arguments.json.write_text(json.dumps([row.as_json() for row in rows], indent=1))


if __name__ == "__main__":
    main()
