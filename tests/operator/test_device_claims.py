"""Devices by claims: what is checked, what pods and templates say, and what a cluster without them gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kubernetes_asyncio import client

from skyproxy_operator.compute_spec import problems
from skyproxy_operator.device_claims import CLAIM_VERSIONS, DeviceClaim, template_name, template_spec
from skyproxy_operator.pod_builder import build_pod, pool
from tests.operator.makers import OPTIONS, make_compute, spec_of
from tests.operator.world import World, run

GPU = {"name": "gpu", "deviceClassName": "gpu.nvidia.com", "count": 2}


def pod_of(*claims: dict[str, Any], options: Any = OPTIONS, **spec: Any) -> dict[str, Any]:
    compute = make_compute(resourceClaims=list(claims), **spec)
    return build_pod(compute, spec_of(compute), 0, 0, options)


def test_pods_name_their_claims_and_the_container_uses_them() -> None:
    named = {"name": "half", "resourceClaimTemplateName": "half-a-gpu", "request": "mig"}
    shared = {"name": "shared", "resourceClaimName": "switch"}
    pod = pod_of(GPU, named, shared, resources={"cpu": 1})
    assert pod["spec"]["resourceClaims"] == [
        {"name": "gpu", "resourceClaimTemplateName": template_name("dev", DeviceClaim.parse(GPU))},  # type: ignore[arg-type]
        {"name": "half", "resourceClaimTemplateName": "half-a-gpu"},
        {"name": "shared", "resourceClaimName": "switch"},
    ]
    (worker,) = pod["spec"]["containers"]
    assert worker["resources"] == {
        "requests": {"cpu": "1"},
        "limits": {"cpu": "1"},
        "claims": [{"name": "gpu"}, {"name": "half", "request": "mig"}, {"name": "shared"}],
    }
    assert "claims" not in pod_of(resources={"cpu": 1})["spec"]["containers"][0]["resources"]


@pytest.mark.parametrize(
    ("device_class", "image", "computes"),
    [
        ("gpu.nvidia.com", OPTIONS.gpu_worker_image, 1),
        ("mig.nvidia.com", OPTIONS.gpu_worker_image, 1),
        ("gpu.amd.com", "rocm", 1),
        ("compute-domain-default-channel.nvidia.com", OPTIONS.worker_image, 0),
        ("dra.net", OPTIONS.worker_image, 0),
    ],
)
def test_a_class_of_gpus_chooses_the_image_and_tells_the_worker(device_class: str, image: str, computes: int) -> None:
    claim = {"name": "a", "deviceClassName": device_class}
    options = replace(OPTIONS, accelerator_images="gpu.amd.com=rocm")
    pod = pod_of(claim, options=options)
    assert pod["spec"]["containers"][0]["image"] == image
    keys = [row["key"] for row in pod["spec"].get("tolerations", ())]
    assert keys == (["nvidia.com/gpu"] if image == OPTIONS.gpu_worker_image else [])
    compute = make_compute(resourceClaims=[claim])
    assert pool(compute, spec_of(compute), 0, 0)["accelerators"] == computes


def test_a_class_without_an_image_asks_for_one() -> None:
    with pytest.raises(ValueError, match=r"no worker image for gpu\.amd\.com"):
        pod_of({"name": "a", "deviceClassName": "gpu.amd.com"})
    assert (
        pod_of({"name": "a", "deviceClassName": "gpu.amd.com"}, image="mine")["spec"]["containers"][0]["image"]
        == "mine"
    )


@pytest.mark.parametrize("version", CLAIM_VERSIONS)
def test_the_template_has_the_form_of_its_version(version: str) -> None:
    claim = DeviceClaim.parse({**GPU, "selectors": ["device.attributes['gpu.nvidia.com'].type == 'gpu'"]})  # type: ignore[arg-type, misc, typeddict-item]
    spec = template_spec(claim, version)
    api = client.ApiClient.__new__(client.ApiClient)
    api.configuration = client.Configuration()
    model = {"v1": "V1", "v1beta2": "V1beta2", "v1beta1": "V1beta1"}[version]
    read = api._ApiClient__deserialize_model(spec, getattr(client, f"{model}ResourceClaimTemplateSpec"))  # type: ignore[attr-defined]
    (request,) = read.spec.devices.requests
    exact = request if version == "v1beta1" else request.exactly
    assert (exact.device_class_name, exact.count, exact.allocation_mode) == ("gpu.nvidia.com", 2, "ExactCount")
    assert exact.selectors[0].cel.expression.startswith("device.attributes")


def test_other_devices_are_another_template_and_other_pods() -> None:
    def made(**change: Any) -> tuple[str, str]:
        compute = make_compute(resourceClaims=[{**GPU, **change}])
        (claim,) = spec_of(compute).claims
        return template_name("dev", claim), spec_of(compute).pod_hash()

    found = [made(), made(count=1), made(selectors=["true"]), made(deviceClassName="mig.nvidia.com")]
    assert len({name for name, _ in found}) == len({text for _, text in found}) == 4
    assert made() == found[0]


def test_templates_are_there_before_their_pods() -> None:
    async def scenario(world: World) -> None:
        await world.settle()
        assert world.status["phase"] == "Running"
        made = [kind for verb, kind, _ in world.cluster.requests if verb != "get"]
        assert made.index("ResourceClaimTemplate") < made.index("Pod")
        (template,) = world.cluster.all("ResourceClaimTemplate")
        assert template["apiVersion"] == "resource.k8s.io/v1beta2"
        assert template["metadata"]["ownerReferences"][0]["kind"] == "Compute"
        (pod,) = world.cluster.all("Pod")
        assert pod["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] == template["metadata"]["name"]

    world = World(resourceClaims=[GPU])
    world.cluster.kinds["ResourceClaimTemplate"] = "v1beta2"
    run(scenario, world)


@pytest.mark.parametrize(
    ("kinds", "there"), [({}, "no ResourceClaimTemplate"), ({"ResourceClaimTemplate": "v1alpha3"}, "of v1alpha3 only")]
)
def test_a_cluster_without_claims_makes_no_pod_and_says_what_it_lacks(kinds: dict[str, str], there: str) -> None:
    async def scenario(world: World) -> None:
        await world.settle()
        assert world.names("Pod") == world.names("ResourceClaimTemplate") == []
        conditions = {item["type"]: item for item in world.status["conditions"]}
        assert conditions["Ready"]["reason"] == conditions["Degraded"]["reason"] == "ClaimsUnavailable"
        assert "needs Kubernetes 1.32 or newer" in conditions["Degraded"]["message"]
        assert there in conditions["Degraded"]["message"]

    world = World(resourceClaims=[{"name": "a", "resourceClaimName": "b"}])
    world.cluster.kinds.update(kinds)
    run(scenario, world)


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ({"name": "a"}, "exactly one of"),
        ({"name": "a", "deviceClassName": "c", "resourceClaimName": "d"}, "exactly one of"),
        ({"name": "a", "resourceClaimName": "d", "count": 2}, "belong to deviceClassName"),
        ({"name": "a", "deviceClassName": "c", "request": "r"}, "only one"),
    ],
)
def test_what_cannot_be_is_refused_with_the_name_of_the_claim(claim: dict[str, Any], said: str) -> None:
    (line,) = problems("dev", {"resourceClaims": [claim]})  # type: ignore[typeddict-item, list-item]
    assert line.startswith("spec.resourceClaims[a]: ")
    assert said in line
