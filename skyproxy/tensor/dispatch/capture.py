"""Capturing: operations are written to a list of their own in place of the session's stream, and run later, as often as
asked.

While a thread captures, the recorder of each session is replaced by a stand-in that gives that thread the capture's
lists, and every other thread the real ones. The dispatcher binds the recorder's lists anew for each operation, so it
needs not know; when nothing is captured, nothing is different.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from heapq import heappop, heappush

from skyproxy import torch_codec
from skyproxy.errors import CaptureError, SessionLostError
from skyproxy.interrupts import shielded
from skyproxy.protocol import commands
from skyproxy.protocol.messages import Buffer, Sequence
from skyproxy.session.recorder import RecordedBatch, Recorder
from skyproxy.session.session import Session
from skyproxy.tensor.core.devices import DEVICES, Handle, SkyDevice
from skyproxy.tensor.core.late_release import REFERENCES_AT_DEATH, LateRelease

_UNLIMITED = 1 << 62
_numbers = itertools.count(1)
_lock = threading.Lock()
_active: Capture | None = None

_WHY = {
    commands.FETCH: "the values of a tensor are needed here",
    commands.DESCRIBE: "only the worker can tell what the results of this operation look like",
    commands.CALL: "this needs an answer of the worker",
    commands.UPLOAD: "a tensor of the CPU is copied to the worker",
    commands.RECEIVE: "a tensor of the CPU is copied to the worker",
    commands.REPLAY: "a graph is replayed inside the capture of another one",
}
_APART = frozenset({"forget_call", "forget_compiled", "graph_forget"})
"""Controls that destructors ask for: no part of the step, but to be done."""
_HINT = (
    " while a graph is captured, when nothing runs on the worker. Do it before or after the capture; what is new in "
    "every replay goes into a static tensor with copy_(). Run the step a few times before you capture it, too: the "
    "first calls may ask the worker what later ones know."
)


class RecordedStream(list[object]):
    """The stream that the capturing thread writes to. Lets through what can be replayed.

    Attributes:
        is_empty: whether nothing was recorded that does anything.
    """

    def __init__(self, capture: SessionCapture) -> None:
        super().__init__()
        self._capture = capture
        self.is_empty = True

    def extend(self, command: Iterable[object]) -> None:
        command = list(command)
        number = command[0]
        if number == commands.DEFINE or (number == commands.DO and command[1] in _APART):
            self._capture.recorder.emit(command)
            return
        if number in _WHY:
            raise self._capture.owner.broken(_WHY[number] + _HINT)
        if number == commands.DO and command[1] not in commands.RECORDABLE:
            raise self._capture.owner.broken(f"{command[1]!r} is asked of the worker" + _HINT)
        self.is_empty = self.is_empty and number == commands.DO and command[1] == "set_modes"
        super().extend(command)


class StandIn:
    """A session's recorder during a capture: for the capturing thread the capture's own, for others the real one."""

    def __init__(self, capture: SessionCapture, device: SkyDevice | None = None) -> None:
        self._capture = capture
        self._device = device

    @property
    def stream(self) -> list[object]:
        capture = self._capture
        if not capture.is_mine:
            return capture.recorder.stream
        if self._device is not None:
            capture.used[self._device.index] = self._device
        return capture.stream

    @property
    def lines(self) -> list[object]:
        return self._capture.lines if self._capture.is_mine else self._capture.recorder.lines

    # Other threads get only fresh slots: the recording may read those that they give back meanwhile.
    @property
    def free(self) -> list[int]:
        return self._capture.free if self._capture.is_mine else self._capture.pool_of_others

    @property
    def emit(self) -> Callable[[Iterable[object]], None]:
        return self.stream.extend

    @property
    def emit_line(self) -> Callable[[Iterable[object]], None]:
        return self.lines.extend

    @property
    def unsent(self) -> int:
        return len(self.stream)

    @property
    def hidden_writes(self) -> int:
        return self._capture.recorder.hidden_writes

    @hidden_writes.setter
    def hidden_writes(self, count: int) -> None:  # what others write meanwhile counts after the capture, too
        self._capture.recorder.hidden_writes = count

    @property
    def limit(self) -> int:
        return _UNLIMITED if self._capture.is_mine else self._capture.recorder.limit

    def take_slot(self, handle: Handle) -> None:
        self._capture.take_slot(handle)

    def append(self, *command: object) -> None:
        if self._capture.is_mine:
            self._capture.stream.extend(command)
        else:
            self._capture.recorder.append(*command)

    def append_with_buffer(self, buffer: Buffer, *command: object) -> None:
        if self._capture.is_mine:
            self._capture.stream.extend(command)  # raises: bytes cannot be captured
        else:
            self._capture.recorder.append_with_buffer(buffer, *command)

    def send_if_due(self) -> None:
        if not self._capture.is_mine:
            self._capture.recorder.send_if_due()

    def flush(self) -> None:
        if not self._capture.is_mine:
            self._capture.recorder.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._capture.recorder, name)


class SessionCapture:
    """The record of one session in one capture, and afterwards the slots that belong to it.

    Attributes:
        number: the recording's name on the worker.
        recorder: the session's real recorder.
        stream, lines: what was recorded.
        free: slots of the capture's own that can be used again inside it, as a heap.
        used: the devices that were computed on, by index.
    """

    # Names of this module may be gone when the last tensors die.
    _release_command = commands.RELEASE
    _push = staticmethod(heappush)

    def __init__(self, owner: Capture, session: Session, devices: list[SkyDevice]) -> None:
        self.owner = owner
        self.number = next(_numbers)
        self.session = session
        self.recorder: Recorder = session.recorder
        self.stream = RecordedStream(self)
        self.lines: list[object] = []
        self.free: list[int] = []
        self.pool_of_others: list[int] = []
        self.used: dict[int, SkyDevice] = {}
        self._modes = devices[0].modes
        self._devices = devices
        self._slots: list[int] = []
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._recording = True
        self._kept = False
        self._lock = threading.RLock()  # a destructor may run while it is held, and take it again

    @property
    def is_mine(self) -> bool:
        """Return whether the calling thread captures."""
        return self._recording and threading.get_ident() == self.owner.thread

    # --- slots -------------------------------------------------------------------------------------------------------

    def take_slot(self, handle: Handle) -> None:
        """Set `handle.slot`: for the capturing thread to one that belongs to the capture from now on."""
        if not self.is_mine:
            self.recorder.take_unused_slot(handle)
            return
        if self.free:
            handle.slot = self.free[0]
            heappop(self.free)
        else:
            self.recorder.take_unused_slot(handle)
            self._slots.append(handle.slot)

    def _handles_of(self, sky_device: SkyDevice, ordinary: Callable[[], Handle]) -> Callable[[], Handle]:
        died = self.died
        getrefcount, late_release, at_death = sys.getrefcount, LateRelease, REFERENCES_AT_DEATH

        class CapturedHandle(Handle):
            __slots__ = ("__weakref__",)
            device = sky_device

            @shielded
            def __del__(self) -> None:
                try:
                    slot, meta = self.slot, self.meta
                except AttributeError:
                    return
                large = meta is not None and meta.large  # type: ignore[redundant-expr]
                if getrefcount(self) > at_death:
                    self.late = late_release(died, slot, large)
                else:
                    died(slot, large)

        def make() -> Handle:
            if not self.is_mine:
                return ordinary()
            handle = CapturedHandle()
            self._handles.add(handle)
            return handle

        return make

    def died(self, slot: int, large: bool) -> None:
        """A tensor that was made in this capture is gone."""
        if self._recording:
            if large:
                list.extend(self.stream, (self._release_command, [slot]))
            self._push(self.free, slot)
            return
        with self._lock:
            if self._kept:
                self._push(self.free, slot)  # the recording goes on filling it
            else:
                self.recorder.drop_slot(slot)

    def made(self, handle: Handle) -> bool:
        """Return whether the handle's tensor was made in this capture."""
        return handle in self._handles

    # --- begin and end -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """From now on, the calling thread's operations are recorded here."""
        self.session.check()
        self.session.do("graph_begin")
        self.session.divert(StandIn(self))  # type: ignore[arg-type]
        for device in self._devices:
            device.divert(StandIn(self, device), self._handles_of(device, device.handle_type))  # type: ignore[arg-type]

    def end(self, *, kept: bool) -> None:
        """Puts the real recorder back. Tells the worker nothing yet, so that it cannot fail."""
        self.session.end_diversion()
        for device in self._devices:
            device.end_diversion()
        self._kept = kept
        self._recording = False

    def _collect_held(self) -> set[int]:
        """The slots whose tensors are still held."""
        return set(self._slots).difference(self.free)

    def keep(self) -> None:
        """After the end: the worker keeps what was recorded."""
        held = self._collect_held()
        metas = {handle.slot: handle.meta for handle in self._handles if handle.slot in held}
        exports = [
            [slot, torch_codec.encode_description(metas[slot].description) if metas.get(slot) is not None else None]
            for slot in sorted(held)
        ]
        self.session.recordings[self.number] = RecordedBatch(Sequence(0), list(self.stream), self.lines)
        places = [device.place for device in self.used.values()]
        self.session.do("graph_define", self.number, list(self.stream), exports, places, dict(self._modes))
        self._tell_modes()
        self.stream.clear()

    def _tell_modes(self) -> None:
        """The worker did not run what the capture recorded, a change of PyTorch's global modes among it."""
        if self._devices[0].modes != self._modes:
            self.session.do("set_modes", dict(self._devices[0].modes))

    def drop(self) -> None:
        """After the end: nothing was kept, and nothing of it ever ran."""
        held = sorted(self._collect_held())
        self.session.do("graph_abort", held)
        self._tell_modes()
        for slot in self.free:
            self.recorder.drop_slot(slot)
        self.stream.clear()

    def replay(self) -> None:
        """Runs the recording once more; does not wait, unless each op is waited for.

        Raises:
            RemoteError: an op failed, where each is waited for.
        """
        recorder = self.session.recorder
        try:
            recorder.append(commands.REPLAY, self.number)
        finally:  # not before: another thread could ask for a value in between, and take it for one of afterwards
            recorder.hidden_writes += 1
        recorder.flush()
        if recorder.wait_for_outcome is not None:
            recorder.wait_for_outcome()

    def forget(self) -> None:
        """The worker forgets the recording; its slots go back to where all others are."""
        with self._lock:
            if not self._kept:
                return
            self._kept = False
        self.session.recordings.pop(self.number, None)
        # Emitted directly: this may run in a destructor, which must not wait, and inside another capture.
        self.recorder.emit((commands.DO, "graph_forget", [self.number]))
        for slot in self.free:
            self.recorder.drop_slot(slot)
        self.free.clear()


