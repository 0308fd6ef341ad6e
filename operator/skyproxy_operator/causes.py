"""The true cause why a pod does not run, in words that say what to do."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyproxy.errors import visible
from skyproxy_operator.names import CONTAINER

Object = Mapping[str, Any]

_INSUFFICIENT = re.compile(r"Insufficient ([\w.\-]+(?:/[\w.\-]+)?)")
_MAX_LOG_CHARACTERS = 1000
NAMESPACE_TERMINATING = "NamespaceTerminating"
"""Nothing can be made any more where a Compute is; that is never taken back."""
LOG_MARK = " Its last lines: "
"""Between why a worker ended and the end of its log."""
_BINDING_SECONDS = 30.0
"""The time that a claim may take to get its volume before somebody should look."""
_IMAGE_REASONS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
# All that some kubelets say from the second time on; newer ones add the cause.
_BACK_OFF = re.compile(r'Back-off pulling image "[^"]*"|ImagePullBackOff')
_PULL_EVENTS = ("Failed to pull image", "Failed to inspect image", "Failed to apply default image tag")
_CONFIG_REASONS = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"}
_VOLUME_EVENTS = {"FailedMount", "FailedAttachVolume", "FailedBinding", "ProvisioningFailed", "FailedMapVolume"}
_NORMAL_EXIT = {"Completed", "Error", ""}


@dataclass(frozen=True)
class Cause:
    """The reason why something is not as it should be.

    Attributes:
        reason: one word, for programs.
        message: for people: what, and what next. It may hold a worker's last lines, or words of a registry or another
            peer: none of it commands a terminal, and all of it can be written to a status.
        actionable: whether it stays so until somebody does something.
    """

    reason: str
    message: str
    actionable: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", visible(self.message))


def pod_phase(pod: Object) -> str:
    """Pending, Running, Succeeded, Failed or Unknown."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def has_ended(pod: Object) -> bool:
    """Return whether a pod's containers have ended, and will not run again."""
    return pod_phase(pod) in ("Failed", "Succeeded")


def condition(pod: Object, kind: str) -> Object:
    """A condition of a pod; an empty one where it has none of that kind."""
    found = [item for item in (pod.get("status") or {}).get("conditions") or () if item["type"] == kind]
    return found[0] if found else {}


def is_ready(pod: Object) -> bool:
    """Return whether a pod takes sessions."""
    return condition(pod, "Ready").get("status") == "True" and "deletionTimestamp" not in pod["metadata"]


def is_scheduled(pod: Object) -> bool:
    """Return whether a pod has found a machine."""
    return bool((pod.get("spec") or {}).get("nodeName"))


def node_lost_seconds(pod: Object, now: datetime.datetime) -> float | None:
    """For how long a pod's machine has not answered; None where it answers.

    The node controller then writes Ready=False over what the kubelet said last, and leaves ContainersReady as it was; a
    kubelet never says so itself, but for readiness gates. Older controllers wrote Unknown.
    """
    ready = condition(pod, "Ready")
    silent = ready.get("status") == "Unknown" or (
        ready.get("status") == "False"
        and condition(pod, "ContainersReady").get("status") == "True"
        and not (pod.get("spec") or {}).get("readinessGates")
    )
    if not silent or not is_scheduled(pod):
        return None
    since = ready.get("lastTransitionTime")
    return (now - datetime.datetime.fromisoformat(since.replace("Z", "+00:00"))).total_seconds() if since else 0.0


def pull_failures(
    pods: Iterable[Object], events: Mapping[str, Sequence[Object]], before: Mapping[str, str]
) -> dict[str, str]:
    """Return what registries said against images that pods cannot pull, by the image.

    A kubelet says so once, and from then on in its status that it waits before it tries again; its event goes after an
    hour. So who wants to know it later must keep it.

    Args:
        pods: of a Compute.
        events: those about each pod, oldest first, by the pod's name.
        before: what was found the last time; what is still waited for is kept.
    """
    found: dict[str, str] = {}
    for pod in pods:
        for status in _container_statuses(pod):
            waiting, image = (status.get("state") or {}).get("waiting") or {}, status.get("image") or ""
            if waiting and image in before:
                found.setdefault(image, before[image])
            if waiting.get("reason") not in _IMAGE_REASONS:
                continue
            said = str(waiting.get("message") or "")
            if not said or _BACK_OFF.fullmatch(said.strip()):
                told = [
                    str(event.get("message", ""))
                    for event in events.get(pod["metadata"]["name"], ())
                    if event.get("reason") in ("Failed", "InspectFailed") and image in str(event.get("message", ""))
                ]
                said = next((text for text in reversed(told) if text.startswith(_PULL_EVENTS)), "")
            if said:
                found[image] = said[:_MAX_LOG_CHARACTERS]
    return found


