"""A plugin of pytest that notes what comes of each test.

`MATRIX_JOURNAL` names the file. With `MATRIX_RESUME`, tests that have passed or were skipped by it do not run again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from journal import note, read_journal


class Journal:
    """Notes tests in the process that others report to, and leaves out in each what need not run."""

    def __init__(self, path: Path, resume: bool) -> None:
        self._path = path
        before = read_journal(path).tests if resume else {}
        self._left_out = {test for test, outcome in before.items() if outcome != "failed"}
        self._found = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if item.nodeid in self._left_out]
        if left_out:
            items[:] = [item for item in items if item.nodeid not in self._left_out]
            config.hook.pytest_deselected(items=left_out)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput") and not session.config.getoption("numprocesses", None):
            self._note_found(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._note_found(len(ids))

    def _note_found(self, number: int) -> None:
        if not self._found:  # each process says so, also one in place of another that crashed
            note(self._path, {"found": number})
            self._found = True


class Reporter(Journal):
    """The journal of the process that others report to."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._note_outcome(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":  # a file that cannot be imported, or is skipped as a whole
            self._note_outcome(report)

    def _note_outcome(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        entry = {"test": report.nodeid, "outcome": report.outcome}
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
            entry["why"] = reason.removeprefix("Skipped: ")
        note(self._path, entry)


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin where a journal is wanted."""
    if path := os.environ.get("MATRIX_JOURNAL"):
        kind = Journal if hasattr(config, "workerinput") else Reporter
        config.pluginmanager.register(kind(Path(path), "MATRIX_RESUME" in os.environ), "journal")
