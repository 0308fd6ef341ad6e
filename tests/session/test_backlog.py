"""What a worker has to do, in words; and the line that says so while somebody waits."""

from __future__ import annotations

import io
from typing import Any

import pytest

from skyproxy.protocol import commands
from skyproxy.protocol.messages import Sequence
from skyproxy.session import backlog
from skyproxy.session.backlog import Backlog, Backlogs, BacklogWatch, NotebookLine, TerminalLine
from skyproxy.session.recorder import RecordedBatch
from skyproxy.session.waiters import Waiter

MM, RELU = commands.FIRST_SIGNATURE, commands.FIRST_SIGNATURE + 1
CODE = compile("\n" * 6 + "x @ y", "work.py", "exec")


class FakeRecorder:
    """What the backlog asks of a recorder: two batches of three operations are sent, two more are not."""

    widths = {**commands.width_table(), MM: 3, RELU: 2}
    unsent_lines = 4

    def __init__(self) -> None:
        stream = [MM, 1, 2, 3, RELU, 3, 4, commands.RELEASE, [3], MM, 4, 4, 5]
        lines = [CODE, 2] * 3
        self.batches = [RecordedBatch(Sequence(n), stream, lines) for n in (6, 7)]

    def sent_batches(self) -> list[RecordedBatch]:
        return self.batches


class Worker:
    """Answers what it does, if it answers at all."""

    def __init__(self, load: dict[str, int] | None) -> None:
        self.load = load
        self.questions = 0

    def ask(self) -> Waiter:
        self.questions += 1
        waiter = Waiter()
        if self.load is not None:
            waiter.set(self.load)
        return waiter


def backlogs(load: dict[str, int] | None = None) -> Backlogs:
    recorder: Any = FakeRecorder()
    made = Backlogs(recorder, {MM: ("aten::mm",), RELU: ("aten::relu",)}, Worker(load).ask)
    made.device = "sky:0"
    return made


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (None, "sky:0 is working: 8 operations queued"),
        ({"executing": 1}, "sky:0 is working: 8 operations queued"),  # a worker of before
        (
            {"executing": 1, "sequence": 6, "position": 4},
            "sky:0 is working: 6 operations queued, running aten::relu from work.py:7 in <module>",
        ),
        (
            {"executing": 1, "sequence": 7, "position": 9},
            "sky:0 is working: 2 operations queued, running aten::mm from work.py:7 in <module>",
        ),
        ({"executing": 1, "sequence": 6, "position": 5}, "sky:0 is working: 6 operations queued"),  # no command
        ({"executing": 1, "sequence": 6, "position": 10**9}, "sky:0 is working: 8 operations queued"),
        ({"executing": 1, "sequence": 6, "position": -1}, "sky:0 is working: 8 operations queued"),
        ({"executing": 0, "sequence": 7, "position": -1}, "sky:0 is working: 2 operations queued"),
    ],
)
def test_it_counts_what_is_not_begun(load: dict[str, int] | None, text: str) -> None:
    assert str(backlogs().read(load)) == text


def test_a_worker_that_says_nothing_of_use_is_not_working() -> None:
    assert not backlogs().read({}).is_working


def test_one_operation_and_none() -> None:
    assert str(Backlog("sky:0", 1)) == "sky:0 is working: 1 operation queued"
    assert str(Backlog("sky:0", 0, is_working=False)) == "sky:0 has nothing to do"


class Line:
    def __init__(self, waiter: Waiter) -> None:
        self.texts: list[str] = []
        self.closed = 0
        self._waiter = waiter

    def update(self, text: str) -> None:
        self.texts.append(text)
        if len(self.texts) == 3:
            self._waiter.set("there")

    def close(self) -> None:
        self.closed += 1


def test_a_wait_shows_its_line_until_the_answer_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "_REFRESH_SECONDS", 0.001)
    waiter = Waiter()
    line = Line(waiter)
    with BacklogWatch(backlogs({"executing": 1, "sequence": 6, "position": 4}), lambda: line) as watch:
        assert watch.wait(waiter) == "there"
    assert len(line.texts) == 3
    assert all("running aten::relu" in text for text in line.texts)
    assert line.closed == 1
    assert backlog._showing.acquire(blocking=False)
    backlog._showing.release()


def test_a_silent_worker_and_a_broken_screen_do_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "_REFRESH_SECONDS", 0.001)
    waiter = Waiter()
    line = Line(waiter)
    with BacklogWatch(backlogs(), lambda: line) as watch:
        assert watch.wait(waiter) == "there"

    class Broken(Line):
        def update(self, text: str) -> None:
            self._waiter.set("all the same")
            raise OSError("no screen")

    waiter = Waiter()
    with BacklogWatch(backlogs(), lambda: Broken(waiter)) as watch:
        assert watch.wait(waiter) == "all the same"


def test_where_nobody_looks_nothing_is_shown() -> None:
    waiter = Waiter()

    def display() -> None:
        waiter.set("there")

    with BacklogWatch(backlogs(), display) as watch:
        assert watch.wait(waiter) == "there"


def test_a_terminal_line_fits_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = io.StringIO()
    line = TerminalLine(stream)
    line.update("sky:0 is working: 1,240 operations")
    assert stream.getvalue() == "\r\x1b[Ksky:0 is working..."
    line.close()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_a_notebooks_line_is_empty_in_the_end() -> None:
    pytest.importorskip("IPython")
    line = NotebookLine()
    line._text = "<now>"
    assert line._repr_mimebundle_() == {"text/plain": "<now>", "text/html": "<div>&lt;now&gt;</div>"}
    line.close()
    assert line._repr_mimebundle_() == {"text/plain": "", "text/html": ""}
