"""The objects that a Compute has beside its pods: Services, Secrets, claims, a NetworkPolicy, a route. Nothing is sent
here.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from typing import Any

from skyproxy_operator.certificates import KeyPair, alternative_names
from skyproxy_operator.compute_spec import ComputeSpec, ComputeVolume
from skyproxy_operator.device_claims import CLAIM_TEMPLATE, DEVICE_GROUP, DeviceClaim, template_name, template_spec
from skyproxy_operator.gangs import group_name, group_spec
from skyproxy_operator.names import (
    COMPUTE_LABEL,
    NODE_LABEL,
    ca_config_map,
    claim_name,
    labels,
    nodes_service,
    owner_reference,
    server_name,
    tls_secret,
    token_secret,
)
from skyproxy_operator.options import ADDRESSES, Options, network_peers

Object = dict[str, Any]

_APP_PROTOCOL = "kubernetes.io/wss"
"""Tells gateways that they speak WebSocket over TLS to the worker."""
ROUTE_API = "gateway.networking.k8s.io/v1"


def service(compute: Object, spec: ComputeSpec) -> Object:
    """The Service by which clients in the cluster reach the first node; the others they reach by their own names."""
    name = compute["metadata"]["name"]
    # One node only: a session has two connections, and both must arrive at the same worker.
    selector = {COMPUTE_LABEL: name, NODE_LABEL: "0"}
    return _object(compute, "v1", "Service", name) | {
        "spec": {"type": "ClusterIP", "selector": selector, "ports": _service_ports(spec)}
    }


def headless_service(compute: Object, spec: ComputeSpec) -> Object:
    """The Service that gives each node a name, before it is ready, too: that is when nodes look for one another."""
    name = compute["metadata"]["name"]
    return _object(compute, "v1", "Service", nodes_service(name)) | {
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {COMPUTE_LABEL: name},
            "ports": _service_ports(spec),
        }
    }


def _service_ports(spec: ComputeSpec) -> list[Object]:
    return [
        {
            "name": f"worker-{index}" if index else "worker",
            "port": port,
            "targetPort": port,
            "protocol": "TCP",
            "appProtocol": _APP_PROTOCOL,
        }
        for index, port in enumerate(spec.ports)
    ]


def network_policy(compute: Object, spec: ComputeSpec, options: Options) -> Object:
    """Return the policy of who reaches the workers' ports, where the token decides, and whom the workers reach."""
    name = compute["metadata"]["name"]
    own = {"podSelector": {"matchLabels": {COMPUTE_LABEL: name}}}
    ports = [{"protocol": "TCP", "port": port} for port in spec.ports]
    entry: Object = {"ports": ports}
    if options.ingress != "*":
        operator = [_namespace_peer(options.lease_namespace)] if options.lease_namespace else []
        entry["from"] = [*_peers("ingress", options.ingress, compute["metadata"]["namespace"]), *operator, own]
    policy: Object = {
        "podSelector": own["podSelector"],
        "policyTypes": ["Ingress"],
        "ingress": [entry, {"from": [own]}],
    }
    if options.egress != "*":
        dns = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
        allowed = [own, *_peers("egress", options.egress, compute["metadata"]["namespace"])]
        policy |= {"policyTypes": ["Ingress", "Egress"], "egress": [{"ports": dns}, {"to": allowed}]}
    return _object(compute, "networking.k8s.io/v1", "NetworkPolicy", name) | {"spec": policy}


def is_limited(options: Options) -> bool:
    """Return whether an installation limits who reaches workers, or whom they reach."""
    return options.ingress != "*" or options.egress != "*"


def _peers(option: str, text: str, namespace: str) -> list[Object]:
    """Return the peers that an option names, as a NetworkPolicy has them."""
    return [
        {"ipBlock": {"cidr": name}} if kind == ADDRESSES else _namespace_peer(name or namespace)
        for kind, name in network_peers(option, text)
    ]


def _namespace_peer(name: str) -> Object:
    # The API server sets this label on every namespace, since 1.21.
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def claim(compute: Object, volume: ComputeVolume, existing: Object | None) -> Object:
    """The claim of a volume.

    Args:
        compute: its Compute.
        volume: what is wanted.
        existing: the claim that is there; what cannot change in it stays.
    """
    result = _object(compute, "v1", "PersistentVolumeClaim", claim_name(compute["metadata"]["name"], volume.name))
    if volume.retain:
        del result["metadata"]["ownerReferences"]
    spec: Object = {
        "accessModes": [volume.access_mode],
        "resources": {"requests": {"storage": volume.storage}},
    }
    if volume.storage_class is not None:
        spec["storageClassName"] = volume.storage_class
    if existing is not None:
        kept = ("accessModes", "storageClassName")
        spec |= {key: existing["spec"][key] for key in kept if key in existing["spec"]}
    return result | {"spec": spec}


def disruption_budget(compute: Object, spec: ComputeSpec, version: str, *, protected: bool) -> Object:
    """Return the budget by which a drain leaves the workers alone, or need not.

    Args:
        compute: their Compute.
        spec: its checked spec.
        version: that of PodDisruptionBudget which the cluster knows: v1, or v1beta1 before Kubernetes 1.21.
        protected: whether they must stay.
    """
    name = compute["metadata"]["name"]
    # A number that must stay: of pods whose owner cannot be scaled, Kubernetes takes neither percentages nor a number
    # that may go.
    least = spec.nodes if protected else 0
    return _object(compute, f"policy/{version}", "PodDisruptionBudget", name) | {
        "spec": {"minAvailable": least, "selector": {"matchLabels": {COMPUTE_LABEL: name}}}
    }


