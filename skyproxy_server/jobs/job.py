"""One job: its process, one at a time, and the thread that starts it, reads what it prints, and ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from skyproxy.runtime.descendants import JOB_MARK_VARIABLE, end_marked
from skyproxy.settings import Settings
from skyproxy_server.jobs.logs import JobLog
from skyproxy_server.jobs.records import CANCELLED, FAILED, LOST, PREEMPTED, RESTARTING, RUNNING, SUCCEEDED, JobRecord

logger = logging.getLogger("skyproxy.server")

PAYLOAD = "payload"
RESULT = "result"
_POLL_SECONDS = 0.1
_READ_BYTES = 1 << 16
_MAX_PAUSE_SECONDS = 60.0
_SECRETS = ("SKYPROXY_TOKEN",)


class WorkerJob:
    """A job of this worker.

    Attributes:
        record: what is known of it; changed by its own thread, and by `stop`, under its lock.
        log: what it prints.
        folder: where all of it lies.
    """

    def __init__(
        self,
        record: JobRecord,
        folder: Path,
        settings: Settings,
        spawning: threading.Lock,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Make a job that does not run yet.

        Args:
            record: of the job, saved already.
            folder: of the job, with its payload.
            settings: limits.
            spawning: held while a process is made whose number is not known yet.
            on_end: called on the job's thread when it stands still.
        """
        self.record = record
        self.folder = folder
        self.log = JobLog(folder, settings.max_job_log_bytes)
        self.process_id: int | None = None
        self._settings = settings
        self._spawning = spawning
        self._on_end = on_end
        self._lock = threading.Lock()
        self._stop = ""
        self._is_saved = True
        self._stopping = threading.Event()
        self._still = threading.Event()
        self._still.set()

    @property
    def is_running(self) -> bool:
        """True if its thread is at work: it runs, is being ended, or waits for its next start."""
        return not self._still.is_set()

    def row(self) -> dict[str, object]:
        """Return what its client is told."""
        with self._lock:
            row = self.record.row()
        return {**row, "log_bytes": self.log.end, "has_result": (self.folder / RESULT).exists()}

    def start(self) -> None:
        """Begin to run it, on a thread of its own."""
        self._still.clear()
        thread = threading.Thread(target=self._run, name=f"skyproxy-job-{self.record.name[:20]}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._still.set()
            raise

    def stop(self, state: str) -> None:
        """Have it end: SIGTERM, and SIGKILL when its grace is over. Idempotent; what was cancelled is not preempted.

        Args:
            state: `CANCELLED`, or `PREEMPTED` where it is started again with the worker.
        """
        with self._lock:
            stands_still = not self.is_running or self.record.state == PREEMPTED
            if stands_still and state == CANCELLED and not self.record.has_ended:
                self._note(CANCELLED)
            if not self.is_running:
                return
            if self._stop != CANCELLED:
                self._stop = state
        self._stopping.set()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until it stands still; return whether it does."""
        return self._still.wait(timeout_seconds)

    def recover(self) -> bool:
        """Take up the record of a worker that is gone; return whether the job is to be started again."""
        end_marked(self.record.mark, JOB_MARK_VARIABLE)
        with self._lock:
            record = self.record
            if record.has_ended:
                return False
            if record.state == PREEMPTED:
                record.preemptions += 1
            elif record.restarts < record.max_restarts:
                record.restarts += 1
            else:
                self._note(LOST)
                return False
        self._say("started again: its worker was taken away" if record.preemptions else "started again")
        return True

    # --- on its own thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                code = self._attempt()
                pause = self._after(code)
                if pause is None or self._stopping.wait(pause):
                    break
            with self._lock:
                if not self.record.has_ended and self.record.state != PREEMPTED:
                    self._note(self._stop or FAILED)  # stopped while it waited for its next start
        except Exception:
            logger.exception("job %s ended by an internal error", self.record.name)
            with self._lock, contextlib.suppress(OSError):
                self._note(FAILED)
        finally:
            self.process_id = None
            self._tidy()
            self._still.set()
            self.log.wake()
            self._on_end()

    def _tidy(self) -> None:
        """Keep what is asked for later; nothing that the job has done to its folder may keep it from standing still."""
        if self.record.has_ended:
            with contextlib.suppress(OSError):
                (self.folder / PAYLOAD).unlink(missing_ok=True)
            with self._lock:
                if not self._is_saved:
                    # The disk was full, and has the room of the payload now: a job that has ended must not run again.
                    self._save()
        try:
            self.log.close()
        except OSError as error:
            logger.error("the log of job %s cannot be closed: %s", self.record.name, error)

    def _after(self, code: int) -> float | None:
        """Take note of how a process ended; return the pause before the next one, None for no other."""
        with self._lock:
            record, stop = self.record, self._stop
            record.exit_code, record.signal = (code, None) if code >= 0 else (None, -code)
            if stop:
                self._note(stop)
            elif code == 0:
                self._note(SUCCEEDED)
            elif record.restarts >= record.max_restarts:
                self._note(FAILED)
            else:
                record.restarts += 1
                self._note(RESTARTING)
                self._say(f"it {_ending(code)}; start {record.restarts} of {record.max_restarts} again")
                pause = self._settings.job_restart_seconds * 2.0 ** min(record.restarts - 1, 16)
                return min(pause, _MAX_PAUSE_SECONDS)
        return None

    def _note(self, state: str) -> None:
        """Write down a state; the lock is held."""
        record = self.record
        record.state = state
        if state == RUNNING:
            record.started_at, record.ended_at, record.exit_code, record.signal = time.time(), None, None, None
        elif state != RESTARTING:
            record.ended_at = time.time()
        self._save()

    def _save(self) -> None:
        try:
            self.record.save(self.folder)
            self._is_saved = True
        except OSError as error:
            self._is_saved = False
            logger.error("the record of job %s cannot be written: %s", self.record.name, error)

    def _say(self, text: str) -> None:
        self.log.write(f"[skyproxy] {self.record.name}: {text}\n".encode("utf-8", "replace"))

    def _attempt(self) -> int:
        """Run its process once, to its end; return the exit code, or the negative number of a signal."""
        with self._lock:
            self._note(RUNNING)
        read, write = os.pipe()
        with open(read, "rb", buffering=0) as output:
            try:
                with self._spawning:
                    process = self._spawn(write)
                    self.process_id = process.pid
            except OSError as error:
                self._say(f"could not be started: {error}")
                return 127
            finally:
                os.close(write)
            try:
                self._follow(process, output)
            finally:
                _kill_group(process)
                code = process.wait()
                end_marked(self.record.mark, JOB_MARK_VARIABLE)  # what it has left running, wherever that has gone
            self._drain(output)
        return code

    def _spawn(self, output: int) -> subprocess.Popen[bytes]:
        (self.folder / RESULT).unlink(missing_ok=True)
        checkpoints = self.folder / "checkpoints"
        checkpoints.mkdir(exist_ok=True, mode=0o700)
        record = self.record
        environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
        environment |= record.env
        environment |= {
            JOB_MARK_VARIABLE: record.mark,
            "SKYPROXY_JOB": record.name,
            "SKYPROXY_JOB_FOLDER": str(self.folder),
            "SKYPROXY_RESTART_COUNT": str(record.restarts + record.preemptions),
            "SKYPROXY_CHECKPOINT_DIR": str(checkpoints),
            "PYTHONUNBUFFERED": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "skyproxy.jobs.begin", str(self.folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=self.folder,
            start_new_session=True,
        )

    def _follow(self, process: subprocess.Popen[bytes], output: object) -> None:
        """Write down what it prints until its process has ended, however long others hold the pipe; pass on a stop."""
        kill_at: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)  # type: ignore[arg-type]
            open_ = True
            while not _has_ended(process):
                if self._stopping.is_set() and kill_at is None:
                    _signal_group(process, signal.SIGTERM)
                    kill_at = time.monotonic() + self.record.grace_seconds
                if kill_at is not None and time.monotonic() >= kill_at:
                    _kill_group(process)
                if not open_:
                    time.sleep(_POLL_SECONDS)  # it has closed its output, and runs on
                elif selector.select(_POLL_SECONDS):
                    open_ = self._copy(output)
                    if not open_:
                        selector.unregister(output)  # type: ignore[arg-type]

    def _copy(self, output: object) -> bool:
        data = os.read(output.fileno(), _READ_BYTES)  # type: ignore[attr-defined]
        if data:
            self.log.write(data)
        return bool(data)

    def _drain(self, output: object) -> None:
        """Take what is in the pipe already; all who could write more have been ended."""
        os.set_blocking(output.fileno(), False)  # type: ignore[attr-defined]
        with contextlib.suppress(BlockingIOError):
            while self._copy(output):
                pass

    def delete(self) -> None:
        """Remove all that is left of it; it must stand still."""
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has ended, and leave it to be waited for: until then nobody else gets its number."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # Only before it was waited for: nobody else has its number until then.
    if process.returncode is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    _signal_group(process, signal.SIGKILL)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
