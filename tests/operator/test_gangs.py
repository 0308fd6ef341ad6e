"""Nodes that get machines together, or none, by schedulers for groups."""

from __future__ import annotations

from typing import Any

import pytest

from skyproxy_operator.gangs import gang_labels, scheduler_of
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


def test_without_its_scheduler_no_pod_is_made_and_the_cause_says_so() -> None:
    async def scenario(world: World) -> None:
        await world.settle()
        assert world.names("Pod") == []
        conditions = {item["type"]: item for item in world.status["conditions"]}
        assert conditions["Ready"]["reason"] == "GangUnavailable"
        assert "PodGroup of scheduling.volcano.sh/v1beta1" in conditions["Degraded"]["message"]

    run(scenario, World(nodes=2, gang="volcano"))
