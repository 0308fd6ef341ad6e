"""An embedded worker: a child process on this machine whose life is tied to ours."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from skyproxy.errors import WorkerStartError, visible
from skyproxy.runtime.descendants import MARK_VARIABLE, end_marked
from skyproxy.session.forking import ForkServer, WorkerProcess
from skyproxy.settings import Settings
from skyproxy.transport.shared_threads import SharedThreads

_SHOWN_OUTPUT_BYTES = 4000
_SHOWN_LINES = 20
_ADVICE = {
    "SIGKILL": "the system does that when memory runs out: see its log, and use smaller batches or more memory",
    "SIGSEGV": "C code that the function or an operation called has crashed",
    "SIGABRT": "C code that the function or an operation called has aborted",
    "SIGBUS": "often /dev/shm, or the disk of a mapped file, is full",
}
_END_TIMEOUT_SECONDS = 1.0
_WAITING_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
_SPINS = 2000
"""Rounds that a thread of OpenMP computes in vain before it sleeps; libgomp's own number is 300,000, milliseconds."""
_SNAPSHOTS = "SKYPROXY_SNAPSHOTS"
_workers: weakref.WeakSet[LocalWorker] = weakref.WeakSet()


class LocalWorker:
    """A worker process on loopback.

    The token goes through the child's standard input, so it is in no process list and no environment. That pipe is
    also its life-line: when it closes, by `stop` or because we died, the worker ends at once.

    Attributes:
        url: where it listens.
        token: what it wants to hear.
        device: what it was started for.
    """

    url: str

    def __init__(
        self,
        device: str,
        settings: Settings,
        *,
        python: str = sys.executable,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
        snapshots_folder: str | None = None,
        server: ForkServer | None = None,
        threads: SharedThreads | None = None,
    ) -> None:
        """Starts the process and waits until it listens.

        Args:
            device: "auto", "cpu" or "cuda".
            settings: limits.
            python: the interpreter to run it.
            command: what starts it in another way, with --embedded: in a container, for instance.
            environment: all of its variables; ours by default.
            wait: whether to wait; otherwise call `wait_until_it_listens`, before anything else but `stop`.
            snapshots_folder: where it keeps snapshots; made when the first one is. By default one of its own, where
                neither a command nor the environment says otherwise.
            server: forks it; as long as it can, else the process is started in the ordinary way.
            threads: wait for its end, among much else; by default a thread of its own does.

        Raises:
            WorkerStartError: it ended, or did not listen in time; with the end of its output.
        """
        self.token = secrets.token_urlsafe(32)
        self.device = device
        self._snapshots_folder = snapshots_folder
        if snapshots_folder is None and command is None and environment is None and _SNAPSHOTS not in os.environ:
            self._snapshots_folder = os.path.join(tempfile.gettempdir(), f"skyproxy-snapshots-{secrets.token_hex(16)}")
        self._owner = os.getpid()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._last_words = ""
        arguments = ["--embedded", "--host", "127.0.0.1", "--port", "0", "--device", device]
        if command is None:
            command = [python, "-P", "-m", "skyproxy_server", *arguments]
        mark = secrets.token_hex(16)
        variables = worker_environment() if environment is None else dict(environment)
        if self._snapshots_folder is not None:
            variables[_SNAPSHOTS] = self._snapshots_folder
        variables[MARK_VARIABLE] = mark
        forked = server.try_to_start(arguments, variables, self._output) if server is not None else None
        self._process: WorkerProcess = forked or self._spawn(command, variables)
        _workers.add(self)
        self._first_line: list[bytes] = []
        # A thread reads them, because sockets are all that every system can wait for.
        self._reader = threading.Thread(target=self._read_first_line, name="skyproxy-worker-port", daemon=True)
        self._reader.start()
        self._has_ended = threading.Event()
        clean_up = partial(_end_group, self._process, mark, self._has_ended)
        if threads is None or not ProcessEnd.tell(threads, self._process.pid, clean_up):
            threading.Thread(target=clean_up, name="skyproxy-worker", daemon=True).start()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(self.token.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.stop()
            raise WorkerStartError(self._explain()) from None
        if wait:
            self.wait_until_it_listens(settings.worker_start_timeout_seconds)

    def _spawn(self, command: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._output,
                env=variables,
                start_new_session=True,  # Ctrl-C in the terminal is meant for the client alone
            )
        except OSError as error:
            raise WorkerStartError(f"the embedded worker could not be started: {error}") from error

    def successor(self, settings: Settings) -> LocalWorker:
        """Start another one in its place, with its snapshots; call `wait_until_it_listens` then.

        Raises:
            WorkerStartError: it cannot be started.
        """
        folder, self._snapshots_folder = self._snapshots_folder, None
        return LocalWorker(self.device, settings, wait=False, snapshots_folder=folder)

    def delete_snapshots(self) -> None:
        """Delete what it kept of its sessions, once it has ended."""
        if self._snapshots_folder is not None and self._owner == os.getpid():
            shutil.rmtree(self._snapshots_folder, ignore_errors=True)

    def wait_until_it_listens(self, timeout_seconds: float) -> None:
        """Waits for the worker's word. `stop`, from another thread, ends the wait.

        Raises:
            WorkerStartError: it ended, or did not listen in time; it is stopped then.
        """
        try:
            self.url = f"ws://127.0.0.1:{self._read_port(timeout_seconds)}"
        except BaseException as error:
            self.stop()
            if isinstance(error, OSError | ValueError):
                raise WorkerStartError(self._explain()) from None
            raise

    def _read_port(self, timeout_seconds: float) -> int:
        self._reader.join(timeout_seconds)
        if not self._first_line:
            raise ValueError(f"no answer within {timeout_seconds:.0f} s")
        return int(json.loads(self._first_line[0])["port"])

    def _read_first_line(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # stopped meanwhile
            self._first_line.append(self._process.stdout.readline())

    @property
    def has_answered(self) -> bool:
        """True if `wait_until_it_listens` would return at once, or raise."""
        return not self._reader.is_alive()

    @property
    def is_running(self) -> bool:
        """True if the process has not ended."""
        return self._process.poll() is None

    def _explain(self) -> str:
        status = self._process.poll()
        how = f"ended with status {status}" if status is not None else "did not listen in time"
        return (
            f"the embedded worker {how}. The end of its output:\n{self.output()}\n"
            "Try `python -m skyproxy_server --help`, or connect to another worker: skyproxy.connect(url, token=...)."
        )

    @property
    def process_id(self) -> int:
        """The child's process id."""
        return self._process.pid

    def output(self) -> str:
        """The end of what the worker wrote to its standard error."""
        # Closed once the worker has ended.
        with contextlib.suppress(OSError, ValueError):
            self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, self._output.tell() - _SHOWN_OUTPUT_BYTES))
            self._last_words = self._output.read().decode(errors="replace").strip()
        return self._last_words

    def explain_end(self, patience_seconds: float = _END_TIMEOUT_SECONDS) -> tuple[str, str] | None:
        """Return how the process ended and the end of its log, for an error's text; None if it lives a moment later."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_seconds)
        status = self._process.poll()
        if status is None:
            return None
        log = "\n".join("  " + line for line in self.output().splitlines()[-_SHOWN_LINES:])
        return f"its process {_explain_exit(status)}", f"\nThe end of the worker's log:\n{visible(log)}" if log else ""

    def abandon_in_child(self) -> None:
        """After a fork, in the child: lets go of the life-line, which is the parent's alone."""
        for stream in (self._process.stdin, self._process.stdout, self._output):
            _close(stream)
        self._process.returncode = 0  # not ours to wait for, nor to warn of

    def stop(self) -> None:
        """Ends the process; idempotent, bounded in time."""
        if self._owner != os.getpid():
            return
        _close(self._process.stdin)
        # The closed pipe ends it at once, unless it was stopped or is beyond help.
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_SECONDS)
                break
            self._process.kill()
        self._has_ended.wait(_END_TIMEOUT_SECONDS)
        # Only after it has ended: somebody may be waiting for its first line, and holds the stream's lock until then.
        _close(self._process.stdout)
        self.output()
        self._output.close()


