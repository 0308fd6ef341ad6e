"""The parts of the Gateway API that we use, as strict schemas: what is not named here is an error.

Written after the API's reference, for tests without a cluster. Kubernetes' own objects have bundled schemas; these
kinds come from elsewhere.
"""

from __future__ import annotations

from typing import Any

import jsonschema

Schema = dict[str, Any]

_HOST = {
    "type": "string",
    "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
    "maxLength": 253,
}
_NAME = {"type": "string", "minLength": 1, "maxLength": 253}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_DURATION = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> Schema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


def _list(items: Schema, most: int) -> Schema:
    return {"type": "array", "minItems": 1, "maxItems": most, "items": items}


_REFERENCE = _object({"name": _NAME}, {"group": {"type": "string"}, "kind": _NAME, "namespace": _NAME})
_LISTENER = _object(
    {"name": _NAME, "port": _PORT, "protocol": {"enum": ["HTTP", "HTTPS", "TLS", "TCP", "UDP"]}},
    {
        "hostname": _HOST,
        "tls": _object({"mode": {"enum": ["Terminate", "Passthrough"]}, "certificateRefs": _list(_REFERENCE, 64)}),
        "allowedRoutes": _object({"namespaces": _object({"from": {"enum": ["All", "Selector", "Same"]}})}),
    },
)
_RULE = _object(
    {"backendRefs": _list(_object({"name": _NAME, "port": _PORT}), 16)},
    {
        "matches": _list(_object({"path": _object({"type": {"enum": ["Exact", "PathPrefix"]}, "value": _NAME})}), 64),
        "timeouts": _object({}, {"request": _DURATION, "backendRequest": _DURATION}),
    },
)
_PARENT = _object({"name": _NAME}, {**_REFERENCE["properties"], "sectionName": _NAME, "port": _PORT})

SPECS: dict[str, Schema] = {
    "GatewayClass": _object({"controllerName": {"type": "string", "pattern": r"^[a-z0-9.-]+/[A-Za-z0-9/._~-]+$"}}),
    "Gateway": _object({"gatewayClassName": _NAME, "listeners": _list(_LISTENER, 64)}),
    "HTTPRoute": _object({"parentRefs": _list(_PARENT, 32), "hostnames": _list(_HOST, 16), "rules": _list(_RULE, 16)}),
    "BackendTLSPolicy": _object(
        {
            "targetRefs": _list(_object({"group": {"type": "string"}, "kind": _NAME, "name": _NAME}), 16),
            "validation": _object(
                {
                    "hostname": {**_HOST, "not": {"pattern": r"^\*"}},
                    "caCertificateRefs": _list(_object({"group": {"type": "string"}, "kind": _NAME, "name": _NAME}), 8),
                }
            ),
        }
    ),
}
"""The spec of each kind."""


def gateway_problems(item: dict[str, Any]) -> list[str]:
    """What the Gateway API has against an object."""
    found = [
        f"{error.json_path}: {error.message}"
        for error in jsonschema.Draft202012Validator(SPECS[item["kind"]]).iter_errors(item["spec"])
    ]
    versions = {"BackendTLSPolicy": ("v1", "v1alpha3")}.get(item["kind"], ("v1",))
    if item["apiVersion"] not in [f"gateway.networking.k8s.io/{version}" for version in versions]:
        found.append(f"apiVersion: {item['apiVersion']}")
    return found
