"""Turns that are shared among groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from skyproxy_operator.fair_turns import FairTurns
from tests.operator.virtual_time import run_virtually


class Slow:
    """What takes a turn for a while, and remembers who had one when."""

    def __init__(self, at_once: int, seconds: float = 5.0) -> None:
        self.turns = FairTurns(at_once)
        self.begun: list[tuple[float, str]] = []
        self.active = 0
        self.most = 0
        self._seconds = seconds

    async def work(self, group: str) -> None:
        async with self.turns.turn(group):
            self.begun.append((asyncio.get_running_loop().time(), group))
            self.active += 1
            self.most = max(self.most, self.active)
            await asyncio.sleep(self._seconds)
            self.active -= 1


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtually(main())


def test_one_group_has_half_of_the_turns_and_another_begins_at_once() -> None:
    slow = Slow(4)

    async def main() -> None:
        crowd = [asyncio.ensure_future(slow.work("crowd")) for _ in range(40)]
        await asyncio.sleep(1)
        await slow.work("one")
        await asyncio.gather(*crowd)

    run(main)
    assert (1.0, "one") in slow.begun
    assert [group for when, group in slow.begun if when == 0.0] == ["crowd"] * 2
    assert (len(slow.begun), slow.most) == (41, 3)


def test_groups_take_turns_however_many_wait_in_each() -> None:
    slow = Slow(2)

    async def main() -> None:
        works = [slow.work(group) for group, count in (("a", 20), ("b", 20), ("c", 2)) for _ in range(count)]
        await asyncio.gather(*works)

    run(main)
    last = max(when for when, group in slow.begun if group == "c")
    assert last <= 15.0
    assert (len(slow.begun), slow.most) == (42, 2)


def test_who_gives_up_waiting_leaves_its_turn_to_the_next() -> None:
    slow = Slow(2)

    async def main() -> None:
        first = [asyncio.ensure_future(slow.work("a")) for _ in range(4)]
        await asyncio.sleep(1)
        first[1].cancel()
        first[3].cancel()
        await asyncio.gather(*first, return_exceptions=True)
        # Nothing is held any more, by whoever was cancelled while it waited or had just been given a turn.
        assert (slow.turns._held, dict(slow.turns._waiting), slow.turns._free) == ({}, {}, 2)

    run(main)
    assert [when for when, _ in slow.begun] == [0.0, 5.0]


def test_a_turn_that_comes_with_the_cancellation_is_passed_on() -> None:
    slow = Slow(2)

    async def main() -> None:
        holder = asyncio.ensure_future(slow.work("a"))
        waiting = [asyncio.ensure_future(slow.work("a")) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        holder.cancel()
        await asyncio.sleep(0)
        # The first has its turn, and has not run since.
        waiting[0].cancel()
        await asyncio.gather(holder, *waiting, return_exceptions=True)
        assert (slow.turns._held, dict(slow.turns._waiting), slow.turns._free) == ({}, {}, 2)

    run(main)
    assert len(slow.begun) == 2


def test_an_error_gives_the_turn_back() -> None:
    turns = FairTurns(1)

    async def main() -> None:
        for _ in range(3):
            try:
                async with turns.turn("a"):
                    raise ValueError
            except ValueError:
                continue

    run(main)
    assert (turns._held, turns._free) == ({}, 1)
