"""Futures that let go of whom they have told, and notice signals and forks while somebody waits for them."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED
from types import TracebackType
from typing import TypeVar

from skyproxy import interrupts
from skyproxy.errors import ConfigurationError

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

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    def cancel(self) -> bool:
        """Cancel it, and tell those who wait for several futures: nobody takes it from a queue, who would do so."""
        is_cancelled = super().cancel()
        if self._state == CANCELLED:
            with self._condition:
                if self._state == CANCELLED:
                    self.set_running_or_notify_cancel()
        return is_cancelled

    def set_running_or_notify_cancel(self) -> bool:
        """Return whether whoever is about to compute the result should; not where the future was cancelled."""
        with self._condition:
            # `cancel` has told everybody by now, which the base class takes for a second call of this.
            return self._state != CANCELLED_AND_NOTIFIED and super().set_running_or_notify_cancel()

    _trace: TracebackType | None = None
    """Frames of the exception when it was set: each time that it is raised begins with these."""

    def set_exception(self, exception: BaseException | None) -> None:
        """Set what `result` raises."""
        self._trace = exception.__traceback__ if exception is not None else None
        super().set_exception(exception)

    def result(self, timeout: float | None = None) -> T:
        """The result; waits for it, and notices signals that came just before the wait, too.

        Raises:
            ConfigurationError: there is none yet, and this process was forked from the one that gets it.
        """
        try:
            self._check_process()
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
        self._check_process()
        if timeout is None:
            self._wait_for_end()
        return super().exception(timeout)

    async def wait_in_loop(self) -> None:
        """Wait until it is done, without blocking the event loop; whoever cancels this wait leaves the future alone.

        Raises:
            asyncio.CancelledError: the future was cancelled.
        """
        self._check_process()
        news: Future[None] = Future()
        self.add_done_callback(lambda _: news.set_result(None) if news.set_running_or_notify_cancel() else None)
        await asyncio.wrap_future(news)
        if self.cancelled():
            raise asyncio.CancelledError

    def _check_process(self) -> None:
        if self._process != os.getpid() and self._state not in _DONE:
            raise ConfigurationError(
                "this process was forked from the one that made the call, and only that one gets its result. Make the "
                "call here, or wait for it before the fork."
            )

    def _wait_for_end(self) -> None:
        with self._condition:
            while self._state not in _DONE:
                self._condition.wait(interrupts.SIGNAL_LOOK_SECONDS)
