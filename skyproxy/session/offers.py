"""The uploads that a worker is asked about before their bytes leave, and those that it is asked to keep."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

from skyproxy.protocol.digests import Map, content_digest, content_proof
from skyproxy.protocol.messages import Welcome
from skyproxy.settings import Settings

_MISSES = 3
"""Questions about one size that were answered with no, in a row, before that size is not asked about any more."""
_LONE_UPLOADS = 16
"""Uploads of one size, outside a module's move, that are kept: more of them are a stream of data, not a state."""
_THREADS = 4


Wanted = Callable[[], bool]


def _always() -> bool:
    return True


def _map_while(wanted: Wanted, mapped: Map) -> Map:
    """Return a `map` that stops when the result is not wanted: gigabytes take seconds, and the next upload waits."""

    def hashed(function: Callable[[memoryview], bytes], pieces: Iterable[memoryview]) -> Iterable[bytes]:
        return mapped(lambda piece: function(piece) if wanted() else b"", pieces)

    return hashed


class UploadMode(Enum):
    """The message that precedes the chunks of an upload."""

    PLAIN = "nothing"
    KEEP = "the request to keep them"
    QUERY = "the question whether they are there, and the request to keep them"


class UploadDedup:
    """Decides by sizes and by earlier answers: hashing costs as much time as a fast network.

    Nothing is hashed for a worker that cannot have the content: one that kept nothing when we came, and was given
    nothing of this size since. Belongs to the uploading thread.

    Attributes:
        saved_bytes: what did not have to travel.
    """

    def __init__(self, least_bytes: int, *, keeps: bool, had_blobs: bool) -> None:
        """Begin without earlier answers.

        Args:
            least_bytes: smaller uploads are not worth a question.
            keeps: whether the worker keeps anything, and may.
            had_blobs: whether it had kept something already when we came.
        """
        self.saved_bytes = 0
        self._least_bytes = least_bytes
        self._keeps = keeps
        self._had_blobs = had_blobs
        self._kept: Counter[int] = Counter()
        self._misses: Counter[int] = Counter()
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def agreed(cls, welcome: Welcome, settings: Settings) -> UploadDedup:
        """Return what a worker that welcomed us and our settings come to together."""
        return cls(
            settings.min_blob_bytes,
            keeps=settings.remember_uploads and welcome.limits.get("blob_bytes", 0) > 0,
            had_blobs=welcome.limits.get("blobs", 0) > 0,
        )

    def plan(self, byte_count: int, together: bool) -> UploadMode:
        """Decide what to do about an upload that begins.

        Args:
            byte_count: its size.
            together: whether it is part of a module's move.
        """
        if not self._keeps or byte_count < self._least_bytes:
            return UploadMode.PLAIN
        if (self._had_blobs or self._kept[byte_count]) and self._misses[byte_count] < _MISSES:
            return UploadMode.QUERY
        return self._to_keep(byte_count, together)

    def _to_keep(self, byte_count: int, together: bool) -> UploadMode:
        if not together and self._kept[byte_count] >= _LONE_UPLOADS:
            return UploadMode.PLAIN
        self._kept[byte_count] += 1
        return UploadMode.KEEP

    def digest(self, view: memoryview, wanted: Wanted = _always) -> bytes:
        """The name of these bytes.

        Args:
            view: the bytes.
            wanted: asked before each piece. Once it is not, the rest is left out, and the name is that of nothing.
        """
        if self._pool is None:
            threads = min(_THREADS, os.cpu_count() or 1)
            self._pool = ThreadPoolExecutor(threads, "skyproxy-hashing")
        return content_digest(view, _map_while(wanted, self._pool.map))

    def proof(self, view: memoryview, nonce: bytes, wanted: Wanted = _always) -> bytes:
        """Return the proof for a worker that these bytes are here; `wanted` as in `digest`."""
        return content_proof(view, nonce, _map_while(wanted, map if self._pool is None else self._pool.map))

    def note_answer(self, byte_count: int, known: bool) -> None:
        """The worker has answered a question about an upload of this size."""
        if known:
            self.saved_bytes += byte_count
            self._misses[byte_count] = 0
        else:
            self._misses[byte_count] += 1
            self._kept[byte_count] += 1

    def end(self) -> None:
        """Ends the hashing threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
