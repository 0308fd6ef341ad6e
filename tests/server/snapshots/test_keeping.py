"""What a worker does by itself for the named sessions of its volume."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyproxy.errors import SnapshotError
from skyproxy.settings import SETTINGS
from skyproxy.snapshots.stores import LocalStore
from skyproxy_server.named_sessions import NamedSessions, NamedValueRequests
from skyproxy_server.snapshots import claims
from skyproxy_server.snapshots.keeping import NameKeeper
from tests.server.snapshots.sessions import Session
from tests.server.test_named_sessions import FakeHolder


class Worker:
    """A worker of a volume: its named sessions, and the session of one client."""

    def __init__(self, root: Path, machine: str = "", *, ops: bool = True, **limits: float) -> None:
        settings = dataclasses.replace(SETTINGS, **limits)
        self.names = NamedSessions(settings)
        self.keeper = NameKeeper(LocalStore(root), self.names, settings)
        self.keeper.leases._machine = machine
        self.names.leases = self.keeper.leases
        self.holder = FakeHolder()
        self.session = Session(root, ops=ops, **limits)
        self.session.state.names = NamedValueRequests(self.names, "token", self.holder)

    def hold(self, *, take: bool = False) -> Any:
        return self.session.call("hold_named", "exp", take)

    def put(self, value: float) -> None:
        self.session.put(s1=torch.full((6,), value))
        self.session.call("put_named", "x", b"document", [1])

    def found(self) -> list[float]:
        assert self.session.call("adopt_named", "x", 1, [5])
        values: list[float] = self.session.slots[5].tolist()
        return values

    def leave(self) -> None:
        """The client of its session says goodbye."""
        self.names.release(self.holder)
        assert self.session.state.names is not None
        self.session.state.names.held = None


@pytest.fixture
def start(tmp_path: Path) -> Any:
    made: list[Worker] = []

    def begin(machine: str = "", **limits: Any) -> Worker:
        made.append(Worker(tmp_path, machine, **limits))
        return made[-1]

    yield begin
    for worker in made:
        worker.names.leases = None
        worker.session.executor.end()


Start = Callable[..., Worker]


def test_a_name_that_another_worker_of_the_volume_has_is_not_begun_anew(start: Start) -> None:
    one, other = start(name_lease_seconds=0.05), start(name_lease_seconds=0.05)
    assert one.hold() == {}
    one.put(1)
    one.leave()  # it is kept, and nobody uses it
    one.keeper.leases._machine = other.keeper.leases._machine = "here"
    one.keeper.leases.beat()
    answer = other.hold()
    assert f"process {os.getpid()}" in answer["elsewhere"]
    assert other.names.rows("token") == []
    assert one.hold() == {}
    assert one.found() == [1] * 6


def test_a_name_whose_worker_has_let_go_of_it_is_free_at_once(start: Start) -> None:
    one, other = start(), start()
    assert one.hold() == {}
    one.leave()  # without any value, nothing is kept
    one.keeper.tend()
    assert other.hold() == {}


def test_what_is_taken_ends_at_the_worker_that_had_it(start: Start) -> None:
    one, other = start(), start()
    one.hold()
    one.put(1)
    assert other.hold(take=True) == {}
    one.keeper.tend()
    assert "is used at another worker of the same volume" in one.holder.reasons[0]
    assert one.names.rows("token") == []
    other.keeper.tend()
    assert other.holder.reasons == []


def test_a_client_that_moves_is_not_cut_off_while_it_speaks_to_both(start: Start) -> None:
    one, other = start(), start(ops=False)
    one.hold()
    one.put(1)
    one.session.call("save_snapshot", "place")
    loaded = other.session.call("load_snapshot", "place")
    assert "snapshot" in loaded, loaded
    one.keeper.tend()
    assert one.holder.reasons == []
    one.holder.deserted_seconds = 0.0
    one.keeper.tend()
    assert one.names.rows("token") == []
    assert other.found() == [1] * 6


def test_a_snapshot_does_not_bring_back_what_another_worker_has_in_use(start: Start) -> None:
    one, other, third = start(), start(), start(ops=False)
    one.hold()
    one.put(1)
    one.session.call("save_snapshot", "place")
    other.hold(take=True)
    other.put(2)
    one.session.call("save_snapshot", "later")  # before it heard of it
    other.keeper.leases._machine = third.keeper.leases._machine = "here"
    other.keeper.leases.beat()
    error = third.session.call("load_snapshot", "later")
    assert error["type"] == "SnapshotError"
    assert "another worker of this volume" in error["message"]
    assert third.names.rows("token") == []


def test_a_volume_that_takes_nothing_keeps_nobody_from_what_lies_in_memory(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    worker = start()
    monkeypatch.setattr(LocalStore, "write", no_space)
    assert worker.hold() == {}
    assert "No space left" in caplog.text
    worker.keeper._try(worker.keeper.leases.beat)
    worker.keeper._try(worker.keeper.leases.beat)
    assert caplog.text.count("cannot be used for named sessions now") == 1


def test_what_a_hung_volume_gives_after_all_is_let_go_of(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start()
    asked = worker.session.snapshots.ask_volume

    def hangs(what: str, work: Callable[[Callable[[], object]], object]) -> object:
        monkeypatch.setattr(worker.session.snapshots, "ask_volume", asked)
        pending.append(lambda: work(lambda: None))
        raise claims.VolumeHangsError("it hangs")

    pending: list[Callable[[], object]] = []
    monkeypatch.setattr(worker.session.snapshots, "ask_volume", hangs)
    with pytest.raises(SnapshotError), claims.claimed(worker.session.state, "exp"):
        raise AssertionError
    pending[0]()
    assert worker.keeper.leases.names() == []
    assert start().hold() == {}


def test_what_has_expired_goes_by_itself_the_second_time_that_it_is_seen(start: Start, tmp_path: Path) -> None:
    one = start()
    one.hold()
    one.holder.is_leaving = True
    one.put(1)
    one.session.call("save_snapshot", "place")
    later = start(saved_session_days=0.0)
    later.keeper.sweep()
    assert (tmp_path / "token" / "place").exists(), "a clock may be wrong for a while"
    one.keeper.sweep()  # whose bound is a month
    later.keeper.sweep()
    assert not (tmp_path / "token" / "place").exists()


def test_the_thread_begins_and_ends_with_the_worker(tmp_path: Path) -> None:
    names = NamedSessions(SETTINGS)
    keeper = NameKeeper(LocalStore(tmp_path), names, SETTINGS)
    keeper.start()
    assert names.leases is not None
    names.leases.acquire("token", "exp", "", take=False, note_progress=lambda: None)
    keeper.end()
    assert not keeper._thread.is_alive()
    assert not list(tmp_path.glob("**/*.json"))
