"""A TCP proxy that breaks connections at places that a seed chooses, as a bad network does."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator

_PIECE_BYTES = 64 << 10


class ChaosProxy:
    """Carries connections to one port and cuts them after random numbers of bytes.

    Attributes:
        port: where it listens.
        cuts: how many connections it has cut.
    """

    def __init__(self, port: int, seed: int = 0) -> None:
        self._target = port
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._pairs: dict[tuple[socket.socket, socket.socket], threading.Event] = {}
        self._budget: tuple[int, int] | None = None
        self._left = 0
        self._turns_away = False
        self._silent = 0
        self._piece_bytes = _PIECE_BYTES
        self.cuts = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, body: Callable[..., object], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=body, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def cut_after(self, least_bytes: int, most_bytes: int, cuts: int) -> None:
        """Cut connections that begin from now on, after so many bytes in one direction each; so many times in all."""
        with self._lock:
            self._budget, self._left = (least_bytes, most_bytes), cuts

    def cut(self) -> None:
        """Cut all connections that there are now."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._break(pair)

    def stall(self) -> None:
        """Let nothing pass any more on the connections that there are, and close nothing: a cable was pulled out."""
        with self._lock:
            for flows in self._pairs.values():
                flows.clear()

    def stall_newest(self) -> None:
        """The same for the connection that began last alone: a gateway has forgotten it."""
        with self._lock:
            next(reversed(self._pairs.values())).clear()

    def drip(self, piece_bytes: int) -> None:
        """Carry no more than so many bytes at a time from now on, each piece by itself."""
        self._piece_bytes = piece_bytes

    def silence(self, connections: int) -> None:
        """Carry, of what the worker says on so many of the next connections, the answer to the upgrade only."""
        with self._lock:
            self._silent = connections

    def turn_away(self, turns_away: bool) -> None:
        """Close connections that come from now on; or carry them again."""
        self._turns_away = turns_away

    def close(self) -> None:
        """Stop listening, cut everything, wait for the threads."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for thread in self._threads:
            thread.join(20)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            if self._turns_away:
                client.close()
                continue
            try:
                worker = socket.create_connection(("127.0.0.1", self._target), timeout=10)
            except OSError:
                client.close()
                continue
            worker.settimeout(None)
            pair = (client, worker)
            for end in pair:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                flows = self._pairs[pair] = threading.Event()
                flows.set()
                silent, self._silent = self._silent > 0, max(self._silent - 1, 0)
                budgets: list[int | None] = [None, None]
                if self._budget is not None:
                    budgets[self._random.randrange(2)] = self._random.randint(*self._budget)
            carrying = [
                self._start(self._carry, source, sink, pair, flows, budget, silent and source is worker)
                for source, sink, budget in ((client, worker, budgets[0]), (worker, client, budgets[1]))
            ]
            self._start(self._close_after, pair, carrying)

    @staticmethod
    def _close_after(pair: tuple[socket.socket, socket.socket], carrying: list[threading.Thread]) -> None:
        for thread in carrying:
            thread.join()
        for end in pair:
            end.close()

    def _carry(
        self,
        source: socket.socket,
        sink: socket.socket,
        pair: tuple[socket.socket, socket.socket],
        flows: threading.Event,
        budget: int | None,
        silent: bool,
    ) -> None:
        with contextlib.suppress(OSError):
            if silent:
                sink.sendall(_head_of(source))
            while data := source.recv(self._piece_bytes):
                flows.wait()
                if silent:
                    continue
                if budget is not None:
                    budget -= len(data)
                    if budget < 0 and self._may_cut():
                        sink.sendall(data[: len(data) + budget])  # a frame ends in its middle
                        self._break(pair)
                        return
                sink.sendall(data)
        self._break(pair, counted=False)

    def _may_cut(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def _break(self, pair: tuple[socket.socket, socket.socket], *, counted: bool = True) -> None:
        with self._lock:
            flows = self._pairs.pop(pair, None)
            if flows is None:
                return
            flows.set()
            self.cuts += counted
        for end in pair:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _head_of(source: socket.socket) -> bytes:
    """Read the answer to an upgrade, and nothing behind it."""
    head = b""
    while not head.endswith(b"\r\n\r\n") and (byte := source.recv(1)):
        head += byte
    return head


@contextlib.contextmanager
def chaos_proxy(port: int, seed: int = 0) -> Iterator[ChaosProxy]:
    """A proxy in front of this port, for the length of the block."""
    proxy = ChaosProxy(port, seed)
    try:
        yield proxy
    finally:
        proxy.close()
