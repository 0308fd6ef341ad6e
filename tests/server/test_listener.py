"""The listener and the client's handshake, against one another and against strangers."""

from __future__ import annotations

import json
import logging
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import trustme
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from skyproxy.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    SessionLostError,
    VersionMismatchError,
)
from skyproxy.protocol.messages import BULK, Ack, Batch, Chunk, Hello, Reply, RequestId, Sequence
from skyproxy.settings import Settings
from skyproxy.transport.websocket import WebSocketTransport, connect_websocket
from skyproxy_server.listener import Listener, serve
from tests.integration.programs import wait_for

pytestmark = pytest.mark.timeout(30)

TOKEN = "a-token-that-nobody-should-see-anywhere"
FAST = Settings(close_timeout_seconds=0.3, handshake_timeout_seconds=5.0)
OPERATIONS_HELLO = Hello([1], "operations", "", {"skyproxy": "test"})


def url(listener: Listener, scheme: str = "ws") -> str:
    return f"{scheme}://127.0.0.1:{listener.port}"


@contextmanager
def connected(listener: Listener, hello: Hello = OPERATIONS_HELLO, **options: object) -> Iterator[WebSocketTransport]:
    options = {"settings": FAST, **options}
    scheme = "wss" if options.get("ssl_context") else "ws"
    transport, _ = connect_websocket(url(listener, scheme), TOKEN, hello, **options)  # type: ignore[arg-type]
    try:
        yield transport
    finally:
        transport.close()


def get(listener: Listener, path: str, context: ssl.SSLContext | None = None) -> tuple[int, str]:
    scheme = "https" if context else "http"
    try:
        with urllib.request.urlopen(url(listener, scheme) + path, timeout=5, context=context) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_and_its_bulk_connection(start, host) -> None:
    listener = start()
    operations, welcome = connect_websocket(url(listener), TOKEN, OPERATIONS_HELLO, settings=FAST)
    assert (welcome.version, welcome.session) == (1, "session-0")
    assert host.hellos == [OPERATIONS_HELLO]
    with connected(listener, Hello([1], BULK, welcome.session, {})) as bulk:
        operations.send(Batch(Sequence(1), [1.5, "x"], (b"abc",)))
        assert operations.recv(5) == Ack(Sequence(1))
        assert operations.recv(5) == Reply(RequestId(1), [1.5, "x"], (b"abc",))
        bulk.send(Chunk(1, 0, 300_000, (b"z" * 300_000,)))
        assert bulk.recv(5) == Chunk(1, 0, 300_000, (b"z" * 300_000,))
    operations.close()
    wait_for(lambda: listener.connections == 0, "connections end")


def test_over_tls(start, tls_contexts) -> None:
    listener = start(ssl_context=tls_contexts[1])
    with connected(listener, ssl_context=tls_contexts[0]) as operations:
        operations.send(Batch(Sequence(1), [], (b"q" * 500_000,)))
        assert operations.recv(5) == Ack(Sequence(1))
        assert operations.recv(5) == Reply(RequestId(1), [], (b"q" * 500_000,))
    assert get(listener, "/healthz", tls_contexts[0]) == (200, "alive\n")


def test_the_worker_closes_with_a_reason(start) -> None:
    listener = start()
    with connected(listener) as operations:
        closer = threading.Thread(target=listener.close)
        closer.start()
        with pytest.raises(SessionLostError, match=r"shutdown.*shutting down"):
            operations.recv(5)
        closer.join(5)
        assert not closer.is_alive()


