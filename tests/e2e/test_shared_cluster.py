"""Neighbours in a namespace, as the API server's own admission and controllers see to them."""

from __future__ import annotations

import json

import pytest

from tests.e2e.cluster import ApiError, Cluster, Object, condition
from tests.e2e.computes import TRIVIAL, User, make, path_of, wait_phase, wait_reason
from tests.e2e.installation import NAMESPACE

SESSION = """
import sys

import torch

import skyproxy

x = torch.ones(4, device="sky:0")
print(x.sum().item(), flush=True)
sys.stdin.readline()
"""

pytestmark = pytest.mark.usefixtures("installation")


def put_quota(cluster: Cluster, namespace: str, **hard: str) -> None:
    """Makes a ResourceQuota, and waits until its controller counts."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "share"}, "spec": {"hard": hard}}
    folder = f"/api/v1/namespaces/{namespace}/resourcequotas"
    cluster.create(folder, quota)
    cluster.wait(f"{folder}/share", lambda found: (found or {}).get("status", {}).get("used"), "the quota counts")


def warnings(cluster: Cluster, namespace: str, reason: str) -> list[Object]:
    events = cluster.items(f"/api/v1/namespaces/{namespace}/events", fieldSelector=f"reason={reason}")
    return [event for event in events if event["involvedObject"]["kind"] == "Compute"]


def test_a_quota_is_named_with_its_amounts_and_its_room_is_taken_when_there_is_some(
    cluster: Cluster, user: User
) -> None:
    namespace = user.namespace
    put_quota(cluster, namespace, pods="1")
    first = make(cluster, namespace, "first", **TRIVIAL)
    wait_phase(cluster, first, "Running")
    refused = user.try_sky("up", "second", "--no-use", "--timeout", "15s")
    assert refused.returncode == 4, refused.stderr
    said = "Pod second-0 exceeds the ResourceQuota share of its namespace: pods: 1 asked for, 1 of 1 in use."
    assert said in refused.stderr
    second = path_of(namespace, "second")
    assert wait_reason(cluster, second, "Degraded", "QuotaExceeded")["message"] == said
    cluster.delete(first)
    assert condition(wait_phase(cluster, second, "Running", 150), "Degraded")["status"] == "False"
    # It was refused more than once, and told of once.
    assert len(warnings(cluster, namespace, "QuotaExceeded")) == 1


def test_a_quota_that_counts_memory_asks_for_its_amount(cluster: Cluster, namespace: str) -> None:
    put_quota(cluster, namespace, **{"limits.memory": "1Gi"})
    path = make(cluster, namespace, "one", **TRIVIAL)
    text = wait_reason(cluster, path, "Ready", "QuotaNeedsResources")["message"]
    assert "the ResourceQuota share of its namespace counts limits.memory" in text
    cluster.patch(path, {"spec": {"resources": {"memory": "64Mi"}}})
    wait_phase(cluster, path, "Running")


def test_a_limit_range_is_named(cluster: Cluster, namespace: str) -> None:
    limits = [{"type": "Container", "max": {"memory": "64Mi"}}]
    made = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}, "spec": {"limits": limits}}
    cluster.create(f"/api/v1/namespaces/{namespace}/limitranges", made)
    path = make(cluster, namespace, "one", **TRIVIAL, resources={"memory": "65Mi"})
    text = wait_reason(cluster, path, "Ready", "LimitRangeViolated")["message"]
    assert "maximum memory usage per Container is 64Mi, but limit is 65Mi" in text
    cluster.patch(path, {"spec": {"resources": {"memory": "64Mi"}}})
    wait_phase(cluster, path, "Running")


def test_without_kueue_a_queue_is_no_way_past_it(cluster: Cluster, namespace: str) -> None:
    path = make(cluster, namespace, "one", **TRIVIAL, queue="research")
    assert "installs Kueue" in wait_reason(cluster, path, "Ready", "QueueUnavailable")["message"]
    assert cluster.items(f"/api/v1/namespaces/{namespace}/pods") == []
    cluster.patch(path, {"spec": {"queue": None}})
    wait_phase(cluster, path, "Running")


def test_a_cluster_without_claims_of_devices_says_so(cluster: Cluster, user: User) -> None:
    if "resource.k8s.io" in {group["name"] for group in cluster.get("/apis")["groups"]}:
        pytest.skip("this cluster may allocate devices by claims")
    namespace = user.namespace
    refused = user.try_sky("up", "one", "--claim", "gpu.nvidia.com:2", "--no-use", "--timeout", "10s")
    assert refused.returncode == 4, refused.stderr
    assert "spec.resourceClaims needs Kubernetes 1.32 or newer" in refused.stderr
    path = path_of(namespace, "one")
    assert cluster.get(path)["spec"]["resourceClaims"][0]["count"] == 2
    wait_reason(cluster, path, "Degraded", "ClaimsUnavailable")
    assert cluster.items(f"/api/v1/namespaces/{namespace}/pods") == []
    claims = [{"name": "gpu", "resourceClaimTemplateName": "half-a-gpu"}]
    path = make(cluster, namespace, "two", **TRIVIAL, resourceClaims=claims)
    wait_reason(cluster, path, "Ready", "ClaimsUnavailable")
    cluster.patch(path, {"spec": {"resourceClaims": None}})
    wait_phase(cluster, path, "Running")


def test_nodes_are_placed_in_one_domain_and_a_domain_that_is_not_there_is_waited_for(
    cluster: Cluster, namespace: str
) -> None:
    path = make(cluster, namespace, "near", **TRIVIAL, nodes=2, topology={"key": "kubernetes.io/hostname"})
    nodes = wait_phase(cluster, path, "Running")["status"]["nodes"]
    assert len({row["nodeName"] for row in nodes}) == 1
    path = make(cluster, namespace, "nowhere", **TRIVIAL, nodes=2, topology={"key": "example.com/rack"})
    text = wait_reason(cluster, path, "Scheduled", "Unschedulable")["message"]
    assert "affinity" in text
    cluster.patch(path, {"spec": {"topology": {"required": False}}})
    wait_phase(cluster, path, "Running")


def put_runtime(cluster: Cluster, name: str, namespace: str, spec: Object) -> str:
    """Makes a runtime for a namespace; gives its path."""
    text = json.dumps({"spec": spec, "overrides": ["resources"], "limits": {"nodes": 2}, "namespaces": [namespace]})
    metadata = {"name": name, "labels": {"skyproxy.dev/runtime": ""}}
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"runtime.yaml": text}}
    folder = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
    cluster.create(folder, made)
    return f"{folder}/{name}"


def test_a_runtime_fills_in_a_compute_and_a_change_of_it_ends_nothing(cluster: Cluster, user: User) -> None:
    namespace = user.namespace
    labelled = {"metadata": {"labels": {"tier": "first"}}}
    template = {**TRIVIAL["podTemplate"], **labelled}
    runtime = put_runtime(cluster, f"own-{namespace}", namespace, {**TRIVIAL, "podTemplate": template})
    name = runtime.rpartition("/")[2]
    refused = user.try_sky("up", "many", "--runtime", name, "--nodes", "3", "--no-use", "--timeout", "15s")
    assert refused.returncode == 4, refused.stderr
    assert f"spec.nodes: 3 are more than 2, which is the limit of runtime {name}" in refused.stderr
    absent = user.try_sky("up", "none", "--runtime", "absent", "--no-use", "--timeout", "15s")
    assert f"this installation has no runtime absent. There are: {name}" in absent.stderr

    path = make(cluster, namespace, "one", runtime=name, resources={"cpu": "1m"})
    wait_phase(cluster, path, "Running")
    pods = f"/api/v1/namespaces/{namespace}/pods"
    before = cluster.get(f"{pods}/one-0")
    assert before["metadata"]["labels"]["tier"] == "first"
    changed = json.dumps({"spec": {**TRIVIAL, "podTemplate": {**template, "metadata": {"labels": {"tier": "second"}}}}})
    cluster.patch(runtime, {"data": {"runtime.yaml": changed}})
    cluster.wait(path, lambda found: found and found["status"]["runtime"]["outdated"], "the change is seen")
    told = f"/api/v1/namespaces/{namespace}/events"
    cluster.wait_all(told, lambda found: "RuntimeChanged" in {row["reason"] for row in found.values()}, "it is told")
    events = warnings(cluster, namespace, "RuntimeChanged")
    assert [event["message"] for event in events] == [
        f"The runtime {name} has changed. The Pods that run stay as they are; those of the next start will have it."
    ]
    assert cluster.get(f"{pods}/one-0")["metadata"]["uid"] == before["metadata"]["uid"]
    cluster.patch(path, {"spec": {"suspend": True}})
    cluster.wait(f"{pods}/one-0", lambda found: found is None, "the Pod goes", 90)
    cluster.patch(path, {"spec": {"suspend": False}})
    wait_phase(cluster, path, "Running")
    assert cluster.get(f"{pods}/one-0")["metadata"]["labels"]["tier"] == "second"
    cluster.delete(runtime)


def policy_version(cluster: Cluster) -> str:
    """The version of budgets and evictions that the cluster prefers."""
    return str(cluster.get("/apis/policy")["preferredVersion"]["version"])


def evict(cluster: Cluster, namespace: str, pod: str) -> int:
    """Asks for an eviction, as a drain does; the HTTP status of a refusal, or 201."""
    kind = {"apiVersion": f"policy/{policy_version(cluster)}", "kind": "Eviction"}
    try:
        cluster.create(
            f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction",
            {**kind, "metadata": {"name": pod, "namespace": namespace}},
        )
    except ApiError as error:
        return error.status
    return 201


def test_a_drain_waits_for_sessions_and_for_nothing_else(cluster: Cluster, user: User) -> None:
    namespace = user.namespace
    path = make(cluster, namespace, "dev", resources={"memory": "4Gi"})
    wait_phase(cluster, path, "Running")
    user.sky("connect", "dev")
    with user.started(SESSION) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "4.0\n"
        cluster.wait(path, lambda found: found and found["status"].get("inUse"), "the session is seen")
        budget = f"/apis/policy/{policy_version(cluster)}/namespaces/{namespace}/poddisruptionbudgets/dev"
        cluster.wait(budget, lambda found: (found or {}).get("status", {}).get("currentHealthy") == 1, "it counts")
        assert evict(cluster, namespace, "dev-0") == 429
        pod = cluster.get(f"/api/v1/namespaces/{namespace}/pods/dev-0")
        assert pod["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
        program.communicate("\n", timeout=60)
    cluster.wait(budget, lambda found: found and found["status"]["disruptionsAllowed"] == 1, "nobody is left", 90)
    assert cluster.get(budget)["metadata"]["ownerReferences"][0]["name"] == "dev"
    assert evict(cluster, namespace, "dev-0") == 201
    cluster.delete(path)
    cluster.wait(budget, lambda found: found is None, "the budget goes with the Compute", 90)
