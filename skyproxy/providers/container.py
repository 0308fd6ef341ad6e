"""Workers in containers on this machine, by docker or podman."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from functools import partial

from skyproxy.errors import ConfigurationError, WorkerStartError
from skyproxy.providers.all_or_none import run_all_or_none
from skyproxy.providers.base import Endpoint, Launched, Progress, Report, WorkerSpec, refuse_options
from skyproxy.providers.commands import run_command
from skyproxy.providers.container_engine import CONFINEMENT, gpu_options, is_running
from skyproxy.providers.container_image import container_image
from skyproxy.providers.image import Image
from skyproxy.providers.local import devices_of_node, wait_for_worker
from skyproxy.providers.single_nodes import OneByOne
from skyproxy.runtime.instance import LOCAL_HEAD_PORT, POOL_VARIABLE, InstanceInfo, Peer
from skyproxy.session.local_worker import LocalWorker
from skyproxy.settings import SETTINGS
from skyproxy.units import plain_text, quantity, size_bytes

logger = logging.getLogger("skyproxy")

_PORT = 8765
_INCLUDES = "/opt/skyproxy-includes"
_GPU = "nvidia.com/gpu"
_ENGINE_END_SECONDS = 10.0
"""For an engine to clear away a container that does not run any more."""


class Container:
    """A container for every node, on this machine. What a described `Image` asks for is built in once.

    The worker's life is tied to this program as that of a local one is: its token comes, and its end shows, on the
    standard input of `docker run`. Its port is published on loopback only.

    Attributes:
        name: "container".

    Example:
        ```python
        with skyproxy.Compute(provider=skyproxy.Container(), image=skyproxy.Image(pip=["einops"])) as pool:
            train() >> pool
        ```
    """

    name = "container"

    def __init__(self, *, cli: str | None = None, shared_memory: str = "2g") -> None:
        """Choose the engine, and what containers may use.

        Args:
            cli: "docker", "podman" or the path of one; by default the first of them that is installed.
            shared_memory: the size of /dev/shm, which data loaders and NCCL need.
        """
        self._cli = cli
        self._shared_memory = shared_memory
        self._network: str | None = None

    def __repr__(self) -> str:
        return "Container()" if self._cli is None else f"Container(cli={self._cli!r})"

    async def launch(self, spec: WorkerSpec, report: Report) -> Containers:
        """Builds the image where it is not there yet, and starts all containers; see `Provider.launch`."""
        if spec.keep:
            raise ConfigurationError("containers of Container() end with this program, so keep=True is not available.")
        refuse_options("Container()", spec.options)
        cli = await self._find_cli()
        gpus = spec.accelerator is not None or int(spec.resources.get(_GPU, 0)) > 0
        image = Image(base=spec.image) if isinstance(spec.image, str) else spec.image or Image()
        if isinstance(spec.image, str):
            tag = spec.image
        elif image.base is not None and not (image.pip or image.apt or image.python or image.requirements):
            tag = image.base
        else:
            report(Progress("provisioning", None, "building the image, or finding it built"))
            tag = await container_image(cli, image, gpus=gpus)
        for volume in spec.volumes:
            logger.info("skyproxy: a volume of %s has no limit; %s asks for %s", cli, volume.name, volume.storage)
        containers = Containers(cli, spec, tag, image, self._shared_memory, gpus, self._network)
        try:
            await containers.start(report)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(containers.close()))
            raise
        return containers

    def single_nodes(self, spec: WorkerSpec) -> ContainerNodes:
        """Return the source of an elastic pool's nodes, which share a network."""
        return ContainerNodes(self, spec)

    def on_network(self, network: str) -> Container:
        """Return the same provider for containers on a network that is there."""
        other = copy.copy(self)
        other._network = network
        return other

    async def make_network(self, name: str) -> None:
        """Make a network.

        Raises:
            ConfigurationError: there is no engine.
            WorkerStartError: the engine refused.
        """
        await run_command([await self._find_cli(), "network", "create", name], "make a network for the nodes")

    async def remove_network(self, name: str) -> None:
        """Remove a network; a failure is logged."""
        await _remove_network(await self._find_cli(), name)

    async def _find_cli(self) -> str:
        cli = self._cli or next((name for name in ("docker", "podman") if shutil.which(name)), None)
        if cli is None or shutil.which(cli) is None:
            raise ConfigurationError(
                f"Container() needs {cli or 'docker or podman'}, which is not installed. Install it, or use Local()."
            )
        try:
            await run_command([cli, "ps", "--quiet"], "reach the container engine")
        except WorkerStartError as error:
            raise ConfigurationError(
                f"Container(): {cli} is installed, but its engine does not answer: {error}\nStart it (systemctl start "
                f"docker, or Docker Desktop), see that `{cli} ps` works for you, or use Local()."
            ) from error
        return cli