def test_a_newer_client_gets_the_version_that_both_speak(start) -> None:
    listener = start()
    with connected(listener, replace(OPERATIONS_HELLO, versions=[7, 1, 9])) as operations:
        assert operations.connection.welcome is not None
        assert operations.connection.welcome.version == 1


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused_and_not_told(start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    listener = start()
    with pytest.raises(AuthenticationError, match="SKYPROXY_TOKEN") as caught:
        connect_websocket(url(listener), "wrong-but-secret-too", OPERATIONS_HELLO, settings=FAST)
    text = caplog.text + str(caught.value)
    assert "refused" in caplog.text
    assert "wrong-but-secret-too" not in text
    assert TOKEN not in text


def test_no_token_reaches_a_log(start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with connected(start()) as operations:
        operations.send(Batch(Sequence(1), []))
        operations.recv(5)
    assert "connected" in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer"}, {"Authorization": f"Basic {TOKEN}"}, {"Authorization": TOKEN}],
    ids=["none", "empty", "basic", "bare"],
)
def test_only_one_form_of_token_counts(start, headers: dict[str, str]) -> None:
    with pytest.raises(InvalidStatus) as caught, connect(url(start()), additional_headers=headers):
        pass
    assert caught.value.response.status_code == 401


def test_browsers_are_refused_unless_their_page_is_known(start) -> None:
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    with pytest.raises(InvalidStatus) as caught, connect(url(start()), origin="http://evil", additional_headers=bearer):
        pass
    assert caught.value.response.status_code == 403
    trusting = start(allowed_origins=["http://notebook"])
    with connect(url(trusting), origin="http://notebook", additional_headers=bearer, compression=None):
        pass


def test_a_foreign_version_is_named(start, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VersionMismatchError, match=r"client speaks protocol versions 5, 6, the worker 1"):
        connect_websocket(url(start()), TOKEN, replace(OPERATIONS_HELLO, versions=[5, 6]), settings=FAST)


def test_too_many_sessions(start) -> None:
    listener = start()
    with connected(listener), connected(listener):
        with pytest.raises(ConnectError, match="2 sessions"):
            connect_websocket(url(listener), TOKEN, OPERATIONS_HELLO, settings=FAST)


def test_no_such_session(start) -> None:
    with pytest.raises(ConnectError, match="no such session"):
        connect_websocket(url(start()), TOKEN, Hello([1], BULK, "nope", {}), settings=FAST)


def test_a_full_worker_says_so_and_still_answers_health(start) -> None:
    listener = start(settings=replace(FAST, max_connections=1))
    assert get(listener, "/readyz")[0] == 200
    with connected(listener):
        with pytest.raises(ConnectError, match="503"):
            connect_websocket(url(listener), TOKEN, OPERATIONS_HELLO, settings=FAST)
        assert get(listener, "/healthz")[0] == 200
        assert get(listener, "/readyz")[0] == 503
    wait_for(lambda: get(listener, "/readyz")[0] == 200, "it is ready")


# --- strangers --------------------------------------------------------------------------------------------------------


def exchange(listener: Listener, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", listener.port), timeout=10) as sock:
        sock.sendall(data)
        received = b""
        try:
            while piece := sock.recv(4096):
                received += piece
        except ConnectionResetError:
            pass
        return received


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff\xfe garbage",
        b"POST / HTTP/1.1\r\n\r\n",
        b"GET nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nbroken header\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["binary", "post", "request line", "header", "huge", "tls"],
)
def test_garbage_gets_a_400_and_harms_nobody(start, data: bytes) -> None:
    listener = start()
    assert exchange(listener, data).startswith(b"HTTP/1.1 400")
    with connected(listener):
        pass


def test_plain_http_with_the_token_is_told_to_upgrade(start) -> None:
    request = f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    assert b" 426 " in exchange(start(), request).split(b"\r\n")[0]


def test_a_slow_stranger_is_cut_off(start) -> None:
    listener = start(settings=replace(FAST, handshake_timeout_seconds=0.3))
    with socket.create_connection(("127.0.0.1", listener.port), timeout=10) as sock:
        begin = time.monotonic()
        sock.sendall(b"GET /")
        assert sock.recv(100) == b""
        assert time.monotonic() - begin < 3


def test_a_slow_hello_is_cut_off(start) -> None:
    listener = start(settings=replace(FAST, handshake_timeout_seconds=0.3))
    begin = time.monotonic()
    with connect(url(listener), additional_headers={"Authorization": f"Bearer {TOKEN}"}, compression=None) as socket_:
        for _ in socket_:
            pass
    assert time.monotonic() - begin < 5
    wait_for(lambda: listener.connections == 0, "connections end")


def test_a_message_out_of_place_ends_that_connection_only(start) -> None:
    listener = start()
    with connected(listener) as innocent:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with connect(url(listener), additional_headers=headers, compression=None) as socket_:
            socket_.send(b"\x05\x02\x00\x00\x00\x91\x01")
            assert b"may not send Ack" in socket_.recv(5)  # type: ignore[operator]
        innocent.send(Batch(Sequence(1), []))
        assert innocent.recv(5) == Ack(Sequence(1))


def test_an_oversized_frame_ends_that_connection(start) -> None:
    listener = start(settings=replace(FAST, max_frame_bytes=100_000))
    with connected(listener) as operations:
        operations.send(Batch(Sequence(1), [], (bytes(200_000),)))
        with pytest.raises(SessionLostError, match=r"100,000|is gone"):
            operations.recv(5)


def test_a_stock_client_with_tiny_fragments_is_understood(start) -> None:
    from skyproxy.protocol import framing

    bearer = {"Authorization": f"Bearer {TOKEN}"}
    hello = b"".join(framing.encode(OPERATIONS_HELLO, 1000))
    with connect(url(start()), additional_headers=bearer, compression=None) as socket_:
        socket_.send(hello[index : index + 3] for index in range(0, len(hello), 3))
        welcome = framing.decode(socket_.recv(5), 10_000)  # type: ignore[arg-type]
        assert type(welcome).__name__ == "Welcome"


# --- health and the end -----------------------------------------------------------------------------------------------


def test_health_needs_no_token_and_tells_nothing(start) -> None:
    listener = start()
    assert get(listener, "/healthz") == (200, "alive\n")
    assert get(listener, "/readyz?verbose") == (200, "ready\n")
    assert get(listener, "/anything") == (401, "wrong token\n")


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}])
def test_activity_is_told_to_those_with_the_token_only(start, header: dict[str, str]) -> None:
    listener = start()
    request = urllib.request.Request(url(listener, "http") + "/activity", headers=header)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=5)
    assert caught.value.code == 401
    assert "sessions" not in caught.value.read().decode()


