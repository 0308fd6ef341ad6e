"""The custom resource's schema and rules, and that the operator judges as they do."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyproxy_operator import names, status
from skyproxy_operator.compute_spec import ComputeSpec, RestartPolicy, problems
from tests.manifests.custom_resource import (
    CRD,
    SCHEMA,
    VERSION,
    rule_problems,
    rules,
    schema_problems,
    walk,
    with_defaults,
)
from tests.manifests.kustomization import MANIFESTS, documents

EXAMPLES = sorted((MANIFESTS / "examples").glob("*.yaml"))
SPEC = SCHEMA["properties"]["spec"]
STATUS = SCHEMA["properties"]["status"]


def compute(name: str = "dev", **spec: Any) -> dict[str, Any]:
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": spec}


# --- the definition -------------------------------------------------------------------------------------------------


def test_it_bears_the_names_that_the_operator_uses() -> None:
    assert CRD["metadata"]["name"] == f"{names.PLURAL}.{names.GROUP}"
    assert (CRD["spec"]["group"], CRD["spec"]["names"]["plural"]) == (names.GROUP, names.PLURAL)
    assert (CRD["spec"]["names"]["kind"], VERSION["name"]) == (names.KIND, names.VERSION)
    assert CRD["spec"]["names"]["shortNames"] == ["sky"]
    assert VERSION["subresources"] == {"status": {}}


def test_the_schema_is_structural() -> None:
    """The rules of "structural schemas", which the server checks, too: types everywhere, no types inside of anyOf."""
    for path, schema in walk(SCHEMA):
        flexible = schema.get("x-kubernetes-int-or-string")
        assert ("type" in schema) != bool(flexible), path
        if flexible:
            assert schema["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
        for word in ("$ref", "definitions", "patternProperties", "uniqueItems", "oneOf", "not", "dependencies"):
            assert word not in schema, f"{path}: {word}"
        assert not ("properties" in schema and "additionalProperties" in schema), path
        if schema.get("type") == "array":
            assert "items" in schema, path
            assert schema["x-kubernetes-list-type"] in ("atomic", "map", "set"), path
        if schema.get("x-kubernetes-list-type") == "map":
            for key in schema["x-kubernetes-list-map-keys"]:
                assert key in schema["items"]["required"] or "default" in schema["items"]["properties"][key], path
        if "pattern" in schema:
            re.compile(schema["pattern"])


def test_what_rules_look_at_is_bounded() -> None:
    """Servers refuse rules whose estimated cost is too high, and estimate unbounded lists and texts at their worst."""
    for path, schema in walk(SPEC):
        if schema.get("type") == "array":
            assert "maxItems" in schema, path
    for word in ("path", "name"):
        assert "maxLength" in SPEC["properties"]["volumes"]["items"]["properties"][word]


def test_defaults_are_the_operators_own() -> None:
    spec = with_defaults(SPEC, {})
    assert ComputeSpec.parse("dev", spec) == ComputeSpec.parse("dev", {}) == ComputeSpec()
    assert ComputeSpec.parse("dev", spec).restart == RestartPolicy()
    volume = {"name": "a", "storage": "1Gi", "path": "/a"}
    assert ComputeSpec.parse("dev", with_defaults(SPEC, {"volumes": [volume]})) == ComputeSpec.parse(
        "dev", {"volumes": [volume]}
    )


def test_defaults_fit_the_schema() -> None:
    assert schema_problems(compute(**with_defaults(SPEC, {}))) == []


def test_printer_columns_show_what_there_is() -> None:
    for column in VERSION["additionalPrinterColumns"]:
        found = re.fullmatch(r"\.(status|spec)\.(\w+).*", column["jsonPath"])
        if found:
            assert found[2] in SCHEMA["properties"][found[1]]["properties"], column["name"]


def test_the_status_that_the_operator_writes_is_not_pruned() -> None:
    from skyproxy_operator.causes import Cause
    from skyproxy_operator.reaping import Report
    from tests.operator.makers import NOW, make_compute, make_pod, spec_of

    made = make_compute(nodes=2, gateway={"enabled": True, "hostname": "a.example"})
    pods = [make_pod(made, node, ready=True) for node in (0, 1)]
    device = {"type": "cuda", "index": 0, "name": "x", "total_memory_bytes": 1}
    report = Report(1.0, {"software": {"torch": "2", "python": "3", "skyproxy": "1"}, "devices": [device]})
    carried = {
        **dict.fromkeys(("restarts", "failuresInARow"), 1),
        **dict.fromkeys(("lastFailure", "formed", "endedFor", "endedReason", "endedMessage"), "x"),
        **dict.fromkeys(("lastFailureTime", "startTime", "readySince", "expiryTime"), status.timestamp(NOW)),
        "pullFailures": {"registry.example/worker:1": "manifest unknown"},
        "runtime": {"name": "a100", "template": "spec: {}", "outdated": True},
    }
    carried = status.with_activity(carried, [report], NOW)
    assert set(carried) == set(status._PAST)
    written = status.build_status(
        made,
        status.Verdict("Running", True, Cause("Ready", "x"), False, True),
        NOW,
        carried=carried,
        pods=pods,
        spec=spec_of(made),
        external_host="a.example",
    )
    assert schema_problems(compute() | {"status": written}) == []
    assert set(written) == set(STATUS["properties"])


@pytest.mark.parametrize(
    "phase",
    [
        status.PENDING,
        status.QUEUED,
        status.PROVISIONING,
        status.RUNNING,
        status.SUSPENDED,
        status.FAILED,
        status.EXPIRED,
        status.TERMINATING,
    ],
)
def test_every_phase_is_known(phase: str) -> None:
    assert phase in STATUS["properties"]["phase"]["enum"]
    assert len(STATUS["properties"]["phase"]["enum"]) == 8


# --- examples -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_what_they_seem(path: Any) -> None:
    from skyproxy_operator.pod_builder import build_pod
    from tests.operator.makers import OPTIONS

    (example,) = documents(path)
    assert schema_problems(example) == []
    made = {**example, "spec": with_defaults(SPEC, example["spec"])}
    made["metadata"] = {**made["metadata"], "namespace": "lab", "uid": "x"}
    spec = ComputeSpec.parse(made["metadata"]["name"], made["spec"])
    assert build_pod(made, spec, 0, 0, OPTIONS)["kind"] == "Pod"


def test_a_misspelt_field_of_an_example_would_be_found() -> None:
    assert schema_problems(compute(idleTimout="1h"))
    assert schema_problems(compute(volumes=[{"name": "a", "storage": "1Gi", "path": "/a", "mode": "x"}]))


SCHEMA_REFUSES: list[dict[str, Any]] = [
    {"nodes": 0},
    {"nodes": "1"},
    {"procsPerNode": 17},
    {"port": 80},
    {"resources": {"cpu": "1 core"}},
    {"resources": {"cpu": True}},
    {"volumes": [{"name": "a", "storage": "1Gi"}]},
    {"volumes": [{"name": "A", "storage": "1Gi", "path": "/a"}]},
    {"volumes": [{"name": "a", "storage": "1Gi", "path": "a"}]},
    {"volumes": [{"name": "a", "storage": "1Gi", "path": "/a", "reclaimPolicy": "Recycle"}]},
    {"env": [{"name": "1A"}]},
    {"idleTimeout": "1.h"},
    {"suspend": "yes"},
    {"suspendAfter": "soon"},
    {"snapshots": {}},
    {"snapshots": {"storage": "much"}},
    {"gateway": {"hostname": "*.example"}},
    {"image": ""},
    {"queue": ""},
    {"gang": "yes"},
    {"runtime": ""},
    {"runtime": "A100"},
    {"topology": {}},
    {"topology": {"key": "a b"}},
    {"resourceClaims": [{"deviceClassName": "gpu.nvidia.com"}]},
    {"resourceClaims": [{"name": "a", "deviceClassName": "gpu.nvidia.com", "count": 0}]},
    {"resourceClaims": [{"name": "a", "deviceClassName": "GPU"}]},
    {"schedulerName": "A"},
    {"topologySpreadConstraints": [{"maxSkew": 0, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule"}]},
    {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "z"}]},
    {"queue": "Research"},
    {"queue": "a..b"},
    {"queue": "a" * 64},
]


@pytest.mark.parametrize("spec", SCHEMA_REFUSES)
def test_the_schema_refuses(spec: dict[str, Any]) -> None:
    assert schema_problems(compute(**spec))


# --- rules ----------------------------------------------------------------------------------------------------------

VOLUME = {"name": "a", "storage": "1Gi", "path": "/a"}
CASES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"port": 65535}, True),
    ({"port": 65535, "procsPerNode": 2}, False),
    ({"volumes": [VOLUME, {**VOLUME, "name": "b"}]}, False),
    ({"volumes": [VOLUME, {**VOLUME, "name": "b", "path": "/b"}]}, True),
    ({"resources": {"nvidia.com/gpu": 1}}, True),
    ({"resources": {"nvidia.com/gpu": "0.5"}}, False),
    ({"resources": {"amd.com/gpu": "500m"}}, False),
    ({"resources": {"cpu": "0.5"}}, True),
    ({"env": [{"name": "A", "value": "", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}, False),
    ({"env": [{"name": "A", "value": ""}]}, True),
    ({"resourceClaims": [{"name": "a", "deviceClassName": "gpu.nvidia.com", "count": 2, "selectors": ["true"]}]}, True),
    ({"resourceClaims": [{"name": "a", "resourceClaimTemplateName": "half", "request": "gpu"}]}, True),
    ({"resourceClaims": [{"name": "a"}]}, False),
    ({"resourceClaims": [{"name": "a", "deviceClassName": "c", "resourceClaimName": "d"}]}, False),
    ({"resourceClaims": [{"name": "a", "resourceClaimName": "d", "count": 2}]}, False),
    ({"resourceClaims": [{"name": "a", "deviceClassName": "c", "request": "r"}]}, False),
    ({"env": [{"name": "COMPUTE_POOL", "value": ""}]}, False),
    ({"idleTimeout": "", "maxLifetime": "1d"}, True),
    ({"idleTimeout": "0s"}, False),
    ({"maxLifetime": "0d0h"}, False),
    ({"suspendAfter": "15m"}, False),
    ({"suspendAfter": "", "suspend": True}, True),
    ({"suspendAfter": "15m", "snapshots": {"storage": "20Gi"}}, True),
    ({"suspendAfter": "0s", "snapshots": {"storage": "20Gi"}}, False),
]


@pytest.mark.parametrize(("spec", "good"), CASES)
def test_rules_and_operator_judge_alike(spec: dict[str, Any], good: bool) -> None:
    pytest.importorskip("celpy", reason="evaluates the rules")
    value = with_defaults(SCHEMA, compute(**spec))
    assert (not rule_problems(value), not list(problems("dev", value["spec"]))) == (good, good)


NAMES = [("dev", True), ("d" * 50, True), ("d" * 51, False), ("1d", False), ("a.b", False), ("a-", False)]


@pytest.mark.parametrize(("name", "good"), NAMES)
def test_rules_and_operator_judge_names_alike(name: str, good: bool) -> None:
    pytest.importorskip("celpy", reason="evaluates the rules")
    value = with_defaults(SCHEMA, compute(name))
    assert (not rule_problems(value), not list(problems(name, value["spec"]))) == (good, good)


CHANGES: list[tuple[dict[str, Any], bool]] = [
    ({"storage": "2Gi"}, True),
    ({"path": "/other"}, True),
    ({"reclaimPolicy": "Retain"}, True),
    ({"storageClassName": "other"}, False),
    ({"accessMode": "ReadWriteMany"}, False),
]


@pytest.mark.parametrize(("change", "good"), CHANGES)
def test_what_cannot_change_in_a_volume(change: dict[str, Any], good: bool) -> None:
    pytest.importorskip("celpy", reason="evaluates the rules")
    old = with_defaults(
        SCHEMA, compute(volumes=[{**VOLUME, "storageClassName": "fast", "accessMode": "ReadWriteOnce"}])
    )
    new = copy.deepcopy(old)
    new["spec"]["volumes"][0].update(change)
    assert (not rule_problems(new, old)) == good
    # Another volume is not a change of this one, and taking the choice back is.
    other = compute(volumes=[{**VOLUME, "name": "b"}])
    assert not rule_problems(with_defaults(SCHEMA, other), old)
    del new["spec"]["volumes"][0]["storageClassName"]
    assert rule_problems(new, old)


def test_each_rule_is_broken_by_one_of_the_cases() -> None:
    pytest.importorskip("celpy", reason="evaluates the rules")
    broken = {message for spec, _ in CASES for message in rule_problems(with_defaults(SCHEMA, compute(**spec)))}
    changes = {message for _, rule, message in rules() if "oldSelf" in rule}
    of_names = {message for path, _, message in rules() if path == ""}
    assert broken | changes | of_names == {message for _, _, message in rules()}


VOLUMES = st.builds(
    lambda name, path: {"name": name, "storage": "1Gi", "path": path},
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["/a", "/b", "/a/b"]),
)
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "port": st.integers(65520, 65535),
        "procsPerNode": st.integers(1, 16),
        "volumes": st.lists(VOLUMES, max_size=3, unique_by=lambda item: item["name"]),
        "resources": st.dictionaries(
            st.sampled_from(["cpu", "nvidia.com/gpu"]), st.sampled_from([1, "1", "2.0", "500m"]), max_size=2
        ),
        "env": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(["A", "SKYPROXY_TOKEN"])},
                optional={"value": st.just(""), "valueFrom": st.just({"fieldRef": {"fieldPath": "x"}})},
            ),
            max_size=2,
            unique_by=lambda item: item["name"],
        ),
    },
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(SPECS)
def test_whatever_the_schema_lets_through_is_judged_alike(spec: dict[str, Any]) -> None:
    pytest.importorskip("celpy", reason="evaluates the rules")
    value = with_defaults(SCHEMA, compute(**spec))
    assert schema_problems(value) == []
    assert bool(rule_problems(value)) == bool(list(problems("dev", value["spec"])))
