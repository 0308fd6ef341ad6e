"""What a spec means, and which ones are refused."""

from __future__ import annotations

from typing import Any

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy_operator.compute_spec import ComputeSpec, problems

VOLUME = {"name": "cache", "storage": "10Gi", "path": "/cache"}


def test_an_empty_spec_is_a_worker() -> None:
    spec = ComputeSpec.parse("dev", {})
    assert spec == ComputeSpec()
    assert (spec.nodes, list(spec.ports), spec.accelerators, spec.idle_timeout_seconds) == (1, [8765], {}, None)


def test_everything_is_parsed() -> None:
    spec = ComputeSpec.parse(
        "dev",
        {
            "image": "i",
            "resources": {"cpu": 1, "memory": "8Gi", "nvidia.com/gpu": "2"},
            "nodes": 2,
            "procsPerNode": 2,
            "port": 9000,
            "volumes": [{**VOLUME, "reclaimPolicy": "Retain"}],
            "env": [{"name": "A", "value": "b"}],
            "envFrom": [{"secretRef": {"name": "s"}}],
            "imagePullSecrets": [{"name": "pull"}],
            "idleTimeout": "30m",
            "maxLifetime": "1d",
            "restartPolicy": {"maxRestarts": 7},
            "gateway": {"enabled": True, "hostname": "a.example"},
        },
    )
    assert spec.resources == {"cpu": "1", "memory": "8Gi", "nvidia.com/gpu": "2"}
    assert (spec.accelerators, list(spec.ports), spec.image_pull_secrets) == (
        {"nvidia.com/gpu": 2},
        [9000, 9001],
        ("pull",),
    )
    assert (spec.idle_timeout_seconds, spec.max_lifetime_seconds) == (1800, 86400)
    assert (spec.restart.max_restarts, spec.restart.backoff_seconds) == (7, 5)
    assert spec.gateway is not None
    assert spec.gateway.hostname == "a.example"
    (volume,) = spec.volumes
    # Several nodes mount it at the same time.
    assert (volume.access_mode, volume.retain) == ("ReadWriteMany", True)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"port": 65535, "procsPerNode": 2}, "spec.port"),
    ({"resources": {"nvidia.com/gpu": "0.5"}}, r"nvidia.com/gpu\]: '0.5' is not whole"),
    ({"resources": {"nvidia.com/gpu": "1k"}}, "whole numbers"),
    ({"resources": {"memory": "8GB"}}, r"spec.resources\[memory\]: '8GB' is not a quantity"),
    ({"volumes": [VOLUME, {**VOLUME, "name": "other"}]}, "that of volume cache too"),
    ({"volumes": [VOLUME, {**VOLUME, "name": "other", "path": "/cache/"}]}, "that of volume cache too"),
    ({"volumes": [{**VOLUME, "path": "/tmp"}]}, "used by the worker itself"),
    ({"volumes": [{**VOLUME, "path": "/var/run/skyproxy/token"}]}, "used by the worker itself"),
    ({"volumes": [{**VOLUME, "path": "/"}]}, "used by the worker itself"),
    ({"volumes": [{**VOLUME, "name": "tls"}]}, "used by the operator"),
    ({"volumes": [{**VOLUME, "name": "v" * 62}]}, "too long"),
    ({"volumes": [{**VOLUME, "storage": "much"}]}, "storage: 'much' is not a quantity"),
    ({"env": [{"name": "A", "value": "", "valueFrom": {}}]}, "either value or valueFrom"),
    ({"env": [{"name": "SKYPROXY_TOKEN", "value": "x"}]}, "set by the operator"),
    ({"sharedMemory": "2 Gi"}, "spec.sharedMemory"),
    ({"idleTimeout": "30x"}, "spec.idleTimeout: '30x' is not a duration"),
    ({"maxLifetime": "tomorrow"}, "spec.maxLifetime"),
    ({"idleTimeout": "0s"}, "spec.idleTimeout: '0s' is over before it begins"),
    ({"maxLifetime": "0d0h"}, "spec.maxLifetime: '0d0h' is over before it begins"),
    ({"idleTimeout": "99999999999d"}, "spec.idleTimeout: '99999999999d' is longer than ten years"),
    ({"podTemplate": {"status": {}}}, "metadata and spec only"),
    ({"podTemplate": {"spec": {"nodeSelektor": {}}}}, "nodeSelektor: there is no such field; did you mean nodeSel"),
    ({"podTemplate": {"spec": {"foo": 1}}}, "podTemplate.spec.foo: there is no such field"),
    (
        {"podTemplate": {"spec": {"containers": [{"name": "worker", "imagePullPolice": "Always"}]}}},
        r"containers\[worker\].imagePullPolice: there is no such field; did you mean imagePullPolicy",
    ),
    ({"podTemplate": {"spec": {"containers": "x"}}}, "spec.containers: it must be a list, and is a string"),
    ({"podTemplate": {"spec": {"hostname": ["x"]}}}, "spec.hostname: it must be of the type str, and is a list"),
    ({"podTemplate": {"spec": {"priority": "high"}}}, "spec.priority: it must be of the type int, and is a string"),
    ({"podTemplate": {"spec": {"priority": True}}}, "spec.priority: it must be of the type int"),
    ({"podTemplate": {"metadata": {"labels": "x"}}}, "metadata.labels: it must be an object, and is a string"),
    ({"podTemplate": {"metadata": {"labels": {"a": ["b"]}}}}, r"labels\[a\]: it must be of the type str"),
    ({"podTemplate": {"spec": 0}}, "must be an object"),
    ({"podTemplate": {"spec": [1]}}, "must be an object"),
]


