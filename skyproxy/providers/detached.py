"""Workers on this machine that outlive the command which started them: what `skyproxy up --provider local` makes.

Each has a folder of its own, readable by its owner alone: a record of the process, its token, its port and its log.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from skyproxy.contexts import checked_name, state_folder, write_private
from skyproxy.errors import ConfigurationError, ConnectError, WorkerStartError
from skyproxy.extras import install_command
from skyproxy.providers.processes import end, identity_of, is_alive, wait_for_end
from skyproxy.session.local_worker import worker_environment
from skyproxy.settings import SETTINGS

_POLL_SECONDS = 0.05
_SHOWN_LOG_BYTES = 4000
_END_GRACE_SECONDS = 10.0
_JOBS_VARIABLE = "SKYPROXY_JOBS"
_REPORT = "suspended.json"
_BEYOND_LEAVE_SECONDS = 30.0
"""The time that a worker may take to end when its sessions are suspended."""


@dataclass(frozen=True)
class DetachedWorker:
    """A worker process on this machine.

    Attributes:
        name: of the worker.
        process_id: of the worker, or of the command that is just starting it.
        identity: tells that process from a later one with the same number.
        device: what it offers: "auto", "cuda" or "cpu".
        started: when, as ISO 8601 in UTC.
        env: variables that it was given.
        suspend_after_seconds: the time without anything to do after which it is suspended; 0: never.
    """

    name: str
    process_id: int
    identity: str
    device: str
    started: str
    env: dict[str, str] = field(default_factory=dict, repr=False)
    suspend_after_seconds: float = 0.0

    @property
    def folder(self) -> Path:
        """The folder of its traces."""
        return workers_folder() / self.name

    @property
    def log(self) -> Path:
        """The file with its standard error."""
        return self.folder / "worker.log"

    @property
    def alive(self) -> bool:
        """True if the process still lives."""
        return is_alive(self.process_id, self.identity)

    @property
    def url(self) -> str | None:
        """The address where it listens; None while it does not."""
        try:
            port = int((self.folder / "port").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        return f"ws://127.0.0.1:{port}"

    @property
    def snapshots(self) -> Path:
        """The folder of its sessions' snapshots."""
        return self.folder / "snapshots"

    @property
    def is_suspended(self) -> bool:
        """True if it has ended and left its sessions on the disk, for the one that is started next."""
        return not self.alive and (self.folder / _REPORT).exists()

    def suspension_text(self) -> str:
        """Return what became of its sessions when it was suspended, for people."""
        try:
            return str(json.loads((self.folder / _REPORT).read_text(encoding="utf-8"))["text"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def token(self) -> str:
        """Return the token that it wants to hear.

        Raises:
            ConfigurationError: its token file is gone.
        """
        try:
            return (self.folder / "token").read_text(encoding="ascii").strip()
        except OSError as error:
            raise ConfigurationError(
                f"the token of the worker {self.name!r} cannot be read: {error}. Start it again: skyproxy down "
                f"{self.name}; skyproxy up {self.name} --provider local"
            ) from error

    def log_tail(self) -> str:
        """The end of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _SHOWN_LOG_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def stop(self) -> None:
        """Ends the process and removes its traces; idempotent.

        Raises:
            ConfigurationError: it cannot be ended.
        """
        try:
            # Not with SIGTERM, which would suspend its sessions.
            gone = end(self.process_id, self.identity, _END_GRACE_SECONDS, signal.SIGINT)
        except PermissionError:
            gone = False
        if not gone:
            raise ConfigurationError(f"the worker {self.name!r}, process {self.process_id}, cannot be ended by you.")
        shutil.rmtree(self.folder, ignore_errors=True)


def workers_folder() -> Path:
    """The folder of the workers' folders."""
    return state_folder() / "workers"


def find(name: str) -> DetachedWorker | None:
    """The worker of that name, alive or not; None where there are no traces of one.

    Raises:
        ConfigurationError: the name cannot be one.
    """
    return _read(workers_folder() / checked_name(name))


def list_detached() -> list[DetachedWorker]:
    """All of them, by name."""
    folders = sorted(
        path.parent for path in workers_folder().glob("*/worker.json") if not path.parent.name.startswith(".")
    )
    return [worker for folder in folders if (worker := _read(folder)) is not None]


def start_detached(
    name: str,
    *,
    device: str = "auto",
    env: Mapping[str, str] | None = None,
    log_level: str = "info",
    wait: bool = True,
    suspend_after_seconds: float = 0.0,
) -> DetachedWorker:
    """Starts a worker process that lives on when we end.

    One of that name that has ended leaves it its token, its port, its jobs and the snapshots of its sessions.

    Args:
        name: by which it is found again.
        device: "auto", "cuda" or "cpu".
        env: variables for it, beside ours.
        log_level: how much it logs.
        wait: until it listens.
        suspend_after_seconds: the time without anything to do after which it is suspended; 0: never.

    Raises:
        ConfigurationError: there is a living one of that name, or the name cannot be one.
        WorkerStartError: torch is not installed; or it ended, or did not listen in time, with the end of its log.
    """
    _check_torch()
    variables = dict(env or {})
    claimed = DetachedWorker(
        checked_name(name),
        os.getpid(),
        identity_of(os.getpid()) or "",
        device,
        datetime.now(UTC).isoformat(timespec="seconds"),
        variables,
        suspend_after_seconds,
    )
    port = _claim(claimed)
    folder, worker = claimed.folder, claimed
    try:
        if not (folder / "token").exists():
            write_private(folder / "token", secrets.token_urlsafe(32) + "\n")
        folder.joinpath("snapshots").mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, "-P", "-m", "skyproxy_server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--port-file", str(folder / "port"), "--token-file", str(folder / "token")]
        command += ["--snapshots", str(worker.snapshots), "--suspend-report", str(folder / _REPORT)]
        command += ["--suspend-after", f"{suspend_after_seconds:g}"] if suspend_after_seconds else []
        # A folder of the user's own choice is one that does not go with the worker.
        command += [] if _JOBS_VARIABLE in variables else ["--jobs", str(folder / "jobs")]
        command += ["--device", device, "--log-level", log_level]
        process = _spawn(command, {**worker_environment(), **variables}, worker.log)
        worker = replace(claimed, process_id=process.pid, identity=identity_of(process.pid) or "")
        _write(worker, folder)
        if wait:
            _wait_until_it_listens(worker, process)
        process.returncode = 0  # not ours to wait for, nor to warn of
        return worker
    except BaseException:
        _give_up(worker)
        raise


def _give_up(worker: DetachedWorker) -> None:
    """Remove the traces of a worker that did not start; sessions and jobs that another one left stay for the next."""
    if worker.process_id != os.getpid():
        with contextlib.suppress(PermissionError):
            end(worker.process_id, worker.identity, _END_GRACE_SECONDS, signal.SIGINT)
    if any(worker.snapshots.glob("*/*/snapshot-*")) or any(worker.folder.glob("jobs/*/*")):
        gone = replace(worker, process_id=0, identity="")
        _write(gone, worker.folder)
        write_private(worker.folder / _REPORT, json.dumps({"text": "it could not be started again"}) + "\n")
    else:
        shutil.rmtree(worker.folder, ignore_errors=True)


def suspend_detached(name: str) -> DetachedWorker:
    """Have a worker's sessions suspended, and end it.

    Raises:
        ConfigurationError: there is none that runs, or it does not end.
    """
    worker = find(name)
    if worker is None or not worker.alive or worker.url is None:
        what = "is suspended already" if worker is not None and worker.is_suspended else "does not run"
        raise ConfigurationError(f"the worker {name!r} {what}. See: skyproxy list")
    if os.name != "posix":
        raise ConfigurationError("workers on Windows cannot be suspended. End it: skyproxy down " + name)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.process_id, signal.SIGTERM)
    patience_seconds = SETTINGS.leave_seconds + _BEYOND_LEAVE_SECONDS
    if not wait_for_end(worker.process_id, worker.identity, patience_seconds):
        raise ConfigurationError(
            f"the worker {name!r} has not ended within {patience_seconds:.0f} s. See: skyproxy logs {name}"
        )
    return worker


