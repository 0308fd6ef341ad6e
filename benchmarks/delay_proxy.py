"""A TCP proxy that adds what a distant network adds: delay, a bandwidth cap, and boundaries that nobody chose.

    python benchmarks/delay_proxy.py --to 127.0.0.1:8765 --rtt-ms 20
    python benchmarks/delay_proxy.py --to 127.0.0.1:8765 --rtt-ms 20 --mbit-up 50 --mbit-down 200
    python benchmarks/delay_proxy.py --to 127.0.0.1:8765 --rechunk

Every byte leaves half a round trip after it came, in either direction; throughput is not limited unless asked for. It
prints one line of JSON, `{"ports": [...]}`, one port for each --to, and ends when its standard input ends. Opening a
connection is not delayed: loopback accepts at once.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from _helper_process import announce, end_with_parent

_PIECE_BYTES = 256 << 10
_CAPPED_PIECE_BYTES = 16 << 10
"""With a cap, connections take turns in pieces of this size: 2.6 ms each at 50 Mbit/s."""
_RECHUNK_BITS = 16
_MAX_UNDER_WAY_BYTES = 256 << 20
"""What one direction of one connection may hold: at 80 ms round trip, 6 GiB/s."""


@dataclass(frozen=True)
class Conditions:
    """How the network between client and worker is.

    Attributes:
        rtt_seconds: of which each direction adds half.
        mbit_up, mbit_down: from client to worker and back, shared by all connections; None is no limit.
        rechunk: whether bytes leave in pieces of random sizes.
        seed: of the sizes.
    """

    rtt_seconds: float = 0.0
    mbit_up: float | None = None
    mbit_down: float | None = None
    rechunk: bool = False
    seed: int = 0


class TokenBucket:
    """Lets bytes through at a rate; whoever takes more waits."""

    def __init__(
        self,
        bytes_per_second: float,
        burst_bytes: int = _CAPPED_PIECE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._burst_seconds = burst_bytes / bytes_per_second
        self._clock, self._sleep = clock, sleep
        self._free_at = clock()
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Waits until `count` more bytes may pass; callers pass in the order in which they came."""
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - self._burst_seconds) + count / self._rate
            wait_seconds = self._free_at - now
        if wait_seconds > 0:
            self._sleep(wait_seconds)


class _Direction:
    """Carries the bytes of one connection one way: one thread takes them in, another lets them out when due."""

    def __init__(
        self,
        source: socket.socket,
        sink: socket.socket,
        delay_seconds: float,
        bucket: TokenBucket | None,
        sizes: random.Random | None,
        on_end: Callable[[], None],
    ) -> None:
        self._source, self._sink = source, sink
        self._delay_seconds = delay_seconds
        self._bucket = bucket
        self._sizes = sizes
        self._on_end = on_end
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._bytes_under_way = 0
        self._broken = False
        self._changed = threading.Condition()

    def start(self) -> None:
        """Begins; both threads end with the connection."""
        for body in (self._take_in, self._let_out) if self._delay_seconds else (self._pass_on,):
            threading.Thread(target=body, daemon=True).start()

    def _receive(self) -> bytes:
        limit = _PIECE_BYTES if self._bucket is None else _CAPPED_PIECE_BYTES
        if self._sizes is not None:
            limit = min(limit, int(2 ** self._sizes.uniform(0, _RECHUNK_BITS)))
        try:
            data = self._source.recv(limit)
        except OSError:
            return b""
        if data and self._bucket is not None:
            self._bucket.take(len(data))
        return data

    def _pass_on(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._receive():
                self._sink.sendall(data)
        self._finish()

    def _take_in(self) -> None:
        while True:
            data = self._receive()
            with self._changed:
                while self._bytes_under_way > _MAX_UNDER_WAY_BYTES and not self._broken:
                    self._changed.wait()
                self._under_way.append((time.monotonic() + self._delay_seconds, data))
                self._bytes_under_way += len(data)
                self._changed.notify_all()
            if not data or self._broken:
                return

    def _let_out(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._under_way:
                        self._changed.wait()
                    due, data = self._under_way.popleft()
                    self._bytes_under_way -= len(data)
                    self._changed.notify_all()
                wait_seconds = due - time.monotonic()
                if wait_seconds > 0:
                    time.sleep(wait_seconds)
                if not data:
                    break
                self._sink.sendall(data)
        except OSError:
            with self._changed:
                self._broken = True
                self._changed.notify_all()
        self._finish()

    def _finish(self) -> None:
        """Tells either side: what reads from us gets the end of the stream, what writes to us cannot any more."""
        with contextlib.suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            self._source.shutdown(socket.SHUT_RD)
        self._on_end()


class DelayProxy:
    """Listens on loopback, one port for each target, until closed.

    Attributes:
        ports: where it listens, in the order of the targets.
    """

    def __init__(self, targets: list[tuple[str, int]], conditions: Conditions) -> None:
        self._conditions = conditions
        self._up = _bucket(conditions.mbit_up)
        self._down = _bucket(conditions.mbit_down)
        self._seeds = random.Random(conditions.seed)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listening = [socket.create_server(("127.0.0.1", 0)) for _ in targets]
        self.ports: list[int] = [listening.getsockname()[1] for listening in self._listening]
        for listening, target in zip(self._listening, targets):
            threading.Thread(target=self._accept, args=(listening, target), daemon=True).start()

    def _accept(self, listening: socket.socket, target: tuple[str, int]) -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            try:
                worker = socket.create_connection(target, timeout=10)
            except OSError:
                client.close()
                continue
            worker.settimeout(None)
            self._carry(client, worker)

    def _carry(self, client: socket.socket, worker: socket.socket) -> None:
        both = (client, worker)
        for end in both:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open.update(both)
        ended: list[None] = []

        def on_end() -> None:
            with self._lock:
                ended.append(None)
                if len(ended) == len(both):
                    self._open.difference_update(both)
                    for end in both:
                        end.close()

        delay = self._conditions.rtt_seconds / 2
        for source, sink, bucket in ((client, worker, self._up), (worker, client, self._down)):
            sizes = random.Random(self._seeds.random()) if self._conditions.rechunk else None
            _Direction(source, sink, delay, bucket, sizes, on_end).start()

    def close(self) -> None:
        """Stops listening and breaks every connection."""
        for listening in self._listening:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()
        with self._lock:
            ends = list(self._open)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _bucket(mbit: float | None) -> TokenBucket | None:
    return TokenBucket(mbit * 1e6 / 8) if mbit else None


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no address; write host:port")
    return host, int(port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=_address, action="append", required=True, metavar="HOST:PORT", help="repeatable")
    parser.add_argument("--rtt-ms", type=float, default=0.0, help="round-trip time to add (default: %(default)s)")
    parser.add_argument("--mbit-up", type=float, help="limit of what clients send, all connections together")
    parser.add_argument("--mbit-down", type=float, help="limit of what clients receive, all connections together")
    parser.add_argument("--rechunk", action="store_true", help="cut the stream at random places")
    parser.add_argument("--seed", type=int, default=0, help="of the random places (default: %(default)s)")
    arguments = parser.parse_args()
    end_with_parent()
    proxy = DelayProxy(
        arguments.to,
        Conditions(arguments.rtt_ms / 1e3, arguments.mbit_up, arguments.mbit_down, arguments.rechunk, arguments.seed),
    )
    announce(ports=proxy.ports)
    threading.Event().wait()


if __name__ == "__main__":
    main()
