"""The batches, and the uploads, that a session must send again if its worker dies: those since the last snapshot.

Decides only; moves no bytes. Sending and receiving threads use it at the same time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from skyproxy.protocol import commands, framing
from skyproxy.protocol.messages import Batch, Buffer, Message, Sequence

_ENTRY_BYTES = 160
"""The memory of an entry beside the bytes of its batch."""
_UNREPEATABLE = {
    "bind_call": "a function ran on the worker",
    "adopt_results": "a function's results became tensors",
    "end_cancellation": "operations were cancelled",
    "hold_named": "the session was given a name",
    "adopt_snapshot": "saved values were restored",
}
"""Controls whose effect depends on more than what the log has, and what to call them."""


class LoggedBatch(NamedTuple):
    """One batch.

    Attributes:
        sequence: its number.
        total_bytes: the size of all batches up to and including it.
        frame: the batch as it travels.
    """

    sequence: int
    total_bytes: int
    frame: bytes


class KeptUpload:
    """The bytes of an upload that travels beside the batches.

    Attributes:
        values: the bytes; the log's own.
        sequence: a batch by which it was announced at the latest; None while that is not known.
        job: what sends it.
    """

    __slots__ = ("job", "sequence", "values")

    def __init__(self, values: bytes) -> None:
        self.values = values
        self.sequence: int | None = None
        self.job: object = None


class Hole(NamedTuple):
    """An effect that the log cannot bring about again.

    Attributes:
        sequence: the batch up to which it took place.
        reason: what it was, for people.
    """

    sequence: int
    reason: str


class BatchLog:
    """Batches and uploads since the snapshots from which a session can still go on.

    A snapshot is begun by a batch of its own; the log from there on stands for itself. Until the worker has told that
    the snapshot is durable, the older one and the log behind it stay.

    Attributes:
        max_bytes: what it may hold.
    """

    def __init__(self, max_bytes: int, max_frame_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._max_frame_bytes = max_frame_bytes
        # The first entry stands for the batch before, so the queue is never empty, and every figure comes from it.
        self._batches: deque[LoggedBatch] | None = None
        self._uploads: dict[int, KeptUpload] = {}
        self._upload_bytes = 0
        self._begun: deque[int] = deque()
        self._durable: int | None = None
        self._holes: list[Hole] = []
        self._blanks: set[int] = set()
        self._lock = threading.RLock()

    @property
    def last(self) -> int:
        """The newest batch that was logged; 0 before the first snapshot is begun."""
        batches = self._batches
        return batches[-1].sequence if batches else 0

    @property
    def durable(self) -> int | None:
        """The batch of the newest snapshot that the worker has told to be durable; None before the first."""
        return self._durable

    @property
    def byte_count(self) -> int:
        """The size of all that it holds."""
        batches = self._batches
        return self._upload_bytes + (batches[-1].total_bytes - batches[0].total_bytes if batches else 0)

    # --- what is sent ------------------------------------------------------------------------------------------------

    def add(self, sequence: int, message: Message) -> None:
        """Take note of a batch that is about to be sent; of the same one once, however often it is sent."""
        batches = self._batches
        if batches is None or sequence <= batches[-1].sequence:
            return
        frame = b"".join(framing.encode(message, self._max_frame_bytes))
        batches.append(LoggedBatch(sequence, batches[-1].total_bytes + len(frame) + _ENTRY_BYTES, frame))

    def keep(self, transfer: int, view: Buffer) -> KeptUpload:
        """Copy the bytes of an upload that is about to be announced."""
        kept = KeptUpload(bytes(view))
        with self._lock:
            self._uploads[transfer] = kept
            self._upload_bytes += len(kept.values)
        return kept

    def announced(self, transfer: int, sequence: int) -> None:
        """Take note that an upload was announced by this batch, or by an earlier one."""
        with self._lock:
            kept = self._uploads.get(transfer)
            if kept is not None:
                kept.sequence = sequence

    def puncture(self, sequence: int, reason: str) -> None:
        """Take note of what cannot be done again; only a snapshot begun later mends that."""
        with self._lock:
            if not any(hole.reason == reason and hole.sequence == sequence for hole in self._holes):
                self._holes.append(Hole(sequence, reason))

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def begin(self, sequence: int) -> None:
        """Take note that this batch begins a snapshot; call it before the batch is added."""
        with self._lock:
            if self._batches is None:
                self._batches = deque([LoggedBatch(sequence - 1, 0, b"")])
            if sequence not in self._begun:
                self._begun.append(sequence)

    def fail(self, sequence: int) -> None:
        """Take note that there will be no such snapshot."""
        with self._lock:
            if sequence in self._begun:
                self._begun.remove(sequence)
                self._blank(sequence)
            if self._durable is None and not self._begun:
                self._batches = None
                self._holes.clear()
                self._blanks.clear()
                self._drop_uploads(self._uploads_until(None))

    def _blank(self, sequence: int) -> None:
        """Leave of a batch that asked for a snapshot in vain nothing but its number: another worker might take that
        snapshot, which nobody asks for any more, and give up an older one for it.
        """
        batches = self._batches
        for index, entry in enumerate(list(batches or ())):
            if batches is not None and entry.sequence == sequence and entry.frame:
                frame = b"".join(framing.encode(Batch(Sequence(sequence), []), self._max_frame_bytes))
                batches[index] = entry._replace(frame=frame)
                self._blanks.add(sequence)

    def is_blank(self, sequence: int) -> bool:
        """Return whether there is nothing but the number of this batch left, whatever was sent."""
        return sequence in self._blanks

    def commit(self, sequence: int) -> None:
        """Drop what is not needed any more: the snapshot that this batch began is durable."""
        with self._lock:
            batches = self._batches
            if sequence not in self._begun or batches is None:
                return
            while self._begun and self._begun[0] <= sequence:
                self._begun.popleft()
            self._durable = sequence
            while len(batches) > 1 and batches[0].sequence < sequence:
                batches.popleft()
            self._holes = [hole for hole in self._holes if hole.sequence > sequence]
            self._blanks = {each for each in self._blanks if each > sequence}
            self._drop_uploads(self._uploads_until(sequence))

    def forget(self) -> None:
        """Hold nothing until the next snapshot is begun."""
        with self._lock:
            self._batches, self._durable = None, None
            self._begun.clear()
            self._holes.clear()
            self._blanks.clear()
            self._drop_uploads(self._uploads_until(None))

    def _uploads_until(self, sequence: int | None) -> list[int]:
        return [
            number
            for number, kept in self._uploads.items()
            if sequence is None or (kept.sequence is not None and kept.sequence <= sequence)
        ]

    def _drop_uploads(self, numbers: list[int]) -> None:
        for number in numbers:
            self._upload_bytes -= len(self._uploads.pop(number).values)

    # --- recovery ----------------------------------------------------------------------------------------------------

    def starts(self) -> list[int]:
        """Return the batches of the snapshots that may exist, the newest first."""
        with self._lock:
            return [*reversed(self._begun), *([self._durable] if self._durable is not None else [])]

    def hole_after(self, sequence: int) -> Hole | None:
        """Return the first thing behind a snapshot that cannot be done again; None where there is none."""
        with self._lock:
            return next((hole for hole in self._holes if hole.sequence > sequence), None)

    def batches_after(self, sequence: int, last: int) -> Iterator[tuple[int, Message, int]]:
        """Give the batches behind a snapshot: number, message and size."""
        for entry in list(self._batches or ()):
            if sequence < entry.sequence <= last:
                yield entry.sequence, framing.decode(entry.frame, self._max_frame_bytes), len(entry.frame)

    def jobs_after(self, sequence: int) -> list[object]:
        """Return what sends the uploads that were announced behind a snapshot, or may have been, in order."""
        with self._lock:
            return [
                kept.job
                for kept in self._uploads.values()
                if kept.job is not None and (kept.sequence is None or kept.sequence > sequence)
            ]


def unrepeatable(stream: list[Any], widths: dict[int, int]) -> str:
    """Return what in a stream cannot be done again, for people; an empty text where all of it can."""
    for at in commands.walk(stream, widths):
        number = stream[at]
        if number == commands.DO or number == commands.CALL:
            name = stream[at + 1] if number == commands.DO else stream[at + 2]
            if name in _UNREPEATABLE:
                return _UNREPEATABLE[name]
    return ""
