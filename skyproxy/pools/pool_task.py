"""A call on its way through a pool, and the stream that it may give."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING

from skyproxy import telemetry
from skyproxy.errors import ConfigurationError, SessionLostError
from skyproxy.pools.call_options import Retry, is_stream
from skyproxy.pools.futures import PoolFuture
from skyproxy.pools.pending import PendingCompute
from skyproxy.pools.running import not_running_text

if TYPE_CHECKING:
    from skyproxy.functions import Payload
    from skyproxy.functions.call import Call


class PoolTask:
    """A call on its way through a pool, from its caller to the process that runs it.

    Attributes:
        rank: where it runs, or must run; None as long as any process will do.
        future: what its caller holds.
        retries: how often it may still be made again.
        keeps: what must live until the call has ended.
    """

    def __init__(self, call: PendingCompute[object], payload: Payload, rank: int | None, retry: Retry) -> None:
        self.name = call.name
        self.payload = payload
        self.timeout_seconds = call.options.timeout_seconds
        self.results = "remote" if call.options.remote else "value"
        self.isolate = bool(call.options.isolate)
        self.debug = call.options.debug
        self.is_stream = is_stream(call.function)
        self.pinned = rank
        self.rank = rank
        self.retry = retry
        self.tries = 0
        self.future: PoolFuture[object] = PoolFuture(call.name)
        self.running: Call | None = None
        self.keeps: object = None
        self.span = telemetry.begin("skyproxy.pool_call", function=call.name)
        if self.span is not None:
            self.future.add_done_callback(partial(_end_span, self.span))


def _end_span(span: object, future: Future[object]) -> None:
    error = CancelledError() if future.cancelled() else future.exception()
    telemetry.end(span, type(error).__name__ if error is not None else "")


class StreamItems:
    """An iterator that says when nobody wants more of it: at its end, when it is closed, or when it is dropped.

    Attributes:
        reader: who took the last item, and has not asked for the next one.
    """

    def __init__(self, items: Iterator[object], end: Callable[[], None]) -> None:
        self._items = items
        self._end: Callable[[], None] | None = end
        self.reader: object = None

    def __iter__(self) -> StreamItems:
        return self

    def __next__(self) -> object:
        if self._end is None:
            raise StopIteration
        self.reader = None
        try:
            item = next(self._items)
        except BaseException:
            self.close()
            raise
        self.reader = current_caller()
        return item

    @property
    def has_ended(self) -> bool:
        """True if nobody wants more of it."""
        return self._end is None

    def close(self) -> None:
        """Ends the call; idempotent."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def __del__(self) -> None:
        self.close()


def current_caller() -> object:
    """The running task, or the thread where there is none."""
    try:
        running = asyncio.current_task()
    except RuntimeError:
        running = None
    return threading.get_ident() if running is None else running


def closed_error() -> ConfigurationError:
    """The error for calls of a pool that is closed."""
    return ConfigurationError(not_running_text("Calls are made inside its `with` block."))


def lost_rank(task: PoolTask) -> SessionLostError:
    """The error for a call that only one process could run, which is gone."""
    return SessionLostError(f"rank {task.pinned} was lost while {task.name} waited for it.")
