"""The system's ssh: what runs on a host, tunnels to it, and what its errors mean.

Keys, names and which hosts are trusted are as the user's own ssh has them; nothing is asked on a terminal.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyproxy.errors import ConfigurationError, ConnectError, SkyproxyError, WorkerStartError, visible_output
from skyproxy.providers.bounded_output import run_bounded

CONNECT_SECONDS = 20
ANSWER_SECONDS = 180.0
"""Time that a host has for everything but installing, and what takes a time of its own on top."""
_LONGEST_SOCKET_PATH = 80
"""About a hundred characters are allowed, and ssh itself adds seventeen while it makes the socket."""
_TARGET = re.compile(r"ssh://(?:([^@/:\s]+)@)?(\[[0-9A-Fa-f:.]+\]|[^@/:\s\[\]]+)(?::(\d{1,5}))?/?")
_TOO_OLD = "skyproxy-python-too-old"
# In one line: it passes the shell of the user there, whichever that is.
_BEGIN = (
    f"import sys; sys.version_info < (3, 11) and sys.exit('{_TOO_OLD} %d.%d' % sys.version_info[:2]); "
    "s = sys.stdin.buffer; exec(s.read(int(s.readline())))"
)
_FAILURES = (
    (
        r"Could not resolve hostname|nodename nor servname|Name or service not known",
        "no host of that name is known. Check the name, your network or VPN, and ~/.ssh/config.",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        (
            "the host's key has changed: it was installed anew, or somebody is in between. Ask who runs it for the "
            "fingerprint; only where that is the one below, take out the old key as ssh says there."
        ),
    ),
    (
        r"Host key verification failed",
        (
            "ssh does not know the host's key. Log in once by hand, and compare the fingerprint that it shows: "
            "ssh {login}"
        ),
    ),
    (
        r"Permission denied|Too many authentication failures",
        (
            "the host accepts none of your keys, and no password is asked for here. Set one up: ssh-copy-id {login}; "
            "or unlock yours: ssh-add"
        ),
    ),
    (r"Connection refused", "no ssh server is listening there. Check the host and the port."),
    (r"timed out|No route to host|Network is unreachable", "the host does not answer. Check your network or VPN."),
)
_PROBLEMS = {
    "venv": "its Python cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv; or name "
    "another one: --python PATH.",
    "install": "pip could not install what a worker needs there.",
    "torch": "its Python has no torch, and pip could not get it. Install torch there, or name a Python that has it: "
    "--python PATH.",
    "disk": "the disk there is full, or your quota is used up. Make room in ~/.cache/skyproxy.",
    "python": "its Python does not work.",
    "start": "the worker did not start there.",
    "exists": "there is one already.",
    "stop": "an older one does not end.",
    "gone": "it is not there any more.",
    "home": "its ~/.cache cannot be written, where a worker lives. Make that folder yours, or take another account.",
    "system": "its system refused something that a worker needs.",
}


class EnvironmentRemovedError(WorkerStartError):
    """An environment on a host that another program removed before the worker started."""


def is_host(text: str) -> bool:
    """Return whether a text is meant as a host for ssh."""
    return text.startswith("ssh://")


@dataclass(frozen=True)
class SshTarget:
    """A host, as ssh is told of it.

    Attributes:
        host: its name, also one of ~/.ssh/config.
        user: who logs in; None as ssh has it.
        port: of the ssh server; None as ssh has it.
        config: a configuration file in place of ~/.ssh/config.
    """

    host: str
    user: str | None = None
    port: int | None = None
    config: str | None = None

    @classmethod
    def parse(cls, text: str, config: str | None = None) -> SshTarget:
        """Read "ssh://[user@]host[:port]".

        Raises:
            ConfigurationError: it is not of that form.
        """
        found = _TARGET.fullmatch(text)
        port = int(found[3]) if found is not None and found[3] else None
        is_bad = port is not None and not 0 < port < 1 << 16
        if found is None or found[2].startswith("-") or (found[1] or "").startswith("-") or is_bad:
            raise ConfigurationError(
                f"{text!r} is not a host to log in to. Example: ssh://me@gpu-box, or ssh://gpu-box:2222"
            )
        return cls(found[2].strip("[]"), found[1], port, config)

    @property
    def shown(self) -> str:
        """The host as a user writes it for ssh."""
        return f"{self.user}@{self.host}" if self.user else self.host

    @property
    def login(self) -> str:
        """The arguments of ssh and of ssh-copy-id, as a user types them: "-p 2222 me@gpu-box"."""
        config = f"-F {shlex.quote(self.config)} " if self.config else ""
        return f"{config}{f'-p {self.port} ' if self.port else ''}{self.shown}"

    @property
    def url(self) -> str:
        """The host as `skyproxy up` takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh://{f'{self.user}@' if self.user else ''}{host}{f':{self.port}' if self.port else ''}"

    def command(self, *options: str, shared: bool = True) -> list[str]:
        """Return the beginning of a command line of ssh, up to the host.

        Args:
            options: of this call.
            shared: whether it goes through a connection that several calls share.

        Raises:
            ConfigurationError: there is no ssh.
        """
        ssh = shutil.which("ssh")
        if ssh is None:
            raise ConfigurationError(
                "ssh:// needs the program ssh, which is not installed here. Install OpenSSH's client."
            )
        command = [ssh, *(["-F", self.config] if self.config else [])]
        wanted = [
            "BatchMode=yes",
            f"ConnectTimeout={CONNECT_SECONDS}",
            "ServerAliveInterval=15",
            "ServerAliveCountMax=4",
            "LogLevel=INFO",  # else its errors could not be told apart
            "RemoteCommand=none",  # that of the user's configuration (tmux, say) would be in the way of ours
            "ForwardAgent=no",  # tunnels stay open for days, and whoever is root there could use the agent's keys
            "ForwardX11=no",
        ]
        path = self._control_path() if shared and os.name == "posix" else ""
        if path and len(path) <= _LONGEST_SOCKET_PATH:
            wanted += ["ControlMaster=auto", "ControlPersist=20", f"ControlPath={path}"]
        else:
            wanted += ["ControlMaster=no", "ControlPath=none"]
        for option in wanted:
            command += ["-o", option]
        command += ["-T", *options, *(["-p", str(self.port)] if self.port else [])]
        return [*command, *(["-l", self.user] if self.user else []), "--", self.host]

    def _control_path(self) -> str:
        """Return a short path: that of a socket may have about a hundred characters."""
        folder = Path(tempfile.gettempdir()) / f"skyproxy-ssh-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigurationError(f"{folder} is not a folder of yours alone. Remove it, or set TMPDIR.")
        key = repr((self.host, self.user, self.port, self.config))
        return str(folder / hashlib.sha256(key.encode()).hexdigest()[:16])

    def leave(self) -> None:
        """End the shared connection, if there is one."""
        if os.name == "posix":
            subprocess.run(
                self.command("-O", "exit"), stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False
            )


