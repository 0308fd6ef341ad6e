"""Small storages whose bytes are known here, so that a number that is taken of one does not wait.

Programs put a few numbers on the device and read them one by one: `for t in scheduler.timesteps`, `order[0]`, the items
of a batch of labels. The bytes of such a storage were uploaded, or came whole with the first number that was asked for,
and stay with the handle of the tensor that first had it. A view reads its number out of them by its offset. Of storages
of any size it is known how large results were that depend on their values: `x[mask]` does not ask again. And where
numbers of a large one are read one after another, as `all(mask)` does, some are read ahead.

What writes to the storage, through whichever tensor, forgets the bytes: every recorded operation says what it changes
(`OpInfo.changes`), and every alias names the storage by `handle.root`. What writes without being an operation (replays
of graphs, compiled graphs, functions) changes `recorder.hidden_writes`, with which each copy is compared.
"""

from __future__ import annotations

import contextlib
import struct
from collections import deque
from ctypes import string_at
from functools import partial
from typing import TYPE_CHECKING

import torch

from skyproxy.session.recorder import Recorder
from skyproxy.tensor.core.addresses import HostCopy, LaterBytes, Reads
from skyproxy.tensor.core.known_values import KnownMeta, forget
from skyproxy.tensor.core.memory import bytes_needed, memory_of
from skyproxy.torch_codec import contiguous_stride, is_dense

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skyproxy.tensor.core.devices import Handle
    from skyproxy.tensor.core.metadata import Meta

MOST_BYTES = 1 << 14
"""Storages up to this size are kept."""
_MOST_READ_AHEAD = 1 << 13
"""Storages up to this size are read whole when one number is asked for."""
_MOST_COPIES = 64
"""Copies of each kind that live at a time; the oldest goes."""
_MOST_WATCHED = 1024
"""The same of storages whose bytes are not known: a step with sparse gradients makes eight for each parameter."""
_MOST_AHEAD = 1 << 16
_LEAST_AHEAD = 1 << 12
"""Bytes of a larger storage that are read ahead: twice as many each time."""
_LONGEST_STEP = 1 << 8
"""Bytes from one number to the next; where they lie further apart, much of what is read ahead would be for nothing."""
MOST_DERIVED_BYTES = 1 << 18
"""The same where the bytes are computed here as soon as somebody asks, such as positions of a batch."""
_FEW = 64
"""Numbers that are looked at faster in Python than in PyTorch."""
_MOST_SIZED = 16
"""Results whose sizes are known by one storage's values."""

_FORMATS = {
    torch.float64: "d",
    torch.float32: "f",
    torch.float16: "e",
    torch.int64: "q",
    torch.int32: "i",
    torch.int16: "h",
    torch.int8: "b",
    torch.uint8: "B",
    torch.bool: "?",
}
_READERS = {dtype: struct.Struct("=" + form).unpack_from for dtype, form in _FORMATS.items()}
_read_float32 = _READERS[torch.float32]


_ESCAPED = HostCopy(None, -1)
_ESCAPED.final = True
_uploaded: deque[HostCopy] = deque()
_asked: deque[HostCopy] = deque()
_watched: deque[HostCopy] = deque()
_derived: deque[HostCopy] = deque()
_read_ahead: deque[HostCopy] = deque()


def _count(copy: HostCopy, copies: deque[HostCopy]) -> None:
    copies.append(copy)
    if len(copies) > (_MOST_WATCHED if copies is _watched else _MOST_COPIES):
        try:  # not `suppress`, which takes longer than all the rest, for each upload
            oldest = copies.popleft()
        except IndexError:  # another thread has forgotten them all meanwhile
            return
        if not oldest.asked or (copies is not _uploaded and copies is not _derived):
            oldest.values = oldest.later = None


