"""Snapshots that a client has written to its worker's volume as it likes."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from skyproxy.errors import SnapshotError
from skyproxy.session import snapshot_copies
from skyproxy.snapshots import folder
from skyproxy.snapshots.documents import MAX_WHOLE, pack
from skyproxy.snapshots.packs import PIECE_BYTES, pieces_in, pieces_of
from skyproxy_server.snapshots import copies

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux", reason="deaths are told by Linux")
def test_a_few_hundred_changed_snapshots_end_no_worker_and_give_nothing_foreign() -> None:
    # In a process of its own: it forks, and its children may die.
    command = [sys.executable, "-m", "tests.security.snapshot_fuzzing", "--documents", "300", "--seed", "1000000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "'restored'" in done.stdout
    assert "'refused'" in done.stdout


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES])
def test_pieces_are_counted_as_they_are_cut(size: int) -> None:
    assert pieces_in(size) == len(pieces_of(size))


def test_a_size_that_a_snapshot_claims_takes_no_memory() -> None:
    header = {"document": {"storages": [[MAX_WHOLE, 0, 0]]}, "contents": [[b"x" * 32]], "names": b""}
    tracemalloc.start()
    try:
        with pytest.raises(SnapshotError, match="other pieces"):
            snapshot_copies._copy_of(header, lambda digests: iter(()))
        with pytest.raises(SnapshotError, match="other pieces"):
            copies._finish(None, pack(header))  # type: ignore[arg-type]
        with pytest.raises(SnapshotError, match="has 1 pieces"):
            folder._load_tensor(MAX_WHOLE, [b"x" * 32], {}, {}, None)  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
