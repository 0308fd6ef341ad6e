"""A call on its way through a pool, and the stream that it may give."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
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
    from skyproxy.functions.runner import SentContext
    from skyproxy.pools.elastic_group import ElasticGroup
    from skyproxy.pools.ranks import RankGroup

logger = logging.getLogger("skyproxy")

_PATIENCE_SECONDS = 10.0
"""The time that a call waits for processes with streams which nobody reads, until that is said."""


class PoolTask:
    """A call on its way through a pool, from its caller to the process that runs it.

    Attributes:
        rank: where it runs, or must run; None as long as any process will do.
        future: what its caller holds.
        retries: how often it may still be made again.
        keeps: what must live until the call has ended.
    """

    def __init__(self, call: PendingCompute[object], payload: Payload, rank: int | None, retry: Retry) -> None:
        self.name = name = call.name
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
        self.future: PoolFuture[object] = PoolFuture(name)
        self.running: Call | None = None
        self.keeps: object = None
        self.span = telemetry.begin("skyproxy.pool_call", function=name)
        if self.span is not None:
            self.future.add_done_callback(partial(_end_span, self.span))


def _end_span(span: object, future: Future[object]) -> None:
    error = CancelledError() if future.cancelled() else future.exception()
    telemetry.end(span, type(error).__name__ if error is not None else "")


def note_lost_rank(name: str, rank: int | None, ranks: int, again: bool, error: SessionLostError) -> None:
    """Tell an error on which of so many ranks its call was running, and how the call could be made again."""
    error.add_note(f"{name} was running on rank {rank} of {ranks}." + again * " Retry(...) would run it again.")


class SentContexts:
    """Contexts of the calls to each rank, pickled once for as long as they stay the same."""

    def __init__(self, group: RankGroup | ElasticGroup, most: int) -> None:
        self._group = group
        self._most = most
        self._known: dict[int, tuple[dict[str, object], SentContext]] = {}

    def of_rank(self, rank: int) -> SentContext:
        """Return the context of calls to a rank."""
        context = self._group.context(rank)
        known = self._known.get(rank)
        if known is None or known[0] is not context:
            from skyproxy.functions.runner import SentContext  # late, for it loads torch

            if len(self._known) > self._most:
                self._known.clear()  # of ranks that have gone, most of them
            known = self._known[rank] = context, SentContext(context)
        return known[1]


class StreamItems:
    """An iterator that says when nobody wants more of it: at its end, when it is closed, or when it is dropped.

    Attributes:
        reader: who took the last item, and has not asked for the next one.
        taken: the number of items that were taken.
    """

    def __init__(
        self,
        items: Iterator[object],
        end: Callable[[], None],
        explain: Callable[[SessionLostError], SessionLostError] = lambda error: error,
        keeps: object = None,
    ) -> None:
        self._items = items
        self._end: Callable[[], None] | None = end
        self._explain = explain
        self._keeps = keeps
        self.reader: object = None
        self.taken = 0

    def __iter__(self) -> StreamItems:
        return self

    def __next__(self) -> object:
        if self._end is None:
            raise StopIteration
        self.reader = None
        try:
            item = next(self._items)
        except SessionLostError as error:
            self.close()
            explained = self._explain(error)
            try:
                raise explained from explained.__cause__
            finally:
                del explained  # its traceback holds this frame
        except BaseException:
            self.close()
            raise
        self.reader = current_caller()
        self.taken += 1
        return item

    @property
    def has_ended(self) -> bool:
        """True if nobody wants more of it."""
        return self._end is None

    def let_go(self) -> Callable[[], None]:
        """Return what ends the call, which does not end any more where this is dropped. Reading it goes on."""
        end = self._end or _do_nothing
        if self._end is not None:
            self._end = _do_nothing
        return end

    def close(self) -> None:
        """Ends the call; idempotent."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def __del__(self) -> None:
        self.close()


def _do_nothing() -> None:
    pass


def warn_if_nobody_reads(task: PoolTask, streams: list[StreamItems]) -> None:
    """Say so where a call waits for processes that streams hold, and nobody takes anything of these for a while.

    It is no error: another thread may be about to read them.
    """
    before = [(weakref.ref(stream), stream.taken) for stream in streams]

    def look() -> None:
        left = [(stream(), taken) for stream, taken in before]
        if task.running is not None or task.future.done():
            return
        if all(stream is not None and not stream.has_ended and stream.taken == taken for stream, taken in left):
            logger.warning(
                "skyproxy: %s waits for a process, and all of them are held by streams of which nobody has taken an "
                "item for %g s. Take their items, list(...), or drop them; or let a process run more calls at a time, "
                "Compute(concurrency=...).",
                task.name,
                _PATIENCE_SECONDS,
            )

    timer = threading.Timer(_PATIENCE_SECONDS, look)
    timer.daemon = True
    timer.start()


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


def endless_wait(task: PoolTask, ranks: list[int]) -> ConfigurationError:
    """Return the error for a call that waits for these ranks, or the pool's only process, which its waiter holds."""
    where = f"rank {', '.join(map(str, ranks))}" if ranks else "the pool's only process"
    return ConfigurationError(
        f"{task.name} would wait forever: {where} is busy with a stream that this program reads, and that goes on only "
        "when this wait is over. Take its items first: list(...); or let a process run more calls at a time, "
        "Compute(concurrency=2), or the pool have more of them."
    )
