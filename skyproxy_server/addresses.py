"""Listening sockets on every address of a host."""

from __future__ import annotations

import socket

from skyproxy.errors import ConfigurationError

_BACKLOG = 128


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets on those addresses of `host` that are to be had, at least one, and all on the same port.

    Args:
        host: an address, a name, or an empty string for all addresses.
        port: the port, 0 for a free one.

    Raises:
        ConfigurationError: none of them is to be had.
    """
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    try:
        rows = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        rows, problem = [], exc
    for family, _, _, _, address in sorted(set(rows)):
        actual = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_listening(family, (address[0], actual, *address[2:])))
        except OSError as exc:
            problem = exc
    if not sockets:
        reason = "the name is unknown" if problem is None else problem.strerror or problem
        raise ConfigurationError(
            f"Cannot listen on {host or 'all addresses'} port {port}: {reason}. "
            "Use another --port (0 for a free one) or --host."
        ) from problem
    return sockets


def _listening(family: int, address: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # On Windows this option would let others take the same port.
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
