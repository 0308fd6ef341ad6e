"""Calls of other sessions of the same client, seen from a session's process: `Visits` has theirs, `Visitor` shows ours.

Two processes are connected by the supervisor. One speaks the protocol of a functions connection for one call, as a
client would; the other answers as a worker. Tensors of results travel beside it, in memory that is handed over.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence

import torch

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol.call_messages import CallAck, CallAttach, CallCancel, CallData, CallEvent
from skyproxy.protocol.connection import Connection
from skyproxy.protocol.messages import CLIENT, FUNCTIONS, WORKER, Hello, Message, Welcome
from skyproxy.settings import Settings
from skyproxy.transport.stream import PlainStream
from skyproxy.transport.websocket_transport import WebSocketTransport
from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.functions.connection import FunctionsConnection
from skyproxy_server.functions.elsewhere import RemoteListener
from skyproxy_server.functions.registry import Calls
from skyproxy_server.isolation import call_names
from skyproxy_server.isolation.call_search import MAX_SEARCHES

logger = logging.getLogger("skyproxy.server")

_TENSORS_SECONDS = 120.0
_GONE = "the process of the session that ran this call has ended, and the call with it"


def _transport(sock: socket.socket, role: str, settings: Settings) -> WebSocketTransport:
    """A functions connection between two of our processes, as it is after its greeting."""
    connection = Connection(role)
    hello, welcome = Hello([1], FUNCTIONS, "a call", {}), Welcome(1, "a call", {}, [], {})
    if role == CLIENT:
        connection.on_send(hello)
        connection.on_receive(welcome)
    else:
        connection.on_receive(hello)
        connection.on_send(welcome)
    return WebSocketTransport(PlainStream(sock), role, settings, b"", connection)


class _Visit:
    """One call of another process.

    Attributes:
        listener: the client's connection; None while it has none.
        transport: to the process that has the call; None until that is found, and where it is not.
        number: events behind this one are wanted.
        is_over: whether the client was told the end, or wants to know no more.
        cancelled: why the client gave it up while it was looked for, and what to do if it is not found.
        is_parted: whether the client's connection has ended; another one makes another visit.
    """

    def __init__(self, identity: str, listener: RemoteListener, number: int) -> None:
        self.identity = identity
        self.listener: RemoteListener | None = listener
        self.number = number
        self.is_over = False
        self.is_parted = False
        self.cancelled: tuple[str, Callable[[], None]] | None = None
        self.transport: WebSocketTransport | None = None
        self.tensors: ControlChannel | None = None

    def say(self, message: Message) -> None:
        """Tell the other process, if there is one."""
        if self.transport is not None:
            try:
                self.transport.send(message)
            except SessionLostError as error:
                logger.debug("call %s: its process is gone: %s", self.identity[:8], error)

    def tell(self, message: Message) -> None:
        """Tell the client, if it is there."""
        listener = self.listener
        if listener is not None:
            try:
                listener.forward(message)
            except SessionLostError:
                self.listener = None

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
        if self.tensors is not None:
            self.tensors.close()


class Visits:
    """The calls of other processes that clients of this one asked for.

    Args:
        calls: those of this process.
        ask: sends a message to the supervisor.
        settings: limits.
    """

    def __init__(self, calls: Calls, ask: Callable[[dict[str, object]], None], settings: Settings) -> None:
        self._calls = calls
        self._ask = ask
        self._settings = settings
        self._visits: dict[str, _Visit] = {}
        self._searches: dict[int, _Visit] = {}
        self._count = 0
        self._lock = threading.Lock()

    # --- looking for a call --------------------------------------------------------------------------------------

    def has(self, identity: str) -> bool:
        """Return whether this call is spoken for here, or looked for."""
        return identity in self._visits

    def attach(self, listener: RemoteListener, identity: str, number: int) -> bool:
        """Look for a call, and send its events behind `number` to `listener`; False where nobody can look now."""
        with self._lock:
            visit = self._visits.get(identity)
            if visit is None or visit.is_parted:
                return self._begin_search(_Visit(identity, listener, number), visit)
            visit.listener, visit.number = listener, number
        visit.say(CallAttach(identity, number))
        return True

    def _begin_search(self, visit: _Visit, before: _Visit | None) -> bool:
        if len(self._searches) >= MAX_SEARCHES or len(self._visits) >= self._settings.max_calls:
            return False
        seal = call_names.seal(call_names.proof(visit.identity))
        self._count += 1
        self._searches[self._count] = visit
        try:
            self._ask({"find": self._count, "mark": call_names.mark(visit.identity), "seal": seal})
        except ChannelClosedError:
            del self._searches[self._count]
            return False
        self._visits[visit.identity] = visit
        if before is not None and before.tensors is not None:
            before.tensors.close()
        return True

    def found(self, count: int, descriptors: Sequence[int]) -> None:
        """Take the supervisor's answer: two descriptors, or none where nobody has the call."""
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        with self._lock:
            visit = self._searches.pop(count, None)
            if visit is not None and sockets:
                visit.transport = _transport(sockets[0], CLIENT, self._settings)
                visit.tensors = ControlChannel(sockets[1])
            elif visit is not None:
                self._drop(visit)
        if visit is None:
            for sock in sockets:
                sock.close()
        else:
            # If the client has forgotten the call meanwhile, the call's process forgets it, too.
            target = self._report_missing if not sockets else _part if visit.is_over else self._carry
            threading.Thread(target=target, args=(visit,), name="skyproxy-visit", daemon=True).start()

    def _report_missing(self, visit: _Visit) -> None:
        if visit.cancelled is not None:
            visit.cancelled[1]()
        # It may be a call of this process that has begun in the meantime.
        if visit.listener is not None:
            answer = self._calls.attach_here(visit.listener, visit.identity, visit.number)
            if answer is not None:
                visit.tell(answer)

    def _drop(self, visit: _Visit) -> bool:
        """Let go of a visit; False where another one has taken its place already."""
        if self._visits.get(visit.identity) is not visit:
            return False
        del self._visits[visit.identity]
        return True

    # --- what it says --------------------------------------------------------------------------------------------

    def _carry(self, visit: _Visit) -> None:
        transport, last = visit.transport, visit.number
        assert transport is not None
        if visit.is_parted:
            transport.close()
        visit.say(CallAttach(visit.identity, visit.number))
        if visit.cancelled is not None:
            visit.say(CallCancel(visit.identity, visit.cancelled[0]))
        try:
            while True:
                message = transport.recv()
                if not isinstance(message, CallEvent | CallData) or message.call != visit.identity:
                    raise ProtocolError("the process that has a call spoke of another one")
                if isinstance(message, CallEvent):
                    last = max(last, message.number)
                    visit.is_over = visit.is_over or message.kind in ("result", "error", "unknown")
                visit.tell(message)
        except (SessionLostError, ProtocolError) as error:
            logger.debug("call %s of another session: %s", visit.identity[:8], error)
        finally:
            transport.close()
            # Where only the client's connection is gone, its operations may still take tensors.
            if not visit.is_parted:
                with self._lock:
                    is_kept = self._drop(visit)
                if is_kept and not visit.is_over:
                    words = {"type": "SessionLostError", "message": _GONE, "traceback": ""}
                    visit.tell(CallEvent(visit.identity, last + 1, "error", words, []))
                if visit.tensors is not None:
                    visit.tensors.close()

    # --- what the client says ------------------------------------------------------------------------------------

    def detach(self, listener: RemoteListener) -> None:
        """A connection is gone: its calls go on, with nobody who listens until it comes back."""
        with self._lock:
            visits = [visit for visit in self._visits.values() if visit.listener is listener]
            for visit in visits:
                visit.listener, visit.is_parted = None, True
        for visit in visits:
            if visit.transport is not None:  # else the process that has the call would wait for acks forever
                threading.Thread(target=visit.transport.close, name="skyproxy-visit-end", daemon=True).start()

    def ack(self, identity: str, outputs: int, items: int) -> None:
        """The caller has seen that much."""
        self._say(identity, CallAck(identity, outputs, items))

    def cancel(self, identity: str, reason: str, or_else: Callable[[], None]) -> None:
        """The caller gives a call up; `or_else` is called if it turns out to be nowhere else."""
        with self._lock:
            visit = self._visits.get(identity)
            if visit is not None and visit.transport is None:
                visit.cancelled = reason, or_else  # told or cancelled once we know where it is
                return
        if visit is not None:
            visit.say(CallCancel(identity, reason))
        else:
            or_else()

    def _say(self, identity: str, message: Message) -> None:
        visit = self._visits.get(identity)
        if visit is not None:
            visit.say(message)

    def take(self, identity: str, number: int) -> list[torch.Tensor] | None:
        """Fetch the tensors of one of a call's events; None if they are gone."""
        visit = self._visits.get(identity)
        if visit is None or visit.tensors is None:
            return None
        try:
            visit.tensors.send({"take": number})
            answer, descriptors = visit.tensors.receive(_TENSORS_SECONDS)
        except (ChannelClosedError, TimeoutError) as error:
            logger.warning("tensors of call %s did not come: %s", identity[:8], error)
            return None
        if not answer.get("taken") or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        with open(descriptors[0], "rb") as file:
            # Plain tensors only: the other process has run another program's code.
            taken = torch.load(file, weights_only=True)
        if not isinstance(taken, list) or not all(isinstance(tensor, torch.Tensor) for tensor in taken):
            return None
        return taken

    def forget(self, identity: str) -> None:
        """The caller has all that it wants of a call."""
        with self._lock:
            visit = self._visits.pop(identity, None)
            if visit is not None:
                visit.is_over = True
        if visit is not None:
            threading.Thread(target=_part, args=(visit,), name="skyproxy-visit-end", daemon=True).start()

    def abandon(self) -> None:
        """In a forked child: let go of all connections, which are the parent's."""
        for visit in list(self._visits.values()):
            if visit.transport is not None:
                visit.transport.abandon()
            if visit.tensors is not None:
                visit.tensors.abandon()


