"""Workers on hosts that ssh reaches: what `skyproxy up ssh://host` makes.

The host needs ssh and Python 3.11, no open port and no administrator. What runs there is in `ssh_remote`; here is a
record of each worker, in a folder that only its owner can read.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from skyproxy.contexts import MAX_NAME_LENGTH, checked_name, installation_id, state_folder, write_private
from skyproxy.errors import ConfigurationError, ConnectError, SkyproxyError, WorkerStartError
from skyproxy.providers.ssh_connection import EnvironmentRemovedError, SshTarget, call
from skyproxy.providers.ssh_tunnel import Tunnel
from skyproxy.settings import SETTINGS

DEFAULT_PYTHON = "python3"
_OF_A_WORKER: dict[str, tuple[type, ...]] = {"alive": (bool,), "there": (bool,)}
_ANSWERS: dict[str, dict[str, tuple[type, ...]]] = {
    "look": {"ready": (bool,), "environment": (str,), "torch": (str, type(None))},
    "status": _OF_A_WORKER,
    "resume": _OF_A_WORKER,
    "suspend": {"text": (str, type(None))},
    "stop": {"there": (bool,)},
}
"""Fields that are read of a host's answers, by operation."""


@dataclass(frozen=True)
class SshWorker:
    """A worker on a host.

    Attributes:
        name: of the worker, here.
        target: the host.
        python: its interpreter.
        started: when, as ISO 8601 in UTC.
    """

    name: str
    target: SshTarget
    python: str
    started: str

    @property
    def folder(self) -> Path:
        """The folder of its record and its token."""
        return workers_folder() / self.name

    @property
    def remote_name(self) -> str:
        """Its name on the host, where workers of our other machines may be called the same."""
        return f"{self.name}-{installation_id()[:8]}"

    def ask(self, operation: str, **request: object) -> dict[str, Any]:
        """Run an operation of `ssh_remote` on the host.

        Raises:
            ConnectError: the host cannot be reached, or answers what no host of a worker says.
            WorkerStartError: what was wanted failed there.
        """
        answer = call(self.target, self.python, {"operation": operation, "name": self.remote_name, **request})
        wanted = _ANSWERS.get(operation, {})
        if answer.get("alive") is True:
            wanted = {**wanted, "port": (int, type(None))}
        wrong = [key for key, kinds in wanted.items() if key not in answer or type(answer[key]) not in kinds]
        port = answer.get("port")
        if wrong or (type(port) is int and not 0 < port < 1 << 16):
            raise ConnectError(
                f"{self.target.shown} gave no {' and no '.join(wrong) or 'port'} in its answer. Another program "
                "answers there, or another version of skyproxy."
            )
        return answer

    def token(self) -> str:
        """Return what it wants to hear.

        Raises:
            ConfigurationError: its token file is gone.
        """
        try:
            return (self.folder / "token").read_text(encoding="ascii").strip()
        except OSError as error:
            raise ConfigurationError(
                f"the token of the worker {self.name!r} cannot be read: {error}. Start it again, after: skyproxy down "
                f"{self.name}"
            ) from error

    def open(self, *, wakes: bool = False) -> tuple[Tunnel, str]:
        """Open a tunnel to it; return that and the worker's token.

        Args:
            wakes: whether it is brought back where it was suspended.

        Raises:
            ConfigurationError: its token file is gone.
            ConnectError: it does not run, or the host cannot be reached.
        """
        token = self.token()
        found = self.ask("status")
        if found.get("suspended") is not None:
            if not wakes:
                raise ConnectError(f"the worker {self.name!r} is suspended. Bring it back: skyproxy resume {self.name}")
            found = self.resume()
        if not found["alive"] or not found["port"]:
            last = f" The end of its log:\n{found.get('log')}\n" if found.get("log") else " "
            raise ConnectError(
                f"the worker {self.name!r} on {self.target.shown} is no longer running.{last}"
                f"Start it again: skyproxy up {self.url} --name {self.name}; or forget it: skyproxy down {self.name}"
            )
        return Tunnel(self.target, int(found["port"])), token

    @property
    def url(self) -> str:
        """The host as `skyproxy up` takes it."""
        return self.target.url

    def suspend(self, timeout_seconds: float) -> str:
        """Have its sessions saved, and end it; return what became of them.

        Raises:
            ConnectError: the host cannot be reached.
            WorkerStartError: it does not run, or does not end.
        """
        return str(self.ask("suspend", timeout_seconds=timeout_seconds)["text"] or "")

    def resume(self) -> dict[str, Any]:
        """Start it again where it was suspended, or has ended otherwise; return how it is then.

        Raises:
            ConnectError: the host cannot be reached.
            WorkerStartError: it did not come up, or there is nothing of it any more.
        """
        try:
            return self.ask("resume", timeout_seconds=SETTINGS.worker_start_timeout_seconds)
        except EnvironmentRemovedError as error:
            raise WorkerStartError(
                f"what was installed for the worker {self.name!r} is no longer on {self.target.shown}; its sessions "
                f"are. Install it again, and bring it back: skyproxy up {self.url} --name {self.name}"
            ) from error

    def rotate_token(self) -> None:
        """Give it another token; it accepts the one before for a while."""
        token = secrets.token_urlsafe(32)
        self.ask("token", token=token)
        write_private(self.folder / "token", token + "\n")

    def stop(self, *, keep_environment: bool = False) -> bool:
        """End it and remove all that was made for it, here and there; return whether it was there.

        Args:
            keep_environment: whether what was installed stays, so that the next start is quick.

        Raises:
            ConnectError: the host cannot be reached.
            WorkerStartError: its process cannot be ended.
        """
        there = bool(self.ask("stop", keep_environment=keep_environment, environment="")["there"])
        self.forget()
        self.target.leave()
        return there

    def forget(self) -> None:
        """Remove what is known of it here."""
        shutil.rmtree(self.folder, ignore_errors=True)


