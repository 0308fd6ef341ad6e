"""What pods may have, and what only an administrator's word gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kubernetes_asyncio.client import models

from skyproxy_operator.pod_builder import build_pod
from skyproxy_operator.pod_policy import _VOLUME_KINDS, REVIEWED, violations
from tests.operator.makers import OPTIONS, make_compute, spec_of


def build(options: Any = OPTIONS, **spec: Any) -> dict[str, Any]:
    compute = make_compute(**spec)
    return build_pod(compute, spec_of(compute), 0, 0, options)


def template(**spec: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": spec}}


def worker(**fields: Any) -> dict[str, Any]:
    return template(containers=[{"name": "worker", **fields}])


def sidecar(**fields: Any) -> dict[str, Any]:
    good = {"runAsNonRoot": True, "allowPrivilegeEscalation": False}
    return template(containers=[{"name": "side", "image": "i", "securityContext": good, **fields}])


HOST = [
    template(hostPID=True),
    template(hostIPC=True),
    template(hostNetwork=True),
    template(nodeName="control-plane"),
    template(volumes=[{"name": "root", "hostPath": {"path": "/"}}]),
    template(volumes=[{"name": "share", "nfs": {"server": "s", "path": "/"}}]),
    {"podTemplate": {"metadata": {"annotations": {"cdi.k8s.io/any": "nvidia.com/gpu=all"}}}},
    {"podTemplate": {"metadata": {"annotations": {"io.kubernetes.cri-o.Devices": "/dev/kmsg"}}}},
    {"podTemplate": {"metadata": {"annotations": {"seccomp-profile.kubernetes.cri-o.io/worker": "x/any:1"}}}},
    {"podTemplate": {"metadata": {"annotations": {"irq-load-balancing.crio.io": "disable"}}}},
    {"podTemplate": {"metadata": {"annotations": {"devices.nri.io/container.worker": "[{path: /dev/kmsg}]"}}}},
    {"podTemplate": {"metadata": {"annotations": {"mounts.nri.io/pod": "[{source: /, destination: /host}]"}}}},
    worker(ports=[{"containerPort": 1, "hostPort": 1, "protocol": "TCP"}]),
    sidecar(ports=[{"containerPort": 1, "hostPort": 1, "protocol": "TCP"}]),
    worker(livenessProbe={"httpGet": {"host": "169.254.169.254", "port": 80}}),
    sidecar(startupProbe={"tcpSocket": {"host": "10.0.0.1", "port": 22}}),
    worker(lifecycle={"preStop": {"httpGet": {"host": "169.254.169.254", "port": 80}}}),
    *(
        template(volumes=[{"name": "v", kind: {}}])
        for kind in models.V1Volume.attribute_map.values()
        if kind not in {"name", *_VOLUME_KINDS}
    ),
]
PRIVILEGE = [
    worker(securityContext={"privileged": True}),
    worker(securityContext={"allowPrivilegeEscalation": True}),
    worker(securityContext={"runAsUser": 0}),
    worker(securityContext={"runAsNonRoot": False}),
    worker(securityContext={"procMount": "Unmasked"}),
    worker(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
    worker(securityContext={"seccompProfile": {"type": "Unconfined"}}),
    worker(securityContext={"appArmorProfile": {"type": "Unconfined"}}),
    worker(securityContext={"seLinuxOptions": {"type": "spc_t"}}),
    worker(securityContext={"windowsOptions": {"hostProcess": True}}),
    worker(securityContext={"windowsOptions": {"gmsaCredentialSpecName": "domain-admin"}}),
    worker(securityContext=None),
    template(securityContext={"runAsUser": 0}),
    template(securityContext={"runAsNonRoot": False}),
    template(securityContext=None),
    template(securityContext={"seccompProfile": None}),
    template(securityContext={"seccompProfile": {"type": None}}),
    template(securityContext={"seccompProfile": {"type": "Anything"}}),
    template(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}),
    template(priorityClassName="system-node-critical"),
    template(initContainers=[{"name": "first", "image": "i", "securityContext": {"privileged": True}}]),
    template(initContainers=[{"name": "first", "image": "i"}]),
    sidecar(securityContext={"runAsNonRoot": True}),
    template(
        ephemeralContainers=[{"name": "e", "image": "i", "securityContext": {"privileged": True}}],
    ),
    {
        "podTemplate": {
            "metadata": {"annotations": {"container.seccomp.security.alpha.kubernetes.io/worker": "unconfined"}}
        }
    },
    {
        "podTemplate": {
            "metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/worker": "unconfined"}}
        }
    },
]
ACCOUNT = [
    {"serviceAccountName": "admin"},
    template(serviceAccountName="admin"),
    template(serviceAccount="admin"),
    template(automountServiceAccountToken=True),
    template(volumes=[{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]),
    template(volumes=[{"name": "c", "projected": {"sources": [{"podCertificate": {"signerName": "s"}}]}}]),
]
SECRET = [
    {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "foreign", "key": "k"}}}]},
    {"envFrom": [{"secretRef": {"name": "foreign"}}]},
    template(volumes=[{"name": "v", "secret": {"secretName": "foreign"}}]),
    template(volumes=[{"name": "token", "secret": {"secretName": "foreign"}}]),
    template(volumes=[{"name": "v", "projected": {"sources": [{"secret": {"name": "foreign"}}]}}]),
    template(volumes=[{"name": "v", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "foreign"}}}]),
    worker(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "foreign", "key": "k"}}}]),
    sidecar(envFrom=[{"secretRef": {"name": "foreign"}}]),
]


VOLUME = [
    template(volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "foreign"}}]),
    template(volumes=[{"name": "tmp", "persistentVolumeClaim": {"claimName": "foreign"}, "emptyDir": None}]),
]


@pytest.mark.parametrize("spec", VOLUME)
def test_claims_of_volumes_can_be_limited_to_some(spec: dict[str, Any]) -> None:
    build(**spec)
    build(replace(OPTIONS, volume_claims="mine,for*"), **spec)
    for claims in ("", "mine"):
        with pytest.raises(ValueError, match="SKYPROXY_OPERATOR_VOLUME_CLAIMS=foreign"):
            build(replace(OPTIONS, volume_claims=claims), **spec)
    build(replace(OPTIONS, volume_claims=""), volumes=[{"name": "cache", "storage": "1Gi", "path": "/cache"}])


def test_a_worker_whose_time_is_over_has_no_hour_to_leave() -> None:
    build(**template(terminationGracePeriodSeconds=3600))
    with pytest.raises(ValueError, match="terminationGracePeriodSeconds: 3601 is more than 3600"):
        build(
            replace(OPTIONS, allow_privilege=True, allow_host_access=True),
            **template(terminationGracePeriodSeconds=3601),
        )


CLAIM = [
    {"resourceClaims": [{"name": "a", "resourceClaimName": "foreign"}]},
    {"resourceClaims": [{"name": "a", "resourceClaimTemplateName": "foreign"}]},
    template(resourceClaims=[{"name": "a", "resourceClaimTemplateName": "foreign"}]),
]


@pytest.mark.parametrize("spec", HOST)
def test_the_machine_is_closed_unless_an_administrator_opens_it(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="SKYPROXY_OPERATOR_ALLOW_HOST_ACCESS"):
        build(**spec)
    build(replace(OPTIONS, allow_host_access=True), **spec)


@pytest.mark.parametrize("spec", PRIVILEGE)
def test_privileges_are_refused_unless_an_administrator_allows_them(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="SKYPROXY_OPERATOR_ALLOW_PRIVILEGE"):
        build(**spec)
    build(replace(OPTIONS, allow_privilege=True), **spec)


@pytest.mark.parametrize("spec", ACCOUNT)
def test_service_accounts_are_those_that_an_administrator_names(spec: dict[str, Any]) -> None:
    for accounts in ("", "other/*", "lab/worker"):
        with pytest.raises(ValueError, match=r"SKYPROXY_OPERATOR_SERVICE_ACCOUNTS=lab/(admin|default)"):
            build(replace(OPTIONS, service_accounts=accounts), **spec)
    build(replace(OPTIONS, service_accounts="x/y, lab/*"), **spec)


@pytest.mark.parametrize("spec", SECRET)
def test_secrets_can_be_limited_to_some(spec: dict[str, Any]) -> None:
    build(**spec)
    build(replace(OPTIONS, secrets="mine,for*"), **spec)
    for secrets in ("", "mine"):
        with pytest.raises(ValueError, match="SKYPROXY_OPERATOR_SECRETS=foreign"):
            build(replace(OPTIONS, secrets=secrets), **spec)


@pytest.mark.parametrize("spec", CLAIM)
def test_claims_of_devices_can_be_limited_to_some(spec: dict[str, Any]) -> None:
    build(**spec)
    build(replace(OPTIONS, resource_claims="mine,for*"), **spec)
    for claims in ("", "mine"):
        with pytest.raises(ValueError, match="SKYPROXY_OPERATOR_RESOURCE_CLAIMS=foreign"):
            build(replace(OPTIONS, resource_claims=claims), **spec)


def test_classes_of_devices_can_be_limited_to_some() -> None:
    spec = {"resourceClaims": [{"name": "a", "deviceClassName": "gpu.nvidia.com"}]}
    # What the operator makes itself needs no word among those that may be named.
    build(replace(OPTIONS, resource_claims="", device_classes="tpu.google.com, gpu.*"), **spec)
    with pytest.raises(ValueError, match=r"SKYPROXY_OPERATOR_DEVICE_CLASSES=gpu\.nvidia\.com"):
        build(replace(OPTIONS, device_classes="tpu.google.com"), **spec)


@pytest.mark.parametrize("kind", REVIEWED)
def test_every_field_of_the_api_was_looked_at(kind: str) -> None:
    """What a newer API has is refused until somebody has added it to the list, with a rule where it needs one."""
    assert set(getattr(models, kind).attribute_map.values()) <= REVIEWED[kind]


@pytest.mark.parametrize(
    "place",
    [
        {"new": 1},
        {"securityContext": {"new": 1}},
        {"containers": [{"new": 1}]},
        {"initContainers": [{"new": 1}]},
        {"ephemeralContainers": [{"new": 1}]},
        {"containers": [{"securityContext": {"new": 1}}]},
        {"containers": [{"env": [{"name": "A", "valueFrom": {"new": 1}}]}]},
        {"containers": [{"envFrom": [{"new": 1}]}]},
        {"volumes": [{"name": "v", "projected": {"sources": [{"new": 1}]}}]},
        {"volumes": [{"name": "v", "new": 1}]},
    ],
    ids=str,
)
def test_a_field_that_the_policy_does_not_know_is_refused(place: dict[str, Any]) -> None:
    pod = {"metadata": {"namespace": "lab"}, "spec": {"automountServiceAccountToken": False, **place}}
    assert any("new: " in line for line in violations(pod, OPTIONS))
    opened = replace(OPTIONS, allow_privilege=True, allow_host_access=True)
    assert not any("new: " in line for line in violations(pod, opened))


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="hostPID") as told:
        build(serviceAccountName="admin", **template(hostPID=True, hostNetwork=True))
    assert len(str(told.value).splitlines()) == 3


@pytest.mark.parametrize(
    "spec",
    [
        template(containers="x"),
        template(volumes={"a": 1}),
        template(securityContext="x"),
        template(volumes=[{"name": "v", "projected": "x"}]),
    ],
)
def test_nonsense_is_an_error_of_the_template_and_no_crash(spec: dict[str, Any]) -> None:
    """What still has a pod's form is the API server's to refuse."""
    try:
        build(**spec)
    except ValueError as error:
        assert str(error)  # noqa: PT017


def test_ordinary_pods_and_harmless_templates_pass() -> None:
    build()
    build(nodes=2, procsPerNode=2, volumes=[{"name": "cache", "storage": "1Gi", "path": "/cache"}])
    build(**template(schedulerName="volcano", runtimeClassName="gvisor", topologySpreadConstraints=[]))
    build(**sidecar())
    build(replace(OPTIONS, secrets=""), nodes=2)
    own = {"seccompProfile": {"type": "Localhost", "localhostProfile": "p"}}
    build(
        podTemplate={
            "spec": {
                "securityContext": {"seccompProfile": None},
                "containers": [{"name": "worker", "securityContext": own}],
            }
        }
    )


def test_no_template_makes_a_pod_anothers() -> None:
    foreign = {"skyproxy.dev/compute": "other", "skyproxy.dev/node": "7", "app.kubernetes.io/managed-by": "me"}
    owner = {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "1", "controller": True}
    metadata = {"name": "z", "namespace": "kube-system", "labels": foreign, "ownerReferences": [owner]}
    made = build(podTemplate={"metadata": metadata})["metadata"]
    assert (made["name"], made["namespace"]) == ("dev-0", "lab")
    assert [row["kind"] for row in made["ownerReferences"]] == ["Compute"]
    assert not set(foreign.values()) & set(made["labels"].values())
