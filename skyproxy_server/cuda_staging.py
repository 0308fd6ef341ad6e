"""Large tensors between the host and a CUDA device: pinned buffers, side streams, and no waiting of the CPU.

Pieces pass through a few pinned buffers, in turns; their copies run on a side stream, and the compute stream waits for
them on the device. On a CPU worker nothing of this happens: bytes land in the tensor itself and leave from there.

`CopyEngine` touches CUDA; the rest is tested with another engine, without a GPU.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from skyproxy import torch_codec
from skyproxy_server.inventory import DeviceRow
from skyproxy_server.lost_context import CONTEXT

BUFFERS = 8
"""Pinned buffers of one direction of one session, each as large as a chunk."""
_NO_STREAMS = contextlib.nullcontext()


class DeviceEvent(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Waits until the device has come there."""


class CopyEngine(Protocol):
    """The operations of a device that staging needs, for one direction of one session."""

    def pinned(self, byte_count: int) -> torch.Tensor:
        """A host buffer that the device can reach by itself; uint8."""

    def begin(self, tensor: torch.Tensor) -> None:
        """On the executor's thread: copies of `tensor` may begin where its compute stream stands now, and its memory
        is not used for anything else before they are done.
        """

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> DeviceEvent:
        """Copies on the side stream; returns at once."""

    def hold_back(self, event: DeviceEvent) -> None:
        """On the executor's thread: what it computes from now on waits for `event`."""


class CudaCopyEngine:
    """A side stream of one CUDA device."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._side: Any = torch.cuda.Stream(index)  # type: ignore[no-untyped-call,unused-ignore]

    def pinned(self, byte_count: int) -> torch.Tensor:
        return torch.empty(byte_count, dtype=torch.uint8, pin_memory=True)

    def begin(self, tensor: torch.Tensor) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        tensor.record_stream(self._side)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> DeviceEvent:
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            event: DeviceEvent = self._side.record_event()
        return event

    def hold_back(self, event: DeviceEvent) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)  # type: ignore[arg-type,unused-ignore]


class Buffers:
    """Pinned buffers in turns. Belongs to one thread."""

    def __init__(self, engine: CopyEngine, byte_count: int) -> None:
        self.byte_count = byte_count
        self._engine = engine
        self._made = 0
        self._free: list[torch.Tensor] = []
        self._used: deque[tuple[torch.Tensor, DeviceEvent]] = deque()

    def take(self) -> torch.Tensor:
        """A buffer; waits for the oldest copy while all are in use.

        Raises:
            RuntimeError: the device is in trouble.
        """
        if self._free:
            return self._free.pop()
        if self._made < BUFFERS:
            fresh = self._engine.pinned(self.byte_count)
            self._made += 1
            return fresh
        if not self._used:
            raise RuntimeError("every pinned buffer was lost")
        buffer, event = self._used.popleft()
        event.synchronize()
        return buffer

    def give_back(self, buffer: torch.Tensor, event: DeviceEvent | None = None) -> None:
        """The buffer is free, after `event` where there is one."""
        if event is None:
            self._free.append(buffer)
        else:
            self._used.append((buffer, event))


class IncomingTensor:
    """A device tensor that is being filled, piece by piece."""

    def __init__(self, engine: CopyEngine, buffers: Buffers, value: torch.Tensor) -> None:
        self._engine = engine
        self._buffers = buffers
        self._bytes = device_bytes(value)
        self._last: DeviceEvent | None = None
        engine.begin(value)

    def buffer(self, byte_count: int) -> torch.Tensor | None:
        """Return the memory where a piece may land; None where it must take the plain way. On the receiving thread."""
        if not 0 < byte_count <= self._buffers.byte_count:
            return None
        try:
            return self._buffers.take()
        except RuntimeError:  # no memory can be pinned, or worse; then `settle` fails as well, and can report it
            return None

    def forward(self, buffer: torch.Tensor, offset: int, byte_count: int) -> None:
        """Sends a piece that has landed on to the device. On the receiving thread.

        Raises:
            RuntimeError: the device is in trouble.
        """
        event: DeviceEvent | None = None
        try:
            self._last = event = self._engine.copy(self._bytes[offset : offset + byte_count], buffer[:byte_count])
        finally:
            self._buffers.give_back(buffer, event)

    def settle(self, host: torch.Tensor, early: list[tuple[int, int]]) -> None:
        """Everything has landed: what is computed from now on sees it. On the executor's thread.

        Args:
            host: the transfer's own memory.
            early: offsets and sizes of pieces that landed there, not in a pinned buffer.
        """
        for offset, byte_count in early:
            self._bytes[offset : offset + byte_count].copy_(host[offset : offset + byte_count])
        if self._last is not None:
            self._engine.hold_back(self._last)


class Staging:
    """The large tensors of one session on their way to and from the devices that need pinned buffers.

    Args:
        chunk_bytes: the size of the pieces.
        engine_of: makes the engine for one direction of a device; None for devices whose memory is the host's.
    """

    def __init__(self, chunk_bytes: int, engine_of: Callable[[torch.device], CopyEngine | None] | None = None) -> None:
        self._chunk_bytes = chunk_bytes
        self._engine_of = engine_of or cuda_copy_engine
        self._lanes: dict[tuple[torch.device, str], tuple[CopyEngine, Buffers] | None] = {}

    def _lane(self, device: torch.device, direction: str) -> tuple[CopyEngine, Buffers] | None:
        key = device, direction
        if key not in self._lanes:
            engine = self._engine_of(device)
            self._lanes[key] = None if engine is None else (engine, Buffers(engine, self._chunk_bytes))
        return self._lanes[key]

    def arriving(self, value: torch.Tensor) -> IncomingTensor | None:
        """For a fresh dense tensor that will be filled. On the executor's thread."""
        lane = self._lane(value.device, "in")
        return None if lane is None else IncomingTensor(*lane, value)

    def leave(self, tensor: torch.Tensor) -> None:
        """A dense tensor is about to leave, as it is now. On the executor's thread."""
        lane = self._lane(tensor.device, "out")
        if lane is not None:
            lane[0].begin(tensor)

    def pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The bytes of a dense tensor that `leave` was told of, each piece valid until the next. On the sending thread.

        While one piece is sent, the next one is on its way from the device.
        """
        lane = self._lanes.get((tensor.device, "out"))
        if lane is None:
            view = torch_codec.byte_view(tensor)
            for offset in range(0, len(view), self._chunk_bytes):
                yield view[offset : offset + self._chunk_bytes]
            return
        engine, buffers = lane
        source = device_bytes(tensor)
        under_way: deque[tuple[torch.Tensor, int, DeviceEvent]] = deque()

        def next_one() -> Iterator[memoryview]:
            buffer, count, event = under_way.popleft()
            event.synchronize()
            try:
                yield torch_codec.byte_view(buffer)[:count]
            finally:
                buffers.give_back(buffer)

        try:
            for offset in range(0, len(source), self._chunk_bytes):
                piece, buffer = source[offset : offset + self._chunk_bytes], buffers.take()
                under_way.append((buffer, len(piece), engine.copy(buffer[: len(piece)], piece)))
                if len(under_way) > 1:
                    yield from next_one()
            while under_way:
                yield from next_one()
        finally:
            for buffer, _, event in under_way:
                buffers.give_back(buffer, event)


def device_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in memory order, as a tensor on the same device and memory."""
    start, count = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (count,), (1,))  # type: ignore[no-any-return,unused-ignore]


