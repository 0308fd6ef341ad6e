"""The log of a protected session: what it has, and what takes its place."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Sequence
from skyproxy.session.batch_log import BatchLog
from skyproxy.torch_codec import describe, encode_description
from tests.server.snapshots.sessions import ADD, ADD_, CALL, DO, OPS, RAND, Session, T

UPLOAD = commands.UPLOAD
FLOATS = encode_description(describe(torch.zeros(3)))


@pytest.fixture
def log() -> BatchLog:
    made = BatchLog(1 << 20, 1 << 20)
    made.begin(5)
    made.add(5, Batch(Sequence(5), [commands.DO, "save", []]))
    made.commit(5)
    return made


def add(log: BatchLog, *sequences: int) -> None:
    for sequence in sequences:
        log.add(sequence, Batch(Sequence(sequence), [commands.DO, "add", [sequence]]))


def test_the_log_has_what_follows_the_snapshot(log: BatchLog) -> None:
    add(log, 6, 7, 7, 8)
    assert [sequence for sequence, _, _ in log.batches_after(5, 8)] == [6, 7, 8]
    assert [sequence for sequence, _, _ in log.batches_after(5, 7)] == [6, 7]


def test_a_durable_snapshot_takes_the_place_of_the_log_before_it(log: BatchLog) -> None:
    add(log, 6)
    log.begin(7)
    add(log, 7, 8)
    assert log.starts() == [7, 5]
    before = log.byte_count
    log.commit(7)
    assert log.starts() == [7]
    assert log.byte_count < before
    assert [sequence for sequence, _, _ in log.batches_after(7, 8)] == [8]


def test_what_cannot_be_repeated_is_mended_by_a_later_snapshot_only(log: BatchLog) -> None:
    log.puncture(6, "a function ran")
    log.begin(7)
    assert log.hole_after(5) is not None
    assert log.hole_after(7) is None
    log.commit(7)
    assert log.hole_after(7) is None


def test_a_snapshot_that_was_refused_changes_nothing(log: BatchLog) -> None:
    add(log, 6)
    log.begin(7)
    add(log, 7)
    log.fail(7)
    assert log.starts() == [5]
    assert [sequence for sequence, _, _ in log.batches_after(5, 7)] == [6, 7]


def test_an_upload_is_kept_until_a_snapshot_has_it(log: BatchLog) -> None:
    kept = log.keep(1, b"x" * 1000)
    kept.job = "job"
    assert log.jobs_after(5) == ["job"]
    log.announced(1, 6)
    log.begin(7)
    assert log.byte_count >= 1000
    assert (log.jobs_after(5), log.jobs_after(7)) == (["job"], [])
    log.commit(7)
    assert log.byte_count < 1000


def test_a_snapshot_that_was_refused_is_not_asked_for_again(log: BatchLog) -> None:
    """Another worker might take it, and give up for it the older one, from which alone the session can go on."""
    log.begin(6)
    log.add(6, Batch(Sequence(6), [commands.CALL, 9, "save_snapshot", ["s"]]))
    add(log, 7)
    log.fail(6)
    assert [(number, message) for number, message, _ in log.batches_after(5, 7)][0] == (6, Batch(Sequence(6), []))
    assert [sequence for sequence, _, _ in log.batches_after(5, 7)] == [6, 7]


# --- the log of a real session ---------------------------------------------------------------------------------------


class LoggedSession(RuleBasedStateMachine):
    """A session that ends at any batch, and goes on from a snapshot and the log, has the bits of one that never did.

    The sessions and the volume are a worker's own; what is sent to them goes through the log as it is on its way.
    """

    def __init__(self) -> None:
        super().__init__()
        # Hundreds of snapshots wait for a disk for minutes.
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.root = Path(self._folder.name)
        self.direct = Session(self.root / "direct", ops=False)
        self.worker = Session(self.root / "volume", ops=False)
        self.log = BatchLog(1 << 30, 1 << 30)
        self.begun: list[int] = []
        self.uploads: dict[int, int | None] = {}
        self.transfers = self.slot = 0
        self._snapshot()
        self._commit()
        definitions = [item for definition in OPS for item in definition]
        self._send(*definitions, DO, "manual_seed", [["cpu", None], 5])
        seeds = b"".join(struct.pack("<f", number) for number in (1.0, 2.5, -3.0))
        for _ in range(3):
            self.slot += 1
            self._send(UPLOAD, self.slot, FLOATS, ["cpu", None], buffers=(seeds,))

    def _send(self, *stream: Any, buffers: tuple[bytes, ...] = ()) -> None:
        """Send a batch to both; the log has it, and a second time changes nothing."""
        batch = Batch(Sequence(self.worker.sequence + 1), list(stream), buffers)
        for _ in range(2):
            self.log.add(batch.sequence, batch)
        self.worker.run(*stream, buffers=buffers)
        self.direct.run(*stream, buffers=buffers)

    def _snapshot(self, *, refused: bool = False) -> None:
        sequence = self.worker.sequence + 1
        self.log.begin(sequence)
        self.log.add(sequence, Batch(Sequence(sequence), [CALL, 77, "save_snapshot", ["s"]]))
        if refused:
            self.worker.slots[99] = object()  # what no snapshot can hold
        answer = self.worker.call("save_snapshot", "s")
        self.worker.slots.pop(99, None)
        assert ("snapshot" in answer) != refused
        self.direct.run(CALL, 77, "synchronize", [])
        if refused:
            self.log.fail(sequence)
        else:
            self.begun.append(sequence)

    def _commit(self) -> None:
        self.log.commit(self.begun[-1])
        self.begun.clear()

    @rule(a=st.integers(1, 6), b=st.integers(1, 6), kind=st.sampled_from([ADD, ADD_, RAND, T]))
    def compute(self, a: int, b: int, kind: int) -> None:
        a, b = min(a, self.slot), min(b, self.slot)
        if kind == ADD_:
            self._send(ADD_, a, b)
            return
        self.slot = min(self.slot + 1, 6)
        operands = [a, b] if kind == ADD else [a]
        self._send(kind, *operands, self.slot)

    @rule(refused=st.booleans())
    def snapshot(self, refused: bool) -> None:
        if not self.begun:
            self._snapshot(refused=refused)

    @rule()
    def commit(self) -> None:
        if self.begun:
            self._commit()

    @rule(size=st.integers(1, 1000), is_announced=st.booleans())
    def upload(self, size: int, is_announced: bool) -> None:
        self.transfers += 1
        self.log.keep(self.transfers, bytes(size)).job = self.transfers
        self.uploads[self.transfers] = self.log.last if is_announced else None
        if is_announced:
            self.log.announced(self.transfers, self.log.last)

    @rule()
    def puncture(self) -> None:
        """What happened cannot be done again, until a later snapshot."""
        sequence = self.log.last
        self.log.puncture(sequence, "a function ran")
        for start in self.log.starts():
            assert (self.log.hole_after(start) is not None) == (start < sequence)
        self._snapshot_again()

    def _snapshot_again(self) -> None:
        if self.begun:
            self._commit()
        self._snapshot()
        self._commit()
        assert self.log.hole_after(self.log.starts()[0]) is None

    @rule(which=st.integers(0, 1))
    def worker_ends(self, which: int) -> None:
        """Another worker goes on from any snapshot that there is, and that the log reaches back to."""
        numbers = {row["sequence"]: str(row["snapshot"]) for row in self.worker.snapshots.rows("s")}
        starts = [start for start in self.log.starts() if start in numbers]
        start, last = starts[which % len(starts)], self.worker.sequence
        self.worker.executor.end()
        self.worker = Session(self.root / "volume", ops=False)
        assert self.worker.call("load_snapshot", "s", numbers[start])["sequence"] == start
        for number, (sequence, message, size) in enumerate(self.log.batches_after(start, last), start + 1):
            assert isinstance(message, Batch)
            assert (sequence, size > 0) == (number, True)
            self.worker.run(*message.stream, buffers=tuple(map(bytes, message.buffers)))
            self.worker.snapshots.finish_writing()
        assert self.worker.sequence == last

    @invariant()
    def both_have_the_same_bits(self) -> None:
        here, there = self.worker.slots, self.direct.slots
        assert here.keys() == there.keys()
        for slot in here:
            if slot:
                assert describe(here[slot]) == describe(there[slot])
                assert torch.equal(here[slot].view(torch.int32), there[slot].view(torch.int32))
                assert _kin(here, slot) == _kin(there, slot)

    @invariant()
    def it_holds_what_follows_the_oldest_snapshot_and_no_more(self) -> None:
        starts = self.log.starts()
        assert starts == sorted(starts, reverse=True)
        entries = list(self.log.batches_after(0, 1 << 60))
        numbers = [sequence for sequence, _, _ in entries]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert numbers[0] <= min(starts) + 1
        assert numbers[-1] == self.log.last
        durable = self.log.durable or 0
        live = [number for number, at in self.uploads.items() if at is None or at > durable]
        assert self.log.jobs_after(durable) == live
        assert self.log.byte_count < sum(size + 500 for _, _, size in entries) + 1000 * len(live)

    def teardown(self) -> None:
        self.worker_ends(0)
        self.both_have_the_same_bits()
        self.worker.executor.end()
        self.direct.executor.end()
        self._folder.cleanup()


def _kin(slots: dict[int, Any], slot: int) -> list[int]:
    """The slots of all that share the memory of one."""
    memory = slots[slot].untyped_storage()._cdata
    return [other for other in slots if other and slots[other].untyped_storage()._cdata == memory]


TestLoggedSession = LoggedSession.TestCase
TestLoggedSession.settings = settings(
    max_examples=10,
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
