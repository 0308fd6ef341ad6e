"""The functions connection of a session, on the client's side: opened by the first call, and again when it is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from skyproxy.errors import ConnectError, ProtocolError, SessionLostError
from skyproxy.functions.call import Call, ReceivedEvent
from skyproxy.functions.function_code import Digests
from skyproxy.payloads.pieces import MAX_FORGOTTEN, Assembly, plain_memory, send_payload
from skyproxy.payloads.tensors import memory_for
from skyproxy.protocol import commands
from skyproxy.protocol.answers import checked_event
from skyproxy.protocol.call_messages import CallAck, CallAttach, CallCancel, CallData, CallEvent, CallStart
from skyproxy.protocol.messages import Buffer, Message
from skyproxy.session.attempts import attempt
from skyproxy.session.housekeeping import AuxiliaryConnection
from skyproxy.session.liveness import QuietConnection
from skyproxy.session.reading import ConnectionReader
from skyproxy.session.session import Session
from skyproxy.transport.base import Transport
from skyproxy.transport.shared_threads import Lane

logger = logging.getLogger("skyproxy")

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0
_MAX_ATTEMPTS = 3
_MAX_TO_FORGET = 256
_EVENT_BYTES = 64
"""The bytes that an event takes beside its text and payload."""
_QUESTION_BYTES = 4096
"""The bytes that a question counts, whatever it brings: the worker sends it without waiting for room."""
_NEVER_BEGUN = "never begun"
_NO_FUNCTION = "no function"


class FunctionChannel:
    """All calls of a session, and their connection.

    Three threads once it is open: one reads, one hands out what came (so that a slow `on_output` does not stop the
    reading), one sends short messages (so that no caller waits behind a large payload). Where the session shares
    threads with others, those do all of this.

    Args:
        session: whose calls these are.
        open_connection: makes a functions connection for it.
    """

    def __init__(self, session: Session, open_connection: Callable[[], Transport]) -> None:
        self.session = session
        self._open_connection = open_connection
        self._settings = session.settings
        self._calls: dict[str, Call] = {}
        self._coming: dict[str, tuple[CallEvent, Assembly[object]]] = {}
        self._transport: Transport | None = None
        self._functions = Digests()
        self._to_forget: deque[str] = deque()
        self._forgotten_before = 0
        """The number of ended calls in the queue when it was looked at last."""
        self._lost_bytes = [0, 0]
        self._heard: dict[str, Call] = {}
        self._to_deliver = Lane(self._deliver, self._ack_what_was_heard, session.threads)
        self._to_do = Lane(self._do, threads=session.threads)
        self._threads: list[threading.Thread] = []
        self._quiet = QuietConnection(self._settings.silence_seconds, time.monotonic())
        self._stop = threading.Event()
        self._opening = threading.Lock()
        session.at_end.append(self._on_session_end)

    # --- what calls ask for ------------------------------------------------------------------------------------------

    def start(self, call: Call) -> None:
        """Sends a call's payload; the call's events come from now on.

        Raises:
            SessionLostError: the worker is gone.
        """
        self._calls[call.id] = call
        self.session.check()
        self.session.wake()
        try:
            self._send_start(call)
        except SessionLostError:
            # The reading thread sees to it: it connects again, asks for the call, and sends it if it never arrived.
            logger.debug("skyproxy: call %s waits for the connection", call.id[:8])

    def _send_start(self, call: Call) -> None:
        payload, transport = call.payload, self._transport
        if payload is not None and transport is not None:
            head = partial(_start_message, call)
            code = payload.code
            # What is sent again brings everything: it was not there, or nobody knows how far it came.
            with_code = code is not None and (call.attempts > 0 or code.digest not in self._functions)
            if self._to_forget:
                call.task["forget"] = self._take_forgotten(MAX_FORGOTTEN)
            if call.file is not None:
                name, value = call.file.mark
                call.task.pop(name, None)
            if call.file is not None and not call.attempts:
                with_code = True
                call.task[name] = value
                transport.send(head(call.file.sizes, ()))
            else:
                pieces = payload.pieces(with_code=with_code)
                send_payload(transport.send, head, call.id, 0, pieces, self._settings.chunk_bytes)
            if code is not None and with_code:
                self._functions.add(
                    code.digest
                )  # not earlier: a call that overtakes it would name something that is not there

    def forget(self, call: Call) -> None:
        """The worker need not keep anything of a call any more. Safe in a destructor.

        The next call brings the word of it, where what the worker keeps is small; else it leaves with the operations.
        """
        if self.session.lost is not None:
            return
        if call.is_light and self.session.welcome.limits.get("direct_calls"):
            self._to_forget.append(call.id)
            if len(self._to_forget) <= _MAX_TO_FORGET:
                return
            self._emit_forgotten()
        else:
            self.session.recorder.emit((commands.DO, "forget_call", [call.id]))

    def _take_forgotten(self, count: int) -> list[str]:
        taken: list[str] = []
        try:
            while len(taken) < count:
                taken.append(self._to_forget.popleft())
        except IndexError:  # that were all
            pass
        return taken

    def _emit_forgotten(self) -> None:
        for identity in self._take_forgotten(len(self._to_forget)):
            self.session.recorder.emit((commands.DO, "forget_call", [identity]))

    def settle(self) -> None:
        """Have ended calls forgotten that no other call has brought the word of; called by `Housekeeping`."""
        waiting = len(self._to_forget)
        if waiting and waiting <= self._forgotten_before:
            self._emit_forgotten()
            waiting = 0
        self._forgotten_before = waiting

    @property
    def is_busy(self) -> bool:
        """True if calls are under way."""
        return bool(self._calls)

    def find(self, identity: str) -> Call | None:
        """The call of this name that this session waits for; None if it waits for none."""
        return self._calls.get(identity)

    def attach(self, call: Call) -> None:
        """Asks for the events of a call that was begun before, perhaps by another process."""
        self.open()
        self._calls[call.id] = call
        self._say(CallAttach(call.id, call.received))

    def cancel(self, call: Call) -> None:
        """Tells the worker that nobody waits for this call."""
        self._say(CallCancel(call.id, "the caller cancelled it"))

    def ack(self, call: Call, outputs: int, items: int) -> None:
        """Tells the worker how far the caller has come."""
        self._say(CallAck(call.id, outputs, items))

    def remove(self, call: Call) -> None:
        """The call has ended; nobody but its holder keeps it from now on."""
        self._calls.pop(call.id, None)

    def post(self, job: Callable[[], object]) -> None:
        """Has a short job done on the sending thread. Safe in destructors."""
        self._to_do.put(job)

    def _say(self, message: Message) -> None:
        self.post(partial(self._send, message))

    def _send(self, message: Message) -> None:
        if self._transport is not None:
            self._transport.send(message)

    # --- its connection ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Opens the connection, the first time.

        Raises:
            SessionLostError: the worker is gone.
            ConnectError: it does not take the connection.
        """
        with self._opening:
            self.session.check()
            if self._transport is not None:
                return
            self.session.wait_until_awake()
            self._use(attempt(self.session, self._open_connection))
            self.session.often += [self.settle, self._look_for_signs]
            handlers = self._handlers()
            reading = ConnectionReader(
                self._link,
                lambda message: handlers[type(message)](message),
                self._on_unreadable,
                self._stop.is_set,
            )
            if self.session.threads is not None:
                reading.share(self.session.threads)
                return
            bodies = {"calls": reading.run, "output": self._to_deliver.run, "acks": self._to_do.run}
            for name, body in bodies.items():
                thread = threading.Thread(target=body, name=f"skyproxy-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _use(self, transport: Transport) -> None:
        before, self._transport = self._transport, transport
        self._quiet = QuietConnection(self._settings.silence_seconds, time.monotonic())
        auxiliary = self.session.auxiliary
        if before is None:
            auxiliary.append(_Counted(transport, self._lost_bytes))
        else:
            self._lost_bytes[0] += before.bytes_sent
            self._lost_bytes[1] += before.bytes_received
            before.close()
            auxiliary[:] = [item for item in auxiliary if not isinstance(item, _Counted)]
            auxiliary.append(_Counted(transport, self._lost_bytes))
        if self._stop.is_set():
            # The session ended while this was being opened, and has closed only the one before.
            transport.close()

    def _look_for_signs(self) -> None:
        """Cut the connection where nothing comes on it, not even what the worker was asked for."""
        link = self._transport
        if link is None:
            return
        is_gone, is_to_be_asked = self._quiet.look(
            time.monotonic(), link.bytes_sent, link.bytes_received, is_awaited=self.is_busy
        )
        if is_gone:
            logger.debug("skyproxy: a silent connection for functions is cut")
            link.cut()
        elif is_to_be_asked:
            link.keep_alive()

    def _link(self) -> Transport:
        assert self._transport is not None
        return self._transport

    def _handlers(self) -> dict[type[Message], Callable[[Any], None]]:
        return {CallEvent: self._on_event, CallData: self._on_data}

    def _on_unreadable(self, error: Exception) -> bool:
        """Return whether there is a connection again, after this went wrong with the one before."""
        if not isinstance(error, SessionLostError):  # trying again would not help
            reason = f"the connection for functions ended: {error}"
            if not isinstance(error, ProtocolError):  # the last line of defence: whoever waits must learn of it
                logger.error("skyproxy: the thread that reads calls failed", exc_info=error)
                reason = f"an internal error on the client: {error!r}"
            self._fail_all(reason)
            self._calls.clear()
        return self._connect_again(error)

    def _connect_again(self, error: Exception) -> bool:
        """Return whether there is a connection again; every call is attached to it."""
        pause, until = _FIRST_PAUSE_SECONDS, time.monotonic() + self._settings.call_grace_seconds
        while not self._stop.is_set() and self.session.lost is None:
            if self.session.is_suspended:
                if self._calls:
                    self.session.wake()
                self._stop.wait(_LONGEST_PAUSE_SECONDS if not self._calls else _FIRST_PAUSE_SECONDS)
                until = time.monotonic() + self._settings.call_grace_seconds
                continue
            try:
                transport = self._open_connection()
            except (ConnectError, SessionLostError) as problem:
                if time.monotonic() > until:
                    self._fail_all(f"the connection for functions was lost ({error}) and did not come back ({problem})")
                    return False
                self._stop.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            self._use(transport)
            self._coming.clear()
            for call in list(self._calls.values()):
                self._say(CallAttach(call.id, call.received))
            logger.info("skyproxy: the connection for functions is back; %d calls continue", len(self._calls))
            return True
        return False

    # --- what comes --------------------------------------------------------------------------------------------------

    def _on_event(self, event: CallEvent) -> None:
        call = self._calls.get(event.call)
        if call is None or call.ahead.has_end or (event.number and event.number <= call.received):
            return
        value = checked_event(event.kind, event.value)
        if value is not event.value:
            event = replace(event, value=value)
        if event.kind == "unknown":
            self._on_unknown(call, str(event.value.get("reason")))
            return
        count = len(event.sizes)
        if "bases" in event.value and not _are_tables(event.value, count):
            raise ProtocolError(f"the worker sent a malformed event of {call.name}")
        allocate = memory_for(event.value, count) if "bases" in event.value else plain_memory
        assembly: Assembly[object] = Assembly(event.sizes, event.buffers, allocate, self._settings.max_payload_bytes)
        if assembly.complete:
            self._pass_on(call, event, assembly)
        else:
            self._coming[event.call] = event, assembly

    def _on_data(self, data: CallData) -> None:
        coming, call = self._coming.get(data.call), self._calls.get(data.call)
        if coming is None or call is None or coming[0].number != data.number:
            return
        event, assembly = coming
        assembly.add(data)
        if assembly.complete:
            del self._coming[data.call]
            self._pass_on(call, event, assembly)

    def _pass_on(self, call: Call, event: CallEvent, assembly: Assembly[object]) -> None:
        size = sum(event.sizes) + len(event.value.get("text", "")) + _EVENT_BYTES
        if event.kind == "ask":
            size = _QUESTION_BYTES
        call.ahead.note(event.kind, self._settings)
        call.received = event.number
        came = ReceivedEvent(event.kind, event.number, event.value, assembly.pieces, size)
        if event.kind in ("output", "ask") or call.ahead.is_queued:
            call.ahead.queued += size
            self._to_deliver.put((call, came))
        else:
            # Nothing of it can take long: no thread need be woken for that.
            self._deliver_one(call, came)

    @staticmethod
    def _deliver_one(call: Call, came: ReceivedEvent) -> None:
        try:
            call.deliver(came)
        except Exception:
            logger.exception("skyproxy: an event of %s could not be delivered", call.name)

    def _on_unknown(self, call: Call, reason: str) -> None:
        if reason == _NO_FUNCTION and call.payload is not None and call.payload.code is not None:
            # It has made room, or knows nothing of what a broken connection was sent.
            self._functions.drop(call.payload.code.digest)
            reason = _NEVER_BEGUN
        if reason == _NEVER_BEGUN and call.payload is not None and not call.received:
            call.attempts += 1
            if call.attempts <= _MAX_ATTEMPTS:
                self.post(partial(self._send_start, call))
                return
            text = (
                f"the connection for functions broke {call.attempts} times while {call.name} was sent. It never began."
            )
            self._to_deliver.put((call, ReceivedEvent("error", 0, {"exception": SessionLostError(text)})))
            return
        text = (
            f"the worker has no call {call.id[:8]}...: it has ended and its result was taken or dropped, or it never "
            "existed"
        )
        self._to_deliver.put((call, ReceivedEvent("error", 0, {"exception": LookupError(text)})))

    def _deliver(self, entry: tuple[Call, ReceivedEvent]) -> None:
        call, came = entry
        self._deliver_one(call, came)
        call.ahead.delivered += came.size
        self._heard[call.id] = call

    def _ack_what_was_heard(self) -> None:
        """Tell the worker that all output was shown, also where that is less than is told otherwise."""
        while self._heard:
            self._heard.popitem()[1].ack_output()

    @staticmethod
    def _do(job: Callable[[], object]) -> None:
        try:
            job()
        except SessionLostError as error:
            logger.debug("skyproxy: not sent on the functions connection: %s", error)
        except Exception:
            logger.exception("skyproxy: a job of the functions connection failed")

    # --- its end -----------------------------------------------------------------------------------------------------

    def _fail_all(self, reason: str, process_ended: bool = False) -> None:
        for call in list(self._calls.values()):
            # A session's own process, or the whole worker: the worker reports the one, whoever launched it the other.
            is_over = process_ended or "node was closed" in reason or "its process on the worker" in reason
            again = "" if is_over else f" The call may still run: node.reattach({call.id!r}) finds it."
            error = SessionLostError(reason if is_over else f"{reason.rstrip('.')}.{again}")
            error.process_ended = process_ended or "its process on the worker" in reason
            self._to_deliver.put((call, ReceivedEvent("error", 0, {"exception": error})))

    def _on_session_end(self, error: SessionLostError) -> None:
        self._stop.set()
        self._fail_all(str(error), error.process_ended)
        self._to_deliver.put(None)
        self._to_do.put(None)
        if self._transport is not None:
            self._transport.close()


def _are_tables(value: dict[str, object], count: int) -> bool:
    """Return whether an event says as it must what its pieces are."""
    rows, bases = value.get("tensors"), value["bases"]
    if type(rows) is not list or type(bases) is not list or len(bases) >= count:
        return False
    if rows and not all(type(row) is list and len(row) >= 5 for row in rows):
        return False
    return not bases or all(type(base) is int for base in bases)


def _start_message(call: Call, sizes: list[int], buffers: tuple[Buffer, ...]) -> Message:
    return CallStart(call.id, call.task, sizes, buffers)


class _Counted(AuxiliaryConnection):
    """A connection whose figures include those of the connections that it replaced."""

    def __init__(self, transport: Transport, before: list[int]) -> None:
        self._transport = transport
        self._before = before

    def keep_alive(self) -> None:
        self._transport.keep_alive()

    def cut(self) -> bool:
        return self._transport.cut()

    def abandon(self) -> None:
        self._transport.abandon()

    @property
    def bytes_sent(self) -> int:
        return self._before[0] + self._transport.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._before[1] + self._transport.bytes_received
