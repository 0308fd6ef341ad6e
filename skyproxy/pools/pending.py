"""Calls that are not made yet, and the operators that say where."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, TypeVarTuple, overload

from skyproxy.errors import ConfigurationError
from skyproxy.pools.call_options import (
    CallOptions,
    On,
    Retry,
    checked_rank,
    checked_restarts,
    checked_timeout,
    is_stream,
)
from skyproxy.pools.futures import PoolFuture, gather_futures
from skyproxy.pools.node_target import POOL_OF_NODE, NodeTarget
from skyproxy.pools.traps import NotAValue

if TYPE_CHECKING:
    from skyproxy.node import Node

T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")
W = TypeVar("W")
T_co = TypeVar("T_co", covariant=True)
Ts = TypeVarTuple("Ts")


class Target(Protocol):
    """A place where calls can be made: a pool that runs, or a node."""

    def submit_call(self, call: PendingCompute[T]) -> PoolFuture[T]:
        """Makes a call on one process."""

    def broadcast_call(self, call: PendingCompute[T]) -> PoolFuture[list[T]]:
        """Makes it on every process."""

    def stream_call(self, call: PendingCompute[object]) -> Iterator[object]:
        """Makes it on one process, and gives what its generator yields."""


class PendingCompute(NotAValue, Generic[T_co]):
    """A call that is made when an operator says where.

    `call >> pool` waits for the result from one process, `call @ pool` for those of all, as a list in the order of
    ranks; `call > pool` gives a future at once; `a & b` makes one thing of several calls, which run in parallel. Each
    operator has a method of a longer name: `run`, `broadcast`, `submit`, `gather`.

    Example:
        ```python
        call = square(3)  # nothing has run
        print(call >> pool)  # one process
        print(call @ pool)  # all of them
        future = call > pool  # not waited for
        ```
    """

    def __init__(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        options: CallOptions,
        name: str,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = dict(kwargs)
        self.options = options
        self._name = name

    @property
    def name(self) -> str:
        """The function's name."""
        return self._name

    def __repr__(self) -> str:
        return f"<{self.name}(...), not run yet: `>> pool` runs it>"

    def _with_options(self, **changes: Any) -> PendingCompute[T_co]:
        return PendingCompute(self.function, self.args, self.kwargs, replace(self.options, **changes), self.name)

    def with_timeout(self, seconds: float | None) -> PendingCompute[T_co]:
        """The call, ended with a TimeoutError if it runs longer than so many seconds; None for no limit.

        Example:
            ```python
            print(square(3).with_timeout(60) >> pool)
            ```
        """
        return self._with_options(timeout_seconds=checked_timeout(seconds))

    def with_retry(self, retry: Retry | int) -> PendingCompute[T_co]:
        """The call, made once more where it fails as `retry` says; a number stands for lost workers only.

        Example:
            ```python
            print(square(3).with_retry(2) >> pool)
            ```
        """
        return self._with_options(retry=Retry.parse(retry) or Retry(0))

    def with_restarts(self, max_restarts: int) -> PendingCompute[T_co]:
        """The call for `@`, begun again on all ranks where one of them fails, so often at most.

        A rank whose process died gets a new one first. What `skyproxy.checkpoint_dir()` names is the same folder each
        time; `skyproxy.restart_count()` says how often it was begun again.

        Example:
            ```python
            print(square(3).with_restarts(2) @ pool)
            ```
        """
        return self._with_options(max_restarts=checked_restarts(max_restarts))

    def on(self, rank: On) -> PendingCompute[T_co]:
        """The call, on one rank: its number, or "head".

        Example:
            ```python
            print(square(3).on("head") >> pool)
            ```
        """
        return self._with_options(on=checked_rank(rank))

    def remote(self) -> PendingCompute[T_co]:
        """The call, with the tensors of its result left on the worker, as remote tensors.

        Example:
            ```python
            y = square(torch.ones(3)).remote() >> pool
            print(y.device.type)  # sky
            ```
        """
        return self._with_options(remote=True)

    def run(self, target: Target | Node) -> T_co:
        """`self >> target`: waits for the result. A generator function gives an iterator.

        Example:
            ```python
            print(square(3).run(pool))
            ```
        """
        warn_in_a_loop(f"{self.name}() >> pool")
        if is_stream(self.function):
            return target_of(target).stream_call(self)  # type: ignore[return-value]  # T is an iterator then
        return target_of(target).submit_call(self).wait()

    def submit(self, target: Target | Node) -> PoolFuture[T_co]:
        """`self > target`: a future of the result.

        Example:
            ```python
            future = square(3).submit(pool)
            print(future.result())
            ```
        """
        return target_of(target).submit_call(self)

    def broadcast(self, target: Target | Node) -> list[T_co]:
        """`self @ target`: waits for the results of all processes, in the order of ranks.

        Raises:
            RankErrors: one of them failed, and the others were ended.

        Example:
            ```python
            print(square(3).broadcast(pool))  # with two processes: [9, 9]
            ```
        """
        warn_in_a_loop(f"{self.name}() @ pool")
        return self.submit_to_all(target).wait()

    def submit_to_all(self, target: Target | Node) -> PoolFuture[list[T_co]]:
        """The future of `broadcast`.

        Example:
            ```python
            future = square(3).submit_to_all(pool)
            print(future.result())  # with two processes: [9, 9]
            ```
        """
        if self.options.on is not None:
            raise ConfigurationError(f"{self.name} was pinned with .on({self.options.on!r}); `@` runs on every rank.")
        return target_of(target).broadcast_call(self)

    @overload
    def stream(self: PendingCompute[Iterator[U]], target: Target | Node) -> Iterator[U]: ...
    @overload
    def stream(self: PendingCompute[AsyncIterator[U]], target: Target | Node) -> Iterator[U]: ...
    def stream(self, target: Target | Node) -> Iterator[Any]:
        """Yield what a generator function yields on one process, as it comes.

        Example:
            ```python
            @skyproxy.function
            def count(n: int) -> Iterator[int]:
                yield from range(n)


            for number in count(3).stream(pool):
                print(number)
            ```
        """
        return target_of(target).stream_call(self)

    def __rshift__(self, target: Target | Node) -> T_co:
        return self.run(target)

    def __gt__(self, target: Target | Node) -> PoolFuture[T_co]:
        return self.submit(target)

    def __matmul__(self, target: Target | Node) -> list[T_co]:
        return self.broadcast(target)

    @overload
    def __and__(self, other: PendingCompute[U]) -> PendingGroup[T_co, U]: ...
    @overload
    def __and__(self, other: PendingGroup[*Ts]) -> PendingGroup[T_co, *Ts]: ...
    def __and__(self, other: object) -> PendingGroup[*tuple[object, ...]]:
        return _join([self], other)


