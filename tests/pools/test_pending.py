"""Calls that have not run: how they are written, and what the mistakes say."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import cloudpickle
import pytest

import skyproxy as sky
from skyproxy.errors import ConfigurationError, SessionLostError
from skyproxy.pools import PendingCompute, PendingGroup, PoolFuture, RemoteFunction, Retry, gather
from skyproxy.pools import pending as pending_module
from skyproxy.pools.futures import gather_futures


class Here:
    """A place that runs calls at once, in this thread: the operators' own part needs no worker."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def submit_call(self, call: PendingCompute) -> PoolFuture[Any]:
        self.made.append(call.name)
        future: PoolFuture[Any] = PoolFuture(call.name)
        try:
            future.settle(call.function(*call.args, **call.kwargs))
        except Exception as error:
            future.fail(error)
        return future

    def broadcast_call(self, call: PendingCompute) -> PoolFuture[list[Any]]:
        future: PoolFuture[list[Any]] = PoolFuture(call.name)
        future.settle([call.function(*call.args, **call.kwargs) for _ in range(2)])
        return future

    def stream_call(self, call: PendingCompute) -> Iterator[Any]:
        return iter(call.function(*call.args, **call.kwargs))


@sky.compute
def double(x: int, *, plus: int = 0) -> int:
    """Twice x."""
    return 2 * x + plus


@sky.function
def fail() -> None:
    raise KeyError("x")


@sky.compute
def count(to: int) -> Iterator[int]:
    yield from range(to)


def test_operators_say_where() -> None:
    here = Here()
    assert double(2) >> here == 4
    assert double(2, plus=1) @ here == [5, 5]
    assert (double(3) > here).result() == 6
    assert (double(1) & double(2) & double(3)) >> here == (2, 4, 6)
    assert gather(double(1), double(2) & double(3)) >> here == (2, 4, 6)
    assert gather() >> here == ()
    assert list(count(3) >> here) == list(count(3).stream(here)) == [0, 1, 2]


def test_methods_have_the_operators_meanings() -> None:
    here = Here()
    assert double(2).run(here) == 4
    assert double(2).broadcast(here) == [4, 4]
    assert double(2).submit(here).result() == 4
    assert double(2).submit_to_all(here).result() == [4, 4]


def test_futures_can_be_awaited() -> None:
    async def both() -> tuple[int, tuple[int, ...]]:
        here = Here()
        return await (double(1) > here), await ((double(1) & double(2)) > here)

    assert asyncio.run(both()) == (2, (2, 4))


def test_waiting_in_an_event_loop_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_module, "_warned", False)

    async def wait() -> None:
        double(1) >> Here()
        double(1) >> Here()

    with caplog.at_level(logging.WARNING, "skyproxy"):
        asyncio.run(wait())
    assert [record.message.count("await (f() > pool)") for record in caplog.records] == [1]


def test_options_make_another_call() -> None:
    call = double(1)
    changed = call.with_timeout(5).on(2).remote().with_retry(3)
    assert (changed.options.timeout_seconds, changed.options.on, changed.options.remote) == (5.0, 2, True)
    assert changed.options.retry == Retry(3)
    assert call.options == sky.compute(len)([]).options
    assert call.options.timeout_seconds is None  # training takes as long as it takes
    assert changed.with_timeout(None).options.timeout_seconds is None
    assert double(1).on("head").options.rank == 0
    assert (double(1) & double(2)).with_timeout(3).remote().calls[1].options.timeout_seconds == 3.0


@pytest.mark.parametrize(
    "write",
    [
        lambda: double(1).with_timeout(0),
        lambda: double(1).with_timeout(float("nan")),
        lambda: double(1).with_timeout("1s"),  # type: ignore[arg-type]
        lambda: sky.compute(timeout=0)(len),
        lambda: sky.compute(timeout="1s")(len),
        lambda: sky.function(timeout=-1)(len),
        lambda: sky.function(retry=-1)(len),
        lambda: sky.function(remote="yes"),  # type: ignore[call-overload]
        lambda: sky.compute(isolate=1),
        lambda: sky.compute(len, timeout=0),  # type: ignore[call-overload]
        lambda: sky.compute(len, name="x"),  # type: ignore[call-overload]
        lambda: Retry(times=-1),
        lambda: Retry(times=True),
        lambda: Retry(on=[OSError]),  # type: ignore[arg-type]
        lambda: Retry(on=("OSError",)),  # type: ignore[arg-type]
        lambda: Retry(backoff_seconds=-1),
        lambda: Retry(backoff_seconds=float("inf")),
        lambda: double(1).on("tail"),
        lambda: double(1).on(-1),
        lambda: double(1).on(True),
        lambda: double(1).with_retry(-1),
        lambda: double(1).on(1) @ Here(),
        lambda: sky.compute(double),
        lambda: sky.compute(3),
        lambda: sky.compute(colour="red"),
        lambda: sky.compute(name="x")(lambda: None),
        lambda: sky.compute(name="x")(print),
    ],
)
def test_what_cannot_work_is_refused(write: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError):
        write()


