"""Words between a Compute's pods and Kueue, in both directions. Pure.

Kueue holds a pod with its queue's label at a scheduling gate, and lets it go when the queue has room
(https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/). Pods of one group are let go together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from skyproxy_operator.causes import Cause, condition, has_ended
from skyproxy_operator.compute_spec import ComputeSpec

Object = Mapping[str, Any]

KUEUE_GROUP = "kueue.x-k8s.io"
WORKLOAD = "Workload"
"""Kueue's own object about a pod, or about a group of them."""
QUEUE_LABEL = f"{KUEUE_GROUP}/queue-name"
GROUP_LABEL = f"{KUEUE_GROUP}/pod-group-name"
TOTAL_ANNOTATION = f"{KUEUE_GROUP}/pod-group-total-count"
_RETRIABLE_ANNOTATION = f"{KUEUE_GROUP}/retriable-in-group"
_MANAGED_LABEL = f"{KUEUE_GROUP}/managed"
_GATE = f"{KUEUE_GROUP}/admission"
_JOB_UID_LABEL = f"{KUEUE_GROUP}/job-uid"
QUEUED = "Queued"
EVICTED = "EvictedByQueue"
"""Kueue took a pod back, for one that goes before it."""


def queue_labels(compute: Object, spec: ComputeSpec, attempt: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return the labels and the annotations by which Kueue knows a pod; none without a queue."""
    if spec.queue is None:
        return {}, {}
    labels = {QUEUE_LABEL: spec.queue}
    if spec.nodes == 1:
        return labels, {}
    # Each start is a group of its own, for all of its pods are replaced. Not retriable, because Kueue would otherwise
    # keep the pods of the start before until there are others of the same group, and those need their names.
    start = hashlib.sha256(f"{compute['metadata']['uid']}/{attempt}/{spec.pod_hash()}".encode()).hexdigest()[:8]
    group = f"{compute['metadata']['name']}-{start}"
    return labels | {GROUP_LABEL: group}, {TOTAL_ANNOTATION: str(spec.nodes), _RETRIABLE_ANNOTATION: "false"}


def is_gated(pod: Object) -> bool:
    """Return whether a pod must not be given a machine yet."""
    return condition(pod, "PodScheduled").get("reason") == "SchedulingGated" and not has_ended(pod)


def workload_query(pod: Object) -> dict[str, str]:
    """Return how the Workload of a pod is found."""
    labels = pod["metadata"].get("labels") or {}
    if GROUP_LABEL in labels:
        return {"fieldSelector": f"metadata.name={labels[GROUP_LABEL]}"}
    return {"labelSelector": f"{_JOB_UID_LABEL}={pod['metadata']['uid']}"}


def gate_cause(pod: Object, workload: Object | None = None) -> Cause:
    """Return what a pod at a scheduling gate waits for.

    Args:
        pod: one that `is_gated`.
        workload: Kueue's object about it; None where it is not known.
    """
    name = pod["metadata"]["name"]
    gates = [str(item["name"]) for item in (pod.get("spec") or {}).get("schedulingGates") or ()]
    queue = (pod["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    if queue is None or _GATE not in gates:
        return Cause("SchedulingGated", f"Pod {name} is waiting for its scheduling gates: {', '.join(gates)}.")
    said, actionable = _explain_workload(workload or {})
    text = f"Pod {name} waits in the queue {queue} until Kueue admits it."
    return Cause(QUEUED, f"{text} Kueue: {said}" if said else text, actionable)


def _explain_workload(workload: Object) -> tuple[str, bool]:
    """Return what Kueue says about a Workload, and whether it stays so until somebody does something."""
    reserved = condition(workload, "QuotaReserved")
    if reserved.get("status") != "True":
        # Inadmissible: the queue is not there, or is closed.
        return str(reserved.get("message", "")), reserved.get("reason") == "Inadmissible"
    checks = [
        f"{check.get('name', '')}" + (f" ({check['message']})" if check.get("message") else "")
        for check in (workload.get("status") or {}).get("admissionChecks") or ()
        if check.get("state") != "Ready"
    ]
    return (f"quota is reserved; admission checks are left: {', '.join(checks)}" if checks else ""), False


def eviction(pod: Object) -> Cause | None:
    """Return why Kueue ends a pod that it had admitted; None where it does not."""
    target = condition(pod, "TerminationTarget")
    if QUEUE_LABEL not in (pod["metadata"].get("labels") or {}) or target.get("status") != "True":
        return None
    why = str(target.get("message") or target.get("reason") or "").rstrip(".")
    return Cause(EVICTED, f"Kueue took pod {pod['metadata']['name']} back" + (f": {why}." if why else "."))


def ignored_queue(spec: ComputeSpec, pods: Iterable[Object]) -> Cause | None:
    """Return what is wrong where Kueue does not look after pods that have a queue; None where it does."""
    names = [pod["metadata"]["name"] for pod in pods if _MANAGED_LABEL not in (pod["metadata"].get("labels") or {})]
    if spec.queue is None or not names:
        return None
    return Cause(
        "QueueIgnored",
        f"Kueue does not hold pod {names[0]}, so the queue {spec.queue} has no effect. Its pod integration is off, or "
        "does not select this namespace: an administrator changes that in Kueue's configuration.",
        actionable=True,
    )


def unavailable(queue: str) -> Cause:
    """Return why no pod is made for a queue in a cluster without Kueue."""
    return Cause(
        "QueueUnavailable",
        f"spec.queue is {queue}, and the cluster does not know {WORKLOAD} of {KUEUE_GROUP}. An administrator installs "
        "Kueue with its pod integration. Without a queue, the Pods are made at once.",
        actionable=True,
    )
