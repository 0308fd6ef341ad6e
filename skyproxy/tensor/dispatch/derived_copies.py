"""Small tensors of whole numbers that follow from what is known here: computed here, too, where somebody asks.

Models count positions with `arange`, add to them, compare them, and ask whether all is as usual: is a batch packed, is
its end padding? Schedulers look up which of their time steps, which are fractions, comes next. What they ask follows
from sizes, and from numbers that were just uploaded. So the results of the operations below keep how they were made, as
long as the bytes of all operands are known (`core.host_copies`). Nothing is computed before somebody asks, and what it
is computed of is what the operands held then: later writes to them do not matter, and a write to the result forgets it,
as it forgets what was uploaded. Where a comparison takes a number of a small storage that nobody knows, whoever asks
for a second such answer has all of the storage come in place of it.
"""

from __future__ import annotations

import functools
from ctypes import string_at
from typing import TYPE_CHECKING, Any

import torch

from skyproxy.interrupts import raised_by_handler
from skyproxy.tensor.core.host_copies import (
    MOST_BYTES,
    MOST_DERIVED_BYTES,
    keep_later,
    readable,
    sized_by,
    source_of,
    tensor_in,
)
from skyproxy.tensor.core.memory import bytes_needed
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import DisableTorchFunction, has_modes_or_transforms
from skyproxy.torch_codec import is_dense

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skyproxy.tensor.core.addresses import LaterBytes
    from skyproxy.tensor.core.devices import Handle
    from skyproxy.tensor.dispatch.op_info import OpInfo

WHOLE = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
"""Dtypes in which the operations that are derived here are exact on every device."""
_FRACTIONS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16}
"""Dtypes of what may be compared, and integers of their size. Other operations have other last bits elsewhere."""
_COMPARISONS = frozenset(
    f"aten::{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")
)
_MOST_STEPS = 16
"""Operations between what is known and what is derived of it: a mask that grows with each token has ever more."""
_CONSTANTS = (int, bool, torch.dtype, type(None))
"""No fractions: what they make of whole numbers depends on the default dtype."""
_FRACTIONAL_NUMBERS = frozenset({float, complex})
_OF_PLACE = frozenset({"device", "layout", "pin_memory"})
"""Arguments that say where a result is to be, and nothing of its values."""


class _Awaited:
    """The bytes of a small storage that are not known yet: asked for where somebody asks for what follows from them.

    Not the first time: who asks once may ask for one number of it and for no more.

    Args:
        owner: the handle of the tensor that first had the storage.
        asked: has this class for a key once somebody has asked; until something writes to the storage.
    """

    __slots__ = ("_asked", "_copy", "_owner")

    def __init__(self, owner: Handle, asked: dict[object, object]) -> None:
        self._owner, self._copy, self._asked = owner, owner.copy, asked

    def compute(self, made: dict[object, bytes]) -> bytes:
        """Return the bytes as they were when this was made. Waits.

        Raises:
            RuntimeError: something has written to them meanwhile, or nobody has asked before.
        """
        copy, owner = self._copy, self._owner
        if not copy.values:
            has_asked = _Awaited in self._asked
            self._asked[_Awaited] = True
            if not (has_asked and self._is_unchanged()):
                raise RuntimeError("the numbers are not known here")
            whole = owner.device.session.fetch(owner.slot, owner.meta.description)
            if not self._is_unchanged():  # by another thread
                raise RuntimeError("the numbers have changed meanwhile")
            copy.values = string_at(whole.data_ptr(), whole.nbytes)
        return copy.values

    def _is_unchanged(self) -> bool:
        """Return whether nothing has written to the storage, as far as `_copy` is told."""
        copy, owner = self._copy, self._owner
        is_told = owner.copied and owner.copy is copy
        return is_told and copy.values is not None and copy.epoch == owner.device.recorder.hidden_writes


def _storage_around(handle: Handle) -> _Awaited | None:
    """Return what gives the bytes of the small storage that a number lies in; None: they are not to be had."""
    owner = handle.root
    if owner is None or handle.meta.size or not owner.meta.size or not readable(handle):
        return None
    asked = sized_by(handle)
    return None if asked is None else _Awaited(owner, asked)


class _Operand:
    """A tensor as it was when an operation was recorded.

    Attributes:
        source: the bytes of its storage, or what gives them.
        meta: how it looks.
    """

    __slots__ = ("meta", "source")

    def __init__(self, source: bytes | _Awaited | LaterBytes, meta: Meta) -> None:
        self.source, self.meta = source, meta

    def tensor(self, made: dict[object, bytes]) -> torch.Tensor:
        """Return a copy of it on the CPU; `made` has what was computed by now.

        Raises:
            RuntimeError: nobody can tell.
        """
        source = self.source
        if type(source) is _Derived or type(source) is _Awaited:
            source = source.compute(made)
        values = source if type(source) is bytes else b""
        found = tensor_in(values, self.meta)
        if found is None:
            raise RuntimeError("an operand is not known")
        if found.dtype in _FRACTIONS and _has_subnormal_numbers(found):
            raise RuntimeError("whether an operand is zero depends on a mode of the worker")
        return found


