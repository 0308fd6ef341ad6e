"""Calls that another session has: the supervisor asks the processes of the same token, and connects two of them."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.isolation import call_names
from skyproxy_server.isolation.session_words import count

logger = logging.getLogger("skyproxy.server")

MAX_SEARCHES = 16
"""Calls that one session may look for at a time."""


class CallSearchTarget(Protocol):
    """A session's process, as it is asked for calls."""

    @property
    def identity(self) -> str:
        """The session's name."""

    def order(self, message: dict[str, Any], descriptors: Iterable[int] = ()) -> None:
        """Send it an order without waiting.

        Raises:
            ChannelClosedError: it takes none any more.
        """


_S = TypeVar("_S", bound=CallSearchTarget)


@dataclass(slots=True)
class _Search:
    asker: CallSearchTarget
    number: int
    mark: bytes
    seal: bytes
    asked: dict[str, CallSearchTarget] = field(default_factory=dict)
    """Those that have not answered yet."""


class CallSearch(Generic[_S]):
    """Finds the process that has a call. Called from the threads that watch the sessions.

    Args:
        others: tells the sessions whose calls a session may have: those of the same token, itself left out.
    """

    def __init__(self, others: Callable[[_S], Sequence[CallSearchTarget]]) -> None:
        self._others = others
        self._searches: dict[int, _Search] = {}
        self._count = 0
        self._lock = threading.Lock()

    def on_message(self, sender: _S, message: dict[str, Any]) -> bool:
        """Take a session's message if it is about calls; return whether it is.

        Raises:
            ValueError: it is malformed, or nobody asked for it, or the session asks for too much at a time.
        """
        if "find" in message:
            self._begin(
                sender,
                _Search(sender, count(message["find"]), _digest(message.get("mark")), _digest(message.get("seal"))),
            )
            return True
        if "has" in message:
            self._note_answer(sender, count(message["has"]), message["proof"])
            return True
        return False

    def _begin(self, sender: _S, search: _Search) -> None:
        asked = {other.identity: other for other in self._others(sender)}
        with self._lock:
            if sum(other.asker is sender for other in self._searches.values()) >= MAX_SEARCHES:
                raise ValueError(f"more than {MAX_SEARCHES} searches for calls at a time")
            self._count += 1
            number = self._count
            search.asked = dict(asked)
            self._searches[number] = search
        for other in asked.values():
            try:
                other.order({"order": "has-call", "search": number, "mark": search.mark})
            except ChannelClosedError:
                self._leave_out(number, other)
        if not asked:
            self._leave_out(number, sender)

    def _note_answer(self, sender: CallSearchTarget, number: int, proof: object) -> None:
        with self._lock:
            search = self._searches.get(number)
            if search is None:
                return  # it was found elsewhere, or nobody wants to know any more
            if search.asked.get(sender.identity) is not sender:
                raise ValueError("an answer to a question that was not asked")
            if not call_names.fits(proof, search.seal):
                search.asked.pop(sender.identity)
                if search.asked:
                    return
                sender = search.asker
            self._searches.pop(number)
        if sender is search.asker:
            self._tell(search.asker, {"order": "found", "find": search.number}, ())
        else:
            self._connect(search, sender)

    def _leave_out(self, number: int, session: CallSearchTarget) -> None:
        """One process does not answer any more; where it was the last, the call is not found."""
        with self._lock:
            search = self._searches.get(number)
            if search is None:
                return
            search.asked.pop(session.identity, None)
            if search.asked:
                return
            self._searches.pop(number)
        self._tell(search.asker, {"order": "found", "find": search.number}, ())

    def forget(self, session: CallSearchTarget) -> None:
        """A session's process has ended: it looks for nothing more, and has nothing."""
        with self._lock:
            own = [number for number, search in self._searches.items() if search.asker is session]
            for number in own:
                self._searches.pop(number)
            waiting = [number for number, search in self._searches.items() if session.identity in search.asked]
        for number in waiting:
            self._leave_out(number, session)

    def _connect(self, search: _Search, holder: CallSearchTarget) -> None:
        """Give both processes one end each of two channels: of messages, and of tensors."""
        stream, theirs = socket.socketpair()
        tensors, their_tensors = ControlChannel.pair()
        try:
            visit = {"order": "visit", "mark": search.mark}
            with theirs, their_tensors, stream:
                holder.order(visit, [theirs.fileno(), their_tensors.fileno()])
                # Sent even if the other process is gone by now: it finds the channels closed.
                self._tell(search.asker, {"order": "found", "find": search.number}, (stream.fileno(), tensors.fileno()))
        except ChannelClosedError:
            self._tell(search.asker, {"order": "found", "find": search.number}, ())
        finally:
            tensors.abandon()

    def _tell(self, session: CallSearchTarget, message: dict[str, object], descriptors: Iterable[int]) -> None:
        with suppress(ChannelClosedError):
            session.order(message, descriptors)


def _digest(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) != call_names.SIZE:
        raise ValueError("a malformed name of a call")
    return value
