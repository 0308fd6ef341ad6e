"""The chart for Helm gives what Kustomize gives, and refuses what it does not know."""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyproxy.kubernetes.manifests import narrowed
from skyproxy_operator.names import RUNTIME_LABEL
from skyproxy_operator.options import load
from skyproxy_operator.runtimes import RUNTIME_KEY, parse
from tests.manifests.kustomization import MANIFESTS, identity, of_kind, rendered
from tests.manifests.test_installation import environment_of

CHART = MANIFESTS / "chart"
SYSTEM = "skyproxy-system"
# What the chart has values of their own for, or knows by itself.
OWN = {"worker_image", "gpu_worker_image", "worker_uid", "gateway", "gateway_domain"}
OF_THE_POD = {"lease_namespace", "lease_name", "lease_identity", "http_host", "http_port"}
E2E = {
    "podSecurityContext": {"runAsUser": 10001, "runAsGroup": 10001},
    "gateway": {"create": True, "domain": "skyproxy.example"},
}
OPENSHIFT = {
    "workerUid": None,
    "gateway": {
        "create": True,
        "namespace": "openshift-ingress",
        "className": "openshift-default",
        "controllerName": "openshift.io/gateway-controller/v1",
        "domain": "skyproxy.apps.example.com",
    },
}


@functools.cache
def helm() -> str:
    """The command; the extra `dev` brings it."""
    beside = Path(sys.executable).parent / "helm"
    found = str(beside) if beside.exists() else shutil.which("helm")
    if found is None:
        pytest.skip("helm is not there; the extra `dev` brings it")
    return found


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *arguments], capture_output=True, text=True, timeout=120, check=False)


def template(folder: Path, namespace: str = SYSTEM, **values: Any) -> list[dict[str, Any]]:
    """The objects that a release would have."""
    chosen = folder / "values.yaml"
    chosen.write_text(yaml.safe_dump(values), encoding="utf-8")
    done = run("template", "skyproxy", str(CHART), "--namespace", namespace, "--values", str(chosen))
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def by_identity(objects: list[dict[str, Any]]) -> dict[tuple[str, str, str, str], dict[str, Any]]:
    """Objects, but for the namespace, which a release lies in and cannot have; variables sorted by their names."""
    objects = [copy.deepcopy(item) for item in objects if item["kind"] != "Namespace"]
    for deployment in of_kind(objects, "Deployment"):
        for container in deployment["spec"]["template"]["spec"]["containers"]:
            container["env"].sort(key=lambda variable: variable["name"])
    found = {identity(item): item for item in objects}
    assert len(found) == len(objects)
    return found


def refusal(folder: Path, **values: Any) -> str:
    chosen = folder / "values.yaml"
    chosen.write_text(yaml.safe_dump(values), encoding="utf-8")
    done = run("template", "skyproxy", str(CHART), "--values", str(chosen))
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize(
    ("overlay", "values"),
    [("base", {}), ("overlays/e2e", E2E), ("overlays/openshift", OPENSHIFT)],
    ids=["base", "e2e", "openshift"],
)
def test_it_gives_the_same_objects_as_kustomize(tmp_path: Path, overlay: str, values: dict[str, Any]) -> None:
    values = {**values, "crds": {"keep": False}}
    assert by_identity(template(tmp_path, **values)) == by_identity(rendered(MANIFESTS / overlay))


def test_some_namespaces_only_are_the_same_as_those_of_the_command(tmp_path: Path) -> None:
    objects = template(tmp_path, namespaces=["team", "lab"], crds={"keep": False})
    assert by_identity(objects) == by_identity(narrowed(rendered(MANIFESTS / "base"), ["team", "lab"]))
    assert not list(of_kind(objects, "ClusterRoleBinding"))


def test_a_release_lies_in_its_own_namespace(tmp_path: Path) -> None:
    objects = template(tmp_path, namespace="elsewhere", gateway={"create": True, "domain": "a.example"})
    assert SYSTEM not in json.dumps([item for item in objects if item["kind"] != "CustomResourceDefinition"])
    assert environment_of(objects)["SKYPROXY_OPERATOR_GATEWAY"] == "elsewhere/skyproxy"


