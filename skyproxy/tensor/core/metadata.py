"""Looks of remote tensors, each kept once, so that comparing two is comparing two pointers."""

from __future__ import annotations

import functools
import weakref
from _weakref import _remove_dead_weakref  # type: ignore[attr-defined]  # removes it only if it is dead, in one step
from functools import partial

import torch

from skyproxy import torch_codec
from skyproxy.settings import SETTINGS
from skyproxy.torch_codec import Description


class Meta:
    """A description that exists once: two tensors look alike exactly if their `Meta` is the same object.

    Attributes:
        description: all of it.
        encoded: the same as it travels.
        size, stride, offset, dtype, layout, conjugate, negative: as in `torch_codec.Description`.
        plain: strided, without conjugate or negative bit; what the fast path can make.
        large: whether the tensor's memory is worth a release of its own.
        known: whether this is the look of one tensor alone, whose value is known; see `known_values`.
    """

    known = False

    __slots__ = (
        "__weakref__",
        "conjugate",
        "description",
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

    def __init__(self, d: Description) -> None:
        self.description = d
        self.encoded = torch_codec.encode_description(d)
        self.size, self.stride, self.offset, self.dtype, self.layout, self.conjugate, self.negative = d
        self.plain = d.layout is torch.strided and not d.conjugate and not d.negative
        self.large = torch_codec.byte_count(d) >= SETTINGS.prompt_release_bytes

    def __repr__(self) -> str:
        return f"Meta({self.dtype}, {list(self.size)}, stride={list(self.stride)}, offset={self.offset})"


_interned: dict[Description, weakref.ref[Meta]] = {}
"""As a `WeakValueDictionary`, whose methods in Python cost several times as much."""


@functools.lru_cache(4096)  # so that what a loop creates and drops is not built again each time
def intern_meta(description: Description) -> Meta:
    """Return the one `Meta` of this description."""
    reference = _interned.get(description)
    found = reference() if reference is not None else None
    while found is None:
        _remove_dead_weakref(_interned, description)
        made = Meta(description)
        # `setdefault`, so that two threads that get here together agree on one object.
        found = _interned.setdefault(description, weakref.ref(made, partial(_forget, description)))()
    return found


def _forget(description: Description, reference: weakref.ref[Meta]) -> None:
    del reference
    _remove_dead_weakref(_interned, description)


def plain_meta(
    size: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None, offset: int = 0
) -> Meta:
    """The `Meta` of a strided tensor, row-major unless told otherwise."""
    return intern_meta(
        Description(size, torch_codec.contiguous_stride(size) if stride is None else stride, offset, dtype)
    )


def meta_of(tensor: torch.Tensor) -> Meta:
    """The `Meta` of a real, fake or meta tensor."""
    return intern_meta(torch_codec.describe(tensor))
