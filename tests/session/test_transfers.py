"""Uploads one by one and together, on a transport of the test's own: what is sent, waited for and given up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError, SessionLostError
from skyproxy.protocol import digests
from skyproxy.protocol.digests import content_digest
from skyproxy.protocol.messages import CancelTransfer, Challenge, Chunk, Known, Message, Offer, PackedChunk, Proof
from skyproxy.session import transfer_groups
from skyproxy.session.downloads import Downloads
from skyproxy.session.offers import UploadDedup
from skyproxy.session.transfer_groups import grouped_upload
from skyproxy.session.transfers import UploadQueue
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
    def __init__(self, offers: UploadDedup | None = None) -> None:
        self.link = Held()
        self.announced: list[int] = []
        self.uploads = UploadQueue(self.link, CHUNK, offers=offers)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self.uploads.run)
        self.thread.start()

    def upload(self, number: int, size: int = 2500) -> None:
        tensor = torch.full((size,), number, dtype=torch.uint8)
        view = torch_codec.byte_view(tensor)
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
    with grouped_upload("upload", 0, shown=False):
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
        with grouped_upload("upload", 0, shown=False):
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
        with grouped_upload("upload", 0, shown=False):
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
    monkeypatch.setattr(transfer_groups, "_WAITING_BYTES", 6000)
    finished = threading.Event()

    def upload() -> None:
        with grouped_upload("upload", 0, shown=False):
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
        with grouped_upload("upload", 0, shown=False):
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
    data = bytes(torch_codec.byte_view(raw))
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


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("offset", "total"), [(0, 8000), (2000, 8000), (4004, 8000), (4000, 8004), (4000, 4000)], ids=str
)
def test_a_piece_that_is_not_the_next_one_is_refused_and_lands_nowhere(
    offset: int, total: int, is_packed: bool
) -> None:
    """Else memory that nothing was written to would count as values."""
    waiters = Waiters()
    downloads = Downloads(waiters)
    target = torch.zeros(2000, dtype=torch.int32)
    number, waiter = waiters.open(keep_alive=target)
    downloads.open(number, target)
    data = bytes(torch_codec.byte_view(torch.arange(1, 1001, dtype=torch.int32)))
    first = Chunk(number, 0, 8000, (data,))
    sink = downloads.sink(first)
    assert sink is not None
    sink[: len(data)] = data
    downloads.on_chunk(first)
    with pytest.raises(ProtocolError, match="of which 4000 have come"):
        if is_packed:
            packed = pack(data, 4)
            assert packed is not None
            downloads.on_packed_chunk(PackedChunk(number, offset, total, 4000, 4, (packed,)))
        else:
            wrong = Chunk(number, offset, total, (data,))
            assert downloads.sink(wrong) is None
            downloads.on_chunk(wrong)
    assert not waiter.done
    assert target[1000:].eq(0).all()


def test_a_piece_of_a_transfer_that_nobody_asked_for_is_refused() -> None:
    waiters = Waiters()
    downloads = Downloads(waiters)
    target = torch.zeros(2)
    number, _ = waiters.open(keep_alive=target)
    downloads.open(number, target)
    with pytest.raises(ProtocolError, match="transfer 7, which nobody asked for"):
        downloads.on_chunk(Chunk(7, 0, 8, (bytes(8),)))
    downloads.on_chunk(Chunk(number, 0, 8, (bytes(8),)))
    downloads.on_chunk(Chunk(number, 0, 8, (bytes(8),)))  # once more, as behind a broken connection


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


# --- uploads that the worker may have --------------------------------------------------------------------------------


class Asking(Sender):
    """A sender that asks before each upload. Its worker answers when the test says so."""

    def __init__(self) -> None:
        super().__init__(UploadDedup(1, keeps=True, had_blobs=True))
        self.asked: queue.SimpleQueue[Offer] = queue.SimpleQueue()
        self.link.may_pass.set()
        plain = self.link.send

        def send(message: Message) -> None:
            plain(message)
            if isinstance(message, Offer) and message.digest:
                self.asked.put(message)

        self.link.send = send  # type: ignore[method-assign]

    def answer(self, transfer: int, known: bool) -> None:
        self.uploads.on_known(Known(transfer, known))


@pytest.fixture
def asking() -> Iterator[Asking]:
    made = Asking()
    yield made
    made.uploads.end(SessionLostError("over"))
    made.thread.join(20)
    assert not made.thread.is_alive()


def in_thread(body: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=body)
    thread.start()
    return thread


def test_all_questions_leave_before_the_first_answer_comes(asking: Asking) -> None:
    def move() -> None:
        with grouped_upload("upload", 0, shown=False):
            for number in (1, 2, 3):
                asking.upload(number)

    thread = in_thread(move)
    questions = [asking.asked.get(timeout=20) for _ in range(3)]
    assert [question.transfer for question in questions] == [1, 2, 3]
    assert questions[1].digest == content_digest(memoryview(bytes([2]) * 2500))
    for number, known in ((1, True), (2, False), (3, True)):
        asking.answer(number, known)
    thread.join(20)
    assert [len(asking.chunks(number)) for number in (1, 2, 3)] == [0, 3, 0]
    assert asking.uploads.offers.saved_bytes == 5000


def test_an_upload_that_waits_for_its_answer_can_be_given_up(asking: Asking) -> None:
    with pytest.raises(KeyboardInterrupt):
        with grouped_upload("upload", 0, shown=False):
            asking.upload(1)
            asking.asked.get(timeout=20)
            raise KeyboardInterrupt
    asking.answer(1, False)  # too late
    thread = in_thread(lambda: asking.upload(2))
    asking.asked.get(timeout=20)
    asking.answer(2, True)
    thread.join(20)
    assert asking.chunks(1) == []
    assert [m.transfer for m in asking.link.sent if isinstance(m, CancelTransfer)] == [1]


@pytest.mark.parametrize("proves", [False, True])
def test_no_further_piece_is_hashed_for_an_upload_that_was_given_up(
    asking: Asking, monkeypatch: pytest.MonkeyPatch, proves: bool
) -> None:
    monkeypatch.setattr(digests, "LEAF_BYTES", 100)
    hashed: list[int] = []
    leaf = digests._leaf
    struck, may_go_on = threading.Event(), threading.Event()

    def slow_leaf(piece: memoryview, start: bytes = b"") -> bytes:
        hashed.append(len(piece))
        if len(hashed) > (25 if proves else 0):  # the first time, which names the content, is let through
            struck.set()
            assert may_go_on.wait(20)
        return leaf(piece, start)

    monkeypatch.setattr(digests, "_leaf", slow_leaf)

    def upload() -> None:
        with pytest.raises(KeyboardInterrupt):
            with grouped_upload("upload", 0, shown=False):
                asking.upload(1)
                if proves:
                    asking.asked.get(timeout=20)
                    asking.uploads.on_known(Challenge(1, b"n" * 32))
                assert struck.wait(20)
                raise KeyboardInterrupt
        may_go_on.set()

    in_thread(upload).join(20)
    monkeypatch.setattr(digests, "_leaf", leaf)
    thread = in_thread(lambda: asking.upload(2))
    assert asking.asked.get(timeout=20).transfer == 2
    asking.answer(2, True)
    thread.join(20)
    # What other threads of the pool were at may end; of the 25 pieces most never begin.
    assert len(hashed) - (25 if proves else 0) <= 4
    assert [m.transfer for m in asking.link.sent if isinstance(m, CancelTransfer)] == [1]
    assert asking.chunks(1) == []
    assert not [m for m in asking.link.sent if isinstance(m, Proof)]


def test_a_lost_session_fails_who_waits_for_an_answer(asking: Asking) -> None:
    errors: list[BaseException] = []

    def upload() -> None:
        try:
            asking.upload(1)
        except SessionLostError as error:
            errors.append(error)

    thread = in_thread(upload)
    asking.asked.get(timeout=20)
    asking.uploads.end(SessionLostError("the worker is gone"))
    thread.join(20)
    assert [str(error) for error in errors] == ["the worker is gone"]


def test_an_answer_that_nobody_asked_for_is_ignored(asking: Asking) -> None:
    asking.answer(99, True)
    thread = in_thread(lambda: asking.upload(1))
    asking.asked.get(timeout=20)
    asking.answer(1, True)
    thread.join(20)
    assert asking.uploads.offers.saved_bytes == 2500


def test_a_first_upload_goes_unasked_behind_the_request_to_keep_it() -> None:
    made = Sender(UploadDedup(1, keeps=True, had_blobs=False))
    made.link.may_pass.set()
    made.upload(1)
    assert made.link.sent[0] == Offer(1, 2500, b"")
    assert len(made.chunks(1)) == 3
    made.uploads.end(SessionLostError("over"))
    made.thread.join(20)
