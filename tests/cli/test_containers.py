"""`--provider container`, with an engine that answers as docker does and runs processes in place of containers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from skyproxy.contexts import Context, ContextStore
from skyproxy.errors import WorkerStartError
from skyproxy.providers import container_engine
from skyproxy.providers.commands import run_command
from skyproxy.providers.container_engine import CONFINEMENT, ContainerEngine
from tests.cli.test_suspending import Notebook, undisturbed
from tests.integration.programs import wait_for

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the stand-in for docker reads /proc"),
]

Run = Callable[..., Result]
Read = Callable[..., Any]


@pytest.fixture
def engine(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the engine keeps its state."""
    commands, state = home / "bin", home / "engine"
    commands.mkdir()
    state.mkdir()
    command = commands / "docker"
    source = (Path(__file__).parent / "fake_engine.py").read_text(encoding="utf-8")
    command.write_text(source.replace("#!/usr/bin/env python3", f"#!{sys.executable}"), encoding="utf-8")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(item for item in sys.path if item))
    monkeypatch.setenv("FAKE_ENGINE_STATE", str(state))
    yield state
    for folder in state.iterdir():
        if folder.is_dir():
            subprocess.run([str(command), "rm", "--force", folder.name], check=True)


def calls(engine: Path) -> list[list[str]]:
    return [json.loads(line) for line in (engine / "calls").read_text().splitlines()]


