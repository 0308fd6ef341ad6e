"""The recorder: order, slots, batches, room; whatever other threads and Ctrl-C do in between."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from skyproxy.errors import LimitExceededError, SessionLostError
from skyproxy.protocol import commands
from skyproxy.session.recorder import Recorder
from skyproxy.settings import Settings

OP = commands.FIRST_SIGNATURE
"""An op with one operand, the slot of its result."""


class Wire:
    """Where batches go; acknowledges when told to."""

    def __init__(self, **limits: int) -> None:
        self.sent: list[Any] = []
        self.acked = 0
        self.before_send: Callable[[Any], None] = lambda message: None
        settings = dataclasses.replace(Settings(), **limits)
        self.recorder = Recorder(self.send, self.unacked, settings)
        self.recorder.widths[OP] = 1

    def send(self, message: Any) -> None:
        self.before_send(message)
        if not self.sent or self.sent[-1] is not message:
            self.sent.append(message)

    def unacked(self) -> tuple[int, int]:
        waiting = len(self.sent) - self.acked
        return waiting, 100 * waiting

    def ack(self, count: int | None = None) -> None:
        self.acked = len(self.sent) if count is None else count
        self.recorder.ack(self.acked)

    def op(self, slot: int) -> None:
        self.recorder.stream.extend((OP, slot))
        self.recorder.lines.extend((None, slot))

    @property
    def commands(self) -> list[Any]:
        return [item for message in self.sent for item in message.stream]


@pytest.fixture
def wire() -> Wire:
    return Wire()


def drop(recorder: Recorder, slots: list[int]) -> None:
    for slot in slots:
        recorder.drop_slot(slot)


def test_commands_leave_in_order_and_batches_are_numbered_without_gaps(wire: Wire) -> None:
    for slot in range(5):
        wire.op(slot)
        wire.recorder.flush()
    assert wire.commands == [item for slot in range(5) for item in (OP, slot)]
    assert [message.sequence for message in wire.sent] == [1, 2, 3, 4, 5]
    wire.recorder.flush()  # nothing is nothing
    assert len(wire.sent) == 5
    assert wire.recorder.batches == 5
    assert wire.recorder.ops == 5


def new_slot(recorder: Recorder) -> int:
    handle = SimpleNamespace()
    recorder.take_slot(handle)
    return handle.slot


def test_a_dead_slot_is_reused_without_a_word_or_released_with_the_next_batch(wire: Wire) -> None:
    first, second = new_slot(wire.recorder), new_slot(wire.recorder)
    drop(wire.recorder, [first])
    assert new_slot(wire.recorder) == first
    drop(wire.recorder, [second])
    assert wire.recorder.live_slots == 1
    wire.recorder.flush()
    assert wire.commands == [commands.RELEASE, [second]]
    assert wire.recorder.live_slots == 1
    assert new_slot(wire.recorder) == second


def test_values_are_counted_exactly_while_another_thread_sends(wire: Wire) -> None:
    drop(wire.recorder, [new_slot(wire.recorder), new_slot(wire.recorder)][:1])
    counts: list[int] = []
    with ThreadPoolExecutor(1) as other:
        wire.before_send = lambda message: counts.append(other.submit(lambda: wire.recorder.live_slots).result())
        wire.recorder.flush()
    assert counts == [1]


def test_free_slots_above_all_living_ones_count_as_never_used_where_there_are_very_many(wire: Wire) -> None:
    slots = [new_slot(wire.recorder) for _ in range(20_000)]
    living = slots[100]
    drop(wire.recorder, [slot for slot in slots if slot != living])
    wire.recorder.flush()
    assert wire.recorder.live_slots == 1
    assert len(wire.recorder.free) == 100
    assert [new_slot(wire.recorder) for _ in range(103)] == [*slots[:100], *slots[101:104]]
    assert wire.recorder.live_slots == 104


def test_a_slot_that_another_thread_takes_while_a_batch_is_cut_is_not_released(wire: Wire) -> None:
    """One thread has taken the first of eight slots, another one finds which are free, and the first goes on."""
    recorder, is_looking, has_taken = wire.recorder, threading.Event(), threading.Event()
    slots = [new_slot(recorder) for _ in range(8)]
    drop(recorder, slots)

    def stop_in_release(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is Recorder._release.__code__ and frame.f_locals.get("releasing") and not is_looking.is_set():
            is_looking.set()
            assert has_taken.wait(10)
        return stop_in_release

    def cut() -> None:
        sys.settrace(stop_in_release)
        recorder.flush()

    def stop_in_taking(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is Recorder.take_free_slots.__code__ and frame.f_locals.get("slots") and not cutter.is_alive():
            cutter.start()
            assert is_looking.wait(10)
        return stop_in_taking

    cutter, tracer = threading.Thread(target=cut), sys.gettrace()
    sys.settrace(stop_in_taking)
    try:
        assert recorder.take_free_slots(8) == []
    finally:
        sys.settrace(tracer)
    taken = new_slot(recorder)
    wire.op(taken)
    has_taken.set()
    cutter.join()
    recorder.flush()
    ran = wire.commands
    at = ran.index(OP)
    assert taken == slots[0]
    assert all(taken not in item for item in ran[at:] if isinstance(item, list))


class LookedAt(int):
    """A slot that counts how often it, or another one, is looked at."""

    count = 0

    def __lt__(self, other: int) -> bool:
        LookedAt.count += 1
        return int(self) < int(other)

    def __hash__(self) -> int:
        LookedAt.count += 1
        return int(self)


@pytest.mark.parametrize("free", [5_000, 20_000])
def test_a_batch_looks_at_the_slots_that_died_and_not_at_all_that_are_free(wire: Wire, free: int) -> None:
    recorder = wire.recorder
    slots = [new_slot(recorder) for _ in range(free)]
    kept, last = slots[0], slots[-1]  # with the largest in use, none of the free ones can be forgotten
    drop(recorder, slots[1:-1])
    recorder.flush()
    recorder.free[:] = map(LookedAt, recorder.free)
    LookedAt.count = 0
    for _ in range(3):
        drop(recorder, [kept])
        recorder.flush()
        assert wire.commands[-2:] == [commands.RELEASE, [kept]]
        kept = new_slot(recorder)
    assert LookedAt.count < 300
    assert recorder.live_slots == 2
    assert last not in recorder.free


def test_a_slot_that_is_being_released_is_not_given_out_before_its_release_is_recorded(wire: Wire) -> None:
    slot = new_slot(wire.recorder)
    drop(wire.recorder, [slot])
    given: list[int] = []
    wire.before_send = lambda message: given.append(new_slot(wire.recorder))
    wire.recorder.flush()
    assert wire.commands[:2] == [commands.RELEASE, [slot]]
    assert given == [slot]  # any command that uses it comes after the release


def test_slots_depend_on_what_lives_and_not_on_how_it_died_or_where_batches_were_cut(wire: Wire) -> None:
    held = [new_slot(wire.recorder) for _ in range(6)]
    for slot in (held[4], held[1]):
        drop(wire.recorder, [slot])
    wire.recorder.flush()
    drop(wire.recorder, [held[2]])
    assert [new_slot(wire.recorder) for _ in range(4)] == [2, 3, 5, 7]


def test_large_values_are_released_in_their_place(wire: Wire) -> None:
    slot = new_slot(wire.recorder)
    wire.op(slot)
    wire.recorder.release_now(slot)
    assert new_slot(wire.recorder) == slot
    wire.op(slot)
    wire.recorder.flush()
    assert wire.commands == [OP, slot, commands.RELEASE, [slot], OP, slot]


def test_there_is_a_bound_on_slots() -> None:
    recorder = Wire(max_handles=3).recorder
    slots = [new_slot(recorder) for _ in range(3)]
    with pytest.raises(LimitExceededError, match="SKYPROXY_MAX_HANDLES"):
        new_slot(recorder)
    drop(recorder, [slots[1]])
    assert new_slot(recorder) == slots[1]


def test_buffers_stay_with_their_commands(wire: Wire) -> None:
    for number in range(3):
        wire.recorder.append_with_buffer(bytes([number]), commands.UPLOAD, number, [], [])
    wire.recorder.flush()
    wire.recorder.append_with_buffer(b"last", commands.UPLOAD, 9, [], [])
    wire.recorder.flush()
    assert [message.buffers for message in wire.sent] == [(b"\0", b"\1", b"\2"), (b"last",)]


def test_small_uploads_leave_by_themselves_when_they_are_many(wire: Wire) -> None:
    piece = bytes(60_000)
    for number in range(100):
        wire.recorder.append_with_buffer(piece, commands.UPLOAD, number, [], [])
        assert sum(map(len, wire.recorder._buffers)) < 2 << 20
    assert len(wire.sent) > 2


def test_commands_leave_by_themselves_when_they_are_many() -> None:
    wire = Wire(max_batch_commands=8, max_loop_batch_commands=32)
    for slot in range(2000):
        wire.op(slot)
        if len(wire.recorder.stream) > wire.recorder.limit:
            wire.recorder.send_some()
        assert len(wire.recorder.stream) <= 4 * 32 + 2
    wire.recorder.flush()
    streams: list[int] = []
    for message in wire.sent:
        # A batch that came before travels without its commands.
        streams += [message.sequence]
    assert streams == list(range(1, len(wire.sent) + 1))
    assert wire.recorder.ops == 2000


def test_a_wait_for_room_ends_with_the_ack() -> None:
    wire = Wire(max_in_flight_batches=1)
    full = threading.Event()

    def record() -> None:
        for slot in range(5):
            wire.op(slot)
            if slot == 2:
                full.set()
            wire.recorder.flush()

    thread = threading.Thread(target=record)
    thread.start()
    assert full.wait(10)
    while thread.is_alive():
        wire.ack()
        thread.join(0.001)
    assert wire.commands == [item for slot in range(5) for item in (OP, slot)]


def test_a_wait_for_room_ends_with_the_session() -> None:
    wire = Wire(max_in_flight_bytes=0)
    wire.op(1)
    wire.recorder.flush()
    errors: list[BaseException] = []

    def record() -> None:
        wire.op(2)
        try:
            wire.recorder.flush()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=record)
    thread.start()
    wire.recorder.end(SessionLostError("gone"))
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(SessionLostError, match="gone"):
        wire.recorder.flush()
    with pytest.raises(SessionLostError, match="gone"):
        wire.recorder.flush()
    assert len(errors) <= 1


def test_housekeeping_never_waits_for_room_nor_for_another_thread() -> None:
    wire = Wire(max_in_flight_bytes=0)
    wire.op(1)
    assert wire.recorder.flush_unless_busy()
    wire.op(2)
    assert not wire.recorder.flush_unless_busy()  # there is no room
    assert wire.commands == [OP, 1]
    wire.ack()
    assert wire.recorder.flush_unless_busy()
    assert wire.commands == [OP, 1, OP, 2]
    wire.ack()
    wire.op(3)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with wire.recorder._lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    assert not wire.recorder.flush_unless_busy()
    assert wire.commands == [OP, 1, OP, 2]
    done.set()
    thread.join(10)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_batch_is_sent_again_and_only_once(wire: Wire, when: str) -> None:
    def interrupt(message: Any) -> None:
        wire.before_send = lambda message: None
        if when == "after":
            wire.sent.append(message)
        raise KeyboardInterrupt

    wire.op(1)
    wire.recorder.append_with_buffer(b"x", commands.UPLOAD, 2, [], [])
    wire.before_send = interrupt
    with pytest.raises(KeyboardInterrupt):
        wire.recorder.flush()
    wire.op(3)
    wire.recorder.flush()
    assert wire.commands == [OP, 1, commands.UPLOAD, 2, [], [], OP, 3]
    assert [message.sequence for message in wire.sent] == [1, 2]
    assert [message.buffers for message in wire.sent] == [(b"x",), ()]


def test_a_send_that_failed_for_good_says_so_at_every_flush(wire: Wire) -> None:
    def fail(message: Any) -> None:
        raise SessionLostError("cut")

    wire.before_send = fail
    wire.op(1)
    for _ in range(2):
        with pytest.raises(SessionLostError, match="cut"):
            wire.recorder.flush()


def test_several_threads_record_whole_commands() -> None:
    wire = Wire(max_in_flight_batches=10_000)

    def record(first: int) -> None:
        for slot in range(first, first + 500):
            wire.op(slot)
            if slot % 7 == 0:
                wire.recorder.flush()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(record, range(0, 4000, 1000)))
    wire.recorder.flush()
    stream = wire.commands
    assert set(stream[::2]) == {OP}
    slots = stream[1::2]
    assert len(slots) == len(set(slots)) == 2000
    for n in range(4):
        own = [slot for slot in slots if slot // 1000 == n]
        assert own == sorted(own)


def test_a_forked_child_can_use_nothing_and_waits_for_nothing(wire: Wire) -> None:
    wire.recorder._lock.acquire()  # as if held by a thread of the parent
    wire.op(1)
    errors: list[BaseException] = []

    def use() -> None:
        try:
            wire.recorder.flush()
        except SessionLostError as error:
            errors.append(error)

    wire.recorder.abandon(SessionLostError("the parent's"))
    thread = threading.Thread(target=use)
    thread.start()
    thread.join(10)
    assert len(errors) == 1


def test_a_line_that_is_missing_costs_the_lines_of_one_batch_and_makes_none_wrong() -> None:
    wire = Wire(max_batch_commands=8, max_loop_batch_commands=8)
    batches: list[Any] = []
    wire.before_send = lambda message: batches.append(wire.recorder.sent(message.sequence))
    for slot in range(200):
        wire.op(slot)
        if slot == 50:
            del wire.recorder.lines[-2:]  # Ctrl-C struck between the command and its line
        if len(wire.recorder.stream) > wire.recorder.limit:
            wire.recorder.send_some()
    wire.recorder.flush()
    out_of_step = [batch for batch in batches if len(batch.lines) != len(batch.stream)]
    assert len(out_of_step) == 1
    for batch in batches:
        if batch not in out_of_step:
            assert batch.lines[1::2] == batch.stream[1::2]
    sent = [item for batch in batches for item in batch.stream]
    assert sent == [item for slot in range(200) for item in (OP, slot)]


def test_free_slots_are_taken_together_or_not_at_all(wire: Wire) -> None:
    recorder, handle = wire.recorder, SimpleNamespace(slot=0)
    slots = []
    for _ in range(3):
        recorder.take_slot(handle)
        slots.append(handle.slot)
    drop(recorder, slots)
    before = sorted(recorder.free)
    assert recorder.take_free_slots(4) == []
    assert sorted(recorder.free) == before
    assert recorder.take_free_slots(2) == before[:2]
    assert recorder.free == before[2:]


def test_what_is_emitted_is_sent_when_it_is_due() -> None:
    sent: list[Any] = []
    recorder = Recorder(sent.append, lambda: (0, 0), Settings())
    recorder.widths[OP] = 1
    for number in range(recorder.limit):
        recorder.emit((OP, number))
        recorder.emit_line((None, 0))
        recorder.send_if_due()
    assert sent
    assert recorder.unsent + sum(len(batch.stream) for batch in sent) == 2 * recorder.ops
    start, first_line = recorder.unsent, recorder.unsent_lines
    recorder.emit((OP, -1))
    recorder.emit_line((None, 7))
    assert recorder.recorded(start, recorder.unsent, first_line) == ([OP, -1], [None, 7])


def test_batches_grow_until_the_program_waits_or_pauses(wire: Wire) -> None:
    recorder, slots = wire.recorder, iter(range(100_000))

    def run_on() -> None:
        while len(recorder.stream) <= recorder.limit:
            wire.op(next(slots))
        recorder.send_some()
        wire.ack()

    first = recorder.limit
    for _ in range(2):
        run_on()
    assert recorder.limit == 4 * first
    recorder.flush()  # a value was asked for, and is not waited for
    wire.ack()
    wire.op(next(slots))
    recorder.flush()
    assert recorder.limit == 4 * first
    recorder.reset_batch_limit()  # it is waited for
    assert recorder.limit == first
    run_on()
    assert recorder.flush_unless_busy()  # nothing has come for a while, and the worker has done all that it had
    assert recorder.limit == first
