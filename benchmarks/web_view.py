"""What the web view costs a program that trains: blocks with it and without, in turn, as ratios of processor time.

Run it as `python -m benchmarks.web_view`. The view looks twenty times as often as it does otherwise, so that a short
block has many looks; the cost of the usual view is a twentieth of what is printed above one. The last line is what a
look takes of an idle worker's processor.
"""

from __future__ import annotations

import statistics
import time

import psutil
import torch

import skyproxy
from skyproxy.webview import program

_BLOCKS = 15
_STEPS = 400
_LOOKS = 300


def main() -> None:
    """Measure, and print a line for each process."""
    program._INTERVAL_SECONDS = 0.1
    with skyproxy.launch_local("cpu") as node:
        device = node.device("cpu")
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).to(device)
        x = torch.randn(32, 64, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        assert node.process_id is not None
        processes = {"program": psutil.Process(), "worker": psutil.Process(node.process_id)}

        def block() -> dict[str, float]:
            before = {name: sum(one.cpu_times()[:2]) for name, one in processes.items()}
            began = time.perf_counter()
            for _ in range(_STEPS):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            node.synchronize()
            took = {name: sum(one.cpu_times()[:2]) - before[name] for name, one in processes.items()}
            return {**took, "wall": time.perf_counter() - began}

        def look_seconds() -> float:
            before = sum(processes["worker"].cpu_times()[:2])
            for _ in range(_LOOKS):
                node.worker_status()
            return (sum(processes["worker"].cpu_times()[:2]) - before) / _LOOKS

        block()
        ratios: dict[str, list[float]] = {name: [] for name in (*processes, "wall")}
        for number in range(_BLOCKS):
            order = (True, False) if number % 2 else (False, True)  # neither side is always the warmer one
            found: dict[bool, dict[str, float]] = {}
            for with_view in order:
                if with_view:
                    with skyproxy.ui():
                        found[True] = block()
                else:
                    found[False] = block()
            for name, values in ratios.items():
                values.append(found[True][name] / max(found[False][name], 1e-9))
        print(f"a look takes {look_seconds() * 1e3:.2f} ms of the worker's processor time")
    for name, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:<8} with / without: {middle:.3f} (quartiles {low:.3f} to {high:.3f}), looks every 0.1 s")


if __name__ == "__main__":
    main()
