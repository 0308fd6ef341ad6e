"""What is remembered of the looks: rates, totals, and no more than so many."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from skyproxy.webview.history import MAX_SAMPLES, History, totals


def worker(commands: int, memory: int = 10, received: int = 0) -> dict[str, Any]:
    return {
        "worker": {"commands": commands, "devices": [{"used_memory_bytes": memory}]},
        "sessions": [{"tensor_bytes": 5, "commands": 1, "bytes_received": received, "bytes_sent": 1}],
    }


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rates_are_differences_of_two_looks() -> None:
    clock = Clock()
    looks = [worker(100), worker(300, received=50), worker(200)]
    history = History(lambda: {"workers": [looks.pop(0)], "program": None}, 1.0, clock)
    for _ in range(3):
        history.look()
        clock.now += 2.0
    assert history.status()["history"] == [
        (100.0, 10.0, 0.0, 0.0, 0.0),
        (102.0, 10.0, 100.0, 25.0, 0.0),
        (104.0, 10.0, 0.0, 0.0, 0.0),  # fewer than before: the worker was started anew
    ]


def test_no_more_than_so_many_samples_are_kept() -> None:
    clock = Clock()
    history = History(lambda: {"workers": [], "program": None}, 1.0, clock)
    for _ in range(MAX_SAMPLES + 10):
        history.look()
        clock.now += 1.0
    samples = history.status()["history"]
    assert len(samples) == MAX_SAMPLES
    assert samples[0][0] == 110.0


def test_without_the_workers_own_figures_the_sessions_are_summed() -> None:
    answer = {"worker": {}, "sessions": [{"tensor_bytes": 5, "commands": 7}, {"tensor_bytes": 6, "commands": 1}]}
    assert totals([answer])["memory"] == 11
    assert totals([answer])["commands"] == 8


def test_what_is_no_number_counts_nothing() -> None:
    odd: dict[str, Any] = {"worker": {"devices": "many", "commands": "x"}, "sessions": [7, {"bytes_sent": None}]}
    assert set(totals([odd, {}, {"sessions": None, "worker": 3}]).values()) == {0.0}


def test_the_thread_looks_until_it_is_stopped_and_survives_an_error() -> None:
    looked = threading.Semaphore(0)
    count = 0

    def look() -> dict[str, Any]:
        nonlocal count
        count += 1
        looked.release()
        if count == 1:
            raise ZeroDivisionError
        return {"workers": [], "program": None}

    history = History(look, 0.001)
    history.start()
    for _ in range(3):
        assert looked.acquire(timeout=30)
    history.stop(30)
    seen = count
    assert not history._thread.is_alive()
    assert count == seen
    assert len(history.status()["history"]) == count - 1


def test_an_error_that_comes_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    looked = threading.Semaphore(0)
    outcomes = iter([ZeroDivisionError] * 5 + [None] + [ZeroDivisionError] * 5)

    def look() -> dict[str, Any]:
        looked.release()
        outcome = next(outcomes, None)
        if outcome is not None:
            raise outcome
        return {"workers": [], "program": None}

    history = History(look, 0.001)
    with caplog.at_level(logging.ERROR):
        history.start()
        for _ in range(12):
            assert looked.acquire(timeout=30)
        history.stop(30)
    assert len([record for record in caplog.records if "could not look" in record.message]) == 2
