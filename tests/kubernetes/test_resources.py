"""The manifest of a Compute: what is given becomes it, and what cannot work is refused here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from skyproxy.errors import ConfigurationError
from skyproxy.kubernetes.resources import claim_rows, compute_manifest

CRD = Path(__file__).resolve().parents[2] / "manifests" / "base" / "crd.yaml"


def test_nothing_given_is_nothing_said() -> None:
    assert compute_manifest("a") == {
        "apiVersion": "skyproxy.dev/v1alpha1",
        "kind": "Compute",
        "metadata": {"name": "a"},
        "spec": {"nodes": 1},
    }


def everything() -> dict[str, Any]:
    return compute_manifest(
        "a",
        namespace="team",
        image="registry/worker:1",
        resources={"cpu": "500m", "memory": "8Gi", "nvidia.com/gpu": 1},
        nodes=2,
        procs_per_node=4,
        volumes=[{"name": "cache", "storage": "10Gi", "path": "/cache", "reclaimPolicy": "Retain"}],
        env={"HF_HOME": "/cache", "N": 1, "TOKEN": {"secretKeyRef": {"name": "s", "key": "k"}}},
        idle_timeout_seconds=5400,
        max_lifetime_seconds=0.5,
        suspend_after_seconds=900,
        snapshots={"storage": "20Gi"},
        nodeSelector={"zone": "a"},
        queue="research",
        affinity=None,
    )


def test_everything_given_is_said() -> None:
    assert everything()["spec"] == {
        "nodes": 2,
        "procsPerNode": 4,
        "image": "registry/worker:1",
        "resources": {"cpu": "500m", "memory": "8Gi", "nvidia.com/gpu": "1"},
        "volumes": [{"name": "cache", "storage": "10Gi", "path": "/cache", "reclaimPolicy": "Retain"}],
        "env": [
            {"name": "HF_HOME", "value": "/cache"},
            {"name": "N", "value": "1"},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        ],
        "idleTimeout": "1h30m",
        "maxLifetime": "1s",
        "suspendAfter": "15m",
        "snapshots": {"storage": "20Gi"},
        "nodeSelector": {"zone": "a"},
        "queue": "research",
    }


def test_every_field_is_one_that_the_custom_resource_has() -> None:
    from skyproxy.kubernetes import resources

    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    known = set(schema["properties"]["spec"]["properties"])
    assert set(everything()["spec"]) | resources._SPEC_FIELDS == known
    volume = schema["properties"]["spec"]["properties"]["volumes"]["items"]["properties"]
    assert set(volume) == {"name", "storage", "path", *resources._VOLUME_FIELDS}


@pytest.mark.parametrize(("seconds", "text"), [(1, "1s"), (0.2, "1s"), (90061, "1d1h1m1s"), (59.5, "1m")])
def test_limits_are_rounded_up_to_whole_seconds(seconds: float, text: str) -> None:
    spec = compute_manifest("a", idle_timeout_seconds=seconds, max_lifetime_seconds=seconds)["spec"]
    assert (spec["idleTimeout"], spec["maxLifetime"]) == (text, text)


def test_claims_of_a_command_line_are_those_of_the_spec() -> None:
    rows = claim_rows(["gpu.nvidia.com", "gpu.nvidia.com:2", "template/half", "claim/a.b"])
    assert rows == [
        {"name": "devices-0", "deviceClassName": "gpu.nvidia.com", "count": 1},
        {"name": "devices-1", "deviceClassName": "gpu.nvidia.com", "count": 2},
        {"name": "devices-2", "resourceClaimTemplateName": "half"},
        {"name": "devices-3", "resourceClaimName": "a.b"},
    ]
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    fields = schema["properties"]["spec"]["properties"]["resourceClaims"]["items"]["properties"]
    assert {key for row in rows for key in row} <= set(fields)
    assert compute_manifest("a", resourceClaims=rows)["spec"]["resourceClaims"] == rows


@pytest.mark.parametrize("text", ["", "GPU", "gpu.nvidia.com:0", "gpu.nvidia.com:65", "gpu:x", "templates/a", "claim/"])
def test_a_claim_that_is_written_otherwise_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is no claim of devices.*template/half-a-gpu"):
        claim_rows([text])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"name": "A"}, "cannot name a worker"),
        ({"nodes": 0}, "nodes=0"),
        ({"resources": {"memory": "8 Gi"}}, "memory='8 Gi' is not a quantity"),
        ({"resources": {"nvidia.com/gpu": "0.5"}}, "whole numbers"),
        ({"volumes": [{"name": "a", "path": "/a"}]}, "lacks storage"),
        ({"volumes": [{"name": "a", "storage": "1Gi", "path": "a"}]}, "must begin with '/'"),
        ({"volumes": [{"name": "a", "storage": "1Gi", "path": "/a", "size": "1"}]}, "has no size"),
        ({"env": {"SKYPROXY_TOKEN": "x"}}, "set by the operator"),
        ({"env": {"a b": "x"}}, "cannot name an environment variable"),
        ({"replicas": 2}, "has no replicas"),
        ({"queue": "Research"}, "kubectl get localqueues"),
        ({"queue": "a" * 64}, "at most 63"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(given: dict[str, Any], problem: str) -> None:
    arguments = {"name": "a", **given}
    with pytest.raises(ConfigurationError, match=problem):
        compute_manifest(**arguments)
