"""The manifests that come with the package: put together as kubectl would, and applied in order."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from skyproxy.errors import ClusterError, ConfigurationError
from skyproxy.kubernetes.address import ClusterAddress
from skyproxy.kubernetes.manifests import apply_manifests, manifests_folder, render

OVERLAYS = ("base", "e2e", "openshift")


def kubectl() -> str | None:
    cache = Path(os.environ.get("SKYPROXY_CACHE", Path.home() / ".cache" / "skyproxy"))
    built = sorted(cache.glob("kubernetes-*/bin/kubectl"))
    return shutil.which("kubectl") or (str(built[-1]) if built else None)


def by_name(objects: list[dict[str, Any]]) -> dict[Any, Any]:
    return {
        (item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]): in_one_order(item)
        for item in objects
    }


def in_one_order(value: Any) -> Any:
    """Lists of named things sorted: each kubectl puts what a patch adds at another end."""
    if isinstance(value, dict):
        return {key: in_one_order(item) for key, item in value.items()}
    if isinstance(value, list):
        rows = [in_one_order(item) for item in value]
        named = all(isinstance(row, dict) and "name" in row for row in rows)
        return sorted(rows, key=lambda row: str(row["name"])) if named else rows
    return value


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.skipif(kubectl() is None, reason="there is no kubectl to compare with")
def test_they_are_what_kubectl_makes_of_them(overlay: str) -> None:
    folder = manifests_folder(overlay)
    command = [str(kubectl()), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    theirs = [item for item in yaml.safe_load_all(done.stdout) if item]
    assert by_name(render(folder)) == by_name(theirs)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_others_stand_on_comes_first(overlay: str) -> None:
    kinds = [item["kind"] for item in render(manifests_folder(overlay))]
    assert kinds[:2] == ["Namespace", "CustomResourceDefinition"]
    assert kinds.index("ClusterRole") < kinds.index("ClusterRoleBinding") < kinds.index("Deployment")


def test_what_only_kubectl_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: []\nhelmCharts: []\n")
    with pytest.raises(ConfigurationError, match="helmCharts, which needs kubectl"):
        render(tmp_path)


def test_a_patch_for_what_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("patches: [{path: p.yaml}]\n")
    (tmp_path / "p.yaml").write_text("kind: Deployment\nmetadata: {name: absent}\n")
    with pytest.raises(ConfigurationError, match="absent"):
        render(tmp_path)


def test_an_overlay_that_is_not_installed_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="'moon'"):
        manifests_folder("moon")


RESOURCES = {
    "/api/v1": [{"kind": "Namespace", "name": "namespaces", "namespaced": False}],
    "/apis/apps/v1": [
        {"kind": "Deployment", "name": "deployments", "namespaced": True},
        {"kind": "Deployment", "name": "deployments/status", "namespaced": True},
    ],
}


def test_each_object_is_applied_at_its_own_place(server: Any, kubeconfig: Path) -> None:
    bodies = []

    async def handler(request: Any) -> Any:
        if request.method == "GET":
            return web.json_response({"resources": RESOURCES[request.path]})
        bodies.append(json.loads(await request.text()))
        return web.json_response({})

    server.handler = handler
    objects = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "system"}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "operator", "namespace": "system"}},
    ]
    asyncio.run(apply_manifests(ClusterAddress(kubeconfig=str(kubeconfig)), objects))
    query = "?fieldManager=skyproxy-install&force=true"
    assert [line for line in server.requests if line.startswith("PATCH")] == [
        f"PATCH /api/v1/namespaces/system{query}",
        f"PATCH /apis/apps/v1/namespaces/system/deployments/operator{query}",
    ]
    assert bodies == objects


def test_a_kind_that_the_cluster_does_not_know_is_named(server: Any, kubeconfig: Path) -> None:
    async def handler(request: Any) -> Any:
        return web.Response(status=404, text="404 page not found")

    server.handler = handler
    objects = [{"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": {"name": "g"}}]
    with pytest.raises(ClusterError, match="knows no Gateway"):
        asyncio.run(apply_manifests(ClusterAddress(kubeconfig=str(kubeconfig)), objects))
