"""The price of a process of its own: the same function called in the worker's process and in one of its own, in turns.

python benchmarks/isolated_calls.py [--calls 100]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import skyproxy


def nothing(*tensors: torch.Tensor) -> None:
    """Do nothing, with tensors at hand."""


def main() -> None:
    """Print milliseconds a call, medians of pairs, for no tensor and for many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100, help="pairs of calls of each row")
    calls = parser.parse_args().calls
    with skyproxy.launch_local("cpu") as node:
        device = node.devices[0]
        rows = {
            "no tensor": [],
            "one tensor of 64 MiB": [torch.zeros(16 << 20, device=device)],
            "300 tensors of 64 KiB": [torch.zeros(16 << 10, device=device) for _ in range(300)],
        }
        began = time.perf_counter()
        node.submit(nothing, isolate=True).result()
        print(f"first isolated call of the worker: {time.perf_counter() - began:.2f} s")
        for name, tensors in rows.items():
            began = time.perf_counter()
            node.submit(nothing, *tensors, isolate=True).result()
            first = 1000 * (time.perf_counter() - began)
            pairs = [(_milliseconds(node, tensors, False), _milliseconds(node, tensors, True)) for _ in range(calls)]
            inside, apart = (statistics.median(column) for column in zip(*pairs))
            print(f"{name}: {inside:.1f} ms in the worker, {apart:.1f} ms isolated ({first:.0f} ms the first time)")


def _milliseconds(node: skyproxy.Node, tensors: list[torch.Tensor], isolate: bool) -> float:
    began = time.perf_counter()
    node.submit(nothing, *tensors, isolate=isolate).result()
    return 1000 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