def test_up_then_a_program_then_down(run: Run, read: Read, engine: Path) -> None:
    limits = ["--cpu", "500m", "--memory", "2Gi", "--volume", "cache:1Gi:/cache", "--env", "SECRET=hidden"]
    result = run("up", "box", "--provider", "container", "--image", "mine:1", *limits)
    assert result.exit_code == 0, result.output
    (create,) = [call for call in calls(engine) if call[0] == "create"]
    told = " ".join(create)
    for part in (
        "--name skyproxy-box",
        "--publish 127.0.0.1::8765",
        "--cpus 0.5",
        "--memory 2147483648b",
        "--env SECRET",
    ):
        assert part in told
    assert "--volume skyproxy-box-cache:/cache" in told
    assert "hidden" not in (engine / "calls").read_text()
    (row,) = read("list")
    assert (row["name"], row["provider"], row["ready"]) == ("box", "container", True)
    done = subprocess.run(
        [sys.executable, "-c", "import torch, skyproxy; print(torch.ones(3, device='sky').sum().item())"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "3.0\n", done.stderr
    assert "session" in run("logs", "box").stdout
    assert run("down").exit_code == 0
    assert read("list", "--provider", "container") == []
    assert list(Path(os.environ["XDG_STATE_HOME"]).rglob("*.token")) == []
    assert ContextStore().names() == []


def test_a_container_has_no_capabilities_and_nothing_to_write_but_its_volumes(run: Run, engine: Path) -> None:
    assert run("up", "box", "--provider", "container", "--env", "HOME=/elsewhere").exit_code == 0
    (create,) = [call for call in calls(engine) if call[0] == "create"]
    assert set(CONFINEMENT) <= set(create)
    assert {"--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only"} <= set(CONFINEMENT)
    # What the user says of the home comes later, and wins.
    assert create.index("--env=HOME=/home/worker") < create.index("HOME")
    # The token's folder is one that can be written.
    assert "--volume=/tmp" in create
    assert run("down", "box").exit_code == 0
    (remove,) = [call for call in calls(engine) if call[0] == "rm"]
    assert remove == ["rm", "-fv", "skyproxy-box"]


def test_the_token_is_in_no_command_and_no_description(run: Run, engine: Path) -> None:
    assert run("up", "box", "--provider", "container").exit_code == 0
    (token_file,) = Path(os.environ["XDG_STATE_HOME"]).rglob("*.token")
    token = token_file.read_text().strip()
    assert token not in (engine / "calls").read_text()
    assert token not in (engine / "skyproxy-box" / "row.json").read_text()


def test_a_token_is_replaced_in_a_container_that_runs(run: Run, read: Read, engine: Path) -> None:
    assert run("up", "box", "--provider", "container").exit_code == 0
    (token_file,) = Path(os.environ["XDG_STATE_HOME"]).rglob("*.token")
    before = token_file.read_text()
    assert run("token", "rotate", "box").stdout == "box has a new token\n"
    assert token_file.read_text() != before
    assert token_file.read_text().strip() not in (engine / "calls").read_text()
    (row,) = read("list")
    assert row["ready"] is True


def test_an_image_that_cannot_be_had_leaves_nothing(run: Run, read: Read, engine: Path) -> None:
    result = run("up", "box", "--provider", "container", "--image", "no/such:image")
    assert result.exit_code == 4
    assert "pull access denied" in result.output
    assert read("list", "--provider", "container") == []
    assert list(Path(os.environ["XDG_STATE_HOME"]).rglob("*.token")) == []


def test_a_daemon_that_is_down_is_explained(run: Run, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE_DOWN", "1")
    result = run("up", "box", "--provider", "container")
    assert result.exit_code == 4
    assert "Is its daemon running" in result.output


def test_without_an_engine_it_is_said(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))
    result = run("up", "box", "--provider", "container")
    assert result.exit_code == 2
    assert "neither docker nor podman is installed" in result.output


def test_a_suspended_container_holds_nothing_and_comes_back_with_the_next_operation(
    run: Run, read: Read, engine: Path, tmp_path: Path
) -> None:
    assert run("up", "box", "--provider", "container", "--suspend-after", "1h").exit_code == 0
    (create,) = [call for call in calls(engine) if call[0] == "create"]
    assert "--snapshots /home/worker/snapshots" in " ".join(create)
    assert "--suspend-after 3600" in " ".join(create)
    notebook = Notebook(tmp_path)
    try:
        losses = [notebook.read(), notebook.step()]
        result = run("suspend", "box")
        assert result.exit_code == 0, result.output
        assert "box is suspended: 1 session is suspended" in result.stdout
        (row,) = read("list")
        assert (row["phase"], row["ready"], row["message"]) == ("Suspended", False, "1 session is suspended")
        assert "is suspended already" in run("suspend", "box").output
        losses += [notebook.step(), notebook.step()]  # the first of them brings it back
        assert read("list")[0]["phase"] == "Running"
        assert run("suspend").exit_code == 0
        result = run("resume")
        assert (result.exit_code, result.stdout) == (0, "box is ready\n"), result.output
        losses.append(notebook.step())
        assert run("suspend").exit_code == 0
        assert run("up", "box", "--provider", "container").exit_code == 0  # as it was
        losses.append(notebook.step())
        assert losses == undisturbed(tmp_path, len(losses))
        assert run("suspend").exit_code == 0
        assert run("down").exit_code == 0
        notebook.step()
        assert notebook.process.wait(60) == 1
        assert "there is no worker 'box' any more" in notebook.said.read_text()
    finally:
        notebook.close()


def test_a_container_that_was_killed_is_lost_and_not_suspended(run: Run, read: Read, engine: Path) -> None:
    assert run("up", "box", "--provider", "container").exit_code == 0
    os.killpg(json.loads((engine / "skyproxy-box" / "row.json").read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: read("list")[0]["phase"] == "Lost", "it is dead")
    assert run("resume", "box").exit_code == 0
    assert read("list")[0]["phase"] == "Running"


@pytest.mark.parametrize(
    "command", [["list", "--provider", "container"], ["logs", "box", "--provider", "container"], ["down", "box"]]
)
def test_an_engine_that_hangs_is_given_up_and_named(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """Also where what it has started holds its pipes."""
    commands, pids = home / "bin", home / "pids"
    commands.mkdir()
    script = f"#!/bin/sh\nsleep 1000 &\necho $$ $! >> {pids}\nwait\n"
    (commands / "docker").write_text(script)
    (commands / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(container_engine, "_LOOK_SECONDS", 0.3)
    ContextStore().save(Context("box", "container"), make_current=False)
    try:
        result = run(*command)
        assert result.exit_code == 4, result.output
        assert "has not answered for 0.3 s. Is the engine in order? See: docker info" in " ".join(result.output.split())
        engines = [int(line.split()[0]) for line in pids.read_text().splitlines()]
        assert all(not Path(f"/proc/{number}/cwd").exists() for number in engines)
    finally:
        for line in pids.read_text().splitlines():
            os.kill(int(line.split()[1]), signal.SIGKILL)


def test_what_a_container_prints_takes_no_memory(tmp_path: Path) -> None:
    flood = "head -c 100000000 /dev/zero"
    script = f"""#!/bin/sh
case "$1" in
logs) {flood}; {flood} >&2; echo the end;;
cp) truncate -s 100M {tmp_path}/file; tar cf - -C {tmp_path} file;;
inspect) {flood}; echo true;;
*) cat >/dev/null; {flood}; {flood} >&2; echo the end; exit "$STATUS";;
esac
"""
    command = tmp_path / "docker"
    command.write_text(script)
    command.chmod(0o755)
    engine = ContainerEngine(str(command))

    async def use() -> None:
        assert (await engine.logs("box")).endswith("the end")
        assert await engine.read("box", "/file") == "\0" * (1 << 20)
        assert (await engine.call("ps", data=b"x" * 1_000_000, env={"STATUS": "0"})).endswith("the end\n")
        with pytest.raises(WorkerStartError):
            await engine.call("start", env={"STATUS": "1"})
        with pytest.raises(WorkerStartError):
            await run_command([str(command), "start"], "start it", variables={"STATUS": "1"})

    tracemalloc.start()
    try:
        asyncio.run(use())
        assert not container_engine.is_running(str(command), "box")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
