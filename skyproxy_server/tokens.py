"""Tokens in files: one, or a directory of named ones, read again when they change.

A file's first line is the token. Lines behind it say what it allows:

    scopes: operations, functions
    expires: 2027-01-31T00:00:00Z
    sessions: 4
    connections: 16
    memory: 8GiB
    uploads: 2GiB
    snapshots: 50GiB

In a directory, a file's name is the token's name, and names that begin with a dot are skipped: so a mounted Secret of
Kubernetes, which is replaced by exchanging a symbolic link, is such a directory.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from skyproxy.errors import ConfigurationError
from skyproxy.units import size_bytes
from skyproxy_server.auth import (
    FUNCTIONS,
    OPERATIONS,
    OWNER,
    SCOPES,
    Bounds,
    Identity,
    checked,
    matches,
    warn_if_exposed,
)

logger = logging.getLogger("skyproxy.server")

_MAX_FILE_BYTES = 16 << 10
_MAX_TOKENS = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_COUNT = re.compile(r"[0-9]{1,9}")
_SIZES = {"memory": "memory_bytes", "uploads": "blob_bytes", "snapshots": "snapshot_bytes"}
_LOOK_AGAIN_SECONDS = 1.0
"""The interval at which wrong tokens may cause a look at the files: a new one is accepted at once."""


@dataclass(frozen=True, slots=True)
class _Entry:
    identity: Identity
    secret: bytes


@dataclass(frozen=True, slots=True)
class _SupersededTokens:
    secret: bytes
    until: float


class Tokens:
    """The tokens of a file or a directory.

    A replaced token is accepted for a while beside the one that replaced it, so that clients can change over one after
    another. A file that is taken out of the directory revokes its token at once: `refusal` says so, and whoever serves
    connections ends those that have it. A file that cannot be understood leaves what was known of it as it was.

    Attributes:
        several: whether this is a directory, in which tokens may have fewer rights than all.
    """

    def __init__(self, path: Path, overlap_seconds: float = 600.0, clock: Callable[[], float] = time.time) -> None:
        """Read the tokens.

        Args:
            path: of a file, or of a directory.
            overlap_seconds: how long a replaced token is accepted.
            clock: seconds since 1970.

        Raises:
            ConfigurationError: there is no token, or one of the files cannot be understood.
        """
        self.several = path.is_dir()
        self._path = path
        self._overlap_seconds = overlap_seconds
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._former: dict[str, list[_SupersededTokens]] = {}
        self._seen: object = None
        self._looked_at = 0.0
        self._lock = threading.Lock()
        problems = self._look()
        if problems:
            raise ConfigurationError(problems[0])
        if not self._entries and not self.several:
            raise ConfigurationError(f"The token file {path} cannot be read.")
        if not self._entries:
            logger.warning("there is no token in %s yet; nobody can connect", path)

    def __repr__(self) -> str:
        return f"Tokens({sorted(self._entries)})"

    @property
    def names(self) -> list[str]:
        """The names of the tokens that are accepted."""
        return sorted(self._entries)

    # --- who it is ---------------------------------------------------------------------------------------------------

    def identify(self, headers: Sequence[str]) -> Identity | None:
        """Return who sends these `Authorization` headers; None for a stranger, and for a token that has expired."""
        found = self._find(headers)
        if found is None and time.monotonic() - self._looked_at >= _LOOK_AGAIN_SECONDS:
            self.refresh()
            found = self._find(headers)
        return found

    def _find(self, headers: Sequence[str]) -> Identity | None:
        now, found = self._clock(), None
        with self._lock:
            # All of them are compared, whichever fits, so that the time taken reveals nothing.
            for name, entry in self._entries.items():
                secrets = [entry.secret, *(old.secret for old in self._former.get(name, ()) if old.until > now)]
                for secret in secrets:
                    if matches(headers, secret):
                        found = entry.identity
        return None if found is None or _is_over(found, now) else found

    def refusal(self, identity: Identity) -> str:
        """Return why a connection of this identity must end now; an empty text where it need not."""
        with self._lock:
            entry = self._entries.get(identity.name)
        if entry is None:
            return f"The token {identity.name} was revoked."
        if _is_over(entry.identity, self._clock()):
            return f"The token {identity.name} has expired."
        missing = sorted(identity.scopes - entry.identity.scopes)
        return f"The token {identity.name} no longer allows {', '.join(missing)}." if missing else ""

    # --- the files ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take note of tokens that were added, replaced or taken away. Cheap where nothing has changed."""
        for problem in self._look():
            logger.error("%s It was left as it was before.", problem)

    def _look(self) -> list[str]:
        """Read what has changed; return what is wrong with it."""
        with self._lock:
            self._looked_at = time.monotonic()
            try:
                files = self._files()
                seen = {name: _mark(path) for name, path in files.items()}
                if seen == self._seen:
                    return []
                texts = {name: _read(path) for name, path in files.items()}
                if {name: _mark(path) for name, path in files.items()} != seen:
                    return []  # replaced while we read: the next look sees all of it
            except OSError as error:
                problem = f"The token file {self._path} cannot be read: {error.strerror}."
                return [problem] if self._seen is None or (self._seen != problem and self._remember(problem)) else []
            self._seen = seen
            return self._take(texts)

    def _remember(self, problem: str) -> bool:
        self._seen = problem
        return True

    def _files(self) -> dict[str, Path]:
        if not self.several:
            return {OWNER.name: self._path}
        with os.scandir(self._path) as rows:
            files = {row.name: Path(row.path) for row in rows if not row.name.startswith(".") and row.is_file()}
        return dict(sorted(files.items())[:_MAX_TOKENS])

    def _take(self, texts: dict[str, bytes]) -> list[str]:
        now = self._clock()
        entries: dict[str, _Entry] = {}
        problems: list[str] = []
        owners: dict[bytes, str] = {}
        spellings: dict[str, str] = {}
        # Those that are known first: what comes beside them is what is refused.
        for name, text in sorted(texts.items(), key=lambda item: item[0] not in self._entries):
            where = f"The token file {self._path / name if self.several else self._path}"
            try:
                entry = _parse_entry(name, text, where)
                if entry.secret in owners:
                    raise ConfigurationError(f"{where} holds the same token as {owners[entry.secret]}. Make another.")
                # Some volumes do not tell them apart: either would have the other's snapshots.
                if name.casefold() in spellings:
                    raise ConfigurationError(
                        f"{where} has a name that differs from {spellings[name.casefold()]} in capitals only. Choose "
                        "another."
                    )
            except ConfigurationError as error:
                problems.append(str(error))
                if name not in self._entries:
                    continue
                entry = self._entries[name]
            owners[entry.secret] = name
            spellings[name.casefold()] = name
            entries[name] = entry
        if not self.several and not entries:
            return problems
        # A former token that another name has now is that one's alone: it may allow less.
        self._former = {
            name: [old for old in former if owners.get(old.secret, name) == name]
            for name, former in self._former.items()
        }
        for name, before in self._entries.items():
            after = entries.get(name)
            if after is None:
                self._former.pop(name, None)
                logger.info("the token %s was revoked", name)
            elif after.secret != before.secret:
                kept = [old for old in self._former.get(name, []) if old.until > now and old.secret != after.secret]
                if before.secret not in owners:
                    kept.append(_SupersededTokens(before.secret, now + self._overlap_seconds))
                self._former[name] = kept
                logger.info(
                    "the token %s was replaced; the former one is accepted for %g s", name, self._overlap_seconds
                )
        self._entries = entries
        return problems


