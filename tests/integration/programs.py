"""Runs small programs as users would: in a process of their own, with a bound on their time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]


def environment(**extra: str) -> dict[str, str]:
    """Ours with `extra` in place of skyproxy's variables, the packages under test, and no line at the first use."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SKYPROXY_")}
    ours = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *(found for found in [os.environ.get("PYTHONPATH")] if found)]),
        "PYTHONWARNINGS": "default::DeprecationWarning",
        "SKYPROXY_ANNOUNCE_WORKER": "0",
    }
    return {**clean, **ours, **extra}


def run_program(
    source: str, *, timeout: float = 60.0, cwd: Path | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end and returns what it wrote.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        check=False,
    )


def succeed(source: str, *, timeout: float = 60.0, cwd: Path | None = None, **extra: str) -> str:
    """The standard output of a program that must end well and write nothing to its standard error."""
    done = run_program(source, timeout=timeout, cwd=cwd, **extra)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout.strip()


@contextlib.contextmanager
def started(source: str, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """A running program with pipes to it; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**extra),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def worker(folder: Path, *arguments: str, **extra: str) -> Iterator[tuple[str, str]]:
    """The URL and the token of a worker that was started by hand, as `python -m skyproxy_server --token-file`."""
    token = secrets.token_urlsafe(32)
    path = folder / "token"
    path.write_text(token, encoding="ascii")
    path.chmod(0o600)
    log = folder / "worker.log"
    with log.open("wb") as stderr:
        process = start_worker(path, stderr, *arguments, **extra)
        try:
            port = wait_for(lambda: port_in(log, process), "the worker listens")
            yield f"ws://127.0.0.1:{port}", token
        finally:
            # As Ctrl-C does, which says goodbye at once: by SIGTERM, sessions of a worker with snapshots are suspended.
            process.send_signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGINT)
            try:
                process.wait(60)
            finally:
                process.kill()
                process.wait()


def start_worker(
    token_file: Path, stderr: IO[bytes], *arguments: str, python: str = sys.executable, **extra: str
) -> subprocess.Popen[bytes]:
    """Starts a worker on a free port; the caller ends it."""
    command = [python, "-m", "skyproxy_server", "--port", "0", "--device", "cpu"]
    # Functions of tests write where only this user may; a test about users of sessions says so.
    users = [] if "--session-users" in arguments else ["--session-users", "off"]
    command += ["--token-file", str(token_file), *users, *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=environment(**extra)
    )


def port_in(log: Path, process: subprocess.Popen[bytes]) -> int | None:
    text = log.read_text(errors="replace")
    assert process.poll() is None, text
    for line in text.splitlines():
        if "listening on" in line:
            return int(line.rsplit("port", 1)[1])
    return None


def wait_for(look: Callable[[], Any], what: str, timeout: float = 90.0) -> Any:
    """What `look` gives once it gives something; for what happens in another process and tells nobody."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout} s: {what}")


def rows(output: str) -> list[object]:
    """A program's lines of JSON."""
    return [json.loads(line) for line in output.splitlines()]


class Worker:
    """A worker that can be ended, and started again at its address."""

    def __init__(self, folder: Path, *options: str, snapshots: Path | None = None, **variables: str) -> None:
        self.folder, self.variables = folder, variables
        self.token = secrets.token_urlsafe(32)
        self.options: list[str] = ["--snapshots", str(snapshots or folder / "snapshots"), *options]
        self.log = folder / "log"
        path = folder / "token"
        path.write_text(self.token, encoding="ascii")
        path.chmod(0o600)
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.log.write_bytes(b"")
        again = ["--port", str(self.port)] if self.port else []
        with self.log.open("ab") as stderr:
            self.process = process = start_worker(
                self.folder / "token", stderr, *self.options, *again, **self.variables
            )
        try:
            self.port = wait_for(lambda: port_in(self.log, process), "the worker listens")
        except BaseException:
            self.close()
            raise

    def end(self, number: int = signal.SIGTERM) -> str:
        """End it; what it wrote."""
        self.tell(number)
        return self.last_words()

    def tell(self, number: int = signal.SIGTERM) -> None:
        """Have it end."""
        assert self.process is not None
        self.process.send_signal(number)

    def last_words(self) -> str:
        """Wait for its end; what it wrote."""
        assert self.process is not None
        self.process.wait(60)
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
