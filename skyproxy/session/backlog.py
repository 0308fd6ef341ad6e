"""The work that a worker has still to do for its client, in words, and the line that shows it while somebody waits."""

from __future__ import annotations

import contextlib
import html
import importlib
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, TextIO

from skyproxy.interrupts import raised_by_handler
from skyproxy.protocol import commands
from skyproxy.session.lines import describe_line, op_ordinals
from skyproxy.session.progress import in_notebook
from skyproxy.session.recorder import RecordedBatch, Recorder
from skyproxy.session.signatures import op_name
from skyproxy.session.waiters import Waiter

PATIENCE_SECONDS = 2.0
"""Waits that are over before show nothing."""
_REFRESH_SECONDS = 0.5
_BUILT_IN = {
    commands.REPLAY: "a captured graph",
    commands.RECEIVE: "an upload",
    commands.FETCH: "a download",
}

_showing = threading.Lock()
"""Held by the one line that is on the screen."""


class Backlog(NamedTuple):
    """The work that a worker has still to do.

    Attributes:
        device: which one, for people: "sky:0".
        operations: how many were recorded and not begun.
        running: the operation that runs now: "aten::mm"; empty where that is not known, or none does.
        line: the line of the program that recorded it, or an empty text.
        is_working: whether the worker executes anything.
    """

    device: str
    operations: int
    running: str = ""
    line: str = ""
    is_working: bool = True

    def __str__(self) -> str:
        if not self.is_working and not self.operations:
            return f"{self.device} has nothing to do"
        text = f"{self.device} is working: {self.operations:,} operation{'s' * (self.operations != 1)} queued"
        if self.running:
            text += f", running {self.running}"
        return text + (f" from {self.line}" if self.line else "")


class Backlogs:
    """Reads the backlog of one session: from what its client remembers, and what its worker says of itself.

    Attributes:
        device: what to call the worker.
    """

    def __init__(self, recorder: Recorder, structures: Mapping[int, Any], ask: Callable[[], Waiter]) -> None:
        """Make the reader of one session's backlog.

        Args:
            recorder: the session's.
            structures: for the number of each signature, what was recorded: its first part is the op's name.
            ask: asks the worker what it does, past its operations; the answer is a `Pong`'s load.
        """
        self.device = "the worker"
        self._recorder = recorder
        self._structures = structures
        self.ask = ask

    def read(self, load: dict[str, int] | None = None) -> Backlog:
        """Return what there is to do.

        Args:
            load: what the worker said; None while it has said nothing.
        """
        recorder = self._recorder
        batches, queued = recorder.sent_batches(), recorder.unsent_lines // 2
        if load is None or "sequence" not in load:
            queued += sum(len(batch.lines) // 2 for batch in batches)
            is_working = bool(queued if load is None else load.get("executing"))
            return Backlog(self.device, queued, is_working=is_working)
        sequence, is_working = load["sequence"], bool(load.get("executing"))
        queued += sum(len(batch.lines) // 2 for batch in batches if batch.sequence > sequence)
        batch = next((batch for batch in batches if batch.sequence == sequence), None)
        if batch is None or not is_working:
            return Backlog(self.device, queued, is_working=is_working)
        return self._running(batch, load.get("position", -1), queued)

    def _running(self, batch: RecordedBatch, position: int, queued: int) -> Backlog:
        stream, widths = batch.stream, self._recorder.widths
        try:
            at = commands.op_at(stream, position) if 0 <= position < len(stream) else -1
            behind = [place for place in op_ordinals(stream, widths) if place > at]
            running = self._name(stream[at]) if at >= 0 else ""
            line = describe_line(batch, at, widths) if at >= 0 else ""
        except Exception:  # the worker named a place where no command begins
            return Backlog(self.device, queued)
        return Backlog(self.device, queued + len(behind), running, line)

    def _name(self, number: int) -> str:
        if number < commands.FIRST_SIGNATURE:
            return _BUILT_IN.get(number, "")
        return op_name(self._structures, number) or "a compiled graph"


# --- the line on the screen ------------------------------------------------------------------------------------------


class TerminalLine:
    """One line of a terminal, written over and over, and gone in the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def update(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._write("\r\x1b[K" + (text if len(text) <= width else text[: max(width - 3, 0)] + "..."))

    def close(self) -> None:
        self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class NotebookLine:
    """A line below a notebook's cell that vanishes in the end."""

    def __init__(self) -> None:
        self._text = ""
        self._handle: Any = None

    def update(self, text: str) -> None:
        self._text = text
        if self._handle is None:
            # Noted before it is shown: an interrupt may strike in between, and the line has to vanish all the same.
            self._handle = importlib.import_module("IPython.display").DisplayHandle()
            self._handle.display(self)
        else:
            self._handle.update(self)

    def close(self) -> None:
        self._text = ""
        if self._handle is not None:
            self._handle.update(self)

    def _repr_mimebundle_(self, **unused: object) -> dict[str, str]:
        return {
            "text/plain": self._text,
            "text/html": f"<div>{html.escape(self._text)}</div>" if self._text else "",
        }


def visible_line() -> TerminalLine | NotebookLine | None:
    """Return a line, where there is somebody to look at it: this is a notebook, or standard error is a terminal."""
    if in_notebook():
        return NotebookLine()
    stream = sys.stderr
    return TerminalLine(stream) if stream is not None and stream.isatty() else None


class BacklogWatch:
    """Waits for an answer, and shows what it waits for. A context manager."""

    def __init__(self, backlogs: Backlogs, display: Callable[[], Any] = visible_line) -> None:
        """Watch one wait.

        Args:
            backlogs: what is shown.
            display: makes the line: something with `update(text)` and `close()`; or None.
        """
        self._backlogs = backlogs
        self._display = display
        self._line: Any = None
        self._asked: Waiter | None = None
        self._load: dict[str, int] | None = None
        self._holds = False

    def wait(self, waiter: Waiter) -> Any:
        """Return the answer, as `waiter.wait` does."""
        shown = True
        self._ask()
        while shown and not waiter.done_within(0.0 if self._line is None else _REFRESH_SECONDS):
            shown = self._draw()
        return waiter.wait()

    def _ask(self) -> None:
        if self._asked is None or self._asked.done:
            self._asked = self._backlogs.ask()

    def _draw(self) -> bool:
        """Show how things are; return False if nobody looks."""
        try:
            if self._line is None:
                self._holds = self._holds or _showing.acquire(blocking=False)
                self._line = self._display() if self._holds else None
                if self._line is None:
                    return False
                assert self._asked is not None
                self._asked.done_within(_REFRESH_SECONDS)  # the first line that is shown is to be complete
            if self._asked is not None and self._asked.done:
                self._load = self._asked.value if self._asked.error is None else None
            self._line.update(str(self._backlogs.read(self._load)))
            self._ask()
        except Exception as error:  # a wait must not fail because its progress cannot be shown
            if raised_by_handler(error):
                raise
            return False
        return True

    def __enter__(self) -> BacklogWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        line, self._line = self._line, None
        try:
            if line is not None:
                with contextlib.suppress(Exception):
                    line.close()
        finally:
            if self._holds:
                self._holds = False
                _showing.release()


def load_now(backlogs: Backlogs, timeout_seconds: float) -> dict[str, int] | None:
    """Ask the worker what it does; return None if it does not say so in time."""
    asked = backlogs.ask()
    asked.done_within(timeout_seconds)
    value = asked.value if asked.done and asked.error is None else None
    return value if isinstance(value, dict) else None


__all__ = ["Backlog", "BacklogWatch", "Backlogs", "NotebookLine", "TerminalLine", "load_now", "visible_line"]
