"""Positions whose values are known here: one that is out of bounds is refused at its line, where the worker is asked.

Indices and labels that a program has just uploaded are small, as a rule, and their bytes are kept (`host_copies`). What
lies between the least and the largest of a storage is looked at once, until something writes to it. Where nobody knows
the values, the error comes when one is read, as on every device.

A GPU is not asked: its kernels assert what they are given, and an assertion that fails costs the worker its process
(`skyproxy_server.lost_context`). There the call is refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from skyproxy.errors import remote_error_class
from skyproxy.tensor.core import host_copies
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.capture import is_capturing
from skyproxy.tensor.dispatch.mixed_devices import MixedDevicesError
from skyproxy.tensor.dispatch.op_info import comes_first
from skyproxy.tensor.dispatch.recording import ask

if TYPE_CHECKING:
    from skyproxy.tensor.dispatch.op_info import Arguments, OpInfo

_IGNORED = -100
"""The class that `cross_entropy` ignores if none is given."""
_UNKNOWN = -1
_POSITIONS = frozenset({torch.int64, torch.int32})
"""Kernels refuse others for their dtype."""


def _names(text: str) -> list[str]:
    return ["aten::" + name for name in text.split()]


@comes_first(*_names("embedding _embedding_bag _embedding_bag_forward_only"))
def _find_rows(info: OpInfo, args: Arguments) -> object:
    table, index = args[:2]
    return _look(info, args, index, 0, _size(table, 0)) if _is_known(index) else None


@comes_first(
    *_names(
        "gather index_select index_add index_add_ index_copy index_copy_ index_reduce index_reduce_ scatter.src "
        "scatter.value scatter.reduce scatter.value_reduce scatter_.src scatter_.value scatter_.reduce "
        "scatter_.value_reduce scatter_add scatter_add_ scatter_reduce.two scatter_reduce_.two"
    )
)
def _find_along(info: OpInfo, args: Arguments) -> object:
    x, dim, index = args[:3]
    return _look(info, args, index, 0, _size(x, dim)) if _is_known(index) else None


@comes_first(*_names("index_fill.int_Scalar index_fill.int_Tensor index_fill_.int_Scalar index_fill_.int_Tensor"))
def _find_from_either_end(info: OpInfo, args: Arguments) -> object:
    x, dim, index = args[:3]
    if not _is_known(index):
        return None
    size = _size(x, dim)
    return _look(info, args, index, -size, size)


@comes_first(*_names("nll_loss_forward nll_loss2d_forward cross_entropy_loss"))
def _find_classes(info: OpInfo, args: Arguments) -> object:
    x, index = args[:2]
    if _is_known(index) and type(x) is RemoteTensor:
        ignored = args[4] if len(args) > 4 else _IGNORED
        return _look(info, args, index, 0, _size(x, 1 if x.dim() > 1 else 0), ignored)
    return None


@comes_first("aten::one_hot")
def _find_numbered(info: OpInfo, args: Arguments) -> object:
    index, count = args
    return _look(info, args, index, 0, count) if _is_known(index) else None


@comes_first(*_names("take put put_"))
def _find_in_all(info: OpInfo, args: Arguments) -> object:
    x, index = args[:2]
    if _is_known(index) and type(x) is RemoteTensor:
        return _look(info, args, index, -x.numel(), x.numel())
    return None


@comes_first(*_names("index.Tensor index_put index_put_ _index_put_impl_"))
def _find_places(info: OpInfo, args: Arguments) -> object:
    x, indices = args[:2]
    if type(x) is not RemoteTensor:
        return None
    dim, sizes = 0, x._sky.meta.size
    for index in indices:
        if index is None:
            dim += 1
        elif type(index) is not RemoteTensor:
            return None
        else:
            meta = index._sky.meta
            if meta.dtype is torch.bool or meta.dtype is torch.uint8:
                dim += len(meta.size)
                continue
            if dim < len(sizes) and _is_known(index):
                result = _look(info, args, index, -sizes[dim], sizes[dim])
                if result is not None:
                    return result
            dim += 1
    return None


def _size(x: object, dim: int) -> int:
    """Return a size of a remote tensor, or that it is not known."""
    if type(x) is RemoteTensor:
        size = x._sky.meta.size
        if -len(size) <= dim < len(size):
            return size[dim]
    return _UNKNOWN


def _is_known(index: object) -> bool:
    if type(index) is not RemoteTensor:
        return False
    handle = index._sky
    return (handle.root or handle).copied and not handle.meta.dtype.is_floating_point


def _look(
    info: OpInfo, args: Arguments, index: RemoteTensor, least: int, end: int, ignored: int | None = None
) -> object:
    """Refuse a call with a known position other than the one that is ignored that is less than `least`, or not below
    `end`; return None for others.

    Raises:
        RemoteError: there is one; of the worker where that has words for it.
    """
    if end == _UNKNOWN:
        return None
    handle = index._sky
    found = (handle.root or handle).copy.bounds
    if found is None or found[2] is not handle.meta.dtype:
        found = host_copies.bounds_of(handle)
    if found is None or (least <= found[0] and found[1] < end):
        return None
    values = host_copies.values_of(handle)
    if values is None:
        return None
    wrong = (values < least) | (values >= end)
    if ignored is not None:
        wrong &= values != ignored
    if not wrong.any() or is_capturing():  # a captured graph is recorded, for other values may come
        return None
    if handle.device.place[0] != "cpu" and handle.meta.dtype in _POSITIONS and end:
        first = int(values[wrong][0])
        raise remote_error_class(IndexError)(
            f"{first} is out of bounds: {info.name} takes positions from {least} to {end - 1} here. It was "
            "not run, for on a GPU this would have ended the worker's process"
        )
    return _ask(info, args)


def _ask(info: OpInfo, args: Arguments) -> object:
    """Have the worker refuse a call."""
    try:
        call = BoundCall(info, args, {})
    except MixedDevicesError:  # which is told where the call is recorded
        return None
    return ask(call)


__all__: list[str] = []