def keep(handle: Handle, values: bytes, *, asked: bool = False) -> HostCopy | None:
    """Remember the bytes of a storage; None if they cannot be.

    Args:
        handle: that of the tensor that first had it, which begins with it and has no gaps.
        values: all of its bytes.
        asked: whether they were asked for, and not uploaded.
    """
    recorder, made = handle.device.recorder, handle.with_copy
    if type(recorder) is not Recorder or made is None or len(values) > MOST_BYTES:
        return None
    if handle.copied and handle.copy.final:
        return None
    copy = handle.copy = HostCopy(values, recorder.hidden_writes)
    handle.__class__ = made  # after the copy: whoever sees the one finds the other
    if asked:
        _note_ask(copy)
    else:
        _count(copy, _uploaded)
    return copy


def keep_later(handle: Handle, later: LaterBytes) -> None:
    """Remember how the bytes of a storage can be computed here, in case that they are asked for.

    Args:
        handle: that of a fresh tensor, which begins its storage and has no gaps.
        later: gives all of its bytes as they are now, or none.
    """
    recorder, made = handle.device.recorder, handle.with_copy
    if type(recorder) is Recorder and made is not None:
        copy = handle.copy = HostCopy(b"", recorder.hidden_writes)
        copy.later = later
        handle.__class__ = made  # after the copy: whoever sees the one finds the other
        if not later.waits:
            _count(copy, _derived)


def watch(handle: Handle) -> HostCopy | None:
    """Return what is known of a tensor's storage: the same object until something writes to that; None: nobody notes.

    To be asked for before the worker is: then whatever another thread writes meanwhile is noted, too.
    """
    found = _current(handle)
    if found is None:
        owner, recorder = handle.root or handle, handle.device.recorder
        made = owner.with_copy
        if type(recorder) is not Recorder or made is None or (owner.copied and owner.copy.final):
            return None
        copy = owner.copy = HostCopy(b"", recorder.hidden_writes)
        owner.__class__ = made
        copy.asked = True
        _count(copy, _watched)
        return copy
    if not found[0].asked:
        _note_ask(found[0])
    return found[0]


def sized_by(handle: Handle) -> dict[object, object] | None:
    """Return where to keep what depends on a tensor's values, until something writes to its storage; None: nowhere."""
    copy = watch(handle)
    if copy is None:
        return None
    if copy.sized is None or len(copy.sized) >= _MOST_SIZED:
        copy.sized = {}
    return copy.sized


def forget_copy(owner: Handle) -> None:
    """Forget what is known of a storage, as something writes to it.

    Args:
        owner: the handle of the tensor that first had it, with `copied` set.
    """
    owner.copy.values = None
    if not owner.copy.final:
        owner.__class__ = owner.without_copy


def forget_written(handles: Iterable[Handle]) -> None:
    """Forget the bytes of the storages that these tensors lie in."""
    for handle in handles:
        owner = handle.root or handle
        if owner.copied:
            forget_copy(owner)


def forget_uploads() -> bool:
    """Forget all bytes that were uploaded or derived and never asked for; return whether there are others.

    For operations that change long lists: looking at each of their tensors would cost more than such bytes are worth.
    """
    with contextlib.suppress(IndexError):  # another thread may do so, too
        for copies in (_uploaded, _derived):
            while copies:
                copy = copies.pop()
                if not copy.asked:
                    copy.values = copy.later = None
    return bool(_asked or _watched)


def escape(handle: Handle) -> None:
    """Never know the bytes of this tensor's storage again: not only operations of this program may write to it."""
    owner = handle.root or handle
    if owner.copied:
        forget_copy(owner)
    forget(owner)
    if owner.with_copy is not None:
        owner.copy = _ESCAPED
        owner.__class__ = owner.with_copy


def _current(handle: Handle) -> tuple[HostCopy, bytes] | None:
    owner = handle.root or handle
    if not owner.copied:
        return None
    copy, recorder, values = owner.copy, handle.device.recorder, owner.copy.values
    if values is None or type(recorder) is not Recorder or copy.epoch != recorder.hidden_writes:
        return None
    handle.device.values_read += 1
    return copy, values


def number_of(handle: Handle) -> bool | int | float | None:
    """Return the number in a tensor of one element, where its storage's bytes are known."""
    found = _current(handle)
    if found is None or handle.device.session.lost is not None:
        return None
    copy, values = found
    later = copy.later
    if later is not None:
        values = later()
    elif not copy.asked:
        _note_ask(copy)
    if copy.reads is None or values:
        return _read(values, handle.meta)
    return _read_on(copy.reads, handle.meta)


