"""`flex_attention` on remote tensors: the numbers of the CPU, with gradients that the CPU's own does not offer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")
BATCH, HEADS, LENGTH, WIDTH = 2, 4, 48, 16


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def nearer(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return score - (query - key).abs() * 0.1 * (head + 1)


def inputs(device: str, dtype: torch.dtype, key_heads: int = HEADS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, key_heads, key_heads)
    return [torch.randn(BATCH, n, LENGTH, WIDTH, generator=generator).to(device, dtype) for n in heads]


def mask(device: str) -> Any:
    return create_block_mask(causal, BATCH, HEADS, LENGTH, LENGTH, device=device, BLOCK_SIZE=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score_mod", [None, nearer])
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_result_is_that_of_the_cpu(is_masked: bool, score_mod: Any, dtype: torch.dtype, sky: str) -> None:
    found, expected = (
        flex_attention(
            *inputs(device, dtype), score_mod=score_mod, block_mask=mask(device) if is_masked else None, return_lse=True
        )
        for device in (sky, "cpu")
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert torch.equal(ours.cpu(), theirs)


def test_fewer_heads_of_keys_and_tensors_of_the_score_s_own(sky: str) -> None:
    def run(device: str) -> torch.Tensor:
        slopes = torch.arange(1.0, HEADS + 1).to(device)
        result: Any = flex_attention(
            *inputs(device, torch.float32, key_heads=2),
            score_mod=lambda score, batch, head, query, key: score * slopes[head],
            block_mask=mask(device),
            enable_gqa=True,
            scale=0.3,
        )
        return torch.as_tensor(result.cpu())

    assert torch.equal(run(sky), run("cpu"))


@pytest.mark.parametrize("score_mod", [None, nearer])
def test_gradients_are_those_of_the_formula(score_mod: Callable[..., Any] | None, sky: str) -> None:
    remote = [t.requires_grad_() for t in inputs(sky, torch.float32)]
    local = [t.requires_grad_() for t in inputs("cpu", torch.float32)]
    result: Any = flex_attention(*remote, score_mod=score_mod, block_mask=mask(sky))
    result.square().sum().backward()
    query, key, value = local
    scores = query @ key.mT / WIDTH**0.5
    places = torch.arange(LENGTH)
    if score_mod is not None:
        heads = torch.arange(HEADS).view(-1, 1, 1)
        scores = nearer(scores, None, heads, places.view(-1, 1), places)
    scores = scores.masked_fill(places.view(-1, 1) < places, float("-inf"))
    (scores.softmax(-1) @ value).square().sum().backward()
    for ours, theirs in zip(remote, local, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


@pytest.mark.filterwarnings("ignore:.*run op by op from here")
@pytest.mark.parametrize("score_mod", [None, nearer])
def test_compiled_it_gives_the_same_numbers_and_gradients(score_mod: Callable[..., Any] | None, sky: str) -> None:
    found = []
    for attention in (flex_attention, torch.compile(flex_attention)):
        torch._dynamo.reset()
        leaves = [t.requires_grad_() for t in inputs(sky, torch.float32, key_heads=2)]
        result: Any = attention(*leaves, score_mod=score_mod, block_mask=mask(sky), enable_gqa=True)
        result.square().sum().backward()
        found.append([result.detach(), *(leaf.grad for leaf in leaves)])
    for compiled, eager in zip(*found, strict=True):
        assert torch.equal(compiled, eager)


def test_other_devices_are_refused_as_ever(sky: str) -> None:
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(*[t.requires_grad_() for t in inputs("cpu", torch.float32)])
