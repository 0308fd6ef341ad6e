"""Questions that wait for an answer, and the threads that wait for them."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from skyproxy import interrupts
from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol.messages import Buffer, RequestId


class Waiter:
    """One expected answer: set once by the reading thread, waited for by any thread.

    A plain lock, because a `threading.Event` or a future costs several times as much as a round trip on loopback.
    """

    __slots__ = ("_lock", "buffers", "done", "error", "keep_alive", "value")

    def __init__(self, keep_alive: object = None) -> None:
        self.value: Any = None
        self.buffers: tuple[Buffer, ...] = ()
        self.error: BaseException | None = None
        self.done = False
        self.keep_alive = keep_alive
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self, value: object, buffers: tuple[Buffer, ...] = ()) -> None:
        if not self.done:
            self.value, self.buffers, self.done = value, buffers, True
            self._lock.release()

    def fail(self, error: BaseException) -> None:
        if not self.done:
            self.error, self.done = error, True
            self._lock.release()

    def done_within(self, seconds: float) -> bool:
        """Return whether the answer comes within so many seconds; interruptible by Ctrl-C."""
        if not self.done and self._lock.acquire(timeout=seconds):
            self._lock.release()
        return self.done

    def wait(self) -> Any:
        """The answer. Interruptible by Ctrl-C; a lost session fails every waiter, so this always ends.

        Raises:
            BaseException: what `fail` was given.
        """
        if not self.done:
            while not self._lock.acquire(timeout=interrupts.SIGNAL_LOOK_SECONDS):
                pass
            self._lock.release()  # several threads may wait for one answer
        if self.error is not None:
            raise _for_one(self.error)
        return self.value


def _for_one(error: BaseException) -> BaseException:
    """Return an error for one of those whom it is raised for.

    What a session ended with lives as long as the session: with the traceback of somebody who waited it would hold the
    variables of all of his callers, and views among them hold tensors of the session where no collector finds them.
    """
    return error.again() if isinstance(error, SessionLostError) else error.with_traceback(None)


class Waiters:
    """The open questions of a session, by number.

    Attributes:
        may_repeat: whether a worker may answer again what was answered, as one does that takes over from another.
    """

    def __init__(self) -> None:
        self.may_repeat = False
        self._abandoned: set[int] = set()
        self._open: dict[int, Waiter] = {}
        self._numbers = itertools.count(1)
        self._ended: BaseException | None = None

    def next_number(self) -> int:
        """A number that no request of this session has; large uploads are named by one too."""
        return next(self._numbers)

    def was_given(self, number: int) -> bool:
        """Return whether a question, or a transfer, has this number."""
        return 0 < number < next(self._numbers)

    def open(self, keep_alive: object = None) -> tuple[RequestId, Waiter]:
        """A fresh number and its waiter.

        Raises:
            BaseException: what `end` was given, if the session is over.
        """
        number = RequestId(next(self._numbers))
        waiter = Waiter(keep_alive)
        self._open[number] = waiter
        if self._ended is not None:  # checked after the insertion, so that `end` cannot miss this waiter
            self._open.pop(number, None)
            raise _for_one(self._ended)
        return number, waiter

    def open_for(self, waiter: Waiter) -> RequestId:
        """Return a fresh number for a waiter; once the session is over, nothing will set it."""
        number = RequestId(next(self._numbers))
        self._open[number] = waiter
        return number

    def open_numbers(self) -> frozenset[int]:
        """Return the numbers of the questions that are not answered."""
        return frozenset(self._open)

    def take(self, number: int) -> Waiter | None:
        """The waiter of an answer that came; None if nobody waits for it any more."""
        return self._open.pop(number, None)

    def take_answered(self, number: int) -> Waiter | None:
        """The same of a question that has one answer: whose answer bears another number would be waited for forever.

        Raises:
            ProtocolError: nobody has asked this, or it was answered before.
        """
        waiter = self._open.pop(number, None)
        if waiter is None and self._ended is None:
            if not self.was_given(number) or not (number in self._abandoned or self.may_repeat):
                raise ProtocolError(f"the worker answered question {number}, which waits for no answer")
            self._abandoned.discard(number)
        return waiter

    def abandon(self, number: int) -> None:
        """Nobody waits for this answer any more; it is dropped when it comes."""
        self._abandoned.add(number)
        self._open.pop(number, None)

    def end(self, error: BaseException) -> None:
        """Fails every open and every later question."""
        self._ended = error
        while self._open:
            try:
                _, waiter = self._open.popitem()
            except KeyError:
                return
            waiter.fail(error)

    def __len__(self) -> int:
        return len(self._open)
