"""A pool: workers that are provisioned together, and what runs on them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast, overload

from skyproxy.errors import ConfigurationError
from skyproxy.functions.scripts import Script, describe_script, packed_for, run_script
from skyproxy.pools.actor_calls import ActorCalls, ActorMethod, ActorOptions
from skyproxy.pools.actor_place import new_place
from skyproxy.pools.call_options import CallOptions, Retry
from skyproxy.pools.futures import PoolFuture
from skyproxy.pools.loop_thread import loop_thread
from skyproxy.pools.node_target import POOL_OF_NODE
from skyproxy.pools.pending import PendingCompute
from skyproxy.pools.progress_view import ProgressView
from skyproxy.pools.scheduler import Scheduler
from skyproxy.pools.specification import transformed, worker_spec
from skyproxy.pools.workers import Workers
from skyproxy.providers.accelerators import Accelerator
from skyproxy.providers.base import Launched, Progress, Provider, Volume, WorkerSpec
from skyproxy.providers.image import Image
from skyproxy.runtime.plugin import Plugin, reporting

if TYPE_CHECKING:
    from skyproxy.nodes import Node
    from skyproxy.pools.remote_function import RemoteFunction

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("skyproxy")

_DEFAULT_TIMEOUT_SECONDS = 900.0


class Compute:
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
        nodes: int | None = None,
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
        **options: object,
    ) -> None:
        """Checks what is asked for; nothing is provisioned before the `with` block, or `start`.

        Args:
            name: of the workers; made up by default.
            provider: where they run: Local(), Container(), Kubernetes(), Remote([...]), AWS(...). By default what
                SKYPROXY_PROVIDER or the saved context says, else this machine.
            accelerator: of each node: "A100", "A100:8" or an `Accelerator`.
            nodes: machines; one by default, or as many as Remote([...]) has.
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
            options: what only one provider knows.

        Raises:
            ConfigurationError: an argument cannot work.
        """
        if type(concurrency) is not int or concurrency < 1:
            raise ConfigurationError(f"concurrency={concurrency!r}: a process runs one call at a time or more.")
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
        self.plugins = tuple(plugins)
        self._provider = provider
        self._concurrency = concurrency
        self._retry = Retry.parse(retry)
        self._on_event = on_event
        self._progress = progress
        self._workers: Workers | None = None
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
        self._starting = True
        try:
            yield
        finally:
            self._starting = False

    @contextlib.contextmanager
    def _view(self) -> Iterator[Callable[[Progress], None]]:
        asked = self._asked
        count = asked["nodes"] or 1
        title = f"{asked['name'] or 'compute'}: {count} node{'s' * (count != 1)}"
        with ProgressView(title, self._progress) as view:

            def report(progress: Progress) -> None:
                view.report(progress)
                if self._on_event is not None:
                    try:
                        self._on_event(progress)
                    except Exception:
                        logger.exception("on_event failed; the workers are not to blame")

            yield report

    async def _launch(self, report: Callable[[Progress], None]) -> Workers:
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
        return await Workers.launch(provider, spec, self.plugins, report)

    def _begin(self, workers: Workers) -> None:
        self._workers = workers
        self._scheduler = Scheduler(workers.group, concurrency=self._concurrency, retry=self._retry)
        for node in workers.group.nodes:
            POOL_OF_NODE[node] = self
        _running.add(self)

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

    def _end(self) -> Workers | None:
        workers, self._workers = self._workers, None
        scheduler, self._scheduler = self._scheduler, None
        _running.discard(self)
        try:
            self._hooks.close()
        finally:
            for calls in list(self._actors):
                calls.close()
            self._actors.clear()
            if scheduler is not None:
                scheduler.close()
        if workers is not None:
            for node in workers.group.nodes:
                POOL_OF_NODE.pop(node, None)
        return workers

    def __enter__(self) -> Compute:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Any:
        await self.start_async()
        return self.nodes[0] if self.world_size == 1 else self

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
        """The connections to all processes, by rank."""
        return cast("list[Node]", list(self._running_workers().group.nodes))

    @property
    def world_size(self) -> int:
        """Processes: nodes times procs_per_node."""
        return self._running_workers().spec.world_size

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
            {"rank": rank, "worker": node.url, "state": "connected" if node.alive else "lost", "busy": busy[rank]}
            for rank, node in enumerate(self.nodes)
        ]
        return {"name": self.spec.name, "waiting": waiting, "ranks": ranks}

    def _running_workers(self) -> Workers:
        if self._workers is None:
            raise ConfigurationError(
                "this pool is not running. Use it inside its `with` block, or call start() before."
            )
        return self._workers

    def __repr__(self) -> str:
        if self._workers is None:
            return f"<Compute {self._asked['name'] or ''}, not running>"
        spec = self._workers.spec
        return f"<Compute {spec.name}: {spec.nodes} nodes, {spec.world_size} processes>"

    # --- calls --------------------------------------------------------------------------------------------------------

    def submit_call(self, call: PendingCompute[T]) -> PoolFuture[T]:
        """Submit one call, as `call > pool` does."""
        return self._running_scheduler().submit(call)

    def broadcast_call(self, call: PendingCompute[T]) -> PoolFuture[list[T]]:
        """Make a call on every process, as `call @ pool` does, without waiting."""
        return self._running_scheduler().broadcast(call)

    def stream_call(self, call: PendingCompute[object]) -> Iterator[object]:
        """Stream the results of one call, as `call.stream(pool)` does."""
        return self._running_scheduler().stream(call)

    def add_actor(
        self,
        kind: type,
        options: ActorOptions,
        rank: int | None,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> ActorCalls:
        """Return the queue of a new actor, whose first call makes it: the first step of `kind.on(pool)(*args,
        **kwargs)`.
        """
        group = self._running_workers().group
        loads = [0] * len(group.nodes)
        for calls in list(self._actors):
            loads[calls.place.rank] += calls.is_open
        place = new_place(group, kind, rank, loads, (args, kwargs), options.max_restarts)
        calls = ActorCalls(place, options)
        self._actors.add(calls)
        return calls

    def on_node(self, node: Node) -> _OnNode:
        """The pool as a place for calls that are to run on one of its nodes.

        Example:
            ```python
            print(square(3) >> pool.on_node(pool.nodes[1]))
            ```
        """
        return _OnNode(self, self._running_workers().group.nodes.index(node))

    @overload
    def submit(self, function: RemoteFunction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> PoolFuture[T]: ...
    @overload
    def submit(
        self, function: Callable[P, Coroutine[object, object, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> PoolFuture[T]: ...
    @overload
    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> PoolFuture[T]: ...
    def submit(self, function: Callable[..., object], /, *args: object, **kwargs: object) -> PoolFuture[Any]:
        """Calls any function, decorated or not, on a process that is free; as `concurrent.futures.Executor.submit`.

        Example:
            ```python
            future = pool.submit(pow, 2, 10)
            print(future.result())  # 1024
            ```
        """
        return self.submit_call(_call(function, args, kwargs))

    @overload
    def run(self, function: RemoteFunction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def run(self, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def run(self, function: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        """The same, and waits for the result.

        Example:
            ```python
            print(pool.run(pow, 2, 10))  # 1024
            ```
        """
        return _call(function, args, kwargs).run(self)

    @overload
    def broadcast(self, function: RemoteFunction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    @overload
    def broadcast(
        self, function: Callable[P, Coroutine[object, object, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]: ...
    @overload
    def broadcast(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    def broadcast(self, function: Callable[..., object], /, *args: object, **kwargs: object) -> list[Any]:
        """Calls any function on all processes and waits for the results, by rank.

        Example:
            ```python
            print(pool.broadcast(pow, 2, 10))  # with two processes: [1024, 1024]
            ```
        """
        return _call(function, args, kwargs).broadcast(self)

    @overload
    def map(
        self,
        function: RemoteFunction[Concatenate[A, ...], T],
        items: Iterable[A],
        /,
        *,
        timeout: float | None = None,
        retry: Retry | int | None = None,
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        function: RemoteFunction[..., T],
        first: Iterable[object],
        second: Iterable[object],
        /,
        *iterables: Iterable[object],
        timeout: float | None = None,
        retry: Retry | int | None = None,
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        function: Callable[[A], T],
        items: Iterable[A],
        /,
        *,
        timeout: float | None = None,
        retry: Retry | int | None = None,
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        function: Callable[..., T],
        first: Iterable[object],
        second: Iterable[object],
        /,
        *iterables: Iterable[object],
        timeout: float | None = None,
        retry: Retry | int | None = None,
    ) -> Iterator[T]: ...
    def map(
        self,
        function: Callable[..., object],
        /,
        *iterables: Iterable[object],
        timeout: float | None = None,
        retry: Retry | int | None = None,
    ) -> Iterator[object]:
        """The results of a function for every item, in the order of the items.

        A few calls a process are under way at a time, so that the items may be endless; the first ones are made at
        once. The first failure is raised in its place, and ends the others, as dropping the iterator does.

        Args:
            function: decorated or not.
            iterables: one for each parameter; the shortest ends it.
            timeout: seconds for each call.
            retry: as in `Compute`.

        Example:
            ```python
            for result in pool.map(square, range(4)):
                print(result)  # 0, 1, 4, 9
            ```
        """
        scheduler = self._running_scheduler()
        rule = Retry.parse(retry)

        def submit(args: tuple[object, ...]) -> PoolFuture[object]:
            call = _call(function, args, {})
            if timeout is not None:
                call = call.with_timeout(timeout)
            return scheduler.submit(call if rule is None else call.with_retry(rule))

        items = zip(*iterables)
        ahead = 2 * self.world_size * self._concurrency
        begun = deque(submit(args) for args in itertools.islice(items, ahead))

        def results() -> Iterator[object]:
            try:
                while begun:
                    value = begun[0].wait()
                    begun.popleft()
                    for args in itertools.islice(items, 1):
                        begun.append(submit(args))
                    yield value
            finally:
                for future in begun:
                    future.cancel()

        return results()

    def torchrun(
        self,
        script: str | os.PathLike[str],
        /,
        *args: object,
        nproc_per_node: int | str | None = None,
        max_restarts: int = 0,
        module: bool = False,
        env: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Runs an unchanged script for torchrun on all nodes, and waits for its end.

        On each node an agent of PyTorch's own launcher starts the processes, which find torchrun's environment: RANK,
        WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on; `instance_info()` knows their place, too. What they print is
        printed here. An interrupt ends them all: they are sent SIGTERM, and ten seconds later they are killed.

        Nodes that do not see this machine's folders get copies of the script, of the modules beside it, and of small
        texts in their packages. They import this program's own modules as functions do.

        Args:
            script: its file; with `module` a module's name.
            args: what follows it on the command line.
            nproc_per_node: processes on each node: a number, "gpu" (one for each GPU), "cpu" or "auto"; by default the
                pool's procs_per_node.
            max_restarts: how often all processes are started again when one fails. The script then finds what it has
                saved before, as TORCHELASTIC_RESTART_COUNT tells it.
            module: whether `script` is started as `python -m` does, from the working directory.
            env: further environment variables.
            timeout: seconds for all of it; none by default.

        Raises:
            ConfigurationError: there is no such script, or a number cannot be meant.
            RankErrors: it failed on a node; each exception is a `ScriptError` that names the processes.

        Example:
            ```python
            with skyproxy.Compute(provider=skyproxy.Local(), nodes=2) as pool:
                pool.torchrun("train.py", "--epochs", 3, nproc_per_node=2)
            ```
        """
        described = describe_script(
            script,
            args,
            is_module=module,
            procs_per_node=self.spec.procs_per_node if nproc_per_node is None else nproc_per_node,
            max_restarts=max_restarts,
            env=env,
        )
        self.run_torchrun(described, timeout)

    def run_torchrun(self, script: Script, timeout_seconds: float | None = None) -> None:
        """The second half of `torchrun`, for a script that was described before there was a pool."""
        shares_files = all(endpoint.shares_files for endpoint in self.launched.endpoints)
        packed = packed_for(script, shares_files=shares_files)
        call: PendingCompute[None] = PendingCompute(
            run_script, (packed,), {}, CallOptions(timeout_seconds), script.name
        )
        call.broadcast(self)

    def _running_scheduler(self) -> Scheduler:
        self._running_workers()
        assert self._scheduler is not None
        return self._scheduler


