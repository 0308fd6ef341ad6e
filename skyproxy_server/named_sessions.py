"""Values that clients put under names: they stay when sessions end, for whoever comes with the same token."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from skyproxy.errors import LimitExceededError
from skyproxy.settings import Settings
from skyproxy_server.gates import storage_key
from skyproxy_server.named_errors import NamedSessionChangedError, NamedSessionInUseError, NamedSessionMovedError

TAKE_SECONDS = 20.0
"""The time that a session that is taken over may need to end its last batch."""
_LOOK_SECONDS = 0.05


class Holder(Protocol):
    """A session that uses a named one."""

    @property
    def identity(self) -> str:
        """Its own name, which no other session of the worker has."""

    @property
    def is_detached(self) -> bool:
        """True if its client has no connection now."""

    @property
    def deserted_seconds(self) -> float | None:
        """The time for which its client is not heard, as one that was killed: detached, or about to be, with much
        queued; None while it is heard.
        """

    @property
    def is_leaving(self) -> bool:
        """True if its client knows that the worker ends, and gives it up after the next snapshot."""

    def take_away(self, reason: str, timeout_seconds: float) -> bool:
        """End it, drop what is queued, and tell its client why; return whether it is over, and its values are free."""


class Leases(Protocol):
    """The word of a worker to others that it has named sessions; see `snapshots.leases`."""

    def holds(self, owner: str, name: str) -> bool:
        """Return whether a session is this worker's, as far as it knows."""

    def acquire(self, owner: str, name: str, tag: str, *, take: bool, note_progress: Callable[[], object]) -> None:
        """Have a session."""

    def end_elsewhere(self, owner: str, name: str, note_progress: Callable[[], object]) -> bool:
        """Have another worker forget a session; return whether there was one."""

    def leave_elsewhere(
        self, owner: str, name: str, used_by: str, where: str, note_progress: Callable[[], object]
    ) -> bool:
        """Have another process of this worker forget a session that has moved; return whether there was one."""

    def rows_elsewhere(self, owner: str) -> list[dict[str, object]]:
        """Return what other workers of the volume have, as `NamedSessions.rows` does."""

    def settle(self, owner: str, name: str, tag: str) -> None:
        """Say which use of a session goes on here; no mark: it is not here after all."""


@dataclass(slots=True)
class StoredValue:
    """A value under its name.

    Attributes:
        version: tells it from what has the same name before and after.
        document: its structure, which the client wrote and nobody reads here.
        tensors: what the structure refers to, in the order of its references.
        put_at: when, on the clock of the store.
    """

    version: int
    document: bytes
    tensors: list[torch.Tensor]
    put_at: float


@dataclass(slots=True)
class NamedSession:
    """All values of one named session.

    Attributes:
        name: what its client calls it.
        owner: the name of the token that it belongs to.
        made_at: when it was made.
        since: since when it is held, or is not.
        holder: who uses it now.
        values: by their names.
        tag: marks who uses it, or did so last: a snapshot with another mark is older than what is here.
        used_by: the identity of the session that uses it, or did so last.
    """

    name: str
    owner: str
    made_at: float
    since: float
    holder: Holder | None = None
    values: dict[str, StoredValue] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    timer: threading.Timer | None = None
    count: int = 0
    tag: str = ""
    used_by: str = ""

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor of this session; never given twice, so that a client knows a tensor again by it."""
        number = self.numbers.get(id(tensor))
        if number is None:
            self.count += 1
            number = self.numbers[id(tensor)] = self.count
        return number

    def forget_numbers(self) -> None:
        """Forget the numbers of tensors that no value has any more."""
        alive = {id(tensor) for value in self.values.values() for tensor in value.tensors}
        self.numbers = {key: number for key, number in self.numbers.items() if key in alive}


def byte_count(tensors: Iterable[torch.Tensor]) -> int:
    """Return what tensors hold, a shared storage once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        key = storage_key(tensor)
        if key is not None:
            storages[key] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


