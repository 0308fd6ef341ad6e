"""What the same machine does without skyproxy, in the same minutes: round trips and bulk transfer over loopback."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable


def medians(functions: dict[str, Callable[[], float]], rounds: int) -> dict[str, tuple[float, float, float]]:
    """Minimum, median and maximum of each function's figure, taken in turn so that drift hits all alike."""
    figures: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            figures[name].append(function())
    return {name: (min(row), statistics.median(row), max(row)) for name, row in figures.items()}


def microseconds_each(call: Callable[[], object], count: int, before: Callable[[], object] | None = None) -> float:
    """Microseconds of one call, over `count` calls in a row."""
    if before is not None:
        before()
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count * 1e6


def _websocket_echo(ready: multiprocessing.Queue[int]) -> None:
    from websockets.sync.server import serve

    def echo(connection: object) -> None:
        for message in connection:  # type: ignore[attr-defined]
            connection.send(message)  # type: ignore[attr-defined]

    with serve(echo, "127.0.0.1", 0, compression=None) as server:
        server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ready.put(server.socket.getsockname()[1])
        server.serve_forever()


def _raw_sink(ready: multiprocessing.Queue[int]) -> None:
    """Fills fresh memory with what comes, then sends it back."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ready.put(listening.getsockname()[1])
        while True:
            peer, _ = listening.accept()
            with peer:
                size = int.from_bytes(peer.recv(8, socket.MSG_WAITALL), "little")
                memory = bytearray(size)
                view, got = memoryview(memory), 0
                while got < size:
                    got += peer.recv_into(view[got : got + (1 << 20)])
                peer.sendall(b"k")
                peer.sendall(memory)


class Yardsticks:
    """Two helper processes: a bare WebSocket echo, and a raw socket that fills fresh memory."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes = []
        ports = []
        for target in (_websocket_echo, _raw_sink):
            ready: multiprocessing.Queue[int] = context.Queue()
            process = context.Process(target=target, args=(ready,), daemon=True)
            process.start()
            self._processes.append(process)
            ports.append(ready.get(timeout=60))
        self._echo_port, self._raw_port = ports
        from websockets.sync.client import connect

        self._echo = connect(f"ws://127.0.0.1:{self._echo_port}", compression=None)
        self._echo.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def round_trip(self) -> None:
        """One small message to the echo and back, through the websockets library."""
        self._echo.send(b"0123456789abcdef")
        self._echo.recv()

    def raw_transfer(self, data: memoryview) -> tuple[float, float]:
        """Seconds to send the bytes over a raw socket into fresh memory, and to get them back into fresh memory."""
        with socket.create_connection(("127.0.0.1", self._raw_port)) as peer:
            started = time.perf_counter()
            peer.sendall(len(data).to_bytes(8, "little"))
            peer.sendall(data)
            peer.recv(1)
            up = time.perf_counter() - started
            started = time.perf_counter()
            memory = bytearray(len(data))
            view, got = memoryview(memory), 0
            while got < len(data):
                got += peer.recv_into(view[got : got + (1 << 20)])
            return up, time.perf_counter() - started

    def close(self) -> None:
        """Ends the helper processes."""
        self._echo.close()
        for process in self._processes:
            process.terminate()
            process.join()


__all__ = ["Yardsticks", "medians", "microseconds_each"]
