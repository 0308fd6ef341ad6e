"""Hugging Face Accelerate on a pool: configured as its launcher would."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from skyproxy.errors import ConfigurationError
from skyproxy.plugins.process_group import JOIN_TIMEOUT_SECONDS, abort_process_group, process_group
from skyproxy.plugins.requirements import requirement, with_requirements
from skyproxy.runtime.instance import InstanceInfo
from skyproxy.runtime.lifecycle import environment
from skyproxy.runtime.plugin import Plugin

if TYPE_CHECKING:
    from skyproxy.pools.specification import PlannedPool
    from skyproxy.providers.image import Image


@dataclass(frozen=True)
class AcceleratePlugin(Plugin):
    """`sky.plugins.accelerate()`: `Accelerator()` in a task finds all ranks, with no `accelerate config`.

    It joins the process group by itself; `sky.plugins.torch()` beside it shares that group, and installs torch.

    Attributes:
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        version: of accelerate: "latest", "1.0.0", or a constraint.
        backend: of the process group; by default nccl where CUDA is available, else gloo.

    Example:
        ```python
        plugins = [skyproxy.plugins.torch(), skyproxy.plugins.accelerate(mixed_precision="bf16")]
        pool = skyproxy.Compute(provider=skyproxy.Local(), nodes=2, plugins=plugins)
        ```
    """

    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] = "no"
    version: str = "latest"
    backend: str | None = None

    def __post_init__(self) -> None:
        if self.mixed_precision not in ("no", "fp16", "bf16", "fp8"):
            raise ConfigurationError(f"mixed_precision={self.mixed_precision!r} is not one of no, fp16, bf16, fp8.")
        requirement("accelerate", self.version)

    @property
    def name(self) -> str:
        return "accelerate"

    def transform(self, image: Image, cluster: PlannedPool) -> Image:
        """Adds accelerate."""
        return with_requirements(image, [requirement("accelerate", self.version)])

    def around_process(self, info: InstanceInfo) -> contextlib.AbstractContextManager[object]:
        """Set the environment as `accelerate launch` would."""
        return environment({"ACCELERATE_MIXED_PRECISION": self.mixed_precision})

    def around_app(self, info: InstanceInfo) -> contextlib.AbstractContextManager[object]:
        """The process group of all ranks."""
        if info.world_size < 2:
            return contextlib.nullcontext()
        return process_group(info, self.backend, join_timeout_seconds=JOIN_TIMEOUT_SECONDS)

    def abort(self, info: InstanceInfo) -> None:
        """Collectives that wait for a failed rank raise."""
        abort_process_group()
