"""Turns recorded commands into batches, in order, and hands out the slots of their results."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from skyproxy.errors import LimitExceededError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Buffer, Sequence
from skyproxy.settings import Settings


class SentBatch(NamedTuple):
    """What the client keeps of a batch until it is acknowledged."""

    batch: Batch
    lines: list[Any]
    byte_count: int


class Recorder:
    """The stream of commands of one session.

    The dispatcher appends to `stream` and `lines` itself: a call per op would cost a quarter of the op's budget. It
    must append a whole command with one `extend`, which the interpreter never splits between threads.

    Several threads may record. Ctrl-C may strike anywhere: what was recorded stays recorded, and a batch that was
    perhaps not sent is sent again under the same number, which the worker ignores if it had it.

    Attributes:
        stream: commands that are not sent yet.
        lines: for each op in `stream`, a code object and an instruction offset.
        dirty: slots whose tensors died since the last batch; the worker still holds their values.
        free: slots that hold nothing.
        widths: how many operands each op number that was defined takes.
        limit: the length of `stream` from which the dispatcher calls `flush`.
    """

    def __init__(self, send: Callable[[Batch], int], settings: Settings) -> None:
        """Args:
        send: hands a batch to the connection and returns its size in bytes.
        settings: limits.
        """
        self.stream: list[Any] = []
        self.lines: list[Any] = []
        self.dirty: list[int] = []
        self.free: list[int] = []
        self.widths: dict[int, int] = {}
        self.limit = settings.max_batch_commands * 4
        self.batches = 0
        self._sent_ops = 0
        self._buffers: list[Buffer] = []
        self._send = send
        self._max_in_flight = settings.max_in_flight_bytes
        self._max_in_flight_batches = settings.max_in_flight_batches
        self._max_handles = settings.max_handles
        self._slots = itertools.count(1)
        self._top = 0
        self._lock = threading.RLock()
        self._outgoing: tuple[Batch, list[Any]] | None = None
        self._sequence = 0
        self._sent: deque[SentBatch] = deque()
        self._in_flight = 0
        self._acked = threading.Condition(threading.Lock())
        self._ended: BaseException | None = None

    def new_slot(self) -> int:
        """A slot that was never used, or any free one.

        Raises:
            LimitExceededError: the session holds as many values as it may.
        """
        for pool in (self.dirty, self.free):
            try:
                return pool.pop()
            except IndexError:
                continue
        slot = next(self._slots)
        if slot > self._max_handles:
            raise LimitExceededError(
                f"this session holds {self._max_handles} values on its worker, which is its limit. Delete tensors that "
                "are no longer needed, or set SKYPROXY_MAX_HANDLES."
            )
        self._top = slot
        return slot

    @property
    def ops(self) -> int:
        """Ops recorded so far, as far as lines are recorded."""
        return self._sent_ops + len(self.lines) // 2

    @property
    def handles(self) -> int:
        """Values that the client holds on the worker."""
        return self._top - len(self.free) - len(self.dirty)

    def append(self, *command: Any) -> None:
        """Records one built-in command."""
        self.stream.extend(command)

    def append_with_buffer(self, buffer: Buffer, *command: Any) -> None:
        """Records a command that takes the batch's next buffer; the bytes must not change any more."""
        with self._lock:
            self._buffers.append(buffer)
            self.stream.extend(command)

    def flush(self) -> None:
        """Sends what was recorded. Waits while more than the allowed bytes are under way.

        Raises:
            SessionLostError: the worker is gone.
        """
        with self._lock:
            while self.stream or self.dirty or self._outgoing is not None:
                if self._outgoing is None:
                    self._cut()
                assert self._outgoing is not None
                batch, lines = self._outgoing
                if self._ended is not None:
                    raise self._ended
                self._wait_for_room()
                size = self._send(batch)
                self._outgoing = None
                self._keep(SentBatch(batch, lines, size))

    def _cut(self) -> None:
        # Slots are taken one by one: a pop is atomic, so no other thread can be given a slot that is released here.
        released: list[int] = []
        dirty = self.dirty
        while dirty:
            try:
                released.append(dirty.pop())
            except IndexError:
                break
        if released:
            self.stream.extend((commands.RELEASE, released))
        count, line_count, buffers = len(self.stream), len(self.lines), self._buffers
        batch = Batch(Sequence(self._sequence + 1), self.stream[:count], tuple(buffers))
        # No call may stand between these statements: Ctrl-C strikes after calls only, and would lose or repeat commands.
        # The lists themselves stay: the dispatcher has bound them.
        self._outgoing = (batch, self.lines[:line_count])
        self._buffers = []
        del self.stream[:count]
        del self.lines[:line_count]
        self._sent_ops += line_count // 2
        self._sequence += 1
        self.free += released

    def _keep(self, sent: SentBatch) -> None:
        self.batches += 1
        with self._acked:
            self._sent.append(sent)
            self._in_flight += sent.byte_count

    def _wait_for_room(self) -> None:
        with self._acked:
            while self._ended is None and (
                self._in_flight > self._max_in_flight or len(self._sent) > self._max_in_flight_batches
            ):
                self._acked.wait()

    def ack(self, sequence: int) -> None:
        """Everything up to this batch was executed; called by the reading thread."""
        with self._acked:
            while self._sent and self._sent[0].batch.sequence <= sequence:
                self._in_flight -= self._sent.popleft().byte_count
            self._acked.notify_all()

    def sent(self, sequence: int) -> SentBatch | None:
        """A batch that is not acknowledged yet."""
        with self._acked:
            return next((item for item in self._sent if item.batch.sequence == sequence), None)

    def end(self, error: BaseException) -> None:
        """Nothing more can be sent; wakes whoever waits for room."""
        with self._acked:
            self._ended = error
            self._acked.notify_all()

    def abandon(self, error: BaseException) -> None:
        """After a fork, in the child: fresh locks, for the old ones may be held by threads that do not exist here."""
        self._lock = threading.RLock()
        self._acked = threading.Condition(threading.Lock())
        self._ended = error

    def release_now(self, slot: int) -> None:
        """Forgets a large value at this very place of the stream, and takes its slot back."""
        self.stream.extend((commands.RELEASE, [slot]))
        self.free.append(slot)