def waiting_cause(
    pod: Object, now: datetime.datetime, events: Iterable[Object] = (), pull_failure: Mapping[str, str] | None = None
) -> Cause:
    """Return why a pod that has not ended is not ready.

    Args:
        pod: the pod.
        now: the time.
        events: those about it, oldest first; they tell about volumes, which a pod's status does not.
        pull_failure: what `pull_failures` found, now or before.
    """
    name = pod["metadata"]["name"]
    if not is_scheduled(pod):
        return _unscheduled_cause(pod, name, now)
    for status in _container_statuses(pod):
        waiting = (status.get("state") or {}).get("waiting") or {}
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _IMAGE_REASONS:
            image = status.get("image") or ""
            why = str((pull_failure or {}).get(image) or message or reason).rstrip(".")
            return Cause(
                "ImagePullFailed",
                f"Pod {name} cannot pull the image {image or '(unknown)'}: {why}. Check its name and tag, and "
                "imagePullSecrets if the registry is private.",
                actionable=True,
            )
        if reason in _CONFIG_REASONS:
            return Cause(
                "ContainerNotCreated", f"Pod {name} cannot start its container: {message or reason}.", actionable=True
            )
        if reason not in ("", "ContainerCreating", "PodInitializing"):
            return Cause(reason, f"Pod {name} is waiting: {message or reason}.", actionable=True)
    troubles = [event for event in events if event.get("type") == "Warning" and event.get("reason") in _VOLUME_EVENTS]
    if troubles and pod_phase(pod) == "Pending":
        text = str(troubles[-1].get("message", ""))
        return Cause("VolumeNotMounted", f"Pod {name} is waiting for a volume: {text}", actionable=True)
    silent = node_lost_seconds(pod, now)
    if silent is not None:
        machine = (pod.get("spec") or {}).get("nodeName", "")
        text = f"The machine {machine} of pod {name} has not answered for {silent:.0f} s."
        return Cause("NodeNotResponding", f"{text} See: kubectl describe node {machine}", actionable=True)
    if pod_phase(pod) == "Running":
        return Cause("WorkerStarting", f"Pod {name} is running, but its worker does not accept sessions yet.")
    return Cause("ContainerCreating", f"Pod {name} has a machine, and its container is being created.")


def _unscheduled_cause(pod: Object, name: str, now: datetime.datetime) -> Cause:
    scheduled = condition(pod, "PodScheduled")
    message = str(scheduled.get("message", ""))
    if scheduled.get("reason") != "Unschedulable":
        return Cause("Scheduling", f"Pod {name} is waiting for a machine.")
    if "unbound immediate PersistentVolumeClaims" in message:
        born = datetime.datetime.fromisoformat(pod["metadata"]["creationTimestamp"].replace("Z", "+00:00"))
        late = (now - born).total_seconds() >= _BINDING_SECONDS
        return Cause(
            "VolumeUnbound",
            f"Pod {name} is waiting for its volumes"
            + (
                ". Look at the claims: kubectl describe pvc. A storage class may be missing."
                if late
                else " to be made."
            ),
            actionable=late,
        )
    lacking = list(dict.fromkeys(item.rstrip(".") for item in _INSUFFICIENT.findall(message)))
    if lacking:
        wanted = _requests(pod)
        amounts = ", ".join(f"{item} ({wanted[item]} asked for)" if item in wanted else item for item in lacking)
        return Cause(
            "Unschedulable",
            f"Pod {name} finds no machine with enough {amounts}. Wait until some is free, ask for less, or add nodes. "
            f"Scheduler: {message}",
            actionable=True,
        )
    return Cause("Unschedulable", f"Pod {name} finds no machine. Scheduler: {message}", actionable=True)


def _requests(pod: Object) -> dict[str, str]:
    result: dict[str, str] = {}
    for container in (pod.get("spec") or {}).get("containers") or ():
        result |= (container.get("resources") or {}).get("requests") or {}
    return result


def ended_cause(pod: Object) -> Cause:
    """Return why a pod has ended."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    if status.get("reason") and pod_phase(pod) == "Failed":
        # Evicted, NodeLost, Preempting, UnexpectedAdmissionError, ...: nothing that its container did.
        message = status.get("message") or status["reason"]
        return Cause(status["reason"], f"Pod {name} ended: {message}", actionable=True)
    states = [item.get(key) or {} for item in _container_statuses(pod) for key in ("state", "lastState")]
    ended = [item["terminated"] for item in states if item.get("terminated")]
    # The first failure, because the others may have been ended because of it.
    ended.sort(key=lambda item: (item.get("exitCode", 0) == 0, item.get("finishedAt") or ""))
    if not ended:
        return Cause("PodFailed", f"Pod {name} ended, and its status does not say why.", actionable=True)
    terminated, code = ended[0], ended[0].get("exitCode", 0)
    reason = terminated.get("reason") or ""
    if reason == "OOMKilled":
        return Cause(
            "OOMKilled",
            f"Pod {name} used more memory than it has ({_memory(pod)}) and was killed. Ask for more memory: its "
            "tensors on the CPU, its caches and /dev/shm count.",
            actionable=True,
        )
    if reason not in _NORMAL_EXIT and reason != "ContainerCannotRun":
        return Cause(reason, f"Pod {name} ended: {terminated.get('message') or reason}", actionable=True)
    text = f"Pod {name} ended with exit status {code}"
    if code > 128:
        text += f" (signal {code - 128})"
    log = str(terminated.get("message") or "").strip()[-_MAX_LOG_CHARACTERS:]
    return Cause("WorkerExited", f"{text}.{LOG_MARK}{log}" if log else f"{text}.", actionable=True)


def _memory(pod: Object) -> str:
    for container in (pod.get("spec") or {}).get("containers") or ():
        limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
        if container.get("name") == CONTAINER and limit:
            return str(limit)
    return "that of its machine"


def _container_statuses(pod: Object) -> Sequence[Object]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def namespace_cause() -> Cause:
    """Return why nothing is made any more for a Compute whose namespace is being deleted."""
    return Cause(NAMESPACE_TERMINATING, "Its namespace is being deleted, and it goes with it.")
