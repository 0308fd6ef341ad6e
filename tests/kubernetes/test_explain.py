"""Why a worker is not ready: from what the cluster says to what a person is told."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from skyproxy.kubernetes.explain import explain

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def compute(phase: str | None = None, age_seconds: float = 5, seen: bool = True, **conditions: Any) -> dict[str, Any]:
    rows = [{"type": kind, "status": row[0], "reason": row[1], "message": row[2]} for kind, row in conditions.items()]
    made = (NOW - timedelta(seconds=age_seconds)).isoformat().replace("+00:00", "Z")
    status = {"phase": phase, "conditions": rows, "observedGeneration": 3 if seen else 2} if phase else {}
    return {"metadata": {"name": "w", "generation": 3, "creationTimestamp": made}, "status": status}


def pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "w-0"}, "status": status}


def test_ready_is_ready() -> None:
    found = explain(compute("Running", Ready=("True", "Ready", "")), [], [], now=NOW)
    assert (found.ready, found.failed) == (True, False)


def test_a_worker_of_a_runtime_that_has_changed_says_so() -> None:
    item = compute("Running", Ready=("True", "Ready", ""))
    for outdated, said in ((False, "it accepts clients"), (True, "; the runtime a100 has changed since it started")):
        item["status"]["runtime"] = {"name": "a100", "template": "", "outdated": outdated}
        found = explain(item, [], [], now=NOW)
        assert found.ready
        assert found.text.endswith(said)


def test_ready_of_an_older_generation_is_not_ready() -> None:
    found = explain(compute("Running", seen=False, Ready=("True", "Ready", "")), [], [], now=NOW)
    assert not found.ready
    assert "has not seen the latest change" in found.text


def test_the_most_specific_condition_is_told_with_what_to_do() -> None:
    reason = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu"
    item = compute("Pending", Ready=("False", "NotReady", "0 of 1 nodes"), Scheduled=("False", "Unschedulable", reason))
    found = explain(item, [], [], now=NOW)
    assert (found.reason, found.text) == ("Unschedulable", reason)
    assert "skyproxy gpus" in found.hint


def test_a_queue_is_waited_for() -> None:
    said = "Pod w-0 waits in the queue research until Kueue admits it."
    found = explain(compute("Queued", Ready=("False", "Queued", said)), [], [], now=NOW)
    assert (found.phase, found.failed, found.reason, found.text) == ("Queued", False, "Queued", said)
    assert "kubectl get workloads" in found.hint


@pytest.mark.parametrize("phase", ["Failed", "Expired", "Suspended"])
def test_what_has_ended_is_not_waited_for(phase: str) -> None:
    assert explain(compute(phase, Ready=("False", phase, "why")), [], [], now=NOW).failed
    # But the user has just changed it, and the operator will see.
    assert not explain(compute(phase, seen=False, Ready=("False", phase, "why")), [], [], now=NOW).failed


def test_silence_is_the_operators_and_is_named_after_a_while() -> None:
    assert explain(compute(None, age_seconds=2), [], [], now=NOW).reason == "Pending"
    found = explain(compute(None, age_seconds=60), [], [], now=NOW)
    assert found.reason == "NoOperator"
    assert "skyproxy install" in found.hint


@pytest.mark.parametrize(
    ("status", "reason", "text"),
    [
        (
            {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no cpu"}
                ]
            },
            "Unschedulable",
            "w-0: no cpu",
        ),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}]},
            "ErrImagePull",
            "w-0: denied",
        ),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]},
            "ContainerCreating",
            "image may still be being pulled",
        ),
        (
            {
                "containerStatuses": [
                    {"state": {"running": {}}, "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}
                ]
            },
            "OOMKilled",
            "status 137",
        ),
    ],
)
def test_pods_tell_what_the_operator_has_not_said_yet(status: Any, reason: str, text: str) -> None:
    found = explain(compute("Pending"), [pod(**status)], [], now=NOW)
    assert found.reason == reason
    assert text in found.text


def test_warnings_are_shown_and_other_events_are_not() -> None:
    target = {"kind": "Pod", "name": "w-0"}
    events = [
        {"type": "Normal", "message": "scheduled", "involvedObject": target},
        {"type": "Warning", "message": "failed to pull", "count": 3, "involvedObject": target},
    ]
    assert explain(compute("Pending"), [], events, now=NOW).events == ("Pod w-0: failed to pull (x3)",)


def test_what_is_being_deleted_is_not_waited_for() -> None:
    item = compute("Running", Ready=("True", "Ready", ""))
    item["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    found = explain(item, [], [], now=NOW)
    assert (found.ready, found.failed) == (False, True)
