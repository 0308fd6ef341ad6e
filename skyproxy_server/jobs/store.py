"""All jobs of a worker: who has which, how many there may be, and what becomes of them when the worker ends."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from skyproxy.errors import ConfigurationError, LimitExceededError
from skyproxy.runtime.descendants import JOB_MARK_VARIABLE
from skyproxy.runtime.scratch import make_scratch, remove_scratch
from skyproxy.settings import Settings
from skyproxy_server import audit
from skyproxy_server.auth import Identity
from skyproxy_server.jobs.incoming import IncomingJob
from skyproxy_server.jobs.job import WorkerJob
from skyproxy_server.jobs.records import CANCELLED, PREEMPTED, JobRecord, asked_record, load_record, owner_folder

logger = logging.getLogger("skyproxy.server")

_LOCK = ".lock"
_ARRIVING = ".arriving-"
_END_SECONDS = 2.0
"""The time beyond its grace in which a job that was killed is gone."""
_MAX_ROWS = 200
_TAIL_BYTES = 4000
_TAIL_LINES = 40


class Jobs:
    """The jobs of a worker.

    Args:
        root: where they lie; ours alone until `close`. None: a folder that comes with the first job, and goes with the
            worker.
        settings: limits.

    Raises:
        ConfigurationError: the folder cannot be used, or another worker uses it.
    """

    def __init__(self, root: Path | None, settings: Settings) -> None:
        self._settings = settings
        self._is_temporary = root is None
        self._root = root.absolute() if root is not None else None
        self._jobs: dict[tuple[str, str], WorkerJob] = {}
        self._arriving: set[tuple[str, str]] = set()
        self._lock = threading.RLock()
        self._spawning = threading.Lock()
        self._closing = False
        self._last_use = time.monotonic()
        self._lock_file = -1
        if self._root is not None:
            self._lock_file = self._claim(self._root)
            self._recover(self._root)

    def _folder(self) -> Path:
        """Return where jobs lie."""
        with self._lock:
            if self._root is None:
                self._root = make_scratch("jobs")
            return self._root

    def _claim(self, root: Path) -> int:
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(f"The folder of jobs {root} cannot be used: {error.strerror}.") from error
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except OSError as error:
            os.close(descriptor)
            raise ConfigurationError(
                f"The folder of jobs {root} is used by another worker. Give each a folder of its own: --jobs"
            ) from error
        return descriptor

    def _recover(self, root: Path) -> None:
        """Take up what a worker before us has left: start again what was preempted, and what may be by its policy."""
        for folder in sorted(root.glob("*/*")):
            if folder.name.startswith(_ARRIVING):
                shutil.rmtree(folder, ignore_errors=True)
                continue
            record = load_record(folder)
            if record is None or owner_folder(root, record.client.name) != folder.parent:
                if folder.is_dir():
                    logger.warning("%s holds no job that can be read; it is left as it is", folder)
                continue
            job = self._jobs[record.client.name, record.name] = self._job(record, folder)
            if job.recover():
                logger.info("job %s is started again", record.name)
                job.start()

    def _job(self, record: JobRecord, folder: Path) -> WorkerJob:
        return WorkerJob(record, folder, self._settings, self._spawning, self._on_end)

    def _on_end(self) -> None:
        self._last_use = time.monotonic()
        if not self._closing:
            self._make_room()

    # --- what clients ask for ----------------------------------------------------------------------------------------

    def begin(self, client: Identity, asked: Mapping[str, Any]) -> IncomingJob:
        """Take note of a job whose bytes are still to come; its name is taken from now on.

        Raises:
            ProtocolError: it cannot be meant.
            LimitExceededError: there is one of that name, or too many run.
        """
        record = asked_record(asked, client, self._settings.job_grace_seconds)
        key = client.name, record.name
        with self._lock:
            if key in self._jobs or key in self._arriving:
                raise LimitExceededError(
                    f"there is a job {record.name!r} already. Choose another name, or remove it: skyproxy jobs remove "
                    f"{record.name}"
                )
            own = [one for one in (*self._arriving, *self._running_keys()) if one[0] == client.name]
            if len(own) >= self._settings.max_running_jobs:
                raise LimitExceededError(
                    f"{len(own)} jobs of this token run or begin already, its limit; SKYPROXY_MAX_RUNNING_JOBS on the "
                    "worker raises it"
                )
            self._arriving.add(key)
        try:
            folder = owner_folder(self._folder(), client.name) / f"{_ARRIVING}{record.name}"
            return IncomingJob(record, folder, asked.get("payload_bytes"), self._settings, self._forget_arriving)
        except BaseException:
            self._forget_arriving(record)
            raise

    def _forget_arriving(self, record: JobRecord) -> None:
        with self._lock:
            self._arriving.discard((record.client.name, record.name))

    def start(self, incoming: IncomingJob) -> WorkerJob:
        """Start a job whose bytes are here.

        Raises:
            ProtocolError: some are missing.
            LimitExceededError: the worker is shutting down.
        """
        record = incoming.record
        folder = incoming.folder.with_name(record.name)
        with self._lock:
            if self._closing:
                raise LimitExceededError("this worker is shutting down, and starts no jobs")
            incoming.finish(folder)
            job = self._jobs[record.client.name, record.name] = self._job(record, folder)
            job.start()
        audit.note(record.client, "job-start", job=record.name, kind=record.kind, title=record.title)
        self._make_room()
        return job

    def find(self, client: Identity, name: str) -> WorkerJob:
        """Return a client's job.

        Raises:
            LookupError: there is none of that name, or it is another token's.
        """
        with self._lock:
            job = self._jobs.get((client.name, name))
            known = sorted(own for owner, own in self._jobs if owner == client.name)
        if job is None:
            has = f"there are: {', '.join(known[:10])}" if known else "there are none of this token"
            raise LookupError(f"there is no job {name!r}; {has}")
        return job

    def rows(self, client: Identity | None, *, tails: bool = False) -> list[dict[str, object]]:
        """Return a row for each job, the newest first.

        Args:
            client: whose; None: of all.
            tails: whether with the end of their logs, and whose they are.
        """
        with self._lock:
            jobs = [job for (owner, _), job in self._jobs.items() if client is None or owner == client.name]
        jobs.sort(key=lambda job: -job.record.made_at)
        rows = [job.row() for job in jobs[:_MAX_ROWS]]
        if tails:
            for job, row in zip(jobs, rows, strict=False):
                row["client"], row["tail"] = job.record.client.name, _tail(job)
        return rows

    def cancel(self, client: Identity, name: str) -> WorkerJob:
        """Have a job end; see `WorkerJob.stop`.

        Raises:
            LookupError: there is none of that name.
        """
        job = self.find(client, name)
        job.stop(CANCELLED)
        audit.note(client, "job-cancel", job=name)
        return job

    def remove(self, client: Identity, name: str) -> None:
        """Forget a job that has ended, with its log, its result and its checkpoints.

        Raises:
            LookupError: there is none of that name.
            LimitExceededError: it runs.
        """
        with self._lock:
            job = self.find(client, name)
            if job.is_running:
                raise LimitExceededError(f"the job {name!r} runs. End it first: skyproxy cancel {name}")
            del self._jobs[client.name, name]
        audit.note(client, "job-remove", job=name)
        job.delete()

    # --- bounds ------------------------------------------------------------------------------------------------------

    def _running_keys(self) -> list[tuple[str, str]]:
        return [key for key, job in self._jobs.items() if job.is_running]

    def _make_room(self) -> None:
        """Remove ended jobs that are too old, too many or too large, the oldest first, of each token by itself."""
        now, limits, going = time.time(), self._settings, []
        with self._lock:
            for owner in {owner for owner, _ in self._jobs}:
                own = [(key, job) for key, job in self._jobs.items() if key[0] == owner]
                ended = [(key, job) for key, job in own if job.record.has_ended and not job.is_running]
                ended.sort(key=lambda item: item[1].record.ended_at or 0.0)
                sizes = {key: _size(job.folder) for key, job in ended}
                total, count = sum(sizes.values()), len(own)
                for key, job in ended:
                    is_old = now - (job.record.ended_at or now) > limits.kept_job_seconds
                    if not (is_old or count > limits.max_jobs or total > limits.max_kept_job_bytes):
                        break
                    count, total = count - 1, total - sizes[key]
                    going.append(self._jobs.pop(key))
        for job in going:
            logger.info("job %s is removed: ended jobs are kept for a while, in number and size", job.record.name)
            job.delete()

    def end_refused(self, refusal: Callable[[Identity], str]) -> None:
        """End the jobs whose client is refused now: its token was revoked, say."""
        with self._lock:
            jobs = [job for job in self._jobs.values() if job.is_running]
        for job in jobs:
            reason = refusal(job.record.client)
            if reason:
                audit.note(job.record.client, "ended", reason=reason, job=job.record.name)
                job.stop(CANCELLED)

    # --- what the worker knows of them -------------------------------------------------------------------------------

    def add_jobs_to(self, activity: Mapping[str, object]) -> dict[str, object]:
        """Return a worker's report with its jobs: a worker with a running job is not idle."""
        with self._lock:
            running = len(self._running_keys())
        idle = activity.get("idle_seconds", 0.0)
        assert isinstance(idle, int | float)
        since = 0.0 if running else time.monotonic() - self._last_use
        return {**activity, "jobs_running": running, "idle_seconds": round(min(idle, since), 3)}

    @contextlib.contextmanager
    def spared(self) -> Iterator[Callable[[int], bool]]:
        """Give a function that tells the processes of jobs; none begins inside the `with` block."""
        with self._spawning:
            with self._lock:
                jobs = [job for job in self._jobs.values() if job.is_running]
            pids = {job.process_id for job in jobs}
            marks = {f"{JOB_MARK_VARIABLE}={job.record.mark}".encode() for job in jobs}

            def is_spared(pid: int) -> bool:
                return pid in pids or not marks.isdisjoint(_environment(pid))

            yield is_spared

    def preempt(self) -> None:
        """Tell all jobs that the worker ends; `close` waits for them."""
        with self._lock:
            self._closing = True
            jobs = list(self._jobs.values())
        for job in jobs:
            if job.is_running:
                job.stop(PREEMPTED)
            job.log.wake()

    def close(self) -> None:
        """End all jobs within their graces, and let go of the folder. Idempotent."""
        self.preempt()
        with self._lock:
            jobs = [job for job in self._jobs.values() if job.is_running]
            most = max((job.record.grace_seconds for job in jobs), default=0.0)
        deadline = time.monotonic() + most + _END_SECONDS
        for job in jobs:
            if not job.wait(max(deadline - time.monotonic(), 0.0)):
                logger.error("job %s does not end", job.record.name)
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1
        self.remove_temporary()

    def remove_temporary(self) -> None:
        """Remove a folder that goes with the worker, whose jobs have been ended."""
        if not self._is_temporary or self._root is None:
            return
        removed = self._root.with_name(f"{self._root.name}-removed")
        with contextlib.suppress(OSError):
            self._root.rename(removed)  # or what threads of jobs still note there would keep it
            shutil.rmtree(removed, ignore_errors=True)
        remove_scratch(self._root)


def _tail(job: WorkerJob) -> list[str]:
    _, data = job.log.read(-_TAIL_BYTES, _TAIL_BYTES)
    return data.decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]


def _size(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def _environment(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()
