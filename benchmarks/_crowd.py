"""A pool's scheduler with any number of workers in memory, which do nothing at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from skyproxy.pools.call_options import CallOptions
from skyproxy.pools.pending import PendingCompute
from skyproxy.pools.ranks import RankGroup
from skyproxy.pools.scheduler import Scheduler
from skyproxy.runtime.instance import InstanceInfo


class _Call:
    """A call that ends when the crowd's thread comes to it."""

    is_light = True

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], object]] = []

    def result(self, timeout: float | None = None) -> None:
        """Nothing."""

    def cancel(self) -> bool:
        """Too late."""
        return False

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """For the end."""
        self._callbacks.append(callback)
        _ended.put(self)

    def end(self) -> None:
        """The function has run."""
        for callback in self._callbacks:
            callback(self)


_ended: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()


class _Node:
    alive = True
    url = "memory"
    _session = None
    _devices: tuple[object, ...] = ()

    def submit_payload(self, payload: object, **options: object) -> _Call:
        return _Call()


class _Group(RankGroup):
    def ensure(self) -> None:
        """Nothing is to be formed."""


class Crowd:
    """So many workers, and the scheduler for them."""

    def __init__(self, nodes: int) -> None:
        info = InstanceInfo(
            node=0,
            total_nodes=nodes,
            head_addr="127.0.0.1",
            head_port=1,
            accelerators=0,
            peers=(),
            rank=0,
            world_size=nodes,
            local_rank=0,
            procs_per_node=1,
            job="crowd",
        )
        group = _Group("crowd", [_Node() for _ in range(nodes)], [info] * nodes)  # type: ignore[misc]
        self._scheduler = Scheduler(group, concurrency=1, retry=None)
        self._thread = threading.Thread(target=self._end_calls, daemon=True)

    def _end_calls(self) -> None:
        while (call := _ended.get()) is not None:
            call.end()

    def run(self, function: Callable[..., object], count: int) -> None:
        """Make so many calls, and wait for them."""
        call: PendingCompute[object] = PendingCompute(function, (), {}, CallOptions(), "nothing")
        for future in [self._scheduler.submit(call) for _ in range(count)]:
            future.result()

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._scheduler.close()
        _ended.put(None)
        self._thread.join()
