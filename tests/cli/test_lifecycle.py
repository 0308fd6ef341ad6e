"""`up` to `down` of a worker on this machine, with real processes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from skyproxy.contexts import ContextStore
from skyproxy.errors import AuthenticationError
from skyproxy.providers.detached import find
from skyproxy.providers.processes import is_alive
from skyproxy.transport.worker_report import ask_worker

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.name != "posix", reason="a home of its own is chosen by HOME"),
]

Run = Callable[..., Result]
Read = Callable[..., Any]

PROGRAM = """
import sys, torch, skyproxy
x = torch.arange(4.0, device="sky")
print((x * x).sum().item(), skyproxy.devices()[0].source, *sys.argv[1:])
"""


@pytest.fixture
def dev(run: Run) -> str:
    result = run("up", "dev", "--provider", "local", "--gpus", "0")
    assert result.exit_code == 0, result.output
    assert "dev is ready (cpu)" in result.stdout
    return "dev"


def program(home: Path) -> str:
    path = home / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def python(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_up_then_a_program_then_down(run: Run, read: Read, dev: str, home: Path) -> None:
    worker = find(dev)
    assert worker is not None
    (row,) = read("list")
    assert (row["name"], row["provider"], row["phase"], row["ready"]) == ("dev", "local", "Running", True)
    assert python(program(home)) == "14.0 saved context 'dev' (local)\n"
    assert "session" in run("logs", dev).stdout
    rows = [json.loads(line) for line in run("logs", dev, "--json").stdout.splitlines()]
    assert {row["name"] for row in rows} == {dev}
    assert any("session" in row["line"] for row in rows)
    assert run("down").exit_code == 0
    assert not is_alive(worker.process_id, worker.identity)
    assert read("list") == []
    assert ContextStore().chosen({}) is None
    assert list((home / "state").rglob("token*")) == []


def test_only_its_owner_can_read_what_a_worker_leaves(dev: str, home: Path) -> None:
    for path in (home / "state").rglob("*"):
        if path.name != "port":
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_the_token_is_in_no_command_line_and_in_no_log(run: Run, dev: str) -> None:
    worker = find(dev)
    assert worker is not None
    token = worker.token()
    assert token.encode() not in Path(f"/proc/{worker.process_id}/cmdline").read_bytes()
    assert token.encode() not in Path(f"/proc/{worker.process_id}/environ").read_bytes()
    for command in (["list"], ["status"], ["logs"], ["doctor"], ["connect", dev, "--env"], ["context", "list"]):
        assert token not in run(*command).output, command


def test_up_again_keeps_the_worker(run: Run, dev: str) -> None:
    before = find(dev)
    result = run("up", dev, "--provider", "local")
    assert result.exit_code == 0
    assert "is already running" in result.stderr
    assert find(dev) == before


def test_up_of_a_running_worker_says_which_options_change_nothing(run: Run, dev: str) -> None:
    before = find(dev)
    result = run("up", dev, "--provider", "local", "--gpus", "1", "--env", "TOKEN=hidden", "--env", "HOME")
    assert result.exit_code == 0, result.output
    assert "--gpus 1, --env TOKEN, --env HOME had no effect" in " ".join(result.stderr.split())
    assert "skyproxy down dev; skyproxy up dev --provider local" in " ".join(result.stderr.split())
    assert "hidden" not in result.output
    assert find(dev) == before


LATER = """
import subprocess, sys, torch, skyproxy

