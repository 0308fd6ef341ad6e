"""What the caller of a function is told of errors whose own code gets in the way of telling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

import skyproxy
from skyproxy.errors import RankErrors, RemoteFunctionError
from skyproxy_server.functions.call_errors import CallInterrupt, describe_failure


class SaysNothing(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class ExitsWhenRead(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Frozen(Exception):
    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} cannot be set")


class FrozenModule(ModuleNotFoundError):
    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} cannot be set")


KINDS = [SaysNothing, ExitsWhenRead, Frozen, FrozenModule]


def _raise(kind: type[Exception]) -> Callable[[], Any]:
    def function() -> NoReturn:
        raise kind("words")

    return function


@pytest.fixture(scope="module")
def pool() -> Iterator[skyproxy.Compute]:
    with skyproxy.Compute(provider=skyproxy.Local(device="cpu")) as pool:
        yield pool


@pytest.mark.parametrize("kind", [Frozen, FrozenModule])
@pytest.mark.parametrize("isolate", [False, True])
def test_an_error_that_nobody_can_change_keeps_its_class_and_says_where_it_came_from(
    pool: skyproxy.Compute, kind: type[Exception], isolate: bool
) -> None:
    error = pool.nodes[0].submit(_raise(kind), isolate=isolate).exception(60)
    assert type(error) is kind
    assert "on the worker" in error.__notes__[-1]
    assert "in function" in str(error.__cause__)
    assert "skyproxy" not in str(error.__cause__).replace(__file__, ""), "frames of ours, that led to the function"
    with pytest.raises(RankErrors) as caught:
        skyproxy.compute(_raise(kind))() @ pool
    assert "skyproxy" not in str(caught.value.exceptions[0].__cause__).replace(__file__, "")
    assert "On rank 0 of 1" in caught.value.exceptions[0].__notes__[-1]


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, GeneratorExit])
def test_what_would_end_a_loop_of_the_caller_in_silence_is_told(
    pool: skyproxy.Compute, kind: type[BaseException]
) -> None:
    def end() -> NoReturn:
        raise kind

    with pytest.raises(RemoteFunctionError, match=f"end raised {kind.__name__} on the worker.*end a loop"):
        pool.run(end)

    async def wait() -> None:
        await (skyproxy.compute(end)() > pool)

    with pytest.raises(RemoteFunctionError, match=kind.__name__):
        asyncio.run(asyncio.wait_for(wait(), 60))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isolate", [False, True])
def test_the_caller_of_a_function_learns_of_an_error_whatever_its_own_code_does(
    pool: skyproxy.Compute, kind: type[Exception], isolate: bool
) -> None:
    error = pool.nodes[0].submit(_raise(kind), isolate=isolate).exception(60)
    assert kind.__name__ in type(error).__name__ + (str(error) if isinstance(error, RemoteFunctionError) else "")
    assert pool.run(abs, -1) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_streams_and_calls_on_all_processes_end_with_such_an_error(
    pool: skyproxy.Compute, kind: type[Exception]
) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise kind("words")

    found = skyproxy.function(items)().stream(pool)
    assert next(found) == 1
    with pytest.raises((kind, RemoteFunctionError)):
        next(found)
    with pytest.raises((kind, RemoteFunctionError, RankErrors)):
        skyproxy.function(_raise(kind))() @ pool
    assert pool.run(abs, -1) == 1


def test_what_cannot_be_described_is_named_by_its_class() -> None:
    words, pickled = describe_failure(ExitsWhenRead("words"), "load", ["/project"], False)
    assert (words["type"], pickled) == ("ExitsWhenRead", None)
    assert "which cannot be described: <SystemExit object at" in words["message"]


def test_a_cancellation_that_strikes_there_is_none_of_the_errors_doing() -> None:
    class Cancelled(Exception):
        def __str__(self) -> str:
            raise CallInterrupt

    with pytest.raises(CallInterrupt):
        describe_failure(Cancelled(), "load", [], False)
