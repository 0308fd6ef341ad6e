"""Names of content: the same whoever computes them, another one for any other content."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyproxy.protocol.digests import DIGEST_BYTES, LEAF_BYTES, content_digest


def leaf(data: bytes) -> bytes:
    return hashlib.sha256(b"skyproxy leaf:" + data).digest()


@pytest.mark.parametrize("size", [0, 1, LEAF_BYTES, LEAF_BYTES + 1])
def test_the_name_is_the_hash_of_the_hashes_of_the_pieces(size: int) -> None:
    data = os.urandom(size)
    pieces = [data[offset : offset + LEAF_BYTES] for offset in range(0, size, LEAF_BYTES)]
    expected = hashlib.sha256(b"skyproxy root %d:" % size + b"".join(map(leaf, pieces))).digest()
    assert content_digest(memoryview(data)) == expected
    assert len(expected) == DIGEST_BYTES


def test_threads_give_the_same_name() -> None:
    data = memoryview(os.urandom(3 * LEAF_BYTES + 5))
    with ThreadPoolExecutor(3) as pool:
        assert content_digest(data, pool.map) == content_digest(data)


def test_content_cannot_pass_for_the_pieces_of_another_one() -> None:
    data = bytes(LEAF_BYTES + 1)
    hashes = leaf(data[:LEAF_BYTES]) + leaf(data[LEAF_BYTES:])
    assert content_digest(memoryview(hashes)) != content_digest(memoryview(data))


def test_any_changed_byte_changes_the_name() -> None:
    data = bytearray(LEAF_BYTES + 100)
    names = set()
    for position in (None, 0, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 99):
        changed = bytearray(data)
        if position is not None:
            changed[position] ^= 1
        names.add(content_digest(memoryview(changed)))
    assert len(names) == 5
