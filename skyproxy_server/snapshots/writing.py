"""Snapshots written while their session goes on: copies of its storages, and the thread that writes them.

The copies are taken on the session's thread, in the order of its operations. They hold so many bytes and no more: a
session that is larger waits for the disk.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Executor
from contextlib import suppress
from queue import SimpleQueue

import torch

from skyproxy.errors import SessionLostError, SnapshotError
from skyproxy.snapshots.folder import Draft, SnapshotFolder, piece_count
from skyproxy.snapshots.packs import PIECE_BYTES, pieces_of
from skyproxy.torch_codec import byte_view
from skyproxy_server.reports import Deferred
from skyproxy_server.snapshots.capture import Captured

logger = logging.getLogger("skyproxy.server")

_COPIED_BYTES = 16 * PIECE_BYTES
"""Storages are copied in parts of this size, so that one large storage needs no copy as large as itself."""


class VolumeHangsError(SnapshotError):
    """The volume has taken nothing for too long."""


def hangs(seconds: float) -> VolumeHangsError:
    """Return the error for a volume that has taken nothing for so long."""
    return VolumeHangsError(
        f"the worker's volume has taken nothing for {seconds:g} s (SKYPROXY_SNAPSHOT_STALL_SECONDS). The session goes "
        "on, and the snapshots before are untouched; none is taken until the volume answers again"
    )


class CopyBudget:
    """The bytes of copies that wait to be written.

    Args:
        most: how many there may be; a single copy always may.
        stall_seconds: the time for which the volume may take nothing.
    """

    def __init__(self, most: int, stall_seconds: float) -> None:
        self._most = most
        self._stall_seconds = stall_seconds
        self._used = 0
        self._changed = threading.Condition()
        self._moved_at = time.monotonic()

    def take(self, byte_count: int) -> None:
        """Wait for room, for as long as the volume takes something.

        Raises:
            VolumeHangsError: it does not.
        """
        with self._changed:
            while self._used and self._used + byte_count > self._most:
                left = self._moved_at + self._stall_seconds - time.monotonic()
                if left <= 0:
                    raise hangs(self._stall_seconds)
                self._changed.wait(left)
            if not self._used:
                self._moved_at = time.monotonic()
            self._used += byte_count

    def give_back(self, byte_count: int) -> None:
        """Make room."""
        with self._changed:
            self._used -= byte_count
            self._moved_at = time.monotonic()
            self._changed.notify_all()


class WritingJob:
    """One snapshot on its way to the disk.

    Args:
        captured: the session at the boundary of a batch.
        folder: where it goes.
        claimed: the names that are ours already; what is not is made ours first, and again where that failed.
        budget: bounds the copies.
        hashing: hashes and writes pieces.
        names: what the client keeps with it, which nobody reads here.

    Attributes:
        answer: what the client is told in the end.
    """

    def __init__(
        self,
        captured: Captured,
        folder: SnapshotFolder,
        claimed: set[str],
        budget: CopyBudget,
        hashing: Executor,
        names: bytes = b"",
    ) -> None:
        self.answer = Deferred()
        self._names = names
        self._moved_at = time.monotonic()
        self._done = threading.Event()
        self._answering = threading.Lock()
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
        found: dict[str, object] = {}
        self._moved_at = time.monotonic()
        try:
            if self._folder.name not in self._claimed:
                self._folder.claim()
                self._claimed.add(self._folder.name)
            draft = self._folder.begin(self._piece_count, self._hashing)
            for copy in copies:
                try:
                    view = byte_view(copy)
                    digests += draft.put(view[start:end] for start, end in pieces_of(len(view)))
                finally:
                    self._budget.give_back(copy.numel())
                self._moved_at = time.monotonic()
            found = self._finish(draft, digests)
        except Exception as problem:
            error = problem
            if draft is not None:
                with suppress(OSError):
                    draft.abandon()
            for copy in copies:
                self._budget.give_back(copy.numel())
        self._answer(found, None if error is None else self._named(error))
        self._done.set()

    def _answer(self, found: object, error: Exception | None) -> None:
        """Tell the client, unless it was told that the volume hangs."""
        if not self._answering.acquire(blocking=False):
            return
        with suppress(SessionLostError):  # the session ended meanwhile; the snapshot is there
            if error is None:
                self.answer.give(found)
            else:
                self.answer.fail(error)

    def _finish(self, draft: Draft, digests: list[bytes]) -> dict[str, object]:
        if len(digests) != self._piece_count:
            raise SnapshotError("not all of the session could be copied. The snapshots before are untouched; try again")
        rest = iter(digests)
        contents = [[next(rest) for _ in pieces_of(size)] for size in self._sizes]
        number = draft.finish(self._document, contents, sum(self._sizes), self._names)
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
                f"the snapshot could not be written: {error.strerror} ({error.filename or self._folder.name}). "
                "Those before it are untouched, and the session goes on. Make room on the worker's volume; try again"
            )
        logger.error("a snapshot could not be written", exc_info=error)
        return SnapshotError(f"the snapshot could not be written: {error!r:.200}. Those before it are untouched")
