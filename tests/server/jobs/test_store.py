"""All jobs of a worker: whose they are, how many, and what the next worker finds."""

from __future__ import annotations

import dataclasses
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyproxy.errors import ConfigurationError, LimitExceededError
from skyproxy_server.jobs.job import PAYLOAD, WorkerJob
from skyproxy_server.jobs.records import (
    CANCELLED,
    FAILED,
    LOST,
    PREEMPTED,
    RUNNING,
    SUCCEEDED,
    JobRecord,
    asked_record,
    owner_folder,
)
from skyproxy_server.jobs.store import Jobs
from tests.server.jobs.programs import (
    LONG,
    ME,
    OTHER,
    PATIENCE_SECONDS,
    limits,
    payload_of,
    submit,
    text_of,
    wait_for_text,
)

SAVES = """
import os, signal, sys, time
from pathlib import Path
place = Path(os.environ["SKYPROXY_CHECKPOINT_DIR"]) / "saved"
if place.exists():
    print("again", os.environ["SKYPROXY_RESTART_COUNT"], place.read_text(), flush=True)
    sys.exit(0)
def save(*_):
    place.write_text("state")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
time.sleep(600)
"""
SAVES_SLOWLY = """
import os, signal, sys, time
def save(*_):
    print("saving", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("begun", flush=True)
time.sleep(600)
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    store = Jobs(tmp_path / "jobs", limits(job_grace_seconds=0.1))
    yield store
    store.close()


def ended(job: WorkerJob) -> WorkerJob:
    assert job.wait(PATIENCE_SECONDS)
    return job


def test_another_tokens_job_is_not_there(jobs: Jobs, tmp_path: Path) -> None:
    submit(jobs, payload_of(tmp_path, LONG), name="mine")
    for ask in (jobs.find, jobs.cancel, jobs.remove):
        with pytest.raises(LookupError, match="none of this token"):
            ask(OTHER, "mine")
    assert jobs.rows(OTHER) == []
    assert jobs.find(ME, "mine").is_running
    assert submit(jobs, payload_of(tmp_path, ""), OTHER, name="mine").record.client == OTHER


def test_a_preempted_job_saves_its_state_and_goes_on_with_the_next_worker(tmp_path: Path) -> None:
    before = Jobs(tmp_path / "jobs", limits())
    job = submit(before, payload_of(tmp_path, SAVES), name="mine")
    wait_for_text(job, "begun")
    before.close()
    assert (job.record.state, job.record.exit_code) == (PREEMPTED, 143)
    after = Jobs(tmp_path / "jobs", limits())
    try:
        again = ended(after.find(ME, "mine"))
        assert (again.record.state, again.record.preemptions, again.record.restarts) == (SUCCEEDED, 1, 0)
        assert "again 1 state" in text_of(again)
        assert text_of(again).startswith("begun")
    finally:
        after.close()


def test_a_job_that_is_cancelled_while_its_worker_ends_does_not_go_on_with_the_next_one(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    before = Jobs(tmp_path / "jobs", limits())
    job = submit(before, payload_of(tmp_path, SAVES_SLOWLY, str(gate)), name="mine")
    wait_for_text(job, "begun")
    before.preempt()
    wait_for_text(job, "saving")
    before.cancel(ME, "mine")
    gate.touch()
    before.close()
    assert job.record.state == CANCELLED
    after = Jobs(tmp_path / "jobs", limits())
    try:
        assert ended(after.find(ME, "mine")).record.state == CANCELLED
    finally:
        after.close()


@pytest.mark.parametrize(("max_restarts", "state"), [(0, LOST), (1, SUCCEEDED)])
def test_a_job_of_a_worker_that_died_is_lost_or_started_again(max_restarts: int, state: str, tmp_path: Path) -> None:
    _leave_behind(tmp_path, payload_of(tmp_path, "print('here')\n"), max_restarts=max_restarts)
    jobs = Jobs(tmp_path / "jobs", limits())
    try:
        job = ended(jobs.find(ME, "mine"))
        assert (job.record.state, job.record.restarts) == (state, max_restarts)
        assert ("here" in text_of(job)) == (state == SUCCEEDED)
    finally:
        jobs.close()


def _leave_behind(tmp_path: Path, payload: bytes, **asked: object) -> Path:
    """A job as a worker leaves it that is killed while it runs."""
    folder = owner_folder(tmp_path / "jobs", ME.name) / "mine"
    folder.mkdir(parents=True)
    (folder / "payload").write_bytes(payload)
    asked_record({"name": "mine", "kind": "script", "title": "", **asked}, ME, 5.0).save(folder)
    return folder


def test_an_ended_job_keeps_its_status_and_log(tmp_path: Path) -> None:
    before = Jobs(tmp_path / "jobs", limits())
    ended(submit(before, payload_of(tmp_path, "print('here')\nraise SystemExit(2)\n"), name="mine"))
    before.close()
    after = Jobs(tmp_path / "jobs", limits())
    try:
        job = after.find(ME, "mine")
        assert (job.record.state, job.record.exit_code, text_of(job)) == (FAILED, 2, "here\n")
    finally:
        after.close()


def test_a_job_that_ended_on_a_full_disk_does_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = JobRecord.save

    def save_if_there_is_room(record: JobRecord, folder: Path) -> None:
        if record.has_ended and (folder / PAYLOAD).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        save(record, folder)

    monkeypatch.setattr(JobRecord, "save", save_if_there_is_room)
    jobs = Jobs(tmp_path / "jobs", limits())
    job = ended(submit(jobs, payload_of(tmp_path, "print('once')"), name="a", max_restarts=3))
    assert job.record.state == SUCCEEDED
    jobs.close()
    after = Jobs(tmp_path / "jobs", limits())
    found = after.find(ME, "a")
    assert (found.record.state, found.is_running, text_of(found)) == (SUCCEEDED, False, "once\n")
    after.close()


def test_what_is_no_job_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    folder = _leave_behind(tmp_path, b"")
    strange = owner_folder(tmp_path / "jobs", OTHER.name)
    strange.mkdir()
    os.rename(folder, strange / "mine")  # where only another token's lie
    (tmp_path / "jobs" / "file").write_text("x")
    (strange / "empty").mkdir()
    (strange / ".arriving-half").mkdir()
    jobs = Jobs(tmp_path / "jobs", limits())
    try:
        assert jobs.rows(None) == []
        assert (strange / "mine" / "job.json").exists()
        assert not (strange / ".arriving-half").exists()
    finally:
        jobs.close()


def test_two_workers_do_not_share_a_folder(jobs: Jobs, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="another worker"):
        Jobs(tmp_path / "jobs", limits())


def test_a_name_is_taken_and_free_again_when_its_job_is_removed(jobs: Jobs, tmp_path: Path) -> None:
    ended(submit(jobs, payload_of(tmp_path, ""), name="mine"))
    with pytest.raises(LimitExceededError, match="already"):
        submit(jobs, payload_of(tmp_path, ""), name="mine")
    folder = jobs.find(ME, "mine").folder
    jobs.remove(ME, "mine")
    assert not folder.exists()
    ended(submit(jobs, payload_of(tmp_path, ""), name="mine"))


def test_a_running_job_cannot_be_removed(jobs: Jobs, tmp_path: Path) -> None:
    submit(jobs, payload_of(tmp_path, LONG), name="mine")
    with pytest.raises(LimitExceededError, match="skyproxy cancel mine"):
        jobs.remove(ME, "mine")


def test_jobs_that_run_are_bounded_a_token(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs", limits(max_running_jobs=1, job_grace_seconds=0.1))
    try:
        first = submit(jobs, payload_of(tmp_path, LONG), name="first")
        with pytest.raises(LimitExceededError, match="SKYPROXY_MAX_RUNNING_JOBS"):
            submit(jobs, payload_of(tmp_path, ""))
        submit(jobs, payload_of(tmp_path, ""), OTHER)
        jobs.cancel(ME, "first")
        ended(first)
        submit(jobs, payload_of(tmp_path, ""))
    finally:
        jobs.close()


def test_a_job_on_its_way_counts_and_holds_its_name_until_it_is_given_up(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs", limits(max_running_jobs=1))
    try:
        asked = {"name": "mine", "kind": "script", "title": "", "payload_bytes": 3}
        incoming = jobs.begin(ME, asked)
        for name in ("mine", "other"):
            with pytest.raises(LimitExceededError):
                jobs.begin(ME, {**asked, "name": name})
        incoming.discard()
        jobs.begin(ME, asked).discard()
        assert not list(owner_folder(tmp_path / "jobs", ME.name).iterdir())
    finally:
        jobs.close()


@pytest.mark.parametrize("change", [{"max_jobs": 2}, {"kept_job_seconds": -1.0}, {"max_kept_job_bytes": 0}])
def test_ended_jobs_are_kept_within_bounds_the_newest_longest(change: dict[str, float], tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs", limits(**change))
    try:
        for name in ("one", "two", "three"):
            ended(submit(jobs, payload_of(tmp_path, "print('x' * 100)\n"), name=name))
        left = submit(jobs, payload_of(tmp_path, LONG), name="runs")  # making room is done with each start
        kept = {str(row["name"]) for row in jobs.rows(ME)}
        assert kept == ({"three", "runs"} if "max_jobs" in change else {"runs"})
        assert left.is_running
        left.stop(CANCELLED)
    finally:
        jobs.close()


def test_a_revoked_tokens_jobs_end(jobs: Jobs, tmp_path: Path) -> None:
    mine, other = submit(jobs, payload_of(tmp_path, LONG)), submit(jobs, payload_of(tmp_path, LONG), OTHER)
    jobs.end_refused(lambda client: "revoked" if client.name == OTHER.name else "")
    assert ended(other).record.state == CANCELLED
    assert mine.is_running


def test_a_worker_with_a_running_job_is_not_idle(jobs: Jobs, tmp_path: Path) -> None:
    job = submit(jobs, payload_of(tmp_path, LONG))
    report = jobs.add_jobs_to({"idle_seconds": 500.0, "sessions": 0})
    assert (report["jobs_running"], report["idle_seconds"], report["sessions"]) == (1, 0.0, 0)
    job.stop(CANCELLED)
    ended(job)
    assert jobs.add_jobs_to({"idle_seconds": 500.0})["jobs_running"] == 0
    assert jobs.add_jobs_to({"idle_seconds": 0.0})["idle_seconds"] == 0.0


def test_the_processes_of_jobs_are_known(jobs: Jobs, tmp_path: Path) -> None:
    job = submit(jobs, payload_of(tmp_path, LONG))
    wait_for_text(job, "begun")
    assert job.process_id is not None
    with jobs.spared() as is_spared:
        assert is_spared(job.process_id)
        assert not is_spared(os.getpid())


def test_rows_have_the_ends_of_logs_where_they_are_asked_for(jobs: Jobs, tmp_path: Path) -> None:
    ended(submit(jobs, payload_of(tmp_path, "for n in range(100): print('line', n)\n"), name="mine"))
    (row,) = jobs.rows(None, tails=True)
    assert (row["client"], row["tail"][-1], len(row["tail"])) == ("me", "line 99", 40)  # type: ignore[index, arg-type]
    assert "tail" not in jobs.rows(ME)[0]


def test_a_folder_of_its_own_comes_with_the_first_job_and_goes_with_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    jobs = Jobs(None, limits())
    assert list((tmp_path / "temporary").iterdir()) == []
    ended(submit(jobs, payload_of(tmp_path, "print('done')"), name="mine"))
    assert len(list((tmp_path / "temporary").iterdir())) == 1
    jobs.close()
    jobs.close()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_no_job_begins_while_the_worker_ends(jobs: Jobs, tmp_path: Path) -> None:
    payload = payload_of(tmp_path, "")
    incoming = jobs.begin(ME, {"name": "late", "kind": "script", "title": "", "payload_bytes": len(payload)})
    incoming.add(payload)
    jobs.preempt()
    with pytest.raises(LimitExceededError, match="shutting down"):
        jobs.start(incoming)
    incoming.discard()


def test_a_record_has_the_token_and_not_its_secret(tmp_path: Path) -> None:
    record = asked_record({"name": "a", "kind": "script", "title": ""}, dataclasses.replace(ME, address="::1"), 5.0)
    assert (record.state, record.client.address) == (RUNNING, "::1")
