"""One upload on its way: where its pieces land, and whoever waits for the last."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from skyproxy import torch_codec
from skyproxy_server.blobs import Keeping
from skyproxy_server.cuda_staging import IncomingTensor

LOOK_SECONDS = 5.0
"""The interval at which whoever waits for an upload looks whether its client is still there."""


class IncomingTransfer:
    """Bytes that come from the client, in pieces.

    Attributes:
        target: where they land; None where there was no memory for them, or nothing comes any more.
        view: the same as bytes.
        byte_count: how many there are.
        missing: how many did not come yet.
        over: whether no more pieces come.
        device: the device tensor that pieces are passed on to; None for one in the host's memory.
        early: offsets and sizes of the pieces that are in `target`; the others went to `device`.
        pieces: offsets and sizes of all pieces that came.
        kept: what takes a copy of each piece, for later uploads of the same content.
    """

    def __init__(self, byte_count: int, has_left: Callable[[], bool] = lambda: False) -> None:
        """Get ready for so many bytes.

        Args:
            byte_count: how many come.
            has_left: tells whether the client is gone for good.
        """
        self.target: torch.Tensor | None = None
        self.view: memoryview | None = None
        self.byte_count = byte_count
        self.missing = byte_count
        self.over = False
        self.device: IncomingTensor | None = None
        self.early: list[tuple[int, int]] = []
        self.pieces: list[tuple[int, int]] = []
        self.kept: Keeping | None = None
        self._has_left = has_left
        self._done = threading.Event()
        self._error: Exception | None = None
        try:
            self.target = torch.empty(byte_count, dtype=torch.uint8)
            self.view = torch_codec.byte_view(self.target)
        except (RuntimeError, MemoryError) as error:  # the operation that wanted the values fails, nothing else
            self.fail(error)

    def bytes(self, offset: int, size: int) -> memoryview | None:
        """Some of what has landed in the arrival's own memory."""
        return self.view[offset : offset + size] if self.view is not None else None

    def finished(self) -> bool:
        return self._done.is_set()

    def wait(self) -> torch.Tensor:
        """Waits for the last piece; the bytes.

        Raises:
            Exception: there was no memory, the client cancelled the transfer, or the connection ended.
        """
        before = -1
        while not self._done.wait(LOOK_SECONDS):
            # Nobody reads the operations connection meanwhile; what comes on the bulk connection may still be complete.
            if self.missing == before and self._has_left():
                self.over = True
                self.fail(RuntimeError("the client has left in the middle of an upload"))
            before = self.missing
        if self._error is not None:
            raise self._error
        assert self.target is not None
        return self.target

    def settle(self, value: torch.Tensor, host: torch.Tensor) -> None:
        """Waits for the last piece; then whatever is computed sees the values.

        Args:
            value: the tensor that `Transfers.pass_on` was given.
            host: the view of `target` that looks like it.

        Raises:
            Exception: as `wait`.
        """
        target = self.wait()
        if self.device is not None:
            self.device.settle(target, self.early)
        else:
            value.copy_(host)

    def count(self, byte_count: int) -> None:
        self.missing -= byte_count
        if self.missing <= 0:
            self.over = True
            kept, self.kept = self.kept, None  # a piece that came twice must not change what is hashed
            if not self._is_whole():
                if kept is not None:
                    kept.discard()
                self.fail(RuntimeError("pieces of an upload came twice, and others never"))
                return
            if kept is not None:
                kept.finish()
            self._done.set()

    def _is_whole(self) -> bool:
        """Return whether the pieces cover all bytes, so that none of what was in memory before is left."""
        end = 0
        for offset, size in sorted(self.pieces):
            if offset > end:
                return False
            end = max(end, offset + size)
        return end >= self.byte_count

    def fail(self, error: Exception) -> None:
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.discard()
        if not self._done.is_set():
            self._error = error
            self._done.set()


class TransferCancelledError(RuntimeError):
    """The client cancelled a transfer; it knows that, and why."""
