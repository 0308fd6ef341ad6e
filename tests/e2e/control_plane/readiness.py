"""Waiting for an API server."""

from __future__ import annotations

import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

_READY_SECONDS = 120.0


def wait_ready(server: str, authority: Path, check: Callable[[], None], path: str = "/readyz") -> None:
    """Waits until a server says that it is ready.

    Args:
        server: its URL.
        authority: the certificate to trust.
        check: raises when it is of no use to wait on.
        path: what it is asked for.

    Raises:
        RuntimeError: it took too long, with what was answered last.
    """
    context = ssl.create_default_context(cafile=str(authority))
    deadline = time.monotonic() + _READY_SECONDS
    pause = threading.Event()
    while True:
        check()
        try:
            with urllib.request.urlopen(f"{server}{path}", timeout=5, context=context):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{server} was not ready within {_READY_SECONDS:g} s: {error}") from error
            pause.wait(0.1)
