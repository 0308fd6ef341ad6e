"""Scaled dot-product attention of CUDA workers: the kernel that their own PyTorch chooses.

Without gradients the worker takes the op whole. With them its kernel has to be known here, because each has a backward
of its own; so the worker is asked, once for tensors that look alike. What follows is what ATen's composite does with
the answer (aten/src/ATen/native/transformers/attention.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from skyproxy.tensor.core.devices import SkyDevice
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import disable_current_modes
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.entries import Entry, Output
from skyproxy.tensor.dispatch.op_info import info_of
from skyproxy.tensor.dispatch.recording import ask, run

aten = torch.ops.aten
MATH, FLASH, EFFICIENT, CUDNN, NONE = 0, 1, 2, 3, -1
"""PyTorch's numbers for the kernels, `torch.nn.attention.SDPBackend`."""
_FLASH_ALIGNMENT = 8
_BIAS_ALIGNMENT = 16


def attend_whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> torch.Tensor:
    """Attention as one op of the worker, which chooses the kernel: for remote tensors that need no gradients."""
    info = info_of(aten.scaled_dot_product_attention.default)
    call = BoundCall(info, (query, key, value, mask, dropout, causal), {"scale": scale, "enable_gqa": gqa})
    result: torch.Tensor = run(call)
    return result


def choose(
    device: SkyDevice,
    tensors: Sequence[torch.Tensor],
    looks: Sequence[Meta | None],
    dropout: float,
    causal: bool,
    gqa: bool,
    needs_grad: bool,
) -> int:
    """Return the kernel that the worker would choose, one of the numbers above; asks it where that is not known yet.

    Args:
        device: where the tensors live.
        tensors: query, key, value and, where there is one, the mask; while a graph is traced, fakes of them.
        looks: what the four look like; None for a mask that is not there.
        needs_grad: whether a backward follows.
    """
    info = info_of(aten._fused_sdp_choice.default)
    key = (info, *looks, dropout > 0, causal, gqa)
    known: Entry | None = device.cache.get(key)
    if known is None:
        with disable_current_modes(), torch.no_grad():
            stand_ins = [
                t if isinstance(t, RemoteTensor) else _empty_tensor(meta, device)
                for t, meta in zip(tensors, looks, strict=False)
                if meta is not None
            ]
            mask = stand_ins[3] if len(stand_ins) > 3 else None
            found = ask(BoundCall(info, (*stand_ins[:3], mask, dropout, causal), {"enable_gqa": gqa}))
        known = Entry([Output(value=int(found))])
        device.remember(key, known)
    choice = known.outputs[0].value
    assert isinstance(choice, int)
    head_size = tensors[0].shape[-1]
    if needs_grad and not _has_backward(choice, int(head_size), dropout, device.row.get("compute_capability", [9, 0])):
        return MATH
    return choice


def _empty_tensor(meta: Meta, device: SkyDevice) -> torch.Tensor:
    return torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device=device.torch_device)


def _has_backward(choice: int, head_size: int, dropout: float, capability: Sequence[int]) -> bool:
    """Return whether a kernel that was chosen for tensors without gradients is chosen for those with them, too.

    The worker's copies need no gradients, so it does not look at this: the bounds of sdp_utils.cpp.
    """
    if choice == FLASH:
        small_memory = tuple(capability) in ((8, 6), (8, 9)) or capability[0] == 12
        return not (small_memory and head_size > 192 and (head_size <= 224 or dropout > 0))
    if choice == CUDNN:
        return head_size <= 128
    return True


def attend(
    choice: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention by one of the fused kernels.

    Args:
        choice: FLASH, EFFICIENT or CUDNN.
        bias: the mask as numbers that are added, or None.
    """
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    result: torch.Tensor
    if choice == FLASH:
        head_size = query.shape[-1]
        scale = head_size**-0.5 if scale is None else scale  # of the sizes before padding
        padded = [_pad(t, _FLASH_ALIGNMENT) for t in (query, key, value)]
        result = aten._scaled_dot_product_flash_attention.default(*padded, dropout, causal, False, scale=scale)[0]
        return result if result.shape[-1] == head_size else result[..., :head_size]
    if bias is not None:
        columns = bias.shape[-1]
        # The kernel reads whole blocks of a row, so the rows in memory must consist of whole blocks.
        bias = _pad(bias, _BIAS_ALIGNMENT)[..., :columns] if columns % _BIAS_ALIGNMENT else bias
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if choice == CUDNN:
        fused = aten._scaled_dot_product_cudnn_attention.default
        result = fused(query, key, value, bias, needs_grad, dropout, causal, False, scale=scale)[0]
    else:
        fused = aten._scaled_dot_product_efficient_attention.default
        result = fused(query, key, value, bias, needs_grad, dropout, causal, scale=scale)[0]
    return result


def _pad(tensor: torch.Tensor, alignment: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % alignment
    return F.pad(tensor, (0, missing)) if missing else tensor


__all__ = ["CUDNN", "EFFICIENT", "FLASH", "MATH", "NONE", "attend", "attend_whole", "choose"]
