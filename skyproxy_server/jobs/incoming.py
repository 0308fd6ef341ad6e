"""A job on its way to this worker: its bytes arrive in a folder that has another name until all of them are there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from skyproxy.errors import LimitExceededError, ProtocolError
from skyproxy.settings import Settings
from skyproxy_server.jobs.job import PAYLOAD
from skyproxy_server.jobs.records import JobRecord


class IncomingJob:
    """A job whose bytes are arriving.

    Attributes:
        record: of the job.
        folder: where its bytes arrive.
    """

    def __init__(
        self,
        record: JobRecord,
        folder: Path,
        payload_bytes: object,
        settings: Settings,
        on_end: Callable[[JobRecord], object],
    ) -> None:
        """Begin to receive a job.

        Args:
            record: of the job.
            folder: for it, which is made.
            payload_bytes: as the client announces them.
            settings: limits.
            on_end: called when it is no longer on its way.

        Raises:
            ProtocolError: that is not a number of bytes.
            LimitExceededError: it is too many.
        """
        if type(payload_bytes) is not int or payload_bytes < 0:
            raise ProtocolError("payload_bytes is a number of bytes")
        if payload_bytes > settings.max_job_bytes:
            raise LimitExceededError(
                f"a job may send {settings.max_job_bytes} bytes, and this one sends {payload_bytes}; "
                "SKYPROXY_MAX_JOB_BYTES on the worker raises it"
            )
        self.record = record
        self.folder = folder
        self._left = payload_bytes
        self._on_end = on_end
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        descriptor = os.open(folder / PAYLOAD, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "wb")

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes.

        Raises:
            ProtocolError: they are more than was announced.
            OSError: they cannot be written.
        """
        size = memoryview(data).nbytes
        if size > self._left:
            raise ProtocolError("a job sends more bytes than it has announced")
        self._left -= size
        self._file.write(data)

    def finish(self, folder: Path) -> None:
        """Give it the name by which it is found again.

        Raises:
            ProtocolError: bytes are missing.
            OSError: it cannot be written.
        """
        if self._left:
            raise ProtocolError(f"{self._left} bytes of the job are missing")
        self._file.close()
        self.record.save(self.folder)
        shutil.rmtree(folder, ignore_errors=True)  # of a job that could not be read
        self.folder.rename(folder)
        self._on_end(self.record)

    def discard(self) -> None:
        """Forget it; it was not started."""
        with contextlib.suppress(OSError):
            self._file.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._on_end(self.record)
