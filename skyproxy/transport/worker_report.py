"""Asking a worker what it is and does, over plain HTTP: no session, no torch."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skyproxy.errors import AuthenticationError, ConnectError, visible
from skyproxy.settings import SETTINGS
from skyproxy.transport.addresses import check_confidential, parse_url
from skyproxy.transport.links import is_link, read_url
from skyproxy.transport.trust import client_context

_MAX_BYTES = 1 << 20
_MOST = 1 << 63
_OF_A_DEVICE = {"type", "index"}
_NUMBERS = {
    *("sessions", "processes", "memory_bytes", "detached", "named", "calls_running", "jobs_running", "idle_seconds"),
    *("commands", "used_memory_bytes", "total_memory_bytes"),
}
_MOST_STEPS = 4
"""The bound of the whole answer, in bounds of a step: a worker could send a byte a step."""


def ask_worker(
    url: str,
    token: str,
    path: str = "/activity",
    *,
    ssl_context: ssl.SSLContext | None = None,
    certificate: str | Path | None = None,
    server_name: str | None = None,
    timeout_seconds: float = 5.0,
) -> dict[str, Any]:
    """The worker's own report: sessions, calls_running, idle_seconds, devices, software; or another one.

    Args:
        url: "ws://host:port" or "wss://host:port", with a path where a gateway wants one; or a link, "sky://...".
        token: the worker's.
        path: "/status" for what the web view shows.
        ssl_context: whom to trust, in place of a certificate.
        certificate: whom to trust, as `trust.client_context` takes it; the system's authorities by default.
        server_name: the name in its certificate, where the url says another.
        timeout_seconds: for each step; the whole answer may take four times that.

    Raises:
        ConfigurationError: the token would travel unencrypted.
        AuthenticationError: it refused the token.
        ConnectError: nobody answers there, or no worker.
    """
    if is_link(url):
        url, certificate = read_url(url, certificate)
    address = parse_url(url, token)
    host, port, secure, shown = address.host, address.port, address.secure, address.shown
    if not secure:
        check_confidential(host, shown, insecure=SETTINGS.insecure)
    context = (ssl_context or client_context(certificate)) if secure else None
    connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    end = threading.Timer(_MOST_STEPS * timeout_seconds, _hang_up, (connection,))
    end.daemon = True
    end.start()
    try:
        connection.sock = socket.create_connection((host, port), timeout_seconds)
        if context is not None:
            connection.sock = context.wrap_socket(connection.sock, server_hostname=server_name or host)
        connection.request("GET", urlsplit(url).path.rstrip("/") + path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        body = answer.read(_MAX_BYTES)
        if answer.status in (401, 403):
            raise AuthenticationError(
                f"the worker at {shown} refused the token. Connect again with the one that it was started "
                "with: skyproxy connect URL --token-file FILE"
            )
        if answer.status != 200:
            raise ConnectError(
                f"the worker at {shown} does not report its state (HTTP {answer.status}). Is it a skyproxy worker?"
            )
        return checked_report(json.loads(body), path)
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        if isinstance(error, ConnectError):
            raise
        raise ConnectError(
            f"the worker at {shown} cannot be reached: {visible(error)}. See whether it runs: skyproxy list"
        ) from error
    finally:
        end.cancel()
        connection.close()


def _hang_up(connection: http.client.HTTPConnection) -> None:
    """End an answer that takes too long: whoever reads it is told so at once."""
    with contextlib.suppress(OSError, AttributeError):  # it has just ended, or has not begun
        connection.sock.shutdown(socket.SHUT_RDWR)


def checked_report(said: object, path: str = "/activity") -> dict[str, Any]:
    """Return a worker's report, if what others compute with are numbers; its words do not command a terminal.

    Args:
        said: JSON, by whichever way it came.
        path: what was asked.

    Raises:
        ValueError: it is none.
    """
    report = _show(said)
    if not isinstance(report, dict):
        raise ValueError("its answer is not a table")
    devices = report.get("devices", [])
    if not isinstance(devices, list) or not all(
        isinstance(row, dict) and row.keys() >= _OF_A_DEVICE for row in devices
    ):
        raise ValueError("its answer has devices that are none")
    software = report.get("software", {})
    if not isinstance(software, dict) or not all(isinstance(text, str) for text in software.values()):
        raise ValueError("its answer has versions that are none")
    numbers = _NUMBERS - {"sessions"} if path == "/status" else _NUMBERS  # there they are rows; who shows them looks
    for row in (report, *devices):
        for name in numbers & row.keys():
            if type(row[name]) not in (int, float) or not -1 < row[name] < _MOST:  # clocks are read one by one
                raise ValueError(f"its answer has {row[name]!r:.80} for {name}")
    return report


def _show(value: object) -> Any:
    """A worker's words, so that whoever shows them need not think of what they could do to a terminal."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(key): _show(item) for key, item in value.items()}
    return [_show(item) for item in value] if isinstance(value, list) else value
