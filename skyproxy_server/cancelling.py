"""Operations that a client cancels before they are begun, and what stands in for their results.

The client says so past its operations, on the bulk connection, and puts a mark into its stream. Up to the mark, the
executor walks over the commands: those that keep both sides in agreement (definitions, releases, modes, uploads) it
runs, of the others it poisons the results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyproxy.errors import ProtocolError
from skyproxy.protocol import commands
from skyproxy.protocol.commands import Handler
from skyproxy_server.failures import Failed
from skyproxy_server.graphs import Graphs
from skyproxy_server.op_table import OpTable
from skyproxy_server.reports import Reports
from skyproxy_server.values import Values

_WHY = "was cancelled by an interrupt, or by torch.sky.cancel(), before the worker had begun it"
_NOT_MADE = f"this operation {_WHY}: what it would have made does not exist. Run its line again to make it."
_NOT_CHANGED = (
    f"this operation {_WHY}, and so were those behind it. The tensors that they would have changed keep the values "
    "that they had. That is said once: use them again to go on from there, or load what you saved."
)
_NOT_ANSWERED = f"this question {_WHY}. Ask again."
_MAX_PLACES = 512
"""Places whose lines the client is asked to remember: as many as the values that it still holds, as a rule."""
_ABOUT_VALUES = frozenset({"item", "numbers", "equal", "synchronize", "differentiated", "differentiate", "wait_event"})
"""The controls that answer for operations before them, or compute."""


class Cancellation:
    """The state and the effects of cancelling the operations of one session. Two threads use it.

    Attributes:
        dropped: operations that were dropped since the last mark.
    """

    def __init__(self, values: Values, reports: Reports) -> None:
        self._values = values
        self._reports = reports
        self._asked = self._met = 0
        self._lock = threading.Lock()
        self._changed: Failed | None = None
        self.dropped = 0

    @property
    def is_on(self) -> bool:
        """True if commands are dropped now."""
        return self._asked > self._met

    @property
    def latest_mark(self) -> int:
        """The number of the latest mark."""
        return self._met

    def go_on_behind(self, number: int) -> None:
        """Take all marks up to this one for met."""
        with self._lock:
            self._met = max(self._met, number)

    def ask(self, number: int) -> None:
        """Drop what is not begun, up to the mark of this number. For the thread that reads the bulk connection."""
        with self._lock:
            self._asked = max(self._asked, number)
            if self.is_on:
                self._values.gates.hold()

    def meet(self, number: int) -> dict[str, object]:
        """Go on behind a mark.

        Returns:
            "dropped": how many operations were; "places": the sequence and position of those whose errors may be
            raised.
        """
        found = {"dropped": self.dropped, "places": self._places()}
        with self._lock:
            self._met = max(self._met, number)
            if not self.is_on:
                self._values.gates.let_go()
        self._changed, self.dropped = None, 0
        self._values.gates.forget_unheld()
        return found

    def _places(self) -> list[list[int]]:
        if not self.dropped:
            return []
        failed = {id(value): value for value in self._values.slots.values() if isinstance(value, Failed)}
        if self._changed is not None:
            failed = {id(self._changed): self._changed, **failed}
        records = [value.record for value in failed.values() if value.was_cancelled]
        return [[record["sequence"], record["position"]] for record in records[:_MAX_PLACES]]

    def of_results(self, op: str, position: int) -> Failed:
        """Return what stands for the results of an operation."""
        self.dropped += 1
        return Failed.cancelled(_NOT_MADE, op, self._reports.sequence, position)

    def of_changes(self, op: str, position: int) -> Failed:
        """Return what marks the tensors that are not changed: one thing for all, so that it is told once."""
        if self._changed is None:
            self._changed = Failed.cancelled(_NOT_CHANGED, op, self._reports.sequence, position)
        return self._changed

    def of_question(self, op: str, position: int) -> Failed:
        """Return the answer to a question."""
        return Failed.cancelled(_NOT_ANSWERED, op, self._reports.sequence, position)


class CommandSkipper:
    """Walks over commands in place of running them."""

    def __init__(
        self,
        cancellation: Cancellation,
        ops: OpTable,
        values: Values,
        reports: Reports,
        graphs: Graphs,
        owe_check: Callable[[Any, list[object], int], None],
        fail: Callable[[list[object], int, Exception], int],
    ) -> None:
        """Make the walker of one session.

        Args:
            cancellation: what it is for.
            ops, values, reports, graphs: the session's.
            owe_check: notes that an op was not held against what the client believes of it; see `Verification`.
            fail: poisons what the command at a position should have made, for an error; returns the next position.
        """
        self._cancellation = cancellation
        self._ops = ops
        self._values = values
        self._reports = reports
        self._graphs = graphs
        self._owe_check = owe_check
        self._fail = fail
        self._handlers: Mapping[int, Handler] = {
            commands.FETCH: self._refuse,
            commands.DESCRIBE: self._refuse,
            commands.CALL: self._call,
            commands.DO: self._do,
            commands.REPLAY: self._replay,
        }

    def drop(self, stream: list[Any], position: int) -> int:
        """Drop the command at `position`, or run it if the client relies on it; return the next one's position.

        Raises:
            ProtocolError: it is malformed.
        """
        try:
            at = commands.op_at(stream, position)
            signature = self._ops.signatures.get(stream[at])
            if signature is None:
                handler = self._handlers.get(stream[position]) or self._handler(stream, position)
                return handler(self._values.slots, stream, position)
            if at + signature.width >= len(stream):
                raise ProtocolError(f"the stream ends in the middle of the command at {at}")
            if signature.reshapes and self._are_whole(signature.input_slots(stream, at)):
                # The client believes in the new look already, and nothing is computed.
                return self._run(stream, position)
            expected = None
            if at != position:
                expected = stream[position + 1]
                self._owe_check(signature, stream, position)
            made = self._cancellation.of_results(signature.name, at)
            changed = self._cancellation.of_changes(signature.name, at) if signature.written_slots(stream, at) else made
            self._values.cancel(signature, stream, at, made, changed, expected)
            return at + 1 + signature.width
        except ProtocolError:
            raise
        except (TypeError, ValueError, KeyError, IndexError, RecursionError, RuntimeError) as problem:
            raise ProtocolError(f"the command at {position} is malformed: {problem!r:.200}") from problem

    def _run(self, stream: list[object], position: int) -> int:
        try:
            return self._handler(stream, position)(self._values.slots, stream, position)
        except Exception as error:
            return self._fail(stream, position, error)

    def _handler(self, stream: list[Any], position: int) -> Handler:
        handler: Handler | None = self._ops.handlers[stream[position]]
        if handler is None:
            raise ProtocolError(f"command {stream[position]!r:.40} at {position} was never defined")
        return handler

    def _are_whole(self, slots: Sequence[int]) -> bool:
        return not any(isinstance(self._values.slots.get(slot), Failed) for slot in slots)

    def _refuse(self, slots: dict[int, object], stream: list[Any], position: int) -> int:
        number = stream[position]
        op = str(stream[position + 2]) if number == commands.CALL else ""
        self._reports.refuse(stream[position + 1], self._cancellation.of_question(op, position))
        return commands.end_of(stream, position)

    def _call(self, slots: dict[int, object], stream: list[object], position: int) -> int:
        if stream[position + 2] in _ABOUT_VALUES:
            return self._refuse(slots, stream, position)
        return self._handler(stream, position)(slots, stream, position)

    def _do(self, slots: dict[int, object], stream: list[Any], position: int) -> int:
        name, arguments = stream[position + 1 : position + 3]
        if name != "copy_to_device":
            return self._handler(stream, position)(slots, stream, position)
        slots[arguments[0]] = self._cancellation.of_results(name, position)
        return position + 3

    def _replay(self, slots: dict[int, object], stream: list[Any], position: int) -> int:
        self._cancellation.dropped += 1
        self._graphs.cancel(stream[position + 1], self._cancellation.of_changes("a captured graph", position))
        return position + 2
