"""A debugger in one process and whoever looks at it in another: the words between the two, whatever carries them.

To the process that waits: {"attach": number}, {"detach": number}, {"line": text}. From it: [number, kind, text], with
the number of who is attached, and otherwise as `Debugger.follow` has it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from skyproxy.errors import ConfigurationError
from skyproxy.runtime.breakpoints import Debugger

Send = Callable[[dict[str, Any]], object]
"""Sends words to the other process; an OSError says that it is gone."""

MAX_TEXT_CHARACTERS = 8192
_MAX_WAITING_TEXTS = 1000
_LOOK_SECONDS = 0.2
_SIGN_SECONDS = 1.0


class DebuggedProcess:
    """The end in the process that waits: follows its debugger for whoever attaches."""

    def __init__(self, debugger: Debugger, send: Callable[[list[object]], object]) -> None:
        """Make the end of one debugger.

        Args:
            debugger: of this process.
            send: sends what it says to the other process; an OSError says that this is gone.
        """
        self._debugger = debugger
        self._send = send
        self._attached = 0
        self._thread: threading.Thread | None = None

    def hear(self, message: dict[str, Any]) -> None:
        """Do what the other process says; from one thread."""
        if "attach" in message:
            self._attached = int(message["attach"])
            body = (self._attached, self._thread)
            self._thread = threading.Thread(target=self._follow, args=body, name="skyproxy-debugger", daemon=True)
            self._thread.start()
        elif "detach" in message:
            if self._attached == message["detach"]:
                self._attached = 0
        elif "line" in message:
            self._debugger.tell(str(message["line"]))

    def _follow(self, number: int, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        following = self._debugger.follow()
        try:
            for kind, text in following:
                if self._attached != number:
                    return
                for start in range(0, max(len(text), 1), MAX_TEXT_CHARACTERS):
                    self._send([number, kind, text[start : start + MAX_TEXT_CHARACTERS]])
        except OSError:
            self._debugger.give_up()
        finally:
            following.close()


class DistantDebugger:
    """The end in a worker: stands for the debugger of a process that belongs to a call.

    Attributes:
        identity: names it, a secret.
        ended: whether the process is gone.
    """

    def __init__(self, identity: str, send: Send) -> None:
        """Make the end for one process.

        Args:
            identity: names it.
            send: sends words to the process.
        """
        self.identity = identity
        self.ended = False
        self._send = send
        self._said: queue.Queue[tuple[str, str]] = queue.Queue(_MAX_WAITING_TEXTS)
        self._attached = self._number = 0
        self._lock = threading.Lock()

    def hear(self, said: object) -> None:
        """Take what the process has said, of which nothing is believed.

        Raises:
            ValueError: its debugger says no such thing.
        """
        if type(said) is not list or [type(part) for part in said] != [int, str, str]:
            raise ValueError("words of an unknown form")
        number, kind, text = said
        if kind not in ("text", "prompt", "alive", "end") or len(text) > MAX_TEXT_CHARACTERS:
            raise ValueError("words of an unknown form")
        if number == self._attached and kind != "alive":
            self._put(kind, text)

    def _put(self, kind: str, text: str) -> None:
        """Keep it for whoever is attached; text that nobody reads gives way."""
        if self._said.full():
            if kind == "text":
                return
            with contextlib.suppress(queue.Empty):
                self._said.get_nowait()
        self._said.put_nowait((kind, text))

    def follow(self) -> Generator[tuple[str, str]]:
        """Attach; see `Debugger.follow`.

        Raises:
            ConfigurationError: somebody else is attached.
        """
        with self._lock:
            if self._attached:
                raise ConfigurationError("somebody else is attached to this breakpoint. Let them leave it first.")
            self._number += 1
            number = self._attached = self._number
            self._said = queue.Queue(_MAX_WAITING_TEXTS)
        try:
            self._tell({"attach": number})
            signed_at = time.monotonic()
            while True:
                try:
                    kind, text = self._said.get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    if self.ended:
                        yield "end", ""
                        return
                    if time.monotonic() - signed_at > _SIGN_SECONDS:
                        signed_at = time.monotonic()
                        yield "alive", ""
                    continue
                yield kind, text
                if kind == "end":
                    return
        finally:
            self._attached = 0
            self._tell({"detach": number})

    def tell(self, line: str) -> None:
        """Say a line to the debugger."""
        self._tell({"line": line})

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._send(message)
        except OSError:
            self.ended = True