def _explain_exit(status: int) -> str:
    """Explain a process's exit status, and its most likely cause."""
    # A container's runtime, or a shell, reports a signal as 128 plus its number.
    number = -status if status < 0 else status - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exited with code {status}"
    what = f"was killed by {name}" if status < 0 else f"exited with code {status}, that is {name}"
    advice = _ADVICE.get(name)
    return f"{what} ({advice})" if advice else what


class ProcessEnd:
    """The end of a process, as what shared threads wait for."""

    def __init__(self, threads: SharedThreads, handle: int, then: Callable[[], object]) -> None:
        self._threads = threads
        self._handle = handle
        self._then = then

    @classmethod
    def tell(cls, threads: SharedThreads, process_id: int, then: Callable[[], object]) -> bool:
        """Have a helper call a function when a process has ended; False where the system cannot tell."""
        try:
            handle = os.pidfd_open(process_id)
        except (AttributeError, OSError):  # no such question here, or it was reaped already
            return False
        threads.watch(cls(threads, handle, then))
        return True

    def fileno(self) -> int:
        """As `Receiver.fileno`."""
        return self._handle

    def receive(self) -> bool:
        """As `Receiver.receive`."""
        poller = select.poll()  # `select` would refuse large descriptors
        poller.register(self._handle, select.POLLIN)
        if poller.poll(0):
            raise EOFError
        return False

    def broken(self) -> None:
        """As `Receiver.broken`."""
        os.close(self._handle)
        self._threads.submit(self._then)


def _end_group(leader: WorkerProcess, mark: str, has_ended: threading.Event) -> None:
    """Waits for a worker's end, and ends what functions had started in it: nobody else would.

    At once, for forked processes keep its connections open, and its peers know it by those.
    """
    with contextlib.suppress(OSError):
        leader.wait()
        if hasattr(os, "killpg"):
            os.killpg(leader.pid, signal.SIGKILL)
    try:
        end_marked(mark)  # daemons have left the group
    finally:
        has_ended.set()


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.close()


def worker_environment() -> dict[str, str]:
    """Return the variables of a worker on this machine, which shares its cores with the program that it works for.

    They are ours, with a path to the packages where they are not installed but lie beside this one. Threads of kernels
    wait for each other without computing for long, unless a variable of ours says how they wait: by default they take
    the cores that the program, and whatever else runs, could use (`benchmarks/waiting_threads.py`).
    """
    environment = dict(os.environ)
    if environment.keys().isdisjoint(_WAITING_VARIABLES):
        environment["GOMP_SPINCOUNT"] = str(_SPINS)
    root = str(Path(__file__).resolve().parents[2])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root + (os.pathsep + known if known else "")
    return environment


def _after_fork_in_child() -> None:
    for worker in list(_workers):
        worker.abandon_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
