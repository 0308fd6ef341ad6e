"""Kept uploads of sessions in processes of their own: the supervisor keeps them, in files that nobody can change.

A session writes an upload into a file in memory that the supervisor has made. When all of it is there, the supervisor
seals it, so that not even whoever still has it open can change a byte, and hashes it itself. What is asked for comes
back as an open file, to be copied.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import logging
import mmap
import os
import resource
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from skyproxy_server.auth import OWNER, Identity
from skyproxy_server.blob_backends import FolderBackend, PendingBlob, StoredBlob
from skyproxy_server.blobs import BlobStore, Incoming
from skyproxy_server.control_channel import ChannelClosedError, ControlChannel
from skyproxy_server.isolation.session_words import count

logger = logging.getLogger("skyproxy.server")

_ADD_SEALS = 1033  # of <linux/fcntl.h>, as the seals are
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE = 1, 2, 4, 8
_MAX_DRAFTS = 1024
_MOST_DESCRIPTORS = 1 << 16
_OTHER_DESCRIPTORS = 700
"""Left for connections and sessions."""
_COPY_BYTES = 16 << 20
_ANSWER_SECONDS = 60.0


# --- the supervisor's side -------------------------------------------------------------------------------------------


class _Sealable:
    """A file in memory: a pending blob that a session writes, and what becomes of it."""

    _open: ClassVar[set[int]] = set()

    def __init__(self, byte_count: int) -> None:
        """Make an empty file in memory.

        Raises:
            OSError: there is no memory, or so many files are open that connections would find none left.
        """
        if len(self._open) >= _descriptors_for_uploads():
            raise OSError(errno.EMFILE, "too many uploads are kept for the descriptors of this process")
        self._descriptor = os.memfd_create("skyproxy-upload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, byte_count)
            fcntl.fcntl(self._descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
        except OSError:
            os.close(self._descriptor)
            raise
        self._byte_count = byte_count
        self._open.add(self._descriptor)
        self._sealed = False
        self._lock = threading.Lock()

    def write(self, offset: int, piece: memoryview) -> None:
        raise NotImplementedError("the session writes it")

    def seal(self) -> None:
        if not self._sealed:
            fcntl.fcntl(self._descriptor, _ADD_SEALS, _SEAL_WRITE | _SEAL_SEAL)
            self._sealed = True

    @contextlib.contextmanager
    def view(self) -> Iterator[memoryview]:
        with mmap.mmap(self._descriptor, self._byte_count, access=mmap.ACCESS_READ) as mapping:
            with memoryview(mapping) as view:
                yield view

    def keep(self, digest: bytes) -> StoredBlob:
        return self

    def open(self, digest: bytes = b"") -> int:
        with self._lock:  # or its number could belong to another file by now
            return os.dup(self._descriptor)

    def copy_into(self, target: memoryview, digest: bytes) -> bool:
        with self.view() as view:
            target[:] = view
        return True

    def discard(self) -> None:
        """Forget it; whoever has it open can finish."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                self._open.discard(descriptor)
                os.close(descriptor)

    remove = discard


@functools.cache
def _descriptors_for_uploads() -> int:
    """Return how many descriptors of this process uploads may take, when its limit is as high as we may set it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, _MOST_DESCRIPTORS) if hard != resource.RLIM_INFINITY else _MOST_DESCRIPTORS
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_DESCRIPTORS, 0)


class SealedMemoryBackend:
    """Uploads in memory, as files that can be passed on."""

    def new_pending(self, byte_count: int) -> PendingBlob:
        return _Sealable(byte_count)

    def found(self) -> Iterable[tuple[bytes, StoredBlob, int]]:
        return ()

    def close(self) -> None:
        pass


class _SealedToFile(_Sealable):
    """A pending blob in memory that becomes a file of a folder."""

    def __init__(self, byte_count: int, folder: FolderBackend) -> None:
        super().__init__(byte_count)
        self._folder = folder

    def keep(self, digest: bytes) -> StoredBlob:
        pending = self._folder.new_pending(self._byte_count)
        try:
            with self.view() as view:
                for offset in range(0, len(view), _COPY_BYTES):
                    pending.write(offset, view[offset : offset + _COPY_BYTES])
            pending.seal()
            return pending.keep(digest)
        except OSError:
            pending.discard()
            raise
        finally:
            self.discard()


class SealedFolderBackend(FolderBackend):
    """Uploads as files of a folder, which arrive in memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files = FolderBackend(folder)

    def new_pending(self, byte_count: int) -> PendingBlob:
        return _SealedToFile(byte_count, self._files)

    def close(self) -> None:
        super().close()
        self._files.close()