def _part(visit: _Visit) -> None:
    """Have the other process forget a call as well, and close what leads there."""
    if visit.tensors is not None:
        try:
            visit.tensors.send({"forget": True}, wait=False)
        except ChannelClosedError:
            pass
    visit.close()


class Visitor:
    """Another process of the same client that has asked for one of our calls.

    Args:
        calls: ours.
        mark: which call it asked for.
        descriptors: of the connection, and of the channel of tensors.
        settings: limits.
    """

    def __init__(self, calls: Calls, mark: bytes, descriptors: Sequence[int], settings: Settings) -> None:
        self._calls = calls
        self._mark = mark
        self._transport = _transport(socket.socket(fileno=descriptors[0]), WORKER, settings)
        self._tensors = ControlChannel(socket.socket(fileno=descriptors[1]))
        self._connection = FunctionsConnection(calls, "a call", self._transport, settings)

    def run(self) -> None:
        """Answer until the other process has left."""
        giving = threading.Thread(target=self._give, name="skyproxy-visitor-tensors", daemon=True)
        giving.start()
        try:
            while True:
                message = self._transport.recv()
                if isinstance(message, CallAttach | CallAck | CallCancel) and self._is_meant(message.call):
                    self._on_message(message)
                else:
                    raise ProtocolError("it asked for more than one call")
        except (SessionLostError, ProtocolError) as error:
            logger.debug("a visitor left: %s", error)
        finally:
            # Tensors are given until the other process closes their channel.
            self._calls.detach_here(self._connection)
            self._transport.close()
            giving.join()

    def _is_meant(self, identity: str) -> bool:
        return call_names.mark(identity) == self._mark

    def _on_message(self, message: CallAttach | CallAck | CallCancel) -> None:
        if isinstance(message, CallAttach):
            answer = self._calls.attach_here(self._connection, message.call, message.number)
            if answer is not None:
                self._transport.send(answer)
        elif isinstance(message, CallAck):
            self._calls.ack(message.call, message.outputs, message.items)
        else:
            self._calls.cancel("", message.call, InterruptedError(message.reason))

    def _give(self) -> None:
        """Hand over tensors, each once."""
        try:
            while True:
                wanted, descriptors = self._tensors.receive()
                for descriptor in descriptors:
                    os.close(descriptor)
                identity = next(filter(self._is_meant, self._calls.names()), "")
                if wanted.get("forget"):
                    self._calls.forget(identity)
                    return
                taken = self._calls.take(identity, int(wanted.get("take", 0))) if identity else None
                if taken is None:
                    self._tensors.send({"taken": False})
                    continue
                memory = _memory_file(taken)
                try:
                    self._tensors.send({"taken": True}, [memory])
                finally:
                    os.close(memory)
        except (ChannelClosedError, TypeError, ValueError) as error:
            logger.debug("a visitor takes no more tensors: %s", error)
        except Exception:
            logger.exception("tensors of a call could not be given to another session")
        finally:
            self._tensors.close()

    def abandon(self) -> None:
        """In a forked child: let go of the connections, which are the parent's."""
        self._transport.abandon()
        self._tensors.abandon()


def _memory_file(tensors: list[torch.Tensor]) -> int:
    """Return a file in memory that holds these tensors, with what they share; it belongs to the caller."""
    memory = os.memfd_create("skyproxy-tensors")
    with torch.no_grad(), open(os.dup(memory), "wb") as file:
        torch.save([tensor.detach() for tensor in tensors], file)
    os.lseek(memory, 0, os.SEEK_SET)
    return memory
