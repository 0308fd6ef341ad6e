"""A pool's `map`, whose short calls travel together: order, failures, what is given back, replies that cannot be."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.pools import mapping
from skyproxy.pools.call_options import CallOptions, Retry
from skyproxy.pools.futures import PoolFuture
from skyproxy.pools.mapping import GroupingMap
from skyproxy.pools.pending import PendingCompute
from skyproxy.runtime import call_groups
from skyproxy.runtime.call_groups import GroupTask


class Threads:
    """A scheduler that makes every call at once, on a thread of its own."""

    def __init__(self) -> None:
        self.retries = 0
        self.sizes: list[int] = []
        self.answer: Callable[[object], object] = lambda reply: reply
        self.threads: list[threading.Thread] = []

    def task(self, function: Callable[..., object]) -> Callable[..., object]:
        return function

    def submit(self, call: PendingCompute[Any]) -> PoolFuture[Any]:
        future: PoolFuture[Any] = PoolFuture(call.name)
        future.rank = 0
        is_group = isinstance(call.function, GroupTask)
        self.sizes.append(len(call.args[1]) if is_group else 1)  # type: ignore[arg-type]

        def run() -> None:
            try:
                value = call.function(*call.args)
            except BaseException as error:
                future.fail(error)
            else:
                future.settle(self.answer(value) if is_group else value)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()
        return future

    def ask(self, rank: int, function: Callable[..., object], *args: object) -> PoolFuture[Any]:
        future: PoolFuture[Any] = PoolFuture("question")
        try:
            future.settle(function(*args))
        except LookupError as error:
            future.fail(error)
        return future


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    """Calls take no time, however busy the machine is, and whoever waits for a group is patient."""

    class Clock:
        monotonic = perf_counter = staticmethod(lambda: 0.0)

    monkeypatch.setattr(mapping, "time", Clock)
    monkeypatch.setattr(call_groups, "time", Clock)
    monkeypatch.setattr(mapping, "_PATIENCE_SECONDS", 60.0)
    scheduler = Threads()
    yield scheduler
    for thread in scheduler.threads:
        thread.join(60)
        assert not thread.is_alive()


def mapped(
    scheduler: Threads,
    function: Callable[..., object],
    items: Any,
    options: CallOptions = CallOptions(),  # noqa: B008
) -> Iterator[object]:
    def make(args: tuple[object, ...]) -> PendingCompute[Any]:
        return PendingCompute(function, args, {}, options, "work")

    return GroupingMap(scheduler, make, iter(items), 4, 2).begin()  # type: ignore[arg-type]


def test_short_calls_travel_together_in_order_and_each_is_made_once(threads: Threads) -> None:
    made: list[int] = []

    def work(number: int) -> int:
        made.append(number)
        return -number

    assert list(mapped(threads, work, ((n,) for n in range(1000)))) == [-n for n in range(1000)]
    assert sorted(made) == list(range(1000))
    assert max(threads.sizes) == 64
    assert len(threads.sizes) < 60


def test_endless_items_are_taken_only_so_far_ahead(threads: Threads) -> None:
    taken = itertools.count()
    results = mapped(threads, abs, ((next(taken),) for _ in itertools.repeat(None)))
    assert [next(results) for _ in range(500)] == list(range(500))
    assert next(taken) < 500 + 6 * 64
    results.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [CallOptions(timeout_seconds=5), CallOptions(retry=Retry(1)), CallOptions(on=0), CallOptions(remote=True)],
)
def test_calls_that_are_watched_by_themselves_travel_alone(threads: Threads, options: CallOptions) -> None:
    assert list(mapped(threads, abs, ((-n,) for n in range(50)), options)) == list(range(50))
    assert set(threads.sizes) == {1}


def test_the_retries_of_the_pool_count_as_well(threads: Threads) -> None:
    threads.retries = 1
    assert list(mapped(threads, abs, ((-n,) for n in range(50)))) == list(range(50))
    assert set(threads.sizes) == {1}


def test_arguments_that_can_change_travel_alone(threads: Threads) -> None:
    buffer = [0]

    def items() -> Iterator[tuple[list[int]]]:
        for number in range(60):
            buffer[0] = number
            yield (buffer,)

    assert len(list(mapped(threads, list, items()))) == 60
    assert set(threads.sizes) == {1}


def test_a_failure_comes_in_its_place_and_nothing_behind_it_in_its_group_is_made(threads: Threads) -> None:
    made: list[int] = []

    def work(number: int) -> int:
        made.append(number)
        if number == 321:
            raise KeyError("no")
        return number

    results = mapped(threads, work, ((n,) for n in range(10_000)))
    assert [next(results) for _ in range(321)] == list(range(321))
    with pytest.raises(KeyError, match="no"):
        next(results)
    assert 322 not in made
    assert len(made) == len(set(made))


def test_a_long_call_holds_up_none_of_those_behind_it(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_PATIENCE_SECONDS", 0.05)
    go_on, next_one = threading.Event(), threading.Event()
    made: list[int] = []
    count = 400

    def work(number: int) -> int:
        made.append(number)
        if number == 322:
            next_one.set()
        if number == 321:
            # Mostly in the midst of a group; it goes on when the one behind it has been made elsewhere.
            assert next_one.wait(60)
            assert go_on.wait(60)
        return number

    results = mapped(threads, work, ((n,) for n in range(count)))
    assert [next(results) for _ in range(321)] == list(range(321))
    go_on.set()
    assert list(results) == list(range(321, count))
    assert sorted(made) == list(range(count))


def test_a_result_that_is_not_simple_comes_in_its_place(threads: Threads) -> None:
    weird = object()
    results = mapped(threads, lambda number: weird if number == 100 else number, ((n,) for n in range(300)))
    assert list(results) == [weird if n == 100 else n for n in range(300)]


def test_a_worker_that_is_lost_with_a_group_is_told_and_nothing_of_it_is_made_again(threads: Threads) -> None:
    made: list[int] = []

    def work(number: int) -> int:
        made.append(number)
        if number == 200:
            raise SessionLostError("the worker is gone")
        return number

    results = mapped(threads, work, ((n,) for n in range(1000)))
    with pytest.raises(SessionLostError):
        list(results)
    assert len(made) == len(set(made))


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: None,
        lambda reply: reply[:3],
        lambda reply: [reply[0][:-1], *reply[1:]],
        lambda reply: [reply[0], reply[1] + 1, *reply[2:]],
        lambda reply: [reply[0], 0, *reply[2:]],
        lambda reply: [reply[0], -1, *reply[2:]],
        lambda reply: [reply[0] + [1], reply[1] + 1, *reply[2:]],
        lambda reply: [reply[0], reply[1], 1, reply[3]],
        lambda reply: [*reply[:3], "soon"],
        lambda reply: {"values": reply},
    ],
)
def test_a_reply_that_cannot_be_is_refused(threads: Threads, change: Callable[[Any], object]) -> None:
    threads.answer = change
    with pytest.raises(ProtocolError, match="work"):
        list(mapped(threads, abs, ((n,) for n in range(100))))


@pytest.mark.parametrize("answer", [[], [[], 65], [[1, 2, 3], 1], [[], -1], ["", 1], 7])
def test_a_part_that_cannot_be_is_refused(answer: Any) -> None:
    part = mapping._Part([(1,), (2,)], PoolFuture("work"), "key")
    with pytest.raises(ProtocolError, match="work"):
        mapping.GroupingMap._settle(part, answer)


def test_dropping_the_iterator_cancels_what_is_under_way(threads: Threads) -> None:
    go_on = threading.Event()
    futures: list[PoolFuture[Any]] = []
    submit = threads.submit

    def watched(call: PendingCompute[Any]) -> PoolFuture[Any]:
        futures.append(submit(call))
        return futures[-1]

    threads.submit = watched  # type: ignore[method-assign]
    results = mapped(threads, lambda number: go_on.wait(60) if number else 0, ((n,) for n in range(100)))
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    assert all(future.done() for future in futures)
    assert any(future.cancelled() for future in futures)
    go_on.set()
