"""The places where snapshots lie: a folder, or an address of fsspec such as `s3://bucket/snapshots`.

A file that is there is whole: it is written under another name, or sent in one piece, and outlives a crash.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from skyproxy.errors import ConfigurationError
from skyproxy.extras import install_command
from skyproxy.interrupts import raised_by_handler
from skyproxy.snapshots.locks import (
    LOCK_LOOK_SECONDS,
    LOCK_SECONDS,
    SHARED_FILE,
    SHARED_FOLDER,
    is_shared,
    lock,
    open_lock,
    share,
)
from skyproxy.snapshots.sources import MAX_READ_BYTES, NO_LINK, OPEN_FLAGS, PlainFile, Source, read_whole, refuse_more

T = TypeVar("T")
_URL_MARK = "://"
_ATTEMPTS = 3
_PAUSE_SECONDS = 0.2
"""Before the second attempt at a store elsewhere; twice as long before the third."""
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that another attempt would meet again."""


class FileStore(Protocol):
    """A place with files in it, and with further places.

    Every method raises OSError where the place cannot be read or written.

    Attributes:
        name: the last part of where it is.
    """

    name: str

    def child(self, name: str) -> FileStore:
        """The place of this name below it; made when something is written there."""

    def places(self) -> list[str]:
        """The names of the places below it."""

    def files(self) -> list[str]:
        """The names of its files, drafts included; none where there is no such place."""

    def prepare(self) -> None:
        """Make the place, if need be."""

    def read(self, name: str, most_bytes: int = MAX_READ_BYTES) -> bytes:
        """The content of a file, which may have so many bytes."""

    def write(self, name: str, content: bytes) -> None:
        """Put a file there, in place of what has its name, whole or not at all."""

    def open(self, name: str) -> Source:
        """Open a file, which may not be a link."""

    def draft(self, name: str) -> Path:
        """Return where a large file may be written, on this machine, that `publish` takes."""

    def publish(self, draft: Path, name: str) -> None:
        """Give a draft, which is synchronized with the disk, its name."""

    def settle(self) -> None:
        """Have the names of its files outlive a crash."""

    def remove(self, name: str) -> None:
        """Delete a file; one that is gone is fine."""

    def remove_place(self) -> None:
        """Delete the place, if nothing is left in it."""

    def exclusive(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Keep others out for a moment, by a lock on a file. A store elsewhere has none, and keeps nobody out."""

    def held(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Have a lock on a file that ends with the block, and with this process; in a store elsewhere there is none."""

    def is_held(self, name: str) -> bool | None:
        """Return whether a process of this machine has that lock; None where that cannot be known."""


def is_address(location: object) -> bool:
    """Return whether this is an address of fsspec, not a path."""
    return isinstance(location, str) and _URL_MARK in location


def open_store(location: str | os.PathLike[str]) -> FileStore:
    """Return the place at a path or an address.

    Raises:
        ConfigurationError: the address needs a package that is not there, or is none.
    """
    if isinstance(location, str) and is_address(location):
        if location.startswith("file://"):
            return LocalStore(Path(location.removeprefix("file://")))
        return FsspecStore(location)
    return LocalStore(Path(location))


class LocalStore:
    """A folder. What it makes is its user's alone; below one that its group shares, its group's as well.

    In such a one, others of the group can put a link in the place of anything at any moment. So what is done in a
    folder below it is done in the folder that was opened, and to which no link led.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    def child(self, name: str) -> LocalStore:
        return LocalStore(self.path / name)

    @contextlib.contextmanager
    def _open_folder(self) -> Iterator[int | None]:
        """Open the folder; where the system cannot, give None."""
        if os.name != "posix":
            yield None
            return
        no_link = NO_LINK if is_shared(self.path.parent) else 0
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | no_link)
        try:
            yield folder
        finally:
            os.close(folder)

    def _in(self, folder: int | None, name: str) -> str:
        return name if folder is not None else str(self.path / name)

    def places(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._open_folder() as folder:
            follows = folder is None or not is_shared(folder)
            with os.scandir(folder if folder is not None else self.path) as items:
                return [item.name for item in items if item.is_dir(follow_symlinks=follows)]
        return []

    def files(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._open_folder() as folder:
            return os.listdir(folder if folder is not None else self.path)
        return []

    def prepare(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_shared(self.path.parent):
            with self._open_folder() as folder:
                if folder is not None:
                    share(folder, SHARED_FOLDER)

    def read(self, name: str, most_bytes: int = MAX_READ_BYTES) -> bytes:
        with contextlib.closing(self.open(name)) as source:
            return read_whole(source, most_bytes)

    def write(self, name: str, content: bytes) -> None:
        draft = f".{name}.{secrets.token_hex(4)}.draft"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
        with self._open_folder() as folder:
            path = self._in(folder, draft)
            try:
                with os.fdopen(os.open(path, flags, 0o600, dir_fd=folder), "wb") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
                self._give_name(folder, draft, name)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path, dir_fd=folder)
                raise
            _settle(folder)

    def open(self, name: str) -> Source:
        with self._open_folder() as folder:
            return PlainFile(self._in(folder, name), folder)

    def draft(self, name: str) -> Path:
        return self.path / f".{name}.draft"

    def publish(self, draft: Path, name: str) -> None:
        with self._open_folder() as folder:
            self._give_name(folder, draft.name, name)

    def _give_name(self, folder: int | None, draft: str, name: str) -> None:
        if folder is not None and is_shared(folder):
            file = os.open(draft, OPEN_FLAGS, dir_fd=folder)
            try:
                share(file, SHARED_FILE)
            finally:
                os.close(file)
        os.replace(self._in(folder, draft), self._in(folder, name), src_dir_fd=folder, dst_dir_fd=folder)

    def settle(self) -> None:
        with self._open_folder() as folder:
            _settle(folder)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._open_folder() as folder:
            os.unlink(self._in(folder, name), dir_fd=folder)

    def remove_place(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()

    @contextlib.contextmanager
    def exclusive(self, name: str) -> Iterator[None]:
        with self._lock_file(name) as file:
            deadline = time.monotonic() + LOCK_SECONDS
            # Whoever has it may be stopped in between: without end, all others would be, too.
            while lock(file) is False and time.monotonic() < deadline:
                time.sleep(LOCK_LOOK_SECONDS)
            yield

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        with self._lock_file(name) as file:
            lock(file)
            yield

    def is_held(self, name: str) -> bool | None:
        if name not in self.files():
            return False
        with self._lock_file(name) as file:
            got = lock(file)
            return None if got is None else not got

    @contextlib.contextmanager
    def _lock_file(self, name: str) -> Iterator[int]:
        with self._open_folder() as folder, open_lock(self._in(folder, name), folder) as file:
            yield file

    def __str__(self) -> str:
        return str(self.path)


def _settle(folder: int | None) -> None:
    """Have the names of an open folder's files outlive a crash."""
    if folder is not None:
        os.fsync(folder)


class FsspecStore:
    """A place that fsspec reaches. Large files are written to this machine's temporary folder first. What fails there
    is tried again, and what was written is looked at: a connection may break in the middle.

    Args:
        address: such as "s3://bucket/folder".

    Raises:
        ConfigurationError: fsspec, or what it needs for this kind of address, is not installed.
    """

    def __init__(self, address: str) -> None:
        try:
            import fsspec  # type: ignore[import-untyped]
        except ImportError as error:
            raise ConfigurationError(
                f"{_redact(address)} is an address for fsspec, which is not installed. Install it: "
                f"{install_command('fsspec')}; or give a folder"
            ) from error
        try:
            self._system, self._path = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"{_redact(address)} cannot be used: {error}") from error
        self._address = address.rstrip("/")
        self.name = self._path.rstrip("/").rpartition("/")[2]

    def child(self, name: str) -> FsspecStore:
        made = object.__new__(FsspecStore)
        made._system, made._path = self._system, f"{self._path.rstrip('/')}/{name}"
        made._address, made.name = f"{self._address}/{name}", name
        return made

    def places(self) -> list[str]:
        return self._names("directory")

    def files(self) -> list[str]:
        return self._names("file")

    def _names(self, kind: str) -> list[str]:
        with self._name_place():
            try:
                rows = self._attempt(self._fresh_rows)
            except FileNotFoundError:
                return []
            return [row["name"].rstrip("/").rpartition("/")[2] for row in rows if row["type"] == kind]

    def _fresh_rows(self) -> list[dict[str, Any]]:
        self._system.invalidate_cache()
        rows: list[dict[str, Any]] = self._system.ls(self._path, detail=True)
        return rows

    def prepare(self) -> None:
        with self._name_place():
            self._attempt(lambda: self._system.makedirs(self._path, exist_ok=True))

    def read(self, name: str, most_bytes: int = MAX_READ_BYTES) -> bytes:
        with self._name_place():
            content = bytes(self._attempt(lambda: self._system.cat_file(self._join(name), end=most_bytes + 1)))
        return refuse_more(content, len(content), most_bytes)

    def write(self, name: str, content: bytes) -> None:
        def put() -> None:
            self._system.pipe_file(self._join(name), content)
            self._check_size(name, len(content))

        with self._name_place():
            self._attempt(put)

    def open(self, name: str) -> Source:
        with self._name_place():
            return self._attempt(lambda: _Remote(self, self._system, self._join(name)))

    def draft(self, name: str) -> Path:
        return Path(tempfile.gettempdir()) / f".skyproxy-{secrets.token_hex(8)}-{name}.draft"

    def publish(self, draft: Path, name: str) -> None:
        def put() -> None:
            self._system.put_file(str(draft), self._join(name))
            self._check_size(name, draft.stat().st_size)

        try:
            with self._name_place():
                self._attempt(put)
        finally:
            draft.unlink(missing_ok=True)

    def settle(self) -> None:
        pass

    def remove(self, name: str) -> None:
        with self._name_place(), contextlib.suppress(FileNotFoundError):
            self._attempt(lambda: self._system.rm_file(self._join(name)))

    def remove_place(self) -> None:
        with contextlib.suppress(Exception):  # an object store has no folders
            self._system.rmdir(self._path)

    def exclusive(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def held(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_held(self, name: str) -> bool | None:
        return None

    def _check_size(self, name: str, byte_count: int) -> None:
        """Refuse a file of another size than was written.

        Raises:
            OSError: a file that was just written is not whole.
        """
        self._system.invalidate_cache()
        there = self._system.size(self._join(name))
        if there != byte_count:
            raise OSError(errno.EIO, f"{name} has {there} bytes there, and {byte_count} were written")

    def _attempt(self, act: Callable[[], T]) -> T:
        """Do something that may fail for a moment, a few times.

        Raises:
            Exception: what the last attempt raised, or one that no other attempt would mend.
        """
        for pause in (_PAUSE_SECONDS * 2**number for number in range(_ATTEMPTS - 1)):
            try:
                return act()
            except _FINAL:
                raise
            except Exception as error:
                if raised_by_handler(error):
                    raise
                time.sleep(pause * random.uniform(0.5, 1.5))
        return act()

    def _join(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _name_place(self) -> Iterator[None]:
        """Turn what other libraries raise into an OSError that names the place.

        Raises:
            OSError: something was raised.
        """
        try:
            yield
        except OSError as error:
            if raised_by_handler(error):
                raise
            reason = error.strerror or f"{type(error).__name__}: {error!s:.200}"
            raise OSError(error.errno or errno.EIO, reason, _redact(self._address)) from error
        except Exception as error:
            if raised_by_handler(error):
                raise
            reason = f"{type(error).__name__}: {error!s:.200}"
            raise OSError(errno.EIO, reason, _redact(self._address)) from error

    def __str__(self) -> str:
        return _redact(self._address)


class _Remote:
    def __init__(self, store: FsspecStore, system: Any, path: str) -> None:
        self._store, self._system, self._path = store, system, path
        self.size = int(system.size(path))

    def read_into(self, target: memoryview, offset: int) -> int:
        end = min(offset + len(target), self.size)
        if end <= offset:
            return 0
        with self._store._name_place():
            content = self._store._attempt(lambda: self._system.cat_file(self._path, start=offset, end=end))
        count = min(len(content), len(target))
        target[:count] = content[:count]
        return count

    def close(self) -> None:
        pass


def _redact(address: str) -> str:
    """The address without what may be a password in it."""
    kind, mark, rest = address.partition(_URL_MARK)
    place, slash, path = rest.partition("/")
    return f"{kind}{mark}{place.rpartition('@')[2]}{slash}{path}"
