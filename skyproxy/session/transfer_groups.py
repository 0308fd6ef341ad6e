"""Transfers of one thread that overlap, and share a progress bar."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from skyproxy.session.progress import TransferWatch
from skyproxy.session.waiters import Waiter

_WAITING_BYTES = 64 << 20
"""The bytes that a group of uploads may hold in memory before it waits for the first of them."""


class _Moving(Protocol):
    """An upload: the bytes, how many of them have left, and its end."""

    view: memoryview
    sent_bytes: int
    done: Waiter


class _Giver(Protocol):
    """The uploads of a session."""

    def give_up(self, job: Any) -> None:
        """Send no more of one."""


class TransferGroup:
    """Transfers of one thread that overlap and share a progress bar; see `together`.

    Attributes:
        expected_bytes: all that will move, as far as is known.
    """

    def __init__(self, text: str, expected_bytes: int, shown: bool) -> None:
        self.expected_bytes = expected_bytes
        self._watch = TransferWatch(text, self._figures, shown)
        self._pending: deque[tuple[_Giver, _Moving]] = deque()
        self._pending_bytes = 0
        self._done_bytes = 0
        self._arrived_bytes: Callable[[], int] = lambda: 0

    def _figures(self) -> tuple[int, int]:
        done = self._done_bytes + self._arrived_bytes() + sum(job.sent_bytes for _, job in self._pending)
        return done, max(self.expected_bytes, self._done_bytes + self._pending_bytes)

    def add(self, uploads: _Giver, job: _Moving) -> None:
        """Takes an upload that is about to begin. Waits for earlier ones, but for the last, while they hold much."""
        size = len(job.view)
        while len(self._pending) > 1 and self._pending_bytes + size > _WAITING_BYTES:
            self._finish_first()
        self._pending_bytes += size
        self._pending.append((uploads, job))

    def _finish_first(self) -> None:
        _, job = self._pending[0]
        self._watch.wait(job.done)
        self._pending.popleft()
        self._pending_bytes -= len(job.view)
        self._done_bytes += len(job.view)

    def wait_for_download(self, waiter: Waiter, size: int, missing_bytes: Callable[[], int]) -> object:
        """The answer of a waiter whose bytes arrive."""
        self._arrived_bytes = lambda: size - missing_bytes()
        try:
            return self._watch.wait(waiter)
        finally:
            self._arrived_bytes = lambda: 0
            self._done_bytes += size

    def finish(self) -> None:
        """Waits until the bytes of all uploads were read."""
        while self._pending:
            self._finish_first()

    def give_up(self) -> None:
        """Cancels every upload that is not through."""
        for uploads, job in self._pending:
            uploads.give_up(job)

    def close(self) -> None:
        self._watch.close()


class _Current(threading.local):
    group: TransferGroup | None = None


_current = _Current()


def current_group() -> TransferGroup | None:
    """Return the group that this thread's uploads belong to."""
    return _current.group


@contextlib.contextmanager
def grouped_upload(text: str, expected_bytes: int, shown: bool) -> Iterator[TransferGroup]:
    """Uploads that this thread begins inside the block do not wait for one another; all are waited for at its end.

    Where the block ends by an exception, Ctrl-C included, those that are not complete are cancelled.

    Args:
        text: for the progress bar.
        expected_bytes: how many bytes will move, for that too.
        shown: whether there may be one.
    """
    outer = _current.group
    group = TransferGroup(text, expected_bytes, shown)
    try:
        _current.group = group
        yield group
        group.finish()
    except BaseException:
        group.give_up()
        raise
    finally:
        _current.group = outer
        group.close()


def wait_for_download(waiter: Waiter, size: int, missing_bytes: Callable[[], int], shown: bool) -> object:
    """The answer of a waiter whose bytes arrive on the bulk connection, with a progress bar if that takes long."""
    if _current.group is not None:
        return _current.group.wait_for_download(waiter, size, missing_bytes)
    with TransferWatch("download", lambda: (size - missing_bytes(), size), shown) as watch:
        return watch.wait(waiter)
