"""The queue of keys to be looked at: each once, whoever asks, and never two looks at the same key at the same time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


NEW, CHANGED, ROUTINE = range(3)
"""Priorities: what somebody has just asked for, what has changed, what is looked at because time has passed."""


class WorkQueue(Generic[Key]):
    """Keys to look at, now or later, the most urgent first. For one event loop."""

    def __init__(self) -> None:
        self._lanes: tuple[OrderedDict[Key, None], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        self._waiting: dict[Key, int] = {}
        self._active: set[Key] = set()
        self._again: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Key, urgency: int = CHANGED) -> None:
        """Look at this key soon; after the present look where there is one.

        Args:
            key: the key. One that waits already is not looked at twice, and goes by the higher of its urgencies.
            urgency: NEW, CHANGED or ROUTINE.
        """
        self._cancel(key)
        if key in self._active:
            self._again[key] = min(urgency, self._again.get(key, urgency))
            return
        before = self._waiting.get(key)
        if before is not None and before <= urgency:
            return
        if before is not None:
            del self._lanes[before][key]
        self._waiting[key] = urgency
        self._lanes[urgency][key] = None
        self._changed.set()

    def add_later(self, key: Key, seconds: float) -> None:
        """A look at this key after a while, if none comes before; one that was to come earlier stays."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + seconds:
            return
        self._cancel(key)
        self._timers[key] = loop.call_later(max(seconds, 0.0), self.add, key, ROUTINE)

    async def get(self) -> Key:
        """The next key; `done` must follow."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        lane = next(lane for lane in self._lanes if lane)
        key, _ = lane.popitem(last=False)
        del self._waiting[key]
        self._active.add(key)
        return key

    def done(self, key: Key) -> None:
        """The look at a key is over."""
        self._active.discard(key)
        urgency = self._again.pop(key, None)
        if urgency is not None:
            self.add(key, urgency)

    def forget(self, key: Key) -> None:
        """No look later; one that was asked for meanwhile stays."""
        self._cancel(key)

    def close(self) -> None:
        """Nothing happens later any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _cancel(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
