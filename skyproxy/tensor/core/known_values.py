"""Numbers on a worker whose values are known here, so that asking for them does not wait.

An optimizer counts its steps in tensors, and reads them on the host. Where they live on a worker, as after
`torch.load(map_location="sky:0")`, each reading would be a round trip. But the client uploaded them, or made them with
`zeros`, or asked for them before, and it recorded every `add_` since: it does the same addition on a copy here.

A tensor whose value is known has a look of its own (`KnownMeta`). No cache of shapes has seen that look, so that each
operation on the tensor takes the careful way through `dispatch.binding`, which forgets the value first. Only the few
operations of `dispatch.known_results` let it be known again. What writes without being an operation on the tensor
(replays of graphs, compiled graphs, functions) makes all values of the session unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from skyproxy.interrupts import raised_by_handler
from skyproxy.session.recorder import Recorder
from skyproxy.tensor.core.addresses import HostCopy
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.torch_private import has_modes_or_transforms

if TYPE_CHECKING:
    from skyproxy.tensor.core.devices import Handle

DTYPES = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    }
)  # fmt: skip
Value = torch.Tensor | Callable[[], torch.Tensor]
"""A tensor of the CPU, or what makes it: most numbers are never asked for."""
MOST_BYTES = 16
"""Storages of files up to this size may hold a number."""


class KnownMeta(Meta):
    """The look of one tensor whose value is known.

    Attributes:
        base: the look that it shares with other tensors.
        value: a tensor of the CPU that equals it; None once something else may have changed it.
        recorder: what records the session's commands.
        epoch: `recorder.hidden_writes` when the value was right.
        unasked: how often the value was used since somebody asked for it.
        heir: for the bytes of a storage: the look of the one tensor that was made of them.
        sources: the looks of what it was computed of; who asks for it asks for them.
        copy: for an element of a storage whose bytes are known, those: the value is right as long as they are known.
    """

    __slots__ = ("_value", "base", "copy", "epoch", "heir", "recorder", "sources", "unasked")
    known = True

    def __init__(self, base: Meta, value: Value, recorder: Recorder, unasked: int = 0) -> None:
        self.size, self.stride, self.offset = base.size, base.stride, base.offset
        self.dtype, self.layout, self.plain, self.large = base.dtype, base.layout, base.plain, base.large
        self.conjugate, self.negative, self.encoded = base.conjugate, base.negative, base.encoded
        self.base = base
        self._value: Value | None = value
        self.recorder = recorder
        self.epoch = recorder.hidden_writes
        self.unasked = unasked
        self.heir: KnownMeta | None = None
        self.sources: tuple[KnownMeta, ...] = ()
        self.copy: HostCopy | None = None

    @property
    def is_right(self) -> bool:
        """Return whether nothing has happened that may have changed the value."""
        return self.epoch == self.recorder.hidden_writes and (self.copy is None or self.copy.values is not None)

    @property
    def value(self) -> torch.Tensor | None:
        value = self._value
        if value is None or type(value) is torch.Tensor:
            return value
        made: torch.Tensor | None = None
        # A mode would have its own idea of what is made now.
        if not has_modes_or_transforms():
            try:
                made = value()  # type: ignore[operator]  # it is a tensor of no other class
            except RuntimeError as error:  # the worker reports the same, with its line
                if raised_by_handler(error):
                    raise
                made = None
        self._value = made
        return made

    @value.setter
    def value(self, value: torch.Tensor | None) -> None:
        self._value = value

    def note_ask(self) -> None:
        """Notes that somebody wants the value."""
        self.unasked = 0
        sources, self.sources = (
            self.sources,
            (),
        )  # said once, because a number that is counted anew each time would keep all earlier ones
        for source in sources:
            source.note_ask()


def know(handle: Handle, value: torch.Tensor) -> None:
    """Remembers the value of a tensor that shares its memory with no other one.

    Args:
        handle: the tensor's.
        value: an equal tensor on the CPU, which nobody else changes.
    """
    recorder = handle.device.recorder
    if handle.copied and handle.copy.final:
        return
    if type(recorder) is Recorder and value.dtype in DTYPES and not handle.meta.known:
        handle.meta = KnownMeta(handle.meta, value, recorder)


def know_bytes(handle: Handle, values: bytes) -> None:
    """Remember the value of a tensor of no dimensions, as `know` does.

    Args:
        handle: the tensor's.
        values: its bytes.
    """
    recorder, meta = handle.device.recorder, handle.meta
    if type(recorder) is Recorder and meta.dtype in DTYPES:
        handle.meta = KnownMeta(meta, partial(_number_of_bytes, values, meta.dtype), recorder)


def _number_of_bytes(values: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(values), dtype=dtype).reshape(())


def forget(handle: Handle) -> torch.Tensor | None:
    """Makes a tensor's value unknown, and that of the tensor made of its bytes; the value that was known, if any."""
    meta: KnownMeta = handle.meta  # type: ignore[assignment]  # if it is `known`
    if not meta.known:
        return None
    value = meta.value if meta.is_right else None
    drop(handle, meta)
    return value


def drop(handle: Handle, meta: KnownMeta) -> None:
    """Makes a tensor's value unknown, as `forget` does, without computing it.

    Args:
        handle: the tensor's.
        meta: its look.
    """
    handle.meta = meta.base
    if meta.copy is None:  # else what is written forgets that
        meta.value = None
        if meta.heir is not None:
            meta.heir.value = None


def value_of(handle: Handle) -> torch.Tensor | None:
    """The value of a tensor, where it is known; not to be changed."""
    meta: KnownMeta = handle.meta  # type: ignore[assignment]  # if it is `known`
    if not meta.known or not meta.is_right or type(handle.device.recorder) is not Recorder:
        return None
    meta.note_ask()
    return meta.value


_MOST_UNASKED_READS = 16


def restore(read: list[tuple[Handle, KnownMeta]]) -> None:
    """Let elements be known again after an operation that they were operands of, unless it changed them."""
    for handle, meta in read:
        if meta.copy is not None and meta.is_right and handle.meta is meta.base:
            handle.meta = look_after_use(meta)


def look_after_use(meta: KnownMeta) -> Meta:
    """Return the look of an element of which an operation made use.

    After some operations in which nobody asks for it, an element takes the short way for good.
    """
    meta.unasked += 1
    return meta if meta.unasked <= _MOST_UNASKED_READS and meta.is_right else meta.base


def inherit(root: Handle, handle: Handle) -> None:
    """Lets a tensor that was just made of a storage's bytes be known as they are, if it is the first and takes all."""
    lender: KnownMeta = root.meta  # type: ignore[assignment]  # if it is `known`
    if not lender.known:
        return
    meta = handle.meta
    fits = lender.heir is None and meta.size == () and meta.plain and meta.offset == 0
    value = value_of(root)
    if not fits or value is None or value.numel() != meta.dtype.itemsize or meta.dtype not in DTYPES:
        forget(root)
        return
    know(handle, value.clone().view(meta.dtype).reshape(()))
    if handle.meta.known:
        lender.heir = handle.meta  # type: ignore[assignment]


__all__ = [
    "DTYPES",
    "KnownMeta",
    "drop",
    "forget",
    "inherit",
    "know",
    "know_bytes",
    "look_after_use",
    "restore",
    "value_of",
]
