"""What functions print, as it appears here."""

from __future__ import annotations

import io
import sys

import pytest

from skyproxy.pools.output_view import TaskOutput


def test_a_pool_of_one_passes_text_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    output = TaskOutput(None)
    output.write("stdout", "a")
    assert capsys.readouterr().out == "a"
    output.write("stderr", "b\nc")
    output.finish()
    assert capsys.readouterr().err == "b\nc"


def test_several_ranks_show_whole_lines_with_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = TaskOutput(0), TaskOutput(1)
    first.write("stdout", "be")
    second.write("stdout", "one\n")
    first.write("stdout", "gun\nen")
    first.write("stderr", "err")
    first.finish()
    second.finish()
    seen = capsys.readouterr()
    assert seen.out == "[1] one\n[0] begun\n[0] en\n"
    assert seen.err == "[0] err\n"


def test_a_progress_bar_draws_over_itself(capsys: pytest.CaptureFixture[str]) -> None:
    output = TaskOutput(3)
    output.write("stdout", "10%\r20%\r")
    assert capsys.readouterr().out == "[3] 10%\r[3] 20%\r"


def test_ranks_have_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = []
    for rank in (0, 1):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        TaskOutput(rank).write("stdout", "x\n")
        shown.append(terminal.getvalue())
    assert shown == ["\x1b[36m[0] \x1b[0mx\n", "\x1b[35m[1] \x1b[0mx\n"]
    monkeypatch.setenv("NO_COLOR", "1")
    TaskOutput(0).write("stdout", "x\n")
    assert terminal.getvalue().endswith("\n[0] x\n")
