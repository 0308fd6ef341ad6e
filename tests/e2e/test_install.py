"""`kubectl apply --server-side -k` is the whole installation, and it may do what it must, and no more."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request

import pytest
from typer.testing import CliRunner

from tests.e2e.cluster import ApiError, Cluster
from tests.e2e.computes import collection, make, manifest, path_of, wait_reason
from tests.e2e.control_plane.control_plane import ControlPlane
from tests.e2e.installation import ACCOUNT, NAMESPACE, Installation, knows_rules

# What an operator with too much power could do; each has to be denied.
_DENIED = [
    ("list", "", "secrets", ""),
    ("watch", "", "secrets", ""),
    ("delete", "", "secrets", ""),
    ("list", "", "configmaps", ""),
    ("delete", "skyproxy.dev", "computes", ""),
    ("update", "skyproxy.dev", "computes", ""),
    ("patch", "skyproxy.dev", "computes", ""),
    ("create", "skyproxy.dev", "computes", ""),
    ("create", "", "pods", "exec"),
    ("get", "", "pods", "log"),
    ("create", "", "pods", "portforward"),
    ("create", "", "pods", "attach"),
    ("create", "", "pods", "eviction"),
    ("update", "", "pods", ""),
    ("delete", "", "persistentvolumeclaims", ""),
    ("delete", "", "services", ""),
    ("create", "", "namespaces", ""),
    ("delete", "", "namespaces", ""),
    ("list", "", "nodes", ""),
    ("patch", "", "nodes", ""),
    ("create", "", "serviceaccounts", "token"),
    ("impersonate", "", "users", ""),
    ("create", "apps", "deployments", ""),
    ("create", "batch", "jobs", ""),
    ("create", "rbac.authorization.k8s.io", "clusterrolebindings", ""),
    ("escalate", "rbac.authorization.k8s.io", "clusterroles", ""),
    ("patch", "apiextensions.k8s.io", "customresourcedefinitions", ""),
    ("create", "admissionregistration.k8s.io", "mutatingwebhookconfigurations", ""),
    ("*", "*", "*", ""),
]
_ALLOWED = [
    ("watch", "skyproxy.dev", "computes", ""),
    ("patch", "skyproxy.dev", "computes", "status"),
    ("create", "", "pods", ""),
    ("delete", "", "pods", ""),
    ("patch", "", "pods", ""),  # annotations for autoscalers
    ("create", "", "secrets", ""),
]


def may(cluster: Cluster, verb: str, group: str, resource: str, subresource: str, namespace: str) -> bool:
    attributes = {
        "namespace": namespace,
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": subresource,
    }
    review = {"spec": {"user": ACCOUNT, "groups": ["system:serviceaccounts"], "resourceAttributes": attributes}}
    answer = cluster.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def test_the_operator_is_available_under_its_own_account(installation: Installation) -> None:
    pod = installation.pod()
    assert pod["spec"]["serviceAccountName"] == "skyproxy-operator"
    assert "Traceback" not in installation.logs()


def test_applying_again_changes_nothing(cluster: Cluster, installation: Installation) -> None:
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/skyproxy-operator"
    before = cluster.get(path)["metadata"]["generation"]
    if cluster.local:
        cluster.kubectl("apply", "--server-side", "-k", str(installation.overlay))
        assert cluster.get(path)["metadata"]["generation"] == before


def test_the_command_installs_the_same(
    cluster: Cluster, installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyproxy.cli.main import app

    # The same files; those without CEL rules where the server knows none.
    monkeypatch.setattr("skyproxy.kubernetes.manifests.manifests_folder", lambda overlay: installation.overlay)
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/skyproxy-operator"
    before = cluster.get(path)["metadata"]
    done = CliRunner().invoke(app, ["install", "--overlay", "e2e", "--kubeconfig", str(cluster.kubeconfig)])
    assert done.exit_code == 0, done.output
    after = cluster.get(path)["metadata"]
    assert after["generation"] == before["generation"]
    assert {row["manager"] for row in after["managedFields"]} > {row["manager"] for row in before["managedFields"]}


@pytest.mark.parametrize(("verb", "group", "resource", "subresource"), _DENIED)
def test_the_operators_account_is_denied_what_it_does_not_need(
    cluster: Cluster, installation: Installation, verb: str, group: str, resource: str, subresource: str
) -> None:
    assert not may(cluster, verb, group, resource, subresource, "default")


def test_the_operators_account_may_do_what_it_needs(cluster: Cluster, installation: Installation) -> None:
    assert [row for row in _ALLOWED if not may(cluster, *row, "default")] == []


def test_a_request_with_the_operators_token_is_refused(
    cluster: Cluster, installation: Installation, control_plane: ControlPlane
) -> None:
    account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/skyproxy-operator/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = cluster.create(account, request)["status"]["token"]
    context = ssl.create_default_context(cafile=str(control_plane.authority.certificate))

    def status_of(path: str) -> int:
        asked = urllib.request.Request(control_plane.server + path, headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(asked, context=context, timeout=30) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert status_of("/apis/skyproxy.dev/v1alpha1/computes") == 200
    assert status_of("/api/v1/secrets") == 403
    assert status_of("/api/v1/namespaces/kube-system/pods") == 200  # any namespace's Pods may be a worker's
    assert status_of("/api/v1/nodes") == 403


def test_kubectl_shows_computes_with_phase_and_reason(
    cluster: Cluster, installation: Installation, namespace: str
) -> None:
    make(cluster, namespace, "shown", image="registry.invalid/worker:1")
    wait_reason(cluster, path_of(namespace, "shown"), "Ready", "ImagePullFailed")
    header, row = cluster.kubectl("get", "sky", f"--namespace={namespace}").splitlines()
    assert header.split()[:4] == ["NAME", "PHASE", "READY", "REASON"]
    assert row.split()[0] == "shown"
    assert row.split()[2:4] == ["False", "ImagePullFailed"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"nodes": 0}, ["spec.nodes", "greater than or equal to 1"]),
        ({"nodes": "two"}, ["spec.nodes", "integer"]),
        ({"resources": {"memory": "lots"}}, ["spec.resources.memory"]),
        ({"volumes": [{"name": "data", "storage": "1Gi"}]}, ["spec.volumes", "path"]),
        ({"volumes": [{"name": "Data", "storage": "1Gi", "path": "/data"}]}, ["spec.volumes", "name"]),
        ({"idleTimeout": "soon"}, ["spec.idleTimeout"]),
        ({"port": 80}, ["spec.port", "1024"]),
        ({"restartPolicy": {"maxRestarts": -1}}, ["spec.restartPolicy.maxRestarts"]),
    ],
)
def test_a_bad_spec_is_refused_with_a_message_that_names_the_field(
    cluster: Cluster, installation: Installation, namespace: str, spec: dict[str, object], words: list[str]
) -> None:
    refused = cluster.try_kubectl(
        *("apply", "--server-side", f"--namespace={namespace}", "-f", "-"), text=json.dumps(manifest("bad", **spec))
    )
    assert refused.returncode != 0
    for word in words:
        assert word in refused.stderr
    assert cluster.items(collection(namespace)) == []


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {
                "volumes": [
                    {"name": "one", "storage": "1Gi", "path": "/data"},
                    {"name": "two", "storage": "1Gi", "path": "/data"},
                ]
            },
            ["volumes", "path"],
        ),
        ({"env": [{"name": "SKYPROXY_TOKEN", "value": "mine"}]}, ["SKYPROXY_TOKEN", "operator"]),
        ({"resources": {"nvidia.com/gpu": "0.5"}}, ["nvidia.com/gpu", "whole"]),
        ({"port": 65535, "procsPerNode": 4}, ["65536"]),
    ],
)
def test_what_only_rules_can_tell_is_refused_by_the_server_or_said_in_the_status(
    cluster: Cluster, installation: Installation, namespace: str, spec: dict[str, object], words: list[str]
) -> None:
    if knows_rules(cluster):
        with pytest.raises(ApiError) as refused:
            make(cluster, namespace, "bad", **spec)
        message = str(refused.value)
    else:
        path = make(cluster, namespace, "bad", **spec)
        message = wait_reason(cluster, path, "Ready", "InvalidSpec")["message"]
        assert cluster.get(path)["status"]["phase"] == "Failed"
        assert cluster.items(f"/api/v1/namespaces/{namespace}/pods") == []
    for word in words:
        assert word in message
