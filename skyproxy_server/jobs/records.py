"""The record of one job: what was asked for, how far it has come, and where that lies on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from skyproxy.errors import ProtocolError
from skyproxy_server.auth import Identity

RUNNING = "running"
RESTARTING = "restarting"
SUCCEEDED = "succeeded"
FAILED = "failed"
CANCELLED = "cancelled"
PREEMPTED = "preempted"
LOST = "lost"
ENDED = frozenset({SUCCEEDED, FAILED, CANCELLED, LOST})
"""The states that a job does not leave. A preempted one is started again with its worker."""
STATES = ENDED | {RUNNING, RESTARTING, PREEMPTED}
KINDS = frozenset({"script", "function", "torchrun"})

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_MAX_TITLE = 200
_MAX_RESTARTS = 1000
_MAX_GRACE_SECONDS = 3600.0
_MAX_ENV_BYTES = 64 << 10
_MAX_NODES = 4096
_RECORD = "job.json"
_MAX_RECORD_BYTES = 1 << 20
_COUNT, _TIME = (int,), (int, float)
_KINDS: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "title": (str,),
    "state": (str,),
    "max_restarts": _COUNT,
    "grace_seconds": _TIME,
    "mark": (str,),
    "exit_code": (int, type(None)),
    "signal": (int, type(None)),
    "restarts": _COUNT,
    "preemptions": _COUNT,
    "made_at": _TIME,
    "started_at": _TIME,
    "ended_at": (int, float, type(None)),
}
"""The types of what a record has, for one that is read again."""


@dataclass(slots=True)
class JobRecord:
    """A job.

    Attributes:
        name: by which its client finds it; a file name, and no path.
        client: whose it is; its token's name decides.
        kind: one of `KINDS`, for people.
        title: what runs, for people.
        max_restarts: how often it is started again after it died; preemptions do not count.
        grace_seconds: the time that it has after SIGTERM.
        env: further variables of its processes.
        part: which part of a job of several nodes it is, and of how many.
        mark: what its processes are known by, wherever they have gone.
        state: one of `STATES`.
        exit_code: of its last process; None while it runs, or where a signal ended it.
        signal: the number of the signal that ended it; None for others.
        restarts: how often it was started again because it died.
        preemptions: how often because its worker was taken away.
        made_at, started_at, ended_at: seconds since 1970; of the latest start, and None before there is an end.
    """

    name: str
    client: Identity
    kind: str = "script"
    title: str = ""
    max_restarts: int = 0
    grace_seconds: float = 5.0
    env: dict[str, str] = field(default_factory=dict)
    part: tuple[int, int] = (0, 1)
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    state: str = RUNNING
    exit_code: int | None = None
    signal: int | None = None
    restarts: int = 0
    preemptions: int = 0
    made_at: float = field(default_factory=time.time)
    started_at: float = field(default_factory=time.time)
    ended_at: float | None = None

    @property
    def has_ended(self) -> bool:
        """True if it will not run again."""
        return self.state in ENDED

    def row(self) -> dict[str, object]:
        """Return what its client is told."""
        now = time.time()
        return {
            "name": self.name,
            "kind": self.kind,
            "title": self.title,
            "state": self.state,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "restarts": self.restarts,
            "preemptions": self.preemptions,
            "max_restarts": self.max_restarts,
            "part": list(self.part),
            "age_seconds": max(now - self.made_at, 0.0),
            "seconds": max((self.ended_at or now) - self.started_at, 0.0),
        }

    def save(self, folder: Path) -> None:
        """Write it whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        plain = {**dataclasses.asdict(self), "client": self.client.to_plain()}
        partial = folder / f".{_RECORD}.{secrets.token_hex(4)}"
        try:
            with open(partial, "w", encoding="utf-8") as file:
                json.dump(plain, file)
                file.flush()
                os.fsync(file.fileno())  # so that the record is whole even if the machine is switched off
            partial.replace(folder / _RECORD)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def load_record(folder: Path) -> JobRecord | None:
    """Return the record in a folder; None where there is none that can be read."""
    try:
        with open_own(folder / _RECORD) as file:
            plain = json.loads(file.read(_MAX_RECORD_BYTES))
        client = Identity.from_plain(plain.pop("client"))
        index, count = plain.pop("part")
        record = JobRecord(client=client, part=(int(index), int(count)), **plain)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    try:
        checked_env(record.env)
    except ProtocolError:
        return None
    # The job itself could have written it.
    is_right = record.name == folder.name and all(
        type(getattr(record, name)) in kinds for name, kinds in _KINDS.items()
    )
    return record if is_right and record.state in STATES and record.kind in KINDS else None


