"""The nested tensors that `nn.TransformerEncoder` makes of a padded batch, in eval mode and without gradients.

On this fast path PyTorch leaves the padding out of every layer. The nested tensor stays on the worker, whose kernels
are those of local PyTorch; here it is known by the look of the padded batch. It comes to be in one op and ends in
another (`to_padded_tensor`); between them are a transformer's layers, of which those that hooks or options keep from
PyTorch's fused op come one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from skyproxy.errors import UnsupportedOpError
from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import OpOverload, disabled_torch_function, make_wrapper_subclass, pytree
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.op_info import OpInfo, implements, info_of, is_decomposed
from skyproxy.tensor.dispatch.recording import record_as

_make_wrapper = make_wrapper_subclass


class NestedBatch(torch.Tensor):
    """A nested tensor on a worker, which looks like the padded batch that it was made of: (N, T, ...).

    Attributes:
        held: a tensor of that look, whose slot holds the nested one. It is for recording only.
    """

    held: RemoteTensor

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]
    is_nested = True

    @staticmethod
    def holding(held: RemoteTensor) -> NestedBatch:
        meta: Meta = held._sky.meta
        batch: NestedBatch = _make_wrapper(
            NestedBatch, meta.size, meta.stride, meta.offset, dtype=meta.dtype, device=held._sky.device.torch_device
        )
        batch.held = held
        return batch

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        info = info_of(func)
        look = _LOOKS.get(info.name)
        if look is None and is_decomposed(info.name):
            return func.decompose(*args, **(kwargs or {}))
        if look is None:
            raise UnsupportedOpError(
                f"{info.name}: the nested tensor that nn.TransformerEncoder makes of a padded batch takes part in its "
                "layers only. Pass enable_nested_tensor=False to nn.TransformerEncoder, or call "
                "torch.backends.mha.set_fastpath_enabled(False)"
            )
        args, kwargs = pytree.tree_map_only(NestedBatch, lambda batch: batch.held, (args, kwargs or {}))
        call = BoundCall(info, args, kwargs)
        results = record_as(call, look(*args, **kwargs))
        if info.name in _ENDS:
            return results[0]
        nested = tuple(NestedBatch.holding(result) if result is not None else None for result in results)
        return nested if len(nested) > 1 else nested[0]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"<nested batch of {list(self.shape)} on {self.device}>"


Look = Callable[..., list[Meta | None]]
_ENDS = ("aten::to_padded_tensor",)


def _meta(tensor: Any) -> Meta:
    meta: Meta = tensor._sky.meta
    return meta


def _as_first(x: torch.Tensor, *rest: object, **kwargs: object) -> list[Meta | None]:
    return [_meta(x)]


def _infer_padding(x: object, padding: float, output_size: Any = None) -> list[Meta | None]:
    size = _meta(x).size if output_size is None else tuple(output_size)
    return [plain_meta(size, _meta(x).dtype)]


def _linear(x: object, weight: object, bias: object = None) -> list[Meta | None]:
    return [plain_meta((*_meta(x).size[:-1], _meta(weight).size[0]), _meta(x).dtype)]


def _infer_norm(x: torch.Tensor, *rest: object) -> list[Meta | None]:
    statistics = plain_meta((*_meta(x).size[:-1], 1), _meta(x).dtype)
    return [_meta(x), statistics, statistics]


def _infer_attention(query: object, *rest: object) -> list[Meta | None]:
    need_weights = rest[9] if len(rest) > 9 else True
    if need_weights:
        raise UnsupportedOpError(
            "_native_multi_head_attention of a nested tensor gives no attention weights: pass need_weights=False"
        )
    return [_meta(query), None]


_LOOKS: dict[str, Look] = {
    "aten::_transformer_encoder_layer_fwd": _as_first,
    "aten::_native_multi_head_attention": _infer_attention,
    "aten::linear": _linear,
    "aten::native_layer_norm": _infer_norm,
    "aten::to_padded_tensor": _infer_padding,
    **dict.fromkeys(
        ("aten::add.Tensor", "aten::relu", "aten::gelu", "aten::clone", "aten::detach", "aten::alias"), _as_first
    ),
}
"""For each op that a nested batch can take part in, what its results look like; None for a result that is None."""


@implements("aten::_nested_tensor_from_mask")
def _from_mask(
    info: OpInfo, func: OpOverload, args: tuple[torch.Tensor, torch.Tensor], kwargs: dict[str, object]
) -> NestedBatch:
    """A padded batch (N, T, D) and a mask (N, T) of what counts in it to a nested tensor, without a wait."""
    (batch,) = record_as(BoundCall(info, args, kwargs), [plain_meta(tuple(args[0].shape), args[0].dtype)])
    assert batch is not None
    return NestedBatch.holding(batch)


__all__ = ["NestedBatch"]
