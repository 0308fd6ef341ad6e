"""Errors that were caught are freed at once, with all that they hold: nothing waits for Python's collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

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
        assert caught() is None, gc.get_referrers(caught())
    finally:
        gc.enable()
