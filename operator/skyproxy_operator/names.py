"""The names that the operator's objects, labels and annotations bear, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROUP = "skyproxy.dev"
VERSION = "v1alpha1"
PLURAL = "computes"
KIND = "Compute"
API_VERSION = f"{GROUP}/{VERSION}"
FIELD_MANAGER = "skyproxy-operator"

COMPUTE_LABEL = f"{GROUP}/compute"
NODE_LABEL = f"{GROUP}/node"
SPEC_HASH = f"{GROUP}/spec-hash"
"""On a pod: what of the spec it was made of. Another value means that the pod is made again."""
ATTEMPT = f"{GROUP}/attempt"
"""On a pod: which start of its Compute it belongs to, counted from 0."""
RUNTIME_LABEL = f"{GROUP}/runtime"
"""On a ConfigMap of the operator's namespace: it is a runtime that Computes may name."""
WAKE = f"{GROUP}/wake"
"""On a Compute: any new value starts one that has expired or failed."""
APPLIED = f"{GROUP}/applied"
"""On a child: what we said of it the last time. The same again need not be said."""
ISSUER = f"{GROUP}/cert-manager-issuer"
"""On a Compute: `Issuer/NAME` or `ClusterIssuer/NAME` of cert-manager, which then makes the certificate."""

CONTAINER = "worker"
TOKEN_FOLDER = "/var/run/skyproxy/token"
TLS_FOLDER = "/var/run/skyproxy/tls"
HOME_FOLDER = "/home/worker"


def pod_name(compute: str, node: int) -> str:
    """The pod of a node."""
    return f"{compute}-{node}"


def nodes_service(compute: str) -> str:
    """The headless Service by which nodes find one another."""
    return f"{compute}-nodes"


def token_secret(compute: str) -> str:
    """The Secret with the token."""
    return f"{compute}-token"


def tls_secret(compute: str) -> str:
    """The Secret with the certificate, its key, and the authority to trust."""
    return f"{compute}-tls"


def ca_config_map(compute: str) -> str:
    """The ConfigMap by which a gateway trusts the worker."""
    return f"{compute}-ca"


def claim_name(compute: str, volume: str) -> str:
    """The claim of a volume."""
    return f"{compute}-{volume}"


def server_name(compute: str, namespace: str) -> str:
    """The name that the certificate vouches for."""
    return f"{compute}.{namespace}.svc"


def labels(compute: str) -> dict[str, str]:
    """Return the labels of every child of a Compute."""
    return {
        COMPUTE_LABEL: compute,
        "app.kubernetes.io/name": "skyproxy-worker",
        "app.kubernetes.io/instance": compute,
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
    }


def owner_reference(compute: Mapping[str, Any]) -> dict[str, object]:
    """Return the reference that makes a child go when its Compute goes.

    blockOwnerDeletion is left out on purpose: with it, clusters that check owner references ask for the right to change
    the Compute's finalizers.
    """
    metadata = compute["metadata"]
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
