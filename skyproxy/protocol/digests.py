"""The name of some bytes by their content: the same on both sides, and nobody can guess it who does not have them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final

DIGEST_BYTES: Final = 32
LEAF_BYTES: Final = 4 << 20
"""Bytes are hashed in pieces of this size, so that several threads can share the work."""
SHA256: Final = "sha256"
BLAKE3: Final = "blake3"
"""Names, on the wire, of the hashes by which pieces of snapshots are called."""

Map = Callable[[Callable[[memoryview], bytes], Iterable[memoryview]], Iterable[bytes]]


def content_digest(view: memoryview, mapped: Map = map) -> bytes:
    """SHA-256 over the size and the SHA-256 of each piece: 32 bytes.

    Leaves and root begin differently, so that no content can pass for the list of another one's pieces.

    Args:
        view: the bytes, one-dimensional.
        mapped: as `map`; that of a pool of threads hashes the pieces side by side.
    """
    root = hashlib.sha256(b"skyproxy root %d:" % len(view))
    for leaf in mapped(_leaf, _pieces(view)):
        root.update(leaf)
    return root.digest()


def content_proof(view: memoryview, nonce: bytes, mapped: Map = map) -> bytes:
    """SHA-256 as `content_digest`, in which each piece and the whole begin with a nonce of the other side.

    Who knows only the content's name cannot make it, nor who has the content but for a byte: each byte of it is hashed
    behind a nonce that was not known before.
    """
    root = hashlib.sha256(b"skyproxy proof root %d:" % len(view) + nonce)
    leaf_start = b"skyproxy proof leaf:" + nonce
    for leaf in mapped(lambda piece: _leaf(piece, leaf_start), _pieces(view)):
        root.update(leaf)
    return root.digest()


def _pieces(view: memoryview) -> Iterator[memoryview]:
    for offset in range(0, len(view), LEAF_BYTES):
        yield view[offset : offset + LEAF_BYTES]


def _leaf(piece: memoryview, start: bytes = b"skyproxy leaf:") -> bytes:
    leaf = hashlib.sha256(start)
    leaf.update(piece)  # without the interpreter's lock
    return leaf.digest()
