"""The queue of keys to be looked at: each once, whoever asks, and never two looks at the same key at the same time.

Nobody's haste is at the cost of others: groups of keys take turns, a key that asks all the time is looked at now and
then, and what is not urgent has every fourth turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


NEW, CHANGED, ROUTINE = range(3)
"""Priorities: what somebody has just asked for, what has changed, what is looked at because time has passed."""

_LOOKS_AT_ONCE = 30
_LOOKS_A_SECOND = 2.0
"""Looks at one key: so many at first, then so many a second. Its changes meanwhile are seen together."""
_TURN_OF_ROUTINE = 4


class _Lane(Generic[Key]):
    """Keys of one urgency, in their order; groups of them take turns."""

    def __init__(self, group_of: Callable[[Key], Hashable]) -> None:
        self._group_of = group_of
        self._groups: OrderedDict[Hashable, OrderedDict[Key, None]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, key: Key) -> None:
        self._groups.setdefault(self._group_of(key), OrderedDict())[key] = None

    def remove(self, key: Key) -> None:
        group = self._group_of(key)
        del self._groups[group][key]
        if not self._groups[group]:
            del self._groups[group]

    def pop(self) -> Key:
        group, keys = self._groups.popitem(last=False)
        key, _ = keys.popitem(last=False)
        if keys:
            self._groups[group] = keys
        return key


class WorkQueue(Generic[Key]):
    """Keys to look at, now or later, the most urgent first. For one event loop."""

    def __init__(self, group_of: Callable[[Key], Hashable] = lambda _: None) -> None:
        """Make an empty queue.

        Args:
            group_of: names whose key one is; without it, all are of one group.
        """
        self._lanes: tuple[_Lane[Key], ...] = (_Lane(group_of), _Lane(group_of), _Lane(group_of))
        self._waiting: dict[Key, int] = {}
        self._active: set[Key] = set()
        self._again: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        # Of keys that were looked at too often: the urgency of the look that comes later.
        self._held: dict[Key, int] = {}
        self._looks: dict[Key, tuple[float, float]] = {}
        self._turn = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Key, urgency: int = CHANGED) -> None:
        """Look at this key soon; after the present look where there is one.

        Args:
            key: the key. One that waits already is not looked at twice, and goes by the higher of its urgencies.
            urgency: NEW, CHANGED or ROUTINE.
        """
        if key in self._active:
            self._cancel(key)
            self._again[key] = min(urgency, self._again.get(key, urgency))
            return
        before = self._waiting.get(key)
        if before is None and (pause := self._pause_seconds(key)) > 0:
            self._held[key] = min(urgency, self._held.get(key, urgency))
            self.add_later(key, pause)
            return
        self._cancel(key)
        if before is not None and before <= urgency:
            return
        if before is not None:
            self._lanes[before].remove(key)
        self._waiting[key] = urgency
        self._lanes[urgency].add(key)
        self._changed.set()

    def add_later(self, key: Key, seconds: float) -> None:
        """A look at this key after a while, if none comes before; one that was to come earlier stays."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + seconds:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(max(seconds, 0.0), self._come_due, key)

    def _come_due(self, key: Key) -> None:
        del self._timers[key]
        self.add(key, self._held.get(key, ROUTINE))

    async def get(self) -> Key:
        """The next key; `done` must follow."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        self._turn = (self._turn + 1) % _TURN_OF_ROUTINE
        lanes = self._lanes if self._turn else reversed(self._lanes)
        key = next(lane for lane in lanes if lane).pop()
        del self._waiting[key]
        self._active.add(key)
        now = asyncio.get_running_loop().time()
        self._looks[key] = self._looks_left(key, now) - 1.0, now
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
        self._looks.pop(key, None)

    def close(self) -> None:
        """Nothing happens later any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _looks_left(self, key: Key, now: float) -> float:
        """Return how often a key may be looked at, as a bucket of tokens counts it."""
        left, since = self._looks.get(key, (float(_LOOKS_AT_ONCE), now))
        return min(left + (now - since) * _LOOKS_A_SECOND, float(_LOOKS_AT_ONCE))

    def _pause_seconds(self, key: Key) -> float:
        lacking = 1.0 - self._looks_left(key, asyncio.get_running_loop().time())
        # Less is an error of rounding.
        return lacking / _LOOKS_A_SECOND if lacking > 1e-6 else 0.0

    def _cancel(self, key: Key) -> None:
        self._held.pop(key, None)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
