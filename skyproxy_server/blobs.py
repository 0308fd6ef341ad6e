"""What clients uploaded, kept under the hash of its content: bounded, and shared by the sessions of this worker.

The hash is the only key. A client cannot read what it does not have already, for it can only name it by a hash of all
of it; and what stands under a hash was hashed here, whatever the client said of it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from skyproxy.protocol.digests import content_digest
from skyproxy_server.blob_shelves import Draft, Kept, MemoryShelf, Shelf

logger = logging.getLogger("skyproxy.server")

_QUIET_SECONDS = 0.2
"""Hashing begins when nothing has come for so long: it would slow down what is on its way."""
_PATIENCE_SECONDS = 10.0
"""It begins after this time in any case."""


@dataclass(slots=True)
class _Blob:
    kept: Kept
    byte_count: int
    user: str
    """The session that used it last."""


class Incoming:
    """An upload that is being kept. The thread that receives it writes; any may end it."""

    def __init__(self, store: BlobStore, draft: Draft, byte_count: int, user: str) -> None:
        self.draft = draft
        self.byte_count = byte_count
        self.user = user
        self._store = store
        self._over = False
        self._lock = threading.RLock()

    def write(self, offset: int, piece: memoryview) -> None:
        """Takes a piece; after an error of the disk, none any more."""
        with self._lock:
            if self._over:
                return
            self._store._last_write = time.monotonic()
            try:
                self.draft.write(offset, piece)
            except OSError as error:
                logger.warning("an upload is not kept: %s", error)
                self.discard()

    def finish(self) -> None:
        """All pieces are there: hashed and kept by a thread of the store's own."""
        with self._lock:
            if not self._over:
                self._over = True
                self.draft.seal()
                self._store._complete(self)

    def discard(self) -> None:
        """Forgets it; idempotent."""
        with self._lock:
            if not self._over:
                self._over = True
                self._store._drop(self)


class BlobStore:
    """The kept uploads of this process.

    When it is full, what was used longest ago goes; but uploads of one session do not displace one another, so that of
    a model that is larger than the store a part stays, and not nothing.

    Attributes:
        max_bytes: how much it keeps, what is still arriving included.
    """

    def __init__(self, max_bytes: int, shelf: Shelf | None = None, least_bytes: int = 1) -> None:
        """Args:
        max_bytes: how much to keep.
        shelf: where; by default in memory.
        least_bytes: what is smaller is not worth an entry of its own.
        """
        self.max_bytes = max_bytes
        self._least_bytes = max(least_bytes, 1)
        self._shelf: Shelf = shelf if shelf is not None else MemoryShelf()
        self._blobs: OrderedDict[bytes, _Blob] = OrderedDict()
        self._held_bytes = 0
        self._unhashed = 0
        self._last_write = 0.0
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._finished: queue.SimpleQueue[Incoming | None] = queue.SimpleQueue()
        for digest, kept, byte_count in self._shelf.found():
            self._blobs[digest] = _Blob(kept, byte_count, "")
            self._held_bytes += byte_count
        with self._lock:
            self._make_room(0, "")
        self._hasher = threading.Thread(target=self._hash, name="skyproxy-blobs", daemon=True)
        self._hasher.start()

    def __len__(self) -> int:
        return len(self._blobs)

    def stats(self) -> dict[str, int]:
        """How many blobs there are, their bytes, the most bytes there may be, and uploads that are not hashed yet."""
        with self._lock:
            return {
                "blobs": len(self._blobs),
                "bytes": self._held_bytes,
                "max_bytes": self.max_bytes,
                "unhashed": self._unhashed,
            }

    def start(self, byte_count: int, user: str) -> Incoming | None:
        """Begins to keep an upload; None where there is no room.

        Args:
            byte_count: its size.
            user: the session that it belongs to.
        """
        with self._lock:
            if byte_count < self._least_bytes or not self._make_room(byte_count, user):
                return None
            self._held_bytes += byte_count
        try:
            return Incoming(self, self._shelf.draft(byte_count), byte_count, user)
        except (OSError, MemoryError) as error:
            logger.warning("an upload is not kept: %s", error)
            with self._lock:
                self._held_bytes -= byte_count
            return None

    def _make_room(self, byte_count: int, user: str) -> bool:
        """Whether there is room for so much now; under the lock."""
        excess = self._held_bytes + byte_count - self.max_bytes
        going: list[bytes] = []
        for digest, blob in self._blobs.items():
            if excess <= 0:
                break
            if blob.user != user or not user:
                going.append(digest)
                excess -= blob.byte_count
        if excess > 0 and byte_count:
            return False
        for digest in going:
            self._remove(digest)
        return True

    def _remove(self, digest: bytes) -> None:
        blob = self._blobs.pop(digest)
        self._held_bytes -= blob.byte_count
        blob.kept.remove()

    def copy_into(self, digest: bytes, target: memoryview, user: str) -> bool:
        """Whether the bytes of this name and size are there; then `target` holds a copy of them.

        Otherwise its content is undefined.
        """
        with self._lock:
            blob = self._blobs.get(digest)
            if blob is None or blob.byte_count != len(target):
                return False
            blob.user = user
            self._blobs.move_to_end(digest)
        # Without the lock: what is removed meanwhile stays readable until we are done with it.
        try:
            sound = blob.kept.copy_into(target, digest)
        except OSError as error:
            logger.warning("a kept upload cannot be read: %s", error)
            sound = False
        if not sound:
            with self._lock:
                if self._blobs.get(digest) is blob:
                    self._remove(digest)
        return sound

    def _complete(self, incoming: Incoming) -> None:
        with self._lock:
            self._unhashed += 1
        self._finished.put(incoming)

    def _drop(self, incoming: Incoming) -> None:
        incoming.draft.discard()
        with self._lock:
            self._held_bytes -= incoming.byte_count

    def _hash(self) -> None:
        """Names what has arrived, one after another."""
        while (incoming := self._finished.get()) is not None:
            latest = time.monotonic() + _PATIENCE_SECONDS
            while (pause := min(self._last_write + _QUIET_SECONDS, latest) - time.monotonic()) > 0:
                if self._stopping.wait(pause):
                    break
            try:
                self._name(incoming)
            except Exception as error:  # keeping is a favour: nothing may fail because of it
                logger.warning("an upload is not kept: %r", error)
                self._drop(incoming)
            finally:
                with self._lock:
                    self._unhashed -= 1

    def _name(self, incoming: Incoming) -> None:
        with incoming.draft.view() as view:
            digest = content_digest(view)
        with self._lock:
            blob = self._blobs.get(digest)
            if blob is not None:
                blob.user = incoming.user
                self._blobs.move_to_end(digest)
        if blob is not None:
            self._drop(incoming)
            return
        kept = incoming.draft.keep(digest)
        with self._lock:
            self._blobs[digest] = _Blob(kept, incoming.byte_count, incoming.user)

    def close(self) -> None:
        """Ends the hashing thread; what is on disk stays there."""
        self._stopping.set()
        self._finished.put(None)
        self._hasher.join(5.0)
        with contextlib.suppress(queue.Empty):
            while True:
                rest = self._finished.get_nowait()
                if rest is not None:
                    rest.draft.discard()
        self._shelf.close()


def usable_memory_bytes(root: Path = Path("/")) -> int | None:
    """How much memory this process may use: the machine's, or less where a container sets a limit. None: unknown."""
    sizes: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                sizes.append(int(line.split()[1]) << 10)
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            sizes.append(int((root / name).read_text(encoding="ascii")))
    return min(sizes) if sizes else None
