"""Why pods do not run, in the words of real schedulers and kubelets."""

from __future__ import annotations

from typing import Any

import pytest

from skyproxy_operator.causes import Cause, ended_cause, pull_failures, waiting_cause
from tests.operator.makers import NOW, at, condition, make_compute, make_pod

COMPUTE = make_compute(resources={"nvidia.com/gpu": "2", "memory": "8Gi"})


def unscheduled(message: str, **more: Any) -> dict[str, Any]:
    pod = make_pod(COMPUTE, conditions=[condition("PodScheduled", "False", "Unschedulable", message)], **more)
    pod["spec"]["containers"][0]["resources"]["requests"] = {"nvidia.com/gpu": "2", "memory": "8Gi"}
    return pod


def started(**status: Any) -> dict[str, Any]:
    pod = make_pod(COMPUTE, **status)
    pod["spec"]["nodeName"] = "machine"
    return pod


def waits(reason: str, message: str = "") -> dict[str, Any]:
    return started(
        containerStatuses=[
            {"name": "worker", "image": "i:1", "state": {"waiting": {"reason": reason, "message": message}}}
        ]
    )


@pytest.mark.parametrize("message", ['Back-off pulling image "i:1"', "", "ImagePullBackOff"])
def test_what_a_registry_said_is_in_an_event_when_the_kubelet_only_waits(message: str) -> None:
    pod = waits("ImagePullBackOff", message)
    said = 'Failed to pull image "i:1": unauthorized: authentication required'
    events = [
        {"reason": "Pulling", "message": 'Pulling image "i:1"'},
        {"reason": "Failed", "type": "Warning", "message": said},
        {"reason": "Failed", "type": "Warning", "message": "Error: ErrImagePull"},
    ]
    found = pull_failures([pod], {"dev-0": events}, {})
    assert found == {"i:1": said}
    assert "unauthorized" in waiting_cause(pod, NOW, events, found).message
    # What was known before stays as long as the image is waited for, and no longer.
    assert pull_failures([pod], {}, {"i:1": "before", "gone:1": "x"}) == {"i:1": "before"}
    assert pull_failures([make_pod(COMPUTE, ready=True)], {}, {"i:1": "before"}) == {}


def test_a_kubelet_that_repeats_the_cause_is_believed() -> None:
    message = 'Back-off pulling image "i:1": ErrImagePull: manifest unknown'
    assert pull_failures([waits("ImagePullBackOff", message)], {}, {"i:1": "old"}) == {"i:1": message}


@pytest.mark.parametrize(
    ("message", "lacking"),
    [
        ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", ["nvidia.com/gpu (2 asked for)"]),
        (
            "0/3 nodes are available: 1 Insufficient memory, 2 Insufficient nvidia.com/gpu. preemption: not helpful.",
            ["memory (8Gi asked for)", "nvidia.com/gpu (2 asked for)"],
        ),
        ("0/1 nodes are available: 1 Insufficient cpu.", ["cpu"]),
    ],
)
def test_the_resource_that_is_lacking_is_named(message: str, lacking: list[str]) -> None:
    cause = waiting_cause(unscheduled(message), NOW)
    assert (cause.reason, cause.actionable) == ("Unschedulable", True)
    assert f"no machine with enough {', '.join(lacking)}." in cause.message
    assert message in cause.message


def test_other_reasons_of_the_scheduler_are_told_as_they_are() -> None:
    message = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
    cause = waiting_cause(unscheduled(message), NOW)
    assert (cause.reason, cause.actionable) == ("Unschedulable", True)
    assert message in cause.message


def test_a_claim_may_take_a_moment_to_be_bound() -> None:
    pod = unscheduled("0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.")
    assert [waiting_cause(pod, moment).actionable for moment in (NOW, at(31))] == [False, True]
    assert "kubectl describe pvc" in waiting_cause(pod, at(31)).message


def test_a_fresh_pod_waits_for_its_machine() -> None:
    assert waiting_cause(make_pod(COMPUTE), NOW).reason == "Scheduling"