class PendingGroup(NotAValue, Generic[*Ts]):
    """Several calls that run in parallel; their results come as a tuple in the order of the calls."""

    def __init__(self, calls: Sequence[PendingCompute[object]]) -> None:
        self.calls = list(calls)

    @property
    def name(self) -> str:
        """For people."""
        return " & ".join(call.name + "()" for call in self.calls[:4]) + (" & ..." if len(self.calls) > 4 else "")

    def __repr__(self) -> str:
        return f"<{self.name}, not run yet: `>> pool` runs them>"

    def run(self, target: Target | Node) -> tuple[*Ts]:
        """`self >> target`: waits for all results. The first failure is raised, and ends the other calls."""
        warn_in_a_loop("(a() & b()) >> pool")
        return self.submit(target).wait()

    def submit(self, target: Target | Node) -> PoolFuture[tuple[*Ts]]:
        """`self > target`: a future of all results."""
        place = target_of(target)
        return gather_futures([place.submit_call(call) for call in self.calls], self.name)

    def with_timeout(self, seconds: float | None) -> PendingGroup[*Ts]:
        """The same limit for each of the calls."""
        return PendingGroup([call.with_timeout(seconds) for call in self.calls])

    def remote(self) -> PendingGroup[*Ts]:
        """All calls with the tensors of their results left on the workers."""
        return PendingGroup([call.remote() for call in self.calls])

    def __len__(self) -> int:
        return len(self.calls)

    def __rshift__(self, target: Target | Node) -> tuple[*Ts]:
        return self.run(target)

    def __gt__(self, target: Target | Node) -> PoolFuture[tuple[*Ts]]:
        return self.submit(target)

    # As in `NotAValue`: a checker reports the line.
    if not TYPE_CHECKING:

        def __matmul__(self, target: object) -> NoReturn:
            raise TypeError(
                "`@` sends one call to every process, and this is several calls. Broadcast them one after the other, "
                "or use (a() & b()) >> pool."
            )

    @overload
    def __and__(self, other: PendingCompute[U]) -> PendingGroup[*Ts, U]: ...
    @overload
    def __and__(self, other: PendingGroup[*tuple[object, ...]]) -> PendingGroup[*tuple[object, ...]]: ...
    def __and__(self, other: object) -> PendingGroup[*tuple[object, ...]]:
        return self.and_(other)

    def and_(self, other: object) -> PendingGroup[*tuple[object, ...]]:
        """These calls and another one, or others."""
        return _join(self.calls, other)


