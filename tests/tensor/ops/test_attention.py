"""Attention on remote tensors: for every number of dimensions what PyTorch computes for the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

SHAPES = [(5, 8), (3, 5, 8), (1, 5, 8), (2, 3, 5, 8), (2, 2, 3, 5, 8)]
MASKS = ["none", "two dimensions", "all dimensions", "numbers", "causal"]


def attend(device: str, shape: tuple[int, ...], mask: str, gradients: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator).to(device).requires_grad_(gradients) for _ in range(3))
    arguments: dict[str, Any] = {"is_causal": mask == "causal"}
    if mask == "two dimensions":
        arguments["attn_mask"] = torch.ones(5, 5, dtype=torch.bool).tril().to(device)
    elif mask == "all dimensions":
        arguments["attn_mask"] = torch.ones(*shape[:-1], 5, dtype=torch.bool).tril().to(device)
    elif mask == "numbers":
        arguments["attn_mask"] = torch.randn(5, 5, generator=generator).to(device)
    result = scaled_dot_product_attention(q, k, v, **arguments)
    if gradients:
        result.sum().backward()
    return [result.detach(), *(each.grad for each in (q, k, v) if gradients)]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)}d")
def test_any_number_of_dimensions_gives_the_bits_of_the_cpu(
    shape: tuple[int, ...], mask: str, gradients: bool, sky1: str
) -> None:
    for ours, theirs in zip(attend(sky1, shape, mask, gradients), attend("cpu", shape, mask, gradients), strict=True):
        assert torch.equal(ours.cpu(), theirs)
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)}d")
def test_inference_mode_gives_the_same(shape: tuple[int, ...], sky1: str) -> None:
    with torch.inference_mode():
        (ours,), (theirs,) = (attend(device, shape, "none", False) for device in (sky1, "cpu"))
    assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("batch", [(), (2,)], ids=["3d", "4d"])
def test_grouped_queries_give_the_bits_of_the_cpu(batch: tuple[int, ...], sky1: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*batch, heads, 5, 8, generator=generator) for heads in (6, 2, 2))
    theirs = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    ours = scaled_dot_product_attention(q.to(sky1), k.to(sky1), v.to(sky1), enable_gqa=True)
    assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("why", ["dropout", "a mask with gradients", "fewer queries", "empty"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)}d")
def test_the_math_form_is_a_view_where_that_of_the_cpu_is(shape: tuple[int, ...], why: str, sky1: str) -> None:
    """From 2.15 on, PyTorch makes four dimensions of three, and views three in the result."""

    def run(device: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        sizes = (*shape[:-1], 0) if why == "empty" else shape
        q, k, v = (torch.randn(sizes, generator=generator).to(device) for _ in range(3))
        arguments: dict[str, Any] = {}
        if why == "dropout":
            torch.manual_seed(0)
            arguments["dropout_p"] = 0.5
        elif why == "a mask with gradients":
            arguments["attn_mask"] = torch.randn(*shape[:-1], 5, generator=generator).to(device).requires_grad_()
        elif why == "fewer queries" and len(shape) > 2:
            q = q[..., :1, :, :]
        return scaled_dot_product_attention(q, k, v, **arguments)

    ours, theirs = run(sky1), run("cpu")
    assert torch.equal(ours.cpu(), theirs)
    assert (ours.shape, ours.stride(), ours._is_view()) == (theirs.shape, theirs.stride(), theirs._is_view())
    if theirs._is_view() and theirs._base is not None:
        assert ours._base is not None
        assert ours._base.shape == theirs._base.shape
