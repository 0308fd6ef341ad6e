"""What a Compute has beside its pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy_operator import children
from skyproxy_operator.options import load
from tests.operator.makers import OPTIONS, make_compute, spec_of

DOMAIN = replace(OPTIONS, gateway_domain="sky.example")


def in_namespace(namespace: str, name: str = "dev", **gateway: Any) -> tuple[dict[str, Any], Any]:
    compute = make_compute(name, gateway={"enabled": True, **gateway})
    compute["metadata"]["namespace"] = namespace
    return compute, spec_of(compute)


def test_hosts_of_different_computes_never_meet() -> None:
    pairs = [("a-b", "c"), ("a", "b-c"), ("a", "b--c"), ("a--b", "c"), ("a", "c"), ("a-b-c", "d"), ("a", "b-c-d")]
    hosts = [children.gateway_host(*in_namespace(namespace, name), DOMAIN) for name, namespace in pairs]
    assert len(set(hosts)) == len(pairs)
    assert hosts[0] == "a-b.c.sky.example"


@pytest.mark.parametrize("host", ["dev.other.sky.example", "sky.example", "x.sky.example", "DEV.Other.Sky.Example."])
def test_a_host_of_another_namespace_is_not_given(host: str) -> None:
    compute, spec = in_namespace("lab", hostname=host)
    assert children.is_foreign_host(compute, spec, DOMAIN)
    assert children.gateway_host(compute, spec, DOMAIN) is None


@pytest.mark.parametrize("host", ["nice.lab.sky.example", "dev.company.example", "notsky.example"])
def test_other_hosts_are_free(host: str) -> None:
    compute, spec = in_namespace("lab", hostname=host)
    assert children.gateway_host(compute, spec, DOMAIN) == host


def rules(ingress: str, egress: str = "*", **more: Any) -> dict[str, Any]:
    compute = make_compute()
    options = replace(OPTIONS, ingress=ingress, egress=egress, **more)
    made: dict[str, Any] = children.network_policy(compute, spec_of(compute), options)["spec"]
    return made


def test_by_default_workers_are_reached_from_everywhere_at_their_port() -> None:
    spec = rules("*")
    assert spec["policyTypes"] == ["Ingress"]
    assert spec["ingress"][0] == {"ports": [{"protocol": "TCP", "port": 8765}]}


def test_who_reaches_workers_can_be_limited() -> None:
    entry = rules("namespace, namespaces/ingress,10.0.0.0/8", lease_namespace="skyproxy-system")["ingress"][0]
    named = [
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for peer in entry["from"]
        if "namespaceSelector" in peer
    ]
    assert named == ["lab", "ingress", "skyproxy-system"]
    assert {"ipBlock": {"cidr": "10.0.0.0/8"}} in entry["from"]


def test_whom_workers_reach_can_be_limited() -> None:
    spec = rules("*", "")
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    dns, peers = spec["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    assert peers["to"] == [{"podSelector": {"matchLabels": {"skyproxy.dev/compute": "dev"}}}]
    assert {"ipBlock": {"cidr": "2001:db8::/32"}} in rules("*", "2001:db8::/32")["egress"][1]["to"]


@pytest.mark.parametrize("text", ["everywhere", "namespaces/", "10.0.0.0/99", "10.0.0.1/8"])
@pytest.mark.parametrize("option", ["INGRESS", "EGRESS"])
def test_a_rule_that_cannot_be_read_keeps_the_operator_from_starting(option: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"SKYPROXY_OPERATOR_{option}: '{text}'"):
        load({f"SKYPROXY_OPERATOR_{option}": text})
