"""The scheduler of a pool whose processes come and go."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from skyproxy.errors import SessionLostError
from skyproxy.pools.call_options import CallOptions, Retry
from skyproxy.pools.elastic_group import ElasticGroup
from skyproxy.pools.futures import PoolFuture
from skyproxy.pools.pending import PendingCompute
from skyproxy.pools.pool_task import PoolTask, lost_rank
from skyproxy.pools.scheduler import Scheduler
from skyproxy.pools.slots import Demand


class ElasticScheduler(Scheduler):
    """The queue of a pool that grows and shrinks. What waits for any process is what the pool grows for."""

    def __init__(
        self,
        group: ElasticGroup,
        *,
        concurrency: int,
        retry: Retry | None,
        max_processes: int,
        on_demand: Callable[[], object],
    ) -> None:
        """Make the queue of an elastic pool.

        Args:
            group: the processes.
            concurrency: single calls that each runs at a time.
            retry: the rule of the pool.
            max_processes: how many there can be.
            on_demand: called whenever a call waits for any process, or a process was lost; must be short.
        """
        self._tell_of_demand = on_demand
        super().__init__(group, concurrency=concurrency, retry=retry, max_processes=max_processes)

    def _on_demand(self) -> None:
        self._tell_of_demand()

    def broadcast(self, call: PendingCompute[object]) -> PoolFuture[list[Any]]:
        """Make a call on every process that is there when its turn comes; where none is, the first one is started."""
        future = super().broadcast(call)
        if not len(self._slots):
            self._on_demand()
        return future

    def _on_failure(self, task: PoolTask, error: BaseException) -> None:
        rank = task.rank
        if isinstance(error, SessionLostError) and rank is not None and self._group.node_of(rank) is None:
            self.lose_ranks([rank])
        super()._on_failure(task, error)

    def add_ranks(self, ranks: Collection[int]) -> None:
        """Processes have come, and can be used."""
        with self._lock:
            self._slots.add(ranks)
            self._wake()

    def remove_ranks(self, ranks: Collection[int], is_held: Callable[[int], bool]) -> bool:
        """Take processes out of use, unless one of them has something to do; return whether that was done.

        Args:
            ranks: all of them, or none.
            is_held: tells whether something else keeps a process.
        """
        with self._lock:
            slots = [slot for slot in self._slots if slot.rank in ranks]
            if not all(slot.is_idle for slot in slots) or any(is_held(rank) for rank in ranks):
                return False
            self._slots.remove(ranks)
            return True

    def lose_ranks(self, ranks: Collection[int]) -> None:
        """Processes are gone. The calls that they ran end by themselves; those that only they could run fail now."""
        with self._lock:
            stranded = [task for slot in self._slots.remove(ranks) for task in slot.queue]
            self._waiting -= len(stranded)
            self._on_demand()
        for task in stranded:
            task.future.fail(lost_rank(task))

    def fail_waiting(self, error: Exception) -> None:
        """End the calls that wait for any process, and the broadcasts: none will come."""
        with self._lock:
            tasks = list(self._queued)
            self._queued.clear()
            self._waiting -= len(tasks)
            broadcasts = self._broadcasts.forget()
        for task in tasks:
            task.future.fail(error)
        for future in broadcasts:
            future.fail(error)

    def demand(self) -> Demand:
        """Return what waits, and what each process does."""
        with self._lock:
            idle = {slot.rank: slot.used_at if slot.is_idle else None for slot in self._slots}
            broadcasts = len(self._broadcasts) > 0
            return Demand(idle, self._slots.free(), len(self._queued), broadcasts)

    def _send_elsewhere(self, task: PoolTask) -> None:
        """A call that its process never saw, because it was gone."""
        task.tries -= 1
        assert task.rank is not None
        self.lose_ranks([task.rank])  # first, or it would be given the same process again
        self._requeue(task)

    def _rank_of(self, options: CallOptions) -> int | None:
        if options.on != "head":
            return options.rank
        with self._lock:
            return min((slot.rank for slot in self._slots), default=None)  # none: the first one that comes
