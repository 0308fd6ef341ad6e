"""Several coroutines at once: all of them, or none."""

from __future__ import annotations

import asyncio

import pytest

from skyproxy.providers.all_or_none import run_all_or_none


async def _give(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_results_come_in_order_and_of_nothing_there_are_none() -> None:
    assert asyncio.run(run_all_or_none(map(_give, range(3)))) == [0, 1, 2]
    assert asyncio.run(run_all_or_none(())) == []


def test_a_failure_ends_the_others_and_is_raised_once_they_have_cleaned_up() -> None:
    seen: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise

    async def fails() -> None:
        await asyncio.sleep(0)
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        asyncio.run(run_all_or_none([waits(), fails(), waits()]))
    assert seen == ["cleaned up", "cleaned up"]


def test_who_is_cancelled_from_outside_is_cancelled_once_and_may_clean_up() -> None:
    seen: list[str] = []

    async def waits(steps: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            for _ in range(steps):  # the first is through before the others
                await asyncio.sleep(0)
            seen.append(f"cleaned up in {steps}")
            raise

    async def give_up() -> None:
        task = asyncio.create_task(run_all_or_none(map(waits, (0, 3, 6))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert seen == ["cleaned up in 0", "cleaned up in 3", "cleaned up in 6"]
