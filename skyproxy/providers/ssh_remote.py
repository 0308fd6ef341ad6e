"""The script that `skyproxy up ssh://host` runs on the host: its text is sent over ssh and executed by the host's own
Python.

It stands alone: standard library only, and nothing of skyproxy is there yet. Below ~/.cache/skyproxy/ssh it keeps
`environments/HASH`, virtual environments that are found again by what went into them, and `workers/NAME`, a folder for
each worker that only its owner can read. Standard input holds a request, a line of JSON, and what belongs to it; the
answer is a line of JSON on standard output.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

ROOT = Path.home() / ".cache" / "skyproxy" / "ssh"
_REPORT = "suspended.json"
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 10.0
_OWN_END_SECONDS = 30.0
_LOG_TAIL_BYTES = 4000
_LEAST_FREE_BYTES = 8 << 20  # less than pip alone needs
_LOOK = """
import importlib.metadata as m, json, sys
try: torch = m.version("torch")
except m.PackageNotFoundError: torch = None
print(json.dumps({"torch": torch, "folders": [p for p in sys.path if p.endswith("-packages")]}))
"""


class HostError(Exception):
    """A failure, in one word for the client and in words for people."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def look(request: dict[str, Any], _: IO[bytes]) -> dict[str, Any]:
    """Tell which environment the request would have, whether it is there, and which torch the host has."""
    found = json.loads(_run([sys.executable, "-P", "-c", _LOOK], "python", {}))
    parts = [request["wheel"], sys.executable, sys.version, found["torch"] or request["torch"]]
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return {**found, "environment": name, "ready": (ROOT / "environments" / name / "finished").exists()}


def install(request: dict[str, Any], stream: IO[bytes]) -> dict[str, Any]:
    """Make the environment from the wheel that follows the request."""
    looked = look(request, stream)
    wheel = stream.read(request["wheel_bytes"])
    if hashlib.sha256(wheel).hexdigest() != request["wheel"]:
        raise HostError("install", "the package arrived incomplete")
    folder = ROOT / "environments" / looked["environment"]
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _lock(folder.with_suffix(".lock")):
        if not (folder / "finished").exists():
            try:
                _build(folder, wheel, request, looked)
                (folder / "finished").touch()
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    return looked


def _build(folder: Path, wheel: bytes, request: dict[str, Any], looked: dict[str, Any]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)], "venv", {})
    python = folder / "bin" / "python"
    wanted = [*request["requirements"], "numpy"]
    if looked["torch"] is None:
        wanted.append(request["torch"])
    else:
        # The host's own packages, behind those of the environment: its torch is the one that fits its driver.
        (site,) = folder.glob("lib/python*/site-packages")
        calls = "; ".join(f"site.addsitedir({path!r})" for path in looked["folders"])
        (site / "zz-host.pth").write_text(f"import site; {calls}\n")
    path = folder / request["wheel_name"]
    path.write_bytes(wheel)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    environment = request["env"]
    _run([*pip, "--no-deps", "--ignore-installed", str(path)], "install", environment)
    _run([*pip, *wanted], "torch" if looked["torch"] is None else "install", environment)
    path.unlink()


def start(request: dict[str, Any], _: IO[bytes]) -> dict[str, Any]:
    """Start a worker, unless it runs, and wait until it listens."""
    folder = ROOT / "workers" / request["name"]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (ROOT / "environments" / request["environment"] / "finished").exists():
        raise HostError("removed", "what was installed was removed again")
    with _lock(folder / "lock"):
        if _is_alive(folder):
            raise HostError("exists", f"a worker {request['name']!r} is already running there")
        (folder / "worker.log").unlink(missing_ok=True)
        _write(folder / "token", request["token"] + "\n")
        _start(folder, {key: request[key] for key in ("environment", "arguments", "env")}, request["timeout_seconds"])
    return status(request, _)


def _start(folder: Path, row: dict[str, Any], timeout_seconds: float) -> None:
    """Start the worker of a folder, whose lock is ours; what another one has left there is this one's.

    Args:
        folder: of the worker.
        row: its environment, its arguments and its variables.
        timeout_seconds: for it to listen.
    """
    for old in ("port", _REPORT):
        (folder / old).unlink(missing_ok=True)
    (folder / "snapshots").mkdir(mode=0o700, exist_ok=True)
    python = ROOT / "environments" / row["environment"] / "bin" / "python"
    command = [str(python), "-P", "-m", "skyproxy_server", "--host", "127.0.0.1", "--port", "0"]
    command += ["--port-file", str(folder / "port"), "--token-file", str(folder / "token")]
    command += ["--snapshots", str(folder / "snapshots"), "--suspend-report", str(folder / _REPORT)]
    # A folder of the user's own choice is one that does not go with the worker.
    command += [] if "SKYPROXY_JOBS" in row["env"] else ["--jobs", str(folder / "jobs")]
    command += row["arguments"]
    log = os.open(folder / "worker.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd="/",
        env={**os.environ, **row["env"]},
        start_new_session=True,
    )
    os.close(log)
    # With all that another one like it needs, for it may be suspended.
    _write(folder / "worker.json", json.dumps({**row, "pid": process.pid, "identity": _identity(process.pid)}))
    try:
        _await_port(process, folder, timeout_seconds)
    except BaseException:  # the client's interrupt among them
        _end(folder)
        raise


