"""Programs that go on where their worker was killed: the same bits as undisturbed, and what ends them says why."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import skyproxy
from skyproxy.errors import ConfigurationError, SessionLostError
from skyproxy.session import moving, snapshot_copies
from skyproxy.session.protection import Protection
from skyproxy.settings import SETTINGS
from skyproxy.snapshots import hashes
from tests.integration import protected_programs as programs
from tests.integration.chaos_proxy import chaos_proxy
from tests.integration.programs import ROOT, port_in, start_worker, wait_for, worker
from tests.integration.protected_programs import Served

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by what /proc says of them")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with programs.served(tmp_path_factory.mktemp("worker")) as made:
        yield made


@pytest.fixture
def node(sky: str, served: Served) -> Iterator[skyproxy.Node]:
    """A session of its own; the devices of other tests come first and keep their numbers."""
    with skyproxy.connect(served.url, token=served.token) as made:
        yield made


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_a_program_whose_worker_is_killed_gives_the_same_bits(
    served: Served, node: skyproxy.Node, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    program, device = programs.PROGRAMS[name], node.devices[0]
    expected = program(device, 24, lambda step: None)
    protected = skyproxy.protect(every=0.1, node=node)

    def disturb(step: int) -> None:
        if step in (4, 15):
            device_sum = torch.ones(3, device=device).sum()
            assert device_sum.item() == 3  # the worker before has come so far
            served.kill_session()

    assert programs.same(expected, program(device, 24, disturb))
    assert protected.recoveries == 2
    assert node.alive
    assert capfd.readouterr().err.count("goes on from the last snapshot") == 2


def test_an_embedded_worker_that_is_killed_is_started_anew(sky: str) -> None:
    with skyproxy.launch_local("cpu") as node:
        device = node.devices[0]
        expected = programs.digits(device, 12)
        protected = skyproxy.protect(steps=4, node=node)
        first = node.process_id

        def disturb(step: int) -> None:
            if step == 6:
                assert first is not None
                os.kill(first, signal.SIGKILL)

        assert programs.same(expected, programs.digits(device, 12, disturb))
        assert protected.recoveries == 1
        assert node.process_id != first
        protected.snapshot()
        assert protected.snapshots >= 2


def test_a_worker_that_is_started_again_at_its_address_goes_on(sky: str, tmp_path: Path) -> None:
    token, log = "x" * 40, tmp_path / "log"
    path = tmp_path / "token"
    path.write_text(token, encoding="ascii")
    path.chmod(0o600)
    options = ["--snapshots", str(tmp_path / "snapshots")]
    with contextlib.ExitStack() as stack:
        stderr = stack.enter_context(log.open("wb"))
        process = start_worker(path, stderr, *options)
        stack.callback(lambda: (process.kill(), process.wait()))
        port = wait_for(lambda: port_in(log, process), "the worker listens")
        node = stack.enter_context(skyproxy.connect(f"ws://127.0.0.1:{port}", token=token))
        device = node.devices[0]
        skyproxy.protect(steps=5, node=node)
        total = torch.zeros(3, device=device)
        total += 1
        process.kill()
        process.wait()
        total += 1
        process = start_worker(path, stderr, "--port", str(port), *options)
        assert total.tolist() == [2, 2, 2]


def test_a_worker_that_is_given_goes_on(served: Served, sky: str, tmp_path: Path) -> None:
    snapshots = str(served.snapshots)
    with contextlib.ExitStack() as stack:
        with worker(tmp_path, "--snapshots", snapshots) as (url, token):
            node = stack.enter_context(skyproxy.connect(url, token=token))
            protected = skyproxy.protect(node=node, new_worker=lambda: (served.url, served.token))
            total = torch.full((4,), 2.0, device=node.devices[0])
            assert total.sum().item() == 8
        total *= 3  # the worker has said goodbye
        assert total.tolist() == [6, 6, 6, 6]
        assert (protected.recoveries, node.url) == (1, served.url)


def test_after_a_function_the_program_goes_on_from_a_snapshot_behind_it(served: Served, node: skyproxy.Node) -> None:
    protected = skyproxy.protect(every="1h", node=node)
    x = torch.arange(4.0, device=node.devices[0])
    y = node.run(torch.cumsum, x, 0)
    assert y.sum().item() == 10  # whatever belongs to the function has left
    wait_for(lambda: protected.snapshots >= 2 and not _wants_more(node), "a snapshot has the function's results")
    served.kill_session()
    assert (y + 1).tolist() == [1, 2, 4, 7]
    assert protected.recoveries == 1


def _wants_more(node: skyproxy.Node) -> bool:
    protection = node._session.protection
    assert protection is not None
    return protection.log.hole_after(protection.log.durable or 0) is not None


def test_what_cannot_be_repeated_ends_the_session_with_its_reason(served: Served, node: skyproxy.Node) -> None:
    skyproxy.protect(every="1h", node=node)
    protection = node._session.protection
    assert protection is not None
    x = torch.ones(4, device=node.devices[0])
    protection._retry_at = float("inf")  # no snapshot is taken behind the function
    node.run(torch.cumsum, x, 0)
    served.kill_session()
    with pytest.raises(SessionLostError, match="a function ran on the worker, which cannot be done again"):
        x.sum().item()


def test_without_protection_the_session_ends_with_its_worker(served: Served, node: skyproxy.Node) -> None:
    protected = skyproxy.protect(node=node)
    x = torch.ones(4, device=node.devices[0])
    protected.stop()
    served.kill_session()
    with pytest.raises(SessionLostError):
        x.sum().item()


def test_a_worker_without_a_place_for_snapshots_is_refused(sky: str, tmp_path: Path) -> None:
    with (
        worker(tmp_path) as (url, token),
        skyproxy.connect(url, token=token) as node,
        pytest.raises(ConfigurationError, match="--snapshots FOLDER"),
    ):
        skyproxy.protect(node=node)


@pytest.mark.parametrize("options", [{"every": "soon"}, {"steps": 0}, {"steps": True}, {"every": -1}])
def test_arguments_that_cannot_be_are_refused(node: skyproxy.Node, options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        skyproxy.protect(node=node, **options)  # type: ignore[arg-type]
    assert node._session.protection is None


def test_protection_ends_with_its_block_and_may_begin_again(node: skyproxy.Node) -> None:
    for _ in range(2):
        with skyproxy.protect(node=node) as protected:
            assert protected.snapshots == 1
            assert node._session.protection is not None
            name = node._session.protection.name
            assert [row["name"] for row in node._session.call("list_snapshots", name)] == [name]
            with pytest.raises(ConfigurationError, match="protected already"):
                skyproxy.protect(node=node)
        assert node._session.call("list_snapshots", name) == []


@pytest.fixture
def other(served: Served, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URL and the token of another worker with the same folder of snapshots."""
    with worker(tmp_path, "--snapshots", str(served.snapshots)) as (url, token):
        yield url, token


