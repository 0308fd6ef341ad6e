"""Headers of snapshots: what one says of its pieces and of its named session. Nothing in it is believed."""

from __future__ import annotations

import re

from skyproxy.snapshots.documents import Table, data, entry, flag, refuse, rows, table, text, whole_number
from skyproxy.snapshots.hashes import SHA256
from skyproxy.snapshots.packs import DIGEST_BYTES

PACK_NAME = re.compile(r"pack-[0-9a-f]{16}\.safetensors")


def hash_of(header: Table) -> str:
    """The name of the hash that named a snapshot's pieces."""
    return text(header.get("hash", SHA256), "the name of its hash", 20)


def places_of(header: Table) -> dict[bytes, str]:
    """The pack of each piece."""
    packs = [text(name, "a pack", 64) for name in rows(entry(header, "packs"), "the packs")]
    if not all(PACK_NAME.fullmatch(name) for name in packs):
        raise refuse("it names a file that is none of ours")
    return {
        data(digest, "a piece's name", DIGEST_BYTES): packs[whole_number(number, "a pack", len(packs) - 1)]
        for digest, number in rows(entry(header, "pieces"), "the pieces", 2)
    }


def session_of(document: Table) -> dict[str, object]:
    """Return what a snapshot has of a named session, as a part of its row."""
    if "named" not in document:
        return {}
    named = table(document["named"], "its named session")
    return {
        "session": text(entry(named, "name"), "the name of a session", 200),
        "names": len(rows(entry(named, "values"), "its named values")),
        "held": flag(named.get("held", False), "whether a program uses it"),
    }
