"""Remote against local CUDA: this process and the worker use the same GPU, in turn.

Where the local side is a CPU, the same runs with tiny models, to see that it can: `make gpu ARGS=--rehearse`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from _decode import compare as compare_decodes
from _decode import generate_with, have_transformers, qwen2
from _figures import Target, interleaved, ratio_at_least
from _links import Bench
from _models import Decoder
from _training import Batch, Trainer, assert_alike, compare
from torch import nn
from torch.nn import functional as F

_WARM_UP_STEPS = 3
_BATCHES = 4
_LEARNING_RATE = 1e-5
"""At 1e-3, a transformer of 111M parameters that learns four batches by heart is chaotic: on a CPU, two kernels of
attention lead to losses that are 15 % apart after 13 steps.
"""


def missing_cuda() -> str:
    """Why there can be no figures of CUDA here; empty if there can."""
    if not torch.cuda.is_available():
        return "this machine has no CUDA device that its torch can use; run it where the worker's GPU is"
    return ""


def _decoder(bench: Bench) -> tuple[Decoder, list[Batch]]:
    """About 100M parameters, 12 layers of width 768, and batches of 8 sequences of 1,024 tokens."""
    small = bench.scale.small_models
    layers, width, heads, vocabulary, length = (1, 16, 4, 32, 8) if small else (12, 768, 12, 16_384, 1024)
    torch.manual_seed(1)
    return Decoder(layers, width, heads, vocabulary, length), _token_batches(vocabulary, length)


def _token_batches(vocabulary: int, length: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(vocabulary, (8, length), generator=generator),
            torch.randint(vocabulary, (8, length), generator=generator),
        )
        for _ in range(_BATCHES)
    ]


class Gpt2(nn.Module):
    """GPT-2 small of transformers with random weights: (N, T) tokens to a tuple of (N, T, vocabulary) scores."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="sdpa"))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = self.model(input_ids=tokens, use_cache=False, return_dict=False)
        return found


def _trainers(bench: Bench, model: nn.Module, batches: list[Batch]) -> dict[str, Trainer]:
    pair = {
        side: Trainer(model, batches, device, torch.bfloat16, learning_rate=_LEARNING_RATE)
        for side, device in (("sky", bench.device), ("local", bench.local))
    }
    torch.manual_seed(2)  # of both devices; dropout draws from them
    for trainer in pair.values():
        trainer.run(_WARM_UP_STEPS)
    assert_alike(pair, bench)
    return pair


def _train(bench: Bench, name: str, model: nn.Module, batches: list[Batch], bound: float) -> None:
    """Steps a second with the loss never read, and read every ten steps."""
    targets: tuple[Target, ...] = (ratio_at_least(bound),)
    pair = _trainers(bench, model, batches)
    compare(bench, name, pair, bench.scale.steps, targets)
    compare(bench, f"{name}, loss read every 10 steps", pair, bench.scale.steps, targets, "every 10")


def training(bench: Bench) -> None:
    """A transformer of about 100M parameters in bfloat16 autocast, op by op."""
    model, batches = _decoder(bench)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    _train(bench, f"transformer of {millions:.0f}M parameters, bf16 autocast", model, batches, 0.95)


def gpt2(bench: Bench) -> None:
    """GPT-2 small as transformers has it, with its dropout, in bfloat16 autocast, op by op."""
    if not have_transformers():
        bench.skip("GPT-2 small", "transformers is not installed")
        return
    small = bench.scale.small_models
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 16} if small else {}
    batches = _token_batches(64, 8) if small else _token_batches(50_257, 1024)
    torch.manual_seed(1)
    _train(bench, "GPT-2 small, bf16 autocast", Gpt2(**sizes), batches, 0.99)


