"""`@compute`: functions that run on a pool, and functions that bring their own worker."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from skyproxy.errors import ConfigurationError
from skyproxy.pools.call_options import On, Retry
from skyproxy.pools.pool import Compute
from skyproxy.pools.remote_function import Decorator, RemoteFunction, function

if TYPE_CHECKING:
    from typing import Unpack

    from skyproxy.kubernetes.resources import SpecFields
    from skyproxy.pools.growth import Nodes
    from skyproxy.providers.accelerators import Accelerator
    from skyproxy.providers.base import Progress, Provider, Volume
    from skyproxy.providers.image import Image
    from skyproxy.runtime.plugin import Plugin

    class WorkerArguments(SpecFields, total=False):
        """Arguments of `Compute`; tests/typing holds both together."""

        name: str | None
        provider: Provider | None
        accelerator: Accelerator | str | None
        nodes: int | Nodes | None
        procs_per_node: int | str
        vcpus: float | None
        memory_gb: float | None
        resources: Mapping[str, object] | None
        image: Image | str | None
        plugins: Sequence[Plugin]
        volumes: Sequence[Volume | Mapping[str, object]]
        env: Mapping[str, object] | None
        concurrency: int
        retry: Retry | int | None
        timeout: float | str
        idle_timeout: float | str | None
        max_lifetime: float | str | None
        keep: bool
        on_event: Callable[[Progress], object] | None
        progress: bool | None


P = ParamSpec("P")
T = TypeVar("T")


def provisioned(target: Callable[..., object], options: Mapping[str, Any]) -> Callable[..., object]:
    """`target` without its parameter `node`: each call provisions a worker as `options` say, and takes it away.

    Whoever passes `node=` provisions nothing.

    Raises:
        ConfigurationError: the function has no parameter to take the node.
    """
    if not inspect.isfunction(target):
        raise ConfigurationError(f"@compute(name=...) decorates functions that take a node, not {target!r}.")
    signature = inspect.signature(target)
    if "node" not in signature.parameters:
        raise ConfigurationError(
            f"@compute({', '.join(options)}) on {target.__name__}: it has no parameter `node` to take the worker. "
            f"Write async def {target.__name__}(node, ...); or use a bare @compute and say where: "
            f"{target.__name__}(...) >> pool."
        )
    others = [parameter for name, parameter in signature.parameters.items() if name != "node"]

    def bound(node: object, args: tuple[object, ...], kwargs: dict[str, object]) -> inspect.BoundArguments:
        rest = signature.replace(parameters=others).bind(*args, **kwargs)
        whole = inspect.BoundArguments(signature, type(rest.arguments)())
        for name in signature.parameters:
            if name == "node":
                whole.arguments[name] = node
            elif name in rest.arguments:
                whole.arguments[name] = rest.arguments[name]
        return whole

    wrapper: Any
    if inspect.iscoroutinefunction(target):

        @functools.wraps(target)
        async def wrapper(*args: object, **kwargs: object) -> object:
            if "node" in kwargs:
                return await target(*args, **kwargs)
            bound(None, args, kwargs)  # a wrong argument should not cost a worker
            async with Compute(**options) as node:
                call = bound(node, args, kwargs)
                return await target(*call.args, **call.kwargs)

    else:

        @functools.wraps(target)
        def wrapper(*args: object, **kwargs: object) -> object:
            if "node" in kwargs:
                return target(*args, **kwargs)
            bound(None, args, kwargs)
            with Compute(**options) as pool:
                call = bound(pool.node_or_pool, args, kwargs)
                return target(*call.args, **call.kwargs)

    wrapper.__signature__ = signature.replace(parameters=others)
    return wrapper  # type: ignore[no-any-return]


class _WorkerDecorator(Protocol):
    """The decorator that `compute(name=...)` returns: the function without the node that each call brings along."""

    @overload
    def __call__(
        self, target: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], /
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(self, target: Callable[Concatenate[Any, P], T], /) -> Callable[P, T]: ...


_CALL_OPTIONS = frozenset(inspect.signature(function).parameters) - {"target"}
_WORKER_OPTIONS = frozenset(inspect.signature(Compute.__init__).parameters) - {"self", "options", "timeout", "retry"}


@overload
def compute(target: Callable[P, Coroutine[Any, Any, T]], /) -> RemoteFunction[P, T, Coroutine[Any, Any, T]]: ...
@overload
def compute(target: Callable[P, AsyncIterator[T]], /) -> RemoteFunction[P, Iterator[T], AsyncIterator[T]]: ...
@overload
def compute(target: Callable[P, T], /) -> RemoteFunction[P, T, T]: ...
@overload
def compute(
    *,
    timeout: float | None = None,
    on: On = None,
    remote: bool = False,
    retry: Retry | int | None = None,
    isolate: bool | None = None,
    max_restarts: int = 0,
) -> Decorator: ...
@overload
def compute(**options: Unpack[WorkerArguments]) -> _WorkerDecorator: ...
def compute(target: Callable[..., object] | None = None, /, **options: Any) -> Any:
    """A decorator for functions that run elsewhere. What it makes depends on what it is told.

    - Bare, or with the options of `function`: a function whose calls run on a pool, with `>>`, `@`, `&` and `>`.
    - With options of `Compute` (name, image, resources, nodes, ...), on a function whose first parameter is `node`:
    each
      call provisions a worker, passes its node, and takes the worker away at the end. `async def` gives a coroutine.

    Raises:
        ConfigurationError: the options are of neither kind, or the function takes no node.

    Example:
        ```python
        @skyproxy.compute(name="trainer", provider=skyproxy.Local())
        async def train(node: skyproxy.Node) -> float:
            x = torch.ones(4, device=node.device("cpu"))
            return x.sum().item()


        print(asyncio.run(train()))
        ```
    """
    if options.keys() <= _CALL_OPTIONS:
        decorate: Any = function(**options)
        return decorate if target is None else decorate(target)
    if not options.keys() & _WORKER_OPTIONS:
        unknown = ", ".join(sorted(options.keys() - _CALL_OPTIONS))
        raise ConfigurationError(
            f"@compute does not know {unknown}. For a call: {', '.join(sorted(_CALL_OPTIONS))}. For a worker: "
            f"{', '.join(sorted(_WORKER_OPTIONS))}."
        )
    return functools.partial(provisioned, options=options) if target is None else provisioned(target, options)
