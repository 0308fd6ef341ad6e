"""What a worker does by itself for the named sessions of its volume."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyproxy.errors import SnapshotError
from skyproxy.settings import SETTINGS
from skyproxy.snapshots.stores import LocalStore
from skyproxy_server.named_sessions import NamedSession, NamedSessions, NamedValueRequests
from skyproxy_server.snapshots import claims
from skyproxy_server.snapshots.keeping import NameKeeper
from skyproxy_server.snapshots.unused_names import save_unused
from tests.integration.programs import wait_for
from tests.server.snapshots.sessions import DEVICES, Session
from tests.server.test_named_sessions import FakeHolder


class Worker:
    """A worker of a volume: its named sessions, and the session of one client."""

    def __init__(self, root: Path, machine: str = "", *, ops: bool = True, **limits: float) -> None:
        settings = dataclasses.replace(SETTINGS, **limits)
        self.names = NamedSessions(settings)
        self.saves = True
        self.keeper = NameKeeper(LocalStore(root), self.names, settings, self._save)
        self.keeper.leases._machine = machine
        self.names.leases = self.keeper.leases
        self.holder = FakeHolder()
        self.session = Session(root, ops=ops, **limits)
        self.session.state.names = NamedValueRequests(self.names, "token", self.holder)

        self._root, self._settings = root, settings

    def _save(self, session: NamedSession) -> bool:
        return self.saves and not save_unused([session], self.names, self._root, DEVICES, self._settings)

    def ask(self, other: Worker) -> None:
        """Have another worker look for claims while this one waits."""
        pause = self.keeper.leases._pause
        self.keeper.leases._pause = lambda seconds: (other.keeper.look_for_claims(), pause(0.02))

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


def test_a_name_that_a_client_of_another_worker_of_the_volume_uses_is_not_begun_anew(start: Start) -> None:
    one, other = start(), start()
    assert one.hold() == {}
    one.put(1)
    one.keeper.leases._own = dataclasses.replace(one.keeper.leases._own, where="process 5 on mars")
    one.keeper.leases.settle("token", "exp", "changed, so that it is written")
    other.ask(one)
    assert other.hold()["elsewhere"] == "process 5 on mars"
    assert other.names.rows("token") == []
    assert one.holder.reasons == []
    assert one.found() == [1] * 6


def test_what_no_client_uses_at_another_worker_is_saved_there_and_found_here(start: Start) -> None:
    one, other = start(), start()
    one.hold()
    one.put(1)
    one.leave()
    other.ask(one)
    assert other.hold() == {}
    assert other.found() == [1] * 6
    assert one.names.rows("token") == []
    assert other.session.call("list_snapshots") == []


def test_a_client_that_is_not_heard_for_long_enough_uses_nothing_there(start: Start) -> None:
    one, other = start(named_return_seconds=0.3), start(named_return_seconds=0.3)
    one.hold()
    one.put(1)
    began_at = time.monotonic()
    one.holder = one.session.state.names.holder  # type: ignore[union-attr]
    type(one.holder).deserted_seconds = property(lambda self: time.monotonic() - began_at)  # type: ignore[assignment]
    try:
        other.ask(one)
        assert other.hold() == {}
    finally:
        del type(one.holder).deserted_seconds
    assert other.found() == [1] * 6
    assert "another client took the session" in one.holder.reasons[0]
    assert time.monotonic() - began_at >= 0.3


def test_what_is_taken_is_saved_before_by_the_worker_that_had_it(start: Start) -> None:
    one, other = start(), start()
    one.hold()
    one.put(1)
    other.ask(one)
    assert other.hold(take=True) == {}
    assert other.found() == [1] * 6, "also what only that worker's memory had"
    assert "what was put under a name there is kept" in one.holder.reasons[0]
    one.keeper.tend()
    assert one.names.rows("token") == []
    assert len(one.holder.reasons) == 1


def test_what_cannot_be_saved_stays_where_it_is(start: Start) -> None:
    one, other = start(), start()
    one.hold()
    one.put(1)
    one.saves = False
    other.ask(one)
    assert other.hold(take=True)["type"] == "SnapshotError"
    assert len(one.names.rows("token")) == 1
    one.saves = True
    assert other.hold() == {}  # its client was told; nobody uses it
    assert other.found() == [1] * 6


def test_it_is_listed_and_ended_from_another_worker(start: Start) -> None:
    one, other = start(), start()
    one.hold()
    one.put(1)
    one.keeper.tend()
    (row,) = other.session.call("named_sessions")
    assert (row["name"], row["names"], row["held"]) == ("exp", 1, True)
    other.ask(one)
    assert other.session.call("end_named", "exp") is True
    assert "ended by name" in one.holder.reasons[0]
    assert other.session.call("named_sessions") == []
    assert other.session.call("end_named", "exp") is False


def test_a_process_hears_from_another_one_of_its_worker_that_its_session_has_moved(start: Start) -> None:
    one, other, third = start(), start(), start()
    one.hold()
    one.put(1)
    for worker in (other, third):
        worker.ask(one)
    assert other.session.call("leave_named", "exp", "another session", "wss://there") is False
    assert len(one.names.rows("token")) == 1
    assert other.session.call("leave_named", "exp", one.holder.identity, "wss://there") is True
    assert one.names.rows("token") == []
    assert third.hold() == {"moved": "wss://there"}
    assert third.hold(take=True) == {}


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
    one.keeper.tend()  # it was stopped for a while, and has not answered
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
    third.ask(other)
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
    worker.keeper._try(worker.keeper.leases._signs_of("token").beat)
    worker.keeper._try(worker.keeper.leases._signs_of("token").beat)
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


@pytest.mark.parametrize("content", [b"[" * 30_000, b"\xff", b"{}", b'{"worker": 5}', b"null", b" " * 70_000])
def test_whatever_lies_on_the_volume_a_worker_keeps_its_word(start: Any, tmp_path: Path, content: bytes) -> None:
    one = start()
    one.hold()
    one.put(1.0)
    place = tmp_path / "token"
    for folder in (place / ".leases", place / ".workers"):
        for path in [path for path in folder.iterdir() if path.suffix == ".json"]:
            path.with_suffix(".claim").write_bytes(content)
            (folder / f"other{path.suffix}").write_bytes(content)
    (place / os.fsdecode(b"exp\xff")).mkdir()
    for act in (one.keeper.tend, one.keeper.look_for_claims, one.keeper.sweep):
        one.keeper._try(act)
    assert one.names.leases is not None
    assert one.names.leases.holds("token", "exp")
    assert one.session.call("named_sessions")


def test_what_nobody_thought_of_does_not_end_the_thread_that_keeps_the_word(start: Any) -> None:
    one = start()
    one.hold()
    tended: list[int] = []

    def fail() -> None:
        tended.append(1)
        raise RecursionError

    one.keeper.tend = fail
    one.keeper.start()
    try:
        one.keeper._wake()
        wait_for(lambda: len(tended) > 1 or one.keeper._wake(), "it goes on")
    finally:
        one.keeper.end()
