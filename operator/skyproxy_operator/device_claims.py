"""Devices that Kubernetes allocates by claims (dynamic resource allocation), as a Compute asks for them. Pure.

A claim names a template or a claim of its namespace, or only a class of devices; for that the operator makes the
template (https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, NotRequired, TypedDict

from skyproxy_operator.causes import Cause
from skyproxy_operator.options import Options

DEVICE_GROUP = "resource.k8s.io"
CLAIM_TEMPLATE = "ResourceClaimTemplate"
CLAIM_VERSIONS = ("v1", "v1beta2", "v1beta1")
"""Those whose Pods name claims as we do: before them, Pods had another form, and servers drop it without a word."""
_REQUEST = "devices"
_NVIDIA = re.compile(r"(.+\.)?(gpu|mig)\.nvidia\.com")
_COMPUTES = re.compile(r"(.+\.)?(gpu|mig|npu|tpu|gaudi|neuron)\..+")
"""Classes of what computes: drivers are called after it, such as gpu.nvidia.com, and not what is only beside it."""


class ClaimItem(TypedDict):
    """A claim in a Compute's spec, as the schema of the custom resource has it."""

    name: str
    deviceClassName: NotRequired[str]
    count: NotRequired[int]
    selectors: NotRequired[list[str]]
    resourceClaimTemplateName: NotRequired[str]
    resourceClaimName: NotRequired[str]
    request: NotRequired[str]


class DeviceClaim(NamedTuple):
    """A claim of each node; has a class and a number of its devices, or names a template or a claim."""

    name: str
    device_class: str | None = None
    number: int = 1
    selectors: tuple[str, ...] = ()
    template: str | None = None
    claim: str | None = None
    request: str | None = None

    @classmethod
    def parse(cls, item: ClaimItem) -> DeviceClaim:
        """A claim of a spec that was checked."""
        return cls(
            item["name"],
            item.get("deviceClassName"),
            item.get("count", 1),
            tuple(item.get("selectors") or ()),
            item.get("resourceClaimTemplateName"),
            item.get("resourceClaimName"),
            item.get("request"),
        )

    @property
    def is_nvidia(self) -> bool:
        """True if its class is one of NVIDIA's GPUs, or parts of them."""
        return _NVIDIA.fullmatch(self.device_class or "") is not None

    @property
    def accelerators(self) -> int:
        """The number of devices that compute; 0 where that cannot be seen, because the claim only names another."""
        return self.number if _COMPUTES.fullmatch(self.device_class or "") else 0


def claim_problems(items: Iterable[ClaimItem]) -> Iterator[str]:
    """Everything that is wrong with claims that the schema lets through, a line each."""
    for item in items:
        where = f"spec.resourceClaims[{item['name']}]"
        sources = [key for key in ("deviceClassName", "resourceClaimTemplateName", "resourceClaimName") if key in item]
        if len(sources) != 1:
            yield (
                f"{where}: a claim has exactly one of deviceClassName, resourceClaimTemplateName and resourceClaimName"
            )
        if "deviceClassName" not in item and ("count" in item or "selectors" in item):
            yield (
                f"{where}: count and selectors belong to deviceClassName; what is named says itself how many and which"
            )
        if "deviceClassName" in item and "request" in item:
            yield f"{where}: request chooses a part of a claim that is named; with deviceClassName there is only one"


def class_violations(claims: Sequence[DeviceClaim], options: Options) -> Iterator[str]:
    """Yield the classes that the installation does not let Computes ask for, a line each."""
    patterns = [pattern.strip() for pattern in options.device_classes.split(",")]
    for claim in claims:
        if claim.device_class is not None and not any(fnmatchcase(claim.device_class, each) for each in patterns):
            yield (
                f"spec.resourceClaims[{claim.name}]: this installation does not give workers devices of the class "
                f"{claim.device_class}. An administrator allows it: SKYPROXY_OPERATOR_DEVICE_CLASSES="
                f"{claim.device_class}"
            )


def template_name(compute: str, claim: DeviceClaim) -> str:
    """Return the name of the template that the operator makes for a claim: another one for other devices, because a
    template cannot be changed.
    """
    text = json.dumps([claim.device_class, claim.number, claim.selectors])
    return f"{compute}-{claim.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def own_templates(compute: str, claims: Iterable[DeviceClaim]) -> set[str]:
    """Return the names of the templates that the operator makes for a Compute."""
    return {template_name(compute, claim) for claim in claims if claim.device_class is not None}


def template_spec(claim: DeviceClaim, version: str) -> dict[str, Any]:
    """Return the spec of the template that the operator makes for a claim, in one of CLAIM_VERSIONS."""
    devices: dict[str, Any] = {"deviceClassName": claim.device_class, "allocationMode": "ExactCount"}
    devices["count"] = claim.number
    if claim.selectors:
        devices["selectors"] = [{"cel": {"expression": text}} for text in claim.selectors]
    request = {"name": _REQUEST, **(devices if version == "v1beta1" else {"exactly": devices})}
    return {"spec": {"devices": {"requests": [request]}}}


def pod_claims(compute: str, claims: Iterable[DeviceClaim]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the claims of a pod, and those of its worker's container."""
    of_pod, of_container = [], []
    for claim in claims:
        if claim.claim is not None:
            source = {"resourceClaimName": claim.claim}
        else:
            source = {"resourceClaimTemplateName": claim.template or template_name(compute, claim)}
        of_pod.append({"name": claim.name, **source})
        of_container.append({"name": claim.name, **({"request": claim.request} if claim.request else {})})
    return of_pod, of_container


def claims_unavailable(kinds: Mapping[str, str]) -> Cause:
    """Return why no pod is made for claims on a cluster that does not know them.

    Args:
        kinds: what the cluster serves of DEVICE_GROUP.
    """
    there = f"{CLAIM_TEMPLATE} of {kinds[CLAIM_TEMPLATE]} only" if CLAIM_TEMPLATE in kinds else f"no {CLAIM_TEMPLATE}"
    return Cause(
        "ClaimsUnavailable",
        f"spec.resourceClaims needs Kubernetes 1.32 or newer with dynamic resource allocation ({CLAIM_TEMPLATE} of "
        f"{DEVICE_GROUP}, {', '.join(CLAIM_VERSIONS[:-1])} or {CLAIM_VERSIONS[-1]}), and this cluster serves {there}. "
        "Ask for devices in spec.resources, or have an administrator upgrade it.",
        actionable=True,
    )
