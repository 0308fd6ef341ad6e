"""The `skyproxy` command and the Kubernetes provider against a cluster, from a user's shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.computes import TRIVIAL, User, make, path_of, pods_of, wait_nothing_left, wait_phase
from tests.e2e.control_plane.processes import bound
from tests.e2e.installation import Installation

STEP = """
import sys, torch, skyproxy
model = torch.nn.Linear(4, 1).to("sky")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss = model(torch.ones(8, 4, device="sky")).square().mean()
loss.backward()
optimizer.step()
print(bool(torch.isfinite(loss).item()), skyproxy.devices()[0].source, *sys.argv[1:])
"""

LAUNCH = """
import asyncio, sys
from skyproxy.providers import Kubernetes, WorkerSpec

async def main():
    provider = Kubernetes(sys.argv[1])
    spec = WorkerSpec(sys.argv[2], timeout_seconds=float(sys.argv[3]), resources={"nvidia.com/gpu": sys.argv[4]})
    work = asyncio.ensure_future(provider.launch(spec, lambda step: print(step.phase, step.message, flush=True)))
    if sys.argv[5:] == ["cancel"]:
        await asyncio.to_thread(sys.stdin.readline)
        work.cancel()
    await work

try:
    asyncio.run(main())
except BaseException as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def worker(cluster: Cluster, user: User) -> Iterator[str]:
    """A worker that the user got with one command."""
    told = json.loads(user.sky("up", "dev", "--json"))
    assert (told["name"], told["ready"], told["phase"]) == ("dev", True, "Running")
    yield "dev"
    user.sky("down", "dev")
    assert pods_of(cluster, user.namespace, "dev") == []


def test_a_user_works_with_a_worker_in_every_way(cluster: Cluster, user: User, worker: str) -> None:
    assert user.python(STEP).startswith("True saved context 'dev' (kubernetes)")
    (row,) = [row for row in json.loads(user.sky("list", "--json")) if row["provider"] == "kubernetes"]
    assert (row["name"], row["ready"]) == (worker, True)
    assert row["software"]["torch"]
    status = json.loads(user.sky("status", worker, "--json"))
    assert status["url"].startswith("wss://")
    assert "listening on" in user.sky("logs", worker)
    assert json.loads(user.sky("top", worker, "--json"))["commands"] > 0
    states = {found["check"]: found["state"] for found in json.loads(user.try_sky("doctor", "--json").stdout)}
    assert states["worker"] in ("ok", "warning")
    assert states["Compute"] == states["operator"] == states["permissions"] == states["cluster"] == "ok"
    # Another context is current; `run` takes the worker that it is told.
    user.sky("context", "clear")
    (user_script := user.home / "step.py").write_text(STEP)
    assert user.sky("run", "--on", worker, str(user_script), "--flag").endswith("(kubernetes) --flag\n")


def test_a_port_forward_serves_programs_until_it_is_ended(user: User, worker: str) -> None:
    command = [sys.executable, "-m", "skyproxy.cli.main", "port-forward", worker, "--namespace", user.namespace]
    with subprocess.Popen(
        bound(command), env=user.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as forward:
        assert forward.stdout is not None
        lines = "".join(forward.stdout.readline() for _ in range(4))
        told = subprocess.run(
            ["sh", "-c", 'eval "$1"; exec "$2" -c "$3"', "sh", lines, sys.executable, STEP],
            env={**user.environment, "SKYPROXY_CONTEXT": ""},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        forward.send_signal(signal.SIGTERM)
        assert forward.wait(30) == 0
    assert lines.count("export ") == 4
    assert told.stdout == "True SKYPROXY_URL\n", told.stderr


def test_following_logs_end_with_the_worker(cluster: Cluster, user: User, installation: Installation) -> None:
    lines = (
        "for i in 1 2 3 4 5; do echo line $i; done; sleep 2; echo last; trap 'exit 0' TERM; while :; do sleep 1; done"
    )
    make(cluster, user.namespace, "talks", **{**TRIVIAL, "command": ["sh", "-c", lines]})
    wait_phase(cluster, path_of(user.namespace, "talks"), "Running")
    command = [sys.executable, "-m", "skyproxy.cli.main", "logs", "talks", "-f", "--namespace", user.namespace]
    with subprocess.Popen(bound(command), env=user.environment, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        seen = [follower.stdout.readline().strip() for _ in range(6)]
        user.sky("down", "talks")
        assert follower.wait(60) is not None
    assert seen == [*(f"line {number}" for number in range(1, 6)), "last"]


def test_what_cannot_be_placed_is_explained_and_given_up_in_time(cluster: Cluster, user: User) -> None:
    ended = user.try_sky("up", "huge", "--gpus", "999", "--timeout", "10s")
    assert ended.returncode == 4
    assert "nvidia.com/gpu" in ended.stderr
    assert "skyproxy gpus" in ended.stderr
    status = user.try_sky("status", "huge", "--json")
    assert status.returncode == 1
    assert json.loads(status.stdout)["reason"] == "Unschedulable"
    user.sky("down", "huge")
    wait_nothing_left(cluster, user.namespace, "huge")
    assert user.try_sky("down", "huge").returncode == 3


def test_gpus_of_the_cluster_are_counted(cluster: Cluster, user: User) -> None:
    if not cluster.local:
        pytest.skip("another cluster may have no GPUs")
    rows: list[dict[str, Any]] = json.loads(user.sky("gpus", "--json"))
    assert rows
    assert all(row["resource"] == "nvidia.com/gpu" and 0 <= row["free"] <= row["total"] for row in rows)


def test_a_launch_that_fails_takes_back_what_it_made(cluster: Cluster, user: User) -> None:
    told = user.python(LAUNCH, user.namespace, "fails", "8", "999")
    assert "WorkerStartError the worker 'fails' was not ready within 8 s" in told
    assert "nvidia.com/gpu" in told
    wait_nothing_left(cluster, user.namespace, "fails")


def test_a_launch_that_is_cancelled_takes_back_what_it_made(cluster: Cluster, user: User) -> None:
    command = bound([sys.executable, "-c", LAUNCH, user.namespace, "gone", "200", "999", "cancel"])
    with subprocess.Popen(
        command, env=user.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launch:
        assert launch.stdout is not None
        assert launch.stdin is not None
        assert launch.stdout.readline().startswith("provisioning created Compute gone")
        cluster.wait(path_of(user.namespace, "gone"), bool, "the Compute exists")
        launch.stdin.write(os.linesep)
        launch.stdin.close()
        assert "CancelledError" in launch.stdout.read()
    wait_nothing_left(cluster, user.namespace, "gone")


def test_up_again_starts_what_had_expired(cluster: Cluster, user: User) -> None:
    arguments = ("up", "short", "--max-lifetime", "3s")
    assert json.loads(user.sky(*arguments, "--json"))["ready"] is True
    wait_phase(cluster, path_of(user.namespace, "short"), "Expired")
    assert "skyproxy up short" in user.try_sky("status", "short").stdout
    ended = user.try_python("-c", "import torch, skyproxy; torch.ones(1, device='sky')")
    assert ended.returncode != 0
    assert "skyproxy status short" in ended.stderr
    # The very same command; that it lives only for seconds again is not its fault.
    assert json.loads(user.sky(*arguments, "--json"))["name"] == "short"
    user.sky("down", "short")
