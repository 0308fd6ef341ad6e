"""Batches that came before, kept decoded under the names that the client gave them."""

from __future__ import annotations

from skyproxy.errors import ProtocolError
from skyproxy.protocol.messages import MAX_NAMES, Batch, Message, NamedBatch, Repeat

_MAX_REPEATED = 1 << 20
"""Numbers that the shortened lists of one message may stand for."""


class NamedBatches:
    """The named batches of one session."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[object], list[int]]] = {}

    def resolve(self, message: Message) -> Batch | None:
        """The batch that a message stands for; None if it carries no commands.

        Raises:
            ProtocolError: the name is unknown or out of bounds, or a change fits no hole.
        """
        if isinstance(message, Batch):
            return message
        if isinstance(message, NamedBatch):
            if not 0 < message.name <= MAX_NAMES + 1:
                raise ProtocolError(f"a batch was named {message.name}; names go from 1 to {MAX_NAMES + 1}")
            if any(not 0 <= hole < len(message.stream) for hole in message.holes):
                raise ProtocolError(f"batch {message.name} has a hole outside of its {len(message.stream)} items")
            self._known[message.name] = (message.stream, message.holes)
            return Batch(message.sequence, message.stream, message.buffers)
        if isinstance(message, Repeat):
            known = self._known.get(message.name)
            if known is None:
                raise ProtocolError(f"no batch is named {message.name}")
            stream, holes = known
            if len(message.changes) % 2:
                raise ProtocolError(f"a change of batch {message.name} has no value")
            changes = iter(message.changes)
            room = _MAX_REPEATED
            for number, value in zip(changes, changes, strict=True):
                if type(number) is not int or not 0 <= number < len(holes):
                    raise ProtocolError(f"batch {message.name} has {len(holes)} holes, none is numbered {number!r:.40}")
                value, room = _lengthen(value, room)
                stream[holes[number]] = value
            return Batch(message.sequence, stream, message.buffers)
        return None


def _lengthen(value: object, room: int) -> tuple[object, int]:
    """Undoes the client's shortening of lists that hold one number many times: `[[count, number]]`.

    Args:
        value: what came.
        room: how many numbers it may become.

    Returns:
        The list, or the value itself; and the room that is left.

    Raises:
        ProtocolError: there is no room for it.
    """
    if type(value) is list and len(value) == 1 and type(value[0]) is list:
        if len(value[0]) != 2 or type(value[0][0]) is not int or not 0 <= value[0][0] <= room:
            raise ProtocolError(f"a repeated batch may hold {_MAX_REPEATED} shortened numbers, not {value[0]!r:.60}")
        count, number = value[0]
        return [number] * count, room - count
    return value, room
