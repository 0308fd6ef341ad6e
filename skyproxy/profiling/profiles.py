"""One picture of both sides: what this process recorded, what was on the wire, what the workers computed."""

from __future__ import annotations

import gzip
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity

from skyproxy import torch_codec
from skyproxy.errors import ConfigurationError, ProtocolError, SessionLostError
from skyproxy.profiling.clock import Clock, ClockReading, read_clock
from skyproxy.profiling.received import MOST_PACKED_BYTES, read_profile
from skyproxy.profiling.timeline import Side, Timeline, merge
from skyproxy.session.session import Session
from skyproxy.tensor.core.devices import DEVICES

logger = logging.getLogger("skyproxy")

AT_END: list[Callable[[Profile], object]] = []
"""Called with each profile whose block has ended."""


class _Profiled:
    """One worker that is being profiled."""

    def __init__(self, session: Session, names: list[str], shapes: bool, stacks: bool) -> None:
        self.session = session
        self.names = names
        self.first: ClockReading = self._read()
        session.call("profile_start", shapes, stacks)
        self.trace = session.start_trace()

    def _read(self) -> ClockReading:
        return read_clock(lambda: cast(int, self.session.call("clock")))

    def finish(self) -> Side | None:
        """Return what the worker saw; None where it is lost."""
        self.session.stop_trace()
        device = DEVICES.of(self.names[0])
        try:
            handle = device.new_handle(None)
            size = self.session.call("profile_stop", handle.slot)
            if size > MOST_PACKED_BYTES:
                raise ProtocolError(f"the worker announces a profile of {size} bytes; {MOST_PACKED_BYTES} are the most")
            description = torch_codec.describe(torch.empty(size, dtype=torch.uint8, device="meta"))
            packed = self.session.fetch(handle.slot, description)
            clock = Clock(self.first, self._read())
        except SessionLostError:
            return None
        trace, replies = read_profile(torch_codec.byte_view(packed))
        return Side(", ".join(self.names), trace, replies, self.trace, clock)


class Profile:
    """A profile that is being made, or was; see `profile`.

    Attributes:
        trace: the whole trace as Chrome's format has it, once the block has ended; else None.

    Example:
        ```python
        with skyproxy.profile("trace.json") as profile:
            model(x).sum().item()
        print(profile.summary())
        ```
    """

    def __init__(self, path: str | os.PathLike[str] | None, record_shapes: bool, with_stack: bool) -> None:
        self.trace: dict[str, object] | None = None
        self._path = Path(path) if path is not None else None
        self._shapes = record_shapes
        self._stacks = with_stack
        self._workers: list[_Profiled] = []
        self._timeline: Timeline | None = None
        self._profiler: Any = None
        self._started_ns = 0

    def __enter__(self) -> Profile:
        if self._profiler is not None:
            raise ConfigurationError("this profile was already made. Make another one: skyproxy.profile(...)")
        DEVICES.at(0)
        sessions: dict[int, tuple[Session, list[str]]] = {}
        for device in DEVICES.alive():
            sessions.setdefault(id(device.session), (device.session, []))[1].append(f"sky:{device.index}")
        try:
            for session, names in sessions.values():
                self._workers.append(_Profiled(session, names, self._shapes, self._stacks))
            self._profiler = torch.profiler.profile(
                activities=[ProfilerActivity.CPU], record_shapes=self._shapes, with_stack=self._stacks
            )
            self._started_ns = time.time_ns()
            self._profiler.start()
        except BaseException:
            self._finish_workers()
            raise
        return self

    def _finish_workers(self) -> list[Side]:
        """Ends the profile on every worker, whatever becomes of the others."""
        sides: list[Side] = []
        trouble: list[Exception] = []
        while self._workers:
            try:
                side = self._workers.pop(0).finish()
            except Exception as error:
                trouble.append(error)
            else:
                sides += [side] if side is not None else []
        if trouble:
            raise trouble[0]
        return sides

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            sides = self._finish_workers()
        except Exception:
            if error is None:
                raise
            sides = []  # the program's own error tells more
        finally:
            self._profiler.stop()
        own = _export_trace(self._profiler)
        self._timeline = merge(own, sides, self._started_ns, time.time_ns())
        self.trace = self._timeline.trace
        if self._path is not None:
            self.save(self._path)
        for observer in list(AT_END):
            try:
                observer(self)
            except Exception:
                logger.exception("a profile could not be shown")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace, to be opened at ui.perfetto.dev or chrome://tracing. A name that ends in .gz is compressed.

        Raises:
            ConfigurationError: the block has not ended yet.

        Example:
            ```python
            with skyproxy.profile() as profile:
                torch.ones(8, device="sky:0").sum().item()
            profile.save("trace.json.gz")
            ```
        """
        data = json.dumps(self._require_timeline().trace).encode()
        target = Path(path)
        target.write_bytes(gzip.compress(data, 5) if target.suffix == ".gz" else data)

    def summary(self, rows: int = 10) -> str:
        """Return where the time went, as a table for people.

        Args:
            rows: how many of the workers' operations are named.

        Raises:
            ConfigurationError: the block has not ended yet.

        Example:
            ```python
            with skyproxy.profile() as profile:
                torch.ones(8, device="sky:0").sum().item()
            print(profile.summary(rows=3))
            ```
        """
        return self._require_timeline().summary(rows)

    def _require_timeline(self) -> Timeline:
        if self._timeline is None:
            raise ConfigurationError("the profile has no trace yet: it is made at the end of its `with` block")
        return self._timeline

    def __repr__(self) -> str:
        return "<Profile, not ended>" if self._timeline is None else self.summary()


def profile(
    path: str | os.PathLike[str] | None = None, *, record_shapes: bool = False, with_stack: bool = False
) -> Profile:
    """Profiles the block on both sides of the wire: `with skyproxy.profile("trace.json"): ...`.

    The trace has, on one clock, the operations as this thread recorded them, its waits, the batches and transfers on
    their way, and the operations and kernels as each worker ran them. The workers' clocks are read before and after by
    round trips; how wrong they may be stands in the trace. Entering and leaving waits for the workers.

    Args:
        path: where to write the trace at the end of the block; None: nowhere, see `Profile.save`.
        record_shapes: also the shapes of the operations' inputs.
        with_stack: also Python's stacks, which takes time and room.

    Raises:
        RemoteError: somebody else profiles one of the workers at the moment.

    Example:
        ```python
        with skyproxy.profile() as profile:
            torch.ones(8, device="sky:0").sum().item()
        print(profile.summary())
        ```
    """
    return Profile(path, record_shapes, with_stack)


def _export_trace(profiler: Any) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="skyproxy-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        result: dict[str, object] = json.loads(path.read_bytes())
    return result
