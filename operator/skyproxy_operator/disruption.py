"""Protection of workers that somebody uses from the cluster, which may end the others. Pure.

A drain asks a PodDisruptionBudget; autoscalers, which move pods to save machines, ask annotations as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyproxy_operator.compute_spec import ComputeSpec
from skyproxy_operator.options import Options
from skyproxy_operator.reaping import Report

POLICY_GROUP = "policy"
BUDGET = "PodDisruptionBudget"
_USES = ("sessions", "detached", "named", "jobs_running", "calls_running")
"""Of a worker's report: what would be lost with it."""
# cluster-autoscaler keeps machines with pods that have an emptyDir, unless they say that they may go.
_IN_USE = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
_UNUSED = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true", "karpenter.sh/do-not-disrupt": None}


def are_in_use(reports: Sequence[Report]) -> bool | None:
    """Return whether somebody would lose something with the workers; None where one of them does not say."""
    answers = [report.answer for report in reports if report.answer is not None]
    if any(answer.get(key) for answer in answers for key in _USES):
        return True
    return False if answers and len(answers) == len(reports) else None


def is_protected(status: Mapping[str, Any], options: Options) -> bool:
    """Return whether a Compute's pods must stay, as its status tells."""
    return options.protect_sessions and bool(status.get("inUse"))


def annotations_to_change(
    pod: Mapping[str, Any], spec: ComputeSpec, status: Mapping[str, Any], options: Options
) -> dict[str, str | None]:
    """Return the annotations of a pod that are not as they should be; None for those that go.

    What the spec's podTemplate sets stays, and before the workers said anything nothing changes.
    """
    if "inUse" not in status or not options.protect_sessions:
        return {}
    metadata = spec.pod_template.get("metadata")
    given = (metadata.get("annotations") if isinstance(metadata, Mapping) else None) or {}
    there = pod["metadata"].get("annotations") or {}
    wanted = _IN_USE if is_protected(status, options) else _UNUSED
    return {key: value for key, value in wanted.items() if key not in given and there.get(key) != value}
