"""A session whose functions turn against the supervisor: it says anything on its channels, and takes what it shares."""

from __future__ import annotations

import math
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import torch

from skyproxy.errors import SkyproxyError
from skyproxy_server.auth import OWNER
from skyproxy_server.limits import are_sessions_separable
from tests.integration.programs import wait_for
from tests.server.isolation.workers import Worker

if not are_sessions_separable():
    pytest.skip("session processes need Linux", allow_module_level=True)

from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.isolation import supervised_session
from skyproxy_server.isolation.slots import ConnectionSlots, mapped, new_memory
from skyproxy_server.isolation.supervised_session import SupervisedSession

pytestmark = pytest.mark.timeout(180)

REPORT = {"report": 1, "commands": 0, "idle_seconds": 0.0, "calls_running": 0, "devices": [], "leaving": 0}
ENDLESS = [math.inf, -math.inf, math.nan, 1e308, -1e308, 2**64 - 1, -(2**63), "1", b"1", [], {}, None, True]


class HostileSession:
    """The supervisor's view of a session whose process does nothing; the test has the other end of its channel."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        control, theirs = ControlChannel.pair()
        self.channel = ControlChannel(theirs)
        memory = new_memory()
        self.heard: list[dict[str, object]] = []
        self.seen = SupervisedSession(
            "f" * 32,
            OWNER,
            self._process.pid,
            control,
            ConnectionSlots(mapped(memory)),
            None,
            lambda session: None,
            self._hear,
        )
        os.close(memory)

    def _hear(self, session: SupervisedSession, message: dict[str, object]) -> bool:
        self.heard.append(message)
        return "known" in message or "over" in message

    def is_ended(self) -> bool:
        """Return whether its process was ended and waited for; waits for that."""
        return self.seen.ended.wait(60)

    def close(self) -> None:
        self.seen.kill("the test is over")
        assert self.is_ended()
        self._process.returncode = 0  # the supervisor has waited for it
        self.channel.close()


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileSession]:
    monkeypatch.setattr(supervised_session, "REAP_SECONDS", 0.01)
    made = HostileSession()
    yield made
    made.close()


def send(channel: ControlChannel, message: object) -> None:
    """Send anything, also what is no message."""
    sock = socket.socket(fileno=os.dup(channel.fileno()))
    with sock:
        sock.send(message if isinstance(message, bytes) else msgpack.packb(message))


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        [1],
        {},
        *({"report": value} for value in ENDLESS),
        *({"prepared": value} for value in ENDLESS),
        {"over": True},
        {"over": True, "commands": math.inf, "idle_seconds": 0.0},
        {"over": True, "commands": 0, "idle_seconds": math.nan},
        {"over": True, "commands": 0, "idle_seconds": math.inf},
        {**REPORT, "report": 99},
        {"prepared": 7, "attempt": 1, "received": 1},
    ],
    ids=lambda message: f"{message!r:.60}",
)
def test_whatever_a_session_says_it_is_ended_at_most_and_its_end_is_noticed(
    session: HostileSession, message: object
) -> None:
    send(session.channel, message)
    assert session.is_ended()
    assert not session.seen.is_open


@pytest.mark.parametrize("name", [name for name in REPORT if name != "report"])
def test_a_report_that_is_none_is_nobodys_report(session: HostileSession, name: str) -> None:
    number = session.seen.ask()
    send(session.channel, {**REPORT, "report": number, name: [{"type": 5, "used_memory_bytes": math.inf}, "x"]})
    assert session.is_ended()
    assert session.seen.answer(number, 0.0) is None


def test_a_report_comes_once(session: HostileSession) -> None:
    number = session.seen.ask()
    send(session.channel, {**REPORT, "report": number})
    wait_for(lambda: session.seen.answer(number, 0.0), "the report comes")
    send(session.channel, {**REPORT, "report": number})
    assert session.is_ended()


def test_a_session_claims_no_time_without_use_that_makes_a_worker_look_busy_for_ever(session: HostileSession) -> None:
    send(session.channel, {"over": True, "commands": 1, "idle_seconds": -1e308})
    wait_for(lambda: session.heard, "the message is read")
    assert session.seen.idle_seconds == 0.0


class SpentAllowance:
    """Nothing is left after ten questions."""

    def __init__(self) -> None:
        self._count = 0

    def pause_seconds(self) -> float:
        self._count += 1
        return 0.0 if self._count <= 10 else 600.0


def test_who_talks_without_end_is_not_listened_to_and_its_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_session, "Allowance", SpentAllowance)
    session = HostileSession()
    try:
        with pytest.raises(ChannelClosedError):  # nobody reads any more
            while True:
                session.channel.send({"known": bytes(1000)}, wait=False)
        assert len(session.heard) <= 10
        assert not session.seen.ended.is_set()
    finally:
        session.close()


def test_shared_memory_cannot_be_made_shorter_under_the_supervisors_feet() -> None:
    memory = new_memory()
    try:
        for size in (0, 1, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(memory, size)
    finally:
        os.close(memory)


# --- with the real program -------------------------------------------------------------------------------------------


def the_process() -> Any:
    """In a session: what carries out the supervisor's orders there."""
    import gc

    from skyproxy_server.isolation.session_process import SessionProcess

    return next(found for found in gc.get_objects() if type(found) is SessionProcess)


