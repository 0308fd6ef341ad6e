"""What it costs the client that a session outlives its connections: SKYPROXY_RECONNECT=1 against 0, in pairs.

    python benchmarks/reconnecting.py
    python benchmarks/reconnecting.py --pairs 61 --count 3000

Two sessions of one program on one worker record the same operations in turn, and each pair gives a ratio; its median
and quartiles are printed. What is counted is processor time: of the thread that records, and of the whole client, with
the threads that send and receive. A busy machine stretches the time on the clock, not that. The last row, two sessions
without, is the noise of the method.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from _figures import interleaved
from _models import digits_net
from _small_ops import cases
from _training import Trainer
from session_processes import worker

import skyproxy
from skyproxy import nodes

Clock = Callable[[], float]
NAMES = ("y = x + y", "x.add_(y), in place", "x + y with gradient", "x.view(256)")


@contextmanager
def session(url: str, token: str, *, reconnect: bool) -> Iterator[skyproxy.Node]:
    """A session that outlives its connections, or does not."""
    before = nodes.SETTINGS
    nodes.SETTINGS = dataclasses.replace(before, reconnect=reconnect)
    try:
        node = skyproxy.connect(url, token=token)
    finally:
        nodes.SETTINGS = before
    with node:
        assert (node._session._reconnector is not None and node._session._reconnector.is_active) is reconnect
        yield node


def trainer(device: str) -> Callable[[], object]:
    """A step of training a small CNN, of which nothing is asked."""
    torch.manual_seed(0)
    images, labels = torch.rand(64, 1, 8, 8).to(device), torch.randint(10, (64,)).to(device)
    made = Trainer(digits_net(), [(images, labels)], device)
    return lambda: made.step((images, labels))


def cost(call: Callable[[], object], count: int, node: skyproxy.Node, clock: Clock) -> Callable[[], float]:
    """Microseconds of each of `count` calls, by a clock; all of it is executed before and behind."""

    def measure() -> float:
        node.synchronize()
        started = clock()
        for _ in range(count):
            call()
        if clock is time.process_time:
            node.synchronize()  # what is sent, and what is heard of it
        return (clock() - started) / count * 1e6

    return measure


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=41)
    arguments.add_argument("--count", type=int, default=2000, help="operations of a sample")
    given = arguments.parse_args()
    with ExitStack() as stack:
        url, token, _, _ = stack.enter_context(worker(None))
        made = [stack.enter_context(session(url, token, reconnect=kind)) for kind in (False, True, False)]
        calls = [{name: call for name, (call, _) in cases(str(node.devices[0])).items()} for node in made]
        rows = {name: ([each[name] for each in calls], given.count) for name in NAMES}
        rows["a step of the digits CNN"] = [trainer(str(node.devices[0])) for node in made], max(given.count // 100, 1)
        print(f"{'operation':<26} {'counted':<8} {'without us':>10} {'with us':>9}  ratio, quartiles    noise")
        for name, (three, count) in rows.items():
            for counted, clock in (("thread", time.thread_time), ("client", time.process_time)):
                kinds = zip(("without", "with", "again"), three, made, strict=True)
                functions = {kind: cost(call, count, node, clock) for kind, call, node in kinds}
                for function in functions.values():
                    function()
                found = interleaved(functions, given.pairs)
                ratios = [more / less for more, less in zip(found["with"], found["without"], strict=True)]
                noise = [more / less for more, less in zip(found["again"], found["without"], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                without, with_ = (statistics.median(found[kind]) for kind in ("without", "with"))
                print(
                    f"{name:<26} {counted:<8} {without:>10.2f} {with_:>9.2f}  {middle:.3f}, {low:.3f} to {high:.3f}"
                    f"   {statistics.median(noise):.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
