"""Futures: what calls on a pool become."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED
from typing import Any, NoReturn, SupportsIndex, TypeVar

from skyproxy.errors import ConfigurationError
from skyproxy.releasing_future import ReleasingFuture

T = TypeVar("T")
_CANCELLED = (CANCELLED, CANCELLED_AND_NOTIFIED)
_DONE = (*_CANCELLED, FINISHED)


class PoolFuture(ReleasingFuture[T]):
    """The result of a call, when it comes: to be waited for with `result()`, or awaited.

    It is a `concurrent.futures.Future`, so `wait` and `as_completed` know it. Cancelling it ends the call on the
    worker; what is in C code there ends later.

    Attributes:
        before_wait: raises where waiting, by the one who calls it, could never end.
        rank: where the call runs, or ran; None before it is sent.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.before_wait: Callable[[], object] | None = None
        self.rank: int | None = None
        self._stop: Callable[[], object] | None = None
        self._guard = threading.Lock()

    def on_cancel(self, stop: Callable[[], object]) -> None:
        """Set what ends the call from now on; called at once if the future has been cancelled already."""
        with self._guard:
            self._stop = stop
            cancelled = self.cancelled()
        if cancelled:
            stop()

    def cancel(self) -> bool:
        """Ends the call; False where it has ended already."""
        done = super().cancel()  # not below the guard: it calls back
        with self._guard:
            stop = self._stop
        if done and stop is not None:
            stop()
        return done

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self._state in _CANCELLED  # one look, for which no lock is needed

    def done(self) -> bool:
        """Return whether there is a result or an exception, or the future was cancelled."""
        return self._state in _DONE

    def settle(self, value: T) -> None:
        """Sets the result, unless somebody cancelled meanwhile."""
        try:
            self.set_result(value)
        except InvalidStateError:
            pass
        self._stop = self.before_wait = (
            None  # it refers to the call, and the call to us: what is over should not wait for the collector
        )

    def settle_alone(self, value: T) -> bool:
        """Set the result, if nobody asked to be called then: what others do is not for the calling thread.

        Returns:
            Whether it was set.
        """
        with self._condition:  # re-entrant, as callbacks are added below it
            if self._done_callbacks:  # type: ignore[attr-defined]
                return False
            self.settle(value)
            return True

    def fail(self, error: BaseException) -> None:
        """Sets the exception, unless somebody cancelled meanwhile."""
        error.with_traceback(None)  # the frames of our threads hold the call, and with it the error
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)
        self._stop = self.before_wait = None

    def follow(self, other: Future[T]) -> None:
        """Takes over what another future comes to."""
        self.on_cancel(other.cancel)
        other.add_done_callback(self._take_over)

    def _take_over(self, other: Future[T]) -> None:
        if other.cancelled():
            super().cancel()
        elif (error := other.exception()) is not None:
            self.fail(error)
        else:
            self.settle(other.result())

    def result(self, timeout: float | None = None) -> T:
        """The result; waits for it.

        Raises:
            ConfigurationError: it could never come while the caller waits.
            Exception: whatever the function raised.
        """
        try:
            if timeout is None:
                self.check_wait()
            return super().result(timeout)
        finally:
            del self  # the error's traceback would hold this frame, the frame the future, and that the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The exception, None if there is a result; waits for one of them. Raises as `result` does."""
        if timeout is None:
            self.check_wait()
        return super().exception(timeout)

    def check_wait(self) -> None:
        """Raise where the caller's wait could never end, as `result` does."""
        if self.before_wait is not None and not self.done():
            self.before_wait()

    def wait(self) -> T:
        """The result; an interrupt of this wait ends the call."""
        try:
            return self.result()
        except BaseException as error:
            if error is self._exception:
                error.with_traceback(self._trace)  # some classes let nobody set attributes
            elif not self.done():
                self.cancel()
            raise
        finally:
            del self  # as in `result`

    def __await__(self) -> Generator[Any, None, T]:
        self.check_wait()
        return self._wait_in_loop().__await__()

    async def _wait_in_loop(self) -> T:
        try:
            return await asyncio.wrap_future(self)  # cancelling the awaiting task cancels the call
        except TimeoutError:
            # asyncio makes another one of it, which knows neither of the worker nor of what else was said of it.
            error = self.exception() if self.done() and not self.cancelled() else None
            if error is None:
                raise
            try:
                raise error from error.__cause__
            finally:
                del self, error  # as in `result`

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ConfigurationError(
            f"the future of {self.name} belongs to this program, and cannot be sent to a worker. Pass its result: "
            "future.result(), or await it."
        )

    def __bool__(self) -> bool:
        raise TypeError(
            f"the future of {self.name} is neither true nor false. Python reads `a > pool > b` as `(a > pool) and "
            "(pool > b)`: write one comparison per line, or use parentheses. For its value use .result() or "
            "await; to see whether there is one, .done()."
        )


def gather_futures(futures: Iterable[PoolFuture[Any]], name: str) -> PoolFuture[tuple[Any, ...]]:
    """The results of several futures, in their order. The first failure is raised, and ends the others."""
    parts = list(futures)
    whole: PoolFuture[tuple[object, ...]] = PoolFuture(name)
    left = len(parts)
    lock = threading.Lock()

    def cancel_all() -> None:
        for part in parts:
            part.cancel()

    def ended(part: Future[object]) -> None:
        nonlocal left
        if part.cancelled():
            whole.cancel()
            return
        error = part.exception()
        if error is not None:
            whole.fail(error)
            cancel_all()
            return
        with lock:
            left -= 1
            last = left == 0
        if last:
            whole.settle(tuple(one.result() for one in parts))

    def check_waits() -> None:
        for part in parts:
            if part.before_wait is not None and not part.done():
                part.before_wait()

    whole.on_cancel(cancel_all)
    whole.before_wait = check_waits
    if not parts:
        whole.settle(())
    for part in parts:
        part.add_done_callback(ended)
    return whole
