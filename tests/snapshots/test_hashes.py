"""The hashes that name pieces of snapshots: which there are, and which is chosen."""

from __future__ import annotations

import pytest

from skyproxy.errors import SnapshotError
from skyproxy.snapshots import hashes
from skyproxy.snapshots.hashes import BLAKE3, SHA256, chosen, fastest, piece_hash

EMPTY = {
    SHA256: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    BLAKE3: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
}


@pytest.mark.parametrize("name", sorted({SHA256, fastest()}))
def test_each_hash_is_the_standard_one(name: str) -> None:
    assert piece_hash(name)(b"").hex() == EMPTY[name]
    assert piece_hash(name)(memoryview(b"abc")) == piece_hash(name)(b"abc") != piece_hash(name)(b"abd")


def test_a_wish_is_granted_where_that_hash_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "_blake3", lambda: lambda piece: bytes(32))
    assert (fastest(), chosen(BLAKE3), chosen(SHA256)) == (BLAKE3, BLAKE3, SHA256)
    monkeypatch.setattr(hashes, "_blake3", lambda: None)
    assert (fastest(), chosen(BLAKE3), chosen(SHA256)) == (SHA256, SHA256, SHA256)
    assert chosen(["md5"]) == SHA256


def test_a_hash_that_is_missing_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "_blake3", lambda: None)
    with pytest.raises(SnapshotError, match="install the package blake3"):
        piece_hash(BLAKE3)
    for name in ("md5", 7, None):
        with pytest.raises(SnapshotError, match="not known here"):
            piece_hash(name)
