"""The documented first steps work from the built wheel in a fresh environment."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.firstrun.pages import FIRST_STEPS, RUN, blocks, programs

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = sorted(
    tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
)
# What users install; the others are environments of the tests, and `make environment` installs them all.
USERS_EXTRAS = ("aws", "kubernetes", "operator", "server", "torch")

pytestmark = [pytest.mark.firstrun, pytest.mark.timeout(600)]

Environment = Callable[..., Path]


def run(python: Path, home: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments], env=home, cwd=home["HOME"], capture_output=True, text=True, timeout=300
    )


def test_every_extra_of_a_user_exists() -> None:
    assert set(USERS_EXTRAS) <= set(EXTRAS)


@pytest.mark.parametrize("extra", ["torch", "server"])
@pytest.mark.parametrize("page", FIRST_STEPS)
def test_a_page_runs_as_written(environment: Environment, home: dict[str, str], page: str, extra: str) -> None:
    code = "\n".join(blocks(page, "python"))
    assert "import skyproxy" in code
    done = run(environment(extra), home, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@contextlib.contextmanager
def started_worker(python: Path, home: dict[str, str]) -> Iterator[tuple[str, str]]:
    """A worker of that environment; its address and token."""
    folder = Path(home["HOME"])
    token, port = folder / "token.txt", folder / "port"
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    command = [str(python), "-m", "skyproxy_server", "--port", "0", "--token-file", str(token)]
    worker = subprocess.Popen([*command, "--port-file", str(port)], env=home, cwd=folder)
    try:
        deadline = time.monotonic() + 300
        while not (port.exists() and port.read_text().strip()):
            assert worker.poll() is None, "the worker has ended"
            assert time.monotonic() < deadline, "the worker does not listen"
            time.sleep(0.1)
        yield f"ws://127.0.0.1:{port.read_text().strip()}", token.read_text()
    finally:
        worker.terminate()
        worker.wait(60)


@pytest.mark.parametrize("page", RUN)
def test_a_page_of_how_to_runs_as_written(environment: Environment, home: dict[str, str], page: str) -> None:
    python = environment("torch", packages=RUN[page].packages)
    code = Path(home["HOME"], "page.py")  # a file, as a reader's: functions travel by their source's name
    with contextlib.ExitStack() as stack:
        address = ""
        if RUN[page].worker:
            address, token = stack.enter_context(started_worker(python, home))
            home = home | {"SKYPROXY_TOKEN": token}
        for text in programs(page, worker=address):
            code.write_text(text, encoding="utf-8")
            done = run(python, home, str(code))
            assert done.returncode == 0, done.stderr


def test_a_torch_of_ones_own_is_enough(environment: Environment, home: dict[str, str]) -> None:
    done = run(environment(packages=("torch",)), home, "-c", "\n".join(blocks("README.md", "python")))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("extra", [None, *USERS_EXTRAS])
def test_the_command_line_works_with_any_extra(
    environment: Environment, home: dict[str, str], extra: str | None
) -> None:
    python = environment(*([extra] if extra else []))
    doctor = run(python, home, "-m", "skyproxy.cli.main", "doctor")
    assert "Traceback" not in doctor.stderr, doctor.stderr
    # Without torch nothing can run here, and doctor says so; with it, nothing is broken.
    assert doctor.returncode == (0 if extra in ("torch", "server") else 1), doctor.stdout + doctor.stderr
    listed = run(python, home, "-m", "skyproxy.cli.main", "list")
    assert listed.returncode == 0, listed.stderr
