"""Functions that clients have sent before, by their content: kept, so that a call names one instead of bringing it."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from skyproxy.errors import ProtocolError
from skyproxy.payloads.pickling import Unpickler
from skyproxy.payloads.tensors import Row
from skyproxy.runtime.project_code import PROJECT_CODE

DIGEST_BYTES = 32
_OVERHEAD_BYTES = 4096
"""The bytes that each counts beside its code, so that many small ones are bounded, too."""
_NO_TABLES: dict[str, object] = {"tensors": [], "bases": []}


class KnownFunction:
    """One function of one session.

    Attributes:
        content: its pickle.

    Args:
        keeps_globals: whether all calls share one function, and with it the values of its globals.
    """

    def __init__(self, content: bytes, keeps_globals: bool) -> None:
        self.content = content
        self._keeps_globals = keeps_globals
        self._lock = threading.Lock()
        self._made: tuple[int, Callable[..., object]] | None = None

    @property
    def kept_bytes(self) -> int:
        """The bytes that it counts."""
        return len(self.content) + _OVERHEAD_BYTES

    def make(self) -> Callable[..., object]:
        """The function for one call, on that call's thread.

        Raises:
            Exception: something that it refers to is missing here.
        """
        if not self._keeps_globals:
            return self._load()
        generation = PROJECT_CODE.generation
        with self._lock:
            if self._made is None or self._made[0] != generation:
                # Modules of the program were reloaded: the function may hold objects of the old ones.
                self._made = generation, self._load()
            return self._made[1]

    def _load(self) -> Callable[..., object]:
        function = Unpickler([self.content], _NO_TABLES, _no_reference, named_device).unpickle()
        if not callable(function):
            raise ProtocolError(f"what came as a function is a {type(function).__name__}")
        return function  # type: ignore[no-any-return]


class KnownFunctions:
    """Those of all sessions of this process; no session finds another's.

    Args:
        max_bytes: what they may have together; those that were not called for longest go first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, bytes], KnownFunction] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, session: str, digest: bytes, keeps_globals: bool, content: Any) -> KnownFunction | None:
        """The function of this digest; None if it is not here.

        Args:
            session: whose it is.
            digest: names its content.
            keeps_globals: see `KnownFunction`.
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
                known = self._kept[key] = KnownFunction(data, keeps_globals)
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
            for key in [key for key in self._kept if key[0] == session]:
                self._bytes -= self._kept.pop(key).kept_bytes


def named_device(fields: Any) -> torch.device:
    """The device that a client names by its type and index."""
    kind, index = fields
    return torch.device(kind, index) if index is not None else torch.device(kind)


def _no_reference(row: Row, number: int) -> torch.Tensor:
    raise ProtocolError("a function with a remote tensor in it came without its arguments")