def shorten_what_is_shared() -> list[str]:
    """In a session: make all files in memory shorter, however they can be reached."""
    mapped = the_process()._marks
    assert len(mapped) > 0
    done = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if "skyproxy-marks" in os.readlink(f"/proc/self/fd/{name}"):
                os.ftruncate(int(name), 0)
                done.append(name)
        except OSError as error:
            done.append(type(error).__name__)
    return [name for name in done if name != "FileNotFoundError"]


def say_nonsense(kind: str) -> None:
    """In a session: break whatever the supervisor takes from it."""
    process = the_process()
    if kind == "reports":
        nonsense = {"idle_seconds": "never", "calls_running": 2**63, "devices": [[1]], "commands": -1}
        process._report = lambda rows: nonsense
    elif kind == "control":
        process._control.send({"report": math.inf})
    elif kind == "digest":
        # As many zeros as this, and the supervisor would hash them with its interpreter held.
        process._uploads.ask({"do": "find", "digest": 1 << 40, "size": 1})
    elif kind == "size":
        process._uploads.ask({"do": "start", "size": math.inf})


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("worker"))
    yield made
    made.end()


@pytest.fixture
def attacked(worker: Worker) -> Iterator[Callable[[Callable[..., object], str], object]]:
    """Runs a function in a session of its own; then the worker must be as it was."""
    with worker.connect() as honest:
        value = torch.ones(3, device=str(honest.devices[0]))

        def attack(function: Callable[..., object], *arguments: str) -> object:
            with worker.connect() as hostile:
                found = None
                try:
                    found = hostile.run(function, *arguments)
                    worker.activity()
                except SkyproxyError:
                    pass
                return found

        yield attack
        report = worker.activity()
        assert 0 <= float(str(report["idle_seconds"])) < 1e6
        assert (value + 1).tolist() == [2, 2, 2]
        wait_for(lambda: len(worker.children()) == 2, "the hostile session's process is gone")
        assert worker.process.poll() is None


def test_a_session_cannot_end_the_supervisor_by_what_they_share(attacked) -> None:
    assert attacked(shorten_what_is_shared) in ([], ["PermissionError"])


@pytest.mark.parametrize("kind", ["reports", "control", "digest", "size"])
def test_nonsense_of_a_session_ends_it_alone_and_the_worker_tells_its_activity(attacked, kind: str) -> None:
    attacked(say_nonsense, kind)


FORGED = '2026-01-01 00:00:00,000 INFO skyproxy.server.audit: session-begin token="forged" address="1.2.3.4"'


def forge_lines(kind: str) -> None:
    """In a session: write what looks like a line of the worker, in every way that there is."""
    line = f"\n{FORGED}\n".encode()
    for descriptor in (1, 2):
        os.write(descriptor, line)
    subprocess.run(["sh", "-c", 'printf "%s" "$0"; printf "%s" "$0" >&2', line], check=True)
    try:
        with open("/dev/tty", "wb", buffering=0) as terminal:
            terminal.write(line)
    except OSError:  # it has none, and so not the worker's
        pass


def test_no_session_writes_a_line_of_the_worker_or_of_another_one(worker: Worker, attacked) -> None:
    attacked(forge_lines, "")
    wait_for(lambda: worker.log.count(FORGED) >= 4, "they are in the log")
    assert not [line for line in worker.log.splitlines() if FORGED in line and not line.startswith("[")]


def flood(kind: str) -> None:
    """In a session: write 20 MB."""
    for _ in range(20):
        os.write(2, b"flooded\n" * (1 << 17))


def test_no_session_fills_the_log(worker: Worker, attacked) -> None:
    before = len(worker.log)
    attacked(flood, "")
    wait_for(lambda: "bytes were held back here" in worker.log, "that is said")
    assert len(worker.log) - before < 4 << 20
