"""The document of one value as plain data: its codes, its atoms, and the bytes and tensors that travel beside it.

`plain_writing` has the functions that write values of each class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgpack
import torch

from skyproxy import torch_codec
from skyproxy.interrupts import raised_by_handler
from skyproxy.payloads import rebuilding
from skyproxy.payloads.pickling import PLAIN, Pickled
from skyproxy.payloads.plain import ATOMS, HEAD, MAX_DEPTH, Code, NotPlainError
from skyproxy.payloads.tensors import Refer, TensorTable
from skyproxy.protocol.messages import Buffer

OUT_OF_BAND_BYTES = 64 << 10
MIN_INT, MAX_INT = -(2**63), 2**64 - 1


class PlainWriter:
    """Writes one value.

    Args:
        refer: for a tensor that goes by reference, what its row ends with; None for one that goes by value.
        find_function: for a value, the function that writes those of its class; None where they are not plain data.

    Attributes:
        tensors: the tensors of the value.
        path: the way from the value to the part that is being written.
    """

    def __init__(self, refer: Refer, find_function: FindFunction) -> None:
        self._find_function = find_function
        self.tensors = TensorTable(refer)
        self._codes: list[int] = []
        self._atoms: list[object] = []
        self._buffers: list[Buffer] = []
        self._known: dict[int, int] = {}
        self._count = 0
        self._keep: list[object] = []
        self._open: set[int] = set()
        self.path: list[str] = []
        self._hashed = 0

    def write(self, value: object) -> Pickled:
        """Return the value as bytes.

        Raises:
            NotPlainError: something in it is not plain data.
        """
        try:
            self.put(value)
        except NotPlainError:
            raise
        except RecursionError:
            raise NotPlainError("value that is nested too deeply", self.path[:20]) from None
        except Exception as error:  # code of the value's class
            if raised_by_handler(error):
                raise
            raise NotPlainError(f"{rebuilding.full_name(type(value))} ({error!r:.80})", self.path) from error
        document = self._document()
        contents = self.tensors.contents()
        pieces: list[Buffer] = [document, *self._buffers, *map(torch_codec.byte_view, contents)]
        table = self.tensors
        keep = [self._keep, self._buffers, contents]
        return Pickled(pieces, table.rows, table.bases(), table.references, "", keep, PLAIN)

    def _document(self) -> bytes:
        codes, atoms = pack(self._codes), pack(self._atoms)
        return HEAD.pack(len(codes)) + codes + atoms

    # --- values

    def put(self, value: Any) -> None:
        """Write a value behind those that were written."""
        kind = type(value)
        if kind in ATOMS and not (kind is bytes and len(value) >= OUT_OF_BAND_BYTES):
            self._codes.append(Code.ATOM)
            self._atoms.append(value)
        elif kind is int:
            self._put_int(value)
        elif id(value) in self._known and not (self._hashed and not isinstance(value, torch.Tensor)):
            self._codes += (Code.REF, self._known[id(value)])
        else:
            if id(value) in self._open:
                raise NotPlainError(f"{kind.__qualname__} that contains itself", self.path)
            if len(self.path) >= MAX_DEPTH:
                raise NotPlainError("value that is nested too deeply", self.path[:20])
            self._keep.append(value)
            function = self._find_function(value)
            if function is None:
                raise NotPlainError(rebuilding.full_name(kind), self.path)
            function(self, value)

    def _put_int(self, value: int) -> None:
        if MIN_INT <= value <= MAX_INT:
            self._codes.append(Code.ATOM)
            self._atoms.append(value)
        else:
            self._codes.append(Code.BIG_INT)
            self._atoms.append(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))

    def note(self, value: object) -> None:
        """Give a value its number, by which it is named when it comes again. Called where the reader has made it."""
        self._known[id(value)] = self._count
        self._count += 1

    def begin(self, code: Code, *numbers: int) -> None:
        """Write what follows is made into."""
        self._codes += (code, *numbers)

    def atom(self, *values: object) -> None:
        """Write atoms that belong to the code before."""
        self._atoms += values

    def buffer(self, content: Buffer) -> int:
        """Have bytes travel beside the document; return their number."""
        self._buffers.append(content)
        return len(self._buffers) - 1

    def part(self, value: object, place: str) -> None:
        """Write a part of the present value; `place` leads there, as in an expression."""
        self.path.append(place)
        try:
            self.put(value)
        finally:
            self.path.pop()

    def attempt(self, write: Callable[[], object]) -> bool:
        """Return whether `write` has written only what is plain data; if not, nothing of it is left."""
        codes, atoms, buffers, count = len(self._codes), len(self._atoms), len(self._buffers), self._count
        try:
            write()
        except Exception as error:  # also what code of the value's class raises
            if raised_by_handler(error):
                raise
            del self._codes[codes:], self._atoms[atoms:], self._buffers[buffers:]
            self._count = count
            self._known = {name: number for name, number in self._known.items() if number < count}
            return False
        return True

    def attributes(self, items: Mapping[str, object]) -> None:
        """Write those of a value's attributes that are plain data, and how many they are."""
        place, written = len(self._codes), 0
        self._codes.append(0)
        for name, item in items.items():
            if type(name) is str and self.attempt(partial(self.pairs, [(name, item)])):
                written += 1
        self._codes[place] = written

    def parts(self, values: Iterable[object]) -> None:
        """Write the items of a sequence."""
        for index, value in enumerate(values):
            self.part(value, f"[{index}]")

    def pairs(self, items: Iterable[tuple[object, object]]) -> None:
        """Write keys and values."""
        for key, value in items:
            self.hashed_part(key)
            self.part(value, f"[{key!r:.40}]" if type(key) in (str, int) else "[...]")

    def hashed_part(self, value: object) -> None:
        """Write a value that is hashed where it arrives: in full, because a tuple of tuples would take forever."""
        self._hashed += 1
        try:
            self.part(value, "(a key)")
        finally:
            self._hashed -= 1

    def hashed_parts(self, values: Iterable[object]) -> None:
        """Write the items of a set."""
        for value in values:
            self.hashed_part(value)

    def write_parts(self, value: object, write: Callable[[], object]) -> None:
        """Write the parts of a value that can only be made once they are there."""
        self._open.add(id(value))
        try:
            write()
        finally:
            self._open.discard(id(value))
        self.note(value)


def pack(values: Sequence[object]) -> bytes:
    """The values as a run of msgpack: as a list, without what would say that it is one."""
    packed = msgpack.packb(values, unicode_errors="surrogatepass")
    count = len(values)
    return packed[1 if count < 16 else 3 if count < 1 << 16 else 5 :]  # type: ignore[no-any-return]


WriteFunction = Callable[[PlainWriter, Any], None]
FindFunction = Callable[[object], WriteFunction | None]
