"""Turns at something that only so many may do at a time, shared among groups: who waits for long is a group alone.

Groups take turns (round robin, as in fair queueing by J. Nagle, RFC 970), and none has more than half of all, so that
there is a turn for a group that has just come, however slow those of another one are.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairTurns:
    """At most `at_once` turns at a time, half of them for one group. For one event loop."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._most = max(at_once // 2, 1)
        self._held: dict[str, int] = {}
        # The group whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, group: str) -> AsyncIterator[None]:
        """Wait for a turn of a group, and have it."""
        if self._may_begin(group) and group not in self._waiting:
            self._take(group)
        else:
            await self._wait(group)
        try:
            yield
        finally:
            self._give_back(group)

    def _may_begin(self, group: str) -> bool:
        return self._free > 0 and self._held.get(group, 0) < self._most

    def _take(self, group: str) -> None:
        self._free -= 1
        self._held[group] = self._held.get(group, 0) + 1

    def _give_back(self, group: str) -> None:
        self._free += 1
        self._held[group] -= 1
        if not self._held[group]:
            del self._held[group]
        self._hand_out()

    async def _wait(self, group: str) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                # It has just been given a turn that nobody will use.
                self._give_back(group)
            else:
                self._forget(group, waiter)
            raise

    def _forget(self, group: str, waiter: asyncio.Future[None]) -> None:
        line = self._waiting.get(group)
        if line is not None and waiter in line:
            line.remove(waiter)
            if not line:
                del self._waiting[group]

    def _hand_out(self) -> None:
        """Give what is free to those who wait, a turn for each group in its order."""
        while group := next((name for name in self._waiting if self._may_begin(name)), None):
            line = self._waiting[group]
            waiter = line.popleft()
            if line:
                self._waiting.move_to_end(group)
            else:
                del self._waiting[group]
            if not waiter.done():
                self._take(group)
                waiter.set_result(None)
