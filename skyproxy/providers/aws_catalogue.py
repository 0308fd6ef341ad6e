"""The hardware of EC2's types of instances."""

from __future__ import annotations

import math

from skyproxy.errors import ConfigurationError
from skyproxy.providers.accelerators import Accelerator
from skyproxy.providers.base import WorkerSpec
from skyproxy.units import quantity, size_bytes

# accelerator: (how many, instance type), the smallest first
_WITH_GPUS: dict[str, list[tuple[int, str]]] = {
    "A100": [(8, "p4d.24xlarge")],
    "A100-80GB": [(8, "p4de.24xlarge")],
    "A10G": [(1, "g5.xlarge"), (4, "g5.12xlarge"), (8, "g5.48xlarge")],
    "B200": [(8, "p6-b200.48xlarge")],
    "H100": [(1, "p5.4xlarge"), (8, "p5.48xlarge")],
    "H200": [(8, "p5en.48xlarge")],
    "L4": [(1, "g6.xlarge"), (4, "g6.12xlarge"), (8, "g6.48xlarge")],
    "L40S": [(1, "g6e.xlarge"), (4, "g6e.12xlarge"), (8, "g6e.48xlarge")],
    "T4": [(1, "g4dn.xlarge"), (4, "g4dn.12xlarge"), (8, "g4dn.metal")],
    "V100": [(1, "p3.2xlarge"), (4, "p3.8xlarge"), (8, "p3.16xlarge")],
}
# (processors, GiB of memory, instance type), the smallest first
_WITHOUT: list[tuple[int, int, str]] = [
    (2, 4, "c7i.large"),
    (2, 8, "m7i.large"),
    (4, 8, "c7i.xlarge"),
    (4, 16, "m7i.xlarge"),
    (8, 16, "c7i.2xlarge"),
    (8, 32, "m7i.2xlarge"),
    (16, 32, "c7i.4xlarge"),
    (16, 64, "m7i.4xlarge"),
    (32, 64, "c7i.8xlarge"),
    (32, 128, "m7i.8xlarge"),
    (64, 256, "m7i.16xlarge"),
    (96, 384, "m7i.24xlarge"),
    (192, 768, "m7i.48xlarge"),
]
_SMALLEST_CPUS, _SMALLEST_GIB = 4, 16


def instance_type_for(spec: WorkerSpec) -> str:
    """The smallest instance type that has what a node is asked to have.

    Raises:
        ConfigurationError: there is none; says what there is.
    """
    if spec.accelerator is not None:
        return _with_gpus(spec.accelerator)
    if "nvidia.com/gpu" in spec.resources:
        raise ConfigurationError(
            "AWS() needs to know which GPU: accelerator='A100:8' instead of resources={'nvidia.com/gpu': ...}."
        )
    processors = math.ceil(quantity(spec.resources["cpu"], "cpu")) if "cpu" in spec.resources else _SMALLEST_CPUS
    memory = size_bytes(spec.resources["memory"], "memory") / (1 << 30) if "memory" in spec.resources else _SMALLEST_GIB
    for has_processors, has_memory, name in _WITHOUT:
        if has_processors >= processors and has_memory >= memory:
            return name
    raise ConfigurationError(
        f"AWS() knows no instance with {processors} processors and {memory:g} GiB. Name one: AWS(instance_type=...)."
    )


def _with_gpus(accelerator: Accelerator) -> str:
    known = _WITH_GPUS.get(accelerator.name)
    if known is None:
        raise ConfigurationError(
            f"AWS() knows no instance with {accelerator.name}. It knows: {', '.join(sorted(_WITH_GPUS))}; or name one: "
            "AWS(instance_type=...)."
        )
    for count, name in known:
        if count >= accelerator.count:
            return name
    raise ConfigurationError(f"no instance has {accelerator.count} {accelerator.name}; at most {known[-1][0]}.")
