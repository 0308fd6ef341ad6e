"""Several coroutines at once: all of them, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_all_or_none(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results, in order. The first failure cancels the rest, waits for their end and is raised as it is."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            if not task.cancelling():  # by whoever cancelled us: once more would break off what it cleans up
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
