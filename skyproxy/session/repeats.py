"""Recognises batches that were sent before, so that a training step in a loop travels as a few bytes.

A loop records the same commands over and over: slots are reused in order, so the commands are the same to the byte, but
for a few numbers: a learning rate that decays, the number of a request. Those places are holes. A batch that is seen
for the second time is given a name; from the third time on, the name and what stands in the holes travel alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import msgpack

from skyproxy.protocol import commands
from skyproxy.protocol.messages import MAX_NAMES, Batch, Buffer, NamedBatch, Repeat, Sequence

_SMALLEST = 24
"""Streams shorter than this are not worth a name."""
_SHARE_OF_NEW = 16
"""One of so many commands may be an EXPECT where a batch is worth a name: what reshapes in place has one each time."""
_REQUEST_PLACES = {commands.FETCH: (1, 3), commands.CALL: (1,), commands.DESCRIBE: (1,)}
"""The operands of what asks for something that differ each time."""


def holes_of(
    stream: list[Any], positions: list[int], numbers: list[int], number_places: Mapping[int, tuple[int, ...]]
) -> list[int]:
    """The places in a stream that may differ although the program does the same thing again.

    Fractions (learning rates, bias corrections), lists of them, and the numbers of requests.

    Args:
        stream: commands.
        positions: where each of them begins, perhaps with some beyond the stream's end.
        numbers: the number of each command.
        number_places: which operands of an op may be numbers; ops of which none may are not there.
    """
    # Few commands take numbers: to look at every item, though by functions of C, takes three times as long.
    holes = []
    for i in _places(positions, numbers, number_places):
        value = stream[i]
        if type(value) is float or (type(value) is list and value and type(value[0]) is float):
            holes.append(i)
    if _REQUEST_PLACES.keys().isdisjoint(numbers):
        return holes
    return sorted([*holes, *_places(positions, numbers, _REQUEST_PLACES)])


def _places(positions: list[int], numbers: list[int], operands: Mapping[int, tuple[int, ...]]) -> list[int]:
    return [
        at + place
        for at, number in zip(positions, numbers, strict=False)
        if number in operands
        for place in operands[number]
    ]


def changes(before: list[Any], now: list[Any]) -> list[object]:
    """Return what stands in other holes than before: the number of a hole, then its value, and so on.

    A list that holds one number many times, as optimizers make them, becomes `[[count, number]]`.
    """
    result: list[Any] = []
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        if old != new or type(old) is not type(new) or (_has_zero(new) and repr(old) != repr(new)):
            result += (number, _shorten(new))
    return result


def _has_zero(value: object) -> bool:
    """Return whether there is a zero in it: zeros have signs, which == does not see."""
    return 0.0 in value if type(value) is list else value == 0.0


def _shorten(value: object) -> object:
    if type(value) is list and len(value) > 1 and value[0] != 0.0 and value.count(value[0]) == len(value):
        return [[len(value), value[0]]]
    return value


class BatchForm(NamedTuple):
    """The form in which a batch travels, and what must be remembered once it is on its way: `seen[key] = known`."""

    message: Batch | NamedBatch | Repeat
    key: bytes
    known: tuple[int, list[Any]]


class Repeats:
    """The client's memory of the batches it sent.

    Attributes:
        number_places: which operands of an op may be numbers, counted from 1; ops of which none may are not there.
        seen: for the hash of each batch that was sent, without its holes: its name, or 0 if it came once only, and
            what stood in the holes the last time.
    """

    def __init__(self, widths: dict[int, int]) -> None:
        self._widths = widths
        self.number_places: dict[int, tuple[int, ...]] = {}
        self._pack = msgpack.Packer(default=str).pack
        self.seen: OrderedDict[bytes, tuple[int, list[Any]]] = OrderedDict()

    def choose(
        self,
        sequence: Sequence,
        stream: list[Any],
        buffers: tuple[Buffer, ...],
        positions: list[int] | None = None,
    ) -> BatchForm:
        """The shortest message that makes the worker run this stream. Remembers nothing by itself: Ctrl-C may strike
        before the message is on its way.

        Args:
            sequence: the batch's number.
            stream: its commands.
            buffers: the bytes of its uploads.
            positions: where each command begins, if that is known, perhaps with some beyond the stream's end.
        """
        if len(stream) < _SMALLEST:
            return BatchForm(Batch(sequence, stream, buffers), b"", (0, []))
        positions = commands.walk(stream, self._widths) if positions is None else positions
        end = len(stream)
        numbers = [stream[at] for at in positions if at < end]
        if _SHARE_OF_NEW * numbers.count(commands.EXPECT) > len(numbers):
            # These ops come for the first time on such shapes, which happens once: it does not come again as it is.
            return BatchForm(Batch(sequence, stream, buffers), b"", (0, []))
        holes = holes_of(stream, positions, numbers, self.number_places)
        template, values = stream, [stream[i] for i in holes]
        if holes:
            template = stream.copy()
            for i in holes:
                template[i] = None
        # Only a hash is kept: a thousand batches of some kilobytes would be the largest thing that the client holds.
        key = blake2b(self._pack((template, holes)), digest_size=16).digest()
        known = self.seen.get(key)
        if known is None:
            if len(self.seen) >= MAX_NAMES:
                self.seen.popitem(last=False)
            return BatchForm(Batch(sequence, stream, buffers), key, (0, values))
        self.seen.move_to_end(key)
        name, before = known
        if name == 0:
            name = self._free_name()
            return BatchForm(NamedBatch(sequence, stream, name, holes, buffers), key, (name, values))
        return BatchForm(Repeat(sequence, name, changes(before, values), buffers), key, (name, values))

    def _free_name(self) -> int:
        used = {name for name, _ in self.seen.values()}
        return next(n for n in range(1, MAX_NAMES + 2) if n not in used)
