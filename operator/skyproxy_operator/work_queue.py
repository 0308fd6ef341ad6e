"""What waits to be looked at: each key once, whoever asks, and never two looks at the same key at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class WorkQueue(Generic[Key]):
    """Keys to look at, now or later. For one event loop."""

    def __init__(self) -> None:
        self._ready: deque[Key] = deque()
        self._waiting: set[Key] = set()
        self._active: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, key: Key) -> None:
        """A look at this key, soon; after the present one where there is one."""
        self._cancel(key)
        if key in self._active:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.append(key)
            self._changed.set()

    def add_later(self, key: Key, seconds: float) -> None:
        """A look at this key after a while, if none comes before; one that was to come earlier stays."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + seconds:
            return
        self._cancel(key)
        self._timers[key] = loop.call_later(max(seconds, 0.0), self.add, key)

    async def get(self) -> Key:
        """The next key; `done` must follow."""
        while not self._ready:
            self._changed.clear()
            await self._changed.wait()
        key = self._ready.popleft()
        self._waiting.discard(key)
        self._active.add(key)
        return key

    def done(self, key: Key) -> None:
        """The look at a key is over."""
        self._active.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

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