@pytest.mark.parametrize(("spec", "message"), BAD)
def test_what_cannot_work_is_refused_with_a_reason(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ComputeSpec.parse("dev", spec)


@pytest.mark.parametrize("name", ["1dev", "Dev", "dev-", "a.b", "", "d" * 51])
def test_names_of_which_no_service_can_be_made_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"metadata\.name"):
        ComputeSpec.parse(name, {})


def test_all_problems_are_told_at_once() -> None:
    found = list(problems("dev", {"idleTimeout": "x", "maxLifetime": "y", "sharedMemory": "z"}))
    assert len(found) == 3


# --- which changes make other pods ------------------------------------------------------------------------------------

IN_PLACE: list[dict[str, Any]] = [
    {"idleTimeout": "1h"},
    {"maxLifetime": "1h"},
    {"suspend": True},
    {"restartPolicy": {"maxRestarts": 0}},
    {"gateway": {"enabled": True}},
]
OTHER_PODS: list[dict[str, Any]] = [
    {"image": "i"},
    {"resources": {"cpu": "1"}},
    {"nodes": 2},
    {"procsPerNode": 2},
    {"port": 9000},
    {"volumes": [VOLUME]},
    {"env": [{"name": "A", "value": "b"}]},
    {"envFrom": [{"secretRef": {"name": "s"}}]},
    {"command": ["x"]},
    {"args": ["x"]},
    {"tolerations": [{"key": "x"}]},
    {"nodeSelector": {"a": "b"}},
    {"affinity": {"nodeAffinity": {}}},
    {"priorityClassName": "high"},
    {"serviceAccountName": "a"},
    {"imagePullSecrets": [{"name": "a"}]},
    {"sharedMemory": "4Gi"},
    {"podTemplate": {"spec": {"schedulerName": "x"}}},
]


@pytest.mark.parametrize("change", IN_PLACE)
def test_pods_stay(change: dict[str, Any]) -> None:
    assert ComputeSpec.parse("dev", change).pod_hash() == ComputeSpec().pod_hash()


@pytest.mark.parametrize("change", OTHER_PODS)
def test_pods_are_made_again(change: dict[str, Any]) -> None:
    assert ComputeSpec.parse("dev", change).pod_hash() != ComputeSpec().pod_hash()


def test_what_becomes_of_a_volume_later_is_nothing_to_pods() -> None:
    before = ComputeSpec.parse("dev", {"volumes": [VOLUME]})
    after = ComputeSpec.parse("dev", {"volumes": [{**VOLUME, "storage": "20Gi", "reclaimPolicy": "Retain"}]})
    assert before.pod_hash() == after.pod_hash()


def test_a_default_that_is_written_down_makes_no_other_pods() -> None:
    written = {"nodes": 1, "procsPerNode": 1, "port": 8765, "sharedMemory": "2Gi", "suspend": False}
    assert ComputeSpec.parse("dev", written).pod_hash() == ComputeSpec().pod_hash()


def test_the_hash_stays_the_same_over_versions() -> None:
    # Another value here means that an upgrade of the operator ends every running worker.
    spec = {"image": "i", "nodes": 2, "env": [{"name": "A", "value": "b"}], "volumes": [VOLUME]}
    assert ComputeSpec().pod_hash() == "44136fa355b3678a"
    assert ComputeSpec.parse("dev", spec).pod_hash() == "8cb46566be0bd0bc"
