"""The manifests that come with this package: found, put together as kustomize would, and applied.

Knows the part of kustomize that our own manifests use, and refuses any other, so that it never gives something else
than `kubectl kustomize`.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skyproxy.errors import ClusterError, ConfigurationError
from skyproxy.kubernetes.address import ClusterAddress, load_yaml
from skyproxy.kubernetes.api_server import GROUP, Manifest
from skyproxy.kubernetes.client import APPLY, PLURAL, VERSION, ClusterClient
from skyproxy.kubernetes.versions import check_version

_KNOWN_FIELDS = {"apiVersion", "kind", "resources", "patches"}
_FIRST = ("Namespace", "CustomResourceDefinition", "ServiceAccount", "ClusterRole", "Role")
OPERATOR = "skyproxy-operator"
WORKERS_BINDING = "skyproxy-operator-workers"
DISCOVERY = "skyproxy-operator-discovery"
"""Bound to the operator by earlier versions, which looked for custom resource definitions."""
_RBAC = "/apis/rbac.authorization.k8s.io/v1/"
_LOOK_SECONDS = 1.0
_SHOWN = 5
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
        LibraryMissingError: yaml is not installed.
    """
    objects = _render(folder)
    order = {kind: number for number, kind in enumerate(_FIRST)}
    return sorted(objects, key=lambda item: order.get(item["kind"], len(order)))


def _render(folder: Path) -> list[Manifest]:
    yaml = load_yaml()
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
            objects = _patch(objects, patch, path)
    return objects


def _patch(objects: list[Manifest], patch: Manifest, path: Path) -> list[Manifest]:
    wanted = _identity(patch)
    if wanted not in map(_identity, objects):
        raise ConfigurationError(f"{path} has a patch for {' '.join(wanted)}, which is not there.")
    return [_merge(item, patch) if _identity(item) == wanted else item for item in objects]


def _identity(item: Manifest) -> tuple[str, str, str]:
    return item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _merge(base: object, patch: object) -> Any:
    """A strategic merge: maps by key, lists of named things by name, other lists replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        result = copy.deepcopy(base)
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = _merge(result[key], value) if key in result else copy.deepcopy(value)
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
                    rows[row[key]] = _merge(rows.get(row[key], {}), row)
            return list(rows.values())
    return copy.deepcopy(patch)


def narrowed(objects: list[Manifest], namespaces: Sequence[str]) -> list[Manifest]:
    """The same installation, whose operator looks after some namespaces and may do nothing in the others.

    What it may do is bound by a RoleBinding in each of them; in the cluster it has no rights at all.

    Args:
        objects: an installation for the whole cluster.
        namespaces: those that it is to look after.
    """
    result: list[Manifest] = []
    for item in objects:
        if item["kind"] == "ClusterRoleBinding" and item["metadata"]["name"] == OPERATOR:
            labels = item["metadata"].get("labels", {})
            for namespace in namespaces:
                metadata = {"name": WORKERS_BINDING, "namespace": namespace, "labels": labels}
                result.append({**item, "kind": "RoleBinding", "metadata": metadata})
        elif item["kind"] == "Deployment" and item["metadata"]["name"] == OPERATOR:
            item = copy.deepcopy(item)
            for container in item["spec"]["template"]["spec"]["containers"]:
                args = [part for part in container.get("args", ()) if part not in ("--all-namespaces", "-A")]
                container["args"] = [part for name in namespaces for part in ("--namespace", name)] + args
            result.append(item)
        else:
            result.append(item)
    return result


async def apply_manifests(
    address: ClusterAddress, objects: list[Manifest], say: Callable[[str], None] = lambda _: None
) -> None:
    """Server-side apply of objects, in order. Rights that an installation of another reach had are taken away.

    Raises:
        ClusterError: the cluster is too old, and nothing is applied; or it refused one, and those before it are there.
    """
    async with ClusterClient(address) as client:
        check_version(await client.request("GET", "/version"))
        for item in objects:
            say(f"{item['kind']} {item['metadata']['name']}")
            path = await _path_of(client, item)
            query = [("fieldManager", "skyproxy-install"), ("force", "true")]
            await client.request("PATCH", path, body=item, query=query, content_type=APPLY)
        if any(item["kind"] == "Deployment" and item["metadata"]["name"] == OPERATOR for item in objects):
            await _delete_bindings(client, objects)


async def remove_manifests(
    address: ClusterAddress,
    objects: list[Manifest],
    *,
    computes: str = "refuse",
    timeout_seconds: float = 300.0,
    say: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Delete what `apply_manifests` made, the last first.

    Args:
        address: the cluster.
        objects: those that were applied.
        computes: what happens to Computes that are there, for without their definition they cannot be: "refuse" deletes
            nothing, "delete" ends them and their workers first, "keep" leaves them, their workers and the definition.
        timeout_seconds: how long Computes may take to go.
        say: told what is being done.

    Returns:
        What was left in the cluster, and why, a line each.

    Raises:
        ConfigurationError: there are Computes, and `computes` is "refuse".
        ClusterError: the cluster refused, or Computes did not go in time; what was not deleted yet stays.
    """
    left = []
    async with ClusterClient(address) as client:
        found = await _computes_anywhere(client)
        names = [f"{item['metadata']['namespace']}/{item['metadata']['name']}" for item in found]
        if found and computes == "refuse":
            raise ConfigurationError(
                f"there are Computes, and they and their workers cannot stay without skyproxy: {_join(names)}. End "
                "them with skyproxy down, or all of them now with --delete-computes. --keep-computes takes away the "
                "operator alone"
            )
        if found and computes == "delete":
            await _delete_computes(client, found, timeout_seconds, say)
        keeps = computes == "keep" and bool(found)
        await _delete_bindings(client, [])
        for item in reversed(objects):
            what = f"{item['kind']} {item['metadata']['name']}"
            if keeps and item["kind"] == "CustomResourceDefinition":
                left.append(f"{what}: {_join(names)}")
                continue
            if item["kind"] == "Namespace":
                own = ("skyproxy",) if keeps else ("skyproxy", "skyproxy-worker")
                if others := await _foreign_pods(client, item["metadata"]["name"], own):
                    left.append(f"{what}: other Pods are in it: {_join(others)}")
                    continue
            say(what)
            await _delete(client, item)
    return left


