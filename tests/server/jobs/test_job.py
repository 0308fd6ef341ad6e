"""One job: its process, its ends, its restarts."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyproxy.runtime.descendants import JOB_MARK_VARIABLE
from skyproxy_server.jobs.job import RESULT
from skyproxy_server.jobs.records import CANCELLED, FAILED, SUCCEEDED
from skyproxy_server.jobs.store import Jobs
from tests.integration.programs import wait_for
from tests.server.jobs.programs import LONG, PATIENCE_SECONDS, limits, payload_of, submit, text_of, wait_for_text


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    store = Jobs(tmp_path / "jobs", limits(job_grace_seconds=0.2))
    yield store
    store.close()


def test_a_job_runs_to_its_end_and_its_output_stays(jobs: Jobs, tmp_path: Path) -> None:
    text = "import sys\nprint('out', sys.argv[1])\nprint('err', file=sys.stderr)\nsys.exit(3)\n"
    job = submit(jobs, payload_of(tmp_path, text, "one"))
    assert job.wait(PATIENCE_SECONDS)
    assert (job.record.state, job.record.exit_code, job.record.signal) == (FAILED, 3, None)
    assert sorted(text_of(job).split("\n")) == ["", "err", "out one"]


def test_a_signal_is_named(jobs: Jobs, tmp_path: Path) -> None:
    job = submit(jobs, payload_of(tmp_path, "import os\nos.kill(os.getpid(), 11)\n"))
    assert job.wait(PATIENCE_SECONDS)
    assert (job.record.state, job.record.exit_code, job.record.signal) == (FAILED, None, signal.SIGSEGV)


def test_a_job_that_dies_is_started_again_with_its_checkpoints(jobs: Jobs, tmp_path: Path) -> None:
    text = """
import os, sys
from pathlib import Path
place = Path(os.environ["SKYPROXY_CHECKPOINT_DIR"]) / "step"
step = int(place.read_text()) if place.exists() else 0
place.write_text(str(step + 1))
print("count", os.environ["SKYPROXY_RESTART_COUNT"], "step", step)
sys.exit(1 if step < 2 else 0)
"""
    job = submit(jobs, payload_of(tmp_path, text), max_restarts=5)
    assert job.wait(PATIENCE_SECONDS)
    assert (job.record.state, job.record.restarts) == (SUCCEEDED, 2)
    assert [line for line in text_of(job).split("\n") if line.startswith("count")] == [
        "count 0 step 0",
        "count 1 step 1",
        "count 2 step 2",
    ]


def test_restarts_are_bounded(jobs: Jobs, tmp_path: Path) -> None:
    job = submit(jobs, payload_of(tmp_path, "print('begun')\nraise SystemExit(1)\n"), max_restarts=1)
    assert job.wait(PATIENCE_SECONDS)
    assert (job.record.state, job.record.restarts, text_of(job).count("begun")) == (FAILED, 1, 2)


def test_a_cancelled_job_ends_with_all_that_it_has_started(jobs: Jobs, tmp_path: Path) -> None:
    text = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(f"child {child.pid};", flush=True)
time.sleep(600)
"""
    job = submit(jobs, payload_of(tmp_path, text), max_restarts=9)
    wait_for_text(job, ";")
    child = int(text_of(job).split()[1].rstrip(";"))
    job.stop(CANCELLED)
    assert job.wait(PATIENCE_SECONDS)
    assert (job.record.state, job.record.signal) == (CANCELLED, signal.SIGKILL)
    wait_for(lambda: not _is_alive(child), "the child has ended", PATIENCE_SECONDS)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_a_job_that_obeys_is_not_killed(tmp_path: Path) -> None:
    store = Jobs(tmp_path / "jobs", limits())
    try:
        text = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(7))\nprint('begun', flush=True)\n"
        job = submit(store, payload_of(tmp_path, text + "time.sleep(600)\n"))
        wait_for_text(job, "begun")
        job.stop(CANCELLED)
        assert job.wait(PATIENCE_SECONDS)
        assert (job.record.state, job.record.exit_code) == (CANCELLED, 7)
    finally:
        store.close()


def test_a_job_waiting_for_its_next_start_can_be_cancelled(tmp_path: Path) -> None:
    store = Jobs(tmp_path / "jobs", limits(job_restart_seconds=3600.0))
    try:
        job = submit(store, payload_of(tmp_path, "raise SystemExit(1)\n"), max_restarts=3)
        wait_for_text(job, "start 1 of 3 again")
        job.stop(CANCELLED)
        assert job.wait(PATIENCE_SECONDS)
        assert (job.record.state, job.record.restarts) == (CANCELLED, 1)
    finally:
        store.close()


