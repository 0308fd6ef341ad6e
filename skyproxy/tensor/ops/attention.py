"""Scaled dot-product attention: the kernel that the worker's own PyTorch would choose, as one op.

For a device like ours PyTorch would choose the math form: a dozen ops, and other roundings than the fused kernel that
local PyTorch takes. So the choice is made here as the worker would make it, and the fused op is called by its name;
its backward follows from PyTorch's own derivative formulas.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from skyproxy import torch_versions
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import (
    DisableTorchFunction,
    FakeTensor,
    FunctionalTensor,
    OpOverload,
    choose_attention,
    disable_current_modes,
    flash_attention_enabled,
    function_transform_level,
    is_forward_ad_active,
    is_transformed,
    math_attention_enabled,
    unwrap_gradients,
    unwrapped,
)
from skyproxy.tensor.dispatch.op_info import OpInfo, implements
from skyproxy.tensor.ops import cuda_attention

aten = torch.ops.aten
_flash = aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH = 1
_NONE = -1
_VERSION = torch_versions.minor(torch.__version__)
_ADDS_A_BATCH = _LOOKS_AT_MASK_FIRST = _VERSION >= (2, 14)
"""True if PyTorch makes four dimensions of three before it chooses, and views three in the result; and if it refuses a
mask that is also causal before it looks for elements."""
_MASK_AND_CAUSAL = "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True"
_NO_BACKEND = (
    "No viable backend for scaled_dot_product_attention was found. This is likely due to turning off both the math "
    "kernel and the fused kernels."
)
_MATH_ONLY = (
    " sky devices compute attention in the math form where function transforms want tangents, second derivatives or a "
    "mask's. Allow it: sdpa_kernel([..., SDPBackend.MATH])."
)


@functools.lru_cache(maxsize=4096)
def _cpu_choice(
    query: Meta,
    key: Meta,
    value: Meta,
    mask: Meta | None,
    mask_grad: bool,
    dropout: float,
    causal: bool,
    gqa: bool,
    enabled: tuple[bool, bool],
) -> int:
    """Return what PyTorch chooses for CPU tensors that look like these. Their memory is never touched.

    Args:
        enabled: whether the math form and the fused kernel may be chosen; PyTorch looks at that by itself.
    """
    stand_ins = {
        meta: torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="cpu")
        for meta in {query, key, value}
    }
    q, k, v = stand_ins[query], stand_ins[key], stand_ins[value]
    m = None if mask is None else torch.empty_strided(mask.size, mask.stride, dtype=mask.dtype, device="cpu")
    if m is not None and mask_grad:
        m.requires_grad_()
    return int(choose_attention(q, k, v, m, dropout, causal, enable_gqa=gqa))


@functools.lru_cache(maxsize=1024)
def _usual_choice(
    dtype: torch.dtype,
    ones: tuple[bool, bool, bool],
    length: int,
    key_length: int,
    dropout: float,
    causal: bool,
    enabled: tuple[bool, bool],
) -> int:
    """Return the choice for all usual tensors of a kind, see `_choose_at_once`; asked of small ones that are alike."""
    batch, heads, width = (1 if one else 2 for one in ones)
    query = plain_meta((batch, heads, length, width), dtype)
    key = plain_meta((batch, heads, key_length, width), dtype)
    return _cpu_choice(query, key, key, None, False, dropout, causal, False, enabled)


def _choose_at_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    causal: bool,
    enabled: tuple[bool, bool],
) -> int | None:
    """Return what the worker's CPU chooses for the usual inputs, in a fraction of the time of all the questions.

    PyTorch looks at which sizes are equal, one or zero, and whether elements of a row lie side by side; so what it
    chose once holds for other sizes, and a generation's keys, of which each step has more, ask it nothing.

    Returns:
        The choice; None where inputs are not remote tensors of one dtype and device with elements and of four
        dimensions, whose keys and values have the sizes of the queries but for their number.
    """
    if not type(query) is type(key) is type(value) is RemoteTensor:
        return None
    handle, key_handle, value_handle = query._sky, key._sky, value._sky
    q, k, v = handle.meta, key_handle.meta, value_handle.meta
    if len(q.size) != 4 or len(k.size) != 4 or k.size != v.size or not q.dtype is k.dtype is v.dtype:
        return None
    batch, heads, length, width = q.size
    other_batch, other_heads, key_length, other_width = k.size
    if batch != other_batch or heads != other_heads or width != other_width or 0 in q.size or key_length == 0:
        return None
    device = handle.device
    if key_handle.device is not device or value_handle.device is not device or device.row["type"] != "cpu":
        return None
    if not (q.plain and k.plain and v.plain) or not q.stride[3] == k.stride[3] == v.stride[3] == 1:
        return None
    number = 1 if length == 1 else 2
    key_number = number if key_length == length else 1 if key_length == 1 else 3
    ones = batch == 1, heads == 1, width == 1
    return _usual_choice(q.dtype, ones, number, key_number, dropout, causal, enabled)


def _looks(tensors: tuple[torch.Tensor, ...]) -> list[Meta | None] | None:
    """Describe the four arguments; None where nobody can tell. While a graph is traced, they are fake."""
    looks: list[Meta | None] = []
    for t in tensors:
        if isinstance(t, RemoteTensor):
            looks.append(t._sky.meta)
        elif isinstance(t, FakeTensor | FunctionalTensor) or is_transformed(t):
            numbers = [_hint(n) for n in (*t.shape, *t.stride())]
            if None in numbers:
                return None
            looks.append(plain_meta(tuple(numbers[: t.dim()]), t.dtype, tuple(numbers[t.dim() :])))
        else:
            return None
    return looks + [None] * (4 - len(looks))


def _needs_formulas(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Tell whether function transforms want tangents, second derivatives or a mask's, which fused kernels have not."""
    return (
        is_forward_ad_active()
        or any(unwrap_gradients(t)[1] > 1 or not _is_remote_below(t) for t in tensors)
        or any(mask.requires_grad for mask in tensors[3:])
    )


