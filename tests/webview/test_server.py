"""What the web view's server refuses, and what it bounds."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator

import pytest

import skyproxy
from skyproxy.errors import ConfigurationError
from skyproxy.webview.server import PageServer
from tests.integration.programs import wait_for

SECRET_STATUS = {"workers": [], "program": None, "at": 1.0, "title": "a title that only the page may see"}


@pytest.fixture
def server() -> Iterator[PageServer]:
    made = PageServer(lambda: SECRET_STATUS)
    made.start()
    yield made
    made.close()


def ask(
    server: PageServer, method: str, path: str, key: str | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    try:
        given = {"Authorization": f"Bearer {key}"} if key is not None else {}
        connection.request(method, path, headers={**given, **headers})
        response = connection.getresponse()
        return response.status, response.read().decode(), dict(response.getheaders())
    finally:
        connection.close()


def entered(server: PageServer) -> str:
    url, _, secret = server.link().partition("#")
    assert url == server.url
    status, body, _ = ask(server, "POST", "/enter", secret)
    assert status == 200
    return str(json.loads(body)["key"])


def test_a_link_opens_the_view_once(server: PageServer) -> None:
    secret = server.link().partition("#")[2]
    status, body, _ = ask(server, "POST", "/enter", secret)
    assert status == 200
    assert ask(server, "POST", "/enter", secret)[0] == 401
    key = json.loads(body)["key"]
    assert key != secret
    status, body, headers = ask(server, "GET", "/status", key)
    assert (status, json.loads(body)) == (200, SECRET_STATUS)
    assert headers["Cache-Control"] == "no-store"
    assert ask(server, "GET", "/status", secret)[0] == 401


@pytest.mark.parametrize("key", [None, "", "wrong", "ü"])
def test_without_a_key_nothing_is_told(server: PageServer, key: str | None) -> None:
    entered(server)
    status, body, headers = ask(server, "GET", "/status", key.encode().decode("latin-1") if key else key)
    assert status == 401
    assert "title" not in body
    assert "Set-Cookie" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil.example", "", "127.0.0.1:x"]
)
@pytest.mark.parametrize("path", ["/", "/status"])
def test_another_name_for_this_machine_is_refused(server: PageServer, host: str, path: str) -> None:
    """DNS rebinding: a page of another site whose name now means this machine."""
    status, body, _ = ask(server, "GET", path, entered(server), Host=host)
    assert status == 421
    assert "title" not in body


@pytest.mark.parametrize("host", ["127.0.0.1:{}", "localhost:{}", "localhost:9999", "localhost"])
def test_a_forwarded_port_is_this_machine(server: PageServer, host: str) -> None:
    given = host.format(server.server_address[1])
    assert ask(server, "GET", "/status", entered(server), Host=given)[0] == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "http://127.0.0.1"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/status"), ("POST", "/enter"), ("GET", "/")])
def test_another_page_is_refused(server: PageServer, origin: str, method: str, path: str) -> None:
    key = entered(server)
    secret = server.link().partition("#")[2]
    status, body, headers = ask(server, method, path, secret if method == "POST" else key, Origin=origin)
    assert status == 403
    assert "title" not in body
    assert "Access-Control-Allow-Origin" not in headers
    if method == "POST":  # and the secret is still good for whoever it was meant for
        assert ask(server, "POST", "/enter", secret, Origin=server.url.rstrip("/"))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/status", 405),
        ("POST", "/", 405),
        ("POST", "/enter?x", 405),
        ("PUT", "/status", 501),
        ("DELETE", "/status", 501),
        ("OPTIONS", "/status", 501),
        ("GET", "/enter", 404),
        ("GET", "/../page.js", 404),
        ("GET", "/static/page.js", 404),
        ("GET", "/%2e%2e/etc/passwd", 404),
    ],
)
def test_nothing_can_be_changed_and_no_other_file_read(server: PageServer, method: str, path: str, status: int) -> None:
    assert ask(server, method, path, entered(server))[0] == status


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/plot.js", "/status", "/nothing"])
def test_every_answer_has_the_headers_that_protect_it(server: PageServer, path: str) -> None:
    _, _, headers = ask(server, "GET", path, entered(server))
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert "http" not in policy.partition("frame-ancestors")[0]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Python" not in headers.get("Server", "")


@pytest.mark.parametrize(
    "request_line",
    [
        "OPTIONS /status HTTP/1.1",
        "TRACE <i> HTTP/1.1",
        f"GET /{'a' * 70_000} HTTP/1.1",
        "GET <i> HTTP/9.1",
        "<i> <i> <i> <i>",
    ],
)
def test_what_is_no_request_is_not_repeated_and_its_refusal_has_those_headers_too(
    server: PageServer, request_line: str
) -> None:
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20) as connection:
        connection.sendall(f"{request_line}\r\nHost: 127.0.0.1\r\n\r\n".encode())
        answer = b""
        with contextlib.suppress(ConnectionError):  # where it was not read to its end
            while got := connection.recv(65536):
                answer += got
    head, _, body = answer.rpartition(b"\r\n\r\n")
    assert body == b"this is no request that the view answers\n"
    assert not head or b"X-Content-Type-Options: nosniff" in head  # none is an answer of HTTP 0.9


def test_secrets_and_keys_are_bounded(server: PageServer) -> None:
    first = server.link().partition("#")[2]
    for _ in range(16):
        server.link()
    assert ask(server, "POST", "/enter", first)[0] == 401
    keys = [entered(server) for _ in range(17)]
    assert not server.knows(keys[0])
    assert server.knows(keys[-1])


def test_it_listens_on_loopback_only(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_who_asks_without_end_keeps_nobody_out_and_connections_are_bounded(server: PageServer) -> None:
    address = ("127.0.0.1", server.server_address[1])
    slow = [socket.create_connection(address, 20) for _ in range(40)]
    try:
        for one in slow:
            with contextlib.suppress(OSError):
                one.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert ask(server, "GET", "/")[0] == 200
        assert slow[0].recv(1) == b""  # the oldest was ended
        assert wait_for(lambda: len(server._open) <= 32, "those of whom there are too many are gone")
    finally:
        for one in slow:
            one.close()
    assert wait_for(lambda: not server._open, "their threads notice that they are gone")
    assert ask(server, "GET", "/")[0] == 200


def test_who_used_a_link_is_told_of_and_a_closed_server_listens_no_more() -> None:
    used: list[int] = []
    server = PageServer(dict, on_used=lambda: used.append(1))
    server.start()
    entered(server)
    assert used == [1]
    port = server.server_address[1]
    server.close()
    server.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 5).close()


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_no_machine_has_is_refused(port: int) -> None:
    with pytest.raises(ConfigurationError, match=f"no port {port}"):
        skyproxy.ui(port)
