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
USERS_EXTRAS = ("aws", "fsspec", "kubernetes", "notebook", "operator", "server", "telemetry", "torch")
TORCH = ("server", "torch")
"""The extras that bring it; the others stand beside a torch of the user's own."""
PURPOSES: dict[str, tuple[str, str]] = {
    "aws": (
        (
            "import boto3, cryptography, skyproxy.providers\n"
            "client = boto3.client('ec2', region_name='eu-west-1', aws_access_key_id='a', aws_secret_access_key='b')\n"
            "print(client.meta.service_model.operation_model('RunInstances').name, skyproxy.providers.AWS)"
        ),
        "RunInstances <class 'skyproxy.providers.aws.AWS'>",
    ),
    "fsspec": (
        (
            "from skyproxy.snapshots.stores import open_store; store = open_store('memory://some/place')\n"
            "store.prepare(); store.write('file', b'written'); print(store.read('file'))"
        ),
        "b'written'",
    ),
    "kubernetes": (
        "from skyproxy.cli.main import app; app(['install', '--namespace', 'team', '--dry-run'])",
        "kind: Deployment",
    ),
    "notebook": ("import ipykernel, nbclient; print('ready')", "ready"),
    "operator": (
        "import runpy, sys; sys.argv = ['x', '--help']; runpy.run_module('skyproxy_operator', run_name='__main__')",
        "SKYPROXY_OPERATOR_",
    ),
    "server": ("from skyproxy.cli.identity import _self_signed; print(_self_signed())", "BEGIN CERTIFICATE"),
    "telemetry": (
        (
            "from opentelemetry import trace; from skyproxy import telemetry\n"
            "trace.set_tracer_provider(trace.NoOpTracerProvider()); print(telemetry.begin('x', worker='dev'))"
        ),
        "NonRecordingSpan",
    ),
    "torch": ("import torch, skyproxy; print(torch.arange(4.0, device='sky').sum().item())", "6.0"),
}
"""The main thing of each extra, as a program, and what that prints."""

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
    assert doctor.returncode == (0 if extra in TORCH else 1), doctor.stdout + doctor.stderr
    listed = run(python, home, "-m", "skyproxy.cli.main", "list")
    assert listed.returncode == 0, listed.stderr


@pytest.mark.parametrize("extra", USERS_EXTRAS)
def test_an_extra_alone_does_what_it_is_for(environment: Environment, home: dict[str, str], extra: str) -> None:
    program, printed = PURPOSES[extra]
    done = run(environment(extra), home, "-c", program)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


@pytest.mark.parametrize("extra", sorted(set(USERS_EXTRAS) - set(TORCH)))
def test_an_extra_alone_says_that_torch_is_missing(environment: Environment, home: dict[str, str], extra: str) -> None:
    """Not by a traceback of somebody else's module, and with what to type."""
    doctor = run(environment(extra), home, "-m", "skyproxy.cli.main", "doctor")
    assert doctor.returncode == 1
    assert "pip install" in doctor.stdout + doctor.stderr
    assert "torch" in doctor.stdout + doctor.stderr
    used = run(environment(extra), home, "-c", "import skyproxy; skyproxy.connect('ws://127.0.0.1:1', token='x' * 40)")
    assert "No module named 'torch'" in used.stderr
