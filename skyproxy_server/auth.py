"""The token: where it comes from, and whether a request has it. It is never logged and never on a command line."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from skyproxy.errors import ConfigurationError

logger = logging.getLogger("skyproxy.server")

TOKEN_VARIABLE = "SKYPROXY_TOKEN"
_MAX_TOKEN_BYTES = 4096
_SHORT = 16


class TokenCheck:
    """Knows the token; tells in constant time whether somebody else does."""

    def __init__(self, token: str) -> None:
        self._expected = checked(token).encode()

    def accepts(self, headers: Sequence[str]) -> bool:
        """Whether the `Authorization` headers of a request are exactly one, with our token."""
        if len(headers) != 1:
            return False
        scheme, _, given = headers[0].partition(" ")
        # Compared in any case, so that a wrong scheme takes no other time than a wrong token.
        same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._expected)
        return same and scheme.lower() == "bearer"

    def __repr__(self) -> str:
        return "TokenCheck(...)"


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
        logger.warning("the token has fewer than %d characters; whoever guesses it runs code here", _SHORT)
    return token


def token_from_file(path: Path) -> str:
    """The token in a file, which only its owner should be able to read.

    Raises:
        ConfigurationError: there is no such file, or no token in it.
    """
    try:
        with path.open("rb") as file:
            if _exposed(file):
                logger.warning("others can read the token file %s; protect it: chmod 600 %s", path, path)
            text = file.read(_MAX_TOKEN_BYTES + 1)
    except OSError as exc:
        raise ConfigurationError(f"The token file {path} cannot be read: {exc.strerror}.") from exc
    return _decoded(text, f"The token file {path}")


def _exposed(file: BinaryIO) -> bool:
    """Whether a file is ours and others can read it. One of someone else's, as in a pod, is not ours to protect."""
    if os.name != "posix":
        return False
    status = os.fstat(file.fileno())
    return status.st_uid == os.geteuid() and bool(status.st_mode & (stat.S_IRGRP | stat.S_IROTH))


def token_from_stream(stream: BinaryIO) -> str:
    """The token in the first line of a stream.

    Raises:
        ConfigurationError: there is none.
    """
    return _decoded(stream.readline(_MAX_TOKEN_BYTES + 1), "The first line of standard input")


def token_from_environment(environ: Mapping[str, str]) -> str | None:
    """The token of `SKYPROXY_TOKEN`; None where it is not set."""
    token = environ.get(TOKEN_VARIABLE)
    return checked(token.strip()) if token is not None else None


def new_token_file() -> tuple[str, Path]:
    """Makes a token, and a file of it that only we can read."""
    token = secrets.token_urlsafe(32)
    # mkstemp gives the file mode 0600 from its very beginning.
    descriptor, name = tempfile.mkstemp(prefix="skyproxy-token-")
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token, Path(name)


def _decoded(text: bytes, where: str) -> str:
    if len(text) > _MAX_TOKEN_BYTES:
        raise ConfigurationError(f"{where} is longer than {_MAX_TOKEN_BYTES} bytes; that is no token.")
    token = text.decode("utf-8", "replace").strip()
    if not token:
        raise ConfigurationError(f"{where} holds no token. Make one, for instance with: openssl rand -hex 32")
    return checked(token)
