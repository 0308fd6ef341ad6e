"""The pod security standard "restricted", as its page in the Kubernetes documentation has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def violations(spec: dict[str, Any]) -> Iterator[str]:
    """What in a pod's spec the standard does not allow."""
    for word in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(word):
            yield word
    for volume in spec.get("volumes", ()):
        if not set(volume) - {"name"} <= _VOLUMES:
            yield f"volume {volume['name']}"
    pod = spec.get("securityContext", {})
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        name, own = container["name"], container.get("securityContext", {})
        if own.get("privileged"):
            yield f"{name}: privileged"
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{name}: allowPrivilegeEscalation"
        if "ALL" not in own.get("capabilities", {}).get("drop", ()):
            yield f"{name}: capabilities"
        if set(own.get("capabilities", {}).get("add", ())) - {"NET_BIND_SERVICE"}:
            yield f"{name}: added capabilities"
        if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
            yield f"{name}: runAsNonRoot"
        if own.get("runAsUser", pod.get("runAsUser")) == 0:
            yield f"{name}: runAsUser"
        profile = own.get("seccompProfile", pod.get("seccompProfile", {})).get("type")
        if profile not in ("RuntimeDefault", "Localhost"):
            yield f"{name}: seccompProfile"
        if any("hostPort" in port for port in container.get("ports", ())):
            yield f"{name}: hostPort"
