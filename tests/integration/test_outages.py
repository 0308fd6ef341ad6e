"""Outages of a real kind: a process that is stopped, a cable that is pulled out. Nothing is lost, results are exact."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy import nodes
from skyproxy.errors import SessionHeldError
from skyproxy.settings import SETTINGS
from tests.integration import network
from tests.integration.broken_connections import check_same, train
from tests.integration.chaos_proxy import chaos_proxy
from tests.integration.programs import ROOT, environment, wait_for, worker

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="sends POSIX signals"),
]

IMPATIENT = dataclasses.replace(
    SETTINGS,
    reconnect=True,
    reconnect_seconds=100.0,
    ping_interval_seconds=0.1,
    silence_seconds=0.5,
    connect_timeout_seconds=2.0,
    chunk_bytes=64 << 10,
)
"""Heartbeats for tests: the outages below are longer than all of them."""


@pytest.fixture(autouse=True)
def lasting(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SETTINGS", IMPATIENT)


def has_noticed(node: skyproxy.Node) -> Callable[[], bool]:
    """Tells when the client has noticed that a connection is broken."""
    assert node._session._reconnector is not None
    outage = node._session._reconnector.outage
    return lambda: outage.is_going_on


class Outage:
    """Something that stops, until the client has noticed."""

    def __init__(self, node: skyproxy.Node, stop: Callable[[], object], go_on: Callable[[], object]) -> None:
        self._noticed = has_noticed(node)
        self._stop, self._go_on = stop, go_on
        self._thread: threading.Thread | None = None
        self.was_noticed = False

    def begin(self) -> None:
        """Stop it now; a thread waits until it was noticed, and lets it go on."""
        self._stop()
        self._thread = threading.Thread(target=self._end_when_noticed)
        self._thread.start()

    def _end_when_noticed(self) -> None:
        try:
            wait_for(self._noticed, "the outage is noticed", 60)
            self.was_noticed = True
        finally:
            self._go_on()

    def check(self) -> None:
        """Raise an error unless it was noticed, and is over."""
        assert self._thread is not None
        self._thread.join(80)
        assert self.was_noticed


def check_training(node: skyproxy.Node, stop: Callable[[], object], go_on: Callable[[], object]) -> None:
    """Train with an outage in the middle, and compare with a training without one."""
    expected = train(node.devices[0], steps=8)
    outage = Outage(node, stop, go_on)
    check_same(expected, train(node.devices[0], steps=8, before_step=lambda step: step == 4 and outage.begin()))
    outage.check()
    assert node.alive


@pytest.mark.parametrize("arguments", [(), ("--session-processes",)], ids=["in the worker", "session process"])
def test_a_worker_that_is_stopped_for_longer_than_the_heartbeats_loses_nothing(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    if arguments and not sys.platform.startswith("linux"):
        pytest.skip("session processes need Linux")
    with worker(tmp_path, *arguments) as (url, token), skyproxy.connect(url, token=token) as node:
        process = node.run(os.getpid)
        check_training(node, lambda: os.kill(process, signal.SIGSTOP), lambda: os.kill(process, signal.SIGCONT))


CLIENT = """
import sys, torch, skyproxy
from tests.integration.broken_connections import check_same, train
from tests.integration.chaos_proxy import chaos_proxy

def before_step(step):
    if step == 4:
        print("in the middle", flush=True)
        torch.zeros(1, device=device).item()

with skyproxy.connect(sys.argv[1]) as node:
    device = node.devices[0]
    expected = train(device, steps=8)
    check_same(expected, train(device, steps=8, before_step=before_step))
    assert node.alive
