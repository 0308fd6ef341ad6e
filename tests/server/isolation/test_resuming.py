"""Sessions with a process of their own whose connections break: the process goes on, and its client comes back."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import skyproxy
from skyproxy import nodes
from skyproxy.errors import ConnectError, SessionLostError
from skyproxy.protocol.messages import BULK, OPERATIONS, Hello, Welcome
from skyproxy.settings import SETTINGS, Settings
from skyproxy.transport.websocket import connect_websocket
from skyproxy.transport.websocket_transport import WebSocketTransport
from skyproxy_server.limits import are_sessions_separable
from tests.integration.broken_connections import check_same, move, train
from tests.integration.chaos_proxy import ChaosProxy, chaos_proxy
from tests.integration.programs import wait_for
from tests.server.isolation.workers import TOKEN, Worker

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not are_sessions_separable(), reason="session processes need Linux"),
]

LASTING = dataclasses.replace(SETTINGS, reconnect=True, reconnect_seconds=60.0, chunk_bytes=64 << 10)
FAST = Settings(close_timeout_seconds=0.3, handshake_timeout_seconds=30.0)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(tmp_path_factory.mktemp("worker"), SKYPROXY_MAX_DETACHED_SESSIONS="2")
    yield made
    made.end()


@pytest.fixture(autouse=True)
def lasting(sky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SETTINGS", LASTING)


def connect(proxy: ChaosProxy) -> skyproxy.Node:
    return skyproxy.connect(f"ws://127.0.0.1:{proxy.port}", token=TOKEN)


def open_session(worker: Worker, grace_seconds: int = 600) -> tuple[WebSocketTransport, Welcome]:
    return greet(worker, Hello([1], OPERATIONS, "", {}, grace_seconds))


def greet(worker: Worker, hello: Hello, token: str = TOKEN) -> tuple[WebSocketTransport, Welcome]:
    return connect_websocket(worker.url, token, hello, settings=FAST)


def take_up(worker: Worker, welcome: Welcome, secret: bytes | None = None) -> WebSocketTransport:
    hello = Hello([1], OPERATIONS, welcome.session, {}, 600, welcome.secret if secret is None else secret)
    return greet(worker, hello)[0]


def test_training_over_a_connection_that_breaks_is_exact(worker: Worker) -> None:
    with chaos_proxy(worker.port, 3) as proxy, connect(proxy) as node:
        process = node.run(os.getpid)
        expected = train(node.devices[0], steps=12)
        proxy.cut_after(1, 200_000, cuts=20)
        proxy.cut()
        check_same(expected, train(node.devices[0], steps=12))
        assert proxy.cuts >= 2
        assert node.run(os.getpid) == process
        proxy.cut_after(1 << 20, 6 << 20, cuts=4)
        proxy.cut()
        move(node.devices[0], 12 << 20, seed=3)


def test_over_tls_too(tmp_path: Path, authority) -> None:
    certificate = tmp_path / "certificate.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    worker = Worker(tmp_path, "--tls-cert", str(certificate), "--no-functions")
    try:
        with chaos_proxy(worker.port, 5) as proxy:
            trusted = authority.cert_pem.bytes().decode()
            with skyproxy.connect(f"wss://127.0.0.1:{proxy.port}", token=TOKEN, certificate=trusted) as node:
                expected = train(node.devices[0], steps=8)
                proxy.cut_after(5_000, 200_000, cuts=6)
                proxy.cut()
                check_same(expected, train(node.devices[0], steps=8))
                assert proxy.cuts >= 2
    finally:
        worker.end()


def test_a_process_that_was_killed_ends_the_session_and_says_how(worker: Worker) -> None:
    with chaos_proxy(worker.port) as proxy, connect(proxy) as node:
        x = torch.ones(3, device=node.devices[0])
        proxy.cut()
        assert x.sum().item() == 3
        os.kill(node.run(os.getpid), signal.SIGKILL)
        with pytest.raises(SessionLostError):
            while True:  # it may answer once more before it dies
                x.sum().item()


def test_a_wrong_secret_is_refused_and_harms_nothing(worker: Worker) -> None:
    first, welcome = open_session(worker)
    other, another = open_session(worker)
    assert len(welcome.secret) == 32
    for secret in (welcome.secret[:-1], welcome.secret + b"x", another.secret, bytes(32)):
        with pytest.raises(ConnectError, match="no such session"):
            take_up(worker, welcome, secret)
    with pytest.raises(ConnectError, match="no such session"):
        greet(worker, Hello([1], OPERATIONS, "0" * 32, {}, 600, welcome.secret))
    assert not first.connection.goodbye
    again = take_up(worker, welcome)
    for transport in (other, again):
        transport.close()


def test_a_second_bulk_connection_needs_the_secret(worker: Worker) -> None:
    first, welcome = open_session(worker)
    bulk, answer = greet(worker, Hello([1], BULK, welcome.session, {}))
    assert answer.secret == b""
    with pytest.raises(ConnectError, match="no such session"):
        greet(worker, Hello([1], BULK, welcome.session, {}))
    another, _ = greet(worker, Hello([1], BULK, welcome.session, {}, 600, welcome.secret))
    for transport in (another, bulk, first):
        transport.close()


def test_a_session_lasts_only_where_its_client_asked_for_it(worker: Worker) -> None:
    first, welcome = open_session(worker, grace_seconds=0)
    assert welcome.secret == b""
    assert "grace_seconds" not in welcome.limits
    before = worker.children()
    first.cut()
    wait_for(lambda: len(worker.children()) < len(before), "its process ends")


def has_processes(worker: Worker, count: int) -> bool:
    return worker.activity()["processes"] == count


def test_too_many_sessions_without_a_connection_end_the_oldest(worker: Worker) -> None:
    wait_for(lambda: worker.activity()["processes"] == 0, "the sessions of other tests end")
    opened = []
    for count in range(3):
        transport, welcome = open_session(worker)
        opened.append(welcome)
        transport.cut()
        wait_for(lambda: worker.activity()["sessions"] == 0, "it is noticed")
        # The third one ends the first.
        wait_for(partial(has_processes, worker, min(count + 1, 2)), "as many are kept as may be")
    with pytest.raises(ConnectError, match="no such session"):
        take_up(worker, opened[0])
    for welcome in opened[1:]:
        take_up(worker, welcome).close()
    wait_for(lambda: worker.activity()["processes"] == 0, "those that were left in order end")


def test_without_a_client_the_process_ends_when_the_grace_does(worker: Worker) -> None:
    wait_for(lambda: worker.activity()["processes"] == 0, "the sessions of other tests end")
    transport, _ = open_session(worker, grace_seconds=1)
    assert worker.activity()["processes"] == 1
    transport.cut()
    wait_for(lambda: worker.activity()["processes"] == 0, "the grace is over")
