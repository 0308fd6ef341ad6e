"""Computes and pods as the API server would give them, for the tests of the operator."""

from __future__ import annotations

import datetime
from typing import Any

from skyproxy_operator.compute_spec import ComputeSpec
from skyproxy_operator.names import ATTEMPT, COMPUTE_LABEL, NODE_LABEL, SPEC_HASH, owner_reference, pod_name
from skyproxy_operator.options import Options

NOW = datetime.datetime(2026, 5, 1, 12, 0, 0, tzinfo=datetime.UTC)
OPTIONS = Options()


def make_compute(name: str = "dev", *, uid: str = "uid-1", status: Any = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "skyproxy.dev/v1alpha1",
        "kind": "Compute",
        "metadata": {"name": name, "namespace": "lab", "uid": uid, "generation": 1, "resourceVersion": "1"},
        "spec": spec,
        **({"status": status} if status is not None else {}),
    }


def spec_of(compute: dict[str, Any]) -> ComputeSpec:
    return ComputeSpec.parse(compute["metadata"]["name"], compute["spec"])


def make_pod(compute: dict[str, Any], node: int = 0, *, attempt: int = 0, **status: Any) -> dict[str, Any]:
    """A pod of this Compute's present spec.

    Args:
        status: its status; `ready=True` makes a whole one, `terminated={...}` one that has failed.
    """
    name = compute["metadata"]["name"]
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(name, node),
            "namespace": "lab",
            "uid": f"pod-{node}-{attempt}",
            "creationTimestamp": "2026-05-01T12:00:00Z",
            "labels": {COMPUTE_LABEL: name, NODE_LABEL: str(node)},
            "annotations": {SPEC_HASH: spec_of(compute).pod_hash(), ATTEMPT: str(attempt)},
            "ownerReferences": [owner_reference(compute)],
        },
        "spec": {
            "containers": [{"name": "worker", "resources": {"requests": {}, "limits": {}}}],
        },
        "status": {"phase": "Pending"},
    }
    if status.pop("ready", False):
        pod["spec"]["nodeName"] = "machine"
        status = {"phase": "Running", "podIP": f"10.0.0.{node}", "conditions": [condition("Ready", "True")], **status}
    terminated = status.pop("terminated", None)
    if terminated is not None:
        pod["spec"]["nodeName"] = "machine"
        state = {"name": "worker", "state": {"terminated": terminated}}
        status = {"phase": "Failed", "containerStatuses": [state], **status}
    pod["status"].update(status)
    return pod


def condition(kind: str, status: str, reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def at(seconds: float) -> datetime.datetime:
    return NOW + datetime.timedelta(seconds=seconds)