def test_computes_outlive_the_release_unless_somebody_says_otherwise(tmp_path: Path) -> None:
    (definition,) = of_kind(template(tmp_path), "CustomResourceDefinition")
    assert definition["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert not list(of_kind(template(tmp_path, crds={"install": False}), "CustomResourceDefinition"))


def test_it_knows_every_option_of_the_operator() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    known = {
        re.sub(r"[A-Z]", lambda letter: f"_{letter[0].lower()}", name)
        for name in schema["properties"]["options"]["properties"]
    }
    assert known == {field.name for field in fields(type(load({})))} - OWN - OF_THE_POD


def test_what_it_writes_is_what_the_operator_reads(tmp_path: Path) -> None:
    chosen = {
        "protectSessions": False,
        "concurrency": 4,
        "secretsSeconds": 1_000_000,
        "probeSeconds": 2.5,
        "egress": "namespace,10.0.0.0/8",
    }
    objects = template(tmp_path, options=chosen, workerUid=1234, workerImage="registry.example/w:1")
    environment = {name: value for name, value in environment_of(objects).items() if value != "from the pod"}
    options = load(environment)
    assert (options.protect_sessions, options.concurrency, options.egress) == (False, 4, "namespace,10.0.0.0/8")
    assert (options.secrets_seconds, options.probe_seconds) == (1_000_000.0, 2.5)
    assert (options.worker_uid, options.worker_image) == (1234, "registry.example/w:1")


def test_runtimes_of_a_release_are_those_that_the_operator_reads(tmp_path: Path) -> None:
    a100 = {
        "description": "One A100",
        "spec": {"resources": {"nvidia.com/gpu": 1}, "env": [{"name": "A", "value": "a: 'b'\n c"}]},
        "overrides": ["env"],
        "limits": {"nodes": 2, "maxLifetime": "8h"},
        "namespaces": ["team-*"],
    }
    objects = template(tmp_path, namespace="elsewhere", runtimes={"a100": a100, "open": {}})
    found = {item["metadata"]["name"]: item for item in of_kind(objects, "ConfigMap")}
    assert set(found) == {"a100", "open"}
    assert {item["metadata"]["namespace"] for item in found.values()} == {"elsewhere"}
    assert all(RUNTIME_LABEL in item["metadata"]["labels"] for item in found.values())
    runtime = parse("a100", found["a100"]["data"][RUNTIME_KEY])
    assert (runtime.spec, runtime.limits) == (a100["spec"], a100["limits"])
    assert (runtime.overrides, runtime.namespaces) == (("env",), ("team-*",))
    assert parse("open", found["open"]["data"][RUNTIME_KEY]).namespaces == ("*",)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"optons": {}}, "optons"),
        ({"options": {"protectSesions": False}}, "protectSesions"),
        ({"options": {"concurrency": 0}}, "concurrency"),
        ({"options": {"protectSessions": "no"}}, "protectSessions"),
        ({"namespaces": ["Team"]}, "namespaces.0"),
        ({"workerUid": 0}, "workerUid"),
        ({"runtimes": {"a100": {"spek": {}}}}, "spek"),
        ({"runtimes": {"A100": {}}}, "A100"),
        ({"logFormat": "xml"}, "logFormat"),
        ({"gateway": {"create": True}}, "gateway.domain is needed"),
        ({"gateway": {"create": True, "domain": "*.sky.example"}}, "gateway.domain"),
    ],
)
def test_what_it_does_not_know_is_refused(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    assert said in refusal(tmp_path, **values)


def test_it_is_packaged_with_the_definition_in_it(tmp_path: Path) -> None:
    done = run("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("*.tgz")
    shutil.unpack_archive(package, tmp_path)
    packaged = tmp_path / "skyproxy" / "files" / "crd.yaml"
    assert not packaged.is_symlink()
    assert packaged.read_bytes() == (MANIFESTS / "base" / "crd.yaml").read_bytes()


def test_helm_finds_nothing_to_complain_of() -> None:
    done = run("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_version_is_that_of_the_images() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    (operator,) = of_kind(rendered(MANIFESTS / "base"), "Deployment")
    image = operator["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image.endswith(f":{chart['appVersion']}")
    assert chart["version"] == chart["appVersion"]