class Capture:
    """One capture, over all sessions of this process.

    Attributes:
        thread: the identity of the thread that captures.
        parts: what each session recorded.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.parts: list[SessionCapture] = []
        self._error: CaptureError | None = None

    def broken(self, message: str) -> CaptureError:
        """The error for an operation that cannot be captured; the capture cannot be kept after it."""
        self._error = self._error or CaptureError(message)
        return CaptureError(message)

    def begin(self) -> None:
        """Starts to capture.

        Raises:
            CaptureError: another capture is under way.
        """
        global _active
        DEVICES.at(None)
        with _lock:
            if _active is not None:
                raise CaptureError("a graph is already being captured; captures cannot be nested, nor run side by side")
            _active = self
        try:
            by_session: dict[int, tuple[Session, list[SkyDevice]]] = {}
            for device in DEVICES.alive():
                by_session.setdefault(id(device.session), (device.session, []))[1].append(device)
            for session, devices in by_session.values():
                part = SessionCapture(self, session, devices)
                part.begin()
                self.parts.append(part)
        except BaseException:
            self.abort()
            raise

    def finish(self) -> list[SessionCapture]:
        """Ends the capture; the recordings of those sessions that recorded anything.

        Raises:
            CaptureError: something inside could not be captured.
        """
        global _active
        if self._error is not None:
            self.abort()
            raise CaptureError(f"the capture could not be kept: {self._error}") from self._error
        for part in self.parts:
            part.end(kept=not part.stream.is_empty)
        _active = None
        kept = [part for part in self.parts if not part.stream.is_empty]
        for part in self.parts:
            if not part.stream.is_empty:
                part.keep()
            else:
                part.drop()
        return kept

    def abort(self) -> None:
        """Ends the capture and keeps nothing."""
        global _active
        for part in self.parts:
            part.end(kept=False)
        _active = None
        for part in self.parts:
            with contextlib.suppress(SessionLostError):
                part.drop()


def is_capturing() -> bool:
    """Return whether the calling thread captures a graph."""
    return _active is not None and _active.thread == threading.get_ident()


def check_reshaped(handles: list[Handle]) -> None:
    """Refuse to change, inside a capture, what a tensor from outside it looks like: each replay would do it again.

    Raises:
        CaptureError: the calling thread captures, and one of the tensors was not made in the capture.
    """
    if not is_capturing() or _active is None:
        return
    for handle in handles:
        if not any(part.made(handle) for part in _active.parts):
            raise _active.broken("an operation changes the sizes or strides of a tensor that was made outside" + _HINT)
