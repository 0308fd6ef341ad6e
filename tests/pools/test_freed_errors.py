"""Results that were dropped, and errors that were caught, are freed at once: nothing waits for Python's collector."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

import skyproxy as sky
from skyproxy.pools import Compute


class Full(Exception):
    """Holds much, it may be."""


def fail(argument: object = None) -> None:
    raise Full(bytes(1000))


def fail_at_last(number: int) -> None:
    if number == 1999:
        fail()


def fail_later(argument: object = None) -> Iterator[int]:
    yield 1
    raise Full(bytes(1000))


@sky.actor
class Failing:
    def fail(self) -> None:
        fail()


@pytest.fixture(scope="module")
def pool() -> Iterator[Compute]:
    with Compute(name="errors", provider=sky.Local(device="cpu")) as pool:
        yield pool


def make(argument: object = None) -> Full:
    return Full(bytes(1000))


def make_several(argument: object = None) -> Iterator[Full]:
    yield from (Full(), Full())


class Making(sky.Actor):
    def make(self) -> Full:
        return make()

    async def make_later(self) -> Full:
        return make()


async def awaited(pool: Compute) -> Full:
    return await (sky.compute(make)() > pool)


def called_back(future: Future[Full]) -> Full:
    found: list[Full] = []
    told = threading.Event()

    def take(done: Future[Full]) -> None:
        found.append(done.result())
        told.set()

    future.add_done_callback(take)
    assert told.wait(60)
    return found.pop()


RESULTS: dict[str, Callable[[Compute], Full]] = {
    "run": lambda pool: pool.run(make),
    "callback": lambda pool: called_back(pool.submit(make)),
    "await": lambda pool: asyncio.run(awaited(pool)),
    "group": lambda pool: ((sky.compute(make)() & sky.compute(make)()) >> pool)[1],
    "broadcast": lambda pool: (sky.compute(make)() @ pool)[0],
    "map": lambda pool: list(pool.map(make, range(3)))[1],
    "stream": lambda pool: list(pool.run(make_several))[1],
    "node": lambda pool: pool.nodes[0].run(make),
    "isolated": lambda pool: pool.nodes[0].submit(make, isolate=True).result(),
    "actor": lambda pool: Making.on(pool)().make(),
    "coroutine of an actor": lambda pool: pool.submit(Making.on(pool)().make_later).result(),
    "actor on each": lambda pool: Making.on_all(pool)().broadcast(Making.make)[0],
}


def assert_freed(seen: weakref.ref[Full]) -> None:
    """Without the collector, though not at the same moment: the thread that brought it may be about to let go of it."""
    deadline = time.monotonic() + 30
    while seen() is not None and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert seen() is None, gc.get_referrers(seen())


@pytest.mark.parametrize("way", RESULTS)
def test_a_result_that_was_dropped_is_freed_at_once(pool: Compute, way: str) -> None:
    gc.disable()
    try:
        assert_freed(weakref.ref(RESULTS[way](pool)))
    finally:
        gc.enable()


WAYS: dict[str, Callable[[Compute], object]] = {
    "run": lambda pool: pool.run(fail),
    "result": lambda pool: pool.submit(fail).result(),
    "result in time": lambda pool: pool.submit(fail).result(60),
    "operator": lambda pool: sky.compute(fail)() >> pool,
    "map": lambda pool: list(pool.map(fail, range(3))),
    "map of many": lambda pool: list(pool.map(fail_at_last, range(2000))),
    "stream": lambda pool: list(pool.run(fail_later)),
    "call": lambda pool: pool.nodes[0].submit(fail).result(),
    "node": lambda pool: pool.nodes[0].run(fail),
    "actor": lambda pool: Failing.on(pool)().fail(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_caught_error_is_freed_at_once(pool: Compute, way: str) -> None:
    gc.disable()
    try:
        try:
            WAYS[way](pool)
        except Full as error:
            caught = weakref.ref(error)
        assert_freed(caught)
    finally:
        gc.enable()
