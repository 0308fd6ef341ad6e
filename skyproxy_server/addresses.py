"""Listening sockets on every address of a host."""

from __future__ import annotations

import socket
from pathlib import Path

from skyproxy.errors import ConfigurationError
from skyproxy.transport.addresses import is_loopback

_BACKLOG = 128


def refuse_early(host: str, port: int, port_file: Path | None, *, encrypted: bool, insecure: bool) -> None:
    """Refuse addresses and files that cannot work, before anything slow is loaded and anything is written.

    Args:
        host: the address to listen on.
        port: the port; 0 for a free one.
        port_file: the file that the port is to be written to.
        encrypted: whether there is a certificate.
        insecure: whether other machines may connect without.

    Raises:
        ConfigurationError: they cannot.
    """
    check_encrypted(host, encrypted=encrypted, insecure=insecure)
    # Bound, but not listening: nobody who waits for the worker should find half of one.
    for sock in listen(host, port, backlog=None):
        sock.close()
    if port_file is not None and not port_file.absolute().parent.is_dir():
        raise ConfigurationError(f"The port file {port_file} cannot be written: there is no such folder.")


def check_encrypted(host: str, *, encrypted: bool, insecure: bool) -> None:
    """Refuse to let other machines connect without encryption, unless somebody allowed it.

    Raises:
        ConfigurationError: nobody did.
    """
    if not encrypted and not insecure and not is_loopback(host):
        raise ConfigurationError(
            f"Listening on {host or 'all addresses'} without TLS would send the token and all tensors over the network "
            "in clear text. Give --tls-cert and --tls-key, or skyproxy serve --tls, which makes both; or --insecure, "
            "if TLS ends in front of this worker."
        )


def listen(host: str, port: int, backlog: int | None = _BACKLOG) -> list[socket.socket]:
    """Sockets on those addresses of `host` that are to be had, at least one, and all on the same port.

    Args:
        host: an address, a name, or an empty string for all addresses.
        port: the port, 0 for a free one.
        backlog: connections that may wait to be accepted; None: none can be made yet.

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
            sockets.append(_bind_socket(family, (address[0], actual, *address[2:]), backlog))
        except OSError as exc:
            problem = exc
    if not sockets:
        reason = "the name is unknown" if problem is None else problem.strerror or problem
        raise ConfigurationError(
            f"Cannot listen on {host or 'all addresses'} port {port}: {reason}. "
            "Use another --port (0 for a free one) or --host."
        ) from problem
    return sockets


def _bind_socket(family: int, address: tuple[object, ...], backlog: int | None) -> socket.socket:
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
        if backlog is not None:
            sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock
