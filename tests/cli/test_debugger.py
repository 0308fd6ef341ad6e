"""`skyproxy debug` against a program that says what it is told to say."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from skyproxy.cli.main import app
from skyproxy.runtime import debug_rooms
from skyproxy.runtime.debug_rooms import Line

ROW = {
    "id": "1f3a90bc",
    "name": "train",
    "kind": "breakpoint",
    "file": "/home/me/train.py",
    "line": 12,
    "function": "train",
    "rank": 3,
    "world_size": 4,
    "pool": "dev/1",
    "process": 77,
}


class Program:
    """A program with something that waits; takes two lines, and ends."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.typed: list[str] = []
        ours, theirs = socket.socketpair()
        self.line = Line(ours)
        self._theirs = Line(theirs)
        self._thread = threading.Thread(target=self._run, args=(rows,), daemon=True)
        self._thread.start()

    def _run(self, rows: list[dict[str, Any]]) -> None:
        try:
            while True:
                if "list" in self._theirs.receive():
                    self._theirs.send({"waiting": rows})
                    continue
                for _ in range(2):
                    self._theirs.send({"kind": "text", "text": "(Pdb) \x1b[2J"})
                    self._theirs.send({"kind": "alive", "text": ""})
                    self._theirs.send({"kind": "prompt", "text": ""})
                    self.typed.append(self._theirs.receive()["line"])
                self._theirs.send({"kind": "end", "text": ""})
        except OSError:
            pass

    def end(self) -> None:
        self.line.close()
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    program = Program(getattr(request, "param", [ROW]))
    monkeypatch.setattr(debug_rooms, "programs", lambda: iter([program.line]))
    yield program
    program.end()


def test_what_waits_is_listed(program: Program) -> None:
    result = CliRunner().invoke(app, ["debug", "--list"])
    assert result.exit_code == 0
    for words in ("1f3a90bc", "dev/1", "3", "train", "/home/me/train.py:12", "breakpoint"):
        assert words in result.output


def test_what_waits_is_told_to_programs(program: Program) -> None:
    assert json.loads(CliRunner().invoke(app, ["debug", "--json"]).output) == [ROW]


def test_what_is_typed_goes_there_until_the_function_has_ended(program: Program) -> None:
    result = CliRunner().invoke(app, ["debug"], input="p total\nc\n")
    assert (result.exit_code, program.typed) == (0, ["p total\n", "c\n"])
    assert "the function has ended" in result.output
    assert "\x1b" not in result.output  # what a worker says moves no cursor


def test_the_end_of_what_is_typed_leaves_it_waiting(program: Program) -> None:
    assert CliRunner().invoke(app, ["debug", "1f3a90bc"], input="").exit_code == 0
    assert program.typed == []


@pytest.mark.parametrize("arguments", [["12345678"], ["--post-mortem"]])
def test_what_does_not_wait_is_not_found(program: Program, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["debug", *arguments])
    assert result.exit_code != 0
    assert "nothing waits" in result.output


@pytest.mark.parametrize("program", [[ROW, {**ROW, "id": "22222222"}]], indirect=True)
def test_of_several_one_has_to_be_named(program: Program) -> None:
    result = CliRunner().invoke(app, ["debug"])
    assert result.exit_code != 0
    assert "several wait: name one" in result.output
