"""Threads that wait for a disk, and keep nothing from ending: a volume may hang forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Work = tuple["Future[Any]", Callable[[], Any]]


class DiskThreads(Executor):
    """A few threads that do what they are given, in order. They are begun when there is something to do.

    Args:
        count: how many there are.
        name: what they are called.
        on_done: called by the thread that has done something.
    """

    def __init__(self, count: int, name: str, on_done: Callable[[], object] = lambda: None) -> None:
        self._on_done = on_done
        self._count = count
        self._name = name
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_over = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with self._lock:
            if self._is_over:
                raise RuntimeError("these threads have ended")
            if len(self._threads) < self._count:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
            future: Future[T] = Future()
            self._work.put((future, lambda: fn(*args, **kwargs)))
            return future

    def _run(self) -> None:
        for future, work in iter(self._work.get, None):
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            self._on_done()
            del future, work  # they hold the bytes of a session

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads when all is done that they were given; `join` waits for them."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                for _ in self._threads:
                    self._work.put(None)

    def join(self, until: float) -> bool:
        """Wait for their end until a point of `time.monotonic`; return whether they have ended."""
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)
