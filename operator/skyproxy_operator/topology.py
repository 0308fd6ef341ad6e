"""Nodes of a Compute near to each other: what pods say of it to the cluster's scheduler and to Kueue. Pure.

Kueue reads annotations (https://kueue.sigs.k8s.io/docs/concepts/topology_aware_scheduling/), Kubernetes' own groups a
constraint of their PodGroup, and every other scheduler an affinity of the pods to each other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from skyproxy_operator.names import COMPUTE_LABEL

_KUEUE = "kueue.x-k8s.io/podset-{}-topology"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_MAX_WEIGHT = 100


class Topology(NamedTuple):
    """A domain that all nodes of a Compute are to share.

    Attributes:
        key: the label of machines by which domains differ.
        required: False if it is only preferred.
    """

    key: str
    required: bool = True


def queue_annotations(topology: Topology | None) -> dict[str, str]:
    """Return the annotations of pods in a queue, which Kueue places."""
    if topology is None:
        return {}
    return {_KUEUE.format("required" if topology.required else "preferred"): topology.key}


def group_constraints(topology: Topology | None) -> dict[str, Any]:
    """Return what the spec of Kubernetes' own PodGroup says; it knows no preference."""
    if topology is None or not topology.required:
        return {}
    return {"schedulingConstraints": {"topology": [{"key": topology.key}]}}


def affinity_of(compute: str, topology: Topology | None, affinity: Mapping[str, object]) -> dict[str, Any]:
    """Return an affinity by which pods of a Compute are near to each other, beside what it says already."""
    result: dict[str, Any] = copy.deepcopy(dict(affinity))
    if topology is None:
        return result
    term: dict[str, Any] = {
        "topologyKey": topology.key,
        "labelSelector": {"matchLabels": {COMPUTE_LABEL: compute}},
    }
    near = result.get("podAffinity")
    near = result["podAffinity"] = dict(near) if isinstance(near, Mapping) else {}
    key, row = (
        (_REQUIRED, term) if topology.required else (_PREFERRED, {"weight": _MAX_WEIGHT, "podAffinityTerm": term})
    )
    near[key] = [*(near.get(key) or ()), row]
    return result
