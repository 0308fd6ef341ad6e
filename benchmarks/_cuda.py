"""Remote against local CUDA: this process and the worker use the same GPU, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from _decode import compare as compare_decodes
from _decode import generate_with, have_transformers, qwen2
from _figures import interleaved, ratio_at_least
from _links import Bench
from _models import Decoder
from _training import Trainer, assert_alike
from torch import nn


def missing_cuda() -> str:
    """Why there can be no figures of CUDA here; empty if there can."""
    if not torch.cuda.is_available():
        return "this machine has no CUDA device that its torch can use; run it where the worker's GPU is"
    return ""


def training(bench: Bench) -> None:
    """About 100M parameters, 12 layers of width 768, 8 sequences of 1,024 tokens, in bfloat16 autocast."""
    small = bench.scale.small_models
    layers, width, heads, vocabulary, length = (1, 16, 4, 32, 8) if small else (12, 768, 12, 16_384, 1024)
    generator = torch.Generator().manual_seed(0)
    batches = [
        (
            torch.randint(vocabulary, (8, length), generator=generator),
            torch.randint(vocabulary, (8, length), generator=generator),
        )
        for _ in range(4)
    ]
    torch.manual_seed(1)
    model = Decoder(layers, width, heads, vocabulary, length)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    pair = {
        side: Trainer(model, batches, device, torch.bfloat16)
        for side, device in (("sky", bench.device), ("local", bench.local))
    }

    def rate(side: str) -> float:
        bench.synchronize()
        return pair[side].run(bench.scale.steps)

    for side in pair:
        rate(side)
    figures = interleaved({side: lambda side=side: rate(side) for side in pair}, bench.scale.rounds)
    assert_alike(pair, bench)
    name = f"transformer of {millions:.0f}M parameters, bf16 autocast"
    bench.compare("cuda", name, "steps/s", figures, (ratio_at_least(0.95),))


def decode(bench: Bench) -> None:
    """`generate` of a Qwen2 of the 0.5B size, random weights in bfloat16."""
    if not have_transformers():
        bench.skip("decode of a 0.5B Qwen2", "transformers is not installed")
        return
    sizes = {
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    }
    if bench.scale.small_models:
        sizes |= {"num_hidden_layers": 1, "hidden_size": 28, "intermediate_size": 32, "vocab_size": 64}
    pair = {
        side: generate_with(qwen2("sdpa", device, torch.bfloat16, **sizes))
        for side, device in (("sky", bench.device), ("local", bench.local))
    }
    compare_decodes(bench, "Qwen2 0.5B generate, sdpa, bf16", pair, (ratio_at_least(0.8),), sizes["vocab_size"])


class _SmallStep:
    """A training step on fixed memory, as graphs want it."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True, capturable=True)
        generator = torch.Generator().manual_seed(6)
        self.inputs = torch.rand(64, 64, generator=generator).to(device)
        self.wanted = torch.randint(10, (64,), generator=generator).to(device)
        self.loss = torch.zeros((), device=device)

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(self.model(self.inputs), self.wanted)
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())


def _captured_local(step: _SmallStep) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _captured_remote(step: _SmallStep, graph_class: type) -> Callable[[], None]:
    for _ in range(3):
        step()
    graph = graph_class()
    with torch.sky.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def graph_class() -> type | None:
    """The class of `torch.sky` that stands where `torch.cuda.CUDAGraph` does; None while there is none."""
    if not hasattr(torch.sky, "graph"):
        return None
    for name in ("SkyGraph", "Graph", "CUDAGraph"):
        found = getattr(torch.sky, name, None)
        if isinstance(found, type):
            return found
    return None


def graphs(bench: Bench) -> None:
    """A captured step of a small network, replayed; one CUDA graph on either side."""
    found = graph_class()
    if found is None:
        bench.skip("graph-captured step of a small model", "torch.sky has no graph yet")
        return
    count = bench.scale.steps * 20
    steps = {"sky": _SmallStep(bench.device), "local": _SmallStep(bench.local)}
    replays = {"sky": _captured_remote(steps["sky"], found), "local": _captured_local(steps["local"])}

    def rate(side: str) -> float:
        bench.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            replays[side]()
        steps[side].loss.item()
        return count / (time.perf_counter() - started)

    figures = interleaved({side: lambda side=side: rate(side) for side in steps}, bench.scale.rounds)
    sky, local = (steps[side].loss.cpu() for side in ("sky", "local"))
    # A capture may or may not execute the step on the way, so the two may be one step apart.
    torch.testing.assert_close(sky, local, rtol=0.1, atol=0.05)
    bench.compare("cuda", "graph-captured step of a small model", "steps/s", figures, (ratio_at_least(0.9),))


__all__ = ["decode", "graph_class", "graphs", "missing_cuda", "training"]
