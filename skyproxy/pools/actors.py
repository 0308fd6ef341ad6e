"""Actors: objects that live on a pool, whose state stays there, and whose methods are calls."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, cast, overload

from skyproxy.errors import ConfigurationError
from skyproxy.payloads.sent_actors import find_handle, is_method, no_method
from skyproxy.pools.actor_calls import ActorCalls, ActorMethod, ActorOptions
from skyproxy.pools.call_options import CallOptions, On, checked_flag, checked_rank, checked_timeout
from skyproxy.pools.futures import PoolFuture, gather_futures
from skyproxy.pools.node_target import POOL_OF_NODE
from skyproxy.pools.pending import PendingCompute, warn_in_a_loop

if TYPE_CHECKING:
    from skyproxy.node import Node
    from skyproxy.pools.pool import Compute

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
C = TypeVar("C", bound=type)

_OPTIONS = "__skyproxy_actor__"


class Actor:
    """A base for classes whose objects live on a pool.

    `Model.on(pool)(args)` makes one there. What comes back has the methods of the class, which run there, one at a
    time, in the order of the calls. `Model(args)` is an ordinary object, here.

    Example:
        ```python
        class Counter(skyproxy.Actor):
            def __init__(self, start: int) -> None:
                self.count = start

            def add(self, amount: int) -> int:
                self.count += amount
                return self.count


        with skyproxy.Compute(provider=skyproxy.Local()) as pool:
            counter = Counter.on(pool)(10)
            print(counter.add(1), counter.add(2))  # 11 13
            print(pool.submit(counter.add, 3).result())  # 16
        ```
    """

    @classmethod
    def on(cls: Callable[P, S], target: Compute | Node, *, rank: On = None) -> Placement[P, S]:
        """Name the place for an object of this class: on a pool, or on one of its nodes.

        Args:
            target: a running pool, or one of its nodes.
            rank: a number from 0, or "head"; by default where its tensor arguments are, or the fewest actors.

        Example:
            ```python
            adder = Adder.on(pool, rank=1)()
            print(adder.add(1, 2))
            ```
        """
        return _on(cls, target, rank=rank)

    @classmethod
    def on_all(cls: Callable[P, S], target: Compute | Node) -> Placement[P, ActorGroup[S]]:
        """The same for one object on each rank.

        Example:
            ```python
            group = Adder.on_all(pool)()
            print(group[1].add(1, 2))
            ```
        """
        return _on_all(cls, target)


@overload
def actor(target: C, /) -> C: ...
@overload
def actor(
    *,
    max_restarts: int = 0,
    retry: bool = False,
    timeout: float | None = None,
    remote: bool = False,
    concurrency: int = 1,
) -> Callable[[C], C]: ...
def actor(
    target: object = None,
    /,
    *,
    max_restarts: int = 0,
    retry: bool = False,
    timeout: float | None = None,
    remote: bool = False,
    concurrency: int = 1,
) -> Any:
    """A decorator for classes, bare or with options: their objects can live on a pool, see `Actor`.

    It gives a class `on` and `on_all` where it does not derive from `Actor`; type checkers see them only there.

    Args:
        target: the class.
        max_restarts: how often an actor whose process died is made again, from the arguments that it was made of.
        retry: whether calls that ran or waited when it died are then made again; they may run twice. Else they raise
            ActorDiedError.
        timeout: how many seconds each call may run; forever by default.
        remote: whether tensors in results stay on the worker.
        concurrency: calls of one actor that run at a time; with more than one, only their beginnings are in order.

    Raises:
        ConfigurationError: this is not a class, or an option cannot work.

    Example:
        ```python
        @skyproxy.actor(max_restarts=2, retry=True)
        class Squares(skyproxy.Actor):
            def of(self, x: int) -> int:
                return x * x


        with skyproxy.Compute(provider=skyproxy.Local()) as pool:
            print(Squares.on(pool)().of(3))
        ```
    """
    if type(max_restarts) is not int or max_restarts < 0:
        raise ConfigurationError(f"max_restarts={max_restarts!r}: use 0 or more.")
    if type(concurrency) is not int or concurrency < 1:
        raise ConfigurationError(f"concurrency={concurrency!r}: an actor runs one call at a time or more.")
    timeout, remote = checked_timeout(timeout), bool(checked_flag("remote", remote))
    if retry and not max_restarts:
        raise ConfigurationError("retry=True needs an actor that is recreated. Say how often: max_restarts=1.")
    options = ActorOptions(max_restarts, retry, timeout, remote, concurrency)

    def decorate(target: object) -> object:
        if not isinstance(target, type):
            raise ConfigurationError(
                f"@actor decorates classes, not {target!r}. For a function use @compute; options have names: "
                "@actor(max_restarts=1)."
            )
        setattr(target, _OPTIONS, options)
        if not issubclass(target, Actor):
            for name, function in (("on", _on), ("on_all", _on_all)):
                if inspect.getattr_static(target, name, None) is not None:
                    raise ConfigurationError(
                        f"@actor gives {target.__name__} a method {name}(), and it already has one."
                    )
                setattr(target, name, classmethod(function))
        return target

    return decorate if target is None else decorate(target)


class Placement(Generic[P, S]):
    """The place where an actor is to be made; called with the arguments of its class, it makes it."""

    def __init__(self, make: Callable[[tuple[object, ...], dict[str, object]], PoolFuture[S]], name: str) -> None:
        self._make = make
        self._name = name

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> S:
        """Makes the actor, and waits until it is there.

        Raises:
            Exception: whatever its class raises.
        """
        warn_in_a_loop(f"{self._name}.on(pool)()")
        return self._make(args, kwargs).wait()

    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> PoolFuture[S]:
        """A future of the actor, to be awaited or waited for."""
        return self._make(args, kwargs)


class _ActorHandle:
    """The stand-in here for an object on a worker: its methods, and nothing else."""

    def __init__(self, kind: type, calls: ActorCalls) -> None:
        self.__dict__.update(_sky_kind=kind, _sky_calls=calls)
        # The pool ends its actors by itself, and at the end of the program nobody is there to be told.
        weakref.finalize(self, calls.retire).atexit = False

    def __getattr__(self, name: str) -> Any:
        kind: type = self.__dict__["_sky_kind"]
        if name.startswith("__") or not is_method(inspect.getattr_static(kind, name, None)):
            raise no_method(self, kind, name)
        return _method(self, name)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        kind: type = self.__dict__["_sky_kind"]
        raise AttributeError(
            f"{name} cannot be set: the attributes of the actor {kind.__name__} live on the worker; write a method."
        )

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        kind: type = self.__dict__["_sky_kind"]
        if not is_method(inspect.getattr_static(kind, "__call__", None)):
            raise TypeError(f"the actor {kind.__name__} cannot be called; its methods can.")
        return _method(self, "__call__")(*args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        calls: ActorCalls = self.__dict__["_sky_calls"]
        calls.keep(self)
        return find_handle, (self.__dict__["_sky_kind"], calls.place.identity)

    def __repr__(self) -> str:
        calls: ActorCalls = self.__dict__["_sky_calls"]
        return f"<{calls.place}>"


def _method(handle: _ActorHandle, name: str) -> ActorMethod:
    kind: type = handle.__dict__["_sky_kind"]
    member = inspect.getattr_static(kind, name)
    function: Callable[..., object]
    if isinstance(member, staticmethod | classmethod):
        function = getattr(kind, name)
    elif isinstance(member, functools.partialmethod | functools.singledispatchmethod):
        function = types.MethodType(getattr(kind, name), handle)
    else:
        function = types.MethodType(getattr(member, "function", member), handle)  # below @compute, if that is there
    return ActorMethod(handle, handle.__dict__["_sky_calls"], name, function)


class ActorGroup(Generic[S]):
    """An actor on each rank: `group[rank]` is one of them.

    Example:
        ```python
        class Adder(skyproxy.Actor):
            def add(self, one: int, two: int) -> int:
                return one + two


        with skyproxy.Compute(provider=skyproxy.Local(), nodes=2) as pool:
            group: skyproxy.ActorGroup[Adder] = Adder.on_all(pool)()
            print(group.broadcast(Adder.add, 1, 2), group[1].add(3, 4))  # [3, 3] 7
        ```
    """

    def __init__(self, actors: list[S]) -> None:
        self._actors = actors

    def __len__(self) -> int:
        return len(self._actors)

    def __getitem__(self, rank: int) -> S:
        return self._actors[rank]

    def __iter__(self) -> Iterator[S]:
        return iter(self._actors)

    @overload
    def broadcast(
        self, method: Callable[Concatenate[S, P], Coroutine[object, object, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[T]: ...
    @overload
    def broadcast(self, method: Callable[Concatenate[S, P], T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    def broadcast(self, method: Callable[..., object], /, *args: object, **kwargs: object) -> list[Any]:
        """Calls a method, `Model.step`, of all of them at once and waits for the results, by rank.

        Raises:
            Exception: the first that one of them raised; the other calls are ended.

        Example:
            ```python
            group = Adder.on_all(pool)()
            print(group.broadcast(Adder.add, 1, 2))  # with two processes: [3, 3]
            ```
        """
        warn_in_a_loop("group.broadcast()")
        return self._submit(method, args, kwargs).wait()

    @overload
    def submit(
        self, method: Callable[Concatenate[S, P], Coroutine[object, object, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> PoolFuture[list[T]]: ...
    @overload
    def submit(
        self, method: Callable[Concatenate[S, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> PoolFuture[list[T]]: ...
    def submit(self, method: Callable[..., object], /, *args: object, **kwargs: object) -> PoolFuture[list[Any]]:
        """The future of `broadcast`.

        Example:
            ```python
            future = Adder.on_all(pool)().submit(Adder.add, 1, 2)
            print(future.result())  # with two processes: [3, 3]
            ```
        """
        return self._submit(method, args, kwargs)

    def _submit(self, method: object, args: tuple[object, ...], kwargs: dict[str, object]) -> PoolFuture[list[object]]:
        name = getattr(method, "__name__", "")
        calls: list[PendingCompute[object]] = []
        for one in self._actors:
            kind: type = one.__dict__["_sky_kind"]
            if not isinstance(one, _ActorHandle):
                raise ConfigurationError(
                    f"group.broadcast() and submit() are for the program that made the group. Here, call {name} of "
                    "each: [one.method() for one in group]."
                )
            if not name or getattr(kind, name, None) is not method:
                raise TypeError(f"{method!r:.80} is not a method of {kind.__name__}. Write {kind.__name__}.method.")
            bound = _method(one, name)
            calls.append(PendingCompute(bound, args, kwargs, CallOptions(), bound.__qualname__))
        futures = [cast(ActorMethod, call.function).__skyproxy_calls__.submit(call) for call in calls]
        return _map_future(gather_futures(futures, name), list)

    def __repr__(self) -> str:
        return f"<ActorGroup of {len(self)}>"


# --- making them ------------------------------------------------------------------------------------------------------


def _on(cls: Any, target: object, *, rank: On = None) -> Placement[Any, Any]:
    pool, home = _pool_of(target, cls)
    chosen = checked_rank(rank)
    chosen = 0 if chosen == "head" else chosen
    if home is not None and chosen not in (None, home):
        raise ConfigurationError(f"{cls.__name__} is to live on rank {chosen}, and this node is rank {home}.")
    fixed = home if chosen is None else chosen
    if fixed is not None and fixed not in pool.ranks:
        there = ", ".join(map(str, pool.ranks)) or "none"
        raise ConfigurationError(f"{cls.__name__} is to live on rank {fixed}, and the ranks of this pool are: {there}.")
    return Placement(functools.partial(_make, cls, pool, fixed), cls.__name__)


def _on_all(cls: Any, target: object) -> Placement[Any, ActorGroup[Any]]:
    pool, home = _pool_of(target, cls)
    if home is not None and pool.world_size > 1:
        raise ConfigurationError(f"{cls.__name__}.on_all(...) takes a pool, and this is one of its nodes.")

    def make(args: tuple[object, ...], kwargs: dict[str, object]) -> PoolFuture[ActorGroup[Any]]:
        parts = [_make(cls, pool, rank, args, kwargs) for rank in pool.ranks]
        return _map_future(gather_futures(parts, cls.__name__), lambda actors: ActorGroup(list(actors)))

    return Placement(make, cls.__name__)


def _pool_of(target: Any, cls: type) -> tuple[Compute, int | None]:
    """The pool, and the rank where a node of it was named."""
    if hasattr(target, "add_actor"):
        return target, None
    try:
        pool = POOL_OF_NODE.get(target)
    except TypeError:  # nothing in it could be a node
        pool = None
    if pool is None:
        raise TypeError(
            f"{cls.__name__}.on({target!r:.60}): an actor lives on a pool that runs, or on one of its nodes: "
            "with Compute(...) as pool: ..."
        )
    return pool, pool.rank_of(target)


def _make(
    cls: type, pool: Compute, rank: int | None, args: tuple[object, ...], kwargs: dict[str, object]
) -> PoolFuture[_ActorHandle]:
    try:
        inspect.signature(cls).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{cls.__name__}(): {error}") from None
    except ValueError:  # some classes do not say
        pass
    options: ActorOptions = getattr(cls, _OPTIONS, ActorOptions())
    calls = pool.add_actor(cls, options, rank, args, kwargs)
    handle = _ActorHandle(cls, calls)
    ready = ActorMethod(handle, calls, "", _nothing)
    there = calls.submit(PendingCompute(ready, (), {}, CallOptions(remote=options.remote), cls.__name__))
    future = _map_future(there, lambda _: handle)
    future.on_cancel(calls.close)
    return future


def _nothing() -> None:
    """Do nothing: the call that shows whether an actor is there."""


def _map_future(source: PoolFuture[T], change: Callable[[T], S]) -> PoolFuture[S]:
    """Return a future for the mapped result of another."""
    future: PoolFuture[S] = PoolFuture(source.name)

    def ended(done: Future[T]) -> None:
        if done.cancelled():
            future.cancel()
        elif (error := done.exception()) is not None:
            future.fail(error)
        else:
            future.settle(change(done.result()))

    future.on_cancel(source.cancel)
    future.before_wait = lambda: source.before_wait() if source.before_wait is not None and not source.done() else None
    source.add_done_callback(ended)
    return future
