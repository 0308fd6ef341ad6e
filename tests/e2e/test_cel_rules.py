"""The custom resource on an API server that evaluates its CEL rules: what is refused, and in which words."""

from __future__ import annotations

import copy
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from skyproxy.kubernetes.answers import parse
from skyproxy_operator.compute_spec import problems
from tests.e2e.cel.server import DEFINITIONS, Server, build, is_cached
from tests.e2e.cluster import ApiError, Object, condition
from tests.e2e.computes import TRIVIAL, collection, path_of
from tests.e2e.control_plane.addresses import take_slot
from tests.manifests.custom_resource import CRD, SCHEMA, rules, with_defaults
from tests.manifests.test_custom_resource import (
    CASES,
    CHANGES,
    EXAMPLES,
    NAMES,
    SCHEMA_REFUSES,
    SPECS,
    VOLUME,
    compute,
)
from tests.operator.test_compute_spec import IN_PLACE, OTHER_PODS

pytestmark = pytest.mark.cel

_DOCS = Path(__file__).resolve().parents[2] / "docs"
DOCUMENTED = re.findall(
    r"^- (.+)$",
    (_DOCS / "reference/compute-resource.md")
    .read_text(encoding="utf-8")
    .split("## What else is checked")[1]
    .split("\n## ")[0],
    re.MULTILINE,
)
"""The rules, in the words of the reference."""

