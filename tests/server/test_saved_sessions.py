"""Named sessions on a worker's volume: which there are, who may come back to them, and when they go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skyproxy.settings import SETTINGS
from skyproxy_server.named_sessions import NamedSessions, NamedValueRequests
from skyproxy_server.saved_sessions import DAY_SECONDS, saved_sessions
from tests.server.snapshots.sessions import Session


class Holder:
    """A session of a program that knows, or does not, that its worker ends."""

    def __init__(self, *, is_leaving: bool) -> None:
        self.identity = "somebody"
        self.is_detached = False
        self.deserted_seconds: float | None = None
        self.is_leaving = is_leaving

    def take_away(self, reason: str, timeout_seconds: float) -> bool:
        return True


def named(root: Path, *, is_leaving: bool = True, **limits: float) -> Session:
    """A session of a worker that has kept nothing in memory."""
    session = Session(root, **limits)
    session.state.names = NamedValueRequests(NamedSessions(SETTINGS), "token", Holder(is_leaving=is_leaving))
    return session


def put(session: Session, value: float) -> None:
    assert session.call("hold_named", "exp", False) == {}
    session.put(s1=torch.full((6,), value))
    session.call("put_named", "x", b"document", [1])


def rows(session: Session) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = session.call("named_sessions")
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A volume on which the named session "exp" was saved by a worker that ended as it should."""
    with named(tmp_path) as session:
        put(session, 1)
        session.call("save_snapshot", "place")
        (row,) = rows(session)
        assert "saved" not in row  # it is in memory
    return tmp_path


def test_what_was_saved_is_listed_with_its_expiry(root: Path) -> None:
    with named(root) as session:
        (row,) = rows(session)
        assert (row["name"], row["names"], row["bytes"], row["held"], row["saved"]) == ("exp", 1, 48, False, True)
        assert 0 <= row["age_seconds"] < DAY_SECONDS
        assert 29 * DAY_SECONDS < row["expires_in_seconds"] <= 30 * DAY_SECONDS
    with Session(root, "mallory") as other:
        other.state.names = NamedValueRequests(NamedSessions(SETTINGS), "mallory", Holder(is_leaving=False))
        assert rows(other) == []


def test_who_connects_has_it_and_nothing_is_left(root: Path) -> None:
    with named(root) as session:
        assert session.call("hold_named", "exp", False) == {}
        assert session.call("adopt_named", "x", 1, [5])
        assert session.slots[5].tolist() == [1] * 6
        assert session.call("list_snapshots") == []


@pytest.mark.parametrize("control", ["named_sessions", "hold_named"])
def test_what_has_expired_is_deleted_by_whoever_looks(root: Path, control: str) -> None:
    with named(root, saved_session_days=0.0) as session:
        session.call(control, *(["other", False] if control == "hold_named" else []))
        assert session.call("list_snapshots") == []
        assert not (root / "token" / "place").exists()


def test_it_is_ended_by_name_with_every_copy(root: Path) -> None:
    with named(root) as session:
        session.state.names = NamedValueRequests(NamedSessions(SETTINGS), "token", Holder(is_leaving=True))
        put(session, 2)
        session.call("save_snapshot", "further")
    with named(root) as session:
        assert len(rows(session)) == 1
        assert session.call("end_named", "exp") is True
        assert session.call("end_named", "exp") is False
        assert session.call("list_snapshots") == []


def test_a_program_that_may_go_on_from_it_is_not_robbed(tmp_path: Path) -> None:
    """Its worker was killed: it comes back to its snapshot at any moment."""
    with named(tmp_path, is_leaving=False, saved_session_days=0.0) as session:
        put(session, 1)
        session.call("save_snapshot", "place")
    with named(tmp_path, saved_session_days=0.0) as session:
        (row,) = rows(session)
        assert (row["held"], row["saved"], row["expires_in_seconds"]) == (True, True, None)
        assert set(session.call("hold_named", "exp", False)) == {"held_seconds"}
        assert len(session.call("list_snapshots")) == 1
        assert session.call("hold_named", "exp", True) == {}
        assert session.call("adopt_named", "x", 1, [5])
        assert session.slots[5].tolist() == [1] * 6


def test_the_newest_of_a_place_counts_and_trouble_is_left_out() -> None:
    row = {"session": "exp", "name": "a", "snapshot": "10", "names": 1, "bytes": 5, "seconds": 7.0, "held": False}
    found = saved_sessions(
        [
            {**row, "snapshot": "9", "seconds": 5.0, "held": True},  # a clock was set back behind it
            row,
            {**row, "snapshot": "8", "seconds": 9.0, "held": True},
            {**row, "name": "b", "seconds": 3.0},
            {"name": "c", "snapshot": "1", "trouble": "damaged"},
            {**row, "session": None},
            {**row, "bytes": "many"},
        ],
        kept_days=1.0,
    )
    assert [(one.place, one.age_seconds, one.is_held) for one in found] == [("b", 3.0, False), ("a", 7.0, False)]
    assert all(one.expires_in_seconds == DAY_SECONDS - one.age_seconds for one in found)
    assert saved_sessions([row], kept_days=0.0)[0].is_expired
