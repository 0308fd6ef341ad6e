"""Compiled decoding with a static cache: exact tokens, two commands a step, no copies of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F

from skyproxy.tensor.programs import compiler_ir


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="sky", options={"worker": "eager"})


def twins(device: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    local = CachedAttention()
    torch.manual_seed(0)
    return CachedAttention().to(device), local


class CachedAttention(nn.Module):
    """One layer of greedy decoding with a static cache."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 11)
        self.embed = nn.Embedding(11, 16)

    def forward(
        self, token: torch.Tensor, place: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = self.qkv(self.embed(token)).view(1, 1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        keys.index_copy_(2, place, k)
        values.index_copy_(2, place, v)
        mask = (torch.arange(keys.shape[2], device=token.device) <= place).view(1, 1, 1, -1)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.head(self.out(y.transpose(1, 2).reshape(1, 1, 16))).argmax(-1)


def decode(step: Any, device: str, count: int) -> tuple[list[int], torch.Tensor]:
    keys, values = torch.zeros(1, 2, 12, 8, device=device), torch.zeros(1, 2, 12, 8, device=device)
    token, place, tokens = torch.tensor([[3]], device=device), torch.zeros(1, dtype=torch.long, device=device), []
    for _ in range(count):
        token = step(token, place, keys, values)
        place += 1
        tokens.append(int(token))
    return tokens, keys.cpu()


@torch.no_grad()
def test_decoding_with_a_static_cache(sky: str) -> None:
    remote, local = twins(sky)
    got, keys = decode(compiled(remote), sky, 8)
    want, expected_keys = decode(local, "cpu", 8)
    assert got == want
    assert torch.equal(keys, expected_keys)


@torch.no_grad()
def test_a_decode_step_is_two_commands_and_writes_its_cache_in_place(sky: str) -> None:
    remote, _ = twins(sky)
    programs: list[Any] = []
    original = compiler_ir.program_of

    def watching(module: Any) -> Any:
        programs.append(original(module))
        return programs[-1]

    compiler_ir.program_of = watching
    try:
        step = compiled(remote)
        keys, values = torch.zeros(1, 2, 12, 8, device=sky), torch.zeros(1, 2, 12, 8, device=sky)
        token, place = torch.tensor([[3]], device=sky), torch.zeros(1, dtype=torch.long, device=sky)
        step(token, place, keys, values)

        def once() -> None:
            step(token, place, keys, values)
            place.add_(1)

        before = torch.sky.stats()["ops"]
        once()
        assert torch.sky.stats()["ops"] - before == 2
    finally:
        compiler_ir.program_of = original
    names = [name for name, _, _ in programs[0].nodes]
    assert names.count("aten::index_copy_") == 2
    assert "aten::copy_" not in names
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names


def test_slices_of_inputs_are_written_in_place(sky: str) -> None:
    def function(cache: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        before = cache.sum()
        cache[1:2] = row
        cache[:, 0] += 1
        return before + cache.sum()

    remote, local = torch.ones(3, 4, device=sky), torch.ones(3, 4)
    with torch.no_grad():
        for _ in range(2):
            got = compiled(function)(remote, torch.full((1, 4), 5.0, device=sky))
            want = function(local, torch.full((1, 4), 5.0))
            assert torch.equal(got.cpu(), want)
            assert torch.equal(remote.cpu(), local)


def test_rows_that_differ_have_the_values_and_the_sizes_of_the_local_run(sky: str) -> None:
    """A graph gets the size of such rows, a symbol that no message holds: sending it ended the session."""

    def double(rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (rows * 2).sin(), rows.shape[1]

    graph = torch.compile(double, backend="sky", options={"worker": "eager"})
    for lengths in ([1, 2, 2, 4], [3, 1], [1, 2, 2, 4]):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        values = torch.randn(sum(lengths), 3)
        rows = torch.nested.nested_tensor_from_jagged(values.to(sky), offsets=offsets.to(sky))
        result, size = graph(rows)
        assert torch.equal(result.values().cpu(), (values * 2).sin())
        assert size == rows.shape[1]
        assert result.shape == rows.shape
