"""Reading from a volume that hangs: whoever asks is told, and nobody waits without end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skyproxy.errors import SnapshotError
from skyproxy.settings import SETTINGS
from skyproxy_server.named_sessions import NamedSessions, NamedValueRequests
from skyproxy_server.snapshots.volume import StuckRequests, VolumeHangsError, VolumeThread
from tests.integration.programs import wait_for
from tests.server.snapshots.sessions import ADD_, Session

STALL_SECONDS = 0.3
WAIT_SECONDS = 60.0
DIGEST = bytes(32)


class Volume:
    """A folder that answers nothing while it hangs: not `open`, not `listdir`, whatever asks.

    Attributes:
        goes_on: lets it go.
        asked: how many wait for it.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.asked = threading.Semaphore(0)
        self._root = str(root)
        for name in ("open", "listdir", "scandir", "unlink", "mkdir"):
            monkeypatch.setattr(os, name, self._slowly(getattr(os, name)))

    def _slowly(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(path: Any = ".", *arguments: Any, **keywords: Any) -> Any:
            if not self.goes_on.is_set() and isinstance(path, str | Path) and str(path).startswith(self._root):
                self.asked.release()
                assert self.goes_on.wait(WAIT_SECONDS)
            return function(path, *arguments, **keywords)

        return wait

    def session(self, **options: Any) -> Session:
        """A session with snapshots here. Until the volume hangs, it may take its time."""
        return Session(self._root, snapshot_stall_seconds=WAIT_SECONDS, **options)

    def hang(self, session: Session) -> None:
        """Give nothing from now on; the session does not wait for long. What it saves was written before."""
        self._bound(session, STALL_SECONDS)
        self.goes_on.clear()

    def answer(self, session: Session) -> None:
        """Go on, and see what was given up to its end."""
        self.goes_on.set()
        settled(session)
        self._bound(session, WAIT_SECONDS)

    def _bound(self, session: Session, seconds: float) -> None:
        session.snapshots._stall_seconds = session.snapshots._volume.stall_seconds = seconds


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
    made = Volume(tmp_path / "volume", monkeypatch)
    yield made
    made.goes_on.set()


class Nobody:
    identity = "somebody"
    is_detached = is_leaving = False
    deserted_seconds = None

    def take_away(self, reason: str, timeout_seconds: float) -> bool:
        return True


def settled(session: Session) -> None:
    """What was given up has come to its end."""
    request = session.snapshots._volume._request
    assert request is not None
    wait_for(request.done, "the request ends")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("list_snapshots", []),
        ("list_snapshots", ["s"]),
        ("open_snapshot", ["s"]),
        ("delete_snapshot", ["s"]),
        ("read_snapshot", ["s"]),
        ("begin_snapshot", ["t", 3]),
    ],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_what_is_asked_of_a_volume_that_hangs_is_given_up(volume: Volume, name: str, arguments: list[Any]) -> None:
    with volume.session() as session:
        session.put(s1=torch.ones(10))
        assert session.call("save_snapshot", "s")["snapshot"] == "1"
        volume.hang(session)
        began = time.monotonic()
        error = session.call_now(name, *arguments)
        assert time.monotonic() - began >= STALL_SECONDS
        assert error["type"] == "VolumeHangsError"
        assert "SKYPROXY_SNAPSHOT_STALL_SECONDS" in error["message"]
        assert "The session goes on" in error["message"]
        for again in ("list_snapshots", "save_snapshot"):  # at once: no further thread waits for it
            threads = threading.active_count()
            assert session.call_now(again, "s")["type"] == "VolumeHangsError"
            assert threading.active_count() <= threads
        session.run(ADD_, 1, 1)
        assert session.slots[1].tolist() == [2] * 10
        volume.answer(session)
        is_left = name != "delete_snapshot"  # which was done after all
        assert [row["name"] for row in session.call("list_snapshots")] == ["s"] * is_left
        assert "snapshot" in session.call("save_snapshot", "s")


