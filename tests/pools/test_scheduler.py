"""Races and mistakes at the ends of a pool's calls, with real workers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest
import torch

import skyproxy as sky
from skyproxy.pools import Compute
from skyproxy.pools.actor_calls import ActorCalls
from skyproxy.pools.pool_task import PoolTask
from skyproxy.pools.scheduler import Scheduler


@pytest.fixture(scope="module")
def pool() -> Iterator[Compute]:
    with Compute(provider=sky.Local(device="cpu")) as pool:
        yield pool


class Adder(sky.Actor):
    def add(self, one: int, two: int) -> int:
        return one + two


@sky.compute
def double(x: Any) -> Any:
    return x + x


@sky.compute
def count(to: int) -> Iterator[int]:
    yield from range(to)


def test_a_stream_that_has_begun_before_its_call_returns_is_found(
    pool: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Scheduler._start

    def start_and_wait(self: Scheduler, task: PoolTask) -> None:
        future = task.future
        start(self, task)
        assert wait([future], 60).done

    monkeypatch.setattr(Scheduler, "_start", start_and_wait)
    assert list(count(3).stream(pool)) == [0, 1, 2]


def test_a_mistake_of_ours_at_the_end_of_a_call_leaves_nobody_waiting(
    pool: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = Scheduler._release

    def fail_once(self: Scheduler, task: PoolTask, prefer: bool = False) -> None:
        monkeypatch.setattr(Scheduler, "_release", release)
        release(self, task, prefer)
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(Scheduler, "_release", fail_once)
    with pytest.raises(ZeroDivisionError, match="of ours"):
        (double(torch.ones(1 << 20)) > pool).result(60)  # whose result is taken on a thread for results
    assert double(2) >> pool == 4


def test_the_last_call_of_an_actor_that_nobody_holds_has_its_result(
    pool: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An actor ends on another thread; here at once, where its handle goes.
    monkeypatch.setattr(ActorCalls, "retire", ActorCalls._retire)
    assert Adder.on_all(pool)().submit(Adder.add, 1, 2).result(60) == [3]
    assert pool.submit(Adder.on(pool)().add, 3, 4).result(60) == 7
