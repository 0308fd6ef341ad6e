"""The manifests that come with this package: found, put together as kustomize would, and applied.

Knows the part of kustomize that our own manifests use, and refuses any other, so that it never gives something else
than `kubectl kustomize`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyproxy.errors import ClusterError, ConfigurationError
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.api_server import Manifest
from skyproxy.kubernetes.client import APPLY, ClusterClient

_KNOWN_FIELDS = {"apiVersion", "kind", "resources", "patches"}
_FIRST = ("Namespace", "CustomResourceDefinition", "ServiceAccount", "ClusterRole", "Role")
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
    for row in kustomization.get("patches", ()):
        if row.keys() != {"path"}:
            raise ConfigurationError(f"{path} has a patch with more than a path, which needs kubectl.")
        for patch in yaml.safe_load_all((folder / row["path"]).read_text(encoding="utf-8")):
            objects = _patched(objects, patch, path)
    return objects


def _patched(objects: list[Manifest], patch: Manifest, path: Path) -> list[Manifest]:
    wanted = _identity(patch)
    if wanted not in map(_identity, objects):
        raise ConfigurationError(f"{path} has a patch for {' '.join(wanted)}, which is not there.")
    return [_merged(item, patch) if _identity(item) == wanted else item for item in objects]


def _identity(item: Manifest) -> tuple[str, str, str]:
    return item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]


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
