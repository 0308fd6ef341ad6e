"""The calls of this program that wait at breakpoints, and the socket by which `skyproxy debug` gets to them.

What is typed there goes to the worker on the connection that the program has to it anyway.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, Protocol

from skyproxy.errors import ConfigurationError, visible
from skyproxy.functions.payload import Payload
from skyproxy.runtime import breakpoints, debug_rooms
from skyproxy.runtime.debug_rooms import Line

if TYPE_CHECKING:
    from skyproxy.functions.call import Call

logger = logging.getLogger("skyproxy")

Row = dict[str, Any]
"""A call that waits, as `skyproxy debug` shows it."""
_MAX_CONNECTIONS = 16
_LONGEST_NAME = 64
_MAX_WAITING = 10_000
_MAX_WAITING_OF_A_CALL = 1024
"""Ranks of a script, say; a worker may claim more, and would keep those of others out."""
_LONGEST_TEXT = 300
_MAX_LIST_BYTES = debug_rooms.MAX_LINE_BYTES - (64 << 10)


class Submits(Protocol):
    """Runs functions on a worker; see `runner.Runner`."""

    def submit(
        self, payload: Payload, *, results: Literal["remote", "value"] = "remote", debug: bool | None = None
    ) -> Call: ...


class WaitingCalls:
    """All of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Row, Submits]] = {}
        self._of_call: dict[str, set[str]] = {}
        """Names of what waits of each call, by the call's own."""
        self._process = 0
        self._connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def note(self, runner: Submits, call: Call, place: Row) -> None:
        """Take note of a call that waits, or of a process of it, that has a name of its own for this."""
        named = place.get("debugger")
        identity = named if type(named) is str and 0 < len(named) <= _LONGEST_NAME else call.id
        if place.get("kind") == "gone":
            self._forget(call, identity)
            return
        row = {
            "id": visible(identity[:8]),
            "name": call.name,
            "since": time.time(),
            **{key: visible(place.get(key) or "")[-_LONGEST_TEXT:] for key in ("kind", "file", "function", "pool")},
            **{key: _number(place.get(key)) for key in ("line", "rank", "world_size")},
        }
        with self._lock:
            is_new = identity not in self._known
            if is_first := call.id not in self._of_call:
                self._of_call[call.id] = set()
            of_call = self._of_call[call.id]
            if is_new:
                if len(self._known) >= _MAX_WAITING or len(of_call) >= _MAX_WAITING_OF_A_CALL:
                    return
                of_call.add(identity)
            elif identity not in of_call:
                return  # it is another call's, of another worker perhaps
            self._known[identity] = row, runner
            self._listen()
        if is_first:
            call.add_done_callback(self._forget_all)

    def _forget(self, call: Call, identity: str) -> None:
        with self._lock:
            if identity in self._of_call.get(call.id, ()):
                self._of_call[call.id].discard(identity)
                self._known.pop(identity, None)

    def _forget_all(self, call: Call) -> None:
        with self._lock:
            for identity in self._of_call.pop(call.id, ()):
                self._known.pop(identity, None)

    def _listen(self) -> None:
        """Open the socket, once in each process."""
        if self._process != os.getpid():
            try:
                listener, _ = debug_rooms.listen()
            except (ConfigurationError, OSError) as error:
                logger.warning("skyproxy: what waits at a breakpoint cannot be attached to: %s", error)
                return
            self._process = os.getpid()
            threading.Thread(target=self._accept, args=(listener,), name="skyproxy-debug", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            self._connections.acquire()
            sock, _ = listener.accept()
            threading.Thread(target=self._serve, args=(Line(sock),), name="skyproxy-debug-one", daemon=True).start()

    def _serve(self, line: Line) -> None:
        try:
            while True:
                message = line.receive()
                if "list" in message:
                    line.send({"waiting": self._list()})
                else:
                    self._attach(line, str(message.get("attach")))
        except OSError:
            pass  # they have left
        finally:
            line.close()
            self._connections.release()

    def _list(self) -> list[Row]:
        """Return what waits, as much as one message holds: of each call the first, then the others."""
        with self._lock:
            of_calls = [sorted(names & self._known.keys()) for names in self._of_call.values()]
            found = [self._known[name][0] for turn in itertools.zip_longest(*of_calls) for name in turn if name]
        rows: list[Row] = []
        left = _MAX_LIST_BYTES
        for row in found:
            rows.append({**row, "process": os.getpid()})
            left -= len(json.dumps(rows[-1])) + 2
            if left < 0:
                return rows[:-1]
        return rows

    def _attach(self, line: Line, wanted: str) -> None:
        with self._lock:
            found = [(name, runner) for name, (row, runner) in self._known.items() if row["id"] == wanted]
        if not found:
            line.send({"kind": "end", "text": "it does not wait any more"})
            return
        identity, runner = found[0]
        following = runner.submit(Payload.of(breakpoints.attach, (identity,)), results="value", debug=False)
        try:
            for kind, text in following:
                line.send({"kind": str(kind), "text": visible(text) if kind == "end" else str(text)})
                if kind == "prompt":
                    said = line.receive()
                    told = Payload.of(breakpoints.tell, (identity, str(said.get("line"))))
                    runner.submit(told, results="value", debug=False).result()
        except OSError:
            raise
        except Exception as error:
            with contextlib.suppress(OSError):
                line.send({"kind": "end", "text": str(error)})
        finally:
            following.cancel()


def _number(value: object) -> int:
    return value if type(value) is int else 0


WAITING_CALLS = WaitingCalls()