def _is_remote_below(tensor: Any) -> bool:
    """Tell whether it is a remote tensor that transforms have wrapped; while a graph is traced, it is a fake one."""
    while is_transformed(tensor):
        tensor = unwrapped(tensor)
    return isinstance(tensor, RemoteTensor)


def _hint(n: int | torch.SymInt) -> int:
    """The number that a symbolic size had when the graph was traced."""
    return n.node.hint if isinstance(n, torch.SymInt) else n


def _check_inputs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Refuse what PyTorch refuses before it chooses a kernel, in its words: some kernels would take it."""
    dtypes = [t.dtype for t in (query, key, value)]
    of_mask = None if mask is None else mask.dtype
    if len(set(dtypes)) > 1 or of_mask not in (None, torch.bool, torch.float32, query.dtype):
        q, k, v, *masks = (
            torch.empty((1, 1, 1, 1), dtype=dtype, device="cpu") for dtype in (*dtypes, of_mask) if dtype
        )
        with disable_current_modes(), DisableTorchFunction():
            aten.scaled_dot_product_attention(q, k, v, *masks)  # raises
    if not query.device == key.device == value.device:
        raise RuntimeError(
            f"Expected query, key, and value to have the same device type, but got query.device: {query.device} "
            f"key.device: {key.device} and value.device: {value.device} instead."
        )
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise RuntimeError(
            f"Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: {query.dim()} "
            f"key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )


def _is_nothing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether PyTorch gives zeros without looking further, as 2.11 does where it chooses its fused kernel, which
    ends the process where there are no heads.
    """
    if _VERSION >= (2, 13):
        return query.shape[-2] == 0 or 0 in value.shape
    if _VERSION == (2, 12):
        return 0 in (*query.shape, *key.shape, *value.shape)
    tensors = query, key, value
    outer, *others = ((t.dim(), *t.shape[:2], t.shape[-1]) for t in tensors)
    return outer[0] == 4 and 0 in outer and others == [outer] * 2 and all(t.shape[2] != 0 for t in tensors)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` for remote tensors; see there for shapes."""
    if attn_mask is None and function_transform_level() is None:
        enabled = math_attention_enabled(), flash_attention_enabled()
        if _choose_at_once(query, key, value, dropout_p, is_causal, enabled) == _FLASH:
            usual: torch.Tensor = (
                _flash(query, key, value, dropout_p, is_causal)
                if scale is None
                else _flash(query, key, value, dropout_p, is_causal, scale=scale)
            )[0]
            return usual
    _check_inputs(query, key, value, attn_mask)
    mask = attn_mask
    device = DEVICES.of(query.device)
    inputs = (query, key, value) if mask is None else (query, key, value, mask)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    if device.row["type"] == "cuda" and not needs_grad and all(isinstance(t, RemoteTensor) for t in inputs):
        return cuda_attention.attend_whole(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)
    if _ADDS_A_BATCH and query.dim() == key.dim() == value.dim() == 3:
        while mask is not None and mask.dim() < 4:
            mask = mask.unsqueeze(0)
        batch = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        return attention(*batch, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa).squeeze(0)
    if _is_nothing(query, key, value):
        if mask is not None and is_causal and _LOOKS_AT_MASK_FIRST:
            raise RuntimeError(_MASK_AND_CAUSAL)
        # The product keeps the three in the graph, as PyTorch's does.
        none: torch.Tensor = aten.mul.Scalar(query.sum() + key.sum() + value.sum(), 0)
        return torch.zeros((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device) + none
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    transformed = function_transform_level() is not None
    needs_formulas = transformed and (device.row["type"] == "cuda" or _needs_formulas(tensors))
    looks = None if needs_formulas else _looks(tensors)
    enabled = math_attention_enabled(), flash_attention_enabled()
    if looks is not None and device.row["type"] == "cuda":
        choice = cuda_attention.choose(device, tensors, looks, dropout_p, is_causal, enable_gqa, needs_grad)
        if choice == cuda_attention.NONE:
            raise RuntimeError(_NO_BACKEND)
        if choice != cuda_attention.MATH:
            return cuda_attention.attend(choice, query, key, value, mask, dropout_p, is_causal, scale)
    elif looks is not None:
        needs = mask is not None and mask.requires_grad
        with disable_current_modes() if not isinstance(query, RemoteTensor) else contextlib.nullcontext():
            choice = _cpu_choice(*looks, needs, dropout_p, is_causal, enable_gqa, enabled)
        if choice == _NONE:
            raise RuntimeError(_NO_BACKEND)
        if choice == _FLASH:
            fused: torch.Tensor = _flash(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
            return fused
    elif not enabled[0]:
        raise RuntimeError(_NO_BACKEND + _MATH_ONLY)
    result: torch.Tensor = aten._scaled_dot_product_attention_math.default(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


@implements("aten::scaled_dot_product_attention")
def _undivided_attention(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """In inference mode the op arrives here undecomposed."""
    return attention(*args, **kwargs)


def install(library: torch.library.Library) -> None:
    """Puts our choice in the place of PyTorch's."""
    library.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
