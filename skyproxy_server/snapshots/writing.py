"""Snapshots written while their session goes on: copies of its storages, and the thread that writes them.

The copies are taken on the session's thread, in the order of its operations. They hold so many bytes and no more: a
session that is larger waits for the disk.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Executor
from contextlib import suppress
from queue import SimpleQueue

import torch

from skyproxy.errors import SessionLostError, SnapshotError
from skyproxy.torch_codec import byte_view
from skyproxy_server.reports import Deferred
from skyproxy_server.snapshots.capture import Captured
from skyproxy_server.snapshots.folder import Draft, SnapshotFolder, piece_count
from skyproxy_server.snapshots.packs import PIECE_BYTES, pieces_of

logger = logging.getLogger("skyproxy.server")

_COPIED_BYTES = 16 * PIECE_BYTES
"""Storages are copied in parts of this size, so that one large storage needs no copy as large as itself."""


class CopyBudget:
    """The bytes of copies that wait to be written.

    Args:
        most: how many there may be; a single copy always may.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._changed = threading.Condition()

    def take(self, byte_count: int) -> None:
        """Wait for room."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + byte_count <= self._most)
            self._used += byte_count

    def give_back(self, byte_count: int) -> None:
        """Make room."""
        with self._changed:
            self._used -= byte_count
            self._changed.notify_all()


class WritingJob:
    """One snapshot on its way to the disk.

    Args:
        captured: the session at the boundary of a batch.
        folder: where it goes.
        claimed: the names that are ours already; what is not is made ours first, and again where that failed.
        budget: bounds the copies.
        hashing: hashes and writes pieces.

    Attributes:
        answer: what the client is told in the end.
    """

    def __init__(
        self, captured: Captured, folder: SnapshotFolder, claimed: set[str], budget: CopyBudget, hashing: Executor
    ) -> None:
        self.answer = Deferred()
        self._document = captured.document
        self._sizes = [storage.numel() for storage in captured.storages]
        self._piece_count = piece_count(captured.storages)
        self._folder = folder
        self._claimed = claimed
        self._budget = budget
        self._hashing = hashing
        self._copies: SimpleQueue[torch.Tensor | None] = SimpleQueue()

    def copy(self, storages: list[torch.Tensor]) -> None:
        """Copy what is to be written. On the session's thread; waits where the disk is slower."""
        try:
            for storage in storages:
                for start in range(0, storage.numel(), _COPIED_BYTES):
                    part = storage[start : start + _COPIED_BYTES]
                    self._budget.take(part.numel())
                    try:
                        self._copies.put(part.cpu() if part.is_cuda else part.clone())
                    except BaseException:
                        self._budget.give_back(part.numel())
                        raise
        finally:
            self._copies.put(None)

    def write(self) -> None:
        """Write it, and tell the client. On the thread for this; takes every copy, whatever happens."""
        error: Exception | None = None
        draft: Draft | None = None
        digests: list[bytes] = []
        copies = iter(self._copies.get, None)
        try:
            if self._folder.path.name not in self._claimed:
                self._folder.claim()
                self._claimed.add(self._folder.path.name)
            draft = self._folder.begin(self._piece_count, self._hashing)
            for copy in copies:
                try:
                    view = byte_view(copy)
                    digests += draft.put(view[start:end] for start, end in pieces_of(len(view)))
                finally:
                    self._budget.give_back(copy.numel())
            found = self._finish(draft, digests)
        except Exception as problem:
            error = problem
            if draft is not None:
                draft.abandon()
            for copy in copies:
                self._budget.give_back(copy.numel())
        with suppress(SessionLostError):  # the session ended meanwhile; the snapshot is there
            if error is None:
                self.answer.give(found)
            else:
                self.answer.fail(self._named(error))

    def _finish(self, draft: Draft, digests: list[bytes]) -> dict[str, object]:
        if len(digests) != self._piece_count:
            raise SnapshotError("not all of the session could be copied. The snapshots before are untouched; try again")
        rest = iter(digests)
        contents = [[next(rest) for _ in pieces_of(size)] for size in self._sizes]
        number = draft.finish(self._document, contents, sum(self._sizes))
        return {
            "snapshot": number,
            "sequence": self._document["sequence"],
            "bytes": sum(self._sizes),
            "written_bytes": draft.written_bytes,
        }

    def _named(self, error: Exception) -> Exception:
        if isinstance(error, SnapshotError):
            return error
        if isinstance(error, OSError):
            return SnapshotError(
                f"the snapshot could not be written: {error.strerror} ({error.filename or self._folder.path.name}). "
                "Those before it are untouched, and the session goes on. Make room on the worker's volume; try again"
            )
        logger.error("a snapshot could not be written", exc_info=error)
        return SnapshotError(f"the snapshot could not be written: {error!r:.200}. Those before it are untouched")
