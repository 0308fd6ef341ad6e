"""A captured stream of commands, decoded: what each one runs, what it reads from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.commands import Handler
from skyproxy.torch_modes import USUAL, Record
from skyproxy_server.signatures import Signature

_BUILT_IN = frozenset({commands.RELEASE, commands.DO})
"""The built-in commands that can be replayed."""


Made = dict[int, object]
"""The results that a replay leaves for the client, by slot."""
Run = Callable[[bool], tuple[Made, bool]]
"""Runs the commands one by one; the argument says whether the first failure is raised. Tells what they made, and
whether all of them succeeded."""


class Replayer(Protocol):
    """The part that runs a recording as one graph of its device."""

    @property
    def is_live(self) -> bool:
        """True if replays are launches of a graph by now."""

    def replay(self, inputs: list[object], run: Run) -> Made:
        """Replay once: as a graph, or command by command with `run`."""


class Step(NamedTuple):
    """One command of a recording.

    Attributes:
        handler: runs it.
        position: where it stands in the recording's stream.
        signature: what it is, if it is an op.
        checked: whether its results are held against what the client believes, which is done until it succeeded.
    """

    handler: Handler
    position: int
    signature: Signature | None
    checked: bool


class Recording:
    """A captured stream, ready to run.

    Attributes:
        stream: the commands.
        steps: the same, decoded.
        exports: the slots whose values the client holds.
        modes: PyTorch's global modes when it was captured.
        externals: what the recording reads from outside, by slot.
        dynamic: slots that it reads from outside and that another recording fills.
        places: the devices that it computes on, each `[type, index]`.
        replayer: runs it as a CUDA graph; None on the CPU.
        intact: whether every step succeeded the last time.
    """

    def __init__(self, number: int, stream: list[Any], exports: list[int], modes: Record = USUAL) -> None:
        self.number = number
        self.stream = stream
        self.steps: list[Step] = []
        self.exports = exports
        self.modes = modes
        self.externals: dict[int, object] = {}
        self.dynamic: list[int] = []
        self.places: list[list[object]] = []
        self.replayer: Replayer | None = None
        self.intact = False

    def decode(
        self, handlers: list[Handler | None], signatures: dict[int, Signature], widths: dict[int, int]
    ) -> list[int]:
        """Fills in the steps.

        Returns:
            The slots that are read before they are filled.

        Raises:
            ProtocolError: the stream holds what cannot be replayed.
        """
        stream = self.stream
        made: set[int] = {0}
        outside: dict[int, None] = {}
        begin: int | None = None  # of the EXPECT before
        for at in commands.walk(stream, widths):
            position, begin = at if begin is None else begin, None
            number = stream[at]
            if number == commands.EXPECT and position == at:
                begin = at
                continue
            # Nothing is known of a number that merely equals one of ours.
            handler = handlers[commands.EXPECT if position != at else number] if type(number) is int else None
            signature = signatures.get(number)
            recordable = signature is not None or (number in _BUILT_IN and position == at)
            if handler is None or not recordable:
                raise ProtocolError(f"command {number!r:.40} at {at} of a captured stream cannot be replayed")
            reads, fills = _slots_of(signature, stream, at)
            outside.update(dict.fromkeys(slot for slot in reads if slot not in made))
            made.update(fills)
            if signature is not None and at == position:
                # Looked up until the first success: a check may replace the handlers of the ops behind it.
                handler = _lookup_handler(handlers)
            self.steps.append(Step(handler, position, signature, at != position))
        if begin is not None:
            raise ProtocolError("a captured stream ends with an EXPECT")
        return list(outside)

    def settle(self, handlers: list[Handler | None], signatures: dict[int, Signature]) -> None:
        """Every step succeeded: from now on nothing is checked or looked up any more."""
        self.intact = True
        for i, step in enumerate(self.steps):
            if step.signature is not None:
                at = commands.op_at(self.stream, step.position)
                number = self.stream[at]
                watched = step.signature.watch is not None or step.signature.warns
                known = handlers[number] if watched and signatures.get(number) is step.signature else None
                self.steps[i] = Step(known or step.signature.handler, at, step.signature, False)


def _lookup_handler(handlers: list[Handler | None]) -> Handler:
    def handler(values: dict[int, object], stream: list[Any], position: int) -> int:
        following: int = handlers[stream[position]](values, stream, position)
        return following

    return handler


def _slots_of(signature: Signature | None, stream: list[Any], position: int) -> tuple[list[int], list[int]]:
    """The slots that a command reads, and those that it fills."""
    if signature is not None:
        return signature.input_slots(stream, position), signature.output_slots(stream, position)
    if stream[position] == commands.RELEASE:
        return [], []
    try:
        name, arguments = stream[position + 1 : position + 3]
        reads, fills = commands.RECORDABLE[name]
        filled = [arguments[i] for i in fills]
        return [arguments[i] for i in reads], [
            slot for item in filled for slot in (item if isinstance(item, list) else [item])
        ]
    except (KeyError, TypeError, ValueError, IndexError):
        raise ProtocolError(f"a captured stream holds a control that cannot be replayed, at {position}") from None
