"""Snapshots written while their session goes on: copies of its storages, and the thread that writes them.

The copies are taken on the session's thread, in the order of its operations. They hold so many bytes and no more: a
session that is larger waits for the disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from queue import SimpleQueue

import torch

from skyproxy.errors import SessionLostError, SnapshotError
from skyproxy.snapshots.folder import Draft, SnapshotFolder, piece_count
from skyproxy.snapshots.hashes import SHA256
from skyproxy.snapshots.packs import PIECE_BYTES, pieces_of
from skyproxy.torch_codec import byte_view
from skyproxy_server.reports import Deferred
from skyproxy_server.snapshots.capture import Captured
from skyproxy_server.snapshots.volume import hangs

logger = logging.getLogger("skyproxy.server")

_BUFFER_BYTES = 4 * PIECE_BYTES
"""Storages are copied in parts of this size at most, so that a large one needs no copy as large as itself."""
_BUFFERS_ON_THE_WAY = 3
"""Buffers that are hashed and written at a time."""
_Filled = tuple[torch.Tensor, list[tuple[int, int]]]
"""A buffer, and where in it the pieces begin and end."""
_Started = tuple[torch.Tensor, "list[Future[bytes]]"]
"""A buffer, and its pieces on their way."""


class CopyBuffers:
    """The memory of copies that wait to be written. What was written is used again: new memory costs a page fault for
    every 4 KiB, three times as much as the copy.

    Args:
        most: how many bytes there may be; a single buffer always may.
        stall_seconds: the time for which the volume may take nothing.
    """

    def __init__(self, most: int, stall_seconds: float) -> None:
        self.buffer_bytes = max(min(_BUFFER_BYTES, most), PIECE_BYTES)
        self._most = most
        self._stall_seconds = stall_seconds
        self._used = 0
        self._free: list[torch.Tensor] = []
        self._changed = threading.Condition()
        self._moved_at = time.monotonic()

    def take(self, byte_count: int) -> torch.Tensor:
        """Wait for room, for as long as the volume takes something; return at least so many bytes, of
        `buffer_bytes` at most.

        Raises:
            VolumeHangsError: it does not.
        """
        with self._changed:
            while self._used and self._used + self._size_for(byte_count) > self._most:
                left = self._moved_at + self._stall_seconds - time.monotonic()
                if left <= 0:
                    raise hangs(self._stall_seconds)
                self._changed.wait(left)
            if not self._used:
                self._moved_at = time.monotonic()
            size = self._size_for(byte_count)
            self._used += size
            if self._free:
                return self._free.pop()
        return torch.empty(size, dtype=torch.uint8)

    def _size_for(self, byte_count: int) -> int:
        """The size of the buffer that so many bytes get: a whole one, which others can use after them, unless they are
        few. Storages seldom fill one to the last byte.
        """
        return self.buffer_bytes if self._free or 2 * byte_count > self.buffer_bytes else byte_count

    def give_back(self, buffer: torch.Tensor) -> None:
        """Make room."""
        with self._changed:
            self._used -= buffer.numel()
            if buffer.numel() == self.buffer_bytes:
                self._free.append(buffer)
            self._moved_at = time.monotonic()
            self._changed.notify_all()

    def let_go(self) -> None:
        """Give the memory that nothing uses back to the system."""
        with self._changed:
            self._free.clear()


class WritingJob:
    """One snapshot on its way to the disk.

    Args:
        captured: the session at the boundary of a batch.
        folder: where it goes.
        claimed: the names that are ours already; what is not is made ours first, and again where that failed.
        buffers: the memory of the copies.
        hashing: hashes and writes pieces.
        names: what the client keeps with it, which nobody reads here.
        hash_name: the hash by which its pieces get their names.

    Attributes:
        answer: what the client is told in the end.
        name: of the snapshot.
        byte_count: the bytes of its storages.
    """

    def __init__(
        self,
        captured: Captured,
        folder: SnapshotFolder,
        claimed: set[str],
        buffers: CopyBuffers,
        hashing: Executor,
        names: bytes = b"",
        hash_name: str = SHA256,
    ) -> None:
        self.answer = Deferred()
        self._names = names
        self._hash_name = hash_name
        self._moved_at = time.monotonic()
        self._done = threading.Event()
        self._answering = threading.Lock()
        self._document = captured.document
        self._sizes = [storage.numel() for storage in captured.storages]
        self._piece_count = piece_count(captured.storages)
        self.name, self.byte_count = folder.name, sum(self._sizes)
        self._folder = folder
        self._claimed = claimed
        self._buffers = buffers
        self._hashing = hashing
        self._copies: SimpleQueue[_Filled | None] = SimpleQueue()

    def copy(self, storages: list[torch.Tensor]) -> None:
        """Copy what is to be written. On the session's thread; waits where the disk is slower."""
        try:
            for parts, spans in _groups(storages, self._buffers.buffer_bytes):
                byte_count = spans[-1][1]
                buffer = self._buffers.take(byte_count)
                try:
                    _gather(parts, buffer[:byte_count])
                except BaseException:
                    self._buffers.give_back(buffer)
                    raise
                self._copies.put((buffer, spans))
        finally:
            self._copies.put(None)

    @property
    def is_done(self) -> bool:
        """True if it is written, or never will be."""
        return self._done.is_set()

    def is_stalled(self, stall_seconds: float) -> bool:
        """Return whether it is not done, and the volume has taken nothing for so long."""
        return not self.is_done and time.monotonic() - self._moved_at >= stall_seconds

    def wait(self, stall_seconds: float) -> bool:
        """Wait until it is done, for as long as the volume takes something; return whether it is."""
        while not self._done.is_set():
            left = self._moved_at + stall_seconds - time.monotonic()
            if left <= 0:
                return False
            self._done.wait(left)
        return True

    def watch(self, stall_seconds: float) -> None:
        """Tell the client when the volume hangs; until then, wait."""
        if not self.wait(stall_seconds):
            self._answer(None, hangs(stall_seconds))

    def write(self) -> None:
        """Write it, and tell the client. On the thread for this; takes every copy, whatever happens."""
        error: Exception | None = None
        draft: Draft | None = None
        digests: list[bytes] = []
        copies = iter(self._copies.get, None)
        on_the_way: deque[_Started] = deque()
        found: dict[str, object] = {}
        self._moved_at = time.monotonic()
        try:
            if self._folder.name not in self._claimed:
                self._folder.claim()
                self._claimed.add(self._folder.name)
            draft = self._folder.begin(self._piece_count, self._hashing, self._hash_name)
            for copy in copies:
                on_the_way.append(self._put(draft, copy))
                # Threads that copy may be waiting for the memory of these.
                while len(on_the_way) == _BUFFERS_ON_THE_WAY or (on_the_way and self._copies.empty()):
                    digests += self._wait_for_digests(on_the_way.popleft())
            while on_the_way:
                digests += self._wait_for_digests(on_the_way.popleft())
            found = self._finish(draft, digests)
        except Exception as problem:
            error = problem
            for buffer, pieces in on_the_way:  # they write to the file of the draft
                wait(pieces)
                self._buffers.give_back(buffer)
            if draft is not None:
                with suppress(OSError):
                    draft.abandon()
            for buffer, _ in copies:
                self._buffers.give_back(buffer)
        self._buffers.let_go()
        was_told = self._answer(found, None if error is None else self._name_error(error))
        if error is None and was_told:
            # Who was told that the volume hangs counts on the ones before, although this one is there after all.
            with suppress(OSError):
                self._folder.clear_away()
        self._done.set()

    def _put(self, draft: Draft, copy: _Filled) -> _Started:
        buffer, spans = copy
        view = byte_view(buffer)
        return buffer, [self._hashing.submit(draft.put_piece, view[start:end]) for start, end in spans]

    def _wait_for_digests(self, started: _Started) -> list[bytes]:
        """The digests of the pieces of a buffer, when they are written; the buffer is free then."""
        buffer, pieces = started
        wait(pieces)
        self._buffers.give_back(buffer)
        self._moved_at = time.monotonic()
        return [piece.result() for piece in pieces]

    def _answer(self, found: object, error: Exception | None) -> bool:
        """Tell the client, unless it was told that the volume hangs; return whether it is told now."""
        if not self._answering.acquire(blocking=False):
            return False
        with suppress(SessionLostError):  # the session ended meanwhile; the snapshot is there
            if error is None:
                self.answer.give(found)
            else:
                self.answer.fail(error)
            return True
        return False

    def _finish(self, draft: Draft, digests: list[bytes]) -> dict[str, object]:
        if len(digests) != self._piece_count:
            raise SnapshotError("not all of the session could be copied. The snapshots before are untouched; try again")
        rest = iter(digests)
        contents = [[next(rest) for _ in pieces_of(size)] for size in self._sizes]
        number = draft.finish(self._document, contents, sum(self._sizes), self._names, clears=False)
        return {
            "snapshot": number,
            "sequence": self._document["sequence"],
            "bytes": sum(self._sizes),
            "written_bytes": draft.written_bytes,
        }

    def _name_error(self, error: Exception) -> Exception:
        if isinstance(error, SnapshotError):
            return error
        if isinstance(error, OSError):
            return SnapshotError(
                f"the snapshot could not be written: {error.strerror} ({error.filename or self._folder.name}). "
                "Those before it are untouched, and the session goes on. Make room on the worker's volume; try again"
            )
        logger.error("a snapshot could not be written", exc_info=error)
        return SnapshotError(f"the snapshot could not be written: {error!r:.200}. Those before it are untouched")


def _groups(storages: list[torch.Tensor], most: int) -> Iterator[tuple[list[torch.Tensor], list[tuple[int, int]]]]:
    """The pieces of storages, in order, as many together as go into a buffer; and where they lie there."""
    parts: list[torch.Tensor] = []
    spans: list[tuple[int, int]] = []
    used = 0
    for storage in storages:
        for start, end in pieces_of(storage.numel()):
            if used + end - start > most:
                yield parts, spans
                parts, spans, used = [], [], 0
            parts.append(storage[start:end])
            spans.append((used, used + end - start))
            used += end - start
    if parts:
        yield parts, spans


def _gather(parts: list[torch.Tensor], target: torch.Tensor) -> None:
    """Copy tensors, one behind the other."""
    if any(part.is_cuda for part in parts):
        for part, place in zip(parts, target.split([part.numel() for part in parts]), strict=True):
            place.copy_(part)
    else:
        torch.cat(parts, out=target)  # one call: after each, a session's thread may have to wait for the interpreter
