"""The XOR that RFC 6455 asks of clients, without allocating for large payloads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

try:
    from websockets.speedups import apply_mask
except ImportError:  # no C compiler was at hand when websockets was installed
    from websockets.utils import apply_mask

from skyproxy.protocol.messages import Buffer

mask: Callable[[Buffer, bytes], bytes] = apply_mask
"""Returns a masked copy of a small payload."""
_NUMPY_FROM_BYTES = 16 << 10
"""From this size on numpy is faster than websockets' function, which returns fresh memory."""


@functools.cache
def load_numpy() -> ModuleType | None:
    """numpy, where it is installed.

    Late, because the command line must start fast; optional, because only torch brings it along. A transport calls
    this when it is made, because an import that Ctrl-C interrupts in the middle of a send would stay broken.
    """
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def rotate(key: bytes, position: int) -> bytes:
    """The key as it applies from `position` of a payload on."""
    shift = position & 3
    return key[shift:] + key[:shift]


def unmask(view: memoryview, key: bytes) -> None:
    """Masks or unmasks memory in place.

    Args:
        view: writable bytes.
        key: four bytes, as they apply to the first of `view`.
    """
    xor(view, view, key)


def xor(source: memoryview, target: memoryview, key: bytes) -> None:
    """Writes `source` XOR `key` to `target`, which is as long and either the same memory or separate."""
    numpy = load_numpy() if len(source) >= _NUMPY_FROM_BYTES else None
    if numpy is None:
        target[:] = apply_mask(source, key)
        return
    given = numpy.frombuffer(source, numpy.uint8)
    result = numpy.frombuffer(target, numpy.uint8)
    lead = -address(source, numpy) % 8
    if (address(target, numpy) + lead) % 8:
        # numpy takes a slow path for words that are not aligned.
        result[:] = given
        xor(target, target, key)
        return
    body = (len(source) - lead) & ~7
    end = lead + body
    if lead:
        target[:lead] = apply_mask(source[:lead], key)
    word = numpy.frombuffer(rotate(key, lead) * 2, numpy.uint64)
    numpy.bitwise_xor(given[lead:end].view(numpy.uint64), word, out=result[lead:end].view(numpy.uint64))
    if end < len(source):
        target[end:] = apply_mask(source[end:], rotate(key, end))


def address(view: memoryview, numpy: ModuleType | None = None) -> int:
    """Return where in memory `view` begins; 0 where nobody can tell."""
    numpy = numpy or load_numpy()
    if numpy is None or not len(view):
        return 0
    interface: dict[str, Any] = numpy.frombuffer(view, numpy.uint8).__array_interface__
    where: int = interface["data"][0]
    return where


def mask_parts(parts: Iterable[Buffer], key: bytes, target: memoryview) -> None:
    """Writes the masked bytes of consecutive parts to `target`, which is exactly as long as they are together."""
    position = 0
    for part in parts:
        view = memoryview(part)
        if view.format != "B":
            view = view.cast("B")
        end = position + len(view)
        xor(view, target[position:end], rotate(key, position))
        position = end
