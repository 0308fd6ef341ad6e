"""How one worker serves several clients: operations a second of each and in all, and how long each waits for a value.

    python benchmarks/clients.py                          # 1, 2, 4 and 8 clients
    python benchmarks/clients.py --clients 1 16 --seconds 5

Each client is a process that is started once and lives until the end; in each round, the first so many of them work at
the same time. The number beside which one is measured changes with every round, so that a machine that gets slower
halfway favours none. Client and worker share the machine's processors. Standard error tells of each round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence

from skyproxy.session.local_worker import LocalWorker, worker_environment
from skyproxy.settings import SETTINGS

_START_SECONDS = 600.0
_CLIENT = """
import json, sys, time
import torch, skyproxy

url, token = json.loads(sys.stdin.readline())
skyproxy.connect(url, token=token)
x, y = torch.ones(16, 16, device="sky:0"), torch.zeros(16, 16, device="sky:0")
for _ in range(2000):
    y = y + x
y[0, 0].item()
print("ready", flush=True)
for line in sys.stdin:
    seconds = float(line)
    y = torch.zeros(16, 16, device="sky:0")
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        for _ in range(100):
            y = y + x
        done += 100
    assert y[0, 0].item() == done
    rate = done / (time.perf_counter() - started)
    waits, started = [], time.perf_counter()
    while time.perf_counter() - started < seconds:
        began = time.perf_counter()
        (x + 1)[0, 0].item()
        waits.append(time.perf_counter() - began)
    print(json.dumps([rate, waits]), flush=True)
"""

Client = subprocess.Popen[str]
Figures = list[tuple[float, list[float]]]


@contextlib.contextmanager
def clients_of(worker: LocalWorker, count: int) -> Iterator[list[Client]]:
    """So many clients that have computed something; they end with the block."""
    clients: list[Client] = []
    try:
        for _ in range(count):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            clients.append(
                subprocess.Popen([sys.executable, "-c", _CLIENT], text=True, env=worker_environment(), **pipes)
            )
            _say(clients[-1], json.dumps([worker.url, worker.token]))
        for client in clients:
            if _hear(client, _START_SECONDS).strip() != "ready":
                raise RuntimeError("a client did not start; what it said stands above")
        yield clients
    finally:
        for client in clients:
            client.kill()
            client.wait()


def together(clients: Sequence[Client], seconds: float) -> Figures:
    """Let these clients work at once.

    Returns:
        Of each client: its operations a second, and the seconds of each wait for a value.
    """
    for client in clients:
        _say(client, str(seconds))
    return [tuple(json.loads(_hear(client, _START_SECONDS + 10 * seconds))) for client in clients]


def _hear(client: Client, timeout_seconds: float) -> str:
    """Return the next line that a client says; it says whole ones, one at a time."""
    assert client.stdout is not None
    ready, _, _ = select.select([client.stdout], [], [], timeout_seconds)
    if not ready:
        raise TimeoutError(f"a client said nothing for {timeout_seconds:.0f} s")
    return client.stdout.readline()


def _say(client: subprocess.Popen[str], line: str) -> None:
    assert client.stdin is not None
    client.stdin.write(line + "\n")
    client.stdin.flush()


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8], help="how many (default: 1 2 4 8)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each figure (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="figures of each kind (default: %(default)s)")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # worker and clients inherit it
    figures: dict[int, list[Figures]] = {count: [] for count in arguments.clients}
    worker = LocalWorker("cpu", SETTINGS)
    try:
        with clients_of(worker, max(arguments.clients)) as clients:
            for number in range(arguments.rounds):
                for count, rows in figures.items():
                    rows.append(together(clients[:count], arguments.seconds))
                print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    finally:
        worker.stop()
    print("| clients | kops/s each | in all | slowest of them | `.item()` p50, us | p99 |")
    print("|---|---|---|---|---|---|")
    for count, rounds in figures.items():
        rates = [[rate / 1e3 for rate, _ in clients] for clients in rounds]
        waits = sorted(wait * 1e6 for clients in rounds for _, own in clients for wait in own)
        each = statistics.median(statistics.mean(own) for own in rates)
        total = statistics.median(sum(own) for own in rates)
        slowest = statistics.median(min(own) for own in rates)
        late = waits[int(0.99 * (len(waits) - 1))]
        print(
            f"| {count} | {each:.1f} | {total:.1f} | {slowest:.1f} | {statistics.median(waits):,.0f} | {late:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
