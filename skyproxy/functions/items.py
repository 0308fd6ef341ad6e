"""The items of a generator that runs on a worker, for one consumer at a time, with or without an event loop."""

from __future__ import annotations

import concurrent.futures
import threading
from collections import deque
from typing import Any


class Items:
    """A queue that can be waited for by a thread and by a task. Bounded by what the worker sends ahead."""

    def __init__(self) -> None:
        self._ready: deque[object] = deque()
        self._waiting: deque[concurrent.futures.Future[object]] = deque()
        self._lock = threading.Lock()

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

    def get(self) -> concurrent.futures.Future[Any]:
        """A future of the next item."""
        future: concurrent.futures.Future[object] = concurrent.futures.Future()
        with self._lock:
            if self._ready:
                future.set_result(self._ready.popleft())
            else:
                self._waiting.append(future)
        return future
