"""Turns recorded commands into batches, in order, and hands out the slots of their results."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import filterfalse
from typing import Any, NamedTuple

from skyproxy.errors import LimitExceededError, SessionLostError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Buffer, NamedBatch, Repeat, Sequence
from skyproxy.session.cutting import find_cut
from skyproxy.session.repeats import Repeats
from skyproxy.session.slots import MANY_FREE, SLOTS_AHEAD, SlotOwner, slot_dropper, without_top
from skyproxy.session.waiters import Waiter
from skyproxy.settings import Settings

_CUT_AT_BYTES = 1 << 20
"""Bytes of small uploads from which a batch is sent without being asked for; far below what a frame may have."""
_REMEMBERED = 8
"""Batches that are remembered once they are acknowledged: kernels of GPUs run, and fail, later than that."""
_ITEMS_A_COMMAND = 4
"""Items of the stream that a command takes, as a rule."""


class RecordedBatch(NamedTuple):
    """The part of a batch that the client keeps until it is acknowledged."""

    sequence: Sequence
    stream: list[Any]
    lines: list[Any]


class Recorder:
    """The stream of commands of one session.

    Whoever records calls `emit`, `emit_line`, `take_slot` and `drop_slot`. Only the hot path, in
    `tensor/dispatch/hot_path.py`, knows the lists themselves: calls would cost it a quarter of an op's budget. A whole
    command is appended with one `extend`, which the interpreter never splits between threads.

    Several threads may record. Ctrl-C may strike anywhere: what was recorded stays recorded, and a batch that was
    perhaps not sent is sent again under the same number, which the worker ignores if it had it.

    Attributes:
        stream: commands that are not sent yet.
        lines: for each op in `stream`, a code object and an instruction offset.
        free: slots that no tensor has, as a heap: the smallest is given out first. So what a loop records depends on
            which tensors live and on nothing else, and its batches come again.
        dirty: slots whose tensors died since the last batch, whether they were given out again or not.
        held: for each slot, whether a tensor has it; what is in `free` is not held. With it, finding which of the dirty
            slots are still free takes as long as there are dirty ones, however many are free.
        widths: how many operands each command takes; ops are added as they are defined.
        repeats: recognises the batches that come again.
        limit: the length of `stream` from which it is time to call `send_some`.
        emit: puts one whole command into the stream: `emit((number, *operands))`. It is the list's own `extend`, so it
            never waits and nothing comes between: destructors may call it, and what must not be torn by Ctrl-C.
        emit_line: notes for the op that was just emitted a code object and an instruction offset, in the same way.
        drop_slot: takes a slot back whose value the worker still holds; for destructors too, however late.
        wait_for_outcome: called after each op; None where ops are not waited for.
        wait_for_news: waits for a waiter, where the worker has as much to do as it may have.
        last_batch: the last batch that left, acknowledged or not; None before the first.
        on_sent: called after batches have left, on the thread that records; a batch may be sent then.
        hidden_writes: how often something was recorded that may write to values which it does not name as operands of
            an op: a replay, a compiled graph, a function.
    """

    # Names of this module may be gone when the last tensors die.
    _release_command = commands.RELEASE
    _push = staticmethod(heappush)

    def __init__(
        self,
        send: Callable[[Batch | NamedBatch | Repeat], object],
        unacked: Callable[[], tuple[int, int]],
        settings: Settings,
        wait_for_outcome: Callable[[], object] | None = None,
    ) -> None:
        """Begin an empty stream.

        Args:
            send: hands a batch to the connection; doing so twice with the last one changes nothing.
            unacked: how many batches, and how many bytes of them, were sent and not acknowledged.
            settings: limits.
            wait_for_outcome: called after each op where `settings.launch_blocking` is on.
        """
        self.stream: list[Any] = []
        self.lines: list[Any] = []
        self.dirty: list[int] = []
        self.free: list[int] = []
        self.held: list[bool] = [True] * SLOTS_AHEAD
        self.widths = commands.width_table()
        self.emit: Callable[[Iterable[object]], None] = self.stream.extend
        self.emit_line: Callable[[Iterable[object]], None] = self.lines.extend
        self.drop_slot = slot_dropper(self.free, self.dirty, self.held)
        self.hidden_writes = 0
        self._first_limit = settings.max_batch_commands * _ITEMS_A_COMMAND
        self._last_limit = max(settings.max_loop_batch_commands * _ITEMS_A_COMMAND, self._first_limit)
        # With a negative limit, every op finds that it is time to send.
        self.wait_for_outcome = wait_for_outcome if settings.launch_blocking else None
        if self.wait_for_outcome is not None:
            self._first_limit = self._last_limit = -1
        self.limit = self._first_limit
        self.repeats = Repeats(self.widths)
        self._sent_ops = 0
        self._buffers: list[Buffer] = []
        self._buffered_bytes = 0
        self._taken: list[int] = []
        self._died = 0
        self._send = send
        self._unacked = unacked
        self._max_in_flight = settings.max_in_flight_bytes
        self._max_in_flight_batches = settings.max_in_flight_batches
        self._max_handles = settings.max_handles
        self._top = 0
        self._lock = threading.RLock()
        self._outgoing: tuple[Batch | NamedBatch | Repeat, RecordedBatch] | None = None
        self._sequence = 0
        # Senders add to it, the reading thread takes from it. There is no lock, because Ctrl-C could leave it held.
        self._sent: deque[RecordedBatch] = deque()
        self.last_batch: RecordedBatch | None = None
        self._acked: deque[RecordedBatch] = deque(maxlen=_REMEMBERED)
        self._waiting: deque[Waiter] = deque()
        self.wait_for_news: Callable[[Waiter], object] = Waiter.wait
        self.on_sent: Callable[[], object] | None = None
        self._ended: SessionLostError | None = None

    @property
    def live_slots(self) -> int:
        """The number of tensors and other handles that the program has on the worker."""
        return self.held[1 : self._top + 1].count(True)

    def take_slot(self, handle: SlotOwner) -> None:
        """Set `handle.slot` to any free slot, or to one that was never used.

        Raises:
            LimitExceededError: the session holds as many values as it may.
        """
        # No call may end between these statements: Ctrl-C strikes, and threads switch, only after calls.
        free = self.free
        if free:
            handle.slot = slot = free[0]
            self.held[slot] = True
            heappop(free)
        else:
            self.take_unused_slot(handle)

    def take_unused_slot(self, handle: SlotOwner) -> None:
        """Set `handle.slot` to one that was never used.

        Raises:
            LimitExceededError: the session holds as many values as it may.
        """
        if self._top >= self._max_handles:
            raise LimitExceededError(
                f"this session holds {self._max_handles} values on its worker, which is its limit. Delete tensors that "
                "are no longer needed, or set SKYPROXY_MAX_HANDLES."
            )
        if len(self.held) <= self._top + SLOTS_AHEAD:
            self.held.extend([True] * len(self.held))
        handle.slot = self._top = slot = self._top + 1
        self.held[slot] = True

    def take_free_slots(self, count: int) -> list[int]:
        """Take so many free slots; none if there are fewer. Call it shielded: Ctrl-C would lose what was taken."""
        free = self.free
        slots: list[int] = []
        try:
            for _ in range(count):  # as in `take_slot`: what another thread releases must not be a slot that is taken
                slot = free[0]
                self.held[slot] = True
                heappop(free)
                slots.append(slot)
        except IndexError:
            for slot in slots:
                self.held[slot] = False
                heappush(free, slot)
            return []
        return slots

    @property
    def unsent(self) -> int:
        """Items of the stream that are not sent yet."""
        return len(self.stream)

    @property
    def unsent_lines(self) -> int:
        """Items of the lines that are not sent yet, two for each op."""
        return len(self.lines)

    @property
    def has_dropped(self) -> bool:
        """True if slots were dropped since the last batch."""
        return bool(self.dirty)

    def recorded(self, start: int, end: int, first_line: int) -> tuple[list[Any], list[Any]]:
        """Return what was recorded between two places of the unsent stream, and the lines from a place on."""
        return self.stream[start:end], self.lines[first_line:]

    @property
    def ops(self) -> int:
        """Ops recorded so far, as far as lines are recorded."""
        return self._sent_ops + len(self.lines) // 2

    @property
    def batches(self) -> int:
        """Batches that were cut so far."""
        return self._sequence

    def live_among(self, slots: Iterable[int]) -> list[int]:
        """Return those of some slots that a tensor has now."""
        return list(filter(self.held.__getitem__, slots))

    def append(self, *command: object) -> None:
        """Records one built-in command; sends, if it is time."""
        self.stream.extend(command)
        if len(self.stream) > self.limit:
            self._send_older()

    def append_with_buffer(self, buffer: Buffer, *command: object) -> None:
        """Records a command that takes the batch's next buffer; the bytes must not change any more."""
        byte_count = len(buffer)
        with self._lock:
            buffers, stream = self._buffers, self.stream
            buffers += (buffer,)  # both or neither: Ctrl-C strikes, and threads switch, only after calls
            stream += command
            self._buffered_bytes += byte_count
        if self._buffered_bytes > _CUT_AT_BYTES:
            self.flush()
        elif len(self.stream) > self.limit:
            self._send_older()

    def flush(self) -> None:
        """Sends what was recorded. Waits while more than the allowed bytes are under way.

        Raises:
            SessionLostError: the worker is gone.
        """
        with self._lock:
            while self.stream or self.dirty or self._outgoing is not None:
                self._send_next(whole=True)
            if self.on_sent is not None:
                self.on_sent()

    def try_to_begin_anew(self, make: Callable[[Sequence], Batch]) -> bool:
        """Send all that was recorded, then one batch by itself, behind which no batch rests on one before.

        Args:
            make: makes that batch, given its number.

        Returns:
            False, with nothing done, if that would have to wait for another thread or for the worker.

        Raises:
            SessionLostError: the worker is gone.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._has_room():
                return False
            while self.stream or self.dirty or self._outgoing is not None:
                self._send_next(whole=True)
            sequence = Sequence(self._sequence + 1)
            batch = make(sequence)
            sent = RecordedBatch(sequence, batch.stream, [])
            self.repeats.seen.clear()
            # As in `_cut`, there must be no call between these statements.
            self._outgoing = (batch, sent)
            self._sequence += 1
            self._send_next(whole=True)
            return True
        finally:
            self._lock.release()

    def between_batches(self, action: Callable[[], object], timeout_seconds: float) -> bool:
        """Do something while no batch is cut or sent; return whether there was such a moment in time."""
        if not self._lock.acquire(timeout=timeout_seconds):
            return False
        try:
            action()
            return True
        finally:
            self._lock.release()

    def reset_batch_limit(self) -> None:
        """Make the next batch small: the worker has nothing to do, and should start soon."""
        self.limit = self._first_limit

    def send_some(self) -> None:
        """Sends the older part of what was recorded, cut where the commands themselves say, see `find_cut`.

        The first batch after a wait or a pause is small, so that the worker starts soon; the longer a program runs
        without either, the larger its batches, up to `max_loop_batch_commands`. A program that asks for values without
        waiting runs on: an idle worker then tells that it is the faster of the two, and more batches would be more work
        for the slower.

        Raises:
            SessionLostError: the worker is gone.
            RemoteError: an op failed, where each is waited for.
        """
        self._send_older()
        if self.wait_for_outcome is not None:
            self.wait_for_outcome()

    def send_if_due(self) -> None:
        """Send some, if enough was recorded.

        Raises:
            SessionLostError: the worker is gone.
            RemoteError: an op failed, where each is waited for.
        """
        if len(self.stream) > self.limit:
            self.send_some()

    def _send_older(self) -> None:
        if self.wait_for_outcome is not None:
            self.flush()
            return
        with self._lock:
            while len(self.stream) > self.limit:
                self._send_next(whole=False)
                self.limit = min(self.limit * 2, self._last_limit)
            if self.on_sent is not None:
                self.on_sent()

    def flush_unless_busy(self) -> bool:
        """Sends what was recorded, unless that would have to wait for another thread or for the worker.

        Returns:
            Whether it was sent.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._has_room():
                return False
            if self.is_all_executed:  # the program pauses, and so does the worker
                self.limit = self._first_limit
            self.flush()
            return True
        finally:
            self._lock.release()

    def _send_next(self, *, whole: bool) -> None:
        if self._outgoing is None:
            self._cut(whole)
        assert self._outgoing is not None
        message, sent = self._outgoing
        self._wait_for_room()
        if self._ended is not None:
            raise self._ended.again()
        # Before it is sent, so that an acknowledgement always finds it.
        if self.last_batch is not sent:
            self._sent.append(sent)
            self.last_batch = sent
        self._send(message)
        self._outgoing = None

    def _cut(self, whole: bool) -> None:
        self._release()
        place = recorded = len(self.stream), len(self.lines), len(self._buffers)
        positions = None
        if not whole:
            positions = commands.walk(self.stream, self.widths, recorded[0])
            place = find_cut(self.stream, positions, self.limit, recorded)
        count, line_count, buffer_count = place
        stream, buffers, seen = self.stream[:count], self._buffers[:buffer_count], self.repeats.seen
        sequence = Sequence(self._sequence + 1)
        message, key, known = self.repeats.choose(sequence, stream, tuple(buffers), positions)
        sent = RecordedBatch(sequence, stream, self.lines[:line_count])
        buffered = sum(map(len, buffers))
        # There must be no call between these statements: Ctrl-C strikes only after calls, and would lose or repeat
        # commands. The lists themselves stay, because the dispatcher holds them.
        self._outgoing = (message, sent)
        seen[key] = known
        del self._buffers[:buffer_count]
        del self.stream[:count]
        del self.lines[:line_count]
        self._buffered_bytes -= buffered
        self._sent_ops += line_count // 2
        self._sequence += 1

    def _release(self) -> None:
        """Records that the worker may forget the values of dead tensors, but for those that were written over.

        Its cost is that of the dead ones: of the free slots, which may be very many, only the list is moved.
        """
        dead = self.dirty[:]
        in_order = not self._taken  # else Ctrl-C left something there
        releasing: list[int] = []
        are_free = filterfalse(self.held.__getitem__, dead)
        # A slot that is being released is given to nobody. As in `take_slot`, no call may end between these statements,
        # so that what is not held lies in `_taken`; what Ctrl-C leaves there goes back with the next batch.
        self._taken += self.free
        del self.free[:]
        releasing += are_free
        if releasing:
            self.stream.extend((commands.RELEASE, sorted(set(releasing))))
        del self.dirty[: len(dead)]
        self._died += len(dead)
        if len(self._taken) > MANY_FREE and self._died >= len(self._taken):
            self._died = 0
            self._forget_top()
            in_order = True
        # Nor between these: what was a heap is still one where nothing came to it.
        in_order = in_order and not self.free
        self.free += self._taken
        self._taken = []
        if not in_order:
            heapify(self.free)

    def _forget_top(self) -> None:
        """Makes the largest of the free slots ones that were never used: a program that once held very many tensors is
        then as quick, and as small, as it was before.

        Called while `free` is empty, so that whoever needs a slot meanwhile takes an unused one; and no more often than
        as many tensors have died as are looked through.
        """
        seen = self._top
        kept, top = without_top(self._taken, seen)
        # No call may end between these statements: another thread may take an unused slot.
        if seen == self._top:
            self._top, self._taken = top, kept

    @property
    def is_all_executed(self) -> bool:
        """True if the worker has told that it did whatever was sent."""
        return self._unacked()[0] == 0

    def _has_room(self) -> bool:
        batches, byte_count = self._unacked()
        return byte_count <= self._max_in_flight and batches <= self._max_in_flight_batches

    def _is_over(self) -> bool:
        return self._ended is not None

    def _wait_for_room(self) -> None:
        while self._ended is None and not self._has_room():
            waiter = Waiter()
            self._waiting.append(waiter)
            if self._is_over() or self._has_room():  # checked after the insertion, so that no news is missed
                return
            self.wait_for_news(waiter)

    def ack(self, sequence: int) -> None:
        """Everything up to this batch was executed; called by the reading thread."""
        while self._sent and self._sent[0].sequence <= sequence:
            self._acked.append(self._sent.popleft())
        self._wake()

    def keep_acked(self, *, kept: bool) -> None:
        """Remember all batches that are acknowledged from now on, or the latest only; news of them is still to come."""
        # Batches of an earlier cancellation whose news is still to come are kept when a later one begins.
        if kept != (self._acked.maxlen is None):
            self._acked = deque(tuple(self._acked), None if kept else _REMEMBERED)

    def _wake(self) -> None:
        while self._waiting:
            self._waiting.popleft().set(None)

    def sent(self, sequence: int) -> RecordedBatch | None:
        """A batch that is not acknowledged yet, or not for long; called by the reading thread."""
        return next((item for item in self.sent_batches(acked=True) if item.sequence == sequence), None)

    def sent_batches(self, *, acked: bool = False) -> list[RecordedBatch]:
        """Return the batches that are not acknowledged yet, or also the last that are, in order; for any thread."""
        return [*tuple(self._acked), *tuple(self._sent)] if acked else list(self._sent)

    def check(self) -> None:
        """Check that the session goes on.

        Raises:
            SessionLostError: the session is over.
        """
        if self._ended is not None:
            raise self._ended.again()

    def end(self, error: SessionLostError) -> None:
        """Nothing more can be sent; wakes whoever waits for room."""
        self._ended = error
        self._wake()

    def abandon(self, error: SessionLostError) -> None:
        """Use a fresh lock, in the child of a fork: a thread that does not exist here may hold the old one."""
        self._lock = threading.RLock()
        self._ended = error
        self._first_limit = self._last_limit = self.limit = -1  # every op finds that it is to send, and fails

    def release_now(self, slot: int) -> None:
        """Forgets a large value at this very place of the stream, and takes its slot back."""
        self.stream.extend((self._release_command, [slot]))
        self.give_back(slot)

    def give_back(self, slot: int) -> None:
        """Takes back a slot whose release was recorded."""
        self.held[slot] = False
        self._push(self.free, slot)
