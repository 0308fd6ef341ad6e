"""A user and their worker: up, a training step through sky:0, down; reached through the API server's port-forward."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, condition
from tests.e2e.computes import (
    User,
    kill_worker,
    killable,
    make,
    path_of,
    pods_of,
    wait_nothing_left,
    wait_phase,
)
from tests.e2e.installation import Installation

TRAIN = """
import time

begin = time.time()
import torch
import skyproxy


def losses(device):
    torch.manual_seed(0)
    data, target = torch.randn(32, 8), torch.randint(0, 4, (32,))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(data.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


imported = time.time()
assert torch.ones(2, 2).to("sky:0").sum().item() == 4.0
first = time.time()
assert list(losses("sky:0")) == list(losses("cpu"))
(node,) = skyproxy.list_nodes()
print(f"{imported - begin:.2f} {first - imported:.2f} {time.time() - first:.2f} {node.url} {node.process_id}")
"""

HOLD = """
import sys
import torch
import skyproxy.errors

x = torch.ones(4).to("sky:0")
assert x.sum().item() == 4.0
print("holding", flush=True)
sys.stdin.readline()
try:
    (x + 1).sum().item()
except skyproxy.errors.SessionLostError as error:
    print("lost:", error)
"""

STEAL = """
import sys
import skyproxy.errors

url, server_name, certificate, token_file = sys.argv[1:]
try:
    skyproxy.connect(url, token=open(token_file).read(), certificate=open(certificate).read(), server_name=server_name)
except skyproxy.errors.AuthenticationError as error:
    print("refused:", error)
"""


@pytest.fixture
def gpus(cluster: Cluster) -> list[str]:
    """Arguments for a GPU where one is sure to be free."""
    return ["--gpus", "1"] if cluster.local else []


def token_of(cluster: Cluster, namespace: str, name: str) -> str:
    secret = cluster.get(f"/api/v1/namespaces/{namespace}/secrets/{name}-token")
    return base64.b64decode(secret["data"]["token"]).decode()


def test_up_a_training_step_and_down_with_nothing_left(
    cluster: Cluster, user: User, gpus: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    said = user.sky("up", "train", "--cpu", "1", "--memory", "4Gi", *gpus)
    ready = time.monotonic() - begin
    assert said.startswith("train is ready")
    imported, first, steps, url, process_id = user.python(TRAIN).split()
    assert process_id == "None"  # not an embedded worker
    (shown,) = json.loads(user.sky("list", "--json"))
    assert (shown["name"], shown["phase"], shown["ready"]) == ("train", "Running", True)
    compute = cluster.get(path_of(user.namespace, "train"))
    assert compute["spec"]["resources"]["cpu"] == "1"
    user.sky("down", "train")
    wait_nothing_left(cluster, user.namespace, "train")
    assert json.loads(user.sky("list", "--json")) == []
    with capsys.disabled():
        print(
            f"\nup to Ready {ready:.1f} s; then import {imported} s, connect and first op {first} s, three training "
            f"steps {steps} s, by {url}; up to first op {ready + float(imported) + float(first):.1f} s"
        )


class Pair:
    """Two users with a worker each, in namespaces of their own."""

    def __init__(self, alice: User, bob: User) -> None:
        self.alice = alice
        self.bob = bob


@pytest.fixture(scope="module")
def pair(cluster: Cluster, installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two users whose workers run."""
    users = []
    for name in ("alice", "bob"):
        namespace = f"e2e-{name}-{time.time_ns():x}"
        cluster.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        users.append(User(cluster, namespace, tmp_path_factory.mktemp(name)))
        make(
            cluster,
            namespace,
            name,
            **killable({"resources": {"memory": "4Gi"}, "restartPolicy": {"backoffSeconds": 0}}),
        )
    for found, name in zip(users, ("alice", "bob"), strict=True):
        wait_phase(cluster, path_of(found.namespace, name), "Running")
    yield Pair(*users)
    for found in users:
        cluster.delete(f"/api/v1/namespaces/{found.namespace}")


def test_a_worker_refuses_the_token_of_another_ones_user(cluster: Cluster, pair: Pair, tmp_path: Path) -> None:
    tokens = {
        name: token_of(cluster, found.namespace, name) for name, found in (("alice", pair.alice), ("bob", pair.bob))
    }
    assert tokens["alice"] != tokens["bob"]
    secret = cluster.get(f"/api/v1/namespaces/{pair.bob.namespace}/secrets/bob-tls")
    certificate = tmp_path / "ca.crt"
    certificate.write_bytes(base64.b64decode(secret["data"]["ca.crt"]))
    token_file = tmp_path / "token"
    token_file.write_text(tokens["alice"], encoding="ascii")
    with pair.bob.forwarded("bob") as url:
        server_name = f"bob.{pair.bob.namespace}.svc"
        output = pair.alice.python(STEAL, url, server_name, str(certificate), str(token_file))
    assert output.startswith("refused:")
    assert tokens["alice"] not in output


@pytest.mark.parametrize("trusted", ["alice", "bob"])
def test_a_workers_certificate_is_for_its_name_only(cluster: Cluster, pair: Pair, tmp_path: Path, trusted: str) -> None:
    namespace = {"alice": pair.alice, "bob": pair.bob}[trusted].namespace
    secret = cluster.get(f"/api/v1/namespaces/{namespace}/secrets/{trusted}-tls")
    certificate = tmp_path / "ca.crt"
    certificate.write_bytes(base64.b64decode(secret["data"]["ca.crt"]))
    token_file = tmp_path / "token"
    token_file.write_text(token_of(cluster, pair.bob.namespace, "bob"), encoding="ascii")
    program = STEAL.replace("AuthenticationError", "ConnectError")
    with pair.bob.forwarded("bob") as url:
        # Whoever means Alice's worker does not take Bob's for it, and sends it no token.
        server_name = f"alice.{pair.alice.namespace}.svc"
        output = pair.alice.python(program, url, server_name, str(certificate), str(token_file))
    assert output.startswith("refused:")


def test_tokens_are_in_no_log_event_status_or_process_list(
    cluster: Cluster, pair: Pair, installation: Installation
) -> None:
    for name, found in (("alice", pair.alice), ("bob", pair.bob)):
        token = token_of(cluster, found.namespace, name)
        found.sky("connect", name)
        found.python(TRAIN)
        places = {
            "operator's log": installation.logs(),
            "worker's log": cluster.kubectl("logs", f"--namespace={found.namespace}", f"{name}-0"),
            "events": json.dumps(cluster.items(f"/api/v1/namespaces/{found.namespace}/events")),
            "Compute": json.dumps(cluster.get(path_of(found.namespace, name))),
            "Pods": json.dumps(pods_of(cluster, found.namespace, name)),
            "status": found.sky("status", name, "--json"),
            "logs": found.sky("logs", name),
            "saved context": "".join(p.read_text() for p in found.home.rglob("contexts/*") if p.is_file()),
        }
        if cluster.local:
            commands = []
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    commands.append(process.read_bytes().decode(errors="replace"))
                except OSError:  # it has ended
                    continue
            places["process list"] = "\n".join(commands)
            assert "skyproxy_server" in places["process list"]
        assert [where for where, text in places.items() if token in text or _encoded(token) in text] == []


def _encoded(token: str) -> str:
    return base64.b64encode(token.encode()).decode()


def test_a_killed_worker_is_an_error_for_its_client_and_comes_back(cluster: Cluster, pair: Pair) -> None:
    alice = pair.alice
    alice.sky("connect", "alice")
    (before,) = pods_of(cluster, alice.namespace, "alice")
    with alice.started(HOLD) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "holding\n"
        kill_worker(cluster, before)
        output, errors = client.communicate("go\n", timeout=120)
    assert output.startswith("lost:"), errors
    path = path_of(alice.namespace, "alice")
    cluster.wait(path, lambda found: (found or {})["status"].get("restarts") == 1, "the restart is counted")
    wait_phase(cluster, path, "Running")
    alice.python(TRAIN)


def test_an_idle_worker_is_reaped_and_up_brings_it_back(cluster: Cluster, pair: Pair) -> None:
    bob = pair.bob
    path = path_of(bob.namespace, "bob")
    (before,) = pods_of(cluster, bob.namespace, "bob")
    bob.sky("connect", "bob")
    with bob.started(HOLD) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "holding\n"
        # Whoever has a session open is not idle, though nothing is asked of the worker.
        cluster.patch(path, {"spec": {"idleTimeout": "3s"}})
        running = wait_phase(cluster, path, "Running")
        assert "expiryTime" not in running["status"]
        assert [p["metadata"]["uid"] for p in pods_of(cluster, bob.namespace, "bob")] == [before["metadata"]["uid"]]
        client.communicate("go\n", timeout=60)
    compute = wait_phase(cluster, path, "Expired")
    assert condition(compute, "Ready")["reason"] == "IdleTimeout"
    pods = f"/api/v1/namespaces/{bob.namespace}/pods/bob-0"
    cluster.wait(pods, lambda found: found is None, "the Pod is gone")
    assert bob.sky("up", "bob", "--idle-timeout", "1h").startswith("bob is ready")
    bob.python(TRAIN)