def test_activity_is_json(start) -> None:
    listener = start()
    request = urllib.request.Request(
        url(listener, "http") + "/activity?x", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=5) as response:
        assert response.headers.get_all("Content-Type") == ["application/json"]
        assert json.load(response) == {"sessions": 0, "idle_seconds": 1.5}


def test_a_draining_worker_is_alive_but_not_ready(start) -> None:
    listener = start()
    with connected(listener) as operations:
        closer = threading.Thread(target=listener.close, args=(10.0,))
        closer.start()
        wait_for(lambda: get(listener, "/readyz")[0] == 503, "it is not ready")
        assert get(listener, "/healthz")[0] == 200
        with pytest.raises(ConnectError, match="503"):
            connect_websocket(url(listener), TOKEN, OPERATIONS_HELLO, settings=FAST)
        operations.send(Batch(Sequence(1), []))
        assert operations.recv(5) == Ack(Sequence(1))
    closer.join(5)
    assert not closer.is_alive()


def test_close_leaves_no_thread_and_no_port(host) -> None:
    before = set(threading.enumerate())
    listener = serve("127.0.0.1", 0, TOKEN, host, settings=FAST)
    idle = socket.create_connection(("127.0.0.1", listener.port))
    transport, _ = connect_websocket(url(listener), TOKEN, OPERATIONS_HELLO, settings=FAST)
    listener.close()
    transport.close()
    idle.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectError, match="nothing listens"):
        connect_websocket(f"ws://127.0.0.1:{listener.port}", TOKEN, OPERATIONS_HELLO, settings=FAST)


def test_other_machines_need_tls_or_a_decision(host, tls_contexts) -> None:
    for address in ("0.0.0.0", "::", "", "192.0.2.1"):
        with pytest.raises(ConfigurationError, match="--insecure"):
            serve(address, 0, TOKEN, host)
    serve("0.0.0.0", 0, TOKEN, host, insecure=True, settings=FAST).close()
    serve("0.0.0.0", 0, TOKEN, host, tls_contexts[1], settings=FAST).close()


def test_a_taken_port_is_explained(start, host) -> None:
    taken = start().port
    with pytest.raises(ConfigurationError, match=f"port {taken}"):
        serve("127.0.0.1", taken, TOKEN, host)