def remote_program(target: SshTarget, python: str, request: dict[str, object]) -> tuple[list[str], bytes]:
    """Return the command that runs `ssh_remote` on a host, and its input; a token in the request is in no command line.

    Args:
        target: the host.
        python: its interpreter.
        request: what is wanted.
    """
    spec = importlib.util.find_spec("skyproxy.providers.ssh_remote")
    assert spec is not None
    assert spec.origin is not None
    program = Path(spec.origin).read_bytes() + b"\n\nmain()\n"
    line = f"exec {shlex.quote(python)} -I -c {shlex.quote(_BEGIN)}"
    return [*target.command(), line], b"%d\n" % len(program) + program + json.dumps(request).encode() + b"\n"


def call(target: SshTarget, python: str, request: dict[str, object], payload: bytes = b"") -> dict[str, Any]:
    """Run one operation of `ssh_remote` on a host, and return its answer.

    Raises:
        ConnectError: the host cannot be reached, or says nothing.
        WorkerStartError: what was wanted failed there.
    """
    command, given = remote_program(target, python, request)
    limit: float | None = None
    if request["operation"] != "install":
        own = request.get("timeout_seconds", 0)
        limit = ANSWER_SECONDS + (own if isinstance(own, int | float) else 0)
    try:
        done = run_bounded(command, given + payload, limit)
    except subprocess.TimeoutExpired as error:
        said = visible_output((error.stdout or b"").decode(errors="replace")[-500:])
        raise ConnectError(
            f"{target.shown} lets us in, and gives no answer within {limit:.0f} s. Does its login shell wait for "
            f"something? Try: ssh {target.login} true\n{said}".rstrip()
        ) from error
    if done.returncode != 0:
        told = done.stderr.strip() or done.stdout.strip()[-2000:]
        raise failure(target, python, done.returncode, told.decode(errors="replace"))
    try:
        # What a profile of the host prints comes before the answer.
        answer = dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError, RecursionError) as error:
        shown = visible_output(repr(done.stdout[-200:]))
        raise ConnectError(
            f"{python} on {target.shown} gave an unexpected answer: {shown}. Is it a Python? Name another one: "
            "--python PATH"
        ) from error
    if answer.get("error") == "removed":
        raise EnvironmentRemovedError(str(answer.get("text", "")))
    if "error" in answer:
        why, text = _PROBLEMS.get(str(answer["error"]), ""), visible_output(str(answer.get("text", "")))
        raise WorkerStartError(f"cannot have a worker on {target.shown}: {why}\n{text}")
    return answer


def failure(target: SshTarget, python: str, status: int, told: str) -> SkyproxyError:
    """Return the error for what ssh, or the command that it ran, wrote before it ended."""
    told = visible_output(told.strip())
    if status == 255:
        for pattern, text in _FAILURES:
            if re.search(pattern, told):
                return ConnectError(
                    f"cannot log in to {target.shown}: " + text.format(login=target.login) + f"\n{told}"
                )
        return ConnectError(f"cannot log in to {target.shown}: {told or 'ssh ended without a message'}")
    where = f"on {target.shown}"
    if found := re.search(_TOO_OLD + r" ([\d.]+)", told):
        return WorkerStartError(
            f"{python} {where} is Python {found[1]}, and a worker needs 3.11 or newer. Name another one: --python PATH"
        )
    if status in (126, 127):
        return WorkerStartError(
            f"there is no {python} {where}. Install Python 3.11 or newer, or name one: --python PATH"
        )
    return WorkerStartError(f"{python} {where} ended with {status}.\n{told[-2000:]}")
