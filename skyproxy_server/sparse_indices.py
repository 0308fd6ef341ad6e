"""Indices of sparse tensors, which kernels follow without a look at the sizes."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import torch
from torch.utils.weak import WeakTensorKeyDictionary

Tensor = torch.Tensor
_MOST_STORAGES = 100_000
_ACCESSORS = frozenset(
    (
        *("_indices", "indices", "crow_indices", "col_indices", "ccol_indices", "row_indices", "_values", "values"),
        *("detach", "alias"),
    )
)
_SHARING = frozenset(
    (
        *("_indices", "indices", "crow_indices", "col_indices", "ccol_indices", "row_indices"),
        "_values",  # the very tensor that the sparse one has: what changes its sizes changes how many indices it needs
        *("embedding_backward", "_embedding_bag_backward"),
    )
)


def may_share_indices(packet: str) -> bool:
    """Return whether an op may leave a client with a dense tensor in the memory of a sparse one's indices.

    Args:
        packet: the op's name without its namespace and its overload.
    """
    return packet in _SHARING or "sparse" in packet


def may_follow_indices(packet: str) -> bool:
    """Return whether an op may look up what the indices of a sparse tensor lead to, as all do but those of its parts.

    Args:
        packet: the op's name without its namespace and its overload.
    """
    return packet not in _ACCESSORS


def parts_of(tensor: Tensor) -> tuple[tuple[Tensor, ...], Tensor] | None:
    """Return the indices and the values of a sparse tensor; None for another layout."""
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(),), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices()), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices()), tensor.values()
    return None


def check_indices(tensor: Tensor) -> None:
    """Check that the indices of a sparse tensor stay within its sizes; of any other tensor nothing.

    Raises:
        RuntimeError: they do not.
    """
    parts = parts_of(tensor)
    if parts is None:
        return
    indices, values = parts
    if tensor.layout is torch.sparse_coo:
        torch._validate_sparse_coo_tensor_args(indices[0], values, list(tensor.shape))
        kinds = len(indices[0]), values.dim() - 1
        if kinds != (tensor.sparse_dim(), tensor.dense_dim()) or indices[0].shape[1] != values.shape[0]:
            raise RuntimeError("a sparse tensor has other indices than values: one of them was resized")
        return
    outer, inner = indices
    try:
        torch._validate_sparse_compressed_tensor_args(outer, inner, values, tensor.shape, tensor.layout)
    except RuntimeError as error:
        # Locally, indices in another order and twice the same one are as good.
        if "sorted and distinct" not in str(error) or not _lead_inside(tensor, outer, inner):
            raise


def check_distinct(tensor: Tensor) -> None:
    """Check that no index of a compressed tensor stands twice in a row or column: products of two such tensors write
    beyond their memory on the CPU.

    Raises:
        RuntimeError: one does.
    """
    parts = parts_of(tensor)
    if parts is None or tensor.layout is torch.sparse_coo or tensor.device.type != "cpu":
        return
    (outer, inner), values = parts
    try:
        torch._validate_sparse_compressed_tensor_args(outer, inner, values, tensor.shape, tensor.layout)
    except RuntimeError:  # perhaps they are in another order
        counts = outer.diff(dim=-1).reshape(-1)
        rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
        if len(torch.stack((rows, inner.reshape(-1))).unique(dim=1)[0]) < inner.numel():
            raise RuntimeError(
                "an index stands twice in a compressed sparse tensor, which no operation on two of them takes here. "
                "Sum such values first: x.to_sparse_coo().coalesce()"
            ) from None


def with_own_indices(tensor: Tensor) -> Tensor:
    """Return a tensor with the same values, in the same memory, whose indices nobody else can write to.

    Other sessions run meanwhile, so that a look at theirs would not hold for long.
    """
    parts = parts_of(tensor)
    if parts is None:
        return tensor
    indices, values = [part.clone() for part in parts[0]], parts[1]
    if tensor.layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(
            indices[0], values, tensor.shape, is_coalesced=tensor.is_coalesced(), check_invariants=False
        )
    outer, inner = indices
    return torch.sparse_compressed_tensor(
        outer, inner, values, tensor.shape, layout=tensor.layout, check_invariants=False
    )


def _lead_inside(tensor: Tensor, outer: Tensor, inner: Tensor) -> bool:
    """Return whether indices of fitting shapes stay within a compressed tensor, in whatever order they are."""
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    batch = outer.dim() - 1
    blocks = tensor.layout in (torch.sparse_bsr, torch.sparse_bsc)
    length = tensor.shape[batch + by_rows] // (tensor.values().shape[batch + 1 + by_rows] if blocks else 1)
    ends = (outer[..., 0] == 0) & (outer[..., -1] == inner.shape[-1])
    rising = (outer.diff(dim=-1) >= 0).all() & ends.all()
    return bool(rising & (inner >= 0).all() & (inner < length).all())


class WatchedIndices:
    """The sparse tensors of a session that were looked at since the memory of their indices was last written to."""

    def __init__(self) -> None:
        self._looked_at = WeakTensorKeyDictionary()
        self._writes: dict[int, int] = {}
        self._lent: dict[int, None] = {}

    def check(
        self, tensor: Tensor, written: AbstractSet[int] = frozenset(), written_values: AbstractSet[int] = frozenset()
    ) -> None:
        """Check a tensor that an op is going to read.

        Args:
            tensor: of any layout.
            written: the keys of the storages that the op writes to as those of dense tensors, and may resize.
            written_values: those that it writes to as values of sparse tensors.

        Raises:
            RuntimeError: its indices lead outside of it, or the op would change them while it reads them.
        """
        parts = parts_of(tensor)
        if parts is None:
            return
        indices, values = parts
        keys = [_key(each) for each in indices]
        if not written_values.isdisjoint(keys) or not written.isdisjoint((*keys, _key(values))):
            raise RuntimeError("an operation cannot write to the indices or values of a sparse tensor that it reads")
        if len(self._writes) + len(keys) > _MOST_STORAGES:  # all are looked at again
            self._looked_at.clear()
            self._writes.clear()
        state = (values.shape, [(key, self._writes.setdefault(key, 0)) for key in keys])
        if self._looked_at.get(tensor) != state or not self._lent.keys().isdisjoint(keys):
            check_indices(tensor)
            self._looked_at[tensor] = state

    def note_loan(self, keys: Iterable[int]) -> None:
        """Note that a function has these storages, and may write to them whenever it likes."""
        self._lent.update(dict.fromkeys(keys))
        while len(self._lent) > _MOST_STORAGES:
            del self._lent[next(iter(self._lent))]

    def note_writes(self, keys: Iterable[int]) -> None:
        """Note that an op writes to these storages."""
        for key in keys:
            if key in self._writes:
                self._writes[key] += 1


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


__all__ = [
    "WatchedIndices",
    "check_distinct",
    "check_indices",
    "may_follow_indices",
    "may_share_indices",
    "parts_of",
    "with_own_indices",
]
