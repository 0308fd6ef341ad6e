"""The clock of a task on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch  # noqa: F401

from skyproxy.pools.gathering import Gathering
from skyproxy.runtime.instance import InstanceInfo


class WaitingCall(Future[int]):
    """A call whose function has not begun."""

    id = "waiting"

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[Callable[[], object]] = []

    def add_started_callback(self, callback: Callable[[], object]) -> None:
        self.begun.append(callback)


def test_a_timeout_counts_from_when_all_functions_run() -> None:
    calls = {rank: WaitingCall() for rank in range(2)}
    group: Any = None  # asked for nothing while all goes well
    infos = [InstanceInfo(rank=rank, world_size=2) for rank in range(2)]
    gathering = Gathering(group, infos, dict(calls), timeout_seconds=1e-9, what="the task")
    assert [len(call.begun) for call in calls.values()] == [1, 1]
    calls[0].begun[0]()
    for rank, call in calls.items():
        call.set_result(rank)
    assert gathering.future.result(60) == [0, 1]
