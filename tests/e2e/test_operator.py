"""The operator on a real API server: what it makes, mends and takes away. Its workers are trivial commands here."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Object, condition
from tests.e2e.computes import (
    LABEL,
    TRIVIAL,
    children,
    collection,
    is_in,
    kill_worker,
    killable,
    make,
    manifest,
    messages,
    pods_of,
    wait_nothing_left,
    wait_phase,
    wait_reason,
)
from tests.e2e.control_plane.control_plane import ControlPlane
from tests.e2e.installation import Installation
from tests.e2e.kubelet.memory_limits import enforced
from tests.e2e.kubelet.pods import KILL_ANNOTATION

pytestmark = pytest.mark.usefixtures("installation")


def pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def spec_of(**more: Any) -> dict[str, Any]:
    return {**TRIVIAL, **more}


def uid(item: Object) -> str:
    return str(item["metadata"]["uid"])


def test_a_compute_gets_its_children_and_takes_them_with_it(cluster: Cluster, namespace: str) -> None:
    path = make(cluster, namespace, "one", **spec_of())
    compute = wait_phase(cluster, path, "Running")
    assert children(cluster, namespace, "one") == [
        "networkpolicies/one",
        "pods/one-0",
        "secrets/one-tls",
        "secrets/one-token",
        "services/one",
    ]
    assert compute["status"]["url"] == f"wss://one.{namespace}.svc:8765"
    assert condition(compute, "Degraded")["status"] == "False"
    secret = cluster.get(f"/api/v1/namespaces/{namespace}/secrets/one-token")
    token = base64.b64decode(secret["data"]["token"]).decode()
    assert len(token) >= 32
    # Written once: another reconcile must not lock the worker's clients out.
    cluster.patch(path, {"spec": {"idleTimeout": "1h"}})
    wait_phase(cluster, path, "Running")
    assert cluster.get(f"/api/v1/namespaces/{namespace}/secrets/one-token")["data"] == secret["data"]
    cluster.delete(path)
    wait_nothing_left(cluster, namespace, "one")


def test_a_child_that_someone_deletes_comes_back(cluster: Cluster, namespace: str) -> None:
    path = make(cluster, namespace, "one", **spec_of())
    wait_phase(cluster, path, "Running")
    service = f"/api/v1/namespaces/{namespace}/services/one"
    before = uid(cluster.get(service))
    cluster.delete(service)
    cluster.wait(service, lambda found: found and uid(found) != before, "the Service is made again")


def test_too_few_gpus_are_named_and_another_spec_helps(cluster: Cluster, namespace: str) -> None:
    path = make(cluster, namespace, "big", **spec_of(resources={"nvidia.com/gpu": "999"}))
    ready = wait_reason(cluster, path, "Ready", "Unschedulable")
    assert "nvidia.com/gpu (999 asked for)" in ready["message"]
    compute = cluster.get(path)
    assert condition(compute, "Scheduled")["status"] == "False"
    assert condition(compute, "Degraded")["status"] == "True"
    cluster.patch(path, {"spec": {"resources": None}})
    compute = wait_phase(cluster, path, "Running")
    assert condition(compute, "Degraded")["status"] == "False"


def test_a_compute_that_waits_for_gpus_gets_those_that_become_free(
    cluster: Cluster, namespace: str, control_plane: object
) -> None:
    first = make(cluster, namespace, "first", **spec_of(resources={"nvidia.com/gpu": "2"}))
    wait_phase(cluster, first, "Running")
    second = make(cluster, namespace, "second", **spec_of(resources={"nvidia.com/gpu": "2"}))
    assert "nvidia.com/gpu (2 asked for)" in wait_reason(cluster, second, "Ready", "Unschedulable")["message"]
    cluster.delete(first)
    wait_phase(cluster, second, "Running")


def test_a_killed_worker_is_started_again(cluster: Cluster, namespace: str) -> None:
    path = make(cluster, namespace, "one", **killable(spec_of(restartPolicy={"backoffSeconds": 1})))
    wait_phase(cluster, path, "Running")
    (before,) = pods_of(cluster, namespace, "one")
    kill_worker(cluster, before)
    cluster.wait(path, lambda found: (found or {})["status"].get("restarts") == 1, "a restart is counted")
    compute = wait_phase(cluster, path, "Running")
    (after,) = pods_of(cluster, namespace, "one")
    assert uid(after) != uid(before)
    assert "137" in compute["status"]["lastFailure"]


def test_a_worker_that_keeps_failing_has_failed_with_its_last_words(cluster: Cluster, namespace: str) -> None:
    spec = spec_of(
        command=["sh", "-c", "echo there is no such model; exit 3"],
        restartPolicy={"maxRestarts": 1, "backoffSeconds": 0},
    )
    path = make(cluster, namespace, "broken", **spec)
    compute = wait_phase(cluster, path, "Failed")
    ready = condition(compute, "Ready")
    assert "there is no such model" in ready["message"]
    assert "3" in ready["message"]
    assert compute["status"]["restarts"] == 1
    events = cluster.items(f"/api/v1/namespaces/{namespace}/events", fieldSelector="involvedObject.kind=Compute")
    assert "there is no such model" in messages(events)


def test_a_worker_that_takes_more_memory_than_it_has_says_so(
    cluster: Cluster, namespace: str, control_plane: object
) -> None:
    if not enforced():
        pytest.skip("this machine lets nobody make control groups for memory")
    command = ["python", "-c", "print('taking', flush=True); taken = bytearray(300 << 20); print(len(taken))"]
    spec = spec_of(command=command, resources={"memory": "64Mi"}, restartPolicy={"maxRestarts": 0})
    compute = wait_phase(cluster, make(cluster, namespace, "hungry", **spec), "Failed")
    ready = condition(compute, "Ready")
    assert "64Mi" in ready["message"]
    assert "OOMKilled" in compute["status"]["lastFailure"]


def test_a_worker_out_of_memory_says_so(cluster: Cluster, namespace: str, stand_in: None) -> None:
    policy = {"maxRestarts": 0}
    path = make(cluster, namespace, "hungry", **spec_of(resources={"memory": "64Mi"}, restartPolicy=policy))
    wait_phase(cluster, path, "Running")
    cluster.patch(pod_path(namespace, "hungry-0"), {"metadata": {"annotations": {KILL_ANNOTATION: "worker=OOMKilled"}}})
    compute = wait_phase(cluster, path, "Failed")
    assert "64Mi" in condition(compute, "Ready")["message"]
    assert "memory" in condition(compute, "Ready")["message"]


def test_an_image_that_cannot_be_pulled_is_named(cluster: Cluster, namespace: str) -> None:
    path = make(cluster, namespace, "imageless", image="registry.invalid/worker:1")
    assert "registry.invalid/worker:1" in wait_reason(cluster, path, "Ready", "ImagePullFailed", 120)["message"]


def test_the_operator_killed_while_it_creates_leaves_nothing_double_and_nothing_out(
    cluster: Cluster, namespace: str, installation: Installation
) -> None:
    names = [f"c{index}" for index in range(8)]
    secrets = f"/api/v1/namespaces/{namespace}/secrets"
    for name in names:
        make(cluster, namespace, name, **spec_of())
    # As early as something can be seen of its work, then once more when it is at it again.
    dead = ""
    for count in (1, 9):
        cluster.wait_all(
            secrets, lambda found, n=count: len(found) >= n, f"{count} secrets are made", 120, labelSelector=LABEL
        )
        dead = installation.kill()
        installation.pod(other_than=dead)
    cluster.wait_all(
        collection(namespace),
        lambda found: all(is_in("Running")(item) for item in found.values()),
        "all run",
        180,
    )
    for name in names:
        assert children(cluster, namespace, name) == [
            f"networkpolicies/{name}",
            f"pods/{name}-0",
            f"secrets/{name}-tls",
            f"secrets/{name}-token",
            f"services/{name}",
        ]
        assert "restarts" not in cluster.get(f"{collection(namespace)}/{name}")["status"]
    cluster.delete(collection(namespace))
    wait_nothing_left(cluster, namespace)


def test_a_restart_of_the_api_server_restarts_no_worker(
    cluster: Cluster, namespace: str, control_plane: ControlPlane
) -> None:
    path = make(cluster, namespace, "kept", **killable(spec_of(restartPolicy={"backoffSeconds": 0})))
    wait_phase(cluster, path, "Running")
    (before,) = pods_of(cluster, namespace, "kept")
    control_plane.restart_server()
    make(cluster, namespace, "new", **spec_of())
    wait_phase(cluster, f"{collection(namespace)}/new", "Running")
    (after,) = pods_of(cluster, namespace, "kept")
    assert uid(after) == uid(before)
    assert "restarts" not in cluster.get(path)["status"]
    # What happens afterwards is seen.
    kill_worker(cluster, after)
    cluster.wait(path, lambda found: (found or {})["status"].get("restarts") == 1, "the restart is counted", 120)
    wait_phase(cluster, path, "Running")


def test_what_happens_while_the_operator_is_down_is_made_good(
    cluster: Cluster, namespace: str, installation: Installation
) -> None:
    path = make(cluster, namespace, "kept", **killable(spec_of(restartPolicy={"backoffSeconds": 0})))
    make(cluster, namespace, "gone", **spec_of())
    wait_phase(cluster, path, "Running")
    wait_phase(cluster, f"{collection(namespace)}/gone", "Running")
    dead = installation.kill()
    kill_worker(cluster, pods_of(cluster, namespace, "kept")[0])
    cluster.delete(f"{collection(namespace)}/gone")
    make(cluster, namespace, "new", **spec_of())
    installation.pod(other_than=dead)
    wait_phase(cluster, f"{collection(namespace)}/new", "Running")
    cluster.wait(path, lambda found: (found or {})["status"].get("restarts") == 1, "the worker is started again")
    wait_phase(cluster, path, "Running")
    wait_nothing_left(cluster, namespace, "gone")


def test_a_lifetime_ends_the_pods_and_keeps_the_compute(cluster: Cluster, namespace: str) -> None:
    path = make(cluster, namespace, "short", **spec_of(maxLifetime="3s"))
    wait_phase(cluster, path, "Running")
    compute = wait_phase(cluster, path, "Expired")
    assert condition(compute, "Ready")["reason"] == "MaxLifetime"
    cluster.wait(pod_path(namespace, "short-0"), lambda found: found is None, "the Pod is gone")
    cluster.patch(path, {"spec": {"maxLifetime": "1h"}})
    wait_phase(cluster, path, "Running")


def test_suspend_removes_the_pods_and_resume_finds_the_data_again(cluster: Cluster, namespace: str) -> None:
    volumes = [{"name": "data", "storage": "1Gi", "path": "/data"}]
    script = "echo start >> /data/starts; trap 'exit 0' TERM; while :; do sleep 0.5; done"
    path = make(cluster, namespace, "pause", **spec_of(volumes=volumes, command=["sh", "-c", script]))
    wait_phase(cluster, path, "Running")
    cluster.patch(path, {"spec": {"suspend": True}})
    wait_phase(cluster, path, "Suspended")
    cluster.wait(pod_path(namespace, "pause-0"), lambda found: found is None, "the Pod is gone")
    assert "persistentvolumeclaims/pause-data" in children(cluster, namespace, "pause")
    assert "services/pause" in children(cluster, namespace, "pause")
    script = f"cat /data/starts; {script}"
    cluster.patch(path, {"spec": {"suspend": False, "command": ["sh", "-c", script]}})
    wait_phase(cluster, path, "Running")
    log = cluster.kubectl("logs", f"--namespace={namespace}", "pause-0")
    assert log == "start\n"


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
def test_a_volume_goes_or_stays_as_its_policy_says(cluster: Cluster, namespace: str, policy: str) -> None:
    volumes = [{"name": "data", "storage": "1Gi", "path": "/data", "reclaimPolicy": policy}]
    path = make(cluster, namespace, "one", **spec_of(volumes=volumes))
    wait_phase(cluster, path, "Running")
    claim = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/one-data"
    assert cluster.get(claim)["status"]["phase"] == "Bound"
    cluster.delete(path)
    cluster.wait(pod_path(namespace, "one-0"), lambda found: found is None, "the Pod is gone")
    if policy == "Delete":
        cluster.wait(claim, lambda found: found is None, "the claim is gone")
    else:
        cluster.wait(f"/api/v1/namespaces/{namespace}/services/one", lambda found: found is None, "the rest is gone")
        assert cluster.get(claim)["status"]["phase"] == "Bound"
        # Another Compute of that name takes it up again.
        make(cluster, namespace, "one", **spec_of(volumes=volumes))
        wait_phase(cluster, path, "Running")


def test_an_update_recreates_pods_only_where_it_must(cluster: Cluster, namespace: str) -> None:
    path = make(cluster, namespace, "one", **spec_of(env=[{"name": "COLOUR", "value": "red"}]))
    wait_phase(cluster, path, "Running")
    (first,) = pods_of(cluster, namespace, "one")
    cluster.patch(path, {"spec": {"idleTimeout": "2h", "maxLifetime": "3h"}})
    wait_phase(cluster, path, "Running")
    (second,) = pods_of(cluster, namespace, "one")
    assert uid(second) == uid(first)
    cluster.patch(path, {"spec": {"env": [{"name": "COLOUR", "value": "blue"}]}})
    wait_phase(cluster, path, "Running")
    (third,) = pods_of(cluster, namespace, "one")
    assert uid(third) != uid(first)
    assert {"name": "COLOUR", "value": "blue"} in third["spec"]["containers"][0]["env"]
    assert "restarts" not in cluster.get(path)["status"]


def test_deletion_while_it_is_created_leaves_nothing(cluster: Cluster, namespace: str) -> None:
    first_of = ["secrets", "services", "pods"]
    for index, kind in enumerate(["", *first_of]):
        name = f"c{index}"
        path = make(cluster, namespace, name, **spec_of())
        if kind:
            where = f"/api/v1/namespaces/{namespace}/{kind}"
            cluster.wait_all(where, bool, f"{kind} are made", labelSelector=f"{LABEL}={name}")
        cluster.delete(path)
    wait_nothing_left(cluster, namespace)


def test_a_compute_made_again_under_its_name_is_another_one(cluster: Cluster, namespace: str) -> None:
    path = make(cluster, namespace, "again", **spec_of())
    wait_phase(cluster, path, "Running")
    secret = f"/api/v1/namespaces/{namespace}/secrets/again-token"
    before = cluster.get(secret)["data"]["token"]
    cluster.delete(path)
    cluster.wait(path, lambda found: found is None, "it is gone")
    make(cluster, namespace, "again", **spec_of())
    wait_phase(cluster, path, "Running")
    assert cluster.get(secret)["data"]["token"] != before


def test_nodes_start_together_know_one_another_and_restart_together(cluster: Cluster, namespace: str) -> None:
    script = (
        'echo "$COMPUTE_POOL"; until getent hosts pair-0.pair-nodes && getent hosts pair-1.pair-nodes; do sleep 0.2; '
        "done; echo found; trap 'exit 0' TERM; while :; do sleep 0.5; done"
    )
    spec = killable(spec_of(nodes=2, command=["sh", "-c", script], restartPolicy={"backoffSeconds": 0}))
    path = make(cluster, namespace, "pair", **spec)
    compute = wait_phase(cluster, path, "Running")
    assert [node["rank"] for node in compute["status"]["nodes"]] == [0, 1]
    before = {pod["metadata"]["name"]: uid(pod) for pod in pods_of(cluster, namespace, "pair")}
    for node in (0, 1):
        lines = iter(cluster.kubectl("logs", f"--namespace={namespace}", f"pair-{node}").splitlines())
        pool = json.loads(next(lines))
        assert (pool["node"], pool["total_nodes"]) == (node, 2)
        assert pool["head_addr"].startswith("pair-0.pair-nodes.")
    kill_worker(cluster, pods_of(cluster, namespace, "pair")[1])
    cluster.wait(path, lambda found: (found or {})["status"].get("restarts") == 1, "the restart is counted")
    wait_phase(cluster, path, "Running")
    after = {pod["metadata"]["name"]: uid(pod) for pod in pods_of(cluster, namespace, "pair")}
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())


def test_fifty_computes_at_once(
    cluster: Cluster, namespace: str, installation: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    items = [manifest(f"many-{index}", **spec_of()) for index in range(50)]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    cluster.kubectl("apply", "--server-side", f"--namespace={namespace}", "-f", "-", text=text)
    applied = time.monotonic() - begin
    cluster.wait_all(
        collection(namespace),
        lambda found: len(found) == 50 and all(is_in("Running")(item) for item in found.values()),
        "all fifty run",
        240,
    )
    running = time.monotonic() - begin
    assert len(children(cluster, namespace)) == 5 * 50
    cluster.delete(collection(namespace))
    wait_nothing_left(cluster, namespace, seconds=240)
    gone = time.monotonic() - begin - running
    assert "Traceback" not in installation.logs()
    with capsys.disabled():
        print(
            f"\nfifty Computes: applied in {applied:.1f} s, all Running after {running:.1f} s, gone {gone:.1f} s later"
        )
