"""Places where kept uploads lie: in this process's memory, or as files in a folder that outlives it."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from skyproxy.errors import ConfigurationError
from skyproxy.protocol.digests import DIGEST_BYTES, content_digest

_SUFFIX = ".blob"
_THREADS = 4
_DRAFT_PREFIX = "draft-"
_FORGOTTEN_DRAFT_SECONDS = 3600.0
"""Pending blobs that are older belong to a worker that is gone."""


class StoredBlob(Protocol):
    """Bytes under their name. They never change."""

    def copy_into(self, target: memoryview, digest: bytes) -> bool:
        """Copies them; whether they are what `digest` names."""

    def open(self, digest: bytes) -> int | None:
        """Open them for another process; the descriptor is the caller's. None where they are not what `digest` names.

        Raises:
            OSError: they are gone.
        """

    def remove(self) -> None:
        """Forgets them; who reads them at the moment can finish."""


class PendingBlob(Protocol):
    """Bytes that arrive and have no name yet."""

    def write(self, offset: int, piece: memoryview) -> None: ...

    def seal(self) -> None:
        """Nothing is written any more: lets go of what writing needs. Thousands may wait to be hashed."""

    def view(self) -> AbstractContextManager[memoryview]:
        """All of them, to be hashed."""

    def keep(self, digest: bytes) -> StoredBlob:
        """Gives them their name."""

    def discard(self) -> None: ...


class BlobBackend(Protocol):
    """Makes pending blobs, and knows what lay here before."""

    def new_pending(self, byte_count: int) -> PendingBlob: ...

    def found(self) -> Iterable[tuple[bytes, StoredBlob, int]]:
        """Names, bytes and sizes of what is here already; what was used longest ago comes first."""

    def close(self) -> None:
        """Ends what it uses; what lies here stays."""


class _Memory:
    """Both a pending blob and what becomes of it."""

    def __init__(self, byte_count: int) -> None:
        # A mapping of its own: once freed, it returns to the system at once and leaves no hole in the heap.
        mapping = mmap.mmap(-1, byte_count)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)  # a fault for each 4 KiB would slow the upload down
        self._view = memoryview(mapping)

    def write(self, offset: int, piece: memoryview) -> None:
        self._view[offset : offset + len(piece)] = piece

    def seal(self) -> None:
        pass

    @contextlib.contextmanager
    def view(self) -> Iterator[memoryview]:
        yield self._view

    def keep(self, digest: bytes) -> _Memory:
        return self

    def copy_into(self, target: memoryview, digest: bytes) -> bool:
        target[:] = self._view  # hashed when it came, and nobody else can reach it
        return True

    def open(self, digest: bytes) -> int | None:
        raise OSError("kept in the memory of this process")

    def discard(self) -> None:
        """The memory goes with the last reader."""

    remove = discard


class MemoryBackend:
    """Uploads in memory."""

    def new_pending(self, byte_count: int) -> PendingBlob:
        return _Memory(byte_count)

    def found(self) -> Iterable[tuple[bytes, StoredBlob, int]]:
        return ()

    def close(self) -> None:
        pass


class _File:
    def __init__(self, path: Path, hashing: Executor) -> None:
        self._path = path
        self._hashing = hashing

    def copy_into(self, target: memoryview, digest: bytes) -> bool:
        """The bytes are hashed again, because a file can change behind our back."""
        with self._path.open("rb", buffering=0) as file:
            done = 0
            while done < len(target):
                count = file.readinto(target[done:])
                if not count:
                    return False
                done += count
        with contextlib.suppress(OSError):
            os.utime(self._path)  # after a restart, the order of use is known
        return content_digest(target, self._hashing.map) == digest

    def open(self, digest: bytes) -> int | None:
        with self._path.open("rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping, memoryview(mapping) as view:
                if content_digest(view, self._hashing.map) != digest:
                    return None
            with contextlib.suppress(OSError):
                os.utime(self._path)
            return os.dup(file.fileno())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


class _PendingFile:
    def __init__(self, path: Path, byte_count: int, hashing: Executor) -> None:
        self._path = path
        self._byte_count = byte_count
        self._hashing = hashing
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.truncate(self._descriptor, byte_count)
        except OSError:
            self.discard()
            raise

    def write(self, offset: int, piece: memoryview) -> None:
        assert self._descriptor is not None
        while len(piece):
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            count = os.write(self._descriptor, piece)
            offset, piece = offset + count, piece[count:]

    def seal(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @contextlib.contextmanager
    def view(self) -> Iterator[memoryview]:
        with self._path.open("rb") as file:
            with mmap.mmap(file.fileno(), self._byte_count, access=mmap.ACCESS_READ) as mapping:
                with memoryview(mapping) as view:
                    yield view

    def keep(self, digest: bytes) -> StoredBlob:
        target = self._path.with_name(digest.hex() + _SUFFIX)
        os.replace(self._path, target)
        return _File(target, self._hashing)

    def discard(self) -> None:
        self.seal()
        self._path.unlink(missing_ok=True)


class FolderBackend:
    """Uploads as files, named by their hash. They survive the worker; each is hashed again when it is used."""

    def __init__(self, folder: Path) -> None:
        """Open the folder, or make it.

        Raises:
            ConfigurationError: the folder cannot be made or written.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--blob-dir {folder} cannot be made: {error.strerror}.") from error
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigurationError(f"--blob-dir {folder} cannot be written. Name a folder that the worker owns.")
        self._folder = folder
        self._numbers = itertools.count(1)
        # A client waits while what it asked for is hashed again.
        self._hashing = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "skyproxy-blob-files")

    def new_pending(self, byte_count: int) -> PendingBlob:
        path = self._folder / f"{_DRAFT_PREFIX}{os.getpid()}-{next(self._numbers)}"
        return _PendingFile(path, byte_count, self._hashing)

    def close(self) -> None:
        self._hashing.shutdown(wait=False, cancel_futures=True)

    def found(self) -> Iterable[tuple[bytes, StoredBlob, int]]:
        now = time.time()
        rows: list[tuple[float, bytes, Path, int]] = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError, ValueError):
                status = path.stat()
                if path.name.startswith(_DRAFT_PREFIX) and now - status.st_mtime > _FORGOTTEN_DRAFT_SECONDS:
                    path.unlink()
                elif path.suffix == _SUFFIX and len(digest := bytes.fromhex(path.stem)) == DIGEST_BYTES:
                    rows.append((status.st_mtime, digest, path, status.st_size))
        return [(digest, _File(path, self._hashing), size) for _, digest, path, size in sorted(rows)]
