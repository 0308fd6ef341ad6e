"""Networks that the benchmarks train and decode with."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

Cache = list[tuple[torch.Tensor, torch.Tensor]]


class Block(nn.Module):
    """Attention and a feed-forward part, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(
        self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """x: (N, T, width), and the keys and values (N, heads, T, width / heads) of what came before."""
        n, length, width = x.shape
        parts = self.query_key_value(self.before_attention(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        if past is not None:
            key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        x = x + self.out(found.transpose(1, 2).reshape(n, length, width))
        return x + self.feed(self.before_feed(x)), (key, value)


class Decoder(nn.Module):
    """A small transformer that predicts the next token: (N, T) tokens to (N, T, vocabulary) scores."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, longest: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, past: Cache | None = None) -> tuple[torch.Tensor, Cache]:
        start = past[0][0].shape[2] if past else 0
        places = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        cache = []
        for number, block in enumerate(self.blocks):
            x, pair = block(x, past[number] if past else None)
            cache.append(pair)
        return self.scores(self.norm(x)), cache


@torch.no_grad()
def decode_greedily(model: Decoder, prompt: torch.Tensor, new_tokens: int, ask_every_token: bool) -> torch.Tensor:
    """The prompt (N, T) with the likeliest tokens behind it, one after the other, on the model's device.

    Args:
        ask_every_token: whether to look at each token, as code does that may stop early; that waits for the device.
    """
    tokens, next_tokens, cache = [prompt], prompt, None
    for _ in range(new_tokens):
        scores, cache = model(next_tokens, cache)
        next_tokens = scores[:, -1].argmax(-1, keepdim=True)
        tokens.append(next_tokens)
        if ask_every_token and bool((next_tokens < 0).all()):
            break
    return torch.cat(tokens, 1)


def mnist_net() -> nn.Module:
    """The network of examples/mnist.py: (N, 1, 28, 28) to (N, 10)."""
    from mnist import MnistNet

    return MnistNet()


def digits_net() -> nn.Module:
    """The network of examples/train_digits.py, with batch norm and dropout: (N, 1, 8, 8) to (N, 10)."""
    from train_digits import DigitsNet

    return DigitsNet()


__all__ = ["Cache", "Decoder", "decode_greedily", "digits_net", "mnist_net"]
