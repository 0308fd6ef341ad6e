"""Cuts, stalls, stops, ends and kills of workers, and moves between them, all at once: the same bits as undisturbed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration import combined_faults

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes by what /proc says of them"),
]


@pytest.mark.parametrize("seed", [1, 4])
def test_programs_under_every_fault_at_once_give_the_same_bits(tmp_path: Path, seed: int) -> None:
    struck, told = combined_faults.run(tmp_path, seed, 15)
    assert sum(struck.values()) >= 3
    assert all(each["rounds"] for each in told)


def test_a_session_is_where_its_last_move_said_whatever_was_killed_meanwhile(tmp_path: Path) -> None:
    assert combined_faults.move_under_kills(tmp_path, 4, 20)["moves"]
