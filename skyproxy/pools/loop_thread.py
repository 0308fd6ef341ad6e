"""An event loop on a thread of its own: providers are asynchronous, their users need not be."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class LoopThread:
    """A loop that runs coroutines for other threads and, unlike `run_coroutine_threadsafe`, waits for their
    clean-up.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="skyproxy-pools", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """The result of a coroutine. An interrupt cancels it, and is raised when the coroutine has cleaned up.

        A second interrupt does not wait for that.
        """
        running = _Running(self._loop, coroutine)
        try:
            running.begin()
            return running.ended.result()
        except BaseException:
            if not running.ended.done():
                running.cancel()
                running.wait()
            raise

    def finish(self, coroutine: Coroutine[object, object, T]) -> T:
        """The same for a clean-up: an interrupt does not cancel it, and is raised when it has ended; a second one is
        raised at once.
        """
        running = _Running(self._loop, coroutine)
        try:
            running.begin()
            return running.ended.result()
        except BaseException:
            running.begin()  # an interrupt may have struck before it was on the loop
            running.wait()
            raise

    def post(self, callback: Callable[[], object]) -> None:
        """Calls `callback` on the loop, soon; it must be short. Safe in finalizers."""
        self._loop.call_soon_threadsafe(callback)

    async def run_async(self, coroutine: Coroutine[object, object, T]) -> T:
        """The same, without blocking the caller's loop; cancelling the caller cancels it."""
        running = _Running(self._loop, coroutine)
        running.begin()
        ended = asyncio.wrap_future(running.ended)
        ended.add_done_callback(_take_note)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait([ended])
            raise


def _take_note(ended: asyncio.Future[T]) -> None:
    """Retrieve an error for which nobody waits any more: else asyncio logs that nobody did."""
    if not ended.cancelled():
        ended.exception()


class _Running(Generic[T]):
    """A coroutine on the loop.

    Attributes:
        ended: its outcome; set when it has really ended, and never cancelled by anybody else.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[object, object, T]) -> None:
        self.ended: Future[T] = Future()
        self._loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """Put it on the loop, unless it is there; an interrupt in here leaves that open."""
        self._loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        if self._task is not None:
            return
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.ended.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(task.result())

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.ended.done():  # it never came to the loop, which takes everything in order
            self._coroutine.close()
            self.ended.set_exception(asyncio.CancelledError())

    def wait(self) -> None:
        self.ended.exception()


_lock = threading.Lock()
_current: tuple[int, LoopThread] | None = None


def loop_thread() -> LoopThread:
    """The one of this process; a forked child has none of its parent's threads, and gets its own."""
    global _current
    with _lock:
        if _current is None or _current[0] != os.getpid():
            _current = (os.getpid(), LoopThread())
        return _current[1]