class UploadDesk:
    """One session's requests to the store, by the channel that it has for them. Its methods belong to one thread."""

    def __init__(self, store: BlobStore, user: str, client: Identity = OWNER) -> None:
        self._store = store
        self._user = user
        self._owner = "" if client.name == OWNER.name else client.name
        self._most_bytes = client.bounds.blob_bytes
        self._numbers = itertools.count(1)
        self._drafts: dict[int, Incoming] = {}

    def answer(self, channel: ControlChannel) -> None:
        """Answer one question.

        Raises:
            ChannelClosedError: the session does not read its answers, or none will come.
            KeyError, TypeError, ValueError: it was none.
        """
        question, descriptors = channel.receive(0)
        for descriptor in descriptors:
            os.close(descriptor)
        words, given = self._answer(question)
        try:
            channel.send(words, given, wait=False)
        finally:
            for descriptor in given:
                os.close(descriptor)

    def _answer(self, question: dict[str, Any]) -> tuple[dict[str, object], list[int]]:
        what = question["do"]
        if what == "find":
            digest, size = question["digest"], count(question["size"])
            if not isinstance(digest, bytes):
                raise TypeError("a digest is bytes")
            descriptor = self._store.open(digest, size, self._user, self._owner)
            return {"found": descriptor is not None}, [] if descriptor is None else [descriptor]
        if what == "start":
            return self._start(count(question["size"]))
        if what == "stats":
            return dict(self._store.stats(self._owner)), []
        incoming = self._drafts.pop(count(question["number"]), None)
        if incoming is not None:
            self._end(incoming, whole=what == "finish")
        return {}, []

    def _start(self, byte_count: int) -> tuple[dict[str, object], list[int]]:
        if len(self._drafts) >= _MAX_DRAFTS:
            return {"number": 0}, []
        incoming = self._store.start(byte_count, self._user, self._owner, self._most_bytes)
        if incoming is None or not incoming.begin():
            return {"number": 0}, []
        assert isinstance(incoming.pending, _Sealable)
        number = next(self._numbers)
        self._drafts[number] = incoming
        return {"number": number}, [incoming.pending.open()]

    def _end(self, incoming: Incoming, *, whole: bool) -> None:
        if not whole:
            incoming.discard()
            return
        assert isinstance(incoming.pending, _Sealable)
        try:
            incoming.pending.seal()  # fails where the session still has it mapped, to change it later
        except OSError as error:
            logger.warning("an upload is not kept: %s", error)
            incoming.discard()
            return
        incoming.finish()

    def close(self) -> None:
        """Forget what is unfinished."""
        while self._drafts:
            _, incoming = self._drafts.popitem()
            incoming.discard()


# --- the session's side ----------------------------------------------------------------------------------------------


class _Writing:
    """An upload that is being kept; see `blobs.Incoming`. The supervisor learns of it when its first bytes come."""

    def __init__(self, uploads: SharedUploads, byte_count: int) -> None:
        self._uploads = uploads
        self._byte_count = byte_count
        self._number = 0
        self._descriptor = -1
        self._over = False
        self._lock = threading.RLock()

    def _begin(self) -> bool:
        if not self._number and not self._over:
            words, descriptors = self._uploads.ask({"do": "start", "size": self._byte_count})
            self._number = words.get("number") or 0
            if self._number:
                self._descriptor = descriptors[0]
            self._over = not self._number
        return not self._over

    def write(self, offset: int, piece: memoryview) -> None:
        with self._lock:
            if not self._begin():
                return
            try:
                while len(piece):
                    count = os.pwrite(self._descriptor, piece, offset)
                    offset, piece = offset + count, piece[count:]
            except OSError as error:
                logger.warning("an upload is not kept: %s", error)
                self.discard()

    def finish(self) -> None:
        self._end("finish")

    def discard(self) -> None:
        self._end("discard")

    def _end(self, how: str) -> None:
        with self._lock:
            self._over = True
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)
                self._uploads.ask({"do": how, "number": self._number})


class SharedUploads:
    """The supervisor's store, as a session sees it; see `blobs.Uploads`."""

    def __init__(self, channel: ControlChannel, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._channel: ControlChannel | None = channel
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.stats()["blobs"]

    def ask(self, question: dict[str, object]) -> tuple[dict[str, Any], list[int]]:
        """Ask the supervisor; an empty answer once it does not answer any more, for keeping is a favour."""
        with self._lock:
            if self._channel is None:
                return {}, []
            try:
                self._channel.send(question)
                return self._channel.receive(_ANSWER_SECONDS)
            except (ChannelClosedError, TimeoutError) as error:
                logger.warning("uploads are not kept any more: %s", error)
                self._channel = None  # a late answer must not pass for that of another question
                return {}, []

    def stats(self, owner: str = "") -> dict[str, int]:
        empty = {"blobs": 0, "bytes": 0, "max_bytes": self.max_bytes, "unhashed": 0}
        return {**empty, **self.ask({"do": "stats"})[0]}

    def start(self, byte_count: int, user: str, owner: str = "", most_bytes: int | None = None) -> _Writing | None:
        return _Writing(self, byte_count)

    def needs_proof(self, digest: bytes, byte_count: int, owner: str) -> bool:
        """Not here: the supervisor gives nobody what it would have to prove first."""
        return False

    def is_owned(self, digest: bytes, owner: str) -> None:
        """The supervisor knows who has uploaded what."""

    def copy_into(self, digest: bytes, target: memoryview, user: str, owner: str = "") -> bool:
        words, descriptors = self.ask({"do": "find", "digest": digest, "size": len(target)})
        if not words.get("found"):
            return False
        try:
            done = 0
            while done < len(target):
                count = os.preadv(descriptors[0], [target[done : done + _COPY_BYTES]], done)
                if not count:
                    return False
                done += count
        except OSError as error:
            logger.warning("a kept upload cannot be read: %s", error)
            return False
        finally:
            os.close(descriptors[0])
        return True

    def abandon(self) -> None:
        """Close this process's copy: in a forked child."""
        if self._channel is not None:
            self._channel.abandon()