def _read_on(reads: Reads, meta: Meta) -> bool | int | float | None:
    """Return a number that was read ahead, and note where the program is."""
    at = meta.offset * meta.dtype.itemsize
    number = _read(reads.values, meta, reads.start) if reads.start <= at else None
    if number is not None:
        reads.last = at
    return number


def elements_ahead(handle: Handle) -> tuple[HostCopy, int] | None:
    """Return how many elements to read in place of one, and what is known of their storage; None: that one alone.

    As soon as three numbers of a large storage are asked for at equal distances.
    """
    owner, meta = handle.root or handle, handle.meta
    if meta.size or meta.dtype not in _READERS or not _is_whole(owner):
        return None
    copy = watch(handle)
    if copy is None:
        return None
    reads = copy.reads
    if reads is None:
        reads = copy.reads = Reads()
    at = meta.offset * meta.dtype.itemsize
    step, reads.last, before = at - reads.last, at, reads.step
    reads.step = step
    if step != before or not 0 < step <= _LONGEST_STEP:
        return None
    length = min(max(2 * len(reads.values), _LEAST_AHEAD), _MOST_AHEAD, memory_of(owner).byte_count - at)
    return copy, length // meta.dtype.itemsize


def keep_ahead(copy: HostCopy, handle: Handle, values: bytes) -> None:
    """Remember the bytes of elements that were read ahead, from that of a tensor on."""
    reads = copy.reads
    if reads is not None:
        if not reads.values:
            _count(copy, _read_ahead)
        reads.start, reads.values = handle.meta.offset * handle.meta.dtype.itemsize, values


def values_of(handle: Handle, *, may_wait: bool = False) -> torch.Tensor | None:
    """Return a copy on the CPU of a tensor in a storage whose bytes are known, or if it may wait, can be asked for."""
    found = _current(handle)
    if found is None:
        return None
    later = found[0].later
    if later is not None and later.waits and not may_wait:
        return None
    return tensor_in(found[1] if later is None else later(), handle.meta)


