"""The first figures of the device: `sky:0` on this machine's embedded worker against local CPU, in one run.

    python benchmarks/device.py                 # the table
    python benchmarks/device.py --json out.json # and every figure

All figures of a row are taken in turn, round by round, so that a machine whose speed drifts treats both sides alike.
Trust the ratios; the absolute figures are this machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _yardsticks import Yardsticks, medians, microseconds_each
from torch import nn

import skyproxy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))


class Table:
    """Rows of the result."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, unit: str, sky: tuple[float, float, float], local: tuple[float, float, float], what: str) -> None:
        """One row: `sky` against `local`, each as minimum, median, maximum."""
        self.rows.append(
            {"name": name, "unit": unit, "sky": sky, "local": local, "against": what, "ratio": sky[1] / local[1]}
        )
        print(f"{name:<34} {sky[1]:>10.1f} {unit:<8} {what:<26} {local[1]:>10.1f}   ratio {sky[1] / local[1]:.2f}", flush=True)

    def markdown(self) -> str:
        """The table as the documentation shows it."""
        lines = ["| figure | unit | sky:0 | compared with | there | ratio |", "|---|---|---|---|---|---|"]
        for row in self.rows:
            lines.append(
                f"| {row['name']} | {row['unit']} | {row['sky'][1]:.1f} | {row['against']} | {row['local'][1]:.1f} "
                f"| {row['ratio']:.2f} |"
            )
        return "\n".join(lines)


def small_ops(table: Table, rounds: int) -> None:
    """Client time of an operation: what the program itself waits, while the worker computes beside it."""
    def make(device: str) -> dict[str, Any]:
        x = torch.ones(16, 16, device=device)
        y = torch.ones(16, 16, device=device)
        g = torch.ones(16, 16, device=device, requires_grad=True)
        return {
            "y = x + y, 16x16": lambda: x + y,
            "x.add_(y)": lambda: x.add_(y),
            "x * 2.0": lambda: x * 2.0,
            "x + y with gradient": lambda: g + y,
            "x.view(256)": lambda: x.view(256),
            "x.sum(1)": lambda: x.sum(1),
        }

    sky, local = make("sky:0"), make("cpu")
    for name in sky:
        for call in (sky[name], local[name]):
            microseconds_each(call, 1000)
        figures = medians(
            {
                "sky": lambda name=name: microseconds_each(sky[name], 5000, torch.sky.synchronize),
                "local": lambda name=name: microseconds_each(local[name], 5000),
            },
            rounds,
        )
        table.add(f"client time: {name}", "us/op", figures["sky"], figures["local"], "local CPU eager")


def end_to_end(table: Table, rounds: int) -> None:
    """Operations a second, done on the worker."""
    def chain(device: str, count: int = 20_000) -> float:
        x, y = torch.ones(16, 16, device=device), torch.zeros(16, 16, device=device)
        started = time.perf_counter()
        for _ in range(count):
            y = y + x
        value = y[0, 0].item()
        seconds = time.perf_counter() - started
        assert value == count, value
        return count / seconds / 1e3

    figures = medians({"sky": lambda: chain("sky:0"), "local": lambda: chain("cpu")}, rounds)
    table.add("end to end: y = y + x", "kops/s", figures["sky"], figures["local"], "local CPU eager")


def latency(table: Table, yardsticks: Yardsticks, rounds: int) -> None:
    """What one value costs."""
    one = torch.ones((), device="sky:0")
    figures = medians(
        {
            "item": lambda: microseconds_each(one.item, 300, torch.sky.synchronize),
            "bare": lambda: microseconds_each(yardsticks.round_trip, 300),
        },
        rounds,
    )
    table.add(".item()", "us", figures["item"], figures["bare"], "bare websockets echo")


def bandwidth(table: Table, yardsticks: Yardsticks, rounds: int, mebibytes: int) -> None:
    """One large tensor there and back."""
    tensor = torch.randn(mebibytes << 18)
    data = memoryview(tensor.numpy()).cast("B")
    figures: dict[str, list[float]] = {"up": [], "down": [], "raw up": [], "raw down": []}
    for _ in range(rounds):
        torch.sky.synchronize()
        started = time.perf_counter()
        remote = tensor.to("sky:0")
        torch.sky.synchronize()
        figures["up"].append(mebibytes / (time.perf_counter() - started))
        started = time.perf_counter()
        back = remote.cpu()
        figures["down"].append(mebibytes / (time.perf_counter() - started))
        assert torch.equal(back, tensor)
        del remote, back
        up, down = yardsticks.raw_transfer(data)
        figures["raw up"].append(mebibytes / up)
        figures["raw down"].append(mebibytes / down)
    rows = {name: (min(row), sorted(row)[len(row) // 2], max(row)) for name, row in figures.items()}
    table.add(f"upload {mebibytes} MiB", "MiB/s", rows["up"], rows["raw up"], "raw socket, fresh memory")
    table.add(f"download {mebibytes} MiB", "MiB/s", rows["down"], rows["raw down"], "raw socket, fresh memory")


def digits(table: Table, rounds: int, steps: int) -> None:
    """Training steps a second of the demo's network, batch 64."""
    from train_digits import DigitsNet, load_data

    images, labels = (t[:64] for t in load_data()[0].tensors)

    def runner(device: str) -> Any:
        torch.manual_seed(0)
        model = DigitsNet().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

        def run(count: int = steps) -> float:
            started = time.perf_counter()
            for _ in range(count):
                x, y = images.to(device), labels.to(device)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            loss.item()
            return count / (time.perf_counter() - started)

        run(3)
        return run

    figures = medians({"sky": runner("sky:0"), "local": runner("cpu")}, rounds)
    table.add("digits CNN, batch 64", "steps/s", figures["sky"], figures["local"], "local CPU, same threads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="figures of each kind (default: %(default)s)")
    parser.add_argument("--mebibytes", type=int, default=256, help="size of the large tensor (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="training steps a round (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch threads of either side (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # the embedded worker inherits it
    torch.set_num_threads(arguments.threads)
    torch.zeros(1, device="sky:0")
    print(f"{skyproxy.devices()[0].source}; torch {torch.__version__}; {os.cpu_count()} cores; {arguments.threads} threads")
    table, yardsticks = Table(), Yardsticks()
    try:
        small_ops(table, arguments.rounds)
        end_to_end(table, arguments.rounds)
        latency(table, yardsticks, arguments.rounds)
        bandwidth(table, yardsticks, arguments.rounds, arguments.mebibytes)
        digits(table, arguments.rounds, arguments.steps)
    finally:
        yardsticks.close()
    print("\n" + table.markdown())
    if arguments.json:
        arguments.json.write_text(json.dumps(table.rows, indent=1))


if __name__ == "__main__":
    main()
