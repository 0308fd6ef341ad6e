"""A progress bar for transfers that take longer than a second, drawn by the very thread that waits for them."""

from __future__ import annotations

import contextlib
import html
import importlib
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from skyproxy.interrupts import raised_by_handler
from skyproxy.session.waiters import Waiter

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE_SECONDS = 1.0
"""Waits that are over before show nothing."""
_REFRESH_SECONDS = 0.1
_MIB = 1 << 20

_drawing = threading.Lock()
"""Held by the one bar that is on the screen."""

Display = Callable[[str], object]
"""Makes a bar of a text: something with `update(done_bytes, total_bytes)` and `close()`; or None."""


class RichBar:
    """A bar of `rich` on standard error that vanishes in the end. It has no thread of its own."""

    def __init__(self, text: str, console: Console) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            # The program's own streams are not ours to redirect.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(text, total=None)
        self._bar.start()

    def update(self, done_bytes: int, total_bytes: int) -> None:
        self._bar.update(self._task, completed=done_bytes, total=total_bytes, refresh=True)

    def close(self) -> None:
        self._bar.stop()


class NotebookBar:
    """A bar below a notebook's cell that vanishes in the end. It needs no widgets, and has no thread of its own."""

    def __init__(self, text: str) -> None:
        display: Any = importlib.import_module("IPython.display").display
        self._text = text
        self._done = self._total = 0
        self._started = time.monotonic()
        self._closed = False
        self._handle: Any = display(self, display_id=True)

    def update(self, done_bytes: int, total_bytes: int) -> None:
        self._done, self._total = done_bytes, total_bytes
        self._handle.update(self)

    def close(self) -> None:
        self._closed = True
        self._handle.update(self)

    def _repr_mimebundle_(self, **unused: object) -> dict[str, str]:
        if self._closed:
            return {"text/plain": "", "text/html": ""}
        rate = self._done / max(time.monotonic() - self._started, 1e-3)
        figures = f"{self._done / _MIB:,.1f} of {self._total / _MIB:,.1f} MiB, {rate / _MIB:,.1f} MiB/s"
        bar = f'<progress value="{self._done}" max="{max(self._total, 1)}"></progress>'
        return {
            "text/plain": f"{self._text}: {figures}",
            "text/html": f"<div>{html.escape(self._text)} {bar} {figures}</div>",
        }


def in_notebook() -> bool:
    """Return whether what we display appears below a cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def visible_bar(text: str) -> RichBar | NotebookBar | None:
    """A bar, where there is somebody to look at it: this is a notebook, or standard error is a terminal."""
    if in_notebook():
        return NotebookBar(text)
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from rich.console import Console

    console = Console(stderr=True)
    return RichBar(text, console) if console.is_terminal else None


class TransferWatch:
    """Waits for transfers, and shows how far they are once that takes long. A context manager.

    Args:
        text: what is under way: "upload".
        figures: the bytes that are done, and all of them.
        shown: whether a bar may be drawn at all.
        display: makes it.
        clock: tells seconds.
    """

    def __init__(
        self,
        text: str,
        figures: Callable[[], tuple[int, int]],
        shown: bool,
        display: Display = visible_bar,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._text = text
        self._figures = figures
        self._shown = shown
        self._display = display
        self._clock = clock
        self._due = clock() + PATIENCE_SECONDS
        self._bar: Any = None
        self._holds = False

    def wait(self, waiter: Waiter) -> Any:
        """The answer, as from `waiter.wait`."""
        while self._shown and not waiter.done:
            if waiter.done_within(_REFRESH_SECONDS if self._bar is not None else max(self._due - self._clock(), 0.0)):
                break
            self._draw()
        return waiter.wait()

    def _draw(self) -> None:
        try:
            if self._bar is None:
                self._holds = self._holds or _drawing.acquire(blocking=False)
                self._bar = self._display(self._text) if self._holds else None
                if self._bar is None:  # another thread's bar is shown, or nobody is looking
                    self._shown = False
                    return
            self._bar.update(*self._figures())
        except Exception as error:  # a transfer must not fail because its progress cannot be shown
            self._shown = False
            if raised_by_handler(error):
                raise

    def close(self) -> None:
        """Removes the bar; idempotent."""
        bar, self._bar = self._bar, None
        try:
            if bar is not None:
                with contextlib.suppress(Exception):
                    bar.close()
        finally:
            if self._holds:
                self._holds = False
                _drawing.release()

    def __enter__(self) -> TransferWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


__all__ = ["Display", "NotebookBar", "RichBar", "TransferWatch", "visible_bar"]
