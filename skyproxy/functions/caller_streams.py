"""The output of a call where nobody takes it: written where its caller writes."""

from __future__ import annotations

import sys

from skyproxy.errors import visible_output


class CallerStreams:
    """Writes to the `sys.stdout` and `sys.stderr` that the caller had."""

    def __init__(self) -> None:
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}

    def __call__(self, stream: str, text: str) -> None:
        target = self._streams[stream]
        if target is None or getattr(target, "closed", False):
            target = getattr(sys, stream)
        if target is not None:
            target.write(visible_output(text))
            target.flush()
