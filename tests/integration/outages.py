"""Long outages, and how soon a session goes on after short ones; the figures of docs/topics/durable-sessions.md.

python -m tests.integration.outages --seconds 5 60
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("SKYPROXY_RECONNECT", "1")

import torch

import skyproxy
from tests.integration import network
from tests.integration.broken_connections import check_same, move, train
from tests.integration.chaos_proxy import chaos_proxy
from tests.integration.programs import wait_for, worker

_TRANSFER_BYTES = 64 << 20
_STEPS = 150


def outlast(
    program: Callable[[], object], stop: Callable[[], object], go_on: Callable[[], object], seconds: float
) -> str:
    """Run a program; soon after its beginning stop something for so long. How long it took beside that."""

    def disturb() -> None:
        time.sleep(0.1)
        stop()
        time.sleep(seconds)
        go_on()

    thread = threading.Thread(target=disturb)
    thread.start()
    began = time.monotonic()
    program()
    done = time.monotonic()
    thread.join()
    return f"exact; {done - began - seconds:.1f} s in addition"


def measure_cuts(count: int) -> None:
    """How long it takes from a cut of all connections to the next value, again and again."""
    with (
        tempfile.TemporaryDirectory() as folder,
        worker(Path(folder)) as (url, token),
        chaos_proxy(int(url.rpartition(":")[2])) as proxy,
        skyproxy.connect(f"ws://127.0.0.1:{proxy.port}", token=token) as node,
    ):
        x = torch.ones(3, device=node.devices[0])
        x.sum().item()
        taken = []
        for _ in range(count):
            proxy.cut()
            began = time.monotonic()
            x.sum().item()
            taken.append(time.monotonic() - began)
            assert node._session._reconnector is not None
            outage = node._session._reconnector.outage
            wait_for(lambda now=outage: not now.is_going_on, "all connections are back")
        taken.sort()
        print(
            f"{count} cuts, from the cut to the next value: median {statistics.median(taken):.3f} s, "
            f"95% {taken[int(0.95 * count)]:.3f} s, longest {taken[-1]:.3f} s",
            flush=True,
        )
        taken = []
        for _ in range(3):
            proxy.stall()
            began = time.monotonic()
            x.sum().item()
            taken.append(time.monotonic() - began)
        print(
            f"a connection that says nothing any more: {', '.join(f'{seconds:.1f} s' for seconds in taken)}", flush=True
        )


def measure_outages(all_seconds: list[float]) -> None:
    """Pull the cable out, and stop the worker, for so long each."""
    with (
        tempfile.TemporaryDirectory() as folder,
        network.worker_behind_a_link(Path(folder)) as link,
        skyproxy.connect(link.url, token=link.token, insecure=True) as node,
    ):
        device = node.devices[0]
        process = node.run(os.getpid)
        expected = train(device, steps=_STEPS)
        programs = {
            "training": lambda: check_same(expected, train(device, steps=_STEPS)),
            "64 MiB up and down": lambda: move(device, _TRANSFER_BYTES, 3),
        }
        faults: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "the link is down": (lambda: link.set(up=False), lambda: link.set(up=True)),
            "the worker is stopped": (
                lambda: os.kill(process, signal.SIGSTOP),
                lambda: os.kill(process, signal.SIGCONT),
            ),
        }
        for name, program in programs.items():
            print(f"undisturbed, {name}: {outlast(program, lambda: None, lambda: None, 0.0)}", flush=True)
        for seconds in all_seconds:
            for fault, (stop, go_on) in faults.items():
                for name, program in programs.items():
                    print(f"{fault} for {seconds:g} s, {name}: {outlast(program, stop, go_on, seconds)}", flush=True)
        measure_own_stop(max(all_seconds), programs["training"])


def measure_own_stop(seconds: float, program: Callable[[], object]) -> None:
    """Have this very process stopped for so long."""
    own = os.getpid()
    waker = os.fork()
    if waker == 0:
        time.sleep(0.3)
        os.kill(own, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    began = time.monotonic()
    program()
    taken = time.monotonic() - began
    os.waitpid(waker, 0)
    print(f"the client is stopped for {seconds:g} s, training: exact, {taken - seconds:.1f} s beside it", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, nargs="+", default=[5.0, 60.0])
    parser.add_argument("--cuts", type=int, default=200)
    arguments = parser.parse_args()
    measure_cuts(arguments.cuts)
    reason = network.why_not()
    if reason:
        raise SystemExit(f"no links are taken down: {reason}")
    measure_outages(arguments.seconds)


if __name__ == "__main__":
    main()
