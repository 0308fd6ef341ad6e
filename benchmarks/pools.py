"""What a call on a pool costs: a function that does nothing, against others who send functions to processes, in one
run.

    python benchmarks/pools.py            # the table
    python benchmarks/pools.py --aims     # every figure that has an aim, which stands beside it
    python benchmarks/pools.py --json x   # and every figure in a file

All pools are warm and have two processes. A figure is the median time of one call from its start to its result; the
ratios are to skyproxy's. A broadcast of 100 MiB stands beside two single calls with the same argument. `map` of many
short calls is a rate. With `--start 16`, pools of so many processes are started. With `--nodes 1 8 32`, the threads
that pools of so many processes take in this process are counted, and a broadcast of 20 MiB to all of them stands beside
one to a pool of one. The last rows have a scheduler and workers in memory that do nothing: what is left is the
scheduler's own time.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _crowd import Crowd
from _figures import (
    Row,
    Target,
    describe,
    interleaved,
    latencies,
    percentile,
    ratio_at_most,
    value_at_least,
    value_at_most,
)

import skyproxy as sky

PROCESSES = 2
EXECUTOR = "ProcessPoolExecutor"
MIB = 1 << 20


Maps = dict[str, Callable[[int], object]]


def nothing(argument: Any = None) -> None:
    """The function that is sent."""


def competitors(stack: ExitStack, maps: Maps) -> dict[str, Callable[[], object]]:
    """One call of each, to its result; and their maps."""
    executor = stack.enter_context(ProcessPoolExecutor(PROCESSES))
    found: dict[str, Callable[[], object]] = {EXECUTOR: lambda: executor.submit(nothing).result()}
    maps[EXECUTOR] = lambda count: list(executor.map(nothing, range(count)))
    try:
        from distributed import Client, LocalCluster
    except ModuleNotFoundError:
        print("distributed is not installed, so Dask is left out")
        return found
    cluster = stack.enter_context(LocalCluster(n_workers=PROCESSES, threads_per_worker=1, dashboard_address=None))
    client = stack.enter_context(Client(cluster))
    found["Dask distributed"] = lambda: client.submit(nothing, pure=False).result()
    maps["Dask distributed"] = lambda count: client.gather(client.map(nothing, range(count), pure=False))
    return found


def seconds(call: Callable[[], object]) -> float:
    """The time of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def starts(count: int) -> dict[str, Callable[[], float]]:
    """The time until pools of so many processes have run a call on each of them; their end is not counted."""

    def own() -> float:
        started = time.perf_counter()
        with sky.Compute(provider=sky.Local(device="cpu"), nodes=count) as pool:
            pool.broadcast(nothing)
            return time.perf_counter() - started

    try:
        from distributed import Client, LocalCluster
    except ModuleNotFoundError:
        return {"skyproxy": own}

    def dask() -> float:
        started = time.perf_counter()
        with LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=None) as cluster:
            with Client(cluster) as client:
                client.wait_for_workers(count)
                client.run(nothing)
                return time.perf_counter() - started

    return {"skyproxy": own, "Dask distributed": dask}


def threads_of(count: int) -> float:
    """The threads that there are here while a pool of so many processes has run a call on each."""
    with sky.Compute(provider=sky.Local(device="cpu"), nodes=count) as pool:
        pool.broadcast(nothing)
        return threading.active_count()


def spread(count: int, rounds: int) -> dict[str, list[float]]:
    """The times of broadcasts of 20 MiB, in turn: to so many processes, and to one."""
    large = os.urandom(20 * MIB)
    with ExitStack() as stack:
        pools = {
            name: stack.enter_context(sky.Compute(provider=sky.Local(device="cpu"), nodes=nodes))
            for name, nodes in (("all", count), ("one", 1))
        }
        for pool in pools.values():
            pool.broadcast(nothing, large)
        return interleaved(
            {name: lambda pool=pool: seconds(lambda: pool.broadcast(nothing, large)) for name, pool in pools.items()},  # type: ignore[misc]
            rounds,
        )