def _join(calls: Sequence[PendingCompute[object]], other: object) -> PendingGroup[*tuple[object, ...]]:
    if isinstance(other, PendingCompute):
        return PendingGroup([*calls, other])
    if isinstance(other, PendingGroup):
        return PendingGroup([*calls, *other.calls])
    first = calls[-1].name
    raise TypeError(
        f"`{first}() & ...`: the right-hand side is {other!r:.80}, not a call. `>>`, `@` and `>` bind "
        f"tighter than `&`, or chain unexpectedly: Python reads `{first}() & b() >> pool` as `{first}() & (b() >> "
        f"pool)`, so b has run and {first} has not. Write ({first}() & b()) >> pool."
    )


@overload
def gather(one: PendingCompute[T], /) -> PendingGroup[T]: ...
@overload
def gather(one: PendingCompute[T], two: PendingCompute[U], /) -> PendingGroup[T, U]: ...
@overload
def gather(one: PendingCompute[T], two: PendingCompute[U], three: PendingCompute[V], /) -> PendingGroup[T, U, V]: ...
@overload
def gather(
    one: PendingCompute[T], two: PendingCompute[U], three: PendingCompute[V], four: PendingCompute[W], /
) -> PendingGroup[T, U, V, W]: ...
@overload
def gather(*calls: PendingCompute[T]) -> PendingGroup[*tuple[T, ...]]: ...
@overload
def gather(*calls: PendingCompute[object] | PendingGroup[*tuple[object, ...]]) -> PendingGroup[*tuple[object, ...]]: ...
def gather(*calls: object) -> PendingGroup[*tuple[object, ...]]:
    """Several calls as one thing; `gather(a(), b())` is `a() & b()`.

    Raises:
        TypeError: one of them is something else.

    Example:
        ```python
        both = skyproxy.gather(load(), tokenize())  # load() & tokenize()
        model, tokens = both >> pool
        ```
    """
    parts: list[PendingCompute[object]] = []
    for position, call in enumerate(calls):
        if not isinstance(call, PendingCompute | PendingGroup):
            raise TypeError(
                f"gather(): argument {position + 1} is {call!r:.80}, not a call of a function "
                "decorated with @compute. Pass f(x), not f and not its result."
            )
        parts += call.calls if isinstance(call, PendingGroup) else [call]
    return PendingGroup(parts)


def target_of(target: Any) -> Target:
    """The pool that a user named, or the node.

    Raises:
        TypeError: it is neither; says which mistake that mostly is.
    """
    if isinstance(target, type):
        raise TypeError(
            f"{target.__name__} is a class. Start one and name it: with {target.__name__}(...) as pool: ..."
        )
    if hasattr(target, "submit_call"):
        return target  # type: ignore[no-any-return]
    if hasattr(target, "submit") and hasattr(target, "devices"):
        pool = POOL_OF_NODE.get(target)
        return NodeTarget(target) if pool is None else pool.on_node(target)
    if isinstance(target, PendingCompute | PendingGroup):
        raise TypeError(
            "both sides are calls that have not run. A result goes into a call as an argument: g(f() >> pool) >> pool."
        )
    raise TypeError(
        f"a call cannot run on {target!r:.80}. The right-hand side must be a pool or a node: "
        "with Compute(...) as pool: f(x) >> pool"
    )


_warned = False


def warn_in_a_loop(what: str) -> None:
    """Says once that a wait blocks the event loop. In a notebook, where a loop always runs, that is what a cell is
    for.
    """
    global _warned
    if _warned or asyncio._get_running_loop() is None:  # which raises nothing, and takes a tenth of the time
        return
    import logging
    import sys

    if "ipykernel" in sys.modules:
        return
    _warned = True
    logging.getLogger("skyproxy").warning(
        "skyproxy: `%s` blocks the event loop while it waits. In asynchronous code write: await (f() > pool)", what
    )
