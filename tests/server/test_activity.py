"""What counts as activity, and how a worker reports it."""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any

import pytest

from skyproxy.protocol.messages import Ack, Batch, Hello, Sequence
from skyproxy.transport.websocket import connect_websocket
from skyproxy_server.activity import Activity
from skyproxy_server.inventory import inventory
from skyproxy_server.listener import Listener, serve
from skyproxy_server.worker_host import WorkerHost

TOKEN = "a-token-for-the-activity-tests"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_idleness_counts_from_the_last_thing_done() -> None:
    clock = Clock()
    activity = Activity(clock)
    clock.now += 7
    assert activity.idle_seconds == 7
    activity.touch()
    assert activity.idle_seconds == 0
    clock.now += 3
    assert activity.idle_seconds == 3


def test_what_runs_is_activity_however_long_it_takes() -> None:
    clock = Clock()
    activity = Activity(clock)
    with activity.running():
        with activity.running():
            assert activity.calls_running == 2
        clock.now += 1000
        assert (activity.calls_running, activity.idle_seconds) == (1, 0)
    assert (activity.calls_running, activity.idle_seconds) == (0, 0)
    clock.now += 1
    assert activity.idle_seconds == 1


def test_a_failure_ends_what_ran() -> None:
    activity = Activity()
    with pytest.raises(ZeroDivisionError), activity.running():
        1 / 0
    assert activity.calls_running == 0


def test_many_threads_are_counted_right() -> None:
    activity = Activity()

    def enter_often() -> None:
        for _ in range(2000):
            with activity.running():
                pass

    threads = [threading.Thread(target=enter_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert activity.calls_running == 0


def report_of(listener: Listener) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{listener.port}/activity", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def test_a_worker_reports_sessions_and_devices_and_is_idle_between_batches() -> None:
    clock = Clock()
    host = WorkerHost(devices=inventory("cpu"), activity=Activity(clock))
    listener = serve("127.0.0.1", 0, TOKEN, host)
    try:
        clock.now += 5
        report = report_of(listener)
        assert (report["sessions"], report["calls_running"], report["idle_seconds"]) == (0, 0, 5)
        assert report["devices"][0]["type"] == "cpu"
        assert set(report["software"]) == {"skyproxy", "torch", "python"}

        url = f"ws://127.0.0.1:{listener.port}"
        transport, _ = connect_websocket(url, TOKEN, Hello([1], "operations", "", {}))
        assert report_of(listener)["idle_seconds"] == 0
        clock.now += 60
        # A session that is open and does nothing.
        report = report_of(listener)
        assert (report["sessions"], report["idle_seconds"]) == (1, 60)
        transport.send(Batch(Sequence(1), []))
        assert transport.recv(10) == Ack(Sequence(1))
        assert report_of(listener)["idle_seconds"] == 0
        transport.close()
    finally:
        listener.close()