def test_a_session_moves_to_another_worker_while_it_trains(
    served: Served, node: skyproxy.Node, other: tuple[str, str]
) -> None:
    expected = programs.digits(node.devices[0], 16)

    def disturb(step: int) -> None:
        if step == 5:
            node.move_to(other[0], token=other[1])
            wait_for(lambda: set(programs.children(served.process)) <= served.others, "the session before has ended")
        if step == 11:
            node.move_to(served.url, token=served.token)

    assert programs.same(expected, programs.digits(node.devices[0], 16, disturb))
    assert node.url == served.url
    assert node._session.protection is None
    assert node.run(sum, [1, 2]) == 3


def test_a_protected_session_stays_protected_where_it_moves(
    served: Served, sky: str, tmp_path: Path, other: tuple[str, str]
) -> None:
    with skyproxy.connect(other[0], token=other[1]) as node, skyproxy.protect(node=node) as protected:
        total = torch.full((3,), 2.0, device=node.devices[0])
        node.move_to(served.url, token=served.token)
        total += 1
        assert total.tolist() == [3, 3, 3]
        served.kill_session()
        total += 1
        assert total.tolist() == [4, 4, 4]
        assert protected.recoveries == 1


@pytest.mark.parametrize("has_left", [False, True])
def test_a_move_that_is_interrupted_ends_no_session(
    served: Served, node: skyproxy.Node, other: tuple[str, str], monkeypatch: pytest.MonkeyPatch, has_left: bool
) -> None:
    """Ctrl-C is for the wait: the session is where it was, or where it has gone."""
    total, move = torch.full((3,), 2.0, device=node.devices[0]), Protection.move

    def interrupted(protection: Protection, *arguments: Any) -> None:
        if has_left:
            move(protection, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Protection, "move", interrupted)
    with pytest.raises(KeyboardInterrupt):
        node.move_to(other[0], token=other[1])
    assert node.url == (other[0] if has_left else served.url)
    total += 1
    assert total.tolist() == [3, 3, 3]
    monkeypatch.undo()
    node.move_to(other[0] if not has_left else served.url, token=other[1] if not has_left else served.token)
    total += 1
    assert total.tolist() == [4, 4, 4]


