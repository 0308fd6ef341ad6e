"""Barriers, counters and locks over all ranks, on a `TCPStore` of the head; for tasks without a process group."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from skyproxy.errors import ConfigurationError
from skyproxy.plugins.process_group import JOIN_TIMEOUT_SECONDS, store_on_the_head
from skyproxy.runtime.instance import InstanceInfo
from skyproxy.runtime.lifecycle import port_for
from skyproxy.runtime.plugin import Plugin

_LONGEST_PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class CoordinationPlugin(Plugin):
    """`sky.plugins.coordination()`: makes `barrier`, `counter` and `lock` work in the pool's tasks.

    Attributes:
        join_timeout_seconds: how long a rank tries to reach the head's store.

    Example:
        ```python
        @skyproxy.function
        def task() -> int:
            skyproxy.plugins.barrier()
            return skyproxy.plugins.counter("tasks").add()


        with skyproxy.Compute(provider=skyproxy.Local(), nodes=2, plugins=[skyproxy.plugins.coordination()]) as pool:
            print(sorted(task() @ pool))  # [1, 2]
        ```
    """

    join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS

    @property
    def name(self) -> str:
        return "coordination"

    def around_app(self, info: InstanceInfo) -> contextlib.AbstractContextManager[object]:
        """The head's store, and everybody's connection to it."""
        return self._store(info)

    @contextlib.contextmanager
    def _store(self, info: InstanceInfo) -> Iterator[None]:
        from torch.distributed import HashStore  # type: ignore[attr-defined]

        global _meeting
        store: Any
        if info.world_size == 1:
            store = HashStore()
        else:
            store = store_on_the_head(info, port_for("coordination", info), self.join_timeout_seconds)
        _meeting = _Meeting(store, info)
        try:
            yield
        finally:
            _meeting = None

    def abort(self, info: InstanceInfo) -> None:
        """Whoever waits stops waiting."""
        if _meeting is not None:
            _meeting.aborted = True


class _Meeting:
    """The store of this process's pool, and what this rank knows about it."""

    def __init__(self, store: Any, info: InstanceInfo) -> None:
        self.store = store
        self.info = info
        self.aborted = False
        self._rounds: dict[str, int] = {}
        self._lock = threading.Lock()

    def next_round(self, name: str) -> int:
        with self._lock:
            self._rounds[name] = number = self._rounds.get(name, 0) + 1
        return number

    def wait(self, done: Callable[[], bool], timeout_seconds: float | None) -> bool:
        """Return whether something came about in time. In short steps: one connection serves all threads of the
        process.
        """
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        pause = 0.0005
        while not done():
            if self.aborted:
                raise RuntimeError("another rank failed, so nobody else will arrive")
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return True


_meeting: _Meeting | None = None


def _current_meeting() -> _Meeting:
    if _meeting is None:
        raise ConfigurationError(
            "barrier, counter and lock need the pool's store. Add sky.plugins.coordination() to the pool's plugins."
        )
    return _meeting


def barrier(name: str = "", timeout_seconds: float | None = None) -> None:
    """Waits until every rank has come here; can be used again and again, as long as all ranks do so equally often.

    Args:
        name: tells barriers apart that may be waited at in different orders.
        timeout_seconds: how long to wait; forever by default.

    Raises:
        TimeoutError: some ranks did not come; names them.

    Example:
        ```python
        @skyproxy.function
        def step() -> None:
            skyproxy.plugins.barrier("step", timeout_seconds=60)


        step() @ pool  # the pool has plugins=[skyproxy.plugins.coordination()]
        ```
    """
    meeting = _current_meeting()
    store, info = meeting.store, meeting.info
    key = f"barrier/{name}/{meeting.next_round(name)}"
    keys = [f"{key}/{rank}" for rank in range(info.world_size)]
    store.set(keys[info.rank], "1")
    if not meeting.wait(lambda: bool(store.check(keys)), timeout_seconds):
        missing = [str(rank) for rank, own in enumerate(keys) if not store.check([own])]
        raise TimeoutError(f"barrier {name!r}: rank {', '.join(missing)} did not arrive within {timeout_seconds:.1f} s")


@dataclass(frozen=True)
class Counter:
    """A number that all ranks share.

    Attributes:
        name: tells counters apart.
    """

    name: str

    def add(self, amount: int = 1) -> int:
        """Adds, in one step that nobody else can come between.

        Returns:
            The new value.
        """
        return int(_current_meeting().store.add(f"counter/{self.name}", amount))

    @property
    def value(self) -> int:
        """The number that it stands at."""
        return self.add(0)


def counter(name: str = "") -> Counter:
    """The counter of that name; it begins with 0.

    Example:
        ```python
        @skyproxy.function
        def task() -> int:
            return skyproxy.plugins.counter("tasks").add()


        print(task() @ pool)  # the pool has plugins=[skyproxy.plugins.coordination()]
        ```
    """
    return Counter(name)


@contextlib.contextmanager
def lock(name: str = "", timeout_seconds: float | None = None) -> Iterator[None]:
    """Only one task of all ranks is inside the `with` block at a time. Not reentrant, and in no order.

    Args:
        name: tells locks apart.
        timeout_seconds: how long to wait; forever by default.

    Raises:
        TimeoutError: it was not free in time; names the rank that holds it.

    Example:
        ```python
        @skyproxy.function
        def alone() -> None:
            with skyproxy.plugins.lock("download", timeout_seconds=60):
                print("one at a time")


        alone() @ pool  # the pool has plugins=[skyproxy.plugins.coordination()]
        ```
    """
    meeting = _current_meeting()
    store, key = meeting.store, f"lock/{name}"
    # Unique, so that even the same thread waits for itself: taking a lock twice is a mistake that a timeout shows.
    own = f"rank {meeting.info.rank}, process {os.getpid()} ({secrets.token_hex(4)})"
    if not meeting.wait(lambda: bool(store.compare_set(key, "", own) == own.encode()), timeout_seconds):
        holder = store.get(key).decode() or "nobody now"
        raise TimeoutError(f"lock {name!r} was not free within {timeout_seconds:.1f} s; held by {holder}")
    try:
        yield
    finally:
        store.compare_set(key, own, "")
