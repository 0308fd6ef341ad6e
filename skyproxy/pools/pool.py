"""A pool: workers that are provisioned together, and what runs on them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, SupportsIndex, TypeVar

from skyproxy.errors import ConfigurationError
from skyproxy.pools.actor_calls import ActorCalls
from skyproxy.pools.call_options import Retry, checked_callback, checked_flag
from skyproxy.pools.growth import Nodes
from skyproxy.pools.loop_thread import loop_thread
from skyproxy.pools.node_target import POOL_OF_NODE
from skyproxy.pools.pool_actors import PoolActors
from skyproxy.pools.pool_calls import OnNode, PoolCalls
from skyproxy.pools.pool_jobs import PoolJobs
from skyproxy.pools.progress_view import ProgressView
from skyproxy.pools.running import RUNNING, check_may_start, not_running_text
from skyproxy.pools.scheduler import Scheduler
from skyproxy.pools.specification import check_plugins, check_provider, transformed, worker_spec
from skyproxy.pools.workers import Workers
from skyproxy.providers.accelerators import Accelerator
from skyproxy.providers.base import Launched, Progress, Provider, Volume, WorkerSpec
from skyproxy.providers.image import Image
from skyproxy.runtime.instance import InstanceInfo
from skyproxy.runtime.plugin import Plugin, reporting

if TYPE_CHECKING:
    from typing import Unpack

    from skyproxy.kubernetes.resources import SpecFields
    from skyproxy.node import Node
    from skyproxy.pools.elastic_workers import ElasticWorkers

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("skyproxy")

_DEFAULT_TIMEOUT_SECONDS = 900.0


class Compute(PoolCalls, PoolActors, PoolJobs):
    """Workers, from the moment when somebody asks for them until they are gone. `ComputePool` is another name for it.

    `with Compute(...) as pool` gives the pool itself: `f(x) >> pool`, `f(x) @ pool`, `pool.map(f, xs)`.
    `async with Compute(...) as node` gives the `Node` of a single worker, and the pool where there are several.
    Workers that do not come up are taken back, as are all of them when the block ends, whichever way it does.

    Example:
        ```python
        @skyproxy.function
        def square(x: int) -> int:
            return x * x


        with skyproxy.Compute(provider=skyproxy.Local(), nodes=2) as pool:
            print(square(3) >> pool, square(4) @ pool)
        ```
    """

    def __init__(
        self,
        *,
        name: str | None = None,
        provider: Provider | None = None,
        accelerator: Accelerator | str | None = None,
        nodes: int | Nodes | None = None,
        procs_per_node: int | str = 1,
        vcpus: float | None = None,
        memory_gb: float | None = None,
        resources: Mapping[str, object] | None = None,
        image: Image | str | None = None,
        plugins: Sequence[Plugin] = (),
        volumes: Sequence[Volume | Mapping[str, object]] = (),
        env: Mapping[str, object] | None = None,
        concurrency: int = 1,
        retry: Retry | int | None = None,
        timeout: float | str = _DEFAULT_TIMEOUT_SECONDS,
        idle_timeout: float | str | None = None,
        max_lifetime: float | str | None = None,
        keep: bool = False,
        on_event: Callable[[Progress], object] | None = None,
        progress: bool | None = None,
        **options: Unpack[SpecFields],
    ) -> None:
        """Checks what is asked for; nothing is provisioned before the `with` block, or `start`.

        Args:
            name: of the workers; made up by default.
            provider: where they run: Local(), Container(), Kubernetes(), Remote([...]), AWS(...). By default what
                SKYPROXY_PROVIDER or the saved context says, else this machine.
            accelerator: of each node: "A100", "A100:8" or an `Accelerator`.
            nodes: machines; one by default, or as many as Remote([...]) has. `Nodes(1, 8)`: as many as the queue needs.
            procs_per_node: processes on each; every process is a rank. "gpu": one for each GPU.
            vcpus: of each node.
            memory_gb: of each node, in GiB.
            resources: the same as quantities of Kubernetes: {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}.
            image: the software: an `Image`, or the name of a container image.
            plugins: what is set up on the workers: plugins.torch(), ...
            volumes: storage: [{"name": "cache", "storage": "10Gi", "path": "/cache"}].
            env: variables of the worker processes.
            concurrency: single calls that one process runs at a time.
            retry: when a single call is made once more: a number of times for lost workers, or a `Retry`.
            timeout: how long it may take until all workers run, in seconds or as "15m". Calls have no limit of their
                own.
            idle_timeout: after how long without work the provider takes the workers away.
            max_lifetime: after how long it does in any case.
            keep: whether the workers stay at the end, and are found again by their name.
            on_event: called with every `Progress`, on a thread of the pool.
            progress: whether to draw the progress; by default on a terminal.
            options: what only one provider knows. Type checkers know the fields of a Compute's spec: tolerations=[...].

        Raises:
            ConfigurationError: an argument cannot work.
        """
        if type(concurrency) is not int or concurrency < 1:
            raise ConfigurationError(f"concurrency={concurrency!r}: a process runs one call at a time or more.")
        self.limits = nodes if isinstance(nodes, Nodes) else None
        if self.limits is not None:
            nodes = self.limits.maximum
        self._asked: dict[str, Any] = {
            "name": name,
            "nodes": nodes,
            "procs_per_node": procs_per_node,
            "accelerator": accelerator,
            "vcpus": vcpus,
            "memory_gb": memory_gb,
            "resources": resources,
            "image": image,
            "volumes": volumes,
            "env": env,
            "timeout": timeout,
            "idle_timeout": idle_timeout,
            "max_lifetime": max_lifetime,
            "keep": keep,
            "options": options,
        }
        # Said now, where it was written; the provider may still have a say in procs_per_node="gpu".
        checked = {"nodes": 1 if nodes is None else nodes}
        if procs_per_node == "gpu":
            checked["procs_per_node"] = 1
        worker_spec(**self._asked | checked, local=False)
        check_plugins(plugins)
        check_provider(provider)
        self.plugins = tuple(plugins)
        self._provider = provider
        self._concurrency = concurrency
        self._retry = Retry.parse(retry)
        self._on_event = checked_callback("on_event", on_event)
        self._progress = checked_flag("progress", progress)
        self._workers: Workers | ElasticWorkers | None = None
        self._scheduler: Scheduler | None = None
        self._hooks = contextlib.ExitStack()
        self._starting = False
        self._actors: weakref.WeakSet[ActorCalls] = weakref.WeakSet()

    # --- its life -----------------------------------------------------------------------------------------------------

    def start(self) -> Compute:
        """Provisions the workers and waits until they run; an interrupt takes back what was begun. Then call `close`.

        Raises:
            ConfigurationError: the provider cannot give what is asked for.
            WorkerStartError: they did not come up, or not in time; with the reason.
            ConnectError: they cannot be reached.
            RankErrors: a plugin failed on some of them.

        Example:
            ```python
            pool = skyproxy.Compute(provider=skyproxy.Local()).start()
            try:
                print(pool.run(pow, 2, 10))
            finally:
                pool.close()
            ```
        """
        loop_thread().run(self.provision())
        try:
            self.enter_client_hooks()
        except BaseException:
            self.close()
            raise
        return self

    async def start_async(self) -> Compute:
        """The same without blocking the event loop; cancelling it takes back what was begun.

        Example:
            ```python
            async def main() -> None:
                pool = await skyproxy.Compute(provider=skyproxy.Local()).start_async()
                try:
                    print(await pool.submit(pow, 2, 10))
                finally:
                    await pool.close_async()


            asyncio.run(main())
            ```
        """
        await self.provision()
        try:
            self.enter_client_hooks()
        except BaseException:
            await self.close_async()
            raise
        return self

    async def provision(self) -> None:
        """The first half of `start`: everything but the plugins' hooks on the client."""
        with self._only_once(), self._view() as report:
            self._begin(await loop_thread().run_async(self._launch(report)))

    def enter_client_hooks(self) -> None:
        """The second half; on the thread of the one who uses the pool. The pool must be closed where it fails."""
        for plugin in self.plugins:
            if callable(getattr(plugin, "around_client", None)):
                with reporting(plugin, "around_client"):
                    self._hooks.enter_context(plugin.around_client(self))

    @contextlib.contextmanager
    def _only_once(self) -> Iterator[None]:
        if self._starting or self._workers is not None:
            raise ConfigurationError("this pool is already running. For another one make another Compute(...).")
        check_may_start()
        self._starting = True
        try:
            yield
        finally:
            self._starting = False

    @contextlib.contextmanager
    def _view(self) -> Iterator[Callable[[Progress], None]]:
        count = self.limits or self._asked["nodes"] or 1
        title = f"{self._asked['name'] or 'compute'}: {count} node{'s' * (count != 1)}"
        with ProgressView(title, self._progress) as view:

            def report(progress: Progress) -> None:
                view.report(progress)  # an elastic pool goes on to report when the view is closed: to the log
                if self._on_event is not None:
                    try:
                        self._on_event(progress)
                    except Exception:
                        logger.exception("on_event failed; the workers are not to blame")

            yield report

    async def _launch(self, report: Callable[[Progress], None]) -> Workers | ElasticWorkers:
        provider = self._provider
        if provider is None:
            from skyproxy.providers.choice import default_provider

            provider = default_provider()
        nodes = self._asked["nodes"]
        if nodes is None:
            per_node = self._asked["procs_per_node"]
            nodes = max(1, getattr(provider, "process_count", 1) // (per_node if isinstance(per_node, int) else 1))
        spec = worker_spec(**self._asked | {"nodes": nodes}, local=provider.name == "local")
        spec = transformed(spec, self.plugins)
        if self.limits is None:
            return await Workers.launch(provider, spec, self.plugins, report)
        from skyproxy.pools.elastic_workers import ElasticWorkers  # late, for this loads torch

        return await ElasticWorkers.launch(provider, spec, self.limits, self.plugins, report, self._concurrency)

    def _begin(self, workers: Workers | ElasticWorkers) -> None:
        self._workers = workers
        if isinstance(workers, Workers):
            self._scheduler = Scheduler(workers.group, concurrency=self._concurrency, retry=self._retry)
            POOL_OF_NODE.update(dict.fromkeys(workers.group.nodes, self))
        else:
            self._scheduler = workers.begin(
                self._concurrency,
                self._retry,
                is_held=lambda rank: self._has_actors(rank) or self._has_jobs(rank),
                on_node=self._take_in,
            )
        RUNNING.add(self)

    def _take_in(self, node: Node) -> None:
        POOL_OF_NODE[node] = self

    def close(self) -> None:
        """Cancels what still runs and takes the workers away, unless they are to be kept. Idempotent.

        Example:
            ```python
            pool = skyproxy.Compute(provider=skyproxy.Local()).start()
            pool.close()
            ```
        """
        workers = self._end()
        if workers is not None:
            loop_thread().finish(workers.close())

    async def close_async(self) -> None:
        """The same without blocking the event loop.

        Example:
            ```python
            async def main() -> None:
                pool = await skyproxy.Compute(provider=skyproxy.Local()).start_async()
                await pool.close_async()


            asyncio.run(main())
            ```
        """
        workers = self._end()
        if workers is not None:
            closing = asyncio.ensure_future(loop_thread().run_async(workers.close()))
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                # Workers that nobody ends cost money: the cancelled one waits for this.
                await closing
                raise

    def _end(self) -> Workers | ElasticWorkers | None:
        workers, self._workers = self._workers, None
        scheduler, self._scheduler = self._scheduler, None
        RUNNING.discard(self)
        try:
            self._hooks.close()
        finally:
            for calls in list(self._actors):
                calls.close()
            self._actors.clear()
            if scheduler is not None:
                scheduler.close()
        if workers is not None:
            for node in workers.group.members.values():
                POOL_OF_NODE.pop(node, None)
        return workers

    def abandon_in_child(self) -> object:
        """After a fork, in the child: it runs in the parent alone. Return what must not be let go of here."""
        kept = self._workers, self._hooks, [one for one in (self._scheduler, *self._actors) if one is not None]
        for scheduler in kept[2]:
            scheduler.abandon_in_child()
        self._workers = self._scheduler = None
        self._hooks, self._actors = contextlib.ExitStack(), weakref.WeakSet()
        return kept

    def __enter__(self) -> Compute:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Any:
        await self.start_async()
        return self.node_or_pool

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close_async()

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def spec(self) -> WorkerSpec:
        """Return what the provider was asked for."""
        return self._running_workers().spec

    @property
    def launched(self) -> Launched:
        """Return what the provider gave."""
        return self._running_workers().launched

    @property
    def nodes(self) -> list[Node]:
        """The connections to all processes, by rank; of an elastic pool, to those that are there at this moment."""
        return list(self._members().values())

    def want_nodes(self, count: int) -> None:
        """Have an elastic pool keep so many nodes, whatever its queue says; 0 leaves that to the queue again."""
        workers = self._running_workers()
        if not isinstance(workers, Workers):
            workers.membership.want(count)

    @property
    def ranks(self) -> list[int]:
        """The ranks that are there. Those of an elastic pool may have gaps: a process keeps its own while it lives."""
        return list(self._members())

    def rank_of(self, node: Node) -> int:
        """Return the rank of one of the pool's nodes.

        Raises:
            ConfigurationError: it is not, or no longer, one of them.

        Example:
            ```python
            assert pool.rank_of(pool.nodes[1]) == 1
            ```
        """
        for rank, other in self._members().items():
            if other is node:
                return rank
        raise ConfigurationError(f"{node!r} is not a node of this pool.")

    @property
    def node_or_pool(self) -> Node | Compute:
        """The node of a pool that has a single process for all its life; else the pool."""
        return self.nodes[0] if self.limits is None and self.world_size == 1 else self

    def rank_info(self, rank: int) -> InstanceInfo:
        """Return the place of a rank, as `instance_info()` tells it there.

        Example:
            ```python
            print(pool.rank_info(0).head_addr)
            ```
        """
        place: Any = self._running_workers().group.context(rank)["pool"]
        return InstanceInfo.from_mapping(place)

    @property
    def world_size(self) -> int:
        """Processes: nodes times procs_per_node; of an elastic pool, those that are there at this moment."""
        return len(self._members())

    def logs(self, rank: int = 0) -> str:
        """The end of what a worker process itself wrote, apart from the output of functions.

        Example:
            ```python
            print(pool.logs(rank=1))
            ```
        """
        return loop_thread().run(self.launched.logs(rank))

    def status(self) -> dict[str, object]:
        """Return what the pool does, as plain data: "name", calls "waiting", and a row for each of "ranks".

        Example:
            ```python
            print(pool.status()["waiting"])
            ```
        """
        busy, waiting = self._running_scheduler().load()
        ranks = [
            {"rank": rank, "worker": n.url, "state": "connected" if n.alive else "lost", "busy": busy.get(rank, 0)}
            for rank, n in self._members().items()
        ]
        return {"name": self.spec.name, "waiting": waiting, "ranks": ranks}

    def _members(self) -> Mapping[int, Node]:
        """The processes that calls can run on, by rank."""
        members = self._running_workers().group.members
        if self.limits is None:
            return members
        busy, _ = self._running_scheduler().load()  # a process that has just come is in the group first
        return {rank: members[rank] for rank in busy if rank in members}

    def _running_workers(self) -> Workers | ElasticWorkers:
        if self._workers is None:
            raise ConfigurationError(not_running_text())
        return self._workers

    def __repr__(self) -> str:
        if self._workers is None:
            return f"<Compute {self._asked['name'] or 'without a name'}, not running>"
        spec = self._workers.spec
        return f"<Compute {spec.name}: {self.limits or spec.nodes} nodes, {self.world_size} processes>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ConfigurationError(
            f"{self!r} belongs to this program, and cannot be sent to a worker. Make calls here, and pass their "
            "results; or give the function a pool of its own: with Compute(...) as pool, inside of it."
        )

    # --- places -------------------------------------------------------------------------------------------------------

    def on_node(self, node: Node) -> OnNode:
        """The pool as a place for calls that are to run on one of its nodes.

        Example:
            ```python
            print(square(3) >> pool.on_node(pool.nodes[1]))
            ```
        """
        return OnNode(self, self.rank_of(node))

    def _running_scheduler(self) -> Scheduler:
        self._running_workers()
        assert self._scheduler is not None
        return self._scheduler


ComputePool = Compute
