"""Slots, by which the values of a session are called on its worker: what gives them back, and what forgets them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappush
from typing import Protocol

MANY_FREE = 8192
"""Free slots from which the largest are worth forgetting."""
SLOTS_AHEAD = 1024
"""Slots that `Recorder.held` has beyond the largest in use: more than threads that could take one at the same time."""


class SlotOwner(Protocol):
    """An object that a slot can be given to."""

    slot: int


def slot_dropper(free: list[int], dirty: list[int], held: list[bool]) -> Callable[[int], None]:
    """Make the function that takes a slot back, of lists of `Recorder`."""
    # Names of this module may be gone when the last tensors die.
    push, mark = heappush, dirty.append

    def drop_slot(slot: int) -> None:
        # In this order: a slot that was marked first could be looked at, and forgotten, before it is free. No call ends
        # between the first two.
        held[slot] = False
        push(free, slot)
        mark(slot)

    return drop_slot


def without_top(free: Iterable[int], top: int) -> tuple[list[int], int]:
    """Return the free slots without the largest, in order, and the largest slot that is left of `top` ones."""
    kept = sorted(free)
    while kept and kept[-1] == top:
        kept.pop()
        top -= 1
    return kept, top
