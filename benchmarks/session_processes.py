"""What a process for each session costs, and what it keeps from the others.

    python benchmarks/session_processes.py
    python benchmarks/session_processes.py --rounds 9 --mib 64

Four workers in turn, round by round: sessions in the worker's process and in processes of their own, without TLS and
with it. Each gets uploads and downloads of so many MiB, values that the program waits for (`.item()`), and a loop of
small operations. The last rows are an honest session's waits on each worker while another session computes a huge
power, which holds the interpreter. At the end it prints the table of docs/topics/session-processes.md. Compare within a
run, on a machine that does nothing else: the ratios are of medians, a session's own process to the worker's.
"""

from __future__ import annotations

import argparse
import json
import secrets
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from _links import Certificate

import skyproxy

Measure = Callable[[skyproxy.Node], float]


@contextmanager
def worker(certificate: Certificate | None, *arguments: str) -> Iterator[tuple[str, str, ssl.SSLContext | None, int]]:
    """URL, token, trust and process of a worker of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder, token = Path(name), secrets.token_urlsafe(16)
        (folder / "token").touch(mode=0o600)
        (folder / "token").write_text(token)
        command = [sys.executable, "-m", "skyproxy_server", "--port", "0", "--device", "cpu", "--log-level", "error"]
        command += ["--token-file", str(folder / "token"), "--port-file", str(folder / "port"), "--blob-bytes", "0"]
        command += ["--tls-cert", certificate.file] if certificate is not None else []
        process = subprocess.Popen([*command, *arguments])
        try:
            deadline = time.monotonic() + 100
            while not (folder / "port").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the worker did not come up")
                time.sleep(0.02)
            scheme = "ws" if certificate is None else "wss"
            url = f"{scheme}://127.0.0.1:{(folder / 'port').read_text().strip()}"
            yield url, token, certificate.client_context if certificate is not None else None, process.pid
        finally:
            process.terminate()
            process.wait()


def upload(mib: int) -> Measure:
    """Seconds for so many MiB to the worker."""
    values = torch.randn(mib << 18)

    def measure(node: skyproxy.Node) -> float:
        device, started = node.devices[0], time.perf_counter()
        values.to(device)
        node.synchronize()
        return time.perf_counter() - started

    return measure


def download(mib: int) -> Measure:
    """Seconds for so many MiB from the worker."""

    def measure(node: skyproxy.Node) -> float:
        values = torch.ones(mib << 18, device=node.devices[0])
        node.synchronize()
        started = time.perf_counter()
        values.cpu()
        return time.perf_counter() - started

    return measure


def waits(node: skyproxy.Node, count: int) -> list[float]:
    """Seconds of each of so many `.item()`."""
    value = torch.ones(4, device=node.devices[0])
    found: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        value.sum().item()
        found.append(time.perf_counter() - started)
    return found


def item(node: skyproxy.Node) -> float:
    """The median wait for a value."""
    return statistics.median(waits(node, 500))


def small_operations(node: skyproxy.Node) -> float:
    """Seconds for an operation in a loop that waits at its end."""
    value = torch.ones(16, device=node.devices[0])
    node.synchronize()
    started = time.perf_counter()
    for _ in range(3000):
        value = value + 1
    node.synchronize()
    return (time.perf_counter() - started) / 3000


def start(connect: Callable[[], skyproxy.Node]) -> float:
    """Seconds to connect another session, to its first value."""
    started = time.perf_counter()
    with connect() as node:
        torch.ones(1, device=node.devices[0]).item()
        return time.perf_counter() - started


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def hold_the_interpreter() -> None:
    """Hold it for about half a minute, in native code that does not let go of it for seconds."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        pow(7, 10**7)


def table(results: dict[str, dict[str, float]]) -> str:
    """The table of docs/topics/session-processes.md: ratios, and for p99 and the start of a session the figures.

    Args:
        results: seconds by "measure, link" and kind of worker.
    """

    def cell(name: str, link: str, form: Callable[[float, float], str]) -> str:
        (row,) = [row for key, row in results.items() if key.startswith(name) and key.endswith(f", {link}")]
        return form(row["own process"], row["in process"])

    def ratio(own: float, shared: float) -> str:
        return f"{own / shared:.2f}"

    def instead(own: float, shared: float) -> str:
        return f"{own * 1e3:,.1f} ms instead of {shared * 1e3:,.1f} ms"

    rows = {
        "`.item()`": ("item", ratio),
        "an operation of a loop": ("small operation", ratio),
        "upload": ("upload", ratio),
        "download": ("download", ratio),
        "p99 of `.item()`, alone": ("p99 of item, alone", instead),
        "p99 of `.item()` beside a session that holds its interpreter": ("p99 of item, beside", instead),
        "another session, from `connect` to its first value": ("another session", instead),
    }
    lines = ["| | own process to the worker's, without TLS | with TLS |", "|---|---|---|"]
    lines += [
        f"| {title} | {cell(name, 'ws', form)} | {cell(name, 'wss', form)} |" for title, (name, form) in rows.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--waits", type=int, default=1000)
    parser.add_argument("--only", default="", help="measures whose name has this, and no waits beside a hog")
    arguments = parser.parse_args()
    measures: dict[str, Measure] = {
        f"upload {arguments.mib} MiB": upload(arguments.mib),
        f"download {arguments.mib} MiB": download(arguments.mib),
        "item": item,
        "small operation": small_operations,
    }
    measures = {name: measure for name, measure in measures.items() if arguments.only in name}
    kinds = {"in process": "--sessions-in-process", "own process": "--session-processes"}
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        certificate = Certificate(Path(folder))
        connects: dict[tuple[str, str], Callable[[], skyproxy.Node]] = {}
        for link in ("ws", "wss"):
            for kind, option in kinds.items():
                url, token, trust, _ = stack.enter_context(worker(certificate if link == "wss" else None, option))
                connects[link, kind] = lambda u=url, t=token, c=trust: skyproxy.connect(u, token=t, ssl_context=c)
        nodes = {key: stack.enter_context(connect()) for key, connect in connects.items()}
        seen: dict[tuple[str, str, str], list[float]] = {}
        for number in range(arguments.rounds + 1):
            for name, measure in measures.items():
                for key in nodes if number % 2 else reversed(nodes):
                    seconds = measure(nodes[key])
                    if number:  # the first round warms up
                        seen.setdefault((name, *key), []).append(seconds)
            for key, connect in connects.items():
                seen.setdefault(("another session", *key), []).append(start(connect))
        for key in nodes if not arguments.only else ():
            seen["p99 of item, alone", *key] = [p99(waits(nodes[key], arguments.waits))]
        for key in nodes if not arguments.only else ():
            with connects[key]() as other:
                call = other.submit(hold_the_interpreter)
                seen["p99 of item, beside a hog", *key] = [p99(waits(nodes[key], arguments.waits // 4))]
                call.result(300)  # or it would disturb the next one
        for (name, link, kind), values in seen.items():
            results.setdefault(f"{name}, {link}", {})[kind] = statistics.median(values)
    for name, row in results.items():
        ratio = row["own process"] / row["in process"]
        print(f"{name:<34}" + "".join(f"{kind} {row[kind] * 1e3:10.3f} ms   " for kind in kinds) + f"ratio {ratio:.2f}")
    print(json.dumps(results))
    if not arguments.only:
        print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
