"""A cluster in memory behind the operator's own interface, that can fail or stop at any request.

It stands for the API server (names are unique, a uid is checked, apply merges), for garbage collection, and for the
scheduler and kubelet, as far as the tests tell it. The real ones are in tests/e2e.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from skyproxy_operator.cluster import ApiError
from skyproxy_operator.names import COMPUTE_LABEL
from skyproxy_operator.probing import ENDING, ProbeCredentials
from skyproxy_operator.queueing import GROUP_LABEL, QUEUE_LABEL, TOTAL_ANNOTATION, WORKLOAD
from skyproxy_operator.reaping import Report

Object = dict[str, Any]
Place = tuple[str, str, str]


class Interrupted(BaseException):
    """The operator's process ends here."""


class FakeCluster:
    """What the operator sees of a cluster.

    Attributes:
        objects: all that is there, by kind, namespace and name.
        requests: every request that was made: verb, kind and name.
        stop_after: how many more requests succeed before the process ends; None for all.
        refuse: a failure for each kind of object that cannot be created or applied.
        made: how often each object was created.
        runtime_texts: the installation's runtimes by their names.
        kinds: those that the cluster serves beside Kubernetes' own, with their versions. With Workload, Kueue is there.
        workload_object: Kueue's object about pods in its queue.
    """

    def __init__(self) -> None:
        self.objects: dict[Place, Object] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.stop_after: int | None = None
        self.refuse: dict[str, ApiError] = {}
        self.made: Counter[Place] = Counter()
        self.kinds: dict[str, str] = {}
        self.runtime_texts: dict[str, str] = {}
        self.workload_object: Object | None = None
        self._uids = itertools.count(1)

    # --- the operator's side -----------------------------------------------------------------------------------------

    def _request(self, verb: str, kind: str, name: str) -> None:
        if self.stop_after is not None:
            if self.stop_after == 0:
                raise Interrupted
            self.stop_after -= 1
        self.requests.append((verb, kind, name))

    async def read(self, api_version: str, kind: str, namespace: str, name: str) -> Object | None:
        self._request("get", kind, name)
        return copy.deepcopy(self.objects.get((kind, namespace, name)))

    def check_current(self, patience_seconds: float) -> None:
        pass

    def computes(self) -> list[tuple[str, str]]:
        return [(namespace, name) for kind, namespace, name in self.objects if kind == "Compute"]

    def compute(self, namespace: str, name: str) -> Object | None:
        return copy.deepcopy(self.objects.get(("Compute", namespace, name)))

    def runtimes(self) -> dict[str, str]:
        return self.runtime_texts

    def watches(self, kind: str) -> bool:
        return kind in ("Compute", "Pod", "Service", "PersistentVolumeClaim", "NetworkPolicy")

    def child(self, kind: str, namespace: str, name: str) -> Object | None:
        found = self.objects.get((kind, namespace, name))
        return copy.deepcopy(found) if found and COMPUTE_LABEL in (found["metadata"].get("labels") or {}) else None

    def pods(self, namespace: str, compute: str) -> list[Object]:
        return [
            copy.deepcopy(item)
            for (kind, where, _), item in self.objects.items()
            if kind == "Pod" and where == namespace and item["metadata"]["labels"].get(COMPUTE_LABEL) == compute
        ]

    async def events(self, namespace: str, pod: Object) -> list[Object]:
        self._request("list", "Event", pod["metadata"]["name"])
        return []

    async def workload(self, version: str, pod: Object) -> Object | None:
        self._request("list", WORKLOAD, pod["metadata"]["name"])
        assert version == self.kinds[WORKLOAD]
        return copy.deepcopy(self.workload_object)

    async def served_kinds(self, group: str) -> Mapping[str, str]:
        return self.kinds

    async def create(self, wanted: Object) -> bool:
        place = _place(wanted)
        self._request("create", place[0], place[2])
        if wanted["kind"] in self.refuse:
            raise self.refuse[wanted["kind"]]
        if place in self.objects:
            return False
        self.put(wanted)
        return True

    async def apply(self, wanted: Object) -> Object:
        place = _place(wanted)
        self._request("patch", place[0], place[2])
        if wanted["kind"] in self.refuse:
            raise self.refuse[wanted["kind"]]
        old = self.objects.get(place)
        if old is None:
            self.put(wanted)
        else:
            old.update({key: copy.deepcopy(value) for key, value in wanted.items() if key != "metadata"})
            old["metadata"].update(copy.deepcopy(wanted["metadata"]))
        return self.objects[place]

    async def delete(self, item: Object, *, force: bool = False) -> None:
        place = _place(item)
        self._request("delete", place[0], place[2])
        found = self.objects.get(place)
        if found is not None and found["metadata"]["uid"] == item["metadata"]["uid"]:
            # As a kubelet does it: the pod stays until its containers have ended; by force, nobody asks it.
            if force:
                del self.objects[place]
                return
            found["metadata"]["deletionTimestamp"] = "2026-05-01T12:00:00Z"

    async def annotate(self, item: Object, changes: Mapping[str, str | None]) -> None:
        place = _place(item)
        self._request("patch", place[0], place[2])
        found = self.objects.get(place)
        if found is not None and found["metadata"]["uid"] == item["metadata"]["uid"]:
            found["metadata"] = _merge_patched(found["metadata"], {"annotations": dict(changes)})

    async def patch_status(self, compute: Object, patch: Object) -> None:
        place = _place(compute)
        self._request("patch", "Compute/status", place[2])
        found = self.objects.get(place)
        if found is not None and found["metadata"]["uid"] == compute["metadata"]["uid"]:
            found["status"] = _merge_patched(found.get("status") or {}, patch)

    # --- the world's side --------------------------------------------------------------------------------------------

    def put(self, item: Object) -> Object:
        """Adds an object as the API server does."""
        made = copy.deepcopy(item)
        made["metadata"].setdefault("uid", f"uid-{next(self._uids)}")
        made["metadata"].setdefault("creationTimestamp", "2026-05-01T12:00:00Z")
        if made["kind"] == "Pod":
            made.setdefault("status", {"phase": "Pending"})
            if WORKLOAD in self.kinds and QUEUE_LABEL in made["metadata"]["labels"]:
                _hold(made)
        self.objects[_place(made)] = made
        self.made[_place(made)] += 1
        return made

    def all(self, kind: str) -> list[Object]:
        return [item for (each, _, _), item in sorted(self.objects.items()) if each == kind]

    def finish_deletions(self) -> None:
        """Pods that were told to end have ended."""
        for place, item in list(self.objects.items()):
            if "deletionTimestamp" in item["metadata"] and not self._keeps(item):
                del self.objects[place]

    def make_ready(self) -> None:
        """Every pod that waits runs, and takes sessions."""
        for pod in self.all("Pod"):
            if pod["spec"].get("schedulingGates"):
                continue
            if pod["status"]["phase"] == "Pending" and "deletionTimestamp" not in pod["metadata"]:
                pod["spec"]["nodeName"] = "machine"
                ready = {"type": "Ready", "status": "True"}
                pod["status"] = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [ready]}

    def _keeps(self, pod: Object) -> bool:
        """Kueue keeps the pods of a group until all of them have ended, and nobody may replace them."""
        metadata = pod["metadata"]
        if "finalizers" not in metadata or GROUP_LABEL not in metadata["labels"]:
            return False
        group = self._group(metadata["labels"][GROUP_LABEL])
        retried = all(
            item["metadata"]["annotations"].get("kueue.x-k8s.io/retriable-in-group") != "false" for item in group
        )
        ended = all("deletionTimestamp" in item["metadata"] or item["status"]["phase"] == "Failed" for item in group)
        return retried or not ended

    def _group(self, name: str) -> list[Object]:
        return [pod for pod in self.all("Pod") if pod["metadata"]["labels"].get(GROUP_LABEL) == name]

    def admit(self) -> None:
        """Kueue has room for every group that is there as a whole, and every pod without one."""
        for pod in self.all("Pod"):
            metadata = pod["metadata"]
            group = metadata["labels"].get(GROUP_LABEL)
            if group is None or len(self._group(group)) == int(metadata["annotations"][TOTAL_ANNOTATION]):
                pod["spec"].pop("schedulingGates", None)
                pod["status"]["conditions"] = []

    def preempt(self) -> None:
        """Kueue takes every pod back."""
        target = {"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvicted", "message": "Preempted"}
        for pod in self.all("Pod"):
            pod["status"]["conditions"] = [target]
            pod["metadata"]["deletionTimestamp"] = "2026-05-01T12:00:00Z"

    def fail(self, name: str, last_lines: str = "boom") -> None:
        """A pod's worker crashes."""
        pod = self.objects["Pod", "lab", name]
        state = {"terminated": {"exitCode": 1, "reason": "Error", "message": last_lines}}
        pod["status"] = {"phase": "Failed", "containerStatuses": [{"name": "worker", "state": state}]}

    def collect_garbage(self) -> None:
        """What belongs only to objects that are gone goes, too."""
        uids = {item["metadata"]["uid"] for item in self.objects.values()}
        for place, item in list(self.objects.items()):
            owners = item["metadata"].get("ownerReferences") or []
            if owners and not any(owner["uid"] in uids for owner in owners):
                del self.objects[place]


