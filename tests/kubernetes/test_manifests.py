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
from skyproxy.kubernetes.manifests import (
    apply_manifests,
    manifests_folder,
    narrowed,
    reach_of_installation,
    remove_manifests,
    render,
)
from skyproxy.kubernetes.versions import check_version

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


NEW = {"major": "1", "minor": "20", "gitVersion": "v1.20.2"}
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
        if request.path == "/version":
            return web.json_response(NEW)
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
        if request.path == "/version":
            return web.json_response(NEW)
        return web.Response(status=404, text="404 page not found")

    server.handler = handler
    objects = [{"apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway", "metadata": {"name": "g"}}]
    with pytest.raises(ClusterError, match="knows no Gateway"):
        asyncio.run(apply_manifests(ClusterAddress(kubeconfig=str(kubeconfig)), objects))


@pytest.mark.parametrize(("major", "minor"), [("1", "19"), ("1", "9+"), ("0", "30")])
def test_a_cluster_that_is_too_old_is_refused_before_anything_is_applied(
    server: Any, kubeconfig: Path, major: str, minor: str
) -> None:
    async def handler(request: Any) -> Any:
        assert request.path == "/version"
        return web.json_response({"major": major, "minor": minor, "gitVersion": f"v{major}.{minor}.1"})

    server.handler = handler
    objects = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "system"}}]
    with pytest.raises(ClusterError, match=rf"v{major}.{minor[0]}.* needs 1.20 or newer".replace("+", r"\+")):
        asyncio.run(apply_manifests(ClusterAddress(kubeconfig=str(kubeconfig)), objects))
    assert server.requests == ["GET /version"]


@pytest.mark.parametrize(
    "answer", [NEW, {"major": "1", "minor": "31+"}, {"major": "2", "minor": "0"}, {}, {"minor": "x"}]
)
def test_newer_versions_and_those_that_nobody_can_read_are_tried(answer: dict[str, str]) -> None:
    assert check_version(answer) == answer.get("gitVersion", "unknown")


class Installed:
    """A cluster in which skyproxy is installed, as far as an uninstallation sees it."""

    def __init__(self, computes: list[str], pods: dict[str, str]) -> None:
        self.computes = computes
        self.pods = pods
        self.deleted: list[str] = []

    async def answer(self, request: Any) -> Any:
        path = request.path
        if request.method == "DELETE":
            self.deleted.append(path.rpartition("/")[2])
            self.computes = [name for name in self.computes if not path.endswith(f"/computes/{name}")]
            return web.json_response({})
        if path.endswith("/computes"):
            items = [{"metadata": {"namespace": "team", "name": name}} for name in self.computes]
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})
        if path.endswith("/pods"):
            items = [
                {"metadata": {"name": name, "labels": {"app.kubernetes.io/name": label}}}
                for name, label in self.pods.items()
            ]
            return web.json_response({"items": items})
        kinds = {
            "Namespace": False,
            "ServiceAccount": True,
            "Deployment": True,
            "Role": True,
            "RoleBinding": True,
            "ClusterRole": False,
            "ClusterRoleBinding": False,
            "CustomResourceDefinition": False,
        }
        rows = [{"kind": kind, "name": f"{kind.lower()}s", "namespaced": inside} for kind, inside in kinds.items()]
        return web.json_response({"resources": rows})


def uninstalled(server: Any, kubeconfig: Path, cluster: Installed, computes: str) -> list[str]:
    server.handler = cluster.answer
    objects = render(manifests_folder("base"))
    return asyncio.run(remove_manifests(ClusterAddress(kubeconfig=str(kubeconfig)), objects, computes=computes))


OPERATOR = {"skyproxy-operator-1": "skyproxy"}


def test_an_uninstallation_deletes_what_an_installation_made_and_the_last_first(server: Any, kubeconfig: Path) -> None:
    cluster = Installed([], OPERATOR)
    assert uninstalled(server, kubeconfig, cluster, "refuse") == []
    made = [item["metadata"]["name"] for item in render(manifests_folder("base"))]
    assert cluster.deleted == made[::-1]
    assert cluster.deleted[-2:] == ["computes.skyproxy.dev", "skyproxy-system"]


def test_nothing_is_uninstalled_while_there_are_workers(server: Any, kubeconfig: Path) -> None:
    cluster = Installed(["a", "b"], OPERATOR)
    with pytest.raises(ConfigurationError, match=r"team/a, team/b\. End them .*--delete-computes"):
        uninstalled(server, kubeconfig, cluster, "refuse")
    assert cluster.deleted == []


def test_workers_end_before_their_definition_goes(server: Any, kubeconfig: Path) -> None:
    cluster = Installed(["a", "b"], OPERATOR)
    assert uninstalled(server, kubeconfig, cluster, "delete") == []
    assert cluster.deleted[:2] == ["a", "b"]
    assert cluster.deleted[-1] == "skyproxy-system"


def test_workers_that_are_kept_keep_their_definition_and_their_namespace(server: Any, kubeconfig: Path) -> None:
    cluster = Installed(["a"], {**OPERATOR, "a-0": "skyproxy-worker"})
    left = uninstalled(server, kubeconfig, cluster, "keep")
    assert left == [
        "CustomResourceDefinition computes.skyproxy.dev: team/a",
        "Namespace skyproxy-system: other Pods are in it: a-0",
    ]
    assert "skyproxy-operator" in cluster.deleted
    assert not {"a", "computes.skyproxy.dev", "skyproxy-system"} & set(cluster.deleted)