def suspend(request: dict[str, Any], _: IO[bytes]) -> dict[str, object]:
    """Have a worker save its sessions, and end it; tell what became of them."""
    folder = ROOT / "workers" / request["name"]
    if not _is_alive(folder):
        raise HostError("gone", f"the worker {request['name']!r} does not run")
    with contextlib.suppress(ProcessLookupError):
        os.kill(_record(folder)["pid"], signal.SIGTERM)
    deadline = time.monotonic() + request["timeout_seconds"]
    while _is_alive(folder):
        if time.monotonic() > deadline:
            raise HostError("stop", f"it has not ended within {request['timeout_seconds']:.0f} s")
        time.sleep(_POLL_SECONDS)
    return {"text": _suspension_text(folder)}


def resume(request: dict[str, Any], _: IO[bytes]) -> dict[str, object]:
    """Start a worker again that was suspended, or has ended otherwise; one that runs is left alone."""
    folder = ROOT / "workers" / request["name"]
    if not folder.exists():
        raise HostError("gone", "there is nothing of it any more, and what it held is gone with it")
    with _lock(folder / "lock"):
        if not _is_alive(folder):
            row = _record(folder)
            if "arguments" not in row:
                raise HostError("gone", "it was started by an older skyproxy, which kept nothing to start it again")
            if not (ROOT / "environments" / row["environment"] / "finished").exists():
                raise HostError("removed", "what was installed was removed")
            _start(folder, row, request["timeout_seconds"])
    return status(request, _)


