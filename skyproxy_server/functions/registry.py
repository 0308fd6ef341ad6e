"""The calls of this worker. They belong to no session: a client that lost its connection finds them again."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from skyproxy.protocol.call_messages import CallEvent
from skyproxy.relays.relays import RELAYS
from skyproxy.runtime.actors import ACTORS
from skyproxy.runtime.lifecycle import LIFECYCLE
from skyproxy.runtime.project_code import PROJECT_CODE
from skyproxy.settings import Settings
from skyproxy_server.activity import Activity
from skyproxy_server.functions.call import FunctionCall
from skyproxy_server.functions.call_threads import CallThreads
from skyproxy_server.functions.elsewhere import Elsewhere, RemoteListener
from skyproxy_server.functions.events import EventListener
from skyproxy_server.functions.isolated_call import Loan
from skyproxy_server.functions.known_functions import KnownFunction, KnownFunctions
from skyproxy_server.functions.nursery import Nursery
from skyproxy_server.global_modes import note_function
from skyproxy_server.inventory import DeviceRow

logger = logging.getLogger("skyproxy.server")

_LONGEST_NAME = 64
_REMEMBERED = 100_000
"""Names of calls that are gone, so that none is ever begun twice; and of sessions, which begin none."""
NEVER_BEGUN = "never begun"
_GONE = "gone"
_NO_FUNCTION = "no function"


class Calls:
    """All calls, by name.

    Names are secrets of the clients that made them; whoever knows one may attach to the call, from any session.

    Attributes:
        elsewhere: the calls of other processes, where sessions have processes of their own.
    """

    def __init__(self, devices: list[DeviceRow], settings: Settings, activity: Activity) -> None:
        self._devices = devices
        self._settings = settings
        self._activity = activity
        self._calls: OrderedDict[str, FunctionCall] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._running: dict[str, str] = {}
        """The calls whose functions run, and the sessions that began them."""
        self._ended_sessions: set[str] = set()
        """Those whose functions still run."""
        self._functions = KnownFunctions(settings.max_kept_function_bytes)
        self._nursery = Nursery(settings.max_isolated_calls) if Nursery.is_possible() else None
        self._threads = CallThreads()
        self.elsewhere: Elsewhere | None = None
        self._lock = threading.RLock()

    @property
    def running(self) -> int:
        """Functions that run now."""
        return len(self._running)

    def is_awaited(self, *, told: bool = False) -> bool:
        """Return whether somebody listens to a call here, or may come back for one.

        Args:
            told: whether a call counts that has ended, and whose caller was told so and has not thanked for it.
        """
        with self._lock:
            calls = list(self._calls.values())
        return any(call.events.attached or told or not call.events.told_end for call in calls)

    def is_listened_to(self) -> bool:
        """Return whether somebody listens to a call here."""
        with self._lock:
            calls = list(self._calls.values())
        return any(call.events.attached for call in calls)

    def names(self) -> list[str]:
        """Return the names of all calls that are kept here."""
        with self._lock:
            return list(self._calls)

    def running_names(self, session: str) -> list[tuple[str, float]]:
        """Return the names of the functions that run for a session, and when they began by `time.monotonic`."""
        with self._lock:
            calls = [self._calls.get(name) for name, owner in self._running.items() if owner == session]
        return [(call.name, call.began_at) for call in calls if call is not None]

    def use_tensors(self, session: str) -> bool:
        """Return whether a function that was given tensors of a session runs, or will."""
        with self._lock:
            calls = list(self._calls.values())
        return any(call.session == session and call.has_tensors and (call.running or call.is_active) for call in calls)

    @property
    def can_isolate(self) -> bool:
        """True if functions can have processes of their own."""
        return self._nursery is not None

    def _find_elsewhere(self, identity: str) -> Elsewhere | None:
        """Return who speaks for a call that runs in another process; None for one of ours, or of nobody."""
        elsewhere = self.elsewhere
        return elsewhere if elsewhere is not None and elsewhere.has(identity) else None

    def _get(self, identity: str) -> FunctionCall | None:
        with self._lock:
            return self._calls.get(identity)

    def _get_or_make(self, identity: str, session: str) -> FunctionCall | None:
        """The call of this name, a new one if there was none; None if it is gone."""
        with self._lock:
            call = self._calls.get(identity)
            if call is None and identity not in self._gone and session not in self._gone:
                call = self._calls[identity] = FunctionCall(
                    identity, session, self._devices, self._settings, self._activity, self._nursery, self._threads
                )
            return call

    # --- what connections ask for ------------------------------------------------------------------------------------

    def start(
        self, session: str, listener: EventListener, identity: str, task: dict[str, Any], pieces: Sequence[object]
    ) -> CallEvent | None:
        """Begins a call, unless it was begun before; what to answer if the function that it names is not here."""
        call = self._get_or_make(identity, session)
        if call is None:
            return None
        if not call.events.attached:
            call.events.attach(listener, 0)
        if call.has_payload:
            return None  # sent again, after a connection broke
        function: KnownFunction | None = None
        if (named := task.get("function")) is not None:
            digest, keeps_globals = named
            function = self._functions.find(session, digest, keeps_globals, pieces[1])
            if function is None:
                return CallEvent(identity, 0, "unknown", {"reason": _NO_FUNCTION}, [])
            pieces = [pieces[0], *pieces[2:]]
        with self._lock:
            count = len(self._calls)
            if count >= self._settings.max_calls:  # with those that have ended, and this one
                count = sum(other.is_active for other in self._calls.values())
            # Those too that still wait for their arguments, and those that run on although they were cancelled.
            count = max(self.running, count)
        if count >= self._settings.max_calls:
            text = f"this worker already runs {count} functions, its limit; SKYPROXY_MAX_CALLS raises it"
            call.fail({"type": "LimitExceededError", "message": text, "traceback": ""})
            return None
        call.start(task, pieces, partial(self._count, call), partial(self._on_end, call), function)
        return None

    def _count(self, call: FunctionCall, begins: bool) -> None:
        note_function(begins)
        with self._lock:
            if begins:
                self._running[call.identity] = call.session
            else:
                self._running.pop(call.identity, None)

    def _on_end(self, call: FunctionCall) -> None:
        self._make_room()
        self._leave_hooks_if_over(call.session)

    def attach(self, listener: RemoteListener, identity: str, number: int) -> CallEvent | None:
        """Sends a call's events to `listener` from now on; what to answer if there is no such call."""
        with self._lock:
            is_known = identity in self._calls or identity in self._gone
        if not is_known and self.elsewhere is not None and self.elsewhere.attach(listener, identity, number):
            return None  # whoever looks for it answers
        return self.attach_here(listener, identity, number)

    def attach_here(self, listener: EventListener, identity: str, number: int) -> CallEvent | None:
        """Do the same for calls of this process only."""
        call = self._get(identity)
        if call is None:
            reason = _GONE if identity in self._gone else NEVER_BEGUN
            return CallEvent(identity, 0, "unknown", {"reason": reason}, [])
        call.events.attach(listener, number)
        # Its arguments came with the operations, but its payload was lost.
        return None if call.has_payload else CallEvent(identity, 0, "unknown", {"reason": NEVER_BEGUN}, [])

    def detach(self, listener: RemoteListener) -> None:
        """A connection is gone. Its calls go on."""
        self.detach_here(listener)
        if self.elsewhere is not None:
            self.elsewhere.detach(listener)

    def detach_here(self, listener: EventListener) -> None:
        """Do the same for calls of this process only."""
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.events.detach(listener)

    def ack(self, identity: str, outputs: int, items: int) -> None:
        """The caller has seen that much."""
        if elsewhere := self._find_elsewhere(identity):
            elsewhere.ack(identity, outputs, items)
            return
        call = self._get(identity)
        if call is not None:
            call.events.ack(outputs, items)

    def cancel(self, session: str, identity: str, error: BaseException) -> None:
        """Ends a call at its caller's wish; also one whose payload is still coming."""
        if elsewhere := self._find_elsewhere(identity):
            elsewhere.cancel(identity, str(error), partial(self._cancel_here, session, identity, error))
        else:
            self._cancel_here(session, identity, error)

    def _cancel_here(self, session: str, identity: str, error: BaseException) -> None:
        call = self._get_or_make(identity, session)
        if call is not None:
            call.interrupt(error)

    # --- what operations ask for -------------------------------------------------------------------------------------

    def bind(
        self,
        session: str,
        identity: str,
        arguments: list[object],
        streams: Sequence[torch.cuda.Stream],
        loan: Loan | None = None,
    ) -> None:
        """Gives a call its tensor arguments."""
        call = self._get_or_make(identity, session)
        if call is not None:
            call.bind(arguments, streams, loan)

    def refuse(self, session: str, identity: str, words: dict[str, object]) -> None:
        """Ends a call whose arguments do not exist."""
        call = self._get_or_make(identity, session)
        if call is not None:
            call.fail(words)

    def take(self, identity: str, number: int) -> list[torch.Tensor] | None:
        """The tensors of one of a call's events; None if they are gone."""
        if elsewhere := self._find_elsewhere(identity):
            return elsewhere.take(identity, number)
        call = self._get(identity)
        return None if call is None else call.events.take(number)

    def forget(self, identity: str) -> None:
        """Nobody asks for this call any more; it is forgotten when it has ended, at once if it has."""
        if elsewhere := self._find_elsewhere(identity):
            elsewhere.forget(identity)
        with self._lock:
            call = self._calls.pop(identity, None)
            self._remember(identity)
        if call is not None:
            call.discard()

    def _remember(self, identity: str) -> None:
        if len(identity) > _LONGEST_NAME:
            return  # no client of ours: theirs are 32 characters long
        self._gone[identity] = None
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)

    # --- bounds ------------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Drops the oldest ended calls, so that what is kept stays within its bounds."""
        with self._lock:
            ended = [call for call in self._calls.values() if call.ended and not call.running]
        count, held = len(ended), sum(call.events.result_bytes for call in ended)
        for call in ended:
            if count <= self._settings.max_kept_calls and held <= self._settings.max_kept_result_bytes:
                return
            held -= call.events.result_bytes
            count -= 1
            if call.events.attached:
                call.events.shed()  # its caller has received the payload
            else:
                logger.warning("the result of call %s was dropped: too many are kept", call.identity[:8])
                self.forget(call.identity)

    def session_ended(self, session: str) -> None:
        """Its calls go on for a while; then those that nobody came back for are cancelled."""
        with self._lock:
            orphans = [call for call in self._calls.values() if call.session == session]
            # What its functions connection still has to say comes too late.
            self._remember(session)
            self._ended_sessions.add(session)
            self._functions.forget(session)
            if self._nursery is not None:
                self._nursery.session_ended(session)
            runs = session in self._running.values()
        if orphans or runs:
            timer = threading.Timer(self._settings.call_grace_seconds, self._expire, (session, orphans))
            timer.daemon = True
            timer.start()
        self._leave_hooks_if_over(session)

    def _expire(self, session: str, orphans: list[FunctionCall]) -> None:
        given_up = [call for call in orphans if not call.events.attached]
        for call in given_up:
            logger.info("call %s was abandoned: its client did not come back", call.identity[:8])
            self.forget(call.identity)
        with self._lock:
            if session not in self._ended_sessions or any(call.running for call in orphans if call not in given_up):
                return
            self._ended_sessions.discard(session)
        _abandon(session, [call.identity for call in given_up if call.running])

    def _leave_hooks_if_over(self, session: str) -> None:
        """Close what plugins hold open for a pool once its session has ended, and its functions have."""
        with self._lock:
            if session not in self._ended_sessions or session in self._running.values():
                return
            self._ended_sessions.discard(session)
        # On a thread of its own: a hook may take its time, and this one has a connection to close or a call to end.
        threading.Thread(target=_abandon, args=(session,), name="skyproxy-hooks", daemon=True).start()


def _abandon(session: str, *calls: list[str]) -> None:
    """Leave what a session holds in this process that will not come back."""
    LIFECYCLE.abandon(session, *calls)
    PROJECT_CODE.forget(session)
    ACTORS.forget(session)
    RELAYS.forget(session)
