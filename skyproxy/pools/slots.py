"""The processes of a pool as a scheduler sees them: what each runs, what waits for it, and whether it is there."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyproxy.pools.pool_task import PoolTask, StreamItems


class Slot:
    """A process.

    Attributes:
        rank: its number, the same for as long as it is there.
        place: its number among those that are there now.
        busy: single calls that it runs.
        broadcasts: calls on all processes that it takes part in.
        queue: calls that only this process can run.
        streams: those that hold the process.
        used_at: when it last ended something, or came.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.place = 0
        self.busy = 0
        self.broadcasts = 0
        self.queue: deque[PoolTask] = deque()
        self.streams: weakref.WeakSet[StreamItems] = weakref.WeakSet()
        self.used_at = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """True if it has nothing to do."""
        return not (self.busy or self.broadcasts or self.queue)

    def release(self) -> None:
        """A single call has ended."""
        self.busy -= 1
        self.used_at = time.monotonic()

    def broadcast_ended(self) -> None:
        """A call on all processes has ended."""
        self.broadcasts -= 1
        self.used_at = time.monotonic()


class ProcessSlots:
    """All processes of a pool, by rank. Whoever uses them holds the scheduler's lock."""

    def __init__(self, ranks: Iterable[int], concurrency: int) -> None:
        self.concurrency = concurrency
        self._by_rank = {rank: Slot(rank) for rank in ranks}
        self._in_order: list[Slot] = []
        self._next = 0
        self._warm: Slot | None = None
        self._sort()

    def __len__(self) -> int:
        return len(self._in_order)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._in_order)

    def __contains__(self, rank: object) -> bool:
        return rank in self._by_rank

    def get(self, rank: int) -> Slot | None:
        """The process of a rank; None where none is there."""
        return self._by_rank.get(rank)

    def ranks_text(self) -> str:
        """The ranks that are there, for people."""
        ranks = [slot.rank for slot in self._in_order]
        if ranks == list(range(len(ranks))) and ranks:
            return f"{len(ranks)}: 0 to {len(ranks) - 1}"
        return f"{len(ranks)} now: {', '.join(map(str, ranks))}" if ranks else "none at this moment"

    def add(self, ranks: Iterable[int]) -> None:
        """Processes have come."""
        self._by_rank |= {rank: Slot(rank) for rank in ranks}
        self._sort()

    def remove(self, ranks: Collection[int]) -> list[Slot]:
        """Processes have gone; return them."""
        gone = [self._by_rank.pop(rank) for rank in ranks if rank in self._by_rank]
        self._sort()
        return gone

    def _sort(self) -> None:
        self._in_order = [self._by_rank[rank] for rank in sorted(self._by_rank)]
        for place, slot in enumerate(self._in_order):
            slot.place = place
        self._next = 0
        self._warm = None

    def prefer(self, slot: Slot) -> None:
        """A call has ended well there: the next one finds what it needs in the processor's caches."""
        if self._by_rank.get(slot.rank) is slot:  # else it has gone meanwhile
            self._warm = slot

    def next_free(self) -> Slot | None:
        """The process that does least: the preferred one, or in turn among equals; None where all are busy.

        A preference counts once: after a call that failed or was cancelled, and may still run in C code, it is the
        next one's turn.
        """
        warm, self._warm = self._warm, None
        count = len(self._in_order)
        if warm is not None and warm.is_idle:
            self._next = (warm.place + 1) % count
            return warm
        best: Slot | None = None
        chosen = 0
        for step in range(count):
            index = (self._next + step) % count
            slot = self._in_order[index]
            if best is None or slot.busy < best.busy:
                best, chosen = slot, index
                if not slot.busy:
                    break
        if best is None or best.busy >= self.concurrency:
            return None
        self._next = (chosen + 1) % count
        return best

    def streams(self) -> list[StreamItems]:
        """The streams that hold processes."""
        return [stream for slot in self._in_order for stream in slot.streams]

    def free(self) -> int:
        """Return how many single calls could begin."""
        return sum(max(0, self.concurrency - slot.busy) for slot in self._in_order)


@dataclass(frozen=True)
class Demand:
    """The work of a pool at one moment.

    Attributes:
        idle_since: since when each process has had nothing to do, by rank; None: it has.
        free_slots: single calls that could begin at once.
        waiting: single calls that wait for any process.
        broadcasts: whether a broadcast waits.
    """

    idle_since: Mapping[int, float | None]
    free_slots: int
    waiting: int
    broadcasts: bool
