"""Breakpoints and exceptions in a process of a script under torchrun: they wait for whoever looks by way of the worker.

`PYTHONBREAKPOINT` names `stop`; the `sitecustomize` of `rank_start` calls `look_at`. Nothing of it is imported before.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from types import FrameType

from skyproxy.runtime.breakpoints import Debugger, Place, is_quit
from skyproxy.runtime.debug_rooms import Line
from skyproxy.runtime.distant_debugger import DebuggedProcess
from skyproxy.settings import SETTINGS

SOCKET_VARIABLE = "SKYPROXY_SCRIPT_DEBUG"
"""The environment variable with the path of the worker's socket, in a folder that only its user can open."""

_CONNECTING = threading.Lock()
_KNOWN: dict[int, Debugger] = {}
"""The debugger of this process, by its number: a process that it forks has another one."""


def stop(*args: object, **kwargs: object) -> None:
    """Wait at a breakpoint of the caller; what `breakpoint()` calls.

    Raises:
        RuntimeError: the worker cannot be reached.
    """
    frame: FrameType = sys._getframe(1)
    _debugger().stop(frame)


def look_at(error: BaseException) -> None:
    """Wait for somebody to look at an exception that ends this process."""
    if is_quit(error):
        known = _KNOWN.get(os.getpid())
        if known is not None:
            print(f"skyproxy: {known.explain()}", file=sys.stderr)
    elif isinstance(error, Exception):
        with contextlib.suppress(RuntimeError):  # the worker is gone: nobody can look
            _debugger().look_at(error)


def _debugger() -> Debugger:
    with _CONNECTING:
        known = _KNOWN.get(os.getpid())
        if known is None:
            known = _KNOWN[os.getpid()] = _connect(os.environ.get(SOCKET_VARIABLE, ""))
    return known


def _connect(path: str) -> Debugger:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise RuntimeError(
            f"the worker of this process does not answer at {path!r}, so no debugger can get here: {error}"
        ) from error
    line = Line(sock)

    def announce(place: Place) -> None:
        try:
            line.send({"waits": place})
        except OSError:
            debugger.give_up()

    debugger = Debugger("", SETTINGS.breakpoint_seconds, announce)
    process = DebuggedProcess(debugger, lambda said: line.send({"said": said}))
    threading.Thread(target=_listen, args=(line, debugger, process), name="skyproxy-debug", daemon=True).start()
    return debugger


def _listen(line: Line, debugger: Debugger, process: DebuggedProcess) -> None:
    try:
        while True:
            process.hear(line.receive())
    except OSError:
        debugger.give_up()  # the worker is gone, or has ended the script
