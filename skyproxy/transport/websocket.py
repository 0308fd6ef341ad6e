"""Connecting to a worker over WebSocket."""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import replace

from websockets.client import ClientProtocol
from websockets.uri import parse_uri

from skyproxy.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    ProtocolError,
    SessionLostError,
    VersionMismatchError,
    visible,
)
from skyproxy.interrupts import raised_by_handler
from skyproxy.protocol.messages import CLIENT, Goodbye, Hello, Welcome
from skyproxy.settings import SETTINGS, Settings
from skyproxy.transport.addresses import Address, check_confidential, parse_url
from skyproxy.transport.http_head import SILENT_LOGGER, read_head
from skyproxy.transport.shared_threads import SharedThreads
from skyproxy.transport.stream import ByteStream, PlainStream, remaining, write_all
from skyproxy.transport.tls import TlsStream
from skyproxy.transport.trust import WrongCertificateError
from skyproxy.transport.websocket_transport import WebSocketTransport

__all__ = ["WebSocketTransport", "connect_websocket"]


def connect_websocket(
    url: str,
    token: str,
    hello: Hello,
    *,
    settings: Settings = SETTINGS,
    ssl_context: ssl.SSLContext | None = None,
    server_name: str | None = None,
    insecure: bool = False,
    threads: SharedThreads | None = None,
    timeout_seconds: float | None = None,
) -> tuple[WebSocketTransport, Welcome]:
    """Opens a connection to a worker and makes the whole handshake.

    Args:
        url: `ws://host:port` or `wss://host:port`, with a path where a gateway wants one; never with a secret.
        token: the worker's token. It travels in a header, and nowhere else.
        hello: what we say first.
        settings: limits and timeouts.
        ssl_context: trust for `wss`; by default the system's certificate authorities.
        server_name: the name that the certificate must have, where it is not the url's host: behind a tunnel.
        insecure: whether `ws` may go to other machines.
        threads: those of several connections, in place of one for this alone.
        timeout_seconds: for connecting, and for the handshake, where less than the settings allow.

    Returns:
        The open transport and the worker's welcome.

    Raises:
        ConfigurationError: the url or the token cannot be used, or would travel unencrypted.
        AuthenticationError: the worker refused the token.
        VersionMismatchError: the worker speaks no version that we speak.
        ConnectError: no connection came about for another reason; says which and what to do.
    """
    if timeout_seconds is not None:
        settings = replace(
            settings,
            connect_timeout_seconds=min(settings.connect_timeout_seconds, timeout_seconds),
            handshake_timeout_seconds=min(settings.handshake_timeout_seconds, timeout_seconds),
        )
    address = parse_url(url, token)
    _check_token(token)
    if not address.secure:
        check_confidential(address.host, address.shown, insecure=insecure or settings.insecure)
    sock = _connect_tcp(address, settings)
    deadline = time.monotonic() + settings.handshake_timeout_seconds
    transport: WebSocketTransport | None = None
    try:
        stream = _secure(sock, address, ssl_context, deadline, server_name or address.host)
        received = _upgrade(stream, address, token, deadline)
        transport = WebSocketTransport(stream, CLIENT, settings, received, threads=threads)
        return transport, _greet(transport, hello, address, deadline)
    except BaseException:
        if transport is not None and hello.session:
            transport.cut()  # it may have been welcomed already: a goodbye would end the session that it was to join
        elif transport is not None:
            transport.close()
        sock.close()
        raise


def _check_token(token: str) -> None:
    if not token:
        raise ConfigurationError("No token was given, and every worker requires one. Set SKYPROXY_TOKEN.")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigurationError("The token has characters that a header cannot carry. Use printable ASCII, no spaces.")


def _connect_tcp(address: Address, settings: Settings) -> socket.socket:
    try:
        return socket.create_connection((address.host, address.port), timeout=settings.connect_timeout_seconds)
    except (OSError, UnicodeError) as exc:
        if raised_by_handler(exc):
            raise
        if isinstance(exc, socket.gaierror):
            reason, hint = f"the name {address.host!r} is unknown", "Check the url, and your network or VPN."
        elif isinstance(exc, TimeoutError):
            reason = f"nothing answered within {settings.connect_timeout_seconds:g} s"
            hint = "Check host and port, and firewalls in between."
        elif isinstance(exc, ConnectionRefusedError):
            reason = f"nothing listens on port {address.port}"
            hint = "Start a worker there (skyproxy serve), or correct the url."
        else:
            reason, hint = str(exc), "Check the url and the network."
        raise _failure(address, reason, hint) from exc


