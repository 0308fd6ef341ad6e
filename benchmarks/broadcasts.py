"""A broadcast to processes behind a narrow link: passed on among them, against sent to each, in turn, in one run.

    python benchmarks/broadcasts.py --processes 32 --mbit-up 100 --rtt-ms 20

The processes are those of a pool on this machine. Between them and a second pool is `delay_proxy.py`, through which
everything goes that this program sends; what they send to one another does not. For the second pool they are on as many
machines, an address of loopback each, or on one.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from _figures import Row, describe, interleaved
from _helper_process import HelperProcess
from pools import MIB, nothing, seconds

import skyproxy as sky
from skyproxy.pools.ranks import RankGroup

Addresses = Callable[[int], dict[int, str]]

WAYS: dict[str, Addresses] = {
    "machines": lambda count: {rank: f"127.0.0.{rank + 2}" for rank in range(count)},
    "one machine": lambda count: dict.fromkeys(range(count), "127.0.0.1"),
    "each": lambda count: {},
}


@contextmanager
def addresses(way: str) -> Iterator[None]:
    """Processes know one another by these addresses inside of the `with` block; without any, nothing is passed on."""
    before = RankGroup.addresses
    RankGroup.addresses = property(lambda group: WAYS[way](len(group.nodes)))  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        RankGroup.addresses = before  # type: ignore[method-assign]


def measure(processes: int, size_mib: int, mbit_up: float | None, rtt_ms: float, rounds: int) -> list[Row]:
    """The times of broadcasts, and the bytes that this program sent for one."""
    link = f"ws, {rtt_ms:g} ms" + (f", {mbit_up:g} Mbit/s up" if mbit_up else "")
    options = ["--rtt-ms", str(rtt_ms), *(["--mbit-up", str(mbit_up)] if mbit_up else [])]
    large = os.urandom(size_mib * MIB)
    sent: dict[str, list[float]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        near = stack.enter_context(sky.Compute(provider=sky.Local(device="cpu"), nodes=processes))
        near.broadcast(nothing)
        ends = near._workers.launched.endpoints  # type: ignore[union-attr]
        targets = [part for end in ends for part in ("--to", urlsplit(end.url).netloc)]
        proxy = stack.enter_context(HelperProcess("delay_proxy.py", *targets, *options))
        urls = [f"ws://127.0.0.1:{port}" for port in proxy.announced["ports"]]
        pool = stack.enter_context(sky.Compute(provider=sky.Remote(urls, token=[end.token for end in ends])))
        pool.broadcast(nothing)

        def one(way: str) -> float:
            before = sum(node._session.bytes_sent for node in pool.nodes)
            with addresses(way):
                took = seconds(lambda: pool.broadcast(nothing, large))
            sent[way].append((sum(node._session.bytes_sent for node in pool.nodes) - before) / MIB)
            return took

        took = interleaved({way: lambda way=way: one(way) for way in WAYS}, rounds)  # type: ignore[misc]
    name, rows = f"{size_mib} MiB to {processes} processes", []
    for way in ("machines", "one machine"):
        where = f"on {way}" if way == "one machine" else "on as many machines"
        rows.append(Row("broadcasts", f"{name} {where}", link, "s", took[way], took["each"], "each by itself"))
        rows.append(Row("broadcasts", f"sent, {where}", link, "MiB", sent[way], sent["each"], "each by itself"))
    return rows


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--mib", type=int, default=20, help="size of the argument (default: %(default)s)")
    parser.add_argument("--mbit-up", type=float, default=100.0, help="0 for no limit (default: %(default)s)")
    parser.add_argument("--rtt-ms", type=float, default=20.0, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="samples of each figure (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    arguments = parser.parse_args()
    rows = measure(
        arguments.processes, arguments.mib, arguments.mbit_up or None, arguments.rtt_ms, max(1, arguments.rounds)
    )
    for row in rows:
        print(describe(row), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([row.as_json() for row in rows], indent=1))


if __name__ == "__main__":
    main()
