"""Nodes near to each other, in the words of whoever places them."""

from __future__ import annotations

from typing import Any

import pytest

from skyproxy_operator.pod_builder import build_pod
from tests.operator.makers import OPTIONS, make_compute, spec_of

KEY = "example.com/rack"
TERM = {"topologyKey": KEY, "labelSelector": {"matchLabels": {"skyproxy.dev/compute": "dev"}}}
REQUIRED = {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]}
PREFERRED = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": TERM}]}


def pod_of(**spec: Any) -> dict[str, Any]:
    compute = make_compute(**{"nodes": 2, "topology": {"key": KEY}, **spec})
    return build_pod(compute, spec_of(compute), 0, 0, OPTIONS)


@pytest.mark.parametrize(
    ("spec", "affinity", "annotation"),
    [
        ({}, REQUIRED, None),
        ({"topology": {"key": KEY, "required": False}}, PREFERRED, None),
        ({"gang": "volcano"}, REQUIRED, None),
        ({"gang": "kubernetes"}, None, None),
        # That one knows no preference.
        ({"gang": "kubernetes", "topology": {"key": KEY, "required": False}}, PREFERRED, None),
        ({"queue": "research"}, None, "required"),
        ({"queue": "research", "topology": {"key": KEY, "required": False}}, None, "preferred"),
        ({"nodes": 1}, None, None),
        ({"nodes": 1, "queue": "research"}, None, None),
        ({"topology": None}, None, None),
    ],
)
def test_each_scheduler_is_told_in_its_own_words(
    spec: dict[str, Any], affinity: dict[str, Any] | None, annotation: str | None
) -> None:
    pod = pod_of(**spec)
    assert pod["spec"].get("affinity", {}).get("podAffinity") == affinity
    said = {key: value for key, value in pod["metadata"]["annotations"].items() if "topology" in key}
    assert said == ({f"kueue.x-k8s.io/podset-{annotation}-topology": KEY} if annotation else {})


def test_an_affinity_of_the_users_own_stays_as_it_is() -> None:
    own = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}
    given = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}},
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [own]},
    }
    affinity = pod_of(affinity=given)["spec"]["affinity"]
    assert affinity["nodeAffinity"] == given["nodeAffinity"]
    assert affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == [own, TERM]
    assert given["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == [own]


def test_another_domain_means_other_pods_and_none_means_the_same() -> None:
    hashes = {
        spec_of(make_compute(nodes=2, **more)).pod_hash()
        for more in ({}, {"topology": {"key": "a"}}, {"topology": {"key": "a", "required": False}})
    }
    assert len(hashes) == 3
    assert spec_of(make_compute(topology=None)).pod_hash() == spec_of(make_compute()).pod_hash()