def resume_detached(name: str) -> DetachedWorker:
    """Start a worker again that was suspended, or has ended otherwise; one that runs is left alone.

    Raises:
        ConfigurationError: there is no trace of it.
        WorkerStartError: it did not come up.
    """
    deadline = time.monotonic() + SETTINGS.worker_start_timeout_seconds
    while True:
        worker = find(name)
        if worker is None:
            raise ConfigurationError(f"there is no worker {name!r} any more, and what it held is gone with it.")
        if worker.alive and worker.url is not None:
            return worker
        if not worker.alive:
            try:
                return start_detached(
                    name, device=worker.device, env=worker.env, suspend_after_seconds=worker.suspend_after_seconds
                )
            except ConfigurationError:  # somebody else was faster
                if (now := find(name)) is None or not now.alive:
                    raise
        if time.monotonic() > deadline:
            raise WorkerStartError(
                f"the worker {name!r} is being started and does not listen. See: skyproxy logs {name}"
            )
        time.sleep(_POLL_SECONDS)


def _claim(worker: DetachedWorker) -> int:
    """Makes the folder of a worker that we are about to start; nobody else can have it from then on.

    Returns:
        The port for it: that of the one before, where it is free; else 0.
    """
    name = worker.name
    made = workers_folder() / f".{name}.{secrets.token_hex(4)}"
    port = 0
    try:
        _write(worker, made)
        for _ in range(10):
            try:
                # Fails where the folder exists: it is never empty.
                made.rename(worker.folder)
                return port
            except OSError:
                existing = _read(worker.folder)
                if existing is not None and existing.alive:
                    raise ConfigurationError(
                        f"a worker {name!r} is already running, as process {existing.process_id}. Use it, or end it "
                        f"first: skyproxy down {name}"
                    ) from None
                port = _inherit(worker.folder, made) or port
                shutil.rmtree(worker.folder, ignore_errors=True)
        raise ConfigurationError(f"{worker.folder} cannot be made. Remove it, or set XDG_STATE_HOME.")
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _inherit(before: Path, made: Path) -> int:
    """Take what a worker that has ended left to the next one; return its port, where that is free."""
    for item in ("token", "snapshots", "jobs"):
        with contextlib.suppress(OSError):
            (before / item).rename(made / item)
    try:
        port = int((before / "port").read_text(encoding="ascii"))
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(("127.0.0.1", port))
    except (OSError, ValueError, OverflowError):
        return 0
    return port


