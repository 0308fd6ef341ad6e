"""The scheduler of a pool: it decides which call runs on which process, and when."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from skyproxy import telemetry
from skyproxy.errors import ConfigurationError, LimitExceededError, SessionLostError
from skyproxy.pools import pool_task
from skyproxy.pools.broadcasts import Broadcasts
from skyproxy.pools.call_options import CallOptions, Retry, refuse_restarts
from skyproxy.pools.futures import PoolFuture
from skyproxy.pools.output_view import TaskOutput
from skyproxy.pools.pending import PendingCompute
from skyproxy.pools.pool_task import PoolTask, SentContexts, StreamItems, current_caller
from skyproxy.pools.slots import ProcessSlots, Slot
from skyproxy.pools.tasks import as_task
from skyproxy.runtime.call_groups import GroupTask
from skyproxy.settings import SETTINGS

if TYPE_CHECKING:
    from skyproxy.functions.call import Call
    from skyproxy.pools.elastic_group import ElasticGroup
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
        group: RankGroup | ElasticGroup,
        *,
        concurrency: int,
        retry: Retry | None,
        max_queued_calls: int = SETTINGS.max_queued_calls,
        max_processes: int | None = None,
    ) -> None:
        self._group = group
        self._retry = retry or Retry(0)
        self._max_queued_calls = max_queued_calls
        self._lock = threading.RLock()  # a stream can be dropped, and say so, wherever the collector runs
        self._work = threading.Condition(self._lock)
        self._slots = ProcessSlots(group.members, concurrency)
        self._queued: deque[PoolTask] = deque()
        self._waiting = 0
        self._running: dict[PoolTask, Slot] = {}
        self._broadcasts = Broadcasts(group, self._slots, self._lock, self._wake)
        self._closed = False
        self._feeder: threading.Thread | None = None
        self._max_processes = max_processes or len(self._slots)
        self._contexts = SentContexts(group, 2 * self._max_processes)
        # Results are unpickled here, and what user code does then cannot hold up the connection.
        self._result_executor = ThreadPoolExecutor(min(8, self._max_processes), "skyproxy-results")

    @property
    def is_open(self) -> bool:
        """True if calls can be made."""
        return not self._closed

    @property
    def max_processes(self) -> int:
        """Processes that the pool can have at most."""
        return self._max_processes

    def load(self) -> tuple[dict[int, int], int]:
        """Return how many single calls each process runs, by rank, and how many calls and broadcasts wait."""
        with self._lock:
            return {slot.rank: slot.busy for slot in self._slots}, self._waiting + len(self._broadcasts)

    def locked(self) -> contextlib.AbstractContextManager[object]:
        """No process comes or goes inside the `with` block, which must be short."""
        return self._lock

    @property
    def retries(self) -> int:
        """The number of times that a call is made again which says nothing of it."""
        return self._retry.times

    def task(self, function: Callable[..., object]) -> Callable[..., object]:
        """A function as it goes to the processes."""
        return self._group.task(function)

    def ask(self, rank: int, function: Callable[..., object], *args: object) -> Call:
        """Call a function of ours on a rank at once, beside what runs there."""
        node = self._group.node_of(rank)
        if node is None:
            raise SessionLostError(f"rank {rank} is not there any more.")
        return node.submit(function, *args, results="value", context=self._group.context(rank))

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
        task = self._task(call)
        future = task.future  # the task of a stream gets another one when it has begun, which may be before we return
        with self._lock:
            self._check_open()
            if self._waiting >= self._max_queued_calls:
                raise LimitExceededError(
                    f"{self._waiting} calls are already waiting in this pool. Wait for some of them, use pool.map, or "
                    "raise SKYPROXY_MAX_QUEUED_CALLS."
                )
            future.on_cancel(lambda: self._cancel(task))
            future.before_wait = lambda: self._check_wait(task)
            chosen = self._claim(task)
            if not chosen:
                self._enqueue(task)
        if chosen:
            self._start(task)
        return future

    def _submit_to(self, actor: Any, call: PendingCompute[object]) -> PoolFuture[object]:
        """A call of an actor's method, which waits in the actor's own queue."""
        if actor.place.group is not self._group:
            raise ConfigurationError(f"{call.name} is a method of the {actor.place}, which lives in another pool.")
        refuse_restarts(call)
        future: PoolFuture[object] = actor.submit(call)
        return future

    def _task(self, call: PendingCompute[object]) -> PoolTask:
        from skyproxy.functions import Payload

        options = call.options
        refuse_restarts(call)
        rank = self._rank_of(options)
        if rank is not None and rank not in self._slots:
            raise ConfigurationError(
                f"{call.name} is to run on rank {rank}, and this pool has {self._slots.ranks_text()}."
            )
        is_group = isinstance(call.function, GroupTask)  # of tasks
        function = call.function if is_group else self._group.task(as_task(call.function))
        payload = Payload.of(function, call.args, call.kwargs)
        if payload.session is not None:
            home = next((r for r, node in self._group.members.items() if node._session is payload.session), None)
            if home is None or rank not in (None, home):
                where = "no process of this pool" if home is None else f"rank {home}, not on rank {rank}"
                raise ConfigurationError(
                    f"the arguments of {call.name} hold remote tensors that live on {where}. Move them first: "
                    "x.to(pool.nodes[k].device(...)), or pass x.cpu()."
                )
            rank = home
        return PoolTask(call, payload, rank, options.retry or self._retry)

    def _rank_of(self, options: CallOptions) -> int | None:
        """Return the rank that a call must run on; None for any."""
        return options.rank

    def _claim(self, task: PoolTask) -> bool:
        """Return whether the task has a process now; with the lock held."""
        slot: Slot | None
        if task.pinned is not None:
            slot = self._slots.get(task.pinned)
            if slot is None or slot.busy >= self._slots.concurrency or (slot.queue and not task.tries):
                return False  # or others came first
        elif self._queued and not task.tries:
            return False
        else:
            slot = self._slots.next_free()
            if slot is None:
                return False
        self._occupy(task, slot)
        return True

    def _occupy(self, task: PoolTask, slot: Slot) -> None:
        slot.busy += 1
        task.rank = slot.rank
        self._running[task] = slot

    def _check_wait(self, task: PoolTask) -> None:
        """Raise where a task waits for processes that only its own waiter can set free.

        Raises:
            ConfigurationError: all that could run it are held by streams which the caller is in the midst of.
        """
        if task in self._running:
            return
        reader = current_caller()
        with self._lock:
            if task in self._running or task.future.done():
                return
            if task.pinned is None and len(self._slots) < self._max_processes:
                return  # another process will come
            slots = [slot for slot in self._slots if task.pinned in (None, slot.rank)]
            most = self._slots.concurrency
            if any(sum(stream.reader == reader for stream in slot.streams) < most for slot in slots):
                if all(len(slot.streams) >= most for slot in slots):  # others may read them, or nobody
                    pool_task.warn_if_nobody_reads(task, [stream for slot in slots for stream in slot.streams])
                return
            ranks = [] if len(self._slots) == 1 else [slot.rank for slot in slots]
        task.future.cancel()
        raise pool_task.endless_wait(task, ranks)

    def _enqueue(self, task: PoolTask, first: bool = False) -> None:
        """Has a task wait; with the lock held."""
        slot = None if task.pinned is None else self._slots.get(task.pinned)
        queue = self._queued if slot is None else slot.queue
        (queue.appendleft if first else queue.append)(task)
        self._waiting += 1
        if slot is None:
            self._on_demand()
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
                task = self._next_task()
                begin = None if task is not None else self._broadcasts.next()
                if task is None and begin is None:
                    if self._closed:
                        return
                    self._work.wait()
                    continue
            if task is not None:
                self._start(task)
            elif begin is not None:
                begin()

    def _next_task(self) -> PoolTask | None:
        if self._waiting > len(self._queued):
            for slot in self._slots:
                if slot.queue and slot.busy < self._slots.concurrency:
                    return self._pop(slot.queue, slot)
        if self._queued and (free := self._slots.next_free()) is not None:
            return self._pop(self._queued, free)
        return None

    def _pop(self, queue: deque[PoolTask], slot: Slot) -> PoolTask:
        task = queue.popleft()
        self._waiting -= 1
        self._occupy(task, slot)
        return task

    def _start(self, task: PoolTask) -> None:
        """Sends a task to the process it has claimed."""
        assert task.rank is not None
        if task.future.cancelled():
            self._release_rank(task)
            return
        task.tries += 1
        task.future.rank = task.rank
        begun: list[Call] = []
        try:
            self._group.ensure()
            node = self._group.node_of(task.rank)
            if node is None:
                self._send_elsewhere(task)
                return
            output = self._output(task.rank)
            with telemetry.as_parent(task.span):
                call = node.submit_payload(
                    task.payload,
                    on_output=output.write,
                    timeout=task.timeout_seconds,
                    name=task.name,
                    results=task.results,
                    isolate=task.isolate,
                    debug=task.debug,
                    context=self._contexts.of_rank(task.rank),
                    quiet=True,
                    begun=begun,
                )
        except Exception as error:
            self._on_failure(task, error)
            return
        except BaseException:
            for sent in begun:
                sent.cancel()
            self._release_rank(task)
            task.future.cancel()
            raise
        task.running = call
        if task.future.cancelled():  # before that: there was nothing to end yet
            self._cancel(task)
        call.add_done_callback(lambda call: self._on_done(task, call, output))

    def _on_done(self, task: PoolTask, call: Call, output: TaskOutput) -> None:
        """A call has ended; on a thread that reads what a worker sends."""
        if not call.is_light or task.is_stream:
            self._submit_result(self._on_end, task, call, output)
            return
        try:
            value = call.result()
        except BaseException:  # its own state is not what its worker reported
            self._submit_result(self._on_end, task, call, output)
            return
        output.finish()
        self._release_rank(task, prefer=True)
        if not task.future.settle_alone(value):
            self._submit_result(task.future.settle, value)

    def _submit_result(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._result_executor.submit(function, *args)
        except RuntimeError:  # closed: whoever still waits must be told all the same
            function(*args)

    def _output(self, rank: int) -> TaskOutput:
        return TaskOutput(rank if self._max_processes > 1 else None)

    def _on_end(self, task: PoolTask, call: Call, output: TaskOutput) -> None:
        try:
            self._settle(task, call, output)
        except BaseException as error:  # a mistake of ours, which would have its caller wait for ever
            logger.exception("skyproxy: the end of %s could not be dealt with", task.name)
            task.future.fail(error)

    def _settle(self, task: PoolTask, call: Call, output: TaskOutput) -> None:
        try:
            value = call.result()
        except BaseException as error:
            output.finish()
            if call.cancelled():
                self._release_rank(task)
                task.future.cancel()
            else:
                self._on_failure(task, error)
            return
        if task.is_stream:
            with self._lock:
                # The process stays in use. But nothing here may hold the items, or dropping them would end nothing.
                slot = self._running.pop(task)
            future, task.future = task.future, PoolFuture(task.name)
            kept, task.running, task.keeps = task.keeps, None, None
            end = partial(self._stream_ended, slot, call, output)
            items = StreamItems(value, end, partial(self._explain_loss, task.name, task.rank, False), kept)
            with self._lock:
                slot.streams.add(items)
            future.settle(items)
            return
        output.finish()
        self._release_rank(task)
        task.future.settle(value)

    def _on_failure(self, task: PoolTask, error: BaseException) -> None:
        rank = task.rank
        if task.tries <= task.retry.times and isinstance(error, task.retry.on) and not task.future.done():
            pause = task.retry.backoff_seconds * 2 ** (task.tries - 1)
            logger.info("skyproxy: %s failed on rank %s (%s), retrying in %.1f s", task.name, rank, error, pause)
            timer = threading.Timer(pause, self._requeue, (task,))
            timer.daemon = True
            timer.start()
            return
        if isinstance(error, SessionLostError):
            error = self._explain_loss(task.name, task.rank, True, error)
        self._release_rank(task)
        task.future.fail(error)

    def _explain_loss(self, name: str, rank: int | None, again: bool, error: SessionLostError) -> SessionLostError:
        """Return the error for a call that was lost with its process, and could be made again, or for its stream."""
        pool_task.note_lost_rank(name, rank, len(self._group.members), again, error)
        return error

    def _requeue(self, task: PoolTask) -> None:
        error: Exception | None = None
        with self._lock:
            self._release(task)
            task.running = None
            if self._closed:
                error = pool_task.closed_error()
            elif task.pinned is not None and task.pinned not in self._slots:
                error = pool_task.lost_rank(task)
            else:
                self._enqueue(task, first=True)
        if error is not None:
            task.future.fail(error)

    def _stream_ended(self, slot: Slot, call: Call, output: TaskOutput) -> None:
        call.cancel()
        output.finish()
        with self._lock:
            slot.release()
            slot.streams = weakref.WeakSet(one for one in slot.streams if not one.has_ended)
            if self._waiting:
                self._wake()

    def _on_demand(self) -> None:
        """A call waits for any process; with the lock held. A pool that can grow does so."""

    def _send_elsewhere(self, task: PoolTask) -> None:
        """A call whose process has gone for good before the call was sent."""
        self._on_failure(task, SessionLostError(f"rank {task.rank} is gone."))

    def _release(self, task: PoolTask, prefer: bool = False) -> None:
        slot = self._running.pop(task, None)
        if slot is not None:
            slot.release()
            if prefer:
                self._slots.prefer(slot)

    def _release_rank(self, task: PoolTask, prefer: bool = False) -> None:
        """The task's process is free again, and the next call may best go there, too."""
        # Until this returns: an actor whose last handle goes ends the calls that still run.
        _kept, task.running, task.keeps = task.keeps, None, None
        with self._lock:
            self._release(task, prefer)
            if self._waiting:
                self._wake()

    def _cancel(self, task: PoolTask) -> None:
        if task.running is not None:
            task.running.cancel()
            return
        with self._lock:
            slot = None if task.pinned is None else self._slots.get(task.pinned)
            for queue in (self._queued, *(() if slot is None else (slot.queue,))):
                if task in queue:
                    queue.remove(task)
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
        return self._broadcasts.submit(call)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise pool_task.closed_error()

    def close(self) -> None:
        """Cancels what waits and what runs. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            left = [*self._queued, *(task for slot in self._slots for task in slot.queue), *self._running]
            streams = self._slots.streams()
            broadcasts = self._broadcasts.close()
            self._queued.clear()
            for slot in self._slots:
                slot.queue.clear()
            self._waiting = 0
            self._work.notify_all()
        for task in left:
            task.future.cancel()
        for future in broadcasts:
            future.cancel()
        for stream in streams:
            stream.let_go()()  # not where it is dropped: that may be when the interpreter is being taken down
        self._result_executor.shutdown(wait=False)

    def abandon_in_child(self) -> None:
        """After a fork, in the child: the processes are the parent's, as are the threads that calls need."""
        self._lock = threading.RLock()  # one of those threads may have held the other
        self._closed = True
        for stream in self._slots.streams():
            stream.let_go()
