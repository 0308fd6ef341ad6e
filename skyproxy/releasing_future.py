"""Futures that let go of whom they have told, and notice signals while somebody waits for them."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED
from types import TracebackType
from typing import TypeVar

from skyproxy import interrupts

T = TypeVar("T")
_DONE = (CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED)


class ReleasingFuture(Future[T]):
    """A `concurrent.futures.Future` that forgets its callbacks once they were called.

    They mostly know somebody who holds the future: a circle that would keep its result, however large, until Python's
    collector comes.
    """

    def _invoke_callbacks(self) -> None:
        super()._invoke_callbacks()  # type: ignore[misc]
        self._done_callbacks.clear()  # type: ignore[attr-defined]
        # Nobody adds to them any more: who comes now is called at once

    _trace: TracebackType | None = None
    """Frames of the exception when it was set: each time that it is raised begins with these."""

    def set_exception(self, exception: BaseException | None) -> None:
        """Set what `result` raises."""
        self._trace = exception.__traceback__ if exception is not None else None
        super().set_exception(exception)

    def result(self, timeout: float | None = None) -> T:
        """The result; waits for it, and notices signals that came just before the wait, too."""
        try:
            if timeout is None:
                self._wait_for_end()
            return super().result(timeout)
        except BaseException as error:
            if error is self._exception:
                error.with_traceback(self._trace)  # some classes let nobody set attributes
            raise
        finally:
            del self  # the error's traceback would hold this frame, the frame the future, and that the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The exception, None if there is a result; waits as `result` does."""
        if timeout is None:
            self._wait_for_end()
        return super().exception(timeout)

    def _wait_for_end(self) -> None:
        with self._condition:
            while self._state not in _DONE:
                self._condition.wait(interrupts.SIGNAL_LOOK_SECONDS)
