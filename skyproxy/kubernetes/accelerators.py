"""Names that device plugins and drivers give to what computes, of whatever make."""

from __future__ import annotations

import re

WHOLE_GPU = "nvidia.com/gpu"
"""The one that is asked for where nobody says which make."""

# Whole devices (nvidia.com/gpu), slices (nvidia.com/mig-1g.5gb), shares (nvidia.com/gpu.shared), and those of other
# makers. Network cards are not among them, nor what is counted in megabytes beside a device (nvidia.com/gpumem) or
# only watches one (gpu.intel.com/i915_monitoring).
_ACCELERATOR = re.compile(
    r"nvidia\.com/mig-.*|amd\.com/(gpu|cpx|spx|dpx|qpx|xcp)([._-].*)?|gpu\.intel\.com/(i915|xe)([.-].*)?"
    r"|habana\.ai/gaudi.*|google\.com/tpu.*|cloud-tpus\.google\.com/.*|aws\.amazon\.com/neuron.*"
    r"|qualcomm\.com/qaic.*|tenstorrent\.com/.*|huawei\.com/Ascend.*|[^/]+/(gpu|npu|tpu)([.-].*)?"
)


def is_accelerator(resource: str) -> bool:
    """Return whether a resource is a device that computes, or a part of one."""
    return _ACCELERATOR.fullmatch(resource) is not None


def is_device(resource: str) -> bool:
    """Return whether a resource comes in whole numbers: the system's own, hugepages aside, have no slash."""
    return "/" in resource
