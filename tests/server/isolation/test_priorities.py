"""Priorities of sessions: who gives way to whom, with a played clock; and that real processes get them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from skyproxy_server.auth import Identity
from skyproxy_server.isolation.cgroups import Cgroups
from skyproxy_server.isolation.fair_shares import NICEST, NICEST_FOR_EVER, FairShares, Place
from skyproxy_server.isolation.priorities import CgroupMeans, Priorities
from skyproxy_server.limits import are_sessions_separable
from tests.server.isolation.workers import Worker

HONEST: Place = ("honest", "a", "1")
HOSTILE: list[Place] = [("hostile", "b", str(number)) for number in range(8)]


class Played:
    """Shares whose time goes on by hand; remembers what became of each session."""

    def __init__(self, *places: Place, lowers: bool = True) -> None:
        self.now = 100.0
        self.shares = FairShares(lowers=lowers)
        self.niceness: dict[Place, int] = {}
        self.settings = 0
        self.begin(*places)

    def begin(self, *places: Place) -> None:
        for place in places:
            self.shares.begin(place, self.now)
            self.niceness[place] = 0
        self._set()

    def end(self, place: Place) -> None:
        self.shares.end(place)
        del self.niceness[place]

    def pass_by(self, seconds: int, used: dict[Place, float]) -> None:
        """Go on, a second at a time; each uses so much of a processor."""
        for _ in range(seconds):
            self.now += 1.0
            for place, share in used.items():
                self.shares.note(place, share, self.now)
            self._set()

    def _set(self) -> None:
        for place, niceness in self.shares.changes(self.now).items():
            self.shares.has_set(place, niceness)
            self.niceness[place] = niceness
            self.settings += 1


def test_eight_sessions_of_one_token_give_way_to_the_one_of_another_that_uses_more_than_each() -> None:
    played = Played(HONEST, *HOSTILE)
    played.pass_by(5, {HONEST: 0.4, **dict.fromkeys(HOSTILE, 0.2)})
    assert played.niceness[HONEST] == 0
    assert all(played.niceness[place] >= 15 for place in HOSTILE)


def test_who_begins_session_after_session_gains_nothing() -> None:
    played = Played(HONEST, HOSTILE[0])
    played.pass_by(3, {HONEST: 0.1, HOSTILE[0]: 1.5})
    played.end(HOSTILE[0])
    played.begin(HOSTILE[1])
    assert played.niceness[HOSTILE[1]] == NICEST


@pytest.mark.parametrize("lowers", [True, False])
def test_equals_and_who_is_alone_are_as_nice_as_ever(lowers: bool) -> None:
    played = Played(HONEST, HOSTILE[0], lowers=lowers)
    played.pass_by(100, {HONEST: 1.0, HOSTILE[0]: 0.9})
    played.end(HONEST)
    played.pass_by(100, {HOSTILE[0]: 2.0})
    assert played.settings == 0


def test_the_heaviest_of_three_gives_way_to_the_middle_one() -> None:
    light, middle, heavy = ("a", "", "1"), ("b", "", "2"), ("c", "", "3")
    played = Played(light, middle, heavy)
    played.pass_by(10, {light: 0.02, middle: 0.4, heavy: 1.5})
    assert played.niceness[light] == 0 < played.niceness[middle] < played.niceness[heavy] == NICEST


def test_within_a_token_addresses_and_sessions_are_compared() -> None:
    here, there, other = ("one", "here", "1"), ("one", "there", "2"), ("one", "there", "3")
    played = Played(here, there, other)
    played.pass_by(10, {here: 0.3, there: 0.1, other: 1.5})
    assert played.niceness[here] == 0 < played.niceness[there] <= played.niceness[other]


def test_what_was_used_is_forgotten_within_seconds_and_who_sleeps_is_compared_with_nobody() -> None:
    played = Played(HONEST, HOSTILE[0])
    played.pass_by(10, {HONEST: 0.05, HOSTILE[0]: 1.5})
    assert played.niceness[HOSTILE[0]] == NICEST
    played.pass_by(20, {HONEST: 0.05, HOSTILE[0]: 0.05})
    assert played.niceness[HOSTILE[0]] == 0
    played.pass_by(10, {HOSTILE[0]: 1.5})
    assert played.niceness[HOSTILE[0]] == NICEST
    played.pass_by(60, {HOSTILE[0]: 1.5})
    assert played.niceness[HOSTILE[0]] == 0


def test_small_changes_set_nothing() -> None:
    played = Played(HONEST, HOSTILE[0])
    played.pass_by(30, {HONEST: 0.3, HOSTILE[0]: 0.9})
    before = played.settings
    for number in range(100):
        played.pass_by(1, {HONEST: 0.3 + number % 2 * 0.02, HOSTILE[0]: 0.9})
    assert played.settings == before


def test_what_cannot_be_taken_back_is_given_in_few_steps_and_to_equals_alike() -> None:
    early, late = HOSTILE[0], ("other", "c", "9")
    played = Played(HONEST, early, lowers=False)
    played.pass_by(20, {HONEST: 0.05, early: 1.5})
    assert played.niceness == {HONEST: 0, early: NICEST_FOR_EVER}
    assert played.settings <= 2
    played.begin(late)
    played.pass_by(20, {HONEST: 0.05, early: 0.1, late: 1.8})
    assert played.niceness == {HONEST: 0, early: NICEST_FOR_EVER, late: NICEST_FOR_EVER}
    played.pass_by(100, {HONEST: 0.5, early: 0.01, late: 0.01})
    assert played.niceness[early] == played.niceness[late] == NICEST_FOR_EVER


@dataclass
class Session:
    """A session as the supervisor knows it."""

    identity: str
    client: Identity
    is_reaped: bool = False

    def while_unreaped(self, act: Callable[[int], None]) -> None:
        if not self.is_reaped:
            act(1)


@dataclass
class Recorded:
    """Times that a test writes, and the niceness that was set; some settings fail."""

    lowers: bool = True
    used: dict[str, float] = field(default_factory=dict)
    niceness: dict[str, int] = field(default_factory=dict)
    failure: OSError | None = None

    def used_seconds(self, session: str, pid: int) -> float:
        if session not in self.used:
            raise FileNotFoundError
        return self.used[session]

    def set_niceness(self, session: str, pid: int, niceness: int) -> None:
        if self.failure is not None:
            raise self.failure
        self.niceness[session] = niceness


def test_what_could_not_be_set_is_set_at_the_next_look_and_an_ended_process_is_left_alone() -> None:
    means, now = Recorded(used={"light": 0.1, "heavy": 0.0}), 10.0
    priorities = Priorities(means, lambda: now)
    light, heavy = Session("light", Identity("a")), Session("heavy", Identity("b"))
    priorities.begin(light)
    priorities.close()  # no thread looks but this one
    priorities.begin(heavy)
    means.failure = BlockingIOError()
    means.used["heavy"], now = 3.0, 11.0
    priorities.look()
    assert means.niceness == {}
    means.failure, heavy.is_reaped = None, True
    priorities.look()
    assert means.niceness == {}
    heavy.is_reaped = False
    priorities.look()
    assert means.niceness["heavy"] >= 15
    assert "light" not in means.niceness
    priorities.end(heavy)
    priorities.end(light)
    priorities.look()


def test_of_a_cgroup_the_weight_is_set_and_all_that_is_in_it_counts(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "cgroup.controllers").write_text("")
    cgroups = Cgroups(base, ())
    (folder,) = base.glob("skyproxy-*")
    (folder / "s").mkdir()
    (folder / "s" / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (folder / "s" / "cpu.weight.nice").write_text("0\n")
    means = CgroupMeans(cgroups)
    assert means.used_seconds("s", 0) == 2.5
    means.set_niceness("s", 0, 15)
    assert (folder / "s" / "cpu.weight.nice").read_text() == "15"
    with pytest.raises(FileNotFoundError):
        means.set_niceness("gone", 0, 15)


# --- with real processes ---------------------------------------------------------------------------------------------


OWN = os.getpriority(os.PRIO_PROCESS, 0) if are_sessions_separable() else 0
"""How nice these tests are, and so the worker: sessions begin so."""


def burn(seconds: float, begin: int) -> int:
    """Compute until this thread is nicer than `begin`, but no longer than that; say how nice it is then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and os.getpriority(os.PRIO_PROCESS, 0) == begin:
        pow(7, 10**5)
    return os.getpriority(os.PRIO_PROCESS, 0)


def niceness_of_threads(pid: int) -> set[int]:
    return {os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()}


@pytest.mark.timeout(120)
@pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux")
def test_a_session_that_computes_gets_nicer_and_one_that_waits_does_not(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    try:
        with worker.connect() as waiting, worker.connect() as computing:
            assert computing.submit(burn, 80.0, OWN).result(100) > OWN
            assert min(niceness_of_threads(computing.run(os.getpid))) > OWN
            assert niceness_of_threads(waiting.run(os.getpid)) == {OWN}
    finally:
        worker.end()


@pytest.mark.timeout(120)
@pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux")
def test_priorities_can_be_switched_off(tmp_path: Path) -> None:
    worker = Worker(tmp_path, "--no-session-priorities")
    try:
        with worker.connect() as waiting, worker.connect() as computing:
            assert computing.submit(burn, 4.0, OWN).result(100) == OWN
            assert niceness_of_threads(waiting.run(os.getpid)) == {OWN}
    finally:
        worker.end()