def _suspension_text(folder: Path) -> str | None:
    """Return what became of the sessions of a worker that was suspended, for people; None where none was."""
    try:
        return str(json.loads((folder / _REPORT).read_text())["text"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _await_port(process: subprocess.Popen[bytes], folder: Path, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not (folder / "port").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            how = "did not listen in time" if process.returncode is None else f"ended with {process.returncode}"
            raise HostError("start", f"the worker {how}. The end of its log:\n{_tail(folder)}")
        time.sleep(_POLL_SECONDS)


def status(request: dict[str, Any], _: IO[bytes]) -> dict[str, object]:
    """Tell how a worker is: its port, what it says of itself, and the end of its log where it is gone."""
    folder = ROOT / "workers" / request["name"]
    if not _is_alive(folder):
        text = _suspension_text(folder)
        return {"alive": False, "there": folder.exists(), "log": _tail(folder), "suspended": text}
    row: dict[str, object] = {"alive": True, "there": True, "port": None, "report": {}}
    try:
        row["port"] = int((folder / "port").read_text())
        token = (folder / "token").read_text().strip()
        address = f"http://127.0.0.1:{row['port']}/activity"
        asked = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
        # Not through a proxy of the host's environment: the worker is on its loopback interface.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(asked, timeout=30) as answer:
            row["report"] = json.loads(answer.read(1 << 20))
    except (OSError, ValueError) as error:
        row["problem"] = str(error)
    return row


def token(request: dict[str, Any], _: IO[bytes]) -> dict[str, object]:
    """Give a worker another token; it reads the file again by itself."""
    folder = ROOT / "workers" / request["name"]
    if not folder.exists():
        raise HostError("gone", f"there is no worker {request['name']!r}")
    _write(folder / "token", request["token"] + "\n")
    return {}


def stop(request: dict[str, Any], _: IO[bytes]) -> dict[str, object]:
    """End a worker and remove what was made for it; environments that no other worker uses go as well."""
    folder = ROOT / "workers" / request["name"]
    there = folder.exists()
    if there:
        with _lock(folder / "lock"):
            if not _end(folder):
                raise HostError("stop", "the worker's process cannot be ended")
            shutil.rmtree(folder, ignore_errors=True)
    if not request["keep_environment"]:
        used = {_record(other).get("environment") for other in (ROOT / "workers").glob("*")}
        for environment in {path.name.partition(".")[0] for path in (ROOT / "environments").glob("*")}:
            if environment not in used:
                # An installation that our own interrupt has just ended removes itself; others go on.
                _remove_environment(environment, _OWN_END_SECONDS if environment == request["environment"] else 0.0)
    for empty in (ROOT / "workers", ROOT / "environments", ROOT, *ROOT.parents[:2]):
        with contextlib.suppress(OSError):
            empty.rmdir()
    return {"there": there}


def _remove_environment(name: str, patience_seconds: float) -> None:
    """Remove an environment, unless somebody is installing it for longer than that."""
    folder = ROOT / "environments" / name
    lock = folder.with_suffix(".lock")
    deadline = time.monotonic() + patience_seconds
    with lock.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
        lock.unlink(missing_ok=True)


def logs(request: dict[str, Any], stream: IO[bytes]) -> dict[str, object]:
    """Write the last lines of a worker's log; with `follow` on, until it ends or the client goes."""
    folder = ROOT / "workers" / request["name"]
    try:
        log = (folder / "worker.log").open("rb")
    except OSError:
        return {}
    with log:
        lines = log.read().splitlines(keepends=True)
        tail = request["tail"]
        _write_out(b"".join(lines if tail is None else lines[max(0, len(lines) - tail) :]))
        while request["follow"]:
            alive = _is_alive(folder)
            _write_out(log.read())
            if not alive or os.getppid() == 1:
                break
            time.sleep(_POLL_SECONDS * 4)
    return {}


def _write_out(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _run(command: list[str], code: str, environment: dict[str, str]) -> str:
    """Run a program and return what it wrote.

    Raises:
        HostError: it failed; with the end of its output.
    """
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if code == "python" else subprocess.STDOUT,
        env={**os.environ, **environment},
        check=False,
    )
    output = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        end = "\n".join(output.strip().splitlines()[-15:])
        raise HostError("disk" if _is_disk_full(output) else code, end)
    return output


def _is_disk_full(output: str) -> bool:
    """Return whether a program failed for want of room; some, `venv` for one, do not say so."""
    if "No space left" in output or "quota exceeded" in output.lower():
        return True
    there = next(path for path in (ROOT, *ROOT.parents) if path.exists())
    return shutil.disk_usage(there).free < _LEAST_FREE_BYTES


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    while True:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                yield
                return
        # Whoever had it has removed it.


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    partial.replace(path)


def _record(folder: Path) -> dict[str, Any]:
    try:
        row = json.loads((folder / "worker.json").read_text())
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}


def _identity(process_id: int) -> str | None:
    """Return what tells a living process from a later one of the same number; None where none lives."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(process_id)], capture_output=True, check=False)
        return shown.stdout.decode().strip() or None
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def _is_alive(folder: Path) -> bool:
    row = _record(folder)
    return "pid" in row and row["identity"] is not None and _identity(row["pid"]) == row["identity"]


def _end(folder: Path) -> bool:
    """End the worker of a folder: ask, then insist; return whether it is gone."""
    # Not with SIGTERM, which would suspend its sessions.
    for number, seconds in ((signal.SIGINT, _GRACE_SECONDS), (signal.SIGKILL, 5.0)):
        if not _is_alive(folder):
            return True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(_record(folder)["pid"], number)
        deadline = time.monotonic() + seconds
        while _is_alive(folder) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    return not _is_alive(folder)


def _tail(folder: Path) -> str:
    try:
        return (folder / "worker.log").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    except OSError:
        return ""


_OPERATIONS = {
    "look": look,
    "install": install,
    "start": start,
    "suspend": suspend,
    "resume": resume,
    "status": status,
    "token": token,
    "stop": stop,
    "logs": logs,
}


def _end_with_client() -> None:
    """Interrupt this program where the client ends before it has the answer: sshd closes our standard output then."""
    watched = select.poll()
    watched.register(1, 0)  # an error, or that the other side is gone, is told in any case
    watched.poll()
    os.kill(os.getpid(), signal.SIGINT)


def _kind_of(error: OSError) -> str:
    """Return the word for what the system refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk"
    below_home = str(error.filename or "").startswith(str(ROOT.parents[2]))
    if below_home and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT):
        return "home"
    return "system"


def main() -> None:
    """Read a request from standard input, and answer it."""
    os.umask(0o077)
    stream = sys.stdin.buffer
    request = json.loads(stream.readline())
    if request["operation"] in ("install", "start", "resume"):
        threading.Thread(target=_end_with_client, name="skyproxy-client", daemon=True).start()
    try:
        answer = _OPERATIONS[request["operation"]](request, stream)
    except HostError as error:
        answer = {"error": error.code, "text": str(error)}
    except OSError as error:
        answer = {"error": _kind_of(error), "text": str(error)}
    if request["operation"] != "logs":
        # On a line of its own: what a profile prints, a greeting for instance, may end without one.
        _write_out(b"\n" + json.dumps(answer).encode() + b"\n")