def open_own(path: Path) -> BinaryIO:
    """Open a file in a job's folder, where the job itself may have put anything.

    Raises:
        OSError: it is not there, or no file of its own.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "it is no file", str(path))
    return open(descriptor, "rb")


def asked_record(asked: Mapping[str, Any], client: Identity, default_grace_seconds: float) -> JobRecord:
    """Return the record of a job that a client asks for, of whose words nothing is trusted.

    Raises:
        ProtocolError: it cannot be meant; says what.
    """
    max_restarts, grace = asked.get("max_restarts", 0), asked.get("grace_seconds")
    if type(max_restarts) is not int or not 0 <= max_restarts <= _MAX_RESTARTS:
        raise ProtocolError(f"max_restarts is a number from 0 to {_MAX_RESTARTS}")
    if grace is None:
        grace = default_grace_seconds
    if type(grace) not in (int, float) or not 0 <= grace <= _MAX_GRACE_SECONDS:
        raise ProtocolError(f"grace_seconds is a number from 0 to {_MAX_GRACE_SECONDS:g}")
    kind, title = asked.get("kind"), asked.get("title", "")
    if type(kind) is not str or kind not in KINDS or type(title) is not str:
        raise ProtocolError(f"a job is one of {', '.join(sorted(KINDS))}, with a title")
    return JobRecord(
        name=checked_job_name(asked.get("name")),
        client=client,
        kind=kind,
        title=title[:_MAX_TITLE].encode("utf-8", "replace").decode(),
        max_restarts=max_restarts,
        grace_seconds=float(grace),
        env=checked_env(asked.get("env", {})),
        part=_check_part(asked.get("part", [0, 1])),
    )


def checked_job_name(name: object) -> str:
    """Return `name`, if it is one: a file name, which leads nowhere else.

    Raises:
        ProtocolError: it is none.
    """
    if type(name) is not str or not _NAME.fullmatch(name):
        raise ProtocolError(
            "a job's name has 1 to 63 letters, digits, dots, hyphens and underscores, a letter or digit first"
        )
    return name


def owner_folder(root: Path, owner: str) -> Path:
    """Return the folder of the jobs of one token, whatever characters its name has."""
    return root / hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def checked_env(env: object) -> dict[str, str]:
    """Return variables, if processes can have them.

    Raises:
        ProtocolError: they cannot.
    """
    if type(env) is not dict or any(type(text) is not str for pair in env.items() for text in pair):
        raise ProtocolError("env has texts by names")
    if any("=" in name or not name or "\0" in name + value for name, value in env.items()):
        raise ProtocolError("env has a name, or a value, that no variable can have")
    try:
        size = sum(len((name + value).encode()) for name, value in env.items())
    except UnicodeEncodeError as error:
        raise ProtocolError("env has a text that is none") from error
    if size > _MAX_ENV_BYTES:
        raise ProtocolError(f"env may have {_MAX_ENV_BYTES} bytes")
    return env


def _check_part(part: object) -> tuple[int, int]:
    if type(part) is not list or [type(number) for number in part] != [int, int]:
        raise ProtocolError("part is a number, and how many there are")
    index, count = part
    if not 0 <= index < count <= _MAX_NODES:
        raise ProtocolError(f"part {index} of {count} cannot be")
    return index, count
