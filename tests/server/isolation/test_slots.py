"""The memory that a session's process shares with the supervisor."""

from __future__ import annotations

import os
import struct

import pytest

from skyproxy_server.limits import are_sessions_separable

if not are_sessions_separable():
    pytest.skip("session processes need Linux", allow_module_level=True)

from skyproxy_server.isolation.slots import OVER, SLOT_BOUNDS, SLOT_BYTES, SLOTS, ConnectionSlots, mapped, new_memory


def test_what_the_process_writes_is_seen_and_gone_for_the_next_connection() -> None:
    memory = new_memory()
    slots, process = ConnectionSlots(mapped(memory)), memoryview(mapped(memory))
    os.close(memory)
    taken = {slots.take() for _ in range(SLOTS)}
    assert taken == set(range(SLOTS))
    assert slots.take() is None

    mark = process[5 * SLOT_BYTES : 6 * SLOT_BYTES]
    assert not slots.is_over(5)
    mark[0] = OVER
    mark[SLOT_BOUNDS] = struct.pack("QQ", 100, 164)
    assert slots.is_over(5)
    assert [slots.is_between_frames(5, written) for written in (99, 100, 130, 164, 165)] == [0, 1, 0, 1, 0]
    assert not slots.is_over(4)

    slots.give(5)
    assert slots.take() == 5
    assert not slots.is_over(5)
    assert slots.is_between_frames(5, 0)
    mark.release()
    process.release()
    slots.close()