def _has_subnormal_numbers(values: torch.Tensor) -> bool:
    """Return whether there are any, by their bits: a mode of this thread may have the processor take them for zeros."""
    whole = _FRACTIONS[values.dtype]
    magnitudes = values.view(whole) & torch.iinfo(whole).max
    least = torch.tensor(torch.finfo(values.dtype).tiny, dtype=values.dtype, device="cpu").view(whole)
    return bool(((magnitudes > 0) & (magnitudes < least)).any())


class _Derived:
    """The bytes of a storage as one operation makes them, of operands that are known.

    Args:
        info: the operation.
        args: its arguments, with an `_Operand` in the place of each tensor.
        kwargs: the same by name, with those that say where the result is.
        meta: how its result looks.
        steps: how many operations lie between it and what is known.
        waits: whether what it is computed of has to be asked for, perhaps.
    """

    __slots__ = ("_args", "_info", "_kwargs", "_meta", "_values", "steps", "waits")

    def __init__(
        self,
        info: OpInfo,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        meta: Meta,
        steps: int = 0,
        waits: bool = False,
    ) -> None:
        self._info, self._args, self._kwargs, self._meta = info, args, kwargs, meta
        self.steps, self.waits = steps, waits
        self._values: bytes | None = None

    def __call__(self) -> bytes:
        """Return the bytes; none where they cannot be computed."""
        if self._values is not None:
            return self._values
        if has_modes_or_transforms():  # which would have their own idea of it
            return b""
        try:
            with DisableTorchFunction():
                return self.compute({})
        except RuntimeError as error:  # the worker reports the same, with its line
            if raised_by_handler(error):
                raise
            return b""

    def compute(self, made: dict[object, bytes]) -> bytes:
        """Compute the bytes, and those of operands that are not in `made`.

        Raises:
            RuntimeError: an operation refuses its operands, or one is not known.
        """
        if self._values is not None:
            return self._values
        found = made.get(self)
        if found is not None:
            return found

        options = {name: _local(a, made) for name, a in self._kwargs.items() if name not in _OF_PLACE}
        if "device" in self._kwargs:
            options["device"] = "cpu"
        result = self._info.func(*[_local(a, made) for a in self._args], **options)
        meta = self._meta
        if result.dtype is not meta.dtype or tuple(result.shape) != meta.size:
            raise RuntimeError("the result looks otherwise here")
        dense = torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="cpu").copy_(result)
        values = made[self] = string_at(dense.data_ptr(), dense.nbytes)
        if len(values) <= MOST_BYTES:
            self._values = values
        return values


def _local(a: object, made: dict[object, bytes]) -> object:
    """Return an argument with a copy of each operand on the CPU; a function of its own, as one that refers to itself
    would keep what was computed until a collection.
    """
    if type(a) is _Operand:
        return a.tensor(made)
    return [_local(item, made) for item in a] if type(a) is list else a


def derive(handle: Handle, info: OpInfo, args: Any, kwargs: dict[str, Any] | None) -> None:
    """Keep how a fresh tensor was made, if it is small and whole, and all its operands are known.

    To be called before the operation is recorded: what another thread writes meanwhile is forgotten then.

    Args:
        handle: the tensor's, whose storage nobody else has.
        info: one of the operations that keep their values.
        args: its arguments.
        kwargs: the same by name.
    """
    meta = handle.meta
    if meta.dtype not in WHOLE or not _may_be_derived(meta):
        return
    steps, waits, takes_fractions = 0, False, False

    def known(a: object) -> object:
        nonlocal steps, waits, takes_fractions
        if type(a) is RemoteTensor:
            operand, compares = a._sky, info.name in _COMPARISONS
            dtype = operand.meta.dtype
            if dtype not in WHOLE and not (compares and dtype in _FRACTIONS):
                raise LookupError
            source = source_of(operand) or (_storage_around(operand) if compares else None)
            if source is None:
                raise LookupError
            if type(source) is _Derived:
                steps, waits = max(steps, source.steps + 1), waits or source.waits
            waits = waits or type(source) is _Awaited
            takes_fractions = takes_fractions or dtype is torch.float32 or dtype is torch.float64
            return _Operand(source, operand.meta)
        if type(a) not in _CONSTANTS and not (type(a) is float and takes_fractions):
            raise LookupError
        return a

    try:
        given = [list(map(known, a)) if type(a) is list or type(a) is tuple else known(a) for a in args]
        options = {name: a if name in _OF_PLACE else known(a) for name, a in (kwargs or {}).items()}
    except LookupError as error:
        if raised_by_handler(error):
            raise
        return
    if steps <= _MOST_STEPS:
        keep_later(handle, _Derived(info, given, options, meta, steps, waits))


def derive_of_numbers(handle: Handle, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do what `derive` does for a tensor that is made of numbers, as `arange` makes one."""
    if _may_be_derived(handle.meta) and _FRACTIONAL_NUMBERS.isdisjoint(map(type, args)):
        keep_later(handle, _Derived(info, args, kwargs, handle.meta))


@functools.lru_cache(4096)
def _may_be_derived(meta: Meta) -> bool:
    """Return whether a fresh tensor of this look fills its storage, which is small enough to be computed here."""
    return meta.plain and 0 < bytes_needed(meta) <= MOST_DERIVED_BYTES and is_dense(meta.size, meta.stride)


__all__ = ["WHOLE", "derive", "derive_of_numbers"]