def test_a_session_moves_between_workers_that_share_no_folder(
    served: Served, node: skyproxy.Node, tmp_path: Path
) -> None:
    expected, before = programs.digits(node.devices[0], 16), _snapshots_in(served.snapshots)
    with worker(tmp_path, "--snapshots", str(tmp_path / "elsewhere")) as (url, token):

        def disturb(step: int) -> None:
            if step == 5:
                node.move_to(url, token=token)
                assert node.url == url
                wait_for(
                    lambda: _snapshots_in(served.snapshots) <= before, "nothing is left of it on the volume before"
                )
            if step == 11:
                node.move_to(served.url, token=served.token)

        assert programs.same(expected, programs.digits(node.devices[0], 16, disturb))
        assert node.url == served.url
        assert node.run(sum, [1, 2]) == 3


@pytest.mark.parametrize("lacking", ["the other worker", "the program"])
def test_a_session_moves_also_where_not_all_have_blake3(
    node: skyproxy.Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    (tmp_path / "blake3.py").write_text("raise ImportError('not here')\n")
    hidden = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))} if lacking == "the other worker" else {}
    if lacking == "the program":
        monkeypatch.setattr(hashes, "_blake3", lambda: None)
    with worker(tmp_path, "--snapshots", str(tmp_path / "elsewhere"), **hidden) as (url, token):
        total = torch.arange(3 << 20, device=node.devices[0])
        with skyproxy.protect(node=node) as protected:  # a snapshot by the hash that the worker has
            node.move_to(url, token=token)
            total += 1
            assert total[-1].item() == 3 << 20
            protected.snapshot()
            formats = {path.read_bytes()[:19] for path in _snapshots_in(tmp_path / "elsewhere")}
    has_it = not hidden and importlib.util.find_spec("blake3") is not None
    assert formats == {b"skyproxy snapshot 2" if has_it else b"skyproxy snapshot 1"}


def test_a_session_leaves_an_embedded_worker_for_one_elsewhere(served: Served, sky: str) -> None:
    with skyproxy.launch_local("cpu") as node:
        total = torch.full((1 << 21,), 2.0, device=node.devices[0])  # of several pieces
        node.move_to(served.url, token=served.token)
        total += 1
        assert total.unique().tolist() == [3]
        assert (node.url, node.process_id) == (served.url, None)


def _snapshots_in(folder: Path) -> set[Path]:
    return set(folder.rglob("snapshot-*.msgpack"))


