"""The pod of a node, as it is sent to the API server.

It fits the pod security standard "restricted": no root, no privileges, a read-only root file system with writable
folders for the home and temporary files. What a site needs otherwise, a spec's podTemplate says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from skyproxy_operator.compute_spec import SNAPSHOTS_FOLDER, ComputeSpec
from skyproxy_operator.device_claims import class_violations, own_templates, pod_claims
from skyproxy_operator.gangs import gang_labels, group_field, scheduler_of
from skyproxy_operator.names import (
    ATTEMPT,
    COMPUTE_LABEL,
    CONTAINER,
    HOME_FOLDER,
    NODE_LABEL,
    SPEC_HASH,
    TLS_FOLDER,
    TOKEN_FOLDER,
    claim_name,
    labels,
    nodes_service,
    owner_reference,
    pod_name,
    tls_secret,
    token_secret,
)
from skyproxy_operator.options import Options, accelerator_image
from skyproxy_operator.pod_policy import violations
from skyproxy_operator.queueing import queue_labels
from skyproxy_operator.strategic_merge import merged
from skyproxy_operator.topology import affinity_of, queue_annotations

_GRACE_SECONDS = 10
_LEAVE_SECONDS = 60
"""The time that clients have for last snapshots of their sessions, where there is a volume for them."""
_HEAD_PORTS = range(29500, 30500)


def build_pod(
    compute: Mapping[str, Any], spec: ComputeSpec, node: int, attempt: int, options: Options
) -> dict[str, object]:
    """The pod of node number `node`.

    Args:
        compute: the Compute, as the API server gave it.
        spec: its checked spec.
        node: from 0.
        attempt: which start of the Compute this is, from 0.
        options: those of the installation.

    Raises:
        ValueError: the spec's podTemplate cannot be applied, or asks for what the installation does not allow.
    """
    name, namespace = compute["metadata"]["name"], compute["metadata"]["namespace"]
    built: dict[str, Any] = merged(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": pod_name(name, node),
                "namespace": namespace,
                "annotations": {"kubectl.kubernetes.io/default-container": CONTAINER},
                "labels": {},
            },
            "spec": _pod_spec(compute, spec, node, attempt, options),
        },
        spec.pod_template,
    )
    # We recognize our pods by these, so no template may change them.
    metadata = built["metadata"] = built.get("metadata") or {}
    metadata |= {"name": pod_name(name, node), "namespace": namespace, "ownerReferences": [owner_reference(compute)]}
    queue, group = queue_labels(compute, spec, attempt)
    if spec.queue is not None and spec.nodes > 1:
        group = group | queue_annotations(spec.topology)
    gang, gang_annotations = gang_labels(compute, spec)
    metadata["labels"] = {**(metadata.get("labels") or {}), **queue, **gang, **labels(name), NODE_LABEL: str(node)}
    metadata["annotations"] = {
        **(metadata.get("annotations") or {}),
        **group,
        **gang_annotations,
        SPEC_HASH: spec.pod_hash(),
        ATTEMPT: str(attempt),
    }
    worker = [item for item in _rows(built.get("spec"), "containers") if item.get("name") == CONTAINER]
    if not worker or not worker[0].get("image"):
        raise ValueError(
            f"spec.podTemplate leaves the Pod without its container {CONTAINER!r}, or that without an image"
        )
    built["spec"]["restartPolicy"] = "Never"
    own = violations(
        built,
        options,
        own_secrets=(token_secret(name), tls_secret(name)),
        own_claims=own_templates(name, spec.claims),
        own_volumes=[claim_name(name, volume.name) for volume in spec.volumes],
    )
    refused = [f"the Pod's {line}" for line in own]
    refused += class_violations(spec.claims, options)
    if refused:
        raise ValueError("\n".join(refused))
    return built


def _rows(holder: object, key: str) -> list[Mapping[str, object]]:
    """The objects in a list of a pod that a template may have made into anything."""
    found = holder.get(key) if isinstance(holder, Mapping) else None
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []


def _pod_spec(
    compute: Mapping[str, Any], spec: ComputeSpec, node: int, attempt: int, options: Options
) -> dict[str, object]:
    name = compute["metadata"]["name"]
    result: dict[str, object] = {
        "containers": [_container(compute, spec, node, attempt, options)],
        "volumes": _volumes(name, spec, options),
        "securityContext": _pod_security(options),
        "automountServiceAccountToken": spec.service_account is not None,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _GRACE_SECONDS + (_LEAVE_SECONDS if spec.keeps_sessions else 0),
        # We start pods again ourselves: all nodes of a Compute together, and with the back-off of its spec.
        "restartPolicy": "Never",
    }
    if spec.nodes > 1:
        result |= {"hostname": pod_name(name, node), "subdomain": nodes_service(name)}
    tolerations = list(spec.tolerations)
    # Clusters taint nodes with the device's name, to keep others away from them; slices and shares are on nodes that
    # bear the whole one's.
    whole = {"nvidia.com/gpu" for name in spec.accelerators if name.startswith("nvidia.com/")}
    whole.update("nvidia.com/gpu" for claim in spec.claims if claim.is_nvidia)
    for device in sorted(whole.union(spec.accelerators)):
        tolerations.append({"key": device, "operator": "Exists", "effect": "NoSchedule"})
    optional = {
        "tolerations": tolerations,
        "nodeSelector": dict(spec.node_selector),
        "affinity": _affinity(name, spec),
        "priorityClassName": spec.priority_class,
        "schedulerName": scheduler_of(spec),
        # A constraint may say itself from whom else they keep a distance.
        "topologySpreadConstraints": [
            {"labelSelector": {"matchLabels": {COMPUTE_LABEL: name}}, **row} for row in spec.topology_spread
        ],
        "serviceAccountName": spec.service_account,
        "imagePullSecrets": [{"name": secret} for secret in spec.image_pull_secrets],
    }
    optional["resourceClaims"], _ = pod_claims(name, spec.claims)
    return result | group_field(name, spec) | {key: value for key, value in optional.items() if value}


def _affinity(name: str, spec: ComputeSpec) -> dict[str, object]:
    """Return the spec's affinity, with what brings its nodes near to each other where nobody else does."""
    by_group = spec.gang == "kubernetes" and spec.topology is not None and spec.topology.required
    near = None if spec.nodes == 1 or spec.queue is not None or by_group else spec.topology
    return affinity_of(name, near, spec.affinity)


