"""PyTorch on a pool: its wheels in the image, its process group in every rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from skyproxy.errors import ConfigurationError
from skyproxy.plugins.process_group import JOIN_TIMEOUT_SECONDS, abort_process_group, process_group
from skyproxy.plugins.requirements import has_cuda, requirement, with_requirements
from skyproxy.runtime.instance import InstanceInfo
from skyproxy.runtime.plugin import Plugin

if TYPE_CHECKING:
    from skyproxy.pools.specification import PlannedPool
    from skyproxy.providers.image import Image

WHEELS = "https://download.pytorch.org/whl"


@dataclass(frozen=True)
class TorchPlugin(Plugin):
    """`sky.plugins.torch()`: PyTorch is installed, and `torch.distributed` is initialised before the first task.

    Attributes:
        backend: "nccl", "gloo" or whatever else `torch.distributed` knows; by default nccl where the worker has CUDA,
            else gloo.
        cuda: which CUDA wheels to take for an accelerator that has CUDA, such as "cu128"; others get the CPU's.
        version: of torch: "latest", "2.3.0", or a constraint such as ">=2.3".
        vision: of torchvision, in the same words; None leaves it out.
        audio: of torchaudio, in the same words; None leaves it out.
        init: "auto" joins a process group where there are two ranks or more, "always" also where there is one.
        timeout_seconds: of collectives; PyTorch's own by default.
        join_timeout_seconds: how long the ranks wait for one another at the start.

    Example:
        ```python
        @skyproxy.function
        def total() -> float:
            ones = torch.ones(1)
            torch.distributed.all_reduce(ones)
            return ones.item()


        plugins = [skyproxy.plugins.torch(backend="gloo")]
        with skyproxy.Compute(provider=skyproxy.Local(), nodes=2, plugins=plugins) as pool:
            print(total() @ pool)  # [2.0, 2.0]
        ```
    """

    backend: str | None = None
    cuda: str = "cu128"
    version: str = "latest"
    vision: str | None = None
    audio: str | None = None
    init: Literal["auto", "always"] = "auto"
    timeout_seconds: float | None = None
    join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        if self.init not in ("auto", "always"):
            raise ConfigurationError(f'init={self.init!r} is neither "auto" nor "always".')
        self.requirements()

    @property
    def name(self) -> str:
        return "torch"

    def requirements(self) -> list[str]:
        """Return what is installed, as pip reads it.

        Example:
            ```python
            print(skyproxy.plugins.torch(version="2.7.1", vision="latest").requirements())
            ```
        """
        wanted = {"torch": self.version, "torchvision": self.vision, "torchaudio": self.audio}
        return [requirement(package, version) for package, version in wanted.items() if version is not None]

    def transform(self, image: Image, cluster: PlannedPool) -> Image:
        """Adds the packages, and the index of their wheels for these packages alone."""
        from skyproxy.providers.image import PipIndex, requirement_name

        wanted = self.requirements()
        url = f"{WHEELS}/{self.cuda if has_cuda(cluster) else 'cpu'}"
        return with_requirements(image, wanted, [PipIndex(url, [requirement_name(text) for text in wanted])])

    def around_app(self, info: InstanceInfo) -> contextlib.AbstractContextManager[object]:
        """The process group of all ranks."""
        if info.world_size < 2 and self.init == "auto":
            return contextlib.nullcontext()
        return process_group(
            info,
            self.backend,
            timeout_seconds=self.timeout_seconds,
            join_timeout_seconds=self.join_timeout_seconds,
        )

    def decorate(self, function: Callable[..., object]) -> Callable[..., object]:
        """Each rank of a node has a CUDA device of its own; the current device belongs to a thread, as a task does."""
        import torch

        if not torch.cuda.is_available():
            return function
        from skyproxy.runtime import instance_info

        device = instance_info().local_rank % torch.cuda.device_count()

        @functools.wraps(function)
        def on_own_device(*args: object, **kwargs: object) -> object:
            torch.cuda.set_device(device)
            return function(*args, **kwargs)

        return on_own_device

    def abort(self, info: InstanceInfo) -> None:
        """Collectives that wait for a failed rank raise."""
        abort_process_group()
