"""Large tensors on their way here: in pieces, on the bulk connection, straight into the memory of their tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from skyproxy import torch_codec
from skyproxy.errors import ProtocolError, RemoteError
from skyproxy.protocol.messages import CancelTransfer, Chunk, Landed, Message, PackedChunk
from skyproxy.session.trace import SessionTrace
from skyproxy.session.waiters import Waiters
from skyproxy.transport.packing import unpack


class Downloads:
    """Chunks that arrive, written straight into the tensors that wait for them. Named by the request that asked.

    Attributes:
        packed_chunks: how many came compressed.
        trace: where the time of each is noted, else None.
        confirm: tells the worker how much of a transfer has come, where it wants to know that.
    """

    def __init__(self, waiters: Waiters) -> None:
        self.packed_chunks = 0
        self.confirm: Callable[[Landed], object] = lambda message: None
        self.trace: SessionTrace | None = None
        self._waiters = waiters
        self._open: dict[int, tuple[torch.Tensor, memoryview]] = {}
        self._missing: dict[int, int] = {}

    def open(self, number: int, target: torch.Tensor) -> None:
        """Announces where a transfer lands. The target stays alive until its last chunk came, whoever waits or not."""
        view = torch_codec.byte_view(target)
        if self.trace is not None:
            self.trace.download_begins(number)
        self._missing[number] = len(view)
        self._open[number] = (target, view)

    def sink(self, message: Message) -> memoryview | None:
        """Return the memory for a chunk's bytes: straight into the tensor."""
        if not isinstance(message, Chunk):
            return None
        entry = self._open.get(message.transfer)
        if entry is None or not self._is_next(message, entry[1]):
            return None
        return entry[1][message.offset :]

    def _is_next(self, chunk: Chunk | PackedChunk, view: memoryview) -> bool:
        """Return whether a chunk goes on where the one before ended: each byte comes once, and none is left out."""
        landed = len(view) - self._missing.get(chunk.transfer, 0)
        return chunk.total_bytes == len(view) and chunk.offset == landed

    def _check_next(self, chunk: Chunk | PackedChunk) -> None:
        entry = self._open.get(chunk.transfer)
        if entry is not None and not self._is_next(chunk, entry[1]):
            raise ProtocolError(
                f"the worker sent byte {chunk.offset} of {chunk.total_bytes} of a tensor of {len(entry[1])} bytes, of "
                f"which {len(entry[1]) - self._missing[chunk.transfer]} have come"
            )

    def on_chunk(self, chunk: Chunk) -> None:
        """Take note of a piece that came.

        Raises:
            ProtocolError: it is not the next one of its transfer, or of none.
        """
        self._check_next(chunk)
        self._note_landed(chunk.transfer, len(chunk.buffers[0]))
        self._confirm_unknown(chunk)

    def _confirm_unknown(self, chunk: Chunk | PackedChunk) -> None:
        """Tell the worker that a transfer which it sends once more is here already."""
        if chunk.transfer not in self._open:
            if not self._waiters.was_given(chunk.transfer):
                raise ProtocolError(f"the worker sent a piece of transfer {chunk.transfer}, which nobody asked for")
            self.confirm(Landed(chunk.transfer, chunk.total_bytes))

    def on_packed_chunk(self, chunk: PackedChunk) -> None:
        """A piece that came compressed.

        Raises:
            ProtocolError: it cannot be unpacked, or is not the next one of its transfer.
        """
        self.packed_chunks += 1
        entry = self._open.get(chunk.transfer)
        if entry is None:
            self._confirm_unknown(chunk)
            return
        self._check_next(chunk)
        raw = unpack(chunk)
        entry[1][chunk.offset : chunk.offset + len(raw)] = raw  # it fits: the connection has checked that
        self._note_landed(chunk.transfer, len(raw))
        self._confirm_unknown(chunk)

    def _note_landed(self, number: int, byte_count: int) -> None:
        if number not in self._open:
            return
        self._missing[number] -= byte_count
        if self._missing[number] <= 0:
            total = len(self._open[number][1])
            if self.trace is not None:
                self.trace.download_ends(number, total)
            self.forget(number)
            waiter = self._waiters.take(number)
            if waiter is not None:
                waiter.set(None)

    def landed_bytes(self) -> dict[int, int]:
        """Return how much of each transfer that is not complete has come."""
        return {number: len(view) - self._missing.get(number, 0) for number, (_, view) in list(self._open.items())}

    def missing_bytes(self, target: object) -> int:
        """Return how many bytes of the transfer that lands in this tensor have not come yet."""
        for number, (tensor, _) in list(self._open.items()):
            if tensor is target:
                return self._missing.get(number, 0)
        return 0

    def on_cancel(self, message: CancelTransfer) -> None:
        self.forget(message.transfer)
        self.confirm(Landed(message.transfer, 0))
        waiter = self._waiters.take(message.transfer)
        if waiter is not None:
            waiter.fail(RemoteError(message.reason))

    def begin_anew(self) -> None:
        """All that is not complete comes from its beginning."""
        for number, (_, view) in list(self._open.items()):
            self._missing[number] = len(view)

    def forget(self, number: int) -> None:
        """No more chunks come for this request."""
        self._open.pop(number, None)
        self._missing.pop(number, None)
