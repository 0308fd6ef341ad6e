"""A session's own view of torch.profiler: which operations ran, in which batch, and when answers left."""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from skyproxy.protocol.messages import Message, Reply
from skyproxy_server.devices import WorkerDevices
from skyproxy_server.reports import Reports

_in_use = threading.Lock()
"""Held by the session that is being profiled: the profiler is the process's."""


class WorkerProfile:
    """The profiler of one session, from its start to its end. Belongs to the session's thread.

    Args:
        devices: what the session runs on.
        reports: what its client is told.
        shapes: whether the inputs' shapes are recorded.

    Raises:
        RuntimeError: another session of this worker is being profiled.
    """

    def __init__(self, devices: WorkerDevices, reports: Reports, *, shapes: bool) -> None:
        if not _in_use.acquire(blocking=False):
            raise RuntimeError("another session of this worker is being profiled; try again when it is done")
        self._reports = reports
        self._replies: list[tuple[int, int]] = []
        try:
            activities = [ProfilerActivity.CPU]
            self._cuda = devices.has_cuda
            if self._cuda:
                activities.append(ProfilerActivity.CUDA)
            # Without Python's stacks: PyTorch switches between the states of all threads to begin with those, and where
            # there are others it can leave the interpreter to none of them, for ever.
            self._profiler = torch.profiler.profile(activities=activities, record_shapes=shapes)
            self._profiler.start()
        except BaseException:
            _in_use.release()
            raise
        reports.watch = self._note

    def _note(self, message: Message) -> None:
        if isinstance(message, Reply):
            self._replies.append((message.request, time.time_ns()))

    @contextlib.contextmanager
    def batch(self, sequence: int) -> Iterator[None]:
        """Marks what is executed inside as one batch."""
        with torch.profiler.record_function(f"batch {sequence}"):
            yield

    def stop(self) -> bytes:
        """Waits for the device and ends the profile.

        Returns:
            Compressed JSON: "trace", as Chrome wants it, and "replies", each with its request and when it left.
        """
        try:
            if self._cuda:
                torch.cuda.synchronize()
            self._profiler.stop()
            with tempfile.TemporaryDirectory(prefix="skyproxy-") as folder:
                path = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(path))
                trace: object = json.loads(path.read_bytes())
        finally:
            self._leave()
        return gzip.compress(json.dumps({"trace": trace, "replies": self._replies}).encode(), 1)

    def abandon(self) -> None:
        """The session ends, and nobody wants to know any more."""
        try:
            self._profiler.stop()
        finally:
            self._leave()

    def _leave(self) -> None:
        self._reports.watch = None
        _in_use.release()
