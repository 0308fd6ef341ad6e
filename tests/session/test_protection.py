"""A protected session against a model: arbitrary batches, answers, snapshots and ends of workers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import settings

from skyproxy.errors import ConnectError, SessionLostError
from skyproxy.protocol import commands
from skyproxy.protocol.messages import (
    OPERATIONS,
    Warned,
    Welcome,
)
from skyproxy.session import worker_warnings
from skyproxy.session.restoring import NewSession
from skyproxy.transport.base import Transport
from tests.session.protected_session import ProtectedSession, fill, through

TestProtectedSession = ProtectedSession.TestCase
TestProtectedSession.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_operations_that_end_one_worker_after_the_other_end_the_session() -> None:
    session = ProtectedSession()
    session.begin()  # type: ignore[call-arg]
    session.recorder.append(commands.DO, "add", [1])
    session.recorder.flush()
    with pytest.raises(SessionLostError, match="over the same operations"):
        for _ in range(20):
            session.worker.is_dead = True
            session._read()
    assert len(session.workers) < 10


def test_who_waits_for_a_snapshot_hears_of_it_where_its_worker_ended_before_it_could_tell() -> None:
    session = ProtectedSession()
    session.begin()  # type: ignore[call-arg]
    taken: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: taken.append(session.protection.snapshot()), daemon=True)
    asking.start()
    deadline = time.monotonic() + 60
    while not session.worker.saving:
        session.worker.execute(1)
        assert time.monotonic() < deadline
    session.kill(1, True)
    asking.join(60)
    assert [(row["sequence"], row["snapshot"] in session.volume.kept) for row in taken] == [(session.log.durable, True)]
    session.teardown()


def test_a_snapshot_that_was_refused_is_not_asked_of_another_worker() -> None:
    """It would take it, and give up an older one for it that the session still needs."""
    session = ProtectedSession()
    session.begin()  # type: ignore[call-arg]
    session.snapshot(refuses=True)
    session.execute(1)
    session.read()  # refused, and not acknowledged
    session.ask()
    session.snapshot(refuses=False)  # of no use without the answer to what was asked before
    session.kill(0, False)
    session.execute(3)
    session.kill(3, True)  # nothing was heard of all that
    session.teardown()


# --- the bound of the log --------------------------------------------------------------------------------------------


@pytest.fixture
def bounded() -> ProtectedSession:
    """A session whose log holds little, and whose recorder asks for snapshots as a real one does."""
    session = ProtectedSession()
    session.begin()  # type: ignore[call-arg]
    session.log.max_bytes = 10_000
    session.recorder.on_sent = session.protection.on_sent
    return session


def test_at_three_quarters_of_the_bound_a_snapshot_is_asked_for(bounded: ProtectedSession) -> None:
    fill(bounded, 0.7)
    bounded._read()
    assert bounded.protection._pending is None
    fill(bounded, 0.75)
    bounded.recorder.append(commands.DO, "add", [1])
    bounded.added.append(1)
    bounded.recorder.flush()
    assert bounded.protection._pending is not None
    bounded._let_all_through()
    assert bounded.log.byte_count < 0.1 * bounded.log.max_bytes
    assert bounded.protection.snapshots == 2
    bounded.kill(0, True)
    bounded.teardown()


def test_at_the_bound_recording_waits_for_the_snapshot(bounded: ProtectedSession) -> None:
    over = threading.Event()
    sizes: list[int] = []

    def record() -> None:
        for _ in range(200):
            bounded.recorder.append(commands.DO, "add", [1])
            bounded.added.append(1)
            bounded.recorder.flush()
            sizes.append(bounded.log.byte_count)
        over.set()

    thread = threading.Thread(target=record, daemon=True)
    thread.start()
    through(bounded, over)
    thread.join()
    assert max(sizes) <= bounded.log.max_bytes
    assert bounded.protection.snapshots > 2
    bounded.kill(0, True)
    bounded.teardown()


@pytest.mark.parametrize("hangs", [False, True], ids=["refuses", "hangs"])
def test_where_no_snapshot_can_be_taken_the_session_goes_on_unprotected_and_says_so(
    bounded: ProtectedSession, capfd: pytest.CaptureFixture[str], hangs: bool
) -> None:
    bounded.worker.refuses = not hangs
    over = threading.Event()
    if hangs:
        bounded.protection.stall_seconds = 0.01
        bounded.worker.make_durable = lambda: None  # type: ignore[method-assign]

    def record() -> None:
        fill(bounded, 0.75)
        for _ in range(40):
            bounded.recorder.append(commands.DO, "add", [1])
            bounded.added.append(1)
            bounded.recorder.flush()
        over.set()

    thread = threading.Thread(target=record, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not over.wait(0.001):
        bounded._read()
        bounded.worker.execute(1000)
        assert time.monotonic() < deadline
    thread.join()
    assert "is not protected until the next snapshot" in capfd.readouterr().err
    bounded.worker.refuses = False
    bounded.worker.__dict__.pop("make_durable", None)
    bounded._let_all_through()
    bounded.protection._retry_at = 0.0
    bounded.protection.tick()
    bounded._let_all_through()
    assert bounded.log.starts()
    bounded.kill(0, True)  # protected again
    bounded.teardown()


def test_an_upload_that_is_larger_than_the_log_may_be_is_mended_by_a_snapshot(bounded: ProtectedSession) -> None:
    assert bounded.protection.keep_upload(1, memoryview(bytes(10_001))) is None
    bounded.recorder.append(commands.DO, "add", [1])
    bounded.added.append(1)
    bounded.protection.note_upload(1, None)
    start = bounded.log.starts()[0]
    hole = bounded.log.hole_after(start - 1)
    assert hole is not None
    assert "SKYPROXY_MAX_LOG_BYTES" in hole.reason
    bounded.recorder.flush()
    bounded._let_all_through()
    assert bounded.protection.snapshots == 2
    assert bounded.log.hole_after(bounded.log.starts()[0]) is None


# --- what is told once -----------------------------------------------------------------------------------------------


def test_a_warning_that_comes_again_is_no_news(bounded: ProtectedSession) -> None:
    told = bounded.protection.told
    place: dict[str, int] = {"sequence": 7, "position": 3}
    first = Warned("UserWarning", "careful", place)
    assert [told.is_news(first), told.is_news(first)] == [True, False]
    others = [
        Warned("UserWarning", "careful", {**place, "sequence": 8}),
        Warned("UserWarning", "careful", {**place, "graph": 1}),
        Warned("UserWarning", "very careful", place),
        Warned("UserWarning", "careful", None),  # type: ignore[arg-type]  # a worker may send anything
    ]
    assert all(map(told.is_news, others))
    for number in range(worker_warnings._TOLD_WARNINGS + 1):
        told.is_news(Warned("UserWarning", "careful", {"sequence": number, "position": 0}))
    assert len(told._told) <= worker_warnings._TOLD_WARNINGS


# --- a worker that does not answer -----------------------------------------------------------------------------------


def test_another_worker_goes_on_for_one_that_does_not_answer_and_does_not_refuse(bounded: ProtectedSession) -> None:
    attempts: list[str] = []

    def silence(role: str, received: int) -> tuple[Transport, Welcome]:
        attempts.append(role)
        raise ConnectError("no answer within 10 s")

    reconnector = bounded.operations._reconnector
    reconnector._reopen, reconnector.patience_seconds, reconnector.resumes = silence, 1e9, True
    bounded.protection.patience_seconds = 0.0
    bounded.recorder.append(commands.DO, "add", [1])
    bounded.added.append(1)
    bounded.recorder.flush()
    bounded.kill(0, True)
    reconnector.resumes = False
    assert (attempts, len(bounded.workers)) == ([OPERATIONS], 2)
    bounded.teardown()


# --- an end while another worker takes over --------------------------------------------------------------------------


def test_who_ends_the_protection_waits_for_a_worker_that_is_taking_over(bounded: ProtectedSession) -> None:
    protection, opened, goes_on = bounded.protection, threading.Event(), threading.Event()
    open_anew, settled = protection._open_anew, threading.Event()

    def slow(reason: str, stop: threading.Event) -> NewSession:
        opened.set()
        assert goes_on.wait(60)
        return open_anew(reason, stop)

    protection._open_anew = slow
    protection.wait_until_settled()  # at once: nothing happens

    def wait() -> None:
        protection.wait_until_settled()
        settled.set()

    bounded.worker.is_dead = True
    reading = threading.Thread(target=bounded._read, daemon=True)
    reading.start()
    assert opened.wait(60)
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    goes_on.set()
    reading.join(60)
    assert not settled.is_set()  # the bulk connection and the uploads are still missing
    bounded.note_rest()
    assert settled.wait(60)
    waiting.join()
    bounded.teardown()
