"""Times at which a session's messages left and came, kept while somebody wants to know; see `skyproxy.profiling`."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple


class Span(NamedTuple):
    """Something that took time on this side.

    Attributes:
        name: what it was: "send", "wait", "upload", "download".
        key: what it belongs to: a batch's number, a word for what was waited for, a transfer's number.
        start_ns, end_ns: on the clock of `time.time_ns`, which is also the profiler's.
        thread: the system's number of the thread.
        byte_count: how much was moved, for transfers.
    """

    name: str
    key: int | str
    start_ns: int
    end_ns: int
    thread: int
    byte_count: int = 0


class SessionTrace:
    """The events on the client's side of one session. Threads only ever append."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.replies: list[tuple[int, int]] = []
        """Requests by number, and when their answers came."""
        self._begun: dict[int, int] = {}

    def add(self, name: str, key: int | str, start_ns: int, byte_count: int = 0) -> None:
        """Takes note of something that ends now, on the calling thread."""
        self.spans.append(Span(name, key, start_ns, time.time_ns(), threading.get_native_id(), byte_count))

    def replied(self, request: int) -> None:
        """The answer to a request came."""
        self.replies.append((request, time.time_ns()))

    def download_begins(self, number: int) -> None:
        self._begun[number] = time.time_ns()

    def download_ends(self, number: int, byte_count: int) -> None:
        start_ns = self._begun.pop(number, None)
        if start_ns is not None:
            self.add("download", number, start_ns, byte_count)
