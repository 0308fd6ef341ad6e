"""Knowledge of how the parts of sparse tensors look, so that `_indices()` and `_values()` need not be waited for.

How many elements a sparse tensor holds, its look does not say. But it was made of indices and values that are known
here, or as a copy of one that was, or the worker was asked once. That stays true until something writes to the tensor:
it is kept where `host_copies` keeps what depends on values, and forgotten as that is. A detached tensor has parts of
its own, but the same ones as long as nothing replaces them. So what gives a part another look in place makes what is
known of all tensors unknown: `s._values().resize_(0)`, see `remote_tensor.set_metadata`, and what `resizes_parts`
names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from skyproxy.tensor.core.host_copies import sized_by
from skyproxy.tensor.core.metadata import Meta, plain_meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.shapes.rules import RuleResult
from skyproxy.tensor.shapes.sparse import RULES

if TYPE_CHECKING:
    from skyproxy.tensor.core.devices import Handle
    from skyproxy.tensor.dispatch.binding import BoundCall

SPARSE = {
    torch.sparse_coo: ("_indices", "_values", "is_coalesced"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The operations that tell of a tensor's parts, by its layout."""


_to_copy = RULES["aten::_to_copy"]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a sparse tensor.

    Attributes:
        looks: of the indices (those of COO are one tensor, others two), then of the values.
        is_coalesced: whether the indices of COO are sorted, without repetition.
    """

    looks: tuple[Meta, ...]
    is_coalesced: bool = False


def known_parts(handle: Handle) -> Parts | None:
    """Return what is known of a sparse tensor's parts."""
    if not handle.copied:
        return None
    known = sized_by(handle)
    found = known.get(Parts) if known is not None else None
    return found if type(found) is Parts else None


def note_parts(call: BoundCall, result: Handle) -> None:
    """Note of what parts a sparse tensor consists that a call is about to make, where that is known."""
    rule = _RULES.get(call.info.name)
    parts = rule(call) if rule is not None else None
    known = sized_by(result) if parts is not None else None
    if known is not None:
        known[Parts] = parts


_KEEP_PARTS = frozenset({"aten::_coalesced_", "aten::mul_", "aten::_foreach_mul_", "aten::neg_", "aten::zero_"})


def resizes_parts(call: BoundCall, written: RemoteTensor) -> bool:
    """Return whether a call may resize the parts of a tensor that it changes, which others may have for parts, too.

    Few changes of COO only replace them, or write to them; `add_` to an empty one resizes them.
    """
    layout = written.layout
    if layout is torch.sparse_coo:
        return call.info.name.partition(".")[0] not in _KEEP_PARTS or bool(call.info.reshapes)
    return layout in SPARSE


def _parts_given(call: BoundCall) -> Parts | None:
    """Those of a constructor: its result has its arguments themselves."""
    indices, values = call.argument("indices"), call.argument("values")
    if type(indices) is not RemoteTensor or type(values) is not RemoteTensor:
        return None
    looks = indices._sky.meta, values._sky.meta
    if not all(meta.plain for meta in looks) or not values.dim():
        return None
    told = call.argument("is_coalesced")
    return Parts(looks, values.shape[0] < 2 if told is None else bool(told))


def _parts_of_argument(call: BoundCall) -> Parts | None:
    return known_parts(call.tensors[0]._sky)


def _look_of_copy(meta: Meta) -> Meta | None:
    """The look of a part's copy."""
    found: RuleResult = _to_copy(meta)
    look = found[0][0] if found else None
    return look if isinstance(look, Meta) else None


def _parts_of_copy(call: BoundCall) -> Parts | None:
    """Those of a copy of a COO tensor."""
    parts = _parts_of_argument(call) if call.tensors[0].layout is torch.sparse_coo else None
    if parts is None:
        return None
    indices, values = map(_look_of_copy, parts.looks)
    return Parts((indices, values), parts.is_coalesced) if indices is not None and values is not None else None


def _parts_of_mask(call: BoundCall) -> Parts | None:
    """Those of the elements of a dense tensor that are at the indices of a COO tensor."""
    taken, mask = call.tensors
    parts = known_parts(mask._sky) if mask.layout is torch.sparse_coo else None
    if parts is None or not taken._sky.meta.plain or 0 in mask.shape or 0 in parts.looks[0].size:
        return None
    indices = _look_of_copy(parts.looks[0])
    values = plain_meta(parts.looks[1].size, taken.dtype)
    return Parts((indices, values), parts.is_coalesced) if indices is not None else None


_RULES: dict[str, Callable[[BoundCall], Parts | None]] = {
    "aten::_sparse_coo_tensor_with_dims_and_tensors": _parts_given,
    "aten::clone": _parts_of_copy,
    "aten::detach": _parts_of_argument,
    "aten::neg": _parts_of_copy,
    "aten::sparse_mask": _parts_of_mask,
}


__all__ = ["SPARSE", "Parts", "known_parts", "note_parts", "resizes_parts"]
