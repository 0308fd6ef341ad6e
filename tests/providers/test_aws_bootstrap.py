"""The script of an instance against what runs there: its watch ends the instance, whatever workers say."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.providers.aws_bootstrap import new_keys, secret_files
from tests.providers.test_aws import a_script, file_in

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
NONSENSE = [
    b"",
    b"7",
    b"[]",
    b"{}",
    b"{",
    b"\xff",
    b"[" * 60_000,
    b'{"idle_seconds": null}',
    b'{"idle_seconds": []}',
    b'{"idle_seconds": "x"}',
    b'{"idle_seconds": NaN}',
    b'{"idle_seconds": Infinity}',
    b'{"idle_seconds": -1}',
    b'{"idle_seconds": 1e308}',
    b'{"idle_seconds": ' + b"9" * 60_000 + b"}",
]


class Liar:
    """A TLS server of one answer, which it gives whole or byte by byte without end."""

    def __init__(self, folder: Path, answer: bytes, *, drips: bool = False) -> None:
        keys = new_keys()
        (folder / "pair.pem").write_text(keys.certificate + keys.key)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "pair.pem")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._answer, self._drips = answer, drips
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listening.accept()
            except OSError:
                return
            try:
                with self._context.wrap_socket(link, server_side=True) as secure:
                    secure.recv(65536)
                    secure.sendall(self._answer)
                    while self._drips and not self._stopping.wait(0.01):
                        secure.sendall(b"x")
            except OSError:
                continue

    def close(self) -> None:
        self._stopping.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(20)


@pytest.fixture
def liar(tmp_path: Path) -> Iterator[Callable[..., Liar]]:
    made: list[Liar] = []

    def make(answer: bytes, **how: Any) -> Liar:
        made.append(Liar(tmp_path, answer, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Ended(Exception):
    """The instance was shut down."""


def watch_of(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of a watch that has not begun, on a clock of its own; a shutdown is an exception."""
    now = [1e6]
    (tmp_path / "token").write_text("secret")
    text = file_in(script, "watch.py").replace("/var/lib/skyproxy", str(tmp_path)).removesuffix("watch()")
    names: dict[str, Any] = {}
    exec(compile(text, "watch.py", "exec"), names)

    def run(command: list[str]) -> None:
        assert command == ["shutdown", "-h", "now"]
        raise Ended

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    names["now"] = now
    return names


@pytest.mark.parametrize("body", NONSENSE, ids=lambda body: repr(body[:30]))
def test_nonsense_of_a_worker_is_no_activity(
    body: bytes, liar: Callable[..., Liar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = watch_of(a_script(), tmp_path, monkeypatch)
    assert names["ask"](liar(HEAD % len(body) + body).port) is None


def test_what_a_worker_says_in_the_right_form_is_taken(
    liar: Callable[..., Liar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = watch_of(a_script(), tmp_path, monkeypatch)
    good = b'{"idle_seconds": 12.5}'
    assert names["ask"](liar(HEAD % len(good) + good).port) == 12.5
    refused = b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n"
    assert names["ask"](liar(refused % len(good) + good).port) is None


def test_an_answer_that_comes_byte_by_byte_ends(
    liar: Callable[..., Liar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = watch_of(a_script(), tmp_path, monkeypatch)
    timer = threading.Timer
    monkeypatch.setattr(threading, "Timer", lambda seconds, call: timer(seconds / 100, call))
    assert names["ask"](liar(HEAD % (1 << 30), drips=True).port) is None


@pytest.mark.parametrize("said", [None, 700.0])
def test_an_instance_whose_workers_say_nothing_or_are_idle_ends(
    said: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = watch_of(a_script(idle_seconds=600.0), tmp_path, monkeypatch)
    names["ask"] = lambda port: said
    with pytest.raises(Ended):
        names["watch"]()
    assert names["now"][0] - 1e6 <= 1800 + 60


@pytest.mark.parametrize(("asked", "seconds"), [(3600.0, 3600.0), (1e300, 1e9)])
def test_a_lifetime_ends_an_instance_whatever_its_workers_say(
    asked: float, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[float, Callable[[], None]]] = []

    class Timer:
        def __init__(self, *arguments: Any) -> None:
            begun.append(arguments)  # type: ignore[arg-type]

        def start(self) -> None:
            pass

    monkeypatch.setattr(threading, "Timer", Timer)
    watch_of(a_script(lifetime_seconds=asked), tmp_path, monkeypatch)
    ((after, end),) = begun
    assert after == seconds
    with pytest.raises(Ended):
        end()


@pytest.mark.parametrize("name", ["", "A B", "A=B", "A\nB", "1A", "Ä", "A\0"])
def test_a_name_that_no_variable_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be one of a worker"):
        secret_files(new_keys(), "t", {name: "x"})
    for value in ("\0", "a\nSKYPROXY_END\nreboot"):
        with pytest.raises(ConfigurationError):
            secret_files(new_keys(), "t", {"A": value})


def test_any_text_of_a_variable_stays_what_it_is() -> None:
    value = "two\nlines, \"quotes\" 'both', $HOME `id` \\ and ä"
    text = secret_files(new_keys(), "t", {"A": value, "B": "b"})["env"]
    # A shell reads quotes as systemd does.
    shown = subprocess.run(
        ["sh", "-c", f'{text}\nprintf "%s|%s" "$A" "$B"'], capture_output=True, text=True, check=True
    )
    assert shown.stdout == f"{value}|b"
