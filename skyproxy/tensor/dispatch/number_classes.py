"""Classes of numbers in the keys of calls: small ones count by their type only, others by how much they need.

A byte holds no 300, half precision no -1e9: kernels refuse such numbers in `fill_`, `clamp` and their like. So a number
of another class is another call, which is tried, or asked for, at its line.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence
from math import hypot

LEAST, MOST = -128, 127
"""Bounds of the numbers that each signed dtype holds. The hot path has them written out, in place of `class_of`."""
_LIMITS = (
    127,
    128,
    240,  # float8_e4m3fnuz
    255,
    448,  # float8_e4m3fn
    (1 << 15) - 1,
    1 << 15,
    57344,  # float8_e5m2
    65504,  # float16
    (1 << 16) - 1,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    (2 - 2**-7) * 2.0**127,  # bfloat16
    (2 - 2**-23) * 2.0**127,  # float32
    (2 - 2**-52) * 2.0**1023,
)
"""The largest numbers of the dtypes, and the lowest without their signs."""
_OF_FLOAT32 = len(_LIMITS) - 2


@functools.lru_cache(4096, typed=True)
def class_of(number: complex) -> str:
    """Return the class of a number that the hot path does not know for a small one.

    Zero and what is below are classes of their own among whole numbers: nothing is divided by zero, and no power of a
    whole number is negative.
    """
    kind = type(number).__name__
    if type(number) is complex:  # has the class of its larger part
        number = max(abs(number.real), abs(number.imag))
    if number != number:
        return f"{kind} nan"
    size = bisect_left(_LIMITS, abs(number)) if number else -1
    return f"{kind} {'-' if number < 0 else ''}{size}"  # type: ignore[operator]  # a complex one has become real


def key_of(number: object) -> object:
    """Return what a number is in the key of a call, as the hot path has it."""
    kind = type(number)
    if kind is float:
        return float if LEAST <= number <= MOST else class_of(number)  # type: ignore[operator]
    if kind is int:
        return int if 0 < number <= MOST else class_of(number)  # type: ignore[operator]
    return class_of(number) if kind is complex else kind


def keys_of(numbers: Sequence[object]) -> tuple[object, ...]:
    """Return the same of a list of numbers, of which there may be one for each parameter of a model."""
    kinds = tuple(map(type, numbers))
    # One pass in C over them; of a few larger ones each is looked at.
    if kinds.count(float) == len(kinds) and hypot(*numbers) <= MOST:  # type: ignore[arg-type]
        return kinds
    return tuple(map(key_of, numbers))


def is_huge(number: float) -> bool:
    """Return whether single precision does not hold a number, or holds it as infinity only."""
    return not abs(number) <= _LIMITS[_OF_FLOAT32]


__all__ = ["class_of", "is_huge", "key_of", "keys_of"]
