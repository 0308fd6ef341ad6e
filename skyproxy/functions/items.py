"""The items of a generator that runs on a worker, for one consumer at a time, with or without an event loop."""

from __future__ import annotations

import concurrent.futures
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from skyproxy.errors import ProtocolError
from skyproxy.settings import Settings

_SLACK = 16
"""Times what a worker with our settings sends ahead of a caller; another one may have other settings."""


class Items:
    """A queue that can be waited for by a thread and by a task. `Ahead` bounds it."""

    def __init__(self) -> None:
        self._ready: deque[object] = deque()
        self._waiting: deque[concurrent.futures.Future[object]] = deque()
        self._lock = threading.Lock()
        self._end: object = None

    def put(self, item: object) -> None:
        with self._lock:
            while self._waiting:
                future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    break
            else:
                self._ready.append(item)
                return
        future.set_result(item)

    def put_back(self, item: object) -> None:
        """Make an item the next one again."""
        with self._lock:
            self._ready.appendleft(item)

    def end_with(self, item: object) -> None:
        """Give this to all who wait or ask from now on, behind what is there: nothing else comes."""
        with self._lock:
            self._end = item
            waiting = [future for future in self._waiting if future.set_running_or_notify_cancel()]
            self._waiting.clear()
        for future in waiting:
            future.set_result(item)

    def get(self) -> concurrent.futures.Future[Any]:
        """A future of the next item."""
        future: concurrent.futures.Future[object] = concurrent.futures.Future()
        with self._lock:
            if self._ready:
                future.set_result(self._ready.popleft())
            elif self._end is not None:
                future.set_result(self._end)
            else:
                self._waiting.append(future)
        return future


class Streaming(Protocol):
    """A call of a generator function."""

    def next_item(self) -> Any: ...

    def __aiter__(self) -> AsyncIterator[Any]: ...

    def cancel(self) -> bool: ...

    def give_up(self) -> None: ...


class ItemIterator(Iterator[Any]):
    """The items of a call. Whoever lets go of it early cancels the call."""

    def __init__(self, call: Streaming) -> None:
        self._call = call

    def __next__(self) -> Any:
        return self._call.next_item()

    async def __aiter__(self) -> AsyncIterator[Any]:
        # Not the call's own iterator: this one, which cancels the call when it goes, has to stay as long.
        async for item in self._call:
            yield item

    def close(self) -> None:
        """Cancel the call, unless it has ended."""
        self._call.cancel()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # else the connection ends, and modules are being taken down
            self._call.give_up()


@dataclass(slots=True)
class Ahead:
    """Counts of what came of a call ahead of its caller. Each number has one thread that writes it.

    Attributes:
        call: the name of the function.
        queued, delivered: bytes of events that wait for a thread to deliver them or waited, and of those that it did.
        items_came, items_taken: items, and those of them that the caller took.
        has_end: whether the last event came, behind which nothing is read.
    """

    call: str
    queued: int = 0
    delivered: int = 0
    items_came: int = 0
    items_taken: int = 0
    has_end: bool = False

    @property
    def is_queued(self) -> bool:
        """True if something waits to be delivered."""
        return self.queued != self.delivered

    def note(self, kind: str, settings: Settings) -> None:
        """Take note of an event that came, unless it is further ahead than a worker sends it: nobody would take it.

        Raises:
            ProtocolError: it is.
        """
        most_bytes, most_items = _SLACK * settings.max_waiting_output_bytes, _SLACK * settings.max_waiting_items
        self.has_end = kind in ("result", "error")
        if kind == "item":
            self.items_came += 1
            if self.items_came - self.items_taken > most_items:
                self._refuse(f"{most_items:,} items", "SKYPROXY_MAX_WAITING_ITEMS")
        elif not self.has_end and self.queued - self.delivered > most_bytes:
            self._refuse(f"{most_bytes:,} bytes of output", "SKYPROXY_MAX_WAITING_OUTPUT_BYTES")

    def _refuse(self, what: str, setting: str) -> None:
        raise ProtocolError(
            f"the worker sent more than {what} ahead of the caller of {self.call}. If it has another {setting}, "
            "set the same here."
        )
