"""What it costs to keep uploads, and what it saves: one module, moved by one program after another.

    python benchmarks/repeated_uploads.py
    python benchmarks/repeated_uploads.py --mib 1024 --rounds 5

Each row is a worker: one that keeps nothing, one that keeps in memory, one that keeps in a folder. Each column is a
program of its own: the first, the same again, and one with other weights of the same shapes. Times are of `Module.to`
and a synchronize; compare within a run. Hash rates are printed first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from _figures import Spread, number

PROGRAM = """
import json, sys, time, torch, skyproxy
url, token, mib, seed = sys.argv[1:]
node = skyproxy.connect(url, token=token)
torch.manual_seed(int(seed))
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(int(mib) // 4)))
torch.ones(1 << 20).to(node.devices[0])  # both sides have made their buffers
node.synchronize()
before, started = torch.sky.stats(), time.perf_counter()
model.to(node.devices[0])
node.synchronize()
seconds, after = time.perf_counter() - started, torch.sky.stats()
session = node._session
while (session.call("blob_stats") or {"unhashed": 0})["unhashed"]:
    time.sleep(0.05)
print(json.dumps([seconds, after["bytes_sent"] - before["bytes_sent"]]))
"""
PROGRAMS = {"first": 1, "again": 1, "other weights": 2}


@contextmanager
def worker(*arguments: str) -> Iterator[tuple[str, str]]:
    """Url and token of a worker of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder, token = Path(name), secrets.token_urlsafe(16)
        (folder / "token").touch(mode=0o600)
        (folder / "token").write_text(token)
        command = [sys.executable, "-m", "skyproxy_server", "--port", "0", "--device", "cpu", "--log-level", "error"]
        files = ["--token-file", str(folder / "token"), "--port-file", str(folder / "port")]
        process = subprocess.Popen([*command, *files, *(text.replace("FOLDER", name) for text in arguments)])
        try:
            deadline = time.monotonic() + 60
            while not (folder / "port").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the worker did not come up")
                time.sleep(0.02)
            yield f"ws://127.0.0.1:{(folder / 'port').read_text().strip()}", token
        finally:
            process.terminate()
            process.wait()


def hash_rates() -> None:
    """Prints how fast one core hashes, for the choice of the hash."""
    data = secrets.token_bytes(64 << 20)
    for name in ("sha256", "blake2b"):
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            hashlib.new(name, data)
            seconds.append(time.perf_counter() - started)
        print(f"{name:<10} {len(data) / min(seconds) / 2**20:8.0f} MiB/s")


def main() -> None:
    """Runs all of it and prints a table."""
    parser = argparse.ArgumentParser(description="What keeping uploads costs and saves.")
    parser.add_argument("--mib", type=int, default=256, help="of weights")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    hash_rates()
    bound = ["--blob-bytes", str(4 * options.mib << 20)]
    kinds = {"nothing": ["--blob-bytes", "0"], "memory": bound, "folder": [*bound, "--blob-dir", "FOLDER/blobs"]}
    seconds: dict[tuple[str, str], list[float]] = {}
    sent: dict[tuple[str, str], int] = {}
    for _ in range(options.rounds):
        for kind, arguments in kinds.items():
            with worker(*arguments) as (url, token):
                for name, seed in PROGRAMS.items():
                    command = [sys.executable, "-c", PROGRAM, url, token, str(options.mib), str(seed)]
                    took, byte_count = json.loads(subprocess.check_output(command))
                    seconds.setdefault((kind, name), []).append(took)
                    sent[kind, name] = byte_count
    print(f"\n{'kept in':<10} {'program':<15} {'seconds':>8} {'lowest to highest':>20} {'MiB sent':>10}")
    for (kind, name), each in seconds.items():
        spread = Spread.of(each)
        between = f"{number(spread.low)} to {number(spread.high)}"
        middle, moved = number(spread.middle), sent[kind, name] / 2**20
        print(f"{kind:<10} {name:<15} {middle:>8} {between:>20} {moved:>10.2f}")


if __name__ == "__main__":
    main()
