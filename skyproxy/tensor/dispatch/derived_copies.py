"""Small tensors of whole numbers that follow from what is known here: computed here, too, where somebody asks.

Models count positions with `arange`, add to them, compare them, and ask whether all is as usual: is a batch packed, is
its end padding? Schedulers look up which of their time steps, which are fractions, comes next. What they ask follows
from sizes, and from numbers that were just uploaded. So the results of the operations below keep how they were made, as
long as the bytes of all operands are known (`core.host_copies`). Nothing is computed before somebody asks, and what it
is computed of is what the operands held then: later writes to them do not matter, and a write to the result forgets it,
as it forgets what was uploaded.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import string_at
from typing import TYPE_CHECKING, Any

import torch

from skyproxy.interrupts import raised_by_handler
from skyproxy.tensor.core.host_copies import MOST_BYTES, MOST_DERIVED_BYTES, keep_later, source_of, tensor_in
from skyproxy.tensor.core.memory import bytes_needed
from skyproxy.tensor.core.metadata import Meta
from skyproxy.tensor.core.remote_tensor import RemoteTensor
from skyproxy.tensor.core.torch_private import DisableTorchFunction, has_modes_or_transforms
from skyproxy.torch_codec import is_dense

if TYPE_CHECKING:
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
_CONSTANTS = (int, bool, torch.dtype, type(None))  # no fractions: what they make depends on the default dtype


class _Operand:
    """A tensor as it was when an operation was recorded.

    Attributes:
        source: the bytes of its storage, or what gives them.
        meta: how it looks.
    """

    __slots__ = ("meta", "source")

    def __init__(self, source: bytes | Callable[[], bytes], meta: Meta) -> None:
        self.source, self.meta = source, meta

    def tensor(self, made: dict[object, bytes]) -> torch.Tensor:
        """Return a copy of it on the CPU; `made` has what was computed by now.

        Raises:
            RuntimeError: nobody can tell.
        """
        source = self.source
        values = source if type(source) is bytes else source.compute(made) if type(source) is _Derived else b""
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
        kwargs: the same by name.
        meta: how its result looks.
        steps: how many operations lie between it and what is known.
    """

    __slots__ = ("_args", "_info", "_kwargs", "_meta", "_values", "steps")

    def __init__(self, info: OpInfo, args: list[Any], kwargs: dict[str, Any], meta: Meta, steps: int) -> None:
        self._info, self._args, self._kwargs, self._meta, self.steps = info, args, kwargs, meta, steps
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

        def local(a: Any) -> Any:
            if type(a) is _Operand:
                return a.tensor(made)
            return [local(item) for item in a] if type(a) is list else a

        options = {name: local(a) for name, a in self._kwargs.items()}
        result = self._info.func(*map(local, self._args), **options)
        meta = self._meta
        if result.dtype is not meta.dtype or tuple(result.shape) != meta.size:
            raise RuntimeError("the result looks otherwise here")
        dense = torch.empty_strided(meta.size, meta.stride, dtype=meta.dtype, device="cpu").copy_(result)
        values = made[self] = string_at(dense.data_ptr(), dense.nbytes)
        if len(values) <= MOST_BYTES:
            self._values = values
        return values


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
    byte_count = bytes_needed(meta) if meta.plain and meta.dtype in WHOLE else 0
    if not 0 < byte_count <= MOST_DERIVED_BYTES or not is_dense(meta.size, meta.stride):
        return
    steps = 0

    def known(a: Any) -> Any:
        nonlocal steps
        kind = type(a)
        if kind is RemoteTensor:
            operand = a._sky
            dtype = operand.meta.dtype
            is_exact = dtype in WHOLE or (dtype in _FRACTIONS and info.name in _COMPARISONS)
            source = source_of(operand) if is_exact else None
            if source is None:
                raise LookupError
            if type(source) is _Derived:
                steps = max(steps, source.steps + 1)
            return _Operand(source, operand.meta)
        if kind is list or kind is tuple:
            return [known(item) for item in a]
        if kind not in _CONSTANTS:
            raise LookupError
        return a

    options = {}
    try:
        given = [known(a) for a in args]
        for name, a in (kwargs or {}).items():
            if name == "device":
                options[name] = "cpu"
            elif name not in ("layout", "pin_memory"):
                options[name] = known(a)
    except LookupError as error:
        if raised_by_handler(error):
            raise
        return
    if steps <= _MOST_STEPS:
        keep_later(handle, _Derived(info, given, options, meta, steps))


__all__ = ["WHOLE", "derive"]