def _mark(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_ino, status.st_size


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        warn_if_exposed(file, path)
        return file.read(_MAX_FILE_BYTES + 1)


def _is_over(identity: Identity, now: float) -> bool:
    return identity.expires is not None and identity.expires <= now


def _parse_entry(name: str, text: bytes, where: str) -> _Entry:
    """Return the token of a file and what it allows.

    Raises:
        ConfigurationError: it cannot be understood; the token is not in the text of the error.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{where!r} has a name that is not valid for a token. Use letters, digits, '.', '_' and '-'."
        )
    if len(text) > _MAX_FILE_BYTES:
        raise ConfigurationError(f"{where} is longer than {_MAX_FILE_BYTES} bytes; that is not a token.")
    lines = [line.strip() for line in text.decode("utf-8", "replace").strip().splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise ConfigurationError(f"{where} holds no token. Make one, for instance with: openssl rand -hex 32")
    secret = checked(lines[0])
    scopes, expires = SCOPES, None
    bounds: dict[str, int] = {}
    for line in lines[1:]:
        key, colon, value = (part.strip() for part in line.partition(":"))
        if key == "scopes" and colon:
            scopes = _scopes(value, where)
        elif key == "expires" and colon:
            expires = _moment(value, where)
        elif key in ("sessions", "connections") and _COUNT.fullmatch(value):
            bounds[key] = int(value)
        elif key in _SIZES and value:
            bounds[_SIZES[key]] = size_bytes(value, f"{where}: {key}")
        else:
            raise ConfigurationError(
                f"{where} has an unknown line after its token: {key!r:.40}. Use 'scopes: operations, "
                "functions, admin', 'expires: 2027-01-31', 'sessions: 4', 'connections: 16', 'memory: 8GiB', "
                "'uploads: 2GiB' or 'snapshots: 50GiB'."
            )
    return _Entry(Identity(name, scopes, Bounds(**bounds), expires), secret.encode())


def _scopes(text: str, where: str) -> frozenset[str]:
    scopes = frozenset(text.replace(",", " ").split())
    unknown = sorted(scopes - SCOPES)
    if unknown or not scopes:
        raise ConfigurationError(
            f"{where} names the scopes {text!r:.80}. Valid scopes are: {', '.join(sorted(SCOPES))}."
        )
    # Whoever runs code there has the tensors in any case.
    return scopes | {OPERATIONS} if FUNCTIONS in scopes else scopes


def _moment(text: str, where: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"{where} expires at {text!r:.40}. Write it as 2027-01-31T00:00:00Z.") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
