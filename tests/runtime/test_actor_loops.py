"""The event loop of an actor: one for all its async methods, whoever calls them."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import skyproxy as sky
from skyproxy.errors import ActorDiedError
from skyproxy.runtime.actor_loops import ActorLoop

PATIENCE_SECONDS = 60


@pytest.fixture
def loop() -> Iterator[ActorLoop]:
    loop = ActorLoop()
    yield loop
    loop.stop()
    thread = loop._thread
    if thread is not None:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


class Station:
    """What needs one loop: an event, a lock, a task that goes on between calls."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.arrived = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.loops: set[asyncio.AbstractEventLoop] = set()

    async def begin(self) -> None:
        await self.lock.acquire()
        self.loops.add(asyncio.get_running_loop())
        self.task = asyncio.create_task(self.travel())

    async def travel(self) -> None:
        await asyncio.sleep(0)
        self.arrived.set()
        self.lock.release()

    async def wait(self) -> int:
        await self.arrived.wait()
        async with self.lock:
            self.loops.add(asyncio.get_running_loop())
        return len(self.loops)

    async def stops(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            async with self.lock:
                yield number


def test_locks_events_and_tasks_outlive_the_call_that_made_them(loop: ActorLoop) -> None:
    station = Station()
    asyncio.run(loop.run(station.begin()))
    assert asyncio.run(loop.run(station.wait())) == 1

    async def collect() -> list[int]:
        return [number async for number in loop.items(station.stops(3))]

    assert asyncio.run(collect()) == [0, 1, 2]


def test_a_generator_that_is_left_is_closed_on_its_loop(loop: ActorLoop) -> None:
    ended: list[asyncio.AbstractEventLoop] = []

    async def endless() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            ended.append(asyncio.get_running_loop())

    async def take_one() -> None:
        items = loop.items(endless())  # type: ignore[arg-type]
        assert await anext(items) == 1
        await items.aclose()  # type: ignore[attr-defined]

    asyncio.run(take_one())
    assert ended == [loop._loop]


def test_a_method_runs_in_the_context_of_its_caller(loop: ActorLoop) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")

    async def read() -> str:
        return variable.get("none")

    async def call(value: str) -> Any:
        variable.set(value)
        return await loop.run(read())

    assert [asyncio.run(call(value)) for value in "ab"] == ["a", "b"]
    assert asyncio.run(loop.run(read())) == "none"


def test_a_cancelled_method_without_an_await_is_interrupted_and_the_next_one_runs(loop: ActorLoop) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def spin() -> None:
        begun.set()
        try:
            while True:
                pass
        finally:
            ended.set()

    async def call() -> None:
        running = asyncio.create_task(loop.run(spin()))
        await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    async def seven() -> int:
        return 7

    asyncio.run(call())
    assert ended.wait(PATIENCE_SECONDS)
    assert asyncio.run(loop.run(seven())) == 7


def test_the_end_of_an_actor_cancels_what_waits_on_its_loop(loop: ActorLoop) -> None:
    waiting = threading.Event()

    async def wait() -> None:
        waiting.set()
        await asyncio.Event().wait()

    async def call() -> None:
        running = asyncio.create_task(loop.run(wait()))
        await asyncio.to_thread(waiting.wait, PATIENCE_SECONDS)
        loop.stop()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(call())
    with pytest.raises(ActorDiedError, match="has ended"):
        asyncio.run(loop.run(wait()))


class Remote(sky.Actor):
    def __init__(self) -> None:
        self.station = Station()

    async def begin(self) -> None:
        print("begins")
        await self.station.begin()

    async def wait(self) -> int:
        return await self.station.wait()

    async def stops(self, count: int) -> AsyncIterator[int]:
        async for number in self.station.stops(count):
            yield number

    async def sleep(self) -> None:
        await asyncio.Event().wait()


def test_async_methods_of_an_actor_share_its_loop(capsys: pytest.CaptureFixture[str]) -> None:
    with sky.Compute(provider=sky.Local(device="cpu")) as pool:
        remote: Any = Remote.on(pool)()
        remote.begin().result(PATIENCE_SECONDS)
        sleeping = remote.sleep()
        with pytest.raises(TimeoutError):
            sleeping.result(0.2)
        assert sleeping.cancel()
        assert remote.wait().result(PATIENCE_SECONDS) == 1
        assert list(remote.stops(3)) == [0, 1, 2]
    assert "begins\n" in capsys.readouterr().out