def workers_folder() -> Path:
    """The folder of the records."""
    return state_folder() / "ssh"


def find(name: str) -> SshWorker | None:
    """Return the worker of that name; None where there is no record of one."""
    try:
        row = json.loads((workers_folder() / checked_name(name) / "worker.json").read_text(encoding="utf-8"))
        return SshWorker(row["name"], SshTarget(**row["target"]), row["python"], row["started"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def list_workers() -> list[SshWorker]:
    """Return all of them, by name."""
    names = sorted(path.parent.name for path in workers_folder().glob("*/worker.json"))
    return [worker for name in names if (worker := find(name)) is not None]


def name_of(target: SshTarget) -> str:
    """Return what a worker on a host is called where nobody said: "gpu-box" for "gpu-box.example.com"."""
    short = target.host if re.fullmatch(r"[\d.:a-f]+", target.host) else target.host.partition(".")[0]
    words = re.sub(r"[^a-z0-9]+", "-", short.lower()).strip("-")
    return (words if words[:1].isalpha() else f"ssh-{words}")[:MAX_NAME_LENGTH].rstrip("-")


def start(
    name: str,
    target: SshTarget,
    *,
    python: str = DEFAULT_PYTHON,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> SshWorker:
    """Start a worker on a host, and install there what it needs.

    Args:
        name: by which it is found again.
        target: the host.
        python: its interpreter, 3.11 or newer.
        arguments: of the worker's program.
        env: variables for the installer and the worker.
        say: told what is done.

    Raises:
        ConfigurationError: there is one of that name, on another host.
        ConnectError: the host cannot be reached.
        WorkerStartError: the host cannot have a worker; says why.
    """
    known = find(checked_name(name))
    if known is not None and known.target != target:
        raise ConfigurationError(f"a worker {name!r} is on {known.target.shown}. Use another --name, or end that one.")
    from skyproxy.providers.own_wheel import own_wheel

    started = datetime.now(UTC).isoformat(timespec="seconds")
    worker, wheel = SshWorker(name, target, python, started), own_wheel()
    say(f"Looking at {target.shown}")
    request: dict[str, object] = {
        "wheel": wheel.digest,
        "wheel_name": wheel.name,
        "wheel_bytes": len(wheel.content),
        "requirements": wheel.requirements,
        "torch": _own_torch(),
        "env": dict(env or {}),
    }
    looked = worker.ask("look", **request)
    try:
        # From here on there may be something on the host for `down` to remove.
        write_private(worker.folder / "worker.json", json.dumps(asdict(worker), indent=2) + "\n")
        token = secrets.token_urlsafe(32)
        write_private(worker.folder / "token", token + "\n")
        for is_last in (False, True):
            if not looked["ready"] or is_last:
                say(f"Installing on {target.shown}" + ("" if looked["torch"] else ", torch too; this takes minutes"))
                call(target, python, {"operation": "install", "name": worker.remote_name, **request}, wheel.content)
            say(f"Starting {name} on {target.shown}")
            try:
                worker.ask(
                    "start",
                    token=token,
                    environment=looked["environment"],
                    arguments=list(arguments),
                    env=request["env"],
                    timeout_seconds=SETTINGS.worker_start_timeout_seconds,
                )
                break
            except EnvironmentRemovedError:  # by the `down` of another of our machines, which did not know of us yet
                if is_last:
                    raise
    except KeyboardInterrupt:
        say(f"Removing from {target.shown} what was begun")
        with contextlib.suppress(SkyproxyError):  # else it stays in `skyproxy list`, for `skyproxy down`
            worker.ask("stop", keep_environment=bool(looked["ready"]), environment=looked["environment"])
            worker.forget()
            target.leave()
        raise
    return worker


def _own_torch() -> str:
    """Return our own torch as a requirement: the same on both sides is best."""
    import importlib.metadata

    try:
        return "torch==" + importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "torch>=2.11"
