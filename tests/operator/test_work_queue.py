"""The queue of keys to look at."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from skyproxy_operator.work_queue import CHANGED, NEW, ROUTINE, WorkQueue
from tests.operator.virtual_time import run_virtually

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


def test_groups_take_turns_and_what_is_not_urgent_has_every_fourth() -> None:
    async def scenario() -> None:
        queue: WorkQueue[tuple[str, int]] = WorkQueue(group_of=lambda key: key[0])
        for number in range(20):
            queue.add(("many", number), NEW)
        queue.add(("few", 0), NEW)
        queue.add(("patient", 0), ROUTINE)
        first = [await queue.get() for _ in range(4)]
        assert first == [("many", 0), ("few", 0), ("many", 1), ("patient", 0)]
        assert [number for _, number in [await queue.get() for _ in range(18)]] == list(range(2, 20))
        queue.close()

    run_virtually(scenario())


def test_a_key_that_is_added_all_the_time_has_two_looks_a_second() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        loop, looks = asyncio.get_running_loop(), []

        async def look() -> None:
            while True:
                key = await queue.get()
                looks.append(loop.time())
                queue.done(key)

        work = asyncio.create_task(look())
        for _ in range(6000):
            queue.add("busy", NEW)
            await asyncio.sleep(0.01)
        assert len([when for when in looks if when < 0.5]) == 30
        assert 130 <= len(looks) <= 152
        # Who has been quiet for a while is looked at at once again, as often as at first.
        await asyncio.sleep(60)
        looks.clear()
        for _ in range(30):
            queue.add("busy")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert len(looks) == 30
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        queue.close()

    run_virtually(scenario())


def test_a_look_that_must_wait_keeps_its_urgency() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        for _ in range(30):
            queue.add("busy")
            queue.done(await queue.get())
        queue.add("busy", NEW)
        queue.add("busy", ROUTINE)
        queue.add_later("busy", 60)
        assert len(queue) == 0
        await asyncio.sleep(1)
        queue.add("other", CHANGED)
        assert await queue.get() == "busy"
        queue.close()

    run_virtually(scenario())


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
