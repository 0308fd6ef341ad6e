"""What an alarm's handler raises while the program waits is the program's: no wait takes it for one of its own."""

from __future__ import annotations

import signal
import socket
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from skyproxy.interrupts import DeferringSignalHandler
from skyproxy.jobs.link import JobLink
from skyproxy.pools import gathering, mapping
from skyproxy.protocol.messages import OPERATIONS, Hello, Sequence
from skyproxy.session.restoring import NewSession
from skyproxy.session.snapshot_copies import WorkerCopies
from skyproxy.snapshots import stores
from skyproxy.snapshots.folder import SnapshotFolder
from skyproxy.snapshots.stores import LocalStore, open_store
from skyproxy.transport import websocket, worker_questions


class Alarm(TimeoutError):
    """What programs raise, of a class that waits raise as well."""


def _ring(*_: object) -> NoReturn:
    raise Alarm


HANDLER = DeferringSignalHandler(_ring)


class StruckTransport:
    """A connection on which the handler strikes whoever waits for a message."""

    def __init__(self) -> None:
        self.waits = 0

    def send(self, message: object) -> None:
        pass

    def close(self) -> None:
        pass

    def recv(self, timeout_seconds: float | None = None) -> Any:
        self.waits += 1
        HANDLER(signal.SIGALRM, None)


class StruckCall:
    def exception(self, timeout: float | None = None) -> None:
        HANDLER(signal.SIGALRM, None)

    def done(self) -> bool:
        return False


@pytest.fixture
def transport() -> StruckTransport:
    return StruckTransport()


def new_session(transport: Any) -> NewSession:
    return NewSession(transport, transport, SimpleNamespace())  # type: ignore[arg-type]


def test_of_a_job(transport: Any) -> None:
    link = JobLink(lambda timeout_seconds=None: transport, patience_seconds=60.0)
    with pytest.raises(Alarm):
        link.ask("status", name="a")
    assert transport.waits == 1


def test_of_a_map_and_of_a_call_on_all_ranks() -> None:
    call: Any = StruckCall()
    with pytest.raises(Alarm):
        mapping._is_done(call, 60.0)
    with pytest.raises(Alarm):
        gathering._wait([call], 60.0)


def test_of_a_worker_that_goes_on_with_a_session(transport: Any) -> None:
    with pytest.raises(Alarm):
        new_session(transport).recv(float("inf"))
    with pytest.raises(Alarm):
        new_session(transport).ask_control(Sequence(1), "open_snapshot", [])


def test_of_a_snapshot_on_a_worker(transport: Any) -> None:
    copies = WorkerCopies.__new__(WorkerCopies)
    copies._opened, copies._sequence, copies._asked = new_session(transport), 0, deque()
    with pytest.raises(Alarm):
        copies.open("a")


def test_of_a_snapshot_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SnapshotFolder(open_store(tmp_path))
    monkeypatch.setattr(SnapshotFolder, "find", lambda self, name: 1)
    monkeypatch.setattr(LocalStore, "read", lambda *_: HANDLER(signal.SIGALRM, None))
    with pytest.raises(Alarm):
        folder.open("")


def test_of_a_store_elsewhere_which_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def strike(*_: object, **__: object) -> None:
        asked.append(1)
        HANDLER(signal.SIGALRM, None)

    monkeypatch.setattr(stores, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", strike)
    with pytest.raises(Alarm):
        open_store("memory://struck/x").read("a")
    assert len(asked) == 1


def test_of_a_worker_that_is_connected_to(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Alarm):
        websocket._greet(transport, Hello([1], OPERATIONS, "", {}), SimpleNamespace(shown="x"), float("inf"))  # type: ignore[arg-type]
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: HANDLER(signal.SIGALRM, None))
    with pytest.raises(Alarm):
        worker_questions.ask_control("ws://127.0.0.1:1", "a-token", "activity")