def compiled(bench: Bench) -> None:
    """The 100M transformer, compiled on either side: by inductor here, and by the worker's there."""
    model, batches = _decoder(bench)
    pair: dict[str, Trainer] = {}
    for side, device in (("sky", bench.device), ("local", bench.local)):
        torch._dynamo.reset()
        pair[side] = Trainer(model, batches, device, torch.bfloat16, learning_rate=_LEARNING_RATE)
        backend, options = ("sky" if side == "sky" else "inductor"), None
        if bench.local != "cuda":  # a CPU's inductor wants a compiler of C++, and a rehearsal judges no speed
            backend, options = ("sky", {"worker": "eager"}) if side == "sky" else ("eager", None)
        pair[side].model.compile(backend=backend, options=options)
        pair[side].run(_WARM_UP_STEPS)
    try:
        compare(bench, "transformer of 100M parameters, compiled, bf16 autocast", pair, bench.scale.steps, ())
    finally:
        torch._dynamo.reset()


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


class _FixedStep:
    """A training step on fixed memory, as graphs want it."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, wanted: torch.Tensor, device: str, autocast: bool):
        self.model = model.to(device)
        self._kind, self._autocast = torch.device(device).type, autocast
        capturable = self._kind != "cpu"  # a CPU has no graphs, and AdamW knows it
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True, capturable=capturable)
        self.inputs, self.wanted = inputs.to(device), wanted.to(device)
        self.loss = torch.zeros((), device=device)

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        with torch.autocast(self._kind, torch.bfloat16, enabled=self._autocast):
            scores = self.model(self.inputs)
            if isinstance(scores, tuple):
                scores = scores[0].flatten(0, 1)
            loss = F.cross_entropy(scores, self.wanted.flatten())
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())


def _captured_local(step: _FixedStep) -> Callable[[], None]:
    """A CUDA graph of the step; on a CPU the step itself."""
    if step.loss.device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _captured_remote(step: _FixedStep) -> Callable[[], None]:
    for _ in range(_WARM_UP_STEPS):
        step()
    graph = torch.sky.SkyGraph()
    with torch.sky.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def _small_step(device: str) -> _FixedStep:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    generator = torch.Generator().manual_seed(6)
    inputs, wanted = torch.rand(64, 64, generator=generator), torch.randint(10, (64,), generator=generator)
    return _FixedStep(model, inputs, wanted, device, autocast=False)


def _compare_captured(bench: Bench, name: str, make: Callable[[str], _FixedStep], count: int, bound: float) -> None:
    steps = {"sky": make(bench.device), "local": make(bench.local)}
    replays = {"sky": _captured_remote(steps["sky"]), "local": _captured_local(steps["local"])}

    def rate(side: str) -> float:
        bench.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            replays[side]()
        steps[side].loss.item()
        return count / (time.perf_counter() - started)

    for side in steps:
        rate(side)  # a worker replays command by command at first
    figures = interleaved({side: lambda side=side: rate(side) for side in steps}, bench.scale.rounds)
    sky, local = (steps[side].loss.cpu() for side in ("sky", "local"))
    # A capture may or may not execute the step on the way, so the two may be a few steps apart.
    torch.testing.assert_close(sky, local, rtol=0.1, atol=0.05)
    bench.compare("cuda", name, "steps/s", figures, (ratio_at_least(bound),))


def graphs(bench: Bench) -> None:
    """A captured step, replayed, of a small network and of the 100M transformer; one CUDA graph on either side."""
    name = "graph-captured step of a small model"
    _compare_captured(bench, name, _small_step, bench.scale.steps * 20, 0.9)

    def transformer_step(device: str) -> _FixedStep:
        model, batches = _decoder(bench)
        return _FixedStep(model, *batches[0], device, autocast=True)

    name = "graph-captured step of a transformer of 100M parameters, bf16 autocast"
    _compare_captured(bench, name, transformer_step, bench.scale.steps, 1.0)


BENCHMARKS: dict[str, Callable[[Bench], Any]] = {
    "cuda-training": training,
    "cuda-gpt2": gpt2,
    "cuda-compiled": compiled,
    "cuda-decode": decode,
    "cuda-graphs": graphs,
}
ON_DELAYED_LINKS = ("cuda-training", "cuda-gpt2", "cuda-graphs", "cuda-decode", "bandwidth")

__all__ = ["BENCHMARKS", "ON_DELAYED_LINKS", "missing_cuda"]
