"""Functions that clients have sent before, by their content: kept, so that a call names one instead of bringing it."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from skyproxy.errors import ProtocolError
from skyproxy_server.functions.shared_globals import SharedGlobals, SharingFunction, load_function

DIGEST_BYTES = 32
_OVERHEAD_BYTES = 4096
"""The bytes that each counts beside its code, so that many small ones are bounded, too."""


class KnownFunction:
    """One function of one session.

    Attributes:
        content: its pickle.

    Args:
        globals_: what it shares with others; None for one whose every call has globals of its own.
    """

    def __init__(self, content: bytes, globals_: SharedGlobals | None) -> None:
        self.content = content
        self._globals = globals_
        self._sharing = SharingFunction(content)

    @property
    def kept_bytes(self) -> int:
        """The bytes that it counts."""
        return len(self.content) + _OVERHEAD_BYTES

    def make(self) -> tuple[Callable[..., object], object]:
        """The function for one call, on that call's thread, and what to hold while it runs.

        Raises:
            Exception: something that it refers to is missing here.
        """
        return (load_function(self.content), None) if self._globals is None else self._globals.make(self._sharing)


class KnownFunctions:
    """Those of all sessions of this process; no session finds another's.

    Args:
        max_bytes: what they may have together; those that were not called for longest go first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, bytes], KnownFunction] = OrderedDict()
        self._globals: dict[str, SharedGlobals] = {}
        self._lock = threading.Lock()

    def find(self, session: str, digest: bytes, keeps_globals: bool, content: Any) -> KnownFunction | None:
        """The function of this digest; None if it is not here.

        Args:
            session: whose it is.
            digest: names its content.
            keeps_globals: whether it shares its globals with others of its file, in which they live on between calls.
            content: what came with the call: the function, or nothing.

        Raises:
            ProtocolError: the content has another digest.
        """
        key = session, digest
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
        if not len(content):
            return None
        data = bytes(content)
        if hashlib.sha256(data).digest() != digest:
            raise ProtocolError("a function came under the digest of another one")
        with self._lock:
            known = self._kept.get(key)
            if known is None:
                shared = self._globals.setdefault(session, SharedGlobals()) if keeps_globals else None
                known = self._kept[key] = KnownFunction(data, shared)
                self._bytes += known.kept_bytes
                self._make_room()
            return known

    def _make_room(self) -> None:
        while self._bytes > self._max_bytes and self._kept:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.kept_bytes

    def forget(self, session: str) -> None:
        """A session has ended. Functions that run go on."""
        with self._lock:
            self._globals.pop(session, None)
            for key in [key for key in self._kept if key[0] == session]:
                self._bytes -= self._kept.pop(key).kept_bytes