class FakeProber:
    """Workers that say what the tests want.

    Attributes:
        idle_seconds: what each of them reports; None where they do not answer.
        sessions: what each of them reports.
        asked: what was asked.
        told: the addresses that were told that they are ended for good.
    """

    def __init__(self) -> None:
        self.idle_seconds: float | None = 0.0
        self.sessions = 0
        self.silence = Report(problem="silent")
        self.asked: list[tuple[Sequence[tuple[str, int]], ProbeCredentials]] = []
        self.told: list[Sequence[tuple[str, int]]] = []

    async def ask(
        self, addresses: Sequence[tuple[str, int]], access: ProbeCredentials, path: str = "/activity"
    ) -> list[Report]:
        if path == ENDING:
            self.told.append(addresses)
            return []
        self.asked.append((addresses, access))
        if self.idle_seconds is None:
            return [self.silence for _ in addresses]
        return [
            Report(self.idle_seconds, {"software": {}, "devices": [], "sessions": self.sessions}) for _ in addresses
        ]


def _hold(pod: Object) -> None:
    """Do what Kueue's webhook does to a pod with a queue, and then the scheduler."""
    pod["metadata"]["labels"]["kueue.x-k8s.io/managed"] = "true"
    pod["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed"]
    pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    text = "Scheduling is blocked due to non-empty scheduling gates"
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": text}
    pod["status"]["conditions"] = [gated]


def _place(item: Object) -> Place:
    return item["kind"], item["metadata"]["namespace"], item["metadata"]["name"]


def _merge_patched(target: Object, patch: Object) -> Object:
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = _merge_patched(result[key] if isinstance(result.get(key), dict) else {}, value)
        else:
            result[key] = value
    return result