class Containers:
    """The containers that `Container` launched."""

    def __init__(
        self,
        cli: str,
        spec: WorkerSpec,
        tag: str,
        image: Image,
        shared_memory: str,
        gpus: bool,
        network: str | None = None,
    ) -> None:
        self._cli = cli
        self._spec = spec
        self._tag = tag
        self._image = image
        self._shared_memory = shared_memory
        self._gpus = gpus
        # Unique, so that pools of one name, or one that crashed, are not in the way.
        self._name = re.sub(r"[^a-zA-Z0-9_.-]", "-", f"skyproxy-{spec.name}-{secrets.token_hex(3)}")
        self._network = network
        self._owns_network = False
        self._workers: list[LocalWorker | None] = [None] * spec.world_size
        self._urls: list[str] = [""] * spec.world_size
        self._closed = False

    async def start(self, report: Report) -> None:
        """Starts the first process of every node, then the others beside it."""
        spec = self._spec
        if spec.nodes > 1:
            await run_command([self._cli, "network", "create", self._name], "make a network for the nodes")
            self._network, self._owns_network = self._name, True
        report(Progress("bootstrapping", None, f"starting {spec.nodes} container(s) from {self._tag}"))
        procs = spec.procs_per_node
        # The others share the network and the memory of the first, and so must come after it.
        await run_all_or_none(self._start_rank(node * procs, report) for node in range(spec.nodes))
        await run_all_or_none(self._start_rank(rank, report) for rank in range(spec.world_size) if rank % procs)

    async def _start_rank(self, rank: int, report: Report) -> None:
        # Values go through the client's environment: arguments can be read by everybody on the machine.
        variables = self._variables(rank)
        command = self._command(rank, variables, await self._gpu_options(rank))
        worker = LocalWorker("auto", SETTINGS, command=command, environment={**os.environ, **variables}, wait=False)
        self._workers[rank] = worker
        await wait_for_worker(worker, self._spec.timeout_seconds, f"rank {rank}, container {self._container(rank)}")
        node, local_rank = divmod(rank, self._spec.procs_per_node)
        published = await run_command(
            [self._cli, "port", self._container(rank - local_rank), f"{_PORT + local_rank}/tcp"],
            "find the worker's port",
        )
        self._urls[rank] = f"ws://127.0.0.1:{published.splitlines()[0].rpartition(':')[2]}"
        report(Progress("running", node, f"rank {rank} listens in container {self._container(rank)}"))

    def _container(self, rank: int) -> str:
        node, local_rank = divmod(rank, self._spec.procs_per_node)
        return f"{self._name}-{node}" + (f"-{local_rank}" if local_rank else "")

    async def _gpu_options(self, rank: int) -> list[str]:
        if not self._gpus:
            return []
        node = rank // self._spec.procs_per_node
        devices = devices_of_node(self._spec.first_node + node, self._spec.of_nodes or self._spec.nodes)
        return await gpu_options(self._cli, None, devices)

    def _command(self, rank: int, variables: Mapping[str, str], gpus: Sequence[str]) -> list[str]:
        spec = self._spec
        local_rank = rank % spec.procs_per_node
        command = [self._cli, "run", "--rm", "--interactive", "--init", "--name", self._container(rank)]
        command += ["--label", f"skyproxy.pool={spec.name}", *CONFINEMENT]
        if local_rank:
            first = self._container(rank - local_rank)
            command += ["--network", f"container:{first}", "--ipc", f"container:{first}"]
        else:
            command += ["--shm-size", self._shared_memory, "--ipc", "shareable"]
            if self._network is not None:
                command += ["--network", self._network, "--hostname", self._container(rank)]
            for offset in range(spec.procs_per_node):
                command += ["--publish", f"127.0.0.1::{_PORT + offset}"]
        if "cpu" in spec.resources:
            command += ["--cpus", plain_text(quantity(spec.resources["cpu"], "cpu") / spec.procs_per_node)]
        if "memory" in spec.resources:
            command += ["--memory", str(size_bytes(spec.resources["memory"], "memory") // spec.procs_per_node)]
        command += gpus
        for volume in spec.volumes:
            command += ["--volume", f"skyproxy-{volume.name}:{volume.path}"]
        for path in self._image.included_paths():
            command += ["--volume", f"{path}:{_INCLUDES}/{path.name}:ro"]
        for name in variables:
            command += ["--env", name]
        command += [self._tag, "python3", "-m", "skyproxy_server", "--embedded", "--insecure", "--host", "0.0.0.0"]
        return [*command, "--port", str(_PORT + local_rank)]

    def _variables(self, rank: int) -> dict[str, str]:
        spec, procs = self._spec, self._spec.procs_per_node
        node, local_rank = divmod(rank, procs)
        info = InstanceInfo(
            node=node,
            total_nodes=spec.nodes,
            head_addr=self._address(0),
            head_port=LOCAL_HEAD_PORT,
            accelerators=len(devices_of_node(spec.first_node + node, spec.of_nodes or spec.nodes)) if self._gpus else 0,
            peers=tuple(Peer(other, other // procs, self._address(other)) for other in range(spec.world_size)),
            rank=rank,
            world_size=spec.world_size,
            local_rank=local_rank,
            procs_per_node=procs,
            job=spec.name,
        )
        variables = {**self._image.env, **spec.env, POOL_VARIABLE: info.to_json()}
        if self._image.includes:
            variables["PYTHONPATH"] = f"/opt/skyproxy:{_INCLUDES}"
        return variables

    def _address(self, rank: int) -> str:
        first = rank - rank % self._spec.procs_per_node
        return self._container(first) if self._network is not None else "127.0.0.1"

    @property
    def endpoints(self) -> list[Endpoint]:
        """The addresses where they listen, in the order of ranks."""
        return [self._endpoint(rank) for rank in range(self._spec.world_size)]

    def _endpoint(self, rank: int) -> Endpoint:
        worker = self._workers[rank]
        assert worker is not None
        node, local_rank = divmod(rank, self._spec.procs_per_node)
        address, explain_end = self._address(rank), partial(self._explain_end, rank, worker)
        return Endpoint(self._urls[rank], worker.token, node, rank, local_rank, address, explain_end=explain_end)

    def _explain_end(self, rank: int, worker: LocalWorker) -> tuple[str, str] | None:
        """Say how a worker ended, as `LocalWorker.explain_end` does; an engine may take its time to tell."""
        return worker.explain_end() or (
            None if is_running(self._cli, self._container(rank)) else worker.explain_end(_ENGINE_END_SECONDS)
        )

    async def logs(self, rank: int) -> str:
        """The end of what the process wrote to its standard error."""
        worker = self._workers[rank]
        return "" if worker is None else await asyncio.to_thread(worker.output)

    async def restart(self, rank: int) -> Endpoint:
        """Removes one container and starts it anew.

        Raises:
            WorkerStartError: it did not come up, or other processes live in its network.
        """
        if self._closed:
            raise WorkerStartError(f"rank {rank} cannot be restarted: the containers of {self._spec.name} were closed.")
        if self._spec.procs_per_node > 1 and rank % self._spec.procs_per_node == 0:
            raise WorkerStartError(
                f"rank {rank} cannot be restarted alone: the other processes of its node share its network. Start the "
                "pool again, or use procs_per_node=1."
            )
        await self._remove(rank)
        await self._start_rank(rank, lambda progress: None)
        return self._endpoint(rank)

    async def _remove(self, rank: int) -> None:
        worker = self._workers[rank]
        if worker is None:
            return
        await asyncio.to_thread(worker.stop)
        # It has ended with its standard input, unless it was frozen; then its client is gone, and it is not.
        with contextlib.suppress(WorkerStartError):
            await run_command([self._cli, "rm", "-fv", self._container(rank)], "remove a container")

    async def close(self) -> None:
        """Ends and removes all containers, and their network; idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*(self._remove(rank) for rank in range(self._spec.world_size)))
        if self._network is not None and self._owns_network:
            await _remove_network(self._cli, self._network)
            self._owns_network = False


async def _remove_network(cli: str, name: str) -> None:
    try:
        await run_command([cli, "network", "rm", name], "remove the network")
    except WorkerStartError as error:
        logger.warning("skyproxy: %s", error)


class ContainerNodes(OneByOne):
    """Single containers of an elastic pool, on a network of their own."""

    def __init__(self, provider: Container, spec: WorkerSpec) -> None:
        super().__init__(provider, spec)
        self._container = provider
        self._name = re.sub(r"[^a-zA-Z0-9_.-]", "-", f"skyproxy-{spec.name}-{secrets.token_hex(3)}")
        self._there: asyncio.Task[None] | None = None

    async def add_node(self, number: int, report: Report) -> Launched:
        """Start the containers of one node; the first one makes the network."""
        if self._there is None or (self._there.done() and self._there.exception() is not None):
            self._there = asyncio.create_task(self._container.make_network(self._name))
        await asyncio.shield(self._there)
        return await self._container.on_network(self._name).launch(self.spec_of(number), report)

    async def close(self) -> None:
        """Remove the network."""
        there, self._there = self._there, None
        if there is not None:
            with contextlib.suppress(ConfigurationError, WorkerStartError):
                await there
                await self._container.remove_network(self._name)
