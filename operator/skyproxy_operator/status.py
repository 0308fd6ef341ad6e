"""A Compute's status: what its pods and its past make of it. Pure; the time is an argument."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyproxy_operator.causes import Cause, has_ended, is_ready, is_scheduled, pod_phase, waiting_cause
from skyproxy_operator.compute_spec import ComputeSpec
from skyproxy_operator.disruption import are_in_use
from skyproxy_operator.names import NODE_LABEL, server_name
from skyproxy_operator.queueing import gate_cause, is_gated
from skyproxy_operator.reaping import Report

Object = dict[str, Any]

PENDING, QUEUED, PROVISIONING, RUNNING = "Pending", "Queued", "Provisioning", "Running"
SUSPENDED, FAILED, EXPIRED, TERMINATING = "Suspended", "Failed", "Expired", "Terminating"

_PAST: dict[str, type] = {
    "restarts": int,
    "failuresInARow": int,
    "lastFailure": str,
    "lastFailureTime": datetime.datetime,
    "startTime": datetime.datetime,
    "readySince": datetime.datetime,
    "formed": str,
    "expiryTime": datetime.datetime,
    "endedFor": str,
    "endedReason": str,
    "endedMessage": str,
    "lastActivityTime": datetime.datetime,
    "inUse": bool,
    "runtime": Mapping,
    "pullFailures": Mapping,
    "worker": Mapping,
}
"""Fields that cannot be seen in the cluster as it is now, so that the status itself keeps them; each with its type."""
_MAX_COUNT = 1 << 31
_CLOCK_SKEW = datetime.timedelta(minutes=5)
"""Of the operator before, on another machine; what is to come later never was."""

_MAX_MESSAGE = 2000
_ACTIVITY_GRAIN_SECONDS = 20


def timestamp(moment: datetime.datetime) -> str:
    """A time as the API writes it, to the second."""
    return moment.astimezone(datetime.UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")


def moment(text: object) -> datetime.datetime | None:
    """The time that a status tells; None for none, and for what is no time here though the API server takes it."""
    try:
        found = datetime.datetime.fromisoformat(text.upper()) if isinstance(text, str) else None
    except ValueError:
        return None
    return found if found is not None and found.tzinfo is not None else None


@dataclass(frozen=True)
class Verdict:
    """The state of a Compute, before it is put in the form of conditions.

    Attributes:
        phase: one of the phases.
        ready: whether every node takes sessions.
        cause: why it is not ready, or that it is.
        progressing: whether something is on its way that needs nobody's help.
        scheduled: whether every node has a machine.
        trouble: what somebody should look at, even when it runs.
    """

    phase: str
    ready: bool
    cause: Cause
    progressing: bool
    scheduled: bool
    trouble: Cause | None = None


def judge(
    spec: ComputeSpec,
    pods: Sequence[Object],
    events: Mapping[str, Sequence[Object]],
    now: datetime.datetime,
    pull_failures: Mapping[str, str] | None = None,
    workload: Object | None = None,
) -> Verdict:
    """Judge a Compute that should run.

    Args:
        spec: what is wanted.
        pods: its pods of the current start.
        events: those about pods, by the pod's name.
        now: the time.
        pull_failures: what registries said against images, now or before.
        workload: Kueue's object about the pods; None where it is not known.
    """
    ready = sum(is_ready(pod) for pod in pods)
    scheduled = sum(is_scheduled(pod) for pod in pods) == spec.nodes
    if ready == spec.nodes:
        what = "The worker accepts sessions." if spec.nodes == 1 else f"All {spec.nodes} nodes accept sessions."
        return Verdict(RUNNING, True, Cause("Ready", what), False, True)
    waiting = [pod for pod in pods if not is_ready(pod) and not has_ended(pod)]
    causes = [
        gate_cause(pod, workload)
        if is_gated(pod)
        else waiting_cause(pod, now, events.get(pod["metadata"]["name"], ()), pull_failures)
        for pod in waiting
    ]
    # What somebody has to act on comes before what will pass.
    causes.sort(key=lambda item: not item.actionable)
    cause = causes[0] if causes else Cause("CreatingPods", "The pods are being created.")
    if spec.nodes > 1:
        cause = Cause(cause.reason, f"{ready} of {spec.nodes} nodes are ready. {cause.message}", cause.actionable)
    begun = any(is_scheduled(pod) or pod_phase(pod) == "Running" for pod in pods)
    trouble = cause if cause.actionable else None
    idle = QUEUED if any(map(is_gated, waiting)) else PENDING
    return Verdict(PROVISIONING if begun else idle, False, cause, trouble is None, scheduled, trouble)


def judge_stopped(phase: str, cause: Cause, *, leaving: int = 0) -> Verdict:
    """Judge a Compute that should not run.

    Args:
        phase: SUSPENDED, EXPIRED, FAILED or TERMINATING.
        cause: why.
        leaving: pods that are still there.
    """
    if leaving:
        cause = Cause(cause.reason, f"{cause.message} {leaving} pods are on their way out.", cause.actionable)
    return Verdict(phase, False, cause, leaving > 0, False, cause if cause.actionable else None)


def past(status: Mapping[str, Any], now: datetime.datetime) -> Object:
    """Of a status, what is carried on: whoever may write one may have written anything, which is as good as nothing."""
    return {key: status[key] for key, kind in _PAST.items() if _is_kept(status.get(key), kind, now)}


def _is_kept(value: object, kind: type, now: datetime.datetime) -> bool:
    if kind is datetime.datetime:
        told = moment(value)
        return told is not None and told <= now + _CLOCK_SKEW
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_COUNT
    return isinstance(value, kind)


def with_activity(carried: Object, reports: Sequence[Report], now: datetime.datetime) -> Object:
    """`carried`, with what the workers said of themselves.

    The time of the last activity moves in steps: each change is a write, and an event for everyone who watches.
    """
    result = dict(carried)
    answers = [report.answer for report in reports if report.answer is not None]
    idle = [report.idle_seconds for report in reports if report.idle_seconds is not None]
    if idle:
        active, before = now - datetime.timedelta(seconds=min(idle)), moment(carried.get("lastActivityTime"))
        if before is None or (active - before).total_seconds() >= _ACTIVITY_GRAIN_SECONDS:
            result["lastActivityTime"] = timestamp(active)
    used = are_in_use(reports)
    if used is not None:
        result["inUse"] = used
    if answers:
        result["worker"] = worker_facts(answers[0])
    return result


def worker_facts(answer: Mapping[str, Any]) -> Object:
    """Versions and devices from a worker's report. It is what a container says, so only texts and numbers are taken."""
    software = answer.get("software")
    software = software if isinstance(software, Mapping) else {}
    result: Object = {key: _text(software[key], 64) for key in ("skyproxy", "torch", "python") if key in software}
    rows = answer.get("devices")
    devices = []
    for row in rows[:64] if isinstance(rows, list) else ():
        if isinstance(row, Mapping):
            devices.append(
                {
                    "type": _text(row.get("type", ""), 32),
                    "index": _number(row.get("index"), 1 << 31),
                    "name": _text(row.get("name", ""), 128),
                    "memoryBytes": _number(row.get("total_memory_bytes"), 1 << 63),
                }
            )
    result["devices"] = devices
    return result | {"summary": _summary(devices)}