def test_a_job_that_closes_its_output_runs_on_to_its_end(jobs: Jobs, tmp_path: Path) -> None:
    text = "import os, sys\nprint('last', flush=True)\nos.close(1)\nos.close(2)\nos._exit(4)\n"
    job = submit(jobs, payload_of(tmp_path, text))
    assert job.wait(PATIENCE_SECONDS)
    assert (job.record.exit_code, text_of(job)) == (4, "last\n")


def test_a_process_that_it_leaves_behind_neither_keeps_it_running_nor_lives_on(jobs: Jobs, tmp_path: Path) -> None:
    text = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("left", left.pid, flush=True)
"""
    job = submit(jobs, payload_of(tmp_path, text))
    assert job.wait(PATIENCE_SECONDS)
    assert job.record.state == SUCCEEDED
    left = int(text_of(job).split()[1])
    wait_for(lambda: not _is_alive(left), "what it has left has ended", PATIENCE_SECONDS)


def test_the_variables_of_a_job_are_its_own(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPROXY_TOKEN", "a-secret-of-the-worker")
    monkeypatch.setenv("COMPUTE_POOL", "{}")
    text = "import os\nfor n in ('SKYPROXY_JOB', 'MINE', 'SKYPROXY_TOKEN', 'COMPUTE_POOL'): print(os.environ.get(n))\n"
    job = submit(jobs, payload_of(tmp_path, text), name="named", env={"MINE": "yes", "SKYPROXY_JOB": "no"})
    assert job.wait(PATIENCE_SECONDS)
    assert text_of(job).split() == ["named", "yes", "None", "None"]


def test_its_payload_goes_when_it_has_ended_and_a_result_is_there_only_where_it_left_one(
    jobs: Jobs, tmp_path: Path
) -> None:
    text = "import os\nopen(os.environ['SKYPROXY_JOB_FOLDER'] + '/result', 'w').write('x')\n"
    job, other = submit(jobs, payload_of(tmp_path, text)), submit(jobs, payload_of(tmp_path, ""))
    assert job.wait(PATIENCE_SECONDS)
    assert other.wait(PATIENCE_SECONDS)
    assert not (job.folder / "payload").exists()
    assert [job.row()["has_result"], other.row()["has_result"]] == [True, False]
    assert (job.folder / RESULT).read_text() == "x"


def test_a_job_that_spoils_its_folder_stands_still_all_the_same(jobs: Jobs, tmp_path: Path) -> None:
    spoiling = "import os\nos.chdir(os.environ['SKYPROXY_JOB_FOLDER'])\nos.remove('payload')\nos.mkdir('payload')\n"
    job = submit(jobs, payload_of(tmp_path, spoiling))
    assert job.wait(PATIENCE_SECONDS)
    assert job.record.state == SUCCEEDED


def test_bytes_that_are_no_job_end_with_a_traceback(jobs: Jobs) -> None:
    job = submit(jobs, b"\xc1nonsense")
    assert job.wait(PATIENCE_SECONDS)
    assert job.record.state == FAILED
    assert "Traceback" in text_of(job)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
@pytest.mark.parametrize("own_session", [False, True])
def test_a_job_ends_with_its_worker_and_so_does_what_it_has_started(tmp_path: Path, own_session: bool) -> None:
    """The kernel ends it, also where the worker was killed; a process that it has left behind ends the others."""
    payload = tmp_path / "payload"
    text = "import subprocess, sys, os\n"
    text += f"subprocess.Popen([sys.executable, '-c', {LONG!r}], start_new_session={own_session})\nos.wait()\n"
    payload.write_bytes(payload_of(tmp_path, text))
    (tmp_path / "worker.py").write_text(
        "import subprocess, sys, os\n"
        "job = subprocess.Popen([sys.executable, '-m', 'skyproxy.jobs.begin', sys.argv[1], str(os.getpid())])\n"
        "job.wait()\n"
    )
    worker = subprocess.Popen(
        [sys.executable, str(tmp_path / "worker.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, JOB_MARK_VARIABLE: secrets.token_hex(16)},
    )
    assert worker.stdout is not None
    try:
        assert worker.stdout.readline() == b"begun\n"
        worker.kill()
        assert worker.stdout.read() == b""  # the pipe ends when all who have it do
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