async def reach_of_installation(client: ClusterClient, objects: Sequence[Manifest]) -> list[str] | None:
    """The namespaces that the installed operator looks after, none for all of them; None where none is installed."""
    deployment = next(
        (row for row in objects if row["kind"] == "Deployment" and row["metadata"]["name"] == OPERATOR), None
    )
    if deployment is None:
        return None
    folder = f"/apis/apps/v1/namespaces/{deployment['metadata']['namespace']}/deployments"
    found = await client.find(f"{folder}/{OPERATOR}")
    if found is None:
        return None
    args = [str(part) for row in found["spec"]["template"]["spec"]["containers"] for part in row.get("args", ())]
    return [name for flag, name in itertools.pairwise(args) if flag in ("--namespace", "-n")]


async def _delete_bindings(client: ClusterClient, wanted: list[Manifest]) -> None:
    """Delete what gives the operator rights and is not among `wanted`: whichever reach an installation before had."""
    keep = {_identity(item) for item in wanted}
    rows = []
    plurals = {
        "RoleBinding": "rolebindings",
        "ClusterRoleBinding": "clusterrolebindings",
        "ClusterRole": "clusterroles",
    }
    for kind, plural in plurals.items():
        query = [("labelSelector", "app.kubernetes.io/name=skyproxy")]
        found = (await client.request("GET", _RBAC + plural, query=query)).get("items", [])
        rows += [{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, **item} for item in found]
    ours = [("RoleBinding", WORKERS_BINDING), ("ClusterRoleBinding", DISCOVERY), ("ClusterRoleBinding", OPERATOR)]
    ours.append(("ClusterRole", DISCOVERY))
    for item in rows:
        place = _identity(item)
        if (place[0], place[2]) in ours and place not in keep:
            folder = f"namespaces/{place[1]}/{plurals[place[0]]}" if place[1] else plurals[place[0]]
            try:
                await client.request("DELETE", f"{_RBAC}{folder}/{place[2]}")
            except ClusterError as error:
                if error.status != 404:
                    raise


async def _computes_anywhere(client: ClusterClient) -> list[Manifest]:
    try:
        return await client.list_computes(all_namespaces=True)
    except ClusterError as error:
        if error.status == 404:  # their definition is gone already
            return []
        raise


async def _delete_computes(
    client: ClusterClient, found: list[Manifest], timeout_seconds: float, say: Callable[[str], None]
) -> None:
    for item in found:
        namespace, name = item["metadata"]["namespace"], item["metadata"]["name"]
        say(f"Compute {namespace}/{name}")
        path = f"/apis/{item.get('apiVersion') or f'{GROUP}/{VERSION}'}/namespaces/{namespace}/{PLURAL}/{name}"
        try:
            await client.request("DELETE", path, body={"propagationPolicy": "Foreground"})
        except ClusterError as error:
            if error.status != 404:
                raise
    try:
        async with asyncio.timeout(timeout_seconds):
            while rest := await _computes_anywhere(client):
                say(f"waiting for {len(rest)} Computes to end")
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        names = [f"{item['metadata']['namespace']}/{item['metadata']['name']}" for item in rest]
        raise ClusterError(
            f"Computes are still there after {timeout_seconds:.0f} s: {_join(names)}. The operator stays. "
            "See what they are waiting for: skyproxy status NAME"
        ) from None


async def _foreign_pods(client: ClusterClient, namespace: str, own: tuple[str, ...]) -> list[str]:
    """The Pods in a namespace that bear none of the names which are our own."""
    rows = (await client.request("GET", f"/api/v1/namespaces/{namespace}/pods")).get("items", [])
    return [
        row["metadata"]["name"]
        for row in rows
        if (row["metadata"].get("labels") or {}).get("app.kubernetes.io/name") not in own
    ]


async def _delete(client: ClusterClient, item: Manifest) -> None:
    """Delete an object; one that is not there, or of a kind that the cluster does not know, is fine."""
    try:
        path = await _path_of(client, item)
    except _UnknownKindError:
        return
    try:
        await client.request("DELETE", path, body={"propagationPolicy": "Foreground"})
    except ClusterError as error:
        if error.status != 404:
            raise


def _join(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


class _UnknownKindError(ClusterError):
    """The cluster does not know a kind of object."""


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
        raise _UnknownKindError(
            f"the cluster knows no {item['kind']} of {version}. Install what defines it, or choose another --overlay."
        )
    namespace = item["metadata"].get("namespace", client.namespace)
    middle = f"/namespaces/{namespace}" if row["namespaced"] else ""
    return f"{root}{middle}/{row['name']}/{item['metadata']['name']}"
