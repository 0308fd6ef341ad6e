"""Counts the files that one cached `x + y` passes, with its worker in the same process.

    python benchmarks/files_of_an_op.py

Prints our own files in which a function runs, in the order in which Python enters them: while the operation is
recorded, until its batch is written to the socket, and on the worker until it is done. The calling thread counts, and
the worker's thread of the session. docs/topics/architecture.md gives the three lists, and
tests/project/test_files_of_an_op.py holds it to them.
"""

from __future__ import annotations

import gc
import json
import secrets
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import skyproxy
from skyproxy.tensor.activation import activate
from skyproxy.tensor.core.devices import DEVICES
from skyproxy_server.executor import Executor
from skyproxy_server.inventory import inventory
from skyproxy_server.listener import serve
from skyproxy_server.worker_host import WorkerHost

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("skyproxy", "skyproxy_server")
STAGES = ("recorded", "sent", "on the worker")
_PATIENCE_SECONDS = 60.0


class Files:
    """The files whose functions run, for each stage.

    Attributes:
        stage: what the calling thread does; None while nothing counts.
    """

    def __init__(self) -> None:
        self.stage: str | None = None
        self.seen: dict[str, list[str]] = {stage: [] for stage in STAGES}
        self._names: dict[str, str] = {}
        self._session_thread = 0

    def watch(self, frame: FrameType, event: str, _: Any) -> None:
        """Take note of a function that begins; for `sys.setprofile`."""
        if event == "call" and self.stage is not None:
            self._add(self.stage, frame)

    def watch_worker(self, frame: FrameType, event: str, _: Any) -> None:
        """Do the same on the worker's threads; whoever called it began before, and runs as well."""
        if event != "call":
            return
        if frame.f_code is Executor.run.__code__:
            self._session_thread = threading.get_ident()
        if self.stage is None or threading.get_ident() != self._session_thread:
            return
        callers: list[FrameType] = []
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_name != "_serve":
            callers.append(caller)
            caller = caller.f_back
        for each in reversed(callers):
            self._add(STAGES[2], each)

    def _add(self, stage: str, frame: FrameType) -> None:
        path = frame.f_code.co_filename
        if path not in self._names:
            parts = Path(path).relative_to(ROOT).parts if Path(path).is_relative_to(ROOT) else ("",)
            self._names[path] = "/".join(parts) if parts[0] in PACKAGES else ""
        name = self._names[path]
        if name and name not in self.seen[stage]:
            self.seen[stage].append(name)


def count() -> dict[str, list[str]]:
    """The files of each stage. Ends with no node, and nothing watched."""
    files = Files()
    activate()
    DEVICES.on_new = None  # else modes that the worker sets would be the client's as well, for they share a process
    token = secrets.token_hex(16)
    threading.setprofile(files.watch_worker)
    listener = serve("127.0.0.1", 0, token, WorkerHost(inventory("cpu")))
    try:
        with skyproxy.connect(f"ws://127.0.0.1:{listener.port}", token=token) as node:
            _count(files, node)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        listener.close()
    return files.seen


def _count(files: Files, node: Any) -> None:
    x, y = (torch.ones(64, 64, device=node.device("cpu")) for _ in range(2))
    recorder = x._sky.device.recorder
    for _ in range(20):
        z = x + y
        recorder.flush()
        _wait(recorder)
    gc.collect()
    gc.disable()  # the destructors of others are no part of it
    try:
        files.stage = STAGES[0]
        sys.setprofile(files.watch)
        z = x + y
        files.stage = STAGES[1]
        recorder.flush()
        sys.setprofile(None)
        _wait(recorder)
    finally:
        sys.setprofile(None)
        files.stage = None
        gc.enable()
    assert z[0, 0].item() == 2


def _wait(recorder: Any) -> None:
    """Wait until the worker has done everything."""
    deadline, pause = time.monotonic() + _PATIENCE_SECONDS, threading.Event()
    while not recorder.is_all_executed:
        if time.monotonic() > deadline:
            raise TimeoutError("the worker did not answer")
        pause.wait(0.001)


if __name__ == "__main__":
    print(json.dumps(count(), indent=1))
