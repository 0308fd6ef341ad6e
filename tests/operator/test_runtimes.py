"""Runtimes of a platform team: what they fill in, what a Compute may change, and that no change ends what runs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from skyproxy_operator.compute_spec import ComputeSpec
from skyproxy_operator.runtimes import _DEFAULTS, change_message, resolve
from tests.manifests.custom_resource import SCHEMA, with_defaults
from tests.operator.makers import OPTIONS, make_compute
from tests.operator.world import World, run

A100 = """
description: One A100
spec:
  image: registry.example/worker:1
  resources: {nvidia.com/gpu: 1, memory: 64Gi}
  nodeSelector: {pool: a100}
  tolerations: [{key: a100, operator: Exists}]
  env: [{name: HF_HOME, value: /cache}, {name: TEAM, value: platform}]
  idleTimeout: 1h
overrides: [resources, env, idleTimeout]
limits:
  nodes: 2
  resources: {nvidia.com/gpu: 4, memory: 256Gi}
  idleTimeout: 2h
namespaces: [lab, team-*]
"""
TEXTS = {"a100": A100, "field-only": "namespaces: [field]", "open": "overrides: ['*']\nspec: {image: any}"}


def filled_in(*, runtimes: dict[str, str] = TEXTS, options: Any = OPTIONS, **spec: Any) -> dict[str, Any]:
    compute = make_compute(**with_defaults(SCHEMA["properties"]["spec"], spec))
    return dict(resolve(compute, runtimes, has_pods=False, options=options).compute["spec"])


def refusal(*, runtimes: dict[str, str] = TEXTS, options: Any = OPTIONS, **spec: Any) -> str:
    with pytest.raises(ValueError, match="runtime") as told:
        filled_in(runtimes=runtimes, options=options, **spec)
    return str(told.value)


def test_a_runtime_fills_in_what_a_compute_does_not_say() -> None:
    spec = filled_in(runtime="a100", nodes=2, sharedMemory="4Gi")
    assert (spec["image"], spec["nodes"], spec["sharedMemory"]) == ("registry.example/worker:1", 2, "4Gi")
    assert spec["nodeSelector"] == {"pool": "a100"}
    assert ComputeSpec.parse("dev", spec).accelerators == {"nvidia.com/gpu": 1}  # type: ignore[arg-type]


def test_what_may_be_changed_is_merged_by_keys_and_names() -> None:
    mine = {"name": "TEAM", "value": "vision"}
    spec = filled_in(runtime="a100", resources={"nvidia.com/gpu": 4}, env=[mine, {"name": "A", "value": "1"}])
    assert spec["resources"] == {"nvidia.com/gpu": 4, "memory": "64Gi"}
    assert spec["env"] == [{"name": "HF_HOME", "value": "/cache"}, mine, {"name": "A", "value": "1"}]


def test_values_that_the_server_fills_in_are_nothing_that_a_compute_says() -> None:
    defaults = with_defaults(SCHEMA["properties"]["spec"], {})
    assert {key: value for key, value in defaults.items() if key != "gateway"} == _DEFAULTS
    texts = {"many": "spec: {nodes: 3, port: 9000, restartPolicy: {maxRestarts: 0}}"}
    spec = filled_in(runtimes=texts, runtime="many")
    assert (spec["nodes"], spec["port"], spec["restartPolicy"]) == (3, 9000, {"maxRestarts": 0})


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"image": "mine"}, "spec.image: the runtime a100 keeps it for itself; it may have its own resources, env"),
        ({"nodeSelector": {}}, "spec.nodeSelector: the runtime a100 keeps it"),
        ({"tolerations": [{"key": "b200"}]}, "spec.tolerations: the runtime a100 keeps it"),
        # It reaches all the others.
        ({"podTemplate": {"spec": {}}}, "spec.podTemplate: the runtime a100 keeps it"),
        # Devices that no limit counts.
        (
            {"resourceClaims": [{"name": "gpu", "deviceClassName": "gpu.nvidia.com", "count": 64}]},
            "spec.resourceClaims: the runtime a100 keeps it",
        ),
        ({"nodes": 3}, "spec.nodes: 3 are more than 2, which is the limit of runtime a100"),
        ({"resources": {"nvidia.com/gpu": 5}}, "spec.resources[nvidia.com/gpu]: 5 is more than 4, which is the limit"),
        ({"resources": {"memory": "300Gi"}}, "spec.resources[memory]: 300Gi is more than 256Gi"),
        ({"idleTimeout": "3h"}, "spec.idleTimeout: 3h is longer than 2h"),
        ({"idleTimeout": ""}, "spec.idleTimeout: no end is longer than 2h"),
    ],
)
def test_what_goes_beyond_a_runtime_is_refused_with_its_name(spec: dict[str, Any], said: str) -> None:
    assert said in refusal(runtime="a100", **spec)


def test_an_open_runtime_lets_everything_be_changed() -> None:
    template = {"spec": {"hostname": "a"}}
    spec = filled_in(runtime="open", image="mine", podTemplate=template)
    assert (spec["image"], spec["podTemplate"]) == ("mine", template)


def test_without_a_limit_of_resources_claims_are_the_computes() -> None:
    claims = [{"name": "gpu", "deviceClassName": "gpu.nvidia.com"}]
    texts = {"plain": "limits: {nodes: 2}", "shared": "limits: {resources: {memory: 1Gi}}\noverrides: [resourceClaims]"}
    for name in texts:
        assert filled_in(runtimes=texts, runtime=name, resourceClaims=claims)["resourceClaims"] == claims


def test_a_runtime_that_is_not_there_is_told_with_those_that_are() -> None:
    assert refusal(runtime="h100") == "spec.runtime: this installation has no runtime h100. There are: a100, open"
    assert refusal(runtime="field-only").endswith("is not for the namespace lab. There are: a100, open")
    assert "there is none for this namespace" in refusal(runtimes={}, runtime="h100")


def test_an_installation_can_demand_a_runtime() -> None:
    strict = replace(OPTIONS, require_runtime=True)
    assert "every Compute name one. There are: a100, open" in refusal(options=strict)
    assert filled_in(options=strict, runtime="a100")["image"] == "registry.example/worker:1"
    assert "image" not in filled_in()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "no object"),
        ("spec: [", "while parsing"),
        ("spek: {}", "there is no spek"),
        ("spec: {imag: a}", "spec.imag: a Compute has no such field"),
        ("spec: {runtime: a}", "the Compute's own"),
        ("spec: 3", "spec must be an object"),
        ("spec: {nodes: x}", "spec.nodes: it has not the form"),
        ("spec: {nodes: true}", "not the form"),
        ("spec: {image: 3}", "not the form"),
        ("spec: {tolerations: [a]}", "not the form"),
        ("spec: {topology: {key: a, rack: b}}", "not the form"),
        ("spec: {volumes: [{name: tmp, storage: 1Gi, path: /a}]}", "used by the operator"),
        ("spec: {resources: [a]}", "not the form"),
        ("spec: {volumes: [{}]}", "not the form"),
        ("spec: {resources: {memory: much}}", "is not a quantity"),
        ("limits: {gpus: 1}", "there are limits of idleTimeout, maxLifetime, nodes, resources"),
        ("limits: {nodes: 0}", "limits.nodes"),
        ("limits: {resources: {memory: much}}", "limits.resources[memory]='much' is not a quantity"),
        ("limits: {maxLifetime: soon}", "limits.maxLifetime"),
        ("overrides: image", "overrides must be a list"),
        ("overrides: [1]", "overrides must be texts"),
        ("description: " + "x" * (64 << 10), "longer than"),
    ],
)
def test_a_runtime_that_is_wrong_says_so_to_whoever_names_it(text: str, said: str) -> None:
    told = refusal(runtimes={"bad": text}, runtime="bad")
    assert told.startswith("the runtime bad cannot be used, and the platform's team must see to it: ")
    assert said in told
    # Others do not suffer from it.
    assert filled_in(runtimes={"bad": text, **TEXTS}, runtime="a100")["image"]


# --- in the life of a Compute -----------------------------------------------------------------------------------------


def image_of(world: World) -> str:
    (pod,) = world.cluster.all("Pod")
    return str(pod["spec"]["containers"][0]["image"])


def events(world: World) -> list[str]:
    return [event["message"] for event in world.cluster.all("Event") if event["reason"] == "RuntimeChanged"]


def world_of(**spec: Any) -> World:
    world = World(**spec)
    world.cluster.runtime_texts = {"own": "spec: {image: first, env: [{name: A, value: '1'}]}\noverrides: [env]"}
    return world


def change(world: World) -> None:
    world.cluster.runtime_texts = {"own": "spec: {image: second}"}


@pytest.mark.parametrize("is_new_operator", [False, True])
def test_a_change_ends_no_running_worker_and_is_told_once(is_new_operator: bool) -> None:
    async def scenario(world: World) -> None:
        await world.settle()
        (pod,) = world.cluster.all("Pod")
        assert (image_of(world), world.status["runtime"]["outdated"]) == ("first", False)
        change(world)
        if is_new_operator:
            world.start_operator()
        await world.settle()
        assert world.cluster.all("Pod")[0]["metadata"]["uid"] == pod["metadata"]["uid"]
        assert world.status["phase"] == "Running"
        assert world.status["runtime"]["outdated"]
        assert events(world) == [change_message("own")]
        # What is changed of the Compute meanwhile, such as a limit of time, is none of the Pods' business.
        world.edit(idleTimeout="1h")
        await world.settle()
        assert world.cluster.all("Pod")[0]["metadata"]["uid"] == pod["metadata"]["uid"]
        # Also where the runtime is gone altogether.
        world.cluster.runtime_texts = {}
        await world.settle()
        assert (world.status["phase"], image_of(world)) == ("Running", "first")

    run(scenario, world_of(runtime="own"))


@pytest.mark.parametrize("how", ["suspend", "crash", "edit"])
def test_the_next_start_has_the_change(how: str) -> None:
    async def scenario(world: World) -> None:
        await world.settle()
        change(world)
        await world.settle()
        if how == "suspend":
            world.edit(suspend=True)
            await world.settle()
            world.edit(suspend=False)
        elif how == "crash":
            world.cluster.fail("dev-0")
        else:
            world.edit(sharedMemory="3Gi")
        await world.settle(30)
        assert (image_of(world), world.status["runtime"]["outdated"]) == ("second", False)

    run(scenario, world_of(runtime="own", restartPolicy={"backoffSeconds": 1}))


def test_another_runtime_or_none_is_a_change_of_the_spec() -> None:
    async def scenario(world: World) -> None:
        world.cluster.runtime_texts["other"] = "spec: {image: third}"
        await world.settle()
        world.edit(runtime="other")
        await world.settle()
        assert (image_of(world), world.status["runtime"]["name"]) == ("third", "other")
        world.edit(runtime=None)
        await world.settle()
        assert image_of(world) == OPTIONS.worker_image
        assert "runtime" not in world.status

    run(scenario, world_of(runtime="own"))


def test_wherever_an_operator_stops_pods_are_those_of_the_text_in_the_status() -> None:
    """The text is written down before the first Pod: a change just then would otherwise end it."""

    async def scenario(stop_after: int) -> bool:
        world = world_of(runtime="own")
        world.cluster.stop_after = stop_after
        try:
            await world.look()
        except BaseException as exc:
            if type(exc).__name__ != "Interrupted":
                raise
        ended = world.cluster.stop_after == 0
        uids = [pod["metadata"]["uid"] for pod in world.cluster.all("Pod")]
        change(world)
        world.cluster.stop_after = None
        world.start_operator()
        await world.settle()
        if uids:
            assert [pod["metadata"]["uid"] for pod in world.cluster.all("Pod")] == uids
            assert image_of(world) == "first"
        else:
            assert image_of(world) == "second"
        return ended

    requests = 0
    while asyncio.run(scenario(requests)):
        requests += 1
    assert requests > 5


def test_without_its_runtime_a_compute_has_no_pods_and_gets_them_when_it_is_there() -> None:
    async def scenario(world: World) -> None:
        await world.settle()
        assert (world.names("Pod"), world.status["phase"]) == ([], "Failed")
        (ready,) = [row for row in world.status["conditions"] if row["type"] == "Ready"]
        assert "has no runtime late" in ready["message"]
        world.cluster.runtime_texts["late"] = "spec: {image: late}"
        await world.settle()
        assert (image_of(world), world.status["phase"]) == ("late", "Running")

    run(scenario, world_of(runtime="late"))


def test_children_follow_the_runtime() -> None:
    async def scenario(world: World) -> None:
        world.cluster.runtime_texts["own"] = "spec: {port: 9000}"
        await world.settle()
        world.cluster.runtime_texts["own"] = "spec: {port: 9001}"
        await world.settle()
        (service,) = world.cluster.all("Service")
        assert service["spec"]["ports"][0]["port"] == 9000
        world.edit(suspend=True)
        await world.settle()
        world.edit(suspend=False)
        await world.settle()
        (service,) = world.cluster.all("Service")
        assert service["spec"]["ports"][0]["port"] == 9001

    run(scenario, world_of(runtime="own"))


def test_every_field_of_a_compute_can_be_a_runtimes() -> None:
    whole = {
        "image": "a",
        "resources": {"cpu": 1},
        "resourceClaims": [{"name": "a", "deviceClassName": "gpu.nvidia.com", "count": 2}],
        "nodes": 2,
        "procsPerNode": 2,
        "port": 9000,
        "volumes": [{"name": "a", "storage": "1Gi", "path": "/a", "accessMode": "ReadWriteMany"}],
        "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
        "envFrom": [{"secretRef": {"name": "a"}}],
        "command": ["a"],
        "args": ["b"],
        "tolerations": [{"key": "a", "operator": "Exists", "tolerationSeconds": 3}],
        "nodeSelector": {"a": "b"},
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "a",
        "serviceAccountName": "a",
        "imagePullSecrets": [{"name": "a"}],
        "sharedMemory": "1Gi",
        "podTemplate": {"spec": {"hostname": "a"}},
        "idleTimeout": "1h",
        "maxLifetime": "2h",
        "queue": "a",
        "schedulerName": "a",
        "gang": "volcano",
        "topology": {"key": "a", "required": False},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "DoNotSchedule"}],
        "suspendAfter": "1h",
        "snapshots": {"storage": "1Gi"},
        "restartPolicy": {"maxRestarts": 0},
        "gateway": {"enabled": True, "parentRef": {"name": "a"}},
    }
    assert {*whole, "runtime", "suspend"} == set(SCHEMA["properties"]["spec"]["properties"])
    spec = filled_in(runtimes={"a": json.dumps({"spec": whole})}, runtime="a")
    assert ComputeSpec.parse("dev", spec) == ComputeSpec.parse("dev", whole)  # type: ignore[arg-type]
