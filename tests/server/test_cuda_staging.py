"""Pinned buffers in turns, with hands that copy as late as a device may."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from skyproxy.protocol.digests import content_digest
from skyproxy.protocol.messages import Chunk, Offer, PackedChunk
from skyproxy.torch_codec import byte_view
from skyproxy.transport.packing import pack
from skyproxy_server.blobs import BlobStore
from skyproxy_server.cuda_staging import BUFFERS, Staging, on_streams, own_streams
from skyproxy_server.incoming_transfer import IncomingTransfer
from skyproxy_server.transfers import Transfers

CHUNK = 1000


class LateEvent:
    def __init__(self, hands: LateHands, position: int) -> None:
        self._hands, self._position = hands, position

    def synchronize(self) -> None:
        self._hands.run_to(self._position)


class LateHands:
    """Copies only when somebody waits for it: whoever reuses a buffer too early is found out."""

    def __init__(self) -> None:
        self.buffers = 0
        self.begun: list[torch.Tensor] = []
        self.copies: list[Callable[[], object]] = []
        self.done = 0

    def pinned(self, byte_count: int) -> torch.Tensor:
        self.buffers += 1
        return torch.empty(byte_count, dtype=torch.uint8)

    def begin(self, tensor: torch.Tensor) -> None:
        self.begun.append(tensor)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> LateEvent:
        self.copies.append(lambda: target.copy_(source))
        return LateEvent(self, len(self.copies))

    def hold_back(self, event: LateEvent) -> None:  # type: ignore[override]
        event.synchronize()

    def run_to(self, position: int) -> None:
        for copy in self.copies[self.done : position]:
            copy()
        self.done = max(self.done, position)


@pytest.fixture
def hands() -> LateHands:
    return LateHands()


@pytest.fixture
def staging(hands: LateHands) -> Staging:
    return Staging(CHUNK, lambda device: hands)  # type: ignore[arg-type,return-value]


def feed(transfers: Transfers, number: int, data: bytes, offsets: range, chunk: int = CHUNK) -> None:
    """As a transport does: the payload is written where the sink says."""
    for offset in offsets:
        piece = data[offset : offset + chunk]
        target = transfers.sink(Chunk(number, offset, len(data)))
        assert target is not None
        target[: len(piece)] = piece
        transfers.on_chunk(Chunk(number, offset, len(data), (target[: len(piece)],)))


def announced(transfers: Transfers, number: int, value: torch.Tensor) -> tuple[IncomingTransfer, torch.Tensor]:
    arrival = transfers.arrival(number, value.nbytes)
    assert arrival.target is not None
    host = arrival.target.view(value.dtype).as_strided(value.shape, value.stride())
    transfers.pass_on(arrival, value)
    return arrival, host


def source() -> torch.Tensor:
    return torch.randint(0, 1 << 30, (60, 71), dtype=torch.int32)


def test_pieces_go_on_through_few_buffers(staging: Staging, hands: LateHands) -> None:
    transfers = Transfers(CHUNK, staging)
    for number in (1, 2):
        expected, value = source(), torch.zeros(60, 71, dtype=torch.int32)
        arrival, host = announced(transfers, number, value)
        data = bytes(byte_view(expected))
        feed(transfers, number, data, range(0, len(data), CHUNK))
        assert arrival.finished()
        arrival.settle(value, host)
        assert torch.equal(value, expected)
        # The size of the client's pieces is learned from the first one.
        assert arrival.early == ([(0, CHUNK)] if number == 1 else [])
    assert hands.buffers == BUFFERS
    assert len(hands.begun) == 2


def test_pieces_that_came_before_their_announcement_are_not_lost(staging: Staging) -> None:
    transfers = Transfers(CHUNK, staging)
    expected, value = source(), torch.zeros(60, 71, dtype=torch.int32)
    data = bytes(byte_view(expected))
    feed(transfers, 1, data, range(0, 5 * CHUNK, CHUNK))
    arrival, host = announced(transfers, 1, value)
    feed(transfers, 1, data, range(5 * CHUNK, len(data), CHUNK))
    arrival.settle(value, host)
    assert torch.equal(value, expected)


def test_pieces_larger_than_a_buffer_take_the_plain_way(staging: Staging, hands: LateHands) -> None:
    transfers = Transfers(CHUNK, staging)
    expected, value = source(), torch.zeros(60, 71, dtype=torch.int32)
    data = bytes(byte_view(expected))
    arrival, host = announced(transfers, 1, value)
    feed(transfers, 1, data, range(0, len(data), 3 * CHUNK), 3 * CHUNK)
    arrival.settle(value, host)
    assert torch.equal(value, expected)
    assert hands.copies == []


def test_packed_pieces_go_the_same_way(staging: Staging, hands: LateHands) -> None:
    transfers = Transfers(CHUNK, staging)
    expected = torch.arange(1065, dtype=torch.int32)
    value = torch.zeros_like(expected)
    data = bytes(byte_view(expected))
    arrival, host = announced(transfers, 1, value)
    for offset in range(0, len(data), CHUNK):
        raw = data[offset : offset + CHUNK]
        packed = pack(raw, 4)
        assert packed is not None
        transfers.on_packed_chunk(PackedChunk(1, offset, len(data), len(raw), 4, (packed,)))
    arrival.settle(value, host)
    assert torch.equal(value, expected)
    assert arrival.early == []
    assert hands.copies


def test_a_device_in_trouble_fails_the_transfer_and_not_the_connection(staging: Staging, hands: LateHands) -> None:
    def broken(target: torch.Tensor, source: torch.Tensor) -> LateEvent:
        raise RuntimeError("an illegal memory access")

    hands.copy = broken  # type: ignore[method-assign]
    transfers = Transfers(CHUNK, staging)
    value = torch.zeros(60, 71, dtype=torch.int32)
    arrival, host = announced(transfers, 1, value)
    feed(transfers, 1, bytes(value.nbytes), range(0, value.nbytes, CHUNK))
    with pytest.raises(RuntimeError, match="illegal memory"):
        arrival.settle(value, host)


@pytest.mark.parametrize("shape", [(250,), (251,), (60, 71)])
def test_departures_are_one_piece_ahead_and_never_overwritten(
    staging: Staging, hands: LateHands, shape: tuple[int, ...]
) -> None:
    tensor = torch.randint(0, 1 << 30, shape, dtype=torch.int32)
    view = torch.cat([torch.zeros(7, dtype=torch.int32), tensor.flatten()])[7:].view(shape)
    staging.leave(view)
    got = b""
    for number, piece in enumerate(staging.pieces(view)):
        got += bytes(piece)
        assert len(hands.copies) <= number + 2
    assert got == bytes(byte_view(tensor))
    assert hands.buffers <= 2


def test_a_departure_that_is_given_up_returns_its_buffers(staging: Staging, hands: LateHands) -> None:
    tensor = torch.arange(5000, dtype=torch.uint8)
    for _ in range(3 * BUFFERS):
        staging.leave(tensor)
        pieces = staging.pieces(tensor)
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
    assert hands.buffers <= BUFFERS


def test_on_the_cpu_bytes_land_and_leave_in_place() -> None:
    transfers = Transfers(CHUNK)
    data = bytes(byte_view(source()))
    arrival = transfers.arrival(1, len(data))
    feed(transfers, 1, data, range(0, len(data), CHUNK))
    assert arrival.device is None
    target = arrival.wait()
    assert bytes(byte_view(target)) == data
    staging = Staging(CHUNK)
    staging.leave(target)
    for number, piece in enumerate(staging.pieces(target)):
        piece[:1] = b"\x2a"
        assert target[number * CHUNK] == 0x2A


def test_without_cuda_there_are_no_streams() -> None:
    with own_streams([{"type": "cpu", "index": 0}]):
        assert torch.ones(2).sum() == 2


@pytest.mark.parametrize("announced_first", [True, False])
def test_kept_uploads_reach_the_device(staging: Staging, announced_first: bool) -> None:
    store = BlobStore(1 << 20)
    transfers = Transfers(CHUNK, staging, blobs=store, user="a")
    expected = source()
    data = bytes(byte_view(expected))
    for number in (1, 2):  # from the second one on, pieces pass through pinned buffers
        first = expected + number
        value = torch.zeros(60, 71, dtype=torch.int32)
        transfers.on_offer(Offer(number, len(data), b""))
        arrival, host = announced(transfers, number, value)
        feed(transfers, number, bytes(byte_view(first)), range(0, len(data), CHUNK))
        arrival.settle(value, host)
        assert torch.equal(value, first)
    store._finished.put(None)
    store._hasher.join(30)
    assert len(store) == 2
    value = torch.zeros(60, 71, dtype=torch.int32)
    last = expected + 2
    question = Offer(3, len(data), content_digest(byte_view(last)))
    if announced_first:
        arrival, host = announced(transfers, 3, value)
        assert transfers.on_offer(question)
    else:
        assert transfers.on_offer(question)
        arrival, host = announced(transfers, 3, value)
    arrival.settle(value, host)
    assert torch.equal(value, last)


class Thread:
    """What a driver knows of one thread: its device, and whether a context is current, which cuBLAS asks."""

    def __init__(self) -> None:
        self.device = 0
        self.has_context = False

    def set_device(self, index: int) -> None:
        self.device, self.has_context = index, True

    @contextlib.contextmanager
    def stream(self, stream: torch.device) -> Iterator[None]:
        """As PyTorch enters a stream: a device that is current already is not set again."""
        before = self.device
        if stream.index != self.device:
            self.set_device(stream.index)
        yield
        if before != self.device:
            self.set_device(before)


@pytest.mark.parametrize("streams", [[], [torch.device("cuda", 0)], [torch.device("cuda", 0), torch.device("cuda", 1)]])
@pytest.mark.parametrize("is_initialized", [True, False])
def test_a_thread_that_computes_has_a_current_context(
    streams: list[Any], is_initialized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = Thread()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: thread.device)
    monkeypatch.setattr(torch.cuda, "set_device", thread.set_device)
    monkeypatch.setattr(torch.cuda, "stream", thread.stream)
    with on_streams(streams):
        assert (thread.device, thread.has_context) == (0, is_initialized or bool(streams))
