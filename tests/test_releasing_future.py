"""Futures notice signals that came a moment before somebody began to wait, and forks."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from skyproxy import interrupts
from skyproxy.errors import ConfigurationError
from skyproxy.pools import PoolFuture
from skyproxy.releasing_future import ReleasingFuture

WAITS = {
    "result": (ReleasingFuture, ReleasingFuture.result),
    "exception": (ReleasingFuture, ReleasingFuture.exception),
    "a pool's wait": (PoolFuture, PoolFuture.wait),
    "a pool's result": (PoolFuture, PoolFuture.result),
    "a pool's exception": (PoolFuture, PoolFuture.exception),
}


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="such a signal cannot be made here")
@pytest.mark.parametrize("name", WAITS)
def test_a_signal_that_wakes_no_wait_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that comes a moment before the wait: here, it comes to another thread, and Python's flag is set."""
    monkeypatch.setattr(interrupts, "SIGNAL_LOOK_SECONDS", 0.05)
    kind: Callable[..., concurrent.futures.Future[int]]
    wait: Callable[[Any], Any]
    kind, wait = WAITS[name]
    future = kind("call") if kind is PoolFuture else kind()
    end = threading.Timer(20, lambda: future.set_result(1))  # else a wait that notices nothing would hold all tests

    def strike() -> None:
        while not future._condition._waiters:  # type: ignore[attr-defined]
            pass
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    end.start()
    threading.Thread(target=strike).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait(future)
        assert not future.done() or future.cancelled()
    finally:
        end.cancel()


def test_waits_end_as_futures_end() -> None:
    ended: ReleasingFuture[int] = ReleasingFuture()
    threading.Timer(0.05, lambda: ended.set_result(3)).start()
    assert ended.result() == 3
    assert ended.exception() is None
    failed: ReleasingFuture[int] = ReleasingFuture()
    failed.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        failed.result()
    with pytest.raises(concurrent.futures.TimeoutError):
        ReleasingFuture[int]().result(0)


class FrozenError(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


@pytest.mark.parametrize("name", ["result", "a pool's wait", "a pool's result"])
def test_an_error_shows_where_it_came_from_and_who_asks_each_time_alike(name: str) -> None:
    kind, wait = WAITS[name]
    future: Any = kind("call") if kind is PoolFuture else kind()
    try:
        raise FrozenError("away")
    except FrozenError as error:
        future.set_exception(error)
    seen = []
    for _ in range(3):
        with pytest.raises(FrozenError) as caught:
            wait(future)
        seen.append([row.name for row in traceback.extract_tb(caught.value.__traceback__)])
    here = "test_an_error_shows_where_it_came_from_and_who_asks_each_time_alike"
    assert (seen[0][0], seen[0][-1]) == (here, here)
    assert len(seen[0]) <= 4
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("kind", [ReleasingFuture, lambda: PoolFuture("call")])
def test_who_waits_for_several_futures_is_told_of_those_that_are_cancelled(
    kind: Callable[[], concurrent.futures.Future[int]],
) -> None:
    before, meanwhile = kind(), kind()
    assert before.cancel()
    assert before.cancel()
    assert concurrent.futures.wait([before], timeout=20).done == {before}
    ended = concurrent.futures.as_completed([before, meanwhile], timeout=20)
    assert next(ended) is before
    meanwhile.cancel()
    assert next(ended) is meanwhile


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", WAITS)
def test_a_forked_child_is_told_that_a_future_is_its_parents(name: str) -> None:
    kind, wait = WAITS[name]
    future: Any = kind("call") if kind is PoolFuture else kind()
    ended: Any = kind("call") if kind is PoolFuture else kind()
    ended.set_result(3)
    child = os.fork()
    if not child:
        status = 1
        try:
            wait(ended)
            wait(future)
        except ConfigurationError as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not future.done()


def test_who_computes_a_result_learns_that_it_was_cancelled_and_tells_nobody_twice() -> None:
    future: ReleasingFuture[int] = ReleasingFuture()
    assert future.cancel()
    assert not future.set_running_or_notify_cancel()
    assert not future.set_running_or_notify_cancel()
    begun: ReleasingFuture[int] = ReleasingFuture()
    assert begun.set_running_or_notify_cancel()
    assert not begun.cancel()
