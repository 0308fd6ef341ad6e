"""One large tensor on its way to the client."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from skyproxy_server.incoming_transfer import LOOK_SECONDS


class OutgoingTransfer:
    """Bytes that go to the client, in pieces.

    Attributes:
        offset: where to begin; the client has what is before it.
        begun: whether a piece has left.
    """

    begun = False

    def __init__(self, number: int, tensor: torch.Tensor, is_deserted: Callable[[], bool] = lambda: False) -> None:
        """Get ready to send a tensor.

        Args:
            number: of the transfer.
            tensor: a dense one.
            is_deserted: tells whether the client is gone for good.
        """
        self.number = number
        self.tensor = tensor
        self.offset = 0
        self._is_deserted = is_deserted
        self._lock = threading.Lock()
        self._readers = 0
        self._is_over = False
        self._done = threading.Event()

    @property
    def is_over(self) -> bool:
        """True if nobody wants it any more."""
        return self._is_over

    def finished(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        """Waits until the tensor may change again."""
        while not self._done.wait(LOOK_SECONDS):
            # Nobody reads the operations connection meanwhile, nor says that these bytes have come.
            if self._is_deserted():
                self.end()

    def end(self) -> None:
        """Nobody wants it any more: its tensor may change as soon as nobody reads it, whatever the client says."""
        with self._lock:
            self._is_over = True
            if not self._readers:
                self._done.set()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the tensor as it is while its bytes are read; whoever does so looks at `is_over` first."""
        with self._lock:
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                if self._is_over and not self._readers:
                    self._done.set()
