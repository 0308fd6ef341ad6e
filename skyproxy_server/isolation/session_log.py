"""The output of a session's process, on its way to the worker's log: each line names the session, and there is a bound.

Code of clients runs there, and it can write anything to its standard output and error. So these are a pipe, and not the
log itself: what looks like a line of the worker, or of another session, begins with the name of the one that wrote it.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterable

from skyproxy.errors import visible

_READ_BYTES = 1 << 16
_MOST_LINE_BYTES = 4000
_BURST_BYTES = 1 << 20
_BYTES_PER_SECOND = 16 << 10
"""A log that nobody empties: a session's lines are a few a minute, and a subprocess of a function may be talkative."""


class SessionLog:
    """The reading end of what one session's process writes.

    Args:
        session: its name.
        descriptor: the end of a pipe, ours from now on.
        write: takes lines.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        session: str,
        descriptor: int,
        write: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        os.set_blocking(descriptor, False)
        self._prefix = f"[{session[:8]}] "
        self._descriptor = descriptor
        self._write = write or _write_to_stderr
        self._clock = clock
        self._at = clock()
        self._left = float(_BURST_BYTES)
        self._held_back = 0
        self._rest = b""

    def fileno(self) -> int:
        return self._descriptor

    def take(self) -> bool:
        """Pass on what was written; return False where nothing more can come."""
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return True
        now = self._clock()
        self._left, self._at = min(self._left + (now - self._at) * _BYTES_PER_SECOND, _BURST_BYTES), now
        if len(data) > self._left:
            if self._rest:  # what comes later is not its end
                self._say([self._rest])
                self._rest = b""
            self._held_back += len(data)
            return True
        self._left -= len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        self._say(lines)
        return bool(data)

    def _say(self, lines: Iterable[bytes]) -> None:
        texts = [f"({self._held_back} bytes were held back here)"] if self._held_back else []
        self._held_back = 0
        for line in lines:
            for start in range(0, max(len(line), 1), _MOST_LINE_BYTES):
                texts.append(visible(line[start : start + _MOST_LINE_BYTES].decode("utf-8", "replace")))
        if texts:
            self._write("".join(f"{self._prefix}{text}\n" for text in texts))

    def close(self) -> None:
        """Pass on the rest, of which there is no more than a pipe holds, and let go of it."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        for _ in range(_BURST_BYTES // _READ_BYTES):  # what it has started may be writing without end
            if not poll.poll(0) or not self.take():
                break
        self._say([self._rest] if self._rest else [])
        os.close(self._descriptor)


def _write_to_stderr(lines: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(lines)
        sys.stderr.flush()
