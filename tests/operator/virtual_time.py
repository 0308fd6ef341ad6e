"""An event loop whose clock jumps to the next thing to do: hours take no time, and no test depends on speed."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: where it would have, time has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found and timeout is None:
            raise RuntimeError("everything waits, and nothing will ever happen")
        if not found and timeout:
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop with a clock of its own."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)
