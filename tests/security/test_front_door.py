"""Attacks by bytes: what strangers without the token, and clients with hostile frames, can do to a worker."""

from __future__ import annotations

import logging
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from skyproxy.errors import ProtocolError
from skyproxy.protocol import framing
from skyproxy.protocol.messages import Batch, Hello, NamedBatch, Repeat, Sequence
from skyproxy.settings import Settings
from skyproxy.transport.base import Transport
from skyproxy.transport.websocket_frames import frame_header
from skyproxy_server.global_modes import SessionModes
from skyproxy_server.listener import Listener, serve
from skyproxy_server.named_batches import NamedBatches
from skyproxy_server.program_log import OneLineFormatter
from tests.security.raw_client import RawClient

FRAME = 64 << 20
TOKEN = "a-token-that-nobody-should-see-anywhere"
SETTINGS = Settings(
    close_timeout_seconds=0.3, max_pending_connections=6, max_pending_connections_per_address=4, max_connections=4
)


class NoSessions:
    """A host that is asked for nothing."""

    def open_session(self, hello: Hello, transport: Transport) -> Any:
        raise LookupError

    def join_bulk(self, session_id: str, transport: Transport) -> Any:
        raise LookupError

    def end_refused(self, refusal: Any) -> None:
        """Nothing lasts here without a connection."""

    def join_functions(self, session_id: str, transport: Transport) -> Any:
        raise LookupError

    def activity(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = serve("127.0.0.1", 0, TOKEN, NoSessions(), settings=SETTINGS)
    yield made
    made.close()


def healthy(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        return sock.recv(100).startswith(b"HTTP/1.1 200")


def test_half_open_connections_do_not_keep_others_out(listener: Listener) -> None:
    half_open = [socket.create_connection(("127.0.0.1", listener.port), timeout=10) for _ in range(60)]
    try:
        for sock in half_open:
            sock.sendall(b"GET /")
    except OSError:
        pass  # those that were ended already
    assert healthy(listener.port)
    assert half_open[0].recv(10) == b""  # the oldest were ended, and not the newest
    half_open[-1].settimeout(0.05)
    with pytest.raises(TimeoutError):
        half_open[-1].recv(10)
    for sock in half_open:
        sock.close()


def test_a_connection_without_a_token_does_not_live_as_long_as_a_handshake() -> None:
    quick = Settings(close_timeout_seconds=0.3, handshake_timeout_seconds=600.0, token_timeout_seconds=0.05)
    listener = serve("127.0.0.1", 0, TOKEN, NoSessions(), settings=quick)
    try:
        with socket.create_connection(("127.0.0.1", listener.port), timeout=20) as sock:
            sock.sendall(b"GET /")
            assert sock.recv(10) == b""
    finally:
        listener.close()


def test_a_thread_that_cannot_start_costs_one_connection(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def none_left(self: threading.Thread) -> None:
        if self.name == "skyproxy-connection":
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with socket.create_connection(("127.0.0.1", listener.port), timeout=10) as sock:
            assert sock.recv(10) == b""
    assert healthy(listener.port)


# --- requests --------------------------------------------------------------------------------------------------------


def answers(port: int, request: bytes) -> list[tuple[bytes, bytes]]:
    """The status line and the body of each answer on one connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(request)
        received = b""
        while piece := sock.recv(4096):
            received += piece
    found = []
    for answer in received.split(b"HTTP/1.1 ")[1:]:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"Cache-Control: no-store\r\nConnection: close" in head
        found.append((head.split(b" ")[0], body))
    return found


@pytest.mark.parametrize(
    "path", ["/activity", "/metrics", "/status", "/ending", "/", "/ui/", "/jobs", "*", "/healthz/x"]
)
@pytest.mark.parametrize(
    "form",
    ["{}", "{}?healthz", "/{}", "/healthz/..{}", "/readyz%2f..{}", "http://localhost{}", "{}#/healthz", "{};x=1"],
)
def test_no_path_tells_a_stranger_more_than_life(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, path: str, form: str
) -> None:
    monkeypatch.setattr("skyproxy_server.upgrade._REFUSAL_SECONDS", 0.0)
    head = f"GET {form.format(path)} HTTP/1.1\r\nHost: x\r\nOrigin: https://elsewhere\r\n\r\n"
    [(status, body)] = answers(listener.port, head.encode())
    assert (status, body) in {(b"401", b"wrong token\n"), (b"400", b"malformed request\n")}


@pytest.mark.parametrize("size", [100_000, FRAME - 7])
def test_a_greeting_is_short_or_refused_in_words(
    size: int, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    client = RawClient(listener.port, TOKEN)
    client._socket.sendall(frame_header(2, size + 7, bytes(4)) + framing.PREFIX.pack(Hello.code, size))
    while not client.is_over and client.listen(10):
        pass
    assert client.goodbye == "protocol"
    listener.close()  # it has told its log by then
    assert "the limit is 16,384" in caplog.text
    assert "internal error" not in caplog.text


@pytest.mark.parametrize(
    "request_of",
    [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\n\r\nGET /activity HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /status HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /ending HTTP/1.1\r\nAuthorization: Bearer %s\r\n\r\n"
        % TOKEN.encode(),
    ],
)
def test_a_second_request_on_a_connection_is_not_answered(listener: Listener, request_of: bytes) -> None:
    [(status, body)] = answers(listener.port, request_of)
    assert (status, body) in {(b"200", b"alive\n"), (b"400", b"malformed request\n")}


@pytest.mark.parametrize("verb", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT", "get", "PRI"])
def test_a_request_that_is_not_for_reading_is_refused_with_a_token_and_without(listener: Listener, verb: str) -> None:
    for token in (TOKEN, "wrong"):
        head = f"{verb} /ending HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
        assert answers(listener.port, head.encode()) == [(b"400", b"this is a skyproxy worker\n")]


@pytest.mark.parametrize(
    "line", [b"a: " + b"x" * (17 << 10), b"x: y\r\n" * 3000, b"a: \x00", b"Authorization: Bearer \xff"]
)
def test_a_head_that_is_none_is_refused_in_short_words(listener: Listener, line: bytes) -> None:
    [(status, body)] = answers(listener.port, b"GET /activity HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n")
    assert (status, body) in {
        (b"400", b"this is a skyproxy worker\n"),
        (b"400", b"malformed request\n"),
        (b"401", b"wrong token\n"),
    }


# --- frames ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", [[], {}, [{1: []}]], ids=["lists", "tables", "nested"])
def test_a_frame_of_many_lists_is_refused(container: object) -> None:
    stream: list[Any] = [container] * 1_200_000
    frame = b"".join(bytes(piece) for piece in framing.encode(Batch(Sequence(1), stream), FRAME))
    with pytest.raises(ProtocolError, match="lists and tables"):
        framing.decode(frame, FRAME)


def test_a_frame_of_many_numbers_that_look_like_lists_is_read() -> None:
    """As a command with more than a million results has them; such a command ended its session."""
    slots = [0x90] * 1_200_000
    frame = b"".join(bytes(piece) for piece in framing.encode(Batch(Sequence(1), [7, slots]), FRAME))
    decoded = framing.decode(frame, FRAME)
    assert isinstance(decoded, Batch)
    assert decoded.stream == [7, slots]


@pytest.mark.parametrize("kind", [b"\xdd", b"\xdf"], ids=["list", "table"])
@pytest.mark.parametrize("depth", [1, 1000])
def test_lists_that_promise_more_than_any_message_has_are_refused_at_the_first(kind: bytes, depth: int) -> None:
    promise = kind + (5_000_000).to_bytes(4, "big")
    header = b"\x93\x01" + promise * depth + bytes(5_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=r"max_(array|map)_len"):
            framing.decode(framing.PREFIX.pack(Batch.code, len(header)) + header, FRAME)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 25_000_000  # copies of the header; what one such list would take beside them is 40 MB


def test_a_frame_of_many_numbers_is_none_of_them() -> None:
    stream: list[Any] = list(range(300_000))
    frame = b"".join(bytes(piece) for piece in framing.encode(Batch(Sequence(1), stream), FRAME))
    assert framing.decode(frame, FRAME).stream == stream  # type: ignore[attr-defined]


def test_a_deep_frame_is_refused() -> None:
    header = b"\x93\x01" + b"\x91" * 100_000 + b"\x90" + b"\x90"
    with pytest.raises(ProtocolError):
        framing.decode(framing.PREFIX.pack(Batch.code, len(header)) + header, FRAME)


@pytest.mark.parametrize(
    "changes",
    [
        [0, [[1 << 40, 0]]],
        [0, [[1 << 20, 0]], 1, [[1, 0]]],
        [0, [[-1, 0]]],
        [0, [["x", 0]]],
        [0, [[1]]],
        [0, [[1.0, 2]]],
        [0],
    ],
    ids=str,
)
def test_a_repeated_batch_does_not_grow_without_bound(changes: list[Any]) -> None:
    named = NamedBatches()
    named.resolve(NamedBatch(Sequence(1), [5, 6], 1, [0, 1]))
    with pytest.raises(ProtocolError, match=r"shortened|no value"):
        named.resolve(Repeat(Sequence(2), 1, changes))


def test_a_repeated_batch_gets_its_shortened_lists_back() -> None:
    named = NamedBatches()
    named.resolve(NamedBatch(Sequence(1), [5, 6], 1, [0, 1]))
    batch = named.resolve(Repeat(Sequence(2), 1, [0, [[1000, 7]], 1, 8]))
    assert batch is not None
    assert batch.stream == [[7] * 1000, 8]


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_who_waits_for_a_client_keeps_nobody_from_other_modes() -> None:
    waiting, other = SessionModes(), SessionModes()
    other.record = (("default_dtype", "float64"),)
    entered, leave = threading.Event(), threading.Event()

    def wait() -> None:
        with waiting, waiting.idle():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=wait)
    thread.start()
    assert entered.wait(60)
    with other:  # would wait for ever while the other batch counted as running
        assert torch.get_default_dtype() is torch.float64
    leave.set()
    thread.join(60)
    assert not thread.is_alive()


# --- the log ---------------------------------------------------------------------------------------------------------


def test_a_peer_writes_no_lines_into_the_log() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "said %s", ("a\n2026 ERROR forged \x1b]52;c;eA==\x07",), None)
    line = OneLineFormatter().format(record)
    assert line.split(" ", 2)[2] == "INFO x: said a\\n2026 ERROR forged \\x1b]52;c;eA==\\x07"


def test_a_peer_makes_no_line_of_the_log_long() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "said %s", ("a" * 1_000_000,), None)
    line = OneLineFormatter().format(record)
    assert len(line) < 5_000
    assert line.endswith("[996005 more characters]")
