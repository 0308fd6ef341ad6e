"""The progress of a pool that comes up, for people: one line a node on a terminal, nothing elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING

from skyproxy.providers.base import Progress
from skyproxy.settings import SETTINGS

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

logger = logging.getLogger("skyproxy")

_SYMBOLS = {
    "provisioning": "…",
    "bootstrapping": "…",
    "running": "✓",
    "failed": "✗",
    "growing": "…",
    "shrinking": "-",
    "lost": "✗",
}
_STYLES = {"provisioning": "yellow", "bootstrapping": "cyan", "running": "green", "failed": "red"}
_STYLES |= {"growing": "yellow", "shrinking": "yellow", "lost": "red"}
_MAX_LINES = 12


class ProgressView:
    """Shows the last step of every node while the `with` block runs, if standard error is a terminal."""

    def __init__(self, title: str, show: bool | None = None) -> None:
        """Make the view of one pool.

        Args:
            title: what comes up.
            show: whether to draw; by default on a terminal, unless the settings say no.
        """
        self._title = title
        self._show = (SETTINGS.show_progress and sys.stderr.isatty()) if show is None else show
        self._steps: dict[int | None, Progress] = {}
        self._lock = threading.Lock()
        self._live: Live | None = None

    def __enter__(self) -> ProgressView:
        if self._show:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(stderr=True), refresh_per_second=8, transient=True, get_renderable=self._table
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def report(self, progress: Progress) -> None:
        """Takes note of a step."""
        where = "" if progress.node is None else f" node {progress.node}:"
        logger.debug("%s: %s:%s %s", self._title, progress.phase, where, progress.message)
        with self._lock:
            self._steps[progress.node] = progress

    def _table(self) -> Table:
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1))
        table.add_row(Spinner("dots"), Text(self._title, style="bold"))
        with self._lock:
            steps = sorted(self._steps.items(), key=lambda item: -1 if item[0] is None else item[0])
        # People look for those that still wait for something.
        steps.sort(key=lambda item: item[1].phase == "running")
        for node, step in steps[:_MAX_LINES]:
            name = "" if node is None else f"node {node} "
            text = Text(f"{_SYMBOLS[step.phase]} {name}{step.phase}: ", style=_STYLES[step.phase])
            table.add_row("", text + Text(step.message, style="default"))
        if len(steps) > _MAX_LINES:
            table.add_row("", Text(f"and {len(steps) - _MAX_LINES} more"))
        return table
