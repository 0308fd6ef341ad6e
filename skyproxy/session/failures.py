"""Failures on the worker, as exceptions and warnings that name the user's line."""

from __future__ import annotations

import builtins
import contextlib
import re
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from skyproxy.errors import (
    KERNEL_FAILED,
    CancelledOperationError,
    InferenceMismatchError,
    LimitExceededError,
    ProtocolError,
    RemoteError,
    SnapshotError,
    SnapshotNotNowError,
    UnsupportedOpError,
    remote_error_class,
    visible,
)
from skyproxy.interrupts import raised_by_handler, shielded
from skyproxy.protocol.messages import Warned
from skyproxy.session.crashes import CONTEXT_LOST, explain_loss, explain_share
from skyproxy.session.lines import describe_line, find_line
from skyproxy.session.recorder import RecordedBatch, Recorder
from skyproxy.session.worker_warnings import WorkerWarnings

_ERRORS: dict[str, type[BaseException]] = {
    "UnsupportedOpError": UnsupportedOpError,
    "InferenceMismatchError": InferenceMismatchError,
    "LimitExceededError": LimitExceededError,
    "SnapshotError": SnapshotError,
    "SnapshotNotNowError": SnapshotNotNowError,
    "VolumeHangsError": SnapshotError,
    "CancelledOperationError": CancelledOperationError,
    "OutOfMemoryError": torch.OutOfMemoryError,
    "_LinAlgError": torch.linalg.LinAlgError,  # type: ignore[attr-defined]
}
_NEVER_REBUILT = (BaseExceptionGroup, StopIteration, StopAsyncIteration)
"""Exceptions that end a loop in silence, or are made of others; a worker's is a `RemoteError` with its text."""
_KERNEL = re.compile(r'^  File "<skyproxy [^"\n]*>", line \d+, in handler\n', re.MULTILINE)
"""The frame that calls an operation, in a worker's traceback; `skyproxy_server/signatures.py` makes its code."""
_FILE = re.compile(r'^  File "([^"\n]*)", line', re.MULTILINE)
_OWN = re.compile(r"[\\/](?:skyproxy_server|skyproxy[\\/]protocol)[\\/]")
_RECENT_ERRORS = 20
_MAX_SHOWN_CHARACTERS = 300
_REMEMBERED_FAILURES = 1024
"""The worker tells of a failed op at once, while its batch is still known here; the error may be raised much later."""


