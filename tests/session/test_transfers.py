"""Uploads one by one and together, on a transport of the test's own: what is sent, waited for and given up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol.messages import CancelTransfer, Chunk, Message, PackedChunk
from skyproxy.session import transfers
from skyproxy.session.transfers import Downloads, Uploads, together
from skyproxy.session.waiters import Waiters
from skyproxy.transport.packing import pack

CHUNK = 1000


class Held:
    """A transport whose messages leave when the test lets them."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.may_pass = threading.Event()

    def send(self, message: Message) -> None:
        assert self.may_pass.wait(20)
        if isinstance(message, Chunk):  # its buffer is borrowed
            message = replace(message, buffers=tuple(map(bytes, message.buffers)))
        self.sent.append(message)


class Sender:
    def __init__(self) -> None:
        self.link = Held()
        self.announced: list[int] = []
        self.uploads = Uploads(self.link, CHUNK)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self.uploads.run)
        self.thread.start()

    def upload(self, number: int, size: int = 2500) -> None:
        tensor = torch.full((size,), number, dtype=torch.uint8)
        view = transfers.torch_codec.byte_view(tensor)
        self.uploads.send(number, view, 1, tensor, lambda: self.announced.append(number))

    def chunks(self, number: int) -> list[tuple[int, Any]]:
        return [(m.offset, m.buffers[0]) for m in self.link.sent if isinstance(m, Chunk) and m.transfer == number]


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.link.may_pass.set()
    made.uploads.end(SessionLostError("over"))
    made.thread.join(20)
    assert not made.thread.is_alive()


def test_uploads_in_a_block_are_announced_before_the_first_has_left(sender: Sender) -> None:
    with together("upload", 0, shown=False):
        for number in range(1, 6):
            sender.upload(number)
        assert sender.announced == [1, 2, 3, 4, 5]
        assert sender.link.sent == []
        sender.link.may_pass.set()
    for number in range(1, 6):
        assert b"".join(data for _, data in sender.chunks(number)) == bytes([number]) * 2500


def test_the_block_ends_when_all_bytes_were_read(sender: Sender) -> None:
    order: list[str] = []

    def upload() -> None:
        with together("upload", 0, shown=False):
            sender.upload(1)
            order.append("enqueued")
        order.append(f"done after {len(sender.link.sent)} chunks")

    thread = threading.Thread(target=upload)
    thread.start()
    sender.link.may_pass.set()
    thread.join(20)
    assert order == ["enqueued", "done after 3 chunks"]


def test_outside_a_block_each_upload_is_waited_for(sender: Sender) -> None:
    sender.link.may_pass.set()
    sender.upload(1)
    assert len(sender.chunks(1)) == 3


def test_an_interrupt_gives_up_everything_that_is_not_through(sender: Sender) -> None:
    with pytest.raises(KeyboardInterrupt):
        with together("upload", 0, shown=False):
            for number in (1, 2, 3):
                sender.upload(number)
            raise KeyboardInterrupt
    sender.link.may_pass.set()
    sender.upload(4)
    cancelled = [m.transfer for m in sender.link.sent if isinstance(m, CancelTransfer)]
    assert cancelled == [1, 2, 3]
    assert sender.chunks(2) == sender.chunks(3) == []
    assert len(sender.chunks(4)) == 3


def test_what_waits_is_bounded(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_WAITING_BYTES", 6000)
    finished = threading.Event()

    def upload() -> None:
        with together("upload", 0, shown=False):
            for number in range(1, 9):
                sender.upload(number)
        finished.set()

    thread = threading.Thread(target=upload)
    thread.start()
    assert not finished.wait(0.1)
    assert len(sender.announced) <= 2
    sender.link.may_pass.set()
    assert finished.wait(20)
    assert sender.announced == list(range(1, 9))
    thread.join(20)


def test_a_lost_session_ends_the_block(sender: Sender) -> None:
    sender.link.may_pass.set()
    with pytest.raises(SessionLostError):
        with together("upload", 0, shown=False):
            sender.link.may_pass.clear()
            sender.upload(1)
            sender.upload(2)
            sender.uploads.end(SessionLostError("gone"))
            sender.link.may_pass.set()


def test_a_packed_chunk_lands_in_its_place() -> None:
    waiters = Waiters()
    downloads = Downloads(waiters)
    target = torch.zeros(2000, dtype=torch.int32)
    number, waiter = waiters.open(keep_alive=target)
    downloads.open(number, target)
    raw = torch.arange(2000, dtype=torch.int32)
    data = bytes(transfers.torch_codec.byte_view(raw))
    for offset in (0, 4000):
        piece = pack(data[offset : offset + 4000], 4)
        assert piece is not None
        assert downloads.missing_bytes(target) == 8000 - offset
        downloads.on_packed_chunk(PackedChunk(number, offset, 8000, 4000, 4, (piece,)))
    assert waiter.done
    assert torch.equal(target, raw)
    downloads.on_packed_chunk(PackedChunk(number, 0, 8000, 4000, 4, (b"late",)))  # nobody waits: not even unpacked


def test_a_malformed_packed_chunk_is_a_protocol_error() -> None:
    waiters = Waiters()
    downloads = Downloads(waiters)
    target = torch.zeros(2000, dtype=torch.int32)
    number, _ = waiters.open(keep_alive=target)
    downloads.open(number, target)
    with pytest.raises(ProtocolError):
        downloads.on_packed_chunk(PackedChunk(number, 0, 8000, 4000, 4, (b"\xff\xff",)))


def test_an_upload_that_was_interrupted_while_it_was_announced_is_cancelled(sender: Sender) -> None:
    def strike() -> None:
        sender.announced.append(1)
        raise KeyboardInterrupt

    data = bytearray(2500)
    with pytest.raises(KeyboardInterrupt):
        sender.uploads.send(1, memoryview(data), 1, data, strike)
    sender.link.may_pass.set()
    sender.upload(2)
    assert [type(m) for m in sender.link.sent if m.transfer == 1] == [CancelTransfer]  # type: ignore[attr-defined]
    assert [offset for offset, _ in sender.chunks(2)] == [0, 1000, 2000]
