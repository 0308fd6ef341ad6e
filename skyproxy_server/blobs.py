"""Uploads of clients, kept under the hash of its content: bounded, and for the clients of one token.

What stands under a hash was hashed here, whatever the client said of it. Where uploads are shared among tokens, a
client that has not uploaded some bytes itself shows that it has them before it gets a copy: a hash may be known without
its content.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from skyproxy.protocol.digests import content_digest
from skyproxy_server.blob_backends import BlobBackend, MemoryBackend, PendingBlob, StoredBlob

logger = logging.getLogger("skyproxy.server")

_QUIET_SECONDS = 0.2
"""Hashing begins when nothing has come for so long: it would slow down what is on its way."""
_PATIENCE_SECONDS = 10.0
"""It begins after this time in any case."""


@dataclass(slots=True)
class _Blob:
    kept: StoredBlob
    byte_count: int
    user: str
    """The session that used it last."""
    owners: set[str]
    """Clients who have uploaded it, or shown that they have it."""


class Keeping(Protocol):
    """An upload that is being kept, as whoever receives it sees it."""

    def write(self, offset: int, piece: memoryview) -> None: ...

    def finish(self) -> None: ...

    def discard(self) -> None: ...


class UploadStore(Protocol):
    """A store, as sessions see it: this process's `BlobStore`, or one in another process."""

    max_bytes: int

    def __len__(self) -> int: ...

    def stats(self, owner: str = "") -> dict[str, int]: ...

    def start(self, byte_count: int, user: str, owner: str = "", most_bytes: int | None = None) -> Keeping | None: ...

    def needs_proof(self, digest: bytes, byte_count: int, owner: str) -> bool: ...

    def is_owned(self, digest: bytes, owner: str) -> None: ...

    def copy_into(self, digest: bytes, target: memoryview, user: str, owner: str = "") -> bool: ...