class FailureReports:
    """Finds the line of each command that failed or warned, while its batch is still known.

    Attributes:
        recordings: captured graphs, by number: commands, and the lines that recorded them.
        lines: for the place of a command that failed, the line that recorded it.
        warnings: what the worker warned of and was not shown yet.
        loss: where the loss of the worker's CUDA context was noticed, in sentences; empty while it has one.
        recent: the latest errors as texts, for the web view: "at", "message", "op", "line", and where it stood.
    """

    def __init__(self, recorder: Recorder, structures: Mapping[int, Any] | None = None) -> None:
        """Make the reports of one session.

        Args:
            recorder: has the batches that commands stand in.
            structures: as in `Signatures`.
        """
        self.loss = ""
        self._structures: Mapping[int, Any] = {} if structures is None else structures
        self.recordings: dict[int, RecordedBatch] = {}
        self.lines: dict[tuple[int, int], str] = {}
        self.warnings = WorkerWarnings()
        self.recent: deque[dict[str, object]] = deque(maxlen=_RECENT_ERRORS)
        self._recorder = recorder

    @shielded  # what a signal's handler raises would be suppressed
    def answer(self, record: dict[str, object]) -> RemoteError:
        """Return the error that a command's failure on the worker is here, for whoever waits for that.

        It names the line that recorded the command; where the record names no command, it names no line.
        """
        line = ""
        with contextlib.suppress(LookupError, TypeError, ValueError, OverflowError, RuntimeError):
            line = self._line_of(record)
        if record.get("type") == CONTEXT_LOST:
            with contextlib.suppress(LookupError, TypeError, ValueError, RuntimeError, ProtocolError):
                self.loss = explain_loss(record, line, self._recorder, self._structures)
        return self._add_notes(record, line)

    @shielded
    def explain_loss(self, reason: str) -> str:
        """Return sentences on what may have lost the worker its CUDA context; none where it ended otherwise.

        Args:
            reason: why the session is over.
        """
        if self.loss or KERNEL_FAILED not in reason:
            return self.loss
        with contextlib.suppress(LookupError, TypeError, ValueError, RuntimeError, ProtocolError):
            return explain_share(self._recorder, self._structures)
        return ""

    @shielded
    def line_at(self, place: dict[str, Any]) -> str:
        """Return the line that recorded the command at a place, as long as its batch is known; else an empty text."""
        with contextlib.suppress(KeyError, TypeError, RuntimeError):  # it has no place, or the batches are changing
            sent = self._batch_of(place)
            return describe_line(sent, place["position"], self._recorder.widths) if sent is not None else ""
        return ""

    def _add_notes(self, record: dict[str, object], line: str) -> RemoteError:
        error = remote_error(record, line)
        place = {"sequence": record.get("sequence"), "position": record.get("position"), "graph": record.get("graph")}
        kind, message = (visible(record.get(key) or "") for key in ("type", "message"))
        shown = f"{kind}: {message}"[:_MAX_SHOWN_CHARACTERS]
        row = {**place, "graph": place["graph"] or 0, "message": shown, "op": error.op, "line": line}
        if not any(row.items() <= known.items() for known in self.recent):  # it is raised again
            self.recent.append({"at": time.time(), **row})
        return error

    def on_warned(self, warned: Warned) -> None:
        """Keep a warning until somebody waits, with the line that caused it."""
        place, found = warned.place, None
        with contextlib.suppress(KeyError, TypeError):  # it does not say where the command stood
            sent = self._batch_of(place)
            found = find_line(sent, place["position"], self._recorder.widths) if sent is not None else None
        self.warnings.add(warned.category, visible(warned.message), found)

    def remember_line(self, sequence: int, position: int) -> None:
        """Look up the line of a command now: an error may name it when its batch is not known any more."""
        with contextlib.suppress(KeyError, TypeError):
            self._line_of({"sequence": sequence, "position": position})

    def _line_of(self, record: dict[str, Any]) -> str:
        graph = record.get("graph")
        place = (record["sequence"] if graph is None else -graph, record["position"])
        if place not in self.lines:
            if len(self.lines) >= _REMEMBERED_FAILURES:
                self.lines.pop(next(iter(self.lines)))
            sent = self._batch_of(record)
            line = describe_line(sent, record["position"], self._recorder.widths) if sent is not None else ""
            self.lines[place] = line
        return self.lines[place]

    def _batch_of(self, place: dict[str, Any]) -> RecordedBatch | None:
        """Return the commands that a position counts in: a batch's, or those of a captured graph."""
        graph = place.get("graph")
        return self._recorder.sent(place["sequence"]) if graph is None else self.recordings.get(graph)


def remote_error(record: dict[str, object], user_line: str) -> RemoteError:
    """Return the error that a worker describes; whatever it says, there is one, for somebody waits for it."""
    name = str(record.get("type", ""))
    foreign = _ERRORS.get(name) or getattr(builtins, name, RuntimeError)
    if not (isinstance(foreign, type) and issubclass(foreign, Exception)) or issubclass(foreign, _NEVER_REBUILT):
        foreign = RuntimeError
    text, op, traceback = (visible(record.get(key) or "") for key in ("message", "op", "traceback"))
    if op:
        text += f"\n  in {op} on the worker"
    if user_line:
        text += f"\n  recorded at {user_line}"
    try:
        error = remote_error_class(foreign)(text)  # type: ignore[arg-type]  # classes are hashable
    except Exception as problem:  # a class that takes more than a text
        if raised_by_handler(problem):
            raise
        error = RemoteError(text)
    error.op, error.user_line, error.remote_traceback = op, user_line, traceback
    if told := _beyond_ours(traceback):
        error.add_note("Traceback of the worker:\n" + told.rstrip())
    return error


def _beyond_ours(traceback: str) -> str:
    """Return what a worker's traceback tells of an operation's kernel; nothing if the kernel is PyTorch's own.

    What leads to a kernel is the same for all of them, and `remote_traceback` has it.
    """
    below = _KERNEL.split(traceback)[-1]
    if below == traceback:
        return traceback
    files = _FILE.findall(below)
    return "Traceback (most recent call last):\n" + below if any(not _OWN.search(file) for file in files) else ""
