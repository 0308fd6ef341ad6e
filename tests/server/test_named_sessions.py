"""What a worker keeps under names: for whom, how much, and for how long."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterator

import pytest
import torch

from skyproxy.errors import LimitExceededError
from skyproxy.settings import Settings
from skyproxy_server.named_errors import NamedSessionChangedError, NamedSessionInUseError, NamedSessionMovedError
from skyproxy_server.named_sessions import NamedSessions, StoredValue
from tests.integration.programs import wait_for

SETTINGS = Settings(max_named_sessions=2, max_names=3, max_named_bytes=1 << 20)


class FakeHolder:
    """A session that may be taken away, or refuses to end."""

    def __init__(self, ends: bool = True) -> None:
        self.identity = secrets.token_hex(8)
        self.is_detached = self.is_leaving = False
        self.deserted_seconds: float | None = None
        self.ends = ends
        self.reasons: list[str] = []

    def take_away(self, reason: str, timeout_seconds: float) -> bool:
        self.reasons.append(reason)
        return self.ends


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: Callable[[], float]) -> Iterator[NamedSessions]:
    made = NamedSessions(SETTINGS, clock)
    yield made
    for owner in ("alice", "mallory"):
        for row in made.rows(owner):
            made.end(owner, row["name"])


def test_a_session_in_use_is_not_given_to_others(store: NamedSessions, clock: FakeClock) -> None:
    first, second = FakeHolder(), FakeHolder()
    store.hold(first, "alice", "exp", take=False)
    clock.now += 7
    with pytest.raises(NamedSessionInUseError) as held:
        store.hold(second, "alice", "exp", take=False)
    assert held.value.seconds == 7
    assert first.reasons == []


def test_who_takes_it_over_ends_the_one_that_used_it(store: NamedSessions) -> None:
    first, second = FakeHolder(), FakeHolder()
    store.hold(first, "alice", "exp", take=False).values.clear()
    session = store.hold(second, "alice", "exp", take=True)
    assert "took the session 'exp' over" in first.reasons[0]
    store.release(first)  # late: it has nothing any more
    assert session.holder is second


def test_a_client_that_is_not_heard_holds_nothing(store: NamedSessions) -> None:
    first, second = FakeHolder(), FakeHolder()
    store.hold(first, "alice", "exp", take=False)
    first.deserted_seconds = 60.0
    assert [row["held"] for row in store.rows("alice")] == [False]
    assert store.hold(second, "alice", "exp", take=False).holder is second
    assert len(first.reasons) == 1


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_client_whose_connection_has_just_broken_may_come_back(clock: FakeClock, comes_back: bool) -> None:
    first, second, pauses = FakeHolder(), FakeHolder(), []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if comes_back and len(pauses) == 3:
            first.deserted_seconds = None
        elif first.deserted_seconds is not None:
            first.deserted_seconds += seconds

    store = NamedSessions(SETTINGS, clock, pause)
    store.hold(first, "alice", "exp", take=False)
    first.deserted_seconds = 1.0
    if comes_back:
        with pytest.raises(NamedSessionInUseError):
            store.hold(second, "alice", "exp", take=False)
        assert (len(pauses), first.reasons) == (3, [])
        assert store.hold(second, "alice", "exp", take=True).holder is second
        assert len(pauses) == 3, "who takes it waits for nothing"
    else:
        assert store.hold(second, "alice", "exp", take=False).holder is second
        assert sum(pauses) == pytest.approx(SETTINGS.named_return_seconds - 1.0)
    store.end("alice", "exp")


def test_one_that_does_not_end_is_not_shared(store: NamedSessions) -> None:
    first = FakeHolder(ends=False)
    session = store.hold(first, "alice", "exp", take=False)
    store.put(session, "x", b"", [])
    with pytest.raises(LimitExceededError, match="Try again"):
        store.hold(FakeHolder(), "alice", "exp", take=True)
    assert session.holder is None
    assert list(session.values) == ["x"]


def test_sessions_belong_to_a_token(store: NamedSessions) -> None:
    session = store.hold(FakeHolder(), "alice", "exp", take=False)
    store.put(session, "x", b"", [torch.ones(4)])
    other = store.hold(FakeHolder(), "mallory", "exp", take=True)
    assert other.values == {}
    assert [row["bytes"] for row in store.rows("alice")] == [16]
    assert [row["bytes"] for row in store.rows("mallory")] == [0]
    assert not store.end("eve", "exp")
    assert store.end("mallory", "exp")
    assert list(session.values) == ["x"]


def test_what_nobody_uses_is_forgotten_in_the_end(clock: FakeClock) -> None:
    store = NamedSessions(dataclasses.replace(SETTINGS, named_session_seconds=0.05), clock)
    holder = FakeHolder()
    store.put(store.hold(holder, "alice", "exp", take=False), "x", b"", [])
    assert store.rows("alice")[0]["expires_in_seconds"] is None
    store.release(holder)
    wait_for(lambda: store.rows("alice") == [], "it is forgotten")


def test_an_unused_session_says_how_long_it_is_kept(store: NamedSessions, clock: FakeClock) -> None:
    holder = FakeHolder()
    store.put(store.hold(holder, "alice", "exp", take=False), "x", b"", [])
    store.release(holder)
    clock.now += 400
    (row,) = store.rows("alice")
    assert row["expires_in_seconds"] == SETTINGS.named_session_seconds - 400
    assert row["age_seconds"] == 400
    assert not row["held"]
    assert store.end("alice", "exp")


def test_a_session_without_values_is_not_kept(store: NamedSessions) -> None:
    holder = FakeHolder()
    store.hold(holder, "alice", "exp", take=False)
    store.release(holder)
    assert store.rows("alice") == []


def test_who_uses_a_session_that_is_ended_is_told(store: NamedSessions) -> None:
    holder = FakeHolder()
    session = store.hold(holder, "alice", "exp", take=False)
    store.put(session, "x", b"", [torch.ones(3)])
    assert store.end("alice", "exp")
    assert "was ended by name" in holder.reasons[0]
    assert session.values == {}
    store.release(holder)
    assert store.rows("alice") == []


def test_sessions_names_and_structures_are_bounded(store: NamedSessions) -> None:
    session = store.hold(FakeHolder(), "alice", "one", take=False)
    store.hold(FakeHolder(), "alice", "two", take=False)
    with pytest.raises(LimitExceededError, match="MAX_NAMED_SESSIONS"):
        store.hold(FakeHolder(), "alice", "three", take=False)
    for key in "abc":
        store.put(session, key, b"", [])
    with pytest.raises(LimitExceededError, match="Forget one"):
        store.put(session, "d", b"", [])
    store.put(session, "a", bytes(1 << 20), [])  # in place of what has the name
    with pytest.raises(LimitExceededError, match="1 MiB"):
        store.put(session, "b", b"x", [])
    assert store.forget(session, "a")
    store.put(session, "b", b"x", [])


def test_a_tensor_has_one_number_and_no_number_is_given_twice(store: NamedSessions) -> None:
    session = store.hold(FakeHolder(), "alice", "exp", take=False)
    x, y = torch.ones(2), torch.ones(2)
    first = store.put(session, "a", b"", [x, y, x])
    assert first[0] == first[2] != first[1]
    assert store.put(session, "b", b"", [y]) == [first[1]]
    store.forget(session, "a")
    again = store.put(session, "c", b"", [x])
    assert again[0] not in first
    assert store.put(session, "d", b"", [y]) == [first[1]]


def test_what_was_saved_takes_the_place_of_what_is_left_of_the_same_use(store: NamedSessions) -> None:
    first, again = FakeHolder(), FakeHolder()
    left = store.hold(first, "alice", "exp", take=False)
    saved = store.empty("alice", "exp", left.tag)
    store.bring_back(again, saved)
    assert (saved.holder, len(first.reasons)) == (again, 1)
    store.release(first)  # late: it has nothing any more
    assert saved.holder is again


def test_what_was_saved_is_refused_where_another_client_has_used_it_since(store: NamedSessions) -> None:
    before = store.hold(FakeHolder(), "alice", "exp", take=False).tag
    now = store.hold(FakeHolder(), "alice", "exp", take=True)
    with pytest.raises(NamedSessionChangedError, match="another client has used the session 'exp'"):
        store.bring_back(FakeHolder(), store.empty("alice", "exp", before))
    assert store.hold(FakeHolder(), "alice", "exp", take=True) is now
    store.bring_back(FakeHolder(), store.empty("mallory", "exp", before))  # of another token, another session


def test_what_was_saved_has_the_bounds_of_what_is_put(store: NamedSessions) -> None:
    large, many = store.empty("alice", "large", "x"), store.empty("alice", "many", "x")
    large.values["x"] = StoredValue(1, bytes(2 << 20), [], 0.0)
    many.values.update({str(number): StoredValue(1, b"", [], 0.0) for number in range(4)})
    for saved, reason in ((large, "structures"), (many, "4 names")):
        with pytest.raises(LimitExceededError, match=reason):
            store.bring_back(FakeHolder(), saved)
    store.bring_back(FakeHolder(), store.empty("alice", "one", "x"))
    store.bring_back(FakeHolder(), store.empty("alice", "two", "x"))
    with pytest.raises(LimitExceededError, match="its limit"):
        store.bring_back(FakeHolder(), store.empty("alice", "three", "x"))


def test_what_moved_is_forgotten_and_who_asks_is_told_where_it_is(store: NamedSessions) -> None:
    holder, other = FakeHolder(), FakeHolder()
    session = store.hold(holder, "alice", "exp", take=False)
    store.put(session, "x", b"", [torch.ones(3)])
    assert not store.leave("alice", "exp", other.identity, "wss://there")  # somebody else's
    assert not store.leave("mallory", "exp", holder.identity, "wss://there")
    assert store.leave("alice", "exp", holder.identity, "wss://there")
    assert (session.values, store.rows("alice"), store.has_moved("alice", "exp")) == ({}, [], True)
    store.release(holder)  # its end comes later
    with pytest.raises(NamedSessionMovedError) as moved:
        store.hold(other, "alice", "exp", take=False)
    assert moved.value.where == "wss://there"
    store.hold(other, "mallory", "exp", take=False)  # has another of this name
    store.hold(other, "alice", "exp", take=True)  # begins one anew
    assert not store.has_moved("alice", "exp")


def test_what_moved_away_may_come_back(store: NamedSessions) -> None:
    holder = FakeHolder()
    tag = store.hold(holder, "alice", "exp", take=False).tag
    store.release(holder)
    assert not store.has("alice", "exp")
    session = store.hold(holder, "alice", "exp", take=False)
    assert store.leave("alice", "exp", holder.identity, "wss://there")
    back = store.empty("alice", "exp", session.tag)
    store.bring_back(holder, back)
    assert (store.has("alice", "exp"), store.has_moved("alice", "exp"), tag != session.tag) == (True, False, True)


def test_only_so_many_addresses_are_remembered(store: NamedSessions) -> None:
    holder = FakeHolder()
    for number in range(5):
        store.hold(holder, "alice", str(number), take=False)
        assert store.leave("alice", str(number), holder.identity, "wss://there")
    assert [number for number in range(5) if store.has_moved("alice", str(number))] == [3, 4]


def test_a_token_takes_no_room_of_anothers_named_sessions(store: NamedSessions) -> None:
    for number in range(SETTINGS.max_named_sessions):
        store.hold(FakeHolder(), "mallory", f"s{number}", take=False)
    with pytest.raises(LimitExceededError, match="of this token"):
        store.hold(FakeHolder(), "mallory", "another", take=False)
    mine = FakeHolder()
    store.hold(mine, "alice", "mine", take=False)
    assert store.leave("alice", "mine", mine.identity, "wss://elsewhere")
    for number in range(SETTINGS.max_named_sessions):
        assert store.end("mallory", f"s{number}")
        gone = FakeHolder()
        store.hold(gone, "mallory", f"t{number}", take=False)
        assert store.leave("mallory", f"t{number}", gone.identity, "wss://elsewhere")
    assert store.has_moved("alice", "mine")
