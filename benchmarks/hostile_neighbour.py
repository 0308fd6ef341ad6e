"""The price of a hostile neighbour: an honest client's waits for `.item()`, alone and beside one with every means.

    python benchmarks/hostile_neighbour.py
    python benchmarks/hostile_neighbour.py --rounds 5 --waits 2000
    python benchmarks/hostile_neighbour.py --only stalled_upload
    python benchmarks/hostile_neighbour.py --alike
    python benchmarks/hostile_neighbour.py --plain

One worker with two tokens and a process for each session; the hostile token may run functions, too, and has eight
sessions, 24 connections and 1 GiB of memory. Each round measures the honest client alone and then beside all means at
once, each of which is a program of its own that goes on until it is ended: half-open connections, more sessions than
there may be, frames of very many lists, a power without end in a graph, an upload that never comes under another
default dtype, tensors larger than any memory, uploads without end, crashes, and native code that holds the interpreter.
The programs have the lowest priority, for they stand for other machines; what they do in the worker has not. The honest
client's training must end in the same bits. Compare within a run, on a machine that does nothing else. `--plain` also
measures two processes that pass a few bytes to and fro over a socket, without skyproxy: what the system does to anybody
who waits beside all that.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from _helper_process import end_with_parent
from session_processes import hold_the_interpreter, p99, waits

import skyproxy
from skyproxy.errors import SkyproxyError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import OPERATIONS, Batch, Hello, Sequence
from skyproxy.transport.websocket import connect_websocket

CPU = ["cpu", None]
BOUNDS = "scopes: operations, functions\nsessions: 8\nconnections: 24\nmemory: 1GiB\n"


# --- the means -------------------------------------------------------------------------------------------------------


def _connect(url: str, token: str) -> skyproxy.Node:
    return skyproxy.connect(url, token=token)


def _say(url: str, token: str, *streams: list[object], wait_seconds: float = 5.0) -> None:
    """Open a session, send it these batches, and wait for its end a while."""
    transport, _ = connect_websocket(url, token, Hello([1], OPERATIONS, "", {}))
    try:
        for number, stream in enumerate(streams, 1):
            transport.send(Batch(Sequence(number), stream))
        until = time.monotonic() + wait_seconds
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                transport.recv(0.2)
    finally:
        transport.abandon()


def half_open(url: str, token: str) -> None:
    """More connections than may wait for their token, none of which says a whole word."""
    address = url.removeprefix("ws://").split(":")
    opened = [socket.create_connection((address[0], int(address[1])), timeout=5) for _ in range(100)]
    for sock in opened:
        with contextlib.suppress(OSError):
            sock.sendall(b"GET /")
    time.sleep(1)
    for sock in opened:
        sock.close()


def many_sessions(url: str, token: str) -> None:
    """As many sessions as the worker gives, and one more."""
    with contextlib.ExitStack() as stack:
        for _ in range(9):
            stack.enter_context(_connect(url, token))


def many_lists(url: str, token: str) -> None:
    """Frames of half a million lists, which is as many as pass."""
    _say(url, token, *[[commands.RELEASE, [[]] * 500_000]] * 5, wait_seconds=1.0)


def endless_power(url: str, token: str) -> None:
    """A power of thousands of bits in a graph, as a client may ask for it."""
    nodes = [["python::pow", [["", 7], ["", 10**8]], {}]]
    fields = {"nodes": nodes, "outputs": [1], "options": {"worker": "eager"}}
    number = commands.FIRST_SIGNATURE
    _say(url, token, [commands.DEFINE, number, [commands.COMPILED, ["v"], fields, ["n"]], number, 5, 9])


def stalled_upload(url: str, token: str) -> None:
    """Another default dtype, and an operation that waits for an upload which never comes."""
    row = ["float32", [1 << 20], [1], 0]
    number = commands.FIRST_SIGNATURE
    stream = [commands.DO, "set_modes", [{"default_dtype": "float64"}], commands.RECEIVE, 1, row, CPU, 1]
    stream += [commands.DEFINE, number, ["aten::neg", ["t"], {}, ["n"]], number, 1, 2]
    _say(url, token, stream, wait_seconds=10.0)


def allocations(url: str, token: str) -> None:
    """Tensors of any size, up to more than the machine has."""
    with _connect(url, token) as node:
        for size in (1 << 40, 1 << 34, *[1 << 26] * 20):
            with contextlib.suppress(RuntimeError, MemoryError):
                torch.zeros(size, device=str(node.devices[0])).sum().item()


def uploads(url: str, token: str) -> None:
    """Bytes without end."""
    values = torch.ones(1 << 22)
    with _connect(url, token) as node:
        for _ in range(50):
            values.to(str(node.devices[0]))
        node.synchronize()


def crashes(url: str, token: str) -> None:
    """A process that dies."""
    with _connect(url, token) as node:
        node.run(ctypes.string_at, 0)


def held_interpreter(url: str, token: str) -> None:
    """Native code that lets nobody else in."""
    with _connect(url, token) as node:
        node.run(hold_the_interpreter)


def products(url: str, token: str) -> None:
    """Large products, with all threads."""
    with _connect(url, token) as node:
        matrix = torch.rand(2048, 2048, device=str(node.devices[0]))
        for _ in range(20):
            (matrix @ matrix).sum().item()


MEANS: dict[str, Callable[[str, str], None]] = {
    means.__name__: means
    for means in (
        half_open,
        many_sessions,
        many_lists,
        endless_power,
        stalled_upload,
        allocations,
        uploads,
        crashes,
        held_interpreter,
        products,
    )
}


def attack(name: str, url: str) -> None:
    """In a program of its own: one of the means, again and again."""
    # Nor may it share the honest client's part of the processors, which systems divide by sessions of processes.
    os.setsid()
    os.nice(19)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    print("ready", flush=True)
    token = sys.stdin.readline().strip()
    end_with_parent()
    while True:
        with contextlib.suppress(SkyproxyError, RuntimeError, MemoryError, OSError):
            MEANS[name](url, token)
        print(name, flush=True)


# --- the measurement -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def worker(*arguments: str) -> Iterator[tuple[str, str, str]]:
    """URL, and the honest and the hostile token, of a worker with a process for each session."""
    with tempfile.TemporaryDirectory() as name:
        folder, tokens = Path(name), Path(name) / "tokens"
        tokens.mkdir()
        honest, hostile = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        for owner, text in (("honest", honest), ("hostile", f"{hostile}\n{BOUNDS}")):
            (tokens / owner).touch(mode=0o600)
            (tokens / owner).write_text(text)
        command = [sys.executable, "-m", "skyproxy_server", "--port", "0", "--device", "cpu", "--log-level", "error"]
        command += ["--token-file", str(tokens), "--port-file", str(folder / "port"), "--session-processes"]
        # What a killed program leaves is kept for its return; here it only keeps the next round waiting.
        short = {"SKYPROXY_SESSION_GRACE_SECONDS": "3", "SKYPROXY_CALL_GRACE_SECONDS": "3"}
        process = subprocess.Popen([*command, *arguments], env={**os.environ, **short})
        try:
            deadline = time.monotonic() + 100
            while not (folder / "port").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the worker did not come up")
                time.sleep(0.02)
            yield f"ws://127.0.0.1:{(folder / 'port').read_text().strip()}", honest, hostile
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def besieged(url: str, token: str, names: list[str]) -> Iterator[dict[str, int]]:
    """All of these means at once; how often each came to its end, once it is over."""
    done: dict[str, int] = {}
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--attack", name, "--url", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for name in names
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()  # it has loaded what it needs
        for child in children:
            assert child.stdin is not None
            child.stdin.write(f"{token}\n")
            child.stdin.flush()
        yield done
    finally:
        for child in children:
            child.kill()
        for name, child in zip(names, children, strict=True):
            done[name] = done.get(name, 0) + child.communicate()[0].count(name)


@contextlib.contextmanager
def exchange() -> Iterator[Callable[[int], list[float]]]:
    """Seconds of each of so many exchanges between this process and another, which does nothing but answer."""
    answer = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
    answer += "s.setsockopt(6, 1, 1)\nwhile data := s.recv(64): s.sendall(data)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = subprocess.Popen([sys.executable, "-c", answer, str(server.getsockname()[1])])
        try:
            peer, _ = server.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def measure(count: int) -> list[float]:
                found: list[float] = []
                for _ in range(count):
                    started = time.perf_counter()
                    peer.sendall(b"x" * 32)
                    peer.recv(64)
                    found.append(time.perf_counter() - started)
                    while time.perf_counter() - started < 2e-4:
                        pass  # as much as a client computes between two waits
                return found

            with peer:
                yield measure
        finally:
            child.kill()
            child.wait()


def activity(url: str, token: str) -> dict[str, object]:
    request = urllib.request.Request(
        f"{url.replace('ws://', 'http://')}/activity", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        told: dict[str, object] = json.loads(response.read())
    return told


def wait_for_calm(url: str, token: str) -> None:
    """Wait until no hostile session is left."""
    deadline = time.monotonic() + 300
    while (told := activity(url, token))["sessions"] != 1:
        if time.monotonic() > deadline:
            raise SystemExit(f"hostile sessions go on: {told}")
        time.sleep(0.1)


def train(device: str) -> list[torch.Tensor]:
    """A short training with dropout; its weights."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4)).to(device)
    inputs, targets = torch.randn(64, 16).to(device), torch.randint(4, (64,)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waits", type=int, default=1000, help="values waited for, alone and beside, in each round")
    parser.add_argument("--only", choices=MEANS, action="append", help="one of the means; repeatable")
    parser.add_argument("--each", action="store_true", help="also each of the means by itself")
    parser.add_argument("--settle-seconds", type=float, default=5.0, help="time before the waits that they have")
    parser.add_argument("--alike", action="store_true", help="without priorities of sessions, to compare")
    parser.add_argument("--plain", action="store_true", help="also an exchange over a socket, without skyproxy")
    parser.add_argument("--attack", choices=MEANS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        attack(arguments.attack, arguments.url)
    names = arguments.only or list(MEANS)
    rows = [("all at once", names), *((name, [name]) for name in names if arguments.each)]
    right = True
    with (
        worker(*["--no-session-priorities"] * arguments.alike) as (url, honest, hostile),
        exchange() as exchanges,
        skyproxy.connect(url, token=honest) as node,
    ):
        device = str(node.devices[0])
        expected = train(device)
        waits(node, 200)
        for label, chosen in rows:
            alone: list[float] = []
            beside: list[float] = []
            plain: dict[str, list[float]] = {"alone": [], "beside": []}
            for _ in range(arguments.rounds):
                wait_for_calm(url, honest)
                alone += waits(node, arguments.waits)
                plain["alone"] += exchanges(arguments.waits * arguments.plain)
                with besieged(url, hostile, chosen) as done:
                    time.sleep(arguments.settle_seconds)
                    beside += waits(node, arguments.waits)
                    plain["beside"] += exchanges(arguments.waits * arguments.plain)
                    right = right and all(map(torch.equal, train(device), expected))
            ratio = p99(beside) / p99(alone)
            figures = f"p99 {p99(alone) * 1e3:.2f} ms alone, {p99(beside) * 1e3:.2f} ms beside: {ratio:.1f}x"
            medians = f"median {statistics.median(alone) * 1e3:.2f} and {statistics.median(beside) * 1e3:.2f} ms"
            print(f"{label}: .item() {figures}; {medians}; deeds of the last round {done}", flush=True)
            if arguments.plain:
                figures = f"{p99(plain['alone']) * 1e3:.2f} ms alone, {p99(plain['beside']) * 1e3:.2f} ms beside"
                print(
                    f"  a plain exchange: p99 {figures}: {p99(plain['beside']) / p99(plain['alone']):.1f}x", flush=True
                )
    print("training beside them:", "bit-identical" if right else "NOT bit-identical")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