def _text(value: object, length: int) -> str:
    """Text of a stranger, so that it can be written to a status and shown in a terminal."""
    # Lists within lists have a text that takes more of the stack than there may be.
    text = str(value) if isinstance(value, str | int | float) else ""
    # Lone surrogates, which JSON can hold, have no UTF-8.
    shown = text[:length].encode("utf-8", "replace").decode()
    return "".join(character if character.isprintable() else "?" for character in shown)


def _number(value: object, limit: int) -> int:
    """A whole number of a stranger; 0 for what the API server would not take."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit else 0


def _summary(devices: Sequence[Object]) -> str:
    gpus: dict[str, int] = {}
    for row in devices:
        if row["type"] != "cpu":
            gpus[row["name"]] = gpus.get(row["name"], 0) + 1
    return ", ".join(f"{count}x {name}" for name, count in gpus.items()) or "CPU"


def build_status(
    compute: Object,
    verdict: Verdict,
    now: datetime.datetime,
    *,
    carried: Object,
    pods: Sequence[Object] = (),
    spec: ComputeSpec | None = None,
    external_host: str | None = None,
) -> Object:
    """The whole status.

    Args:
        compute: the Compute with its status of before, from which conditions take the time of their last change.
        verdict: how it is.
        now: the time.
        carried: what is kept from before, and changed since.
        pods: those that count.
        spec: the checked spec; None where it cannot be used.
        external_host: the name under which it is reached from outside.
    """
    name, namespace = compute["metadata"]["name"], compute["metadata"]["namespace"]
    result: Object = {**carried, "phase": verdict.phase, "observedGeneration": compute["metadata"].get("generation", 0)}
    if spec is not None:
        result["url"] = f"wss://{server_name(name, namespace)}:{spec.port}"
        if external_host is not None:
            result["externalUrl"] = f"wss://{external_host}"
    nodes = sorted((_node(pod, spec) for pod in pods), key=lambda item: int(item["rank"]))
    result |= {"nodes": nodes, "readyNodes": sum(bool(item["ready"]) for item in nodes)}
    result["conditions"] = _conditions(compute, verdict, now)
    return result


def _node(pod: Object, spec: ComputeSpec | None) -> Object:
    number = int(pod["metadata"]["labels"][NODE_LABEL])
    status = pod.get("status") or {}
    row = {
        "name": str(number),
        "podName": pod["metadata"]["name"],
        "podIP": status.get("podIP"),
        "nodeName": (pod.get("spec") or {}).get("nodeName"),
        "rank": number * (spec.procs_per_node if spec else 1),
        "ready": is_ready(pod),
    }
    return {key: value for key, value in row.items() if value is not None}


def _conditions(compute: Object, verdict: Verdict, now: datetime.datetime) -> list[Object]:
    cause, trouble = verdict.cause, verdict.trouble
    scheduled = Cause("Scheduled", "Every node has a machine.") if verdict.scheduled else cause
    fine = Cause("AsExpected", "Nothing needs attention.")
    rows = {
        "Scheduled": (verdict.scheduled, scheduled),
        "Ready": (verdict.ready, cause),
        "Progressing": (verdict.progressing, cause),
        "Degraded": (trouble is not None, trouble or fine),
    }
    before = {item["type"]: item for item in (compute.get("status") or {}).get("conditions") or ()}
    result = []
    for kind, (holds, why) in rows.items():
        text = "True" if holds else "False"
        old = before.get(kind, {})
        result.append(
            {
                "type": kind,
                "status": text,
                "reason": why.reason,
                "message": why.message[:_MAX_MESSAGE],
                "observedGeneration": compute["metadata"].get("generation", 0),
                "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == text else timestamp(now),
            }
        )
    return result


def patch_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> Object:
    """The merge patch that makes `old` into `new`; empty where they are the same."""
    result: Object = {}
    for key in {*old, *new}:
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            result[key] = patch_between(before, after)
        else:
            result[key] = after
    return result
