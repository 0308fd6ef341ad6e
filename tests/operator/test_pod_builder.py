"""The pods that are sent to the API server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyproxy.errors import ConfigurationError
from skyproxy.runtime.instance import InstanceInfo
from skyproxy_operator.children import claim
from skyproxy_operator.names import ATTEMPT, SPEC_HASH
from skyproxy_operator.options import Options
from skyproxy_operator.pod_builder import build_pod
from skyproxy_server.arguments import parser
from skyproxy_server.health import LIVE_PATH, READY_PATH
from tests.operator.makers import OPTIONS, make_compute, spec_of


def pod_of(node: int = 0, attempt: int = 0, options: Options = OPTIONS, **spec: Any) -> dict[str, Any]:
    compute = make_compute(**spec)
    return build_pod(compute, spec_of(compute), node, attempt, options)


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = [item for item in pod["spec"]["containers"] if item["name"] == "worker"]
    return found


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: item.get("value") for item in container(pod)["env"]}


def test_a_pod_is_known_again_and_goes_with_its_compute() -> None:
    metadata = pod_of(attempt=3)["metadata"]
    assert (metadata["name"], metadata["namespace"]) == ("dev-0", "lab")
    assert metadata["labels"]["skyproxy.dev/compute"] == "dev"
    assert metadata["labels"]["skyproxy.dev/node"] == "0"
    assert metadata["annotations"][ATTEMPT] == "3"
    assert metadata["annotations"][SPEC_HASH] == spec_of(make_compute()).pod_hash()
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("Compute", "uid-1", True)


def test_the_worker_understands_its_arguments() -> None:
    made = container(pod_of(procsPerNode=2, args=["--log-level", "debug"]))
    assert made["command"] == ["python", "-m", "skyproxy_server"]
    arguments = parser().parse_args(made["args"])
    assert (arguments.host, arguments.port, arguments.processes) == ("", 8765, 2)
    assert arguments.log_level == "debug"
    mounts = {mount["mountPath"] for mount in made["volumeMounts"]}
    assert {str(arguments.token_file.parent), str(arguments.tls_cert.parent), str(arguments.tls_key.parent)} <= mounts


def test_a_command_of_the_users_own_is_taken_as_it_is() -> None:
    made = container(pod_of(command=["sleep"], args=["1"]))
    assert (made["command"], made["args"]) == (["sleep"], ["1"])
    assert "args" not in container(pod_of(command=["sleep"]))


def test_secrets_reach_the_worker_in_a_form_that_a_replaced_one_changes() -> None:
    """The kubelet renews folders of Secrets, and neither variables nor mounts with a subPath."""
    pod = pod_of()
    secrets = {volume["name"] for volume in pod["spec"]["volumes"] if "secret" in volume}
    assert secrets == {"token", "tls"}
    mounts = [mount for mount in container(pod)["volumeMounts"] if mount["name"] in secrets]
    assert len(mounts) == 2
    assert all("subPath" not in mount and "subPathExpr" not in mount for mount in mounts)
    assert "secretKeyRef" not in json.dumps(container(pod)["env"])


def test_resources_are_requests_and_limits() -> None:
    made = container(pod_of(resources={"cpu": 1, "nvidia.com/gpu": "2"}))
    assert made["resources"] == {
        "requests": {"cpu": "1", "nvidia.com/gpu": "2"},
        "limits": {"cpu": "1", "nvidia.com/gpu": "2"},
    }


def test_the_default_image_fits_the_hardware_and_a_named_one_wins() -> None:
    options = replace(OPTIONS, worker_image="cpu", gpu_worker_image="gpu")
    assert container(pod_of(options=options))["image"] == "cpu"
    assert container(pod_of(options=options, resources={"nvidia.com/gpu": "1"}))["image"] == "gpu"
    assert container(pod_of(options=options, resources={"nvidia.com/gpu": "0"}))["image"] == "cpu"
    assert container(pod_of(options=options, image="mine", resources={"nvidia.com/gpu": "1"}))["image"] == "mine"


def test_gpu_pods_tolerate_the_taint_of_gpu_nodes() -> None:
    pod = pod_of(resources={"nvidia.com/gpu": "1"}, tolerations=[{"key": "x", "operator": "Exists"}])
    assert pod["spec"]["tolerations"] == [
        {"key": "x", "operator": "Exists"},
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
    ]
    assert "tolerations" not in pod_of()["spec"]


@pytest.mark.parametrize(
    ("resource", "tolerated"),
    [
        ("nvidia.com/mig-1g.5gb", {"nvidia.com/mig-1g.5gb", "nvidia.com/gpu"}),
        ("nvidia.com/gpu.shared", {"nvidia.com/gpu.shared", "nvidia.com/gpu"}),
        ("amd.com/gpu", {"amd.com/gpu"}),
        ("habana.ai/gaudi", {"habana.ai/gaudi"}),
        ("google.com/tpu", {"google.com/tpu"}),
        ("gpu.intel.com/i915", {"gpu.intel.com/i915"}),
        ("aws.amazon.com/neuron", {"aws.amazon.com/neuron"}),
    ],
)
def test_slices_shares_and_other_makes_are_accelerators_too(resource: str, tolerated: set[str]) -> None:
    images = f"{resource.partition('/')[0]}/=theirs"
    options = replace(OPTIONS, worker_image="cpu", gpu_worker_image="gpu", accelerator_images=images)
    pod = pod_of(options=options, resources={resource: 2})
    assert container(pod)["image"] == ("gpu" if resource.startswith("nvidia.com/") else "theirs")
    assert {item["key"] for item in pod["spec"]["tolerations"]} == tolerated
    assert json.loads(variables(pod)["COMPUTE_POOL"])["accelerators"] == 2


def test_an_accelerator_without_an_image_is_told_instead_of_run_on_the_cpu() -> None:
    with pytest.raises(ValueError, match=r"spec.image: this installation has no worker image for amd.com/gpu"):
        pod_of(resources={"amd.com/gpu": 1})
    assert container(pod_of(resources={"amd.com/gpu": 1}, image="mine"))["image"] == "mine"


@pytest.mark.parametrize(
    "resource", ["cpu", "rdma/hca", "vpc.amazonaws.com/efa", "devices.kubevirt.io/kvm", "hugepages-2Mi"]
)
def test_what_does_not_compute_is_no_accelerator(resource: str) -> None:
    options = replace(OPTIONS, worker_image="cpu", gpu_worker_image="gpu")
    assert container(pod_of(options=options, resources={resource: 1}))["image"] == "cpu"


def test_it_fits_the_restricted_pod_security_standard() -> None:
    pod = pod_of()
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(pod)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["restartPolicy"] == "Never"


def test_a_worker_that_answers_nobody_for_minutes_is_ended_and_one_that_computes_is_not() -> None:
    pod = pod_of(port=9000)
    probe = container(pod)["livenessProbe"]
    assert probe["httpGet"] == {"scheme": "HTTPS", "path": LIVE_PATH, "port": 9000}
    patience = probe["periodSeconds"] * probe["failureThreshold"]
    assert 300 <= patience <= 900
    # Long before that, nobody is sent there any more.
    ready = container(pod)["readinessProbe"]
    assert ready["httpGet"] == {"scheme": "HTTPS", "path": READY_PATH, "port": 9000}
    assert ready["periodSeconds"] * ready["failureThreshold"] < patience


def test_the_user_is_the_installations_choice() -> None:
    security = pod_of(options=replace(OPTIONS, worker_uid=7))["spec"]["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (7, 7, 7)
    pod = pod_of(options=replace(OPTIONS, worker_uid=None))
    assert set(pod["spec"]["securityContext"]) == {"runAsNonRoot", "seccompProfile"}
    modes = {item["secret"]["defaultMode"] for item in pod["spec"]["volumes"] if "secret" in item}
    assert modes == {0o444}


def test_volumes_are_mounted() -> None:
    pod = pod_of(volumes=[{"name": "cache", "storage": "1Gi", "path": "/cache"}], sharedMemory="16Gi")
    volumes = {item["name"]: item for item in pod["spec"]["volumes"]}
    assert volumes["cache"]["persistentVolumeClaim"] == {"claimName": "dev-cache"}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    mounts = {item["name"]: item["mountPath"] for item in container(pod)["volumeMounts"]}
    assert set(mounts) == set(volumes)
    assert (mounts["cache"], mounts["shm"]) == ("/cache", "/dev/shm")


def test_sessions_have_a_volume_and_the_time_to_be_saved() -> None:
    compute = make_compute(snapshots={"storage": "20Gi", "storageClassName": "fast"})
    spec = spec_of(compute)
    pod: Any = build_pod(compute, spec, 0, 0, OPTIONS)
    (mount,) = [item for item in container(pod)["volumeMounts"] if item["name"] == "snapshots"]
    assert variables(pod)["SKYPROXY_SNAPSHOTS"] == mount["mountPath"]
    assert pod["spec"]["terminationGracePeriodSeconds"] >= float(variables(pod)["SKYPROXY_LEAVE_SECONDS"]) + 10
    made = claim(compute, spec.volumes[0], None)
    assert made["metadata"]["ownerReferences"][0]["uid"] == compute["metadata"]["uid"]
    assert made["spec"]["storageClassName"] == "fast"
    # A volume of the user's own cannot be in the way.
    for volume in ({"name": "snapshots", "path": "/a"}, {"name": "a", "path": mount["mountPath"]}):
        both = make_compute(snapshots={"storage": "1Gi"}, volumes=[{"storage": "1Gi", **volume}])
        with pytest.raises(ConfigurationError):
            spec_of(both)


def test_the_authority_and_other_keys_of_secrets_stay_outside() -> None:
    keys = {
        entry["key"] for item in pod_of()["spec"]["volumes"] if "secret" in item for entry in item["secret"]["items"]
    }
    assert keys == {"token", "tls.crt", "tls.key"}


def test_the_users_environment_goes_over_ours() -> None:
    pod = pod_of(env=[{"name": "HOME", "value": "/cache"}, {"name": "A", "value": "$(HOME)/a"}])
    names = [item["name"] for item in container(pod)["env"]]
    assert len(names) == len(set(names))
    assert variables(pod)["HOME"] == "/cache"
    assert variables(pod)["USER"] == "worker"


def test_a_single_node_knows_that_it_is_alone() -> None:
    info = InstanceInfo.from_mapping(json.loads(variables(pod_of())["COMPUTE_POOL"]))
    assert (info.total_nodes, info.world_size, info.head_addr) == (1, 1, "127.0.0.1")
    assert "subdomain" not in pod_of()["spec"]


def test_nodes_know_their_place_and_their_peers() -> None:
    pods = [pod_of(node=node, nodes=3, procsPerNode=2, resources={"nvidia.com/gpu": "2"}) for node in range(3)]
    infos = [InstanceInfo.from_mapping(json.loads(variables(pod)["COMPUTE_POOL"])) for pod in pods]
    assert [(info.node, info.rank, info.accelerators) for info in infos] == [(0, 0, 2), (1, 2, 2), (2, 4, 2)]
    assert {(info.head_addr, info.head_port, info.job, info.peers) for info in infos} == {
        (infos[0].head_addr, infos[0].head_port, infos[0].job, infos[0].peers)
    }
    assert infos[0].head_addr == "dev-0.dev-nodes.lab.svc"
    assert [(peer.rank, peer.node, peer.address) for peer in infos[0].peers][-1] == (5, 2, "dev-2.dev-nodes.lab.svc")
    assert [(pod["spec"]["hostname"], pod["spec"]["subdomain"]) for pod in pods][1] == ("dev-1", "dev-nodes")


def test_another_start_is_another_job_on_another_port() -> None:
    first, second = (json.loads(variables(pod_of(nodes=2, attempt=attempt))["COMPUTE_POOL"]) for attempt in (0, 1))
    assert first["job"] != second["job"]
    assert first["head_port"] != second["head_port"]


def test_a_template_goes_over_the_pod() -> None:
    pod = pod_of(
        podTemplate={
            "metadata": {"annotations": {"a": "b"}, "labels": {"c": "d"}},
            "spec": {
                "schedulerName": "volcano",
                "containers": [{"name": "worker", "readinessProbe": None, "env": [{"name": "X", "value": "y"}]}],
            },
        }
    )
    assert pod["spec"]["schedulerName"] == "volcano"
    assert "readinessProbe" not in container(pod)
    assert variables(pod)["X"] == "y"
    assert variables(pod)["USER"] == "worker"
    assert pod["metadata"]["annotations"]["a"] == "b"
    assert pod["metadata"]["labels"]["c"] == "d"


def test_no_template_makes_a_pod_that_we_would_not_know_again() -> None:
    template = {
        "metadata": {
            "name": "other",
            "namespace": "kube-system",
            "labels": {"skyproxy.dev/compute": "other"},
            "annotations": {SPEC_HASH: "x"},
            "ownerReferences": [],
        },
        "spec": {"restartPolicy": "Always"},
    }
    plain, pod = pod_of(), pod_of(podTemplate=template)
    assert pod["metadata"]["name"] == "dev-0"
    assert pod["metadata"]["namespace"] == "lab"
    assert pod["metadata"]["labels"] == plain["metadata"]["labels"]
    assert pod["metadata"]["ownerReferences"] == plain["metadata"]["ownerReferences"]
    assert pod["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    "template",
    [
        {"spec": {"$patch": "delete"}},
        {"spec": {"$patch": "replace", "hostname": "x"}},
        {"spec": {"containers": None}},
        {"spec": {"containers": [{"name": "worker", "$patch": "delete"}]}},
        {"spec": {"containers": [{"name": "worker", "image": None}]}},
        {"spec": {"containers": [{"$patch": "replace"}, {"name": "other", "image": "i"}]}},
        {"spec": None},
    ],
)
def test_a_template_that_takes_the_worker_away_is_refused(template: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="without its container 'worker'"):
        pod_of(podTemplate=template)


def test_numbers_may_stand_where_kubernetes_has_quantities() -> None:
    limits = {"limits": {"cpu": 1, "memory": "1Gi"}}
    pod = pod_of(podTemplate={"spec": {"containers": [{"name": "worker", "resources": limits}]}})
    assert container(pod)["resources"]["limits"] == {"cpu": 1, "memory": "1Gi"}
    assert pod_of(podTemplate={"metadata": None, "spec": {"nodeSelector": None}})["metadata"]["name"] == "dev-0"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-1, 1) | st.sampled_from(["worker", "replace", "delete", "x"]),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(
                    ["$patch", "name", "image", "labels", "containers", "volumes", "env", "securityContext"]
                ),
                inner,
                max_size=3,
            )
        ),
        max_leaves=12,
    )
)
def test_no_template_is_an_internal_error(part: Any) -> None:
    for template in ({"spec": part}, {"metadata": part}, {"spec": {"containers": [part]}}):
        try:
            pod = pod_of(podTemplate=template)
        except ValueError:
            continue
        assert container(pod)["image"]


def test_a_template_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="has no name"):
        pod_of(podTemplate={"spec": {"containers": [{"image": "x"}]}})
