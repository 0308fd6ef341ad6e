"""The items of a generator function, as an event loop takes them."""

from __future__ import annotations

import asyncio
from typing import Any

import skyproxy


def test_the_items_of_an_executed_generator_function_can_be_awaited(node: skyproxy.Node) -> None:
    async def use() -> list[int]:
        items: Any = await node.execute(lambda: (n * n for n in range(4)))
        return [item async for item in items]

    assert asyncio.run(use()) == [0, 1, 4, 9]
