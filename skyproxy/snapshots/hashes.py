"""The hashes that name the pieces of snapshots: SHA-256, which every Python has, and BLAKE3, which is several times as
fast, where its package is installed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable

from skyproxy.errors import SnapshotError
from skyproxy.protocol.digests import BLAKE3, SHA256

PieceHash = Callable[["memoryview | bytes"], bytes]
"""Gives the 32 bytes that name a piece."""


def _sha256(piece: memoryview | bytes) -> bytes:
    return hashlib.sha256(piece).digest()


@functools.cache
def _blake3() -> PieceHash | None:
    try:
        made = importlib.import_module("blake3").blake3
    except ImportError:
        return None

    def digest(piece: memoryview | bytes) -> bytes:
        found: bytes = made(piece).digest()
        return found

    return digest


def fastest() -> str:
    """The name of the fastest hash that there is here."""
    return SHA256 if _blake3() is None else BLAKE3


def chosen(wish: object) -> str:
    """The name of the hash that a client wishes for, if it is here; SHA-256 otherwise."""
    return BLAKE3 if wish == BLAKE3 and _blake3() is not None else SHA256


def piece_check(name: object) -> PieceHash | None:
    """Return the hash of this name, for who passes pieces on to somebody that checks them; None where it is missing.

    Raises:
        SnapshotError: it is not known.
    """
    return None if name == BLAKE3 and _blake3() is None else piece_hash(name)


def piece_hash(name: object) -> PieceHash:
    """Return the hash of this name.

    Raises:
        SnapshotError: it is not here.
    """
    found = _sha256 if name == SHA256 else _blake3() if name == BLAKE3 else None
    if found is None and name == BLAKE3:
        raise SnapshotError(
            "this snapshot's pieces are named by BLAKE3, which is not installed here. Nothing was changed; install the "
            "package blake3 here, and try again"
        )
    if found is None:
        raise SnapshotError(
            f"this snapshot's pieces are named by a hash that is not known here ({name!r:.40}). Nothing was changed; a "
            "newer skyproxy may read it"
        )
    return found


__all__ = ["BLAKE3", "SHA256", "PieceHash", "chosen", "fastest", "piece_check", "piece_hash"]
