"""Shape rules for attention that is computed whole, see `shapes.rules`; this module adds to its table."""

from __future__ import annotations

import torch

from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.shapes.elementwise import preserved_stride
from skyproxy.tensor.shapes.networks import FULL_PRECISION, RULES
from skyproxy.tensor.shapes.rules import FLOATS, RuleResult, rule
from skyproxy.torch_codec import is_dense


@rule("_scaled_dot_product_flash_attention_for_cpu")
def _flash_attention(
    query: Meta, key: Meta, value: Meta, dropout_p: float = 0.0, is_causal: bool = False, **kwargs: object
) -> RuleResult:
    if len(query.size) != 4 or query.dtype not in FLOATS or value.size[-1] != query.size[-1]:
        return None
    if not query.plain:
        return None
    batch, heads, length, _ = query.size
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    out = plain_meta(query.size, query.dtype, preserved_stride(query.size, query.stride))
    sums = plain_meta((batch, heads, length), wide, (length * heads, 1, heads))
    return [(out, None), (sums, None)]


@rule("scaled_dot_product_attention")
def _whole_fused_attention(query: Meta, key: Meta, value: Meta, *args: object, **kwargs: object) -> RuleResult:
    """Undecomposed, on CUDA: fused kernels give the result the query's order of memory, but for the memory-efficient
    one, whose rows are those of all heads. It alone takes single precision.
    """
    sizes = [meta.size for meta in (query, key, value)]
    if any(len(size) != 4 for size in sizes) or len({size[0] for size in sizes}) > 1 or query.dtype not in FLOATS:
        return None
    if not (query.plain and is_dense(query.size, query.stride)) or value.size[-1] != query.size[-1]:
        return None
    if query.dtype in FULL_PRECISION:
        batch, heads, length, width = query.size
        aligned = query.dtype is torch.float32 and width % 4 == 0 and not kwargs.get("enable_gqa")
        stride = (length * heads * width, width, heads * width, 1) if aligned else None
        return [(plain_meta((batch, heads, length, width), query.dtype, stride), None)]
    return [(plain_meta(query.size, query.dtype, query.stride), None)]


@rule("_native_multi_head_attention")
def _whole_attention(
    query: Meta,
    key: Meta,
    value: Meta,
    embed_dim: int,
    num_head: int,
    qkv_weight: Meta,
    qkv_bias: Meta,
    proj_weight: Meta,
    proj_bias: Meta,
    mask: Meta | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> RuleResult:
    """PyTorch's fake kernel gives empty weights where none are wanted; the real ones give None."""
    if len(query.size) != 3 or not query.plain or len(proj_weight.size) != 2:
        return None
    if 0 in query.size:
        return [(plain_meta(query.size, query.dtype), None), (None, None)]
    batch, length, _ = query.size
    out = (plain_meta((batch, length, proj_weight.size[0]), query.dtype), None)
    if not need_weights:
        return [out, (None, None)]
    heads = () if average_attn_weights else (num_head,)
    return [out, (plain_meta((batch, *heads, length, length), query.dtype), None)]


__all__ = ["RULES"]
