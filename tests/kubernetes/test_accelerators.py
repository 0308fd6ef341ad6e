"""What counts as a device that computes."""

from __future__ import annotations

import pytest

from skyproxy.kubernetes.accelerators import is_accelerator, is_device


@pytest.mark.parametrize(
    "resource",
    [
        "nvidia.com/gpu",
        "nvidia.com/gpu.shared",
        "nvidia.com/gpu.a100",
        "nvidia.com/mig-1g.5gb",
        "nvidia.com/mig-1g.5gb.shared",
        "amd.com/gpu",
        "amd.com/cpx_nps4",
        "gpu.intel.com/i915",
        "gpu.intel.com/xe",
        "habana.ai/gaudi",
        "google.com/tpu",
        "cloud-tpus.google.com/v3",
        "aws.amazon.com/neuron",
        "aws.amazon.com/neuroncore",
        "aws.amazon.com/neurondevice",
        "huawei.com/Ascend910",
        "huawei.com/Ascend310P",
        "qualcomm.com/qaic",
        "tenstorrent.com/wormhole",
        "maker.example/npu",
    ],
)
def test_whole_ones_slices_and_shares_of_every_make_compute(resource: str) -> None:
    assert is_accelerator(resource)
    assert is_device(resource)


@pytest.mark.parametrize(
    ("resource", "whole"),
    [
        ("cpu", False),
        ("memory", False),
        ("ephemeral-storage", False),
        ("hugepages-2Mi", False),
        ("nvidia.com/gpumem", True),
        ("nvidia.com/gpucores", True),
        ("gpu.intel.com/i915_monitoring", True),
        ("gpu.intel.com/memory.max", True),
        ("rdma/hca_shared_devices_a", True),
        ("nvidia.com/hostdev", True),
        ("vpc.amazonaws.com/efa", True),
        ("xnvidia.community/gpumem", True),
    ],
)
def test_what_is_beside_them_does_not(resource: str, whole: bool) -> None:
    assert not is_accelerator(resource)
    assert is_device(resource) is whole
