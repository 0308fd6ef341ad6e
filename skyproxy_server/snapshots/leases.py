"""The worker of a volume that has a named session: a file for each name says which, and another one that it lives.

No clock of another machine is believed. A worker that lives writes its sign of life again and again; one whose sign has
not changed for a while, on the clock of whoever looks, lives no more. On one machine the kernel knows better: a lock on
a file ends with its process.

Whoever wants what another one has leaves a claim beside it. The other one answers there: that a client uses it, or that
it is saving it, and then it lets go. "A worker" is the process that has the session: of one with a process for each
session, that process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from skyproxy.errors import SnapshotError
from skyproxy.snapshots.stores import FileStore, LocalStore
from skyproxy_server.named_errors import NamedSessionElsewhereError, NamedSessionMovedError
from skyproxy_server.snapshots.lease_files import (
    ASK,
    END,
    FAILED,
    GIVING,
    HELD,
    LEAVE,
    TAKE,
    Claim,
    Lease,
    Loss,
    claim_file_of,
    count_of,
    file_of,
    read_claim,
    read_lease,
    seconds_of,
)
from skyproxy_server.snapshots.places import place_of
from skyproxy_server.snapshots.signs import SignsOfLife, get, put

_LEASES = ".leases"
"""A folder of a token's place: no snapshot has a name with a point in front."""
_LOCK = ".lock"
BEATS = 3
"""Signs of life in the time after which a worker without one counts as gone."""
_LOOK_SECONDS = 0.25
_SPARE_SECONDS = 1.0
GIVE_SECONDS = 120.0
"""The time that one who is saving what another wants is waited for."""


