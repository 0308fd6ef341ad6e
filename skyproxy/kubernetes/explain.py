"""The reason why a Compute is where it is, from its conditions, its Pods and the events: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from skyproxy.kubernetes.objects import Condition, EventObject, Metadata, PodObject

_OPERATOR_GRACE_SECONDS = 10.0
_SHOWN_EVENTS = 5


@dataclass(frozen=True)
class Explanation:
    """The state of a Compute, with its cause.

    Attributes:
        phase: as the operator says; "Pending" before it said anything.
        ready: whether all its nodes take clients.
        failed: whether waiting is in vain, unless the user changes something.
        reason: one word, for programs.
        text: the true cause, for people.
        hint: what to do; may be empty.
        events: the latest warnings, oldest first.
    """

    phase: str
    ready: bool
    failed: bool
    reason: str
    text: str
    hint: str = ""
    events: tuple[str, ...] = ()


_CHECK_IMAGE = "Check --image and imagePullSecrets; the cluster must be allowed to pull it."
_SEE_LOG = "See what the worker wrote: skyproxy logs NAME."
_HINTS = {
    "ClaimsUnavailable": "Ask for GPUs by their number: skyproxy up NAME --gpus.",
    "CrashLoopBackOff": _SEE_LOG,
    "ErrImagePull": _CHECK_IMAGE,
    "Expired": "Start it again: skyproxy up NAME.",
    "ImagePullBackOff": _CHECK_IMAGE,
    "ImagePullFailed": _CHECK_IMAGE,
    "InvalidImageName": _CHECK_IMAGE,
    "InvalidSpec": "Change it: skyproxy up NAME with other arguments.",
    "NoOperator": "See whether it runs: skyproxy doctor. An administrator installs it: skyproxy install.",
    "LimitRangeViolated": "Ask for what it allows. See: kubectl describe limitrange.",
    "OOMKilled": "Ask for more memory: skyproxy up NAME --memory.",
    "PodFailed": _SEE_LOG,
    "PodSecurityViolation": "The namespace forbids such Pods. Use another, or change podTemplate of the Compute.",
    "ProvisioningFailed": "See what the storage class says: kubectl get events.",
    "QuotaNeedsResources": "Name it: skyproxy up NAME --cpu --memory.",
    "Queued": "See what is before it: kubectl get workloads. Another queue: skyproxy up NAME --queue QUEUE.",
    "QueueUnavailable": "Leave --queue out, or have an administrator install Kueue.",
    "QuotaExceeded": "Ask for less, or end other workers of this namespace. See: kubectl describe quota.",
    "Suspended": "Bring it back: skyproxy resume NAME.",
    "SuspendedIdle": "Bring it back: skyproxy resume NAME.",
    "Unschedulable": "See what is free: skyproxy gpus. Ask for less, or wait until another worker ends.",
    "VolumeUnbound": "See which storage classes there are: kubectl get storageclass; name one with :storageClassName=.",
    "WorkerExited": _SEE_LOG,
}
"""Hints about what to do, by the reason that the operator or the Pod gives."""


def explain(
    compute: Mapping[str, Any],
    pods: Sequence[PodObject],
    events: Sequence[EventObject],
    *,
    now: datetime | None = None,
) -> Explanation:
    """Explain where a Compute stands, and why.

    Args:
        compute: the object as the server has it.
        pods: its Pods; they tell the cause where the operator has not said it yet.
        events: on it and on its Pods, oldest first.
        now: for tests.
    """
    status = compute.get("status") or {}
    metadata = compute["metadata"]
    conditions: dict[str, Condition] = {row["type"]: row for row in status.get("conditions", ())}
    phase = status.get("phase") or "Pending"
    current = status.get("observedGeneration", 0) >= metadata.get("generation", 0)
    warnings = tuple(_event_text(item) for item in events if item.get("type") == "Warning")[-_SHOWN_EVENTS:]
    if metadata.get("deletionTimestamp"):
        return Explanation("Terminating", False, True, "Terminating", "it is being deleted", "", warnings)
    ready = conditions.get("Ready")
    if ready is not None and ready.get("status") == "True" and phase == "Running" and current:
        runtime = status.get("runtime") or {}
        news = f"; the runtime {runtime.get('name')} has changed since it started" if runtime.get("outdated") else ""
        return Explanation(phase, True, False, "Ready", f"it accepts clients{news}")
    reason, text = _cause(conditions, pods, current)
    if not status and not pods:
        reason, text = "Pending", "it is waiting for skyproxy's operator"
    if not status and not pods and _age_seconds(metadata, now) > _OPERATOR_GRACE_SECONDS:
        reason, text = "NoOperator", "nothing in the cluster has looked at it yet: does skyproxy's operator run?"
    failed = phase in ("Failed", "Expired", "Suspended") and current
    key = reason if reason in _HINTS else phase
    hint = _HINTS.get(key, "").replace("NAME", metadata["name"])
    return Explanation(phase, False, failed, reason or phase, text or f"it is {phase.lower()}", hint, warnings)


def _cause(conditions: Mapping[str, Condition], pods: Sequence[PodObject], current: bool) -> tuple[str, str]:
    if not current and conditions:
        return "Progressing", "the operator has not seen the latest change yet"
    # The most specific first: what cannot be placed is not ready either, and that is no news.
    for kind, bad in (("Degraded", "True"), ("Scheduled", "False"), ("Ready", "False"), ("Progressing", "True")):
        row = conditions.get(kind)
        if row is not None and row.get("status") == bad and row.get("message"):
            return str(row.get("reason", "")), str(row["message"])
    for pod in pods:
        found = _pod_cause(pod)
        if found is not None:
            return found[0], f"{pod['metadata']['name']}: {found[1]}"
    return "", ""


def _pod_cause(pod: PodObject) -> tuple[str, str] | None:
    status = pod.get("status", {})
    for row in status.get("conditions", ()):
        if row.get("type") == "PodScheduled" and row.get("status") == "False":
            return str(row.get("reason", "Unschedulable")), str(row.get("message", "no node has room for it"))
    for container in status.get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting")
        ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return waiting["reason"], str(waiting.get("message") or waiting["reason"])
        if ended:
            said = str(ended.get("message") or "").strip()
            text = f"the worker ended with status {ended.get('exitCode')}" + (f": {said}" if said else "")
            return str(ended.get("reason", "Error")), text
        if waiting:
            return str(waiting["reason"]), "its container is being created; the image may still be being pulled"
    return None


def _event_text(event: EventObject) -> str:
    target = event.get("involvedObject", {})
    count = f" (x{event['count']})" if (event.get("count") or 1) > 1 else ""
    return f"{target.get('kind', '')} {target.get('name', '')}: {event.get('message', '').strip()}{count}"


def _age_seconds(metadata: Metadata, now: datetime | None) -> float:
    stamp = metadata.get("creationTimestamp")
    if not stamp:
        return 0.0
    return ((now or datetime.now(UTC)) - datetime.fromisoformat(str(stamp))).total_seconds()
