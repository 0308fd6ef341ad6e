"""Links in memory that break at any byte, with the rules and the frames of real ones."""

from __future__ import annotations

from collections.abc import Callable

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol import framing
from skyproxy.protocol.connection import Connection, State
from skyproxy.protocol.messages import CLIENT, WORKER, Goodbye, Hello, Message, Welcome
from skyproxy.settings import Settings
from skyproxy.transport.base import PayloadSink, Transport

LIMITS = Settings(max_in_flight_batches=6, max_batch_commands=2, max_loop_batch_commands=4)
EVERYTHING = 1 << 60


class Wire:
    """One direction of a link: a stream of bytes that arrives in order, as far as the network lets it through."""

    def __init__(self) -> None:
        self.is_cut = False
        self.under_way = bytearray()
        self.arrived = bytearray()

    def put(self, frame: bytes) -> None:
        self.under_way += len(frame).to_bytes(4, "big") + frame

    def let_through(self, count: int) -> None:
        self.arrived += self.under_way[:count]
        del self.under_way[:count]

    def take(self) -> bytes | None:
        """The next frame that has arrived whole."""
        end = 4 + int.from_bytes(self.arrived[:4], "big")
        if len(self.arrived) < max(end, 4):
            return None
        frame = bytes(self.arrived[4:end])
        del self.arrived[:end]
        return frame

    def cut(self, *, loses_what_arrived: bool) -> None:
        self.is_cut = True
        self.under_way.clear()
        if loses_what_arrived:
            self.arrived.clear()


class Link(Transport):
    """One end of a link, with the rules and frames of a real one; it never waits."""

    was_closed: bool = False

    def __init__(self, role: str, incoming: Wire, outgoing: Wire) -> None:
        self._connection = Connection(role)
        self._incoming, self._outgoing = incoming, outgoing
        self._is_over = False
        self._refused = 0

    @property
    def is_broken(self) -> bool:
        return self._is_over or self._outgoing.is_cut

    def send(self, message: Message) -> None:
        frame = b"".join(framing.encode(message, LIMITS.max_frame_bytes))
        if self._is_over or self._connection.state is State.ENDED:
            raise SessionLostError("this connection is closed")
        step = self._connection.prepare_send(message, len(frame))
        if self._outgoing.is_cut:
            self._refused += 1
            if step is not None and self._refused % 2:  # some systems notice while they send, others before
                step[0](step[1])
            raise SessionLostError("the connection broke")
        if step is not None:
            step[0](step[1])
            self._outgoing.put(frame)

    def post(self, message: Message) -> None:
        if not self.is_broken:
            self._connection.on_send(message)
            self.repeat(message)

    def repeat(self, message: Message) -> None:
        self._outgoing.put(b"".join(framing.encode(message, LIMITS.max_frame_bytes)))

    def recv(self, timeout_seconds: float | None = None) -> Message:
        if self._is_over:
            raise SessionLostError("this connection is closed")
        frame = self._incoming.take()
        if frame is None and self._incoming.is_cut:
            raise SessionLostError("the connection broke")
        if frame is None:
            raise TimeoutError
        try:
            message = framing.decode(bytearray(frame), LIMITS.max_frame_bytes)
            self._connection.on_receive(message, len(frame))
        except ProtocolError as error:
            self.close("protocol", str(error))
            raise
        if isinstance(message, Goodbye):
            self._is_over = True
            raise SessionLostError(f"the peer ended the connection: {message.reason}")
        return message

    def cut(self) -> bool:
        self._is_over = True
        for wire in (self._incoming, self._outgoing):
            wire.cut(loses_what_arrived=False)
        return True

    def close(self, code_name: str = "done", reason: str = "") -> None:
        self.was_closed = True
        if not self._is_over and self._connection.state is not State.ENDED:
            self._connection.on_send(Goodbye(code_name, reason))
            self.repeat(Goodbye(code_name, reason))
        self._is_over = True

    def set_sink(self, sink: PayloadSink | None) -> None:
        pass

    def keep_alive(self) -> None:
        pass

    def abandon(self) -> None:
        self._is_over = True

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def bytes_sent(self) -> int:
        return 0

    @property
    def bytes_received(self) -> int:
        return 0


def greeted(hello: Hello, welcome: Callable[[], Welcome]) -> tuple[Link, Link]:
    """Both ends of a new link, behind the greetings."""
    up, down = Wire(), Wire()
    client, worker = Link(CLIENT, down, up), Link(WORKER, up, down)
    answer = welcome()
    for message, sender, receiver in ((hello, client, worker), (answer, worker, client)):
        sender.connection.on_send(message)
        receiver.connection.on_receive(message)
    return client, worker
