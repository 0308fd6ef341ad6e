"""The port at which a program is asked to move: who has no secret moves nothing, and ends nothing."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.providers.program_control import ProgramControl, ask_programs, programs_folder


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """The moves that a program was asked for; it refuses those to "nowhere"."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    asked: list[tuple[str, str]] = []

    def move(before: str, after: str) -> int:
        if after == "nowhere":
            raise ConfigurationError("there is no context 'nowhere'")
        asked.append((before, after))
        return 1

    control = ProgramControl()
    control.start(move)
    yield asked
    control.stop()
    assert not list(programs_folder().glob("*.json"))


def the_port() -> int:
    (path,) = programs_folder().glob("*.json")
    assert path.stat().st_mode & 0o077 == 0
    port: int = json.loads(path.read_text())["port"]
    return port


def test_who_has_the_file_moves_the_program(moved: list[tuple[str, str]]) -> None:
    the_port()
    (answer,) = ask_programs("dev", "big")
    assert (answer["moved"], moved) == (1, [("dev", "big")])
    (answer,) = ask_programs("dev", "nowhere")
    assert (answer["moved"], answer["problem"]) == (0, "there is no context 'nowhere'")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\n",
        b"[" * 4000 + b"\n",
        b"\xff\xfe\n",
        b"7\n",
        b'{"from": "dev", "to": "big"}\n',
        json.dumps({"secret": "\u00e9" * 43, "from": "dev", "to": "big"}).encode() + b"\n",
        json.dumps({"secret": ["x"], "from": "dev", "to": "big"}).encode() + b"\n",
        b"x" * 10_000 + b"\n",
    ],
    ids=range(9),
)
def test_whatever_others_send_moves_nothing_and_the_next_one_is_answered(
    moved: list[tuple[str, str]], sent: bytes
) -> None:
    answered = b""
    with socket.create_connection(("127.0.0.1", the_port()), 30) as connection, contextlib.suppress(OSError):
        connection.sendall(sent)  # of which it does not read all, and then closes
        connection.shutdown(socket.SHUT_WR)
        answered = connection.recv(100)
    assert answered == b""
    assert moved == []
    assert [answer["moved"] for answer in ask_programs("dev", "big")] == [1]
