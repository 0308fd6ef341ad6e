"""Looks of remote tensors, each kept once, so that comparing two is comparing two pointers."""

from __future__ import annotations

import math
import weakref
from _weakref import _remove_dead_weakref  # type: ignore[attr-defined]  # removes it only if it is dead, in one step
from collections import deque
from collections.abc import Sequence

import torch

from skyproxy import torch_codec
from skyproxy.settings import SETTINGS
from skyproxy.torch_codec import Description

Key = tuple[object, ...]
_strided, _product, _names = torch.strided, math.prod, torch_codec.DTYPE_NAMES
_widths = {dtype: dtype.itemsize for dtype in _names}
_MOST_BYTES = (1 << 63) - 1
"""Bytes that PyTorch's numbers can count."""


def check_extent(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse strides that no memory has, of a tensor that is to have a memory of its own.

    Raises:
        RuntimeError: they are negative, or the memory would be too large; in PyTorch's words.
    """
    backwards = 0 not in size and any(n > 1 and s < 0 for n, s in zip(size, stride, strict=True))
    if backwards or torch_codec.storage_extent(size, stride) * dtype.itemsize > _MOST_BYTES:
        raise RuntimeError(f"Storage size calculation overflowed with sizes={list(size)} and strides={list(stride)}")


class Meta:
    """A description that exists once: two tensors look alike exactly if their `Meta` is the same object.

    There may be tens of thousands, and the garbage collector looks at each list and object: so one consists of few, and
    what travels shares its numbers.

    Attributes:
        encoded: the description as it travels.
        size, stride, offset, dtype, layout, conjugate, negative: as in `torch_codec.Description`.
        plain: strided, without conjugate or negative bit; what the fast path can make.
        large: whether the tensor's memory is worth a release of its own.
        known: whether this is the look of one tensor alone, whose value is known; see `known_values`.

    Raises:
        RuntimeError: no memory is so large.
    """

    known = False

    __slots__ = (
        "__weakref__",
        "conjugate",
        "dtype",
        "encoded",
        "large",
        "layout",
        "negative",
        "offset",
        "plain",
        "size",
        "stride",
    )

    def __init__(
        self,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
        dtype: torch.dtype,
        layout: torch.layout = torch.strided,
        conjugate: bool = False,
        negative: bool = False,
    ) -> None:
        self.size = size
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.layout = layout
        self.conjugate = conjugate
        self.negative = negative
        self.plain = plain = layout is _strided and not conjugate and not negative
        self.encoded = (
            (_names[dtype], size, stride, offset) if plain else tuple(torch_codec.encode_description(self.description))
        )
        count = _product(size)
        if layout is not _strided:
            if count > _MOST_BYTES:
                raise RuntimeError("numel: integer multiplication overflow")  # in PyTorch's words, as below
            self.large = False  # its size says nothing about its bytes
            return
        byte_count = count * _widths[dtype]
        if byte_count > _MOST_BYTES and torch_codec.storage_extent(size, stride, offset) * dtype.itemsize > _MOST_BYTES:
            raise RuntimeError(f"Storage size calculation overflowed with sizes={list(size)}")
        self.large = byte_count >= SETTINGS.prompt_release_bytes

    @property
    def description(self) -> Description:
        """All of it."""
        return Description(self.size, self.stride, self.offset, self.dtype, self.layout, self.conjugate, self.negative)

    def __repr__(self) -> str:
        return f"Meta({self.dtype}, {list(self.size)}, stride={list(self.stride)}, offset={self.offset})"


class _Reference(weakref.ref[Meta]):
    """A reference that knows under which key it is kept."""

    __slots__ = ("key",)
    key: Key


_interned: dict[Key, _Reference] = {}
"""As a `WeakValueDictionary`, whose methods in Python cost several times as much."""
_recent: deque[Meta] = deque(maxlen=4096)
"""The newest ones, so that what a loop creates and drops is not built again each time."""


def _forget(reference: _Reference) -> None:
    _remove_dead_weakref(_interned, reference.key)


def _intern(key: Key) -> Meta:
    """Return the one `Meta` of these fields, of which there was none a moment ago."""
    made = Meta(*key)  # type: ignore[arg-type]  # the fields of a description
    reference = _Reference(made, _forget)
    reference.key = key
    # `setdefault`, so that two threads that get here together agree on one object.
    while (found := _interned.setdefault(key, reference)()) is None:
        _remove_dead_weakref(_interned, key)
    _recent.append(found)
    return found


def plain_meta(
    size: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None, offset: int = 0
) -> Meta:
    """The `Meta` of a strided tensor, row-major unless told otherwise."""
    key = (size, _contiguous_stride(size) if stride is None else stride, offset, dtype)
    reference = _interned.get(key)
    if reference is not None:
        found = reference()
        if found is not None:
            return found
    return _intern(key)


_contiguous_stride = torch_codec.contiguous_stride


def intern_meta(d: Description) -> Meta:
    """Return the one `Meta` of this description."""
    if d.layout is torch.strided and not d.conjugate and not d.negative:
        return plain_meta(d.size, d.dtype, d.stride, d.offset)
    reference = _interned.get(d)
    found = reference() if reference is not None else None
    return _intern(tuple(d)) if found is None else found


def meta_of(tensor: torch.Tensor) -> Meta:
    """The `Meta` of a real, fake or meta tensor."""
    return intern_meta(torch_codec.describe(tensor))
