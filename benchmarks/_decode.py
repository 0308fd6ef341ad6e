"""Greedy decoding: tokens a second, the very same tokens, and round trips a token."""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from _figures import Row, Target, interleaved, microseconds_each, ratio_at_least, ratio_at_most
from _links import Bench
from _models import Decoder, decode_greedily
from graphs import EAGER, StaticDecoder

import skyproxy

_PROMPT_TOKENS = 16
_VOCABULARY = 1000

Decode = Callable[[torch.Tensor, int], torch.Tensor]


def have_transformers() -> bool:
    """Whether transformers is installed; imports it without letting it look for anything on a network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


def qwen2(attention: str, device: str, dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    """A Qwen2 of transformers with random weights, the same every time.

    Args:
        attention: "eager" or "sdpa".
        device: where it goes.
        dtype: of its weights.
        sizes: of `Qwen2Config`, where they differ from 4 layers of width 256.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 4096,
        **sizes,
    }
    torch.manual_seed(3)
    config = Qwen2Config(
        **shape, attn_implementation=attention, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    return Qwen2ForCausalLM(config).to(dtype).eval().to(device)


def generate_with(model: Any) -> Decode:
    """`model.generate`, greedy, always to the last token."""

    def decode(prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
        mask = torch.ones_like(prompt)
        tokens: torch.Tensor = model.generate(
            prompt, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, use_cache=True
        )
        return tokens

    return decode


def generate_there(model: Any) -> Decode:
    """The same with its loop on the worker."""
    node = next(node for node in skyproxy.list_nodes() if node.alive and model.device in node.devices)

    def decode(prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        tokens: torch.Tensor = node.generate(model, inputs, max_new_tokens=new_tokens, do_sample=False, use_cache=True)
        return tokens

    return decode


def _small_decoder(bench: Bench, ask_every_token: bool) -> dict[str, Decode]:
    torch.manual_seed(3)
    layers, width = (1, 16) if bench.scale.small_models else (4, 256)
    longest = _PROMPT_TOKENS + 1 + bench.scale.new_tokens
    model = Decoder(layers, width, 4, _VOCABULARY, longest).eval()

    def on(device: str) -> Decode:
        placed = copy.deepcopy(model).to(device)
        return lambda prompt, count: decode_greedily(placed, prompt, count, ask_every_token)

    return {"sky": on(bench.device), "local": on(bench.local)}


def _generators(bench: Bench, attention: str) -> dict[str, Decode]:
    return {
        "sky": generate_with(_model(bench, attention, bench.device)),
        "local": generate_with(_model(bench, attention, bench.local)),
    }


def _model(bench: Bench, attention: str, device: str) -> Any:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32} if bench.scale.small_models else {}
    return qwen2(attention, device, **sizes)


def compare(
    bench: Bench,
    name: str,
    pair: dict[str, Decode],
    targets: tuple[Target, ...],
    vocabulary: int,
    asks: bool = True,
) -> Row:
    """Tokens a second of both, round by round; the tokens of every round must be the same.

    Args:
        asks: whether it waits for every token, so that a slow link allows fewer of them.

    Returns:
        The row that was added.
    """
    scale = bench.scale
    new_tokens = scale.waits(scale.new_tokens, bench.link.rtt_seconds) if asks else scale.new_tokens
    prompt = torch.randint(vocabulary, (1, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(4))
    prompts = {"sky": prompt.to(bench.device), "local": prompt.to(bench.local)}
    tokens: dict[str, torch.Tensor] = {}

    def rate(side: str) -> float:
        bench.synchronize()
        started = time.perf_counter()
        tokens[side] = pair[side](prompts[side], new_tokens).cpu()
        return new_tokens / (time.perf_counter() - started)

    cold = {}
    for side in pair:
        gc.collect()  # as where a program begins: what other benchmarks have left is not this one's
        cold[side] = [rate(side)]
    rounds = scale.rounds if bench.direct else scale.slow_rounds
    before = torch.sky.stats()["round_trips"]
    figures = interleaved({side: lambda side=side: rate(side) for side in pair}, rounds)
    trips = torch.sky.stats()["round_trips"] - before
    assert tokens["local"].shape == (1, _PROMPT_TOKENS + new_tokens)
    assert torch.equal(tokens["sky"], tokens["local"]), f"other tokens: {tokens['sky']} against {tokens['local']}"
    bench.compare("decode", f"{name}: cold", "tokens/s", cold, (ratio_at_least(0.5),) if bench.direct else ())
    row = bench.compare("decode", name, "tokens/s", figures, targets)
    # Two waits of a round belong to `synchronize`, before the clock starts for either side.
    bench.add("decode", f"{name}: round trips", "a token", [(trips / rounds - 2) / new_tokens])
    return row


def greedy(bench: Bench) -> None:
    """`generate` of a 4-layer Qwen2 with width 256, and a loop of our own that never asks."""
    targets = (ratio_at_least(0.6),) if bench.direct else ()
    if have_transformers():
        for attention in ("eager", "sdpa"):
            name = f"Qwen2 4x256 generate, {attention}"
            row = compare(bench, name, _generators(bench, attention), targets, _VOCABULARY)
            _against_round_trips(bench, name, row)
        pair = {
            "sky": generate_there(_model(bench, "sdpa", bench.device)),
            "local": generate_with(_model(bench, "sdpa", bench.local)),
        }
        name = "Qwen2 4x256 generate, sdpa, run on the worker"
        compare(bench, name, pair, (), _VOCABULARY, asks=False)
    else:
        bench.skip("Qwen2 4x256 generate", "transformers is not installed; an own decoder took its place")
        name = "own decoder 4x256, asked every token"
        row = compare(bench, name, _small_decoder(bench, ask_every_token=True), targets, _VOCABULARY)
        _against_round_trips(bench, name, row)
    name = "own decoder 4x256, never asked"
    compare(bench, name, _small_decoder(bench, ask_every_token=False), targets, _VOCABULARY, asks=False)


def _steps(device: str, how: str, sizes: tuple[int, int], new_tokens: int) -> Decode:
    """A decoder with a static cache whose step for one token is dispatched op by op, compiled or captured.

    Args:
        device: where it runs.
        how: "eager", "compiled" or "captured".
        sizes: layers and width.
        new_tokens: the most tokens that it is asked for.
    """
    torch.manual_seed(3)
    layers, width = sizes
    longest = _PROMPT_TOKENS + new_tokens
    model = StaticDecoder(layers, width, longest, _VOCABULARY).eval().to(device)
    function = torch.compile(model, backend="sky", options=EAGER) if how == "compiled" else model
    token, place = torch.zeros(1, 1, dtype=torch.long, device=device), torch.zeros(1, dtype=torch.long, device=device)
    written = torch.zeros(1, longest + 1, dtype=torch.long, device=device)

    @torch.no_grad()
    def step() -> None:
        token.copy_(function(token, place))
        place.add_(1)
        written.index_copy_(1, place, token)

    step()
    if how == "captured":
        graph = torch.sky.SkyGraph()
        with torch.sky.graph(graph):
            step()
        advance: Callable[[], None] = graph.replay
    else:
        advance = step

    def decode(prompt: torch.Tensor, count: int) -> torch.Tensor:
        place.zero_()
        for number in range(_PROMPT_TOKENS):
            token.copy_(prompt[:, number : number + 1])
            advance()
        for _ in range(count - 1):
            advance()
        return torch.cat([prompt, written[:, _PROMPT_TOKENS : _PROMPT_TOKENS + count]], 1)

    return decode


def by_graphs(bench: Bench) -> None:
    """Greedy decoding whose step is compiled, or captured, against the same step op by op on the local device."""
    small = bench.scale.small_models
    sizes, name = ((1, 16), "1x16") if small else ((4, 256), "4x256")
    targets = (ratio_at_least(0.85),) if bench.direct and not bench.link.tls else ()
    local = _steps(bench.local, "eager", sizes, bench.scale.new_tokens)
    for how in ("compiled", "captured"):
        pair = {"sky": _steps(bench.device, how, sizes, bench.scale.new_tokens), "local": local}
        compare(bench, f"static decoder {name}, step {how}", pair, targets, _VOCABULARY, asks=False)


def _against_round_trips(bench: Bench, name: str, row: Row) -> None:
    """Time a token against what cannot be avoided: one bare round trip, and the computing itself."""
    if not bench.link.rtt_seconds:
        return
    assert row.other is not None
    least = [1e3 / local + microseconds_each(bench.yardsticks.round_trip, 5) / 1e3 for local in row.other]
    targets = (ratio_at_most(1.1),) if bench.link.rtt_seconds == 0.020 else ()
    against = "local CPU + bare round trip"
    bench.add("decode", f"{name}: time a token", "ms", [1e3 / sky for sky in row.sky], least, against, targets)


__all__ = ["by_graphs", "compare", "generate_with", "greedy", "have_transformers", "qwen2"]