x = torch.arange(4.0, device="sky")
assert x.sum().item() == 6.0
subprocess.run([sys.executable, "-m", "skyproxy.cli.main", "token", "rotate"], check=True)
# A further connection of the session, with a token that the worker has never heard of until now.
(node,) = skyproxy.list_nodes()
print(node.run(lambda: 7), x.sum().item())
"""


def test_a_rotated_token_cuts_nobody_off_and_is_found_by_who_was_connected_before(run: Run, read: Read) -> None:
    overlap = "SKYPROXY_TOKEN_OVERLAP_SECONDS=0"
    assert run("up", "dev", "--provider", "local", "--gpus", "0", "--env", overlap).exit_code == 0
    worker = find("dev")
    assert worker is not None
    before = worker.token()
    # No overlap: what is right after it is right only because the new one is found.
    assert python("-c", LATER) == "dev has a new token\n7 6.0\n"
    assert worker.token() != before
    status = read("status")
    assert status["ready"] is True, status
    with pytest.raises(AuthenticationError):
        ask_worker(str(worker.url), before)


def test_run_binds_a_script_to_a_worker_that_is_not_the_current_one(run: Run, dev: str, home: Path) -> None:
    assert run("context", "clear").exit_code == 0
    told = python("-m", "skyproxy.cli.main", "run", "--on", dev, program(home), "--on", "mine")
    assert told == "14.0 saved context 'dev' (local) --on mine\n"
    assert ContextStore().chosen({}) is None


def test_a_single_worker_is_not_several_nodes(run: Run, dev: str, home: Path) -> None:
    result = run("run", "--on", dev, "--nnodes", "2", program(home))
    assert result.exit_code == 2, result.output
    assert "the worker 'dev' is a single node" in " ".join(result.output.split())


@pytest.mark.slow
def test_run_starts_a_script_under_torchrun_on_the_worker_itself(run: Run, dev: str, home: Path) -> None:
    script = home / "ranks.py"
    script.write_text("import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:])\n")
    told = python("-m", "skyproxy.cli.main", "run", "--on", dev, "--nproc-per-node", "2", str(script), "--on", "mine")
    assert sorted(told.splitlines()) == ["[rank 0] 0 2 --on mine", "[rank 1] 1 2 --on mine"]


def test_connect_prints_an_environment_that_works_without_a_context(run: Run, dev: str, home: Path) -> None:
    lines = run("connect", dev, "--env").stdout
    assert run("context", "clear").exit_code == 0
    told = subprocess.run(
        ["sh", "-c", f'eval "$1"; exec {sys.executable} {program(home)}', "sh", lines],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)},
    )
    assert told.stdout == "14.0 SKYPROXY_URL\n"


def test_top_counts_operations(read: Read, dev: str) -> None:
    before = read("top", "--interval", "0.1")
    assert before["commands"] == 0
    python("-c", "import torch, skyproxy\nx = torch.ones(2, device='sky')\nfor _ in range(500): x = x + 1\nx.cpu()")
    after = read("top", "--interval", "0.1")
    assert after["commands"] >= 500
    assert after["devices"][0]["used_memory_bytes"] > 0


def test_doctor_finds_everything_in_order(run: Run, read: Read, dev: str) -> None:
    assert run("doctor").exit_code == 0
    states = {row["check"]: row["state"] for row in read("doctor")}
    assert states["worker"] in ("ok", "warning")  # a busy machine may answer late
    assert states["worker's torch"] == states["sky:0"] == "ok"
    assert states["cluster"] == "skipped"


def test_a_killed_worker_is_lost_and_says_so_everywhere(run: Run, read: Read, dev: str) -> None:
    worker = find(dev)
    assert worker is not None
    os.kill(worker.process_id, 9)
    waited = threading.Event()
    while worker.alive:
        waited.wait(0.01)
    status = run("status", "--json")
    assert status.exit_code == 1
    assert read("list")[0]["phase"] == "Lost"
    assert "skyproxy logs dev" in run("status").stdout
    found = [row for row in read("doctor") if row["check"] in ("worker", "local workers")]
    assert [row["state"] for row in found] == ["broken", "warning"]
    assert run("connect", dev).exit_code == 5
    # And a program is not given another worker in silence.
    told = subprocess.run(
        [sys.executable, "-c", "import torch, skyproxy; torch.ones(2, device='sky')"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)},
    )
    assert told.returncode != 0
    assert "skyproxy up dev --provider local" in told.stderr
    assert run("up", dev, "--provider", "local", "--gpus", "0").exit_code == 0
    assert read("status")["ready"] is True


def test_following_a_log_ends_with_its_worker(run: Run, dev: str) -> None:
    worker = find(dev)
    assert worker is not None
    results: list[Result] = []
    following = threading.Thread(target=lambda: results.append(run("logs", dev, "-f")))
    following.start()
    python("-c", "import torch, skyproxy; torch.ones(2, device='sky').cpu()")
    worker.stop()
    following.join(30)
    assert not following.is_alive()
    assert "session" in results[0].stdout


def test_a_worker_that_cannot_start_ends_with_4_and_leaves_nothing(run: Run, read: Read, home: Path) -> None:
    result = run("up", "gpu", "--provider", "local", "--gpus", "1", "--env", "CUDA_VISIBLE_DEVICES=")
    assert result.exit_code == 4
    assert "--device cuda was asked for" in result.output
    assert read("list") == []
    assert list((home / "state" / "skyproxy" / "workers").iterdir()) == []
    assert ContextStore().names() == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["up", "Dev", "--provider", "local"], "'Dev' cannot name a worker"),
        (["up", "a/../b", "--provider", "local"], "cannot name a worker"),
        (
            ["up", "x", "--provider", "local", "--image", "y", "--idle-timeout", "1m"],
            "cannot have --image, --idle-timeout",
        ),
        (["up", "x", "--provider", "local", "--queue", "research"], "cannot have --queue"),
        (["up", "x", "--provider", "local", "--claim", "gpu.nvidia.com"], "cannot have --claim"),
        (["up", "x", "--provider", "local", "--runtime", "a100"], "cannot have --runtime"),
        (["up", "x", "--provider", "kubernetes", "--claim", "two:x"], "'two:x' is no claim of devices"),
        (["up", "x", "--provider", "local", "--env", "NOT_SET_HERE"], "NOT_SET_HERE is not set here"),
        (["up", "x", "--provider", "local", "--cpu", "500m"], "whole number"),
        (["up", "x", "--provider", "moon"], "moon"),
        (["up", "x", "--provider", "kubernetes"], "no Kubernetes cluster is configured"),
        (["up", "x", "--provider", "kubernetes", "--idle-timeout", "soon"], "--idle-timeout='soon' is not a duration"),
        (["up", "x", "--provider", "kubernetes", "--volume", "cache"], "NAME:SIZE:PATH"),
        (["up", "x", "--provider", "kubernetes", "--gpu-type", "A100", "--gpus", "0"], "--gpu-type was given"),
        (["status"], "no worker is named and no context is chosen"),
        (["run", "-m", "x"], "no context is chosen"),
        (["run", "--nproc-per-node", "2", "x.py"], "there is no script 'x.py'"),
        (["run", "--nproc-per-node", "gpus", __file__], "nproc_per_node='gpus'"),
        (["run", "--max-restarts", "1", __file__], "--max-restarts is for scripts under torchrun"),
        (["connect", "wss://h:1"], "--token-file"),
        (["connect", "ws://h:1"], "would not be encrypted"),
    ],
)
def test_what_cannot_work_is_said_and_ends_with_2(run: Run, arguments: list[str], problem: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert problem in " ".join(result.output.split())


@pytest.mark.parametrize(
    "arguments", [["down", "x"], ["status", "x"], ["logs", "x"], ["context", "use", "x"], ["top", "x"]]
)
def test_a_name_that_nobody_knows_ends_with_3(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 3, result.output
    assert "'x'" in result.output


def test_without_a_cluster_up_says_that_it_takes_this_machine(run: Run) -> None:
    result = run("up", "dev", "--gpus", "0")
    assert result.exit_code == 0, result.output
    assert "Provider: local, on this machine, because no cluster is configured." in result.stderr


def test_two_at_once_start_one_worker(run: Run, read: Read) -> None:
    # `run` is in-process; two real commands meet here.
    command = [sys.executable, "-m", "skyproxy.cli.main", "up", "dev", "--provider", "local", "--gpus", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)}
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes[0] == 0, outputs
    assert codes[1] in (0, 2), outputs  # the second finds a running worker, or one that is just starting
    assert [row["ready"] for row in read("list")] == [True]
