"""Digests of calls' names, by which calls are found in other processes: a name itself is a secret.

Whoever looks for a call asks for its `mark`. Only who knows the name can answer with its `proof`, and only the name's
holder could have given the `seal` that the proof is checked by.
"""

from __future__ import annotations

import hashlib
import hmac

SIZE = 32


def mark(identity: str) -> bytes:
    """Return what a call is asked for by."""
    return _digest(b"mark", identity.encode("utf-8", "surrogatepass"))


def proof(identity: str) -> bytes:
    """Return what shows that its sender has the call."""
    return _digest(b"proof", identity.encode("utf-8", "surrogatepass"))


def seal(proven: bytes) -> bytes:
    """Return what a proof is checked by, and which does not tell the proof."""
    return _digest(b"seal", proven)


def fits(proven: object, sealed: bytes) -> bool:
    """Return whether a proof is the one that was asked for."""
    return isinstance(proven, bytes) and hmac.compare_digest(seal(proven), sealed)


def _digest(purpose: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=SIZE, person=b"skyproxy-" + purpose).digest()
