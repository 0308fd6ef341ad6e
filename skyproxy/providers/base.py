"""The interface of providers: requests and their answers."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from skyproxy.errors import ConfigurationError, visible
from skyproxy.providers.accelerators import Accelerator
from skyproxy.providers.image import Image


@dataclass(frozen=True)
class Volume:
    """Storage that outlives the worker's process, at a path.

    Attributes:
        name: of the volume; workers that name the same one share it where the provider can.
        storage: how much, as a quantity of Kubernetes: "10Gi".
        path: where the functions find it, absolute.
        options: what only some providers know, such as storageClassName, accessMode and reclaimPolicy.

    Example:
        ```python
        cache = skyproxy.Volume("cache", storage="100Gi", path="/cache")
        ```
    """

    name: str
    storage: str
    path: str
    options: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(cls, given: Volume | Mapping[str, object]) -> Volume:
        """A volume as users write it: an object, or a dict with name, storage and path.

        Raises:
            ConfigurationError: one of the three is missing, or the path is not absolute.

        Example:
            ```python
            volume = skyproxy.Volume.parse({"name": "cache", "storage": "10Gi", "path": "/cache"})
            ```
        """
        if not isinstance(given, Volume):
            missing = [key for key in ("name", "storage", "path") if not given.get(key)]
            if missing:
                raise ConfigurationError(
                    f"the volume {dict(given)!r} lacks {', '.join(missing)}. "
                    'Example: {"name": "cache", "storage": "10Gi", "path": "/cache"}'
                )
            values = {str(key): str(value) for key, value in given.items()}
            given = cls(values.pop("name"), values.pop("storage"), values.pop("path"), values)
        if not given.path.startswith("/"):
            raise ConfigurationError(f"the volume {given.name} has the path {given.path!r}; it must begin with '/'.")
        return given


COMPUTE_ARGUMENTS = (
    "name",
    "provider",
    "accelerator",
    "nodes",
    "procs_per_node",
    "vcpus",
    "memory_gb",
    "resources",
    "image",
    "plugins",
    "volumes",
    "env",
    "concurrency",
    "retry",
    "timeout",
    "idle_timeout",
    "max_lifetime",
    "keep",
    "on_event",
    "progress",
)
"""The arguments that every provider understands, in the order of `Compute`."""


@dataclass(frozen=True)
class WorkerSpec:
    """The workers that a provider is asked for.

    Attributes:
        name: of the whole, unique where the provider needs it.
        nodes: machines.
        procs_per_node: worker processes on each; every process is a rank.
        image: what software they have: a description, the name of a container image, or None for the provider's own.
        resources: of each node, as quantities of Kubernetes: {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}.
        accelerator: of each node.
        volumes: of each node.
        env: variables of the worker processes; they go over those of the image.
        idle_timeout_seconds: how long workers may be without a client before they are taken away; None: forever.
        max_lifetime_seconds: how long they may live at all; None: forever.
        timeout_seconds: how long it may take until all of them run.
        keep: whether workers stay when the client leaves, and are found again by their name.
        options: what only one provider knows.
        first_node: the number of the first node, where these are a part of a pool whose nodes come one by one.
        of_nodes: how many nodes that pool has at most, and share what they share; None: `nodes`.

    Example:
        ```python
        spec = skyproxy.providers.WorkerSpec(name="train", nodes=2, procs_per_node=4)
        assert spec.world_size == 8
        ```
    """

    name: str
    nodes: int = 1
    procs_per_node: int = 1
    image: Image | str | None = None
    resources: Mapping[str, str] = field(default_factory=dict, hash=False)
    accelerator: Accelerator | None = None
    volumes: tuple[Volume, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    idle_timeout_seconds: float | None = None
    max_lifetime_seconds: float | None = None
    timeout_seconds: float = 600.0
    keep: bool = False
    options: Mapping[str, object] = field(default_factory=dict, hash=False)
    first_node: int = 0
    of_nodes: int | None = None

    @property
    def world_size(self) -> int:
        """Worker processes in all."""
        return self.nodes * self.procs_per_node


def refuse_options(provider: str, options: Mapping[str, object]) -> None:
    """Refuse arguments that neither a `Compute` nor its provider knows: a misspelt one must not be ignored.

    Args:
        provider: as users write it, such as "Local()".
        options: what was given beside the arguments of a `Compute`.

    Raises:
        ConfigurationError: there are any; with the nearest argument that exists.
    """
    for name in options:
        near = difflib.get_close_matches(name, COMPUTE_ARGUMENTS, n=1)
        meant = f" Did you mean {near[0]}=?" if near else ""
        raise ConfigurationError(
            f"neither Compute(...) nor {provider} has an argument {name}=.{meant} See help(skyproxy.Compute)."
        )


@dataclass(frozen=True)
class Endpoint:
    """A worker process that listens.

    Attributes:
        url: "ws://host:port" or "wss://host:port", as this machine reaches it.
        token: what it wants to hear.
        node: the machine it runs on, from 0.
        rank: the process among all.
        local_rank: the process among those of its node.
        address: the node as its peers reach it: a host name or an IP address, without a port.
        certificate: whom to trust and nobody else, for "wss://", as `skyproxy.connect` takes it; None: the system's
            authorities.
        server_name: the name that the certificate is for, where the url says another.
        insecure: whether "ws://" may go to another machine.
        shares_files: whether the worker sees this program's folders under the same paths.
        trusted: whether this program had it started, so that functions there may return any object.
        explain_end: how the worker's process ended, and the end of its log; None while it lives.
        renew: gives the token, and the certificate where it is another, once the worker takes the former token no more.

    Example:
        ```python
        endpoint = skyproxy.providers.Endpoint(url="ws://127.0.0.1:8765", token="secret", rank=1, node=1)
        ```
    """

    url: str
    token: str = field(repr=False)
    node: int = 0
    rank: int = 0
    local_rank: int = 0
    address: str = "127.0.0.1"
    certificate: str | Path | None = field(default=None, repr=False)
    server_name: str | None = None
    insecure: bool = False
    shares_files: bool = False
    trusted: bool = True
    explain_end: Callable[[], tuple[str, str] | None] | None = field(default=None, repr=False, compare=False)
    renew: Callable[[], tuple[str, str | None]] | None = field(default=None, repr=False, compare=False)


Phase = Literal["provisioning", "bootstrapping", "running", "failed", "growing", "shrinking", "lost"]


@dataclass(frozen=True)
class Progress:
    """A step on the way to running workers.

    Attributes:
        phase: where it stands.
        node: which machine; None for all.
        message: for people, with the true cause where it waits for something. It may hold words of a cluster or a
            machine, and does not command a terminal.

    Example:
        ```python
        def report(progress: skyproxy.providers.Progress) -> None:
            print(progress.phase, progress.node, progress.message)
        ```
    """

    phase: Phase
    node: int | None
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", visible(self.message))


Report = Callable[[Progress], None]


@runtime_checkable
class Launched(Protocol):
    """Workers that run.

    One that has an attribute `unbuilt_image` found its workers' software as it is: the pool then checks that they have
    the packages of that image.

    Example:
        ```python
        async def main() -> None:
            spec = skyproxy.providers.WorkerSpec(name="one")
            launched: skyproxy.providers.Launched = await skyproxy.Local().launch(spec, print)
            print([endpoint.url for endpoint in launched.endpoints])
            await launched.close()


        asyncio.run(main())
        ```
    """

    @property
    def endpoints(self) -> list[Endpoint]:
        """The addresses where they listen, in the order of ranks."""

    async def close(self) -> None:
        """Ends what was launched, unless it was to be kept; idempotent, and safe after a failure."""

    async def logs(self, rank: int) -> str:
        """The end of what a worker process itself wrote; an empty text where nobody knows."""

    async def restart(self, rank: int) -> Endpoint:
        """Ends one worker process, whatever it is doing, and starts it anew.

        Raises:
            WorkerStartError: it did not come up, or this provider cannot.
        """


@runtime_checkable
class Provider(Protocol):
    """A place where workers can be had.

    Example:
        ```python
        class Traced(skyproxy.Local):
            async def launch(self, spec, report):
                print("launching", spec.world_size)
                return await super().launch(spec, report)


        provider: skyproxy.providers.Provider = Traced()
        with skyproxy.Compute(provider=provider) as pool:
            print(pool.run(pow, 2, 10))
        ```
    """

    @property
    def name(self) -> str:
        """For people and for SKYPROXY_PROVIDER: "local", "container", "kubernetes", "remote", "aws"."""

    async def launch(self, spec: WorkerSpec, report: Report) -> Launched:
        """Starts all workers of `spec`, or none.

        Whatever was begun is taken back where this fails or is cancelled.

        Args:
            spec: what is wanted. What the provider cannot give is an error, never left out in silence.
            report: told of every step, on the event loop; must not block.

        Raises:
            ConfigurationError: this provider cannot give what is asked for; says what is missing.
            WorkerStartError: they did not come up; says which and why.
        """
