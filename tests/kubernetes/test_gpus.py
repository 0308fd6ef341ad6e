"""Which GPUs are there and free, and what a short name stands for."""

from __future__ import annotations

from typing import Any

import pytest

from skyproxy.errors import ConfigurationError
from skyproxy.kubernetes.gpus import affinity, inventory, matching_placement


def node(
    name: str, product: str = "", ready: str = "True", cordoned: bool = False, **allocatable: str
) -> dict[str, Any]:
    labels = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": "40960"} if product else {}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"unschedulable": True} if cordoned else {},
        "status": {
            "allocatable": {"cpu": "8", **{key.replace("_", "/"): value for key, value in allocatable.items()}},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def pod(where: str, count: str, phase: str = "Running", first: str = "0") -> dict[str, Any]:
    def container(amount: str) -> dict[str, Any]:
        return {"resources": {"requests": {"nvidia.com/gpu": amount}}}

    spec = {"nodeName": where, "containers": [container(count)], "initContainers": [container(first)]}
    return {"spec": spec, "status": {"phase": phase}}


def gpus(count: str) -> dict[str, str]:
    return {"nvidia.com_gpu": count}


def test_what_pods_have_is_not_free_and_what_ended_has_nothing() -> None:
    pods = [pod("a", "1"), pod("a", "1", first="2"), pod("a", "1", phase="Succeeded"), pod("b", "1")]
    (row,) = inventory([node("a", "NVIDIA-A100-SXM4-40GB", **gpus("4"))], pods)
    assert (row.total, row.used, row.free, row.memory_mib) == (4, 3, 1, 40960)


def test_a_node_without_gpus_has_no_row_and_parts_of_gpus_have_one_each() -> None:
    mig = {"nvidia.com_mig-1g.5gb": "7", "nvidia.com_gpu": "0"}
    rows = inventory([node("cpu"), node("mig", "A100-MIG", **mig)], [])
    assert [(row.node, row.resource, row.total) for row in rows] == [
        ("mig", "nvidia.com/gpu", 0),
        ("mig", "nvidia.com/mig-1g.5gb", 7),
    ]


def test_devices_of_every_make_have_rows_and_what_is_beside_them_has_none() -> None:
    makes = {"google.com_tpu": "4", "habana.ai_gaudi": "8", "gpu.intel.com_i915": "1", "aws.amazon.com/neuron": "16"}
    beside = {"nvidia.com_gpumem": "81920", "gpu.intel.com/i915_monitoring": "1", "rdma_hca": "1", "memory": "64Gi"}
    rows = inventory([node("a", **makes, **beside)], [])
    assert [(row.resource, row.total) for row in rows] == [
        ("aws.amazon.com/neuron", 16),
        ("google.com/tpu", 4),
        ("gpu.intel.com/i915", 1),
        ("habana.ai/gaudi", 8),
    ]


def test_a_thousand_shares_are_counted_as_kubernetes_writes_them() -> None:
    (row,) = inventory([node("a", "T4", **gpus("2k"))], [pod("a", "1k")])
    assert (row.total, row.used, row.free) == (2000, 1000, 1000)


@pytest.mark.parametrize("more", [{"ready": "False"}, {"cordoned": True}])
def test_a_node_that_takes_nothing_new_has_nothing_free(more: dict[str, Any]) -> None:
    (row,) = inventory([node("a", "T4", **more, **gpus("2"))], [])
    assert (row.total, row.free) == (2, 0)


ROWS = inventory(
    [
        node("a", "NVIDIA-A100-SXM4-40GB", **gpus("1")),
        node("b", "NVIDIA-A100-80GB-PCIe", **gpus("1")),
        node("c", "NVIDIA-A10", **gpus("1")),
    ],
    [],
)


@pytest.mark.parametrize(
    ("short", "products"),
    [
        ("a100", ["NVIDIA-A100-80GB-PCIe", "NVIDIA-A100-SXM4-40GB"]),
        ("A100-80GB", ["NVIDIA-A100-80GB-PCIe"]),
        ("A10", ["NVIDIA-A10"]),
        ("NVIDIA-A10", ["NVIDIA-A10"]),
    ],
)
def test_a_short_name_finds_whole_words(short: str, products: list[str]) -> None:
    found = matching_placement(ROWS, short)
    assert (found.resource, found.affinity) == ("nvidia.com/gpu", affinity("nvidia.com/gpu.product", products))


def labelled(name: str, key: str, product: str, **allocatable: str) -> dict[str, Any]:
    made = node(name, **allocatable)
    made["metadata"]["labels"][key] = product
    return made


@pytest.mark.parametrize(
    ("allocatable", "resource", "label"),
    [
        ({"amd.com_gpu": "8"}, "amd.com/gpu", "amd.com/gpu.product-name"),
        ({"gpu.intel.com_xe": "8"}, "gpu.intel.com/xe", "gpu.intel.com/product"),
        ({"nvidia.com_mig-1g.5gb": "7", "nvidia.com_gpu": "1"}, "nvidia.com/gpu", "nvidia.com/gpu.product"),
    ],
)
def test_a_kind_of_gpu_is_asked_for_by_its_makers_name(allocatable: dict[str, str], resource: str, label: str) -> None:
    row = labelled("a", label, "MI-300X", **allocatable)
    found = matching_placement(inventory([row, node("b", "NVIDIA-A10", **gpus("1"))], []), "mi-300x")
    assert (found.resource, found.affinity) == (resource, affinity(label, ["MI-300X"]))


def test_a_kind_that_is_not_there_says_what_is() -> None:
    with pytest.raises(ConfigurationError, match=r"'H100'. It has: .*NVIDIA-A10"):
        matching_placement(ROWS, "H100")


def test_the_affinity_is_a_requirement() -> None:
    (term,) = affinity("k", ["x"])["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term == {"matchExpressions": [{"key": "k", "operator": "In", "values": ["x"]}]}
