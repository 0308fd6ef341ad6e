"""The rules of one connection: who may say what, when, and in which order. Decides only; moves no bytes."""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from skyproxy.errors import ProtocolError
from skyproxy.protocol.message_checks import ROLES, VALUE_CHECKS, check_range
from skyproxy.protocol.message_table import MESSAGES
from skyproxy.protocol.messages import (
    ANSWERS,
    BATCHES,
    CLIENT,
    OPERATIONS,
    WORKER,
    Ack,
    Chunk,
    Goodbye,
    Hello,
    Message,
    Received,
    Sequence,
    Welcome,
)


class State(enum.Enum):
    """The stage that a connection has reached."""

    NEW = "before its Hello"
    GREETED = "between Hello and Welcome"
    OPEN = "while open"
    ENDED = "after a Goodbye"


class CountedBatch(NamedTuple):
    """A batch that was handed over.

    Attributes:
        sequence: its number.
        total_bytes: the bytes of all batches up to and including it.
        message: the batch itself where we sent it, else None.
    """

    sequence: int
    total_bytes: int
    message: Message | None = None


class KeptAnswer(NamedTuple):
    """An answer that the client has not told to have.

    Attributes:
        number: counted from 1.
        total_bytes: the bytes of all answers up to and including it.
        message: the answer, in memory of its own.
    """

    number: int
    total_bytes: int
    message: Message | None


def _messages_of(role: str, kind: str) -> frozenset[type[Message]]:
    return frozenset(
        cls for cls in MESSAGES.values() if role in cls.senders and kind in cls.roles and cls not in (Hello, Welcome)
    )


_NOTHING: frozenset[type[Message]] = frozenset()
_ONLY_GOODBYE: frozenset[type[Message]] = frozenset({Goodbye})
_BEFORE_OPEN: dict[tuple[str, State], frozenset[type[Message]]] = {
    (CLIENT, State.NEW): frozenset({Hello, Goodbye}),
    (WORKER, State.NEW): _ONLY_GOODBYE,
    (CLIENT, State.GREETED): _ONLY_GOODBYE,
    (WORKER, State.GREETED): frozenset({Welcome, Goodbye}),
}
_WHILE_OPEN = {(role, kind): _messages_of(role, kind) for role in (CLIENT, WORKER) for kind in ROLES}


