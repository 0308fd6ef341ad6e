"""Futures that let go of whom they have told."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class ReleasingFuture(Future[T]):
    """A `concurrent.futures.Future` that forgets its callbacks once they were called.

    They mostly know somebody who holds the future: a circle that would keep its result, however large, until Python's
    collector comes.
    """

    def _invoke_callbacks(self) -> None:
        super()._invoke_callbacks()  # type: ignore[misc]
        self._done_callbacks.clear()  # type: ignore[attr-defined]
        # Nobody adds to them any more: who comes now is called at once
