"""A worker's report over HTTP: whatever comes in its place, whoever asks gets a dictionary or an error, soon."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from skyproxy.errors import ConnectError
from skyproxy.transport.worker_report import ask_worker

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


class Liar:
    """Answers each connection with some bytes, and then with one more, again and again."""

    def __init__(self, answer: bytes, drip: bytes = b"") -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"ws://127.0.0.1:{self._socket.getsockname()[1]}"
        self._answer, self._drip = answer, drip
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            with link:
                try:
                    link.recv(1 << 16)
                    link.sendall(self._answer)
                    while self._drip and not self._stopping.wait(0.01):
                        link.sendall(self._drip)
                except OSError:
                    continue

    def close(self) -> None:
        self._stopping.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(20)


@pytest.fixture
def liars() -> Iterator[list[Liar]]:
    made: list[Liar] = []
    yield made
    for liar in made:
        liar.close()


def answer(body: bytes) -> bytes:
    return HEAD % len(body) + body


@pytest.mark.parametrize(
    "said",
    [
        answer(b"[" * 100_000),
        answer(b'{"a":' * 100_000),
        answer(b"[1, 2]"),
        answer(b"7"),
        answer(b"\xff\xfe"),
        answer(b'{"a": ' + b"9" * 10_000 + b"}"),
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 \x1b]52;c;ZXZpbA==\x07\r\n\r\n",
        b"",
    ],
    ids=range(9),
)
def test_nonsense_is_an_error_in_words(liars: list[Liar], said: bytes) -> None:
    liars.append(Liar(said))
    with pytest.raises(ConnectError) as error:
        ask_worker(liars[0].url, "token", timeout_seconds=20)
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize("head", [b"", HEAD % (1 << 20), b"HTTP/1.1 200 OK\r\nX: "])
def test_an_answer_that_comes_byte_by_byte_is_not_waited_for(liars: list[Liar], head: bytes) -> None:
    liars.append(Liar(head, drip=b"1"))
    with pytest.raises(ConnectError):
        ask_worker(liars[0].url, "token", timeout_seconds=0.2)


def test_a_report_is_as_it_was_said(liars: list[Liar]) -> None:
    liars.append(Liar(answer(b'{"sessions": 3, "text": "a\\u001bb"}')))
    expected: dict[str, Any] = {"sessions": 3, "text": "a\\x1bb"}
    assert ask_worker(liars[0].url, "token", timeout_seconds=20) == expected
