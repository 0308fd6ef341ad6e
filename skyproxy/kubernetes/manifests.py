"""The manifests that come with this package: found, put together as kustomize would, and applied.

Knows the part of kustomize that our own manifests use, and refuses any other, so that it never gives something else
than `kubectl kustomize`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyproxy.errors import ClusterError, ConfigurationError
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.client import APPLY, ClusterClient, Manifest

_KNOWN_FIELDS = {"apiVersion", "kind", "metadata", "resources", "patches", "namespace", "images", "labels"}
_FIRST = ("Namespace", "CustomResourceDefinition", "ServiceAccount", "ClusterRole", "Role")
_CLUSTER_WIDE = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "GatewayClass",
    "Namespace",
    "PriorityClass",
    "SecurityContextConstraints",
}
_LIST_KEYS = ("name", "containerPort", "mountPath", "port", "ip")


def manifests_folder(overlay: str) -> Path:
    """The folder of the base or of an overlay, in the installed package or in a checkout.

    Raises:
        ConfigurationError: it did not come with this installation.
    """
    part = Path("base") if overlay == "base" else Path("overlays") / overlay
    package = Path(__file__).resolve().parents[1]
    for root in (package / "manifests", package.parent / "manifests"):
        if (root / part / "kustomization.yaml").exists():
            return root / part
    raise ConfigurationError(
        f"the manifests of {overlay!r} are not in this installation. Install skyproxy from its wheel."
    )


def render(folder: Path) -> list[Manifest]:
    """The objects that `kubectl kustomize` would give for a folder, in an order in which they can be applied.

    Raises:
        ConfigurationError: it uses what we do not know.
    """
    objects = _render(folder)
    order = {kind: number for number, kind in enumerate(_FIRST)}
    return sorted(objects, key=lambda item: order.get(item["kind"], len(order)))


def _render(folder: Path) -> list[Manifest]:
    import yaml

    path = folder / "kustomization.yaml"
    kustomization = yaml.safe_load(path.read_text(encoding="utf-8"))
    unknown = sorted(kustomization.keys() - _KNOWN_FIELDS)
    if unknown:
        raise ConfigurationError(
            f"{path} uses {', '.join(unknown)}, which needs kubectl: kubectl apply --server-side -k {folder}"
        )
    objects: list[Manifest] = []
    for item in kustomization.get("resources", ()):
        source = (folder / item).resolve()
        if source.is_dir():
            objects += _render(source)
        else:
            objects += [each for each in yaml.safe_load_all(source.read_text(encoding="utf-8")) if each]
    for patch in kustomization.get("patches", ()):
        text = patch.get("patch") or (folder / patch["path"]).read_text(encoding="utf-8")
        objects = _patched(objects, yaml.safe_load(text), patch.get("target"), path)
    for each in objects:
        if (namespace := kustomization.get("namespace")) is not None:
            _set_namespace(each, namespace)
        for row in kustomization.get("labels", ()):
            each["metadata"].setdefault("labels", {}).update(row.get("pairs", {}))
        for row in kustomization.get("images", ()):
            _set_image(each, row)
    return objects


def _patched(objects: list[Manifest], patch: Any, target: Mapping[str, str] | None, path: Path) -> list[Manifest]:
    wanted = target or {"kind": patch["kind"], "name": patch["metadata"]["name"]}
    found = [
        number
        for number, item in enumerate(objects)
        if item["kind"] == wanted.get("kind", item["kind"])
        and item["metadata"]["name"] == wanted.get("name", item["metadata"]["name"])
    ]
    if not found:
        raise ConfigurationError(f"{path} has a patch for {dict(wanted)}, which is not there.")
    result = list(objects)
    for number in reversed(found):
        if isinstance(patch, list):
            result[number] = _with_operations(objects[number], patch, path)
        elif patch.get("$patch") == "delete":
            del result[number]
        else:
            result[number] = _merged(objects[number], patch)
    return result


def _merged(base: Any, patch: Any) -> Any:
    """A strategic merge: maps by key, lists of named things by name, other lists replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        result = copy.deepcopy(base)
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = _merged(result[key], value) if key in result else copy.deepcopy(value)
        return result
    if (
        isinstance(base, list)
        and isinstance(patch, list)
        and patch
        and all(isinstance(row, dict) for row in base + patch)
    ):
        key = next((name for name in _LIST_KEYS if all(name in row for row in base + patch)), None)
        if key is not None:
            rows = {row[key]: row for row in base}
            for row in patch:
                if row.get("$patch") == "delete":
                    rows.pop(row[key], None)
                else:
                    rows[row[key]] = _merged(rows.get(row[key], {}), row)
            return list(rows.values())
    return copy.deepcopy(patch)