class Connection:
    """One side's view of one connection.

    A transport asks it before each message that it sends and after each that it receives. Sending and receiving may
    happen on two threads; each direction belongs to one thread at a time.

    Attributes:
        role: which side we are, `CLIENT` or `WORKER`.
        state: how far the connection has come.
        hello: the client's `Hello`, once it was sent or received.
        welcome: the worker's `Welcome`, likewise.
        goodbye: what the peer said last, or None.
        last_answer: on a worker, the newest answer that was sent.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.state = State.NEW
        self.hello: Hello | None = None
        self.welcome: Welcome | None = None
        self.goodbye: Goodbye | None = None
        self._peer = WORKER if role == CLIENT else CLIENT
        # From the last acknowledged batch to the newest, never empty. Because every figure below comes from this one
        # queue, appending to it is all that it takes to commit a batch, and an interrupt cannot leave them at odds.
        self._batches: deque[CountedBatch] = deque([CountedBatch(0, 0)])
        self._jumped_from = 0
        self.last_answer: Message | None = None
        self._keeps = False
        # The last entry that is not kept any more, and those behind it: as with the batches, never empty.
        self._answers: deque[KeptAnswer] = deque([KeptAnswer(0, 0, None)])
        self._may_send = _BEFORE_OPEN[role, State.NEW]
        self._may_receive = _BEFORE_OPEN[self._peer, State.NEW]

    @property
    def kind(self) -> str:
        """One of `ROLES`; the first until the Hello has said so."""
        return OPERATIONS if self.hello is None else self.hello.role

    @property
    def last_sequence(self) -> Sequence:
        """The newest batch that the client sent, or the worker received; 0 before the first."""
        return Sequence(self._batches[-1].sequence)

    @property
    def acked_sequence(self) -> Sequence:
        """The newest batch that the worker acknowledged; 0 before the first."""
        return Sequence(self._batches[0].sequence)

    @property
    def unacked_bytes(self) -> int:
        """The size of all batches that were not acknowledged yet."""
        return self._batches[-1].total_bytes - self._batches[0].total_bytes

    @property
    def answers(self) -> int:
        """The number of answers that the worker sent, or the client received."""
        return self._answers[-1].number

    @property
    def kept_bytes(self) -> int:
        """The size of all answers that are kept."""
        return self._answers[-1].total_bytes - self._answers[0].total_bytes

    # --- a session that outlives its connection ----------------------------------------------------------------------

    def keep_answers(self) -> None:
        """Keep what a worker answers until the client says that it came."""
        self._keeps = True

    def drop_answers(self) -> None:
        """Keep no answer any longer; the session can then not be taken up again."""
        self._keeps = False
        self._answers = deque([self._answers[-1]._replace(message=None)])

    def continue_from(self, before: Connection, received: int) -> list[Message]:
        """Take over where a connection of the same session broke; that one is not used any more.

        Args:
            before: the broken connection.
            received: how far the peer has come: the number of the last batch, or answer, that it has.

        Returns:
            What the peer has not received, to be sent first, in order.

        Raises:
            ProtocolError: the peer has more than was sent, or has less than it had told.
        """
        if self.state is not State.OPEN or self.kind != OPERATIONS or before.state is State.ENDED:
            raise ProtocolError("Only an operations connection that was never ended can be taken up again.")
        first, last = before._answers[0].number, before.answers
        if self.role == CLIENT:
            first, last = int(before.acked_sequence), int(before.last_sequence)
        if not first <= received <= last:
            raise ProtocolError(f"The {self._peer} continues after {received}, which must be {first} to {last}.")
        self._batches, self._answers = before._batches, before._answers
        self._keeps, self.last_answer, self._jumped_from = before._keeps, before.last_answer, before._jumped_from
        if self.role == CLIENT:
            return [batch.message for batch in self._batches if batch.sequence > received and batch.message is not None]
        self._forget_answers(received)
        return [answer.message for answer in self._answers if answer.number > received and answer.message is not None]

    def jump_to(self, sequence: int) -> None:
        """Go on as if `sequence` were the last batch, sent and acknowledged; in a session that continues another one.

        Both sides do so at the same place: behind the batch that brought the other session's state back.

        Raises:
            ProtocolError: this is not an open operations connection.
        """
        if self.state is not State.OPEN or self.kind != OPERATIONS or sequence < 0:
            raise ProtocolError(f"Batches of an open operations connection are counted, not from {sequence}.")
        batches = self._batches
        self._jumped_from = batches[-1].sequence  # whose Ack may still be on its way
        batches.append(CountedBatch(sequence, batches[-1].total_bytes))
        while len(batches) > 1:  # never empty, because other threads read it
            batches.popleft()

    def hold(self, message: Message, frame_bytes: int) -> None:
        """Take note of a client's batch that will leave on a later connection, for this one is broken.

        Raises:
            ProtocolError: it is neither the next batch nor the very one before.
        """
        newest = self._batches[-1]
        sequence: int = message.sequence  # type: ignore[attr-defined]
        if sequence == newest.sequence + 1:
            self._batches.append(CountedBatch(sequence, newest.total_bytes + frame_bytes, message))
        elif message is not newest.message:
            raise ProtocolError(f"Batch {sequence} cannot follow batch {newest.sequence}.")

    def kept_batches(self) -> dict[int, Message]:
        """Return the batches that were sent and not acknowledged, by their numbers."""
        return {batch.sequence: batch.message for batch in list(self._batches) if batch.message is not None}

    def _forget_answers(self, count: int) -> None:
        answers = self._answers
        while answers[0].number < count:
            answers.popleft()

    def _note_answer(self, entry: tuple[Message, int]) -> None:
        message, frame_bytes = entry
        newest = self._answers[-1]
        if not self._keeps:
            self._answers[-1] = KeptAnswer(newest.number + 1, newest.total_bytes, None)
            return
        self.last_answer = message
        if getattr(message, "buffers", ()):
            # The bytes are borrowed, perhaps from a tensor that the next operation changes.
            kept = tuple(bytes(item) for item in message.buffers)  # type: ignore[attr-defined]
            message = dataclasses.replace(message, buffers=kept)  # type: ignore[call-arg]
        self._answers.append(KeptAnswer(newest.number + 1, newest.total_bytes + frame_bytes, message))

    # --- one message -------------------------------------------------------------------------------------------------

    def on_send(self, message: Message, frame_bytes: int = 0) -> None:
        """Takes note of a message that is about to be sent.

        Raises:
            ProtocolError: it must not be sent; nothing has changed.
        """
        step = self.prepare_send(message, frame_bytes)
        if step is not None:
            commit, entry = step
            commit(entry)

    def prepare_send(self, message: Message, frame_bytes: int = 0) -> tuple[Callable[[Any], object], Any] | None:
        """Checks a message that is about to be sent, and leaves the last step to the caller.

        For a batch, that step is one built-in function. A transport can so run it back to back with its own, and no
        signal handler comes in between.

        Returns:
            A function and its argument; calling the one with the other takes note of the message. None for the very
            batch that was sent last: after an interrupt nobody can know whether it was, and so may send it again.

        Raises:
            ProtocolError: it must not be sent; nothing has changed.
        """
        kind = type(message)
        if kind not in self._may_send:
            raise self._refusal(self.role, kind)
        if kind in BATCHES:
            newest = self._batches[-1]
            sequence: int = message.sequence  # type: ignore[attr-defined]
            if sequence != newest.sequence + 1:
                if message is newest.message:
                    return None
                raise ProtocolError(f"Batch {sequence} cannot follow batch {newest.sequence}.")
            return self._batches.append, CountedBatch(sequence, newest.total_bytes + frame_bytes, message)
        if kind in ANSWERS:
            return self._note_answer, (message, frame_bytes)
        self._check(message)
        return self._note_sent, message

    def on_receive(self, message: Message, frame_bytes: int = 0) -> None:
        """Checks a message that came in, and takes note of it.

        Raises:
            ProtocolError: the peer must not send it, or not now.
        """
        kind = type(message)
        if kind not in self._may_receive:
            raise self._refusal(self._peer, kind)
        if kind in BATCHES:
            newest = self._batches[-1]
            sequence: int = message.sequence  # type: ignore[attr-defined]
            if sequence != newest.sequence + 1:
                raise ProtocolError(f"Batch {sequence} came after batch {newest.sequence}; none may be missing.")
            self._batches.append(CountedBatch(sequence, newest.total_bytes + frame_bytes))
            return
        if kind in ANSWERS:
            self._answers[-1] = KeptAnswer(self._answers[-1].number + 1, 0, None)
            return
        # A newer peer may give reasons that we do not know; its Goodbye is welcome all the same.
        if kind is not Goodbye:
            self._check(message)
        if isinstance(message, Ack):
            self._forget(message)
        elif isinstance(message, Received):
            self._forget_answers(message.count)
        elif isinstance(message, Goodbye):
            self.goodbye = message
            self.state = State.ENDED
            self._may_receive = _NOTHING
            self._may_send = _ONLY_GOODBYE
        else:
            self._greet(message)

    def check_payload(self, message: Message, payload_bytes: int) -> None:
        """Checks a message whose payload is still to come, so that none is written where it does not belong.

        Args:
            message: what came so far; its buffers are empty.
            payload_bytes: the size of the one buffer that will follow.

        Raises:
            ProtocolError: the peer must not send it, or the payload does not fit where it says that it belongs.
        """
        kind = type(message)
        if kind not in self._may_receive:
            raise self._refusal(self._peer, kind)
        if isinstance(message, Chunk):
            check_range(message, payload_bytes)

    def _note_sent(self, message: Message) -> None:
        if isinstance(message, Ack):
            self._forget(message)
        elif isinstance(message, Goodbye):
            self.state = State.ENDED
            self._may_send = _NOTHING
        else:
            self._greet(message)

    def _greet(self, message: Message) -> None:
        if isinstance(message, Hello):
            self.hello = message
            self.state = State.GREETED
            self._may_send = _BEFORE_OPEN[self.role, State.GREETED]
            self._may_receive = _BEFORE_OPEN[self._peer, State.GREETED]
        elif isinstance(message, Welcome):
            self.welcome = message
            self.state = State.OPEN
            self._may_send = _WHILE_OPEN[self.role, self.kind]
            self._may_receive = _WHILE_OPEN[self._peer, self.kind]

    def _forget(self, ack: Ack) -> None:
        batches = self._batches
        while batches[0].sequence < ack.sequence:
            batches.popleft()

    def _check(self, message: Message) -> None:
        kind = type(message)
        check = VALUE_CHECKS.get(kind)
        if check is not None:
            check(message)
        relation = _RELATIONS.get(kind)
        if relation is not None:
            relation(self, message)

    def _refusal(self, sender: str, kind: type[Message]) -> ProtocolError:
        return ProtocolError(f"The {sender} may not send {kind.__name__} {self.state.value} ({self.kind} connection).")


def _check_welcome(connection: Connection, message: Welcome) -> None:
    hello = connection.hello
    assert hello is not None, "a Welcome is legal only after a Hello"
    if message.version not in hello.versions:
        raise ProtocolError(f"Welcome chooses version {message.version}, and {hello.versions} were offered.")
    if hello.session and message.session != hello.session:
        raise ProtocolError(f"Welcome to session {message.session!r:.80}, and {hello.session!r:.80} was asked for.")


def _check_ack(connection: Connection, message: Ack) -> None:
    if 0 < message.sequence <= connection._jumped_from and message.sequence < connection.acked_sequence:
        return
    if not connection.acked_sequence <= message.sequence <= connection.last_sequence:
        raise ProtocolError(
            f"Ack {message.sequence} is not between the last one, {connection.acked_sequence}, "
            f"and the newest batch, {connection.last_sequence}."
        )


def _check_received(connection: Connection, message: Received) -> None:
    first = connection._answers[0].number if connection.role == WORKER else 0
    if not first <= message.count <= connection.answers:
        raise ProtocolError(f"Received {message.count} is not between the last one and answer {connection.answers}.")


_RELATIONS: dict[type[Message], Callable[[Connection, Any], None]] = {
    Welcome: _check_welcome,
    Ack: _check_ack,
    Received: _check_received,
}
"""Checks of a message against those before it; `VALUE_CHECKS` has those of a message by itself."""