def pod_group(compute: Object, spec: ComputeSpec, api_version: str) -> Object:
    """Return the group of all nodes, for a scheduler that places them together or not at all."""
    name = group_name(compute["metadata"]["name"], spec)
    return _object(compute, api_version, "PodGroup", name) | {"spec": group_spec(spec)}


def claim_template(compute: Object, claim: DeviceClaim, version: str) -> Object:
    """Return the template by which each node gets the devices of a claim that names a class."""
    name = template_name(compute["metadata"]["name"], claim)
    return _object(compute, f"{DEVICE_GROUP}/{version}", CLAIM_TEMPLATE, name) | {"spec": template_spec(claim, version)}


def new_token(compute: Object) -> Object:
    """A Secret with a new token. It is created, and never changed."""
    token = secrets.token_urlsafe(32)
    return _secret(compute, token_secret(compute["metadata"]["name"]), "Opaque", {"token": token})


def certificate_secret(compute: Object, pair: KeyPair) -> Object:
    """The Secret with a certificate of our own."""
    data = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": pair.authority}
    return _secret(compute, tls_secret(compute["metadata"]["name"]), "kubernetes.io/tls", data)


def certificate_request(compute: Object, issuer: str) -> Object:
    """cert-manager's order for a certificate.

    Args:
        compute: whose workers it is for.
        issuer: `Issuer/NAME` or `ClusterIssuer/NAME`.

    Raises:
        ValueError: the issuer is written otherwise.
    """
    kind, _, issuer_name = issuer.partition("/")
    if kind not in ("Issuer", "ClusterIssuer") or not issuer_name:
        raise ValueError(f"{issuer!r} names no issuer; write Issuer/NAME or ClusterIssuer/NAME")
    name, namespace = compute["metadata"]["name"], compute["metadata"]["namespace"]
    return _object(compute, "cert-manager.io/v1", "Certificate", name) | {
        "spec": {
            "secretName": tls_secret(name),
            "dnsNames": alternative_names(name, namespace),
            "ipAddresses": ["127.0.0.1"],
            "usages": ["digital signature", "server auth"],
            "issuerRef": {"group": "cert-manager.io", "kind": kind, "name": issuer_name},
        }
    }


def gateway_host(compute: Object, spec: ComputeSpec, options: Options) -> str | None:
    """The name under which a Compute is reached from outside; None where nobody said one.

    Each namespace has a domain of its own in that of the installation: names of Computes and namespaces have no dots,
    so no two of them meet.
    """
    if spec.gateway is None or is_foreign_host(compute, spec, options):
        return None
    if spec.gateway.hostname is not None:
        return spec.gateway.hostname
    metadata = compute["metadata"]
    return f"{metadata['name']}.{metadata['namespace']}.{options.gateway_domain}" if options.gateway_domain else None


def is_foreign_host(compute: Object, spec: ComputeSpec, options: Options) -> bool:
    """Return whether the host name that a spec asks for belongs to another namespace of the installation's domain."""
    if spec.gateway is None or spec.gateway.hostname is None or not options.gateway_domain:
        return False
    host, domain = spec.gateway.hostname.lower().rstrip("."), options.gateway_domain.lower()
    return f".{host}".endswith(f".{domain}") and not host.endswith(f".{compute['metadata']['namespace']}.{domain}")


def gateway_parent(spec: ComputeSpec, options: Options) -> dict[str, str] | None:
    """The Gateway of a Compute; None where nobody named one."""
    if spec.gateway is not None and spec.gateway.parent is not None:
        return dict(spec.gateway.parent)
    namespace, _, name = options.gateway.rpartition("/")
    return {"name": name} | ({"namespace": namespace} if namespace else {}) if name else None


def route(compute: Object, spec: ComputeSpec, host: str, parent: Mapping[str, str]) -> Object:
    """The way from a Gateway to the first node."""
    name = compute["metadata"]["name"]
    return _object(compute, ROUTE_API, "HTTPRoute", name) | {
        "spec": {
            "parentRefs": [{"group": "gateway.networking.k8s.io", "kind": "Gateway", **parent}],
            "hostnames": [host],
            "rules": [
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                    "backendRefs": [{"name": name, "port": spec.port}],
                    # Sessions last for days, and gateways end long requests by themselves.
                    "timeouts": {"request": "0s", "backendRequest": "0s"},
                }
            ],
        }
    }


def ca_bundle(compute: Object, authority: str) -> Object:
    """The authority of a Compute's certificate where gateways can read it."""
    return _object(compute, "v1", "ConfigMap", ca_config_map(compute["metadata"]["name"])) | {
        "data": {"ca.crt": authority}
    }


def backend_policy(compute: Object, version: str) -> Object:
    """Makes a gateway speak TLS to the worker, and check its certificate.

    Args:
        compute: whose worker it is.
        version: that of BackendTLSPolicy which the cluster knows, such as v1.
    """
    name, namespace = compute["metadata"]["name"], compute["metadata"]["namespace"]
    return _object(compute, f"gateway.networking.k8s.io/{version}", "BackendTLSPolicy", name) | {
        "spec": {
            "targetRefs": [{"group": "", "kind": "Service", "name": name}],
            "validation": {
                "caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": ca_config_map(name)}],
                "hostname": server_name(name, namespace),
            },
        }
    }


def _object(compute: Object, api_version: str, kind: str, name: str) -> Object:
    metadata = compute["metadata"]
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": metadata["namespace"],
            "labels": labels(metadata["name"]),
            "ownerReferences": [owner_reference(compute)],
        },
    }


def _secret(compute: Object, name: str, kind: str, data: Mapping[str, str]) -> Object:
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    return _object(compute, "v1", "Secret", name) | {"type": kind, "data": encoded}
