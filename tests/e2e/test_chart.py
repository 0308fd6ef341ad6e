"""`helm install`, `upgrade` and `uninstall` on an API server of their own: the run's has an installation already."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.computes import collection, manifest
from tests.e2e.control_plane import binaries
from tests.e2e.control_plane.addresses import take_slot
from tests.e2e.control_plane.control_plane import ControlPlane
from tests.e2e.installation import MANIFESTS, NAMESPACE, copy_without_rules, knows_rules
from tests.e2e.test_install import may
from tests.manifests.test_chart import helm

_RELEASE = ("skyproxy", "--namespace", NAMESPACE)
_DEPLOYMENT = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/skyproxy-operator"
_DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/computes.skyproxy.dev"


@pytest.fixture
def empty_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A control plane without nodes and without an installation."""
    if os.environ.get("SKYPROXY_E2E_KUBECONFIG"):
        pytest.skip("needs a control plane of its own, and SKYPROXY_E2E_KUBECONFIG gives a cluster")
    slot = take_slot()
    plane = ControlPlane(binaries.ensure(), tmp_path, slot)
    try:
        plane.start()
        made = Cluster(binaries.ensure()["kubectl"], plane.kubeconfig, tmp_path, local=True)
        try:
            yield made
        finally:
            made.close()
    finally:
        plane.stop()
        os.close(slot.lock)


def test_a_release_is_installed_made_narrower_and_taken_away(empty_cluster: Cluster, tmp_path: Path) -> None:
    cluster = empty_cluster
    chart = MANIFESTS / "chart"
    if not knows_rules(cluster):
        copy_without_rules(tmp_path / "manifests")
        chart = tmp_path / "manifests" / "chart"
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(tmp_path)}

    def run(*arguments: str) -> str:
        command = [helm(), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "every namespace" in run("install", *_RELEASE, str(chart), "--create-namespace")
    assert cluster.get(_DEPLOYMENT)["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    assert may(cluster, "create", "", "pods", "", "default")

    cluster.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    run("upgrade", *_RELEASE, str(chart), "--set", "namespaces={team},options.protectSessions=false")
    (container,) = cluster.get(_DEPLOYMENT)["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["--namespace", "team"]
    assert {"name": "SKYPROXY_OPERATOR_PROTECT_SESSIONS", "value": "false"} in container["env"]
    assert may(cluster, "create", "", "pods", "", "team")
    assert not may(cluster, "create", "", "pods", "", "default")

    cluster.create(collection("team"), manifest("kept"))
    run("uninstall", *_RELEASE)
    assert cluster.find(_DEPLOYMENT) is None
    assert not may(cluster, "create", "", "pods", "", "team")
    assert cluster.get(_DEFINITION)["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert cluster.get(f"{collection('team')}/kept")["spec"]

    # What it left is its own, so that it can be installed again; the Compute is still there.
    run("install", *_RELEASE, str(chart))
    assert cluster.get(f"{collection('team')}/kept")["spec"]
