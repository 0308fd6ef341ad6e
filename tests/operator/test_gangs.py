"""Nodes that get machines together, or none, by schedulers for groups."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes_asyncio import client

from skyproxy_operator.gangs import gang_labels, group_name, scheduler_of
from skyproxy_operator.pod_builder import build_pod
from tests.operator.makers import OPTIONS, make_compute, spec_of
from tests.operator.world import World, run


def pod_of(**spec: Any) -> dict[str, Any]:
    compute = make_compute(**spec)
    return build_pod(compute, spec_of(compute), 0, 0, OPTIONS)


@pytest.mark.parametrize(
    ("spec", "scheduler", "labels", "annotations"),
    [
        ({"nodes": 2}, None, {}, {}),
        ({"gang": "volcano"}, None, {}, {}),
        ({"nodes": 2, "schedulerName": "own"}, "own", {}, {}),
        ({"nodes": 2, "gang": "volcano"}, "volcano", {}, {"scheduling.k8s.io/group-name": "dev"}),
        ({"nodes": 2, "gang": "volcano", "schedulerName": "v"}, "v", {}, {"scheduling.k8s.io/group-name": "dev"}),
        ({"nodes": 2, "gang": "coscheduling"}, None, {"scheduling.x-k8s.io/pod-group": "dev"}, {}),
    ],
)
def test_pods_name_their_scheduler_and_their_group(
    spec: dict[str, Any], scheduler: str | None, labels: dict[str, str], annotations: dict[str, str]
) -> None:
    compute = make_compute(**spec)
    assert scheduler_of(spec_of(compute)) == scheduler
    assert gang_labels(compute, spec_of(compute)) == (labels, annotations)
    pod = pod_of(**spec)
    assert pod["spec"].get("schedulerName") == scheduler
    assert pod["metadata"]["labels"].items() >= labels.items()
    assert pod["metadata"]["annotations"].items() >= annotations.items()


def test_nodes_spread_among_themselves_unless_a_constraint_says_otherwise() -> None:
    row = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    others = {"matchLabels": {"a": "b"}}
    first, second = pod_of(topologySpreadConstraints=[row, {**row, "labelSelector": others}])["spec"][
        "topologySpreadConstraints"
    ]
    assert first == {**row, "labelSelector": {"matchLabels": {"skyproxy.dev/compute": "dev"}}}
    assert second["labelSelector"] == others
    assert "topologySpreadConstraints" not in pod_of()["spec"]


@pytest.mark.parametrize(
    ("gang", "api_version"),
    [("volcano", "scheduling.volcano.sh/v1beta1"), ("coscheduling", "scheduling.x-k8s.io/v1alpha1")],
)
def test_the_group_is_there_before_its_pods_and_as_large_as_the_compute(gang: str, api_version: str) -> None:
    async def scenario(world: World) -> None:
        await world.settle()
        assert world.status["phase"] == "Running"
        made = [kind for verb, kind, _ in world.cluster.requests if kind in ("PodGroup", "Pod") and verb != "get"]
        assert made == ["PodGroup", "Pod", "Pod", "Pod", "Pod"][: len(made)]
        (group,) = world.cluster.all("PodGroup")
        assert (group["apiVersion"], group["spec"]["minMember"]) == (api_version, 2)
        assert group["metadata"]["ownerReferences"][0]["kind"] == "Compute"
        world.edit(nodes=3)
        await world.settle()
        assert world.cluster.all("PodGroup")[0]["spec"]["minMember"] == 3

    world = World(nodes=2, gang=gang)
    world.cluster.kinds["PodGroup"] = api_version.rpartition("/")[2]
    run(scenario, world)


def test_kubernetes_own_group_is_a_field_of_the_pods() -> None:
    compute = make_compute(nodes=2, gang="kubernetes")
    name = group_name("dev", spec_of(compute))
    pod = pod_of(nodes=2, gang="kubernetes")
    assert pod["spec"]["schedulingGroup"] == {"podGroupName": name}
    # Its size cannot be changed, so another size is another group.
    assert group_name("dev", spec_of(make_compute(nodes=3, gang="kubernetes"))) != name
    assert "schedulingGroup" not in pod_of(gang="kubernetes")["spec"]
    assert "schedulingGroup" not in pod_of(nodes=2, gang="volcano")["spec"]


def test_kubernetes_own_group_has_the_form_of_its_api() -> None:
    async def scenario(world: World) -> None:
        await world.settle()
        assert world.status["phase"] == "Running"
        (group,) = world.cluster.all("PodGroup")
        assert group["apiVersion"] == "scheduling.k8s.io/v1alpha2"
        api = client.ApiClient.__new__(client.ApiClient)
        api.configuration = client.Configuration()
        # The library's model of the API: a field that is spelt otherwise would not be found there.
        read = api._ApiClient__deserialize_model(group["spec"], client.V1alpha2PodGroupSpec)  # type: ignore[attr-defined]
        assert (read.scheduling_policy.gang.min_count, read.priority_class_name) == (2, "batch")
        assert read.scheduling_constraints.topology[0].key == "example.com/rack"
        assert {group["metadata"]["name"]} == {
            pod["spec"]["schedulingGroup"]["podGroupName"] for pod in world.cluster.all("Pod")
        }

    topology = {"key": "example.com/rack"}
    world = World(nodes=2, gang="kubernetes", topology=topology, priorityClassName="batch")
    world.cluster.kinds["PodGroup"] = "v1alpha2"
    run(scenario, world)


@pytest.mark.parametrize("kinds", [{}, {"PodGroup": "v1"}])
def test_kubernetes_own_group_of_another_version_is_none(kinds: dict[str, str]) -> None:
    async def scenario(world: World) -> None:
        await world.settle()
        assert world.names("Pod") == []
        conditions = {item["type"]: item for item in world.status["conditions"]}
        assert "PodGroup of scheduling.k8s.io/v1alpha2" in conditions["Degraded"]["message"]

    world = World(nodes=2, gang="kubernetes")
    world.cluster.kinds.update(kinds)
    run(scenario, world)


def test_without_its_scheduler_no_pod_is_made_and_the_cause_says_so() -> None:
    async def scenario(world: World) -> None:
        await world.settle()
        assert world.names("Pod") == []
        conditions = {item["type"]: item for item in world.status["conditions"]}
        assert conditions["Ready"]["reason"] == "GangUnavailable"
        assert "PodGroup of scheduling.volcano.sh/v1beta1" in conditions["Degraded"]["message"]

    run(scenario, World(nodes=2, gang="volcano"))