def _pod_security(options: Options) -> dict[str, object]:
    result: dict[str, object] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if options.worker_uid is not None:
        # The group gives the worker its volumes; OnRootMismatch, because changing large ones takes minutes.
        result |= {
            "runAsUser": options.worker_uid,
            "runAsGroup": options.worker_uid,
            "fsGroup": options.worker_uid,
            "fsGroupChangePolicy": "OnRootMismatch",
        }
    return result


def _container(
    compute: Mapping[str, Any], spec: ComputeSpec, node: int, attempt: int, options: Options
) -> dict[str, object]:
    result: dict[str, object] = {
        "name": CONTAINER,
        "image": spec.image or _default_image(spec, options),
        "env": _environment(compute, spec, node, attempt),
        "ports": [
            {"name": f"worker-{index}" if index else "worker", "containerPort": port, "protocol": "TCP"}
            for index, port in enumerate(spec.ports)
        ],
        # Patient: a worker that computes for minutes may answer late, and its tensors are worth more than a restart.
        # One that has been silent for ten minutes takes no session any more.
        "livenessProbe": {
            "httpGet": {"scheme": "HTTPS", "path": "/healthz", "port": spec.port},
            "periodSeconds": 30,
            "timeoutSeconds": 10,
            "failureThreshold": 20,
        },
        "readinessProbe": {
            "httpGet": {"scheme": "HTTPS", "path": "/readyz", "port": spec.port},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": 15,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # The end of the log becomes part of the container's status, so that we need no access to logs to tell a cause.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True},
            {"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "home", "mountPath": HOME_FOLDER},
            *({"name": volume.name, "mountPath": volume.path} for volume in spec.volumes),
        ],
    }
    result |= _command(spec)
    if spec.env_from:
        result["envFrom"] = [dict(source) for source in spec.env_from]
    resources: dict[str, object] = {}
    if spec.resources:
        resources = {"requests": dict(spec.resources), "limits": dict(spec.resources)}
    if spec.claims:
        resources["claims"] = pod_claims(compute["metadata"]["name"], spec.claims)[1]
    if resources:
        result["resources"] = resources
    return result


def _default_image(spec: ComputeSpec, options: Options) -> str:
    """The installation's image for what a node has.

    Raises:
        ValueError: it has none for such accelerators.
    """
    classes = {claim.device_class for claim in spec.claims if claim.device_class and claim.accelerators}
    if any(claim.is_nvidia for claim in spec.claims):
        return options.gpu_worker_image
    for resource in sorted(classes.union(spec.accelerators)):
        if resource.startswith("nvidia.com/"):
            return options.gpu_worker_image
        image = accelerator_image(resource, options)
        if image is None:
            raise ValueError(
                f"spec.image: this installation has no worker image for {resource}. Name one here, or have the "
                f"administrator set SKYPROXY_OPERATOR_ACCELERATOR_IMAGES={resource}=IMAGE"
            )
        return image
    return options.worker_image


def _command(spec: ComputeSpec) -> dict[str, list[str]]:
    if spec.command:
        return {"command": list(spec.command)} | ({"args": list(spec.args)} if spec.args else {})
    # All addresses of whichever family the Pod has: 0.0.0.0 is none in a cluster with IPv6 alone.
    arguments = ["--host", "", "--port", str(spec.port)]
    if spec.procs_per_node > 1:
        arguments += ["--processes", str(spec.procs_per_node)]
    arguments += ["--token-file", f"{TOKEN_FOLDER}/token"]
    arguments += ["--tls-cert", f"{TLS_FOLDER}/tls.crt", "--tls-key", f"{TLS_FOLDER}/tls.key"]
    return {"command": ["python", "-m", "skyproxy_server"], "args": [*arguments, *spec.args]}


def _environment(compute: Mapping[str, Any], spec: ComputeSpec, node: int, attempt: int) -> list[Mapping[str, object]]:
    given = {variable["name"] for variable in spec.env}
    defaults = {
        # The user may be one that the image does not know: libraries then find no home and no name by themselves.
        "HOME": HOME_FOLDER,
        "USER": "worker",
        "LOGNAME": "worker",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.keeps_sessions:
        defaults |= {"SKYPROXY_SNAPSHOTS": SNAPSHOTS_FOLDER, "SKYPROXY_LEAVE_SECONDS": str(_LEAVE_SECONDS)}
    return [
        *({"name": name, "value": value} for name, value in defaults.items() if name not in given),
        *(dict(variable) for variable in spec.env),
        {"name": "COMPUTE_POOL", "value": json.dumps(pool(compute, spec, node, attempt), separators=(",", ":"))},
    ]


def pool(compute: Mapping[str, Any], spec: ComputeSpec, node: int, attempt: int) -> dict[str, object]:
    """Return what a node is told about itself and its peers; `skyproxy.runtime` reads it."""
    name, namespace = compute["metadata"]["name"], compute["metadata"]["namespace"]
    if spec.nodes > 1:
        addresses = [f"{pod_name(name, index)}.{nodes_service(name)}.{namespace}.svc" for index in range(spec.nodes)]
    else:
        addresses = ["127.0.0.1"]
    # Another port for each start: what is left of the one before cannot be in the way.
    seed = int(hashlib.sha256(compute["metadata"]["uid"].encode()).hexdigest(), 16)
    return {
        "node": node,
        "total_nodes": spec.nodes,
        "procs_per_node": spec.procs_per_node,
        "head_addr": addresses[0],
        "head_port": _HEAD_PORTS[(seed + attempt) % len(_HEAD_PORTS)],
        "accelerators": sum(spec.accelerators.values()) + sum(claim.accelerators for claim in spec.claims),
        "peers": [
            {"rank": rank, "node": rank // spec.procs_per_node, "address": addresses[rank // spec.procs_per_node]}
            for rank in range(spec.nodes * spec.procs_per_node)
        ],
        "job": f"{compute['metadata']['uid']}-{attempt}",
    }


def _volumes(name: str, spec: ComputeSpec, options: Options) -> list[Mapping[str, object]]:
    # Without a group that owns the files, everyone in the container must be able to read them: it has one user.
    mode = 0o444 if options.worker_uid is None else 0o440
    token = {"secretName": token_secret(name), "defaultMode": mode, "items": [{"key": "token", "path": "token"}]}
    pair = [{"key": key, "path": key} for key in ("tls.crt", "tls.key")]
    return [
        {"name": "token", "secret": token},
        {"name": "tls", "secret": {"secretName": tls_secret(name), "defaultMode": mode, "items": pair}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.shared_memory}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        *(
            {"name": volume.name, "persistentVolumeClaim": {"claimName": claim_name(name, volume.name)}}
            for volume in spec.volumes
        ),
    ]
