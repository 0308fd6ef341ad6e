"""Transformer layers in eval mode and without gradients: PyTorch's fast paths, to the last bit of local PyTorch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from skyproxy.errors import UnsupportedOpError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LEFT_ALIGNED = [[0, 0, 0, 0, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]
SCATTERED = [[1, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 1, 0, 1, 1]]
pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True, but"
)


def on_both(make: Callable[[], nn.Module], run: Callable[[nn.Module, str], list[Any]], sky: str) -> None:
    """Holds what a module gives on the worker against what its copy gives here."""
    torch.manual_seed(0)
    module = make().eval()
    expected = run(module, "cpu")
    found = run(module.to(sky), sky)
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is None:
            assert ours is None
            continue
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert torch.equal(ours.cpu().nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("rows", [LEFT_ALIGNED, SCATTERED])
def test_an_encoder_leaves_padding_out_as_here(
    rows: list[list[int]], heads: int, norm_first: bool, dtype: torch.dtype, mode: type, sky: str
) -> None:
    def run(module: nn.Module, device: str) -> list[Any]:
        x = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        mask = torch.tensor(rows, dtype=torch.bool).to(device)
        added = torch.zeros(3, 5, dtype=dtype, device=device).masked_fill(mask, float("-inf"))
        causal = torch.triu(torch.ones(5, 5, dtype=torch.bool, device=device), 1)
        with mode():
            return [
                module(x),
                module(x, src_key_padding_mask=mask),
                module(x, src_key_padding_mask=added),
                module(x, mask=causal),
                module(x, mask=causal, src_key_padding_mask=mask),
            ]

    layer = nn.TransformerEncoderLayer(12, heads, 24, batch_first=True, norm_first=norm_first)
    on_both(lambda: nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(12)).to(dtype), run, sky)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_layers_with_hooks_take_nested_batches_op_by_op(activation: str, mode: type, sky: str) -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True, activation=activation)
        module = nn.TransformerEncoder(layer, 2)
        module.layers[0].linear1.register_forward_hook(lambda *unused: None)
        return module

    def run(module: nn.Module, device: str) -> list[Any]:
        x = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1)).to(device)
        with mode():
            return [module(x, src_key_padding_mask=torch.tensor(LEFT_ALIGNED, dtype=torch.bool).to(device))]

    on_both(make, run, sky)


def test_an_encoder_waits_once_for_whether_a_mask_is_left_aligned(sky: str) -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
    module = nn.TransformerEncoder(layer, 2).to(sky).eval()
    x, mask = torch.randn(3, 5, 12, device=sky), torch.tensor(LEFT_ALIGNED, dtype=torch.bool).to(sky)
    with torch.no_grad():
        module(x, src_key_padding_mask=mask)
        before = torch.sky.stats()["round_trips"]
        module(x, src_key_padding_mask=mask)
    assert torch.sky.stats()["round_trips"] == before + 1


def test_what_a_nested_batch_cannot_do_names_the_way_out(sky: str) -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
    module = nn.TransformerEncoder(layer, 1).to(sky).eval()
    x, mask = torch.randn(3, 5, 12, device=sky), torch.tensor(LEFT_ALIGNED, dtype=torch.bool).to(sky)
    module.layers[0].linear1.register_forward_hook(lambda module, args, out: out.softmax(-1))
    with torch.no_grad(), pytest.raises(UnsupportedOpError, match="enable_nested_tensor=False"):
        module(x, src_key_padding_mask=mask)


MASKS = ("none", "bool", "float", "heads")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("masks", MASKS)
def test_attention_layers_are_exact(masks: str, heads: int, batch_first: bool, dtype: torch.dtype, sky: str) -> None:
    def run(module: nn.Module, device: str) -> list[Any]:
        x = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        x = x if batch_first else x.transpose(0, 1)
        padding: Any = torch.tensor(LEFT_ALIGNED, dtype=torch.bool).to(device)
        causal: Any = torch.triu(torch.ones(5, 5, dtype=torch.bool, device=device), 1)
        if masks == "float":
            padding, causal = (
                torch.zeros(m.shape, dtype=dtype, device=device).masked_fill(m, float("-inf"))
                for m in (padding, causal)
            )
        causal = causal.expand(3 * heads, 5, 5) if masks == "heads" else causal
        given: list[dict[str, Any]] = [{"attn_mask": causal, "key_padding_mask": padding}, {"attn_mask": causal}]
        given = [{}] if masks == "none" else [*given, {"key_padding_mask": padding}]
        found: list[Any] = []
        for mode, weights, average, options in itertools.product(
            (torch.no_grad, torch.inference_mode), (True, False), (True, False), given
        ):
            with mode():
                found += module(x, x, x, need_weights=weights, average_attn_weights=average, **options)
                found += module(x, x + 1, x, need_weights=weights, average_attn_weights=average, **options)
        return found

    on_both(lambda: nn.MultiheadAttention(12, heads, batch_first=batch_first).to(dtype), run, sky)


@pytest.mark.parametrize("shape", [(0, 5, 12), (2, 0, 12)])
def test_attention_of_nothing_has_no_weights(shape: tuple[int, ...], sky: str) -> None:
    def run(module: nn.Module, device: str) -> list[Any]:
        x = torch.zeros(shape, device=device)
        with torch.no_grad():
            return [*module(x, x, x), *module(x, x, x, need_weights=False)]

    on_both(lambda: nn.MultiheadAttention(12, 2, batch_first=True), run, sky)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_decoders_are_exact(dtype: torch.dtype, batch_first: bool, norm_first: bool, sky: str) -> None:
    def make() -> nn.Module:
        layer = nn.TransformerDecoderLayer(12, 2, 24, batch_first=batch_first, norm_first=norm_first)
        return nn.TransformerDecoder(layer, 2).to(dtype)

    def run(module: nn.Module, device: str) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        memory, x = (torch.randn(3, n, 12, generator=generator).to(device, dtype) for n in (5, 4))
        memory, x = (memory, x) if batch_first else (memory.transpose(0, 1), x.transpose(0, 1))
        padding = torch.tensor(LEFT_ALIGNED, dtype=torch.bool).to(device)
        causal = torch.triu(torch.ones(4, 4, dtype=torch.bool, device=device), 1)
        found = []
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                found += [module(x, memory), module(x, memory, tgt_mask=causal, memory_key_padding_mask=padding)]
        return [tensor.detach() for tensor in found]

    on_both(make, run, sky)