def test_a_namespace_with_pods_of_others_is_left(server: Any, kubeconfig: Path) -> None:
    cluster = Installed([], {**OPERATOR, "database-0": "postgres"})
    left = uninstalled(server, kubeconfig, cluster, "refuse")
    assert left == ["Namespace skyproxy-system: other Pods are in it: database-0"]
    assert "skyproxy-system" not in cluster.deleted


def test_a_narrow_installation_has_rights_in_its_namespaces_only() -> None:
    whole = render(manifests_folder("base"))
    narrow = narrowed(whole, ["team", "lab"])
    by = {(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]): item for item in narrow}
    assert len(by) == len(narrow)
    assert not [item for item in narrow if item["kind"] == "ClusterRoleBinding"]
    for namespace in ("team", "lab"):
        binding = by["RoleBinding", namespace, "skyproxy-operator-workers"]
        assert binding["roleRef"] == {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "skyproxy-operator",
        }
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "skyproxy-operator", "namespace": "skyproxy-system"}
        ]
    (container,) = by["Deployment", "skyproxy-system", "skyproxy-operator"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--namespace", "team", "--namespace", "lab", "--log-format", "json"]
    # All rights of the whole installation are somewhere, and nothing was changed in it.
    original = next(item for item in whole if item["kind"] == "ClusterRole")["rules"]
    assert by["ClusterRole", None, "skyproxy-operator"]["rules"] == original
    assert whole == render(manifests_folder("base"))


class Bindings(Installed):
    """The same cluster, with bindings of an installation before."""

    def __init__(self, args: list[str] | None, *bindings: str) -> None:
        super().__init__([], OPERATOR)
        self.args = args
        self.bindings = list(bindings)
        self.applied: list[dict[str, Any]] = []

    async def answer(self, request: Any) -> Any:
        path = request.path.removeprefix("/apis/rbac.authorization.k8s.io/v1/")
        if request.path == "/version":
            return web.json_response(NEW)
        if request.method == "PATCH":
            self.applied.append(json.loads(await request.text()))
            return web.json_response({})
        if request.method == "DELETE" and path in self.bindings:
            self.bindings.remove(path)
            return web.json_response({})
        if request.method == "GET" and path in ("rolebindings", "clusterrolebindings", "clusterroles"):
            items = []
            for text in self.bindings:
                parts = text.split("/")
                if parts[-2] == path:
                    inside = {"namespace": parts[1]} if parts[0] == "namespaces" else {}
                    items.append({"metadata": {"name": parts[-1], **inside}})
            return web.json_response({"items": items})
        if request.path.endswith("/deployments/skyproxy-operator"):
            if self.args is None:
                return web.json_response({"reason": "NotFound"}, status=404)
            spec = {"template": {"spec": {"containers": [{"args": self.args}]}}}
            return web.json_response({"spec": spec})
        return await super().answer(request)


def installed(kubeconfig: Path, *arguments: str) -> Any:
    from typer.testing import CliRunner

    from skyproxy.cli.main import app

    done = CliRunner().invoke(app, ["install", "--kubeconfig", str(kubeconfig), *arguments])
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.parametrize(
    ("before", "arguments", "reach"),
    [
        (None, (), ["--namespace", "team"]),  # that of the kubeconfig
        (None, ("-n", "lab", "-n", "team"), ["--namespace", "lab", "--namespace", "team"]),
        (None, ("-A",), ["--all-namespaces"]),
        # What is installed keeps its reach, for its workers would have no operator otherwise.
        (["--all-namespaces"], (), ["--all-namespaces"]),
        (["--namespace", "lab"], (), ["--namespace", "lab"]),
        (["--namespace", "lab"], ("-A",), ["--all-namespaces"]),
    ],
)
def test_an_installation_is_narrow_unless_somebody_says_otherwise(
    server: Any, kubeconfig: Path, before: list[str] | None, arguments: tuple[str, ...], reach: list[str]
) -> None:
    cluster = Bindings(before)
    server.handler = cluster.answer
    installed(kubeconfig, *arguments)
    (deployment,) = [item for item in cluster.applied if item["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"] == [*reach, "--log-format", "json"]


def test_rights_of_another_reach_are_taken_away(server: Any, kubeconfig: Path) -> None:
    own, lease = "namespaces/team/rolebindings/skyproxy-operator-workers", "namespaces/skyproxy-system/rolebindings/x"
    cluster = Bindings(
        ["--all-namespaces"],
        own,
        lease,
        "namespaces/old/rolebindings/skyproxy-operator-workers",
        "clusterrolebindings/skyproxy-operator",
        "clusterrolebindings/skyproxy-operator-discovery",
        "clusterroles/skyproxy-operator-discovery",
        "clusterrolebindings/of-somebody-else",
    )
    server.handler = cluster.answer
    installed(kubeconfig, "-n", "team")
    assert cluster.bindings == [own, lease, "clusterrolebindings/of-somebody-else"]
    installed(kubeconfig, "-A")
    assert cluster.bindings == [lease, "clusterrolebindings/of-somebody-else"]


def test_the_reach_of_an_installation_that_is_not_there_is_unknown() -> None:
    assert asyncio.run(reach_of_installation(None, [])) is None  # type: ignore[arg-type]
