"""skyproxy in a cluster, installed as the documentation says."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.cluster import Cluster, Object, condition
from tests.e2e.computes import process_of

NAMESPACE = "skyproxy-system"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:skyproxy-operator"
MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
RULES = "x-kubernetes-validations"

_DEPLOYMENT = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/skyproxy-operator"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_GATEWAY_KINDS = {
    "GatewayClass": "v1",
    "Gateway": "v1",
    "HTTPRoute": "v1",
    "BackendTLSPolicy": "v1",
}


def server_minor(cluster: Cluster) -> int:
    """The server's version after "1."."""
    return int(cluster.get("/version")["minor"].rstrip("+"))


def knows_rules(cluster: Cluster) -> bool:
    """Whether the server checks CEL rules of custom resources."""
    return server_minor(cluster) >= 25


def without_rules(value: Any) -> Any:
    """The same without any CEL rule."""
    if isinstance(value, dict):
        return {key: without_rules(item) for key, item in value.items() if key != RULES}
    if isinstance(value, list):
        return [without_rules(item) for item in value]
    return value


def rules(value: Any) -> Iterator[Any]:
    """Every CEL rule in a manifest."""
    if isinstance(value, dict):
        yield from value.get(RULES, [])
        for key, item in value.items():
            if key != RULES:
                yield from rules(item)
    elif isinstance(value, list):
        for item in value:
            yield from rules(item)


def documents(path: Path) -> list[Any]:
    """What a YAML file holds."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def copy_without_rules(target: Path) -> None:
    """Copies the manifests for a server that refuses CEL rules; nothing else differs.

    Raises:
        AssertionError: something else would.
    """
    shutil.copytree(MANIFESTS, target, symlinks=True)  # the chart takes the definition from the base
    changed = []
    for path in sorted(target.rglob("*.yaml")):
        if path.is_symlink() or path.parent.name == "templates":
            continue
        original = documents(path)
        if list(rules(original)):
            changed.append(path.relative_to(target).as_posix())
            path.write_text(yaml.safe_dump_all(map(without_rules, copy.deepcopy(original))), encoding="utf-8")
            assert documents(path) == without_rules(original)
            assert documents(MANIFESTS / changed[-1]) == original
        else:
            assert path.read_bytes() == (MANIFESTS / path.relative_to(target)).read_bytes()
    assert changed == ["base/crd.yaml"]


def gateway_definitions() -> list[Object]:
    """The Gateway API's kinds, with a schema that lets everything pass: its own needs CEL."""
    result = []
    for kind, version in _GATEWAY_KINDS.items():
        plural = kind.lower().replace("policy", "policie") + ("es" if kind.endswith("Class") else "s")
        anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        result.append(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {
                    "name": f"{plural}.gateway.networking.k8s.io",
                    "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
                },
                "spec": {
                    "group": "gateway.networking.k8s.io",
                    "scope": "Cluster" if kind == "GatewayClass" else "Namespaced",
                    "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
                    "versions": [
                        {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}
                    ],
                },
            }
        )
    return result


class Installation:
    """The operator in a cluster."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self.overlay = MANIFESTS / "overlays" / "e2e"
        if not knows_rules(cluster):
            copy_without_rules(directory / "manifests")
            self.overlay = directory / "manifests" / "overlays" / "e2e"

    def apply(self) -> None:
        """Installs with `kubectl apply --server-side -k`, as the documentation says."""
        cluster = self.cluster
        if cluster.local:
            made = yaml.safe_dump_all(gateway_definitions())
            cluster.kubectl("apply", "--server-side", "-f", "-", text=made)
            self._wait_established("crd", "--all")
        cluster.kubectl("apply", "--server-side", "-k", str(self.overlay))
        self._wait_established("crd/computes.skyproxy.dev")

    def _wait_established(self, *which: str) -> None:
        """Waits until custom resources are served. `kubectl wait` fails for one that has no conditions at all yet."""
        deadline = time.monotonic() + 60
        while True:
            ended = self.cluster.try_kubectl("wait", "--for=condition=Established", *which)
            if ended.returncode == 0:
                return
            assert "accessor error" in ended.stderr, ended.stdout + ended.stderr
            assert time.monotonic() < deadline, ended.stdout + ended.stderr
            time.sleep(0.2)

    def wait_available(self, seconds: float = 120) -> None:
        """Waits until the operator works."""
        self.cluster.wait(
            _DEPLOYMENT,
            lambda found: (
                condition(found, "Available").get("status") == "True"
                and (found or {})["status"].get("observedGeneration") == (found or {})["metadata"]["generation"]
            ),
            "the operator's Deployment is available",
            seconds,
        )

    def pod(self, *, other_than: str = "", running: bool = True) -> Object:
        """The operator's Pod.

        Args:
            other_than: the id of a container that is not meant.
            running: whether to wait until its container runs.
        """

        def found(pods: dict[str, Object]) -> Object | None:
            for pod in pods.values():
                for status in pod["status"].get("containerStatuses", []):
                    works = status["ready"] and "running" in status["state"]
                    if status.get("containerID") != other_than and (works or not running):
                        return pod
            return None

        pod: Object = self.cluster.wait_all(
            _PODS, found, "the operator runs", 120, labelSelector="app.kubernetes.io/component=operator"
        )
        return pod

    def container(self) -> str:
        """The id of the operator's container."""
        return str(self.pod()["status"]["containerStatuses"][0]["containerID"])

    def kill(self) -> str:
        """Kills the operator at once, as a machine's failure would; gives the id of the dead container."""
        identity = self.container()
        if self.cluster.local:
            os.kill(process_of(identity), signal.SIGKILL)
        else:
            name = self.pod()["metadata"]["name"]
            self.cluster.delete(f"{_PODS}/{name}", gracePeriodSeconds="0")
        return identity

    @contextlib.contextmanager
    def configured(self, **options: str) -> Iterator[None]:
        """Runs the operator with options of a site, as the documentation says; without them again at the end."""
        where = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
        self.cluster.create(where, {"metadata": {"name": "skyproxy-operator"}, "data": options})
        try:
            self._restart()
            yield
        finally:
            self.cluster.delete(f"{where}/skyproxy-operator")
            self._restart()

    def _restart(self) -> None:
        deployment = [f"--namespace={NAMESPACE}", "deployment/skyproxy-operator"]
        self.cluster.kubectl("rollout", "restart", *deployment)
        self.cluster.kubectl("rollout", "status", *deployment, "--timeout=110s")

    def logs(self) -> str:
        """Everything the operator wrote since it was started the last time."""
        return self.cluster.kubectl("logs", f"--namespace={NAMESPACE}", self.pod()["metadata"]["name"])
