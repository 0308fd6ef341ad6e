"""The log of a protected session: what it has, and what takes its place."""

from __future__ import annotations

import pytest

from skyproxy.protocol import commands
from skyproxy.protocol.messages import Batch, Sequence
from skyproxy.session.batch_log import BatchLog


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
    assert [sequence for sequence, _, _ in log.since(5, 8)] == [6, 7, 8]
    assert [sequence for sequence, _, _ in log.since(5, 7)] == [6, 7]


def test_a_durable_snapshot_takes_the_place_of_the_log_before_it(log: BatchLog) -> None:
    add(log, 6)
    log.begin(7)
    add(log, 7, 8)
    assert log.starts() == [7, 5]
    before = log.byte_count
    log.commit(7)
    assert log.starts() == [7]
    assert log.byte_count < before
    assert [sequence for sequence, _, _ in log.since(7, 8)] == [8]


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
    assert [sequence for sequence, _, _ in log.since(5, 7)] == [6, 7]


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
    assert [(number, message) for number, message, _ in log.since(5, 7)][0] == (6, Batch(Sequence(6), []))
    assert [sequence for sequence, _, _ in log.since(5, 7)] == [6, 7]
