"""What `skyproxy.protect` costs: training with a snapshot every 100 steps against training without, in pairs.

    python benchmarks/protection.py                     # MNIST CNN, 400 steps, 7 pairs; and the hot path
    python benchmarks/protection.py --steps 100 --pairs 1

Both sides of a pair run in one session, one behind the other, and the first of the two changes with every pair. Times
are elapsed and of the client's processor; on a busy machine, look at the second. The losses of all runs must be equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import skyproxy

BATCH = 64
_OPS = 20_000


def train(device: torch.device, steps: int) -> float:
    """Train the CNN of PyTorch's MNIST example on made-up digits; return the last loss."""
    torch.manual_seed(1)
    convolutions = (nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25))
    rest = (nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))
    model = nn.Sequential(*convolutions, *rest).to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    digits = torch.Generator().manual_seed(2)
    loss = torch.zeros(())
    for _ in range(steps):
        images = torch.randn(BATCH, 1, 28, 28, generator=digits).to(device)
        labels = torch.randint(0, 10, (BATCH,), generator=digits).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


def record(device: torch.device, ops: int) -> float:
    """Record small operations; return their sum."""
    x, y = torch.ones(16, device=device), torch.zeros(16, device=device)
    for _ in range(ops):
        y = y + x
    return y.sum().item()


def timed(work: Callable[[], float]) -> tuple[float, float, float]:
    """Return the elapsed seconds, the client's processor seconds, and what came out."""
    began, processor = time.perf_counter(), time.process_time()
    value = work()
    return time.perf_counter() - began, time.process_time() - processor, value


def pairs(node: skyproxy.Node, work: Callable[[], float], count: int, steps: int) -> list[tuple[float, float]]:
    """Return, for each pair, protected over unprotected: elapsed, and processor time of the client."""
    ratios = []
    for number in range(count):
        figures = {}
        for is_protected in (number % 2 == 0, number % 2 != 0):
            protected = skyproxy.protect(steps=steps, node=node) if is_protected else None
            figures[is_protected] = timed(work)
            if protected is not None:
                protected.stop()
        if figures[True][2] != figures[False][2]:
            raise SystemExit(f"other results: {figures}")
        ratios.append((figures[True][0] / figures[False][0], figures[True][1] / figures[False][1]))
    return ratios


def main() -> None:
    """Print the medians of the pairs, and their range."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--every", type=int, default=100, help="optimizer steps between two snapshots")
    parser.add_argument("--ops", type=int, default=_OPS, help="operations of the hot path")
    options = parser.parse_args()
    with skyproxy.launch_local("cpu") as node:
        device = node.devices[0]
        train(device, 20)
        record(device, options.ops)
        for name, work in (
            (f"training, a snapshot every {options.every} steps", lambda: train(device, options.steps)),
            ("hot path, protected", lambda: record(device, options.ops)),
        ):
            ratios = pairs(node, work, options.pairs, options.every)
            for kind, column in (("elapsed", 0), ("client's processor", 1)):
                values = sorted(ratio[column] for ratio in ratios)
                print(f"{name}: {statistics.median(values):.3f} ({values[0]:.3f} to {values[-1]:.3f}), {kind}")


if __name__ == "__main__":
    main()
