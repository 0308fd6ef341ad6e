"""Functions as they go to a worker."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


class CoroutineTask:
    """A coroutine function, run by an event loop of its own on the worker's thread."""

    wraps_function = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", "coroutine")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return asyncio.run(self.function(*args, **kwargs))


def as_task(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a worker can call to run `function`."""
    return CoroutineTask(function) if inspect.iscoroutinefunction(function) else function