print("exact")
"""


def test_a_client_that_is_stopped_for_longer_than_the_heartbeats_loses_nothing(tmp_path: Path) -> None:
    with worker(tmp_path, SKYPROXY_CLIENT_SILENCE_SECONDS="0.5") as (url, token):
        program = subprocess.Popen(
            [sys.executable, "-c", CLIENT, url],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(
                SKYPROXY_TOKEN=token,
                SKYPROXY_RECONNECT="1",
                SKYPROXY_PING_INTERVAL_SECONDS="0.1",
                SKYPROXY_SILENCE_SECONDS="0.5",
                SKYPROXY_LIVENESS_TIMEOUT_SECONDS="0.5",
            ),
        )
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "in the middle\n"
            program.send_signal(signal.SIGSTOP)
            time.sleep(1.5)  # the outage itself: three times what either heartbeat allows
            program.send_signal(signal.SIGCONT)
            assert program.communicate(timeout=200)[0] == "exact\n"
            assert program.returncode == 0
        finally:
            program.kill()
            program.communicate()


@pytest.mark.parametrize(
    "arguments", [(), pytest.param(("--session-processes",), marks=pytest.mark.slow)], ids=["in the worker", "process"]
)
def test_a_worker_lets_go_of_a_client_that_says_nothing_and_not_of_one_that_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """No side is told that the cable is pulled out; and the client would not notice for long."""
    patient = dataclasses.replace(IMPATIENT, ping_interval_seconds=1000.0, silence_seconds=1000.0)
    monkeypatch.setattr(nodes, "SETTINGS", patient)
    snapshots = ("--snapshots", str(tmp_path / "snapshots"))
    variables = {"SKYPROXY_CLIENT_SILENCE_SECONDS": "1", "SKYPROXY_NAMED_RETURN_SECONDS": "0.5"}
    with (
        worker(tmp_path, *arguments, *snapshots, **variables) as (url, token),
        chaos_proxy(int(url.rpartition(":")[2])) as proxy,
    ):
        quiet = skyproxy.connect(f"ws://127.0.0.1:{proxy.port}", token=token)
        gone = skyproxy.connect(f"ws://127.0.0.1:{proxy.port}", token=token, session="exp1")
        gone.put("x", torch.ones(3, device=gone.devices[0]))
        time.sleep(3)  # the quiet time itself
        assert has_noticed(quiet)() is has_noticed(gone)() is False
        proxy.stall()
        with contextlib.ExitStack() as later:

            def connect() -> skyproxy.Node | None:
                with contextlib.suppress(SessionHeldError):
                    return later.enter_context(skyproxy.connect(url, token=token, session="exp1"))
                return None

            # Nobody waits for minutes, and nobody needs `take=True`.
            assert wait_for(connect, "the name is free", 30).get("x").tolist() == [1, 1, 1]
        proxy.cut()
        assert torch.ones(3, device=quiet.devices[0]).sum().item() == 3
        for node in (quiet, gone):
            node.close()


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[network.Link]:
    reason = network.why_not()
    if reason:
        pytest.skip(reason)
    with network.worker_behind_a_link(tmp_path_factory.mktemp("behind")) as made:
        yield made


@pytest.fixture
def node(link: network.Link) -> Iterator[skyproxy.Node]:
    with skyproxy.connect(link.url, token=link.token, insecure=True) as made:
        yield made


@pytest.mark.slow
def test_a_cable_that_is_pulled_out_while_training_loses_nothing(link: network.Link, node: skyproxy.Node) -> None:
    check_training(node, lambda: link.set(up=False), lambda: link.set(up=True))


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["upload", "download"])
def test_a_cable_that_is_pulled_out_in_a_transfer_loses_nothing(
    link: network.Link, node: skyproxy.Node, direction: str
) -> None:
    size = 64 << 20
    values = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    there = values.to(node.devices[0]) if direction == "download" else None
    if there is not None:
        there[0].item()
    session = node._session
    moved = session.bytes_received if direction == "download" else session.bytes_sent
    outage = Outage(node, lambda: link.set(up=False), lambda: link.set(up=True))

    def in_the_middle() -> None:
        wait_for(lambda: (session.bytes_sent + session.bytes_received - before) > size // 4, "a quarter has moved")
        outage.begin()

    before = session.bytes_sent + session.bytes_received
    thread = threading.Thread(target=in_the_middle)
    thread.start()
    back = there.cpu() if there is not None else values.to(node.devices[0])
    result = back if there is not None else back.cpu()
    thread.join(60)
    outage.check()
    assert torch.equal(result, values)
    assert (session.bytes_received if direction == "download" else session.bytes_sent) - moved >= size
