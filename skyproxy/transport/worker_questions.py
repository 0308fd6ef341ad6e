"""Asking a worker one of its controls, over a session that lasts as long as the answer takes. No torch here."""

from __future__ import annotations

import time
from pathlib import Path

from skyproxy.errors import ConnectError, visible
from skyproxy.interrupts import raised_by_handler
from skyproxy.protocol import commands
from skyproxy.protocol.answers import checked
from skyproxy.protocol.messages import OPERATIONS, Batch, Failure, Hello, Reply, RequestId, Sequence
from skyproxy.protocol.versions import SUPPORTED
from skyproxy.transport.base import recv_before
from skyproxy.transport.links import is_link, read_url
from skyproxy.transport.trust import client_context
from skyproxy.transport.websocket import connect_websocket

_REQUEST = RequestId(1)


def ask_control(
    url: str,
    token: str,
    control: str,
    *arguments: object,
    certificate: str | Path | None = None,
    server_name: str | None = None,
    timeout_seconds: float = 30.0,
) -> object:
    """The answer of a worker's control, as plain data.

    Args:
        url: "ws://host:port" or "wss://host:port"; or a link, "sky://...".
        token: the worker's.
        control: its name.
        arguments: for it.
        certificate: whom to trust, as `trust.client_context` takes it; the system's authorities by default.
        server_name: the name in its certificate, where the url says another.
        timeout_seconds: how long the answer may take.

    Raises:
        ConfigurationError: the token would travel unencrypted.
        AuthenticationError: the worker refused the token.
        ConnectError: nobody answers there, or the worker could not do it.
        ProtocolError: it answered what such a control does not.
    """
    if is_link(url):
        url, certificate = read_url(url, certificate)
    context = client_context(certificate) if certificate is not None else None
    hello = Hello(list(SUPPORTED), OPERATIONS, "", {})
    transport, _ = connect_websocket(url, token, hello, ssl_context=context, server_name=server_name)
    try:
        transport.send(Batch(Sequence(1), [commands.CALL, _REQUEST, control, list(arguments)]))
        deadline = time.monotonic() + timeout_seconds  # a worker may send other things for ever
        while True:
            message = recv_before(transport, deadline)
            if isinstance(message, Reply) and message.request == _REQUEST:
                return checked(control, message.value)
            if isinstance(message, Failure) and message.request == _REQUEST:
                raise ConnectError(visible(message.error.get("message") or "the worker could not do it"))
    except TimeoutError as error:
        if raised_by_handler(error):
            raise
        raise ConnectError(f"the worker did not answer within {timeout_seconds:g} s") from error
    finally:
        transport.close()