def scheduler_us(nodes: int, count: int) -> float:
    """The processor time of the scheduler for one call, its pickling included, in a pool of so many processes."""
    with Crowd(nodes) as crowd:
        crowd.run(nothing, nodes)
        started = time.process_time()
        crowd.run(nothing, count)
        return (time.process_time() - started) / count * 1e6


def scheduler_kib_a_node(nodes: int) -> float:
    """The memory that a scheduler takes for each process."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with Crowd(nodes):
            return (tracemalloc.get_traced_memory()[0] - before) / nodes / 1024
    finally:
        tracemalloc.stop()


def measure(rounds: int, count: int, large_bytes: int, start: int, nodes: Sequence[int]) -> list[Row]:
    """All figures."""
    rows: list[Row] = []

    def add(
        name: str, unit: str, own: list[float], other: list[float] | None = None, against: str = "", *aims: Target
    ) -> None:
        rows.append(Row("pools", name, "ws", unit, own, other, against, aims))
        print(describe(rows[-1]), flush=True)

    with ExitStack() as stack:
        maps: Maps = {}
        calls = competitors(stack, maps)
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
            aims = [ratio_at_most(3)] if name == EXECUTOR else []
            add("a call that does nothing", "us", own, samples, name, *aims)

        many = 40 * count
        maps["skyproxy"] = lambda count: list(pool.map(nothing, range(count)))
        rates = interleaved(
            {name: lambda call=call: many / seconds(lambda: call(many)) for name, call in maps.items()},  # type: ignore[misc]
            rounds,
        )
        own = rates.pop("skyproxy")
        add(f"a map of {many} calls", "calls/s", own, None, "", value_at_least(3000))
        for name, samples in rates.items():
            add(f"a map of {many} calls", "calls/s", own, samples, name)

        large = os.urandom(large_bytes)
        big = interleaved(
            {
                "all": lambda: seconds(lambda: pool.broadcast(nothing, large)),
                "each": lambda: seconds(lambda: [pool.run(nothing, large) for _ in range(PROCESSES)]),
            },
            rounds,
        )
        name = f"{large_bytes // MIB} MiB to {PROCESSES} processes at once"
        add(name, "s", big["all"], big["each"], "one after the other")
    if start:
        took = interleaved(starts(start), min(rounds, 3))
        own = took.pop("skyproxy")
        add(f"start of {start} processes", "s", own)
        for name, samples in took.items():
            add(f"start of {start} processes", "s", own, samples, name, ratio_at_most(2))
    for count_of_nodes in nodes:
        add(
            f"threads here, with {count_of_nodes} processes",
            "threads",
            [threads_of(count_of_nodes)],
            None,
            "",
            value_at_most(20),
        )
        if count_of_nodes > 1:
            took = spread(count_of_nodes, rounds)
            add(
                f"20 MiB to {count_of_nodes} processes at once",
                "s",
                took["all"],
                took["one"],
                "to one",
                value_at_most(10.5),
            )
    few, crowd = 10, 1000
    crowded = interleaved({str(n): lambda n=n: scheduler_us(n, max(40 * count, n)) for n in (few, crowd)}, rounds)  # type: ignore[misc]
    add(f"the scheduler, a call in a pool of {crowd}", "us", crowded[str(crowd)], crowded[str(few)], f"in one of {few}")
    add(f"the scheduler's memory a process, of {crowd}", "KiB", [scheduler_kib_a_node(crowd)])
    return rows


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="samples of each figure (default: %(default)s)")
    parser.add_argument("--count", type=int, default=50, help="calls a sample (default: %(default)s)")
    parser.add_argument("--mib", type=int, default=100, help="size of the large argument (default: %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="start pools of so many processes, too")
    parser.add_argument("--nodes", type=int, nargs="*", default=[], help="sizes of pools whose threads are counted")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--aims", action="store_true", help="the same as --start 16 --nodes 1 8 32")
    arguments = parser.parse_args()
    if arguments.aims:
        arguments.start, arguments.nodes = 16, [1, 8, 32]
    rows = measure(arguments.rounds, arguments.count, arguments.mib * MIB, arguments.start, arguments.nodes)
    if arguments.json:
        arguments.json.write_text(json.dumps([row.as_json() for row in rows], indent=1))


if __name__ == "__main__":
    main()