def local_address(name: str) -> tuple[str, str]:
    """Url and token of a worker on this machine.

    Raises:
        ConnectError: it does not run.
    """
    worker = find(name)
    url = worker.url if worker is not None and worker.alive else None
    if worker is not None and worker.is_suspended:
        raise ConnectError(f"the worker {name!r} is suspended. Bring it back: skyproxy resume {name}")
    if worker is None or url is None:
        last = f" The end of its log:\n{worker.log_tail()}\n" if worker is not None and worker.log_tail() else " "
        raise ConnectError(
            f"the worker {name!r} on this machine is no longer running.{last}"
            f"Start it again: skyproxy up {name} --provider local; or forget it: skyproxy context remove {name}"
        )
    return url, worker.token()


def _check_torch() -> None:
    """Raise before a process is started that would only say the same in a traceback."""
    try:
        found = importlib.util.find_spec("torch") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise WorkerStartError(
            f"a worker on this machine needs torch, which is not installed for {sys.executable}. "
            f"Install it: {install_command('server')}"
        )


def _spawn(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    flags = 0
    if os.name == "nt":
        flags = subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP  # type: ignore[attr-defined, unused-ignore]
    environment.pop("SKYPROXY_TOKEN", None)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env=environment,
            # "/": a folder that we were called in can be removed later.
            cwd=os.path.abspath(os.sep),
            start_new_session=True,
            creationflags=flags,
        )
    except OSError as error:
        raise WorkerStartError(f"the worker could not be started: {error}") from error
    finally:
        os.close(descriptor)


def _wait_until_it_listens(worker: DetachedWorker, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + SETTINGS.worker_start_timeout_seconds
    while worker.url is None:
        status = process.poll()
        if status is not None or time.monotonic() > deadline:
            how = f"ended with status {status}" if status is not None else "did not listen in time"
            raise WorkerStartError(
                f"the worker {worker.name!r} {how}. The end of its log:\n{worker.log_tail()}\nSee: skyproxy doctor"
            )
        time.sleep(_POLL_SECONDS)


def _read(folder: Path) -> DetachedWorker | None:
    try:
        return DetachedWorker(**json.loads((folder / "worker.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(worker: DetachedWorker, folder: Path) -> None:
    write_private(folder / "worker.json", json.dumps(asdict(worker), indent=2) + "\n")