class NameLeases:
    """The leases of one worker. Every method but `holds` may wait for the volume, and raises OSError where that fails.

    Args:
        root: the worker's place for snapshots.
        seconds: the time without a sign of life after which another worker counts as gone.
        clock, pause: of whoever waits for one.
        where: what people call this worker; by default its process and machine.
        return_seconds: for how long a client whose connection broke keeps its session from others.

    Attributes:
        look_seconds: how often a worker looks for claims.
        on_held: called when it has one more.
    """

    def __init__(
        self,
        root: FileStore,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
        where: str = "",
        return_seconds: float = 0.0,
    ) -> None:
        self.seconds = seconds
        # Whoever asks a store elsewhere pays for it, and waits.
        self.look_seconds = _LOOK_SECONDS if isinstance(root, LocalStore) else seconds / BEATS
        self.on_held: Callable[[], object] = lambda: None
        self._root = root
        self._clock = clock
        self._pause = pause
        self._own = Lease(secrets.token_hex(8), "", where or describe_worker(os.getpid()))
        self._return_seconds = return_seconds
        self._machine = _machine()
        self._held: dict[tuple[str, str], str] = {}
        self._lost: set[tuple[str, str]] = set()
        self._claiming: set[tuple[str, str]] = set()
        self._giving: set[tuple[str, str]] = set()
        self._changing = threading.Lock()
        self._signs: dict[str, SignsOfLife] = {}

    def holds(self, owner: str, name: str) -> bool:
        """Return whether the session is this worker's, as far as it knows."""
        key = (owner, name)
        return key in self._held and key not in self._lost and key not in self._giving

    def names(self) -> list[tuple[str, str]]:
        """Return what this worker has, or had until another one took it: tokens' names, and names."""
        with self._changing:
            return list(self._held)

    def rows_elsewhere(self, owner: str) -> list[dict[str, object]]:
        """Return what other workers of the volume have, as far as can be known at once that they live."""
        return [
            {
                "name": lease.name,
                "names": count_of(lease.about.get("names")),
                "bytes": count_of(lease.about.get("bytes")),
                "age_seconds": seconds_of(lease.about.get("age_seconds")),
                "held": bool(lease.about.get("held", True)),
                "expires_in_seconds": None,
            }
            for lease in self._list_others(owner)
            if self._signs_of(owner).look_at(lease.worker)[1] is not False
        ]

    def _list_others(self, owner: str) -> list[Lease]:
        place = self._place(owner)
        found = [read_lease(place, file) for file in place.files() if file.endswith(".json")]
        return [lease for lease in found if lease is not None and lease.worker not in ("", self._own.worker)]

    def end_elsewhere(self, owner: str, name: str, note_progress: Callable[[], object] = lambda: None) -> bool:
        """Have another worker forget a session, or take from it what it does not give; return whether there was one."""
        claim = Claim(secrets.token_hex(8), END)
        return self._claim_for_nobody(owner, name, claim, note_progress)

    def leave_elsewhere(
        self, owner: str, name: str, used_by: str, where: str, note_progress: Callable[[], object] = lambda: None
    ) -> bool:
        """Have another process of this worker forget a session that has moved to an address; return whether one had it,
        and has forgotten it.
        """
        there = read_lease(self._place(owner), file_of(name))
        if there is None or there.where != self._own.where:
            return False
        claim = Claim(secrets.token_hex(8), LEAVE, used_by, where)
        try:
            return self._claim_for_nobody(owner, name, claim, note_progress)
        except NamedSessionMovedError:
            return True
        except NamedSessionElsewhereError:
            return False  # it is another use that goes on there

    def _claim_for_nobody(self, owner: str, name: str, claim: Claim, note_progress: Callable[[], object]) -> bool:
        there = read_lease(self._place(owner), file_of(name))
        if there is None or there.worker in ("", self._own.worker):
            return False
        try:
            self.acquire(owner, name, take=claim.kind == END, note_progress=note_progress, claim=claim)
        finally:
            self.settle(owner, name, "")
        return True

    # --- to have one -------------------------------------------------------------------------------------------------

    def acquire(
        self,
        owner: str,
        name: str,
        tag: str = "",
        *,
        take: bool,
        note_progress: Callable[[], object] = lambda: None,
        claim: Claim | None = None,
    ) -> None:
        """Have a session; wait until its worker has saved it and lets go, says that it is used, gives no answer, or
        counts as gone. `settle` is to follow.

        Args:
            owner, name: which.
            tag: the mark of the use that goes on here, for which no other worker is waited for.
            take: whether it is to be taken from a client that uses it. From a worker that lives and gives no answer, it
                is taken without what only that one's memory has.
            note_progress: called now and then.
            claim: what the worker that has it is asked for, instead.

        Raises:
            NamedSessionElsewhereError: a client uses it, or another worker has it and does not answer.
            NamedSessionMovedError: it has moved, and is not to be taken.
            SnapshotError: the worker that has it cannot save it.
            OSError: the volume cannot be read or written.
        """
        with self._changing:
            self._claiming.add((owner, name))
        place = self._place(owner)
        place.prepare()
        self._signs_of(owner).beat()
        claim = claim or Claim(secrets.token_hex(8), TAKE if take else ASK)
        begun, watched, posted_at = self._clock(), "", None
        try:
            while True:
                with place.exclusive(_LOCK):
                    there = read_lease(place, file_of(name))
                    if there is not None and there.moved and not take and not tag:
                        raise NamedSessionMovedError(there.moved)
                    sign, lives = self._look_at(owner, name, there, tag)
                    waited = self._clock() - begun
                    if lives is None and watched:
                        lives = True if sign != watched else None if waited < self.seconds else False
                    if there is None or lives is False:
                        self._have(place, owner, name, tag)
                        return
                    posted_at = self._post(place, name, claim, waited, posted_at)
                    unanswered = waited - posted_at if posted_at is not None else 0.0
                    if self._is_overdue(there, claim, waited, unanswered, lives):
                        self._have(place, owner, name, tag)
                        return
                watched = watched or sign
                note_progress()
                self._pause(_LOOK_SECONDS)
        finally:
            if posted_at is not None:
                with contextlib.suppress(OSError):
                    self._withdraw(place, name, claim)
            self.on_held()

    def _have(self, place: FileStore, owner: str, name: str, tag: str) -> None:
        self._write(place, name, tag)
        self._note(owner, name, tag)

    def _post(self, place: FileStore, name: str, claim: Claim, waited: float, posted_at: float | None) -> float | None:
        """Leave a claim where the worker that has the session finds it: one at a time, for only one is answered.

        Returns:
            When it was left, in seconds since the beginning; None: another one is there.
        """
        there = get(place, claim_file_of(name)).get("mark") if claim_file_of(name) in place.files() else None
        if there == claim.mark:
            return posted_at
        if there is not None and waited < self._patience_seconds(ASK):
            return None
        put(place, claim_file_of(name), asdict(claim))
        return waited

    def _withdraw(self, place: FileStore, name: str, claim: Claim) -> None:
        with place.exclusive(_LOCK):
            if claim_file_of(name) in place.files() and get(place, claim_file_of(name)).get("mark") == claim.mark:
                place.remove(claim_file_of(name))

    def _patience_seconds(self, kind: str) -> float:
        """Return the time in which a worker that lives answers a claim."""
        return 2 * self.look_seconds + _SPARE_SECONDS + (self._return_seconds if kind == ASK else 0.0)

    def _is_overdue(
        self, there: Lease, claim: Claim, waited_seconds: float, unanswered_seconds: float, lives: bool | None
    ) -> bool:
        """Return whether what another worker has is to be taken, for it does not answer.

        Raises:
            NamedSessionElsewhereError: it is not to be taken.
            SnapshotError: the other one cannot save it.
        """
        said, seconds = there.answer.get("said"), seconds_of(there.answer.get("seconds"))
        if said != GIVING and there.answer.get("claim") != claim.mark:
            said = None
        if said == FAILED:
            raise SnapshotError(
                f"the worker that has the session in its memory ({there.where}) could not save it, so it stays there, "
                "as it was; the log of that worker says why. Make room on the volume, and try again"
            )
        late = unanswered_seconds >= self._patience_seconds(claim.kind)
        may_be_gone = lives is None and claim.kind not in (TAKE, END)  # its next sign of life, or none, will tell
        if said == HELD or waited_seconds >= GIVE_SECONDS or (said is None and late and not may_be_gone):
            if said is None and claim.kind in (TAKE, END) and waited_seconds < GIVE_SECONDS:
                return True
            is_here = there.where == self._own.where
            raise NamedSessionElsewhereError(there.where, seconds, is_here=is_here)
        return False

    def settle(self, owner: str, name: str, tag: str) -> None:
        """Say which use of a session goes on here; no mark: it is not here after all."""
        with self._changing:
            self._claiming.discard((owner, name))
        if not tag:
            self.drop(owner, name)
        elif self.holds(owner, name) and self._held[owner, name] != tag:
            self._write(self._place(owner), name, tag)
            self._note(owner, name, tag)

    def drop(self, owner: str, name: str, moved: str = "") -> None:
        """Let go of a session, which is no longer here.

        Args:
            owner, name: which.
            moved: the address where it is now, for whoever asks; an empty text: it is nowhere, or saved.
        """
        key = (owner, name)
        with self._changing:
            if key in self._claiming or key not in self._held:
                return
            del self._held[key]
            self._lost.discard(key)
        place = self._place(owner)
        with place.exclusive(_LOCK):
            there = read_lease(place, file_of(name))
            if there is not None and there.worker == self._own.worker and key not in self._claiming:
                if moved:
                    put(place, file_of(name), asdict(Lease("", "", there.where, name, moved=moved)))
                else:
                    place.remove(file_of(name))
        self._giving.discard(key)

    # --- to give one away --------------------------------------------------------------------------------------------

    def claim_on(self, owner: str, name: str) -> Claim | None:
        """Return what another worker wants of a session that this one has; None where nobody wants anything, or was
        answered.
        """
        place = self._place(owner)
        if (owner, name) in self._giving or claim_file_of(name) not in place.files():
            return None
        claim, there = read_claim(place, claim_file_of(name)), read_lease(place, file_of(name))
        if claim is None or there is None or there.worker != self._own.worker:
            return None
        return claim if there.answer.get("claim") != claim.mark else None

    def answer(self, owner: str, name: str, claim: Claim, said: str, seconds: float = 0.0) -> None:
        """Answer a claim.

        Args:
            owner, name: of which session.
            claim: what was wanted.
            said: `HELD`; `GIVING`: until `drop` or `FAILED`, nobody gets the session anew here.
            seconds: for how long its client has used it.
        """
        with self._changing:
            (self._giving.add if said == GIVING else self._giving.discard)((owner, name))
        place = self._place(owner)
        with place.exclusive(_LOCK):
            there = read_lease(place, file_of(name))
            if there is not None and there.worker == self._own.worker:
                answer = {"claim": claim.mark, "said": said, "seconds": seconds}
                put(place, file_of(name), asdict(replace(there, answer=answer)))

    def describe(self, owner: str, name: str, about: Mapping[str, object]) -> None:
        """Say how large a session is, where that has changed."""
        place = self._place(owner)
        with place.exclusive(_LOCK):
            there = read_lease(place, file_of(name))
            if there is not None and there.worker == self._own.worker and there.about != about:
                put(place, file_of(name), asdict(replace(there, about=dict(about))))

    # --- to go on having them ----------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Give a sign of life."""
        with self._changing:
            owners = {owner for owner, _ in (*self._held, *self._claiming)}
        for owner in owners:
            self._signs_of(owner).beat()

    def losses(self) -> list[Loss]:
        """Look for sessions that another worker has taken; what nobody has is this worker's again."""
        found: list[Loss] = []
        with self._changing:
            held = list(self._held.items())
        for (owner, name), tag in held:
            place = self._place(owner)
            with place.exclusive(_LOCK):
                there = read_lease(place, file_of(name))
                if there is None and (owner, name) in self._held:
                    self._write(place, name, tag)
            if there is not None and there.worker != self._own.worker:
                found.append(Loss(owner, name, there))
        with self._changing:
            # Not what was had anew meanwhile.
            same = {key for key, tag in held if self._held.get(key) == tag and key not in self._claiming}
            found = [loss for loss in found if (loss.owner, loss.name) in same]
            self._lost = {(loss.owner, loss.name) for loss in found}
        return found

    def clear_away(self, owner_place: FileStore) -> None:
        """Delete the signs of workers that have given none since the last time, in the place of a token."""
        self._signs_in(owner_place).clear_away()

    def end(self) -> None:
        """Let go of all: the worker ends."""
        with self._changing:
            self._claiming.clear()
        for owner, name in self.names():
            self.drop(owner, name)
        for signs in list(self._signs.values()):
            signs.end()

    # --- files -------------------------------------------------------------------------------------------------------

    def _place(self, owner: str) -> FileStore:
        return place_of(self._root, owner).child(_LEASES)

    def _signs_of(self, owner: str) -> SignsOfLife:
        return self._signs_in(place_of(self._root, owner))

    def _signs_in(self, place: FileStore) -> SignsOfLife:
        with self._changing:
            if place.name not in self._signs:
                self._signs[place.name] = SignsOfLife(place, self._own.worker, lambda: self._machine)
            return self._signs[place.name]

    def _look_at(self, owner: str, name: str, there: Lease | None, tag: str) -> tuple[str, bool | None]:
        """Return the sign of life of whoever has a session, and whether that one lives; False: it is free to be had."""
        if there is None or not there.worker or (tag and there.tag == tag):
            return "", False
        if there.worker == self._own.worker:
            return "", (owner, name) in self._giving
        return self._signs_of(owner).look_at(there.worker)

    def _write(self, place: FileStore, name: str, tag: str) -> None:
        put(place, file_of(name), asdict(replace(self._own, tag=tag, name=name)))

    def _note(self, owner: str, name: str, tag: str) -> None:
        with self._changing:
            self._held[owner, name] = tag
            self._lost.discard((owner, name))


def describe_worker(process: int) -> str:
    """Return what people call a worker."""
    return f"process {process} on {socket.gethostname()}"


def _machine() -> str:
    """Return the name of this machine since it was started; empty where the system gives none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
