"""Tensors, and looks of tensors, that a worker describes because nothing here could infer them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError
from skyproxy.interrupts import raised_by_handler
from skyproxy.tensor.core.devices import Handle
from skyproxy.tensor.core.metadata import Meta, intern_meta
from skyproxy.tensor.core.remote_tensor import make_tensor, make_view
from skyproxy.tensor.dispatch import known_results
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.entries import Output

wrap_described: dict[str, Callable[[Handle, list[Any]], torch.Tensor]] = {}
"""Makes tensors of what the worker describes otherwise than by sizes and strides, by the first of the fields."""


def wrap_result(call: BoundCall, handle: Handle, row: Sequence[Any]) -> tuple[Output, Any]:
    """One result of an op that was asked for: what is known of it, and the result itself."""
    fields, alias = row
    if fields is None:
        return Output(), alias
    if fields == "list":  # one slot holds them all; each gets its own
        handles = [call.device.new_handle(None) for _ in alias]
        call.device.session.do("take_apart", handle.slot, [h.slot for h in handles])
        return Output(), [wrap_result(call, h, part)[1] for h, part in zip(handles, alias, strict=True)]
    if fields[0] == torch_codec.NESTED:
        known_results.lend_memory(call)
        return Output(), wrap_answer(handle, row)
    handle.meta = described_meta(fields)
    if alias < 0:
        known_results.note_memory(call, handle)
        return Output(meta=handle.meta), make_tensor(handle.meta, handle)
    if alias >= len(call.tensors):
        raise ProtocolError(f"the worker says that a result of {call.info.name} is a view of input {alias}")
    base = call.tensors[alias]
    handle.root = base._sky.root or base._sky
    return Output(meta=handle.meta, shares=alias), make_view(handle.meta, handle, base)


def wrap_answer(handle: Handle, row: Sequence[Any]) -> torch.Tensor | None:
    """The tensor in a slot that the worker has described, with a memory of its own; None where there is none."""
    fields, _ = row
    if fields is None:
        return None
    if fields[0] == torch_codec.NESTED:
        return wrap_described[fields[0]](handle, fields)
    handle.meta = described_meta(fields)
    return make_tensor(handle.meta, handle)


def described_meta(fields: list[Any]) -> Meta:
    """Return the look that the worker describes."""
    try:
        return intern_meta(torch_codec.decode_description(fields))
    except (KeyError, ValueError, RuntimeError) as error:
        if raised_by_handler(error):
            raise
        raise ProtocolError(f"the worker describes no tensor: {error!r:.80}") from error


__all__ = ["described_meta", "wrap_answer", "wrap_described", "wrap_result"]