def test_connections_that_break_while_a_move_is_prepared_cost_nothing(
    node: skyproxy.Node, other: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker lives: no snapshot is loaded, and it does not look as if operations had ended six workers."""
    total = torch.zeros(3, device=node.devices[0])
    bring, session = moving._Carrier.bring, node._session

    def break_often(self: object, name: str, number: str, sequence: int) -> None:
        for time in range(6):
            session._operations.cut()
            total.add_(1)
            assert total.tolist() == [time + 1] * 3
        bring(self, name, number, sequence)  # type: ignore[arg-type]

    monkeypatch.setattr(moving._Carrier, "bring", break_often)
    with skyproxy.protect(node=node) as protected:
        node.move_to(other[0], token=other[1])
        total.add_(1)
        assert total.tolist() == [7] * 3
        assert protected.recoveries == 0


@pytest.mark.parametrize("asked", ["the session's worker", "the other worker"])
def test_a_silent_network_does_not_hold_a_move(
    node: skyproxy.Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """A worker that is asked for a snapshot may take minutes for it; one that says nothing at all is gone."""
    monkeypatch.setattr(node._opener, "_settings", dataclasses.replace(SETTINGS, silence_seconds=0.5))
    total = torch.full((3,), 2.0, device=node.devices[0])
    with (
        worker(tmp_path, "--snapshots", str(tmp_path / "elsewhere")) as (url, token),
        chaos_proxy(int(url.rpartition(":")[2])) as proxy,
    ):
        bring = moving._Carrier.bring

        def stall_first(self: object, name: str, number: str, sequence: int) -> None:
            if asked == "the other worker":
                proxy.stall()  # also the copy's connections, once there are some
                monkeypatch.setattr(snapshot_copies.WorkerCopies, "sequences", stall_and_ask)
            bring(self, name, number, sequence)  # type: ignore[arg-type]
            proxy.stall()

        sequences = snapshot_copies.WorkerCopies.sequences

        def stall_and_ask(self: snapshot_copies.WorkerCopies, name: str) -> object:
            proxy.stall()
            return sequences(self, name)

        monkeypatch.setattr(moving._Carrier, "bring", stall_first)
        with pytest.raises(skyproxy.errors.SkyproxyError, match=r"said nothing for 0\.5 s.*It goes on where it was"):
            node.move_to(f"ws://127.0.0.1:{proxy.port}", token=token)
    total += 1
    assert total.tolist() == [3, 3, 3]


def test_a_move_whose_carrying_connection_breaks_says_so_and_changes_nothing(
    node: skyproxy.Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = torch.full((3,), 2.0, device=node.devices[0])

    def write(self: snapshot_copies.WorkerCopies, copy: object, name: str) -> None:
        self._opened.operations.cut()
        self._ask("list_snapshots", name)

    monkeypatch.setattr(snapshot_copies.WorkerCopies, "write", write)
    with worker(tmp_path, "--snapshots", str(tmp_path / "elsewhere")) as (url, token):
        with pytest.raises(skyproxy.errors.ConnectError, match="was not moved"):
            node.move_to(url, token=token)
    total += 1
    assert total.tolist() == [3, 3, 3]


def test_a_session_that_cannot_move_goes_on_where_it_was(served: Served, node: skyproxy.Node, tmp_path: Path) -> None:
    total = torch.full((3,), 2.0, device=node.devices[0])
    with worker(tmp_path) as (url, token):
        with pytest.raises(ConfigurationError, match="keeps no snapshots"):
            node.move_to(url, token=token)
    with pytest.raises(skyproxy.errors.ConnectError):
        node.move_to("ws://127.0.0.1:9", token="x" * 40)
    total += 1
    assert total.tolist() == [3, 3, 3]
    assert (node.url, node.alive) == (served.url, True)


def test_a_wrong_interval_is_shown_as_it_was_written() -> None:
    with pytest.raises(ConfigurationError, match="every='5 minuts' is not a duration"):
        skyproxy.protect(every="5 minuts")
