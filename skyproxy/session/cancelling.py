"""Gives up what a worker has not begun: on an interrupt that ends a wait, or by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from skyproxy.interrupts import shielded
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Buffer, CancelOperations, Message
from skyproxy.session.failures import FailureReports
from skyproxy.session.recorder import Recorder
from skyproxy.session.waiters import Waiter, Waiters


class _Mark(Waiter):
    """The end of one cancellation, whose answer nobody waits for: it is dealt with by the thread that reads it."""

    __slots__ = ("on_answer",)

    def __init__(self, on_answer: Callable[[object], object]) -> None:
        super().__init__()
        self.on_answer = on_answer

    def set(self, value: object, buffers: tuple[Buffer, ...] = ()) -> None:
        self.on_answer(value)
        super().set(value, buffers)


class Cancelling:
    """The cancellations of one session.

    A cancellation is two things: a mark in the stream, behind all that was recorded, and a message past the stream that
    tells the worker to drop what it has not begun, up to the mark. Nothing here waits, or can fail halfway: a message
    that is lost with its connection is sent again on the next one.

    Attributes:
        post: leaves a message for the worker's bulk connection; None for a worker that cannot cancel.
        dropped: operations that were dropped so far, as far as the worker has told.
    """

    def __init__(self, recorder: Recorder, waiters: Waiters, failures: FailureReports) -> None:
        self.post: Callable[[Message], object] | None = None
        self.dropped = 0
        self._recorder = recorder
        self._waiters = waiters
        self._failures = failures
        self._numbers = itertools.count(1)
        self._open: list[int] = []

    @shielded
    def cancel(self) -> bool:
        """Have the worker drop what it has not begun of all that was recorded; return False if there is nothing."""
        recorder = self._recorder
        if self.post is None or (recorder.is_all_executed and not recorder.unsent):
            return False
        number = next(self._numbers)
        mark = _Mark(lambda report: self._on_end(number, report))
        request = self._waiters.open_for(mark)
        self._open.append(number)
        recorder.keep_acked(kept=True)
        # The numbers that the client believes to be on the worker depend on operations that may be dropped.
        recorder.hidden_writes += 1
        recorder.emit((commands.CALL, request, "end_cancellation", [number]))
        self.post(CancelOperations(number))
        return True

    def send_again(self, post: Callable[[Message], object]) -> None:
        """Repeat what may be lost with the bulk connection that broke; `post` leaves it on the one that is new."""
        if self._open:
            post(CancelOperations(self._open[-1]))

    def _on_end(self, number: int, report: object) -> None:
        """Note the lines of what was dropped, while they are known. Called by the thread that reads."""
        if isinstance(report, dict):
            places = report.get("places")
            for place in places if isinstance(places, list) else []:
                if isinstance(place, list) and len(place) == 2:
                    self._failures.remember_line(*place)
            dropped = report.get("dropped")
            self.dropped += dropped if isinstance(dropped, int) else 0
        self._open.remove(number)
        if not self._open:
            self._recorder.keep_acked(kept=False)
