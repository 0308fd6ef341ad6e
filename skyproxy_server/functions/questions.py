"""Questions of a running function to its caller: calls of actors elsewhere, whose handles it was given."""

from __future__ import annotations

import itertools
from typing import Any

from skyproxy.payloads.pickling import Pickled
from skyproxy_server.functions.events import Events


class CallQuestions:
    """Those of one call."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._numbers = itertools.count(1)
        self._answers: dict[int, bytes | None] = {}

    def ask(self, words: dict[str, Any], content: bytes) -> int:
        """Have the caller asked; return the number of the answer.

        Args:
            words: which method of which actor.
            content: its arguments, which the caller does not read.

        Raises:
            InterruptedError: the call has ended.
        """
        with self._events.lock:
            if self._events.ended:
                raise InterruptedError("the call of this function has ended, and nobody answers any more")
            number = next(self._numbers)
            self._answers[number] = None
            self._events.add("ask", {**words, "number": number}, Pickled([content], [], [], []))
            return number

    def answer(self, number: int, content: bytes) -> None:
        """The caller has answered; what nobody asked for is dropped."""
        with self._events.lock:
            if number in self._answers:
                self._answers[number] = content
                self._events.changed.notify_all()

    def has_answer(self, number: int) -> bool:
        """Return whether an answer is there."""
        return self._answers.get(number) is not None

    def take(self, number: int) -> bytes | None:
        """Return an answer, and forget it; None where none came."""
        return self._answers.pop(number, None)
