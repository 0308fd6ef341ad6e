"""Workers on this machine: real processes, whose life is tied to ours."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from pathlib import Path

from skyproxy.errors import ConfigurationError, WorkerStartError
from skyproxy.providers.all_or_none import run_all_or_none
from skyproxy.providers.base import Endpoint, Progress, Report, WorkerSpec, refuse_options
from skyproxy.providers.environments import Environment, EnvironmentStore, own_environment_satisfies
from skyproxy.providers.image import Image
from skyproxy.runtime.instance import POOL_VARIABLE, InstanceInfo, Peer, count_accelerators
from skyproxy.runtime.scratch import make_scratch, remove_scratch
from skyproxy.session.forking import ForkServer, can_fork
from skyproxy.session.local_worker import LocalWorker, worker_environment
from skyproxy.settings import SETTINGS
from skyproxy.transport.shared_threads import shared_threads

logger = logging.getLogger("skyproxy")

_ADDRESS = "127.0.0.1"
_MANY = 4
"""Worker processes from which one imports PyTorch for all: below, they do so at the same time, and none waits."""


class Local:
    """Worker processes on this machine: a node of a pool is one process, or `procs_per_node` of them.

    The GPUs of the machine are dealt out to the nodes. Memory is not limited, and `vcpus` sets the number of threads.

    Example:
        ```python
        with skyproxy.Compute(provider=skyproxy.Local(device="cpu"), nodes=2) as pool:
            print(pool.world_size)
        ```
    """

    name = "local"

    def __init__(self, *, device: str = "auto", isolated: bool = False, cache: str | Path | None = None) -> None:
        """Choose the devices and the environment of workers.

        Args:
            device: what workers offer: "auto" (CUDA where there is any), "cpu" or "cuda".
            isolated: whether an image gets an environment without this program's packages. Otherwise what this program
                has is used, and only what is missing or wanted at another version is installed, beside it.
            cache: the folder for environments; by default that of SKYPROXY_CACHE, or ~/.cache/skyproxy.
        """
        if device not in ("auto", "cpu", "cuda"):
            raise ConfigurationError(f"Local(device={device!r}) is not one of 'auto', 'cpu', 'cuda'.")
        self.device = device
        self.isolated = isolated
        self._store = EnvironmentStore((Path(cache) if cache is not None else cache_folder()) / "environments")

    def __repr__(self) -> str:
        return "Local()" if self.device == "auto" else f"Local(device={self.device!r})"

    async def launch(self, spec: WorkerSpec, report: Report) -> LocalWorkers:
        """Starts all processes at once; see `Provider.launch`."""
        image = self._check_image(spec, report)
        environment = await self._environment(image, report)
        for volume in spec.volumes:
            _make_folder(volume.name, volume.path)
        workers = LocalWorkers(spec, self.device, image, environment)
        try:
            await workers.start(report)
        except BaseException:
            await workers.close()
            raise
        return workers

    def _check_image(self, spec: WorkerSpec, report: Report) -> Image:
        refuse_options("Local()", spec.options)
        if isinstance(spec.image, str):
            raise ConfigurationError(
                f"Local() runs processes of this machine, not the container image {spec.image!r}. "
                "Describe the software: Image(pip=[...]), or use Container() or Kubernetes()."
            )
        image = spec.image or Image()
        if image.apt:
            raise ConfigurationError(
                f"Local() installs no Debian packages ({', '.join(image.apt)}) on this machine. Install them yourself, "
                "leave apt=[...] out, or use Container()."
            )
        if image.base is not None:
            raise ConfigurationError(
                f"Image(base={image.base!r}) is a container image; Local() runs none. Use Container()."
            )
        if spec.keep:
            raise ConfigurationError(
                "Local() workers end with this program, so keep=True is not available. For one that stays: "
                "skyproxy up NAME --provider local"
            )
        present = count_accelerators() if self.device != "cpu" else 0
        if spec.accelerator is not None and present == 0:
            told = f"this machine has no CUDA device; the workers compute on its CPU, not on {spec.accelerator}."
            logger.warning("skyproxy: %s", told)
            report(Progress("provisioning", None, told))
        known = ("cpu", "memory")
        others = ", ".join(f"{name}={amount}" for name, amount in spec.resources.items() if name not in known)
        if others:
            told = f"Local() gives its workers what this machine has, and ignores resources: {others}."
            logger.warning("skyproxy: %s", told)
            report(Progress("provisioning", None, told))
        return image

    async def _environment(self, image: Image, report: Report) -> Environment | None:
        if not self.isolated and own_environment_satisfies(image):
            return None
        report(Progress("bootstrapping", None, "preparing the environment of the image"))
        return await self._store.environment(
            image,
            isolated=self.isolated,
            report=lambda message: report(Progress("bootstrapping", None, message)),
        )


class LocalWorkers:
    """The workers that `Local` launched."""

    def __init__(self, spec: WorkerSpec, device: str, image: Image, environment: Environment | None) -> None:
        self._spec = spec
        self._device = device
        self._image = image
        self._environment = environment
        self._workers: list[LocalWorker | None] = [None] * spec.world_size
        self._head_port = free_port()
        self._includes: Path | None = None
        self._server: ForkServer | None = None
        self._closed = False

    async def start(self, report: Report) -> None:
        """Starts every rank; concurrently, for loading torch takes its time."""
        paths = self._image.included_paths()
        if paths:
            self._includes = make_scratch("includes")
            for path in paths:
                (self._includes / path.name).symlink_to(path)
        report(Progress("bootstrapping", None, f"starting {_processes(self._spec.world_size)} on this machine"))
        if self._spec.world_size >= _MANY and can_fork(self._device):
            await self._start_server()
        await run_all_or_none(self._start_rank(rank, report) for rank in range(self._spec.world_size))

    async def _start_server(self) -> None:
        """Have a process import PyTorch once for all workers; where it cannot, each of them does."""
        variables = self._variables(0)
        del variables[POOL_VARIABLE]
        python = sys.executable if self._environment is None else self._environment.python
        starting = asyncio.create_task(asyncio.to_thread(ForkServer, python, variables))
        try:
            self._server = await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                self._server = await starting  # `close` ends it
            raise
        except OSError as error:
            logger.debug("skyproxy: each worker imports torch itself: %s", error)

    async def _start_rank(self, rank: int, report: Report) -> None:
        python = {} if self._environment is None else {"python": self._environment.python}
        worker = LocalWorker(
            self._device,
            SETTINGS,
            environment=self._variables(rank),
            wait=False,
            server=self._server,
            threads=shared_threads(),
            **python,
        )
        self._workers[rank] = worker
        await wait_for_worker(worker, self._spec.timeout_seconds, f"rank {rank}")
        report(
            Progress("running", rank // self._spec.procs_per_node, f"rank {rank} listens (process {worker.process_id})")
        )

    def _variables(self, rank: int) -> dict[str, str]:
        spec, procs = self._spec, self._spec.procs_per_node
        variables = worker_environment()
        search = [variables.get("PYTHONPATH", "")]
        if self._environment is not None and self._environment.search_path is not None:
            search = [self._environment.search_path]
            variables["PYTHONNOUSERSITE"] = "1"
        if self._includes is not None:
            search.insert(0, str(self._includes))
        variables["PYTHONPATH"] = os.pathsep.join(part for part in search if part)
        node, local_rank = divmod(rank, procs)
        devices = devices_of_node(spec.first_node + node, spec.of_nodes or spec.nodes) if self._device != "cpu" else []
        if devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        threads = _threads(spec)
        if threads is not None:
            variables.setdefault("OMP_NUM_THREADS", str(threads))
        variables |= {**self._image.env, **spec.env}
        info = InstanceInfo(
            node=node,
            total_nodes=spec.nodes,
            head_addr=_ADDRESS,
            head_port=self._head_port,
            accelerators=len(devices),
            peers=tuple(Peer(other, other // procs, _ADDRESS) for other in range(spec.world_size)),
            rank=rank,
            world_size=spec.world_size,
            local_rank=local_rank,
            procs_per_node=procs,
            job=spec.name,
        )
        variables[POOL_VARIABLE] = info.to_json()
        return variables

    @property
    def endpoints(self) -> list[Endpoint]:
        """The addresses where they listen, in the order of ranks."""
        return [self._endpoint(rank) for rank in range(self._spec.world_size)]

    def _endpoint(self, rank: int) -> Endpoint:
        worker = self._workers[rank]
        assert worker is not None
        node, local_rank = divmod(rank, self._spec.procs_per_node)
        return Endpoint(
            worker.url,
            worker.token,
            node,
            rank,
            local_rank,
            _ADDRESS,
            shares_files=True,
            explain_end=worker.explain_end,
        )

    def process_ids(self) -> list[int]:
        """The processes, in the order of ranks."""
        return [worker.process_id for worker in self._workers if worker is not None]

    async def logs(self, rank: int) -> str:
        """The end of what the process wrote to its standard error."""
        worker = self._workers[rank]
        return "" if worker is None else await asyncio.to_thread(worker.output)

    async def restart(self, rank: int) -> Endpoint:
        """Ends one process and starts it anew."""
        if self._closed:
            raise WorkerStartError(f"rank {rank} cannot be restarted: the workers of {self._spec.name} were closed.")
        worker = self._workers[rank]
        if worker is not None:
            await asyncio.to_thread(worker.stop)
        await self._start_rank(rank, lambda progress: None)
        return self._endpoint(rank)

    async def close(self) -> None:
        """Ends all processes; idempotent."""
        self._closed = True
        workers = [worker for worker in self._workers if worker is not None]
        await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in workers))
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
        if self._includes is not None:
            remove_scratch(self._includes)


def cache_folder() -> Path:
    """Return the folder in which skyproxy keeps what it can make again: SKYPROXY_CACHE, or skyproxy in the user's
    cache.
    """
    chosen = os.environ.get("SKYPROXY_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyproxy"


def free_port(address: str = _ADDRESS) -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def devices_of_node(node: int, nodes: int) -> list[str]:
    """The CUDA devices of this machine that stand for those of one node, as CUDA_VISIBLE_DEVICES names them.

    They are dealt out in order; where there are more nodes than devices, nodes share them.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = count_accelerators()
    names = [part.strip() for part in given.split(",")][:count] if given else [str(index) for index in range(count)]
    if not names:
        return []
    if nodes > len(names):
        return [names[node % len(names)]]
    return names[node * len(names) // nodes : (node + 1) * len(names) // nodes]


def _threads(spec: WorkerSpec) -> int | None:
    """Threads for one process: its share of what was asked for, or of the machine; None for torch's own choice."""
    cpus = spec.resources.get("cpu")
    if cpus is not None:
        amount = float(cpus[:-1]) / 1000 if cpus.endswith("m") else float(cpus)
        return max(1, int(amount / spec.procs_per_node))
    processes = (spec.of_nodes or spec.nodes) * spec.procs_per_node
    if processes == 1:
        return None
    return max(1, (os.cpu_count() or 1) // processes)


def _make_folder(name: str, path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the volume {name} is to be the folder {path} of this machine, and it cannot be made: {error.strerror}."
        ) from error


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"


async def wait_for_worker(worker: LocalWorker, timeout_seconds: float, name: str) -> None:
    """Wait for a worker that was started without waiting, and end it where the wait is cancelled.

    Raises:
        WorkerStartError: it ended, or did not listen in time; begins with its name.
    """
    waiting = asyncio.create_task(asyncio.to_thread(worker.wait_until_it_listens, timeout_seconds))
    try:
        await asyncio.shield(waiting)
    except asyncio.CancelledError:
        # Its end is what the thread waits for; without it the loop could not be closed.
        await asyncio.to_thread(worker.stop)
        with contextlib.suppress(WorkerStartError):
            await waiting
        raise
    except WorkerStartError as error:
        raise WorkerStartError(f"{name}: {error}") from None