def test_ready_is_announced(host) -> None:
    ports: list[int] = []
    listener = serve("localhost", 0, TOKEN, host, on_ready=ports.append, settings=FAST)
    assert ports == [listener.port]
    listener.close()


# --- the client alone -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        "http://127.0.0.1:1",
        "ws://",
        "127.0.0.1:8765",
        "ws://127.0.0.1:port",
        "ws://user:secretpw@127.0.0.1:1",
        f"ws://127.0.0.1:1/{TOKEN}",
        "ws://127.0.0.1:1/?token=secretpw",
        "ws://127.0.0.1:1/?api_key=secretpw",
    ],
)
def test_bad_urls_are_refused_without_repeating_secrets(bad: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        connect_websocket(bad, TOKEN, OPERATIONS_HELLO)
    assert "secretpw" not in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("bad", ["", "two words", "line\nbreak", "ümlaut"])
def test_bad_tokens_are_refused(bad: str) -> None:
    with pytest.raises(ConfigurationError, match="token"):
        connect_websocket("ws://127.0.0.1:1", bad, OPERATIONS_HELLO)


def test_an_unknown_name_is_explained() -> None:
    with pytest.raises(ConnectError, match=r"name 'no-such-host\.invalid' is unknown.*Check the url"):
        connect_websocket("ws://no-such-host.invalid/path?x=1", TOKEN, OPERATIONS_HELLO, settings=FAST, insecure=True)


@contextmanager
def answering(response: bytes) -> Iterator[str]:
    """A server that says one thing to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve_one() -> None:
            sock, _ = listening.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(response)

        thread = threading.Thread(target=serve_one)
        thread.start()
        yield f"ws://127.0.0.1:{listening.getsockname()[1]}/p?q=1"
        thread.join(5)


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "no worker at that path"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "refused the token"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", "gateway cannot reach"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", "no skyproxy worker"),
        (b"HTTP/1.1\r\n\r\n", "no skyproxy worker"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "not that of a WebSocket server"),
        (b"SSH-2.0-OpenSSH\r\n", "no WebSocket server"),
        (b"", "closed"),
    ],
)
def test_other_servers_are_recognized(response: bytes, problem: str) -> None:
    with answering(response) as where, pytest.raises(ConnectError, match=problem) as caught:
        connect_websocket(where, TOKEN, OPERATIONS_HELLO, settings=FAST)
    assert "127.0.0.1" in str(caught.value)
    assert "q=1" not in str(caught.value)


def test_a_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        where = f"ws://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ConnectError, match="in time"):
            connect_websocket(where, TOKEN, OPERATIONS_HELLO, settings=replace(FAST, handshake_timeout_seconds=0.2))


def test_tls_problems_are_told_apart(start, tls_contexts) -> None:
    encrypted = start(ssl_context=tls_contexts[1])
    stranger = ssl.create_default_context()
    trustme.CA().configure_trust(stranger)
    with pytest.raises(ConnectError, match=r"certificate was not accepted"):
        connect_websocket(url(encrypted, "wss"), TOKEN, OPERATIONS_HELLO, settings=FAST, ssl_context=stranger)
    with pytest.raises(ConnectError, match=r"wss://"):
        connect_websocket(url(encrypted, "ws"), TOKEN, OPERATIONS_HELLO, settings=FAST)
    with pytest.raises(ConnectError, match=r"it does not speak TLS.*ws://"):
        connect_websocket(url(start(), "wss"), TOKEN, OPERATIONS_HELLO, settings=FAST, ssl_context=tls_contexts[0])


def test_a_failed_handshake_leaves_nothing_behind(start) -> None:
    listener = start()
    before = set(threading.enumerate())
    with pytest.raises(AuthenticationError):
        connect_websocket(url(listener), "wrong", OPERATIONS_HELLO, settings=FAST)
    with pytest.raises(VersionMismatchError):
        connect_websocket(url(listener), TOKEN, replace(OPERATIONS_HELLO, versions=[99]), settings=FAST)
    wait_for(
        lambda: {t for t in threading.enumerate() if re.search("outbox|connection", t.name)} <= before, "threads end"
    )
