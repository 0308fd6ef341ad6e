"""The calls of a pool by methods: submit, run, broadcast, map and scripts under torchrun."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar, cast, overload

from skyproxy.errors import ConfigurationError
from skyproxy.functions.scripts import Script, describe_script, pack_for, run_script
from skyproxy.pools.actor_calls import ActorMethod
from skyproxy.pools.call_options import CallOptions, Retry
from skyproxy.pools.futures import PoolFuture
from skyproxy.pools.mapping import GroupingMap
from skyproxy.pools.pending import PendingCompute

if TYPE_CHECKING:
    from typing import Unpack

    from skyproxy.pools.growth import Nodes
    from skyproxy.pools.remote_function import RemoteFunction
    from skyproxy.pools.scheduler import Scheduler
    from skyproxy.providers.base import Endpoint, Launched, WorkerSpec

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")


class MapOptions(TypedDict, total=False):
    """Options of `map`.

    Attributes:
        timeout: seconds for each call.
        retry: as in `Compute`.
    """

    timeout: float | None
    retry: Retry | int | None


class PoolCalls:
    """Calls of a `Compute`, whose workers and scheduler these are."""

    if TYPE_CHECKING:
        _concurrency: int
        limits: Nodes | None

        @property
        def spec(self) -> WorkerSpec: ...
        @property
        def launched(self) -> Launched: ...
        @property
        def world_size(self) -> int: ...
        def want_nodes(self, count: int) -> None: ...
        def _running_scheduler(self) -> Scheduler: ...

    def submit_call(self, call: PendingCompute[T]) -> PoolFuture[T]:
        """Submit one call, as `call > pool` does."""
        return self._running_scheduler().submit(call)

    def broadcast_call(self, call: PendingCompute[T]) -> PoolFuture[list[T]]:
        """Make a call on every process, as `call @ pool` does, without waiting."""
        return self._running_scheduler().broadcast(call)

    def stream_call(self, call: PendingCompute[object]) -> Iterator[object]:
        """Stream the results of one call, as `call.stream(pool)` does."""
        return self._running_scheduler().stream(call)

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
        self, function: Callable[[A], PendingCompute[T]], a: Iterable[A], /, **options: Unpack[MapOptions]
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        function: Callable[[A, B], PendingCompute[T]],
        a: Iterable[A],
        b: Iterable[B],
        /,
        **options: Unpack[MapOptions],
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        function: Callable[[A, B, C], PendingCompute[T]],
        a: Iterable[A],
        b: Iterable[B],
        c: Iterable[C],
        /,
        **options: Unpack[MapOptions],
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        function: Callable[..., PendingCompute[T]],
        a: Iterable[object],
        b: Iterable[object],
        c: Iterable[object],
        d: Iterable[object],
        /,
        *more: Iterable[object],
        **options: Unpack[MapOptions],
    ) -> Iterator[T]: ...
    @overload
    def map(
        self, function: Callable[[A], Coroutine[object, object, T]], a: Iterable[A], /, **options: Unpack[MapOptions]
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        function: Callable[[A, B], Coroutine[object, object, T]],
        a: Iterable[A],
        b: Iterable[B],
        /,
        **options: Unpack[MapOptions],
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        function: Callable[[A, B, C], Coroutine[object, object, T]],
        a: Iterable[A],
        b: Iterable[B],
        c: Iterable[C],
        /,
        **options: Unpack[MapOptions],
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        function: Callable[..., Coroutine[object, object, T]],
        a: Iterable[object],
        b: Iterable[object],
        c: Iterable[object],
        d: Iterable[object],
        /,
        *more: Iterable[object],
        **options: Unpack[MapOptions],
    ) -> Iterator[T]: ...
    @overload
    def map(self, function: Callable[[A], T], a: Iterable[A], /, **options: Unpack[MapOptions]) -> Iterator[T]: ...
    @overload
    def map(
        self, function: Callable[[A, B], T], a: Iterable[A], b: Iterable[B], /, **options: Unpack[MapOptions]
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        function: Callable[[A, B, C], T],
        a: Iterable[A],
        b: Iterable[B],
        c: Iterable[C],
        /,
        **options: Unpack[MapOptions],
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        function: Callable[..., T],
        a: Iterable[object],
        b: Iterable[object],
        c: Iterable[object],
        d: Iterable[object],
        /,
        *more: Iterable[object],
        **options: Unpack[MapOptions],
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

        Calls that turn out to be short, with arguments and results of a few numbers or strings, travel together, up to
        64 at a time; where one of them then takes long, those behind it are made elsewhere. Calls with a timeout or
        with retries travel one by one.

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

        def make(args: tuple[object, ...]) -> PendingCompute[object]:
            call = _call(function, args, {})
            if timeout is not None:
                call = call.with_timeout(timeout)
            return call if rule is None else call.with_retry(rule)

        processes = scheduler.max_processes * self._concurrency
        return GroupingMap(scheduler, make, zip(*iterables), 2 * processes, processes).begin()

    def torchrun(
        self,
        script: str | os.PathLike[str],
        /,
        *args: object,
        nnodes: int | str | None = None,
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
            nnodes: how many nodes: "1:4" for a number that changes while the script runs, as nodes come and go; by
                default all of the pool, and as many as an elastic pool has at a time.
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
            ScriptError: the same where the number of nodes may change.

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
            nodes=nnodes,
        )
        self.run_torchrun(described, timeout)

    def script_endpoints(self) -> list[Endpoint]:
        """Return the first process of each node that is there."""
        busy, _ = self._running_scheduler().load()
        return [one for one in self.launched.endpoints if one.local_rank == 0 and one.rank in busy]

    def _script_limits(self, script: Script) -> tuple[int, int] | None:
        """The limits of the number of nodes that a script runs on, if it may change.

        Raises:
            ConfigurationError: the pool never has as many.
        """
        limits, own = script.nodes, self.limits
        if limits is None:
            return None if own is None else (max(1, own.minimum), own.maximum)
        if limits[0] > self.spec.nodes:
            raise ConfigurationError(
                f"nnodes={limits[0]}:{limits[1]}: this pool has at most {self.spec.nodes}. Give it more, or "
                "ask for less."
            )
        if own is None and limits == (self.spec.nodes, self.spec.nodes):
            return None
        return limits

    def run_torchrun(self, script: Script, timeout_seconds: float | None = None) -> None:
        """The second half of `torchrun`, for a script that was described before there was a pool."""
        shares_files = all(endpoint.shares_files for endpoint in self.launched.endpoints)
        limits = self._script_limits(script)
        packed = replace(pack_for(script, shares_files=shares_files), nodes=limits)
        if limits is not None:
            from skyproxy.pools.elastic_script import ElasticScript

            ElasticScript(self, packed, timeout_seconds, self.spec.timeout_seconds).run()
            return
        call: PendingCompute[None] = PendingCompute(
            run_script, (packed,), {}, CallOptions(timeout_seconds, debug=False), script.name
        )
        call.broadcast(self)


class OnNode:
    """A pool, seen from one of its nodes."""

    def __init__(self, pool: PoolCalls, rank: int) -> None:
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
    if isinstance(function, functools.partial) and hasattr(function.func, "__skyproxy_rewrap__"):
        return cast(PendingCompute[object], function(*args, **kwargs))
    name = function.__qualname__ if isinstance(function, ActorMethod) else getattr(function, "__name__", None)
    name = str(name or type(function).__name__)
    return PendingCompute(function, args, kwargs, CallOptions(), name)
