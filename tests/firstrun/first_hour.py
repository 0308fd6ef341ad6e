"""Seconds and commands from nothing to the first number, for each way to a worker; see `docs/howto/first-hour.md`.

Not a test that judges a machine, and not collected with the others: `make firsthour` runs this and writes the rows
into the page. Packages come from pip's cache or an index, whatever the machine has; torch is the version of this
environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.firstrun.pages import blocks
from tests.providers.test_ssh import NEEDS, Host, host, state

__all__ = ["host", "state"]

pytestmark = [pytest.mark.firstrun, pytest.mark.timeout(1800)]


class Machine:
    """A user's machine: an environment of its own, a home of its own, and a clock that runs while commands do.

    Attributes:
        python: of the environment.
        said: what was typed, and the seconds that it took.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.python = folder / "venv" / "bin" / "python"
        self.said: list[tuple[str, float]] = []
        home = folder / "home"
        home.mkdir(parents=True)
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("SKYPROXY_", "PYTHON", "KUBE"))
        }
        # pip's own cache stays where it is: a user's torch is downloaded once, and that time is the network's.
        cache = {"PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path("~/.cache/pip").expanduser()))}
        paths = {name: str(home) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")}
        self.environment = kept | cache | paths | {"PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"}

    def types(self, shown: str, *command: str, told: str = "") -> str:
        """Runs a command and notes it as `shown`; what it printed. It finds `told` on its standard input."""
        begin = time.perf_counter()
        done = subprocess.run(
            command, env=self.environment, cwd=self._folder, input=told, capture_output=True, text=True, timeout=1500
        )
        self.said.append((shown, time.perf_counter() - begin))
        assert done.returncode == 0, f"{shown}: {done.stdout}{done.stderr}"
        return done.stdout

    def installs(self, wheel: Path, extras: str) -> None:
        """A virtual environment, and skyproxy in it."""
        torch = f"torch=={version('torch').partition('+')[0]}"
        self.types("python -m venv", sys.executable, "-m", "venv", str(self._folder / "venv"))
        pip = (str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        self.types(f'pip install ".[{extras}]"', *pip, torch, f"{wheel}[{extras}]")

    def gets_the_number(self) -> None:
        """README's four lines."""
        assert "tensor(" in self.types(
            "python first.py", str(self.python), "-c", "\n".join(blocks("README.md", "python"))
        )


def show(way: str, *machines: Machine) -> None:
    """Prints the row of the table."""
    said = [item for machine in machines for item in machine.said]
    install = sum(seconds for shown, seconds in said if shown.startswith(("pip", "python -m venv")))
    rest = [(shown, seconds) for shown, seconds in said if not shown.startswith(("pip", "python -m venv"))]
    detail = ", ".join(f"`{shown}` {seconds:.1f}" for shown, seconds in rest)
    print(f"\n| {way} | {len(said)} | {install:.0f} | {sum(seconds for _, seconds in rest):.1f} | {detail} |")


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "here")


def test_this_machine(here: Machine, wheel: Path) -> None:
    here.installs(wheel, "torch")
    here.gets_the_number()
    show("this machine", here)


@pytest.fixture
def there(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "there")


@pytest.fixture
def link(there: Machine, wheel: Path) -> Iterator[str]:
    """A link that `skyproxy serve --tls` printed on the other machine."""
    there.installs(wheel, "server")
    begin = time.perf_counter()
    command = [str(there.python.parent / "skyproxy"), "serve", "--tls", "--host", "127.0.0.1", "--port", "0"]
    worker = subprocess.Popen(
        command, env=there.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    watchdog = threading.Timer(300, worker.kill)
    watchdog.start()
    try:
        assert worker.stdout is not None
        found = None
        lines = []
        while found is None and (line := worker.stdout.readline()):
            lines.append(line)
            found = re.search(r"sky://\S+", line)
        assert found is not None, "".join(lines)
        there.said.append(("skyproxy serve --tls", time.perf_counter() - begin))
        yield found.group()
    finally:
        watchdog.cancel()
        worker.terminate()
        worker.wait(60)


def test_two_machines(here: Machine, there: Machine, link: str, wheel: Path) -> None:
    here.installs(wheel, "torch")
    token = Path(there.environment["XDG_STATE_HOME"], "skyproxy", "serving", "token").read_text()
    here.types("skyproxy connect sky://...", str(here.python.parent / "skyproxy"), "connect", link, told=token)
    here.gets_the_number()
    show("two machines, TLS", there, here)


@NEEDS
def test_ssh(here: Machine, host: Host, wheel: Path) -> None:
    here.installs(wheel, "torch")
    skyproxy = str(here.python.parent / "skyproxy")
    given = ("--ssh-config", str(host.config), "--python", sys.executable)
    here.types("skyproxy up ssh://gpu-box", skyproxy, "up", "ssh://gpu-box", *given)
    here.gets_the_number()
    here.types("skyproxy down", skyproxy, "down")
    show("a machine over ssh", here)
