"""Functions that make calls for a pool, and the decorator for them."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeVar, overload

from skyproxy.errors import ConfigurationError
from skyproxy.pools.call_options import (
    CallOptions,
    On,
    Retry,
    checked_flag,
    checked_rank,
    checked_restarts,
    checked_timeout,
)
from skyproxy.pools.pending import PendingCompute

if TYPE_CHECKING:
    import typing_extensions  # of the checker

    L_co = typing_extensions.TypeVar("L_co", covariant=True, default=Any)
else:
    L_co = TypeVar("L_co", covariant=True)

P = ParamSpec("P")
P2 = ParamSpec("P2")
S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_DEFAULTS = CallOptions()


class RemoteFunction(Generic[P, T_co, L_co]):
    """A function whose calls wait to be told where to run.

    `f(x)` makes a `PendingCompute`; `f.local(x)` runs here and now. Arguments are checked against the signature when
    the call is written, not when it runs. Type checkers know its parameters, the result of a call on a pool, and what
    `f.local(x)` returns, which for `async def` is a coroutine.
    """

    def __init__(self, function: Callable[P, L_co], options: CallOptions = _DEFAULTS) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options
        self._signature = _signature(function)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> PendingCompute[T_co]:
        if self._signature is not None:
            try:
                self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self._name}(): {error}") from None
        return PendingCompute(self._function, args, kwargs, self._options, self._name)

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__name__", type(self._function).__name__))

    @property
    def function(self) -> Callable[P, L_co]:
        """The function that was decorated."""
        return self._function

    def local(self, /, *args: P.args, **kwargs: P.kwargs) -> L_co:
        """Calls the function here, as if it had never been decorated."""
        return self._function(*args, **kwargs)

    def __skyproxy_rewrap__(
        self, wrap: Callable[[Callable[P, Any]], Callable[P, Any]]
    ) -> RemoteFunction[P, T_co, L_co]:
        """The same with another function inside: decorators above `@compute` work as they do below it."""
        return RemoteFunction(wrap(self._function), self._options)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> RemoteFunction[P, T_co, L_co]: ...
    @overload
    def __get__(
        self: RemoteFunction[Concatenate[S, P2], T_co, L_co], instance: S, owner: type | None = None
    ) -> RemoteFunction[P2, T_co, L_co]: ...
    def __get__(self, instance: object, owner: type | None = None) -> RemoteFunction[..., T_co, L_co]:
        return self if instance is None else RemoteFunction(types.MethodType(self._function, instance), self._options)

    def __reduce__(self) -> tuple[object, ...]:
        return RemoteFunction, (self._function, self._options)

    def __repr__(self) -> str:
        return f"<compute function {self._name}>"

    def _call_first(self, symbol: str) -> NoReturn:
        raise TypeError(
            f"`{self._name} {symbol} ...`: a function was named, not called. Write {self._name}(...) {symbol} pool."
        )

    # Not for type checkers: without these, they report such a line before it runs.
    if not TYPE_CHECKING:

        def __class_getitem__(cls, parameters: object) -> types.GenericAlias:
            return types.GenericAlias(cls, parameters)  # with two or three: Python 3.11 knows no defaults of them

        def __rshift__(self, other: object) -> NoReturn:
            self._call_first(">>")

        def __matmul__(self, other: object) -> NoReturn:
            self._call_first("@")

        def __gt__(self, other: object) -> NoReturn:
            self._call_first(">")

        def __and__(self, other: object) -> NoReturn:
            self._call_first("&")


def _signature(function: Callable[..., object]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some builtins do not say
        return None


class Decorator(Protocol):
    """The decorator that `function(timeout=...)` returns."""

    @overload
    def __call__(
        self, target: Callable[P, Coroutine[Any, Any, T]], /
    ) -> RemoteFunction[P, T, Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(
        self, target: Callable[P, AsyncIterator[T]], /
    ) -> RemoteFunction[P, Iterator[T], AsyncIterator[T]]: ...
    @overload
    def __call__(self, target: Callable[P, T], /) -> RemoteFunction[P, T, T]: ...


@overload
def function(target: Callable[P, Coroutine[Any, Any, T]], /) -> RemoteFunction[P, T, Coroutine[Any, Any, T]]: ...
@overload
def function(target: Callable[P, AsyncIterator[T]], /) -> RemoteFunction[P, Iterator[T], AsyncIterator[T]]: ...
@overload
def function(target: Callable[P, T], /) -> RemoteFunction[P, T, T]: ...
@overload
def function(
    *,
    timeout: float | None = None,
    on: On = None,
    remote: bool = False,
    retry: Retry | int | None = None,
    isolate: bool | None = None,
    max_restarts: int = 0,
) -> Decorator: ...
def function(
    target: Callable[..., object] | None = None,
    /,
    *,
    timeout: float | None = None,
    on: On = None,
    remote: bool = False,
    retry: Retry | int | None = None,
    isolate: bool | None = None,
    max_restarts: int = 0,
) -> object:
    """A decorator, bare or with options: calls of the function run on a pool.

    Args:
        target: the function.
        timeout: how many seconds each call may run; forever by default.
        on: the rank that runs it: a number, or "head".
        remote: whether tensors in results stay on the worker.
        retry: when a call is made once more: a number of times for lost workers, or a `Retry`.
        isolate: whether each call runs in a process of its own on its worker, see `Node.submit`.
        max_restarts: how often a call on all ranks begins again, on all of them, where one has failed.

    Raises:
        ConfigurationError: an option cannot work.

    Example:
        ```python
        @skyproxy.function(timeout=60)
        def square(x: int) -> int:
            return x * x


        with skyproxy.Compute(provider=skyproxy.Local()) as pool:
            print(square(3) >> pool)
        ```
    """
    options = CallOptions(
        checked_timeout(timeout),
        checked_rank(on),
        bool(checked_flag("remote", remote)),
        Retry.parse(retry),
        checked_flag("isolate", isolate),
        checked_restarts(max_restarts),
    )

    def decorate(target: Callable[..., object]) -> RemoteFunction[..., object]:
        if isinstance(target, RemoteFunction):
            raise ConfigurationError(f"{target!r} is already decorated. One @compute or @function is enough.")
        if not callable(target):
            raise ConfigurationError(
                f"@compute decorates functions, not {target!r}. Options have names: @compute(timeout=60)."
            )
        return RemoteFunction(target, options)

    return decorate if target is None else decorate(target)
