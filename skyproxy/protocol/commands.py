"""The commands inside a batch, and how an op's signature is written.

A batch is one flat list. Each command starts with its number; the operands follow in place. Numbers below
`FIRST_SIGNATURE` are built in:

========  ===========================================================================================
number    operands
========  ===========================================================================================
DEFINE    number, definition: what an op number from `FIRST_SIGNATURE` on means
EXPECT    descriptions: what the client believes of the next op's outputs, of the tensors that it changes, and of all
          tensors that it reads, in this order; what it sends later without an EXPECT rests on this
RELEASE   slots: forget these values
UPLOAD    slot, description, device: its bytes are the batch's next buffer
RECEIVE   slot, description, device, transfer: its bytes come as chunks on the bulk connection
FETCH     request, slot, transfer: send the value's bytes, with the reply (transfer 0) or as chunks
DESCRIBE  request, output slots, input slots: reply with the outputs' descriptions and what they alias
CALL      request, name, arguments: reply with the result of a named control
DO        name, arguments: run a named control; a failure is remembered until the client synchronizes
REPLAY    graph: run a stream of commands that was captured before
========  ===========================================================================================

A compiled graph is defined and called like an op; its definition is `[COMPILED, argument templates, fields, output
templates]`. The fields are "nodes", each `[overload, arguments, keywords]` (see `torch_codec`), "outputs": the numbers
of the values to keep, "writes": the numbers of the inputs that it changes, and "options".

An op's definition is `[overload, argument templates, keyword templates, output templates]`. A template says where an
argument comes from: one of the marks below, or `[CONSTANT, tag, value]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from skyproxy.errors import ProtocolError
from skyproxy.interrupts import raised_by_handler

DEFINE: Final = 1
EXPECT: Final = 2
RELEASE: Final = 3
UPLOAD: Final = 4
RECEIVE: Final = 5
FETCH: Final = 6
DESCRIBE: Final = 7
CALL: Final = 8
DO: Final = 9
REPLAY: Final = 10
FIRST_SIGNATURE: Final = 32

OPERANDS: Final = {
    DEFINE: 2,
    EXPECT: 1,
    RELEASE: 1,
    UPLOAD: 3,
    RECEIVE: 4,
    FETCH: 3,
    DESCRIBE: 3,
    CALL: 3,
    DO: 2,
    REPLAY: 1,
}
"""The number of operands of each built-in command."""

RECORDABLE: Final = {
    "copy_to_device": ((1,), (0,)),
    "resize_storage": ((0,), ()),
    "set_modes": ((), ()),
    "take_apart": ((0,), (1,)),
    "view_storage": ((1,), (0,)),
}
"""The controls that a captured stream may hold: which of their arguments are slots that are read, and slots (or a list
of slots) that are filled."""

COMPILED: Final = "sky::compiled"
"""The stand-in for an op's name for a compiled graph."""

# Argument templates: each but CONSTANT takes one operand.
VALUE: Final = "v"
"""The operand itself: a number, None, a list of numbers."""
TENSOR: Final = "t"
"""The value in the slot that the operand names; slot 0 is None."""
TENSORS: Final = "T"
"""A list of such values; the operand is a list of slots."""
HOST_SCALAR: Final = "k"
"""A 0-dim tensor on the worker's CPU; `[HOST_SCALAR, dtype]`, and the operand is its value."""
CONSTANT: Final = "c"
"""Part of the signature; `[CONSTANT, tag, value]`, see `torch_codec`."""

# Output templates.
NEW: Final = "n"
"""A fresh value, kept in the slot that the operand names; slot 0 drops it."""
NEW_LIST: Final = "N"
"""A list of fresh values; the operand is a list of slots."""
IGNORED: Final = "x"
"""Not kept: an alias of an argument that the client already holds. Takes no operand."""


def takes_operand(template: Any) -> bool:
    """Tell the templates that take an operand from those that say all by themselves."""
    return bool(template != IGNORED and template[0] != CONSTANT)


def operand_count(templates: Iterable[object]) -> int:
    """Return how many operands an op of these argument and output templates takes."""
    return sum(map(takes_operand, templates))


def number_places(definition: Sequence[Any]) -> tuple[int, ...]:
    """Return which operands of an op may be numbers or lists of them, and not slots, counted from 1 behind its own."""
    name, arguments, keywords, *_ = definition
    templates = [*arguments, *(keywords.values() if name != COMPILED else ())]
    operands = enumerate(filter(takes_operand, templates), 1)
    return tuple(place for place, template in operands if template[0] in (VALUE, HOST_SCALAR))


def width_table(ops: Mapping[int, int] | None = None) -> dict[int, int]:
    """Return how many operands each command takes, by number: the built-in ones, and ops as they are defined."""
    return {**OPERANDS, **(ops or {})}


def walk(stream: list[Any], widths: Mapping[int, int], end: int | None = None) -> list[int]:
    """Return the positions of all commands of a stream, in order; an EXPECT and the op behind it are two.

    This alone knows where a command ends. It gives a list: a generator of numbers, positions and operands took half as
    long again, and every batch is walked before it is sent.

    Args:
        stream: the commands.
        widths: how many operands each of them takes, see `width_table`.
        end: where they end; by default with the stream. Other threads may append to it meanwhile.

    Raises:
        ProtocolError: a number means nothing, or the stream ends in the middle of a command.
    """
    positions: list[int] = []
    append = positions.append
    position, count = 0, len(stream) if end is None else end
    try:
        while position < count:
            append(position)
            position += 1 + widths[stream[position]]
    except (KeyError, TypeError) as error:
        if raised_by_handler(error):
            raise
        raise ProtocolError(f"command {stream[position]!r:.40} at {position} was never defined") from None
    if position != count:
        raise ProtocolError(f"the stream ends in the middle of the command at {positions[-1]}")
    return positions


def op_at(stream: list[object], position: int) -> int:
    """Return where the command proper stands: behind the EXPECT at `position`, or there itself."""
    return end_of(stream, position) if stream[position] == EXPECT else position


def end_of(stream: list[Any], position: int) -> int:
    """Return the position behind the built-in command at `position`."""
    return position + 1 + OPERANDS[stream[position]]


Handler = Callable[[dict[int, object], list[object], int], int]
"""`handler(slots, stream, position)` runs the command at `position` and returns the position of the next one."""


def execute(
    stream: list[Any], position: int, handlers: Sequence[object], slots: dict[int, object], pause: object
) -> tuple[int, int, Exception | None]:
    """Run commands one after another until the stream ends, one fails, or there is reason to pause behind one.

    The same steps as those of `walk`, but by the handlers, which know their own widths, so that an op costs one look-up
    and one call. A property test holds the two against each other.

    Args:
        stream: the commands.
        position: where the first of them stands.
        handlers: by number, the `Handler` of each command.
        slots: the values.
        pause: looked at after each command; true is a reason to pause.

    Returns:
        Where the next command stands, or the one that failed; how many succeeded; the error, if one failed.
    """
    done, end = 0, len(stream)
    try:
        while position < end:
            position = handlers[stream[position]](slots, stream, position)
            done += 1
            if pause:
                break
    except Exception as error:
        return position, done, error
    return position, done, None
