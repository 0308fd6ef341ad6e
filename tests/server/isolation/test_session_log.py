"""What a session's process writes, in the worker's log."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from skyproxy_server.isolation.session_log import SessionLog


class Output:
    """A session's output, with a clock that the test sets."""

    def __init__(self) -> None:
        self.now, self.lines = 0.0, list[str]()
        read, self.end = os.pipe()
        self.log = SessionLog("f" * 32, read, self._note, lambda: self.now)

    def _note(self, text: str) -> None:
        assert text.endswith("\n")
        self.lines += text[:-1].split("\n")

    def write(self, data: bytes) -> None:
        for start in range(0, len(data), 1 << 15):
            os.write(self.end, data[start : start + (1 << 15)])
            self.log.take()


@pytest.fixture
def output() -> Iterator[Output]:
    made = Output()
    yield made
    os.close(made.end)
    made.log.close()


def test_each_line_names_its_session_and_commands_no_terminal(output: Output) -> None:
    output.write(b"2026-01-01 INFO skyproxy.server.audit: one\nhal")
    output.write("f \x1b[2J\r\u202e\n\n".encode())
    output.write(b"\xff")
    output.log.take()
    assert output.lines == [
        "[ffffffff] 2026-01-01 INFO skyproxy.server.audit: one",
        "[ffffffff] half \\x1b[2J\\x0d\\u202e",
        "[ffffffff] ",
    ]


def test_a_line_without_an_end_comes_in_parts_and_is_not_kept(output: Output) -> None:
    output.write(b"x" * 100_000)
    assert all(len(line) <= 4100 for line in output.lines)
    assert sum(line.count("x") for line in output.lines) > 90_000
    assert len(output.log._rest) <= 4000


def test_output_without_end_is_held_back_and_that_is_said(output: Output) -> None:
    for _ in range(40):
        output.write(b"a line of a few words, again and again\n" * 1500)
    said = sum(map(len, output.lines))
    assert said < 3 << 20
    output.now = 10.0
    output.write(b"quiet again\n")
    assert "bytes were held back here" in output.lines[-2]
    assert output.lines[-1] == "[ffffffff] quiet again"


def test_what_is_left_at_the_end_is_passed_on() -> None:
    texts: list[str] = []
    read, end = os.pipe()
    log = SessionLog("f" * 32, read, texts.append)
    os.write(end, b"Fatal Python error: Segmentation fault\n  last")
    log.close()
    assert texts == ["[ffffffff] Fatal Python error: Segmentation fault\n", "[ffffffff]   last\n"]
    os.close(end)
