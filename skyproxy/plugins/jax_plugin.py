"""JAX on a pool: its wheels in the image, one mesh over all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from skyproxy.errors import ConfigurationError
from skyproxy.plugins.process_group import JOIN_TIMEOUT_SECONDS
from skyproxy.plugins.requirements import has_cuda, requirement, with_requirements
from skyproxy.runtime.instance import InstanceInfo
from skyproxy.runtime.lifecycle import environment, port_for
from skyproxy.runtime.plugin import Plugin
from skyproxy.transport.addresses import is_loopback

if TYPE_CHECKING:
    from skyproxy.pools.specification import PlannedPool
    from skyproxy.providers.image import Image

_SHUTDOWN_SECONDS = 10


@dataclass(frozen=True)
class JaxPlugin(Plugin):
    """`sky.plugins.jax()`: JAX is installed, and `jax.distributed` is initialised before the first task.

    Attributes:
        version: of jax: "latest", "0.5.0", or a constraint.
        cuda: the extra of jax for an accelerator that has CUDA; others get plain jax.
        init: "auto" initialises where there are two ranks or more, "always" also where there is one.
        join_timeout_seconds: how long the ranks wait for one another at the start.

    Example:
        ```python
        pool = skyproxy.Compute(provider=skyproxy.Local(), nodes=2, plugins=[skyproxy.plugins.jax()])
        ```
    """

    version: str = "latest"
    cuda: str = "cuda12"
    init: Literal["auto", "always"] = "auto"
    join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS
    # JAX binds its devices to the coordinator it met first, and never to a second one.
    restarts_ranks = True

    def __post_init__(self) -> None:
        if self.init not in ("auto", "always"):
            raise ConfigurationError(f'init={self.init!r} is neither "auto" nor "always".')
        requirement("jax", self.version)

    @property
    def name(self) -> str:
        return "jax"

    def transform(self, image: Image, cluster: PlannedPool) -> Image:
        """Adds jax, with its CUDA wheels where they can be used."""
        package = f"jax[{self.cuda}]" if has_cuda(cluster) else "jax"
        return with_requirements(image, [requirement(package, self.version)])

    def around_process(self, info: InstanceInfo) -> contextlib.AbstractContextManager[object]:
        """Set what JAX reads from the environment."""
        if not self._joins(info):
            return contextlib.nullcontext()
        return environment(
            {
                "JAX_COORDINATOR_ADDRESS": f"{info.head_addr}:{port_for('jax', info)}",
                "JAX_NUM_PROCESSES": str(info.world_size),
                "JAX_PROCESS_ID": str(info.rank),
                "JAX_LOCAL_DEVICE_COUNT": str(max(1, info.accelerators // info.procs_per_node)),
            }
        )

    def around_app(self, info: InstanceInfo) -> contextlib.AbstractContextManager[object]:
        """JAX's distributed runtime, over all ranks."""
        return self._distribute(info) if self._joins(info) else contextlib.nullcontext()

    def _joins(self, info: InstanceInfo) -> bool:
        return info.world_size > 1 or self.init == "always"

    @contextlib.contextmanager
    def _distribute(self, info: InstanceInfo) -> Iterator[None]:
        import jax

        if jax.distributed.is_initialized():
            yield
            return
        shared = info.procs_per_node > 1 and info.accelerators >= info.procs_per_node
        each = info.accelerators // info.procs_per_node
        coordinator = f"{info.head_addr}:{port_for('jax', info)}"
        jax.distributed.initialize(
            coordinator_address=coordinator,
            # By default it listens on all addresses of the machine, also where all ranks are on that.
            coordinator_bind_address=coordinator if is_loopback(info.head_addr) else None,
            num_processes=info.world_size,
            process_id=info.rank,
            local_device_ids=list(range(info.local_rank * each, (info.local_rank + 1) * each)) if shared else None,
            initialization_timeout=int(self.join_timeout_seconds),
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
        try:
            yield
        finally:
            jax.distributed.shutdown()  # type: ignore[no-untyped-call]
