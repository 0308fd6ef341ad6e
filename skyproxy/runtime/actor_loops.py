"""The event loop of an actor: all its async methods run on it, so locks and clients of a loop can be attributes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import TypeVar

from skyproxy.errors import ActorDiedError
from skyproxy.runtime.cuda_streams import carry_streams
from skyproxy.runtime.thread_exceptions import raise_in

T = TypeVar("T")
_PATIENCE_SECONDS = 0.5
"""The time that a cancelled method has to end at an `await` before it is interrupted where it is."""


class LoopInterrupt(BaseException):
    """Raised inside an async method that was cancelled and does not come to an `await`."""


class ActorLoop:
    """One event loop on a thread of its own, from the first async call on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = False

    async def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the actor's loop, from another one; in the context of the caller.

        Raises:
            ActorDiedError: the actor has ended.
            Exception: whatever the coroutine raises.
        """
        try:
            loop = self._running_loop()
        except BaseException:
            coroutine.close()
            raise
        tasks: list[asyncio.Task[T]] = []
        use_streams = carry_streams()

        async def carry(context: contextvars.Context) -> T:
            use_streams()  # all callers are of one session, and so have the same
            tasks.append(asyncio.create_task(coroutine, context=context))
            return await tasks[0]

        future = asyncio.run_coroutine_threadsafe(carry(contextvars.copy_context()), loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._interrupt_later(future, tasks)
            raise

    async def items(self, generator: AsyncGenerator[T, object]) -> AsyncIterator[T]:
        """Yield what an async generator yields that runs on the actor's loop."""

        async def following() -> T:
            return await generator.__anext__()

        async def closing() -> None:
            await generator.aclose()

        try:
            while True:
                try:
                    item = await self.run(following())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            with contextlib.suppress(ActorDiedError):
                await self.run(closing())

    def stop(self) -> None:
        """Cancel what runs on the loop and end its thread, without waiting for that."""
        with self._lock:
            self._ended = True
            loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(loop.stop)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._ended:
                raise ActorDiedError("the actor has ended, and its event loop with it")
            if self._thread is None or not self._thread.is_alive() or self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_serve, args=(self._loop,), name="skyproxy-actor-loop", daemon=True)
                contextvars.Context().run(thread.start)  # or it would hold the call that came first
                self._thread = thread
            return self._loop

    def _interrupt_later(self, future: concurrent.futures.Future[T], tasks: list[asyncio.Task[T]]) -> None:
        """End what holds the loop although it was cancelled: a loop in Python, with no `await` in it."""

        def interrupt() -> None:
            loop, thread = self._loop, self._thread
            if loop is None or thread is None or thread.ident is None or not tasks or tasks[0].done():
                return
            if asyncio.current_task(loop) is tasks[0]:
                raise_in(thread.ident, LoopInterrupt, lambda: thread.is_alive() and not tasks[0].done())

        timer = threading.Timer(_PATIENCE_SECONDS, interrupt)
        timer.daemon = True
        timer.start()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_PATIENCE_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