def _secure(
    sock: socket.socket, address: Address, ssl_context: ssl.SSLContext | None, deadline: float, server_name: str
) -> ByteStream:
    if not address.secure:
        return PlainStream(sock)
    context = ssl_context or ssl.create_default_context()
    try:
        return TlsStream(sock, context, server_side=False, server_hostname=server_name, deadline=deadline)
    except WrongCertificateError as exc:
        hint = "Compare with what `skyproxy serve --tls` prints there, and connect again with that."
        raise _failure(address, str(exc), hint) from exc
    except ssl.SSLCertVerificationError as exc:
        reason = f"its certificate was not accepted ({exc.verify_message})"
        raise _failure(
            address, reason, "Use the name in the certificate, and trust its issuer: SSL_CERT_FILE."
        ) from exc
    except ssl.SSLError as exc:
        reason = f"it does not speak TLS ({exc.reason or exc})"
        raise _failure(address, reason, "If the worker does not encrypt, the url begins with ws://.") from exc
    except OSError as exc:
        if raised_by_handler(exc):
            raise
        raise _failure(address, str(exc), "Check that the url names a worker.") from exc


def _upgrade(stream: ByteStream, address: Address, token: str, deadline: float) -> bytes:
    """Makes a WebSocket of an HTTP connection; the bytes that came behind the response."""
    protocol = ClientProtocol(parse_uri(address.url), max_size=None, logger=SILENT_LOGGER)
    request = protocol.connect()
    request.headers["Authorization"] = f"Bearer {token}"
    protocol.send_request(request)
    try:
        write_all(stream, b"".join(protocol.data_to_send()))
        head, received = read_head(stream, deadline, b"HTTP/")
    except ProtocolError as exc:
        raise _failure(address, f"no WebSocket server is there. {exc}", "Check host and port.") from exc
    except (OSError, EOFError) as exc:
        if raised_by_handler(exc):
            raise
        hint = "Check that the url names a worker; one that uses TLS has a url that begins with wss://."
        raise _failure(address, str(exc) or type(exc).__name__, hint) from exc
    status = head.split(b" ", 2)[1].split(b"\r", 1)[0].decode("ascii", "replace") if b" " in head else "none"
    if status != "101":
        raise _refusal(address, status)
    protocol.receive_data(head)
    if protocol.handshake_exc is not None:
        reason = f"its answer is not that of a WebSocket server ({protocol.handshake_exc})"
        raise _failure(address, reason, "Check that the url names a worker.") from protocol.handshake_exc
    return received


def _refusal(address: Address, status: str) -> ConnectError:
    if status == "403":
        return AuthenticationError(
            f"The worker at {address.shown} refused the token for sessions (HTTP 403): it does not have the scope "
            "'operations'. Use one that has."
        )
    if status == "401":
        return AuthenticationError(
            f"The worker at {address.shown} refused the token (HTTP {status}). "
            "Use the one that the worker was started with: token=..., or SKYPROXY_TOKEN."
        )
    known = {
        "404": ("there is no worker at that path", "Check the url's path."),
        "426": ("it does not speak WebSocket here", "Check the url's path."),
        "502": ("the gateway cannot reach the worker", "See whether the worker runs."),
        "503": ("it takes no new sessions now", "It is full or shutting down; try again or use another worker."),
        "504": ("the gateway cannot reach the worker", "See whether the worker runs."),
    }
    reason, hint = known.get(status, ("it is no skyproxy worker", "Check that the url names a worker."))
    return _failure(address, f"{reason} (HTTP {status})", hint)


def _greet(transport: WebSocketTransport, hello: Hello, address: Address, deadline: float) -> Welcome:
    try:
        transport.send(hello)
        welcome = transport.recv(remaining(deadline))
    except TimeoutError as exc:
        if raised_by_handler(exc):
            raise
        raise _failure(address, "the worker did not answer the handshake in time", "Try again.") from exc
    except SessionLostError as exc:
        raise _goodbye_error(address, transport.connection.goodbye, exc) from exc
    except ProtocolError as exc:
        raise _failure(address, f"the worker broke the protocol. {exc}", "Check that both sides are skyproxy.") from exc
    assert isinstance(welcome, Welcome), "the rules allow nothing else here"
    return welcome


def _goodbye_error(address: Address, goodbye: Goodbye | None, lost: SessionLostError) -> ConnectError:
    if goodbye is None:
        return _failure(address, str(lost), "See the worker's log.")
    text = visible(goodbye.reason or goodbye.code_name)
    if goodbye.code_name == "version":
        return VersionMismatchError(f"Cannot work with the worker at {address.shown}. {text}")
    if goodbye.code_name == "bad-token":
        return AuthenticationError(f"The worker at {address.shown} refused the token. {text}")
    hints = {"too-many-sessions": "End another session, or use another worker.", "shutdown": "Use another worker."}
    error = _failure(address, text, hints.get(goodbye.code_name, "See the worker's log."))
    error.code_name = goodbye.code_name
    return error


def _failure(address: Address, reason: str, hint: str) -> ConnectError:
    return ConnectError(f"Cannot connect to the worker at {address.shown}: {reason.rstrip('.')}. {hint}")
