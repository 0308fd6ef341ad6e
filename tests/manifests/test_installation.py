"""The manifests that are the whole installation."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import datetime
import re
import shutil
import subprocess
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyproxy_operator import children
from skyproxy_operator.__main__ import parser
from skyproxy_operator.certificates import KeyPair
from skyproxy_operator.cluster import _PLURALS
from skyproxy_operator.gangs import GANGS, POD_GROUP
from skyproxy_operator.options import Options, load
from skyproxy_operator.pod_builder import build_pod
from tests.manifests.custom_resource import VERSION
from tests.manifests.gateway_api import SPECS, gateway_problems
from tests.manifests.kustomization import INSTALLATIONS, MANIFESTS, ROOT, documents, identity, of_kind, rendered
from tests.manifests.pod_security import violations
from tests.operator.makers import OPTIONS, make_compute, spec_of

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="holds the schemas of Kubernetes")

VERSIONS = ("1.25.0", "1.29.0", "1.33.0", "1.37.0")
# Not part of Kubernetes itself: their schemas are elsewhere.
ADDED = {"Compute", "Gateway", "GatewayClass", "HTTPRoute", "BackendTLSPolicy", "Certificate"}
BASE = rendered(MANIFESTS / "base")


def operator_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (deployment,) = of_kind(objects, "Deployment")
    template: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return template


def environment_of(objects: list[dict[str, Any]]) -> dict[str, str]:
    (container,) = operator_of(objects)["containers"]
    return {item["name"]: item.get("value", "from the pod") for item in container["env"]}


# --- files ----------------------------------------------------------------------------------------------------------


def test_every_manifest_is_tidy() -> None:
    yamllint = pytest.importorskip("yamllint.linter", reason="judges the form of YAML")
    from yamllint.config import YamlLintConfig

    configuration = YamlLintConfig(file=str(MANIFESTS / ".yamllint"))
    files = sorted(path for path in MANIFESTS.rglob("*.yaml") if path.parent.name != "templates")  # those are Helm's
    assert len(files) > 10
    found = [f"{path}:{item}" for path in files for item in yamllint.run(path.read_text("utf-8"), configuration)]
    assert found == []


@pytest.mark.parametrize("name", INSTALLATIONS)
def test_every_file_of_an_installation_is_part_of_it(name: str) -> None:
    folder = MANIFESTS / name
    (kustomization,) = documents(folder / "kustomization.yaml")
    named = {*kustomization["resources"], *(entry["path"] for entry in kustomization.get("patches", ()))}
    there = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert there <= named
    assert all((folder / item).exists() for item in named)


@pytest.mark.parametrize("name", INSTALLATIONS)
def test_kubectl_renders_the_same(name: str) -> None:
    cached = sorted((Path.home() / ".cache/skyproxy").glob("kubernetes-*/bin/kubectl"))
    kubectl = shutil.which("kubectl") or (str(cached[-1]) if cached else None)
    if kubectl is None:
        pytest.skip("there is no kubectl")
    done = subprocess.run(
        [kubectl, "kustomize", str(MANIFESTS / name)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    ours, theirs = rendered(MANIFESTS / name), list(yaml.safe_load_all(done.stdout))
    for objects in (ours, theirs):
        # In which order merged elements stand is all that they may differ in.
        operator_of(objects)["containers"][0]["env"].sort(key=lambda item: item["name"])
    assert {identity(item): item for item in theirs} == {identity(item): item for item in ours}


# --- against Kubernetes' own schemas ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", INSTALLATIONS)
def test_kubernetes_accepts_the_installation(name: str, version: str) -> None:
    for item in rendered(MANIFESTS / name):
        if item["kind"] not in ADDED:
            kubernetes_validate.validate(item, version, strict=True)


EVERYTHING = make_compute(
    nodes=2,
    procsPerNode=2,
    image="i",
    resources={"cpu": "1", "memory": "8Gi", "nvidia.com/gpu": "2"},
    volumes=[{"name": "cache", "storage": "1Gi", "path": "/cache", "storageClassName": "fast"}],
    env=[
        {"name": "A", "value": "b"},
        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}},
        {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ],
    envFrom=[{"secretRef": {"name": "s"}}, {"prefix": "X_", "configMapRef": {"name": "c"}}],
    tolerations=[{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}],
    nodeSelector={"a": "b"},
    affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
    priorityClassName="high",
    serviceAccountName="me",
    imagePullSecrets=[{"name": "pull"}],
    schedulerName="second",
    topologySpreadConstraints=[{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    gateway={"enabled": True, "hostname": "a.example", "parentRef": {"name": "g"}},
)


LENIENT = replace(OPTIONS, service_accounts="lab/me")


def made_by_the_operator() -> list[dict[str, Any]]:
    spec = spec_of(EVERYTHING)
    without_user = replace(LENIENT, worker_uid=None)
    strict = replace(OPTIONS, ingress="namespace,namespaces/infra,10.0.0.0/8", egress="", lease_namespace="system")
    return [
        build_pod(EVERYTHING, spec, 0, 0, LENIENT),
        build_pod(EVERYTHING, spec, 1, 3, without_user),
        children.service(EVERYTHING, spec),
        children.headless_service(EVERYTHING, spec),
        children.network_policy(EVERYTHING, spec, OPTIONS),
        children.network_policy(EVERYTHING, spec, strict),
        children.claim(EVERYTHING, spec.volumes[0], None),
        children.new_token(EVERYTHING),
        children.certificate_secret(EVERYTHING, KeyPair("c", "k", "a")),
        children.ca_bundle(EVERYTHING, "a"),
        children.disruption_budget(EVERYTHING, spec, "v1", protected=True),
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_what_the_operator_makes(version: str) -> None:
    for item in made_by_the_operator():
        kubernetes_validate.validate(item, version, strict=True)


def gateway_objects() -> list[dict[str, Any]]:
    spec = spec_of(EVERYTHING)
    parent = {"name": "g", "namespace": "infra", "sectionName": "https"}
    return [
        *(item for name in INSTALLATIONS for item in rendered(MANIFESTS / name) if item["kind"] in SPECS),
        children.route(EVERYTHING, spec, "a.example", parent),
        children.backend_policy(EVERYTHING, "v1"),
        children.backend_policy(EVERYTHING, "v1alpha3"),
    ]


def test_the_gateway_api_accepts_what_is_for_it() -> None:
    objects = gateway_objects()
    assert {item["kind"] for item in objects} == set(SPECS)
    assert [problem for item in objects for problem in gateway_problems(item)] == []


@pytest.mark.parametrize("number", range(len(gateway_objects())))
def test_a_misspelt_field_for_the_gateway_would_be_found(number: int) -> None:
    item = copy.deepcopy(gateway_objects()[number])
    item["spec"]["hostname"] = "a.example"
    assert gateway_problems(item)


def test_a_misspelt_field_would_be_found() -> None:
    pod = copy.deepcopy(made_by_the_operator()[0])
    pod["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, VERSIONS[0], strict=True)


# --- security -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INSTALLATIONS)
def test_the_operator_fits_the_restricted_standard(name: str) -> None:
    spec = operator_of(rendered(MANIFESTS / name))
    assert list(violations(spec)) == []
    (container,) = spec["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    (namespace,) = of_kind(rendered(MANIFESTS / name), "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_workers_fit_the_restricted_standard() -> None:
    for pod in made_by_the_operator()[:2]:
        assert list(violations(pod["spec"])) == []


@pytest.mark.parametrize(
    "change",
    [
        {"hostNetwork": True},
        {"securityContext": {}},
        {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]},
        {"containers": [{"name": "w"}]},
    ],
)
def test_what_does_not_fit_would_be_found(change: dict[str, Any]) -> None:
    assert list(violations({**made_by_the_operator()[0]["spec"], **change}))


def test_openshift_chooses_users_and_groups() -> None:
    objects = rendered(MANIFESTS / "overlays/openshift")
    text = yaml.safe_dump(operator_of(objects))
    assert not re.search(r"runAsUser|runAsGroup|fsGroup", text)
    environment = environment_of(objects)
    options = load({key: value for key, value in environment.items() if value != "from the pod"})
    assert options.worker_uid is None
    options = replace(options, service_accounts=LENIENT.service_accounts)
    pod = build_pod(EVERYTHING, spec_of(EVERYTHING), 0, 0, options)
    assert not re.search(r"runAsUser|runAsGroup|fsGroup", yaml.safe_dump(pod))


# --- the operator's options and rights --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INSTALLATIONS)
def test_the_operator_understands_its_arguments_and_environment(name: str) -> None:
    objects = rendered(MANIFESTS / name)
    (container,) = operator_of(objects)["containers"]
    assert parser().parse_args(container["args"]).all_namespaces
    known = {"SKYPROXY_OPERATOR_" + item.name.upper() for item in fields(Options)}
    environment = environment_of(objects)
    assert set(environment) <= known
    options = load(environment)
    assert options.lease_namespace == "from the pod"
    (port,) = container["ports"]
    assert port["containerPort"] == options.http_port
    gateways = list(of_kind(objects, "Gateway"))
    if gateways:
        (gateway,) = gateways
        assert options.gateway == f"{gateway['metadata']['namespace']}/{gateway['metadata']['name']}"
        assert gateway["spec"]["listeners"][0]["hostname"] == f"*.{options.gateway_domain}"


def granted() -> set[tuple[str, str, str]]:
    """Verb, group and resource that the operator's account may use."""
    roles = [
        item
        for kind in ("Role", "ClusterRole")
        for item in of_kind(BASE, kind)
        if item["metadata"]["name"] == "skyproxy-operator"
    ]
    assert len(roles) == 2
    return {
        (verb, group, resource)
        for role in roles
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


GROUPS = {
    "BackendTLSPolicy": "gateway.networking.k8s.io",
    "Certificate": "cert-manager.io",
    "Compute": "skyproxy.dev",
    "HTTPRoute": "gateway.networking.k8s.io",
    "Lease": "coordination.k8s.io",
    "NetworkPolicy": "networking.k8s.io",
    "ResourceClaimTemplate": "resource.k8s.io",
    "PodDisruptionBudget": "policy",
    "Workload": "kueue.x-k8s.io",
}


def used() -> set[tuple[str, str, str]]:
    """What the operator asks of a cluster in a story in which everything happens."""
    from tests.operator.world import EVERYTHING as STORY
    from tests.operator.world import KEY, World

    worlds = [World(**STORY, gang="volcano", restartPolicy={"backoffSeconds": 1}), World(), World(queue="research")]
    worlds.append(World(resourceClaims=[{"name": "gpu", "deviceClassName": "gpu.nvidia.com"}]))
    worlds[3].cluster.kinds["ResourceClaimTemplate"] = "v1"
    worlds[2].cluster.kinds["Workload"] = "v1beta1"
    worlds[0].cluster.kinds["PodGroup"] = "v1beta1"
    worlds[0].cluster.kinds["PodDisruptionBudget"] = "v1"
    worlds[0].prober.sessions = 1
    issuer = {"skyproxy.dev/cert-manager-issuer": "ClusterIssuer/ours"}
    worlds[1].cluster.objects["Compute", *KEY]["metadata"]["annotations"] = issuer

    async def story() -> None:
        await worlds[0].settle()
        worlds[0].cluster.fail("dev-0")
        await worlds[0].settle()
        # Pods with a machine and no container: their events are read.
        for pod in worlds[0].cluster.all("Pod"):
            pod["status"] = {"phase": "Pending"}
        await worlds[0].look()
        for memory in worlds[0].controller._memories.values():
            memory.events = {uid: dataclasses.replace(asked, ask_at=0.0) for uid, asked in memory.events.items()}
        await worlds[0].look()
        await worlds[1].look()
        await worlds[2].settle()
        await worlds[3].settle()
        worlds[0].edit(gateway={"enabled": False})
        await worlds[0].look()
        # The certificate is renewed before it ends.
        worlds[0].now += datetime.timedelta(days=1700)
        worlds[0].start_operator()
        await worlds[0].look()

    asyncio.run(story())
    found = set()
    for verb, kind, _ in [request for world in worlds for request in world.cluster.requests]:
        name, _, part = kind.partition("/")
        resource = _PLURALS[name] + (f"/{part}" if part else "")
        # Applying an object that is not there creates it.
        verbs = {verb, "create"} if verb == "patch" and not part else {verb}
        groups = [gang.group for gang in GANGS.values()] if name == POD_GROUP else [GROUPS.get(name, "")]
        found |= {(each, group, resource) for each in verbs for group in groups}
    # What is watched, and the Lease.
    for group, resource in (
        ("skyproxy.dev", "computes"),
        ("", "pods"),
        ("", "services"),
        ("", "persistentvolumeclaims"),
        ("networking.k8s.io", "networkpolicies"),
        ("", "configmaps"),
    ):
        found |= {("list", group, resource), ("watch", group, resource)}
    return found | {(verb, "coordination.k8s.io", "leases") for verb in ("get", "create", "update")}


def test_the_operator_may_do_what_it_does_and_nothing_else() -> None:
    assert granted() == used()


def test_the_operator_cannot_go_through_secrets_or_change_what_is_wanted() -> None:
    rights = granted()
    assert not {(verb, "", "secrets") for verb in ("list", "watch", "delete", "update")} & rights
    assert not {(verb, "skyproxy.dev", "computes") for verb in ("create", "update", "patch", "delete")} & rights
    assert not [right for right in rights if "*" in right]
    assert not [right for right in rights if right[2] in ("pods/exec", "pods/log", "nodes") or "rbac" in right[1]]


def test_people_get_their_rights_with_the_roles_they_have() -> None:
    roles = {item["metadata"]["name"]: item for item in of_kind(BASE, "ClusterRole")}
    assert roles["skyproxy-edit"]["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    (rule,) = roles["skyproxy-edit"]["rules"]
    assert "computes/status" not in rule["resources"]
    (rule,) = roles["skyproxy-view"]["rules"]
    assert set(rule["verbs"]) == {"get", "list", "watch"}


# --- images ---------------------------------------------------------------------------------------------------------

VERSION_OF_PACKAGE = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]


@pytest.mark.parametrize("name", ["worker", "operator"])
def test_an_image_is_made_of_files_that_there_are_and_runs_as_nobody_in_particular(name: str) -> None:
    text = (MANIFESTS / f"images/Containerfile.{name}").read_text("utf-8")
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists(), source
    # A number, or else the platform cannot tell that it is not root.
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:0"]
    assert "ADD " not in text
    assert "latest" not in text


def test_images_have_the_version_of_the_package() -> None:
    (container,) = operator_of(BASE)["containers"]
    images = [container["image"], *(value for key, value in environment_of(BASE).items() if key.endswith("_IMAGE"))]
    assert len(images) == 3
    for image in images:
        assert re.fullmatch(rf"ghcr\.io/skyproxy/(operator|worker):{re.escape(VERSION_OF_PACKAGE)}(-cuda)?", image)
    for default in (Options().worker_image, Options().gpu_worker_image):
        assert default in images


def test_the_custom_resource_has_one_version() -> None:
    assert (VERSION["name"], VERSION["served"], VERSION["storage"]) == ("v1alpha1", True, True)
