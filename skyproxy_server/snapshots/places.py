"""The place of a token's snapshots, below the worker's."""

from __future__ import annotations

import hashlib
import re

from skyproxy.snapshots.stores import FileStore

_READABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def place_of(root: FileStore, owner: str) -> FileStore:
    """Return the place of all snapshots of a token, by the token's name."""
    if _READABLE.fullmatch(owner):
        return root.child(owner)
    return root.child(f".{hashlib.sha256(owner.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}")
