"""A signal at any bytecode of a send leaves a perfect stream, whatever its handler raises."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from skyproxy.errors import SessionLostError
from skyproxy.interrupts import DeferringSignalHandler
from skyproxy.protocol.messages import BULK, Batch, Buffer, Chunk, Message, Sequence
from skyproxy.settings import Settings

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX interval timers"),
]

STORM_SECONDS = 1.5
PATIENT = Settings(close_timeout_seconds=20.0)
"""What is still on its way when the storm is over has time to arrive."""


class Storm:
    """Raises an error in the main thread, again and again at random times."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.strikes = 0
        self._random = random.Random(1)
        self._raging = False

    def _strike(self, *_: object) -> None:
        if self._raging:
            self.strikes += 1
            self._raging = False
            raise self.error

    def attempt(self, action: Callable[[], object], seconds: float | None = None) -> bool:
        """Whether `action` came to its end before lightning struck, after `seconds` or at random."""
        signal.signal(signal.SIGALRM, DeferringSignalHandler(self._strike))
        delay = seconds or self._random.choice((2e-6, 1e-5, 3e-5, 1e-4, 1e-3)) * self._random.random() + 1e-6
        try:
            self._raging = True
            signal.setitimer(signal.ITIMER_REAL, delay)
            action()
            self._raging = False
        except self.error:
            return False
        finally:
            self._raging = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return True


# What an alarm raises is often a TimeoutError, which is an OSError, as a lost connection is.
@pytest.fixture(params=[KeyboardInterrupt, TimeoutError])
def storm(request: pytest.FixtureRequest) -> Iterator[Storm]:
    before = signal.getsignal(signal.SIGALRM)
    yield Storm(request.param)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class Receiver:
    """Reads a transport to its end on a thread of its own."""

    def __init__(self, recv: Callable[[], Message], check: Callable[[Message], None]) -> None:
        self.error: BaseException | None = None
        self.received = 0
        self._recv, self._check = recv, check
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self._check(self._recv())
                self.received += 1
        except SessionLostError:
            pass
        except BaseException as exc:
            self.error = exc

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


def payload(number: int) -> bytes:
    # Mostly small frames, as in life; some beyond the socket's buffers, so that writes are cut in the middle.
    size = (50, 700, 9_000, 120_000, 50, 50)[number % 6]
    return number.to_bytes(8, "little") * (size // 8)


# An interrupt may strike in a callback of the garbage collector, PyTorch's compiler has one; Python then reports it so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("shares_threads", [False, True], ids=["own threads", "shared threads"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_no_batch_is_lost_torn_or_repeated(make_pair, storm: Storm, tls: bool, shares_threads: bool) -> None:
    client, worker = make_pair(tls=tls, buffer_bytes=8192, settings=PATIENT, shares_threads=shares_threads)
    expected = iter(range(1, 10**9))

    def check(message: Message) -> None:
        assert isinstance(message, Batch)
        number = next(expected)
        assert message.sequence == number
        assert message.stream == [number]
        assert bytes(message.buffers[0]) == payload(number)

    receiver = Receiver(worker.recv, check)
    number = 0
    end = time.monotonic() + STORM_SECONDS
    while time.monotonic() < end or storm.strikes <= 100:
        number += 1
        batch = Batch(Sequence(number), [number], (payload(number),))
        while not storm.attempt(lambda: client.send(batch)):  # noqa: B023
            # What the connection says is true: the batch was taken or it was not.
            assert client.connection.last_sequence in (number - 1, number)
        assert client.connection.last_sequence == number
    client.close()
    receiver.join()
    assert receiver.received == number
    assert storm.strikes > 100


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_interrupted_chunks_are_whole_or_absent(make_pair, storm: Storm, tls: bool) -> None:
    client, worker = make_pair(BULK, tls=tls, buffer_bytes=8192, settings=PATIENT)
    seen: list[int] = []

    def check(message: Message) -> None:
        assert isinstance(message, Chunk)
        number = message.transfer
        seen.append(number)
        assert bytes(message.buffers[0]) == number.to_bytes(8, "little") * (message.total_bytes // 8)

    receiver = Receiver(worker.recv, check)
    sent = []
    number = 0
    end = time.monotonic() + STORM_SECONDS
    while time.monotonic() < end or storm.strikes <= 100:
        number += 1
        size = (40_000, 200_000, 1_000)[number % 3]
        # Ours only until `send` returns or raises.
        mine = bytearray(number.to_bytes(8, "little") * (size // 8))
        if storm.attempt(lambda: client.send(Chunk(number, 0, size, (mine,)))):  # noqa: B023
            sent.append(number)
        mine[:] = b"\xff" * len(mine)
    client.close()
    receiver.join()
    assert seen == sorted(set(seen))
    assert set(sent) <= set(seen)
    assert storm.strikes > 100


def test_a_worker_on_the_main_thread_is_as_safe(make_pair, storm: Storm) -> None:
    client, worker = make_pair(BULK, buffer_bytes=8192, settings=PATIENT)

    def check(message: Message) -> None:
        assert isinstance(message, Chunk)
        assert bytes(message.buffers[0]) == message.transfer.to_bytes(8, "little") * (message.total_bytes // 8)

    receiver = Receiver(client.recv, check)
    number = 0
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        number += 1
        mine = bytearray(number.to_bytes(8, "little") * 20_000)
        storm.attempt(lambda: worker.send(Chunk(number, 0, 160_000, (mine,))))  # noqa: B023
        mine[:] = b"\xff" * len(mine)
    worker.close()
    receiver.join()
    assert receiver.received > 0


def test_an_interrupt_while_the_peer_is_slow_ends_the_wait_and_the_frame_still_arrives(make_pair) -> None:
    client, worker = make_pair(buffer_bytes=8192, settings=PATIENT)

    def on_alarm(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            client.send(Batch(Sequence(1), [], (bytes(8 << 20),)))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert client.connection.last_sequence == 1
    received = worker.recv(10)
    assert isinstance(received, Batch)
    assert bytes(received.buffers[0]) == bytes(8 << 20)
    client.send(Batch(Sequence(2), []))
    assert worker.recv(10) == Batch(Sequence(2), [])


def test_a_destructor_may_send_in_the_middle_of_a_send(make_pair, monkeypatch: pytest.MonkeyPatch) -> None:
    client, worker = make_pair()
    original = client._stream.write
    nested = iter([Batch(Sequence(2), ["nested"])])

    def write(parts: list[Buffer], counts: list[int]) -> None:
        for inner in nested:
            client.send(inner)
        original(parts, counts)

    monkeypatch.setattr(client._stream, "write", write)
    client.send(Batch(Sequence(1), ["outer"]))
    assert [worker.recv(5), worker.recv(5)] == [Batch(Sequence(1), ["outer"]), Batch(Sequence(2), ["nested"])]


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_an_alarm_ends_a_wait_for_a_message_and_not_the_connection(make_pair, storm: Storm, tls: bool) -> None:
    client, worker = make_pair(tls=tls)
    assert not storm.attempt(lambda: worker.recv(30), seconds=0.05)
    client.send(Batch(Sequence(1), [7], ()))
    message = worker.recv(30)
    assert isinstance(message, Batch)
    assert message.stream == [7]
