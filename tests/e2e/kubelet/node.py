"""One node: registered, kept alive, serving the Pods that the scheduler binds to it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path

from tests.e2e.kubelet.api import ApiError, Object
from tests.e2e.kubelet.pods import Node, Pod, now
from tests.e2e.kubelet.server import Server

logger = logging.getLogger("kubelet.node")

_BEAT_SECONDS = 10.0


class Kubelet:
    """The stand-in for the kubelet of one node."""

    def __init__(self, node: Node, gpus: int, certificate: tuple[Path, Path], authority: Path) -> None:
        self._node = node
        self._gpus = gpus
        self._certificate = certificate
        self._authority = authority
        self._pods: dict[str, Pod] = {}
        self._server = Server(self._find)

    async def serve(self) -> None:
        """Registers the node and serves it until cancelled; then ends its Pods."""
        port = await self._server.start(self._node.host_address, self._certificate, self._authority)
        try:
            await self._register(port)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat())
                tasks.create_task(self._follow())
        finally:
            ends = [pod.end(0.0) for pod in self._pods.values()]
            if ends:
                await asyncio.wait(ends, timeout=20)
            await self._server.close()

    def _find(self, namespace: str, name: str) -> Pod | None:
        return next((p for p in self._pods.values() if (p.namespace, p.name) == (namespace, name)), None)

    async def _register(self, port: int) -> None:
        api, name = self._node.api, self._node.name
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        if self._gpus:
            labels |= {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.product": "Stand-In-GPU"}
        await self._create("/api/v1/nodes", {"kind": "Node", "metadata": {"name": name, "labels": labels}})
        resources = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "100Gi", "pods": "110"}
        if self._gpus:
            resources["nvidia.com/gpu"] = str(self._gpus)
        status = {
            "capacity": resources,
            "allocatable": resources,
            "addresses": [
                {"type": "InternalIP", "address": self._node.host_address},
                {"type": "Hostname", "address": name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            "nodeInfo": {
                **dict.fromkeys(("machineID", "systemUUID", "bootID", "kernelVersion", "osImage"), "stand-in"),
                "containerRuntimeVersion": "process://1",
                "kubeletVersion": "v1.20.2-stand-in",
                "kubeProxyVersion": "v1.20.2-stand-in",
                "operatingSystem": "linux",
                "architecture": "amd64",
            },
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "KubeletReady",
                    "message": "stand-in",
                    "lastHeartbeatTime": now(),
                    "lastTransitionTime": now(),
                }
            ],
        }
        await api.patch(f"/api/v1/nodes/{name}/status", {"status": status})
        lease = {"metadata": {"name": name}, "spec": self._lease()}
        await self._create("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", lease)
        # The node came tainted: it had no Ready condition.
        await api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})

    async def _create(self, path: str, body: Object) -> None:
        try:
            await self._node.api.post(path, body)
        except ApiError as error:
            if error.status != 409:
                raise

    def _lease(self) -> Object:
        return {
            "holderIdentity": self._node.name,
            "leaseDurationSeconds": 40,
            "renewTime": now().replace("Z", ".000000Z"),
        }

    async def _beat(self) -> None:
        path = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{self._node.name}"
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            try:
                await self._node.api.patch(path, {"spec": self._lease()})
            except (ApiError, OSError) as error:
                logger.warning("no heartbeat of %s: %s", self._node.name, error)

    async def _follow(self) -> None:
        selector = {"fieldSelector": f"spec.nodeName={self._node.name}"}
        async for kind, pod in self._node.api.watch("/api/v1/pods", **selector):
            uid = pod["metadata"]["uid"]
            known = self._pods.get(uid)
            if kind == "DELETED":
                if known is not None:
                    known.end(0.0).add_done_callback(lambda _, uid=uid: self._pods.pop(uid, None))
            elif known is not None:
                known.update(pod)
            elif pod.get("status", {}).get("phase") in (None, "Pending"):
                self._pods[uid] = Pod(self._node, pod)
                self._pods[uid].update(pod)
            elif pod["metadata"].get("deletionTimestamp"):
                await self._node.api.delete(
                    f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}",
                    {"kind": "DeleteOptions", "gracePeriodSeconds": 0, "preconditions": {"uid": uid}},
                )


def named(node: Node, name: str) -> Node:
    """The same surroundings for another node."""
    return dataclasses.replace(node, name=name)
