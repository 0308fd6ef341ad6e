"""Output of functions, as it appears here: whole lines, with the rank in front."""

from __future__ import annotations

import os
import sys
import threading
from typing import TextIO

from skyproxy.errors import visible_output

_COLOURS = (36, 35, 33, 32, 34, 31, 96, 95, 93, 92, 94, 91)
_LONGEST_LINE = 1 << 16
"""Characters without an end of line that are kept; a line that is longer is shown in parts."""
_lock = threading.Lock()


class TaskOutput:
    """The output of one task on one rank.

    In a pool of one, text passes as it comes. With several ranks, each line has its rank in front, in a colour on a
    terminal, and only whole lines are shown, so that they never mix.
    """

    def __init__(self, rank: int | None) -> None:
        """Show the output of one task.

        Args:
            rank: of the process; None for a pool of one.
        """
        self._rank = rank
        self._begun: dict[str, str] = {}

    def write(self, stream: str, text: str) -> None:
        """Shows text that came on "stdout" or "stderr"."""
        # Looked up now, not earlier: notebooks and tests replace these.
        target: TextIO = getattr(sys, stream)
        text = visible_output(text)
        if self._rank is None:
            target.write(text)
            target.flush()
            return
        text = self._begun.pop(stream, "") + text
        # A carriage return ends a line too: a progress bar draws one over the other.
        cut = max(text.rfind("\n"), text.rfind("\r")) + 1
        if len(text) - cut > _LONGEST_LINE:
            text, cut = text + "\n", len(text) + 1
        if text[cut:]:
            self._begun[stream] = text[cut:]
        if cut:
            self._show(target, text[:cut])

    def finish(self) -> None:
        """Shows what was printed without an end of line."""
        for stream, text in list(self._begun.items()):
            del self._begun[stream]
            self._show(getattr(sys, stream), text + "\n")

    def _show(self, target: TextIO, text: str) -> None:
        prefix = self._prefix(target)
        lines = text.splitlines(keepends=True)
        with _lock:
            target.write("".join(prefix + line for line in lines))
            target.flush()

    def _prefix(self, target: TextIO) -> str:
        assert self._rank is not None
        plain = f"[{self._rank}] "
        if "NO_COLOR" in os.environ or not getattr(target, "isatty", lambda: False)():
            return plain
        return f"\x1b[{_COLOURS[self._rank % len(_COLOURS)]}m{plain}\x1b[0m"