def tensor_in(values: bytes, meta: Meta) -> torch.Tensor | None:
    """Return a copy on the CPU of a tensor of this look in a storage of these bytes; None if it lies beyond them."""
    if not meta.plain or meta.dtype not in _READERS or not 0 < bytes_needed(meta) <= len(values):
        return None
    whole = torch.frombuffer(bytearray(values), dtype=meta.dtype, count=len(values) // meta.dtype.itemsize)
    return whole.as_strided(meta.size, meta.stride, meta.offset)


def source_of(handle: Handle) -> bytes | LaterBytes | None:
    """Return the bytes that a tensor's storage has now, or what gives them; None: they are not known."""
    owner = handle.root or handle
    if not owner.copied:
        return None
    copy = owner.copy
    values = copy.values
    if values is None or copy.epoch != handle.device.recorder.hidden_writes:
        return None
    return values or copy.later


def bounds_of(handle: Handle) -> tuple[int, int, torch.dtype] | None:
    """Return the least and the largest of all numbers in a tensor's storage, if they are whole and its bytes known."""
    found, dtype = _current(handle), handle.meta.dtype
    if found is None or not found[1] or dtype.is_floating_point or dtype not in _READERS:
        return None
    copy, values = found
    if copy.bounds is None or copy.bounds[2] is not dtype:
        count = len(values) // dtype.itemsize
        if not count:
            return None
        if count <= _FEW:
            numbers = struct.unpack_from(f"={count}{_FORMATS[dtype]}", values)
            copy.bounds = min(numbers), max(numbers), dtype
        else:
            least, largest = torch.frombuffer(bytearray(values), dtype=dtype, count=count).aminmax()
            copy.bounds = int(least), int(largest), dtype
    return copy.bounds


def copy_of(handle: Handle) -> torch.Tensor | None:
    """Return what `cpu()` gives of a tensor in a storage whose bytes are known: in memory of its own, without gaps."""
    found, values = _current(handle), values_of(handle, may_wait=True)
    if found is None or values is None:
        return None
    if found[0].later is None and not found[0].asked:
        _note_ask(found[0])
    return values if values.is_contiguous() and values.nbytes == values.untyped_storage().nbytes() else values.clone()


def keep_values(handle: Handle, values: torch.Tensor) -> None:
    """Remember the values of a tensor that has a storage of its own, and begins it, if it has no gaps.

    Args:
        handle: the tensor's.
        values: an equal tensor on the CPU.
    """
    meta = handle.meta
    alike = values.dtype is meta.dtype and tuple(values.shape) == meta.size and values.stride() == meta.stride
    if alike and values.nbytes and is_dense(meta.size, meta.stride):
        keep(handle, string_at(values.data_ptr(), values.nbytes), asked=True)


def _note_ask(copy: HostCopy) -> None:
    _count(copy, _asked)  # first, because `forget_uploads` leaves what was asked for to who looks there
    copy.asked = True


def _read(values: bytes, meta: Meta, first: int = 0) -> bool | int | float | None:
    """Return a number out of the bytes of a storage from its byte `first` on; None where it is none of theirs."""
    dtype = meta.dtype
    start = meta.offset * dtype.itemsize - first
    if not meta.plain or start + dtype.itemsize > len(values):
        return None
    if dtype is torch.bfloat16:
        value: float = _read_float32(_as_float32(values[start : start + 2]))[0]
        return value
    read = _READERS.get(dtype)
    return read(values, start)[0] if read is not None else None


def _as_float32(half: bytes) -> bytes:
    """The bytes of a float32 that equals a bfloat16, in this machine's order."""
    return b"\0\0" + half if _LITTLE_ENDIAN else half + b"\0\0"


_LITTLE_ENDIAN = struct.pack("=h", 1) == struct.pack("<h", 1)


def readable(handle: Handle) -> bool:
    """Return whether the whole storage of a tensor may be read where one number of it is asked for."""
    owner = handle.root or handle
    return _is_whole(owner) and bytes_needed(owner.meta) <= _MOST_READ_AHEAD and handle.meta.dtype in _READERS


def _is_whole(owner: Handle) -> bool:
    """Return whether the tensor that first had a storage is still all of it, and its bytes may be known."""
    meta = owner.meta
    if owner.with_copy is None or (owner.copied and owner.copy.final) or not meta.plain or meta.offset:
        return False
    byte_count = bytes_needed(meta)
    return meta.stride == contiguous_stride(meta.size) and memory_of(owner).byte_count == byte_count > 0


def know_element(handle: Handle, owner: Handle) -> None:
    """Let a number be known that was just taken of a storage whose bytes are, so that results of it are, too.

    Numbers of floating point only if one of that storage was asked for: they are computed with, as a rule, not read.

    Args:
        handle: the number's.
        owner: that of the tensor that first had the storage, with `copied` set.
    """
    copy, recorder, meta = owner.copy, handle.device.recorder, handle.meta
    if (
        copy.values
        and type(recorder) is Recorder
        and copy.epoch == recorder.hidden_writes
        and meta.dtype in _READERS
        and (copy.asked or not meta.dtype.is_floating_point)
    ):
        known = KnownMeta(meta, partial(_tensor_of, copy.values, meta), recorder)
        known.copy = copy
        handle.meta = known


def _tensor_of(values: bytes, meta: Meta) -> torch.Tensor:
    number = _read(values, meta)
    if number is None:
        raise RuntimeError("a number lies beyond its storage")
    return torch.tensor(number, dtype=meta.dtype, device="cpu")


__all__ = [
    "bounds_of",
    "copy_of",
    "elements_ahead",
    "escape",
    "forget_copy",
    "forget_uploads",
    "forget_written",
    "keep",
    "keep_ahead",
    "keep_later",
    "keep_values",
    "know_element",
    "number_of",
    "readable",
    "sized_by",
    "source_of",
    "tensor_in",
    "values_of",
    "watch",
]
