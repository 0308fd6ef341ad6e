"""Streams and events: `torch.sky.Stream` and `Event`, and what `torch.Stream` and `torch.Event` give for `sky`.

A device has one order of execution, that in which operations were recorded, so code for several streams runs
unchanged, and in order. PyTorch's own classes know devices of C++ only; stand-ins choose the class by the device.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch

from skyproxy import patching
from skyproxy.errors import ConfigurationError
from skyproxy.interrupts import shielded
from skyproxy.tensor.core.devices import DEVICES, Handle
from skyproxy.tensor.torch_api import sky_module

DeviceLike = torch.device | str | int | None
_PRIVATE_USE_1 = 20  # c10::DeviceType::PrivateUse1
_plain_stream: Any = torch.Stream
_plain_event: Any = torch.Event
_stream_ids = itertools.count(1)
_event_ids = itertools.count(1)


class _Current(threading.local):
    """The choices of one thread.

    Attributes:
        streams: by device; those of other devices are default streams.
        entered: streams whose blocks it is in, each with the device and the stream that were current before.
    """

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.entered: list[tuple[Stream, int, Stream]] = []


_current = _Current()


class Event(_plain_event):  # type: ignore[misc]
    """A point in the order of execution on the worker.

    Args:
        enable_timing: whether `elapsed_time` will be asked for.
        blocking: for code written for CUDA.
        interprocess: not possible.
        external: for code written for CUDA; a captured graph keeps the order of recording.
        device: the device on which it will be recorded; by default that of the stream.

    Attributes:
        event_id: a number that no other event of this process has.
    """

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
        *,
        device: DeviceLike = None,
    ) -> Any:
        if interprocess:
            raise ValueError("sky events cannot be shared between processes")
        self = _plain_event.__new__(cls, device="sky", enable_timing=enable_timing)
        self._timing = enable_timing
        self._handle = None
        self._device = DEVICES.of(device).torch_device if device is not None else None
        self._number = next(_event_ids)
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._handle: Handle | None

    @property
    def event_id(self) -> int:
        return int(self._number)

    @property
    def device(self) -> torch.device:
        """The device on which it was recorded, or will be."""
        if self._handle is not None:
            return self._handle.device.torch_device
        return self._device if self._device is not None else torch.device("sky", DEVICES.current)

    def record(self, stream: Any = None) -> None:
        """Records the event behind everything recorded so far; does not wait."""
        chosen = DEVICES.of(stream.device if stream is not None else self._device)
        handle = chosen.new_handle(None)
        chosen.session.do("record_event", handle.slot, chosen.place, self._timing)
        self._handle = handle

    def wait(self, stream: object = None) -> None:
        """Makes a stream wait for the event. Streams of one device are one, so there is nothing to do."""

    def query(self) -> bool:
        """Return whether the worker has come past the event."""
        return self._handle is None or bool(self._call("query_event", self._handle.slot))

    def synchronize(self) -> None:
        """Waits until the worker has come past the event."""
        if self._handle is not None:
            self._call("wait_event", self._handle.slot)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds on the worker between this event and `end_event`.

        Raises:
            RuntimeError: one of them was not recorded, or was made without `enable_timing=True`.
        """
        if self._handle is None or end_event._handle is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if not (self._timing and end_event._timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._handle.device.session is not end_event._handle.device.session:
            raise RuntimeError("Events of different workers have no common clock.")
        return float(self._call("elapsed_milliseconds", self._handle.slot, end_event._handle.slot))

    def ipc_handle(self) -> bytes:
        """Not possible.

        Raises:
            ValueError: always.
        """
        raise ValueError("sky events cannot be shared between processes")

    def _call(self, name: str, *slots: int) -> Any:
        assert self._handle is not None
        return self._handle.device.session.call(name, *slots)

    def __repr__(self) -> str:
        return f"<torch.sky.Event {self._number} device={self.device}>"


class Stream(_plain_stream):  # type: ignore[misc]
    """A stream of a device. All streams of a device are one order of execution, that of recording.

    Args:
        device: the device; the current one by default.
        priority: for code written for CUDA.
        stream_id: an existing stream; 0 is the device's default one.
        device_index: the number of the device of an existing stream, in place of `device`.
        device_type: that of streams of `sky`, for code that names a stream by its parts.

    Raises:
        ValueError: `device_type` is that of another device.
    """

    def __new__(
        cls,
        device: DeviceLike = None,
        priority: int = 0,
        stream_id: int | None = None,
        *,
        device_index: int | None = None,
        device_type: int = _PRIVATE_USE_1,
    ) -> Any:
        if device_type != _PRIVATE_USE_1:
            raise ValueError(f"streams of sky have the device type {_PRIVATE_USE_1}, not {device_type}")
        index = DEVICES.of(device_index if device is None else device).index
        number = next(_stream_ids) if stream_id is None else stream_id
        self = _plain_stream.__new__(cls, stream_id=number, device_index=index, device_type=_PRIVATE_USE_1)
        self._priority = priority
        return self

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and the greatest priority, which are one: a device has one order of execution."""
        return 0, 0

    @property
    def priority(self) -> int:
        return int(self._priority)

    def synchronize(self) -> None:
        """Waits until everything recorded is done."""
        DEVICES.of(self.device).session.synchronize()

    def query(self) -> bool:
        """Return whether everything recorded is done; waits, since only the worker knows."""
        self.synchronize()
        return True

    def record_event(self, event: Any = None) -> Any:
        """Records an event, a new one unless given."""
        event = event if event is not None else Event()
        event.record(self)
        return event

    def wait_event(self, event: object) -> None:
        """Nothing to do: order is kept anyway."""

    def wait_stream(self, other: object) -> None:
        """Nothing to do: order is kept anyway."""

    def is_capturing(self) -> bool:
        """Return whether this thread captures a graph."""
        from skyproxy.tensor.dispatch.capture import is_capturing

        return is_capturing()

    @shielded
    def __enter__(self) -> object:
        _current.entered.append((self, DEVICES.current, current_stream(self.device)))
        set_stream(self)
        return self

    @shielded
    def __exit__(self, *exc_info: object) -> None:
        entered = _current.entered
        # Blocks that generators hold end in any order: the latest one of this stream is meant.
        position = next(place for place in reversed(range(len(entered))) if entered[place][0] is self)
        _, index, outer = entered.pop(position)
        set_stream(outer)
        DEVICES.current = index

    def __repr__(self) -> str:
        return f"<torch.sky.Stream {self.stream_id} device={self.device}>"


def default_stream(device: DeviceLike = None) -> Stream:
    """The stream of a device that operations run on unless another one was chosen."""
    stream: Stream = Stream(device, stream_id=0)
    return stream


def current_stream(device: DeviceLike = None) -> Stream:
    """The stream of a device that this thread chose."""
    index = DEVICES.of(device).index
    return _current.streams.get(index) or default_stream(index)


def set_stream(stream: Any) -> None:
    """Makes a stream, and its device, the current ones of this thread; None changes nothing."""
    if stream is not None:
        DEVICES.current = stream.device.index
        _current.streams[stream.device.index] = stream


class StreamContext:
    """Makes a stream, and its device, the current ones of this thread inside a `with` block.

    Args:
        stream: the stream; None changes nothing.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    @shielded
    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    @shielded
    def __exit__(self, *exc_info: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*exc_info)


def stream(stream: Any) -> StreamContext:
    """Makes a stream the current one inside a `with` block."""
    return StreamContext(stream)


class _DeviceSelectingType(type):
    """The class of the stand-ins: their instances are those of PyTorch's class, and ours for `sky`."""

    def __instancecheck__(cls, instance: object) -> bool:
        plain = _STANDS_FOR.get(cls)
        return isinstance(instance, plain) if plain is not None else type.__instancecheck__(cls, instance)

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        plain = _STANDS_FOR.get(cls)
        if plain is None:  # somebody's own subclass
            return type.__call__(cls, *args, **kwargs)
        is_ours, args, kwargs = _with_device(args, kwargs)
        if is_ours:
            plain = Stream if plain is _plain_stream else Event
        return plain(*args, **kwargs)


def _with_device(
    args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[bool, tuple[object, ...], dict[str, object]]:
    """Return whether something of `sky` is asked for, and the arguments, with a device that has its type."""
    if "device_type" in kwargs and (kwargs.get("device", args[0] if args else None)) is None:
        return kwargs["device_type"] == _PRIVATE_USE_1, args, kwargs
    given, *rest = (kwargs["device"], *args) if "device" in kwargs else args or (None,)
    device = _find_device(given)
    return device.type == "sky", tuple(rest), {**kwargs, "device": device}


def _find_device(device: Any) -> torch.device:
    """Return a device with its type: C++ would take ours for a number, and for None, in use or not."""
    if device is not None and not isinstance(device, int):
        return torch.device(device)
    accelerator: torch.device | None = torch._C._accelerator_getAccelerator()
    if device is None:
        return accelerator or torch.device("cpu")
    if accelerator is None:
        torch._C._accelerator_getDeviceIndex()  # raises PyTorch's error
    assert accelerator is not None
    return torch.device(accelerator.type, device)


def _new_of_subclass(cls: type, *args: object, **kwargs: object) -> Any:
    """Make an instance of somebody's own subclass of a stand-in: one with the methods of PyTorch's C++.

    Raises:
        TypeError: it would be one of `sky`, of which those methods know nothing.
    """
    is_ours, args, kwargs = _with_device(args, kwargs)
    stand_in = next(base for base in cls.__mro__ if base in _STANDS_FOR)
    if is_ours:
        name = stand_in.__name__
        raise TypeError(f"{cls.__qualname__} derives from torch.{name} and cannot be of sky. Use torch.sky.{name}.")
    return _STANDS_FOR[stand_in].__new__(cls, *args, **kwargs)


class StreamStandIn(_plain_stream, metaclass=_DeviceSelectingType):  # type: ignore[misc]  # noqa: D101
    __doc__ = _plain_stream.__doc__
    __new__ = _new_of_subclass


class EventStandIn(_plain_event, metaclass=_DeviceSelectingType):  # type: ignore[misc]  # noqa: D101
    __doc__ = _plain_event.__doc__
    __new__ = _new_of_subclass


_STANDS_FOR: dict[type, Any] = {StreamStandIn: _plain_stream, EventStandIn: _plain_event}


def install() -> None:
    """Puts the stand-ins in the place of PyTorch's classes, and the names above into `torch.sky`.

    Raises:
        ConfigurationError: this torch's streams cannot be told their device.
    """
    try:
        _plain_stream(stream_id=0, device_index=0, device_type=_PRIVATE_USE_1)
    except (TypeError, RuntimeError) as error:
        raise ConfigurationError(f"torch {torch.__version__} makes streams in another way: {error}") from error
    for name, stand_in in (("Stream", StreamStandIn), ("Event", EventStandIn)):
        stand_in.__module__, stand_in.__qualname__, stand_in.__name__ = "torch", name, name
        patching.replace(
            torch,
            name,
            stand_in,
            why="a stream or an event of `sky` is one of the worker, with a number of its own",
            test="tests/tensor/torch_api/test_streams.py::test_every_new_stream_and_event_has_a_number_of_its_own",
        )
    sky_module.MODULE.__dict__.update(
        Event=Event,
        Stream=Stream,
        StreamContext=StreamContext,
        current_stream=current_stream,
        default_stream=default_stream,
        set_stream=set_stream,
        stream=stream,
    )
