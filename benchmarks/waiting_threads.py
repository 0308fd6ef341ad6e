"""The price of threads that wait for each other: training on an embedded worker, with and without a busy neighbour.

    python benchmarks/waiting_threads.py
    python benchmarks/waiting_threads.py --rounds 5 --steps 200

Threads of a kernel that are done compute in vain until the others are, and longer than that: libgomp has them do so
300,000 times, in case that the next kernel comes soon. On a machine that has more to do than cores, that time is taken
from the threads that are waited for. Workers on the program's own machine wait 2,000 times and sleep then. Each round
trains a small convolutional network with both numbers, in processes of their own, in turn; then both beside as many
programs that compute without end as there are cores. Seconds of the training alone, and their ratio, libgomp's number
over ours: above 1, ours is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from _figures import Spread, interleaved

PROGRAM = """
import sys, time
import torch
import skyproxy

steps = int(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
    torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Flatten(), torch.nn.Linear(1024, 10),
).to("sky:0")
optimizer = torch.optim.AdamW(model.parameters())
images, labels = torch.randn(64, 1, 8, 8, device="sky:0"), torch.randint(10, (64,), device="sky:0")

def train(count):
    for _ in range(count):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return loss.item()

train(10)
began = time.perf_counter()
train(steps)
print(time.perf_counter() - began)
"""
SIDES = {"libgomp": "300000", "ours": "2000"}


def seconds(spins: str, steps: int) -> float:
    """Train in a process of its own; return what the steps took."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    variables |= {"GOMP_SPINCOUNT": spins, "SKYPROXY_ANNOUNCE_WORKER": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(steps)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return float(done.stdout)


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Programs that compute without end, during the block."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    print(f"{'neighbours':>10} {'libgomp s':>10} {'ours s':>8}  ratio: low, median, high")
    for count in (0, os.cpu_count() or 1):
        with neighbours(count):
            calls = {name: lambda spins=spins: seconds(spins, arguments.steps) for name, spins in SIDES.items()}
            figures = interleaved(calls, arguments.rounds)
        ratios = Spread.of([theirs / ours for theirs, ours in zip(figures["libgomp"], figures["ours"], strict=True)])
        medians = [Spread.of(figures[name]).middle for name in SIDES]
        print(f"{count:>10} {medians[0]:>10.2f} {medians[1]:>8.2f}  " + ", ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
