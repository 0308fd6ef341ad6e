"""Strangers cannot fill a worker's log."""

from __future__ import annotations

import logging

from skyproxy_server.log_limits import RepetitionFilter


class Log:
    def __init__(self) -> None:
        self.now = 0.0
        self.filter = RepetitionFilter(lambda: self.now)
        self.lines: list[str] = []

    def write(self, message: str, *args: object) -> None:
        record = logging.LogRecord("skyproxy", logging.INFO, "file", 1, message, args, None)
        if self.filter.filter(record):
            self.lines.append(record.getMessage())


def test_a_kind_of_line_is_held_back_when_there_are_too_many() -> None:
    log = Log()
    for number in range(10_000):
        log.write("a stranger from %s was refused", number)
    assert len(log.lines) == 50
    log.write("something else")
    assert log.lines[-1] == "something else"


def test_what_was_held_back_is_told_later() -> None:
    log = Log()
    for _ in range(60):
        log.write("refused %s", "x")
    log.now = 10.0
    log.write("refused %s", "y")
    assert log.lines[-1] == "refused y (and 10 more like it before)"
    log.write("refused %s", "z")
    assert log.lines[-1] == "refused z"


def test_ordinary_lines_pass() -> None:
    log = Log()
    for second in range(100):
        log.now = float(second)
        log.write("one a second")
    assert log.lines == ["one a second"] * 100


def test_kinds_do_not_grow_without_bound() -> None:
    log = Log()
    for number in range(5_000):
        log.write(f"kind {number}")
    assert len(log.filter._seen) <= 1024
