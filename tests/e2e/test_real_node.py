"""What only kubelets, a container runtime and several machines show: limits, lost machines, drains, new Secrets."""

from __future__ import annotations

import base64
import datetime
import json
import subprocess
from collections.abc import Iterator

import pytest

from skyproxy.transport.trust import fingerprint_of
from skyproxy_operator.certificates import issue
from tests.e2e.cluster import Cluster, Object, condition
from tests.e2e.computes import (
    TRIVIAL,
    User,
    make,
    path_of,
    pods_of,
    wait_nothing_left,
    wait_phase,
    wait_reason,
)
from tests.e2e.conftest import is_ready
from tests.e2e.control_plane.processes import bound
from tests.e2e.control_plane.real_nodes import NODES, RealNodes
from tests.e2e.installation import Installation

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("installation")]

# Two of them do not fit on one node of a machine with two cores, nor do they leave room for one of the others.
_TWO_THIRDS = {"cpu": "1300m"}

POOL = """
import sys
import skyproxy as sky
from skyproxy.providers import Kubernetes


@sky.function
def total():
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(sky.instance_info().node + 1)])
    dist.all_reduce(value)
    return value.item()


with sky.Compute(
    name="pool",
    provider=Kubernetes(sys.argv[1]),
    nodes=2,
    resources={"cpu": "1300m", "memory": "2Gi"},
    plugins=[sky.plugins.torch(backend="gloo")],
) as pool:
    print(*(total() @ pool), flush=True)
    sys.stdin.readline()
"""

CHECK = """
import torch, skyproxy
assert torch.ones(3, device="sky").sum().item() == 3.0
"""

SESSION = """
import sys, torch, skyproxy
x = torch.ones(3, device="sky")
print(x.sum().item(), flush=True)
sys.stdin.readline()
print((2 * x).sum().item(), flush=True)
"""

LOOK = r"""
grep -E '^(Uid|Gid|CapPrm|CapEff|NoNewPrivs|Seccomp):' /proc/1/status
(: > /written) 2>/dev/null || echo read-only
(: > /home/worker/written) 2>/dev/null && echo home
cat /sys/fs/cgroup/memory/memory.limit_in_bytes
(: > /var/run/secrets/kubernetes.io/serviceaccount/token) 2>/dev/null || echo no account
"""


def nodes_of(cluster: Cluster, namespace: str, name: str) -> list[str]:
    """The nodes of a Compute's Pods, sorted."""
    return sorted(pod["spec"].get("nodeName", "") for pod in pods_of(cluster, namespace, name))


@pytest.fixture
def without_operator(cluster: Cluster, installation: Installation) -> Iterator[str]:
    """The name of a node that has no operator, and that alone takes new Pods."""
    taken = installation.pod()["spec"]["nodeName"]
    (free,) = (name for name in NODES if name != taken)
    cluster.kubectl("cordon", taken)
    yield free
    for name in NODES:
        cluster.kubectl("uncordon", name)


def test_a_worker_is_confined_by_the_kernel(cluster: Cluster, namespace: str) -> None:
    path = make(cluster, namespace, "one", resources={"memory": "1Gi"})
    wait_phase(cluster, path, "Running")
    seen = cluster.kubectl("exec", f"--namespace={namespace}", "one-0", "--", "sh", "-c", LOOK)
    assert [line.split() for line in seen.splitlines()] == [
        ["Uid:", *["10001"] * 4],
        ["Gid:", *["10001"] * 4],
        ["CapPrm:", "0" * 16],
        ["CapEff:", "0" * 16],
        ["NoNewPrivs:", "1"],
        ["Seccomp:", "2"],
        ["read-only"],
        ["home"],
        [str(1 << 30)],
        ["no", "account"],
    ]


def test_a_pool_over_two_machines_has_a_process_group(cluster: Cluster, user: User) -> None:
    with user.started(POOL, user.namespace) as program:
        assert program.stdout is not None
        line = program.stdout.readline()
        where = nodes_of(cluster, user.namespace, "pool")
        _, errors = program.communicate("\n", timeout=120)
        assert (line, program.returncode) == ("3.0 3.0\n", 0), errors
    assert where == sorted(NODES)
    wait_nothing_left(cluster, user.namespace)


@pytest.mark.parametrize("how", ["delete", "drain"])
def test_a_member_that_is_taken_away_restarts_all(cluster: Cluster, namespace: str, how: str) -> None:
    path = make(cluster, namespace, "pair", **{**TRIVIAL, "nodes": 2, "resources": _TWO_THIRDS})
    wait_phase(cluster, path, "Running")
    before = {pod["metadata"]["uid"] for pod in pods_of(cluster, namespace, "pair")}
    assert nodes_of(cluster, namespace, "pair") == sorted(NODES)
    second = cluster.get(f"/api/v1/namespaces/{namespace}/pods/pair-1")
    machine = second["spec"]["nodeName"]
    try:
        if how == "delete":
            cluster.kubectl("delete", "pod", f"--namespace={namespace}", "pair-1")
        else:
            selector = f"--pod-selector=skyproxy.dev/compute=pair,skyproxy.dev/node={second_label(second)}"
            cluster.kubectl("drain", machine, selector, "--force", "--delete-emptydir-data", "--timeout=100s")
        cluster.wait(path, lambda found: (found or {})["status"].get("restarts") == 1, "a restart is counted", 120)
        assert "pair-1 was deleted" in cluster.get(path)["status"]["lastFailure"]
    finally:
        cluster.kubectl("uncordon", machine)
    wait_phase(cluster, path, "Running")
    assert not before & {pod["metadata"]["uid"] for pod in pods_of(cluster, namespace, "pair")}
    assert nodes_of(cluster, namespace, "pair") == sorted(NODES)


