"""The functions connection of a session: payloads in, events out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.payloads.pieces import MAX_FORGOTTEN, Assembly, send_payload
from skyproxy.payloads.tensors import memory_for
from skyproxy.protocol.call_messages import CallAck, CallAttach, CallCancel, CallData, CallEvent, CallStart
from skyproxy.protocol.messages import Buffer, Message
from skyproxy.settings import Settings
from skyproxy.transport.base import Transport
from skyproxy_server import audit
from skyproxy_server.auth import client_of
from skyproxy_server.functions.events import OutgoingEvent
from skyproxy_server.functions.known_functions import DIGEST_BYTES
from skyproxy_server.functions.payload_file import is_payload_file, read_passed_payload, read_payload_file
from skyproxy_server.functions.registry import NEVER_BEGUN, Calls

logger = logging.getLogger("skyproxy.server")

_TASK = {"name": str, "results": str, "context": bytes, "tensors": list, "bases": list}
_TASK_KINDS = list(_TASK.values())
_OPTIONS = {"bound": bool, "quiet": bool, "forget": list}
_LONGEST_NAME = 64


class FunctionsConnection:
    """One connection; reads on the thread that calls `run`, and sends events on the threads of the calls."""

    def __init__(
        self,
        calls: Calls,
        session: str,
        transport: Transport,
        settings: Settings,
        bind: Callable[[str], object] | None = None,
    ) -> None:
        """Make the connection of one client; `run` reads it.

        Args:
            calls: all calls.
            session: the session's name.
            transport: the connection.
            settings: limits.
            bind: lets a call of the session begin that has no tensor arguments; None where that is not for this client.
        """
        self._calls = calls
        self._bind = bind
        self._session = session
        self._transport = transport
        self._settings = settings
        self._coming: dict[str, tuple[CallStart, Assembly[object]]] = {}

    def run(self) -> None:
        """Serves the connection until it ends. The calls go on."""
        handlers = {
            CallStart: self._on_start,
            CallData: self._on_data,
            CallAck: lambda message: self._calls.ack(message.call, message.outputs, message.items),
            CallCancel: self._on_cancel,
            CallAttach: self._on_attach,
        }
        try:
            while True:
                message = self._transport.recv()
                handlers[type(message)](message)  # type: ignore[operator]
        except SessionLostError:
            pass
        except ProtocolError as error:
            logger.warning("functions connection of session %s ended: %s", self._session[:8], error)
            self._transport.close("protocol", str(error))
        except Exception as error:
            logger.exception("functions connection of session %s ended by an internal error", self._session[:8])
            self._transport.close("protocol", f"internal error on the worker: {error!r:.500}")
        finally:
            self._calls.detach(self)

    def close(self) -> None:
        """Ends the connection."""
        self._transport.close("done", "the session ended, or made another functions connection")

    def _on_start(self, message: CallStart) -> None:
        task = message.task
        fits = list(map(type, map(task.get, _TASK))) == _TASK_KINDS
        fits = fits and _names_function(task, len(message.sizes)) and _has_known_options(task)
        fits = fits and (self._bind is not None or not task.get("bound"))
        file, passed = task.pop("file", None), task.pop("passed", None)
        fits = fits and (file is None or (is_payload_file(file) and not message.buffers))
        fits = fits and (passed is None or (_is_name(passed) and file is None and not message.buffers))
        fits = fits and type(task.get("isolate", False)) is bool
        task["timeout"], task["debug"] = (task.get(name) for name in ("timeout", "debug"))
        fits = fits and _is_time(task["timeout"]) and _is_time(task["debug"])
        if not fits or len(task["bases"]) >= len(message.sizes):
            raise ProtocolError(f"the task of call {message.call:.8} is malformed")
        if len(self._coming) >= self._settings.max_calls:
            raise ProtocolError(f"more than {self._settings.max_calls} payloads are on their way at once")
        allocate = memory_for(task, len(message.sizes))
        assembly = Assembly(message.sizes, message.buffers, allocate, self._settings.max_payload_bytes)
        self._coming[message.call] = message, assembly
        audit.note(client_of(self._transport), "call", session=self._session[:8], function=task["name"])
        if file is not None or passed is not None:
            try:
                if passed is not None:
                    read_passed_payload(self._session, passed, assembly, message.call, message.sizes)
                else:
                    read_payload_file(file, assembly, message.call, message.sizes)
            except OSError as error:
                logger.debug("the payload of call %.8s is to be sent: %s", message.call, error)
                del self._coming[message.call]
                self._transport.send(CallEvent(message.call, 0, "unknown", {"reason": NEVER_BEGUN}, []))
                return
        self._begin_if_complete(message.call)

    def _on_data(self, data: CallData) -> None:
        coming = self._coming.get(data.call)
        if coming is not None and data.number == 0:
            coming[1].add(data)
            self._begin_if_complete(data.call)

    def _begin_if_complete(self, call: str) -> None:
        message, assembly = self._coming[call]
        if assembly.complete:
            del self._coming[call]
            for ended in message.task.get("forget", ()):
                self._calls.forget(ended)
            answer = self._calls.start(self._session, self, call, message.task, assembly.pieces)
            if answer is not None:
                self._transport.send(answer)
            elif self._bind is not None and message.task.get("bound"):
                self._bind(call)

    def _on_cancel(self, message: CallCancel) -> None:
        self._coming.pop(message.call, None)
        # The caller knows that it is cancelled, and needs no event for that.
        self._calls.cancel(self._session, message.call, InterruptedError(message.reason))

    def _on_attach(self, message: CallAttach) -> None:
        answer = self._calls.attach(self, message.call, message.number)
        if answer is not None:
            self._transport.send(answer)

    def forward(self, message: Message) -> None:
        """Send what another process has to say of a call that it runs.

        Raises:
            SessionLostError: the connection is gone.
        """
        self._transport.send(message)

    def send_event(self, call: str, event: OutgoingEvent) -> None:
        """Sends an event, with its payload if it has one.

        Raises:
            SessionLostError: the connection is gone.
        """

        def head(sizes: list[int], buffers: tuple[Buffer, ...]) -> Message:
            return make(sizes=sizes, buffers=buffers)

        make = partial(CallEvent, call, event.number, event.kind, event.value)
        send_payload(
            self._transport.send,
            head,
            call,
            event.number,
            event.pieces or (),
            self._settings.chunk_bytes,
        )


def _has_known_options(task: dict[str, object]) -> bool:
    """Return whether what a task may have is what it must be."""
    for name, kind in _OPTIONS.items():
        if name in task and type(task[name]) is not kind:
            return False
    names: list[object] = task.get("forget", [])  # type: ignore[assignment]
    return len(names) <= MAX_FORGOTTEN and all(map(_is_name, names))


def _is_time(seconds: object) -> bool:
    """Return whether something can be waited for so long; None is for ever."""
    return seconds is None or (type(seconds) is float and seconds >= 0.0)


def _is_name(name: object) -> bool:
    return type(name) is str and len(name) <= _LONGEST_NAME


def _names_function(task: dict[str, object], count: int) -> bool:
    """Return whether a task names its function as it must, where it does: beside a piece for its code."""
    named = task.get("function")
    if named is None:
        return True
    if type(named) is not list or [type(part) for part in named] != [bytes, bool]:
        return False
    return len(named[0]) == DIGEST_BYTES and count - len(task["bases"]) >= 2  # type: ignore[arg-type]
