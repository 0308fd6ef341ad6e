"""Snapshots that a client carries from the volume of one worker to that of another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skyproxy.snapshots import documents
from skyproxy.snapshots.hashes import SHA256, fastest
from tests.server.snapshots.sessions import Session


@pytest.mark.parametrize("hash_name", sorted({SHA256, fastest()}))
def test_a_copy_keeps_the_names_of_its_pieces(tmp_path: Path, hash_name: str) -> None:
    with Session(tmp_path / "one") as session, Session(tmp_path / "two", ops=False) as other:
        session.put(s20=torch.rand(10_000), s21=torch.rand(3))
        session.call("save_snapshot", "s", None, b"", hash_name)
        header = session.call("read_snapshot", "s", "", 0)["part"]
        digests = [digest for content in documents.unpack(header)["contents"] for digest in content]
        assert other.call("begin_snapshot", "s", len(digests), hash_name) is None
        for digest in digests:
            assert other.call("write_snapshot_piece", session.call("read_snapshot_piece", digest)) == digest
        assert other.call("write_snapshot", header, True) == "1"
        assert other.call("load_snapshot", "s")["snapshot"] == "1"
        assert all(torch.equal(other.slots[slot], session.slots[slot]) for slot in (20, 21))
        assert "'md5'" in other.call("begin_snapshot", "s", 1, "md5")["message"]


def test_what_clients_bring_has_a_bound_for_each_token(tmp_path: Path) -> None:
    with Session(tmp_path, max_brought_snapshot_bytes=10_000, ops=False) as session:
        session.put(s1=torch.rand(1000))
        assert session.call("save_snapshot", "own")["bytes"] == 4000
        assert session.call("begin_snapshot", "s", 3) is None
        assert len(session.call("write_snapshot_piece", bytes(3000))) == 32
        assert len(session.call("write_snapshot_piece", bytes(3000))) == 32
        words = session.call("write_snapshot_piece", bytes(1))["message"]
        assert "SKYPROXY_MAX_BROUGHT_SNAPSHOT_BYTES" in words
        assert not list((tmp_path / "token" / "s").glob(".*.draft"))
        assert session.call("begin_snapshot", "own", 1) is None  # in place of what is there
        assert len(session.call("write_snapshot_piece", bytes(9000))) == 32
    with Session(tmp_path, "another", max_brought_snapshot_bytes=10_000, ops=False) as session:
        assert session.call("begin_snapshot", "s", 1) is None
        assert len(session.call("write_snapshot_piece", bytes(9000))) == 32


def test_the_snapshots_of_a_token_have_a_bound(tmp_path: Path) -> None:
    megabyte = 1 << 20
    with Session(tmp_path, ops=False, most_bytes=3 * megabyte) as session:
        session.put(s1=torch.zeros(megabyte, dtype=torch.uint8))
        for name in ("one", "two", "two"):  # again under the same name, in place of what is there
            assert session.call("save_snapshot", name)["bytes"] == megabyte
        session.put(s2=torch.zeros(megabyte, dtype=torch.uint8))
        assert "`snapshots` in the token's file" in session.call("save_snapshot", "three")["message"]
        assert session.call("save_snapshot", "two")["bytes"] == 2 * megabyte
        assert session.call("begin_snapshot", "four", 1) is None
        assert "`snapshots` in the token's file" in session.call("write_snapshot_piece", bytes(megabyte))["message"]
        assert session.call("delete_snapshot", "two")
        assert session.call("save_snapshot", "three")["bytes"] == 2 * megabyte
    with Session(tmp_path, "another", ops=False, most_bytes=3 * megabyte) as session:
        session.put(s1=torch.zeros(3 * megabyte, dtype=torch.uint8))
        assert session.call("save_snapshot", "one")["bytes"] == 3 * megabyte


def test_many_small_snapshots_of_a_token_have_a_bound_too(tmp_path: Path) -> None:
    with Session(tmp_path, ops=False, most_bytes=1 << 18) as session:
        answers = [session.call("save_snapshot", f"name{number}") for number in range(6)]
        assert ["snapshot" in answer for answer in answers] == [True] * 4 + [False] * 2
