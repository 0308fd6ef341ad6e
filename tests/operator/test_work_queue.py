"""The queue of keys to look at."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from skyproxy_operator.work_queue import CHANGED, NEW, ROUTINE, WorkQueue

Scenario = Callable[[WorkQueue[str]], Awaitable[None]]


def run(scenario: Scenario) -> None:
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        try:
            await asyncio.wait_for(scenario(queue), 30)
        finally:
            queue.close()

    asyncio.run(main())


def test_a_key_waits_once_however_often_it_is_added() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        for key in ("a", "b", "a", "a"):
            queue.add(key)
        assert (await queue.get(), await queue.get(), len(queue)) == ("a", "b", 0)

    run(scenario)


def test_a_key_that_is_looked_at_is_looked_at_again_afterwards_and_never_at_the_same_time() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        queue.add("a")
        await queue.get()
        queue.add("a")
        queue.add("a")
        assert len(queue) == 0
        queue.done("a")
        assert await queue.get() == "a"
        queue.done("a")
        assert len(queue) == 0

    run(scenario)


def test_somebody_who_waits_is_woken() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.add("a")
        assert await waiting == "a"

    run(scenario)


def test_of_several_times_the_earliest_counts() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        queue.add_later("a", 1000)
        queue.add_later("a", 0.0)
        queue.add_later("a", 500)
        assert await queue.get() == "a"
        queue.done("a")
        assert queue._timers == {}

    run(scenario)


def test_a_look_now_takes_the_place_of_one_later() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        queue.add_later("a", 1000)
        queue.add("a")
        assert queue._timers == {}
        assert await queue.get() == "a"

    run(scenario)


@pytest.mark.parametrize("end", ["forget", "close"])
def test_what_was_to_come_later_can_be_called_off(end: str) -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        queue.add_later("a", 1000)
        queue.forget("a") if end == "forget" else queue.close()
        assert queue._timers == {}

    run(scenario)


def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.add("a")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert await queue.get() == "a"

    run(scenario)


def test_what_is_urgent_goes_first_and_a_key_goes_by_its_highest_urgency() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        for key, urgency in (("old", ROUTINE), ("late", ROUTINE), ("changed", CHANGED), ("new", NEW), ("late", NEW)):
            queue.add(key, urgency)
        queue.add("new", ROUTINE)
        assert len(queue) == 4
        assert [await queue.get() for _ in range(4)] == ["new", "late", "changed", "old"]
        queue.add("old", ROUTINE)
        queue.add("old", NEW)
        queue.add("other", CHANGED)
        queue.done("old")
        assert await queue.get() == "old"

    run(scenario)