def second_label(pod: Object) -> str:
    """What tells one node's Pod of a Compute from the others'."""
    return str(pod["metadata"]["labels"]["skyproxy.dev/node"])


def test_a_lost_machine_is_named_and_its_worker_made_again_elsewhere(
    cluster: Cluster, user: User, installation: Installation, without_operator: str, real_nodes: RealNodes
) -> None:
    namespace, lost = user.namespace, without_operator
    moves = make(cluster, namespace, "moves", **TRIVIAL)
    ends = make(cluster, namespace, "ends", **TRIVIAL)
    for path in (moves, ends):
        wait_phase(cluster, path, "Running")
    assert nodes_of(cluster, namespace, "moves") == nodes_of(cluster, namespace, "ends") == [lost]
    cluster.kubectl("uncordon", *NODES)
    real_nodes.lose(lost)
    try:
        ready = wait_reason(cluster, moves, "Ready", "NodeNotResponding", 150)
        assert f"The machine {lost} of pod moves-0" in ready["message"]
        # What nobody there confirms is not waited for without end.
        wait_reason(cluster, ends, "Ready", "NodeNotResponding")
        refused = user.try_sky("down", "ends", "--timeout", "2s")
        assert refused.returncode != 0
        assert f"The machine {lost} of Pod ends-0 does not answer" in refused.stderr
        user.sky("down", "ends", "--force")
        wait_nothing_left(cluster, namespace, "ends")
        with installation.configured(SKYPROXY_OPERATOR_LOST_NODE_SECONDS="5"):
            wait_phase(cluster, moves, "Running")
            assert lost not in nodes_of(cluster, namespace, "moves")
            assert "NodeLost" in cluster.get(moves)["status"]["lastFailure"]
    finally:
        real_nodes.regain(lost)
        cluster.wait(f"/api/v1/nodes/{lost}", lambda node: node and is_ready(node), "the node is back", 180)


def test_a_renewed_certificate_reaches_a_running_worker(cluster: Cluster, user: User) -> None:
    """As cert-manager renews one: the Secret has another pair, here of another authority, which alone is trusted."""
    assert json.loads(user.sky("up", "dev", "--memory", "2Gi", "--json"))["ready"] is True
    namespace = user.namespace
    (before,) = pods_of(cluster, namespace, "dev")
    with user.started(SESSION) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "3.0\n"
        pair = issue("dev", namespace, datetime.datetime.now(datetime.UTC))
        parts = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": pair.authority}
        data = {key: base64.b64encode(text.encode()).decode() for key, text in parts.items()}
        cluster.patch(f"/api/v1/namespaces/{namespace}/secrets/dev-tls", {"data": data})
        log = cluster.kubectl_command("logs", "--follow", f"--namespace={namespace}", "dev-0")
        wanted = fingerprint_of(pair.certificate)
        with subprocess.Popen(bound(log), env=cluster.environment, stdout=subprocess.PIPE, text=True) as follower:
            assert follower.stdout is not None
            found = next((line for line in follower.stdout if "was reloaded" in line and wanted in line), "")
            follower.kill()
        assert found, "the log ended before the new certificate was there"
        # Who comes now trusts the new one only, and who was there stays.
        user.python(CHECK)
        output, errors = program.communicate("\n", timeout=60)
        assert (output, program.returncode) == ("6.0\n", 0), errors
    (after,) = pods_of(cluster, namespace, "dev")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    status = cluster.get(path_of(namespace, "dev"))
    assert condition(status, "Degraded")["status"] == "False"
    assert cluster.get(f"/api/v1/namespaces/{namespace}/secrets/dev-tls")["data"] == data
    user.sky("down", "dev")
    wait_nothing_left(cluster, namespace, "dev")


def test_a_rotated_token_reaches_a_running_worker(cluster: Cluster, user: User) -> None:
    assert json.loads(user.sky("up", "dev", "--memory", "2Gi", "--json"))["ready"] is True
    user.python(CHECK)
    (before,) = pods_of(cluster, user.namespace, "dev")
    secret = f"/api/v1/namespaces/{user.namespace}/secrets/dev-token"
    old = cluster.get(secret)["data"]["token"]
    rotated = user.try_python("-m", "skyproxy.cli.main", "token", "rotate", "dev", "--namespace", user.namespace)
    assert rotated.returncode == 0, rotated.stderr
    assert cluster.get(secret)["data"]["token"] != old
    user.python(CHECK)
    (after,) = pods_of(cluster, user.namespace, "dev")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    user.sky("down", "dev")
    wait_nothing_left(cluster, user.namespace, "dev")
