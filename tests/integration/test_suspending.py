"""Sessions whose worker is told to end: suspended, and back with the next operation, to the same bits."""

from __future__ import annotations

import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy.errors import ConfigurationError, SessionLostError
from skyproxy.protocol.messages import Landed, Pong
from skyproxy.session import moving
from skyproxy.session.leaving import WorkerEndHandler
from skyproxy.session.session import Session
from skyproxy.session.transfers import UploadQueue
from tests.integration import protected_programs as programs
from tests.integration.programs import Worker, wait_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows ends processes without asking them")


@pytest.fixture
def worker(sky: str, tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    yield made
    made.close()


@pytest.fixture
def node(worker: Worker) -> Iterator[skyproxy.Node]:
    with skyproxy.connect(worker.url, token=worker.token) as made:
        yield made


def test_a_session_is_suspended_and_the_next_operation_brings_it_back(
    worker: Worker, node: skyproxy.Node, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(3)
    x = torch.randn(64, device=node.devices[0])
    view = x[8:]
    before = x.cpu()
    assert "1 session is suspended" in worker.end()
    wait_for(lambda: node._session.is_suspended, "the client has taken leave")
    assert node.alive
    worker.start()
    view += 1
    before[8:] += 1
    assert torch.equal(x.cpu(), before)
    drawn = torch.randn(4, device=node.devices[0]).cpu()
    torch.manual_seed(3)
    torch.randn(64, device=node.devices[0])
    assert torch.equal(torch.randn(4, device=node.devices[0]).cpu(), drawn)
    said = capfd.readouterr().err
    assert said.count("this session is suspended") == 1
    assert said.count("the session goes on") == 1
    assert "broken" not in said
    wait_for(lambda: node._session.protection is None, "it is as before")
    assert node._session.call("list_snapshots") == []


@pytest.mark.parametrize(
    ("name", "races"), [("digits", False), pytest.param("transfers", True, marks=pytest.mark.slow)]
)
def test_training_goes_on_to_the_same_bits_through_an_eviction(
    worker: Worker, node: skyproxy.Node, name: str, races: bool
) -> None:
    program, device = programs.PROGRAMS[name], node.devices[0]
    expected = program(device, 14, lambda step: None)
    restarts: list[threading.Thread] = []

    def start_again() -> None:
        worker.last_words()
        worker.start()

    def disturb(step: int) -> None:
        if step != 5:
            return
        worker.tell()
        if not races:
            wait_for(lambda: node._session.is_suspended, "the client has taken leave, in the middle of an epoch")
        restarts.append(threading.Thread(target=start_again, daemon=True))
        restarts[0].start()

    assert programs.same(expected, program(device, 14, disturb))
    restarts[0].join(60)
    assert races or not node._session.is_suspended


@pytest.mark.slow
def test_a_protected_session_stays_protected(worker: Worker, node: skyproxy.Node) -> None:
    with skyproxy.protect(every="1h", node=node) as protected:
        total = torch.full((5,), 2.0, device=node.devices[0])
        worker.end()
        worker.start()
        total *= 3
        assert total.tolist() == [6.0] * 5
        assert protected.recoveries == 1
        worker.end(signal.SIGKILL)
        worker.start()
        assert (total + 1).tolist() == [7.0] * 5
        assert protected.recoveries == 2


def test_what_is_forgotten_meanwhile_wakes_nobody(worker: Worker, node: skyproxy.Node) -> None:
    kept, small = torch.ones(4, device=node.devices[0]), torch.ones(4, device=node.devices[0])
    large = torch.zeros(1 << 20, device=node.devices[0])
    assert kept.sum().item() + small.sum().item() + large.sum().item() == 8
    worker.end()
    wait_for(lambda: node._session.is_suspended, "the client has taken leave")
    protection = node._session.protection
    assert protection is not None
    del small, large
    node._session.recorder.flush()
    protection.tick()
    assert not protection.suspension._wanted.is_set()
    worker.start()
    kept += 1
    protection.tick()
    assert protection.suspension._wanted.is_set()
    assert kept.sum().item() == 8


def test_a_function_can_be_what_is_wanted_next(worker: Worker, node: skyproxy.Node) -> None:
    x = torch.arange(4.0, device=node.devices[0])
    assert node.run(sum, [1, 2]) == 3  # the connection for functions is open
    worker.end()
    wait_for(lambda: node._session.is_suspended, "the client has taken leave")
    worker.start()
    assert node.run(torch.cumsum, x, 0).tolist() == [0, 1, 3, 6]


@pytest.mark.slow
def test_a_first_function_can_be_what_is_wanted_next(worker: Worker, node: skyproxy.Node) -> None:
    assert torch.ones(2, device=node.devices[0]).sum().item() == 2
    worker.end()
    wait_for(lambda: node._session.is_suspended, "the client has taken leave")
    worker.start()
    assert node.run(sum, [1, 2]) == 3


@pytest.mark.slow
def test_closing_a_suspended_session_wakes_nobody(worker: Worker, node: skyproxy.Node) -> None:
    x = torch.ones(2, device=node.devices[0])
    assert x.sum().item() == 2
    worker.end()
    wait_for(lambda: node._session.is_suspended, "the client has taken leave")
    node.close()
    with pytest.raises(SessionLostError, match="the node was closed"):
        x.sum().item()


def say_that_it_is_ended_for_good(worker: Worker) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{worker.port}/ending", headers={"Authorization": f"Bearer {worker.token}"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200


def test_no_snapshot_is_taken_of_a_worker_that_is_ended_for_good(worker: Worker, node: skyproxy.Node) -> None:
    x = torch.ones(2, device=node.devices[0])
    assert x.sum().item() == 2
    say_that_it_is_ended_for_good(worker)
    assert (x + 1).tolist() == [2, 2]  # until it is told to end, it goes on
    assert "suspended" not in worker.end()
    assert list(worker.folder.glob("snapshots/**/snapshot-*")) == []
    with pytest.raises(SessionLostError):
        x.sum().item()


@pytest.mark.slow
def test_a_worker_that_hears_it_while_it_waits_for_snapshots_waits_no_more(sky: str, tmp_path: Path) -> None:
    worker = Worker(tmp_path, SKYPROXY_LEAVE_SECONDS="600")
    try:
        with skyproxy.connect(worker.url, token=worker.token) as node:
            x = torch.ones(2, device=node.devices[0])
            begun = tmp_path / "begun"
            call = node.submit(_hold, x, str(begun))
            wait_for(begun.exists, "the function runs")
            worker.tell()
            wait_for(lambda: "shutting down" in worker.log.read_text(errors="replace"), "it waits")
            say_that_it_is_ended_for_good(worker)
            assert "0 sessions are suspended" in worker.last_words()
            with pytest.raises(SessionLostError):
                call.result()
    finally:
        worker.close()


def test_an_interrupt_ends_the_sessions_with_the_worker(worker: Worker, node: skyproxy.Node) -> None:
    x = torch.ones(2, device=node.devices[0])
    assert x.sum().item() == 2
    assert "suspended" not in worker.end(signal.SIGINT)
    with pytest.raises(SessionLostError):
        x.sum().item()


@pytest.mark.slow
def test_what_cannot_be_saved_in_time_is_said(sky: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    worker = Worker(tmp_path, SKYPROXY_LEAVE_SECONDS="2")
    try:
        with skyproxy.connect(worker.url, token=worker.token) as node:
            x = torch.ones(2, device=node.devices[0])
            begun = tmp_path / "begun"
            call = node.submit(_hold, x, str(begun))
            wait_for(begun.exists, "the function runs")
            assert "lost: 1 whose clients took no snapshot in time" in worker.end()
            with pytest.raises(SessionLostError):
                call.result()
            with pytest.raises(SessionLostError):
                x.sum().item()
        assert "cannot be suspended: a function runs that was given tensors" in capfd.readouterr().err
    finally:
        worker.close()


def _hold(x: torch.Tensor, path: str) -> None:
    import pathlib
    import time

    pathlib.Path(path).touch()
    time.sleep(60)


@pytest.mark.slow
def test_a_session_in_a_process_of_its_own_is_suspended_too(sky: str, tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("sessions have processes of their own on Linux")
    worker = Worker(tmp_path, "--session-processes")
    try:
        with skyproxy.connect(worker.url, token=worker.token) as node:
            x = torch.arange(6.0, device=node.devices[0])
            assert x.sum().item() == 15
            assert "1 session is suspended" in worker.end()
            worker.start()
            assert (x * 2).tolist() == [0, 2, 4, 6, 8, 10]
    finally:
        worker.close()


@pytest.mark.slow
def test_an_idle_worker_suspends_itself_and_spares_who_cannot_come_back(sky: str, tmp_path: Path) -> None:
    worker = Worker(tmp_path, "--suspend-after", "1")
    try:
        with skyproxy.connect(worker.url, token=worker.token) as node:
            x = torch.arange(3.0, device=node.devices[0])
            assert x.sum().item() == 3
            assert "nothing to do for 1 s" in worker.last_words()
            worker.options = worker.options[:2]
            worker.start()
            assert x.tolist() == [0, 1, 2]
    finally:
        worker.close()


def test_a_worker_that_only_says_that_it_ends_costs_a_snapshot_and_no_session(
    worker: Worker, node: skyproxy.Node
) -> None:
    x = torch.arange(3.0, device=node.devices[0])
    assert x.sum().item() == 3
    for milliseconds in (-1, 0, 1 << 60, 5000, 5000):
        node._session._housekeeping.on_pong(Pong(0, {"leaving": milliseconds}))
    wait_for(lambda: node._session.is_suspended, "it was believed")
    assert x.tolist() == [0, 1, 2]  # there is a worker at its address
    assert sum(thread.name == "skyproxy-leaving" for thread in threading.enumerate()) == 0


def test_a_program_that_waits_for_uploads_alone_brings_its_session_back(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has all of them, and its word was on the way when the session was suspended."""
    on_landed, heard = UploadQueue.on_landed, threading.Event()

    def drop(self: UploadQueue, message: Landed) -> None:
        heard.set()

    monkeypatch.setattr(UploadQueue, "on_landed", drop)
    with skyproxy.connect(worker.url, token=worker.token) as node:
        layer = torch.nn.Linear(400, 400)
        weight = layer.weight.detach().clone()
        moving = threading.Thread(target=layer.to, args=(node.devices[0],), daemon=True)
        moving.start()
        assert heard.wait(60)
        assert "1 session is suspended" in worker.end()
        monkeypatch.setattr(UploadQueue, "on_landed", on_landed)
        assert moving.is_alive()
        worker.start()
        moving.join(60)
        assert not moving.is_alive()
        assert torch.equal(layer.weight.detach().cpu(), weight)


# --- what only a suspension needs ends by housekeeping, and nobody who needs it then loses it ------------------------


@pytest.fixture
def resumed(worker: Worker, node: skyproxy.Node) -> torch.Tensor:
    """A tensor of a session that has just come back, and that housekeeping has not looked at since."""
    x, session = torch.arange(3.0, device=node.devices[0]), node._session
    assert x.sum().item() == 3
    worker.end()
    wait_for(lambda: session.is_suspended, "the client has taken leave")
    assert session.protection is not None
    session._housekeeping.tick = session.protection.suspension.look
    worker.start()
    assert x.tolist() == [0, 1, 2]
    session.wait_until_awake()
    assert session.protection is not None
    return x


def _look_before(owner: object, name: str, session: Session, patch: pytest.MonkeyPatch) -> list[bool]:
    """Have housekeeping look just before a method is called, by which its caller relies on a snapshot."""
    method, looks = getattr(owner, name), []

    def after_a_look(*args: object) -> object:
        session._tick()
        looks.append(True)
        return method(*args)

    patch.setattr(owner, name, after_a_look)
    return looks


def _ends(node: skyproxy.Node) -> None:
    session = node._session
    session._housekeeping.tick = session._tick
    wait_for(lambda: session.protection is None, "it is as before")
    assert session.call("list_snapshots") == []


def test_a_session_that_has_just_come_back_can_be_moved(
    resumed: torch.Tensor, node: skyproxy.Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    other = Worker(tmp_path / "other")
    try:
        looks = _look_before(moving._Carrier, "bring", node._session, monkeypatch)
        node.move_to(other.url, token=other.token)
        assert looks
        assert (node.url, (resumed + 1).tolist()) == (other.url, [1, 2, 3])
        _ends(node)
    finally:
        node.close()
        other.close()


def test_a_session_that_has_just_come_back_can_be_protected(resumed: torch.Tensor, node: skyproxy.Node) -> None:
    with skyproxy.protect(node=node, every="1h"):
        node._session._tick()
        made = node._session.protection
        assert made is not None
        assert (made.every_seconds, made.is_passing) == (3600, False)
        with pytest.raises(ConfigurationError, match="protected already"):
            skyproxy.protect(node=node)
        assert len(node._session.call("list_snapshots")) == 1
    assert resumed.tolist() == [0, 1, 2]
    _ends(node)


def test_a_suspended_session_is_brought_back_to_be_protected(worker: Worker, node: skyproxy.Node) -> None:
    x = torch.arange(3.0, device=node.devices[0])
    assert x.sum().item() == 3
    worker.end()
    wait_for(lambda: node._session.is_suspended, "the client has taken leave")
    worker.start()
    with skyproxy.protect(node=node):
        assert x.tolist() == [0, 1, 2]
    _ends(node)


def test_a_session_that_has_just_come_back_can_be_suspended(
    resumed: torch.Tensor, worker: Worker, node: skyproxy.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = _look_before(WorkerEndHandler, "_is_suspended_by", node._session, monkeypatch)
    assert "1 session is suspended" in worker.end()
    wait_for(lambda: node._session.is_suspended, "the client has taken leave again")
    assert looks
    worker.start()
    assert resumed.tolist() == [0, 1, 2]
    _ends(node)
