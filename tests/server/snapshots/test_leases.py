"""Named sessions on a volume that several workers see: one of them has each, and those that are gone have none."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyproxy.errors import SnapshotError
from skyproxy.snapshots.stores import FileStore, FsspecStore, LocalStore
from skyproxy_server.named_errors import NamedSessionElsewhereError, NamedSessionMovedError
from skyproxy_server.snapshots import leases
from skyproxy_server.snapshots.lease_files import ASK, FAILED, GIVING, HELD, TAKE
from skyproxy_server.snapshots.leases import NameLeases

SECONDS = 15.0


class Time:
    """A clock that moves while somebody waits; what happens meanwhile is up to the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile = lambda: None

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


@pytest.fixture(params=["folder", "elsewhere"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> FileStore:
    if request.param == "folder":
        return LocalStore(tmp_path)
    return FsspecStore(f"memory://{tmp_path.name}-{os.getpid()}")


def worker(root: FileStore, time: Time | None = None, machine: str | None = None) -> NameLeases:
    """A worker; on a machine of its own where the test says which."""
    time = time or Time()
    made = NameLeases(root, SECONDS, time, time.pause)
    if machine is not None:
        made._machine = machine
    return made


def test_another_worker_of_the_volume_does_not_get_what_one_has(root: FileStore) -> None:
    one, time = worker(root, machine="a"), Time()
    other = worker(root, time, machine="b")
    one.acquire("token", "exp", take=False)
    one.settle("token", "exp", "first use")
    time.meanwhile = one.beat
    with pytest.raises(NamedSessionElsewhereError, match=f"process {os.getpid()}"):
        other.acquire("token", "exp", take=False)
    assert time.now < SECONDS, "a sign of life is enough"
    other.acquire("token", "another", take=False)
    other.acquire("mallory", "exp", take=False)
    assert (one.holds("token", "exp"), other.holds("token", "exp")) == (True, False)
    assert one.losses() == []


def test_a_worker_without_a_sign_of_life_has_nothing_whatever_the_clocks_say(root: FileStore) -> None:
    one, time = worker(root, machine="a"), Time()
    other = worker(root, time, machine="b")
    one.acquire("token", "exp", take=False)
    one.settle("token", "exp", "first use")
    other.acquire("token", "exp", take=False)
    other.settle("token", "exp", "second use")
    assert time.now >= SECONDS
    assert other.holds("token", "exp")
    one.beat()  # it was stopped for a while
    (loss,) = one.losses()
    assert (loss.owner, loss.name, loss.lease.tag) == ("token", "exp", "second use")
    assert not one.holds("token", "exp")
    assert other.losses() == []
    one.drop("token", "exp")
    assert other.losses() == [], "what is another's is not given up for it"


def test_of_two_that_wait_for_one_that_is_gone_only_one_gets_it(root: FileStore) -> None:
    gone, time = worker(root, machine="a"), Time()
    first, second = worker(root, time, machine="b"), worker(root, machine="c")
    gone.acquire("token", "exp", take=False)

    def second_is_faster() -> None:
        time.meanwhile = lambda: None
        second.acquire("token", "exp", take=False)

    time.meanwhile = second_is_faster
    with pytest.raises(NamedSessionElsewhereError):
        first.acquire("token", "exp", take=False)
    assert second.holds("token", "exp")


def test_who_ends_in_order_leaves_nothing(root: FileStore) -> None:
    one, time = worker(root, machine="a"), Time()
    one.acquire("token", "exp", take=False)
    one.acquire("token", "further", take=False)
    one.settle("token", "exp", "use")
    one.settle("token", "further", "")  # it did not come here after all
    assert one.names() == [("token", "exp")]
    one.end()
    assert root.child("token").child(".workers").files() == []
    assert [file for file in root.child("token").child(".leases").files() if file != ".lock"] == []
    worker(root, time, machine="b").acquire("token", "exp", take=False)
    assert time.now == 0


def test_what_is_taken_of_one_that_does_not_answer_is_taken_soon_and_it_hears_of_it(root: FileStore) -> None:
    one, time = worker(root, machine="a"), Time()
    other = worker(root, time, machine="b")
    one.acquire("token", "exp", take=False)
    one.settle("token", "exp", "use")
    time.meanwhile = one.beat
    other.acquire("token", "exp", take=True)
    assert time.now < SECONDS
    assert ([loss.name for loss in one.losses()], one.holds("token", "exp")) == (["exp"], False)
    assert one.claim_on("token", "exp") is None, "nothing is left of the claim"


def test_who_saves_what_another_wants_is_waited_for_and_nobody_gets_it_meanwhile(
    root: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "GIVE_SECONDS", 12.0)
    one, time, impatient = worker(root, machine="a"), Time(), Time()
    other, third = worker(root, time, machine="b"), worker(root, impatient, machine="c")
    one.acquire("token", "exp", take=False)
    one.settle("token", "exp", "use")
    impatient.meanwhile = one.beat

    def save() -> None:
        one.beat()
        claim = one.claim_on("token", "exp")
        if claim is not None:
            assert claim.kind == TAKE
            one.answer("token", "exp", claim, GIVING)
            assert not one.holds("token", "exp")
        if 5 < time.now <= 5.25:
            with pytest.raises(NamedSessionElsewhereError):
                third.acquire("token", "exp", take=True)
            assert impatient.now >= 12
        if time.now > 10:
            one.drop("token", "exp")

    time.meanwhile = save
    other.acquire("token", "exp", take=True)
    assert 10 < time.now < 12
    assert (one.losses(), other.holds("token", "exp")) == ([], True)


def test_what_a_client_uses_is_not_given_and_what_cannot_be_saved_is_not_taken(root: FileStore) -> None:
    one, time = worker(root, machine="a"), Time()
    other = worker(root, time, machine="b")
    one.acquire("token", "exp", take=False)
    one.settle("token", "exp", "use")

    def answer(said: str) -> Callable[[], None]:
        def tell() -> None:
            claim = one.claim_on("token", "exp")
            if claim is not None:
                one.answer("token", "exp", claim, said, 7.0)

        return tell

    time.meanwhile = answer(HELD)
    with pytest.raises(NamedSessionElsewhereError) as held:
        other.acquire("token", "exp", take=False)
    assert (held.value.seconds, held.value.is_here) == (7.0, True)
    time.meanwhile = answer(FAILED)
    with pytest.raises(SnapshotError, match="it stays there"):
        other.acquire("token", "exp", take=True)
    assert one.holds("token", "exp")
    assert time.now < 2


def test_one_claim_waits_for_the_answer_to_another(root: FileStore) -> None:
    one, time = worker(root, machine="a"), Time()
    first, second = worker(root, time, machine="b"), worker(root, time, machine="c")
    one.acquire("token", "exp", take=False)
    kinds: list[str] = []

    def both() -> None:
        time.meanwhile = held
        with pytest.raises(NamedSessionElsewhereError):
            second.acquire("token", "exp", take=False)

    def held() -> None:
        claim = one.claim_on("token", "exp")
        if claim is not None:
            kinds.append(claim.kind)
            if claim.kind == TAKE and len(kinds) > 3:
                one.answer("token", "exp", claim, FAILED)
            elif claim.kind == ASK:
                one.answer("token", "exp", claim, HELD)

    time.meanwhile = both
    with pytest.raises((SnapshotError, NamedSessionElsewhereError)):
        first.acquire("token", "exp", take=True)
    assert kinds[:3] == [TAKE] * 3, "nobody writes over it"


def test_a_session_that_has_moved_is_found_by_its_note_until_it_is_begun_anew(root: FileStore) -> None:
    one, other = worker(root, machine="a"), worker(root, machine="a")
    one.acquire("token", "exp", take=False)
    one.settle("token", "exp", "use")
    one.drop("token", "exp", "wss://there")
    with pytest.raises(NamedSessionMovedError) as moved:
        other.acquire("token", "exp", take=False)
    assert moved.value.where == "wss://there"
    other.settle("token", "exp", "")
    other.acquire("token", "exp", "use", take=False)  # it comes back
    other.settle("token", "exp", "use")
    other.drop("token", "exp")
    worker(root).acquire("token", "exp", take=False)


def test_the_sessions_of_others_are_listed_while_they_live(root: FileStore) -> None:
    one, other = worker(root, machine="a"), worker(root, machine="b")
    one.acquire("token", "exp", take=False)
    one.describe("token", "exp", {"names": 2, "bytes": 80, "held": False})
    (row,) = other.rows_elsewhere("token")
    assert (row["name"], row["names"], row["bytes"], row["held"]) == ("exp", 2, 80, False)
    assert (one.rows_elsewhere("token"), other.rows_elsewhere("mallory")) == ([], [])
    one.end()
    assert other.rows_elsewhere("token") == []


def test_a_client_that_goes_on_from_its_snapshot_waits_for_nobody(root: FileStore) -> None:
    """Its worker is cut off, and may live."""
    cut_off, time = Time(), Time()
    one = worker(root, cut_off, machine="a")
    one.acquire("token", "exp", take=False)
    one.settle("token", "exp", "use")
    other = worker(root, time, machine="b")
    other.acquire("token", "exp", "use", take=False)
    assert (time.now, one.losses()[0].lease.tag) == (0, "use")
    cut_off.meanwhile = other.beat
    with pytest.raises(NamedSessionElsewhereError):
        one.acquire("token", "exp", "an older use", take=False)


def test_a_lease_that_somebody_has_deleted_or_spoilt_is_written_again(root: FileStore) -> None:
    one = worker(root)
    one.acquire("token", "exp", take=False)
    place = root.child("token").child(".leases")
    (file,) = [name for name in place.files() if name.endswith(".json")]
    for content in (None, b"", b"[1]", b'{"worker": 5}', b"\xff"):
        place.remove(file)
        if content is not None:
            place.write(file, content)
        assert one.losses() == []
        assert b'"where"' in place.read(file)


def test_signs_of_workers_that_ended_are_cleared_away_when_nothing_came_of_them_for_long(root: FileStore) -> None:
    one, gone, alive = worker(root), worker(root, machine="a"), worker(root, machine="b")
    for each, name in ((gone, "x"), (alive, "y"), (one, "z")):
        each.acquire("token", name, take=False)
    workers = root.child("token").child(".workers")
    for _ in range(2):
        assert len([name for name in workers.files() if name.endswith(".json")]) == 3
        one.clear_away(root.child("token"))
        alive.beat()
    assert len([name for name in workers.files() if name.endswith(".json")]) == 2
    time = Time()
    worker(root, time, machine="c").acquire("token", "x", take=False)
    assert time.now == 0


def test_a_worker_whose_sign_was_cleared_away_gives_it_again(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    one = worker(root)
    one.acquire("token", "exp", take=False)
    for file in root.child("token").child(".workers").files():
        root.child("token").child(".workers").remove(file)
    one.acquire("token", "further", take=False)  # or its thread, within seconds
    with pytest.raises(NamedSessionElsewhereError):
        worker(root, machine=one._machine).acquire("token", "exp", take=False)


def test_what_is_had_anew_while_losses_are_looked_for_is_none(root: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = worker(root, machine="a"), worker(root, machine="b")
    one.acquire("token", "exp", take=False)
    one.settle("token", "exp", "use")
    other.acquire("token", "exp", take=True)
    read = leases.read_lease

    def read_then_taken_back(place: FileStore, name: str) -> object:
        found = read(place, name)
        monkeypatch.setattr(leases, "read_lease", read)
        monkeypatch.setattr(type(place), "exclusive", lambda self, name: contextlib.nullcontext())
        one.acquire("token", "exp", take=True)
        return found

    monkeypatch.setattr(leases, "read_lease", read_then_taken_back)
    assert one.losses() == []
    assert one.holds("token", "exp")


HOLDER = """
import sys
from pathlib import Path
from skyproxy.snapshots.stores import LocalStore
from skyproxy_server.snapshots.leases import NameLeases
leases = NameLeases(LocalStore(Path(sys.argv[1])), 15.0)
leases.acquire("token", "exp", take=False)
print("has it", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "has it\n"
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's locks, and the name that it gives a machine")
def test_on_one_machine_the_kernel_tells_at_once_who_lives(tmp_path: Path) -> None:
    time = Time()
    other = worker(LocalStore(tmp_path), time)
    with another_process(tmp_path) as process:
        with pytest.raises(NamedSessionElsewhereError, match=f"process {process.pid}"):
            other.acquire("token", "exp", take=False)
        process.kill()
        process.wait()
        other.acquire("token", "exp", take=False)
    assert time.now < 2, "nobody waits for one that was killed, nor for a sign of one that lives"
