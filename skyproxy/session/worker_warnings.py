"""Warnings of the worker's PyTorch, shown at the lines that recorded the operations."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from types import CodeType
from typing import Any

from skyproxy.protocol.messages import Warned

_KEPT = 1000
_MOST_SHOWN = 10_000
"""Python notes each text that it has shown, and a worker has endless ones."""
_MOST_CHARACTERS = 4000
_TOLD_WARNINGS = 4096
"""Warnings of a protected session that are remembered, so that none is shown twice."""
_CATEGORIES: dict[str, type[Warning]] = {
    kind.__name__: kind
    for kind in (UserWarning, DeprecationWarning, FutureWarning, PendingDeprecationWarning, RuntimeWarning)
}


class WorkerWarnings:
    """Warnings of the worker that nobody has been shown yet.

    They come while the program does something else, so they are shown by the next thread that waits for the worker: at
    the line that recorded the operation, where Python's filters count them as if they had been raised there.

    Attributes:
        pending: category, text, and the code and line that recorded the operation, where they are known.
    """

    def __init__(self) -> None:
        self.pending: deque[tuple[type[Warning], str, tuple[CodeType, int] | None]] = deque(maxlen=_KEPT)
        self._registries: dict[str, dict[Any, Any]] = {}
        self._shown = 0

    def add(self, category: str, message: str, line: tuple[CodeType, int] | None) -> None:
        """Keep a warning; a session has a bounded number of them. Called by the thread that reads."""
        self._shown += 1
        if self._shown <= _MOST_SHOWN:
            self.pending.append((_CATEGORIES.get(category, UserWarning), message[:_MOST_CHARACTERS], line))

    def show(self) -> None:
        """Warn of what is pending.

        Raises:
            Warning: a filter says so; what else is pending is shown the next time.
        """
        while self.pending:
            try:
                category, message, line = self.pending.popleft()
            except IndexError:  # another thread is showing it
                return
            code, number = line if line is not None else (None, 0)
            filename = code.co_filename if code is not None else "<a line that was not recorded>"
            module, registry = self._place_of(filename)
            warnings.warn_explicit(message, category, filename, number, module, registry)

    def _place_of(self, filename: str) -> tuple[str, dict[Any, Any]]:
        """Return the name of the module of a file, and where Python notes what was shown there already."""
        # No module has a file of such a name.
        for module in () if filename.startswith("<") else list(sys.modules.values()):
            names = getattr(module, "__dict__", {})
            if names.get("__file__") == filename:
                return str(names.get("__name__")), names.setdefault("__warningregistry__", {})
        return filename.removesuffix(".py"), self._registries.setdefault(filename, {})


class ToldWarnings:
    """Warnings that a protected session was told: operations that are executed again warn again."""

    def __init__(self) -> None:
        self._told: dict[int, None] = {}

    def is_news(self, warned: Warned) -> bool:
        """Return whether a warning is told for the first time, and remember it."""
        key = hash(repr((warned.category, warned.message, warned.place)))
        if key in self._told:
            return False
        if len(self._told) >= _TOLD_WARNINGS:
            self._told.pop(next(iter(self._told)))
        self._told[key] = None
        return True
