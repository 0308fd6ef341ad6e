"""Signs by which schedulers for groups give all nodes of a Compute machines together, or none. Pure.

Volcano reads an annotation (https://volcano.sh/en/docs/podgroup/), the coscheduling plugin of scheduler-plugins a label
(https://scheduler-plugins.sigs.k8s.io/docs/plugins/coscheduling/); both name an object of the kind PodGroup.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyproxy_operator.causes import Cause
from skyproxy_operator.compute_spec import ComputeSpec

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
    """

    group: str
    version: str
    labels: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()
    scheduler: str | None = None

    @property
    def api_version(self) -> str:
        """The API version of its PodGroup."""
        return f"{self.group}/{self.version}"


GANGS = {
    "volcano": Gang(
        "scheduling.volcano.sh", "v1beta1", annotations=("scheduling.k8s.io/group-name",), scheduler="volcano"
    ),
    "coscheduling": Gang("scheduling.x-k8s.io", "v1alpha1", labels=("scheduling.x-k8s.io/pod-group",)),
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
