"""Workers on this machine that outlive the command which started them: what `skyproxy up --provider local` makes.

Each has a folder of its own, readable by its owner alone: a record of the process, its token, its port and its log.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from skyproxy.contexts import checked_name, state_folder, write_private
from skyproxy.errors import ConfigurationError, ConnectError, WorkerStartError
from skyproxy.extras import install_command
from skyproxy.providers.processes import end, identity_of, is_alive
from skyproxy.session.local_worker import worker_environment
from skyproxy.settings import SETTINGS

_POLL_SECONDS = 0.05
_SHOWN_LOG_BYTES = 4000
_END_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class DetachedWorker:
    """A worker process on this machine.

    Attributes:
        name: of the worker.
        process_id: of the worker, or of the command that is just starting it.
        identity: tells that process from a later one with the same number.
        device: what it offers: "auto", "cuda" or "cpu".
        started: when, as ISO 8601 in UTC.
    """

    name: str
    process_id: int
    identity: str
    device: str
    started: str

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
            gone = end(self.process_id, self.identity, _END_GRACE_SECONDS)
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
    name: str, *, device: str = "auto", env: Mapping[str, str] | None = None, log_level: str = "info", wait: bool = True
) -> DetachedWorker:
    """Starts a worker process that lives on when we end.

    Args:
        name: by which it is found again.
        device: "auto", "cuda" or "cpu".
        env: variables for it, beside ours.
        log_level: how much it logs.
        wait: until it listens.

    Raises:
        ConfigurationError: there is a living one of that name, or the name cannot be one.
        WorkerStartError: it ended, or did not listen in time; with the end of its log.
    """
    worker = _claim(checked_name(name), device)
    folder = worker.folder
    try:
        write_private(folder / "token", secrets.token_urlsafe(32) + "\n")
        command = [sys.executable, "-P", "-m", "skyproxy_server", "--host", "127.0.0.1", "--port", "0"]
        command += ["--port-file", str(folder / "port"), "--token-file", str(folder / "token")]
        command += ["--jobs", str(folder / "jobs"), "--device", device, "--log-level", log_level]
        process = _spawn(command, {**worker_environment(), **(env or {})}, worker.log)
        identity = identity_of(process.pid) or ""
        worker = DetachedWorker(name, process.pid, identity, device, worker.started)
        _write(worker, folder)
        if wait:
            _wait_until_it_listens(worker, process)
        process.returncode = 0  # not ours to wait for, nor to warn of
        return worker
    except BaseException:
        if worker.process_id == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            worker.stop()
        raise


def _claim(name: str, device: str) -> DetachedWorker:
    """Makes the folder of a worker that we are about to start; nobody else can have it from then on."""
    claimed = datetime.now(UTC).isoformat(timespec="seconds")
    worker = DetachedWorker(name, os.getpid(), identity_of(os.getpid()) or "", device, claimed)
    made = workers_folder() / f".{name}.{secrets.token_hex(4)}"
    try:
        _write(worker, made)
        for _ in range(10):
            try:
                # Fails where the folder exists: it is never empty.
                made.rename(worker.folder)
                return worker
            except OSError:
                existing = _read(worker.folder)
                if existing is not None and existing.alive:
                    raise ConfigurationError(
                        f"a worker {name!r} is already running, as process {existing.process_id}. Use it, or end it "
                        f"first: skyproxy down {name}"
                    ) from None
                shutil.rmtree(worker.folder, ignore_errors=True)
        raise ConfigurationError(f"{worker.folder} cannot be made. Remove it, or set XDG_STATE_HOME.")
    finally:
        shutil.rmtree(made, ignore_errors=True)


def local_address(name: str) -> tuple[str, str]:
    """Url and token of a worker on this machine.

    Raises:
        ConnectError: it does not run.
    """
    worker = find(name)
    url = worker.url if worker is not None and worker.alive else None
    if worker is None or url is None:
        last = f" The end of its log:\n{worker.log_tail()}\n" if worker is not None and worker.log_tail() else " "
        raise ConnectError(
            f"the worker {name!r} on this machine is no longer running.{last}"
            f"Start it again: skyproxy up {name} --provider local; or forget it: skyproxy context remove {name}"
        )
    return url, worker.token()


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
                f"the worker {worker.name!r} {how}. The end of its log:\n{worker.log_tail()}\n"
                f"A worker needs torch: {install_command('server')}. See: skyproxy doctor"
            )
        time.sleep(_POLL_SECONDS)


def _read(folder: Path) -> DetachedWorker | None:
    try:
        return DetachedWorker(**json.loads((folder / "worker.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(worker: DetachedWorker, folder: Path) -> None:
    write_private(folder / "worker.json", json.dumps(asdict(worker), indent=2) + "\n")
