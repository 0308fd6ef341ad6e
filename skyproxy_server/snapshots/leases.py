"""The worker of a volume that has a named session: a file for each name says which, and another one that it lives.

No clock of another machine is believed. A worker that lives writes its sign of life again and again; one whose sign has
not changed for a while, on the clock of whoever looks, lives no more. On one machine the kernel knows better: a lock on
a file ends with its process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyproxy.snapshots.stores import FileStore
from skyproxy_server.named_sessions import NamedSessionElsewhereError
from skyproxy_server.snapshots.places import place_of

_LEASES, _WORKERS = ".leases", ".workers"
"""Folders of a token's place, and of the worker's: no snapshot has a name with a point in front."""
_LOCK = ".lock"
BEATS = 3
"""Signs of life in the time after which a worker without one counts as gone."""
_LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker's word that it has a named session.

    Attributes:
        worker: a name that it was given at random.
        tag: the mark of the session's use; a client that comes back from a snapshot of that use has it, too.
        where: the machine and the process, for people.
    """

    worker: str
    tag: str
    where: str


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


class NameLeases:
    """The leases of one worker. Every method but `holds` may wait for the volume, and raises OSError where that fails.

    Args:
        root: the worker's place for snapshots.
        seconds: the time without a sign of life after which another worker counts as gone.
        clock, pause: of whoever waits for one.
    """

    def __init__(
        self,
        root: FileStore,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.seconds = seconds
        self._root = root
        self._workers = root.child(_WORKERS)
        self._clock = clock
        self._pause = pause
        self._own = Lease(secrets.token_hex(8), "", f"process {os.getpid()} on {socket.gethostname()}")
        self._machine = _machine()
        self._beats = 0
        self._held: dict[tuple[str, str], str] = {}
        self._lost: set[tuple[str, str]] = set()
        self._claiming: set[tuple[str, str]] = set()
        self._changing = threading.Lock()
        self._alive = contextlib.ExitStack()
        self._seen: dict[str, str] = {}

    def holds(self, owner: str, name: str) -> bool:
        """Return whether the session is this worker's, as far as it knows."""
        key = (owner, name)
        return key in self._held and key not in self._lost

    def names(self) -> list[tuple[str, str]]:
        """Return what this worker has, or had until another one took it: tokens' names, and names."""
        with self._changing:
            return list(self._held)

    # --- to have one -------------------------------------------------------------------------------------------------

    def acquire(
        self, owner: str, name: str, tag: str = "", *, take: bool, note_progress: Callable[[], object] = lambda: None
    ) -> None:
        """Have a session; wait until its worker counts as gone, or gives a sign of life. `settle` is to follow.

        Args:
            owner, name: which.
            tag: the mark of the use that goes on here, for which no other worker is waited for.
            take: whether it is to be taken from one that lives.
            note_progress: called now and then.

        Raises:
            NamedSessionElsewhereError: another worker has it, and lives.
            OSError: the volume cannot be read or written.
        """
        with self._changing:
            self._claiming.add((owner, name))
        place = self._place(owner)
        place.prepare()
        self.beat()
        watched, until = "", 0.0
        while True:
            with place.exclusive(_LOCK):
                sign = "" if take else self._sign_of_another(place, name, tag)
                if not sign or (sign == watched and self._clock() >= until):
                    self._write(place, name, tag)
                    self._note(owner, name, tag)
                    return
                if watched and sign != watched:
                    raise NamedSessionElsewhereError(self._holder_of(place, name))
            watched, until = sign, until if watched else self._clock() + self.seconds
            note_progress()
            self._pause(_LOOK_SECONDS)

    def settle(self, owner: str, name: str, tag: str) -> None:
        """Say which use of a session goes on here; no mark: it is not here after all."""
        with self._changing:
            self._claiming.discard((owner, name))
        if not tag:
            self.drop(owner, name)
        elif self.holds(owner, name) and self._held[owner, name] != tag:
            self._write(self._place(owner), name, tag)
            self._note(owner, name, tag)

    def drop(self, owner: str, name: str) -> None:
        """Let go of a session, which is no longer here."""
        key = (owner, name)
        with self._changing:
            if key in self._claiming or key not in self._held:
                return
            del self._held[key]
            self._lost.discard(key)
        place = self._place(owner)
        with place.exclusive(_LOCK):
            there = self._read(place, name)
            if there is not None and there.worker == self._own.worker and key not in self._claiming:
                place.remove(_file(name))

    # --- to go on having them ----------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Give a sign of life."""
        self._workers.prepare()
        if not self._beats or self._workers.is_held(_lock_file(self._own.worker)) is False:  # somebody has cleared away
            self._alive.close()
            self._alive.enter_context(self._workers.held(_lock_file(self._own.worker)))
        self._beats += 1
        _put(self._workers, _file_of_worker(self._own.worker), {"count": self._beats, "machine": self._machine})

    def losses(self) -> list[Loss]:
        """Look for sessions that another worker has taken; what nobody has is this worker's again."""
        found: list[Loss] = []
        with self._changing:
            held = list(self._held.items())
        for (owner, name), tag in held:
            place = self._place(owner)
            with place.exclusive(_LOCK):
                there = self._read(place, name)
                if there is None:
                    self._write(place, name, tag)
            if there is not None and there.worker != self._own.worker:
                found.append(Loss(owner, name, there))
        with self._changing:
            # Not what was had anew meanwhile.
            same = {key for key, tag in held if self._held.get(key) == tag and key not in self._claiming}
            found = [loss for loss in found if (loss.owner, loss.name) in same]
            self._lost = {(loss.owner, loss.name) for loss in found}
        return found

    def clear_away(self) -> None:
        """Delete the signs of workers that have given none since the last time."""
        signs: dict[str, str] = {}
        for file in self._workers.files():
            worker, _, kind = file.rpartition(".")
            if kind == "json" and worker != self._own.worker:
                sign, lives = self._look_at(worker)
                if not lives:
                    signs[worker] = sign
        for worker, sign in signs.items():
            if self._seen.get(worker) == sign:
                self._workers.remove(_file_of_worker(worker))
                self._workers.remove(_lock_file(worker))
        self._seen = signs

    def end(self) -> None:
        """Let go of all: the worker ends."""
        with self._changing:
            self._claiming.clear()
        for owner, name in self.names():
            self.drop(owner, name)
        if self._beats:
            self._workers.remove(_file_of_worker(self._own.worker))
            self._alive.close()
            self._workers.remove(_lock_file(self._own.worker))
            self._workers.remove_place()
            self._beats = 0

    # --- files -------------------------------------------------------------------------------------------------------

    def _place(self, owner: str) -> FileStore:
        return place_of(self._root, owner).child(_LEASES)

    def _sign_of_another(self, place: FileStore, name: str, tag: str) -> str:
        """Return the sign of life of the worker that has a session; empty where it is free to be had.

        Raises:
            NamedSessionElsewhereError: it is known to live.
        """
        there = self._read(place, name)
        if there is None or there.worker == self._own.worker or (tag and there.tag == tag):
            return ""
        sign, lives = self._look_at(there.worker)
        if lives:
            raise NamedSessionElsewhereError(there.where)
        return "" if lives is False else sign

    def _holder_of(self, place: FileStore, name: str) -> str:
        there = self._read(place, name)
        return there.where if there is not None else "unknown"

    def _look_at(self, worker: str) -> tuple[str, bool | None]:
        """Return the sign of life of a worker, and whether it lives, where that can be known at once."""
        file = _file_of_worker(worker)
        if file not in self._workers.files():
            return "", False  # it has left in order
        said = _get(self._workers, file)
        sign = f"{worker}:{said.get('count')}"
        if self._machine and said.get("machine") == self._machine:
            return sign, self._workers.is_held(_lock_file(worker))
        return sign, None

    def _read(self, place: FileStore, name: str) -> Lease | None:
        if _file(name) not in place.files():
            return None
        said = _get(place, _file(name))
        fields = [said.get(key) for key in ("worker", "tag", "where")]
        return Lease(*map(str, fields)) if all(isinstance(field, str) for field in fields) else None

    def _write(self, place: FileStore, name: str, tag: str) -> None:
        _put(place, _file(name), asdict(Lease(self._own.worker, tag, self._own.where)))

    def _note(self, owner: str, name: str, tag: str) -> None:
        with self._changing:
            self._held[owner, name] = tag
            self._lost.discard((owner, name))


def _file(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32] + ".json"


def _file_of_worker(worker: str) -> str:
    return f"{worker}.json"


def _lock_file(worker: str) -> str:
    return f"{worker}.lock"


def _put(place: FileStore, name: str, said: dict[str, object]) -> None:
    place.write(name, json.dumps(said).encode("ascii"))


def _get(place: FileStore, name: str) -> dict[str, Any]:
    """Return what a file says; nothing where it is gone by now, or none of ours."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        said = json.loads(place.read(name))
        if isinstance(said, dict):
            return said
    return {}


def _machine() -> str:
    """Return the name of this machine since it was started; empty where the system gives none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