@pytest.mark.parametrize(
    ("write", "explained"),
    [
        (lambda h: double(1) & (double(2) >> h), r"\(double\(\) & b\(\)\) >> pool"),
        (lambda h: (double(1) >> h) & double(2), "bind tighter than `&`"),
        (lambda h: double(1) & double(2) @ h, "bind tighter"),
        (lambda h: double(1) > h > h, "one comparison per line"),
        (lambda h: h > double(1) > h, "one comparison per line"),
        (lambda h: h >> double(1), "on the right"),
        (lambda h: h @ double(1), "on the right"),
        (lambda h: double(1) + 1 >> h, "in parentheses"),
        (lambda h: 1 + double(1) >> h, "in parentheses"),
        (lambda h: double(1) >= h, ">>"),
        (lambda h: bool(double(1)), "no value"),
        (lambda h: list(double(1)), "no value"),
        (lambda h: list(double(1) & double(2)), "no value"),
        (lambda h: double(1)[0], "in parentheses"),
        (lambda h: double >> h, r"double\(...\) >> pool"),
        (lambda h: double @ h, r"double\(...\) @ pool"),
        (lambda h: double > h, r"double\(...\) > pool"),
        (lambda h: double & double(1), r"double\(...\) & pool"),
        (lambda h: double(1) >> double(2), "as an argument"),
        (lambda h: double(1) >> sky.Compute, "a class"),
        (lambda h: double(1) >> 3, "a pool or a node"),
        (lambda h: (double(1) & double(2)) @ h, "several calls"),
        (lambda h: gather(double), "f\\(x\\), not f"),
        (lambda h: double(), "double"),
        (lambda h: double(1, 2), "double"),
    ],
)
def test_a_mistake_is_explained(write: Callable[[Any], Any], explained: str) -> None:
    with pytest.raises(TypeError, match=explained):
        write(Here())


def test_awaiting_a_call_is_explained() -> None:
    async def wait() -> None:
        await double(1)

    with pytest.raises(TypeError, match=r"await \(f\(\) > pool\)"):
        asyncio.run(wait())


def test_a_call_that_has_not_run_is_no_argument_and_no_result() -> None:
    with pytest.raises(TypeError, match=r"double has not run yet.*g\(f\(\) >> pool\) >> pool"):
        cloudpickle.dumps(double(1))


def test_options_beside_the_function_count() -> None:
    decorate: Any = sky.compute
    options = decorate(len, isolate=True, timeout=5)([]).options
    assert (options.isolate, options.timeout_seconds) == (True, 5.0)


def test_the_function_itself_still_works() -> None:
    assert double.local(2) == 4
    assert double.__name__ == "double"
    assert double.__doc__ == "Twice x."


def test_both_orders_of_decorators_mean_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> str:
        print("words")
        return "done"

    above = sky.silent(sky.compute(speak))
    below = sky.compute(sky.silent(speak))
    for function in (above, below):
        assert isinstance(function, RemoteFunction)
        assert function() >> Here() == "done"
    assert capsys.readouterr().out == ""
    assert sky.compute(speak)() >> Here() == "done"
    assert capsys.readouterr().out == "words\n"


def test_options_of_the_decorator() -> None:
    decorated = sky.function(timeout=3, on="head", remote=True, retry=2)(len)
    options = decorated([]).options
    assert (options.timeout_seconds, options.on, options.remote, options.retry) == (3, "head", True, Retry(2))
    assert sky.compute(timeout=3)(len)([]).options.timeout_seconds == 3


def test_methods_can_be_decorated() -> None:
    class Adder:
        def __init__(self, n: int) -> None:
            self.n = n

        @sky.compute
        def add(self, x: int) -> int:
            return self.n + x

    assert Adder(5).add(1) >> Here() == 6


def test_a_decorated_function_travels() -> None:
    copy = cloudpickle.loads(cloudpickle.dumps(double))
    assert copy(4) >> Here() == 8


def test_the_first_failure_of_a_group_is_raised_and_ends_the_others() -> None:
    with pytest.raises(KeyError, match="x"):
        (double(1) & fail()) >> Here()
    first: PoolFuture[int] = PoolFuture("a")
    second: PoolFuture[int] = PoolFuture("b")
    ended: list[str] = []
    second.on_cancel(lambda: ended.append("b"))
    whole = gather_futures([first, second], "both")
    first.fail(ValueError("first"))
    with pytest.raises(ValueError, match="first"):
        whole.result(5)
    assert ended == ["b"]


def test_cancelling_a_group_cancels_its_calls() -> None:
    parts: list[PoolFuture[int]] = [PoolFuture("a"), PoolFuture("b")]
    assert gather_futures(parts, "both").cancel()
    assert all(part.cancelled() for part in parts)


def test_a_future_cancelled_before_its_call_ends_it_when_it_begins() -> None:
    future: PoolFuture[int] = PoolFuture("a")
    future.cancel()
    ended: list[int] = []
    future.on_cancel(lambda: ended.append(1))
    future.settle(1)
    assert ended == [1]
    assert future.cancelled()


def test_a_future_follows_another() -> None:
    for finish in (lambda f: f.set_result(1), lambda f: f.set_exception(KeyError()), lambda f: f.cancel()):
        other: Future[int] = Future()
        future: PoolFuture[int] = PoolFuture("a")
        future.follow(other)
        finish(other)
        assert future.done()
        assert future.cancelled() == other.cancelled()


def test_a_retry_is_a_number_or_an_object() -> None:
    assert Retry.parse(0) is None
    assert Retry.parse(2) == Retry(2, (SessionLostError,))
    assert Retry.parse(Retry(1, (OSError,))) == Retry(1, (OSError,))


def test_names_are_for_people() -> None:
    assert repr(double(1)) == "<double(...), not run yet: `>> pool` runs it>"
    assert PendingGroup([double(1), count(1)]).name == "double() & count()"
