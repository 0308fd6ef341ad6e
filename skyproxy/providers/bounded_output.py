"""Reading of what programs write that may not end: all of it is read, so that they never wait, and its end is kept."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import IO

MOST_BYTES = 4 << 20
_PIECE_BYTES = 1 << 16
_AFTER_KILL_SECONDS = 1.0
"""Time for what was written before; others may hold the pipes for longer."""


def read_to_end(stream: IO[bytes], kept: bytearray, most: int = MOST_BYTES) -> bytearray:
    """Read a stream that has no buffer to its end, and keep the last bytes of it in `kept`, which is returned."""
    with contextlib.suppress(OSError, ValueError):  # it was closed, for nobody waits any more
        while piece := stream.read(_PIECE_BYTES):
            kept += piece
            if len(kept) > most:
                del kept[:-most]
    return kept


def run_bounded(
    command: Sequence[str], given: bytes, timeout_seconds: float | None, most: int = MOST_BYTES
) -> subprocess.CompletedProcess[bytes]:
    """Run a program as `subprocess.run` does, and keep the end of what it writes.

    Args:
        command: the program and its arguments.
        given: its input.
        timeout_seconds: after which it is killed; None: never.
        most: bytes that are kept of each stream.

    Raises:
        subprocess.TimeoutExpired: it took too long; with what it wrote at last.
    """
    output, problem = bytearray(), bytearray()
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    works = [
        threading.Thread(target=_give, args=(process.stdin, given), name="skyproxy-command-input", daemon=True),
        threading.Thread(
            target=read_to_end, args=(process.stdout, output, most), name="skyproxy-command-output", daemon=True
        ),
        threading.Thread(
            target=read_to_end, args=(process.stderr, problem, most), name="skyproxy-command-errors", daemon=True
        ),
    ]
    for work in works:
        work.start()
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    try:
        for work in works:
            work.join(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        status = process.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        if any(work.is_alive() for work in works):
            raise subprocess.TimeoutExpired(command, timeout_seconds or 0.0)
    except BaseException as error:
        process.kill()
        process.wait()
        for work in works:
            work.join(_AFTER_KILL_SECONDS)
        if isinstance(error, subprocess.TimeoutExpired):
            raise subprocess.TimeoutExpired(command, timeout_seconds or 0.0, bytes(output), bytes(problem)) from None
        raise
    finally:
        for stream in (process.stdout, process.stderr):
            stream.close()
    return subprocess.CompletedProcess(command, status, bytes(output), bytes(problem))


async def communicate_bounded(
    process: asyncio.subprocess.Process, given: bytes | None = None, most: int = MOST_BYTES, *, beginning: bool = False
) -> tuple[bytes, bytes]:
    """Wait for a program as its `communicate` does, and keep the end of what it writes.

    Args:
        process: the program, with pipes.
        given: its input.
        most: bytes that are kept of each stream.
        beginning: keep the beginning of the output instead.
    """

    async def read(stream: asyncio.StreamReader | None, *, beginning: bool) -> bytes:
        kept = bytearray()
        while stream is not None and (piece := await stream.read(_PIECE_BYTES)):
            kept += piece
            if len(kept) > most:
                del kept[slice(most, None) if beginning else slice(None, -most)]
        return bytes(kept)

    async def give(stream: asyncio.StreamWriter | None) -> None:
        if stream is not None:
            with contextlib.suppress(OSError):  # it has ended, or reads no more
                stream.write(given or b"")
                await stream.drain()
            stream.close()

    output, problem, _ = await asyncio.gather(
        read(process.stdout, beginning=beginning), read(process.stderr, beginning=False), give(process.stdin)
    )
    await process.wait()
    return output, problem


def _give(stream: IO[bytes], given: bytes) -> None:
    """Write all of an input, as far as it is read."""
    left = memoryview(given)
    with contextlib.suppress(OSError, ValueError), stream:
        while left:
            left = left[stream.write(left) :]