ComputePool = Compute


class _OnNode:
    """A pool, seen from one of its nodes."""

    def __init__(self, pool: Compute, rank: int) -> None:
        self._pool = pool
        self._rank = rank

    def submit_call(self, call: PendingCompute[object]) -> PoolFuture[object]:
        return self._pool.submit_call(call.on(self._rank))

    def broadcast_call(self, call: PendingCompute[object]) -> PoolFuture[list[object]]:
        if self._pool.world_size > 1:
            raise ConfigurationError("`@` runs on all processes of a pool, and this is one of its nodes. Use `@ pool`.")
        return self._pool.broadcast_call(call)

    def stream_call(self, call: PendingCompute[object]) -> Iterator[object]:
        return self._pool.stream_call(call.on(self._rank))


def _call(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> PendingCompute[object]:
    if hasattr(function, "__skyproxy_rewrap__"):
        return cast(PendingCompute[object], function(*args, **kwargs))
    if isinstance(function, PendingCompute):
        raise TypeError(
            f"{function!r} is already a call. Use call.submit(pool), or pass the function and its arguments."
        )
    name = function.__qualname__ if isinstance(function, ActorMethod) else getattr(function, "__name__", None)
    name = str(name or type(function).__name__)
    return PendingCompute(function, args, kwargs, CallOptions(), name)


# Strong on purpose: a pool that a program forgets still has workers, and they may cost money.
_running: set[Compute] = set()


def running_pools() -> list[Compute]:
    """Return the pools of this program whose workers run."""
    return list(_running)


def _close_all() -> None:
    for pool in list(_running):
        try:
            pool.close()
        except Exception:
            logger.exception("a pool could not be closed")


def _when_the_program_ends(close: Callable[[], None]) -> None:
    """Call `close` when the main thread has ended, and while threads can still be used.

    Handlers of `atexit` come too late: executors take no work any more, and closing a pool needs them. `threading`
    calls in reverse order, so what executors registered at their import comes after us.
    """
    import concurrent.futures.thread  # noqa: F401 - registers its own end first

    register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
    register(close)


_when_the_program_ends(_close_all)