class Incoming:
    """An upload that is being kept. The thread that receives it writes; any may end it."""

    def __init__(self, store: BlobStore, byte_count: int, user: str, owner: str, most_bytes: int | None) -> None:
        self.pending: PendingBlob | None = None
        self.byte_count = byte_count
        self.held_bytes = 0
        """The bytes that came; the store reserves no more, whatever was announced."""
        self.user = user
        self.owner = owner
        self.most_bytes = most_bytes
        self._store = store
        self._over = False
        self._lock = threading.RLock()

    def write(self, offset: int, piece: memoryview) -> None:
        """Takes a piece; after an error of the disk, none any more."""
        with self._lock:
            if self._over:
                return
            self._store._last_write = time.monotonic()
            if not self._store._reserve(self, min(len(piece), self.byte_count - self.held_bytes)):
                self.discard()
                return
            try:
                if self.pending is None:
                    self.pending = self._store._backend.new_pending(self.byte_count)
                self.pending.write(offset, piece)
            except (OSError, MemoryError) as error:
                logger.warning("an upload is not kept: %s", error)
                self.discard()

    def begin(self) -> bool:
        """Reserve all of it and make its pending blob, for bytes that come another way; False if there is no room."""
        with self._lock:
            if self._over or not self._store._reserve(self, self.byte_count - self.held_bytes):
                self.discard()
                return False
            try:
                self.pending = self._store._backend.new_pending(self.byte_count)
            except (OSError, MemoryError) as error:
                logger.warning("an upload is not kept: %s", error)
                self.discard()
                return False
            return True

    def finish(self) -> None:
        """All pieces are there: hashed and kept by a thread of the store's own."""
        with self._lock:
            if self.pending is None:
                self.discard()
            elif not self._over:
                self._over = True
                self.pending.seal()
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
        shared: whether who has one token may use what came with another.
    """

    def __init__(
        self, max_bytes: int, backend: BlobBackend | None = None, least_bytes: int = 1, *, shared: bool = False
    ) -> None:
        """Open the store, with what its backend holds.

        Args:
            max_bytes: how much to keep.
            backend: where; by default in memory.
            least_bytes: what is smaller is not worth an entry of its own.
            shared: whether who has one token may use what came with another.
        """
        self.max_bytes = max_bytes
        self.shared = shared
        self._held_by: Counter[str] = Counter()
        self._least_bytes = max(least_bytes, 1)
        self._backend: BlobBackend = backend if backend is not None else MemoryBackend()
        self._blobs: OrderedDict[bytes, _Blob] = OrderedDict()
        self._held_bytes = 0
        self._unhashed: Counter[str] = Counter()
        self._last_write = 0.0
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._finished: queue.SimpleQueue[Incoming | None] = queue.SimpleQueue()
        for digest, kept, byte_count in self._backend.found():
            self._blobs[digest] = _Blob(kept, byte_count, "", set())
            self._held_bytes += byte_count
        with self._lock:
            self._make_room(0, "")
        self._hasher = threading.Thread(target=self._hash, name="skyproxy-blobs", daemon=True)
        self._hasher.start()

    def __len__(self) -> int:
        return len(self._blobs)

    def stats(self, owner: str = "") -> dict[str, int]:
        """Return how many blobs there are, their bytes, the most bytes there may be, and uploads that are not hashed
        yet: of one owner, where uploads are not shared; else of all.
        """
        with self._lock:
            if owner and not self.shared:
                count, held = sum(owner in blob.owners for blob in self._blobs.values()), self._held_by[owner]
                unhashed = self._unhashed[owner]
            else:
                count, held, unhashed = len(self._blobs), self._held_bytes, self._unhashed.total()
            return {"blobs": count, "bytes": held, "max_bytes": self.max_bytes, "unhashed": unhashed}

    def start(self, byte_count: int, user: str, owner: str = "", most_bytes: int | None = None) -> Incoming | None:
        """Begins to keep an upload; None where there is no room. Nothing is reserved until bytes come.

        Args:
            byte_count: its size.
            user: the session that it belongs to.
            owner: who that session's token belongs to; an empty text for who has the only token.
            most_bytes: what may be kept for this owner; None: as much as there is.
        """
        with self._lock:
            if byte_count < self._least_bytes or not self._has_room(byte_count, user):
                return None
            if most_bytes is not None and self._held_by[owner] + byte_count > most_bytes:
                return None
        return Incoming(self, byte_count, user, owner, most_bytes)

    def _reserve(self, incoming: Incoming, byte_count: int) -> bool:
        """Return whether there is room for so much more of an upload; then it is taken."""
        with self._lock:
            most, held = incoming.most_bytes, self._held_by[incoming.owner]
            if (most is not None and held + byte_count > most) or not self._make_room(byte_count, incoming.user):
                return False
            self._held_bytes += byte_count
            self._held_by[incoming.owner] += byte_count
            incoming.held_bytes += byte_count
            return True

    def _has_room(self, byte_count: int, user: str) -> bool:
        """Return whether so much would find room now; under the lock."""
        fixed = sum(blob.byte_count for blob in self._blobs.values() if blob.user == user and user)
        arriving = self._held_bytes - sum(blob.byte_count for blob in self._blobs.values())
        return fixed + arriving + byte_count <= self.max_bytes

    def _make_room(self, byte_count: int, user: str) -> bool:
        """Return whether there is room for so much now; under the lock."""
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

    def _remove(self, name: bytes) -> None:
        blob = self._blobs.pop(name)
        self._held_bytes -= blob.byte_count
        for owner in blob.owners:
            self._held_by[owner] -= blob.byte_count
        blob.kept.remove()

    def _name_of(self, digest: bytes, owner: str) -> bytes:
        """Return the name under which bytes are kept: apart for each owner, where they are not shared."""
        if self.shared or not owner:
            return digest
        return hashlib.blake2b(digest, key=hashlib.sha256(owner.encode()).digest(), digest_size=len(digest)).digest()

    def needs_proof(self, digest: bytes, byte_count: int, owner: str) -> bool:
        """Return whether bytes of this name are here, and their asker must show first that it has them."""
        with self._lock:
            blob = self._blobs.get(self._name_of(digest, owner))
            return self.shared and blob is not None and blob.byte_count == byte_count and owner not in blob.owners

    def is_owned(self, digest: bytes, owner: str) -> None:
        """Take note that this owner has shown that it has these bytes."""
        with self._lock:
            blob = self._blobs.get(self._name_of(digest, owner))
            if blob is not None and owner not in blob.owners:
                blob.owners.add(owner)
                self._held_by[owner] += blob.byte_count

    def copy_into(self, digest: bytes, target: memoryview, user: str, owner: str = "") -> bool:
        """Return whether the bytes of this name and size are there; then `target` holds a copy of them.

        Otherwise its content is undefined. Where `needs_proof` says so, its caller asks for one first.
        """
        blob = self._find(digest, len(target), user, owner)
        if blob is None:
            return False
        # Without the lock: a blob that is removed meanwhile stays readable until we are done with it.
        try:
            sound = blob.kept.copy_into(target, digest)
        except OSError as error:
            logger.warning("a kept upload cannot be read: %s", error)
            sound = False
        if not sound:
            self._forget(digest, owner, blob)
        return sound

    def open(self, digest: bytes, byte_count: int, user: str, owner: str = "") -> int | None:
        """Open the bytes of this name and size, to be read by another process; None where they are not there.

        Nor where their asker would have to show first that it has them: it is the other process who would ask.
        """
        if self.needs_proof(digest, byte_count, owner):
            return None
        blob = self._find(digest, byte_count, user, owner)
        if blob is None:
            return None
        try:
            descriptor = blob.kept.open(digest)
        except OSError as error:
            logger.warning("a kept upload cannot be read: %s", error)
            descriptor = None
        if descriptor is None:
            self._forget(digest, owner, blob)
        return descriptor

    def _find(self, digest: bytes, byte_count: int, user: str, owner: str) -> _Blob | None:
        name = self._name_of(digest, owner)
        with self._lock:
            blob = self._blobs.get(name)
            if blob is None or blob.byte_count != byte_count:
                return None
            blob.user = user
            self._blobs.move_to_end(name)
            return blob

    def _forget(self, digest: bytes, owner: str, blob: _Blob) -> None:
        name = self._name_of(digest, owner)
        with self._lock:
            if self._blobs.get(name) is blob:
                self._remove(name)

    def _complete(self, incoming: Incoming) -> None:
        with self._lock:
            self._unhashed[incoming.owner] += 1
        self._finished.put(incoming)

    def _drop(self, incoming: Incoming) -> None:
        if incoming.pending is not None:
            incoming.pending.discard()
        with self._lock:
            self._held_bytes -= incoming.held_bytes
            self._held_by[incoming.owner] -= incoming.held_bytes
            incoming.held_bytes = 0

    def _hash(self) -> None:
        """Names what has arrived, one after another."""
        while (incoming := self._finished.get()) is not None:
            latest = time.monotonic() + _PATIENCE_SECONDS
            while (pause := min(self._last_write + _QUIET_SECONDS, latest) - time.monotonic()) > 0:
                if self._stopping.wait(pause):
                    break
            try:
                self._name(incoming)
            except Exception as error:  # keeping uploads is optional: nothing may fail because of it
                logger.warning("an upload is not kept: %r", error)
                self._drop(incoming)
            finally:
                with self._lock:
                    self._unhashed[incoming.owner] -= 1

    def _name(self, incoming: Incoming) -> None:
        assert incoming.pending is not None, "sealed, so it was begun"
        with incoming.pending.view() as view:
            digest = content_digest(view)
        name = self._name_of(digest, incoming.owner)
        with self._lock:
            blob = self._blobs.get(name)
            if blob is not None:
                blob.user = incoming.user
                self._blobs.move_to_end(name)
        if blob is not None:
            self._drop(incoming)
            self.is_owned(digest, incoming.owner)
            return
        kept = incoming.pending.keep(name)
        with self._lock:
            self._blobs[name] = _Blob(kept, incoming.byte_count, incoming.user, {incoming.owner})

    def close(self) -> None:
        """Ends the hashing thread; what is on disk stays there."""
        self._stopping.set()
        self._finished.put(None)
        self._hasher.join(5.0)
        with contextlib.suppress(queue.Empty):
            while True:
                rest = self._finished.get_nowait()
                if rest is not None and rest.pending is not None:
                    rest.pending.discard()
        self._backend.close()


def usable_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory this process may use: the machine's, or less where a container sets a limit. None:
    unknown.
    """
    sizes: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                sizes.append(int(line.split()[1]) << 10)
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number
            sizes.append(int((root / name).read_text(encoding="ascii")))
    return min(sizes) if sizes else None
