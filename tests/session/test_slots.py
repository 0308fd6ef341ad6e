"""Slots are given back before they are marked, and the largest are forgotten in one piece."""

from __future__ import annotations

import pytest

from skyproxy.session.slots import slot_dropper, without_top


@pytest.mark.parametrize(
    ("free", "top", "kept", "left"),
    [
        ([], 4, [], 4),
        ([3, 1, 4, 2], 4, [], 0),
        ([4, 1, 3], 4, [1], 2),
        ([3, 1], 4, [1, 3], 4),
    ],
)
def test_only_the_largest_free_slots_without_a_gap_are_forgotten(
    free: list[int], top: int, kept: list[int], left: int
) -> None:
    assert without_top(free, top) == (kept, left)


def test_a_dropped_slot_is_free_first_and_marked_afterwards() -> None:
    free, held = [7], [True] * 9
    marked: list[tuple[int, list[int], bool]] = []

    class Dirty(list[int]):
        def append(self, slot: int) -> None:
            marked.append((slot, sorted(free), held[slot]))

    drop = slot_dropper(free, Dirty(), held)
    drop(5)
    drop(8)
    assert marked == [(5, [5, 7], False), (8, [5, 7, 8], False)]
    assert free[0] == 5
