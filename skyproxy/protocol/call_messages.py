"""The messages of a functions connection: a call, its payload, and what happens to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from skyproxy.protocol.messages import CLIENT, FUNCTIONS, WORKER, Buffer, Message


@dataclass(frozen=True, slots=True)
class CallStart(Message):
    """Run a function. Its payload is a list of pieces of these `sizes`: here as buffers where all of it is small, else
    in `CallData` messages that follow.

    A call that the worker already knows is not started again. `call` is the client's own, and a secret: whoever knows
    it can fetch the result. `task` has the fields of `payloads.Task`.
    """

    code: ClassVar[int] = 15
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT})
    roles: ClassVar[frozenset[str]] = frozenset({FUNCTIONS})
    call: str
    task: dict[str, Any]
    sizes: list[int]
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class CallData(Message):
    """Bytes of a payload: `buffers[0]` belongs at byte `offset` of piece `piece`.

    `number` is 0 for the payload of a `CallStart`, else that of the `CallEvent`.
    """

    code: ClassVar[int] = 16
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT, WORKER})
    roles: ClassVar[frozenset[str]] = frozenset({FUNCTIONS})
    call: str
    number: int
    piece: int
    offset: int
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class CallEvent(Message):
    """Something happened to a call: its events have numbers from 1, without gaps, and come in that order.

    `kind` is one of `CALL_EVENTS`. Those with a payload have `sizes`, as a `CallStart` has. Number 0 stands for no
    event: the worker does not know the call, for the reason in `value`.
    """

    code: ClassVar[int] = 17
    senders: ClassVar[frozenset[str]] = frozenset({WORKER})
    roles: ClassVar[frozenset[str]] = frozenset({FUNCTIONS})
    call: str
    number: int
    kind: str
    value: dict[str, Any]
    sizes: list[int]
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class CallAck(Message):
    """Outputs up to the event `outputs` were shown, items up to the event `items` were taken: more may come."""

    code: ClassVar[int] = 18
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT})
    roles: ClassVar[frozenset[str]] = frozenset({FUNCTIONS})
    call: str
    outputs: int
    items: int


@dataclass(frozen=True, slots=True)
class CallCancel(Message):
    """The caller gives a call up; it is told the end at once, whenever the function really ends."""

    code: ClassVar[int] = 19
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT})
    roles: ClassVar[frozenset[str]] = frozenset({FUNCTIONS})
    call: str
    reason: str


@dataclass(frozen=True, slots=True)
class CallAttach(Message):
    """Events of this call come here from now on, those behind `number` that were sent before once more."""

    code: ClassVar[int] = 22
    senders: ClassVar[frozenset[str]] = frozenset({CLIENT})
    roles: ClassVar[frozenset[str]] = frozenset({FUNCTIONS})
    call: str
    number: int


CALL_EVENTS = frozenset({"started", "output", "ask", "stream", "item", "result", "error", "unknown"})
"""The events of a call. "ask": the function calls an actor whose handle it was given; "stream": it gave a generator,
whose items follow; "result" and "error" are the last."""
