"""Volumes: a directory for every claim, as a provisioner of a real cluster gives a disk."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.kubelet.api import Api, ApiError, Object

logger = logging.getLogger("kubelet.provisioner")

NAME = "e2e.skyproxy.dev/directories"


class Provisioner:
    """Makes volumes for claims of the default storage class, and removes those that are released."""

    def __init__(self, api: Api, directory: Path, nodes: Sequence[str] = ()) -> None:
        """
        Args:
            api: of the cluster.
            directory: for the volumes' directories.
            nodes: the names of real nodes, all of which have the directory: only volumes of the kind "local" are given
                to the group of a Pod by their kubelets.
        """
        self._api = api
        self._directory = directory
        self._nodes = nodes

    async def install(self) -> None:
        """Makes the default storage class."""
        storage_class = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": "standard", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
            "provisioner": NAME,
            "reclaimPolicy": "Delete",
            "volumeBindingMode": "Immediate",
        }
        try:
            await self._api.post("/apis/storage.k8s.io/v1/storageclasses", storage_class)
        except ApiError as error:
            if error.status != 409:
                raise

    async def follow(self) -> None:
        """Serves claims, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._claims())
            tasks.create_task(self._volumes())

    async def _claims(self) -> None:
        async for kind, claim in self._api.watch("/api/v1/persistentvolumeclaims"):
            spec, meta = claim["spec"], claim["metadata"]
            if kind == "DELETED" or spec.get("volumeName") or spec.get("storageClassName") != "standard":
                continue
            name = f"pvc-{meta['uid']}"
            path = self._directory / name
            path.mkdir(parents=True, exist_ok=True)
            volume: Object = {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": name, "annotations": {"pv.kubernetes.io/provisioned-by": NAME}},
                "spec": {
                    "capacity": {"storage": spec["resources"]["requests"]["storage"]},
                    "accessModes": spec["accessModes"],
                    "persistentVolumeReclaimPolicy": "Delete",
                    "storageClassName": "standard",
                    **self._place(path),
                    "claimRef": {
                        "apiVersion": "v1",
                        "kind": "PersistentVolumeClaim",
                        "namespace": meta["namespace"],
                        "name": meta["name"],
                        "uid": meta["uid"],
                    },
                },
            }
            try:
                await self._api.post("/api/v1/persistentvolumes", volume)
            except ApiError as error:
                if error.status != 409:
                    logger.warning("no volume for %s: %s", meta["name"], error)

    def _place(self, path: Path) -> Object:
        if not self._nodes:
            return {"hostPath": {"path": str(path)}}
        term = {"key": "kubernetes.io/hostname", "operator": "In", "values": list(self._nodes)}
        affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": [term]}]}}
        return {"local": {"path": str(path)}, "nodeAffinity": affinity}

    async def _volumes(self) -> None:
        async for kind, volume in self._api.watch("/api/v1/persistentvolumes"):
            made = volume["metadata"].get("annotations", {}).get("pv.kubernetes.io/provisioned-by") == NAME
            released = volume.get("status", {}).get("phase") == "Released"
            policy = volume["spec"].get("persistentVolumeReclaimPolicy")
            if kind != "DELETED" and made and released and policy == "Delete":
                shutil.rmtree(self._directory / volume["metadata"]["name"], ignore_errors=True)
                await self._api.delete(f"/api/v1/persistentvolumes/{volume['metadata']['name']}")