@pytest.mark.parametrize(
    ("pod", "reason", "text"),
    [
        (waits("ImagePullBackOff", 'Back-off pulling image "i:1"'), "ImagePullFailed", "cannot pull the image i:1"),
        (waits("ErrImagePull", "manifest unknown"), "ImagePullFailed", "manifest unknown"),
        (waits("InvalidImageName"), "ImagePullFailed", "imagePullSecrets"),
        (waits("CreateContainerConfigError", 'secret "hf" not found'), "ContainerNotCreated", 'secret "hf" not found'),
        (waits("RunContainerError", "exec: python: not found"), "ContainerNotCreated", "python: not found"),
    ],
)
def test_what_keeps_a_container_from_starting_is_told(pod: dict[str, Any], reason: str, text: str) -> None:
    cause = waiting_cause(pod, NOW)
    assert (cause.reason, cause.actionable) == (reason, True)
    assert text in cause.message


def test_a_volume_that_cannot_be_mounted_is_told_by_events() -> None:
    pod = waits("ContainerCreating")
    events = [
        {"type": "Normal", "reason": "Scheduled", "message": "assigned"},
        {"type": "Warning", "reason": "FailedMount", "message": "Unable to attach: volume is in use"},
    ]
    assert waiting_cause(pod, NOW).reason == "ContainerCreating"
    cause = waiting_cause(pod, NOW, events)
    assert (cause.reason, cause.actionable) == ("VolumeNotMounted", True)
    assert "volume is in use" in cause.message


def test_a_machine_that_does_not_answer_is_told() -> None:
    pod = started(phase="Running", conditions=[condition("Ready", "Unknown")])
    assert waiting_cause(pod, NOW).reason == "NodeNotResponding"


def test_a_worker_that_starts_is_no_trouble() -> None:
    cause = waiting_cause(started(phase="Running", conditions=[condition("Ready", "False")]), NOW)
    assert (cause.reason, cause.actionable) == ("WorkerStarting", False)


def test_too_little_memory_is_told_with_the_amount() -> None:
    pod = make_pod(COMPUTE, terminated={"exitCode": 137, "reason": "OOMKilled"})
    pod["spec"]["containers"][0]["resources"]["limits"] = {"memory": "8Gi"}
    cause = ended_cause(pod)
    assert cause.reason == "OOMKilled"
    assert "(8Gi)" in cause.message


def test_a_crash_is_told_with_its_last_lines() -> None:
    lines = "Traceback ...\nValueError: no such model"
    cause = ended_cause(make_pod(COMPUTE, terminated={"exitCode": 1, "reason": "Error", "message": lines}))
    assert cause.reason == "WorkerExited"
    assert "exit status 1. Its last lines: " in cause.message
    assert cause.message.endswith("no such model")


def test_a_long_log_is_cut_at_its_beginning() -> None:
    cause = ended_cause(make_pod(COMPUTE, terminated={"exitCode": 1, "message": "x" * 5000 + "the end"}))
    assert len(cause.message) < 1200
    assert cause.message.endswith("the end")


def test_a_signal_is_named() -> None:
    assert "(signal 9)" in ended_cause(make_pod(COMPUTE, terminated={"exitCode": 137, "reason": "Error"})).message


def test_the_first_failure_of_a_pod_is_the_cause() -> None:
    pod = make_pod(COMPUTE, terminated={"exitCode": 0, "finishedAt": "2026-05-01T12:00:00Z"})
    pod["status"]["containerStatuses"] += [
        {"name": "b", "state": {"terminated": {"exitCode": 3, "finishedAt": "2026-05-01T12:00:09Z"}}},
        {"name": "c", "state": {"terminated": {"exitCode": 2, "finishedAt": "2026-05-01T12:00:05Z"}}},
    ]
    assert "exit status 2" in ended_cause(pod).message


@pytest.mark.parametrize("reason", ["Evicted", "NodeLost", "Preempting", "UnexpectedAdmissionError"])
def test_what_is_done_to_a_pod_is_told(reason: str) -> None:
    pod = make_pod(COMPUTE, phase="Failed", reason=reason, message="The node was low on resource: memory.")
    cause = ended_cause(pod)
    assert cause.reason == reason
    assert "low on resource" in cause.message


def test_a_pod_that_ended_without_a_word() -> None:
    assert ended_cause(make_pod(COMPUTE, phase="Failed")).reason == "PodFailed"


def test_no_words_of_a_worker_command_the_terminal_that_shows_a_status() -> None:
    said = "\x1b]52;c;ZXZpbA==\x07\x9d\u202e\ud800\r\nnext"
    message = Cause("PodFailed", said).message
    assert message == "\\x1b]52;c;ZXZpbA==\\x07\\x9d\\u202e\\ud800\\x0d\nnext"
    message.encode()
