"""Python's garbage collector, kept out of the way while much is loaded."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector inside a `with` block that makes a great many objects to stay, as imports do.

    It goes through everything that was loaded before, again and again, and finds nothing to free: a seventh of the
    time of `import torch`, and half of that of `import skyproxy` after it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def set_loaded_aside() -> None:
    """Let the collector never look again at what exists now: what a process loaded when it began, and keeps."""
    gc.freeze()


def collect_loaded() -> None:
    """Let the collector look at all that was loaded now, so that it does not in the middle of a first training step.

    Its next full pass then comes when a quarter as many objects have been made and kept: 80,000 beside PyTorch. A pass
    takes 0.2 s there, so this is for a moment in which something else is waited for.
    """
    if gc.isenabled():
        gc.collect()
