"""The devices of this process: which worker's device each `sky:k` is, and how the first one comes about."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from skyproxy.errors import SELF_EXPLAINING, ConfigurationError, ProtocolError, UnknownDeviceError
from skyproxy.interrupts import raised_by_handler, shielded
from skyproxy.session.recorder import Recorder
from skyproxy.session.session import Session
from skyproxy.settings import SETTINGS
from skyproxy.tensor.core.addresses import HostCopy, Memory
from skyproxy.tensor.core.late_release import REFERENCES_AT_DEATH, LateRelease
from skyproxy.tensor.core.metadata import Meta
from skyproxy.torch_modes import USUAL, Record

_REMEMBERED_MODES = 16
"""A program that goes through more sets of modes than these starts anew with what is remembered for them."""


class Handle:
    """The client's share in one value of a worker; when the last share goes, the slot is given back.

    Attributes:
        slot: where the value lives.
        meta: what it looks like. Generators and events look like nothing, and their handles have None: nobody asks.
        root: for a view, the handle of the tensor whose storage it shares; else None.
        memory: the storage's address and size, once somebody asked; see `core.memory.memory_of`.
        late: what gives the slot back in place of the handle, once the collector has finalized that.
        is_shared: set once several tensors hold this very handle, as detached ones do.
        copied: whether `copy` says what is known of the storage's bytes; on the handle that has no `root`.
        copy: what is known of them, see `core.host_copies`.
        with_copy: the class of such handles on this device, to which those without can change; None: there is none.
        without_copy: the class of the others.
    """

    __slots__ = ("copy", "is_shared", "late", "memory", "meta", "root", "slot")
    device: SkyDevice
    copied = False
    copy: HostCopy
    with_copy: type[Handle] | None = None
    without_copy: type[Handle]
    is_shared: bool
    late: LateRelease
    memory: Memory
    slot: int
    meta: Meta
    root: Handle | None

    # Libraries copy the attributes of tensors that they do not know. A second handle would give the slot back while
    # the first still has it, and whoever gets it next would share it.
    def __copy__(self) -> Handle:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Handle:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a slot of a worker cannot be pickled: it belongs to this process. Pickle the tensor itself")


class SkyDevice:
    """One `sky:k`.

    Attributes:
        torch_device: `torch.device("sky", k)`.
        session: the conversation with its worker.
        place: the device on the worker, `[type, index]`.
        row: what the worker told of the device.
        modes: PyTorch's global modes that its worker's operations run under.
        cache: inferred metadata under these modes, by op and arguments; its values are `dispatch.entries.Entry`s.
        replays: what `dispatch.memoized_calls` noted under these modes, for the signatures of this session.
        values_read: how often bytes of a tensor were read that are known here.
        dropout_state: what cuDNN's recurrent networks draw from, see `ops.cuda_recurrent`; None before the first that
            draws, and whenever the device's generator was given another state.
        handle_type: makes this device's handles: their class, unless a capture has put another function there.
    """

    def __init__(self, index: int, session: Session, row: dict[str, Any]) -> None:
        self.index = index
        self.torch_device = torch.device("sky", index)
        self.session = session
        self.recorder = session.recorder
        self.row = row
        self.place = [row["type"], row["index"] if row["type"] != "cpu" else None]
        self.modes: Record = USUAL
        self.cache: dict[object, Any] = {}
        self.replays: dict[object, Any] = {}
        self._memories = {USUAL: (self.cache, self.replays)}
        self._proven = self._memories
        self.misses = 0
        self.values_read = 0
        self.dropout_state: torch.Tensor | None = None
        self.handle_type: Callable[[], Handle] = _handle_type(self)
        self._own = self.recorder, self.handle_type

    def divert(self, stand_in: Recorder, make_handle: Callable[[], Handle]) -> None:
        """Record with a stand-in and make other handles, until `end_diversion`.

        What is inferred meanwhile is forgotten then: the worker may never run what would prove it.
        """
        self.recorder, self.handle_type = stand_in, make_handle
        self._proven = self._memories
        self._memories = {modes: (dict(cache), replays) for modes, (cache, replays) in self._proven.items()}
        self.use_modes(self.modes)

    def end_diversion(self) -> None:
        """Record, make handles and remember shapes as before `divert`."""
        self.recorder, self.handle_type = self._own
        self._memories = self._proven
        self.use_modes(self.modes)

    def new_handle(self, meta: Meta | None, root: Handle | None = None) -> Handle:
        """A handle with a fresh slot."""
        handle = self.handle_type()
        handle.meta = meta  # type: ignore[assignment]
        handle.root = root
        self.recorder.take_slot(handle)
        return handle

    def use_modes(self, record: Record) -> None:
        """Remember what is inferred from now on for these modes only: other kernels give other dtypes and strides."""
        if record not in self._memories and len(self._memories) >= _REMEMBERED_MODES:
            self._memories = {USUAL: self._memories[USUAL]}
        self.cache, self.replays = self._memories.setdefault(record, ({}, {}))
        self.modes = record

    def change_random_state(self, control: str, *arguments: object) -> None:
        """Seed the device's default generator, or give it another state, in order with the operations around it."""
        self.session.do(control, *arguments)
        self.dropout_state = None

    @property
    def worker_device(self) -> torch.device:
        """The device as the worker names it.

        Raises:
            ProtocolError: PyTorch knows no such device.
        """
        kind, index = self.place
        try:
            return torch.device(kind, index) if index is not None else torch.device(kind)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            if raised_by_handler(error):
                raise
            raise ProtocolError(f"the worker has a device {self.place!r:.80}, which PyTorch does not know") from error

    def remember(self, key: object, entry: object) -> None:
        """Caches inferred metadata; when the cache is full, the oldest quarter goes."""
        cache = self.cache
        if len(cache) >= SETTINGS.max_cached_shapes:
            for old in list(cache)[: SETTINGS.max_cached_shapes // 4 + 1]:
                cache.pop(old, None)
        cache[key] = entry

    def __repr__(self) -> str:
        return f"<sky:{self.index} = {self.worker_device} of {self.session.welcome.session[:8]}>"


def _handle_type(sky_device: SkyDevice) -> type[Handle]:
    # Names of this module may be gone when the last tensors die.
    drop_slot, release_now = sky_device.recorder.drop_slot, sky_device.recorder.release_now
    getrefcount, late_release, at_death = sys.getrefcount, LateRelease, REFERENCES_AT_DEATH

    class DeviceHandle(Handle):
        __slots__ = ()
        device = sky_device

        @shielded
        def __del__(self) -> None:
            # The interpreter may be shutting down or an interrupt may have struck before a slot was taken.
            try:
                slot, meta = self.slot, self.meta
            except AttributeError:
                return
            give_back = release_now if meta is not None and meta.large else drop_slot  # type: ignore[redundant-expr]
            if getrefcount(self) > at_death:
                self.late = late_release(give_back, slot)
            else:
                give_back(slot)

    class CopiedHandle(DeviceHandle):
        __slots__ = ()
        copied = True

    DeviceHandle.with_copy = CopiedHandle
    DeviceHandle.without_copy = DeviceHandle
    return DeviceHandle


class _CurrentDevice(threading.local):
    """The number of a thread's current device, as on CUDA: each thread begins with 0."""

    index = 0


def index_in(device: torch.device | str | int | None) -> int | None:
    """The number in what PyTorch code calls a device; None if it has none.

    Raises:
        ValueError: it is a device of another type.
    """
    if device is None or isinstance(device, int):
        return device
    named = torch.device(device)
    if named.type != "sky":
        raise ValueError(f"Expected a sky device, but got: {named}")
    index: int | None = named.index
    return index


class Devices:
    """All `sky` devices of this process, by number."""

    def __init__(self) -> None:
        self._devices: list[SkyDevice] = []
        self._lock = threading.RLock()
        self._current = _CurrentDevice()
        self.start_default: Callable[[], object] | None = None
        """Makes the first devices when `sky:0` is used before any were added; set by `skyproxy.nodes`."""
        self.before_new: dict[Callable[[], object], None] = {}
        """Called in this order before there are fresh devices, each time; each is here once."""
        self.on_new: Callable[[list[SkyDevice]], object] | None = None
        """Called with fresh devices; set by `skyproxy.tensor.torch_api.global_modes`."""
        self.before_second: Callable[[], object] | None = None
        """Called before there is another device than the first; set by `skyproxy.tensor.torch_api.tensor_methods`."""
        self.before_other: Callable[[], object] | None = None
        """Called before another device than the first is current; set by `skyproxy.tensor.torch_api.current_device`."""

    def add(self, session: Session) -> list[SkyDevice]:
        """Number the devices of a new session: the places of lost ones first, so that a program that connects again
        finds its worker under the number that it has always used.
        """
        for prepare in self.before_new:
            prepare()
        with self._lock:
            vacant = (index for index, device in enumerate(self._devices) if device.session.lost is not None)
            numbers = itertools.chain(list(vacant), itertools.count(len(self._devices)))
            fresh = [SkyDevice(index, session, row) for index, row in zip(numbers, session.welcome.devices)]
            if self.before_second is not None and any(device.index for device in fresh):
                self.before_second()
            for device in fresh:
                self._devices[device.index : device.index + 1] = [device]
        if self.on_new is not None:
            self.on_new(fresh)
        return fresh

    def at(self, index: int | None) -> SkyDevice:
        """`sky:index`, or the current device; starts the default worker if there is none yet.

        Raises:
            UnknownDeviceError: there is no such device.
            ConnectError: the default worker could not be reached or started.
        """
        if not self._devices:
            self._start()
        if index is None or index < 0:
            index = self._current.index
        try:
            return self._devices[index]
        except IndexError:
            raise UnknownDeviceError(
                f"there is no sky:{index}; this process has {self.names()}. "
                "Add workers with skyproxy.connect(url, token=...) or skyproxy.launch_local()."
            ) from None

    def of(self, device: torch.device | str | int | None) -> SkyDevice:
        """The device that PyTorch code names.

        Raises:
            ValueError: it names a device of another type.
        """
        return self.at(index_in(device))

    def _start(self) -> None:
        with self._lock:
            if self._devices:
                return
            if self.start_default is None:
                raise ConfigurationError("no sky device exists. Connect one with skyproxy.connect(url, token=...).")
            try:
                self.start_default()
            except SELF_EXPLAINING as error:
                error.__traceback__ = None
                raise

    def names(self) -> str:
        return ", ".join(f"sky:{d.index} ({d.worker_device})" for d in self._devices) or "none"

    @property
    def current(self) -> int:
        """The number of this thread's current device."""
        return self._current.index

    @current.setter
    def current(self, index: int) -> None:
        self.at(index)
        if index and self.before_other is not None:
            self.before_other()
        self._current.index = index

    def forget_all(self) -> None:
        """Numbers start anew; tensors of the old devices keep failing with the reason why their session ended."""
        with self._lock:
            self._devices = []
            self._current = _CurrentDevice()

    def check_sessions(self, *devices: SkyDevice) -> None:
        """Raise the reason if the session of one of the devices is over; its number may have been given anew.

        Raises:
            SessionLostError: it is.
        """
        for device in devices:
            if device.session.lost is not None:
                raise device.session.lost.again()

    def existing(self) -> list[SkyDevice]:
        """The devices that exist by now, in order; starts nothing."""
        return list(self._devices)

    def alive(self) -> list[SkyDevice]:
        """Those whose session is not over."""
        return [device for device in self._devices if device.session.lost is None]


DEVICES = Devices()