def _with_operations(item: Manifest, operations: list[dict[str, Any]], path: Path) -> Manifest:
    """An object after the operations of a JSON patch (RFC 6902): add, replace and remove."""
    result = copy.deepcopy(item)
    for row in operations:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in row["path"].split("/")[1:]]
        place: Any = result
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part]
        if row["op"] not in ("add", "replace", "remove"):
            raise ConfigurationError(f"{path} has the patch operation {row['op']!r}, which is not known here.")
        if isinstance(place, list):
            index = len(place) if last == "-" else int(last)
            if row["op"] != "add":
                del place[index]
            if row["op"] != "remove":
                place.insert(index, row["value"])
        elif row["op"] == "remove":
            del place[last]
        else:
            place[last] = row["value"]
    return result


def _set_namespace(item: Manifest, namespace: str) -> None:
    if item["kind"] == "Namespace":
        item["metadata"]["name"] = namespace
    elif item["kind"] not in _CLUSTER_WIDE:
        item["metadata"]["namespace"] = namespace
    for subject in item.get("subjects", ()):
        if subject.get("kind") == "ServiceAccount":
            subject["namespace"] = namespace


def _set_image(item: Any, row: Mapping[str, str]) -> None:
    if isinstance(item, dict):
        image = item.get("image")
        if isinstance(image, str) and row["name"] in (image, image.split("@")[0].rpartition(":")[0]):
            name = row.get("newName", row["name"])
            tag = row.get("newTag") or str(image).rpartition(":")[2]
            item["image"] = f"{name}@{row['digest']}" if "digest" in row else f"{name}:{tag}"
        for value in item.values():
            _set_image(value, row)
    elif isinstance(item, list):
        for value in item:
            _set_image(value, row)


async def apply_manifests(
    address: ClusterAddress, objects: list[Manifest], say: Callable[[str], None] = lambda _: None
) -> None:
    """Server-side apply of objects, in order.

    Raises:
        ClusterError: the cluster refused one; those before it are applied.
    """
    async with ClusterClient(address) as client:
        for item in objects:
            say(f"{item['kind']} {item['metadata']['name']}")
            path = await _path_of(client, item)
            query = [("fieldManager", "skyproxy-install"), ("force", "true")]
            await client.request("PATCH", path, body=item, query=query, content_type=APPLY)


async def _path_of(client: ClusterClient, item: Manifest) -> str:
    version = item["apiVersion"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    try:
        resources = (await client.request("GET", root)).get("resources", [])
    except ClusterError as error:
        if error.status != 404:
            raise
        resources = []
    row = next((row for row in resources if row["kind"] == item["kind"] and "/" not in row["name"]), None)
    if row is None:
        raise ClusterError(
            f"the cluster knows no {item['kind']} of {version}. Install what defines it, or choose another --overlay."
        )
    namespace = item["metadata"].get("namespace", client.namespace)
    middle = f"/namespaces/{namespace}" if row["namespaced"] else ""
    return f"{root}{middle}/{row['name']}/{item['metadata']['name']}"
