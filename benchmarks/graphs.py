"""What graphs save: the client's time for a step, dispatched op by op, compiled, and captured, in one run.

    python benchmarks/graphs.py            # the table
    python benchmarks/graphs.py --json x   # and every figure

A figure is the processor time of the calling thread for one step, while the worker computes beside it; the ratios are
to the same step dispatched op by op. The worker runs compiled graphs op by op here, so it computes the same.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _figures import Row, Target, describe, interleaved, ratio_at_most, value_at_most
from _models import mnist_net
from torch import nn
from torch.nn import functional as F

import skyproxy

DEVICE = "sky:0"
EAGER = {"worker": "eager"}
Step = Callable[[], Any]


class Layer(nn.Module):
    """A transformer layer that keeps keys and values in a cache of fixed size."""

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, heads, longest, width // heads))

    def forward(self, x: torch.Tensor, place: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        self.keys.index_copy_(2, place, k)
        self.values.index_copy_(2, place, v)
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.norm2(x))


class StaticDecoder(nn.Module):
    """One greedy step: (1, 1) token and (1,) place to the next (1, 1) token."""

    def __init__(self, layers: int = 12, width: int = 256, longest: int = 128, vocabulary: int = 512) -> None:
        super().__init__()
        self.longest = longest
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, 4, longest) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, token: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(self.longest, device=token.device) <= place).view(1, 1, 1, -1)
        x = self.embed(token)
        for layer in self.layers:
            x = layer(x, place, mask)
        return self.head(x).argmax(-1)


def training_steps() -> dict[str, Step]:
    """A training step of the MNIST network, batch 64: forward and backward, and with the optimizer."""
    steps: dict[str, Step] = {}
    images, labels = torch.randn(64, 1, 28, 28).to(DEVICE), torch.randint(10, (64,)).to(DEVICE)

    def make(how: str, optimized: bool) -> Step:
        torch.manual_seed(0)
        model = mnist_net().to(DEVICE)
        rate = torch.tensor(1e-3, device=DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=True, capturable=True)

        def compile_it(function: Any) -> Any:
            return torch.compile(function, backend="sky", options=EAGER) if how == "compiled" else function

        @compile_it
        def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(x), y)

        update = compile_it(optimizer.step)

        def step() -> None:
            for parameter in model.parameters():
                parameter.grad = None
            loss_of(images, labels).backward()
            if optimized:
                update()

        for _ in range(3):
            step()
        if how != "captured":
            return step
        for parameter in model.parameters():
            parameter.grad = None
        graph = torch.sky.SkyGraph()
        with torch.sky.graph(graph):
            step()
        fresh = torch.randn(64, 1, 28, 28).to(DEVICE)

        def replay() -> None:
            images.copy_(fresh)
            graph.replay()

        return replay

    for optimized, name in ((False, "CNN forward + backward"), (True, "CNN training step")):
        for how in ("eager", "compiled", "captured"):
            steps[f"{name}, {how}"] = make(how, optimized)
    return steps


@torch.no_grad()
def decode_steps() -> dict[str, Step]:
    """One token of a decoder of 12 layers with a static cache."""
    token, place = torch.zeros(1, 1, dtype=torch.long, device=DEVICE), torch.zeros(1, dtype=torch.long, device=DEVICE)
    model = StaticDecoder().to(DEVICE)
    fast = torch.compile(model, backend="sky", options=EAGER)

    def step_of(function: Any) -> Step:
        @torch.no_grad()
        def step() -> None:
            token.copy_(function(token, place))

        return step

    eager, compiled = step_of(model), step_of(fast)
    eager()
    compiled()
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        eager()
    return {
        "decode step, 12 layers, eager": eager,
        "decode step, 12 layers, compiled": compiled,
        "decode step, 12 layers, captured": graph.replay,
    }


TARGETS: dict[str, Target] = {
    "CNN forward + backward, compiled": ratio_at_most(0.5),
    "CNN training step, captured": ratio_at_most(0.05),
    "CNN training step, compiled: commands": value_at_most(4),
    "decode step, 12 layers, compiled: commands": value_at_most(2),
}


def measure(steps: dict[str, Step], rounds: int, count: int) -> list[Row]:
    """For each step its client time beside that of its eager form, and what it sends."""

    def client_time(step: Step) -> float:
        torch.sky.synchronize()
        started = time.thread_time()
        for _ in range(count):
            step()
        return (time.thread_time() - started) / count * 1e6

    figures = interleaved({name: (lambda step=step: client_time(step)) for name, step in steps.items()}, rounds)
    rows = []

    def add(name: str, unit: str, sky: list[float], other: list[float] | None = None) -> None:
        targets = (TARGETS[name],) if name in TARGETS else ()
        rows.append(Row("graphs", name, "ws", unit, sky, other, "the same, op by op" if other else "", targets))
        print(describe(rows[-1]), flush=True)

    for name, samples in figures.items():
        base = name.rpartition(", ")[0] + ", eager"
        add(name, "us", samples, figures[base] if base != name else None)
        torch.sky.synchronize()
        before = torch.sky.stats()
        for _ in range(10):
            steps[name]()
        torch.sky.synchronize()
        after = torch.sky.stats()
        add(f"{name}: commands", "a step", [(after["ops"] - before["ops"]) / 10])
        add(f"{name}: traffic", "bytes a step", [(after["bytes_sent"] - before["bytes_sent"]) / 10])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="samples of each figure (default: %(default)s)")
    parser.add_argument("--count", type=int, default=20, help="steps a sample (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    torch.zeros(1, device=DEVICE)
    print(f"{skyproxy.devices()[0].source}; torch {torch.__version__}; {os.cpu_count()} cores")
    steps = {**training_steps(), **decode_steps()}
    rows = measure(steps, 3 if arguments.quick else arguments.rounds, arguments.count)
    if arguments.json:
        arguments.json.write_text(json.dumps([row.as_json() for row in rows], indent=1))


if __name__ == "__main__":
    main()
