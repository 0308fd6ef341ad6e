"""A client of another token, and named sessions, snapshots and jobs: it finds, takes, changes and ends none of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import skyproxy
from skyproxy.errors import SkyproxyError, UnknownNameError
from skyproxy.jobs.link import JobLink, job_rows
from skyproxy.node import Node
from skyproxy.protocol.messages import BULK, FUNCTIONS, OPERATIONS, Hello
from skyproxy_server.limits import are_sessions_separable
from tests.integration.programs import wait_for
from tests.security.raw_client import RawClient
from tests.server.isolation.interpreters import public_interpreter
from tests.server.isolation.test_session_users import may_give_users, some_numbers
from tests.server.isolation.workers import Worker

pytestmark = pytest.mark.timeout(240)

ALICE, MALLORY = "the-token-of-alice-0123456789", "the-token-of-mallory-012345678"
VALUES = [1.0, 2.0, 3.0]
NAMES = ["exp1", "kept", "alice/kept", "../alice/kept", "../../etc", "/etc", ".leases", "", "\x00", "k" * 5000]


class Victim(NamedTuple):
    """A worker on which Alice has a named session, a snapshot and a job.

    Attributes:
        worker: with a process for each session, or without.
        alice: in the session "exp1".
        volume: where snapshots are.
    """

    worker: Worker
    alice: Node
    volume: Path


@pytest.fixture(scope="module", params=["--session-processes", "--sessions-in-process"])
def victim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    if request.param == "--session-processes" and not are_sessions_separable():
        pytest.skip("session processes need Linux")
    folder = tmp_path_factory.mktemp("worker")
    volume = Path(tempfile.mkdtemp(prefix="skyproxy-test-"))
    volume.chmod(0o755)  # sessions with a user of their own have to come through
    worker = Worker(folder, request.param, "--snapshots", str(volume))
    try:
        _give_tokens(worker)
        with skyproxy.connect(worker.url, token=ALICE, session="exp1", trust_worker=True) as alice:
            alice.put("model", torch.tensor(VALUES, device=alice.devices[0]))
            alice.save("worker:kept", weights=torch.tensor(VALUES, device=alice.devices[0]))
            alice.submit_job(pow, 2, 10, name="night").wait(200)
            yield Victim(worker, alice, volume)
            assert alice.get("model").tolist() == VALUES
            assert alice.job("night").result(60) == 1024
            assert {row["name"] for row in alice._session.call("list_snapshots", "")} >= {"kept"}
    finally:
        worker.end()
        shutil.rmtree(volume)


def _give_tokens(worker: Worker) -> None:
    for name, token in (("alice", ALICE), ("mallory", MALLORY)):
        draft = worker.tokens / ".draft"
        draft.touch(mode=0o600)
        draft.write_text(token)
        draft.rename(worker.tokens / name)
        wait_for(partial(worker.knows, token), f"the worker has seen the token of {name}")


@pytest.fixture
def mallory(victim: Victim) -> Iterator[Node]:
    """A client of another token, whose session may end: what is no name breaks the protocol."""
    with victim.worker.connect(token=MALLORY) as node:
        yield node


def test_names_of_another_token_are_found_by_nobody(victim: Victim, mallory: Node) -> None:
    assert "exp1" not in {row["name"] for row in mallory._session.call("named_sessions")}
    with skyproxy.connect(victim.worker.url, token=MALLORY, session="exp1", take=True) as node:
        assert node.named() == {}
        with pytest.raises(UnknownNameError):
            node.get("model")
        node.put("model", torch.zeros(3, device=node.devices[0]))
    assert victim.alice.get("model").tolist() == VALUES


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_sessions_of_another_token_are_not_ended_or_moved(victim: Victim, mallory: Node, name: str) -> None:
    with contextlib.suppress(SkyproxyError):  # it is no name
        mallory._session.call("end_named", name)
    with contextlib.suppress(SkyproxyError):
        mallory._session.call("leave_named", name, victim.alice._session.welcome.session, "ws://127.0.0.1:1")
    assert victim.alice.get("model").tolist() == VALUES


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_snapshots_of_another_token_are_not_read(victim: Victim, mallory: Node, name: str) -> None:
    for control in ("open_snapshot", "load_snapshot", "read_snapshot"):
        for number in ("1", "", "../../alice/kept/1"):
            with pytest.raises(SkyproxyError):
                mallory._session.call(control, name, number)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_snapshots_of_another_token_are_not_listed_or_deleted(victim: Victim, mallory: Node, name: str) -> None:
    there = {row["name"] for row in victim.alice._session.call("list_snapshots", "")}
    assert not there & {row.get("name") for row in mallory._session.call("list_snapshots", "")}
    for number in ("", "1", "../1"):
        with contextlib.suppress(SkyproxyError):
            assert mallory._session.call("delete_snapshot", name, number) is False
    assert {row["name"] for row in victim.alice._session.call("list_snapshots", "")} == there


@pytest.mark.parametrize("role", [OPERATIONS, BULK, FUNCTIONS])
def test_nobody_of_another_token_joins_a_session_or_takes_it_up(victim: Victim, role: str) -> None:
    welcome = victim.alice._session.welcome
    assert welcome.secret
    for secret in (welcome.secret, b"", bytes(32)):
        stranger = RawClient(victim.worker.port, MALLORY)
        if role != OPERATIONS or secret:
            assert not stranger.greet(Hello([1], role, welcome.session, {}, 0, secret), 20)
            assert stranger.goodbye == "no-such-session"
        stranger.cut()
    assert victim.alice.get("model").tolist() == VALUES


@pytest.mark.parametrize("name", ["night", "../alice/night", "alice/night", "/etc", "", "\x00"], ids=repr)
@pytest.mark.parametrize("action", ["status", "log", "result", "cancel", "remove"])
def test_jobs_of_another_token_do_not_exist(victim: Victim, mallory: Node, name: str, action: str) -> None:
    with JobLink(mallory._open_jobs) as link:
        assert job_rows(link) == []
        with pytest.raises(SkyproxyError):
            link.ask(action, name=name, offset=0, limit=100)
    assert [status.name for status in victim.alice.jobs()] == ["night"]


def look_around(folders: list[str]) -> list[str]:
    """Read whatever can be read below some folders, as the user of this process; the paths of those files."""
    found = []
    for folder in folders:
        for place, _, files in os.walk(folder):
            for name in files:
                with contextlib.suppress(OSError), open(os.path.join(place, name), "rb") as file:
                    file.read(1)
                    found.append(file.name)
    return found


@pytest.mark.skipif(not may_give_users(), reason="only root gives sessions users of their own")
def test_code_of_another_tokens_session_reads_nothing_on_the_volume() -> None:
    place = Path(tempfile.mkdtemp(prefix="skyproxy-test-"))
    place.chmod(0o755)
    try:
        python, variables = public_interpreter(place)
        (folder := place / "worker").mkdir(mode=0o755)
        (volume := place / "volume").mkdir(mode=0o755)
        numbers = some_numbers(8)
        users = f"{numbers[0]}:{len(numbers)}"
        worker = Worker(folder, "--session-users", users, "--snapshots", str(volume), python=python, **variables)
        try:
            _give_tokens(worker)
            with skyproxy.connect(worker.url, token=ALICE, session="exp1", trust_worker=True) as alice:
                weights = torch.tensor(VALUES, device=alice.devices[0])
                alice.put("model", weights)
                alice.save("worker:kept", weights=weights)
                home = alice.run(os.environ.get, "HOME")
                places = [str(volume), home]
                own = set(alice.run(look_around, places))
                with worker.connect(token=MALLORY) as mallory:
                    assert mallory.run(os.geteuid) not in (0, alice.run(os.geteuid))
                    others = set(mallory.run(look_around, places))
                assert {file for file in own if str(volume) in file}, "its own session reads what is there"
                assert not {file for file in others if str(volume) in file or home in file}
        finally:
            worker.end()
    finally:
        shutil.rmtree(place)
