"""Questions about sparse tensors: what their parts are is known here, or asked for all at once.

See `dispatch.sparse_parts`.
"""

from __future__ import annotations

from typing import Any

import torch

from skyproxy.errors import ProtocolError
from skyproxy.tensor.core.host_copies import sized_by
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import OpOverload
from skyproxy.tensor.dispatch.binding import BoundCall
from skyproxy.tensor.dispatch.op_info import OpInfo, implements, info_of
from skyproxy.tensor.dispatch.recording import record_as, record_unknown, run
from skyproxy.tensor.dispatch.replies import described_meta
from skyproxy.tensor.dispatch.sparse_parts import SPARSE, Parts, known_parts

aten = torch.ops.aten


def _parts_of(info: OpInfo, args: tuple[Any, ...]) -> Parts | None:
    """Return the parts of the one argument, after a wait where they are not known; None where that helps nothing."""
    if len(args) != 1 or type(args[0]) is not RemoteTensor or args[0].layout not in SPARSE:
        return None
    tensor = args[0]
    found = known_parts(tensor._sky)
    if found is None:
        known = sized_by(tensor._sky)  # before the worker is asked
        if known is not None:
            found = known[Parts] = _ask(info.name, tensor)
    return found


def _ask(purpose: str, tensor: RemoteTensor) -> Parts:
    """Ask the worker for all parts at once."""
    session, handles = tensor._sky.device.session, []
    for name in SPARSE[tensor.layout]:
        handles += record_unknown(BoundCall(info_of(getattr(aten, name).default), (tensor,), {}))
    rows = session.describe(purpose, [handle.slot for handle in handles], [tensor._sky.slot])
    looks: list[Meta] = []
    is_coalesced = False
    for fields, value in rows:
        if fields is not None and fields != "list":
            looks.append(described_meta(fields))
        elif type(value) is bool:
            is_coalesced = value
        else:
            raise ProtocolError(f"the worker says that a part of a sparse tensor is no tensor: {value!r:.40}")
    return Parts(tuple(looks), is_coalesced)


_PLACES = {"_indices": 0, "indices": 0, "crow_indices": 0, "ccol_indices": 0, "col_indices": 1, "row_indices": 1}
"""Of which of the parts an operation gives a tensor, but for values."""


@implements(*("aten::" + name for name in ("_values", "values", *_PLACES)))
def _part(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """A tensor that is a part, or shares its memory; each time another one, as anywhere."""
    call, name = BoundCall(info, args, kwargs), info.name.removeprefix("aten::")
    names = SPARSE.get(args[0].layout, ())
    parts = _parts_of(info, args) if name in names or "_" + name in names else None
    if parts is None or not (name in names or parts.is_coalesced):
        return run(call)  # whose error is the worker's
    (part,) = record_as(call, [parts.looks[_PLACES.get(name, -1)]], expected=True)
    return part


@implements("aten::is_coalesced")
def _is_coalesced(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    parts = _parts_of(info, args) if args[0].layout is torch.sparse_coo else None
    return run(BoundCall(info, args, kwargs)) if parts is None else parts.is_coalesced


@implements("aten::_nnz")
def _count_elements(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    parts = _parts_of(info, args)
    if parts is None:
        return run(BoundCall(info, args, kwargs))
    return parts.looks[1].size[0 if args[0].layout is torch.sparse_coo else -1]  # of the values, or of inner indices


@implements("aten::sparse_dim", "aten::_dimI", "aten::dense_dim", "aten::_dimV")
def _count_dimensions(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """A number of a tensor's own, which its parts need not have: something else may have resized these."""
    (tensor,) = args
    known = sized_by(tensor._sky) if type(tensor) is RemoteTensor and tensor.layout in SPARSE else None
    if known is None:
        return run(BoundCall(info, args, kwargs))
    if info.name not in known:
        known[info.name] = run(BoundCall(info, args, kwargs))
    return known[info.name]


@implements("aten::sym_stride", "aten::stride", "aten::is_contiguous", "aten::is_contiguous.memory_format")
def _refuse_strides(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """Refuse what PyTorch's C++ asks about compressed tensors only: the class answers for them (`make_tensor`)."""
    asked = "strides" if "stride" in info.name else "is_contiguous"
    layout = str(args[0].layout).removeprefix("torch.sparse_").upper()
    raise RuntimeError(f"Sparse {layout} tensors do not have {asked}")


@implements("aten::is_non_overlapping_and_dense", "aten::is_strides_like_format")
def _is_dense(info: OpInfo, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """No: gradients of what is dense to PyTorch are copied into an empty one of its layout, which those have not."""
    return False


__all__: list[str] = []