class NamedSessions:
    """All named sessions of a worker.

    Args:
        settings: how many there may be, and how long they are kept.
        clock: tells the time.
        pause: lets some pass.

    Attributes:
        leases: what other workers of the volume are told of them; None where there are none.
        on_gone: called when one is no longer here.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.leases: Leases | None = None
        self.on_gone: Callable[[], object] = lambda: None
        self._settings = settings
        self._clock = clock
        self._pause = pause
        self._sessions: dict[tuple[str, str], NamedSession] = {}
        self._moved: dict[tuple[str, str], str] = {}
        self._lock = threading.RLock()

    # --- who holds one -----------------------------------------------------------------------------------------------

    def hold(self, holder: Holder, owner: str, name: str, *, take: bool) -> NamedSession:
        """Have `holder` use the session of this name, which is made where there is none.

        A client that is not heard for some seconds holds nothing against others: it may be a program that has ended.
        What it had queued is dropped, from one place in its order to the end.

        Raises:
            NamedSessionInUseError: another client holds it, and `take` is not set.
            NamedSessionMovedError: it goes on at another worker, and `take` is not set.
            LimitExceededError: there are too many, or the one that holds it does not come to an end now.
        """
        if not take:
            self._await_return(owner, name)
        with self._lock:
            session = self._sessions.get((owner, name))
            if session is None:
                if not take and (owner, name) in self._moved:
                    raise NamedSessionMovedError(self._moved[owner, name])
                self._refuse_too_many(owner)
                now = self._clock()
                session = self._sessions[owner, name] = NamedSession(name, owner, now, now)
            other = session.holder
            if other is not None and not take and other.deserted_seconds is None:
                raise NamedSessionInUseError(self._clock() - session.since)
            session.tag = secrets.token_hex(16)
            self._moved.pop((owner, name), None)
            self._set_holder(session, holder)
        if other is not None:
            reason = f"another client took the session {name!r} over; what was put under a name there is kept"
            if not other.take_away(reason, TAKE_SECONDS):
                self.release(holder)
                raise LimitExceededError(
                    f"the client that held {name!r} is being ended, and has not finished. Try again"
                )
        return session

    def _await_return(self, owner: str, name: str) -> None:
        """Give a client whose connection has just broken the time to come back: it is not one that was killed."""
        while True:
            with self._lock:
                session = self._sessions.get((owner, name))
                other = session.holder if session is not None else None
            seconds = other.deserted_seconds if other is not None else None
            if seconds is None or seconds >= self._settings.named_return_seconds:
                return
            self._pause(min(self._settings.named_return_seconds - seconds, _LOOK_SECONDS))

    @property
    def max_bytes(self) -> int:
        """The bytes that the structures of a session's values may take."""
        return self._settings.max_named_bytes

    def put_at(self, age_seconds: float) -> float:
        """Return the time, on this clock, of what is so old."""
        return self._clock() - age_seconds

    def empty(self, owner: str, name: str, tag: str) -> NamedSession:
        """Return a session that nobody finds yet, to be filled and brought back."""
        now = self._clock()
        return NamedSession(name, owner, now, now, tag=tag)

    def bring_back(self, holder: Holder, session: NamedSession) -> None:
        """Have `holder` use a session that was saved, in place of what is left of it here.

        Raises:
            NamedSessionChangedError: another client has used it since.
            LimitExceededError: there are too many, or it is too large.
        """
        key, settings = (session.owner, session.name), self._settings
        if len(session.values) > settings.max_names:
            raise LimitExceededError(f"{len(session.values)} names, and this worker allows {settings.max_names}")
        if sum(len(value.document) for value in session.values.values()) > settings.max_named_bytes:
            raise LimitExceededError(
                f"the structures of its named values take more than {settings.max_named_bytes} bytes"
            )
        with self._lock:
            there = self._sessions.get(key)
            if there is not None and there.tag != session.tag:
                raise NamedSessionChangedError(
                    f"another client has used the session {session.name!r} here meanwhile, and what it has under names "
                    "is newer"
                )
            if there is None:
                self._refuse_too_many(session.owner)
            if there is not None and there.timer is not None:
                there.timer.cancel()
            self._sessions[key] = session
            self._moved.pop(key, None)
            self._set_holder(session, holder)
        if there is not None and there.holder is not None:
            there.holder.take_away("it goes on from its snapshot", TAKE_SECONDS)

    def _refuse_too_many(self, owner: str) -> None:
        """Refuse another session to a token that has as many as it may; so none takes the room of others.

        Raises:
            LimitExceededError: it has.
        """
        count = sum(other == owner for other, _ in self._sessions)
        if count >= self._settings.max_named_sessions:
            raise LimitExceededError(
                f"this worker already keeps {count} named sessions of this token, its limit. End one: skyproxy "
                "sessions end NAME; or set SKYPROXY_MAX_NAMED_SESSIONS there"
            )

    def _set_holder(self, session: NamedSession, holder: Holder | None) -> None:
        session.holder, session.since = holder, self._clock()
        if holder is not None:
            session.used_by = holder.identity
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
        if holder is None:
            session.timer = threading.Timer(self._settings.named_session_seconds, self._expire, (session,))
            session.timer.daemon = True
            session.timer.start()

    def release(self, holder: Holder) -> None:
        """A session is over: what it held is kept for a while, for whoever comes; nothing is not kept."""
        with self._lock:
            for session in list(self._sessions.values()):
                if session.holder is holder and session.values:
                    self._set_holder(session, None)
                elif session.holder is holder:
                    del self._sessions[session.owner, session.name]
                    self.on_gone()

    def leave(self, owner: str, name: str, used_by: str, where: str) -> bool:
        """Forget a session that goes on at another worker; return False if it is not the one that is meant.

        Args:
            owner, name: which.
            used_by: the session that used it here.
            where: the address of the other worker, for whoever asks for it here.
        """
        with self._lock:
            session = self._sessions.get((owner, name))
            if session is None or session.used_by != used_by:
                return False
            del self._sessions[owner, name]
            if session.timer is not None:
                session.timer.cancel()
            session.values.clear()
            own = [key for key in self._moved if key[0] == owner]
            for key in own[: max(len(own) - self._settings.max_named_sessions + 1, 0)]:
                del self._moved[key]
            self._moved[owner, name] = where
        self.on_gone()
        return True

    def has_moved(self, owner: str, name: str) -> bool:
        """Return whether a session went on at another worker, and was not heard of since."""
        with self._lock:
            return (owner, name) in self._moved

    def _expire(self, session: NamedSession) -> None:
        with self._lock:
            if session.holder is None and self._sessions.get((session.owner, session.name)) is session:
                del self._sessions[session.owner, session.name]
                session.values.clear()
        self.on_gone()

    # --- what people ask ---------------------------------------------------------------------------------------------

    def has(self, owner: str, name: str) -> bool:
        """Return whether there is a session of this name."""
        with self._lock:
            return (owner, name) in self._sessions

    def tag_of(self, owner: str, name: str) -> str:
        """Return the mark of a session's use; empty where there is none of this name."""
        with self._lock:
            session = self._sessions.get((owner, name))
            return session.tag if session is not None else ""

    def unused(self) -> list[NamedSession]:
        """Return those that no client with a connection uses."""
        with self._lock:
            return [one for one in self._sessions.values() if one.holder is None or one.holder.is_detached]

    def released(self) -> list[NamedSession]:
        """Return those that no session uses."""
        with self._lock:
            return [one for one in self._sessions.values() if one.holder is None]

    def use_of(self, owner: str, name: str) -> tuple[float, float | None]:
        """Return for how long a session has been used, or has not; and for how long its client has not been heard:
        none where it is, without end where there is no client.
        """
        with self._lock:
            session = self._sessions.get((owner, name))
            if session is None or session.holder is None:
                return 0.0, math.inf
            return self._clock() - session.since, session.holder.deserted_seconds

    def give(self, owner: str, name: str, reason: str, save: Callable[[NamedSession], bool]) -> bool:
        """Save a session for another worker, and forget it; return False if it could not be saved, and stays.

        Args:
            owner, name: which.
            reason: what its client is told, which loses it.
            save: writes it to the volume.
        """
        with self._lock:
            session = self._sessions.get((owner, name))
            holder = session.holder if session is not None else None
        if session is None:
            return True
        if holder is not None:
            if not holder.take_away(reason, TAKE_SECONDS):
                return False
            self.release(holder)
        with self._lock:
            if self._sessions.get((owner, name)) is not session:
                return True
            if session.holder is not None:
                return False
        if not save(session):
            return False
        self._end(owner, name, reason, 0.0)
        return True

    def rows(self, owner: str) -> list[dict[str, object]]:
        """The sessions of a token: each with its size, age, and the time that it is still kept for."""
        with self._lock:
            now, kept = self._clock(), self._settings.named_session_seconds
            return [
                {
                    "name": session.name,
                    "names": len(session.values),
                    "bytes": byte_count(tensor for value in session.values.values() for tensor in value.tensors),
                    "age_seconds": now - session.made_at,
                    "held": session.holder is not None and session.holder.deserted_seconds is None,
                    "expires_in_seconds": None if session.holder is not None else max(session.since + kept - now, 0.0),
                }
                for session in self._sessions.values()
                if session.owner == owner
            ]

    def end(self, owner: str, name: str) -> bool:
        """Forget a session and its values; who holds it is told. Return whether there was one."""
        return self._end(owner, name, f"the session {name!r} was ended by name, with all that it had", TAKE_SECONDS)

    def lose(self, owner: str, name: str, tag: str, reason: str) -> bool:
        """Forget a session that another worker of the volume has; return whether it is forgotten.

        Args:
            owner, name: which.
            tag: the mark of its use there. A client that moves is not cut off while it still speaks here, too.
            reason: what its client is told.
        """
        with self._lock:
            session = self._sessions.get((owner, name))
            holder = session.holder if session is not None else None
            if session is not None and session.tag == tag and holder is not None and holder.deserted_seconds is None:
                return False
        return self._end(owner, name, reason, 0.0)

    def _end(self, owner: str, name: str, reason: str, timeout_seconds: float) -> bool:
        with self._lock:
            session = self._sessions.pop((owner, name), None)
            if session is None:
                return False
            if session.timer is not None:
                session.timer.cancel()
            session.values.clear()
            holder = session.holder
        self.on_gone()
        if holder is not None:
            holder.take_away(reason, timeout_seconds)
        return True

    # --- its values --------------------------------------------------------------------------------------------------

    def put(self, session: NamedSession, key: str, document: bytes, tensors: list[torch.Tensor]) -> list[int]:
        """Keep a value under a name, in place of what has it; return the numbers of its tensors.

        Raises:
            LimitExceededError: there are too many names, or their structures are too large.
        """
        with self._lock:
            others = [value for name, value in session.values.items() if name != key]
            if len(others) >= self._settings.max_names:
                raise LimitExceededError(f"{len(others)} names, the limit of a session. Forget one: node.forget(name)")
            most = self._settings.max_named_bytes
            if sum(len(value.document) for value in others) + len(document) > most:
                raise LimitExceededError(
                    f"the structures of a session's named values may take {most >> 20} MiB, and with {key!r} they take "
                    "more. Tensors on the node take none of it: move those of the CPU there first"
                )
            session.count += 1
            session.values[key] = StoredValue(session.count, document, tensors, self._clock())
            numbers = [session.number_of(tensor) for tensor in tensors]
            session.forget_numbers()
            return numbers

    def value_rows(self, session: NamedSession) -> list[list[object]]:
        """For each name: how many tensors, their bytes, and its age in seconds."""
        with self._lock:
            now = self._clock()
            return [
                [key, len(value.tensors), byte_count(value.tensors), now - value.put_at]
                for key, value in session.values.items()
            ]

    def forget(self, session: NamedSession, key: str) -> bool:
        """Forget one value; return whether there was one."""
        with self._lock:
            is_there = session.values.pop(key, None) is not None
            session.forget_numbers()
            return is_there


class NamedValueRequests:
    """The named sessions as one session of a worker finds them.

    Attributes:
        store: all of the worker.
        owner: the token's name.
        holder: the session.
        held: the named session that it uses; None before it uses one.
    """

    def __init__(self, store: NamedSessions, owner: str, holder: Holder) -> None:
        self.store = store
        self.owner = owner
        self.holder = holder
        self.held: NamedSession | None = None
