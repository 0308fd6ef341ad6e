"""Signs by which schedulers for groups give all nodes of a Compute machines together, or none. Pure.

Volcano reads an annotation (https://volcano.sh/en/docs/podgroup/), the coscheduling plugin of scheduler-plugins a label
(https://scheduler-plugins.sigs.k8s.io/docs/plugins/coscheduling/), Kubernetes' own scheduler a field, since 1.36
(https://kubernetes.io/docs/concepts/scheduling-eviction/gang-scheduling/); each names an object of the kind PodGroup.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyproxy_operator.causes import Cause
from skyproxy_operator.compute_spec import ComputeSpec
from skyproxy_operator.topology import group_constraints

POD_GROUP = "PodGroup"


@dataclass(frozen=True)
class Gang:
    """A scheduler for groups.

    Attributes:
        group: the API group of its PodGroup.
        version: the version of the form that we write.
        labels: on a pod: names its PodGroup.
        annotations: the same, where it is an annotation.
        scheduler: of pods that name none; None where it is the cluster's own.
        is_own: whether it is Kubernetes' own: a field of pods names its group, which cannot be changed, and of its API
            only that version is known.
    """

    group: str
    version: str
    labels: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()
    scheduler: str | None = None
    is_own: bool = False

    @property
    def api_version(self) -> str:
        """The API version of its PodGroup."""
        return f"{self.group}/{self.version}"


GANGS = {
    "volcano": Gang(
        "scheduling.volcano.sh", "v1beta1", annotations=("scheduling.k8s.io/group-name",), scheduler="volcano"
    ),
    "coscheduling": Gang("scheduling.x-k8s.io", "v1alpha1", labels=("scheduling.x-k8s.io/pod-group",)),
    "kubernetes": Gang("scheduling.k8s.io", "v1alpha2", is_own=True),
}


def gang_of(spec: ComputeSpec) -> Gang | None:
    """Return the scheduler for groups that a spec names; None for a node alone, which is no group."""
    return GANGS[spec.gang] if spec.gang is not None and spec.nodes > 1 else None


def gang_labels(compute: Mapping[str, Any], spec: ComputeSpec) -> tuple[dict[str, str], dict[str, str]]:
    """Return the labels and the annotations that name a pod's PodGroup."""
    gang, name = gang_of(spec), compute["metadata"]["name"]
    if gang is None:
        return {}, {}
    return dict.fromkeys(gang.labels, name), dict.fromkeys(gang.annotations, name)


def group_name(compute: str, spec: ComputeSpec) -> str:
    """Return the name of a gang's PodGroup: another one for another size where it cannot be changed."""
    gang = gang_of(spec)
    if gang is None or not gang.is_own:
        return compute
    text = json.dumps([spec.nodes, spec.topology, spec.priority_class])
    return f"{compute}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def group_spec(spec: ComputeSpec) -> dict[str, Any]:
    """Return the spec of a gang's PodGroup, in the form of its kind."""
    gang = gang_of(spec)
    if gang is None or not gang.is_own:
        return {"minMember": spec.nodes}
    priority = {"priorityClassName": spec.priority_class} if spec.priority_class else {}
    return {"schedulingPolicy": {"gang": {"minCount": spec.nodes}}, **priority, **group_constraints(spec.topology)}


def group_field(compute: str, spec: ComputeSpec) -> dict[str, Any]:
    """Return the field of a pod's spec that names its PodGroup, where a label or an annotation does not."""
    gang = gang_of(spec)
    return {"schedulingGroup": {"podGroupName": group_name(compute, spec)}} if gang is not None and gang.is_own else {}


def is_served(gang: Gang, kinds: Mapping[str, str]) -> bool:
    """Return whether a cluster that serves such kinds of the gang's API group has its scheduler."""
    version = kinds.get(POD_GROUP)
    return version is not None and (not gang.is_own or version == gang.version)


def scheduler_of(spec: ComputeSpec) -> str | None:
    """Return the scheduler of a spec's pods; None for the cluster's own."""
    gang = gang_of(spec)
    return spec.scheduler or (gang.scheduler if gang is not None else None)


def unavailable(spec: ComputeSpec, gang: Gang) -> Cause:
    """Return why no pod is made for a gang in a cluster without its scheduler."""
    return Cause(
        "GangUnavailable",
        f"spec.gang is {spec.gang}, and the cluster does not know {POD_GROUP} of {gang.api_version}. An administrator "
        "installs that scheduler. Without gang, the nodes get machines one by one.",
        actionable=True,
    )
