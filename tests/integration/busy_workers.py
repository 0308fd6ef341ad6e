"""Workers that are kept busy, stopped and killed, and how long what waits for them may take."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import torch

import skyproxy


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails if the body takes longer."""
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < seconds, f"took {took:.1f} s"


@contextlib.contextmanager
def later(seconds: float, action: Callable[[], object]) -> Iterator[None]:
    """Does `action` on another thread while the body runs."""
    timer = threading.Timer(seconds, action)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def keep_busy(device: torch.device | str, seconds: float) -> torch.Tensor:
    """Records work that keeps a worker busy for about so long; a value that comes at its end."""
    x = torch.full((768, 768), 1 / 768, device=device)
    x.cpu()
    start = time.monotonic()
    (x @ x @ x @ x).cpu()
    once = (time.monotonic() - start) / 3
    y = x
    for _ in range(max(3, int(seconds / once))):
        y = y @ x
    return y.mean()


def kill(node: skyproxy.Node, number: int = signal.SIGKILL) -> None:
    assert node.process_id is not None
    os.kill(node.process_id, number)
