"""The scheduler of a pool: it decides which call runs on which process, and when."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from skyproxy import telemetry
from skyproxy.errors import ConfigurationError, LimitExceededError, SessionLostError
from skyproxy.pools.call_options import Retry
from skyproxy.pools.futures import PoolFuture
from skyproxy.pools.job import Job, StreamItems, whoever_calls
from skyproxy.pools.output_view import TaskOutput
from skyproxy.pools.pending import PendingCompute
from skyproxy.pools.tasks import as_task
from skyproxy.settings import SETTINGS

if TYPE_CHECKING:
    from skyproxy.functions import Payload
    from skyproxy.functions.call import Call
    from skyproxy.pools.ranks import RankGroup

logger = logging.getLogger("skyproxy")


class Scheduler:
    """The queue of a pool: single calls wait for a free process, broadcasts for each other.

    Every process runs `concurrency` single calls at a time. A broadcast goes to all processes at once, beside whatever
    runs there; the next one begins when it has ended, for two programs that each talk among all ranks must not be
    mixed.
    """

    def __init__(
        self,
        group: RankGroup,
        *,
        concurrency: int,
        retry: Retry | None,
        max_queued_calls: int = SETTINGS.max_queued_calls,
    ) -> None:
        self._group = group
        self._concurrency = concurrency
        self._retry = retry or Retry(0)
        self._max_queued_calls = max_queued_calls
        self._world_size = len(group.nodes)
        self._lock = threading.RLock()  # a stream can be dropped, and say so, wherever the collector runs
        self._work = threading.Condition(self._lock)
        self._busy = [0] * self._world_size
        self._next_rank = 0
        self._queued: deque[Job] = deque()
        self._pinned: list[deque[Job]] = [deque() for _ in range(self._world_size)]
        self._waiting = 0
        self._running: set[Job] = set()
        self._streams: list[weakref.WeakSet[StreamItems]] = [weakref.WeakSet() for _ in range(self._world_size)]
        """Those that hold a process, by rank."""
        self._broadcasts: deque[tuple[PoolFuture[list[object]], Callable[[], None]]] = deque()
        self._broadcasting = False
        self._closed = False
        self._feeder: threading.Thread | None = None
        # Results are unpickled here, and what user code does then cannot hold up the connection.
        self._result_executor = ThreadPoolExecutor(min(8, self._world_size), "skyproxy-results")

    @property
    def is_open(self) -> bool:
        """True if calls can be made."""
        return not self._closed

    def load(self) -> tuple[list[int], int]:
        """Return how many single calls each process runs, by rank, and how many calls and broadcasts wait."""
        with self._lock:
            return list(self._busy), self._waiting + len(self._broadcasts)

    # --- one process --------------------------------------------------------------------------------------------------

    def submit(self, call: PendingCompute[Any]) -> PoolFuture[Any]:
        """Makes a call as soon as a process is free.

        Raises:
            ConfigurationError: it cannot be sent, or is to run where it cannot.
            LimitExceededError: too many calls wait already.
        """
        actor = getattr(call.function, "__skyproxy_calls__", self)
        if actor is not self:
            return self._submit_to(actor, call)
        job = self._job(call)
        with self._lock:
            self._check_open()
            if self._waiting >= self._max_queued_calls:
                raise LimitExceededError(
                    f"{self._waiting} calls are already waiting in this pool. Wait for some of them, use pool.map, or "
                    "raise SKYPROXY_MAX_QUEUED_CALLS."
                )
            job.future.on_cancel(lambda: self._cancel(job))
            job.future.before_wait = lambda: self._check_wait(job)
            chosen = self._claim(job)
            if not chosen:
                self._enqueue(job)
        if chosen:
            self._start(job)
        return job.future

    def _submit_to(self, actor: Any, call: PendingCompute[object]) -> PoolFuture[object]:
        """A call of an actor's method, which waits in the actor's own queue."""
        if actor.place.group is not self._group:
            raise ConfigurationError(f"{call.name} is a method of the {actor.place}, which lives in another pool.")
        future: PoolFuture[object] = actor.submit(call)
        return future

    def _job(self, call: PendingCompute[object]) -> Job:
        from skyproxy.functions import Payload

        options = call.options
        rank = options.rank
        if rank is not None and rank >= self._world_size:
            raise ConfigurationError(
                f"{call.name} is to run on rank {rank}, and this pool has {self._world_size}: 0 to "
                f"{self._world_size - 1}."
            )
        payload = Payload.of(self._group.task(as_task(call.function)), call.args, call.kwargs)
        if payload.session is not None:
            home = next((r for r, node in enumerate(self._group.nodes) if node._session is payload.session), None)
            if home is None or rank not in (None, home):
                where = "no process of this pool" if home is None else f"rank {home}, not on rank {rank}"
                raise ConfigurationError(
                    f"the arguments of {call.name} hold remote tensors that live on {where}. Move them first: "
                    "x.to(pool.nodes[k].device(...)), or pass x.cpu()."
                )
            rank = home
        return Job(call, payload, rank, options.retry or self._retry)

    def _claim(self, job: Job) -> bool:
        """Return whether the job has a process now; with the lock held."""
        if job.pinned is not None:
            if self._pinned[job.pinned] and not job.tries:
                return False  # others came first
            candidates: Sequence[int] = (job.pinned,)
        else:
            if self._queued and not job.tries:
                return False
            # In turn, among those that do least.
            candidates = [(self._next_rank + step) % self._world_size for step in range(self._world_size)]
        best = min(candidates, key=self._busy.__getitem__)
        if self._busy[best] >= self._concurrency:
            return False
        self._busy[best] += 1
        self._next_rank = (best + 1) % self._world_size
        job.rank = best
        self._running.add(job)
        return True

    def _check_wait(self, job: Job) -> None:
        """Raise where a job waits for processes that only its own waiter can set free.

        Raises:
            ConfigurationError: all that could run it are held by streams which the caller is in the midst of.
        """
        reader = whoever_calls()
        with self._lock:
            if job in self._running or job.future.done():
                return
            ranks = range(self._world_size) if job.pinned is None else (job.pinned,)
            for rank in ranks:
                if sum(stream.reader == reader for stream in self._streams[rank]) < self._concurrency:
                    return
        where = "the pool's only process" if self._world_size == 1 else f"rank {', '.join(map(str, ranks))}"
        job.future.cancel()
        raise ConfigurationError(
            f"{job.name} would wait forever: {where} is busy with a stream that this program reads, and that goes on "
            "only when this wait is over. Take its items first: list(...); or let a process run more calls at "
            "a time, Compute(concurrency=2), or the pool have more of them."
        )

    def _enqueue(self, job: Job, first: bool = False) -> None:
        queue = self._queued if job.pinned is None else self._pinned[job.pinned]
        (queue.appendleft if first else queue.append)(job)
        self._waiting += 1
        self._wake()

    def _wake(self) -> None:
        """Has the feeder look again; with the lock held."""
        if self._feeder is None:
            self._feeder = threading.Thread(target=self._feed, name="skyproxy-feeder", daemon=True)
            self._feeder.start()
        self._work.notify()

    def _feed(self) -> None:
        """Starts queued calls where processes become free, on a thread of its own: starting may wait for a
        connection.
        """
        while True:
            with self._work:
                job = self._next_job()
                begin = None if job is not None else self._next_broadcast()
                if job is None and begin is None:
                    if self._closed:
                        return
                    self._work.wait()
                    continue
            if job is not None:
                self._start(job)
            elif begin is not None:
                begin()

    def _next_job(self) -> Job | None:
        for rank, queue in enumerate(self._pinned):
            if queue and self._busy[rank] < self._concurrency:
                return self._pop(queue, rank)
        if self._queued:
            rank = min(range(self._world_size), key=self._busy.__getitem__)
            if self._busy[rank] < self._concurrency:
                return self._pop(self._queued, rank)
        return None

    def _pop(self, queue: deque[Job], rank: int) -> Job:
        job = queue.popleft()
        self._waiting -= 1
        self._busy[rank] += 1
        job.rank = rank
        self._running.add(job)
        return job

    def _start(self, job: Job) -> None:
        """Sends a job to the process it has claimed."""
        assert job.rank is not None
        if job.future.cancelled():
            self._release_rank(job)
            return
        job.tries += 1
        try:
            self._group.ensure()
            output = self._output(job.rank)
            with telemetry.inside(job.span):
                call = self._group.nodes[job.rank].submit_payload(
                    job.payload,
                    on_output=output.write,
                    timeout=job.timeout_seconds,
                    name=job.name,
                    results=job.results,
                    context=self._group.context(job.rank),
                )
        except Exception as error:
            self._on_failure(job, error)
            return
        except BaseException:
            self._release_rank(job)
            job.future.cancel()
            raise
        job.running = call
        job.future.on_cancel(lambda: self._cancel(job))
        call.add_done_callback(lambda call: self._submit_result(self._on_end, job, call, output))

    def _submit_result(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._result_executor.submit(function, *args)
        except RuntimeError:  # closed: whoever still waits must be told all the same
            function(*args)

    def _output(self, rank: int) -> TaskOutput:
        return TaskOutput(rank if self._world_size > 1 else None)

    def _on_end(self, job: Job, call: Call, output: TaskOutput) -> None:
        try:
            value = call.result()
        except CancelledError:
            output.finish()
            self._release_rank(job)
            job.future.cancel()
            return
        except BaseException as error:
            output.finish()
            self._on_failure(job, error)
            return
        if job.is_stream:
            assert job.rank is not None
            with self._lock:
                # The process stays taken. But nobody here may hold the items, or dropping them would end nothing.
                self._running.discard(job)
            future, job.future = job.future, PoolFuture(job.name)
            job.running = job.keeps = None
            items = StreamItems(value, partial(self._stream_ended, job.rank, call, output))
            with self._lock:
                self._streams[job.rank].add(items)
            future.settle(items)
            return
        output.finish()
        self._release_rank(job)
        job.future.settle(value)

    def _on_failure(self, job: Job, error: BaseException) -> None:
        rank = job.rank
        if job.tries <= job.retry.times and isinstance(error, job.retry.on) and not job.future.done():
            pause = job.retry.backoff_seconds * 2 ** (job.tries - 1)
            logger.info("skyproxy: %s failed on rank %s (%s), retrying in %.1f s", job.name, rank, error, pause)
            timer = threading.Timer(pause, self._requeue, (job,))
            timer.daemon = True
            timer.start()
            return
        if isinstance(error, SessionLostError):
            self._add_lost_note(job, error)
        self._release_rank(job)
        job.future.fail(error)

    def _add_lost_note(self, job: Job, error: SessionLostError) -> None:
        error.add_note(
            f"{job.name} was running on rank {job.rank} of {self._world_size}. Retry(...) would run it again."
        )

    def _requeue(self, job: Job) -> None:
        with self._lock:
            self._release(job)
            job.running = None
            closed = self._closed
            if not closed:
                self._enqueue(job, first=True)
        if closed:
            job.future.fail(_closed_error())

    def _stream_ended(self, rank: int | None, call: Call, output: TaskOutput) -> None:
        assert rank is not None
        call.cancel()
        output.finish()
        with self._lock:
            self._busy[rank] -= 1
            self._streams[rank] = weakref.WeakSet(one for one in self._streams[rank] if not one.has_ended)
            if self._waiting:
                self._wake()

    def _release(self, job: Job) -> None:
        if job in self._running:
            self._running.discard(job)
            assert job.rank is not None
            self._busy[job.rank] -= 1

    def _release_rank(self, job: Job) -> None:
        """The job's process is free again."""
        job.running = job.keeps = None
        with self._lock:
            self._release(job)
            if self._waiting:
                self._wake()

    def _cancel(self, job: Job) -> None:
        if job.running is not None:
            job.running.cancel()
            return
        with self._lock:
            queue = self._queued if job.pinned is None else self._pinned[job.pinned]
            if job in queue:
                queue.remove(job)
                self._waiting -= 1

    def stream(self, call: PendingCompute[object]) -> Iterator[object]:
        """Make a call of a generator function at once, and return an iterator over what it yields."""
        future = self.submit(call)

        def items() -> Iterator[object]:
            try:
                yield from future.wait()
            finally:
                future.cancel()

        return items()

    # --- all processes ------------------------------------------------------------------------------------------------

    def broadcast(self, call: PendingCompute[object]) -> PoolFuture[list[Any]]:
        """Makes a call on every process at once; it is pickled once.

        Raises:
            ConfigurationError: it cannot be sent.
        """
        from skyproxy.functions import Payload

        if hasattr(call.function, "__skyproxy_calls__"):
            raise ConfigurationError(
                f"{call.name} is a method of one actor, and `@` runs on every rank. Use `>>`; for an actor on each "
                "rank, Model.on_all(pool)(...).broadcast(Model.method, ...)."
            )
        payload = Payload.of(self._group.task(as_task(call.function)), call.args, call.kwargs)
        if payload.session is not None and self._world_size > 1:
            raise ConfigurationError(
                f"the arguments of {call.name} hold remote tensors, which live on one process, and `@` runs on all "
                f"{self._world_size}. Pass values (x.cpu()), or run it there alone: f(x) >> pool."
            )
        future: PoolFuture[list[object]] = PoolFuture(call.name)
        with self._lock:
            self._check_open()
            begin = self._broadcasting
            self._broadcasts.append((future, lambda: self._broadcast(call, payload, future)))
            first = None if begin else self._next_broadcast()
        if first is not None:
            first()
        return future

    def _next_broadcast(self) -> Callable[[], None] | None:
        """Return a function that begins the next broadcast, if it is its turn; with the lock held."""
        while self._broadcasts and not self._broadcasting:
            future, begin = self._broadcasts.popleft()
            if not future.cancelled():
                self._broadcasting = True
                return begin
        return None

    def _broadcast(self, call: PendingCompute[object], payload: Payload, future: PoolFuture[list[object]]) -> None:
        calls: dict[int, Call] = {}
        outputs: list[TaskOutput] = []
        try:
            self._group.ensure()
            for rank, node in enumerate(self._group.nodes):
                output = self._output(rank)
                outputs.append(output)
                calls[rank] = node.submit_payload(
                    payload,
                    on_output=output.write,
                    name=call.name,
                    results="remote" if call.options.remote else "value",
                    context=self._group.context(rank),
                )
        except BaseException as error:
            for begun in calls.values():
                begun.cancel()
            self._broadcast_ended(outputs)
            future.fail(error)
            if not isinstance(error, Exception):
                raise
            return
        gathered = self._group.gather(calls, call.options.timeout_seconds, call.name)
        gathered.add_done_callback(lambda _: self._broadcast_ended(outputs))
        future.follow(gathered)

    def _broadcast_ended(self, outputs: Sequence[TaskOutput]) -> None:
        for output in outputs:
            output.finish()
        with self._lock:
            self._broadcasting = False
            if self._broadcasts:
                self._wake()

    # --- the end ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise _closed_error()

    def close(self) -> None:
        """Cancels what waits and what runs. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            left = [*self._queued, *(job for queue in self._pinned for job in queue), *self._running]
            broadcasts = [future for future, _ in self._broadcasts]
            self._queued.clear()
            for queue in self._pinned:
                queue.clear()
            self._broadcasts.clear()
            self._waiting = 0
            self._work.notify_all()
        for job in left:
            job.future.cancel()
        for future in broadcasts:
            future.cancel()
        self._result_executor.shutdown(wait=False)


def _closed_error() -> ConfigurationError:
    return ConfigurationError("this pool is not running. Calls are made inside its `with` block.")