def cuda_copy_engine(device: torch.device) -> CopyEngine | None:
    """CopyEngine for a CUDA device; None for the others."""
    return CudaCopyEngine(device.index or 0) if device.type == "cuda" else None


@contextlib.contextmanager
def _enter_streams(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for stream in reversed(streams):  # entering one makes its device the current one
            stack.enter_context(torch.cuda.stream(stream))
        # The driver keeps a current context for each thread, and cuBLAS warns where there is none. PyTorch sets it only
        # where it is asked for a device by name: entering a stream or a device that is current already does not.
        torch.cuda.set_device(torch.cuda.current_device())
        yield


def on_streams(streams: Sequence[torch.cuda.Stream]) -> contextlib.AbstractContextManager[None]:
    """Compute on these streams inside the `with` block, on a thread that is ready for a GPU if this process uses one.

    Without streams, in a process that uses none, as calls mostly are, at no cost.
    """
    return _enter_streams(streams) if streams or torch.cuda.is_initialized() else _NO_STREAMS


@contextlib.contextmanager
def own_streams(devices: list[DeviceRow]) -> Iterator[list[Any]]:
    """Everything that this thread computes inside the block runs on streams of its own, one a CUDA device.

    Sessions so do not wait for one another. In the end the memory that belonged to those streams is given back, for no
    later session could use it.

    Yields:
        The streams, by the order of `devices`.
    """
    indices = [row["index"] or 0 for row in devices if row["type"] == "cuda"]
    if not indices:
        yield []
        return
    with contextlib.ExitStack() as stack:
        current = torch.cuda.current_device()
        streams: list[Any] = [torch.cuda.Stream(index) for index in indices]  # type: ignore[no-untyped-call,unused-ignore]
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        torch.cuda.set_device(current)  # entering a stream makes its device the current one
        try:
            yield streams
        finally:
            for index in indices:
                try:
                    torch.cuda.synchronize(index)
                except RuntimeError as error:  # of kernels that nobody has waited for
                    CONTEXT.note(error)
    torch.cuda.empty_cache()
