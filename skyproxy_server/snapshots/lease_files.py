"""The files of leases, and of claims on them: what is in them, read without belief in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from skyproxy.snapshots.stores import FileStore
from skyproxy_server.snapshots.signs import get

ASK, TAKE, END, LEAVE = "ask", "take", "end", "leave"
"""Wishes of a claim: a session that no client uses; one that a client may use; its end; that it is elsewhere now."""
HELD, GIVING, FAILED = "held", "giving", "failed"
"""Answers to a claim: a client uses it; it is being saved, and let go of; it cannot be saved."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker's word that it has a named session.

    Attributes:
        worker: a name that it was given at random; empty where nobody has it, and it has moved.
        tag: the mark of the session's use; a client that comes back from a snapshot of that use has it, too.
        where: the machine and the process, for people.
        name: of the session.
        about: its size, for people.
        answer: what became of a claim.
        moved: the address where it is now.
    """

    worker: str
    tag: str
    where: str
    name: str = ""
    about: Mapping[str, object] = field(default_factory=dict)
    answer: Mapping[str, object] = field(default_factory=dict)
    moved: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """The wish of another worker, or of its client, for a session that one has.

    Attributes:
        mark: tells it from others.
        kind: `ASK`, `TAKE`, `END` or `LEAVE`.
        used_by: of `LEAVE`: which session used it.
        where: of `LEAVE`: the address where it is now.
    """

    mark: str
    kind: str
    used_by: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class Loss:
    """A session that another worker has now.

    Attributes:
        owner, name: which.
        lease: that worker's.
    """

    owner: str
    name: str
    lease: Lease


def read_lease(place: FileStore, file: str) -> Lease | None:
    """Return a lease; None where there is none."""
    if file not in place.files():
        return None
    said = get(place, file)
    fields = [said.get(key, "") for key in ("worker", "tag", "where", "name", "moved")]
    if "worker" not in said or not all(isinstance(text, str) for text in fields):
        return None
    worker, tag, where, name, moved = map(str, fields)
    return Lease(worker, tag, where, name, table_of(said.get("about")), table_of(said.get("answer")), moved)


def read_claim(place: FileStore, file: str) -> Claim | None:
    """Return a claim; None where there is none."""
    said = get(place, file) if file in place.files() else {}
    fields = [said.get(key) for key in ("mark", "kind", "used_by", "where")]
    if not all(isinstance(text, str) for text in fields):
        return None
    return Claim(*map(str, fields))


def table_of(said: object) -> Mapping[str, object]:
    """Return a table that was read; an empty one where there is none."""
    return said if isinstance(said, dict) else {}


def seconds_of(said: object) -> float:
    """Return a time that was read; 0 where there is none."""
    return float(said) if isinstance(said, int | float) else 0.0


def count_of(said: object) -> int:
    """Return a count that was read; 0 where there is none."""
    return said if type(said) is int and said >= 0 else 0


def _stem(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def file_of(name: str) -> str:
    """Return the name of a session's lease."""
    return _stem(name) + ".json"


def claim_file_of(name: str) -> str:
    """Return the name of the claim on a session."""
    return _stem(name) + ".claim"
