"""What a Pod's containers get: environment variables and volumes, from Secrets, ConfigMaps, claims and the Pod."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import Any

from tests.e2e.kubelet.api import Api, ApiError, Object
from tests.e2e.kubelet.containers import Mount

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_.-][A-Za-z0-9_.-]*)\))")
_TOKEN_SECONDS = 3600


class MissingError(Exception):
    """Something that the Pod refers to is not there (yet)."""


def expand(text: str, variables: dict[str, str]) -> str:
    """Replaces $(NAME); $$ is a dollar sign, and what is unknown stays."""
    return _REFERENCE.sub(
        lambda match: "$" if match[1] == "$" else variables.get(match[2], match[0]),
        text,
    )


class References:
    """Looks up what the spec of one Pod refers to."""

    def __init__(self, api: Api, pod: Object, addresses: dict[str, str]) -> None:
        """
        Args:
            addresses: the values of "status.podIP" and "status.hostIP".
        """
        self._api = api
        self._pod = pod
        self._addresses = addresses
        self.namespace: str = pod["metadata"]["namespace"]

    async def environment(self, container: Object) -> dict[str, str]:
        """The variables of a container.

        Raises:
            MissingError: a Secret, a ConfigMap or a key is not there.
        """
        result: dict[str, str] = {}
        for source in container.get("envFrom") or []:
            for kind in ("secretRef", "configMapRef"):
                if kind in source:
                    data = await self._data(kind.removesuffix("Ref"), source[kind])
                    result |= {source.get("prefix", "") + name: value.decode() for name, value in data.items()}
        for entry in container.get("env") or []:
            if "valueFrom" in entry:
                value = await self._value(container, entry["valueFrom"])
            else:
                value = expand(entry.get("value", ""), result)
            if value is not None:
                result[entry["name"]] = value
        return result

    async def _value(self, container: Object, source: Object) -> str | None:
        if "fieldRef" in source:
            return self.field(source["fieldRef"]["fieldPath"])
        if "resourceFieldRef" in source:
            kind, _, name = source["resourceFieldRef"]["resource"].partition(".")
            return str(container.get("resources", {}).get(kind, {}).get(name, "0"))
        kind = "secretKeyRef" if "secretKeyRef" in source else "configMapKeyRef"
        reference = source[kind]
        data = await self._data(kind.removesuffix("KeyRef"), reference)
        if reference["key"] in data:
            return data[reference["key"]].decode()
        if reference.get("optional"):
            return None
        raise MissingError(f"couldn't find key {reference['key']} in {reference['name']}")

    def field(self, path: str) -> str:
        """A field of the Pod, as the downward API knows them."""
        if path in self._addresses:
            return self._addresses[path]
        if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
            return str(self._pod["metadata"].get(match[1], {}).get(match[2], ""))
        value: Any = self._pod
        for part in path.split("."):
            value = value.get(part, "")
        return str(value)

    async def _data(self, kind: str, reference: Object) -> dict[str, bytes]:
        name = reference.get("name") or reference["secretName"]
        plural = "secrets" if kind == "secret" else "configmaps"
        try:
            found = await self._api.get(f"/api/v1/namespaces/{self.namespace}/{plural}/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
            if reference.get("optional"):
                return {}
            raise MissingError(f'{kind} "{name}" not found') from error
        if kind == "secret":
            return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
        data = {key: value.encode() for key, value in (found.get("data") or {}).items()}
        return data | {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}

    async def volume(self, volume: Object, directory: Path) -> Path:
        """Makes a volume.

        Args:
            directory: where files that are made for it go; it is removed with the Pod.

        Returns:
            Its directory on this machine.

        Raises:
            MissingError: what it is made of is not there, or a claim is not bound.
        """
        place = directory / volume["name"]
        if "persistentVolumeClaim" in volume:
            return await self._claimed(volume["persistentVolumeClaim"]["claimName"])
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "emptyDir" in volume:
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(0o777)
            return place
        files: dict[str, bytes] = {}
        for source in volume["projected"]["sources"] if "projected" in volume else [volume]:
            files |= await self._files(source)
        place.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            mode = next((volume[k].get("defaultMode") for k in volume if k != "name"), None)
            path.chmod(mode if mode is not None else 0o644)
        return place

    async def _files(self, source: Object) -> dict[str, bytes]:
        if "downwardAPI" in source:
            return {i["path"]: self.field(i["fieldRef"]["fieldPath"]).encode() for i in source["downwardAPI"]["items"]}
        if "serviceAccountToken" in source:
            wanted = source["serviceAccountToken"]
            account = self._pod["spec"].get("serviceAccountName", "default")
            spec: Object = {"expirationSeconds": wanted.get("expirationSeconds", _TOKEN_SECONDS)}
            if wanted.get("audience"):
                spec["audiences"] = [wanted["audience"]]
            request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
            made = await self._api.post(f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{account}/token", request)
            return {wanted["path"]: made["status"]["token"].encode()}
        kind = "secret" if "secret" in source else "configMap"
        if kind not in source:
            raise MissingError(f"volumes of {sorted(source)} are not known here")
        data = await self._data(kind, source[kind])
        if items := source[kind].get("items"):
            lost = [item["key"] for item in items if item["key"] not in data]
            if lost and not source[kind].get("optional"):
                raise MissingError(f"references non-existent secret key: {lost[0]}")
            return {item["path"]: data[item["key"]] for item in items if item["key"] in data}
        return data

    async def _claimed(self, claim_name: str) -> Path:
        path = f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims/{claim_name}"
        try:
            claim = await self._api.get(path)
        except ApiError as error:
            raise MissingError(f'persistentvolumeclaim "{claim_name}" not found') from error
        if claim.get("status", {}).get("phase") != "Bound":
            raise MissingError(f'persistentvolumeclaim "{claim_name}" is not bound')
        volume = await self._api.get(f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
        return Path(volume["spec"]["hostPath"]["path"])


def container_mounts(container: Object, volumes: dict[str, Path], read_only: set[str]) -> list[Mount]:
    """The mounts of one container.

    Args:
        volumes: the Pod's, by name.
        read_only: those that no container may write to.
    """
    result = []
    for entry in container.get("volumeMounts") or []:
        source = volumes[entry["name"]]
        if sub := entry.get("subPath"):
            source = source / sub
            if not source.exists():
                source.mkdir(parents=True)
        fixed = entry.get("readOnly") or entry["name"] in read_only
        result.append(Mount("ro" if fixed else "rw", source, entry["mountPath"]))
    return result