REFUSED: list[tuple[Object, str]] = [
    (compute("1d"), "metadata.name must begin with a lower-case letter"),
    (compute(port=65535, procsPerNode=2), "port + procsPerNode must not exceed 65536"),
    (compute(volumes=[VOLUME, {**VOLUME, "name": "b"}]), "volumes must have different paths"),
    (compute(suspendAfter="15m"), "suspendAfter needs snapshots"),
    (compute(resources={"nvidia.com/gpu": "0.5"}), "nvidia.com/gpu comes in whole numbers"),
    (compute(resources={"amd.com/gpu": "500m"}), "amd.com/gpu comes in whole numbers"),
    (
        compute(env=[{"name": "A", "value": "", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]),
        "an environment variable",
    ),
    (compute(env=[{"name": "SKYPROXY_TOKEN", "value": ""}]), "SKYPROXY_TOKEN and COMPUTE_POOL are set by the operator"),
    (compute(idleTimeout="0s"), "idleTimeout must be more than 0s"),
    (compute(maxLifetime="0d0h"), "maxLifetime must be more than 0s"),
    (compute(resourceClaims=[{"name": "a"}]), "a claim has exactly one of"),
    (compute(resourceClaims=[{"name": "a", "resourceClaimName": "b", "count": 2}]), "count and selectors belong to"),
    (compute(resourceClaims=[{"name": "a", "deviceClassName": "b", "request": "c"}]), "request chooses a part"),
    (compute(suspendAfter="0s", snapshots={"storage": "1Gi"}), "suspendAfter must be more than 0s"),
]
"""A Compute that breaks one rule, and how that rule's words begin."""


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that has the definition of Computes."""
    if not is_cached():
        build()
    slot = take_slot()
    made = Server(tmp_path_factory.mktemp("cel"), slot)
    try:
        made.start()
        made.define(CRD)
        yield made
        made.check()
    finally:
        made.stop()
        os.close(slot.lock)


def create(server: Server, item: Object, **params: str) -> Object:
    return server.request("POST", collection("default"), item, **params)


def refusal(server: Server, item: Object) -> str:
    """What the server says against a Compute; empty when it takes it. Nothing is kept."""
    try:
        create(server, item, dryRun="All")
    except ApiError as error:
        if error.status != 422:
            raise
        return str(error)
    return ""


def documented() -> Iterator[Object]:
    """Every Compute in the documentation."""
    for page in sorted(_DOCS.rglob("*.md")):
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            if re.search(r"^kind: Compute$", block, re.MULTILINE):
                yield from yaml.safe_load_all(block)


def accepted() -> Iterator[Object]:
    """Every Compute of the documentation, the examples and the tests that is as it should be."""
    yield from documented()
    for path in EXAMPLES:
        yield from yaml.safe_load_all(path.read_text(encoding="utf-8"))
    yield compute(**TRIVIAL)
    for spec in (*(spec for spec, good in CASES if good), *IN_PLACE, *OTHER_PODS):
        yield compute(**spec)
    for name, good in NAMES:
        if good:
            yield compute(name)


def test_the_server_takes_the_definition_with_all_its_rules(server: Server) -> None:
    found = server.request("GET", f"{DEFINITIONS}/{CRD['metadata']['name']}")
    assert condition(found, "Established")["status"] == "True"
    assert condition(found, "NonStructuralSchema") == {}
    (version,) = found["spec"]["versions"]
    assert sorted(rules(version["schema"]["openAPIV3Schema"])) == sorted(rules())


def test_a_rule_that_costs_too_much_or_is_none_would_be_refused(server: Server) -> None:
    def answer(schema: Object) -> str:
        other = copy.deepcopy(CRD)
        other["spec"]["names"] = {"kind": "Other", "listKind": "OtherList", "plural": "others", "singular": "other"}
        other["metadata"]["name"] = "others.skyproxy.dev"
        other["spec"]["versions"][0]["schema"]["openAPIV3Schema"] = schema
        with pytest.raises(ApiError) as refused:
            server.request("POST", DEFINITIONS, other, dryRun="All")
        return str(refused.value)

    unbounded = copy.deepcopy(SCHEMA)
    del unbounded["properties"]["spec"]["properties"]["volumes"]["maxItems"]
    assert "exceeds budget" in answer(unbounded)
    misspelt = copy.deepcopy(SCHEMA)
    misspelt["properties"]["spec"]["x-kubernetes-validations"][0]["rule"] = "self.prot + self.procsPerNode <= 65536"
    assert "undefined field 'prot'" in answer(misspelt)


def test_the_rules_are_those_of_the_reference() -> None:
    assert [message for _, _, message in rules()] == DOCUMENTED


@pytest.mark.parametrize(("item", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_breaks_a_rule_is_refused_in_the_words_of_the_reference(server: Server, item: Object, words: str) -> None:
    (rule,) = (rule for rule in DOCUMENTED if rule.startswith(words))
    said = refusal(server, item)
    assert [other for other in DOCUMENTED if other in said] == [rule]


@pytest.mark.parametrize(("change", "good"), CHANGES)
def test_what_cannot_change_in_a_volume_is_refused(server: Server, change: dict[str, Any], good: bool) -> None:
    name = f"change-{uuid.uuid4().hex[:8]}"
    before = {**VOLUME, "storageClassName": "fast", "accessMode": "ReadWriteOnce"}
    create(server, compute(name, volumes=[before]))
    changed = {"spec": {"volumes": [{**before, **change}]}}
    if good:
        assert (
            server.request("PATCH", path_of("default", name), changed)["spec"]["volumes"][0].items() >= change.items()
        )
    else:
        (field,) = change
        with pytest.raises(ApiError, match=f"{field} cannot be changed; use a volume of another name"):
            server.request("PATCH", path_of("default", name), changed)
    # Another volume is not a change of this one.
    server.request("PATCH", path_of("default", name), {"spec": {"volumes": [{**VOLUME, "name": "b"}]}})


def test_each_rule_of_the_reference_is_broken_by_one_of_these() -> None:
    broken = {next(rule for rule in DOCUMENTED if rule.startswith(words)) for _, words in REFUSED}
    changes = {
        f"{next(iter(change))} cannot be changed; use a volume of another name" for change, good in CHANGES if not good
    }
    assert broken | changes == set(DOCUMENTED)


@pytest.mark.parametrize("spec", SCHEMA_REFUSES, ids=str)
def test_what_the_schema_forbids_is_refused_with_the_fields_name(server: Server, spec: dict[str, Any]) -> None:
    (field,) = spec
    assert f"spec.{field}" in refusal(server, compute(**spec))


@pytest.mark.parametrize(
    "item", list(accepted()), ids=lambda item: f"{item['metadata']['name'][:8]}-{list(item['spec'])}"
)
def test_what_is_right_is_taken_as_it_is_with_the_defaults(server: Server, item: Object) -> None:
    made = create(server, item, dryRun="All")
    assert made["spec"] == with_defaults(SCHEMA, item)["spec"]


@pytest.mark.parametrize(("spec", "good"), CASES, ids=str)
def test_server_and_operator_judge_alike(server: Server, spec: dict[str, Any], good: bool) -> None:
    value = with_defaults(SCHEMA, compute(**spec))
    assert (refusal(server, compute(**spec)) == "", not list(problems("dev", value["spec"]))) == (good, good)


@pytest.mark.parametrize(("name", "good"), NAMES)
def test_server_and_operator_judge_names_alike(server: Server, name: str, good: bool) -> None:
    assert (refusal(server, compute(name)) == "", not list(problems(name, {}))) == (good, good)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(SPECS)
def test_whatever_the_schema_lets_through_is_judged_alike_by_server_and_operator(
    server: Server, spec: dict[str, Any]
) -> None:
    value = with_defaults(SCHEMA, compute(**spec))
    assert bool(refusal(server, compute(**spec))) == bool(list(problems("dev", value["spec"])))


def test_a_compute_that_no_parser_takes_is_stored_and_its_neighbour_is_read(server: Server) -> None:
    """Anybody who may make a Compute could otherwise keep the operator from seeing those of all others."""
    deep = json.dumps(compute("too-deep", podTemplate={"spec": "HERE"})).replace(
        '"HERE"', '{"a":' * 9000 + "1" + "}" * 9000
    )
    server.request_text("POST", collection("default"), deep)
    try:
        create(server, compute("neighbour"))
        text = server.request_text("GET", collection("default"))
        with pytest.raises(RecursionError):
            json.loads(text)
        found = {item["metadata"]["name"]: item["spec"] for item in parse(text)["items"]}
        assert found["neighbour"] == create(server, compute("another"), dryRun="All")["spec"]
        assert any("podTemplate.spec.a: there is no such field" in line for line in problems("x", found["too-deep"]))
    finally:
        server.request_text("DELETE", path_of("default", "too-deep"))
