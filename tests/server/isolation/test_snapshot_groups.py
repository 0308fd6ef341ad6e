"""Snapshots of sessions that have users of their own: any session of the token finds them, and no other one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import SessionHeldError, SessionLostError, SkyproxyError
from skyproxy_server.isolation.snapshot_groups import SnapshotGroups
from skyproxy_server.limits import are_sessions_separable
from tests.server.isolation.test_session_users import (
    REFUSED,
    needs_root,
    place,
    python,
    refusals,
    sessions,
    some_numbers,
    written,
)
from tests.server.isolation.workers import TOKEN, Worker

__all__ = ["place", "python", "sessions"]  # fixtures

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux"),
]


@pytest.fixture(scope="module")
def worker(place: Path, python: tuple[str, dict[str, str]]) -> Iterator[Worker]:
    (folder := place / "worker-with-snapshots").mkdir(mode=0o755)
    snapshots = ("--snapshots", str(place / "snapshots"))
    made = Worker(folder, "--session-users", written(some_numbers(8)), *snapshots, python=python[0], **python[1])
    yield made
    made.end()


@needs_root
def test_a_session_goes_on_in_one_of_another_user(sky: str, worker: Worker, sessions) -> None:
    node = sessions()
    user = node.run(os.getuid)
    with skyproxy.protect(node=node) as protected:
        total = torch.full((3,), 2.0, device=node.devices[0])
        protected.snapshot()
        total += 1
        killed = node.run(os.getpid)
        protected.snapshot()
        os.kill(killed, 9)
        total += 1
        assert total.tolist() == [4, 4, 4]
        assert protected.recoveries == 1
        protected.snapshot()  # in the folder that the user before has made
        assert node.run(os.getuid) != 0
        assert user != 0


@needs_root
def test_what_one_session_saved_another_one_restores(sky: str, place: Path, sessions) -> None:
    first, second = sessions(), sessions()
    assert first.run(os.getuid) != second.run(os.getuid)
    first.save("worker:exp", x=torch.ones(3, device=first.devices[0]))
    assert skyproxy.restore("worker:exp", second).get("x").tolist() == [1, 1, 1]
    second.save("worker:exp", x=torch.zeros(3, device=second.devices[0]))
    assert skyproxy.restore("worker:exp", first).get("x").tolist() == [0, 0, 0]
    (token,) = (path for path in (place / "snapshots").iterdir())
    status = token.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (0, 0o2770)
    assert {stat.S_IMODE(path.stat().st_mode) for path in token.rglob("*") if path.is_file()} == {0o660}


@needs_root
def test_what_is_under_a_name_goes_from_one_user_to_the_next(sky: str, worker: Worker) -> None:
    def connect(*, take: bool = False) -> skyproxy.Node:
        return skyproxy.connect(worker.url, token=TOKEN, session="exp1", take=take)

    with connect() as node:
        x = torch.arange(3.0, device=node.devices[0])
        node.put("x", x)
        user = node.run(os.getuid)
        with pytest.raises(SessionHeldError, match="in use by another client"):
            connect()
        with connect(take=True) as later:  # saved by the process of the one, read by that of the other
            assert later.run(os.getuid) not in (0, user)
            found = later.get("x")
            found += 1
            with pytest.raises(SessionLostError, match="took the session 'exp1' over"):
                x.sum().item()
    with connect() as last:
        assert last.get("x").tolist() == [1, 2, 3]
        last.forget("x")


@needs_root
def test_who_is_not_in_the_group_reaches_nothing(place: Path, tmp_path: Path) -> None:
    groups = SnapshotGroups(str(place / "groups"))
    assert groups.location() == str(place / "groups")
    first, second = groups.group_of("one"), groups.group_of("two")
    assert first != second
    assert first is not None
    assert groups.group_of("one") == first
    (secret := place / "groups" / "one" / "secret").write_text("of one token alone")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:  # as a session of the other token is
        os.setgroups([second])
        os.setresgid(60001, 60001, 60001)
        os.setresuid(60001, 60001, 60001)
        found = refusals(
            {
                "list": lambda: os.listdir(secret.parent),
                "read": lambda: secret.read_text(),
                "make": lambda: (secret.parent / "own").write_text(""),
                "all": lambda: os.listdir(place / "groups"),
                "own": lambda: (place / "groups" / "two" / "own").write_text(""),
            }
        )
        os.write(writing, repr(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        found = eval(answers.read())
    os.waitpid(child, 0)
    assert found.pop("own") == "done"
    assert set(found.values()) <= REFUSED, found


@needs_root
def test_a_folder_that_was_roots_alone_is_given_to_the_group(place: Path) -> None:
    (folder := place / "before" / "one" / "exp").mkdir(parents=True, mode=0o700)
    (folder.parent).chmod(0o700)
    (file := folder / "snapshot-00000001.msgpack").write_bytes(b"x")
    (folder / "link").symlink_to("/etc/shadow")
    before = os.stat("/etc/shadow").st_mode
    group = SnapshotGroups(str(place / "before")).group_of("one")
    assert {path.stat().st_gid for path in (folder.parent, folder, file)} == {group}
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder, file)] == [0o2770, 0o2770, 0o660]
    assert os.stat("/etc/shadow").st_mode == before


@needs_root
def test_a_folder_that_others_cannot_reach_offers_no_snapshots(tmp_path: Path, place: Path) -> None:
    (closed := place / "closed").mkdir(mode=0o700)
    assert SnapshotGroups(str(closed / "snapshots")).location() == ""
    assert SnapshotGroups("s3://bucket/x").location() == "s3://bucket/x"
    assert SnapshotGroups("s3://bucket/x").group_of("one") is None
    assert SnapshotGroups("").location() == ""
    (place / "owned").mkdir()
    (place / "owned" / "one").mkdir()
    os.chown(place / "owned" / "one", 60001, 60001)
    with pytest.raises(PermissionError, match="root's own"):
        SnapshotGroups(str(place / "owned")).group_of("one")


def prepare_home() -> str:
    """In the home of the victim: files of the names that a folder of snapshots has."""
    for name in ("writer", "snapshot-00000001.msgpack", "pack-0123456789abcdef.safetensors"):
        Path(os.environ["HOME"], name).write_text("private")
    return os.environ["HOME"]


def plant(folder: str, home: str) -> None:
    """In a session of the same token: put what leads astray where its snapshots are."""
    place = Path(folder)
    (place / "linked").symlink_to(home)
    (place / "pipes").mkdir()
    (place / "pipes").chmod(0o2777)
    for name in ("writer", "snapshot-00000001.msgpack", "snapshot-00000002.msgpack"):
        os.mkfifo(place / "pipes" / name)
        (place / "pipes" / name).chmod(0o666)
    (place / "large").mkdir()
    (place / "large").chmod(0o2777)
    with (place / "large" / "snapshot-00000001.msgpack").open("wb") as file:
        file.truncate(1 << 42)
    (place / "large" / "snapshot-00000001.msgpack").chmod(0o666)
    (place / os.fsdecode(b"no-text-\xff")).mkdir()
    (place / "turned\u202e\x1b[2J").mkdir()


@needs_root
def test_what_a_session_puts_on_the_volume_leads_no_other_one_of_its_token_astray(
    sky: str, place: Path, sessions
) -> None:
    attacker, victim = sessions(), sessions()
    home = victim.run(prepare_home)
    attacker.run(plant, str(place / "snapshots" / "owner"), home)
    session = victim._session
    rows = session.call("list_snapshots", "")
    troubled = {row["name"] for row in rows if "trouble" in row}
    assert troubled == {"pipes", "large"}
    for name in ("linked", "pipes", "large"):
        for control in ("load_snapshot", "open_snapshot", "read_snapshot"):
            with pytest.raises(SkyproxyError):
                session.call(control, name, "")
    torch.ones(3, device=victim.devices[0])
    with pytest.raises(SkyproxyError):
        session.call("save_snapshot", "linked")
    for name in ("linked", "pipes", "large"):
        session.call("delete_snapshot", name, "")
    left = victim.run(
        lambda home: {path.name: path.read_text() for path in Path(home).iterdir() if path.is_file()}, home
    )
    assert {*left.values()} == {"private"}
    assert len(left) == 3
    assert session.call("save_snapshot", "own")["snapshot"] == "1"
    session.call("delete_snapshot", "own", "")
