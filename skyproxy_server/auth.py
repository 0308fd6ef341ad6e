"""Tokens: where they come from, which of them a request has, and what that allows.

A token is never logged and never on a command line; people and logs know it by its name. No torch here: who decides
about connections need not load it.
"""

from __future__ import annotations

import ctypes
import hmac
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from skyproxy.errors import ConfigurationError

logger = logging.getLogger("skyproxy.server")

TOKEN_VARIABLE = "SKYPROXY_TOKEN"
_MAX_TOKEN_BYTES = 4096
_SHORT = 16

OPERATIONS = "operations"
FUNCTIONS = "functions"
ADMIN = "admin"
SCOPES = frozenset({OPERATIONS, FUNCTIONS, ADMIN})


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on what all clients with one token may have at a time; None leaves it to the worker's settings.

    Attributes:
        sessions: how many.
        connections: how many, past their handshake.
        memory_bytes: of one session's process.
        blob_bytes: kept uploads.
        snapshot_bytes: snapshots on the worker's volume, the newest of each name.
    """

    sessions: int | None = None
    connections: int | None = None
    memory_bytes: int | None = None
    blob_bytes: int | None = None
    snapshot_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """The client at the other end of a connection, as far as its token tells: plain data, and no secret.

    Attributes:
        name: of the token.
        scopes: what it allows: `OPERATIONS` opens sessions, `FUNCTIONS` runs code in them, `ADMIN` asks for the
            worker's activity.
        bounds: how much it allows.
        expires: when it ends, in seconds since 1970; None: never.
        address: where the connection comes from.
    """

    name: str
    scopes: frozenset[str] = SCOPES
    bounds: Bounds = Bounds()
    expires: float | None = None
    address: str = ""

    def may(self, scope: str) -> bool:
        """Return whether the token has a scope."""
        return scope in self.scopes

    def to_plain(self) -> dict[str, object]:
        """Return what `from_plain` takes: for JSON or msgpack, on the way to another process."""
        return {
            "name": self.name,
            "scopes": sorted(self.scopes),
            "bounds": {name: getattr(self.bounds, name) for name in Bounds.__slots__},
            "expires": self.expires,
            "address": self.address,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Identity:
        """Return the identity that `to_plain` was asked of."""
        bounds = Bounds(**plain["bounds"])
        return cls(plain["name"], frozenset(plain["scopes"]), bounds, plain["expires"], plain["address"])


OWNER = Identity("token")
"""The client with the one token of a worker that has no others; also one that came without a listener, as in tests."""


def client_of(transport: object) -> Identity:
    """Return who is at the other end, as the listener knows it; the owner on a transport without a listener."""
    identity = getattr(transport, "identity", None)
    return identity if isinstance(identity, Identity) else OWNER


class Authenticator(Protocol):
    """Knows tokens.

    Attributes:
        several: whether there may be clients with different tokens, whatever the name of one of them is.
    """

    several: bool

    def identify(self, headers: Sequence[str]) -> Identity | None:
        """Return who sends these `Authorization` headers; None for a stranger."""

    def refresh(self) -> None:
        """Take note of tokens that were added, replaced or taken away."""

    def refusal(self, identity: Identity) -> str:
        """Return why a connection of this identity must end now; an empty text where it need not."""


class TokenCheck:
    """Knows one token forever; tells in constant time whether somebody else does."""

    several = False

    def __init__(self, token: str) -> None:
        self._expected = checked(token).encode()

    def accepts(self, headers: Sequence[str]) -> bool:
        """Return whether the `Authorization` headers of a request are exactly one, with our token."""
        return matches(headers, self._expected)

    def identify(self, headers: Sequence[str]) -> Identity | None:
        """Return the owner's identity for our token; None for a stranger."""
        return OWNER if self.accepts(headers) else None

    def refresh(self) -> None:
        """Do nothing: this token does not change."""

    def refusal(self, identity: Identity) -> str:
        """Return an empty text: this token is not revoked."""
        return ""

    def __repr__(self) -> str:
        return "TokenCheck(...)"


def matches(headers: Sequence[str], expected: bytes) -> bool:
    """Return, in constant time, whether `Authorization` headers are exactly one with this token."""
    if len(headers) != 1:
        return False
    scheme, _, given = headers[0].partition(" ")
    # Compared in any case, so that a wrong scheme takes as long as a wrong token.
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), expected)
    return same and scheme.lower() == "bearer"


def checked(token: str) -> str:
    """`token`, if it can be one.

    Raises:
        ConfigurationError: it is empty, or a header cannot carry it.
    """
    if not token:
        raise ConfigurationError("The token is empty. Make one, for instance with: openssl rand -hex 32")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigurationError("The token has characters that a header cannot carry. Use printable ASCII, no spaces.")
    if len(token) < _SHORT:
        logger.warning("the token has fewer than %d characters; whoever guesses it can run code here", _SHORT)
    return token


def warn_if_exposed(file: BinaryIO, path: Path) -> None:
    """Log that others can read a token file of ours."""
    if _is_exposed(file):
        logger.warning("others can read the token file %s; protect it: chmod 600 %s", path, path)


def _is_exposed(file: BinaryIO) -> bool:
    """Return whether a file is ours and others can read it. Another's, as in a pod, is not ours to protect."""
    if os.name != "posix":
        return False
    status = os.fstat(file.fileno())
    return status.st_uid == os.geteuid() and bool(status.st_mode & (stat.S_IRGRP | stat.S_IROTH))


def token_from_stream(stream: BinaryIO) -> str:
    """The token in the first line of a stream.

    Raises:
        ConfigurationError: there is none.
    """
    return _decode(stream.readline(_MAX_TOKEN_BYTES + 1), "The first line of standard input")


def token_from_environment(environ: Mapping[str, str]) -> str | None:
    """The token of `SKYPROXY_TOKEN`; None where it is not set."""
    token = environ.get(TOKEN_VARIABLE)
    return checked(token.strip()) if token is not None else None


def erase_from_environment() -> None:
    """Take `SKYPROXY_TOKEN` out of this process's environment, and out of what the system shows of it.

    Without the second part it stays readable in /proc/PID/environ, to every process of the same user.
    """
    if os.name == "posix":
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        place = libc.getenv(TOKEN_VARIABLE.encode())
        if place:  # in the memory that the process was started with, unless somebody has set it since
            ctypes.memset(place, 0, len(ctypes.string_at(place)))
    os.environ.pop(TOKEN_VARIABLE, None)


def new_token_file() -> tuple[str, Path]:
    """Makes a token, and a file of it that only we can read."""
    token = secrets.token_urlsafe(32)
    # mkstemp gives the file mode 0600 from its very beginning.
    descriptor, name = tempfile.mkstemp(prefix="skyproxy-token-")
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token, Path(name)


def _decode(text: bytes, where: str) -> str:
    if len(text) > _MAX_TOKEN_BYTES:
        raise ConfigurationError(f"{where} is longer than {_MAX_TOKEN_BYTES} bytes; that is not a token.")
    token = text.decode("utf-8", "replace").strip()
    if not token:
        raise ConfigurationError(f"{where} holds no token. Make one, for instance with: openssl rand -hex 32")
    return checked(token)
