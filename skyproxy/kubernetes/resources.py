"""Describing a worker to the cluster: the manifest of a Compute, checked before anything is sent."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from skyproxy.contexts import checked_name
from skyproxy.errors import ConfigurationError
from skyproxy.kubernetes.accelerators import is_device
from skyproxy.kubernetes.api_server import GROUP, Manifest
from skyproxy.kubernetes.client import VERSION
from skyproxy.units import duration_text, quantity

_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_QUEUE = re.compile(rf"(?=.{{1,63}}$){_LABEL.pattern}(\.{_LABEL.pattern})*")
_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}$){_LABEL.pattern}(\.{_LABEL.pattern})*")
_MAX_DEVICES = 64
_VOLUME_FIELDS = ("storageClassName", "accessMode", "reclaimPolicy")


class SpecFields(TypedDict, total=False):
    """Fields of a Compute's spec that go to the cluster as they are given."""

    affinity: Mapping[str, object]
    args: Sequence[str]
    command: Sequence[str]
    envFrom: Sequence[Mapping[str, object]]
    gang: str
    gateway: Mapping[str, object]
    imagePullSecrets: Sequence[Mapping[str, object]]
    nodeSelector: Mapping[str, str]
    podTemplate: Mapping[str, object]
    port: int
    priorityClassName: str
    queue: str
    resourceClaims: Sequence[Mapping[str, object]]
    restartPolicy: Mapping[str, object]
    runtime: str
    schedulerName: str
    serviceAccountName: str
    sharedMemory: int | str
    snapshots: Mapping[str, object]
    suspend: bool
    tolerations: Sequence[Mapping[str, object]]
    topology: Mapping[str, object]
    topologySpreadConstraints: Sequence[Mapping[str, object]]


_SPEC_FIELDS = SpecFields.__optional_keys__


def compute_manifest(
    name: str,
    *,
    namespace: str | None = None,
    image: str | None = None,
    resources: Mapping[str, object] | None = None,
    nodes: int = 1,
    procs_per_node: int = 1,
    volumes: Iterable[Mapping[str, object]] = (),
    env: Mapping[str, object] | None = None,
    idle_timeout_seconds: float | None = None,
    max_lifetime_seconds: float | None = None,
    suspend_after_seconds: float | None = None,
    **more: object,
) -> Manifest:
    """The Compute that the operator makes workers of; holds what is given and nothing else.

    Args:
        name: of the Compute.
        namespace: where it goes; the client's by default.
        image: of its containers.
        resources: quantities by resource name, for each node: {"cpu": "1", "nvidia.com/gpu": 1}.
        nodes: Pods.
        procs_per_node: worker processes in each.
        volumes: dicts with name, storage and path, and what claims know: storageClassName, accessMode, reclaimPolicy.
        env: texts by name, or a dict such as {"secretKeyRef": {"name": ..., "key": ...}}.
        idle_timeout_seconds: after which the Pods of an idle worker go.
        max_lifetime_seconds: after which they go in any case.
        suspend_after_seconds: after which the sessions of an idle worker are saved, and the Pods go; needs snapshots.
        more: other fields of the spec, as they are called there: tolerations, nodeSelector, podTemplate, ...

    Raises:
        ConfigurationError: something cannot work; says what would.
    """
    if nodes < 1 or procs_per_node < 1:
        raise ConfigurationError(f"nodes={nodes}, procs_per_node={procs_per_node}: each must be 1 or more.")
    unknown = sorted(more.keys() - _SPEC_FIELDS)
    if unknown:
        raise ConfigurationError(
            f"a Compute has no {', '.join(unknown)}. Besides the usual, it has: {', '.join(sorted(_SPEC_FIELDS))}."
        )
    spec: dict[str, object] = {"nodes": nodes}
    if procs_per_node > 1:
        spec["procsPerNode"] = procs_per_node
    if image:
        spec["image"] = image
    if resources:
        spec["resources"] = {key: _quantity(key, value) for key, value in resources.items()}
    if rows := [_volume(row) for row in volumes]:
        spec["volumes"] = rows
    if env:
        spec["env"] = [_variable(key, value) for key, value in env.items()]
    if idle_timeout_seconds:
        spec["idleTimeout"] = _limit_text(idle_timeout_seconds)
    if max_lifetime_seconds:
        spec["maxLifetime"] = _limit_text(max_lifetime_seconds)
    if suspend_after_seconds:
        spec["suspendAfter"] = _limit_text(suspend_after_seconds)
    queue = more.get("queue")
    if queue is not None and not _QUEUE.fullmatch(str(queue)):
        raise ConfigurationError(
            f"queue={queue!r}: a LocalQueue's name has small letters, digits, hyphens and dots, at most 63. See which "
            "there are: kubectl get localqueues"
        )
    spec |= {key: value for key, value in more.items() if value is not None}
    metadata = {"name": checked_name(name)} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Compute", "metadata": metadata, "spec": spec}


