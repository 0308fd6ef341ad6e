"""Positions whose values are known here: one that is out of bounds is refused at its line, where the worker is asked.

Indices and labels that a program has just uploaded are small, as a rule, and their bytes are kept (`host_copies`). What
lies between the least and the largest of a storage is looked at once, until something writes to it. Where nobody knows
the values, the error comes when one is read, as on every device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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


def _names(text: str) -> list[str]:
    return ["aten::" + name for name in text.split()]


@comes_first(*_names("embedding _embedding_bag _embedding_bag_forward_only"))
def _find_rows(info: OpInfo, args: Arguments) -> object:
    table, index = args[:2]
    return _ask(info, args) if _is_known(index) and _leaves(index, 0, _size(table, 0)) else None


@comes_first(
    *_names(
        "gather index_select index_add index_add_ index_copy index_copy_ index_reduce index_reduce_ scatter.src "
        "scatter.value scatter.reduce scatter.value_reduce scatter_.src scatter_.value scatter_.reduce "
        "scatter_.value_reduce scatter_add scatter_add_ scatter_reduce.two scatter_reduce_.two"
    )
)
def _find_along(info: OpInfo, args: Arguments) -> object:
    x, dim, index = args[:3]
    return _ask(info, args) if _is_known(index) and _leaves(index, 0, _size(x, dim)) else None


@comes_first(*_names("index_fill.int_Scalar index_fill.int_Tensor index_fill_.int_Scalar index_fill_.int_Tensor"))
def _find_from_either_end(info: OpInfo, args: Arguments) -> object:
    x, dim, index = args[:3]
    if _is_known(index):
        size = _size(x, dim)
        if _leaves(index, -size, size):
            return _ask(info, args)
    return None


@comes_first(*_names("nll_loss_forward nll_loss2d_forward cross_entropy_loss"))
def _find_classes(info: OpInfo, args: Arguments) -> object:
    x, index = args[:2]
    if _is_known(index) and type(x) is RemoteTensor:
        ignored = args[4] if len(args) > 4 else _IGNORED
        if _leaves(index, 0, _size(x, 1 if x.dim() > 1 else 0), ignored):
            return _ask(info, args)
    return None


@comes_first("aten::one_hot")
def _find_numbered(info: OpInfo, args: Arguments) -> object:
    index, count = args
    return _ask(info, args) if _is_known(index) and _leaves(index, 0, count) else None


@comes_first(*_names("take put put_"))
def _find_in_all(info: OpInfo, args: Arguments) -> object:
    x, index = args[:2]
    if _is_known(index) and type(x) is RemoteTensor and _leaves(index, -x.numel(), x.numel()):
        return _ask(info, args)
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
            if dim < len(sizes) and _is_known(index) and _leaves(index, -sizes[dim], sizes[dim]):
                return _ask(info, args)
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


def _leaves(index: RemoteTensor, least: int, end: int, ignored: int | None = None) -> bool:
    """Return whether a known position other than the one that is ignored is less than `least`, or `end` or more."""
    if end == _UNKNOWN:
        return False
    handle = index._sky
    found = (handle.root or handle).copy.bounds
    if found is None or found[2] is not handle.meta.dtype:
        found = host_copies.bounds_of(handle)
    if found is None or (least <= found[0] and found[1] < end):
        return False
    values = host_copies.values_of(handle)
    if values is None:
        return False
    wrong = (values < least) | (values >= end)
    return bool((wrong & (values != ignored) if ignored is not None else wrong).any())


def _ask(info: OpInfo, args: Arguments) -> object:
    """Have the worker refuse a call; while a graph is captured it is recorded, for other values may come."""
    if is_capturing():
        return None
    try:
        call = BoundCall(info, args, {})
    except MixedDevicesError:  # which is told where the call is recorded
        return None
    return ask(call)


__all__: list[str] = []
