"""The urls of workers: their parts, and which of them must not be used."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

from skyproxy.errors import ConfigurationError

_SECRET_NAMES = re.compile(r"token|secret|passw|auth|key|credential", re.IGNORECASE)
_PORTS = {"ws": 80, "wss": 443}
_MIN_TOKEN_CHARACTERS = 8
"""Shorter tokens are part of many words by chance."""


class Address(NamedTuple):
    """The place where a worker listens."""

    host: str
    port: int
    secure: bool
    url: str
    """For the handshake."""
    shown: str
    """For people: without a query."""


def check_confidential(host: str, shown: str, *, insecure: bool) -> None:
    """Refuse to send a token, and whatever follows it, to another machine without encryption.

    Args:
        host: where it would go.
        shown: the address, for people.
        insecure: whether somebody allowed it.

    Raises:
        ConfigurationError: nobody did. Nothing was sent.
    """
    if insecure or is_loopback(host):
        return
    raise ConfigurationError(
        f"the connection to {shown} would not be encrypted: anyone on the network path could read the token and all "
        "tensors. Use wss:// (skyproxy serve --tls), or a tunnel (skyproxy port-forward, ssh -L). If the network in "
        "between is trusted: skyproxy.connect(url, insecure=True), or SKYPROXY_INSECURE=1"
    )


def is_loopback(host: str) -> bool:
    """Return whether nobody but this machine sees what is sent to `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_on_loopback(host: str, port: int) -> int | None:
    """Listen where nobody but this machine can connect; return the descriptor, which is the caller's.

    For the stores of PyTorch: given no socket, they listen on all addresses of the machine, whatever host they are
    told, and they ask nobody for a token.

    Args:
        host: where the others look for the listener; None is returned where that is not this machine's loopback.
        port: 0 for any.

    Raises:
        OSError: somebody listens there.
    """
    if not is_loopback(host):
        return None
    address = "127.0.0.1" if host.lower() == "localhost" else host
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family).detach()


def parse_url(url: str, token: str) -> Address:
    """Return the parts of a worker's url.

    Args:
        url: "ws://host:port" or "wss://host:port", with a path where a gateway wants one.
        token: must not be in it.

    Raises:
        ConfigurationError: it is not the url of a worker, or holds a secret.
    """
    try:
        parts: SplitResult = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        # Not the url itself, in any of these messages: it may hold the secret that should not be there.
        raise ConfigurationError(f"The worker's url cannot be read ({exc}). Example: ws://127.0.0.1:8765") from None
    if "@" in parts.netloc or _holds(parts, token):
        raise ConfigurationError("The worker's url holds a secret. Give the token by itself, in SKYPROXY_TOKEN.")
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if _SECRET_NAMES.search(name):
            raise ConfigurationError(
                f"The worker's url has a parameter {name!r}, which looks like a secret; urls end up in logs. "
                "Give the token by itself, in SKYPROXY_TOKEN."
            )
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConfigurationError(
            f"The worker's url has the scheme {parts.scheme!r} and the host {parts.hostname!r}. "
            "It must begin with ws:// or wss:// and a host. Example: ws://127.0.0.1:8765"
        )
    bare = parts._replace(query="", fragment="")
    return Address(
        host=parts.hostname,
        port=port or _PORTS[parts.scheme],
        secure=parts.scheme == "wss",
        url=parts._replace(fragment="").geturl(),
        shown=bare.geturl(),
    )


def _holds(parts: SplitResult, token: str) -> bool:
    """Return whether a url has the token behind its host: as a word, or, if it is long enough, anywhere."""
    rest = f"{parts.path}?{parts.query}#{parts.fragment}"
    return bool(token) and (
        token in re.split(r"[/?&=#;,]", rest) or (len(token) >= _MIN_TOKEN_CHARACTERS and token in rest)
    )