def claim_rows(texts: Iterable[str]) -> list[dict[str, object]]:
    """The claims of a Compute that a command line asks for.

    Args:
        texts: CLASS or CLASS:COUNT for devices of a DeviceClass; template/NAME or claim/NAME for what is there.

    Raises:
        ConfigurationError: one is written otherwise.
    """
    rows: list[dict[str, object]] = []
    for number, text in enumerate(texts):
        kind, slash, named = text.partition("/")
        device_class, colon, count = text.partition(":")
        key = {"template": "resourceClaimTemplateName", "claim": "resourceClaimName"}.get(kind) if slash else None
        if key is not None and _SUBDOMAIN.fullmatch(named):
            rows.append({"name": f"devices-{number}", key: named})
        elif (
            not slash
            and _SUBDOMAIN.fullmatch(device_class)
            and (not colon or (count.isascii() and count.isdigit() and 1 <= int(count) <= _MAX_DEVICES))
        ):
            rows.append({"name": f"devices-{number}", "deviceClassName": device_class, "count": int(count or 1)})
        else:
            raise ConfigurationError(
                f"{text!r} is no claim of devices. Name a DeviceClass and how many of its devices (1 to "
                f"{_MAX_DEVICES}), or what is there. Examples: gpu.nvidia.com:2, template/half-a-gpu, claim/shared"
            )
    return rows


def _limit_text(seconds: float) -> str:
    """A limit as the Compute writes it: rounded up to whole seconds, which operators of every version read."""
    return duration_text(math.ceil(seconds))


def _quantity(name: str, value: object) -> str:
    text = str(value).strip()
    quantity(text, f"resources: {name}")
    if is_device(name) and not text.isdigit():
        raise ConfigurationError(f"resources: {name}={text!r}: devices come in whole numbers.")
    return text


def _volume(row: Mapping[str, Any]) -> dict[str, str]:
    missing = [key for key in ("name", "storage", "path") if not row.get(key)]
    if missing:
        raise ConfigurationError(f"the volume {dict(row)!r} lacks {', '.join(missing)}. Example: cache:10Gi:/cache")
    unknown = sorted(row.keys() - {"name", "storage", "path", *_VOLUME_FIELDS})
    if unknown:
        raise ConfigurationError(
            f"the volume {row['name']} has no {', '.join(unknown)}; it can have: {', '.join(_VOLUME_FIELDS)}."
        )
    if not _LABEL.fullmatch(str(row["name"])):
        raise ConfigurationError(f"the volume's name {row['name']!r} must be small letters, digits and hyphens.")
    if not str(row["path"]).startswith("/") or ":" in str(row["path"]):
        raise ConfigurationError(f"the volume {row['name']} has the path {row['path']!r}; it must begin with '/'.")
    return {**{key: str(value) for key, value in row.items()}, "storage": _quantity(row["name"], row["storage"])}


def _variable(name: str, value: object) -> dict[str, object]:
    if not _VARIABLE.fullmatch(name):
        raise ConfigurationError(f"{name!r} cannot name an environment variable.")
    if name in ("SKYPROXY_TOKEN", "COMPUTE_POOL"):
        raise ConfigurationError(f"{name} is set by the operator; leave it out of env.")
    if isinstance(value, Mapping):
        return {"name": name, "valueFrom": dict(value.get("valueFrom", value))}
    return {"name": name, "value": str(value)}
