"""Who may take a session up whose connection broke: its own client, with its secret, while it is kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch  # noqa: F401 - the device is registered with it

from skyproxy.errors import ConnectError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import BULK, OPERATIONS, Batch, Hello, Sequence, Welcome
from skyproxy.settings import Settings
from skyproxy.transport.websocket import WebSocketTransport, connect_websocket
from skyproxy_server import incoming_transfer, outgoing_transfer
from skyproxy_server.listener import Listener, serve
from skyproxy_server.tokens import Tokens
from skyproxy_server.worker_host import WorkerHost
from tests.integration.programs import wait_for

ALICE = "alice-0123456789abcdef0123456789"
MALLORY = "mallory-0123456789abcdef0123456789"
SETTINGS = Settings(close_timeout_seconds=0.3, max_detached_sessions=2, token_poll_seconds=0.05)


@pytest.fixture
def host() -> WorkerHost:
    return WorkerHost([{"type": "cpu", "index": 0, "name": "cpu"}], SETTINGS)


@pytest.fixture
def listener(host: WorkerHost, tmp_path: Path) -> Iterator[Listener]:
    for name, token in (("alice", ALICE), ("mallory", MALLORY)):
        path = tmp_path / name
        path.write_text(token)
        path.chmod(0o600)
    made = serve("127.0.0.1", 0, Tokens(tmp_path, 600.0), host, settings=SETTINGS)
    yield made
    made.close()


def open_session(listener: Listener, grace_seconds: int = 600) -> tuple[WebSocketTransport, Welcome]:
    return greet(listener, Hello([1], OPERATIONS, "", {}, grace_seconds))


def greet(listener: Listener, hello: Hello, token: str = ALICE) -> tuple[WebSocketTransport, Welcome]:
    return connect_websocket(f"ws://127.0.0.1:{listener.port}", token, hello, settings=SETTINGS)


def take_up(listener: Listener, name: str, secret: bytes, token: str = ALICE) -> tuple[WebSocketTransport, Welcome]:
    return greet(listener, Hello([1], OPERATIONS, name, {}, 600, secret), token)


def test_a_session_is_taken_up_with_its_secret(listener: Listener) -> None:
    first, welcome = open_session(listener)
    assert len(welcome.secret) == 32
    assert welcome.limits["grace_seconds"] == 600
    first.cut()
    for _ in range(3):  # again and again; the one before is still connected
        again, answer = take_up(listener, welcome.session, welcome.secret)
        assert (answer.session, answer.received, answer.secret) == (welcome.session, 0, b"")
    again.close()


@pytest.mark.parametrize("wrong", ["last byte", "too short", "too long", "of another session"])
def test_a_wrong_secret_is_refused_and_harms_nothing(listener: Listener, wrong: str) -> None:
    first, welcome = open_session(listener)
    other, another = open_session(listener)
    secret = {
        "last byte": welcome.secret[:-1] + bytes([welcome.secret[-1] ^ 1]),
        "too short": welcome.secret[:-1],
        "too long": welcome.secret + b"x",
        "of another session": another.secret,
    }[wrong]
    with pytest.raises(ConnectError, match="no such session") as refusal:
        take_up(listener, welcome.session, secret)
    assert refusal.value.code_name == "no-such-session"
    assert not first.connection.goodbye
    again, _ = take_up(listener, welcome.session, welcome.secret)
    for transport in (other, again):
        transport.close()


def test_the_secret_of_another_tokens_session_is_of_no_use(listener: Listener) -> None:
    first, welcome = open_session(listener)
    for hello in (
        Hello([1], OPERATIONS, welcome.session, {}, 600, welcome.secret),
        Hello([1], BULK, welcome.session, {}, 600, welcome.secret),
    ):
        with pytest.raises(ConnectError, match="no such session"):
            greet(listener, hello, MALLORY)
    first.close()


def test_a_session_that_never_was_is_refused_alike(listener: Listener) -> None:
    with pytest.raises(ConnectError, match="no such session"):
        take_up(listener, "0" * 32, b"s" * 32)


def test_who_did_not_ask_for_it_gets_no_session_that_lasts(listener: Listener) -> None:
    first, welcome = open_session(listener, grace_seconds=0)
    assert welcome.secret == b""
    with pytest.raises(ConnectError, match="no such session"):
        take_up(listener, welcome.session, b"s" * 32)
    first.close()


def test_a_second_bulk_connection_needs_the_secret(listener: Listener) -> None:
    first, welcome = open_session(listener)
    bulk, answer = greet(listener, Hello([1], BULK, welcome.session, {}))
    assert answer.secret == b""
    with pytest.raises(ConnectError, match="no such session"):
        greet(listener, Hello([1], BULK, welcome.session, {}))
    another, _ = greet(listener, Hello([1], BULK, welcome.session, {}, 600, welcome.secret))
    for transport in (another, bulk, first):
        transport.close()


def await_detached(host: WorkerHost, name: str, wanted: bool) -> None:
    """Wait for another thread, which notices and tells nobody."""
    wait_for(lambda: host._sessions[name].is_detached is wanted, f"{name} is detached: {wanted}")


def test_too_many_sessions_without_a_connection_end_the_oldest(listener: Listener, host: WorkerHost) -> None:
    opened = [open_session(listener) for _ in range(3)]
    for transport, welcome in opened:
        transport.cut()
        # Taken up, to be sure that it was noticed that the connection broke; then it breaks again. One after the other:
        # each has a thread that notices, and which is the oldest is when it did.
        again, _ = take_up(listener, welcome.session, welcome.secret)
        await_detached(host, welcome.session, False)
        again.cut()
        await_detached(host, welcome.session, True)
    session = opened[0][1]
    wait_for(lambda: session.session not in host._sessions, "the oldest ends")
    with pytest.raises(ConnectError, match="no such session"):
        take_up(listener, session.session, session.secret)
    for _, welcome in opened[1:]:
        take_up(listener, welcome.session, welcome.secret)[0].close()


def test_no_secret_is_logged(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        first, welcome = open_session(listener)
        take_up(listener, welcome.session, welcome.secret)[0].close()
        first.close()
    assert welcome.secret.hex() not in caplog.text
    assert repr(welcome.secret)[2:-1] not in caplog.text


def test_a_revoked_token_ends_the_sessions_that_wait_for_its_client(
    listener: Listener, host: WorkerHost, tmp_path: Path
) -> None:
    first, welcome = open_session(listener)
    other, kept = greet(listener, Hello([1], OPERATIONS, "", {}, 600), MALLORY)
    for transport in (first, other):
        transport.cut()
    wait_for(lambda: all(session.is_detached for session in host._sessions.values()), "both are detached")
    (tmp_path / "alice").unlink()
    # Far sooner than after the 600 seconds for which they are kept.
    wait_for(lambda: welcome.session not in host._sessions, "the session of the revoked token ends")
    take_up(listener, kept.session, kept.secret, MALLORY)[0].close()


FLOATS = ["float32", [4], [1], 0]
UPLOAD = [commands.UPLOAD, 1, FLOATS, ["cpu", None]]


@pytest.mark.parametrize(
    "stream",
    [
        [commands.RECEIVE, 1, FLOATS, ["cpu", None], 1, commands.CALL, 1, "synchronize", []],
        [*UPLOAD, commands.FETCH, 1, 1, 1, commands.CALL, 2, "synchronize", []],
    ],
    ids=["upload", "download"],
)
def test_a_session_whose_bulk_connection_never_came_ends_with_its_client(
    stream: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (incoming_transfer, outgoing_transfer):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    settings = Settings(close_timeout_seconds=0.3, client_silence_seconds=0.2, session_grace_seconds=0.2)
    host = WorkerHost([{"type": "cpu", "index": 0, "name": "cpu"}], settings)
    listener = serve("127.0.0.1", 0, ALICE, host, settings=settings)
    try:
        link, _ = open_session(listener)
        link.send(Batch(Sequence(1), stream, (bytes(16),) if stream[0] == commands.UPLOAD else ()))
        wait_for(lambda: any(row["state"] == "running" for row in host.session_rows()), "the batch waits")
        link.cut()
        wait_for(lambda: not host.session_rows(), "the session is over")
    finally:
        listener.close()
