"""Plain data as bytes: what a client takes of a worker that it does not trust. No code is named in it, and none runs.

A document has two streams: atoms (None, truth values, numbers, strings, bytes), and numbers that say what the atoms
make, in prefix order: a code of `_Code`, then how many parts there are. Each stream is a run of single msgpack values,
none of which may be a list or a table: what is read takes memory in proportion to its bytes, whatever it announces.
Objects that occur more than once are written once, so that lists which contain themselves come back as they were.

Large bytes, arrays and storages of tensors travel beside the document.
"""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Sequence
from enum import IntEnum
from pathlib import PurePath

MAX_DEPTH = 300
"""Of lists in lists; both sides walk through them by recursion."""
HEAD = struct.Struct("<Q")
"""The bytes of the structure, before it; the atoms are behind it."""
ATOMS = frozenset({type(None), bool, float, str, bytes})
"""Beside integers of 64 bits."""
FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (list, dict, set, int, float, str)}
"""Types that the `default_factory` of a defaultdict may be."""
PATHS: dict[str, type[PurePath]] = {
    kind.__name__: kind for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))
}


class Code(IntEnum):
    """The kind of value that the next parts make."""

    ATOM = 0
    REF = 1
    LIST = 2
    ATOM_LIST = 3
    TUPLE = 4
    ATOM_TUPLE = 5
    DICT = 6
    ATOM_DICT = 7
    SET = 8
    FROZENSET = 9
    BIG_INT = 10
    COMPLEX = 11
    BYTEARRAY = 12
    LARGE_BYTES = 13
    LARGE_BYTEARRAY = 14
    ORDERED_DICT = 15
    DEFAULT_DICT = 16
    COUNTER = 17
    DEQUE = 18
    RANGE = 19
    SLICE = 20
    ELLIPSIS = 21
    TENSOR = 22
    DEVICE = 23
    DTYPE = 24
    LAYOUT = 25
    MEMORY_FORMAT = 26
    SIZE = 27
    ARRAY = 28
    NUMPY_SCALAR = 29
    DATE = 30
    DATETIME = 31
    TIME = 32
    TIMEDELTA = 33
    DECIMAL = 34
    FRACTION = 35
    UUID = 36
    PATH = 37
    ENUM = 38
    DATACLASS = 39
    NAMED_TUPLE = 40
    RETURN_TYPE = 41
    EXCEPTION = 42
    NUMPY_DTYPE = 43
    STATE_DICT = 44
    SPARSE = 45
    NAMESPACE = 46


class NotPlainError(TypeError):
    """A value is not plain data; says what of it is not.

    Attributes:
        what: "a Foo at [3]['x']".
    """

    def __init__(self, kind: str, path: Sequence[str]) -> None:
        place = "".join(path)
        self.what = f"a {kind}" + (f" at {place:.200}" if place else "")
        super().__init__(f"{self.what} is not plain data")