def test_a_session_that_cannot_be_read_is_as_empty_as_before(volume: Volume) -> None:
    with volume.session() as session:
        session.put(s1=torch.rand(10))
        session.call("save_snapshot", "s")
        with volume.session(ops=False) as other:
            volume.hang(other)
            assert other.call_now("load_snapshot", "s")["type"] == "VolumeHangsError"
            assert len(other.slots) == 1
            volume.answer(other)
            assert other.call("load_snapshot", "s")["snapshot"] == "1"
            assert torch.equal(other.slots[1], session.slots[1])


def test_a_copy_that_hangs_in_the_middle_is_given_up(volume: Volume) -> None:
    with volume.session() as session:
        assert session.call("begin_snapshot", "t", 3) is None
        volume.hang(session)
        error = session.call_now("begin_snapshot", "t", 3)
        assert error["type"] == "VolumeHangsError"
        assert session.call_now("write_snapshot_piece", b"x")["type"] == "VolumeHangsError"
        assert session.call_now("read_snapshot_piece", DIGEST)["type"] == "VolumeHangsError"


def test_a_session_ends_although_a_read_hangs(volume: Volume) -> None:
    session = volume.session()
    session.call("save_snapshot", "s")
    volume.hang(session)
    assert session.call_now("list_snapshots")["type"] == "VolumeHangsError"
    session.executor.end()  # comes to an end


def test_a_saved_named_session_on_a_volume_that_hangs_is_not_waited_for_without_end(
    volume: Volume, tmp_path: Path
) -> None:
    with volume.session() as session:
        session.state.names = NamedValueRequests(NamedSessions(SETTINGS), "token", Nobody())
        (tmp_path / "volume").mkdir()
        volume.hang(session)
        assert session.call_now("hold_named", "exp", False)["type"] == "VolumeHangsError"
        assert session.state.names.held is None
        volume.answer(session)
        assert session.call("hold_named", "exp", False) == {}
        assert session.state.names.held is not None


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_pipe_in_place_of_a_snapshot_is_trouble_and_no_wait(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.call("save_snapshot", "s")
        os.mkfifo(tmp_path / "token" / "s" / "snapshot-00000009.msgpack")
        first, second = session.call("list_snapshots", "s")
        assert (first["snapshot"], "trouble" in first, second["snapshot"]) == ("9", True, "1")
        assert session.call("load_snapshot", "s", "9")["type"] == "SnapshotError"


def test_a_volume_that_gives_something_is_waited_for() -> None:
    volume, pauses = VolumeThread(1.0), threading.Event()

    def give() -> int:
        for _ in range(4):
            pauses.wait(0.4)
            volume.note_progress()
        return 7

    assert volume.run("reading", give) == 7
    with pytest.raises(SnapshotError, match="there is none"):
        volume.run("reading", lambda: _refuse("there is none"))
    volume.end(pauses.set)
    assert pauses.wait(WAIT_SECONDS)


def _refuse(problem: str) -> None:
    raise SnapshotError(problem)


def test_only_so_many_threads_of_a_process_hang() -> None:
    stuck, goes_on, begun = StuckRequests(2), threading.Event(), []

    def hang() -> None:
        begun.append(threading.current_thread())
        assert goes_on.wait(WAIT_SECONDS)

    volumes = [VolumeThread(0.05, stuck) for _ in range(5)]
    for volume in volumes:
        with pytest.raises(VolumeHangsError, match="the worker's volume hangs: listing"):
            volume.run("listing", hang)
    deadline = time.monotonic() + WAIT_SECONDS  # a thread may begin later than its request is given up
    while len(begun) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    goes_on.set()
    for volume in volumes:
        volume.end(lambda: None)
    assert len(begun) == 2
    for thread in begun:
        thread.join(WAIT_SECONDS)
    assert not stuck.are_many
    free = VolumeThread(WAIT_SECONDS, stuck)
    assert free.run("listing", lambda: "there") == "there"
    free.end(lambda: None)
